"""Sudoku against the rules written a second time; its actions, text, pictures and hints."""

from __future__ import annotations

import itertools
import re

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ragen_jax.envs import sudoku
from ragen_jax.envs.base import Budget
from ragen_jax.envs.sudoku import Sudoku
from tests.support.environments import batch, check_text_round_trip, one, raises_one_line, step
from tests.support.games.sudoku import LARGE, SMALL, TEXT, Game, as_dict, make_levels, seen_cells, seen_from

# -- rewards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'env', [SMALL, Sudoku(empty_cells=10, legal_reward=0.5), Sudoku(side=9, empty_cells=50, legal_reward=0.25)]
)
def test_play_is_that_of_the_rules(env):
  n, rng = 16, np.random.default_rng(0)
  # The reward of wrong digits changes no level.
  states = make_levels(SMALL if env.side == 4 else LARGE, 256 if env.side == 4 else 40)
  states = jax.tree.map(lambda leaf: leaf[:n], states)
  games = [Game(states.solution[i], states.board[i], env.legal_reward) for i in range(n)]
  seen = set()
  for t in range(60):
    actions = rng.integers(0, env.side + 2, (n, 3))
    for i in range(0, n, 2):
      # Half of the levels are played by someone who often knows, so that some are completed.
      row, col = np.argwhere(states.board[i] == 0)[0] if (states.board[i] == 0).any() else (0, 0)
      actions[i] = row + 1, col + 1, states.solution[i, row, col] if t % 3 else actions[i, 2]
    states, out = step(env, states, actions)
    for i, game in enumerate(games):
      reward, written = game.play(*actions[i].tolist())
      assert out.reward[i] == pytest.approx(reward) and bool(out.effective[i]) == written
      assert as_dict(states.board[i]) == game.board
      assert bool(states.done[i]) == bool(states.success[i]) == game.done
      seen.add((round(reward, 2), written))
  # Only the small boards are completed.
  assert seen == {(-0.1, False), (1, True), (env.legal_reward, False)} | (
    {(11, True), (0, False)} if env.side == 4 else set()
  )


def test_rewards_by_hand():
  env, state = Sudoku(legal_reward=0.5, hints=False), batch(Sudoku().from_text(TEXT))
  trace = [
    ((1, 2, 2), 0.5, False),  # no 2 in its row, column and box
    ((1, 2, 2), -0.1, False),  # the same again
    ((1, 2, 1), -0.1, False),  # there is a 1 in the row
    ((1, 2, 4), -0.1, False),  # there is a 4 in the column
    ((1, 2, 3), 1, True),  # the solution's digit
    ((1, 2, 3), -0.1, False),  # into a filled cell
    ((1, 1, 4), -0.1, False),  # into a given cell
    ((2, 4, 4), 0.5, False),
    ((1, 3, 2), 1, True),
    ((2, 4, 2), -0.1, False),  # there is a 2 in the box
    ((4, 3, 1), 0.5, False),
    ((0, 0, 0), -0.1, False),
    ((1, 4, 5), -0.1, False),
    ((5, 1, 1), -0.1, False),
  ]
  for action, reward, written in trace:
    state, out = step(env, state, [action])
    assert (float(out.reward[0]), bool(out.effective[0])) == (pytest.approx(reward), written), action
  want = '[1] 3 | 2  .\n .  . |[3] .\n------+------\n . [4]| .  .\n .  . | . [2]\n'
  assert env.render(state) == [want + 'Wrong: row 2 col 4 is not 2, 4; row 4 col 3 is not 1']
  rest = [(1, 4, 4), (2, 1, 4), (2, 2, 2), (2, 4, 1), (3, 1, 2), (3, 3, 1), (3, 4, 3), (4, 1, 3), (4, 2, 1), (4, 3, 4)]
  for action in rest:
    assert not state.done[0]
    state, out = step(env, state, [action])
    assert float(out.reward[0]) == (11 if action == rest[-1] else 1)
  assert state.done[0] and state.success[0] and not state.wrong.any()
  assert env.render(state) == ['[1] 3 | 2  4\n 4  2 |[3] 1\n------+------\n 2 [4]| 1  3\n 3  1 | 4 [2]']
  for action in ((1, 1, 1), (4, 3, 4), (0, 0, 0)):
    after, out = step(env, state, [action])
    assert not out.reward[0] and not out.effective[0]
    jax.tree.map(np.testing.assert_array_equal, after, state)


