"""Navigation against a plain second writing; its rooms, splits, texts and options."""

from __future__ import annotations

import collections
import dataclasses

import jax
import numpy as np
import pytest

from ragen_jax.agent.world_model.descriptions import describe, possible_claims, read_claims
from ragen_jax.agent.world_model.state_reward import score_description
from ragen_jax.envs.base import Budget
from ragen_jax.envs.navigation import MAX_ATTEMPTS, Navigation
from ragen_jax.envs.navigation_rooms import draw_room, tenth_of
from ragen_jax.envs.splits import SPLITS
from tests.support.environments import batch, make_levels, one, raises_one_line, step
from tests.support.games.navigation import COUNT, ENV, Room, levels, make_state

FREE = dataclasses.replace(ENV, must_see=False, radius=0.43, max_steps=12, min_path=1)


def walks(env, length, seed=0):
  """The states before and after each of some random actions, with the actions and the outcomes."""
  states, played, rng = levels(), [], np.random.default_rng(seed)
  for _ in range(length):
    actions = rng.choice(8, COUNT, p=[0.3, 0.06, 0.12, 0.12, 0.12, 0.08, 0.05, 0.15])
    after, out = step(env, states, actions)
    played.append((states, actions, after, out))
    states = after
  return played


# -- the game ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('env', [ENV, FREE], ids=['must_see', 'distance'])
def test_walks_are_those_of_the_plain_writing(env):
  seen = collections.Counter()
  for number, (states, actions, after, out) in enumerate(walks(env, 14)):
    for i, action in enumerate(actions):
      before, now = one(states, i), one(after, i)
      if before.done:
        jax.tree.map(np.testing.assert_array_equal, now, before)
        assert out.reward[i] == 0 and not out.effective[i]
        seen['over'] += 1
        continue
      room = Room(env, before)
      name = env.action_names[action]
      pose = room.moved(room.pose, name)
      assert (*now.player, now.heading, now.tilt) == pose
      assert now.blocked == (pose == room.pose) == (not out.effective[i])
      assert now.success == room.finds(pose) and out.reward[i] == env.success_reward * now.success
      assert now.done == (now.success or number + 1 == env.max_steps)
      seen[name, bool(now.blocked)] += 1
      seen['won'] += int(now.success)
  assert seen['won'] > 10 and seen['over'] > 50
  assert all(seen[name, False] for name in env.action_names)
  assert all(seen[name, True] for name in env.action_names if not name.startswith('rotate'))


@pytest.mark.slow
def test_sight_is_that_of_the_plain_writing():
  counts, see = collections.Counter(), jax.jit(jax.vmap(ENV.seen))
  for states, _, _, _ in walks(ENV, 5, seed=3):
    seen = np.asarray(see(states))
    for i in range(COUNT):
      room = Room(ENV, one(states, i))
      for k in range(5):
        assert seen[i, k] == room.sees(room.pose, k), (i, k)
        ahead, _ = room.place(room.pose, room.objects[k][2])
        line = room.has_free_line(room.pose[:2], room.objects[k][2])
        counts['seen' if seen[i, k] else 'behind' if ahead <= 0 else 'walled' if not line else 'hidden'] += 1
  assert min(counts[x] for x in ('seen', 'behind', 'walled', 'hidden')) > 20, counts


def test_an_object_hides_what_is_behind_it_and_a_wall_hides_all():
  env = Navigation(inner_walls=0, num_objects=2, kinds=('post',))
  see = jax.jit(env.seen)

  def sees(red, blue, inner=()):
    return see(make_state(env, {'red post': red, 'blue post': blue}, (8, 5), inner=inner)).tolist()

  assert sees((3, 5), (5, 5)) == [False, True] and sees((3, 5), (5, 6)) == [True, True]
  assert sees((3, 5), (9, 5)) == [True, False]
  assert sees((3, 5), (5, 6), [(4, 5)]) == [False, True]
  # A line may touch a corner of a wall, and not enter it.
  assert sees((6, 7), (2, 8), [(7, 5)]) == [True, False] and sees((6, 6), (5, 5), [(7, 5)]) == [False, False]
  assert sees((5, 8), (7, 4), [(7, 6)]) == [False, True]


