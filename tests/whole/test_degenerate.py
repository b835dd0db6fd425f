"""Runs with almost nothing to learn from: one row, one token, one turn, equal rewards, empty replies, no kept group."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ragen_jax import build, train
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.algorithms.advantages import ESTIMATORS
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.training import trainer as trainer_module
from tests.support import learning
from tests.support.configs import small_config

# A reply of one token is no answer, so all rewards are equal.
_ONE = {
  'agent.max_response_tokens': 1, 'envs.FrozenLake.max_turns': 1, 'envs.FrozenLake.max_actions': 1,
  'envs.FrozenLake.max_actions_per_turn': 1, 'train.groups': 1, 'train.group_size': 1, 'eval.groups': 1,
  'eval.group_size': 1, 'eval.greedy_too': False, 'eval.every': 0, 'optimizer.mini_batch_size': 1,
  'optimizer.micro_batch_size': 1, 'num_iterations': 2,
}  # fmt: skip
# Correlations of constants, and the deviation of one.
_UNKNOWN = ('rollout/logprob_pearson', 'critic/vf_explained_var')


def _lines(workdir):
  """The metrics of each iteration; all are finite, except for those that do not exist for constants."""
  lines = read_metrics(workdir)[1:]
  for line in lines:
    assert [name for name, x in line.items() if not np.isfinite(x) and name not in _UNKNOWN] == []
    assert line['train/bad_iterations'] == line['train/skipped_steps'] == 0
  return lines


@pytest.mark.slow
def test_a_run_of_one_row_with_one_turn_of_one_token_and_one_action(tmp_path):
  train.train_and_evaluate(small_config(_ONE), str(tmp_path))
  lines = _lines(tmp_path)
  assert [line['step'] for line in lines] == [1, 2]
  for line in lines:
    assert line['train/num_mini_batches'] == line['response_length/max'] == 1
    assert line['rollout/in_group_reward_std'] == 0 and line['actor/entropy'] > 0


def _weights(workdir, config):
  """The trained weights of the last checkpoint, and those of the model."""
  state = build.make_trainer(config, build.load_policy(config)).init()
  with Checkpointer(str(workdir), keep=1) as checkpointer:
    arrays, _ = checkpointer.restore(state.saved(), partial=True)
  return jax.device_get((arrays['params'], state.trained))


@pytest.mark.slow
@pytest.mark.parametrize('packing', [False, True])
def test_a_run_without_a_kept_group_learns_nothing_and_stops(tmp_path, packing):
  config = small_config(
    _ONE | {'train.group_size': 2, 'eval.groups': 2, 'filter.include_zero': False, 'monitor.empty_patience': 2},
    num_iterations=5, optimizer__packing=packing,
  )  # fmt: skip
  train.train_and_evaluate(config, str(tmp_path))
  lines = _lines(tmp_path)
  assert [line['rollout/consecutive_empty_after_filter_steps'] for line in lines] == [1, 2]
  assert [line['train/num_mini_batches'] for line in lines] == [0, 0]
  assert not any(name.startswith(('actor/', 'monitor/')) for line in lines for name in line)
  jax.tree.map(np.testing.assert_array_equal, *_weights(tmp_path, config))


@pytest.mark.slow
def test_empty_replies_are_learnt_from(tmp_path, monkeypatch):
  """Every token but the stop token is banned, so its probability is 1."""
  original = ChatTokenizer.__init__

  def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    self.banned = tuple(i for i in range(self.size) if i != self.stop_ids[0])

  monkeypatch.setattr(ChatTokenizer, '__init__', init)
  config = small_config(
    _ONE | {'agent.max_response_tokens': 32, 'train.group_size': 2, 'eval.groups': 2, 'envs.FrozenLake.max_turns': 2}
  )
  train.train_and_evaluate(config, str(tmp_path))
  for line in _lines(tmp_path):
    assert line['actor/entropy'] == 0 and line['response_length/max'] == 2  # a stop token in each turn
    assert line['train/FrozenLake/action_is_valid'] == 0 and line['train/num_mini_batches'] == 2


@pytest.fixture(scope='module')
def policy():
  return build.load_policy(small_config())


@pytest.mark.slow
@pytest.mark.parametrize('estimator', list(ESTIMATORS))
@pytest.mark.exhaustive_cases(
  'bi_level_gae', 'turn_wise_gae', 'reinforce_plus_plus', 'reinforce_plus_plus_baseline', 'rloo', 'brpo', 'arpo',
  'dr_grpo',
)  # fmt: skip
def test_equal_rewards_give_finite_updates(policy, estimator):
  fields = _ONE | {'train.groups': 2, 'train.group_size': 2, 'algorithm.adv_estimator': estimator}
  if not ESTIMATORS[estimator].needs_critic:
    fields['reward.credit'] = 'trajectory'
  trainer, state = learning.make_trainer(policy, **{name.replace('.', '__'): x for name, x in fields.items()})
  rollout, selection = trainer.collect(state)
  assert len(set(rollout.scores.tolist())) == 1
  batch, metrics = trainer.estimate(state, selection)
  assert trainer_module.not_finite(batch) == {}
  if not ESTIMATORS[estimator].needs_critic and estimator != 'arpo' and selection.keep.all():  # ARPO takes raw scores
    assert not np.any(batch.advantages[batch.trained])
  state, updated = trainer.update(state, batch, selection)
  assert updated['train/skipped_steps'] == 0
  values = {n: x for n, x in (metrics | updated).items() if isinstance(x, int | float) and n not in _UNKNOWN}
  assert [name for name, x in values.items() if not np.isfinite(x)] == []
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state.trained)))
