"""The benchmark that compares thoughts with the board, on records whose truth is known."""

from __future__ import annotations

import jax

from benchmarks import thoughts
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.sokoban import Sokoban

LAKE = '____\nP_O_\n_O__\n__GO'
TRUE = 'I am at (1, 0), the goal is at (3, 2); no hole beside me.'


def _record(*turns: tuple[str, str]) -> dict:
  return {'turns': [{'observation': board, 'pieces': list(reply)} for board, reply in turns]}


def test_statements_are_those_of_the_games_sentences():
  assert thoughts.statements(TRUE) == ['I am at (1, 0)', 'the goal is at (3, 2)', 'no hole beside me']
  for game in (FrozenLake(), Sokoban()):
    states = jax.vmap(game.reset)(jax.random.split(jax.random.key(0), 8))
    for text, true in zip(game.render(states), game.rationale(states), strict=True):
      ((known, written),) = thoughts.pairs(game, [_record((text, f'<think>{true}</think><answer>Up</answer>'))])
      assert known == written and len(known) == 3


def test_shares_are_those_of_turns_with_a_board():
  beside = LAKE.replace('P_O_', '_PO_')
  found = thoughts.pairs(
    FrozenLake(),
    [
      _record((LAKE, f'{TRUE}</think><answer>Up</answer>')),
      _record((beside, 'I am at (1, 1), the goal is at (3, 2); no hole beside me.</think>'), ('no board', TRUE)),
      _record((LAKE, TRUE)),  # no end of the thought
      _record((LAKE, TRUE.replace('(3, 2)', '(3, 1)') + '</think>')),
      _record((LAKE, 'No hole; no hole beside me; I am at (1, 0).</think>')),  # in other places
    ],
  )
  assert thoughts.shares(found) == {
    'turns': 5, 'true': 0.2, 'statements': [0.6, 0.4, 0.4],
    'said when it matters': [1.0, None, 0.0],
  }  # fmt: skip
