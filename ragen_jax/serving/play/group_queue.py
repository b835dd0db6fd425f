"""Play: the queue of asynchronous training, which tasks are played before the iteration that trains them.

A group is the rollouts of one task. It is trained only if its oldest token is at most k updates old; k is
`serve.max_staleness`. A tag with n groups an iteration has the tasks 0, 1, 2, ... While iteration i is played, the
tasks with numbers below (i + k + 1) n have been queued, and i n tasks have been trained. So at most (k + 1) n tasks are
open, and the last of them is trained by iteration i + k if no group takes longer than k iterations. If a group takes
longer, it is closed, and its task is queued again at the end, with new attempts.

Everything that must survive a restart is in the store. The open tasks are its rollouts that were neither taken by an
iteration nor closed, and the groups of an iteration are recorded before they are trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ragen_jax.envs.spec import EnvSpec
from ragen_jax.serving.engine.keys import folded_keys
from ragen_jax.serving.errors import NotFound
from ragen_jax.serving.rollouts.lifecycle import Lifecycle
from ragen_jax.serving.rollouts.records import OVER, AttemptLimits, NewRollout, RolloutRecord, metadata_with_prompt
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.serving.types import AttemptState, Finish, RolloutState
from ragen_jax.utils.errors import UserError

# Groups with other names are not of a queue.
_PREFIX = 'ahead'
_PAGE = 1000  # rollouts that are read at a time


@dataclasses.dataclass(frozen=True)
class QueueSettings:
  """How far a queue plays ahead.

  Attributes:
    max_staleness: k, at least 1.
    iterations: of the run; no task of a later one is queued.
    group_size: G, rollouts of a task.
  """

  max_staleness: int
  iterations: int
  group_size: int
  limits: AttemptLimits
  prompt: str


@dataclasses.dataclass(frozen=True)
class Taken:
  """A group that an iteration trains: the G rollouts of the task with a tag and a number, see `AgentTasks.task`."""

  tag: str
  seed: int
  rollouts: tuple[RolloutRecord, ...]


@dataclasses.dataclass
class _Group:
  """An open task, of the spec with the index `spec`; `number` counts the tasks of its tag.

  Attributes:
    seed: see `Taken`.
    queued_in: the iteration that queued it; all its tokens have this version or a later one.
    left: the rollouts that are not over.
    cancelled: those that a person has cancelled.
    oldest: the oldest version of its tokens, once it is over; None if it has none.
    completed: its place in the order in which groups ended; None before it has ended.
  """

  spec: int
  number: int
  seed: int
  queued_in: int
  rollouts: tuple[str, ...]
  left: set[str]
  cancelled: set[str] = dataclasses.field(default_factory=set)
  oldest: int | None = None
  completed: int | None = None

  @property
  def age(self) -> tuple[int, int]:
    """Orders groups that are over, the oldest tokens first."""
    return self.queued_in if self.oldest is None else self.oldest, self.completed


class GroupQueue:
  """The open tasks of a run. One thread uses it."""

  def __init__(self, lifecycle: Lifecycle, settings: QueueSettings, specs: Sequence[EnvSpec], now: Callable[[], float]):
    """Goes on with the open tasks of the store; training rollouts of other kinds are closed.

    The specs are `AgentTasks`; `now` gives the present time in seconds since 1970.
    """
    self._lifecycle, self._store, self._now = lifecycle, lifecycle.store, now
    self._settings, self._specs = settings, list(specs)
    self._cursor = self._store.ask(Tables.last_completed)  # before the rollouts are read, so that no end is missed
    self._groups: dict[str, _Group] = {}
    self._of: dict[str, _Group] = {}  # by rollout
    self._to_renew: list[str] = []  # groups of before the start
    for group_id in dict.fromkeys(record.group for record in self._store.unclosed('train')):
      self._reopen(group_id)

  def _reopen(self, group_id: str) -> None:
    """Takes up a group of the store that has an open rollout, or closes it."""
    records = self._store.ask(Tables.group, group_id)
    tags = [spec.tag for spec in self._specs]
    meta = records[0].metadata
    ours = group_id.startswith(f'{_PREFIX}-') and meta['tag'] in tags
    if not ours or any(record.iteration is not None for record in records):
      self._lifecycle.replace([r.rollout_id for r in records if r.iteration is None], ())
      return
    self._add(group_id, _group(tags.index(meta['tag']), meta, [r.rollout_id for r in records]))
    for record in records:
      if record.state in OVER:
        self._end(record)
    # A program that failed may have been mended since. What a person cancelled stays cancelled.
    succeeded = any(record.state == RolloutState.SUCCEEDED for record in records)  # its reward may come
    cancelled = all(record.state == RolloutState.CANCELLED for record in records)
    if self._groups[group_id].completed is not None and not succeeded and not cancelled:
      self._to_renew.append(group_id)

  def _add(self, group_id: str, group: _Group) -> None:
    self._groups[group_id] = group
    self._of |= dict.fromkeys(group.rollouts, group)

  def _forget(self, group_id: str) -> None:
    for rollout_id in self._groups.pop(group_id).rollouts:
      del self._of[rollout_id]

  def fill(self, iteration: int, first_seed: int, key: jax.Array) -> None:
    """Queues tasks until as many are open as the bound of the staleness allows while `iteration` is played.

    Its first task has the number `first_seed`; all tags together have consecutive numbers. Tasks that were over before
    the start, with no attempt that succeeded, are queued again, unless all their rollouts were cancelled.
    """
    k, start = self._settings.max_staleness, 0
    for group_id in self._to_renew:
      if group_id in self._groups:
        self._renew(self._groups[group_id].rollouts, iteration, key)
        self._forget(group_id)
    self._to_renew = []
    begun = max(iteration, self._store.ask(Tables.last_batch) + 1)  # so many iterations have their groups
    every = sum(spec.num_groups for spec in self._specs)
    for i, spec in enumerate(self._specs):
      n = spec.num_groups
      opened = begun * n + sum(group.spec == i for group in self._groups.values())
      for number in range(opened, min(begun + k + 1, self._settings.iterations) * n):
        seed = first_seed + (number // n - iteration) * every + start + number % n
        tasks = [spec.env.task(seed, member) for member in range(self._settings.group_size)]
        meta = {'tag': spec.tag, 'iteration': iteration, 'number': number, 'trial': 0, 'seed': seed}
        self._queue(i, meta, tasks, key, ())
      start += n

  def _queue(self, spec: int, meta: dict[str, Any], tasks: Sequence[Any], key: jax.Array, old: Sequence[str]) -> None:
    """Queues a group, in place of old rollouts."""
    group_id = f'{_PREFIX}-{spec}-{meta["number"]}-{meta["trial"]}'
    words = folded_keys(key, (spec, meta['number'], meta['trial']), len(tasks))
    metadata = metadata_with_prompt(meta, self._settings.prompt)
    new = [
      NewRollout(f'{group_id}-{member}', task, group_id, 'train', self._settings.limits, metadata, words[member])
      for member, task in enumerate(tasks)
    ]
    self._lifecycle.replace(old, new)
    self._add(group_id, _group(spec, meta, [one.rollout_id for one in new]))

  def look(self) -> None:
    """Takes notice of the rollouts that are over."""
    while page := self._store.ask(Tables.completed, self._cursor, _PAGE):
      for record in page:
        self._cursor = record.completed
        self._end(record)

  def _end(self, record: RolloutRecord) -> None:
    group = self._of.get(record.rollout_id)
    if group is None:
      return
    group.left.discard(record.rollout_id)
    if record.state == RolloutState.CANCELLED:
      group.cancelled.add(record.rollout_id)
    if not group.left and group.completed is None:
      group.oldest, group.completed = self._oldest_version(group), record.completed

  def _oldest_version(self, group: _Group) -> int | None:
    """The oldest version of the group's tokens that may be trained; None if there are none."""
    with self._store.read() as tables:
      latest = [tables.rollout(rollout_id).attempt_id for rollout_id in group.rollouts]
      states = (AttemptState.RUNNING, AttemptState.SUCCEEDED)
      attempts = [attempt for attempt in latest if attempt and tables.attempt(attempt).state in states]
      calls = [call for attempt in attempts for call in tables.calls(attempt)]
    versions = [
      int(call.generated.versions.min())
      for call in calls
      if call.trained and call.generated.finish is not Finish.ABORTED and call.generated.ids
    ]
    return min(versions, default=None)

  def renew_stale(self, iteration: int, key: jax.Array, *, running: bool) -> int:
    """Gives up the groups that are too old for `iteration`, and queues their tasks again; returns their number.

    With `running`, groups that are not over are looked at, too.
    """
    last = iteration - self._settings.max_staleness  # the oldest version that may be trained

    def stale(group: _Group) -> bool:
      oldest = group.oldest
      if running and group.completed is None and group.queued_in < last:  # otherwise no token can be too old
        oldest = self._oldest_version(group)
      return oldest is not None and oldest < last

    found = [group_id for group_id, group in self._groups.items() if stale(group)]
    for group_id in found:
      self._renew(self._groups[group_id].rollouts, iteration, key)
      self._forget(group_id)
    return len(found)

  def _renew(self, rollouts: Sequence[str], iteration: int, key: jax.Array) -> None:
    """Queues the task of a group again; its rollouts are given up."""
    records = [self._store.ask(Tables.rollout, rollout_id) for rollout_id in rollouts]
    before = records[0].metadata
    meta = before | {'iteration': iteration, 'trial': before['trial'] + 1}
    meta.pop('prompt', None)
    spec = [spec.tag for spec in self._specs].index(before['tag'])
    self._queue(spec, meta, [record.input for record in records], key, rollouts)

  def take(self, iteration: int, key: jax.Array) -> list[Taken]:
    """Gives an iteration that took none before its groups, those with the oldest tokens first, and stores which ones.

    Returns as many groups of each tag as its spec says, tag by tag; none if too few are over. UserError if all rollouts
    of these groups were cancelled. The tasks of such groups are queued again.
    """
    chosen: list[str] = []
    last = iteration - self._settings.max_staleness
    for i, spec in enumerate(self._specs):
      ready = [
        (group.age, name)
        for name, group in self._groups.items()
        if group.spec == i and group.completed is not None and (group.oldest is None or group.oldest >= last)
      ]
      if len(ready) < spec.num_groups:
        return []
      chosen += [name for _, name in sorted(ready)[: spec.num_groups]]
    groups = [self._groups[name] for name in chosen]
    ids = [rollout_id for group in groups for rollout_id in group.rollouts if rollout_id not in group.cancelled]
    if not ids:
      for name in [name for name, group in self._groups.items() if len(group.cancelled) == len(group.rollouts)]:
        self._renew(self._groups[name].rollouts, iteration, key)
        self._forget(name)
      raise UserError(f'train: all rollouts of the {len(groups)} tasks of iteration {iteration + 1} were cancelled')
    self._store.take_batch(iteration, ids, self._now())
    self._store.close_rollouts([x for group in groups for x in sorted(group.cancelled)], self._now())
    for name in chosen:
      self._forget(name)
    return self.taken(iteration)

  def give_back(self, iteration: int, key: jax.Array) -> None:
    """Queues the tasks of the groups that an iteration took again, since nothing can be learnt from these rollouts.

    The iteration has trained nothing. The same is done with other groups that are over and have no reward.
    """
    groups = self.taken(iteration)
    # If the process ends between the two transactions, the next one takes the same groups, and gives them back.
    self._store.return_batch(iteration)
    over = [name for name, group in self._groups.items() if group.completed is not None]
    for group in groups:
      self._renew([record.rollout_id for record in group.rollouts], iteration, key)
    for name in over:
      rollouts = self._groups[name].rollouts
      with self._store.read() as tables:
        rewarded = any(not reward.metric for x in rollouts for reward in tables.rewards(tables.rollout(x).attempt_id))
      if not rewarded:
        self._renew(rollouts, iteration, key)
        self._forget(name)

  def taken(self, iteration: int) -> list[Taken]:
    """The groups that an iteration took, as the store has them, also after a restart; none if it took none.

    Raises:
      UserError: they were deleted.
    """
    found: dict[str, Taken] = {}
    for rollout_id in self._store.ask(Tables.batch, iteration):
      try:
        record = self._store.ask(Tables.rollout, rollout_id)
      except NotFound as e:
        raise UserError(
          f'iteration {iteration + 1} cannot be repeated: its rollout {rollout_id!r} was deleted (serve.keep)'
        ) from e
      if record.group not in found:
        records, meta = self._store.ask(Tables.group, record.group), record.metadata
        found[record.group] = Taken(meta['tag'], meta['seed'], tuple(records))
    return list(found.values())

  def counts(self) -> tuple[int, int]:
    """Numbers of open tasks that are queued or played, and of those that are over and wait for an iteration."""
    over = sum(group.completed is not None for group in self._groups.values())
    return len(self._groups) - over, over


def _group(spec: int, meta: dict[str, Any], ids: Sequence[str]) -> _Group:
  return _Group(spec, meta['number'], meta['seed'], meta['iteration'], tuple(ids), set(ids))
