"""Sokoban: its moves, its text and pictures, its levels, and its solver, against plain play on text."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.envs import base, sokoban_levels
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.envs.sokoban_boards import BOXOBAN, TILE
from ragen_jax.envs.solvers import sokoban as sokoban_solver

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


def batch(*states):
  return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *states)


def row(states, i):
  return jax.tree.map(lambda leaf: leaf[i], states)


@functools.lru_cache
def generator(env):
  depth = min(env.search_depth, env.max_steps)
  options = (env.dim, env.num_boxes, depth, env.min_solution, env.max_solution)
  return jax.jit(jax.vmap(lambda key: sokoban_levels.generate(key, *options)))


@functools.lru_cache
def generate(env, count, seed=0):
  """Levels, NumPy leaves [count, ...], in blocks of 500 so that an environment's generator compiles once."""
  keys = jax.random.split(jax.random.key(seed), -(-count // 500) * 500)
  blocks = [jax.tree.map(np.asarray, generator(env)(keys[i : i + 500])) for i in range(0, count, 500)]
  return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:count], *blocks)


@functools.lru_cache
def fresh(env, count, seed=0):
  """Fresh states of those levels."""
  levels = generate(env, count, seed)
  no = np.zeros(count, bool)
  example = env.from_text(render_level(row(levels, 0)))
  return type(example)(
    done=no,
    success=no,
    walls=levels.walls,
    targets=levels.targets,
    boxes=levels.boxes,
    player=levels.player,
    steps=np.zeros(count, np.int32),
  )


def render_level(level):
  text = np.where(level.walls, '#', np.where(level.targets, 'O', '_'))
  text = np.where(level.boxes, np.where(level.targets, '√', 'X'), text)
  text[tuple(level.player)] = 'S' if level.targets[tuple(level.player)] else 'P'
  return '\n'.join(''.join(line) for line in text)


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
  rows = 64 if count <= 64 else -(-count // 512) * 512
  padded = np.full((-(-length // 64) * 64, rows), -1, np.int32)
  padded[:length, :count] = actions
  states = jax.tree.map(lambda leaf: np.concatenate([leaf, np.repeat(leaf[:1], rows - count, axis=0)]), states)
  return jax.tree.map(lambda leaf: np.asarray(leaf)[:length, :count], roll(env, states, padded))


def random_play(env, count=64, length=40, seed=0):
  """Fresh states, random actions [T, N], states after them and outputs."""
  states = fresh(env, count)
  actions = np.random.default_rng(seed).integers(0, 4, (length, count))
  return states, actions, *played(env, states, actions)


# -- recorded traces ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def golden(shared_dir):
  path = shared_dir / 'reference' / 'golden_env_traces.json'
  if not path.exists():
    pytest.skip(f'needs the recorded traces in {path}, which is not there')
  return json.loads(path.read_text())['sokoban']


@pytest.mark.parametrize(('config', 'env'), [('6x6_1box', SMALL), ('8x8_2box', LARGE)])
def test_recorded_traces(golden, config, env):
  assert {trace['config'] for trace in golden} == {'6x6_1box', '8x8_2box'}
  traces = [trace for trace in golden if trace['config'] == config]
  assert len(traces) == 20
  start = batch(*(env.from_text(trace['initial']) for trace in traces))
  assert env.render(start) == [trace['initial'] for trace in traces]
  assert env.solve(start, base.Budget()).length.tolist() == [trace['shortest_solution'] for trace in traces]
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
        'text': env.render(row(states, np.s_[t, i : i + 1]))[0],
        'effective': bool(outs.effective[t, i]),
        'success': bool(states.success[t, i]),
      }
      assert step == got


# -- moves -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('env', [SMALL, LARGE], ids=['small', 'large'])
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
      assert read(env.render(row(afters, np.s_[t, i : i + 1]))[0]) == (walls, targets, boxes, player)
      assert outs.reward[t, i] == pytest.approx(reward, abs=1e-6)
      assert outs.effective[t, i] == effective
      assert afters.done[t, i] == afters.success[t, i] == done


@pytest.mark.parametrize('env', [SMALL, LARGE], ids=['small', 'large'])
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
  assert SMALL.render(row(states, 2)) == SMALL.render(batch(state))
  assert outs.reward[:, 0] == pytest.approx([-0.1] * 3) and not outs.effective.any()
  assert states.steps[:, 0].tolist() == [1, 2, 3]


def test_pushing_two_boxes_in_a_row_does_nothing():
  state = TWO.from_text('#######\n#PXX__#\n#__O__#\n#__O__#\n#_____#\n#######')
  states, outs = played(TWO, batch(state), [[RIGHT]])
  assert TWO.render(row(states, 0)) == TWO.render(batch(state)) and not outs.effective.any()


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
  for start in (batch(solved), row(tired, 2)):
    for action in range(4):
      states, outs = played(short, start, [[action]])
      assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a[0] == b).all(), states, start)))
      assert outs.reward[0, 0] == 0 and not outs.effective[0, 0]