@pytest.mark.parametrize('env', [SMALL, LARGE], ids=['4', '9'])
def test_to_try_is_better_than_to_wait(env):
  """The mean reward of a random digit in an empty cell, below what the last cell adds, is above 0."""
  mean = (sudoku.RIGHT_REWARD + (env.side - 1) * sudoku.WRONG_REWARD) / env.side
  state = one(make_levels(env, 40))
  row, col = np.argwhere(state.board == 0)[0].tolist()
  states = jax.tree.map(lambda leaf: np.repeat(leaf[None], env.side, axis=0), state)
  _, out = step(env, states, [(row + 1, col + 1, digit) for digit in range(1, env.side + 1)])
  assert out.reward.mean() == pytest.approx(mean, abs=1e-6) and mean > 0


# -- actions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('text', 'action'),
  [
    ('place 5 at row 2 col 3', (2, 3, 5)),
    (' PLACE 5 at Row 2, Column 3. ', (2, 3, 5)),
    ('put 5 in row 2 col 3', (2, 3, 5)),
    ('5 at row 2 col 3', (2, 3, 5)),
    ('2,3,5', (2, 3, 5)),
    ('( 2 , 3,5 )', (2, 3, 5)),
    ('place5atrow2col3', (2, 3, 5)),
    ('place 0 at row 2 col 3', None),
    ('place 5 at row 10 col 3', None),
    ('place 5 at row 2', None),
    ('place 5 at col 3 row 2', None),
    ('2,3', None),
    ('2,3,5,1', None),
    ('2 3 5', None),
    ('-2,3,5', None),
    ('2,3,5.0', None),
    ('2,3,\u0665', None),
    ('', None),
  ],
)
def test_what_is_an_action(text, action):
  assert LARGE.parse_action(text) == action
  assert SMALL.parse_action(text) is None


@pytest.mark.parametrize('env', [SMALL, LARGE], ids=['4', '9'])
def test_actions_are_read_as_they_are_written(env):
  for action in itertools.product(range(1, env.side + 1), repeat=3):
    assert env.parse_action(env.format_action(action)) == action
    assert env.parse_action(env.format_action(np.array(action)).upper()) == action
    assert env.parse_action(f'{action}') == action
  assert all(env.parse_action(quoted) == (1, 2, 3) for quoted in re.findall('"(.*?)"', env.action_help))
  assert env.action_shape == (3,) and env.action_names == ()


@settings(max_examples=300, deadline=None)
@example('9' * 5000 + ',1,1')
@given(st.one_of(st.text(), st.text('place atrowcl,.()0123456789 ', max_size=30)))
def test_texts_that_are_no_action_never_raise(text):
  action = SMALL.parse_action(text)
  numbers = [int(digits) for digits in re.findall('[0-9]+', text[:40])]
  if action is not None:
    assert len(action) == 3 and set(action) <= {1, 2, 3, 4} and sorted(action) == sorted(numbers)


@settings(max_examples=200, deadline=None)
@given(
  numbers=st.tuples(*[st.integers(-3, 120)] * 3),
  blank=st.sampled_from([' ', '  ', '\t']),
  verb=st.sampled_from(['place', 'Put', 'WRITE', '']),
  comma=st.sampled_from(['', ',']),
  column=st.sampled_from(['col', 'Column']),
)
def test_sentences_of_any_numbers(numbers, blank, verb, comma, column):
  row, col, digit = numbers
  sentence = blank.join([verb, str(digit), 'at', 'row', str(row) + comma, column, str(col)])
  want = numbers if all(1 <= number <= 9 for number in numbers) else None
  assert LARGE.parse_action(sentence) == want
  assert LARGE.parse_action(f'{row},{blank}{col},{digit}{blank}') == want


def test_legal_actions():
  states, _ = step(SMALL, make_levels(SMALL, 256), np.tile([(1, 1, 1)], (256, 1)))
  for i, legal in enumerate(SMALL.legal_actions(states)):
    board = as_dict(states.board[i])
    want = {
      (r + 1, c + 1, digit)
      for (r, c), digit in itertools.product(board, range(1, 5))
      if board[r, c] == 0
      and all(board[cell] != digit for cell in seen_cells(4)[r, c])
      and not states.wrong[i, r, c, digit - 1]
    }
    assert set(legal) == want and len(legal) == len(want)


def test_random_play_stays_below():
  levels, rng = make_levels(SMALL, 256), np.random.default_rng(0)
  states = levels
  for _ in range(SMALL.empty_cells):
    legal = SMALL.legal_actions(states)
    states, _ = step(SMALL, states, [rng.choice(one) if one else (0, 0, 0) for one in legal])
  assert states.success.mean() < 0.5


