"""The 2 x 2 x 2 cube against stickers that turn in space, known sequences and counts, and its own play."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.envs import base, rubik, rubik_cube
from ragen_jax.envs.rubik import Rubik2x2
from ragen_jax.envs.solvers import rubik as solver

NAMES = Rubik2x2.action_names
# Positions at 0, 1, ... quarter turns from solved, modulo rotation: the known counts, 3,674,160 in all.
COUNTS = [1, 6, 27, 120, 534, 2256, 8969, 33058, 114149, 360508, 930588, 1350852, 782536, 90280, 276]
SOLVED = ('U: W W / W W', 'D: Y Y / Y Y', 'L: O O / O O', 'R: R R / R R', 'F: G G / G G', 'B: B B / B B')


@functools.partial(jax.jit, static_argnums=0)
def reset(env, seeds):
  return jax.vmap(lambda seed: env.reset(jax.random.key(seed)))(seeds)


def make_levels(env, n, first=0):
  """Levels of the keys first, first + 1, ..., in blocks of 2,000 so that an environment's reset compiles once."""
  blocks = [jax.tree.map(np.asarray, reset(env, np.arange(i, i + 2000))) for i in range(first, first + n, 2000)]
  return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:n], *blocks)


@jax.jit
def batched_step(states, actions):
  return jax.vmap(Rubik2x2().step, in_axes=(0, 0, None))(states, actions, jax.random.key(0))


def step(states, actions):
  return jax.tree.map(np.asarray, batched_step(states, jnp.asarray(actions, jnp.int32)))


def one(states, i=0):
  return jax.tree.map(lambda leaf: leaf[i], states)


def cubes(stickers):
  """Batched states [N] of lists of 24 colours."""
  stickers = np.array(stickers, np.int8)
  solved = np.array([is_solved(cube) for cube in stickers.tolist()])
  return rubik.State(done=solved, success=solved, stickers=stickers)


# -- a second implementation: stickers are points in space, each with the direction that it faces ----------------------

# Right, up and front are the directions x, y and z. For each face: where it looks, and the directions in which the
# columns and the rows of its picture run.
VIEWS = {
  'U': ((0, 1, 0), (1, 0, 0), (0, 0, 1)),
  'D': ((0, -1, 0), (1, 0, 0), (0, 0, -1)),
  'L': ((-1, 0, 0), (0, 0, 1), (0, -1, 0)),
  'R': ((1, 0, 0), (0, 0, -1), (0, -1, 0)),
  'F': ((0, 0, 1), (1, 0, 0), (0, -1, 0)),
  'B': ((0, 0, -1), (-1, 0, 0), (0, -1, 0)),
}
PLACES = [
  (tuple(n + (2 * col - 1) * c + (2 * row - 1) * r for n, c, r in zip(*view, strict=True)), view[0])
  for view in (VIEWS[face] for face in 'UDLRFB')
  for row, col in itertools.product(range(2), repeat=2)
]


def dot(a, b):
  return sum(x * y for x, y in zip(a, b, strict=True))


def clockwise(v, axis):
  """A vector after a quarter turn, clockwise for one who looks against the axis: v x axis, and what lies along it."""
  (a, b, c), (x, y, z), along = v, axis, dot(v, axis)
  return b * z - c * y + along * x, c * x - a * z + along * y, a * y - b * x + along * z


@functools.cache
def targets(axis, layers):
  """The place to which a turn takes each sticker; `layers` are those that turn, 1 next to the face, -1 opposite."""
  return tuple(
    PLACES.index((clockwise(at, axis), clockwise(facing, axis))) if dot(at, axis) in layers else i
    for i, (at, facing) in enumerate(PLACES)
  )


def moved(cube, to):
  after = [0] * 24
  for i, place in enumerate(to):
    after[place] = cube[i]
  return tuple(after)


def turned(cube, name):
  """A cube, a tuple of 24 colours, after a turn such as "U'"."""
  for _ in range(3 if name.endswith("'") else 1):
    cube = moved(cube, targets(VIEWS[name[0]][0], (1,)))
  return cube


def after_turns(cube, names):
  return functools.reduce(turned, names.split(), cube)


def is_solved(cube):
  return all(len(set(cube[i : i + 4])) == 1 for i in range(0, 24, 4))


@functools.cache
def orientations():
  """The 24 ways to hold a cube, as places to which stickers go."""
  found = [tuple(range(24))]
  for to in found:
    for face in 'UR':
      quarter = targets(VIEWS[face][0], (1, -1))
      after = tuple(quarter[place] for place in to)
      if after not in found:
        found.append(after)
  return found


def modulo_rotation(cube):
  return min(moved(cube, to) for to in orientations())


