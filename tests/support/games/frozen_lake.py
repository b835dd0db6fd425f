"""References for FrozenLake: Gymnasium's tables and a plain search for paths."""

from __future__ import annotations

import itertools

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

NEIGHBOURS = ((0, -1), (1, 0), (0, 1), (-1, 0))  # Left, Down, Right, Up as (row, column)
VARIANTS = (
  {},
  {'size': 5, 'p': 0.6},
  {'success_rate': 0.8},
  {'success_rate': 0.0},
  {'success_rate': 1.0},
  {'is_slippery': False},
  {'is_slippery': False, 'success_rate': 0.5, 'size': 3},
)


def desc_of(state):
  board = np.where(np.asarray(state.holes), 'H', 'F').reshape(-1)
  board[int(state.start)], board[int(state.goal)] = 'S', 'G'
  return [''.join(row) for row in board.reshape(state.holes.shape)]


def distances(holes, goal):
  """Steps to the goal over ice from each square, by breadth-first search; squares that are cut off are left out."""
  size = len(holes)
  steps, queue = {int(goal): 0}, [int(goal)]
  for square in queue:
    for dr, dc in NEIGHBOURS:
      row, column = square // size + dr, square % size + dc
      there = row * size + column
      if 0 <= row < size and 0 <= column < size and not holes[row, column] and there not in steps:
        steps[there] = steps[square] + 1
        queue.append(there)
  return steps


def gymnasium_table(env, state):
  """Transition probabilities, rewards and terminations of Gymnasium's environment on the same map."""
  reference = FrozenLakeEnv(desc=desc_of(state), is_slippery=env.is_slippery, success_rate=env.success_rate)
  squares = env.size**2
  chance, reward, ended = np.zeros((squares, 4, squares)), np.zeros(squares), np.zeros(squares, bool)
  for square, action in itertools.product(range(squares), range(4)):
    for probability, there, gain, done in reference.P[square][action]:
      chance[square, action, there] += probability
      if there != square:
        reward[there], ended[there] = gain, done
  return chance, reward, ended
