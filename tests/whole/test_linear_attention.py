"""A model with linear attention plays and learns: its update has the numbers of its sampler, rows packed or not."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax import build, train
from ragen_jax.agent.language_model import LanguageModel
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.models import presets
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.runs.metrics import read_metrics
from tests.support.configs import small_config
from tests.support.models import HYBRID, WIDE_HYBRID, random_model, random_policy

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
  'fields',
  [
    {'optimizer__packing': True, 'agent__schedule': 'continuous', 'agent__decode_chunk': 5, 'agent__rows_in_flight': 8},
    {'model__remat': True, 'algorithm__old_logprobs': 'trainer'},
    {'lora__rank': 2, 'optimizer__packing': True, 'model__remat': 'auto'},
  ],
  ids=['packed', 'computed again', 'adapters'],
)
@pytest.mark.exhaustive_cases('adapters', 'computed again')
def test_an_iteration_has_the_log_probs_of_the_sampler(tmp_path, fields):
  """Rows wait, go on in the middle of replies and share prompts; the rows of a bin share none."""
  config = small_config(agent__max_response_tokens=12, envs__FrozenLake__max_turns=2, **fields)
  saved = random_policy(config, tmp_path, **WIDE_HYBRID)
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
  assert not metrics.get('perf/shared_tokens', 0)


@pytest.mark.slow
def test_the_built_in_hybrid_plays_and_learns(tmp_path):
  config = small_config(
    {'model.preset': presets.TINY_HYBRID, 'num_iterations': 2, 'eval.every': 1, 'eval.greedy_too': False}
  )
  train.train_and_evaluate(config, str(tmp_path))
  lines = read_metrics(str(tmp_path))
  assert lines[0]['val-env/FrozenLake/format_correct'] > 0.9
  assert [line['actor/grad_norm'] > 0 for line in lines[1:]] == [True, True]
  assert max(line['rollout/logprob_gap_max'] for line in lines[1:]) < 1e-4


@pytest.mark.parametrize(('policy', 'critic'), [({}, HYBRID), (HYBRID, {}), ({}, {})])
def test_rows_of_a_bin_share_their_beginnings_only_if_no_trunk_has_linear_attention(policy, critic):
  model = ActorCritic(random_model(32, **policy).policy, random_model(32, **critic).policy)
  loaded = LanguageModel('', model, None, None, make_mesh(1, 1, 1))
  shared = build.size_settings(small_config(optimizer__packing=True), loaded).most_shared
  assert (shared > 0) == (policy == critic == {})