# -- levels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('options', 'low', 'high'),
  [
    pytest.param({'min_path': 2, 'max_path': 4, 'start': 'facing'}, 2, 4, marks=pytest.mark.slow),
    pytest.param({}, 3, 99, marks=pytest.mark.slow),
    pytest.param({'min_path': 5, 'max_path': 6, 'start': 'away'}, 5, 6, marks=pytest.mark.slow),
  ],
)
@pytest.mark.exhaustive_cases('options2-5-6')
def test_levels_are_within_the_bounds(options, low, high):
  env = Navigation(dim=(8, 8), num_objects=4, **options)
  states = make_levels(env, COUNT, block=COUNT)
  rooms = [Room(env, one(states, i)) for i in range(COUNT)]
  lengths = [room.shortest() for room in rooms]
  assert min(lengths) >= low and max(lengths) <= high
  seen = {room.sees(room.pose, 0) for room in rooms}
  assert seen == {'any': {True, False}, 'facing': {True}, 'away': {False}}[env.start]
  assert not states.done.any() and (states.tilt == 1).all() and set(states.heading.tolist()) == {0, 1, 2, 3}
  for room in rooms:
    assert room.pose[:2] not in room.walls | room.cells and len(room.cells) == 4 and not room.cells & room.walls
    assert len({x[:2] for x in room.objects}) == 4
    assert {(r, c) for r in (0, 7) for c in range(8)} | {(r, c) for r in range(8) for c in (0, 7)} <= room.walls


@pytest.mark.slow
def test_levels_that_cannot_be_within_the_bounds_are_still_solvable():
  env = Navigation(dim=(6, 6), num_objects=2, inner_walls=0, min_path=29)
  states = make_levels(env, 4, block=4)
  assert MAX_ATTEMPTS > 1 and all(0 < Room(env, one(states, i)).shortest() < 29 for i in range(4))


@pytest.mark.slow
def test_same_key_same_level():
  again = jax.jit(jax.vmap(ENV.reset))(jax.vmap(jax.random.key)(np.array([3, 3, 4])))
  for i, seed in enumerate((3, 3, 4)):
    jax.tree.map(np.testing.assert_array_equal, one(again, i), one(levels(), seed))


def test_levels_differ_and_their_walls_leave_a_way():
  room = levels().room
  assert len({places.tobytes() for places in room.places}) > COUNT - 4
  inner = room.walls[:, 1:-1, 1:-1]
  assert inner.sum((1, 2)).min() >= 1 and inner.sum((1, 2)).max() >= 5
  # A wall does not run along the border, and only its end is beside it.
  assert max(inner[:, :, 0].sum(1).max(), inner[:, :, -1].sum(1).max()) <= 2


@pytest.mark.parametrize('split', ['test', pytest.param('train', marks=pytest.mark.slow)])
def test_rooms_of_a_split_are_in_its_tenths(split):
  # Few different rooms, so that chance repeats them.
  draw = jax.jit(jax.vmap(lambda key: draw_room(key, (6, 6), 0, 2, 2, split, 0)[0]))
  rooms = jax.device_get(draw(jax.random.split(jax.random.key(0), 256)))
  low, high = SPLITS[split]
  tenths = np.asarray(jax.jit(jax.vmap(tenth_of))(rooms))
  assert (tenths >= low).all() and (tenths < high).all()
  assert 5 < len({(x.places.tobytes(), x.names.tobytes()) for x in (one(rooms, i) for i in range(256))}) < 256


