"""Environments by their type in the config, and levels from text files."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax import envs as registry
from tests.support.environments import batch, make_levels, raises_one_line
from tests.support.text_games import GAMES, Own, make


def test_a_class_of_one_s_own_may_be_the_type():
  env = registry.make(f'{GAMES}:Own', {'task': 'do it'})
  assert type(env) is Own and env.rules() == 'do it'


@pytest.mark.parametrize(
  ('env_type', 'options', 'message'),
  [
    ('nowhere', {}, r"type='nowhere'; allowed: .*frozen_lake.*python.*'package\.module:ClassName'"),
    ('no_such_module_here:Game', {}, r"type='no_such_module_here:Game' cannot be imported \(ModuleNotFoundError"),
    ('json:Game', {}, r"type='json:Game' cannot be imported \(AttributeError"),
    ('json:JSONEncoder', {}, "'json:JSONEncoder' is not a subclass of Environment or TextEnvironment"),
    (f'{GAMES}:Unfinished', {}, 'Unfinished.* lacks open'),
    (f'{GAMES}:NotFrozen', {}, 'NotFrozen.* is not a frozen dataclass'),
    (f'{GAMES}:Own', {}, 'task is missing; .*Own needs task'),
    (f'{GAMES}:Own', {'tusk': 1}, r"tusk is not an option of .*; did you mean 'task'\? allowed: task"),
  ],
)
def test_wrong_types_and_options_are_named_in_one_line(env_type, options, message):
  with raises_one_line(message):
    registry.make(env_type, options)


@pytest.mark.parametrize(
  ('mistake', 'message'),
  [
    ('options', r'Wrong raised TypeError: no such board \(wrong_game.py:\d+\)'),
    ('refused', "^mistake='refused'$"),
    ('reset', r'reset raised RuntimeError: no level \(wrong_game.py:\d+\)'),
    ('dict', 'reset returned dict; allowed: a subclass of State'),
    ('branch', r'_step raised TracerBoolConversionError: .* \(wrong_game.py:\d+\)'),
    ('alone', '_step returned State; allowed: State, StepOutput'),
    ('swapped', '_step returned StepOutput, State; allowed: State, StepOutput'),
    ('rewards', r'_step returned reward of shape \(2,\); allowed: one number'),
    ('shape', r'after a step the state has int32\[3\] in n, after reset int32\[\]'),
    ('dtype', r'after a step the state has float32\[\] in n, after reset int32\[\]'),
    ('int', r'after a step the state has int32\[\] in done, after reset bool\[\]'),
  ],
)
def test_mistakes_of_a_class_in_jax_are_named_in_one_line_before_it_plays(mistake, message):
  with raises_one_line(message):
    registry.make('tests.support.wrong_game:Wrong', {'mistake': mistake})


def test_a_class_in_jax_may_return_numbers_of_python():
  env = registry.make('tests.support.wrong_game:Wrong', {})
  state, out = env.step(env.reset(jax.random.key(0)), jnp.int32(0), jax.random.key(0))
  assert state.done and out.reward == 1


# -- levels from text files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['frozen_lake', 'sokoban', 'bandit', 'countdown', 'game_2048', 'rubik_2x2', 'sudoku'])
@pytest.mark.slow_cases('sokoban', 'game_2048')
def test_a_level_is_read_from_what_the_game_draws(tmp_path, name):
  env, path = registry.make(name, {}), tmp_path / 'level.txt'
  levels = make_levels(env, 2)
  path.write_text(env.render(levels)[1] + '\n', encoding='utf-8')
  state = registry.load_level(env, path)
  assert env.render(batch(state)) == env.render(levels)[1:]
  assert jax.tree.structure(state) == jax.tree.structure(levels) and not state.done
  after, _ = env.step(state, jnp.zeros(env.action_shape, jnp.int32), jax.random.key(0))
  assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (None, r"level file '.*level\.txt' cannot be read \(No such file or directory\)"),
    (b'\xff\xfe', r"level file '.*level\.txt' is not UTF-8 text"),
    (b'P__\n__G\n___', r"level file '.*level\.txt': frozen_lake: the board has 3 rows, must be 4"),
    ('√___\n____\n____\n____'.encode(), r"level file '.*level\.txt': frozen_lake: the level is already over"),
  ],
)
def test_a_file_without_a_level_is_named_in_one_line(tmp_path, content, message):
  path = tmp_path / 'level.txt'
  if content is not None:
    path.write_bytes(content)
  with raises_one_line(message):
    registry.load_level(registry.make('frozen_lake', {}), str(path))


def test_games_outside_read_no_level(tmp_path):
  (tmp_path / 'level.txt').write_text('rung 1 of 5')
  with raises_one_line(r"level file '.*': python: levels cannot be read from text"):
    registry.load_level(make('Climb'), tmp_path / 'level.txt')


@pytest.mark.slow
def test_an_environment_with_one_level_has_it_for_every_key():
  env = registry.make('sokoban', {'dim': (7, 6)})
  levels = make_levels(env, 2)
  state = jax.tree.map(lambda x: x[1], levels)
  fixed = registry.with_level(env, state)
  drawn = jax.vmap(fixed.reset)(jax.random.split(jax.random.key(5), 3))
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, np.broadcast_to(y, x.shape)), drawn, state)
  assert fixed.dim == env.dim and fixed.rules() == env.rules() and fixed != env
  assert fixed.solve(levels, registry.Budget(max_actions=30, max_turns=10)).success.shape == (2,)
