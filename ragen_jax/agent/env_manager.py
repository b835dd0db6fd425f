"""The batch of environments behind a rollout: groups that share a level, members with their own luck."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.base import Budget, Environment
from ragen_jax.envs.outside.base import TextEnvironment, read_observation, read_reward, read_step
from ragen_jax.utils.errors import one_line
from ragen_jax.utils.threads import Fault

_log = logging.getLogger(__name__)
_FAULT_TOLD = 'envs.%s, level %d: %s; the episode ends as an error. Others like it are only counted, in %s/env_errors'


@dataclasses.dataclass(frozen=True)
class EnvGroup:
  """A share of the batch that plays one environment.

  Attributes:
    tag: its name in the config.
    env: the environment, in JAX or outside.
    budget: turns and actions of an episode.
    max_words: how long the prompt asks a reply to be at most.
    groups: how many prompt groups play it.
  """

  tag: str
  env: Environment | TextEnvironment
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
    done: bool[B], the game is over, also where its environment failed.
    success: bool[B], and won.
  """

  reward: np.ndarray
  executed: np.ndarray
  effective: np.ndarray
  done: np.ndarray
  success: np.ndarray


# How often a level that is held out is drawn again, and how far the seeds of the draws are apart.
_REDRAWS = 8
_STRIDE = 2_654_435_761


