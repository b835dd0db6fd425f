"""The batch of environments behind a rollout: a group shares its level, and each member has its own randomness."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import numpy as np

from ragen_jax.agent.pools import Pool, make_pool
from ragen_jax.envs.spec import EnvSpec

_log = logging.getLogger(__name__)

# Training levels of one `seed`: each has a range of its own.
LEVELS_PER_SEED = 10_000_000
# How often a level that is held out is drawn again, and how far the seeds of the draws are apart.
_REDRAWS = 8
_STRIDE = 2_654_435_761


def first_training_level(first_level: int, seed: int, *, rollout: int = 0, groups: int = 0) -> int:
  """The seed of the level that the first group of a training rollout plays; group g plays the g-th level behind it.

  Args:
    first_level: `train.first_level`.
    seed: of the run.
    rollout: number of rollouts before this one.
    groups: P, levels of a rollout.
  """
  return first_level + seed * LEVELS_PER_SEED + rollout * groups


@dataclasses.dataclass
class StepResult:
  """The outcome of a turn's actions, for every row of the batch.

  Attributes:
    rewards: of the actions that were carried out, one tuple a row.
    executed: i32[B], actions carried out; fewer than asked where the episode ended or the budget ran out.
    effective: i32[B], how many of them changed the state.
    done: bool[B], the game is over, also where its environment failed.
    success: bool[B], and won.
  """

  rewards: list[tuple[float, ...]]
  executed: np.ndarray
  effective: np.ndarray
  done: np.ndarray
  success: np.ndarray

  @property
  def reward(self) -> np.ndarray:
    """f64[B], the exact sums of `rewards`, each rounded once."""
    return np.asarray([math.fsum(own) for own in self.rewards])


class EnvStateManager:
  """Holds, resets and steps the environments of a rollout, or one of several equal shares of them.

  Attributes:
    specs: the environments, in the order of the rows.
    pools: by index into `specs`, the rows of each environment that this share has any of.
    group_size: G.
    first_row: number of rows of the shares before.
    rows: B = groups * G, of this share; group g has rows g*G .. g*G+G-1 of the whole.
    row_env: i32[B], index into `specs`.
    row_group: i32[B], the group's number in the whole.
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
  ):
    """Builds the batch; nothing runs before `reset`.

    Args:
      specs: the environments of the whole.
      group_size: G.
      share: number of this share, from 0.
      shares: number of shares; divides the groups.
      held_out: levels, as `levels` gives them, which `reset` replaces by others.
    """
    self._held_out = held_out
    self._warned_few_levels: set[str] = set()
    self._warned_unsolved: set[str] = set()
    self.specs = list(specs)
    self.group_size = group_size
    whole = np.repeat(np.arange(len(self.specs)), [s.num_groups for s in self.specs])
    groups = len(whole) // shares
    own = np.arange(share * groups, (share + 1) * groups)
    self.first_row = int(own[0]) * group_size
    self.rows = groups * group_size
    self.row_env = np.repeat(whole[own], group_size).astype(np.int32)
    self.row_group = np.repeat(own, group_size).astype(np.int32)
    counts = np.bincount(self.row_env, minlength=len(self.specs)).tolist()
    self.pools: dict[int, Pool] = {
      i: make_pool(s, counts[i], group_size) for i, s in enumerate(self.specs) if counts[i]
    }
    self._slices = {i: slice(sum(counts[:i]), sum(counts[: i + 1])) for i in self.pools}

  @property
  def traces(self) -> int:
    """How often a step has been compiled, over all environments."""
    return sum(p.traces for p in self.pools.values())

  @property
  def groups(self) -> int:
    """P."""
    return self.rows // self.group_size

  @property
  def has_outside(self) -> bool:
    """Whether any environment of the whole lives outside JAX."""
    return any(spec.env.is_outside for spec in self.specs)

  def rows_of(self, index: int) -> slice:
    """The rows of the environment `specs[index]`, which is one of `pools`."""
    return self._slices[index]

  def pool_of(self, row: int) -> Pool:
    """The pool that a row belongs to."""
    return self.pools[int(self.row_env[row])]

  def reset(self, first_seed: int) -> list[str]:
    """Starts fresh episodes: group g's level is made from seed `first_seed + g`.

    Args:
      first_seed: in 0 .. 2**32 - groups.

    Returns:
      The first observations, one a row.
    """
    self.level_seeds = first_seed + self.row_group.astype(np.int64)
    members = np.arange(self.rows) % self.group_size
    for i, pool in self.pools.items():
      own = self._slices[i]
      pool.reset(self.level_seeds[own], members[own])
      if self._held_out and not pool.outside:
        self.level_seeds[own] = self._redraw(pool, self.level_seeds[own], members[own])
    return self.render()

  def _redraw(self, pool: Pool, seeds: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Draws other levels in place of those that are held out; a different seed may still give the same board.

    A group that is unlucky in all attempts keeps its own: some games have hardly any levels.

    Returns:
      i64[rows], the seeds of the levels now.
    """
    drawn = seeds
    for attempt in range(_REDRAWS + 1):
      known = np.repeat([level in self._held_out for level in pool.levels()], self.group_size)
      if not known.any():
        return drawn
      last = attempt == _REDRAWS
      drawn = np.where(known, seeds if last else (seeds + (attempt + 1) * _STRIDE) % 2**32, drawn)
      pool.reset(drawn, members)
    if pool.spec.tag not in self._warned_few_levels:
      self._warned_few_levels.add(pool.spec.tag)
      share = known.mean()
      _log.info(
        '%s has few different levels: %.0f %% of those to train on are held-out ones', pool.spec.tag, 100 * share
      )
    return drawn

  def levels_from(self, first_seed: int) -> set[bytes]:
    """The levels that `reset(first_seed)` would give; environments outside JAX are not reset."""
    seeds, members = first_seed + self.row_group.astype(np.int64), np.arange(self.rows) % self.group_size
    for i, pool in self.pools.items():
      if not pool.outside:
        pool.reset(seeds[self._slices[i]], members[self._slices[i]])
    return self.levels()

  def levels(self) -> set[bytes]:
    """The levels of the last `reset`, of the environments in JAX."""
    return {level for pool in self.pools.values() for level in pool.levels()}

  def step(self, actions: list[list[Any]]) -> StepResult:
    """Carries out a turn's parsed actions, an empty list for rows that do nothing."""
    parts = [pool.step(actions[self._slices[i]]) for i, pool in self.pools.items()]
    rewards, executed, effective = zip(*parts, strict=True)
    return StepResult(
      rewards=[own for part in rewards for own in part],
      executed=np.concatenate(executed),
      effective=np.concatenate(effective),
      done=np.concatenate([p.done for p in self.pools.values()]),
      success=np.concatenate([p.success for p in self.pools.values()]),
    )

  def render(self) -> list[str]:
    """The observations as they are now, one a row."""
    return [text for pool in self.pools.values() for text in pool.render()]

  def picture(self, row: int) -> np.ndarray | None:
    """u8[H, W, 3], the board of a row as it is now; None where the environment draws none."""
    return self.pool_of(row).picture(row - self._slices[int(self.row_env[row])].start)

  def actions_left(self) -> np.ndarray:
    """i32[B], actions that each episode still has."""
    return np.concatenate([p.spec.budget.max_actions - p.used for p in self.pools.values()])

  def optimal(self) -> np.ndarray:
    """f32[B], the best success probability on each row's level of the last `reset`; NaN where it is not known.

    It is NaN if the environment has no solver, or if the solver does not support this size or budget. The second case
    logs a warning, once for each environment.
    """
    best = np.full((self.rows,), np.nan, np.float32)
    for i, pool in self.pools.items():
      try:
        best[self._slices[i]] = pool.optimal()
      except ValueError as e:
        if pool.spec.tag not in self._warned_unsolved:
          self._warned_unsolved.add(pool.spec.tag)
          _log.warning('envs.%s: the best possible success is not known (%s)', pool.spec.tag, e)
    return best

  @property
  def faults(self) -> dict[int, Any]:
    """By row, the fault that ended an episode whose environment failed since `reset`."""
    return {self._slices[i].start + row: fault for i, pool in self.pools.items() for row, fault in pool.faults.items()}

  def end(self) -> None:
    """The rollout is over: environments outside may let go of their episodes. `step` needs a `reset` after it."""
    for pool in self.pools.values():
      pool.end()
