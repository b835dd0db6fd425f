"""Models with experts, or with windows, play and learn: the update has the numbers of the sampler."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax import build
from tests.support.configs import small_config
from tests.support.models import EXPERTS, HYBRID_EXPERTS, WINDOWS, random_policy


@pytest.mark.parametrize(
  ('fields', 'shape'),
  [
    pytest.param(
      {'optimizer__packing': True, 'agent__schedule': 'continuous', 'agent__decode_chunk': 5},
      EXPERTS,
      marks=pytest.mark.slow,
    ),
    ({'optimizer__packing': True, 'model__logits_chunk': 16, 'lora__rank': 2}, WINDOWS),
    pytest.param({'model__remat': True, 'algorithm__ratio_level': 'sequence'}, EXPERTS, marks=pytest.mark.slow),
    pytest.param(
      {'model__separate_critic': True, 'algorithm__old_logprobs': 'trainer'}, EXPERTS, marks=pytest.mark.slow
    ),
    pytest.param({'optimizer__packing': True}, HYBRID_EXPERTS, marks=pytest.mark.slow),
    pytest.param(
      {'lora__rank': 2, 'lora__targets': 'all-linear', 'model__remat': 'auto'}, EXPERTS, marks=pytest.mark.slow
    ),
  ],
  ids=['packed', 'windows', 'computed again, GSPO', 'separate critic', 'behind memories', 'adapters'],
)
def test_an_iteration_has_the_log_probs_of_the_sampler(tmp_path, fields, shape):
  config = small_config(agent__max_response_tokens=12, envs__FrozenLake__max_turns=2, **fields)
  saved = random_policy(config, tmp_path, **shape)
  config.model.path = saved.directory
  trainer = build.make_trainer(config, build.load_policy(config))
  state = trainer.init()
  rollout, selection = trainer.collect(state)
  assert rollout.tokens_sampled > 100
  batch, metrics = trainer.estimate(state, selection)
  state, more = trainer.update(state, batch, selection)
  metrics |= more
  gaps = [metrics[name] for name in ('rollout/logprob_gap_max', 'actor/logprob_gap_max') if name in metrics]
  assert gaps and max(gaps) < 1e-4, gaps
  assert metrics['actor/grad_norm'] > 0 and np.isfinite(metrics['actor/pg_loss'])
  if fields.get('optimizer__packing') and shape is not HYBRID_EXPERTS:
    assert metrics['perf/shared_tokens'] > 0  # rows of a bin share their beginnings
