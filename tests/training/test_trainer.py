"""The steps of an iteration together: updates, their metrics, and options that do not go together."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from ragen_jax import train
from ragen_jax.config.checks import check_config
from ragen_jax.runs.metrics import Counts, read_metrics
from ragen_jax.utils.errors import UserError
from tests.support import builders, learning


def test_where_nothing_is_kept_nothing_is_learnt(policy, played):
  trainer, state = learning.make_trainer(policy)
  selection = trainer.select(played[0])
  nothing = dataclasses.replace(selection, keep=np.zeros_like(selection.keep), groups=0)
  before = jax.device_get(state.params)
  batch, _ = trainer.estimate(state, nothing)
  assert not batch.mask.any()
  state, metrics = trainer.update(state, batch, nothing)
  assert metrics['train/num_mini_batches'] == 0 and state.iteration == 1
  assert not np.any(metrics['actor/ratio'].counts)
  jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))


def test_ratios_are_of_the_tokens_that_were_trained(policy, played):
  trainer, state = learning.make_trainer(policy, filter__strategy='top_k', filter__value=0.5, algorithm__ppo_epochs=2)
  selection = trainer.select(played[0])
  batch, metrics = trainer.estimate(state, selection)
  _, updated = trainer.update(state, batch, selection)
  tokens = played[0].trajectory.loss_mask[selection.keep].sum()
  advantages = batch.advantages[batch.trained]
  assert advantages.shape == (tokens,) and advantages.max() == pytest.approx(metrics['critic/advantages/max'])
  edges, counts = updated['actor/ratio']
  assert counts.sum() == 2 * tokens and counts.max() < 2 * tokens
  # The share outside the clip's bounds is near what the losses say: the bins' edges are not the bounds.
  outside = counts[(edges[1:] < 0.8) | (edges[:-1] > 1.28)].sum() / counts.sum()
  assert 0 < outside < 3 * updated['actor/pg_clipfrac'] + 0.1
  assert [name for name, x in updated.items() if isinstance(x, Counts)] == ['actor/ratio']


def test_an_iteration_is_its_steps(policy):
  trainer, state = learning.make_trainer(policy, optimizer__mini_batch_size=16)
  other = learning.copied(state)
  rollout, selection = trainer.collect(state)
  batch, metrics = trainer.estimate(state, selection)
  state, updated = trainer.update(state, batch, selection)
  whole, found = trainer.iterate(other)
  assert state.iteration == whole.iteration == 1 and rollout.trajectory.policy_version.max() == 0
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.trained), jax.device_get(whole.trained))
  for name, x in (metrics | updated).items():
    assert isinstance(x, Counts) or found[name] == x, name
  assert 'train/FrozenLake/success' in found and 'actor/ratio' not in found
  # The next iteration plays other levels.
  again, _ = trainer.collect(state)
  assert not {e.level_seed for e in again.episodes} & {e.level_seed for e in rollout.episodes}


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'algorithm__ratio_level': 'word'}, r"algorithm\.ratio_level='word'.*sequence"),
    ({'algorithm__kl_kind': 'k4'}, r"algorithm\.kl_kind='k4'"),
    ({'reward__method': 'mean'}, r"reward\.method='mean'.*reward\.credit"),
    ({'filter__strategy': 'best'}, r"filter\.strategy='best'.*top_k"),
    ({'filter__metric': 'luck'}, r"filter\.metric='luck'"),
    ({'algorithm__tis_cap': 2.0}, r"algorithm\.tis_cap=2\.0.*old_logprobs='trainer'"),
    ({'algorithm__mask_loss': False}, r"algorithm\.mask_loss=False.*old_logprobs='trainer'"),
    ({'train__online_k': 2}, r'num_iterations=3: must be a multiple of train\.online_k = 2'),
    ({'algorithm__adv_estimator': 'grpo', 'algorithm__bootstrap_truncated': True}, r'bootstrap_truncated.*no critic'),
    (
      {'algorithm__ratio_level': 'sequence', 'agent__context': 'single_turn'},
      r"ratio_level='sequence'.*agent\.context",
    ),
    ({'algorithm__adv_estimator': 'turn_wise_gae', 'algorithm__kl_reward_coef': 0.1}, r'kl_reward_coef=0\.1.*ends of'),
    ({'filter__strategy': 'top_k', 'filter__value': 0.1}, r'filter\.value=0\.1: of train\.groups=8 no group'),
    ({'replay__groups': 2}, r'replay\.groups=2: needs algorithm\.tis_cap'),
    ({'monitor__echo_trap': 'panic'}, r"monitor\.echo_trap='panic'.*rollback"),
    ({'filter__value': 0.5, 'train__group_size': 1}, r'train\.group_size must be at least 2'),
  ],
)
def test_options_that_do_not_go_together_are_refused(fields, message):
  with pytest.raises(UserError, match=message) as e:
    check_config(builders.small_config(**{'train__groups': 8} | fields))
  assert '\n' not in str(e.value)


@pytest.mark.slow
def test_online_k_learns_from_one_rollout_k_times_and_resumes(tmp_path):
  fields = {
    'train__online_k': 2, 'checkpoint__every': 2, 'eval__every': 0, 'eval__greedy_too': False,
    'algorithm__ratio_level': 'turn',
  }  # fmt: skip
  config = builders.small_config(num_iterations=4, **fields)
  train.train_and_evaluate(config, str(tmp_path / 'whole'))
  lines = read_metrics(tmp_path / 'whole')[1:]
  assert lines[0]['critic/score/mean'] == lines[1]['critic/score/mean'] != lines[2]['critic/score/mean']
  assert lines[0]['actor/pg_loss'] != lines[1]['actor/pg_loss']  # but from new weights
  assert 'timing_s/gen' in lines[0] and 'timing_s/gen' not in lines[1]
  train.train_and_evaluate(builders.small_config(num_iterations=2, **fields), str(tmp_path / 'parts'))
  train.train_and_evaluate(config, str(tmp_path / 'parts'))
  again = read_metrics(tmp_path / 'parts')[1:]
  for ours, theirs in zip(again[2:], lines[2:], strict=True):
    assert {n: x for n, x in ours.items() if not n.startswith(('timing_s/', 'perf/'))} == {
      n: x for n, x in theirs.items() if not n.startswith(('timing_s/', 'perf/'))
    }
