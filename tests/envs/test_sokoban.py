"""Sokoban against recorded traces and plain play on text; its text, pictures and files of levels."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from ragen_jax.envs.base import Budget
from ragen_jax.envs.sokoban import Sokoban
from tests.support.environments import batch, one, raises_one_line
from tests.support.games.sokoban import (
  AMPLE,
  CORNERED,
  DOWN,
  LARGE,
  LEFT,
  RIGHT,
  SMALL,
  TWO,
  TWO_BOXES,
  UP,
  VOCABULARY,
  fresh,
  plan_turns,
  play,
  played,
  random_play,
  read,
  shortest,
)


@pytest.mark.parametrize(('config', 'env'), [('6x6_1box', SMALL), ('8x8_2box', LARGE)])
def test_recorded_traces(golden, config, env):
  assert {trace['config'] for trace in golden['sokoban']} == {'6x6_1box', '8x8_2box'}
  traces = [trace for trace in golden['sokoban'] if trace['config'] == config]
  assert len(traces) == 20
  start = batch(*(env.from_text(trace['initial']) for trace in traces))
  assert env.render(start) == [trace['initial'] for trace in traces]
  assert env.solve(start, Budget()).length.tolist() == [trace['shortest_solution'] for trace in traces]
  actions = np.full((max(len(trace['steps']) for trace in traces), len(traces)), -1)
  for i, trace in enumerate(traces):
    actions[: len(trace['steps']), i] = [env.parse_action(step['action']) for step in trace['steps']]
  states, outs = played(env, start, actions)
  for i, trace in enumerate(traces):
    for t, step in enumerate(trace['steps']):
      got = {
        'action': step['action'],
        'reward': pytest.approx(float(outs.reward[t, i]), rel=1e-6),
        'done': bool(states.done[t, i]),
        'text': env.render(one(states, np.s_[t, i : i + 1]))[0],
        'effective': bool(outs.effective[t, i]),
        'success': bool(states.success[t, i]),
      }
      assert step == got


# -- moves -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('env', [SMALL, LARGE], ids=['small', 'large'])
@pytest.mark.slow
def test_play_is_that_of_the_reference(env):
  states, actions, afters, outs = random_play(env)
  for i, text in enumerate(env.render(states)):
    walls, targets, boxes, player = read(text)
    done = False
    for t, action in enumerate(actions[:, i]):
      new_boxes, new_player = play(walls, boxes, player, action)
      effective = not done and (new_boxes, new_player) != (boxes, player)
      reward = 0.0 if done else -0.1 + len(new_boxes & targets) - len(boxes & targets) + 10 * (new_boxes == targets)
      if not done:
        boxes, player = new_boxes, new_player
      done = done or boxes == targets
      assert read(env.render(one(afters, np.s_[t, i : i + 1]))[0]) == (walls, targets, boxes, player)
      assert outs.reward[t, i] == pytest.approx(reward, abs=1e-6)
      assert outs.effective[t, i] == effective
      assert afters.done[t, i] == afters.success[t, i] == done


@pytest.mark.parametrize('env', [SMALL, LARGE], ids=['small', 'large'])
@pytest.mark.slow_cases('large')
def test_nothing_appears_or_vanishes(env):
  states, _, afters, _ = random_play(env)
  assert (afters.boxes.sum((2, 3)) == env.num_boxes).all()
  assert (afters.walls == states.walls).all() and (afters.targets == states.targets).all()
  rows, cols = np.moveaxis(afters.player, -1, 0)
  at = np.take_along_axis(
    np.reshape(afters.walls | afters.boxes, (*rows.shape, -1)), (rows * env.dim[1] + cols)[..., None], 2
  )
  assert not at.any()
  assert not (afters.walls & afters.boxes).any()


def test_pushing_a_box_into_a_wall_does_nothing():
  state = SMALL.from_text('######\n##XP_#\n#___O#\n#____#\n#____#\n######')
  states, outs = played(SMALL, batch(state), [[LEFT], [UP], [LEFT]])
  assert SMALL.render(one(states, 2)) == SMALL.render(batch(state))
  assert outs.reward[:, 0] == pytest.approx([-0.1] * 3) and not outs.effective.any()
  assert states.steps[:, 0].tolist() == [1, 2, 3]


def test_pushing_two_boxes_in_a_row_does_nothing():
  state = TWO.from_text('#######\n#PXX__#\n#__O__#\n#__O__#\n#_____#\n#######')
  states, outs = played(TWO, batch(state), [[RIGHT]])
  assert TWO.render(one(states, 0)) == TWO.render(batch(state)) and not outs.effective.any()


def test_rewards():
  state = TWO.from_text(TWO_BOXES)
  # Down is blocked by the lower box. Around it: off its target, and on again; then the other box.
  actions = [DOWN, LEFT, DOWN, DOWN, RIGHT, RIGHT, DOWN, RIGHT, UP, LEFT, DOWN, LEFT, LEFT, UP, UP, RIGHT, RIGHT]
  _, outs = played(TWO, batch(state), np.array(actions)[:, None])
  assert outs.reward[:5, 0] == pytest.approx([-0.1, -0.1, -0.1, -0.1, -1.1])
  assert outs.effective[:5, 0].tolist() == [False, True, True, True, True]
  back = TWO.from_text('#######\n#_____#\n#___O_#\n#__OXP#\n#__X__#\n#######')
  _, outs = played(TWO, batch(back), [[LEFT], [DOWN], [LEFT]])
  assert outs.reward[:, 0] == pytest.approx([0.9, -0.1, -0.1])
  last = TWO.from_text('#######\n#_____#\n#PXO__#\n#_√___#\n#_____#\n#######')
  states, outs = played(TWO, batch(last), [[RIGHT], [UP]])
  assert outs.reward[:, 0] == pytest.approx([10.9, 0.0])
  assert states.success.all() and states.done.all()


def test_a_box_from_target_to_target_brings_nothing():
  state = TWO.from_text('#######\n#P√O__#\n#_____#\n#__X__#\n#_____#\n#######')
  _, outs = played(TWO, batch(state), [[RIGHT]])
  assert outs.reward[0, 0] == pytest.approx(-0.1) and outs.effective[0, 0]


def test_finished_states_absorb():
  solved = SMALL.from_text('######\n#P___#\n#_√__#\n#____#\n#____#\n######')
  assert solved.done and solved.success
  short = dataclasses.replace(SMALL, max_steps=3)
  tired, _ = played(short, batch(short.from_text(CORNERED)), [[LEFT], [LEFT], [DOWN]])
  assert tired.done[:, 0].tolist() == [False, False, True] and not tired.success.any()
  for start in (batch(solved), one(tired, 2)):
    for action in range(4):
      states, outs = played(short, start, [[action]])
      assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a[0] == b).all(), states, start)))
      assert outs.reward[0, 0] == 0 and not outs.effective[0, 0]


# -- text and pictures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('symbols', [SMALL.symbols, VOCABULARY], ids=['default', 'vocabulary'])
@pytest.mark.parametrize('observation', ['grid', 'spaced', 'grid_coord'])
@pytest.mark.parametrize('env', [SMALL, LARGE], ids=['small', 'large'])
def test_text_round_trips(env, observation, symbols):
  _, _, afters, _ = random_play(env)
  states = jax.tree.map(lambda leaf: leaf[::8].reshape(-1, *leaf.shape[2:]), afters)
  variant = dataclasses.replace(env, observation=observation, symbols=symbols)
  back = batch(*(variant.from_text(text) for text in variant.render(states)))
  for field in ('walls', 'targets', 'boxes', 'player', 'done', 'success'):
    assert getattr(back, field).dtype == getattr(states, field).dtype
    assert (getattr(back, field) == getattr(states, field)).all(), field
  assert back.steps.dtype == states.steps.dtype and not back.steps.any()


def test_coordinates_alone_are_no_level():
  env = dataclasses.replace(TWO, observation='coord')
  for text in (env.render(batch(TWO.from_text(TWO_BOXES)))[0], 'Board size: 6 rows, 7 columns'):
    with raises_one_line('as the walls are missing'):
      env.from_text(text)


def test_the_game_lasts_as_long_as_the_budget():
  env = dataclasses.replace(SMALL, max_steps=8)
  env.check_budget(Budget(max_turns=5, max_actions=8, max_actions_per_turn=5))
  with raises_one_line('max_steps=8; allowed: at least max_actions=10'):
    env.check_budget(Budget(max_turns=5, max_actions=10, max_actions_per_turn=5))


def test_what_each_observation_shows():
  state = batch(TWO.from_text(TWO_BOXES))
  listed = 'Board size: 6 rows, 7 columns\nTargets: (2, 4)\nBoxes: (2, 2)\nBoxes on target: (3, 2)\nPlayer: (1, 2)'
  assert TWO.render(state) == [TWO_BOXES]
  spaced = dataclasses.replace(TWO, observation='spaced')
  assert spaced.render(state) == ['\n'.join(' '.join(line) for line in TWO_BOXES.split('\n'))]
  assert spaced.rules() == TWO.rules() and spaced.legend() == TWO.legend()
  assert dataclasses.replace(TWO, observation='coord').render(state) == [listed]
  both = f'Coordinates:\n{listed}\nGrid Map:\n{TWO_BOXES}'
  assert dataclasses.replace(TWO, observation='grid_coord').render(state) == [both]
  state = batch(TWO.from_text('#######\n#_____#\n#_X_S_#\n#_X_O_#\n#_____#\n#######'))
  assert dataclasses.replace(TWO, observation='coord').render(state) == [
    'Board size: 6 rows, 7 columns\nTargets: (3, 4)\nBoxes: (2, 2), (3, 2)\nPlayer on target: (2, 4)'
  ]


def test_legend_and_rules_are_those_of_the_configuration():
  env = dataclasses.replace(LARGE, symbols=VOCABULARY)
  assert env.legend() == {
    'W': 'wall',
    '.': 'empty floor',
    'G': 'target',
    'C': 'box on target',
    'B': 'box',
    'A': 'player',
    '@': 'player on target',
  }
  assert dict(zip(SMALL.legend(), env.legend(), strict=True))['√'] == 'C'
  assert not dataclasses.replace(env, observation='coord').legend()
  assert '8 rows' in LARGE.rules() and '2 boxes' in LARGE.rules() and '(7, 7)' not in LARGE.rules()
  assert '(7, 7)' in dataclasses.replace(LARGE, observation='grid_coord').rules()
  assert '6 rows and 7 columns' in TWO.rules() and 'the box' in SMALL.rules() and 'boxes' not in SMALL.rules()


def test_actions():
  assert [SMALL.parse_action(text) for text in ('Up', 'down', ' LEFT ', 'Right', 'Jump', '')] == [
    0,
    1,
    2,
    3,
    None,
    None,
  ]
  assert [SMALL.format_action(i) for i in range(4)] == ['Up', 'Down', 'Left', 'Right']


def test_rationale_is_true():
  def thoughts(env, text):
    return env.rationale(batch(env.from_text(text)))

  assert thoughts(SMALL, CORNERED) == ['I am at (2, 3), the box is at (1, 1), the target is at (3, 2).']
  assert thoughts(SMALL, CORNERED.replace('X', '_').replace('O', '√')) == ['The box is on the target.']
  assert thoughts(TWO, TWO_BOXES) == ['I am at (1, 2), the box left is at (2, 2), the free target is at (2, 4).']
  two_left = '#######\n#_P_X_#\n#_X_O_#\n#_O___#\n#_____#\n#######'
  assert thoughts(TWO, two_left) == [
    'I am at (1, 2), the boxes left are at (1, 4) and (2, 2), the free targets are at (2, 4) and (3, 2).'
  ]
  solved = '#######\n#_P___#\n#___√_#\n#_√___#\n#_____#\n#######'
  assert thoughts(TWO, solved) == ['All boxes are on targets.']


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'options',
  [
    {'dim': (4, 6)},
    {'dim': (6, 6, 6)},
    {'dim': 6},
    {'dim': (6, 6.5)},
    {'num_boxes': 0},
    {'num_boxes': 5},
    {'num_boxes': 1.5},
    {'num_boxes': True},
    {'max_steps': 0},
    {'search_depth': 0},
    {'min_solution': -1},
    {'min_solution': 301},
    {'max_solution': 4, 'min_solution': 5},
    {'max_solution': -1},
    {'max_solution': 8, 'dim': (10, 10), 'num_boxes': 4},
    {'observation': 'image'},
    {'symbols': 7},
    {'symbols': ('#', '_', 'O', '√', 'X', 'P')},
    {'symbols': ('#', '_', 'O', '√', 'X', 'P', 'P')},
    {'symbols': ('#', ' ', 'O', '√', 'X', 'P', 'S')},
    {'symbols': ('#', '_', 'O', '√', 'X', 'P', 'on')},
    {'symbols': ('#', '_', 'O', '√', 'X', 'P', '|')},
    {'symbols': ('#', '_', 'O', '√', 'X', 'P', '<')},
    {'symbols': ('#', '_', 'O', '√', 'X', 'P', '\x07')},
    {'levels': 7},
  ],
)
def test_bad_options(options):
  field = next(iter(options))
  with raises_one_line(rf'^{field}=.*; allowed: '):
    Sokoban(**options)


def test_options_from_a_config_may_be_lists():
  env = Sokoban(dim=[6, 6], symbols=list('#_O√XPS'))
  assert env == SMALL and hash(env) == hash(SMALL)


# -- files of levels ---------------------------------------------------------------------------------------------------


BOXOBAN_FILE = """\
; 0
######
#@   #
# $ .#
#    #
#    #
######

