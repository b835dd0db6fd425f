"""Scores of descriptions against an optimal assignment, and the rewards of turns."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from ragen_jax.agent.world_model.descriptions import describe, write_claim
from ragen_jax.agent.world_model.formats import FORMATS, read_sections, write_reply
from ragen_jax.agent.world_model.state_reward import (
  NO_REWARD,
  ReplyReward,
  ReplyRewardSettings,
  above_floor,
  f1,
  score_description,
  score_turn,
)
from ragen_jax.envs.scenes import RoomScene, Scene

SETTINGS = ReplyRewardSettings(format_reward=0.5, state_reward=0.25, state_floor=0.4, state_place='turn')
SCENE = Scene((2, 2), {'box': ((1, 2), (1, 1)), 'target': ((2, 4),)})
LAKE = Scene((0, 0), {'goal': ((3, 3),), 'hole': ((0, 2), (1, 0))})


def random_scene(rng):
  place = lambda: tuple(rng.integers(5, size=2).tolist())  # noqa: E731
  kinds = (('box', 'target'), ('goal', 'hole'))[rng.integers(2)]
  return Scene(place(), {kind: tuple(place() for _ in range(rng.integers(1, 5))) for kind in kinds})


@pytest.mark.parametrize('shape', [(3, 3), (8, 3)])
def test_f1_is_that_of_the_best_assignment(shape):
  rng, halves, places = np.random.default_rng(0), 0, shape[0] * shape[1]
  for _ in range(300):
    odds = [1 / places] * places
    claimed, true = rng.multinomial(rng.integers(8), odds), rng.multinomial(rng.integers(1, 8), odds)
    claims, things = (np.repeat(np.arange(places), counts) for counts in (claimed, true))
    agree = [np.divmod(claims, shape[1])[i][:, None] == np.divmod(things, shape[1])[i] for i in range(2)]
    credit = (agree[0].astype(float) + agree[1]) / 2
    best = credit[linear_sum_assignment(credit, maximize=True)].sum()
    score = f1(claimed.reshape(shape), true.reshape(shape))
    assert score == pytest.approx(2 * best / (len(claims) + len(things)))
    halves += best % 1 > 0
  assert halves > 50


def test_the_true_description_scores_one_in_any_order():
  rng = np.random.default_rng(1)
  for _ in range(100):
    scene = random_scene(rng)
    claims = describe(scene).split('; ')
    assert score_description('; '.join(rng.permutation(claims)), scene) == 1.0
    # Whatever is left out, doubled or wrong lowers the score.
    assert score_description('; '.join(claims[1:]), scene) < 1
    assert score_description('; '.join([*claims, claims[0]]), scene) < 1


@pytest.mark.parametrize(
  ('text', 'score'),
  [
    (
      'the red ball is ahead and near; the blue cube is behind to the left and far; the red post is behind and midway',
      1,
    ),
    ('the red ball is ahead and near', 1 / 2),
    ('the Red Ball is ahead and far', 1 / 4),
    ('the red ball is to the left and far', 0),
    ('the blue cube is behind to the left and far; the red post is behind and midway', 1 / 2),
    # The names of two things are swapped; what is not there lowers the score, and the words of boards are no claims.
    ('the red ball is ahead and near; the red post is behind to the left and far', 1 / 2),
    ('the red ball is ahead and near; the blue ball is ahead and near', 1 / 2.5),
    ('the red ball is ahead and near; the box is above and to the left', 1 / 2),
    ('the red ball is ahead and near; the red ball is ahead and near', 1 / 2 * 2 / 3),
  ],
)
def test_the_target_of_a_room_weighs_as_much_as_the_rest(text, score):
  things = {'red ball': ((5, 7),), 'blue cube': ((2, 1),), 'red post': ((5, 1),)}
  kinds = ('red ball', 'blue ball', 'red cube', 'blue cube', 'red post')
  # The player looks to the right on the map.
  scene = RoomScene((5, 5), things, heading=1, target='red ball', reach=4, kinds=kinds)
  assert score_description(text, scene) == pytest.approx(score)


def test_wrong_and_empty_descriptions_score_nothing():
  rng = np.random.default_rng(2)
  for _ in range(50):
    scene = random_scene(rng)
    assert score_description('', scene) == score_description('I see a board.', scene) == 0
    # Every place moves by one in both parts of the relation, for boards with one thing of a kind.
    single = Scene(scene.player, {kind: places[:1] for kind, places in scene.things.items()})
    signs = {k: np.sign(np.subtract(p[0], scene.player)) + 1 for k, p in single.things.items()}
    wrong = '; '.join(write_claim(k, (r + 1) % 3, (c + 2) % 3) for k, (r, c) in signs.items())
    assert score_description(wrong, single) == 0


def test_saying_everything_is_worth_little():
  everything = '; '.join(write_claim(kind, r, c) for kind in ('box', 'target') for r in range(3) for c in range(3))
  one = Scene((2, 2), {'box': ((1, 1),), 'target': ((3, 1),)})
  assert score_description(everything, one) == pytest.approx(2 / 10)


@pytest.mark.parametrize(
  ('scene', 'text', 'score'),
  [
    # One axis right of one thing; the other thing right: .5 * 2 * .5 / 2 ... by kind.
    (LAKE, 'the goal is below and to the left', 0.7 * 0.5),
    (LAKE, 'the goal is below and to the right', 0.7),
    (LAKE, 'the hole is in the same row and to the right', 0.3 * 2 / 3),
    (LAKE, 'the hole is in the same row and to the right; the box is above and to the left', 0.3 * 2 / 3 / 1.5),
    (SCENE, 'the box is above and to the left; the target is in the same row and to the left', 0.5 * 2 / 3 + 0.25),
    # Both boxes share a row with the claims, and each claim has one.
    (SCENE, 'the box is above and to the right; the box is above and to the right', 0.5 * 0.5),
    (Scene((0, 0), {'goal': ((0, 1),), 'hole': ()}), 'the goal is in the same row and to the right', 1.0),
    (Scene((0, 0), {'hole': ()}), '', 0.0),
  ],
)
def test_scores_by_hand(scene, text, score):
  assert score_description(text, scene) == pytest.approx(score)


def test_the_floor_is_subtracted():
  assert [above_floor(x, 0.4) for x in (0.0, 0.4, 1.0)] == [0, 0, 1] and above_floor(0.7, 0.4) == pytest.approx(0.5)
  assert above_floor(0.3, 0.0) == 0.3


@pytest.mark.parametrize('form', FORMATS)
def test_observations_are_compared_with_the_state_before_and_predictions_with_the_state_after(form):
  after = Scene((1, 2), {'box': ((0, 2), (1, 1)), 'target': ((2, 4),)})
  texts = {'think': '', 'observation': describe(SCENE), 'reasoning': '', 'prediction': describe(after), 'answer': 'Up'}
  sections = read_sections(write_reply(form, texts), form)
  described = {name for name in ('observation', 'prediction') if name in sections.texts}
  assert len(described) == {'no_think': 0, 'free_think': 0, 'world_modeling': 2}.get(form, 1)
  right = score_turn(sections, True, SCENE, after, SETTINGS)
  assert right == ReplyReward(0.5, dict.fromkeys(described, 1.0), dict.fromkeys(described, 0.25))
  swapped = score_turn(sections, True, after, SCENE, SETTINGS)
  assert all(0 < score < 1 for score in swapped.scores.values()) and set(swapped.scores) == described
  for name, reward in swapped.rewards.items():
    assert reward == pytest.approx(0.25 * max(0.0, (swapped.scores[name] - 0.4) / 0.6))


def test_without_the_format_reward_there_is_no_other():
  texts = {'observation': describe(SCENE), 'reasoning': '', 'prediction': describe(SCENE), 'answer': 'Up'}
  reply = write_reply('world_modeling', texts)
  right, wrong = read_sections(reply, 'world_modeling'), read_sections(reply + 'x', 'world_modeling')
  for sections, valid in ((right, False), (wrong, True)):
    assert score_turn(sections, valid, SCENE, SCENE, SETTINGS) == ReplyReward(0.0, {}, {}) == NO_REWARD
  nowhere = score_turn(right, True, None, None, SETTINGS)
  assert nowhere == ReplyReward(0.5, {}, {}) and nowhere.state_reward == 0
  both = score_turn(right, True, SCENE, SCENE, SETTINGS)
  assert both.state_reward == 0.5
