"""Both forms of the critic: what it learns reaches what it should, its values are those of a plain forward pass."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax import build, train
from ragen_jax.config.checks import check_config
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.training import objective
from ragen_jax.training.batches import MiniBatch
from ragen_jax.training.optimizer import is_critic_weight
from tests.support import learning
from tests.support.configs import small_config
from tests.support.models import random_model

_ROWS, _WIDTH, _VOCAB = 6, 24, 30


def _separate() -> ActorCritic:
  """A random policy, and a critic with other random weights."""
  policy, critic = random_model(_VOCAB), random_model(_VOCAB, seed=5)
  model = ActorCritic(policy.policy, critic.policy)
  model.value_head = critic.value_head
  return model


def _batch() -> tuple[MiniBatch, list]:
  """A batch and its two micro-batches."""
  loss_mask = np.random.default_rng(0).random((_ROWS, _WIDTH)) < 0.3
  loss_mask[:, 0] = False
  batch = learning.mini_batch(loss_mask, _VOCAB)
  return batch, learning.plans(batch, 3)


def _step(model, *, separate, critic_only=False, actor_lr=1e-2, critic_lr=3e-2, grad_clip=0.1, **loss):
  """One optimiser step; weights, the optimiser's state and metrics after it, on the host."""
  optimizer = learning.optimizer(
    actor_lr=actor_lr, critic_lr=critic_lr, weight_decay=0.1, grad_clip=grad_clip, separate_critic=separate
  )
  learner = learning.learner(model, optimizer, **loss)
  state = learning.state_of(learner, learning.copied(nnx.split(model)[1]))
  state, metrics = learning.step(learner, state, *_batch(), critic_only=critic_only)
  return jax.device_get((state.params, state.opt_state, metrics))


