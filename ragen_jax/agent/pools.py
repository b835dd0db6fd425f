"""The rows of one environment in a batch, for each kind of environment: in JAX, or outside it.

Only this module distinguishes the two kinds. A pool answers questions about its environment: whether it is outside JAX,
the legal actions, the best possible success.
"""

from __future__ import annotations

import abc
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.agent import metrics as episode_metrics
from ragen_jax.agent.image_observations import check_images, tile_of, with_images
from ragen_jax.agent.segments import Observation
from ragen_jax.envs.outside.base import TextStep, read_expert, read_observation, read_reward, read_step
from ragen_jax.envs.outside.images import ImageObservation, read_text
from ragen_jax.envs.scenes import Scene
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models.vision.processor import ProcessorConfig
from ragen_jax.utils import foreign
from ragen_jax.utils.errors import one_line, short
from ragen_jax.utils.threads import Fault

_log = logging.getLogger(__name__)
FAULT_MESSAGE = 'envs.%s, level %d: %s; the episode ends as an error. Further ones are only counted, in %s/env_errors'


def make_pool(spec: EnvSpec, rows: int, group_size: int, processor: ProcessorConfig | None = None) -> Pool:
  """Makes the pool for an environment in JAX or outside it, whose `rows` are a multiple of `group_size`.

  Without the processor of a model that reads images, observations are text. Raises UserError if the model cannot read
  the images of the environment.
  """
  kind = OutsidePool if spec.env.is_outside else JaxPool
  return kind(spec, rows, group_size, processor)


class PoolStep(NamedTuple):
  """The outcome of a turn's actions for the rows of a pool; the fields are those of `env_manager.StepResult`."""

  rewards: list[tuple[float, ...]]
  executed: np.ndarray
  effective: np.ndarray
  metrics: list[dict[str, float]]


class Pool(abc.ABC):
  """The rows of one environment, numbered from 0; group g has the rows g*G .. g*G+G-1.

  Attributes:
    processor: of the model that reads images; None if observations are text.
    outside: whether the environment is outside JAX. Its reset may have side effects, so it is called only to begin an
      episode: first prompts are not checked in advance.
    traces: number of compilations of a step.
    faults: row -> the fault that ended its episode since `reset`.
    used: i32[rows], number of executed actions since `reset`.
  """

  outside: bool
  traces = 0

  def __init__(self, spec: EnvSpec, rows: int, group_size: int, processor: ProcessorConfig | None):
    self.spec = spec
    self.rows = rows
    self.group_size = group_size
    self.processor = processor
    if processor is not None:
      check_images(spec, processor)
    self.faults: dict[int, Fault] = {}
    self.used = np.zeros((rows,), np.int32)

  @property
  @abc.abstractmethod
  def done(self) -> np.ndarray:
    """bool[rows], whether the game is over; also True if the environment failed."""

  @property
  @abc.abstractmethod
  def success(self) -> np.ndarray:
    """bool[rows], whether the game is over and won."""

  @abc.abstractmethod
  def reset(self, seeds: np.ndarray, members: np.ndarray) -> None:
    """Starts fresh episodes, from i64[rows] seeds of the levels and i64[rows] numbers of the rows in their groups."""

  @abc.abstractmethod
  def step(self, actions: list[list[Any]]) -> PoolStep:
    """Executes each row's actions of a turn."""

  @abc.abstractmethod
  def render(self) -> list[Observation]:
    """The current observations."""

  def picture(self, row: int) -> np.ndarray | None:
    """u8[H, W, 3], the current board of a row; None if the environment draws no pictures."""
    del row
    return None

  def scenes(self, rows: list[int]) -> list[Scene]:
    """The current scenes of some rows; only for environments with `scene_kinds`."""
    del rows
    raise NotImplementedError(f'{self.spec.env.name} has no scenes')

  @abc.abstractmethod
  def levels(self) -> list[bytes | None]:
    """The initial level of each group, equal for equal boards or items of any seed or tag; None if unknown."""

  def find_levels(self, seeds: np.ndarray, members: np.ndarray) -> list[bytes | None]:
    """The `levels` that `reset` would begin with. An environment in JAX is reset to them, one outside JAX is not."""
    self.reset(seeds, members)
    return self.levels()

  def expert(self, rows: list[int]) -> list[list[str]]:
    """The names of the reference actions for the next turn of some rows, at most as many as the turn may play.

    None where the expert has none or fails, which is logged once for each kind of fault. Only for environments with
    `has_expert`.
    """
    del rows
    raise NotImplementedError(f'{self.spec.env.name} has no expert')

  @abc.abstractmethod
  def legal_actions(self) -> list[list[str]]:
    """For each row, the names of the legal actions; only for environments with `has_legal_actions`."""

  def optimal(self) -> np.ndarray:
    """f32[rows], the best success probability on the levels of the last `reset`; NaN if unknown.

    Raises ValueError if the solver does not support this size of the game or this budget.
    """
    return np.full((self.rows,), np.nan, np.float32)

  def end(self) -> None:
    """Ends the rollout: environments outside JAX may release their episodes. `reset` must precede the next `step`."""
    return


