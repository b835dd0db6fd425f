"""2048 against its rules written a second time in plain Python, and the odds of its new tiles."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.envs import game_2048
from ragen_jax.envs.base import Budget
from ragen_jax.envs.game_2048 import DOWN, LEFT, RIGHT, UP, Game2048
from tests.support.environments import batch, check_text_round_trip, make_levels, one, raises_one_line

BLOCK = 2048  # States of one call: every call of a test has this many, so that a program is compiled once.


@functools.partial(jax.jit, static_argnums=0)
def step(env, states, actions, seeds):
  return jax.vmap(lambda state, action, seed: env.step(state, action, jax.random.key(seed)))(states, actions, seeds)


def play(env, states, actions, seeds=None):
  seeds = np.arange(BLOCK) if seeds is None else seeds
  actions = np.broadcast_to(np.asarray(actions, np.int32), (BLOCK,))
  return jax.tree.map(np.asarray, step(env, states, actions, seeds))


def states_of(tiles):
  """States [BLOCK] with boards of tiles [n, 4, 4], repeated until there are enough."""
  boards = np.resize(np.round(np.log2(np.maximum(tiles, 1))).astype(np.int32), (BLOCK, 4, 4))
  no = np.zeros(BLOCK, bool)
  return game_2048.State(done=no, success=no, board=boards, score=np.zeros(BLOCK, np.int32))


def tiles_of(states):
  return np.where(states.board > 0, 2**states.board, 0)


# -- the rules, a second time ------------------------------------------------------------------------------------------


def push_line(line):
  """A line of tiles pushed to its front, and the sum of the tiles that were made."""
  waiting, pushed, made = [tile for tile in line if tile], [], 0
  while waiting:
    tile = waiting.pop(0)
    if waiting and waiting[0] == tile:
      tile += waiting.pop(0)
      made += tile
    pushed.append(tile)
  return pushed + [0] * (len(line) - len(pushed)), made


def push(board, action):
  """A board of tiles, a list of rows, after a move and before the new tile, and the sum of the tiles made."""
  upright = action in (UP, DOWN)
  lines = [list(line) for line in zip(*board, strict=True)] if upright else [list(row) for row in board]
  made = 0
  for i, line in enumerate(lines):
    backwards = action in (RIGHT, DOWN)
    pushed, gain = push_line(line[::-1] if backwards else line)
    lines[i] = pushed[::-1] if backwards else pushed
    made += gain
  return [list(line) for line in zip(*lines, strict=True)] if upright else lines, made


def random_boards(n, seed=0):
  """Boards of few different tiles, so that many merge; from almost empty to full."""
  rng = np.random.default_rng(seed)
  kinds, fill = rng.integers(1, 7, (n, 1, 1)), rng.choice([0.3, 0.7, 0.95, 1.0], (n, 1, 1))
  exponents = 1 + (rng.random((n, 4, 4)) * kinds).astype(int)
  boards = np.where(rng.random((n, 4, 4)) < fill, 2**exponents, 0)
  boards[:, 0, 0] = np.maximum(boards[:, 0, 0], 2)
  return boards


@pytest.mark.parametrize(
  ('line', 'want', 'made'),
  [
    ([2, 2, 2, 2], [4, 4, 0, 0], 8),
    ([2, 2, 2, 0], [4, 2, 0, 0], 4),
    ([2, 2, 4, 8], [4, 4, 8, 0], 4),
    ([4, 2, 2, 0], [4, 4, 0, 0], 4),
    ([8, 4, 2, 2], [8, 4, 4, 0], 4),
    ([2, 0, 0, 2], [4, 0, 0, 0], 4),
    ([0, 4, 0, 2], [4, 2, 0, 0], 0),
    ([4, 4, 2, 2], [8, 4, 0, 0], 12),
    ([2, 4, 2, 4], [2, 4, 2, 4], 0),
  ],
)
def test_known_lines(line, want, made):
  """Both sets of rules, on lines worked out by hand, in all four directions."""
  assert push_line(line) == (want, made)
  rows = np.zeros((4, 4), int)
  rows[1] = line
  for action, turns in ((LEFT, 0), (DOWN, 1), (RIGHT, 2), (UP, 3)):
    pushed = np.zeros((4, 4), int)
    pushed[1] = want
    states = states_of(np.rot90(rows, turns)[None])
    boards, sums = pushes(states.board)
    np.testing.assert_array_equal(2 ** boards[0, action], np.maximum(np.rot90(pushed, turns), 1))
    assert sums[0, action] == made


@jax.jit
def _pushes(boards):
  return jax.vmap(game_2048._pushed)(boards)


def pushes(boards):
  return jax.tree.map(np.asarray, _pushes(boards))


def test_moves_are_those_of_the_plain_rules():
  env = Game2048()
  boards = random_boards(BLOCK)
  states, seen = states_of(boards), set()
  for action in range(4):
    after, out = play(env, states, action)
    tiles = tiles_of(after)
    for i, board in enumerate(boards.tolist()):
      want, made = push(board, action)
      changed = want != board
      assert out.effective[i] == changed
      assert after.score[i] == made
      assert out.reward[i] == pytest.approx(0.1 * math.log2(1 + made), abs=1e-6)
      new = np.argwhere(tiles[i] != np.array(want))
      if changed:
        ((row, column),) = new
        assert want[row][column] == 0 and tiles[i][row, column] in (2, 4)
      else:
        assert len(new) == 0
      lost = all(push(tiles[i].tolist(), a)[0] == tiles[i].tolist() for a in range(4))
      assert not after.success[i] and after.done[i] == lost
      seen.add((bool(changed), made > 0, lost))
  assert len(seen) >= 5  # Moves with and without effect, merges and an end of the game.


def test_the_end_is_exact_on_full_boards():
  """Boards of two tiles in a chequered pattern with one cell changed: half of the changes leave a move, half do not."""
  chequered = np.where(np.indices((4, 4)).sum(0) % 2, 2, 4)
  boards = []
  for row, column, tile in itertools.product(range(4), range(4), (0, 2, 4, 8)):
    board = chequered.copy()
    board[row, column] = tile
    boards.append(board)
  states = states_of(np.array(boards))
  can_move = np.asarray(jax.jit(jax.vmap(game_2048._can_move))(states.board))[: len(boards)]
  legal = Game2048().legal_actions(states)[: len(boards)]
  for board, movable, actions in zip(boards, can_move, legal, strict=True):
    want = [a for a in range(4) if push(board.tolist(), a)[0] != board.tolist()]
    assert actions == want and movable == bool(want)
  assert 0 < can_move.sum() < len(boards)


def test_legal_actions_are_the_moves_that_change_something():
  env, boards = Game2048(), random_boards(BLOCK, seed=1)
  states = states_of(boards)
  want = [[a for a in range(4) if push(board, a)[0] != board] for board in boards.tolist()]
  assert env.legal_actions(states) == want
  assert env.legal_actions(states.replace(done=~states.done)) == [[]] * BLOCK


# -- chance ------------------------------------------------------------------------------------------------------------


def test_new_tiles_are_anywhere_and_seldom_a_4():
  env = Game2048()
  board = np.array([[2, 4, 8, 16], [32, 64, 0, 0], [0, 0, 2, 0], [0, 0, 0, 2]])
  want = np.array(push(board.tolist(), DOWN)[0])
  empty, counts, n = want == 0, np.zeros((4, 4)), 0
  fours = 0
  for block in range(8):
    after, _ = play(env, states_of(board[None]), DOWN, np.arange(BLOCK) + block * BLOCK)
    new = tiles_of(after) - want
    assert ((new > 0).sum((1, 2)) == 1).all() and not new[:, ~empty].any()
    counts += (new > 0).sum(0)
    fours += (new == 4).sum()
    n += BLOCK
  p = 1 / empty.sum()
  assert (np.abs(counts[empty] / n - p) < 4.5 * math.sqrt(p * (1 - p) / n)).all()
  assert abs(fours / n - 0.1) < 4 * math.sqrt(0.1 * 0.9 / n)


def test_levels():
  levels = make_levels(Game2048(), BLOCK)
  tiles = tiles_of(levels)
  assert ((tiles > 0).sum((1, 2)) == 2).all() and set(np.unique(tiles)) == {0, 2, 4}
  assert not levels.done.any() and not levels.success.any() and not levels.score.any()
  # Both tiles by the odds of a new one: each pair of cells, and the 4s.
  share = (tiles > 0).mean(0)
  assert (np.abs(share - 1 / 8) < 4.5 * math.sqrt(1 / 8 * 7 / 8 / BLOCK)).all()
  assert abs((tiles == 4).sum() / (2 * BLOCK) - 0.1) < 4 * math.sqrt(0.1 * 0.9 / (2 * BLOCK))
  again = make_levels(Game2048(), BLOCK)
  jax.tree.map(np.testing.assert_array_equal, again, levels)
  assert len(set(Game2048().render(levels))) > 300


@pytest.mark.slow
def test_jit_and_vmap_change_nothing():
  env = Game2048()
  levels = make_levels(env, BLOCK)
  after, out = play(env, levels, np.arange(BLOCK) % 4)
  for i in (0, 5, 1030, 2047):
    alone = env.reset(jax.random.key(i))
    jax.tree.map(np.testing.assert_array_equal, alone, one(levels, i))
    state, output = env.step(alone, jnp.int32(i % 4), jax.random.key(i))
    jax.tree.map(np.testing.assert_array_equal, state, one(after, i))
    assert output.effective == out.effective[i]
    # The logarithm's last bit is the compiler's business.
    np.testing.assert_allclose(output.reward, out.reward[i], rtol=3e-7)


# -- whole games -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'options', [{'goal': 32}, pytest.param({'goal': 2048, 'reward': 'raw'}, marks=pytest.mark.slow)]
)
@pytest.mark.slow_cases('options0')
@pytest.mark.exhaustive_cases('options1')
def test_games_to_the_end(options):
  """Random games are those of the plain rules, action by action, and stay as they ended."""
  env = Game2048(**options)
  rng = np.random.default_rng(0)
  states = make_levels(env, BLOCK)
  total, longest = np.zeros(BLOCK), 40 if env.goal == 32 else 120
  for turn in range(longest):
    actions = rng.integers(4, size=BLOCK)
    after, out = play(env, states, actions, np.arange(BLOCK) + turn * BLOCK)
    total += out.reward
    for i in range(0, BLOCK, 64):
      before = tiles_of(one(states, i)).tolist()
      if states.done[i]:
        continue
      want, made = push(before, actions[i])
      assert (np.array(want) != tiles_of(one(after, i))).sum() == (want != before)
      assert after.score[i] == states.score[i] + made
      won = tiles_of(one(after, i)).max() == env.goal
      assert after.success[i] == won
    over = states.done
    jax.tree.map(lambda a, b, over=over: np.testing.assert_array_equal(a[over], b[over]), after, states)
    assert not out.reward[over].any() and not out.effective[over].any()
    states = after
  assert states.done.any() and not states.done.all()
  if env.goal == 32:
    assert states.success.mean() > 0.2 and tiles_of(states).max() == 32
    assert (states.done == (tiles_of(states).max((1, 2)) == 32))[states.success].all()
  if env.reward == 'raw':
    np.testing.assert_array_equal(total, states.score)
    lost = [tiles_of(one(states, i)).tolist() for i in np.flatnonzero(states.done)]
    assert all(push(board, a)[0] == board for board in lost for a in range(4))


def test_the_goal_wins():
  env = Game2048(goal=8)
  states = states_of(np.array([[[4, 4, 0, 0]] + [[0] * 4] * 3]))
  after, out = play(env, states, RIGHT)
  assert after.done.all() and after.success.all() and (after.score == 8).all()
  np.testing.assert_allclose(out.reward, 0.1 * math.log2(9), rtol=1e-6)
  again, out = play(env, after, LEFT)
  jax.tree.map(np.testing.assert_array_equal, again, after)
  assert not out.reward.any() and not out.effective.any()
  after, _ = play(env, states, DOWN)
  assert not after.done.any()


def test_nobody_knows_the_best_play():
  env = Game2048()
  levels = jax.tree.map(lambda leaf: leaf[:3], make_levels(env, BLOCK))
  assert not env.has_solver
  best = env.optimal(levels, Budget())
  assert best.shape == (3,) and np.isnan(best).all()
  with raises_one_line('game_2048 has no solver'):
    env.solve(levels, Budget())


# -- text and pictures -------------------------------------------------------------------------------------------------


TEXT = '2 0 0 4\n0 0 8 0\n0 0 16 0\n0 0 0 1024\nLegal moves: Up, Right, Down, Left\nScore: 1234'


def test_text():
  env = Game2048()
  state = env.from_text(TEXT)
  assert env.render(batch(state)) == [TEXT]
  np.testing.assert_array_equal(tiles_of(state), [[2, 0, 0, 4], [0, 0, 8, 0], [0, 0, 16, 0], [0, 0, 0, 1024]])
  corner = env.from_text('4 2 0 0\n2 0 0 0\n0 0 0 0\n0 0 0 0\nLegal moves: Right, Down\nScore: 0')
  assert not corner.done and corner.score == 0
  lost = env.from_text('2 4 2 4\n4 2 4 2\n2 4 2 4\n4 2 4 2\nLegal moves: none\nScore: 4')
  assert lost.done and not lost.success
  won = Game2048(goal=1024).from_text(TEXT.replace('Up, Right, Down, Left', 'none'))
  assert won.done and won.success


@pytest.mark.slow
def test_text_round_trip():
  env, rng = Game2048(goal=64), np.random.default_rng(2)
  states = make_levels(env, BLOCK)
  for turn in range(60):
    states, _ = play(env, states, rng.integers(4, size=BLOCK), np.arange(BLOCK) + turn)
  assert states.success.any() and states.done.any() and not states.done.all()
  check_text_round_trip(env, one(states, np.s_[:300]))


@pytest.mark.parametrize(
  ('old', 'new', 'message'),
  [
    ('\nScore: 1234', '', '5 lines, must be'),
    ('2 0 0 4', '2 0 0', "line 1 is '2 0 0'"),
    ('0 0 8 0', '0 0 6 0', "line 2 is '0 0 6 0'"),
    ('1024', '4096', "line 4 is '0 0 0 4096', must be 4 of 0, 2, 4, 8 and so on up to 2048"),
    ('1024', '2048', "line 5 is .* must be 'Legal moves: none'"),
    ('Up, ', '', "line 5 is 'Legal moves: Right, Down, Left'"),
    ('Score: 1234', 'Score: many', 'line 6'),
    ('2 0 0 4\n0 0 8 0\n0 0 16 0\n0 0 0 1024', '\n'.join(['0 0 0 0'] * 4), 'no tile'),
  ],
)
def test_bad_text(old, new, message):
  assert old in TEXT
  with raises_one_line(message):
    Game2048().from_text(TEXT.replace(old, new))


def test_actions_and_rules():
  env = Game2048(goal=256)
  assert env.action_names == ('Up', 'Right', 'Down', 'Left')
  assert [env.parse_action(t) for t in ('up', ' Right', 'DOWN', 'left\n', 'jump', '')] == [0, 1, 2, 3, None, None]
  assert [env.parse_action(env.format_action(a)) for a in range(4)] == [0, 1, 2, 3]
  assert 'a tile of 256' in env.rules() and '0.1 * log2(1 + m) points' in env.rules()
  assert 'a tile of 2048' in Game2048().rules() and 'log2' not in Game2048(reward='raw').rules()


@pytest.mark.parametrize(
  ('field', 'value'),
  [('goal', 4), ('goal', 100), ('goal', 2**18), ('goal', 64.0), ('goal', True), ('reward', 'linear')],
)
def test_bad_options_are_named(field, value):
  with raises_one_line(rf'game_2048: {field}=.*; allowed: '):
    Game2048(**{field: value})
