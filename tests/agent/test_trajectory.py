"""The timeline: columns as they were appended, rows put aside, and the arrays that come of them."""

from __future__ import annotations

import numpy as np

from ragen_jax.agent.segments import ImageSegment, ImageSpan
from ragen_jax.agent.trajectory import Timeline


def _end(timeline, count, **changes):
  """The trajectory of `count` episodes, two a group."""
  fields = dict(
    group=np.arange(count) // 2, episode=10 + np.arange(count), env=np.zeros(count), status=1 + np.arange(count) % 2,
    policy_version=3, pad_id=99,
  )  # fmt: skip
  return timeline.trajectory(**fields | changes)


def test_columns_are_those_that_were_appended_and_the_rest_is_padding():
  timeline = Timeline(2, 8)
  timeline.append_context(0, (5, 6), 0)
  timeline.append_reply(0, np.asarray([7, 8]), 0, logprobs=np.asarray([-1.0, -2.0]), values=0.5, entropies=[0.1, 0.2])
  timeline.reward_last_token(0, -0.1)
  timeline.append_context(1, (5,), 0)
  timeline.append_context(0, (4,), 1)
  timeline.append_reply(0, (3,), 1)
  timeline.reward_last_token(0, 10.9)
  t = _end(timeline, 2)
  assert t.tokens.tolist() == [[5, 6, 7, 8, 4, 3], [5, 99, 99, 99, 99, 99]]
  assert t.turn.tolist() == [[0, 0, 0, 0, 1, 1], [0, -1, -1, -1, -1, -1]]
  assert t.loss_mask.tolist() == [[False, False, True, True, False, True], [False] * 6]
  np.testing.assert_allclose(t.logprobs[0], [0, 0, -1, -2, 0, 0])
  np.testing.assert_allclose(t.values[0], [0, 0, 0.5, 0.5, 0, 0])
  np.testing.assert_allclose(t.entropies[0], [0, 0, 0.1, 0.2, 0, 0])
  np.testing.assert_allclose(t.rewards[0], [0, 0, 0, -0.1, 0, 10.9], rtol=1e-6)
  assert t.length.tolist() == [6, 1] and t.episode.tolist() == [10, 11]
  assert t.versions.tolist() == [[0, 0, 3, 3, 0, 3], [0] * 6] and t.policy_version.tolist() == [3, 0]


def test_experts_stand_in_the_columns_of_their_tokens():
  timeline = Timeline(2, 6)
  timeline.record_experts((1, 2), np.dtype(np.uint8))
  timeline.experts[0, :2] = [[[1, 2]], [[3, 4]]]
  timeline.append_context(0, (5, 6), 0)
  timeline.append_reply(0, (7,), 0, experts=[[[5, 6]]])
  timeline.begin_row(0)
  timeline.append_context(0, (5,), 1)
  timeline.append_reply(0, (8, 9), 1, experts=[[[7, 0]], [[2, 1]]])
  t = _end(timeline, 2)
  none = [[0, 0]]
  assert t.experts.dtype == np.uint8
  assert t.experts.tolist() == [[[[1, 2]], [[3, 4]], [[5, 6]]], [none, [[7, 0]], [[2, 1]]], [none] * 3]
  assert _end(Timeline(2, 6), 2).experts is None


def test_rewards_of_replies_are_on_the_tokens_where_they_are_paid_and_add_up():
  timeline = Timeline(2, 8)
  for row in range(2):
    timeline.append_context(row, (1, 2), 0)
    timeline.append_reply(row, (3, 4, 5), 0)
  for reward, before_end in ((0.5, 0), (0.25, 2), (1.0, 0)):
    timeline.add_reply_reward(1, reward, before_end)
  timeline.begin_row(1)
  timeline.append_reply(1, (3, 4), 1)
  timeline.add_reply_reward(1, 2.0, 1)
  t = timeline.trajectory(group=[0, 0], episode=[0, 1], env=[0, 0], status=[1, 1], policy_version=0, pad_id=9)
  assert t.reply_rewards.tolist() == [[0] * 5, [0, 0, 0.25, 0, 1.5], [2.0, 0, 0, 0, 0]]
  assert not t.rewards.any() and t.reply_rewards.dtype == np.float32


