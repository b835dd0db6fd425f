"""How conversations are divided and drawn."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from ragen_jax import build
from ragen_jax.agent import segments
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.models import presets
from ragen_jax.models.vision.processor import ProcessorConfig
from ragen_jax.sft import data as sft_data
from ragen_jax.sft.demonstrations import DemonstrationStyle
from tests.support.configs import small_config
from tests.support.examples import examples_with_images, made_up_examples


def test_levels_are_kept_back_whole():
  data = made_up_examples()
  data.level = np.asarray([0, 0, 1, 1, 2, 2, 3, 3], np.int32)
  shown, withheld = sft_data.split(data, 0.3, seed=5)
  assert len(withheld) == 4 and not set(data.level[shown]) & set(data.level[withheld])
  assert sorted([*shown, *withheld]) == list(range(8))
  assert [x.tolist() for x in sft_data.split(data, 0.0, seed=5)] == [list(range(8)), []]


def test_a_step_draws_each_conversation_once_and_a_resumed_run_draws_the_same():
  rows = np.asarray([3, 5, 8, 9, 12])
  drawn = [x.tolist() for x in itertools.islice(sft_data.step_rows(rows, 4, seed=1), 6)]
  assert all(len(set(x)) == 4 and set(x) <= set(rows.tolist()) for x in drawn) and len(set(map(tuple, drawn))) > 1
  assert [x.tolist() for x in itertools.islice(sft_data.step_rows(rows, 4, seed=1, first_step=4), 2)] == drawn[4:]


def test_other_conversations_have_another_checksum():
  data, other = made_up_examples(), made_up_examples()
  assert data.checksum == other.checksum
  other = made_up_examples()
  other.tokens[0, 0] += 1
  assert data.checksum != other.checksum


def test_other_values_have_another_checksum_where_they_are_learnt():
  data = made_up_examples()
  other = dataclasses.replace(data, values=data.values + 1)
  assert data.checksum_for(0.5) != other.checksum_for(0.5)
  assert data.checksum_for(0) == other.checksum_for(0) == data.checksum


def test_first_turns_end_with_the_first_reply_and_keep_their_images():
  data = examples_with_images(16)
  first = sft_data.first_turns(data)
  np.testing.assert_array_equal(first.length, 12)
  np.testing.assert_array_equal(first.sampled, 4)
  np.testing.assert_array_equal(first.columns[first.mask].reshape(-1, 4), [[8, 9, 10, 11]] * 16)
  assert (first.columns[~first.mask] == 1).all()  # columns of other replies are past the end
  assert ((first.images.index >= 0).sum(axis=1) == 1).all()
  np.testing.assert_array_equal(first.images.index[:, 4], data.images.index[:, 4])
  np.testing.assert_array_equal(first.tokens[:, :12], data.tokens[:, :12])


def test_other_images_have_another_checksum():
  data, other = examples_with_images(4), examples_with_images(4)
  assert data.checksum == other.checksum
  moved = dataclasses.replace(other, images=other.images.replace(index=other.images.index[::-1]))
  assert moved.checksum != data.checksum
  darker = tuple(image // 2 for image in other.images.gallery.pixels)
  gallery = dataclasses.replace(other.images.gallery, pixels=darker)
  assert dataclasses.replace(other, images=other.images.replace(gallery=gallery)).checksum != data.checksum


def test_parts_are_joined_with_their_levels_values_and_images():
  config = small_config(
    {'envs.SimpleSokoban.observation': 'image', 'agent.max_context': 4096, 'reward.format_reward': 0.5}
  )
  processor = ProcessorConfig(8, 1, 1, 64, 65536, (0.5,) * 3, (0.5,) * 3)
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  tokenizer._image_ids = (4, 5, 6)  # of bytes that no prompt contains
  style = DemonstrationStyle(discount=0.97, noise=0.5, hurry=0.5, beginner=0.0, timid=0.0, actions_per_turn=0)
  lessons = []
  for k, form in enumerate(('no_think', 'world_modeling')):
    config.agent.format = form
    [spec] = build.env_specs(config, ('SimpleSokoban',), (6,))
    context, limits = build.context_manager(config, tokenizer, [spec]), build.episode_limits(config, [spec])
    lessons.append(sft_data.Lesson(spec, context, limits, 500 + 6 * k))
  settings = sft_data.DemonstrationSettings(group_size=2, seed=0)
  parts = sft_data.collect_demonstrations(lessons, style, settings, frozenset(), processor)
  for part, form in zip(parts, ('no_think', 'world_modeling'), strict=True):
    assert part.images and {e.form for e in part.episodes} == {form}
    _assert_images_are_those_of_the_boards(part)
  data = sft_data.join(parts, None, None)
  np.testing.assert_array_equal(data.level, np.repeat(np.arange(12), 2))
  rows = [row for part in parts for row in zip(part.episodes, part.trajectory.turn, strict=True)]
  for row, (episode, turn_of) in enumerate(rows):
    for column, value in zip(data.columns[row][data.mask[row]], data.values[row][data.mask[row]], strict=True):
      turns = episode.turns[turn_of[column] :]
      assert value == pytest.approx(sum(sum(turn.rewards) + 0.5 for turn in turns), abs=1e-5)
  assert len({*np.round(data.values[data.mask], 2).tolist()}) > 8  # of Sokoban: -0.1 for each action, 10 for success
  squares = [np.square(data.values[rows][data.mask[rows]]).mean() for rows in (slice(0, 12), slice(12, 24))]
  np.testing.assert_allclose(data.value_scale, np.repeat(1 / np.asarray(squares), 12), rtol=1e-5)


def _assert_images_are_those_of_the_boards(part):
  """The k-th image of a row is the one of its k-th turn."""
  for row, episode in enumerate(part.episodes):
    shown = part.trajectory.image[row]
    images = [segments.images_of(turn.observation)[0] for turn in episode.turns]
    assert (shown >= 0).sum() == 36 * len(images)
    runs = np.split(shown[shown >= 0], len(images))
    for run, image in zip(runs, images, strict=True):
      np.testing.assert_array_equal(part.images[run[0]], image)
