"""Manipulation against a plain second writing; its levels, success rules, actions, texts and options."""

from __future__ import annotations

import collections
import dataclasses

import jax
import numpy as np
import pytest

from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.world_model.descriptions import describe, find_claims, possible_claims, read_claims
from ragen_jax.agent.world_model.marks import HALF, RIGHT, WRONG, mark_description
from ragen_jax.agent.world_model.state_reward import score_description
from ragen_jax.envs.base import Budget
from ragen_jax.envs.manipulation import Manipulation
from ragen_jax.envs.manipulation_tasks import PICK, PLACE, PUSH, TASKS, worth
from ragen_jax.envs.navigation import Navigation
from ragen_jax.envs.solvers.manipulation import planners
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.envs.splits import SPLITS, tenth
from tests.support.environments import batch, check_no_levels, make_levels, one, raises_one_line
from tests.support.games.manipulation import COUNT, HIGH, LOW, NAMES, Plain, act, levels, make_state
from tests.support.speakers import context_settings

ENVS = {name: Manipulation(task=name) for name in NAMES}
each = pytest.mark.parametrize(
  'name', [*(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[:2]), *NAMES[2:]]
)


def noisy_actions(env, states, rng):
  """Legal actions, most of them with a miss of some millimetres, some of plans, and some from anywhere."""
  low, high = np.array(LOW[env.task == 'drawer'] * 2), np.array(HIGH[env.task == 'drawer'] * 2)
  actions = []
  for legal, planner in zip(env.legal_actions(states), planners(env.task_of_levels, states), strict=True):
    action = np.array(legal[rng.integers(len(legal))] if rng.random() < 0.6 else planner.next())
    if rng.random() < 0.2:
      action = np.array([rng.integers(3), *rng.integers(low, high + 1)])
    elif rng.random() < 0.4:
      action[1:] += rng.integers(-24, 25, 6)
      action[1:] = action[1:].clip(low, high)
    if rng.random() < 0.3 and action[0] == PUSH:
      action[4:6] = rng.integers(low[:2], high[:2] + 1)
    actions.append(action)
  return np.array(actions)


# -- the game ----------------------------------------------------------------------------------------------------------


@each
@pytest.mark.slow_cases('stack')
def test_walks_are_those_of_the_plain_writing(name):
  env, states, rng, seen = ENVS[name], levels(name), np.random.default_rng(7), collections.Counter()
  for _ in range(12):
    actions = noisy_actions(env, states, rng)
    after, out = act(env, states, actions)
    for i, action in enumerate(actions):
      before, now = one(states, i), one(after, i)
      if before.done:
        jax.tree.map(np.testing.assert_array_equal, now, before)
        assert out.reward[i] == 0 and not out.effective[i]
        seen['over'] += 1
        continue
      plain = Plain(name, before)
      old, (points, _) = plain.content, plain.stages()
      plain.act(action)
      assert plain.content == Plain(name, now).content, (old, action)
      assert out.effective[i] == (plain.content != old) == (not now.blocked)
      earned, won = plain.stages()
      assert out.reward[i] == pytest.approx(earned - points - 0.1, abs=1e-5)
      assert bool(now.success) == bool(now.done) == won
      seen[int(action[0]), bool(out.effective[i])] += 1
      seen['height', max(place[2] for place in plain.at)] += 1
      seen['won'] += won
    states = after
  for skill in (PICK, PLACE, PUSH):
    assert seen[skill, True] > 10 and seen[skill, False] > 10, seen
  assert seen['won'] > 2 and seen['over'] and seen['height', 155 if name == 'drawer' else 60] > 10, seen


