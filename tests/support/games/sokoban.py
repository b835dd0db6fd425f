"""Boards of Sokoban, its rules in plain Python on text, and batches of levels that are played."""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import sokoban_levels
from ragen_jax.envs.base import Budget
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.utils.sizes import round_up
from tests.support.environments import one

UP, DOWN, LEFT, RIGHT = range(4)
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
SMALL = Sokoban()
LARGE = Sokoban(dim=(8, 8), num_boxes=2, search_depth=10)
VOCABULARY = ('W', '.', 'G', 'C', 'B', 'A', '@')
TWO_BOXES = """\
#######
#_P___#
#_X_O_#
#_√___#
#_____#
#######"""
TWO = Sokoban(dim=(6, 7), num_boxes=2)
FOUR_BOXES = """\
##########
#P_______#
#_XO_____#
#________#
#_XO_____#
#________#
#_X_O____#
#________#
#_√______#
##########"""
CORNERED = """\
######
#X___#
#__P_#
#_O__#
#____#
######"""
AMPLE = Budget(max_turns=100, max_actions=100, max_actions_per_turn=100)


# -- plain play on text: the reference ---------------------------------------------------------------------------------


def read(text):
  """Walls, targets, boxes and the player of a board in the default symbols."""
  cells = {(r, c): symbol for r, line in enumerate(text.split('\n')) for c, symbol in enumerate(line)}
  walls, targets, boxes, players = (
    {at for at, symbol in cells.items() if symbol in kinds} for kinds in ('#', 'O√S', '√X', 'PS')
  )
  (player,) = players
  return walls, targets, frozenset(boxes), player


def play(walls, boxes, player, action):
  """The boxes and the player after one action."""
  (row, col), (down, right) = player, MOVES[action]
  ahead, beyond = (row + down, col + right), (row + 2 * down, col + 2 * right)
  if ahead in walls or (ahead in boxes and (beyond in walls or beyond in boxes)):
    return boxes, player
  return (boxes - {ahead} | {beyond} if ahead in boxes else boxes), ahead


def shortest(text):
  """Moves of the shortest solution, or -1: breadth-first search forward, one position at a time."""
  walls, targets, boxes, player = read(text)
  distance = {(boxes, player): 0}
  queue = collections.deque(distance)
  while queue:
    position = queue.popleft()
    if position[0] == targets:
      return distance[position]
    for action in range(4):
      after = play(walls, *position, action)
      if after not in distance:
        distance[after] = distance[position] + 1
        queue.append(after)
  return -1


# -- batches -----------------------------------------------------------------------------------------------------------


@functools.lru_cache
def generator(env):
  depth = min(env.search_depth, env.max_steps)
  options = (env.dim, env.num_boxes, depth, env.min_solution, env.max_solution)
  return jax.jit(jax.vmap(lambda key: sokoban_levels.generate(key, *options)))


@functools.lru_cache
def generate(env, count, seed=0):
  """Levels, NumPy leaves [count, ...], in blocks of 500 so that an environment's generator compiles once."""
  keys = jax.random.split(jax.random.key(seed), round_up(count, 500))
  blocks = [jax.tree.map(np.asarray, generator(env)(keys[i : i + 500])) for i in range(0, count, 500)]
  return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:count], *blocks)


def render_level(level):
  text = np.where(level.walls, '#', np.where(level.targets, 'O', '_'))
  text = np.where(level.boxes, np.where(level.targets, '√', 'X'), text)
  text[tuple(level.player)] = 'S' if level.targets[tuple(level.player)] else 'P'
  return '\n'.join(''.join(line) for line in text)


@functools.lru_cache
def fresh(env, count, seed=0):
  """Fresh states of those levels."""
  levels = generate(env, count, seed)
  no = np.zeros(count, bool)
  example = env.from_text(render_level(one(levels, 0)))
  return type(example)(
    done=no,
    success=no,
    walls=levels.walls,
    targets=levels.targets,
    boxes=levels.boxes,
    player=levels.player,
    steps=np.zeros(count, np.int32),
  )


@functools.partial(jax.jit, static_argnums=0)
def roll(env, states, actions):
  """Plays actions [T, N] (-1 for none): the states after each and the outputs, leaves [T, N, ...]."""

  def one(states, action):
    after, out = jax.vmap(env.step, in_axes=(0, 0, None))(states, jnp.maximum(action, 0), jax.random.key(0))
    idle = action < 0
    after = jax.tree.map(lambda new, old: jnp.where(idle.reshape(-1, *[1] * (new.ndim - 1)), old, new), after, states)
    return after, (after, out)

  return jax.lax.scan(one, states, actions)[1]


def played(env, states, actions):
  """`roll`, NumPy in and out; padded to a few shapes, so that it compiles seldom."""
  length, count = np.shape(actions)
  rows = 64 if count <= 64 else round_up(count, 512)
  padded = np.full((round_up(length, 64), rows), -1, np.int32)
  padded[:length, :count] = actions
  states = jax.tree.map(lambda leaf: np.concatenate([leaf, np.repeat(leaf[:1], rows - count, axis=0)]), states)
  return jax.tree.map(lambda leaf: np.asarray(leaf)[:length, :count], roll(env, states, padded))


def random_play(env, count=64, length=40, seed=0):
  """Fresh states, random actions [T, N], states after them and outputs."""
  states = fresh(env, count)
  actions = np.random.default_rng(seed).integers(0, 4, (length, count))
  return states, actions, *played(env, states, actions)


def plan_turns(env, states, budget, disturb=0):
  """Follows the plans, with some random actions in between; the last states."""
  solution = env.solve(states, budget)
  actions_left = np.full(len(states.done), budget.max_actions)
  for turns_left in range(budget.max_turns, 0, -1):
    plans = solution.plan(states, np.full(len(states.done), turns_left), actions_left)
    for plan, done, left in zip(plans, states.done, actions_left, strict=True):
      assert len(plan) <= min(budget.max_actions_per_turn, left) and all(0 <= action < 4 for action in plan)
      assert bool(plan) == (not done and left > 0)
    actions = np.full((budget.max_actions_per_turn, len(plans)), -1)
    for i, plan in enumerate(plans):
      actions[: len(plan), i] = plan
    states = one(played(env, states, actions)[0], -1)
    actions_left -= [len(plan) for plan in plans]
  return states
