"""The 2 x 2 x 2 cube against stickers that turn in space, its levels, text and pictures."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ragen_jax.envs.base import Budget
from ragen_jax.envs.rubik import Rubik2x2
from tests.support.environments import check_text_round_trip, make_levels, one, raises_one_line
from tests.support.games.rubik import (
  NAMES,
  WHOLE,
  after_turns,
  cubes,
  is_solved,
  modulo_rotation,
  moved,
  near,
  orientations,
  step,
  turned,
)

SOLVED = ('U: W W / W W', 'D: Y Y / Y Y', 'L: O O / O O', 'R: R R / R R', 'F: G G / G G', 'B: B B / B B')


# -- turns -------------------------------------------------------------------------------------------------------------


def test_turns_are_those_of_a_cube_in_space():
  n, rng = 24, np.random.default_rng(0)
  states = cubes([WHOLE] * n).replace(done=np.zeros(n, bool), success=np.zeros(n, bool))
  plain = [WHOLE] * n
  for t in range(50):
    actions = (np.arange(n) + t) % 12 if t < 3 else rng.integers(0, 12, n)
    states, out = step(states, actions)
    plain = [turned(cube, NAMES[a]) for cube, a in zip(plain, actions, strict=True)]
    assert [tuple(cube) for cube in states.stickers.tolist()] == plain
    solved = np.array([is_solved(cube) for cube in plain])
    np.testing.assert_array_equal(states.done, solved)
    np.testing.assert_array_equal(states.success, solved)
    np.testing.assert_array_equal(out.reward, solved)
    assert out.effective.all()
    states = states.replace(done=np.zeros(n, bool))  # to go on with the solved ones


@pytest.mark.parametrize(
  ('sequence', 'order'),
  [("R U R' U'", 6), ('R U', 15), ("U D'", 4), ("R L' U D'", 3), ("R' D' R D", 6), ('U D', 4), ("F R U R' U' F'", 6)],
)
def test_orders_of_known_sequences(sequence, order):
  """How often a sequence is to be repeated until every sticker is back; the count is also that of the plain cube."""
  actions = [Rubik2x2().parse_action(name) for name in sequence.split()]
  states, plain, back = cubes([WHOLE]), WHOLE, []
  for _ in range(order):
    for action in actions:
      states, _ = step(states.replace(done=np.zeros(1, bool)), [action])
    plain = after_turns(plain, sequence)
    assert tuple(states.stickers[0].tolist()) == plain
    back.append(plain == WHOLE)
  assert back == [False] * (order - 1) + [True]


def test_solved_cubes_absorb_in_every_orientation():
  states = cubes([moved(WHOLE, to) for to in orientations()])
  assert states.done.all()
  for action in range(12):
    after, out = step(states, np.full(24, action))
    assert not out.reward.any() and not out.effective.any()
    jax.tree.map(np.testing.assert_array_equal, after, states)


# -- levels ------------------------------------------------------------------------------------------------------------


def scrambles(depth):
  """The cubes of all scrambles that do not undo a turn by the next, and are not solved."""
  found = [(WHOLE, None)]
  for _ in range(depth):
    found = [
      (turned(cube, name), name)
      for cube, last in found
      for name in NAMES
      if last is None or not is_solved(after_turns(WHOLE, f'{last} {name}'))
    ]
  return [cube for cube, _ in found if not is_solved(cube)]


@pytest.mark.parametrize('depth', [1, 2, 3, 4])
@pytest.mark.slow_cases('4', '3')
def test_scrambles_are_all_sequences_and_equally_likely(depth):
  n = 20_000
  levels = make_levels(Rubik2x2(scramble_depth=depth), n)
  assert not levels.done.any() and not levels.success.any()
  want = [''.join(map(str, cube)) for cube in scrambles(depth)]
  # Four equal twists are a whole turn of each of the 3 axes, by either of 2 faces each time, in 2 directions.
  assert len(want) == 12 * 10 ** (depth - 1) - (96 if depth == 4 else 0)
  got = [''.join(map(str, cube)) for cube in levels.stickers.tolist()]
  assert set(got) <= set(want)
  if depth == 4:  # too many to count each: by their distances
    want, got = ([near()[modulo_rotation(tuple(map(int, cube)))] for cube in some] for some in (want, got))
  kinds, counts = np.unique(want, return_counts=True)
  expected = n * counts / len(want)
  observed = dict(zip(*np.unique(got, return_counts=True), strict=True))
  assert all(abs(observed[kind] - e) < 5.5 * np.sqrt(e) for kind, e in zip(kinds, expected, strict=True))


@pytest.mark.slow
def test_levels_at_an_exact_distance_are_equally_likely():
  n = 40_000
  env = Rubik2x2(scramble_depth=3, exact_distance=True)
  levels = make_levels(env, n)
  assert not levels.done.any() and not levels.success.any()
  found, counts = np.unique(levels.stickers, axis=0, return_counts=True)
  positions = {}
  for cube, count in zip(found.tolist(), counts.tolist(), strict=True):
    positions.setdefault(modulo_rotation(tuple(cube)), []).append(count)
  assert set(positions) == {key for key, d in near().items() if d == 3}
  # 120 positions, each in 24 orientations.
  assert {len(held) for held in positions.values()} == {24}
  expected = n / len(found)
  assert abs(counts - expected).max() < 6 * np.sqrt(expected)
  for depth in (1, 7, 14):
    levels = make_levels(Rubik2x2(scramble_depth=depth, exact_distance=True), 2000)
    assert set(env.distance(levels).tolist()) == {depth}


def test_same_key_same_level():
  env = Rubik2x2(scramble_depth=14)
  levels, again = make_levels(env, 50), make_levels(env, 100)
  np.testing.assert_array_equal(levels.stickers, again.stickers[:50])
  alone = jax.tree.map(np.asarray, jax.jit(env.reset)(jax.random.key(3)))
  jax.tree.map(np.testing.assert_array_equal, alone, one(levels, 3))
  assert len(set(env.render(again))) == 100


# -- text and pictures -------------------------------------------------------------------------------------------------


def test_text():
  env = Rubik2x2()
  assert env.render(cubes([WHOLE])) == ['\n'.join(SOLVED)]
  up = 'U: W W / W W\nD: Y Y / Y Y\nL: G G / O O\nR: B B / R R\nF: R R / G G\nB: O O / B B'
  assert env.render(cubes([turned(WHOLE, 'U')])) == [up]
  right = 'U: W G / W G\nD: Y B / Y B\nL: O O / O O\nR: R R / R R\nF: G Y / G Y\nB: W B / W B'
  assert env.render(step(cubes([WHOLE]).replace(done=np.zeros(1, bool)), [env.parse_action('R')])[0]) == [right]


def test_text_round_trip():
  for env in (Rubik2x2(scramble_depth=14), Rubik2x2(scramble_depth=3, exact_distance=True)):
    check_text_round_trip(env, make_levels(env, 100))
  solved = Rubik2x2().from_text('\n'.join(SOLVED))
  assert solved.done and solved.success


@pytest.mark.parametrize(
  ('lines', 'message'),
  [
    ({5: None}, 'the text has 5 lines, must be 6'),
    ({0: 'U: W W W W'}, "'U: W W W W' must be like"),
    ({0: 'U: W W / W X'}, 'with the letters WYORGB'),
    ({2: 'R: O O / O O'}, 'must be like "L: '),
    ({0: 'U: W W / W Y'}, 'not those of the 8 corners'),
    ({4: 'F: B G / G G'}, 'not those of the 8 corners'),
    # The corner of U, R and F twisted in its place, and then in a mirror.
    ({0: 'U: W W / W R', 3: 'R: G R / R R', 4: 'F: G W / G G'}, 'one of its corners is twisted'),
    ({0: 'U: W W / W R', 3: 'R: W R / R R', 4: 'F: G G / G G'}, 'not those of the 8 corners'),
  ],
)
def test_bad_text(lines, message):
  text = '\n'.join(line for line in (dict(enumerate(SOLVED)) | lines).values() if line is not None)
  with raises_one_line(message):
    Rubik2x2().from_text(text)


def test_actions_are_read_as_they_are_written():
  env = Rubik2x2()
  assert NAMES == ('U', "U'", 'D', "D'", 'L', "L'", 'R', "R'", 'F', "F'", 'B', "B'")
  for action in range(12):
    assert env.parse_action(env.format_action(action)) == action
    assert env.parse_action(f' {env.format_action(action).lower()}\n') == action
  assert env.parse_action('U\u2019') == env.parse_action('u \u2032') == env.parse_action("U'") == 1
  for text in ('', "'", 'U2', "U''", 'UU', 'Up', 'M', 'W', "'U"):
    assert env.parse_action(text) is None


def test_rules_and_legend():
  env = Rubik2x2()
  assert all(word in env.rules() for word in ('2 x 2 x 2', "U'", 'clockwise', '1 point', 'U with B above it'))
  assert env.legend() == {'W': 'white', 'Y': 'yellow', 'O': 'orange', 'R': 'red', 'G': 'green', 'B': 'blue'}


def test_thoughts_are_true():
  names = set()
  states = jax.tree.map(lambda *x: np.concatenate(x), *(make_levels(Rubik2x2(scramble_depth=d), 30) for d in (1, 2, 4)))
  plans = Rubik2x2().solve(states, Budget()).plan(states, np.full(90, 5), np.full(90, 10))
  for cube, thought, plan in zip(
    map(tuple, states.stickers.tolist()), Rubik2x2().rationale(states), plans, strict=True
  ):
    faces = [face for i, face in enumerate('UDLRFB') if len(set(cube[4 * i : 4 * i + 4])) == 1]
    first, second = thought.split('. ')
    assert first == (f'Faces of one colour: {", ".join(faces)}' if faces else 'No face has one colour')
    if near()[modulo_rotation(cube)] == 1:
      assert second == f'{NAMES[plan[0]]} solves the cube.' and is_solved(turned(cube, NAMES[plan[0]]))
    else:
      assert second == 'It takes more than one turn.'
    names.add(second)
  assert len(names) > 3
  assert Rubik2x2().rationale(cubes([WHOLE])) == ['Faces of one colour: U, D, L, R, F, B. The cube is solved.']


# -- budgets and options -----------------------------------------------------------------------------------------------


def test_random_play_stays_below():
  env, rng = Rubik2x2(scramble_depth=2), np.random.default_rng(0)
  states = make_levels(env, 500)
  assert env.optimal(states, Budget(5, 5, 1)).all()
  assert env.legal_actions(states)[0] == list(range(12))
  for _ in range(5):
    states, _ = step(states, rng.integers(0, 12, 500))
  assert 0 < states.success.mean() < 0.2


def test_budgets_that_solve_no_level_are_refused():
  env = Rubik2x2(scramble_depth=6, exact_distance=True)
  env.check_budget(Budget(2, 6, 3))
  Rubik2x2(scramble_depth=6).check_budget(Budget(2, 5, 3))
  for budget in (Budget(2, 5, 3), Budget(5, 10, 1)):
    with raises_one_line('scramble_depth=6; allowed: at most 5 with exact_distance=True'):
      env.check_budget(budget)


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('scramble_depth', 0),
    ('scramble_depth', 15),
    ('scramble_depth', 2.0),
    ('scramble_depth', True),
    ('exact_distance', 1),
    ('exact_distance', 'yes'),
  ],
)
def test_bad_options_are_named(field, value):
  with raises_one_line(rf'rubik_2x2: {field}=.*; allowed: '):
    Rubik2x2(**{field: value})