@pytest.mark.parametrize(
  ('name', 'places', 'reached', 'won'),
  [
    ('align', [(10, 0, 20), (-10, 90, 20)], 2, True),
    ('align', [(11, 0, 20), (-10, 90, 20)], 1, False),
    ('align', [(0, 0, 60), (0, 90, 20)], 1, False),
    ('place', [(80, -50, 20), (50, 140, 20)], 2, True),
    ('place', [(80, -49, 20), (50, 140, 20)], 1, False),
    ('place', [(80, 100, 20), (80, -100, 20)], 0, False),
    ('stack', [(0, 0, 60), (0, 19, 20), (0, -19, 100)], 2, True),
    ('stack', [(0, 0, 60), (0, 20, 20), (0, -19, 100)], 0, False),
    ('stack', [(0, 0, 60), (0, 0, 20), (0, 20, 100)], 1, False),
    ('stack', [(0, 0, 20), (0, 0, 60), (0, 0, 100)], 0, False),
    ('stack', [(0, 0, 60), (100, 0, 20), (0, 0, 100)], 0, False),
  ],
)
def test_success_is_that_of_the_rules(name, places, reached, won):
  state = make_state(*places)
  points, success = worth(TASKS[name], state.table)
  assert (float(points), bool(success)) == Plain(name, state).stages() == (10.0 if won else 4.0 * reached, won)


@pytest.mark.parametrize(
  ('apple', 'opening', 'won'),
  [
    ((-520, -300, 155), 0, True), ((-420, -300, 155), 100, True), ((-420, -300, 155), 101, False),
    ((-421, -201, 155), 100, True), ((-320, -300, 155), 99, False), ((-320, -300, 155), 100, True),
    ((-420, -300, 35), 100, False),
  ],
)  # fmt: skip
def test_an_apple_counts_in_a_closed_drawer(apple, opening, won):
  assert bool(worth(TASKS['drawer'], make_state(apple, opening=opening).table)[1]) == won


def test_an_apple_inside_the_cabinet_cannot_be_taken():
  states = batch(*[make_state((x, -300, 155), opening=110) for x in (-366, -365)])
  _, out = act(ENVS['drawer'], states, [(PICK, -365, -300, 155, 0, 0, 0)] * 2)
  assert out.effective.tolist() == [False, True]


def test_nothing_is_won_with_a_cube_in_the_hand():
  state = make_state((0, 0, 60), (0, 0, 20), (0, 0, 170), held=2)
  after, out = act(ENVS['stack'], batch(state, state), [(PICK, 0, 0, 60, 0, 0, 0), (PLACE, 5, 5, 100, 0, 0, 0)])
  assert after.success.tolist() == [False, True]
  assert out.reward.tolist() == pytest.approx([-0.1, 10 - 6 - 0.1])


@pytest.mark.parametrize(
  ('skill', 'misses', 'limits'),
  [
    (PICK, [(dx, 0, 0) for dx in range(-30, 31)], (-15, 15)),
    (PICK, [(0, dy, 0) for dy in range(-30, 31)], (-20, 20)),
    (PICK, [(0, 0, dz) for dz in range(-10, 50)], (-10, 20)),
    (PLACE, [(dx, 0, 0) for dx in range(-19, 20)], (-19, 19)),
    (PLACE, [(0, 0, dz) for dz in range(-40, 24)], (-10, 23)),
  ],
)  # fmt: skip
def test_tolerances_are_those_that_were_measured_in_maniskill(skill, misses, limits):
  """A pick of the cube at (50, 50, 20), and a place of the held one on it."""
  held = 0 if skill == PLACE else -1
  state = make_state((0, 0, 170) if held == 0 else (-50, -50, 20), (50, 50, 20), (-90, -190, 20), held=held)
  base = (50, 50, 20 if skill == PICK else 60)
  actions = [(skill, *np.add(base, miss), 0, 0, 0) for miss in misses]
  _, out = act(ENVS['stack'], batch(*[state] * len(actions)), actions)
  worked = [sum(miss) for miss, ok in zip(misses, out.effective, strict=True) if ok]
  assert (min(worked), max(worked)) == limits and len(worked) == limits[1] - limits[0] + 1


