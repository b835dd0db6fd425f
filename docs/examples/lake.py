"""A small game for the agents in this folder: cross a frozen lake without stepping into its hole."""

from __future__ import annotations

import random

RULES = (
  'You are P on a frozen lake of 3 x 3 fields. Go to G, and not to H, which is a hole. '
  'You can move up, down, left and right.'
)
MOVES = {'up': (-1, 0), 'down': (1, 0), 'left': (0, -1), 'right': (0, 1)}


class Lake:
  """A game.

  Attributes:
    reward: 1 at the goal, else 0.
    over: whether the goal or the hole is reached.
  """

  def __init__(self, seed: int):
    """Begins in a corner; the seed chooses the hole."""
    self.at, self.goal = (0, 0), (2, 2)
    self.hole = random.Random(seed).choice([(0, 2), (1, 1), (2, 0)])
    self.reward, self.over = 0.0, False

  def show(self) -> str:
    """The lake as text."""
    signs = {self.goal: 'G', self.hole: 'H', self.at: 'P'}
    return '\n'.join(''.join(signs.get((row, column), '_') for column in range(3)) for row in range(3))

  def move(self, direction: str) -> str:
    """Moves the player, unless the direction is unknown or leads off the lake; returns what is seen then."""
    if self.over or direction not in MOVES:
      return 'The game is over.' if self.over else f'{direction!r} is none of {", ".join(MOVES)}.'
    row, column = (min(max(x + step, 0), 2) for x, step in zip(self.at, MOVES[direction], strict=True))
    self.at = (row, column)
    self.over = self.at in (self.goal, self.hole)
    self.reward = float(self.at == self.goal)
    return self.show() + ('\nThe game is over.' if self.over else '')
