"""Assumed lengths, and the shapes of a run beside those of a real rollout."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from ragen_jax import build
from ragen_jax.agent.sampler_speaker import SamplerSpeaker
from ragen_jax.compilers import lengths
from ragen_jax.compilers.lengths import Lengths
from ragen_jax.training.batches import BatchingSettings, plan_micro_batches
from tests.support import builders

FULL = Lengths(prompt=100, observation=20, reply=30, longest=50, turns=3, whole=True, limit=400)


def test_rows_hold_prompt_observations_and_replies():
  assert (FULL.row, FULL.sampled, FULL.rows) == (100 + 3 * 30 + 2 * 20, 90, 1)
  assert [FULL.before(turn) for turn in range(3)] == [0, 100 + 40, 100 + 2 * 40 + 20]
  short = dataclasses.replace(FULL, limit=150)
  assert (short.row, short.before(2)) == (150, 150)


def test_without_the_full_context_each_turn_is_a_row():
  window = dataclasses.replace(FULL, whole=False)
  assert (window.row, window.sampled, window.rows, window.before(2)) == (130, 30, 3, 0)


def test_assumptions_stay_within_the_limits_of_the_agent():
  config = builders.small_config(agent__max_context=200, agent__max_response_tokens=40)
  config.update_from_flattened_dict({'plan.prompt_tokens': 500, 'plan.turns': 9, 'plan.reply_tokens': 60})
  found = lengths.from_config(config, max_turns=4)
  assert found == Lengths(prompt=160, observation=80, reply=40, longest=40, turns=4, whole=True, limit=200)
  config.plan.turns = 0
  assert lengths.from_config(config, max_turns=4).turns == 4
  config.plan.turns = 2
  assert lengths.from_config(config, max_turns=4).turns == 2


def test_shapes_are_rounded_as_in_a_real_rollout():
  """The columns that the speaker feeds and allocates, beside those that are computed from its timelines."""
  config = builders.small_config(length_step=32)
  policy = build.load_policy(config)
  trainer = build.make_trainer(config, policy)
  seen = []
  extend = policy.sampler.extend

  def recorded(params, state, tokens, count, *rest):
    seen.append((tokens.shape[1], state.valid.shape[1], int(np.max(count)), np.asarray(state.count)))
    return extend(params, state, tokens, count, *rest)

  policy.sampler.extend = recorded
  state = trainer.init()
  speaker = SamplerSpeaker(policy.sampler, state.params, jax.random.key(3), build.sampling(config.train))
  trainer.proxy.rollout(speaker, 0)
  assert len(seen) > 1
  for turn, (width, columns, tokens, before) in enumerate(seen):
    assert width == lengths.observation_columns(config, tokens)
    held = int(before.max()) if turn else 0
    assert columns == lengths.cache_size(config, held, width)


def _config(**fields):
  return builders.small_config(
    train__groups=4, train__group_size=4, optimizer__mini_batch_size=8, optimizer__micro_batch_size=4, length_step=64,
    agent__max_context=1024, agent__max_response_tokens=100, **fields,
  )  # fmt: skip


def _batching(config):
  return BatchingSettings(config.optimizer.micro_batch_size, config.length_step, whole_rows=False)


def test_programs_of_a_run_only_grow_and_one_shape_needs_one_of_each():
  config = _config()
  counts = lengths.shapes_of_run(config, dataclasses.replace(FULL, limit=1024), _batching(config), 30)
  assert len(counts) == 30
  for before, after in itertools.pairwise(counts):
    assert all(after[kind] >= before[kind] for kind in before)
  assert counts[-1]['gradient'] > counts[0]['gradient'] >= 1
  config.length_step = 1024
  short = dataclasses.replace(FULL, limit=1024, turns=1)
  once = lengths.shapes_of_run(config, short, _batching(config), 30)[-1]
  assert once == {'extend': 1, 'decode': 1, 'order': 0, 'pick': 0, 'gradient': 1, 'score': 1, 'apply': 1}


def test_gradient_shapes_are_those_of_the_planner():
  """One iteration, counted again from the same episodes with NumPy."""
  config, assumed = _config(), dataclasses.replace(FULL, limit=1024)
  found = lengths.shapes_of_run(config, assumed, _batching(config), 1)[0]['gradient']
  rng = np.random.default_rng(0)
  replies, turns = lengths._episodes(rng, assumed, config, 16, 30 * lengths._FROM)
  sampled = np.asarray([row[:n].sum() for row, n in zip(replies, turns, strict=True)])
  length = 100 + sampled + (turns - 1) * 20
  shapes, order = set(), rng.permutation(16)
  for part in (order[:8], order[8:]):
    for plan in plan_micro_batches(part.astype(np.int32), length, sampled, size=4, length_step=64):
      shapes.add((plan.width, plan.replies))
  assert found == len(shapes)


@pytest.mark.parametrize(('rows', 'live', 'bucket'), [(16, 16, 16), (16, 8, 8), (16, 9, 16), (16, 1, 2), (6, 3, 3)])
def test_rows_shrink_by_halves(rows, live, bucket):
  assert lengths._bucket(rows, live) == bucket