@pytest.mark.parametrize(
  ('push', 'ends'),
  [
    (((110, 0, 20), (90, 0, 20)), (50, 0, 20)),  # the hand does not come to the cube
    (((110, 0, 20), (40, 0, 20)), (10, 0, 20)),
    (((110, 29, 20), (40, 60, 20)), (10, 0, 20)),  # beside the middle, and slanted
    (((110, 30, 20), (40, 30, 20)), (50, 0, 20)),
    (((79, 0, 20), (0, 0, 20)), (50, 0, 20)),  # it would come down on the cube
    (((80, 0, 41), (0, 0, 20)), (50, 0, 20)),  # above it
    (((110, 0, 20), (-100, 0, 20)), (-43, 0, 20)),  # the other cube stops it
    (((50, -60, 20), (50, 190, 20)), (50, 200, 20)),  # the workspace ends
    (((50, -60, 20), (50, -60, 20)), (50, 0, 20)),
  ],
)
def test_pushes(push, ends):
  state = make_state((50, 0, 20), (-100, 30, 20), (-90, -190, 20))
  after, _ = act(ENVS['stack'], batch(state), [(PUSH, *push[0], *push[1])])
  assert after.table.places[0].tolist() == [list(ends), [-100, 30, 20], [-90, -190, 20]]


# -- levels and plans --------------------------------------------------------------------------------------------------


def shortest(name, state):
  """The number of skills of the shortest play from a fresh level, from the rules."""
  places = np.asarray(state.table.places).tolist()
  if name == 'align':
    return sum(1 if x + 30 <= 150 else 2 for x, _, _ in places)
  if name == 'place':
    near = (abs(y - goal) <= 50 and x - 30 >= -100 for (x, y, _), goal in zip(places, (-100, 100), strict=True))
    return sum(1 if ok else 2 for ok in near)
  return {'stack': 4, 'drawer': 3}[name]


@pytest.mark.parametrize('first', [0, *(pytest.param(k * COUNT, marks=pytest.mark.slow) for k in range(1, 9))])
@each
def test_plans_solve_all_levels_in_the_fewest_skills(name, first):
  env, states = ENVS[name], make_levels(ENVS[name], COUNT, first, block=COUNT)
  least = np.array([shortest(name, one(states, i)) for i in range(COUNT)])
  for most in range(2, 6):
    np.testing.assert_array_equal(env.optimal(states, Budget(most, most, 1)), least <= most)
  solution, played, earned = env.solve(states, Budget(3, 6, 2)), np.zeros(COUNT, int), np.zeros(COUNT)
  for turn in range(3):
    plans = solution.plan(states, 3 - turn, 6 - 2 * turn)
    assert max(map(len, plans)) <= 2
    for number in range(2):
      acting = [number < len(plan) for plan in plans]
      actions = [plan[number] if number < len(plan) else (PICK, *LOW[False], 0, 0, 0) for plan in plans]
      for i in np.flatnonzero(acting):
        assert env.parse_action(env.format_action(actions[i])) == tuple(actions[i])
      states, out = act(env, states, actions)
      played += acting
      earned += np.where(acting, out.reward, 0)
  assert states.success.all()
  np.testing.assert_array_equal(played, least)
  np.testing.assert_allclose(earned, 10 - 0.1 * least, atol=1e-4)


@each
@pytest.mark.slow_cases('stack')
def test_plans_reach_the_goal_from_what_random_play_leaves(name):
  env, states, rng = ENVS[name], levels(name), np.random.default_rng(3)
  for _ in range(7):
    states, _ = act(env, states, noisy_actions(env, states, rng))
  best = env.solve(states, Budget(12, 12, 1))
  # A drawer that was closed without the apple cannot be opened.
  lost = (states.table.opening < 70) & (states.table.places[:, 0, 2] != 155) if name == 'drawer' else np.zeros(COUNT)
  assert (best.success.astype(bool) | lost.astype(bool)).all() and best.success.mean() > 0.2