# -- text and pictures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('symbols', [SMALL.symbols, VOCABULARY], ids=['default', 'vocabulary'])
@pytest.mark.parametrize('observation', ['grid', 'grid_coord'])
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
    with pytest.raises(ValueError, match='do not tell the walls') as error:
      env.from_text(text)
    assert '\n' not in str(error.value)


def test_the_game_lasts_as_long_as_the_budget():
  env = dataclasses.replace(SMALL, max_steps=8)
  env.check_budget(base.Budget(max_turns=5, max_actions=8, max_actions_per_turn=5))
  with pytest.raises(ValueError, match='max_steps=8; allowed: at least max_actions=10') as error:
    env.check_budget(base.Budget(max_turns=5, max_actions=10, max_actions_per_turn=5))
  assert '\n' not in str(error.value)


def test_what_each_observation_shows():
  state = batch(TWO.from_text(TWO_BOXES))
  listed = 'Board size: 6 rows, 7 columns\nTargets: (2, 4)\nBoxes: (2, 2)\nBoxes on target: (3, 2)\nPlayer: (1, 2)'
  assert TWO.render(state) == [TWO_BOXES]
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


def test_picture():
  state = TWO.from_text('#######\n#_P_O_#\n#_X___#\n#_√___#\n#_____#\n#######')
  image = TWO.render_rgb(state)
  assert image.shape == (6 * TILE, 7 * TILE, 3) and image.dtype == np.uint8
  on_target = TWO.render_rgb(TWO.from_text('#######\n#_S_O_#\n#_X___#\n#_X___#\n#_____#\n#######'))

  def tile(image, r, c):
    return image[r * TILE : (r + 1) * TILE, c * TILE : (c + 1) * TILE].tobytes()

  assert tile(image, 0, 0) == tile(image, 5, 6) and tile(image, 1, 1) == tile(image, 4, 5)
  kinds = {tile(image, r, c) for r in range(6) for c in range(7)}
  assert len(kinds) == 6  # all but a player on a target
  assert tile(on_target, 1, 2) not in kinds and tile(on_target, 3, 2) == tile(image, 2, 2)


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    (CORNERED[:-7], r'level has 5 rows; dim=\(6, 6\) has 6'),
    (CORNERED.replace('#____#', '#___#'), r'row 4 has 5 columns; dim=\(6, 6\) has 6'),
    (CORNERED.replace('O', '0'), "row 3, column 2 is '0'; allowed: # _ O √ X P S"),
    (CORNERED.replace('#__P_#', '#__P__'), "row 2, column 5 is '_'; the border has to be wall"),
    (CORNERED.replace('P', '_'), 'level has 0 players; there have to be 1'),
    (CORNERED.replace('X_', 'XX'), 'level has 2 boxes; there have to be 1'),
    (CORNERED.replace('O', '_'), 'level has 0 targets; there have to be 1'),
  ],
)
def test_bad_text(text, message):
  with pytest.raises(ValueError, match=message):
    SMALL.from_text(text)


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
  with pytest.raises(ValueError, match=rf'^{field}=.*; allowed: ') as error:
    Sokoban(**options)
  assert '\n' not in str(error.value)


def test_options_from_a_config_may_be_lists():
  env = Sokoban(dim=[6, 6], symbols=list('#_O√XPS'))
  assert env == SMALL and hash(env) == hash(SMALL)


