"""The batch of environments behind a rollout: groups that share a level, members with their own luck."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.base import Budget, Environment


@dataclasses.dataclass(frozen=True)
class EnvGroup:
  """A share of the batch that plays one environment.

  Attributes:
    tag: its name in the config.
    env: the environment.
    budget: turns and actions of an episode.
    max_words: how long the prompt asks a reply to be at most.
    groups: how many prompt groups play it.
  """

  tag: str
  env: Environment
  budget: Budget
  max_words: int
  groups: int


@dataclasses.dataclass
class StepResult:
  """What a turn's actions brought, for every row of the batch.

  Attributes:
    reward: f32[B], summed over the actions.
    executed: i32[B], actions carried out; fewer than asked where the episode ended or the budget ran out.
    effective: i32[B], how many of them changed the state.
    done: bool[B], the game is over.
    success: bool[B], and won.
  """

  reward: np.ndarray
  executed: np.ndarray
  effective: np.ndarray
  done: np.ndarray
  success: np.ndarray


class _Pool:
  """The rows of one environment."""

  def __init__(self, spec: EnvGroup, rows: int, group_size: int):
    self.spec = spec
    self.rows = rows
    self.group_size = group_size
    self.traces = 0
    self._reset = jax.jit(self._reset_rows)
    self._step = jax.jit(self._step_rows)

  def _reset_rows(self, seeds, members):
    keys = jax.vmap(jax.random.key)(seeds)
    # The level depends on the group's seed alone; the environment's luck on the member too.
    luck = jax.vmap(lambda key, member: jax.random.fold_in(jax.random.fold_in(key, 1), member))(keys, members)
    return jax.vmap(self.spec.env.reset)(keys), luck

  def _step_rows(self, states, actions, count, used, luck):
    """actions: i32[rows, A, *action_shape]; count, used: i32[rows]."""
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
      return state, jnp.sum(rewards), executed, jnp.sum(effective)

    return jax.vmap(one_row)(states, actions, count, used, luck)

  def reset(self, seeds: np.ndarray, members: np.ndarray) -> None:
    self.states, self._luck = self._reset(jnp.asarray(seeds, jnp.uint32), jnp.asarray(members, jnp.uint32))
    self.used = np.zeros((self.rows,), np.int32)
    self.host_states = jax.device_get(self.states)

  def step(self, actions: list[list[Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    width = self.spec.budget.max_actions_per_turn
    table = np.zeros((self.rows, width, *self.spec.env.action_shape), np.int32)
    count = np.zeros((self.rows,), np.int32)
    for i, row_actions in enumerate(actions):
      count[i] = min(len(row_actions), width)
      for j, action in enumerate(row_actions[:width]):
        table[i, j] = action
    self.states, reward, executed, effective = self._step(self.states, table, count, self.used, self._luck)
    self.host_states, reward, executed, effective = jax.device_get((self.states, reward, executed, effective))
    self.used = self.used + executed
    return reward, executed, effective


class EnvStateManager:
  """Holds, resets and steps the environments of a rollout, or one of several equal shares of them.

  Attributes:
    specs: the environments, in the order of the rows.
    group_size: G.
    first_row: how many rows the shares before have.
    rows: B = groups * G, of this share; group g has rows g*G .. g*G+G-1 of the whole.
    row_env: i32[B], index into `specs`.
    row_group: i32[B], the group's number in the whole.
    level_seeds: i64[B], the seed of each row's level, after `reset`.
  """

  def __init__(self, specs: list[EnvGroup], group_size: int, *, share: int = 0, shares: int = 1):
    """Builds the batch; nothing runs before `reset`.

    Args:
      specs: the environments of the whole.
      group_size: G.
      share: which share this is.
      shares: how many there are; divides the groups.
    """
    self.specs = list(specs)
    self.group_size = group_size
    whole = np.repeat(np.arange(len(self.specs)), [s.groups for s in self.specs])
    groups = len(whole) // shares
    own = np.arange(share * groups, (share + 1) * groups)
    self.first_row = int(own[0]) * group_size
    self.rows = groups * group_size
    self.row_env = np.repeat(whole[own], group_size).astype(np.int32)
    self.row_group = np.repeat(own, group_size).astype(np.int32)
    counts = np.bincount(self.row_env, minlength=len(self.specs)).tolist()
    # Only of those environments that the share has rows of.
    self._pools = {i: _Pool(s, counts[i], group_size) for i, s in enumerate(self.specs) if counts[i]}
    self._slices = {i: slice(sum(counts[:i]), sum(counts[: i + 1])) for i in self._pools}

  @property
  def traces(self) -> int:
    """How often a step has been compiled, over all environments."""
    return sum(p.traces for p in self._pools.values())

  @property
  def groups(self) -> int:
    """P."""
    return self.rows // self.group_size

  def reset(self, first_seed: int) -> list[str]:
    """Starts fresh episodes: group g's level is made from seed `first_seed + g`.

    Args:
      first_seed: in 0 .. 2**32 - groups.

    Returns:
      The first observations, one a row.
    """
    self.level_seeds = first_seed + self.row_group.astype(np.int64)
    members = np.arange(self.rows) % self.group_size
    for i, pool in self._pools.items():
      pool.reset(self.level_seeds[self._slices[i]], members[self._slices[i]])
    return self.render()

  def step(self, actions: list[list[Any]]) -> StepResult:
    """Carries out a turn's parsed actions, an empty list for rows that do nothing."""
    parts = [pool.step(actions[self._slices[i]]) for i, pool in self._pools.items()]
    reward, executed, effective = (np.concatenate(x) for x in zip(*parts, strict=True))
    return StepResult(
      reward=reward,
      executed=executed,
      effective=effective,
      done=np.concatenate([np.asarray(p.host_states.done) for p in self._pools.values()]),
      success=np.concatenate([np.asarray(p.host_states.success) for p in self._pools.values()]),
    )

  def render(self) -> list[str]:
    """The observations as they are now, one a row."""
    return [text for pool in self._pools.values() for text in pool.spec.env.render(pool.host_states)]

  def actions_left(self) -> np.ndarray:
    """i32[B]."""
    return np.concatenate([p.spec.budget.max_actions - p.used for p in self._pools.values()])

  def optimal(self) -> np.ndarray:
    """f32[B], the best success probability on each row's level; call it right after `reset`."""
    parts = []
    for pool in self._pools.values():
      one_a_group = jax.tree.map(lambda x: np.asarray(x)[:: self.group_size], pool.host_states)
      best = pool.spec.env.optimal(one_a_group, pool.spec.budget)
      parts.append(np.repeat(np.asarray(best, np.float32), self.group_size))
    return np.concatenate(parts)

  def pool_states(self, index: int) -> Any:
    """The states of one environment's rows as NumPy arrays [rows, ...]."""
    return self._pools[index].host_states