@pytest.mark.parametrize(
  ('places', 'least'),
  [
    ([(100, 0, 20), (0, 0, 20), (0, 0, 60)], 6),  # purple on green
    ([(100, 0, 20), (0, 0, 20), (100, 0, 60)], 6),  # purple on red
    ([(0, 0, 20), (0, 0, 60), (100, 0, 20)], 6),  # green on red
    ([(0, 0, 100), (0, 0, 60), (0, 0, 20)], 8),  # red on green on purple
    ([(0, 0, 60), (0, 0, 20), (100, 0, 20)], 2),
  ],
)
def test_plans_unstack_what_is_in_the_way(places, least):
  states = batch(make_state(*places))
  assert [ENVS['stack'].optimal(states, Budget(n, n, 1)).tolist() for n in (least - 1, least)] == [[0], [1]]


@each
def test_levels_are_in_the_start_regions(name):
  env, states = ENVS[name], make_levels(ENVS[name], 4 * COUNT, block=COUNT)
  places, task = states.table.places, TASKS[name]
  for i, ((x0, x1), (y0, y1)) in enumerate(task.starts):
    x, y, z = places[:, i].T
    assert (x >= x0).all() and (x <= x1).all() and (y >= y0).all() and (y <= y1).all() and (z == task.half).all()
    assert x.min() < x0 + 10 and x.max() > x1 - 10 and y.max() - y.min() > 0.8 * (y1 - y0)
  for i in range(places.shape[1]):
    for j in range(i):
      assert np.hypot(*(places[:, i] - places[:, j]).T[:2]).min() >= 57
  assert (states.table.held == -1).all() and not states.done.any()
  assert (states.table.opening == (180 if name == 'drawer' else 0)).all()
  jax.tree.map(np.testing.assert_array_equal, make_levels(env, COUNT, block=COUNT), one(states, np.s_[:COUNT]))


@pytest.mark.parametrize('split', ['test', *(pytest.param(x, marks=pytest.mark.slow) for x in ('train', 'validation'))])
def test_the_parts_of_the_split_have_no_level_in_common(split):
  states = make_levels(Manipulation(task='drawer', split=split), 256)
  parts = np.asarray(jax.vmap(lambda places: tenth(places[:, :2].reshape(-1)))(states.table.places))
  low, high = SPLITS[split]
  assert set(parts.tolist()) == set(range(low, high))


def test_an_empty_batch_has_plans():
  check_no_levels(ENVS['stack'], levels('stack'), Budget(3, 6, 2))


# -- actions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('text', 'action'),
  [
    ('pick(10, -20, 30)', (PICK, 10, -20, 30, 0, 0, 0)),
    (' PLACE ( 1.5,-2.5 , 30.49 ) ', (PLACE, 2, -2, 30, 0, 0, 0)),
    ('push(0,0,20,50,+60,20)', (PUSH, 0, 0, 20, 50, 60, 20)),
    ('pick(-100, -200, 10)', (PICK, -100, -200, 10, 0, 0, 0)),
    ('pick(150, 200, 200)', (PICK, 150, 200, 200, 0, 0, 0)),
    # Outside the workspace, one coordinate after another, and the second place of a push.
    ('pick(-101, 0, 20)', None), ('pick(151, 0, 20)', None), ('pick(0, 201, 20)', None), ('pick(0, 0, 9)', None),
    ('pick(0, 0, 200.5)', None), ('push(0, 0, 20, 0, 300, 20)', None), ('push(0, 0, 20, 0, 0, 9)', None),
    # A number too many or too few.
    ('pick(0, 0, 20, 20)', None), ('pick(0, 0)', None), ('place()', None), ('push(0, 0, 20)', None),
    ('push(0, 0, 20, 0, 0, 20, 0)', None),
    # No object, no number, no skill, more than a skill.
    ('pick(red cube)', None), ('pick(nan, 0, 20)', None), ('pick(inf, 0, 20)', None), ('pick(1e1, 0, 20)', None),
    ('pick(٣, 0, 20)', None), ('pick(0x1, 0, 20)', None), ('pick(1_0, 0, 20)', None), ('grab(0, 0, 20)', None),
    ('pick(0, 0, 20', None), ('pick 0, 0, 20', None), ('pick(0, 0, 20).', None), ('pick((0, 0, 20))', None),
    ('pick(0, 0, 20) place(0, 0, 20)', None), ('pick(0, , 20)', None), ('pick(- 5, 0, 20)', None), ('', None),
    (f'pick({"9" * 5000}, 0, 20)', None), ('p\u0131ck(0, 0, 20)', None),
  ],
)  # fmt: skip
def test_actions_are_read(text, action):
  env = ENVS['place']
  assert env.parse_action(text) == action
  if action is not None:
    assert env.parse_action(env.format_action(action)) == action


