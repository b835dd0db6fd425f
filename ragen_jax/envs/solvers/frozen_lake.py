"""Exact FrozenLake: dynamic programming over (turns left, actions left, square) on the accelerator.

A turn's sequence of actions is chosen before the outcome of its first action is known, so the value of a sequence is
the expectation over the squares where it ends. A game that ends within a sequence ignores the rest of it. All
4 + 16 + ... sequences are tried, so the work grows with 4 ** max_actions_per_turn.

S is the number of squares, N the number of levels. The four actions are any four moves, given as an array
`moves`, i64[S, 4]: the square that each action leads to from each square if nothing slips.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.base import Budget
from ragen_jax.envs.solvers.limits import check_left
from ragen_jax.utils.sizes import next_power

# Working memory of the recursion, and its maximum for one level.
_CHUNK_BYTES = 8 * 2**20
_LEVEL_BYTES = 1 * 2**30
# A longer sequence has to be better by more than float32 rounding.
_TIE = 1e-6
# If the goal is out of reach, every plan has the value 0. The plans then go nearer to the goal: a final live square has
# this fraction of the value of a success, times 0.8 for each step to the goal.
_HOPE = 1e-4
_HOPE_DECAY = 0.8


def transition_probabilities(moves: np.ndarray, slip: tuple[float, float, float], live: np.ndarray) -> np.ndarray:
  """f32[..., S, 4, S], entry [s, a, t]: the probability that action a on square s ends on square t.

  Args:
    moves: i64[S, 4], see the top of this file.
    slip: probabilities that action a has the effect of action a - 1, a, a + 1 (mod 4).
    live: bool[..., S], the squares on which the game continues; other squares are never left.
  """
  squares, actions = np.arange(len(moves)), np.arange(4)
  chance = np.zeros((len(squares), 4, len(squares)))
  for offset, odds in zip((-1, 0, 1), slip, strict=True):
    target = moves[:, (actions + offset) % 4]  # [S, 4]
    np.add.at(chance, (squares[:, None], actions, target), odds)
  stay = np.broadcast_to(np.eye(len(squares))[:, None, :], chance.shape)
  return np.where(live[..., None, None], chance, stay).astype(np.float32)


def check_solvable(size: int, budget: Budget, discount: float) -> None:
  """Raises ValueError if the solver cannot solve lakes of `size` by `size` squares with a budget and a discount."""
  for field in dataclasses.fields(budget):
    if getattr(budget, field.name) < 1:
      raise ValueError(f'frozen_lake: budget.{field.name}={getattr(budget, field.name)!r}; allowed: at least 1')
  if not 0 < discount <= 1:
    raise ValueError(f'frozen_lake: discount={discount!r}; allowed: above 0, at most 1')
  if _level_bytes(size * size, budget) > _LEVEL_BYTES:
    length = budget.max_actions_per_turn
    raise ValueError(
      f'frozen_lake: budget.max_actions_per_turn={length}; allowed: less on {size} x {size} squares, '
      f'since the solver tries all 4**{length} sequences of a turn'
    )


@dataclasses.dataclass(frozen=True, eq=False)
class FrozenLakeSolution:
  """Best play on N lakes; the tables are computed at their first use.

  If the goal is out of reach within the remaining budget, every plan has the same value; `plan` then goes nearer.

  Attributes:
    moves, slip: see `transition_probabilities`.
    live: bool[N, S], the squares on which the game continues: neither holes nor the goal.
    goal: i32[N], the square to reach.
    player: i32[N], the square from which the level is solved.
    done: bool[N], levels that are over already.
    won: bool[N], those of them that are won.
    discount: a success after k actions is worth discount ** k to the plans.
  """

  moves: np.ndarray
  slip: tuple[float, float, float]
  live: np.ndarray
  goal: np.ndarray
  player: np.ndarray
  done: np.ndarray
  won: np.ndarray
  budget: Budget
  discount: float

  @functools.cached_property
  def success(self) -> np.ndarray:
    """f32[N], the highest probability of success within the budget."""
    chances, _ = self._backward(discount=1.0, hope=0.0, with_plans=False)  # f32[N, turns, actions, S], as `_plans`
    chances = chances[np.arange(len(self.player)), -1, -1, self.player]
    return np.where(self.done, self.won, chances).astype(np.float32)

  @functools.cached_property
  def _plans(self) -> np.ndarray:
    """i32[N, turns, actions, S], numbers of the best sequences; entry [t, a] is for t + 1 turns and a + 1 actions."""
    return self._backward(discount=self.discount, hope=_HOPE, with_plans=True)[1]

  def plan(self, states: Any, turns_left: np.ndarray, actions_left: np.ndarray) -> list[list[int]]:
    n = len(self.player)
    turns, actions = check_left('frozen_lake', self.budget, turns_left, actions_left, n)
    ended = np.asarray(states.done) | (turns < 1) | (actions < 1)
    # Levels that are over read an arbitrary entry of the table, which is then replaced.
    plan = self._plans[np.arange(n), np.maximum(turns, 1) - 1, np.maximum(actions, 1) - 1, np.asarray(states.player)]
    return [numbered_sequence(k) for k in np.where(ended, -1, plan).tolist()]

  def _backward(self, *, discount: float, hope: float, with_plans: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Runs the recursion on chunks of levels that fit the working memory; all chunks share one compiled program."""
    n, squares = len(self.player), len(self.moves)
    fit = max(1, _CHUNK_BYTES // _level_bytes(squares, self.budget))
    # Powers of two, so that batches of many sizes share few programs.
    chunk = min(next_power(n), 1 << fit.bit_length() - 1)
    parts = []
    for first in range(0, n, chunk):
      rows = np.minimum(np.arange(first, first + chunk), n - 1)
      live = self.live[rows]  # [n, S]
      goal = np.arange(squares) == self.goal[rows, None]
      leaf = hope * _nearness(live, goal, self.moves)
      step = transition_probabilities(self.moves, self.slip, live)
      step = np.where(live[:, :, None, None], np.float32(discount) * step, step)
      part = _recursion(step, live, goal, leaf, budget=self.budget, with_plans=with_plans)
      parts.append(jax.tree.map(lambda x: np.asarray(x)[: n - first], part))  # noqa: B023
    if not parts:
      shape = (0, self.budget.max_turns, self.budget.max_actions, squares)
      return np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


@functools.partial(jax.jit, static_argnames=('budget', 'with_plans'))
def _recursion(step, live, goal, leaf, *, budget: Budget, with_plans: bool):
  """Backward induction for n levels.

  Args:
    step: f32[n, S, 4, S], the effect of an action on values: value before = step @ value after.
    live: bool[n, S], squares on which the game continues.
    goal: bool[n, S], the goal's square, of value 1.
    leaf: f32[n, S], the value of a live square once turns or actions are used up.

  Returns:
    Values f32[n, turns, actions, S] and, with plans, numbers of the best sequences i32[n, turns, actions, S]. The entry
    [t, a] is for t + 1 turns and a + 1 actions left.
  """
  n, squares = live.shape
  actions = budget.max_actions
  step = step.reshape(n, squares * 4, squares)

  def turn(value, _):
    # value: f32[n, S, actions + 1], with one turn less, by actions left. The last column cannot be what a turn leaves.
    outcome = jnp.where(live[:, :, None], value, goal[:, :, None])[:, :, None, :-1]  # [n, S, 1, actions]
    best = jnp.full((n, squares, actions), -1.0)
    number = jnp.full((n, squares, actions), -1, jnp.int32)
    first = 0
    for length in range(1, min(budget.max_actions_per_turn, actions) + 1):
      # Prepends each action to each sequence. The rows of `step` are (square, action), so the product has the axes
      # (square, first action, later actions, actions left after), and reshaping joins the middle two.
      left = actions - length + 1
      outcome = outcome[..., :left].reshape(n, squares, -1)
      outcome = jnp.einsum('nij,njk->nik', step, outcome, precision='highest').reshape(n, squares, 4**length, left)
      # With `left` = k actions left after it, the sequence was begun with k + length: column k + length - 1.
      highest = outcome.max(axis=2)  # [n, S, left]
      value_here = _shift(highest, length - 1, -1.0)
      better = value_here > best + _TIE
      best = jnp.where(better, value_here, best)
      if with_plans:
        # The first of the best; XLA's own argmax is several times as slow on CPU.
        which = jnp.where(outcome == highest[:, :, None], jnp.arange(4**length)[:, None], 4**length).min(axis=2)
        number = jnp.where(better, _shift(first + which, length - 1, -1), number)
      first += 4**length
    value = jnp.concatenate([leaf[:, :, None], best], axis=2)
    return value, (best, number if with_plans else None)

  value = jnp.repeat(leaf[:, :, None], actions + 1, axis=2)
  _, tables = jax.lax.scan(turn, value, length=budget.max_turns)
  return jax.tree.map(lambda x: x.transpose(1, 0, 3, 2), tables)  # [turns, n, S, actions] to [n, turns, actions, S]


def _shift(x: jax.Array, by: int, fill: float) -> jax.Array:
  """Moves the last axis `by` columns to the right."""
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(by, 0)], constant_values=fill)


def numbered_sequence(number: int) -> list[int]:
  """The actions of a numbered sequence: 0..3 are single actions, 4..19 pairs, and so on, the first action leading.

  Sequence 4 is [0, 0], 5 is [0, 1], 19 is [3, 3], 20 is [0, 0, 0]; -1 is [].
  """
  if number < 0:
    return []
  length = 1
  while number >= 4**length:
    number -= 4**length
    length += 1
  return [number >> 2 * i & 3 for i in reversed(range(length))]


def _level_bytes(squares: int, budget: Budget) -> int:
  """Bytes of one level's largest array in the recursion."""
  longest = min(budget.max_actions_per_turn, budget.max_actions)
  return 4 * squares * 4**longest * (budget.max_actions - longest + 1)


def _nearness(live: np.ndarray, goal: np.ndarray, moves: np.ndarray) -> np.ndarray:
  """f32[n, S], 0.8 ** (steps to the goal over live squares), 0 on squares that are not live or are cut off."""
  near = goal.astype(np.float32)
  while True:
    further = np.where(live, _HOPE_DECAY * near[:, moves].max(axis=2), near)
    if np.array_equal(further, near):
      return np.where(live, near, 0).astype(np.float32)
    near = further
