"""What every environment answers, in JAX and outside."""

from __future__ import annotations

import types

import numpy as np
import pytest

from ragen_jax import envs
from ragen_jax.envs.base import Budget
from tests.support.environments import make_levels, raises_one_line
from tests.support.text_games import make

# Types in JAX, with an action as it is written and as it is parsed.
ACTIONS = {
  'frozen_lake': (' left ', 0, 'Left'),
  'sokoban': ('UP', 0, 'Up'),
  'bandit': ('drag on', 1, 'Dragon'),
  'countdown': ('(1+2)', (2, 3, -1, *[0] * 12), '1 + 2'),
  'game_2048': ('Down', 2, 'Down'),
  'rubik_2x2': ("u'", 1, "U'"),
  'sudoku': ('1,2,3', (1, 2, 3), 'place 3 at row 1 col 2'),
  'navigation': (' RotateLeft', 5, 'rotateleft'),
  'manipulation': ('PICK(1,-2,20)', (0, 1, -2, 20, 0, 0, 0), 'pick(1, -2, 20)'),
}


def test_every_type_in_jax_is_tested_here():
  assert {name for name, cls in envs.TYPES.items() if not cls.is_outside} == set(ACTIONS)
  outside = {name for name, cls in envs.TYPES.items() if cls.is_outside}
  assert outside == {
    'python', 'gymnasium', 'http', 'openenv', 'agent', 'dataset', 'textworld', 'alfworld', 'lean', 'webshop', 'svg',
    'verifiers', 'ai2thor', 'maniskill',
  }  # fmt: skip


@pytest.mark.parametrize('name', ACTIONS)
@pytest.mark.slow_cases('sokoban', 'navigation')
def test_games_in_jax_read_actions_and_say_what_is_best(name):
  env, (text, action, written) = envs.make(name, {}), ACTIONS[name]
  assert env.read_action(text) == (action, written) and env.read_action('no such action') is None
  assert env.has_legal_actions and not env.is_outside
  levels = make_levels(env, 2)
  assert all(env.read_action(env.format_action(a)) for legal in env.legal_actions(levels) for a in legal)
  assert len(env.rationale(levels)) == 2
  best = env.optimal(levels, Budget())
  assert best.shape == (2,) and best.dtype == np.float32
  assert np.isnan(best).all() if not env.has_solver else (best >= 0).all() and (best <= 1).all()
  assert env.has_solver == (name != 'game_2048')


@pytest.mark.parametrize(('game', 'words'), [('Climb', ['Up', 'Down']), ('Echo', [])])
def test_games_outside_answer_the_same_questions(game, words):
  env = make(game)
  rows = types.SimpleNamespace(done=np.zeros(3, bool))
  assert env.is_outside and not env.has_solver and env.has_legal_actions == bool(words)
  assert env.legal_actions(rows) == [words] * 3 and env.action_words == tuple(words)
  assert np.isnan(env.optimal(rows, Budget())).all() and env.rationale(rows) == [''] * 3
  assert env.naive_view() is env
  env.check_budget(Budget(1, 1, 1))
  for call in (lambda: env.solve(rows, Budget()), lambda: env.naive_view().solve(rows, Budget())):
    with raises_one_line('python has no solver'):
      call()
  with raises_one_line('python: levels cannot be read from text'):
    env.from_text('x')


@pytest.mark.parametrize(('budget', 'most'), [((5, 10, 5), 10), ((2, 10, 3), 6), ((3, 2, 1), 2)])
def test_the_most_actions_of_a_budget(budget, most):
  assert Budget(*budget).most_actions == most