@pytest.mark.parametrize('bad', ['pick(0, 0, 20, 1)', 'pick(0, 0, 900)', 'pick(blue cube)', 'pick(nan, 0, 20)'])
def test_a_bad_skill_makes_a_reply_invalid_as_an_unknown_action_does_in_navigation(bad):
  read = []
  for env, wrong, right in ((ENVS['place'], bad, 'place(1, 2, 20)'), (Navigation(), 'fly', 'moveahead')):
    spec = EnvSpec('Game', env, Budget(3, 6, 2), 50, 1)
    reply = ContextManager(None, [spec], context_settings(format='no_think')).parse(
      0, f'<answer>{wrong} || {right}</answer>'
    )
    assert reply.names == (right,)
    read.append((reply.known, reply.valid, reply.sections.correct))
  assert read == [(False, False, True)] * 2


@each
def test_examples_and_random_actions_are_actions(name):
  env = ENVS[name]
  assert [env.parse_action(text)[0] for text in env.example_actions('')] == [PICK, PLACE, PUSH]
  held = levels(name)
  held = held.replace(table=held.table.replace(held=np.zeros(COUNT, np.int32)))
  for states, skills in ((levels(name), {PICK, PUSH}), (held, {PLACE})):
    for legal in env.legal_actions(states):
      assert {action[0] for action in legal} == skills
      assert all(env.parse_action(env.format_action(action)) == tuple(action) for action in legal)


# -- text --------------------------------------------------------------------------------------------------------------


def test_texts_tell_places_as_the_option_says():
  state = make_state((0, 0, 170), (5, -7, 20), held=0).replace(blocked=np.bool_(True))
  texts = {
    p: dataclasses.replace(ENVS['place'], positions=p).render(batch(state))[0] for p in ('named', 'list', 'none')
  }
  rest = 'The hand holds an object.\nThe last skill changed nothing.'
  assert texts['named'] == f'Positions: red cube (0, 0, 170), green cube (5, -7, 20).\n{rest}'
  assert texts['list'] == f'Positions: (0, 0, 170), (5, -7, 20).\n{rest}' and texts['none'] == rest
  drawer = make_state((-150, 20, 35), opening=180)
  assert ENVS['drawer'].render(batch(drawer)) == [
    'Positions: apple (-150, 20, 35), drawer (-340, -300, 150).\nThe drawer is open by 180 mm.\nThe hand is empty.'
  ]
  two = dataclasses.replace(ENVS['place'], cameras=2, positions='none')
  assert two.captions(batch(state)) == [f'{rest}\nFrom the front:\n<image>\nFrom above:\n<image>']
  assert ENVS['place'].captions(batch(state)) == [f'{texts["named"]}\n<image>']


