"""Gradient norms by bucket, and what thoughts have to do with their prompts."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax import build
from ragen_jax.training.probes import Prompt
from tests.support import learning
from tests.support.configs import small_config


def _probes(policy, **fields):
  trainer, state = learning.make_trainer(policy, **fields)
  config = small_config(train__groups=8, **fields)
  return trainer, state, build.make_probes(config, trainer)


@pytest.mark.slow
def test_the_gradient_of_the_only_bucket_is_that_of_the_update(policy, played):
  rollout, _ = played
  trainer, state, probes = _probes(
    policy, monitor__gradient_buckets=1, algorithm__entropy_coef=0.0, algorithm__value_coef=0.0,
    optimizer__mini_batch_size=32,
  )  # fmt: skip
  selection = trainer.select(rollout)
  batch, _ = trainer.estimate(state, selection)
  found = probes.gradient_norms(state, selection, batch)
  _, metrics = trainer.update(state, batch, selection)
  assert metrics['train/num_mini_batches'] == 1
  assert found['grad_norm/bucket_0/task'] == pytest.approx(metrics['actor/grad_norm'], rel=1e-3)
  assert 'grad_norm/bucket_0/entropy' not in found  # it is off


@pytest.mark.slow
def test_buckets_divide_the_groups_by_deviation(policy, played):
  rollout, _ = played
  trainer, state, probes = _probes(policy, monitor__gradient_buckets=2, algorithm__entropy_coef=0.01)
  selection = trainer.select(rollout)
  batch, _ = trainer.estimate(state, selection)
  metrics = probes.gradient_norms(state, selection, batch)
  assert metrics['grad_norm/bucket_0/rows'] + metrics['grad_norm/bucket_1/rows'] == 32
  assert metrics['grad_norm/bucket_0/reward_std'] < metrics['grad_norm/bucket_1/reward_std']
  assert metrics['grad_norm/bucket_1/task'] > 0 and metrics['grad_norm/bucket_1/entropy'] > 0
  assert 'grad_norm/bucket_1/kl' not in metrics  # it is off


@pytest.mark.slow
def test_thoughts_depend_on_their_prompts(policy, played):
  """The built-in model names the squares that it sees: its thoughts are likelier under their own prompts."""
  rollout, _ = played
  _, state, probes = _probes(policy, monitor__information_samples=8, optimizer__micro_batch_size=8)
  for first_only in (True, False):
    found = probes.thought_information(state, rollout, np.random.default_rng(0), first_only=first_only)
    assert found['valid_thinking_rate'] > 0.5
    assert 0 < found['mi'] <= np.log(8) and found['retrieval_top1'] > found['retrieval_top1_chance']


@pytest.mark.slow
def test_the_score_of_a_thought_under_its_own_prompt_is_what_the_sampler_recorded(policy, played):
  rollout, _ = played
  _, state, probes = _probes(policy, monitor__information_samples=8, optimizer__micro_batch_size=8)
  t = rollout.trajectory
  drawn = probes.draw_thoughts(rollout, np.random.default_rng(0), first_only=False)
  assert len({int(t.episode[row]) for row, _ in drawn}) == len(drawn) == 8
  closed = [(row, columns) for row, columns in drawn if len(columns)]
  for row, columns in closed:
    ids = t.tokens[row, columns].tolist()
    assert '</think>' in policy.tokenizer.decode(ids) and '</think>' not in policy.tokenizer.decode(ids[:-1])
  scores = probes.cross_scores(
    state.params, [Prompt(t.tokens[row, : c[0]], None) for row, c in closed], [t.tokens[row, c] for row, c in closed]
  )
  recorded = [t.logprobs[row, columns].sum() for row, columns in closed]
  np.testing.assert_allclose(np.diag(scores), recorded, atol=1e-3)


@pytest.mark.slow
def test_probes_run_when_they_are_due(policy, played):
  rollout, _ = played
  trainer, state, probes = _probes(
    policy, monitor__information_every=2, monitor__gradients_every=3, monitor__information_samples=2,
    monitor__gradient_buckets=1, optimizer__mini_batch_size=32, optimizer__micro_batch_size=32,
  )  # fmt: skip
  selection = trainer.select(rollout)
  batch, _ = trainer.estimate(state, selection)
  groups = [
    {name.split('/')[0].split('_')[0] for name in probes(state.replace(iteration=i), rollout, selection, batch)}
    for i in range(4)
  ]
  assert groups == [{'grad', 'collapse'}, set(), {'collapse'}, {'grad'}]