; 1
#####
#.$@#
#   #
#   #
#####

; 2
######
#.   #
# $  #
#  @ #
#    #
######
"""


def write(directory, text, name='levels.txt'):
  path = directory / name
  path.write_text(text)
  return str(path)


def test_levels_of_a_file_are_played(tmp_path):
  env = Sokoban(levels=write(tmp_path, BOXOBAN_FILE))
  boards = [
    '######\n#P___#\n#_X_O#\n#____#\n#____#\n######',
    # Filled up with wall.
    '######\n#OXP##\n#___##\n#___##\n######\n######',
    '######\n#O___#\n#_X__#\n#__P_#\n#____#\n######',
  ]
  seeds = np.array([0, 1, 2, 3, 10_000, 2**32 - 1], np.uint32)
  states = jax.tree.map(np.asarray, jax.jit(jax.vmap(lambda seed: env.reset(jax.random.key(seed))))(seeds))
  assert env.render(states) == [boards[seed % 3] for seed in seeds.tolist()]
  assert not states.done.any() and not states.steps.any()
  # They are states like those of made levels, and are solved like them.
  assert jax.tree.map(lambda x: x.dtype, one(states, 0)) == jax.tree.map(lambda x: x.dtype, one(fresh(SMALL, 4), 0))
  assert env.solve(states, AMPLE).length.tolist() == [shortest(text) for text in env.render(states)]
  after = plan_turns(env, states, Budget())
  assert after.success.all()
  # Difficulty chooses among them.
  lengths = [shortest(board) for board in boards]
  assert lengths[1] == 1 and max(lengths) == lengths[2]
  hard = dataclasses.replace(env, min_solution=lengths[2])
  easy = dataclasses.replace(env, max_solution=lengths[2] - 1)
  assert hard.render(batch(*(hard.reset(jax.random.key(seed)) for seed in range(3)))) == [boards[2]] * 3
  assert easy.render(batch(*(easy.reset(jax.random.key(seed)) for seed in range(3)))) == [*boards[:2], boards[0]]


def test_levels_of_a_file_in_other_symbols(tmp_path):
  env = Sokoban(levels=write(tmp_path, BOXOBAN_FILE), symbols=VOCABULARY)
  first = env.render(batch(env.reset(jax.random.key(0))))[0]
  assert first == 'WWWWWW\nWA...W\nW.B.GW\nW....W\nW....W\nWWWWWW'


@pytest.mark.parametrize(
  ('change', 'options', 'message'),
  [
    (None, {}, r'a file of levels that can be read \(No such file'),
    (lambda text: '', {}, 'levels that fit, but the text holds no level'),
    (lambda text: text + '; 3\n', {}, 'levels that fit, but level 3 has no board'),
    (lambda text: text, {'dim': (5, 5)}, r'level 0 has 6 rows; dim=\(5, 5\) has 5'),
    (lambda text: text, {'num_boxes': 2}, 'level 0 has 1 boxes; there have to be 2'),
    (lambda text: text.replace('#   #', '#  #', 1), {}, 'level 1, row 2 has 4 columns; row 0 has 5'),
    (lambda text: text.replace('#   #', '#    ', 1), {}, "level 1, row 2, column 4 is ' '; the border has to be wall"),
    (lambda text: text.replace('$ .', ' *$'), {}, 'level 0 has 2 boxes'),
    (lambda text: text.replace('$ .', ' * '), {}, 'number 1 is solved already'),
    (lambda text: text, {'min_solution': 50}, r'within min_solution=50 and max_solution=0, but .* 1 to \d+ moves'),
  ],
)
def test_wrong_files_are_named_in_one_line(tmp_path, change, options, message):
  path = write(tmp_path, change(BOXOBAN_FILE)) if change else str(tmp_path / 'none.txt')
  with raises_one_line(message) as error:
    Sokoban(levels=path, **options)
  assert str(error.value).startswith(f'levels={path!r}; allowed: ')


def test_bounds_pass_over_levels_of_a_file_that_cannot_be_solved(tmp_path):
  cornered = write(tmp_path, BOXOBAN_FILE.replace('.$@', '.@$'))
  assert [len(Sokoban(levels=cornered, max_solution=most)._file_levels.done) for most in (0, 90)] == [3, 2]


def test_a_file_of_bytes_is_no_file_of_levels(tmp_path):
  (tmp_path / 'x').write_bytes(b'\xff\xfe; 0')
  with raises_one_line(r'can be read \(no text\)'):
    Sokoban(levels=str(tmp_path / 'x'))