WHOLE = tuple(i // 4 for i in range(24))


@functools.cache
def near():
  """Distances of the cubes within 4 turns, each held in one way: breadth-first search over all twelve turns."""
  distance, newest = {modulo_rotation(WHOLE): 0}, [WHOLE]
  for d in range(1, 5):
    reached = {}
    for cube, name in itertools.product(newest, NAMES):
      after = turned(cube, name)
      reached.setdefault(modulo_rotation(after), after)
    newest = [cube for key, cube in reached.items() if key not in distance]
    distance.update({key: d for key in reached if key not in distance})
  return distance


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


def test_every_turn_has_order_4_and_its_inverse_beside_it():
  turns, same = rubik_cube.turn_sources(), np.arange(24)
  for i, turn in enumerate(turns):
    powers = [functools.reduce(lambda a, b: a[b], [turn] * k) for k in range(1, 5)]
    assert [np.array_equal(power, same) for power in powers] == [False, False, False, True]
    np.testing.assert_array_equal(turn[turns[i ^ 1]], same)
    assert (turn != same).sum() == 12


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


def test_rotations_are_those_of_a_cube_in_space():
  ours = {tuple(np.array(WHOLE)[rotation].tolist()) for rotation in rubik_cube.rotation_sources()}
  assert len(rubik_cube.rotation_sources()) == 24 and ours == {moved(WHOLE, to) for to in orientations()}
  assert all(is_solved(cube) for cube in ours)


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
    levels = make_levels(env, 100)
    for i, text in enumerate(env.render(levels)):
      read = env.from_text(text)
      jax.tree.map(np.testing.assert_array_equal, read, one(levels, i))
      assert jax.tree.map(lambda leaf: leaf.dtype, read) == jax.tree.map(lambda leaf: leaf.dtype, one(levels, i))
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
  with pytest.raises(ValueError, match=message) as error:
    Rubik2x2().from_text(text)
  assert '\n' not in str(error.value)


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


def test_picture():
  env, cube = Rubik2x2(), after_turns(WHOLE, "R U F' L")
  picture = env.render_rgb(one(cubes([cube])))
  assert picture.shape == (96, 128, 3) and picture.dtype == np.uint8
  colour = {}
  for (place, face), row, col in zip(
    enumerate(np.repeat(list('UDLRFB'), 4)), [0, 0, 1, 1] * 6, [0, 1] * 12, strict=True
  ):
    down, right = {'U': (0, 2), 'L': (2, 0), 'F': (2, 2), 'R': (2, 4), 'B': (2, 6), 'D': (4, 2)}[face]
    colour.setdefault(cube[place], set()).add(tuple(picture[16 * (down + row) + 8, 16 * (right + col) + 8].tolist()))
  assert sorted(colour) == list(range(6)) and all(len(seen) == 1 for seen in colour.values())
  assert len(set.union(*colour.values())) == 6
  assert tuple(picture[8, 8].tolist()) == tuple(picture[80, 120].tolist()) not in set.union(*colour.values())


# -- solver and options ------------------------------------------------------------------------------------------------


def test_counts_of_positions_by_distance():
  table = solver.distance_table(14)
  assert np.bincount(table).tolist() == COUNTS and sum(COUNTS) == 3_674_160
  assert [list(near().values()).count(d) for d in range(5)] == COUNTS[:5]
  short = solver.distance_table(5)
  np.testing.assert_array_equal(short, np.where(table <= 5, table, -1))


def test_distances_are_those_of_a_plain_search_in_every_orientation():
  rng = np.random.default_rng(0)
  held = [moved(cube, orientations()[rng.integers(24)]) for cube in near()]
  np.testing.assert_array_equal(Rubik2x2().distance(cubes(held)), list(near().values()))
  # Another turn changes the distance by one, never by none: quarter turns are odd.
  states = make_levels(Rubik2x2(scramble_depth=14), 500)
  distance = Rubik2x2().distance(states).astype(int)
  for action in range(12):
    after, _ = step(states, np.full(500, action))
    assert set(abs(Rubik2x2().distance(after).astype(int) - distance).tolist()) == {1}


def play(env, solution, states, budget):
  """Plays the plans to the end of the episode: the last states, and the actions that were taken."""
  n = len(states.done)
  left = np.full(n, budget.max_actions)
  for turn in range(budget.max_turns):
    plans = solution.plan(states, np.full(n, budget.max_turns - turn), left)
    assert all(len(plan) <= min(budget.max_actions_per_turn, m) for plan, m in zip(plans, left, strict=True))
    for k in range(budget.max_actions_per_turn):
      acts = np.array([k < len(plan) for plan in plans])
      assert not (acts & states.done).any()
      after, _ = step(states, [plan[k] if k < len(plan) else 0 for plan in plans])
      chosen = acts[:, None]
      states = rubik.State(
        done=np.where(acts, after.done, states.done),
        success=np.where(acts, after.success, states.success),
        stickers=np.where(chosen, after.stickers, states.stickers),
      )
      left = left - acts
  return states, budget.max_actions - left


@pytest.mark.parametrize(
  'budget', [base.Budget(5, 20, 5), base.Budget(2, 3, 3), base.Budget(3, 9, 1), base.Budget(1, 1, 4)]
)
def test_plans_reach_what_is_said_of_them(budget):
  levels = jax.tree.map(lambda *x: np.concatenate(x), *(make_levels(Rubik2x2(scramble_depth=d), 60) for d in (1, 2, 4)))
  env = Rubik2x2(scramble_depth=4)
  shortest = np.array([near()[modulo_rotation(tuple(cube))] for cube in levels.stickers.tolist()])
  solution = env.solve(levels, budget)
  possible = shortest <= min(budget.max_actions, budget.max_turns * budget.max_actions_per_turn)
  np.testing.assert_array_equal(solution.success, possible)
  np.testing.assert_array_equal(env.optimal(levels, budget), possible)
  value = solution.value(levels, np.full(180, budget.max_turns), np.full(180, budget.max_actions))
  np.testing.assert_array_equal(value, possible)
  assert solution.success.dtype == value.dtype == np.float32
  states, taken = play(env, solution, levels, budget)
  np.testing.assert_array_equal(states.success, possible)
  np.testing.assert_array_equal(taken[possible], shortest[possible])
  assert not solution.value(states, np.zeros(180), np.full(180, budget.max_actions)).any()


def test_deep_cubes_are_solved_from_wherever_they_are_turned_to():
  env, budget, rng = Rubik2x2(scramble_depth=14, exact_distance=True), base.Budget(8, 40, 5), np.random.default_rng(0)
  states = make_levels(env, 40)
  solution = env.solve(states, budget)
  assert solution.success.all() and not env.optimal(states, base.Budget(3, 13, 5)).any()
  for _ in range(5):
    states, _ = step(states, rng.integers(0, 12, 40))
  states, taken = play(env, solution, states, budget)
  assert states.success.all() and taken.min() >= 9 and taken.max() <= 14


def test_plans_where_success_is_out_of_reach_go_nearer():
  env = Rubik2x2(scramble_depth=4, exact_distance=True)
  levels = make_levels(env, 50)
  solution = env.solve(levels, base.Budget(5, 10, 2))
  plans = solution.plan(levels, np.ones(50), np.full(50, 10))
  assert {len(plan) for plan in plans} == {2}
  assert not solution.value(levels, np.ones(50), np.full(50, 10)).any()
  for k in range(2):
    levels, _ = step(levels, [plan[k] for plan in plans])
  assert (env.distance(levels) == 2).all()
  # Beyond the whole budget, nothing is known of the way.
  far = make_levels(env, 3)
  assert env.solve(far, base.Budget(1, 3, 3)).plan(far, np.ones(3), np.array([3, 1, 0])) == [[0], [0], []]


def test_random_play_stays_below():
  env, rng = Rubik2x2(scramble_depth=2), np.random.default_rng(0)
  states = make_levels(env, 500)
  assert env.optimal(states, base.Budget(5, 5, 1)).all()
  assert env.legal_actions(states)[0] == list(range(12))
  for _ in range(5):
    states, _ = step(states, rng.integers(0, 12, 500))
  assert 0 < states.success.mean() < 0.2


def test_plans_where_the_episode_is_over():
  env = Rubik2x2()
  levels = make_levels(env, 4)
  solution = env.solve(levels, base.Budget())
  done = levels.replace(done=np.array([True, False, False, False]))
  plans = solution.plan(done, np.array([5, 0, 5, 5]), np.array([10, 10, 0, 1]))
  assert plans[:3] == [[], [], []] and len(plans[3]) == 1
  with pytest.raises(ValueError, match='turns_left=6; allowed: at most 5'):
    solution.plan(levels, np.full(4, 6), np.full(4, 10))
  with pytest.raises(ValueError, match='actions_left=11; allowed: at most 10'):
    solution.value(levels, np.full(4, 5), np.full(4, 11))
  over = levels.replace(done=np.full(4, True), success=np.array([True, False, True, False]))
  np.testing.assert_array_equal(env.optimal(over, base.Budget()), [1, 0, 1, 0])
  none = jax.tree.map(lambda leaf: leaf[:0], levels)
  assert env.solve(none, base.Budget()).plan(none, np.zeros(0, int), np.zeros(0, int)) == []
  assert env.render(none) == env.rationale(none) == []


def test_thoughts_are_true():
  names = set()
  states = jax.tree.map(lambda *x: np.concatenate(x), *(make_levels(Rubik2x2(scramble_depth=d), 30) for d in (1, 2, 4)))
  plans = Rubik2x2().solve(states, base.Budget()).plan(states, np.full(90, 5), np.full(90, 10))
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


def test_budgets_that_solve_no_level_are_refused():
  env = Rubik2x2(scramble_depth=6, exact_distance=True)
  env.check_budget(base.Budget(2, 6, 3))
  Rubik2x2(scramble_depth=6).check_budget(base.Budget(2, 5, 3))
  for budget in (base.Budget(2, 5, 3), base.Budget(5, 10, 1)):
    with pytest.raises(ValueError, match='scramble_depth=6; allowed: at most 5 with exact_distance=True') as error:
      env.check_budget(budget)
    assert '\n' not in str(error.value)


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
  with pytest.raises(ValueError, match=rf'rubik_2x2: {field}=.*; allowed: ') as error:
    Rubik2x2(**{field: value})
  assert '\n' not in str(error.value)
