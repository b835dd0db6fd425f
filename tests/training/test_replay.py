"""The replay buffer: whole groups, their age, and runs that learn from it."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from ragen_jax import train
from ragen_jax.agent.rollout import Rollout
from ragen_jax.agent.segments import ImageSegment, ImageSpan
from ragen_jax.agent.trajectory import Timeline
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.training.replay import ReplayBuffer, ReplaySettings
from tests.support.configs import small_config


def test_the_buffer_gives_back_whole_groups_that_are_not_too_old(policy, played):
  rollout, _ = played
  buffer = ReplayBuffer(ReplaySettings(groups=0, max_age=2))
  rng = np.random.default_rng(0)
  assert buffer.draw(4, rng, 0) == []
  rows, scale = np.arange(4, 32), np.linspace(0, 1, 32, dtype=np.float32)  # the first group was not learnt from
  for iteration in range(4):
    t = rollout.trajectory
    experts = rng.integers(0, 9, (*t.tokens.shape, 2, 3)).astype(np.uint8)
    t = t.replace(versions=np.full_like(t.versions, iteration), experts=experts)
    marked = dataclasses.replace(rollout, trajectory=t)
    buffer.add(marked, rows, scale, iteration)
  drawn = buffer.draw(100, rng, 4)
  assert [int(d.trajectory.policy_version[0]) for d, _ in drawn] == [2, 3]
  assert [len(d.trajectory.length) for d, _ in drawn] == [28, 28]
  some = buffer.draw(5, rng, 4)
  assert sum(len(np.unique(d.trajectory.group)) for d, _ in some) == 5
  for d, factors in drawn + some:
    t = d.trajectory
    for g in np.unique(t.group):
      own = np.flatnonzero(t.group == g)
      assert len(own) == 4
      original = next(r for r in range(0, 32, 4) if (rollout.trajectory.tokens[r : r + 4] == t.tokens[own]).all())
      np.testing.assert_array_equal(factors[own], scale[original : original + 4])
      np.testing.assert_array_equal(d.scores[own], rollout.scores[original : original + 4])
      np.testing.assert_array_equal(t.logprobs[own], rollout.trajectory.logprobs[original : original + 4])
  # And through a checkpoint.
  arrays, described = buffer.state()
  again = ReplayBuffer(ReplaySettings(groups=0, max_age=2))
  again.load_state(arrays, json.loads(json.dumps(described)))
  jax.tree.map(np.testing.assert_array_equal, again.state()[0], arrays)
  assert again.state()[1] == described
  assert buffer.draw(100, rng, 6) == []


@pytest.mark.slow
def test_replayed_groups_are_learnt_from_with_importance_weights_and_a_run_resumes_with_them(tmp_path):
  fields = {
    'replay__groups': 2, 'replay__max_age': 1, 'algorithm__old_logprobs': 'trainer', 'algorithm__tis_cap': 2.0,
    'eval__every': 0, 'eval__greedy_too': False, 'optimizer__actor_lr': 3e-3, 'checkpoint__every': 2,
  }  # fmt: skip
  config = small_config(num_iterations=3, **fields)
  train.train_and_evaluate(config, str(tmp_path / 'whole'))
  lines = read_metrics(tmp_path / 'whole')[1:]
  assert [line['rollout/replayed_groups'] for line in lines] == [0, 2, 2]
  assert [line['rollout/policy_lag_max'] for line in lines] == [0, 1, 1]
  assert all(0 < line['rollout/policy_lag_mean'] < 1 for line in lines[1:])
  assert all(line['rollout/logprob_gap_max'] < 1e-3 for line in lines)  # of fresh rows
  assert {line['train/num_mini_batches'] for line in lines} == {2}
  train.train_and_evaluate(small_config(num_iterations=2, **fields), str(tmp_path / 'parts'))
  train.train_and_evaluate(config, str(tmp_path / 'parts'))
  last = [{n: x for n, x in part[-1].items() if not n.startswith(('timing_s/', 'perf/'))}
          for part in (lines, read_metrics(tmp_path / 'parts'))]  # fmt: skip
  assert last[0] == last[1]


def test_images_of_replayed_rows_go_through_a_checkpoint():
  images = [np.full((8, 8 * i, 3), i, np.uint8) for i in range(1, 13)]
  timeline = Timeline(len(images) + 1, 4)
  for row, image in enumerate(images):
    timeline.append_context(row, (5, *[9] * (row + 1))[:3], 0, [ImageSpan(ImageSegment(image, 1), 1, 2)])
  timeline.append_context(len(images), (5, 6), 0)
  of = np.arange(len(images) + 1)
  trajectory = timeline.trajectory(group=of, episode=of, env=of, status=of, policy_version=0, pad_id=0)
  rollout = Rollout(trajectory, [], of[:, None], of.astype(np.float32), 0, 0, images=tuple(timeline.images))
  buffer, again = (ReplayBuffer(ReplaySettings(groups=0, max_age=2)) for _ in range(2))
  buffer.add(rollout, of[1:], np.ones(len(of)), 0)  # without the first image
  buffer.add(rollout, of[-1:], np.ones(len(of)), 1)  # a row of text
  arrays, described = buffer.state()
  zeros = ReplayBuffer.empty_state(json.loads(json.dumps(described)))
  assert jax.tree.map(np.shape, zeros) == jax.tree.map(np.shape, arrays)
  again.load_state(arrays, described)
  (first, _), (second, _) = again.draw(100, np.random.default_rng(0), 1)
  assert [image.shape[1] // 8 for image in first.images] == list(range(2, 13))
  assert first.trajectory.image[:, 1].tolist() == [*range(11), -1]
  assert second.trajectory.image is None and second.images == ()