# -- text and pictures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('env', [SMALL, LARGE], ids=['4', '9'])
def test_text_round_trip(env):
  states, rng = jax.tree.map(lambda leaf: leaf[:16], make_levels(env, 40)), np.random.default_rng(1)
  wrong = False
  for moves in range(25):
    wrong |= states.wrong.any()
    if moves % 8 == 0:
      check_text_round_trip(env, states)
    actions = rng.integers(1, env.side + 1, (16, 3))
    for i in range(16):
      if moves % 2 and not states.done[i]:
        row, col = rng.choice(np.argwhere(states.board[i] == 0))
        actions[i] = row + 1, col + 1, states.solution[i, row, col]
    states, _ = step(env, states, actions)
  assert wrong and states.done.any() == (env.side == 4)


def test_the_large_board_as_text():
  text = LARGE.render(make_levels(LARGE, 40))[0].splitlines()
  assert len(text) == 11 and text[3] == text[7] == '---------+---------+---------'
  assert all(re.fullmatch(r'((\[\d\]| . ){3}\|){3}', f'{line:29}|') for i, line in enumerate(text) if i not in (3, 7))


@pytest.mark.parametrize(
  ('old', 'new', 'message'),
  [
    ('\n .  . | . [2]', '', 'the board has 3 rows, must be 4'),
    ('[3] .', '[3]', 'row 2 of the board is'),
    ('[3]', '[5]', 'row 2 of the board is'),
    ('[3]', '[x]', 'row 2 of the board is'),
    ('[3]', ' . ', 'the given digits have several solutions'),
    ('[3]', '[4]', 'the given digits have no solution'),
    ('[1] . ', '[1][1]', 'the given digits have no solution'),
    ('[1] . ', '[1] 2 ', 'row 1 col 2 is 2, must be 3 or empty'),
    ('[2]', '[2]\nWrong: row 1 col 2 is not 3', 'is wrong'),
    ('[2]', '[2]\nWrong: row 1 col 1 is not 3', 'is wrong'),
    ('[2]', '[2]\nWrong: row 1 col 5 is not 3', 'is wrong'),
    ('[2]', '[2]\nWrong: row 1 col 2 is 4', 'is not of the form'),
  ],
)
def test_bad_text(old, new, message):
  assert TEXT.count(old) == 1
  with raises_one_line(message):
    Sudoku().from_text(TEXT.replace(old, new))


HINTED = (
  '[1] 3 | .  .\n 4  2 |[3] .\n------+------\n . [4]| .  .\n .  . | . [2]\n'
  'Row 1 col 3: 2 4\nRow 1 col 4: 4\nRow 2 col 4: 1\nRow 3 col 1: 2 3\nRow 3 col 3: 1\nRow 3 col 4: 1 3\n'
  'Row 4 col 1: 3\nRow 4 col 2: 1\nRow 4 col 3: 1 4'
)


def test_hints():
  env, board = Sudoku(), '\n'.join(HINTED.splitlines()[:5])
  state = env.from_text(board)
  assert env.render(batch(state)) == [HINTED]
  assert Sudoku(hints=False).render(batch(state)) == [board]
  jax.tree.map(np.testing.assert_array_equal, env.from_text(HINTED), state)
  assert '\nRow ' not in env.render(batch(env.from_text(TEXT)))[0]  # 12 cells are empty
  # What was tried in vain stays a digit that breaks no rule, and is told below.
  tried = HINTED + '\nWrong: row 1 col 3 is not 4'
  assert env.render(batch(env.from_text(tried))) == [tried]
  assert 'at most 10 empty cells' in env.rules() and 'at most 10' not in Sudoku(hints=False).rules()


@pytest.mark.parametrize('env', [Sudoku(empty_cells=11), Sudoku(side=9, empty_cells=11)], ids=['4', '9'])
def test_hints_are_the_digits_that_the_cell_does_not_see(env):
  states = make_levels(env, 64)
  empty = (states.board == 0).sum(axis=(1, 2))
  assert [('Row ' in text) for text in env.render(states)] == (empty <= 10).tolist() and (empty == 11).any()
  cells = [np.argwhere(board == 0)[0] for board in states.board]
  moves = [(r + 1, c + 1, states.solution[i, r, c]) for i, (r, c) in enumerate(cells)]
  states, _ = step(env, states, moves)
  for board, text in zip(states.board, env.render(states), strict=True):
    hints = [line for line in text.splitlines() if line.startswith('Row ')]
    want = []
    for r, c in np.argwhere(board == 0).tolist():
      seen = {int(board[cell]) for cell in seen_from(env.side, r, c)}
      digits = ' '.join(str(d) for d in range(1, env.side + 1) if d not in seen)
      want.append(f'Row {r + 1} col {c + 1}: {digits}')
    assert hints == want and len(hints) <= 10


