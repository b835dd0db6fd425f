"""The rows of one environment outside JAX, whose failures become faults of the rows."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ragen_jax.agent import metrics as episode_metrics
from ragen_jax.agent.image_observations import with_images
from ragen_jax.agent.pool import FAULT_MESSAGE, Outcomes, Pool, PoolStep
from ragen_jax.agent.segments import Observation
from ragen_jax.envs.outside.base import Session, TextStep, read_expert, read_observation, read_step
from ragen_jax.envs.outside.images import ImageObservation, read_text
from ragen_jax.envs.scenes import Scene
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models.vision.processor import ProcessorConfig
from ragen_jax.utils import foreign
from ragen_jax.utils.errors import one_line, short
from ragen_jax.utils.threads import Fault

_log = logging.getLogger(__name__)


class OutsidePool(Pool):
  """The rows of one environment outside JAX. Exceptions, time-outs and wrong answers become faults of the rows."""

  outside = True

  def __init__(self, spec: EnvSpec, rows: int, group_size: int, processor: ProcessorConfig | None):
    super().__init__(spec, rows, group_size, processor)
    self._warned: set[str] = set()
    self._opened: Session | None = None
    self._done, self._success = np.zeros((rows,), bool), np.zeros((rows,), bool)
    self._call = foreign.named(f'envs.{spec.tag}')
    # Rows that play in threads of their own keep the environment's limit of what happens at a time.
    at_once = getattr(spec.env, 'processes', 0) or getattr(spec.env, 'workers', 0)
    self._room = threading.BoundedSemaphore(at_once) if at_once else contextlib.nullcontext()

  @property
  def done(self) -> np.ndarray:
    return self._done

  @property
  def success(self) -> np.ndarray:
    return self._success

  @property
  def _session(self):
    if self._opened is None:
      self._opened = self.spec.env.open(self.rows)
    return self._opened

  def abandon(self) -> None:
    """Gives up a rollout whose turns may still play: they play no further action, and the next has a new session."""
    self._opened = None

  def reset(self, seeds: np.ndarray, members: np.ndarray) -> None:
    self.faults = {}
    self._done, self._success = np.zeros((self.rows,), bool), np.zeros((self.rows,), bool)
    self.used = np.zeros((self.rows,), np.int32)
    form = self.spec.env.image_form
    self._seen: list[str | ImageObservation] = [''] * self.rows
    self._rendered: dict[int, tuple[str | ImageObservation, Observation]] = {}
    self._seeds = seeds
    rows = range(self.rows)
    results = self._ask('reset', lambda: self._session.reset(rows, seeds.tolist(), members.tolist()), self.rows)
    for row, result in zip(rows, (read_observation(raw, form) for raw in results), strict=True):
      if isinstance(result, Fault):
        self.fail(row, result)
      else:
        self._seen[row] = result
    for row in rows:
      first = row - row % self.group_size
      if self._seen[row] != self._seen[first] and not {row, first} & set(self.faults):
        message = 'envs.%s, level %d: first observations differ within a group; equal seeds must give equal ones'
        self._warn('members', message, self.spec.tag, seeds[row])

  def step(self, actions: list[list[Any]]) -> PoolStep:
    return self.take(self.play({row: own for row, own in enumerate(actions) if own}))

  def play(self, actions: Mapping[int, list[Any]]) -> dict[int, Outcomes]:
    outcomes: dict[int, Outcomes] = {row: [] for row in actions}
    session = self._opened
    read = functools.partial(read_step, form=self.spec.env.image_form, success_stands=self.spec.env.success_stands)
    # The rows play their first actions, then their second, and so on.
    for i in range(self.spec.budget.max_actions_per_turn):
      rows = [row for row, own in actions.items() if i < len(own) and self._goes_on(row, outcomes[row])]
      if not rows:
        break
      chosen = [actions[row][i] for row in rows]
      with self._room:
        if self._opened is not session:  # the rollout was given up
          break
        results = self._ask('step', functools.partial(session.step, rows, chosen), len(rows))
      for row, raw in zip(rows, results, strict=True):
        outcomes[row].append(_own_names(read(raw)))
    return outcomes

  def _goes_on(self, row: int, outcomes: Outcomes) -> bool:
    """Whether a row executes another action after these."""
    last = outcomes[-1] if outcomes else None
    over = self._done[row] if last is None else isinstance(last, Fault) or last.done
    return not over and self.used[row] + len(outcomes) < self.spec.budget.max_actions

  def take(self, outcomes: Mapping[int, Outcomes]) -> PoolStep:
    rewards: list[tuple[float, ...]] = [()] * self.rows
    metrics: list[dict[str, float]] = [{} for _ in range(self.rows)]
    effective = np.zeros((self.rows,), np.int32)
    for row, own in outcomes.items():
      steps = [outcome for outcome in own if not isinstance(outcome, Fault)]
      for step in steps:
        changed = step.observation != self._seen[row]
        effective[row] += changed if step.effective is None else step.effective
        for name, value in step.metrics.items():
          metrics[row][name] = metrics[row].get(name, 0.0) + value
        self._seen[row] = step.observation
        self._done[row], self._success[row] = step.done, step.success
      rewards[row] = tuple(step.reward for step in steps)
      self.used[row] += len(steps)
    for row, own in sorted(outcomes.items(), key=lambda outcome: len(outcome[1])):  # as they occurred
      if own and isinstance(own[-1], Fault):
        self.fail(row, own[-1])
    return PoolStep(rewards, np.asarray([len(own) for own in rewards], np.int32), effective, metrics)

  def _ask(self, what: str, call: Callable[[], list[Any]], count: int) -> list[Any]:
    """The session's answers; faults if it gives none."""
    try:
      with foreign.calling(f'envs.{self.spec.tag}'):
        results = self._call(call)
    except KeyboardInterrupt:
      raise
    except BaseException as e:  # noqa: BLE001, whatever foreign code raises becomes a fault that is reported
      return [Fault(f'{what} raised {type(e).__name__}', one_line(e, str))] * count
    if not isinstance(results, list) or len(results) != count:
      return [Fault(f'{what} did not answer for every row')] * count
    return results

  def fail(self, row: int, fault: Fault) -> None:
    self.faults[row] = fault
    self._done[row], self._success[row] = True, False
    self._warn(fault.kind, FAULT_MESSAGE, self.spec.tag, self._seeds[row], fault, self.spec.tag)

  def _warn(self, kind: str, message: str, *arguments: Any) -> None:
    if kind not in self._warned:
      self._warned.add(kind)
      _log.warning(message, *arguments)

  def render(self) -> list[Observation]:
    for row, seen in enumerate(self._seen):
      if row not in self._rendered or self._rendered[row][0] is not seen:
        self._rendered[row] = seen, self._segments(seen)
    return [self._rendered[row][1] for row in range(self.rows)]

  def _segments(self, seen: str | ImageObservation) -> Observation:
    if not isinstance(seen, ImageObservation):
      return seen
    return seen.text if self.processor is None else with_images(seen.text, seen.images, self.processor)

  def levels(self) -> list[bytes | None]:
    return self._levels_of(self._seeds)

  def find_levels(self, seeds: np.ndarray, members: np.ndarray) -> list[bytes | None]:
    del members
    return self._levels_of(seeds)

  def _levels_of(self, seeds: np.ndarray) -> list[bytes | None]:
    firsts = seeds[:: self.group_size].tolist()
    # One by one, because a seed that fails must not hide the others.
    asked = [functools.partial(lambda seed: [as_level(self.spec.env.level_id(seed))], seed) for seed in firsts]
    found = [self._ask('level_id', call, 1)[0] for call in asked]
    for fault in (x for x in found if isinstance(x, Fault)):
      self._warn(fault.kind, 'envs.%s: %s; held-out items are not recognised', self.spec.tag, fault)
    return [None if isinstance(x, Fault) else x for x in found]

  def picture(self, row: int) -> np.ndarray | None:
    """The images of the observation side by side, with a grey line between them; None for text alone."""
    seen = self._seen[row]
    if not isinstance(seen, ImageObservation):
      return None
    line = np.full((seen.images[0].shape[0], 2, 3), 128, np.uint8)
    parts = [part for image in seen.images for part in (line, image)]
    return np.concatenate(parts[1:], axis=1) if len(seen.images) > 1 else seen.images[0]

  def scenes(self, rows: list[int]) -> list[Scene]:
    return self._session.scenes(rows)

  def legal_actions(self) -> list[list[str]]:
    if self.spec.env.action_words:
      return [list(self.spec.env.action_words)] * self.rows
    rows = [row for row in range(self.rows) if not self._done[row]]
    answers = self._ask('legal_actions', lambda: self._session.legal_actions(rows), len(rows)) if rows else []
    legal: list[list[str]] = [[] for _ in range(self.rows)]
    for row, raw in zip(rows, answers, strict=True):
      names = self._read_plan(raw, 'legal_actions')
      if isinstance(names, Fault):
        told = 'envs.%s, level %d: %s; random play has no action'
        self._warn(names.kind, told, self.spec.tag, self._seeds[row], names)
      else:
        legal[row] = names
    return legal

  def expert(self, rows: list[int]) -> list[list[str]]:
    answers = self._ask('expert', lambda: self._session.expert(rows), len(rows))
    plans = []
    for row, raw in zip(rows, answers, strict=True):
      plan = self._read_plan(raw)
      if isinstance(plan, Fault):
        self._warn(plan.kind, 'envs.%s, level %d: %s; there is no advice', self.spec.tag, self._seeds[row], plan)
        plan = []
      plans.append(plan[: min(self.spec.actions_a_turn, self.spec.budget.max_actions - int(self.used[row]))])
    return plans

  def _read_plan(self, raw: Any, what: str = 'expert') -> list[str] | Fault:
    """The names of the actions that a session's `expert` or `legal_actions` returns."""
    texts = read_expert(raw, what)
    if isinstance(texts, Fault):
      return texts
    read = [self.spec.env.read_action(text) for text in texts]
    if None in read:
      return Fault(f'{what} names what is no action', short(texts[read.index(None)]))
    return [name for _, name in read]

  def rationale(self, rows: list[int]) -> list[str]:
    """The expert's thoughts in some rows; empty where there is none."""
    texts = []
    for raw in self._ask('rationale', lambda: self._session.rationale(rows), len(rows)):
      text = raw if isinstance(raw, Fault) else read_text(raw, 'rationale')
      if isinstance(text, Fault):
        self._warn(text.kind, 'envs.%s: %s; the thought is left out', self.spec.tag, text)
      texts.append('' if isinstance(text, Fault) else text)
    return texts

  def end(self) -> None:
    fault = self._ask('end', lambda: [self._session.end()], 1)[0]
    if isinstance(fault, Fault):
      self._warn(fault.kind, 'envs.%s: %s; its episodes may not be released', self.spec.tag, fault)


def _own_names(step: TextStep | Fault) -> TextStep | Fault:
  """The step; a fault if one of its metrics has a name of `agent.metrics`."""
  taken = [] if isinstance(step, Fault) else [name for name in step.metrics if name in episode_metrics.NAMES]
  return Fault('step reports a metric with a name of ragen_jax', taken[0]) if taken else step


def as_level(item: Any) -> bytes | None:
  """The id of an item as a level, which differs from all levels in JAX."""
  if item is None:
    return None
  if not isinstance(item, str):
    raise TypeError(f'{short(item)} is not text')
  return b'item|' + str.encode(item, 'utf-8', 'replace')