def test_the_parts_of_the_split_are_disjoint_and_cover_all():
  parts = [set(range(*SPLITS[name])) for name in ('train', 'validation', 'test')]
  assert sum(map(len, parts)) == 10 and set().union(*parts) == set(range(*SPLITS['all']))


def test_the_tenth_of_a_room_is_that_of_its_content():
  tenth, room = jax.jit(tenth_of), one(levels(), 0).room
  order = np.array([3, 1, 4, 0, 2])
  assert int(tenth(room)) == int(tenth(room.replace(places=room.places[order], names=room.names[order])))
  for changed in (
    [room.replace(names=(room.names + k) % 24) for k in range(20)],
    [room.replace(walls=np.arange(63).reshape(7, 9) == k) for k in range(20)],
    [room.replace(places=(room.places + k) % 7) for k in range(7)],
  ):
    assert len({int(tenth(x)) for x in changed}) > 3
  assert np.bincount(np.asarray(jax.jit(jax.vmap(tenth_of))(levels().room)), minlength=10).max() < 20


# -- text --------------------------------------------------------------------------------------------------------------


def test_a_text_lists_what_is_in_view():
  env = Navigation(inner_walls=0, num_objects=2, kinds=('post', 'ball'))
  state = make_state(env, {'blue post': (6, 9), 'red ball': (8, 8)}, (8, 5), heading=1, tilt=2)
  behind = state.replace(heading=np.int32(3), tilt=np.int32(1))
  states = batch(state.replace(blocked=np.bool_(True)), behind, behind)
  texts = env.render(states)
  assert texts[0] == (
    'Find the blue post. The last action was blocked.\n'
    'In view: the red ball, 3 ahead; the blue post, 4 ahead and 2 left.\n'
    'Free steps: 2 ahead, 1 right, 4 back, 7 left.\nYou look down.'
  )
  free = 'Free steps: 4 ahead, 7 right, 2 back, 1 left.'
  assert texts[1] == texts[2] == f'Find the blue post.\nIn view: no object.\n{free}\nYou look straight ahead.'
  assert env.captions(states)[0] == 'Find the blue post. The last action was blocked.\n<image>'
  assert env.rationale(states)[:2] == ['The blue post is 4 ahead and 2 left.', 'The blue post is not in view.']


def test_rules_follow_the_options():
  text = ENV.rules()
  assert '0.43 m' in text and 'in view within 1.3 m' in text and '3 points' in text
  assert 'in view' not in FREE.rules()
  assert Navigation(names='words').action_names[4] == 'turn_right' and Navigation().action_names[4] == 'rotateright'
  for env in (Navigation(), Navigation(names='words')):
    assert [env.parse_action(env.format_action(a).upper()) for a in range(8)] == list(range(8))
  with raises_one_line('navigation: levels cannot be read from text'):
    ENV.from_text('Find the red ball.')


# -- descriptions ------------------------------------------------------------------------------------------------------


def test_scenes_are_the_target_and_what_is_in_view():
  relations = set()
  for i, scene in enumerate(ENV.scenes(levels())):
    room = Room(ENV, one(levels(), i))
    expected = {}
    for k, (kind, colour, cell) in enumerate(room.objects):
      if k == 0 or room.sees(room.pose, k):
        ahead, aside = room.place(room.pose, cell)
        way = {1: 'ahead', 0: '', -1: 'behind'}[int(np.sign(ahead))]
        side = {1: 'to the right', 0: '', -1: 'to the left'}[int(np.sign(aside))]
        metres = float(np.hypot(ahead, aside)) * ENV.stride
        far = 'near' if metres <= 1.3 else 'midway' if metres <= 2.6 else 'far'
        expected[f'{colour} {kind}'] = f'the {colour} {kind} is {" ".join(x for x in (way, side) if x)} and {far}'
        relations.add((way, side, far))
    text = describe(scene)
    assert sorted(text.split('; ')) == sorted(expected.values())
    assert score_description(text, scene) == 1.0 and score_description('', scene) == 0
    target = ' '.join(room.objects[0][1::-1])
    alone = 1.0 if len(expected) == 1 else 0.5
    assert scene.target == target and score_description(expected[target], scene) == pytest.approx(alone)
    # One part of the target's claim is wrong.
    half = expected[target].replace(' and near', ' and far') if 'near' in expected[target] else ''
    if half:
      assert score_description(half, scene) == pytest.approx(alone / 2)
  assert len(relations) > 9