@pytest.mark.parametrize(
  ('old', 'new'),
  [('Row 1 col 4: 4', 'Row 1 col 4: 2 4'), ('\nRow 1 col 4: 4', ''), ('col 3: 1 4', 'col 3: 1 4\nRow 4 col 4: 1')],
)
def test_hints_of_another_board_are_refused(old, new):
  assert HINTED.count(old) == 1
  with raises_one_line('the board with the hint'):
    Sudoku().from_text(HINTED.replace(old, new))


def test_text_without_blanks_at_its_ends():
  env = Sudoku()
  stripped = '\n'.join(line.strip() for line in TEXT.splitlines())
  assert env.render(batch(env.from_text(stripped))) == [TEXT]


def test_rules_and_legend():
  text = Sudoku().rules()
  assert '4 by 4' in text and '2 by 2' in text and 'earns 1 point' in text and '10 more' in text and '0.1' in text
  assert '9 by 9' in LARGE.rules() and '3 by 3' in LARGE.rules()
  assert '0.5' in Sudoku(legal_reward=0.5).rules() and '0.5' not in text
  assert set(Sudoku().legend()) == {'.', 'n', '[n]'}


def test_thoughts_are_true():
  states, rng = make_levels(LARGE, 40), np.random.default_rng(2)
  kinds = set()
  for _ in range(30):
    plans = LARGE.solve(states, Budget(60, 60, 1)).plan(states, np.full(40, 60), np.full(40, 60))
    for i, (thought, legal, plan) in enumerate(
      zip(LARGE.rationale(states), LARGE.legal_actions(states), plans, strict=True)
    ):
      (row, col, digit), numbers = plan[0], [int(number) for number in re.findall('[0-9]', thought)]
      box = {(r + 1, c + 1) for r, c in seen_cells(9)[row - 1, col - 1]}
      here = [d for r, c, d in legal if (r, c) == (row, col)]
      kind = thought.split()[0] + ' ' + thought.split()[1]
      if kind.startswith('Only'):
        assert numbers == [digit, row, col] and here == [digit]
      elif kind == 'In row':
        assert numbers == [row, col, digit] and [c for r, c, d in legal if (r, d) == (row, digit)] == [col]
      elif kind == 'In col':
        assert numbers == [col, row, digit] and [r for r, c, d in legal if (c, d) == (col, digit)] == [row]
      elif kind == 'In its':
        same = [(r, c) for r, c in box if ((r - 1) // 3, (c - 1) // 3) == ((row - 1) // 3, (col - 1) // 3)]
        assert numbers == [row, col, digit]
        assert [(r, c) for r, c, d in legal if (r, c) in same and d == digit] == [(row, col)]
      else:
        counts = [sum((r, c) == cell for r, c, _ in legal) for cell in {(r, c) for r, c, _ in legal}]
        assert numbers == [row, col, *here] and len(here) == min(counts) > 1 and digit in here
      kinds.add(kind.split()[0] if kind.startswith('Only') else kind)
      assert states.solution[i, row - 1, col - 1] == digit and states.board[i, row - 1, col - 1] == 0
    # Half of the players write the plan's digit, the others any.
    legal = LARGE.legal_actions(states)
    actions = [plan[0] if i % 2 else legal[i][rng.integers(len(legal[i]))] for i, plan in enumerate(plans)]
    states, _ = step(LARGE, states, actions)
  assert kinds >= {'Only', 'In row', 'In col', 'In its'}
  done = Sudoku().from_text('[1] 3 | 2  4\n 4  2 |[3] 1\n------+------\n 2 [4]| 1  3\n 3  1 | 4 [2]')
  assert done.done and Sudoku().rationale(batch(done)) == ['The board is complete.']


@pytest.mark.parametrize(
  ('options', 'field'),
  [
    ({'side': 6}, 'side'),
    ({'side': '4'}, 'side'),
    ({'side': 4.0}, 'side'),
    ({'empty_cells': 0}, 'empty_cells'),
    ({'empty_cells': 13}, 'empty_cells'),
    ({'side': 9, 'empty_cells': 65}, 'empty_cells'),
    ({'empty_cells': True}, 'empty_cells'),
    ({'legal_reward': 1.0}, 'legal_reward'),
    ({'legal_reward': -0.2}, 'legal_reward'),
    ({'legal_reward': float('nan')}, 'legal_reward'),
    ({'legal_reward': None}, 'legal_reward'),
    ({'hints': 1}, 'hints'),
  ],
)
def test_bad_options_are_named(options, field):
  with raises_one_line(rf'sudoku: {field}=.*; allowed: '):
    Sudoku(**options)
