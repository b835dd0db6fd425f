"""Rollouts joined, cut and padded."""

from __future__ import annotations

import dataclasses

import numpy as np

from ragen_jax.agent.episode import Episode, Status, Turn
from ragen_jax.agent.rollout import SENT_TYPES, Rollout, concatenate, pad_rows, take_rows
from ragen_jax.agent.segments import ImageSegment, ImageSpan, TextSegment
from ragen_jax.agent.trajectory import Timeline
from ragen_jax.agent.world_model.state_reward import ReplyReward
from ragen_jax.envs.scenes import Scene
from ragen_jax.utils.messages import pack, unpack

PAD = 99


def _rollout(lengths, first_group=0, first_episode=0):
  """Two episodes a group, one row each; ids count from the row's number times 10."""
  timeline, count = Timeline(len(lengths), 8), len(lengths)
  for row, length in enumerate(lengths):
    timeline.append_context(row, tuple(10 * row + i for i in range(length - 1)), 0)
    timeline.append_reply(row, (row,), 0)
  group = first_group + np.arange(count) // 2
  trajectory = timeline.trajectory(
    group=group, episode=first_episode + np.arange(count), env=np.zeros(count), status=np.ones(count),
    policy_version=0, pad_id=PAD,
  )  # fmt: skip
  episodes = [Episode('Bandit', int(g), 7, []) for g in group]
  anchors = np.stack([group - first_group, np.full(count, -1)], axis=1).astype(np.int32)
  return Rollout(trajectory, episodes, anchors, np.arange(count, dtype=np.float32), count, PAD)


def test_shares_of_a_rollout_keep_their_numbers():
  whole = concatenate([_rollout([3, 4]), _rollout([6, 2], first_group=1, first_episode=2)], renumber=False)
  t = whole.trajectory
  assert t.group.tolist() == [0, 0, 1, 1] and t.episode.tolist() == [0, 1, 2, 3]
  assert t.tokens.shape == (4, 6) and t.tokens[1].tolist() == [10, 11, 12, 1, PAD, PAD]
  assert t.turn[0].tolist() == [0, 0, 0, -1, -1, -1]
  # Each part numbered its anchors by itself, and -1 is none.
  assert whole.anchors.tolist() == [[0, -1], [0, -1], [1, -1], [1, -1]]
  one_turn = dataclasses.replace(_rollout([2, 2]), anchors=np.zeros((2, 1), np.int32))
  longer = concatenate([one_turn, _rollout([3, 4])], renumber=True)
  assert longer.anchors.tolist() == [[0, -1], [0, -1], [1, -1], [1, -1]]
  assert whole.tokens_sampled == 4 and whole.scores.tolist() == [0, 1, 0, 1]
  assert [e.group for e in whole.episodes] == [0, 0, 1, 1]


def test_experts_are_joined_taken_and_padded_with_their_columns():
  parts = []
  for lengths in ([3, 4], [6, 2]):
    part = _rollout(lengths)
    experts = part.trajectory.tokens[:, :, None, None].repeat(2, axis=3).astype(np.uint8)
    parts.append(dataclasses.replace(part, trajectory=part.trajectory.replace(experts=experts)))
  t = pad_rows(take_rows(concatenate(parts, renumber=True), np.asarray([1, 2])), 3).trajectory
  assert t.experts.shape == (3, 6, 1, 2) and t.experts.dtype == np.uint8
  assert t.experts[:, :, 0, 1].tolist() == [[10, 11, 12, 1, 0, 0], [0, 1, 2, 3, 4, 0], [0] * 6]


def test_scores_that_estimators_compare_have_the_rewards_of_replies_and_raw_scores_do_not():
  rollout = _rollout([3, 4, 2, 5])
  t = rollout.trajectory
  paid = np.zeros(t.rewards.shape, np.float32)
  paid[1, 2], paid[1, 3], paid[2, 1] = 0.25, 0.1, 0.1
  t = t.replace(reply_rewards=paid, episode=np.array([0, 1, 1, 3]), group=np.array([0, 0, 0, 1]))
  rollout.trajectory = t
  expected = [0, 1 + 0.25 + 2 * np.float32(0.1).astype(float), 1 + 0.25 + 2 * np.float32(0.1).astype(float), 3]
  np.testing.assert_array_equal(rollout.trained_scores, np.asarray(expected, np.float32))
  assert rollout.trained_scores.dtype == np.float32 and rollout.scores.tolist() == [0, 1, 1, 3]
  assert take_rows(rollout, np.array([1, 2])).trained_scores.tolist() == rollout.trained_scores[1:3].tolist()
  both = concatenate([rollout, rollout], renumber=True)
  assert both.trained_scores.tolist() == 2 * rollout.trained_scores.tolist()


def test_several_rollouts_are_numbered_on():
  whole = concatenate([_rollout([3, 4, 2, 2]), _rollout([6, 2])], renumber=True)
  assert whole.trajectory.group.tolist() == [0, 0, 1, 1, 2, 2]
  assert whole.trajectory.episode.tolist() == list(range(6))
  assert [e.group for e in whole.episodes] == [0, 0, 1, 1, 2, 2]
  one = _rollout([3, 4])
  assert concatenate([one], renumber=True) is one