class JaxPool(Pool):
  """The rows of one environment in JAX.

  Attributes:
    states: the states of the rows, with NumPy leaves [rows, ...].
    fresh_states: the states right after `reset`.
  """

  outside = False

  def __init__(self, spec: EnvSpec, rows: int, group_size: int, processor: ProcessorConfig | None):
    super().__init__(spec, rows, group_size, processor)
    self._draw = None
    if processor is not None and spec.tile is not None:
      tile = tile_of(spec, processor)
      self._draw = jax.jit(jax.vmap(lambda state: spec.env.pixels(state, tile)))
    self._warned = False
    self._reset = jax.jit(self._reset_rows)
    self._step = jax.jit(self._step_rows)

  @property
  def done(self) -> np.ndarray:
    return np.asarray(self.states.done)

  @property
  def success(self) -> np.ndarray:
    return np.asarray(self.states.success)

  def _reset_rows(self, seeds, members):
    keys = jax.vmap(jax.random.key)(seeds)
    # The level depends on the group's seed only; the randomness of the game also depends on the member.
    luck = jax.vmap(lambda key, member: jax.random.fold_in(jax.random.fold_in(key, 1), member))(keys, members)
    return jax.vmap(self.spec.env.reset)(keys), luck

  def _step_rows(self, states, actions, count, used, luck):
    """The new states, rewards f32[rows, A], and the numbers of executed and of effective actions, i32[rows] each.

    Args:
      actions: i32[rows, A, *action_shape].
      count: i32[rows], number of actions to execute.
      used: i32[rows], number of actions executed in earlier turns.
      luck: [rows], keys of the randomness of the game.
    """
    self.traces += 1
    env, limit = self.spec.env, self.spec.budget.max_actions

    def one_row(state, actions, count, used, key):
      def one_action(carry, xs):
        state, executed = carry
        action, i = xs
        run = (i < count) & (used + executed < limit) & ~state.done
        after, out = env.step(state, action, jax.random.fold_in(key, used + executed))
        state = jax.tree.map(lambda new, old: jnp.where(run, new, old), after, state)
        return (state, executed + run), (jnp.where(run, out.reward, 0.0), out.effective & run)

      (state, executed), (rewards, effective) = jax.lax.scan(
        one_action, (state, jnp.zeros((), jnp.int32)), (actions, jnp.arange(actions.shape[0]))
      )
      return state, rewards, executed, jnp.sum(effective)  # rewards are added on the host: `Episode.score`

    return jax.vmap(one_row)(states, actions, count, used, luck)

  def reset(self, seeds: np.ndarray, members: np.ndarray) -> None:
    self._device_states, self._luck = self._reset(jnp.asarray(seeds, jnp.uint32), jnp.asarray(members, jnp.uint32))
    self.used = np.zeros((self.rows,), np.int32)
    self._seeds, self.faults = seeds, {}
    self.states = self.fresh_states = jax.device_get(self._device_states)

  def _stepped(self, actions: list[list[Any]]) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    """The results of `_step_rows` for the actions of a turn."""
    width = self.spec.budget.max_actions_per_turn
    table = np.zeros((self.rows, width, *self.spec.env.action_shape), np.int32)
    count = np.zeros((self.rows,), np.int32)
    for i, row_actions in enumerate(actions):
      if i in self.faults:
        continue
      count[i] = min(len(row_actions), width)
      for j, action in enumerate(row_actions[:width]):
        table[i, j] = action
    return self._step(self._device_states, table, count, self.used, self._luck)

  def states_after(self, actions: list[list[Any]]) -> Any:
    """The states, with NumPy leaves [rows, ...], that `step` would lead to; the pool does not change."""
    return jax.device_get(self._stepped(actions)[0])

  def step(self, actions: list[list[Any]]) -> PoolStep:
    results = self._stepped(actions)
    self._device_states = results[0]
    self.states, table, executed, effective = jax.device_get(results)
    self.used = self.used + executed
    rewards = [tuple(own[:n]) for own, n in zip(table.tolist(), executed.tolist(), strict=True)]
    return PoolStep(self._contain(rewards), executed, effective, [{} for _ in rewards])

  def _contain(self, rewards: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """The rewards, with zeros for turns that have an unusable reward; the episodes of such turns end as errors."""
    contained = list(rewards)
    for row, own in enumerate(rewards):
      fault = next((x for x in map(read_reward, own) if isinstance(x, Fault)), None)
      if fault is not None:
        self.faults[row], contained[row] = fault, (0.0,) * len(own)
        if not self._warned:
          self._warned = True
          _log.warning(FAULT_MESSAGE, self.spec.tag, self._seeds[row], fault, self.spec.tag)
    if self.faults:
      failed = np.isin(np.arange(self.rows), list(self.faults))
      self.states = self.states.replace(done=self.done | failed, success=self.success & ~failed)
    return contained

  def render(self) -> list[Observation]:
    env = self.spec.env
    if self._draw is None:
      return env.render(self.states)
    images = np.asarray(self._draw(self._device_states))
    # Copies, because a part of the array would keep all of it in memory.
    pairs = zip(env.captions(self.states), images, strict=True)
    return [with_images(text, [image.copy()], self.processor) for text, image in pairs]

  def picture(self, row: int) -> np.ndarray | None:
    try:
      return self.spec.env.render_rgb(jax.tree.map(lambda x: np.asarray(x)[row], self.states))
    except NotImplementedError:  # a user's environment without pictures
      return None

  def scenes(self, rows: list[int]) -> list[Scene]:
    return self.spec.env.scenes(jax.tree.map(lambda x: np.asarray(x)[rows], self.states))

  def levels(self) -> list[bytes | None]:
    leaves = [np.asarray(x)[:: self.group_size] for x in jax.tree.leaves(self.fresh_states)]
    name = self.spec.env.name.encode()
    return [b'|'.join([name, *(x[i].tobytes() for x in leaves)]) for i in range(self.rows // self.group_size)]

  def legal_actions(self) -> list[list[str]]:
    env = self.spec.env
    return [[env.format_action(action) for action in own] for own in env.legal_actions(self.states)]

  def members(self, number: int, states: Any) -> Any:
    """Selects the states of the member with this number in each group, from states [rows, ...]."""
    return jax.tree.map(lambda x: np.asarray(x)[number :: self.group_size], states)

  def optimal(self) -> np.ndarray:
    """A level is solved once, for all members of its group."""
    best = self.spec.env.optimal(self.members(0, self.fresh_states), self.spec.budget)
    return np.repeat(np.asarray(best, np.float32), self.group_size)


class OutsidePool(Pool):
  """The rows of one environment outside JAX. Exceptions, time-outs and wrong answers become faults of the rows."""

  outside = True

  def __init__(self, spec: EnvSpec, rows: int, group_size: int, processor: ProcessorConfig | None):
    super().__init__(spec, rows, group_size, processor)
    self._warned: set[str] = set()
    self._done, self._success = np.zeros((rows,), bool), np.zeros((rows,), bool)
    self._call = foreign.named(f'envs.{spec.tag}')

  @property
  def done(self) -> np.ndarray:
    return self._done

  @property
  def success(self) -> np.ndarray:
    return self._success

  @functools.cached_property
  def _session(self):
    return self.spec.env.open(self.rows)

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
        self._fail(row, result)
      else:
        self._seen[row] = result
    for row in rows:
      first = row - row % self.group_size
      if self._seen[row] != self._seen[first] and not {row, first} & set(self.faults):
        message = 'envs.%s, level %d: first observations differ within a group; equal seeds must give equal ones'
        self._warn('members', message, self.spec.tag, seeds[row])

  def step(self, actions: list[list[Any]]) -> PoolStep:
    rewards: list[list[float]] = [[] for _ in range(self.rows)]
    metrics: list[dict[str, float]] = [{} for _ in range(self.rows)]
    effective = np.zeros((self.rows,), np.int32)
    form = self.spec.env.image_form
    # The rows play their first actions, then their second, and so on.
    for i in range(self.spec.budget.max_actions_per_turn):
      rows = [
        row
        for row, own in enumerate(actions)
        if i < len(own) and not self._done[row] and self.used[row] < self.spec.budget.max_actions
      ]
      if not rows:
        break
      chosen = [actions[row][i] for row in rows]
      results = self._ask('step', functools.partial(self._session.step, rows, chosen), len(rows))
      for row, result in zip(rows, (_own_names(read_step(raw, form)) for raw in results), strict=True):
        if isinstance(result, Fault):
          self._fail(row, result)
          continue
        changed = result.observation != self._seen[row]
        rewards[row].append(result.reward)
        effective[row] += changed if result.effective is None else result.effective
        for name, value in result.metrics.items():
          metrics[row][name] = metrics[row].get(name, 0.0) + value
        self._seen[row] = result.observation
        self._done[row], self._success[row] = result.done, result.success
        self.used[row] += 1
    executed = np.asarray([len(own) for own in rewards], np.int32)
    return PoolStep([tuple(own) for own in rewards], executed, effective, metrics)

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

  def _fail(self, row: int, fault: Fault) -> None:
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
    found = self._ask('level_id', lambda: [_as_level(self.spec.env.level_id(seed)) for seed in firsts], len(firsts))
    for fault in (x for x in found if isinstance(x, Fault)):
      self._warn(fault.kind, 'envs.%s: %s; held-out items are not recognised', self.spec.tag, fault)
    return [None if isinstance(x, Fault) else x for x in found]

  def picture(self, row: int) -> np.ndarray | None:
    """The first image of the observation; None for text alone."""
    seen = self._seen[row]
    return seen.images[0] if isinstance(seen, ImageObservation) else None

  def legal_actions(self) -> list[list[str]]:
    return [list(self.spec.env.action_words)] * self.rows

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

  def _read_plan(self, raw: Any) -> list[str] | Fault:
    """The names of an expert's actions."""
    texts = read_expert(raw)
    if isinstance(texts, Fault):
      return texts
    read = [self.spec.env.read_action(text) for text in texts]
    if None in read:
      return Fault('expert names what is no action', short(texts[read.index(None)]))
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


def _as_level(item: Any) -> bytes | None:
  """The id of an item as a level, which differs from all levels in JAX."""
  if item is None:
    return None
  if not isinstance(item, str):
    raise TypeError(f'{short(item)} is not text')
  return b'item|' + str.encode(item, 'utf-8', 'replace')
