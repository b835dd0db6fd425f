"""The batch of environments of a rollout. The members of a group share a level; each has its own randomness."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent import futures
from typing import Any, TypeVar

import numpy as np

from ragen_jax.agent.image_observations import shows_images
from ragen_jax.agent.pool import Outcomes, Pool, PoolStep
from ragen_jax.agent.pools import make_pool
from ragen_jax.agent.segments import Observation
from ragen_jax.envs.scenes import Scene
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models.vision.processor import ProcessorConfig
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.threads import Fault

_log = logging.getLogger(__name__)
_Result = TypeVar('_Result')

# Number of training levels of one `seed`; each seed has its own range.
LEVELS_PER_SEED = 10_000_000
# Maximum number of redraws of a held-out level, and the distance between the seeds of the draws.
_REDRAWS = 8
_REDRAWS_OF_IDS = 64  # of environments outside JAX, whose items are found without a reset
_STRIDE = 2_654_435_761

_TELLING = threading.Lock()


def _is_first(told: set[str], tag: str) -> bool:
  """Whether no thread has told something about a tag before."""
  with _TELLING:
    first = tag not in told
    told.add(tag)
  return first


def first_training_level(first_level: int, seed: int, *, rollout: int = 0, groups: int = 0) -> int:
  """The seed of the level of the first group of a training rollout; group g plays the level with this seed plus g.

  `rollout` is the number of earlier rollouts, `groups` the number of levels in each.
  """
  return first_level + seed * LEVELS_PER_SEED + rollout * groups


@dataclasses.dataclass
class StepResult:
  """The outcome of a turn's actions, for every row of the batch.

  Attributes:
    rewards: the rewards of the executed actions, one tuple for each row.
    executed: i32[B], number of executed actions; fewer than requested if the episode ended or the budget ran out.
    effective: i32[B], number of executed actions that changed the state.
    done: bool[B], whether the game is over; also True if its environment failed.
    success: bool[B], whether the game is over and won.
    metrics: the environments' own measurements, by name, for each row: sums over the executed actions.
  """

  rewards: list[tuple[float, ...]]
  executed: np.ndarray
  effective: np.ndarray
  done: np.ndarray
  success: np.ndarray
  metrics: list[dict[str, float]]

  @property
  def reward(self) -> np.ndarray:
    """f64[B], the exact sums of `rewards`, each rounded once."""
    return np.asarray([math.fsum(own) for own in self.rewards])


class EnvStateManager:
  """Holds, resets and steps the environments of a rollout, or one of several equal shares of them.

  Attributes:
    specs: the environments, in the order of the rows.
    pools: index into `specs` -> the rows of this environment, for the environments in this share.
    first_row: number of rows in the previous shares.
    rows: B = groups * G, number of rows in this share; group g has the rows g*G .. g*G+G-1 of the whole batch.
    all_rows: number of rows in the whole batch.
    row_env: i32[B], index into `specs`.
    row_group: i32[B], number of the row's group in the whole batch.
    has_images: whether observations of the whole batch contain images.
    level_seeds: i64[B], the seed of each row's level, after `reset`.
  """

  def __init__(
    self,
    specs: list[EnvSpec],
    group_size: int,
    *,
    share: int = 0,
    shares: int = 1,
    held_out: frozenset[bytes] = frozenset(),
    processor: ProcessorConfig | None = None,
  ):
    """Builds the batch; nothing runs before `reset`. Raises UserError if the model cannot read an environment's images.

    Args:
      share: index of this share, from 0.
      shares: number of shares; it divides the number of groups.
      held_out: levels, in the form of `levels`, that `reset` replaces with others.
      processor: of the model that reads images; without it, all observations are text.
    """
    self._held_out, self._processor = held_out, processor
    self._warned_few_levels: set[str] = set()
    self._warned_unsolved: set[str] = set()
    self.specs = list(specs)
    self.group_size = group_size
    whole = np.repeat(np.arange(len(self.specs)), [s.num_groups for s in self.specs])
    groups = len(whole) // shares
    own = np.arange(share * groups, (share + 1) * groups)
    self.first_row = int(own[0]) * group_size
    self.rows, self.all_rows = groups * group_size, len(whole) * group_size
    self.row_env = np.repeat(whole[own], group_size).astype(np.int32)
    self.row_group = np.repeat(own, group_size).astype(np.int32)
    counts = np.bincount(self.row_env, minlength=len(self.specs)).tolist()
    self.pools: dict[int, Pool] = {
      i: make_pool(s, counts[i], group_size, processor) for i, s in enumerate(self.specs) if counts[i]
    }
    self.has_images = processor is not None and any(map(shows_images, self.specs))
    self._slices = {i: slice(sum(counts[:i]), sum(counts[: i + 1])) for i in self.pools}

  def fresh_copy(self) -> EnvStateManager:
    """A batch of the same environments that shares the compiled programs, for another thread.

    Raises RuntimeError if an environment outside JAX plays here already; its session cannot be shared.
    """
    if self.has_outside and hasattr(self, 'level_seeds'):
      raise RuntimeError('fresh_copy: this batch was reset, and its sessions are open')
    other = copy.copy(self)
    other.pools = {i: copy.copy(pool) for i, pool in self.pools.items()}
    return other

  def divided(self, shares: int) -> list[EnvStateManager]:
    """The equal shares of this whole batch, whose number divides the groups. They warn once, as one batch does."""
    found = [
      EnvStateManager(
        self.specs, self.group_size, share=i, shares=shares, held_out=self._held_out, processor=self._processor
      )
      for i in range(shares)
    ]
    for own in found:
      own._warned_few_levels, own._warned_unsolved = self._warned_few_levels, self._warned_unsolved
    return found

  @property
  def groups(self) -> int:
    return self.rows // self.group_size

  @property
  def has_outside(self) -> bool:
    """Whether any environment of the whole batch is outside JAX."""
    return any(spec.env.is_outside for spec in self.specs)

  def rows_of(self, index: int) -> slice:
    """The rows of the environment `specs[index]`, which is one of `pools`."""
    return self._slices[index]

  def pool_of(self, row: int) -> Pool:
    return self.pools[int(self.row_env[row])]

  def reset(
    self, first_seed: int, *, first_member: int = 0, level_seeds: np.ndarray | None = None
  ) -> list[Observation]:
    """Starts fresh episodes and returns the first observation of each row. Group g's level has the seed first_seed + g.

    Args:
      first_seed: in 0 .. 2**32 - groups.
      first_member: number of the first episode of each group; members of equal numbers have equal randomness.
      level_seeds: i64[groups of the whole batch], the seeds of the groups' levels in place of consecutive ones.

    Raises:
      UserError: programs play an environment over HTTP.
    """
    refuse_programs(self.specs)
    chosen = level_seeds is not None
    self.level_seeds = level_seeds[self.row_group] if chosen else first_seed + self.row_group.astype(np.int64)
    members = first_member + np.arange(self.rows) % self.group_size

    def begin(index: int, pool: Pool) -> None:
      own = self._slices[index]
      if self._held_out:
        self.level_seeds[own] = self._redraw(pool, self.level_seeds[own], members[own])
      if pool.outside or not self._held_out:
        pool.reset(self.level_seeds[own], members[own])

    self._each(begin)
    return self.render()

  def _each(self, call: Callable[[int, Pool], _Result]) -> list[_Result]:
    """The results of a call for each pool, in order. If several may run in any thread, they run at the same time."""
    apart = [i for i, pool in self.pools.items() if pool.spec.env.any_thread]
    if len(apart) < 2:
      return [call(i, pool) for i, pool in self.pools.items()]
    with futures.ThreadPoolExecutor(len(apart), 'ragen_jax-pool') as threads:
      waiting = {i: threads.submit(call, i, self.pools[i]) for i in apart}
      done = {i: call(i, pool) for i, pool in self.pools.items() if i not in waiting}
      return [waiting[i].result() if i in waiting else done[i] for i in self.pools]

  def _redraw(self, pool: Pool, seeds: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Replaces held-out levels with levels from other seeds, and returns the seeds i64[rows] of all levels.

    An environment in JAX is then reset to these levels.

    Another seed can give the same board again. A group keeps its original level if all attempts give held-out levels,
    because some games have very few levels.
    """
    drawn = seeds
    known = self._is_held_out(pool, drawn, members)
    for attempt in range(1, (_REDRAWS_OF_IDS if pool.outside else _REDRAWS) + 1):
      if known.any():
        drawn = np.where(known, (seeds + attempt * _STRIDE) % 2**32, drawn)
        known = self._is_held_out(pool, drawn, members)
    if not known.any():
      return drawn
    drawn = np.where(known, seeds, drawn)
    pool.find_levels(drawn, members)
    if _is_first(self._warned_few_levels, pool.spec.tag):
      share = known.mean()
      severity = logging.WARNING if share == 1 or pool.outside else logging.INFO
      why = 'nothing is held out' if share == 1 else 'there are few levels'
      told = '%s: %.0f %% of the training levels are levels of the evaluation too; %s'
      _log.log(severity, told, pool.spec.tag, 100 * share, why)
    return drawn

  def _is_held_out(self, pool: Pool, seeds: np.ndarray, members: np.ndarray) -> np.ndarray:
    """bool[rows], whether the levels of these seeds are held-out levels."""
    levels = pool.find_levels(seeds, members)
    return np.repeat([level in self._held_out for level in levels], self.group_size)

  def levels_from(self, first_seed: int) -> set[bytes]:
    """The levels that `reset` begins with if it replaces none. Environments in JAX are reset to them, others are not.

    They are the boards in JAX, and the items outside it that have an id.
    """
    seeds, members = first_seed + self.row_group.astype(np.int64), np.arange(self.rows) % self.group_size
    found = set()
    for i, pool in self.pools.items():
      found.update(pool.find_levels(seeds[self._slices[i]], members[self._slices[i]]))
    return found - {None}

  def levels(self) -> set[bytes]:
    """The levels after the last `reset`, see `levels_from`."""
    return {level for pool in self.pools.values() for level in pool.levels()} - {None}

  def plays_apart(self, row: int) -> bool:
    """Whether `play` may be called for a row."""
    pool = self.pool_of(row)
    return pool.outside and pool.spec.env.any_thread

  def play(self, row: int, actions: list[Any]) -> Outcomes:
    """Executes a turn's parsed actions in one row, in any thread; `step` then needs the outcomes. See `Pool.play`."""
    index = int(self.row_env[row])
    first = self._slices[index].start
    return self.pools[index].play({row - first: actions})[row - first]

  def step(self, actions: list[list[Any]], played: Mapping[int, Outcomes] | None = None) -> StepResult:
    """Executes a turn's parsed actions; rows without actions have an empty list.

    With `played`, a row -> what `play` returned, rows that play apart execute nothing here.
    """

    def step_pool(index: int, pool: Pool) -> PoolStep:
      own = self._slices[index]
      if played is None or not self.plays_apart(own.start):
        return pool.step(actions[own])
      return pool.take({row - own.start: played[row] for row in range(own.start, own.stop) if row in played})

    parts = self._each(step_pool)
    return StepResult(
      rewards=[own for part in parts for own in part.rewards],
      executed=np.concatenate([part.executed for part in parts]),
      effective=np.concatenate([part.effective for part in parts]),
      done=np.concatenate([p.done for p in self.pools.values()]),
      success=np.concatenate([p.success for p in self.pools.values()]),
      metrics=[own for part in parts for own in part.metrics],
    )

  def render(self) -> list[Observation]:
    """The current observations, one for each row."""
    return [text for pool in self.pools.values() for text in pool.render()]

  def picture(self, row: int) -> np.ndarray | None:
    """u8[H, W, 3], the current board of a row; None if the environment draws no pictures."""
    return self.pool_of(row).picture(row - self._slices[int(self.row_env[row])].start)

  def scenes(self, rows: Collection[int]) -> dict[int, Scene]:
    """The current scenes of those of some rows that have not failed. Their environments have `scene_kinds`."""
    found, faults = {}, self.faults
    for i, pool in self.pools.items():
      first, own = self._slices[i].start, [row for row in rows if self.row_env[row] == i and row not in faults]
      if own:
        found |= dict(zip(own, pool.scenes([row - first for row in own]), strict=True))
    return found

  def actions_left(self) -> np.ndarray:
    """i32[B], actions that each episode still has."""
    return np.concatenate([p.spec.budget.max_actions - p.used for p in self.pools.values()])

  def optimal(self) -> np.ndarray:
    """f32[B], the best success probability on each row's level of the last `reset`; NaN if unknown.

    It is unknown without a solver, or if the solver does not support this size or budget, which is logged once.
    """
    best = np.full((self.rows,), np.nan, np.float32)
    for i, pool in self.pools.items():
      try:
        best[self._slices[i]] = pool.optimal()
      except ValueError as e:
        if _is_first(self._warned_unsolved, pool.spec.tag):
          _log.warning('envs.%s: the best possible success is unknown (%s)', pool.spec.tag, e)
    return best

  def fail(self, row: int, fault: Fault) -> None:
    """Ends the episode of a row outside JAX as an error."""
    self.pool_of(row).fail(row - self._slices[int(self.row_env[row])].start, fault)

  @property
  def faults(self) -> dict[int, Any]:
    """Row -> fault, for the rows whose environments failed since `reset`."""
    return {self._slices[i].start + row: fault for i, pool in self.pools.items() for row, fault in pool.faults.items()}

  def end(self) -> None:
    """Ends the rollout: environments outside JAX may release their episodes. `reset` must precede the next `step`."""
    for pool in self.pools.values():
      pool.end()


def refuse_programs(specs: Iterable[EnvSpec]) -> None:
  """Raises UserError if programs play an environment over HTTP."""
  for spec in specs:
    if spec.env.played_by_programs:
      raise UserError(
        f'envs.{spec.tag}.type={spec.env.name!r}: programs play it, in training and --mode=eval; this mode plays '
        'turn by turn'
      )
