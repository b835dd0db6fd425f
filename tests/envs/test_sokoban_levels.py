"""Levels of Sokoban: each is legal, is solved by its reverse walk, and keeps its bounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.envs import sokoban_levels
from ragen_jax.envs.base import Budget
from ragen_jax.envs.sokoban import Sokoban
from tests.support.environments import batch
from tests.support.games.sokoban import LARGE, SMALL, fresh, generate, played, render_level


def check_levels(env, count):
  """Every level is one, is not solved, and is solved by its recorded reverse walk and by breadth-first search."""
  levels, states = generate(env, count), fresh(env, count)
  border = np.ones(env.dim, bool)
  border[1:-1, 1:-1] = False
  assert levels.walls[:, border].all()
  for board in (levels.boxes, levels.targets):
    assert (board.sum((1, 2)) == env.num_boxes).all() and not (board & levels.walls).any()
  r, c = levels.player.T
  assert not (levels.walls | levels.boxes)[np.arange(count), r, c].any()
  assert (levels.boxes & ~levels.targets).any((1, 2)).all()

  moves = (levels.solution >= 0).sum(1)
  assert moves.max() <= min(env.search_depth, env.max_steps)
  # The actions without the gaps, padded: what follows a solution is absorbed.
  order = np.argsort(levels.solution < 0, axis=1, kind='stable')
  actions = np.take_along_axis(levels.solution, order, 1)[:, : moves.max()]
  for i in range(0, count, 2500):
    after, _ = played(env, jax.tree.map(lambda leaf, i=i: leaf[i : i + 2500], states), actions[i : i + 2500].T)
    ended_at = after.done.argmax(0) + 1
    assert after.success[-1].all() and (ended_at <= moves[i : i + 2500]).all()

  length = env.solve(states, Budget()).length
  assert (length >= 1).all() and (length <= moves).all()
  return length


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ten_thousand_levels():
  length = check_levels(SMALL, 10_000)
  states = fresh(SMALL, 10_000)
  texts = SMALL.render(states)
  assert len(set(texts)) > 5_000
  share = np.bincount(length, minlength=10)[1:7] / len(length)
  assert (share > 0.05).all() and (share < 0.4).all()
  assert 3.0 < length.mean() < 4.5  # gym-sokoban's generator: 3.9
  fixed = render_level(jax.tree.map(np.asarray, sokoban_levels.fixed_level(SMALL.dim, 1, SMALL.search_depth)))
  assert texts.count(fixed) <= 1
  # Targets lie everywhere, boxes everywhere but in the corners.
  somewhere = np.zeros(SMALL.dim, bool)
  somewhere[1:-1, 1:-1] = True
  assert (states.targets.any(0) == somewhere).all()
  somewhere[1:-1:3, 1:-1:3] = False
  assert (states.boxes.any(0) == somewhere).all()


@pytest.mark.slow
def test_levels_with_two_boxes():
  length = check_levels(LARGE, 1_000)
  states = fresh(LARGE, 1_000)
  assert len(set(LARGE.render(states))) > 950
  assert not (states.boxes & states.targets).any()
  assert length.max() <= LARGE.search_depth and len(np.unique(length)) >= 8


@pytest.mark.slow
@pytest.mark.parametrize(
  'env', [LARGE, Sokoban(num_boxes=3), Sokoban(dim=(8, 8), num_boxes=2)], ids=['large', 'three', 'deep']
)
@pytest.mark.exhaustive_cases('three', 'deep', 'large')
def test_levels_with_more_boxes(env):
  check_levels(env, 2_500)


@pytest.mark.slow
def test_bounds_on_the_solution():
  env = Sokoban(min_solution=5, max_solution=7)
  length = check_levels(env, 1_000)
  assert set(length.tolist()) == {5, 6, 7}


@pytest.mark.slow
@pytest.mark.parametrize(
  'env',
  [
    Sokoban(max_solution=3),
    Sokoban(min_solution=8),
    Sokoban(dim=(8, 8), num_boxes=2, search_depth=30, min_solution=8, max_solution=10),
  ],
  ids=['easy', 'hard', 'two'],
)
@pytest.mark.exhaustive_cases('two', 'hard')
def test_more_bounds(env):
  length = check_levels(env, 1_000)
  assert (length >= env.min_solution).all() and (not env.max_solution or (length <= env.max_solution).all())


@pytest.mark.slow
def test_bounds_that_no_room_keeps(monkeypatch):
  monkeypatch.setattr(sokoban_levels, 'MAX_ATTEMPTS', 3)
  env = Sokoban(dim=(5, 5), min_solution=60)
  length = check_levels(env, 50)
  assert (length < 60).all()


@pytest.mark.parametrize(
  'env', [SMALL, LARGE, Sokoban(dim=(5, 5), num_boxes=2), Sokoban(dim=(10, 10), num_boxes=16)], ids=lambda env: env.dim
)
def test_the_fixed_level(env):
  level = jax.tree.map(np.asarray, sokoban_levels.fixed_level(env.dim, env.num_boxes, env.search_depth))
  state = env.from_text(render_level(level))
  assert not state.done
  after, _ = played(env, batch(state), level.solution[level.solution >= 0][:, None])
  assert after.success[-1].all()


def test_the_fixed_level_is_what_is_left_when_all_rooms_fail(monkeypatch):
  def room(bits, dim):
    return jnp.zeros(dim, bool).at[1, 1].set(True).at[4, 1:5].set(True)

  def shut_in(bits, floor):
    return jnp.array([26]), jnp.int32(7), jnp.bool_(True)

  monkeypatch.setattr(sokoban_levels, '_carve_room', room)
  monkeypatch.setattr(sokoban_levels, '_place', shut_in)
  state = jax.tree.map(np.asarray, SMALL.reset(jax.random.key(0)))
  assert SMALL.render(batch(state)) == ['######\n#OXP_#\n#____#\n#____#\n#____#\n######']
  assert not state.done and not state.success


@pytest.mark.slow
def test_same_key_same_level():
  keys = jax.random.split(jax.random.key(0), 500)
  levels = generate(SMALL, 500)
  reset = jax.jit(SMALL.reset)
  state = jax.tree.map(np.asarray, reset(keys[7]))
  for field in ('walls', 'targets', 'boxes', 'player'):
    assert (getattr(state, field) == getattr(levels, field)[7]).all()
  assert not state.done and not state.success and state.steps == 0
  # On every machine, and with every release of JAX.
  states = batch(*(reset(jax.random.key(seed)) for seed in (0, 2)))
  assert SMALL.render(states) == [
    '######\n#____#\n#___O#\n#PX__#\n#____#\n######',
    '######\n#__O##\n#___##\n#_X###\n#P_###\n######',
  ]
  assert SMALL.render(fresh(SMALL, 500)) != SMALL.render(fresh(SMALL, 500, seed=1))