def test_rows_that_are_taken_are_numbered_from_0():
  part = take_rows(_rollout([3, 4, 2, 5]), np.asarray([1, 3]))
  assert part.trajectory.tokens[1, :5].tolist() == [30, 31, 32, 33, 3]
  assert part.trajectory.group.tolist() == [0, 1] and part.trajectory.episode.tolist() == [0, 1]
  assert part.scores.tolist() == [1, 3] and part.tokens_sampled == 2 and not part.episodes


def test_padding_rows_are_empty():
  padded = pad_rows(_rollout([3, 4, 2, 5]), 3)
  t = padded.trajectory
  assert len(t.length) == 6 and t.length[4:].tolist() == [0, 0]
  assert (t.tokens[4:] == PAD).all() and (t.turn[4:] == -1).all() and not t.loss_mask[4:].any()
  assert (padded.anchors[4:] == -1).all() and padded.anchors.shape == (6, 2)
  assert len(pad_rows(padded, 3).trajectory.length) == 6


def _seeing(*shown: int) -> Rollout:
  """One row for each number, which shows the image of this number in its middle column; -1 shows none."""
  timeline = Timeline(len(shown), 4)
  for row, number in enumerate(shown):
    segment = ImageSegment(np.full((8, 8, 3), max(number, 0), np.uint8), 1)
    timeline.append_context(row, (5, 9), 0, [ImageSpan(segment, 1, 2)] if number >= 0 else [])
    timeline.append_reply(row, (7,), 0)
  of = np.arange(len(shown))
  trajectory = timeline.trajectory(group=of, episode=of, env=of * 0, status=of * 0 + 1, policy_version=0, pad_id=PAD)
  anchors = np.full((len(shown), 1), -1, np.int32)
  scores = np.zeros(len(shown), np.float32)
  return Rollout(trajectory, [], anchors, scores, len(shown), PAD, images=tuple(timeline.images))


def _shown(rollout: Rollout) -> list[int]:
  """The number of the image that each row shows."""
  image = rollout.trajectory.image[:, 1]
  assert (rollout.trajectory.image[:, [0, 2]] == -1).all()
  return [int(rollout.images[i][0, 0, 0]) if i >= 0 else -1 for i in image]


def test_rollouts_are_joined_with_each_image_once():
  whole = concatenate([_seeing(3, 4, 3), _seeing(-1, -1), _seeing(5, -1, 4)], renumber=True)
  assert _shown(whole) == [3, 4, 3, -1, -1, 5, -1, 4] and len(whole.images) == 3
  assert concatenate([_seeing(-1), _seeing(-1)], renumber=True).trajectory.image is None


def test_rows_that_are_taken_keep_their_images_only():
  rollout = _seeing(3, 4, -1, 5, 3)
  some = take_rows(rollout, np.array([4, 1, 2]))
  assert _shown(some) == [3, 4, -1] and len(some.images) == 2
  none = take_rows(rollout, np.array([2]))
  assert none.trajectory.image is None and none.images == ()
  padded = pad_rows(rollout, 4)
  assert padded.trajectory.image[5:].tolist() == [[-1] * 3] * 3 and padded.images is rollout.images


def test_a_process_gets_the_rollout_that_another_one_sent():
  rollout, picture = _seeing(3, -1), np.arange(27, dtype=np.uint8).reshape(3, 3, 3)
  scenes = (Scene((0, 1), {'goal': ((2, 2),)}), Scene((1, 1), {'goal': ((2, 2),), 'hole': ()}))
  turn = Turn(
    (TextSegment('a board: '), ImageSegment(picture, 2)), 'left', ['Left'], (0.1, np.float64(0.2)), -0.1, True, 1,
    picture, ids=(1, 2), chat=[{'role': 'user', 'content': 'a board'}], sections={'think': 'go'}, scenes=scenes,
    reply_reward=ReplyReward(0.5, {'observation': 0.75}, {'observation': 0.25}),
  )  # fmt: skip
  rollout.episodes = [
    Episode('FrozenLake', 0, 7, [turn, turn], status=Status.SUCCESS, final_picture=picture, graded=('observation',)),
    Episode('Bandit', 1, 8, [], 'over', Status.ENV_ERROR, error='ValueError'),
  ]
  back = unpack(pack(rollout, SENT_TYPES), SENT_TYPES)
  assert repr(back) == repr(rollout)
  assert back.episodes[0].score == rollout.episodes[0].score and back.episodes[1].status is Status.ENV_ERROR
  assert _shown(concatenate([back, rollout], renumber=False)) == [3, -1, 3, -1]
  np.testing.assert_array_equal(back.episodes[0].turns[1].picture, picture)


def test_equal_rewards_of_replies_in_other_turns_are_equal_scores():
  rollout = _rollout([6, 6, 6])
  rewards = np.zeros_like(rollout.trajectory.reply_rewards)
  rewards[0, :3], rewards[1, :3] = [1e8, 1, -1e8], [1e8, -1e8, 1]  # in float32, the first sum would be 0
  t = rollout.trajectory.replace(reply_rewards=rewards)
  scores = dataclasses.replace(rollout, trajectory=t, episode_scores=np.zeros(3, np.float32)).trained_scores
  assert scores.tolist() == [1, 1, 0]