def test_every_claim_about_rooms_is_read():
  words = ENV.scene_words
  claims = possible_claims(words)
  assert len(claims) == 24 * 8 * 3 == len(set(claims))
  counts = read_claims('; '.join(claims), words)
  assert all((own == 1).all() and own.shape == (8, 3) for own in counts.values()) and set(counts) == set(words.kinds)
  assert not any(own.any() for own in read_claims('the box is above and to the left', words).values())


# -- bad options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('options', 'match'),
  [
    ({'dim': (5, 9)}, 'dim=5; allowed: integers from 6 to 32'),
    ({'dim': 9}, r'dim=\(9,\); allowed: \(rows, columns\)'),
    ({'stride': 0}, 'stride=0; allowed: numbers from 0.1 to 2'),
    ({'radius': True}, 'radius=True; allowed: numbers from 0.1 to 20'),
    ({'radius': float('nan')}, 'radius=nan; allowed'),
    ({'radius': 0.4}, 'radius=0.4; allowed: at least stride=0.5'),
    ({'radius': 0.3, 'stride': 0.25, 'fov': 60.0, 'kinds': ('ball',)}, 'radius=0.3 with must_see=True; .* no ball'),
    ({'fov': 150}, 'fov=150; allowed: numbers from 40 to 140'),
    ({'must_see': 1}, 'must_see=1; allowed: True, False'),
    ({'inner_walls': 4}, 'inner_walls=4; allowed: integers from 0 to 3'),
    ({'num_objects': 1}, 'num_objects=1; allowed: integers from 2 to 8'),
    ({'num_objects': 5, 'dim': (6, 6)}, 'num_objects=5; allowed: integers from 2 to 4'),
    ({'num_objects': 4, 'kinds': ('ball',), 'colours': ('red', 'blue')}, 'num_objects=4; allowed: .* from 2 to 2'),
    ({'kinds': ('ball',), 'colours': 'red'}, 'allowed: two different objects'),
    ({'kinds': ('ball', 'ball')}, 'allowed: different names of ball, cube, post, cone'),
    ({'kinds': ()}, 'kinds=.*allowed: different names'),
    ({'kinds': ('box',)}, "kinds='box'; allowed: ball, cube, post, cone"),
    ({'colours': ('pink',)}, "colours='pink'; allowed: red, green"),
    ({'min_path': 31}, 'min_path=31; allowed: integers from 1 to 30'),
    ({'max_path': 2}, 'max_path=2; allowed: integers from 3'),
    ({'start': 'near'}, "start='near'; allowed: any, facing, away"),
    ({'split': 'dev'}, "split='dev'; allowed: all, test, validation, train"),
    ({'success_reward': 0}, 'success_reward=0; allowed: numbers from 0.01 to 1000'),
    ({'max_steps': 0}, 'max_steps=0; allowed: integers from 1 to 10000'),
    ({'picture': 1}, 'picture=1; allowed: integers from 2 to 64'),
    ({'names': 'short'}, "names='short'; allowed: thor, words"),
  ],
)  # fmt: skip
def test_options_that_are_not_allowed(options, match):
  with raises_one_line(match):
    Navigation(**options)


def test_the_game_lasts_as_long_as_the_budget():
  with raises_one_line('max_steps=30; allowed: at least max_actions=31'):
    Navigation().check_budget(Budget(5, 31, 5))
  Navigation().check_budget(Budget(5, 30, 5))
