"""What the tests of several environments share: batches of levels, steps, and checks that hold for every game."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.envs.base import Budget, Environment


@functools.partial(jax.jit, static_argnums=0)
def _reset(env: Environment, seeds: jax.Array) -> Any:
  return jax.vmap(lambda seed: env.reset(jax.random.key(seed)))(seeds)


def make_levels(env: Environment, n: int = 256, first: int = 0, block: int = 256) -> Any:
  """Levels [n] of the keys first, first + 1, ..., made in blocks so that an environment's reset compiles once."""
  blocks = [jax.tree.map(np.asarray, _reset(env, np.arange(i, i + block))) for i in range(first, first + n, block)]
  return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:n], *blocks)


@functools.partial(jax.jit, static_argnums=0)
def _step(env: Environment, states: Any, actions: jax.Array, seed: int) -> Any:
  return jax.vmap(env.step)(states, actions, jax.random.split(jax.random.key(seed), len(actions)))


def step(env: Environment, states: Any, actions: Any, seed: int = 0) -> Any:
  """The states after one action each, and the outputs, with NumPy leaves [N, ...]."""
  return jax.tree.map(np.asarray, _step(env, states, jnp.asarray(actions, jnp.int32), seed))


def one(states: Any, i: Any = 0) -> Any:
  """States at an index of their batch."""
  return jax.tree.map(lambda leaf: leaf[i], states)


def batch(*states: Any) -> Any:
  """A batch of single states."""
  return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *states)


def where(chosen: np.ndarray, new: Any, old: Any) -> Any:
  """The new states where `chosen`, bool[N], else the old ones."""
  return jax.tree.map(lambda a, b: np.where(chosen.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, old)


@contextlib.contextmanager
def raises_one_line(match: str) -> Iterator[pytest.ExceptionInfo[ValueError]]:
  """Expects a ValueError whose message matches and is one line."""
  with pytest.raises(ValueError, match=match) as error:
    yield error
  assert '\n' not in str(error.value)


def check_text_round_trip(env: Environment, states: Any, most: int = 100) -> None:
  """`from_text` of each observation is its state, to the types of its leaves; of so many states at most."""
  states = one(states, np.s_[:: -(-len(states.done) // most)])
  for i, text in enumerate(env.render(states)):
    read, state = env.from_text(text), one(states, i)
    jax.tree.map(np.testing.assert_array_equal, read, state)
    assert jax.tree.map(lambda leaf: leaf.dtype, read) == jax.tree.map(lambda leaf: leaf.dtype, state)


def check_limits_of_plans(env: Environment, levels: Any) -> None:
  """Plans of 4 levels are empty where the episode is over, no longer than allowed, and refused beyond the budget."""
  solution = env.solve(levels, Budget())
  done = levels.replace(done=np.array([True, False, False, False]))
  plans = solution.plan(done, np.array([5, 0, 5, 5]), np.array([10, 10, 0, 1]))
  assert plans[:3] == [[], [], []] and len(plans[3]) == 1
  with raises_one_line('turns_left=6; allowed: at most 5, the budget that was solved for'):
    solution.plan(levels, np.full(4, 6), np.full(4, 10))
  with raises_one_line('actions_left=11; allowed: at most 10, the budget that was solved for'):
    solution.plan(levels, np.full(4, 5), np.full(4, 11))


def check_no_levels(env: Environment, levels: Any, budget: Budget) -> None:
  """Solvers and texts of an empty batch are empty, and levels that are over keep their success."""
  none = one(levels, np.s_[:0])
  solution = env.solve(none, budget)
  assert solution.success.shape == (0,) and solution.plan(none, np.zeros(0, int), np.zeros(0, int)) == []
  assert env.render(none) == env.rationale(none) == []
  two = one(levels, np.s_[:2]).replace(done=np.array([True, True]), success=np.array([True, False]))
  np.testing.assert_array_equal(env.optimal(two, budget), [1, 0])


def read_golden_traces(shared: pathlib.Path) -> dict[str, Any]:
  """The traces of other implementations, recorded in the directory `shared`; skips the test where there are none."""
  path = shared / 'reference' / 'golden_env_traces.json'
  if not path.exists():
    pytest.skip(f'needs the recorded traces in {path}, which is not there')
  return json.loads(path.read_text())