class _Pool:
  """The rows of one environment in JAX.

  Attributes:
    faults: by row, the reward that ended its episode.
  """

  def __init__(self, spec: EnvGroup, rows: int, group_size: int):
    self.spec = spec
    self.rows = rows
    self.group_size = group_size
    self.traces = 0
    self._told = False
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
    self._seeds, self.faults = seeds, {}
    self.host_states = jax.device_get(self.states)

  def levels(self) -> list[bytes]:
    """What each group's fresh level is, the same bytes for the same board, whatever seed or tag it came from."""
    leaves = [np.asarray(x)[:: self.group_size] for x in jax.tree.leaves(self.host_states)]
    name = self.spec.env.name.encode()
    return [b'|'.join([name, *(x[i].tobytes() for x in leaves)]) for i in range(self.rows // self.group_size)]

  def step(self, actions: list[list[Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    width = self.spec.budget.max_actions_per_turn
    table = np.zeros((self.rows, width, *self.spec.env.action_shape), np.int32)
    count = np.zeros((self.rows,), np.int32)
    for i, row_actions in enumerate(actions):
      if i in self.faults:
        continue
      count[i] = min(len(row_actions), width)
      for j, action in enumerate(row_actions[:width]):
        table[i, j] = action
    self.states, reward, executed, effective = self._step(self.states, table, count, self.used, self._luck)
    self.host_states, reward, executed, effective = jax.device_get((self.states, reward, executed, effective))
    self.used = self.used + executed
    return self._contain(reward), executed, effective

  def _contain(self, reward: np.ndarray) -> np.ndarray:
    """The rewards that are usable numbers, 0 in place of others; these end their episodes."""
    reward = np.array(reward)
    for row, number in enumerate(reward.tolist()):
      fault = read_reward(number)
      if isinstance(fault, Fault):
        self.faults[row], reward[row] = fault, 0.0
        if not self._told:
          self._told = True
          _log.warning(_FAULT_TOLD, self.spec.tag, self._seeds[row], fault, self.spec.tag)
    if self.faults:
      failed = np.isin(np.arange(self.rows), list(self.faults))
      done, success = np.asarray(self.host_states.done), np.asarray(self.host_states.success)
      self.host_states = self.host_states.replace(done=done | failed, success=success & ~failed)
    return reward

  def render(self) -> list[str]:
    return self.spec.env.render(self.host_states)

  def optimal(self) -> np.ndarray:
    one_a_group = jax.tree.map(lambda x: np.asarray(x)[:: self.group_size], self.host_states)
    best = self.spec.env.optimal(one_a_group, self.spec.budget)
    return np.repeat(np.asarray(best, np.float32), self.group_size)

  def end(self) -> None:
    """Nothing is held outside."""


@dataclasses.dataclass
class HostStates:
  """What is known of rows whose environment lives outside.

  Attributes:
    done: bool[rows].
    success: bool[rows].
  """

  done: np.ndarray
  success: np.ndarray


class _TextPool:
  """The rows of one environment outside JAX. Nothing that it does wrong gets out of here.

  Attributes:
    faults: by row, what ended its episode.
  """

  traces = 0

  def __init__(self, spec: EnvGroup, rows: int, group_size: int):
    self.spec = spec
    self.rows = rows
    self.group_size = group_size
    self._told: set[str] = set()

  @functools.cached_property
  def _session(self):
    return self.spec.env.open(self.rows)

  def reset(self, seeds: np.ndarray, members: np.ndarray) -> None:
    self.faults: dict[int, Fault] = {}
    self.host_states = HostStates(np.zeros((self.rows,), bool), np.zeros((self.rows,), bool))
    self.used = np.zeros((self.rows,), np.int32)
    self._texts = [''] * self.rows
    self._seeds = seeds
    rows = range(self.rows)
    results = self._ask('reset', lambda: self._session.reset(rows, seeds.tolist(), members.tolist()), self.rows)
    for row, result in zip(rows, map(read_observation, results), strict=True):
      if isinstance(result, Fault):
        self._fail(row, result)
      else:
        self._texts[row] = result
    for row in rows:
      first = row - row % self.group_size
      if self._texts[row] != self._texts[first] and not {row, first} & set(self.faults):
        told = 'envs.%s, level %d: the members of a group begin differently: reset must give equal text for equal seeds'
        self._warn('members', told, self.spec.tag, seeds[row])

  def step(self, actions: list[list[Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    reward = np.zeros((self.rows,), np.float32)
    executed, effective = np.zeros((self.rows,), np.int32), np.zeros((self.rows,), np.int32)
    # The rows play their first actions, then their second, and so on.
    for i in range(self.spec.budget.max_actions_per_turn):
      rows = [
        row
        for row, own in enumerate(actions)
        if i < len(own) and not self.host_states.done[row] and self.used[row] < self.spec.budget.max_actions
      ]
      if not rows:
        break
      chosen = [actions[row][i] for row in rows]
      results = self._ask('step', functools.partial(self._session.step, rows, chosen), len(rows))
      for row, result in zip(rows, map(read_step, results), strict=True):
        if isinstance(result, Fault):
          self._fail(row, result)
          continue
        changed = result.observation != self._texts[row]
        reward[row] += result.reward
        executed[row] += 1
        effective[row] += changed if result.effective is None else result.effective
        self._texts[row] = result.observation
        self.host_states.done[row], self.host_states.success[row] = result.done, result.success
        self.used[row] += 1
    return reward, executed, effective

  def _ask(self, what: str, call: Callable[[], list[Any]], count: int) -> list[Any]:
    """The session's answers; faults where it gives none."""
    try:
      results = call()
    except KeyboardInterrupt:
      raise
    except BaseException as e:  # noqa: BLE001, whatever foreign code raises becomes a fault that is reported
      return [Fault(f'{what} raised {type(e).__name__}', one_line(e, str))] * count
    if not isinstance(results, list) or len(results) != count:
      return [Fault(f'{what} did not answer for every row')] * count
    return results

  def _fail(self, row: int, fault: Fault) -> None:
    self.faults[row] = fault
    self.host_states.done[row], self.host_states.success[row] = True, False
    self._warn(fault.kind, _FAULT_TOLD, self.spec.tag, self._seeds[row], fault, self.spec.tag)

  def _warn(self, kind: str, message: str, *arguments: Any) -> None:
    """Warns, the first time that there is something of this kind to say."""
    if kind not in self._told:
      self._told.add(kind)
      _log.warning(message, *arguments)

  def render(self) -> list[str]:
    return list(self._texts)

  def optimal(self) -> np.ndarray:
    return np.full((self.rows,), np.nan, np.float32)

  def end(self) -> None:
    fault = self._ask('end', lambda: [self._session.end()], 1)[0]
    if isinstance(fault, Fault):
      self._warn(fault.kind, 'envs.%s: %s; the episodes are over, but may not be let go of', self.spec.tag, fault)


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

  def __init__(
    self,
    specs: list[EnvGroup],
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
      share: which share this is.
      shares: how many there are; divides the groups.
      held_out: levels, as `levels` gives them, in whose place `reset` draws others.
    """
    self._held_out = held_out
    self._few_levels: set[str] = set()  # tags that were told of
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
    self._pools = {
      i: (_TextPool if isinstance(s.env, TextEnvironment) else _Pool)(s, counts[i], group_size)
      for i, s in enumerate(self.specs)
      if counts[i]
    }
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
      if self._held_out and isinstance(pool, _Pool):
        self.level_seeds[self._slices[i]] = self._redraw(
          pool, self.level_seeds[self._slices[i]], members[self._slices[i]]
        )
    return self.render()

  def _redraw(self, pool: _Pool, seeds: np.ndarray, members: np.ndarray) -> np.ndarray:
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
    if pool.spec.tag not in self._few_levels:
      self._few_levels.add(pool.spec.tag)
      share = known.mean()
      _log.info(
        '%s has few different levels: %.0f %% of those to train on are held-out ones', pool.spec.tag, 100 * share
      )
    return drawn

  def levels_from(self, first_seed: int) -> set[bytes]:
    """The levels that `reset(first_seed)` would give; environments outside JAX are left alone."""
    seeds, members = first_seed + self.row_group.astype(np.int64), np.arange(self.rows) % self.group_size
    for i, pool in self._pools.items():
      if isinstance(pool, _Pool):
        pool.reset(seeds[self._slices[i]], members[self._slices[i]])
    return self.levels()

  def levels(self) -> set[bytes]:
    """The fresh levels of the environments in JAX, after `reset`."""
    return {level for pool in self._pools.values() if isinstance(pool, _Pool) for level in pool.levels()}

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
    return [text for pool in self._pools.values() for text in pool.render()]

  def picture(self, row: int) -> np.ndarray | None:
    """u8[H, W, 3], the board of a row as it is now; None where the environment draws none."""
    pool, local = self._pools[int(self.row_env[row])], row - self._slices[int(self.row_env[row])].start
    if isinstance(pool, _TextPool):
      return None
    try:
      return pool.spec.env.render_rgb(jax.tree.map(lambda x: np.asarray(x)[local], pool.host_states))
    except NotImplementedError:  # a user's own that has text only
      return None

  def actions_left(self) -> np.ndarray:
    """i32[B]."""
    return np.concatenate([p.spec.budget.max_actions - p.used for p in self._pools.values()])

  def optimal(self) -> np.ndarray:
    """f32[B], the best success probability on each row's level, NaN where nobody knows; call it right after `reset`."""
    return np.concatenate([pool.optimal() for pool in self._pools.values()])

  @property
  def faults(self) -> dict[int, Fault]:
    """By row, what ended an episode whose environment failed since `reset`."""
    return {self._slices[i].start + row: fault for i, pool in self._pools.items() for row, fault in pool.faults.items()}

  def end(self) -> None:
    """The rollout is over: environments outside may let go of their episodes. `step` needs a `reset` after it."""
    for pool in self._pools.values():
      pool.end()

  def pool_states(self, index: int) -> Any:
    """The states of one environment's rows as NumPy arrays [rows, ...]; `HostStates` for those outside."""
    return self._pools[index].host_states