@pytest.mark.parametrize(
  ('name', 'state', 'thought'),
  [
    ('stack', make_state((0, 0, 20), (100, 0, 20), (0, 100, 20)), 'I pick the red cube.'),
    ('stack', make_state((100, 0, 60), (100, 0, 20), (0, 0, 170), held=2), 'I place the purple cube at x 100, y 0.'),
    ('align', make_state((0, 0, 20), (100, 150, 20)), 'I push the green cube.'),
    # The other cube is nearer to where the hand comes down, and at the same place below.
    ('place', make_state((-15, -84, 20), (-79, -94, 20)), 'I push the red cube.'),
    ('align', make_state((117, 66, 20), (117, 66, 60)), 'I pick the green cube.'),
    ('drawer', make_state((-340, -300, 155), opening=180), 'I push the drawer shut.'),
  ],
)
def test_thoughts_tell_the_next_skill(name, state, thought):
  assert ENVS[name].rationale(batch(state)) == [thought]


# -- descriptions ------------------------------------------------------------------------------------------------------


def test_scenes_tell_places_to_ten_millimetres_and_what_holds_a_thing():
  state = make_state((31, -30, 60), (30, -29, 20), (0, 0, 170), held=2)
  (scene,) = ENVS['stack'].scenes(batch(state))
  red, green, purple = (
    'the red cube is at x 40 y -20 and on a cube', 'the green cube is at x 40 y -20 and on the table',
    'the purple cube is at x 0 y 0 and in the hand',
  )  # fmt: skip
  assert describe(scene) == f'{red}; {green}; {purple}'
  assert score_description(f'{purple}; {red}; {green}', scene) == 1.0
  marks, missing = mark_description(f'{red.replace("40", "60")}; {green}; {green}', scene)
  assert [(mark.verdict, mark.truth) for mark in marks] == [(HALF, red), (RIGHT, ''), (WRONG, '')]
  assert missing == [purple]
  # Swapped names have one right part each; one thing is missing; a part is wrong.
  swapped = f'{red.replace("red", "green")}; {green.replace("green", "red")}; {purple}'
  assert score_description(swapped, scene) == pytest.approx(2 / 3)
  assert score_description(f'{red}; {green}', scene) == pytest.approx(2 / 3)
  assert score_description(f'{red}; {green}; {purple.replace("x 0", "x 20")}', scene) == pytest.approx(5 / 6)
  (scene,) = ENVS['drawer'].scenes(batch(make_state((-520, -300, 155), opening=0)))
  apple, drawer = 'the apple is at x -520 y -300 and in the drawer', 'the drawer is at x -520 y -300 and closed'
  assert describe(scene) == f'{apple}; {drawer}'
  assert score_description(apple, scene) == pytest.approx(5 / 6)


@each
def test_every_state_and_every_claim_has_words(name):
  env, states, rng = ENVS[name], levels(name), np.random.default_rng(5)
  for _ in range(4):
    for i, scene in enumerate(env.scenes(states)):
      text = describe(scene)
      assert score_description(text, scene) == 1.0 and scene.words == env.scene_words
      for claim, place in zip(find_claims(text, scene.words), Plain(name, one(states, i)).at, strict=False):
        x, y = (int(number) for number in scene.words.first[claim.row].split()[2::2])
        assert abs(x - place[0]) <= 10 and abs(y - place[1]) <= 10
    states, _ = act(env, states, noisy_actions(env, states, rng))
  claims = possible_claims(env.scene_words)[::17]
  counts = read_claims('; '.join(claims), env.scene_words)
  assert sum(own.sum() for own in counts.values()) == len(claims)


# -- bad options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('options', 'match'),
  [
    ({'task': 'sort'}, "task='sort'; allowed: align, place, stack, drawer"),
    ({'positions': True}, 'positions=True; allowed: named, list, none'),
    ({'cameras': 3}, 'cameras=3; allowed: integers from 1 to 2'),
    ({'split': 'dev'}, "split='dev'; allowed: all, test, validation, train"),
    ({'picture': 1}, 'picture=1; allowed: integers from 2 to 64'),
  ],
)
def test_options_that_are_not_allowed(options, match):
  with raises_one_line(f'manipulation: {match}'):
    Manipulation(**options)
