"""Play: rollouts that agent programs play over HTTP, queued as tasks, collected as token rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.episode import Status
from ragen_jax.agent.rollout import Rollout
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models import lora
from ragen_jax.runs.interrupt import Interrupt
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.serving.agent_server import ADMIN_KEY, LOCAL_WORKER, AgentServer
from ragen_jax.serving.client import Task
from ragen_jax.serving.engine.keys import split_key
from ragen_jax.serving.errors import Conflict, NotFound
from ragen_jax.serving.play.episodes import EpisodeSettings, FinishedAttempt, TaskAttempts, build_rollout
from ragen_jax.serving.play.pool import LocalQueue, RunnerPool, RunnerStall
from ragen_jax.serving.play.runners import FunctionRunner, ProgramRunner, Runner, load_function
from ragen_jax.serving.rollouts.lifecycle import Lifecycle
from ragen_jax.serving.rollouts.records import OVER, AttemptLimits, NewRollout, RolloutRecord, metadata_with_prompt
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.serving.types import AttemptState, RolloutState
from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)

# Environment variables that agents' commands do not get.
_SECRETS = (
  ADMIN_KEY, 'OPENAI_API_KEY', 'HF_TOKEN', 'HUGGING_FACE_HUB_TOKEN', 'AWS_SECRET_ACCESS_KEY', 'AWS_SESSION_TOKEN',
)  # fmt: skip
_GRACE_S = 10.0  # how long a stopped agent may take to end
_BEAT_S = 30.0  # between two signs of life of an attempt that needs none; they tell whether the server has ended it
LOOK_S = 1.0  # between two looks for attempts that are late
MOST_PRUNED = 10_000  # rollouts that are deleted at a time
REPORT_S = 60.0  # between two lines about a rollout that waits for workers


@dataclasses.dataclass(frozen=True)
class AgentSettings:
  """How tasks are played and collected.

  Attributes:
    mode: 'train' or 'val'.
    max_turns: most calls of an attempt.
    keep_s: how long the store keeps rollouts that were collected.
    ahead: whether training attempts go on between rollouts. Their replies in flight wait then, and do not end, when a
      rollout is complete.
  """

  mode: str
  limits: AttemptLimits
  episodes: EpisodeSettings
  max_turns: int
  keep_s: float
  ahead: bool
  prompt: str


class AgentPlayer:
  """Agent programs play the tasks of the specs, `AgentTasks` each; see `agent.player.Player` for the methods.

  `server.lifecycle.store` holds the rollouts; `metrics` are of the last one, see `episodes.build_rollout`.
  """

  reply_prefix = ''

  def __init__(
    self, settings: AgentSettings, server: AgentServer, specs: list[EnvSpec], group_size: int,
    tokenizer: ChatTokenizer, interrupt: Interrupt | None = None,
  ):  # fmt: skip
    """Plays nothing. `interrupt` ends a play while it waits for attempts."""
    self._interrupt = interrupt or Interrupt()
    self.specs, self.group_size, self.max_turns = specs, group_size, settings.max_turns
    self._settings, self.server, self._tokenizer = settings, server, tokenizer
    self.metrics: dict[str, float] = {}
    self._has_learnt = False  # whether an earlier rollout of this process had a group that can be learnt from

  def check(self, first_seed: int) -> None:
    """See `Player`: the tasks were read, and the runners imported, when the server was opened."""
    del first_seed

  def levels(self, first_seed: int) -> frozenset[bytes]:
    """See `Player`: tasks are not compared."""
    del first_seed
    return frozenset()

  def optimal(self, first_seed: int) -> dict[str, float]:
    """See `Player`: unknown."""
    del first_seed
    return {spec.tag: float('nan') for spec in self.specs}

  def play(
    self,
    params: Any,
    key: jax.Array,
    sampling: Sampling,
    first_seed: int,
    *,
    policy_version: int = 0,
    pictured: Collection[int] = (),
    level_seeds: np.ndarray | None = None,
  ) -> Rollout:
    """See `Player`. Rollouts that the store holds already, from before a restart, are not played again.

    Raises:
      UserError: see `_collect`.
      Stopped: a signal was received before all attempts were over. The store keeps those that are over.
    """
    del pictured, level_seeds
    server, lifecycle = self.server, self.server.lifecycle
    server.service.use_sampling(self._settings.mode, sampling)
    if self._settings.ahead:
      server.use_weights(params, policy_version)
    else:
      server.engine.set_weights(params, version=policy_version, keep_cache=False)
    drain = False
    server.resume()
    try:
      tasks = self._queue(key, first_seed, policy_version, _digest(params, sampling))
      records = self._wait([r for _, _, records in tasks for r in records])
      drain = not self._settings.ahead
    finally:
      server.pause(drain=drain)
    groups = [(spec.tag, seed, [records[r.rollout_id] for r in own]) for spec, seed, own in tasks]
    try:
      rollout = self._collect(groups, sampling)
    except UserError:
      # The same command, perhaps with a better program, plays them again.
      lifecycle.store.discard(list(records), time.time())
      raise
    now = time.time()
    lifecycle.store.close_rollouts([r for r, x in records.items() if x.closed is None], now)
    lifecycle.store.prune(0, now - self._settings.keep_s, MOST_PRUNED)
    return rollout

  def _collect(self, groups: Sequence[tuple[str, int, Sequence[RolloutRecord]]], sampling: Sampling) -> Rollout:
    """The rollout of groups, (tag, number of the task, its rollouts) each; sets the metrics.

    If no group can be learnt from, all episodes of the rollout have `Status.ENV_ERROR`; UserError if no group of an
    earlier rollout could, either: the program itself is wrong.
    """
    episodes = dataclasses.replace(
      self._settings.episodes, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k
    )
    tasks = [TaskAttempts(tag, seed, tuple(self._finished(r) for r in records)) for tag, seed, records in groups]
    rollout, self.metrics = build_rollout(tasks, episodes, self._tokenizer.decode)
    if rollout is not None and any(e.status != Status.ENV_ERROR for e in rollout.episodes):
      self._has_learnt = True
      return rollout
    reason = f'{self._settings.mode}: {_why_nothing(tasks)}'
    if not self._has_learnt:
      raise UserError(reason)
    _log.warning('%s; the run goes on', reason)
    return rollout or build_rollout([_failed(task) for task in tasks], episodes, self._tokenizer.decode)[0]

  def _queue(
    self, key: jax.Array, first_seed: int, version: int, digest: str
  ) -> list[tuple[EnvSpec, int, list[RolloutRecord]]]:
    """Creates the rollouts: (spec, number of the task, its rollouts) for each group."""
    prompt = self._settings.prompt
    prefix = f'{self._settings.mode}-{version}-{digest}{_mark(prompt)}'
    rows = sum(spec.num_groups for spec in self.specs) * self.group_size
    words, tasks, group = iter(split_key(key, rows)), [], 0
    for spec in self.specs:
      for _ in range(spec.num_groups):
        seed, own = first_seed + group, []
        for member in range(self.group_size):
          new = NewRollout(
            rollout_id=f'{prefix}-{seed}-{member}', input=spec.env.task(seed, member), group=f'{prefix}-{seed}',
            mode=self._settings.mode, limits=self._settings.limits,
            metadata=metadata_with_prompt({'tag': spec.tag, 'iteration': version}, prompt), key=next(words),
          )  # fmt: skip
          own.append(created(self.server.lifecycle, new))
        tasks.append((spec, seed, own))
        group += 1
    return tasks

  def _wait(self, rollouts: Sequence[RolloutRecord]) -> dict[str, RolloutRecord]:
    """Waits until all rollouts are over, and ends attempts that are late. Returns them by id.

    Raises:
      Stopped: a signal was received.
      UserError: the runner plays no task any more, see `RunnerStall`.
    """
    lifecycle = self.server.lifecycle
    store, changes = lifecycle.store, lifecycle.changes
    over: dict[str, RolloutRecord] = {}
    told, stall = time.monotonic(), self._stall()
    while True:
      seen = changes.count
      for r in rollouts:
        if r.rollout_id not in over:
          record = store.ask(Tables.rollout, r.rollout_id)
          if record.state in OVER:
            over[r.rollout_id] = record
      if len(over) == len(rollouts):
        return over
      self._interrupt.check()
      self.server.sweep()
      stall.check()
      if time.monotonic() - told > REPORT_S:
        told = time.monotonic()
        self._report(f'{len(over)} of {len(rollouts)}')
      changes.wait(seen, LOOK_S)

  def _stall(self) -> RunnerStall:
    spec, store = self.specs[0], self.server.lifecycle.store
    runner = f'envs.{spec.tag}.runner={spec.env.runner!r}'
    return RunnerStall(
      self.server.progress, functools.partial(store.ask, Tables.running), runner, self._settings.limits.timeout_s
    )

  def _report(self, over: str) -> None:
    running = len(self.server.lifecycle.store.ask(Tables.running))
    _log.info('%s tasks are over, %d are being played', over, running)
    if not running and not any(spec.env.runner for spec in self.specs):
      _log.info('workers claim tasks at %s with the key of %s', self.server.url, ADMIN_KEY)

  def _finished(self, record: RolloutRecord) -> FinishedAttempt:
    """The attempt that counts: the last one."""
    state = {
      RolloutState.SUCCEEDED: AttemptState.SUCCEEDED, RolloutState.CANCELLED: AttemptState.CANCELLED,
    }.get(record.state, AttemptState.FAILED)  # fmt: skip
    if not record.attempt_id:
      return FinishedAttempt(record.rollout_id, state, record.error, (), ())
    with self.server.lifecycle.store.read() as tables:
      calls, rewards = tables.calls(record.attempt_id), tables.rewards(record.attempt_id)
      pixels = tables.images(record.attempt_id)
    return FinishedAttempt(record.attempt_id, state, record.error, tuple(calls), tuple(rewards), pixels)


def _failed(task: TaskAttempts) -> TaskAttempts:
  """A task all of whose attempts count as failed, so that its group is not dropped."""
  fault = 'the group cannot be learnt from'
  attempts = [
    dataclasses.replace(a, state=AttemptState.FAILED, error=a.error or fault, calls=(), rewards=())
    for a in task.attempts
  ]
  return dataclasses.replace(task, attempts=tuple(attempts))


def _why_nothing(groups: Sequence[TaskAttempts]) -> str:
  """The reason why no group of attempts can be learnt from, in one line."""
  attempts = [a for group in groups for a in group.attempts]
  failed = [a for a in attempts if a.state is not AttemptState.SUCCEEDED]
  unrewarded = [a for a in attempts if a.state is AttemptState.SUCCEEDED and all(r.metric for r in a.rewards)]
  text = f'none of {len(groups)} tasks can be learnt from: of {len(attempts)} attempts {len(failed)} failed'
  text += f' and {len(unrewarded)} got no reward'
  if failed:
    return f'{text}; the first failed with: {failed[0].error}'
  if unrewarded:
    return f'{text}; agents must post a reward'
  agents = sorted({call.agent for a in attempts for call in a.calls})
  return f'{text}, but no call is of an agent that serve.trained names; calls are of {", ".join(map(repr, agents))}'


def _digest(params: Any, sampling: Sampling) -> str:
  """A few letters that tell weights apart, so that a rollout of other weights is never taken for one of these."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  # Adapters are matrices, and with LoRA nothing else of the policy changes.
  small = [x for path, x in leaves if x.ndim < 2 or lora.is_adapter(path)]
  digest = hashlib.sha256(repr(sampling).encode())
  for x in jax.device_get(small):
    digest.update(np.ascontiguousarray(x).tobytes())
  return digest.hexdigest()[:10]