def test_a_row_is_as_old_as_the_oldest_version_that_sampled_in_it():
  timeline = Timeline(2, 8)
  timeline.append_context(0, (5, 6), 0)
  timeline.append_reply(0, (7, 8), 0, versions=[4, 5])
  timeline.append_context(0, (9,), 1)
  timeline.append_reply(0, (7,), 1, versions=6)
  timeline.append_context(1, (5,), 0)
  timeline.append_reply(1, (7,), 0, versions=9)
  t = _end(timeline, 2, policy_version=None)
  assert t.versions.tolist() == [[0, 0, 4, 5, 0, 6], [0, 9, 0, 0, 0, 0]]
  assert t.versions.dtype == np.int32 and t.policy_version.tolist() == [4, 9]


def test_rows_that_were_put_aside_come_before_the_episode_s_last_and_empty_ones_at_the_end():
  timeline = Timeline(8, 6)
  for row in range(8):
    timeline.append_context(row, (row,), 0)
  timeline.begin_row(2)
  timeline.append_reply(2, (20, 21), 1)
  timeline.begin_row(2)
  timeline.append_context(2, (22,), 2)
  timeline.begin_row(5)
  timeline.begin_row(5)  # an empty row is not put aside
  t = _end(timeline, 8)
  # 8 episodes and 3 more rows, filled up to a multiple of 8 / 4.
  assert len(t.length) == 12
  assert t.episode.tolist() == [10, 11, 12, 12, 12, 13, 14, 15, 15, 16, 17, 10]
  assert t.length.tolist() == [1, 1, 1, 2, 1, 1, 1, 1, 0, 1, 1, 0]
  assert t.tokens[:5].tolist() == [[0, 99], [1, 99], [2, 99], [20, 21], [22, 99]]
  assert t.group.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 0]
  assert t.loss_mask.sum() == 2 and t.turn[3].tolist() == [1, 1] and t.turn[8].tolist() == [-1, -1]


def test_episodes_without_tokens_are_rows_of_two_columns_of_padding():
  t = _end(Timeline(3, 0), 3)
  assert t.tokens.tolist() == [[99, 99]] * 3 and not t.length.any() and (t.turn == -1).all()


def _board(number: int) -> ImageSegment:
  return ImageSegment(np.full((8, 16, 3), number, np.uint8), 2)


def test_columns_of_images_tell_which_image_and_equal_images_are_one():
  timeline = Timeline(2, 12)
  timeline.append_context(0, (5, 9, 9, 6), 0, [ImageSpan(_board(1), 1, 3)])
  timeline.append_reply(0, (7,), 0)
  timeline.append_context(0, (9, 9, 5, 9, 9), 1, [ImageSpan(_board(2), 0, 2), ImageSpan(_board(1), 3, 5)])
  timeline.append_context(1, (5,), 0)
  t = _end(timeline, 2)
  assert t.image.tolist() == [[-1, 0, 0, -1, -1, 1, 1, -1, 0, 0], [-1] * 10]
  assert [int(image[0, 0, 0]) for image in timeline.images] == [1, 2]
  # A closed row keeps its images, and the next row of the episode begins without any.
  timeline.begin_row(0)
  timeline.append_context(0, (5, 9, 9), 2, [ImageSpan(_board(2), 1, 3)])
  t = _end(timeline, 2)
  assert t.episode.tolist() == [10, 10, 11]
  assert t.image[:, :5].tolist() == [[-1, 0, 0, -1, -1], [-1, 1, 1, -1, -1], [-1] * 5] and len(timeline.images) == 2


def test_rows_of_text_have_no_images():
  timeline = Timeline(1, 4)
  timeline.append_context(0, (5, 6), 0)
  assert _end(timeline, 1).image is None and not timeline.images