def _leaves(tree):
  return [(is_critic_weight(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def _equal(ours, theirs, **tolerance):
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_allclose(a, b, **tolerance)


@pytest.mark.slow
def test_neither_loss_reaches_the_other_model():
  graphdef, params = nnx.split(_separate())
  batch, _ = _batch()

  def norms(**loss):
    settings = learning.loss(**loss)
    gradient = jax.grad(lambda p: objective.policy_and_value_loss(nnx.merge(graphdef, p), batch, settings)[0])
    leaves = _leaves(jax.jit(gradient)(params))
    assert sum(own for own, _ in leaves) > 2  # a trunk and the head
    return [np.max([np.abs(x).max() for own, x in leaves if own == critic]) for critic in (False, True)]

  policy, critic = norms(entropy_coef=0.1, kl_loss_coef=0.1, value_coef=0.0)
  assert policy > 0 and critic == 0
  policy, critic = norms(pg_coef=0.0, entropy_coef=0.0, value_coef=0.5)
  assert policy == 0 and critic > 0


@pytest.mark.slow
def test_an_update_is_that_of_two_models_each_with_its_own_clip():
  """Against runs without the other's loss: the policy with a value head that learns nothing, the critic as a policy."""
  model = _separate()
  loss = {'entropy_coef': 0.05, 'value_coef': 0.5}
  new, _, metrics = _step(model, separate=True, **loss)
  alone, _, policy_metrics = _step(ActorCritic(model.policy), separate=False, **loss | {'value_coef': 0.0})
  _equal(new['policy'], alone['policy'], atol=1e-6)
  critic = ActorCritic(model.critic)
  critic.value_head = model.value_head
  other, _, critic_metrics = _step(critic, separate=False, actor_lr=3e-2, pg_coef=0.0, entropy_coef=0.0, value_coef=0.5)
  _equal(new['critic'], other['policy'], atol=1e-6)
  _equal(new['value_head'], other['value_head'], atol=1e-6)
  assert metrics['actor/grad_norm'] == pytest.approx(policy_metrics['actor/grad_norm'], rel=1e-4)
  assert metrics['critic/grad_norm'] == pytest.approx(critic_metrics['actor/grad_norm'], rel=1e-4)
  assert min(metrics['actor/grad_norm'], metrics['critic/grad_norm']) > 0.1  # so the clip acted on both


@pytest.mark.slow
@pytest.mark.parametrize('separate', [False, True])
@pytest.mark.exhaustive_cases('True')
def test_the_critic_can_learn_alone(separate):
  model = _separate() if separate else random_model(_VOCAB)
  before = jax.device_get(nnx.split(model)[1])
  after, state, metrics = _step(model, separate=separate, critic_only=True, entropy_coef=0.05, value_coef=0.5)
  _equal(after['policy'], before['policy'], rtol=0)
  assert not any(name.startswith('actor/') for name in metrics)
  moments = [(own, np.abs(x).max()) for own, x in _leaves(state) if x.dtype == np.float32]
  assert max(x for own, x in moments if not own) == 0 < min(x for own, x in moments if own)
  if separate:
    whole, _, _ = _step(model, separate=True, entropy_coef=0.05, value_coef=0.5)
    _equal([after['critic'], after['value_head']], [whole['critic'], whole['value_head']], atol=1e-6)
    return
  # The head's gradient, written out: of half the greater of two squared errors, by each value that is not clipped.
  batch, _ = _batch()
  hidden = jax.jit(lambda tokens: model.policy(model.policy.embed(tokens))[0])(batch.tokens)
  hidden = np.take_along_axis(np.asarray(hidden), batch.columns[:, :, None] - 1, axis=1)
  values = hidden @ np.asarray(before['value_head']['kernel'][...])
  clipped = batch.old_values + np.clip(values - batch.old_values, -0.5, 0.5)
  errors, bounded = values - batch.returns, clipped - batch.returns
  by_value = np.where(errors**2 >= bounded**2, errors, bounded * (np.abs(values - batch.old_values) < 0.5))
  by_value = 0.5 * by_value * batch.value_weights
  gradient = np.append(np.einsum('br,brd->d', by_value, hidden), by_value.sum())
  assert metrics['critic/grad_norm'] == pytest.approx(np.linalg.norm(gradient), rel=1e-4)


# -- in a run ----------------------------------------------------------------------------------------------------------


def _lake(**fields):
  """A lake with one step to take, where it is the board that says what there is to win."""
  fields = {
    'model__separate_critic': True, 'envs__FrozenLake__max_turns': 2, 'agent__max_response_tokens': 16,
    'length_step': 128, 'eval__every': 0, 'eval__greedy_too': False, 'eval__groups': 4,
  } | fields  # fmt: skip
  return small_config(**fields)


@pytest.mark.slow
def test_a_separate_critic_begins_with_the_values_that_the_shared_one_has():
  """The sampler's records of the one are the critic's own pass of the other, behind a truncated episode too."""
  made, shown = [], []
  for separate in (False, True):
    config = _lake(model__separate_critic=separate, algorithm__bootstrap_truncated=True, algorithm__kl_loss_coef=0.01)
    trainer = build.make_trainer(config, build.load_policy(config))
    state = trainer.init()
    rollout, selection = trainer.collect(state)
    batch, _ = trainer.estimate(state, selection)
    made.append((rollout.trajectory, batch, trainer.estimator.bootstrap(state.params, rollout)))
    records = trainer.recorder.records(rollout, selection, batch, 0)[1]
    shown.append([turn['value'] for record in records for turn in record['turns']])
  (shared, batch, behind), (separate, own, own_behind) = made
  np.testing.assert_array_equal(shared.tokens, separate.tokens)
  assert np.abs(shared.values).max() > 0 and not separate.values.any()
  assert np.ptp(own.old_values[own.mask]) > 0.1 and own_behind.any()
  np.testing.assert_allclose(own.old_values, batch.old_values, atol=1e-4)
  np.testing.assert_allclose(own_behind, behind, atol=1e-4)
  for ours, theirs in zip(*shown, strict=True):  # what is kept of episodes for people
    np.testing.assert_allclose(ours, theirs, atol=2e-3)
  assert any(map(any, shown[1]))
  np.testing.assert_allclose(own.advantages, batch.advantages, atol=1e-3)
  # Other weights of the critic: the same play, other values.
  state.trained['critic'] = jax.tree.map(lambda x: 1.1 * x, state.trained['critic'])
  again, selection = trainer.collect(state)
  np.testing.assert_array_equal(again.trajectory.tokens, separate.tokens)
  other = trainer.estimate(state, selection)[0]
  assert np.abs(other.old_values - own.old_values).max() > 1e-2
  np.testing.assert_array_equal(other.ref_logprobs, own.ref_logprobs)
  np.testing.assert_allclose(other.ref_logprobs, other.old_logprobs, atol=1e-4)
  # And an update that leaves none of the models as it was.
  before = jax.device_get(state.params)
  state, metrics = trainer.update(state, own, selection)
  for name in ('policy', 'critic', 'value_head'):
    assert any(
      (a != b).any() for a, b in zip(*map(jax.tree.leaves, (before[name], state.params[name])), strict=True)
    ), name
  assert metrics['critic/grad_norm'] > 0 and metrics['rollout/logprob_gap_max'] < 1e-3


@pytest.mark.exhaustive
def test_a_run_with_a_warm_up_and_replay_goes_on_as_if_it_had_not_been_stopped(tmp_path):
  fields = {
    'optimizer__critic_warmup': 1, 'algorithm__old_logprobs': 'trainer', 'algorithm__tis_cap': 2.0, 'replay__groups': 2,
    'train__tags': ('Bandit',), 'eval__tags': ('Bandit',),
  }  # fmt: skip
  config, played = _lake(**fields), []
  for _ in range(2):
    train.train_and_evaluate(config, str(tmp_path))
    lines = read_metrics(tmp_path)[1:]
    played.append([{n: x for n, x in line.items() if not n.startswith(('timing_s/', 'perf/'))} for line in lines])
    shutil.rmtree(tmp_path / 'checkpoints' / '3')  # as if it had been stopped after the second iteration
  whole, parts = played
  assert whole == parts
  assert not any(name.startswith('actor/') for name in whole[0])
  assert all('actor/grad_norm' in line for line in whole[1:])
  assert all(line['critic/grad_norm'] > 0 for line in whole)
  assert whole[1]['rollout/logprob_gap_max'] < 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures('new_programs')
@pytest.mark.parametrize('separate', [False, True])
@pytest.mark.exhaustive
def test_success_and_explained_variance_rise(tmp_path, separate):
  """Arms that always pay the same: a pair that the model knows, but the wrong way round, and one that it does not."""
  config = small_config(
    model__separate_critic=separate, num_iterations=7, train__tags=('Bandit', 'BanditTest'), train__groups=16,
    train__group_size=8, envs__Bandit__high_probability=1.0, envs__BanditTest__high_probability=1.0, length_step=64,
    envs__Bandit__arms=(('Dragon', 'Phoenix'),), optimizer__mini_batch_size=32, optimizer__micro_batch_size=32,
    algorithm__value_clip=0.0, optimizer__actor_lr=1e-4,
    algorithm__whiten_advantages=False,  # what is solved leaves no advantage to learn from
  )  # fmt: skip
  check_config(config)
  trainer = build.make_trainer(config, build.load_policy(config))
  state = trainer.init()
  head = state.trained['value_head']
  state.trained['value_head'] = jax.tree.map(jnp.zeros_like, head)  # a critic that knows nothing yet
  success, explained = [], []
  for _ in range(config.num_iterations):
    rollout, selection = trainer.collect(state)
    batch, metrics = trainer.estimate(state, selection)
    state, _ = trainer.update(state, batch, selection)
    success.append(np.mean([e.success for e in rollout.episodes if e.tag == 'Bandit']))
    explained.append(metrics['critic/vf_explained_var'])
  assert explained[0] == pytest.approx(0, abs=1e-6) and np.mean(explained[-2:]) > 0.5
  assert success[0] < 0.3 and np.mean(success[-2:]) > 0.8
  assert trainer.learner.traces <= 6 and trainer.scorer.traces['values'] <= 6