def _mark(prompt: str) -> str:
  """A few letters that tell prompts apart, so that a rollout of another prompt is never taken; '' for none."""
  return f'-{hashlib.sha256(prompt.encode()).hexdigest()[:10]}' if prompt else ''


def created(lifecycle: Lifecycle, new: NewRollout) -> RolloutRecord:
  """A rollout; if one of this id has other values, such as an input that was mended since, one of another id."""
  try:
    return lifecycle.create(new)
  except Conflict as conflict:
    try:
      lifecycle.replace([new.rollout_id], ())
      # Another id, because an attempt of the old rollout may still run, and attempts are numbered for each rollout.
      values = json.dumps([new.input, dataclasses.asdict(new.limits), dict(new.metadata)], sort_keys=True)
      return lifecycle.create(dataclasses.replace(new, rollout_id=f'{new.rollout_id}{_mark(values)}'))
    except (Conflict, NotFound):
      raise UserError(f'{conflict}; choose another --workdir') from conflict


@contextlib.contextmanager
def run_agents(
  server: AgentServer, runner: Runner | None, *, max_concurrency: int, heartbeat_s: float
) -> Iterator[None]:
  """Plays queued tasks with a runner, if there is one, while the block runs; sets `AgentServer.progress`.

  `heartbeat_s` is that of the attempts, see `AttemptLimits`. The runner sends three signs of life in this time for each
  of them, as `client.heartbeat` does, so that none is late.
  """
  if runner is None:
    yield
    return
  queue = LocalQueue(server.lifecycle, LOCAL_WORKER, server.url)
  # Longer than a runner takes to kill a program that does not end.
  with RunnerPool(queue, runner, max_concurrency, heartbeat_s / 3 or _BEAT_S, 2 * _GRACE_S) as pool:
    server.progress = pool.progress
    yield


def function_runner(function: Callable[[Task], Any]) -> Runner:
  """The runner of a function in this process."""
  return FunctionRunner(function, _GRACE_S)


def make_runner(field: str, name: str, secrets: Collection[str]) -> Runner:
  """The runner that `AgentTasks.runner` names: a function 'package.module:function', or a command.

  A command gets no environment variable of `_SECRETS` and `secrets`. UserError, which names the config field `field`,
  if the function cannot be imported, or the command cannot be read.
  """
  try:
    words = shlex.split(name)
  except ValueError as e:
    raise UserError(f'{field}={name!r}: is no command ({e})') from e
  if not words:
    raise UserError(f'{field}={name!r}: is no command')
  if len(words) == 1 and ':' in name:
    return function_runner(load_function(field, name))
  words = [sys.executable if words[0] == 'python' else words[0], *words[1:]]
  environment = {k: v for k, v in os.environ.items() if k not in (*_SECRETS, *secrets)}
  return ProgramRunner(words, None, environment, _GRACE_S)