def test_boxoban_files():
  boards = [
    '#######\n#_P___#\n#_X_O_#\n#_√___#\n#_____#\n#######',
    '#######\n#_____#\n#_X_S_#\n#_X_O_#\n##____#\n#######',
  ]
  text = '\n'.join(f'; {i}\n{board}\n' for i, board in enumerate(boards))
  for symbol, theirs in zip(TWO.symbols, BOXOBAN, strict=True):
    text = text.replace(symbol, theirs)
  states = TWO.from_boxoban(text)
  assert TWO.render(states) == boards and states.player.tolist() == [[1, 2], [2, 4]]
  assert TWO.render(TWO.from_boxoban(text.replace('\n', '\r\n'))) == boards
  with pytest.raises(ValueError, match=r"level 1, row 4, column 1 is '%'; allowed: # {3}\. \* \$ @ \+"):
    TWO.from_boxoban(text.replace('##    #', '#%    #'))
  with pytest.raises(ValueError, match='level 0 has 1 boxes; there have to be 2'):
    TWO.from_boxoban(text.replace('*', '.', 1))
  with pytest.raises(ValueError, match='before the first header'):
    TWO.from_boxoban(text.removeprefix('; 0\n'))
  with pytest.raises(ValueError, match='holds no level'):
    TWO.from_boxoban('\n')


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
  assert jax.tree.map(lambda x: x.dtype, row(states, 0)) == jax.tree.map(lambda x: x.dtype, row(fresh(SMALL, 4), 0))
  assert env.solve(states, AMPLE).length.tolist() == [shortest(text) for text in env.render(states)]
  after = plan_turns(env, states, base.Budget())
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
def test_wrong_files_are_told_in_one_line(tmp_path, change, options, message):
  path = write(tmp_path, change(BOXOBAN_FILE)) if change else str(tmp_path / 'none.txt')
  with pytest.raises(ValueError, match=message) as error:
    Sokoban(levels=path, **options)
  assert str(error.value).startswith(f'levels={path!r}; allowed: ') and '\n' not in str(error.value)


def test_bounds_pass_over_levels_of_a_file_that_cannot_be_solved(tmp_path):
  cornered = write(tmp_path, BOXOBAN_FILE.replace('.$@', '.@$'))
  assert [len(Sokoban(levels=cornered, max_solution=most)._file_levels.done) for most in (0, 90)] == [3, 2]


def test_a_file_of_bytes_is_no_file_of_levels(tmp_path):
  (tmp_path / 'x').write_bytes(b'\xff\xfe; 0')
  with pytest.raises(ValueError, match=r'can be read \(no text\)'):
    Sokoban(levels=str(tmp_path / 'x'))


# -- levels ------------------------------------------------------------------------------------------------------------


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

  length = env.solve(states, base.Budget()).length
  assert (length >= 1).all() and (length <= moves).all()
  return length


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
def test_ten_thousand_levels_with_more_boxes(env):
  check_levels(env, 10_000)


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
def test_more_bounds(env):
  length = check_levels(env, 1_000)
  assert (length >= env.min_solution).all() and (not env.max_solution or (length <= env.max_solution).all())


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


# -- solver ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=['table', 'forward'])
def search(request, monkeypatch):
  """The two ways to search; boards of every size can be searched forward."""
  if request.param == 'forward':
    monkeypatch.setattr(sokoban_solver, 'MAX_TABLE', 0)
  return request.param


AMPLE = base.Budget(max_turns=100, max_actions=100, max_actions_per_turn=100)


@pytest.mark.parametrize(('env', 'count'), [(SMALL, 200), (LARGE, 10)], ids=['small', 'large'])
def test_lengths_are_those_of_a_plain_search(env, count, search):
  # Fresh levels, and positions that random play has come to, many of them lost.
  _, _, afters, _ = random_play(env, count=count)
  for states in (fresh(env, count), row(afters, 15)):
    wanted = [shortest(text) for text in env.render(states)]
    solution = env.solve(states, AMPLE)
    assert solution.length.tolist() == wanted
    assert solution.success.tolist() == [float(moves >= 0) for moves in wanted]
    assert solution.success.dtype == np.float32


def test_success_counts_the_budget(search):
  states = fresh(SMALL, 200)
  length = SMALL.solve(states, AMPLE).length
  assert {1, 3, 5} < set(length.tolist())
  for options, moves in (
    ({'max_actions': 3}, 3),
    ({'max_turns': 2, 'max_actions_per_turn': 2}, 4),
    ({'max_turns': 1, 'max_actions_per_turn': 1}, 1),
  ):
    success = SMALL.solve(states, dataclasses.replace(AMPLE, **options)).success
    assert (success == (length <= moves)).all()
  short = dataclasses.replace(SMALL, max_steps=2)
  assert (short.optimal(states, AMPLE) == (length <= 2)).all()


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
    states = row(played(env, states, actions)[0], -1)
    actions_left -= [len(plan) for plan in plans]
  return states


@pytest.mark.parametrize(('env', 'count'), [(SMALL, 200), (LARGE, 30)], ids=['small', 'large'])
def test_plans_solve_all_that_can_be_solved(env, count, search):
  states = fresh(env, count)
  budget = base.Budget(max_turns=3, max_actions=6, max_actions_per_turn=2)
  assert (plan_turns(env, states, budget).success == env.optimal(states, budget)).all()
  budget = base.Budget(max_turns=20, max_actions=50, max_actions_per_turn=5)
  after = plan_turns(env, states, budget)
  assert after.success.all()
  assert (after.steps == env.solve(states, budget).length).all()


@pytest.mark.parametrize(('env', 'count'), [(SMALL, 100), (LARGE, 30)], ids=['small', 'large'])
def test_plans_go_on_from_where_the_policy_has_strayed(env, count, search):
  start, _, afters, _ = random_play(env, count=count)
  solution = env.solve(start, AMPLE)
  strayed = row(afters, 9)
  plans = solution.plan(strayed, np.full(count, 100), np.full(count, 60))
  lengths = env.solve(strayed, AMPLE).length
  assert (lengths == -1).any() and (lengths > 0).any()
  actions = np.full((max(map(len, plans)), count), -1)
  for i, (plan, moves) in enumerate(zip(plans, lengths, strict=True)):
    assert len(plan) == moves if moves >= 0 else len(plan) >= 1
    actions[: len(plan), i] = plan
  after, outs = played(env, strayed, actions)
  assert (after.success[-1] == (lengths >= 0)).all()
  lost = (lengths == -1) & (actions[0] >= 0)
  assert outs.effective[0, lost].all()
  value = solution.value(strayed, np.full(count, 100), np.full(count, 60))
  np.testing.assert_allclose(value[lengths > 0], outs.reward.sum(axis=0)[lengths > 0], atol=1e-4)
  np.testing.assert_allclose(value[lengths < 0], -6, atol=1e-5)  # a move a turn until 60 are made
  assert (value[lengths == 0] == 0).all() and {-1, 0} < {*lengths.tolist()}


def test_plans_end_with_the_budget(search):
  states = fresh(SMALL, 4)
  solution = SMALL.solve(states, base.Budget())
  plans = solution.plan(states, np.array([0, 5, 5, 5]), np.array([5, 0, 1, 5]))
  assert plans[0] == plans[1] == [] and len(plans[2]) == 1 and plans[3]
  tired = dataclasses.replace(SMALL, max_steps=2)
  late = states.replace(steps=np.ones(4, np.int32))
  assert all(len(plan) == 1 for plan in tired.solve(states, base.Budget()).plan(late, np.full(4, 5), np.full(4, 10)))


def test_groups_and_more_than_64_rooms_keep_their_order():
  states = fresh(SMALL, 200)
  order = np.random.default_rng(0).integers(0, 200, 500)
  several = jax.tree.map(lambda leaf: leaf[order], states)
  assert (SMALL.solve(several, AMPLE).length == SMALL.solve(states, AMPLE).length[order]).all()


def test_a_player_who_is_shut_in_gets_a_legal_action(search):
  states = batch(SMALL.from_text('######\n#P####\n######\n##X_O#\n##___#\n######'))
  solution = SMALL.solve(states, base.Budget())
  assert solution.length.tolist() == [-1] and solution.success.tolist() == [0.0]
  assert solution.plan(states, np.array([5]), np.array([10])) == [[UP]]


def test_large_boards_are_searched_within_the_budget(monkeypatch):
  env = Sokoban(dim=(10, 10), num_boxes=4)
  states = batch(env.from_text(FOUR_BOXES))
  solution = env.solve(states, base.Budget(max_turns=4, max_actions=20, max_actions_per_turn=5))
  assert solution.length.tolist() == [11] and solution.success.tolist() == [1.0]
  after = plan_turns(env, states, base.Budget(max_turns=4, max_actions=20, max_actions_per_turn=5))
  assert after.success.all() and after.steps.tolist() == [11]
  assert env.solve(states, base.Budget()).success.tolist() == [0.0]
  plan = env.solve(states, base.Budget()).plan(states, np.array([1]), np.array([5]))[0]
  # Too little for all of them: it does what it can, which is the first box.
  assert plan == [DOWN, RIGHT]
  monkeypatch.setattr(sokoban_solver, 'MAX_SEARCH', 50)
  solution = env.solve(states, base.Budget(max_turns=4, max_actions=20, max_actions_per_turn=5))
  assert solution.length.tolist() == [-2] and np.isnan(solution.success).all()


def test_no_levels_at_all():
  none = jax.tree.map(lambda leaf: leaf[:0], fresh(SMALL, 4))
  solution = SMALL.solve(none, base.Budget())
  assert solution.success.shape == (0,) and solution.plan(none, np.zeros(0, int), np.zeros(0, int)) == []
