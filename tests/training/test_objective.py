"""The loss, its metrics, its gradient and the optimiser's steps against `tests.support.plain`, away from the defaults.

A factor, a mask, a sign or an option that does not reach the learner changes a number here, because no setting has the
value at which it would not matter: the temperature is not 1, importance weights are not 1, the masks of policy and
critic differ, and every clip acts on some tokens.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from ragen_jax.algorithms import losses
from ragen_jax.algorithms.diagnostics import RATIO_EDGES
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.training.batches import MiniBatch, TrainBatch, micro_batches, plan_micro_batches
from ragen_jax.training.objective import (
  WeightSettings,
  loss_parts,
  policy_and_value_loss,
  token_means,
  value_unit,
  with_loss_weights,
)
from ragen_jax.training.scoring import score_tokens
from tests.support import learning, plain

_VOCAB, _LIMIT, _THETA, _NORM_LENGTH = 13, 11, 100.0, 9
_ROWS = np.asarray([4, 0, 2, 1, 6], np.int32)  # the mini-batch; rows 3 and 5 are of another
_STEP = 1e-6  # of finite differences, in float64


def _model(*, separate: bool = False) -> ActorCritic:
  """A policy whose every weight is random, biases and norms too."""

  def trunk(seed):
    return Qwen(
      QwenConfig(
        vocab_size=_VOCAB, hidden_size=8, intermediate_size=12, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
        rope_theta=_THETA,
      ),
      rngs=nnx.Rngs(seed),
    )  # fmt: skip

  model = ActorCritic(trunk(0), trunk(1) if separate else None)
  graphdef, params = nnx.split(model)
  rng = np.random.default_rng(7)
  return nnx.merge(graphdef, jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32), params))


def _batch() -> TrainBatch:
  """Seven rows of 4 to 16 columns and up to three turns."""
  rng = np.random.default_rng(3)
  loss_mask = np.zeros((7, 16), bool)
  for row, length in enumerate((16, 8, 12, 14, 4, 7, 10)):
    loss_mask[row, 1:length] = rng.random(length - 1) < 0.7
  loss_mask[:, 3] = True
  batch = learning.mini_batch(loss_mask, _LIMIT, seed=5)
  mask = batch.mask
  # The mean of the log-ratios is near 0 in most rows, and 0.8 in row 2: so ratios of rows and turns are clipped too.
  away = np.asarray([-2.9, -3.2, -2.4, 0.0, -1.4, 0.0, -3.0], np.float32)

  def some(share):
    return mask & (rng.random(mask.shape) < share)

  return batch.replace(
    old_logprobs=np.where(mask, batch.old_logprobs + away[:, None], 0),
    turn=np.where(mask, batch.columns // 5, -1).astype(np.int32), trained=some(0.7), valued=some(0.5),
    importance=np.where(mask, rng.uniform(0.4, 2.0, size=mask.shape), 0).astype(np.float32),
  )  # fmt: skip


def _lengths(batch):
  return np.asarray([batch.columns[row][batch.mask[row]].max() + 1 for row in range(len(batch.mask))])


def _parts(batch, episode, mode='token-mean', *, size=2, length_step=16) -> list[MiniBatch]:
  """The micro-batches of the mini-batch, the last one with an empty row: by default two, two and one row."""
  weights = WeightSettings(loss_agg_mode=mode, loss_norm_length=_NORM_LENGTH)
  mini = with_loss_weights(batch, _ROWS, episode, weights, multiple=2)
  plans = plan_micro_batches(_ROWS, _lengths(batch), batch.mask.sum(axis=1), size=size, length_step=length_step)
  assert len({p.width for p in plans}) == 16 // length_step and (plans[-1].rows < 0).any()
  return list(micro_batches(mini, plans))


def _plain_weights(params):
  return jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(params))


def _leaves(tree) -> dict[str, np.ndarray]:
  """float64 leaves by their path."""
  return {
    jax.tree_util.keystr(path): np.asarray(x, np.float64) for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def _assert_gradient(found, of_weights, weights, *, zero=lambda name: False):
  """Derivatives along a random direction of each leaf, by finite differences of `of_weights`."""
  rng = np.random.default_rng(0)
  leaves, tree = jax.tree.flatten(weights)
  names = list(_leaves(weights))
  gradients = _leaves(nnx.to_pure_dict(found))
  assert names == list(gradients)
  largest = max(np.abs(g).max() for g in gradients.values())
  for i, name in enumerate(names):
    if zero(name):
      assert not gradients[name].any(), name
      continue
    direction = rng.normal(size=leaves[i].shape)
    up, down = (
      of_weights(jax.tree.unflatten(tree, [*leaves[:i], leaves[i] + step * direction, *leaves[i + 1 :]]))
      for step in (_STEP, -_STEP)
    )
    expected = (up - down) / (2 * _STEP)
    np.testing.assert_allclose(
      (gradients[name] * direction).sum(), expected, rtol=1e-3, atol=1e-4 * largest, err_msg=name
    )


_CASES = [
  # ratio level, estimator of the KL, aggregation, episodes of the rows, options of the scores
  ('token', 'k3', 'seq-mean-token-mean', [0, 1, 1, 2, 2, 3, 4], {}),
  ('turn', 'k2', 'seq-mean-token-sum-norm', [0, 1, 1, 2, 2, 3, 4], {'logits_chunk': 5}),
  ('sequence', 'k1', 'seq-mean-token-sum', [0, 1, 2, 3, 4, 5, 6], {'remat': 'elementwise'}),
  ('token', 'abs', 'token-mean', [0, 1, 1, 2, 2, 3, 4], {}),
]


@pytest.mark.parametrize(('level', 'kind', 'mode', 'episode', 'options'), _CASES)
@pytest.mark.slow_cases(
  'turn-k2-seq-mean-token-sum-norm-episode1-options1', 'sequence-k1-seq-mean-token-sum-episode2-options2',
  'token-abs-token-mean-episode3-options3',
)  # fmt: skip
def test_loss_metrics_and_gradient_are_those_of_the_plain_form(level, kind, mode, episode, options):
  """If this fails, a run learns from other gradients than its config says, though its metrics may look healthy."""
  model, batch, episode = _model(), _batch(), np.asarray(episode)
  params = nnx.split(model)[1]
  learner = learning.learner(
    model, temperature=0.7, vocab_limit=_LIMIT, clip_ratio_low=0.1, clip_ratio_high=0.25, clip_ratio_c=1.5,
    ratio_level=level, kl_loss_coef=0.6, kl_kind=kind, value_clip=0.4, value_coef=0.8, entropy_coef=0.3, **options,
  )  # fmt: skip
  parts = _parts(batch, episode, mode, length_step=8 if level == 'turn' else 16)
  state = learning.state_of(learner, params)
  gradients, sums = learner.gradients(state, parts)
  metrics = jax.device_get(token_means(sums))

  def scored(weights):
    return plain.score(weights, batch, _ROWS, episode, theta=_THETA, temperature=0.7, vocab_limit=_LIMIT)

  weights = _plain_weights(params)
  base = scored(weights)

  def plain_loss(weights):
    return plain.loss(
      scored(weights), base, low=0.1, high=0.25, dual=1.5, level=level, kl_coef=0.6, kl_kind=kind, value_clip=0.4,
      value_coef=0.8 / plain.value_unit(batch), entropy_coef=0.3, mode=mode, norm_length=_NORM_LENGTH,
    )  # fmt: skip

  _, expected, ratios = plain_loss(weights)
  for share in ('actor/pg_clipfrac', 'actor/pg_clipfrac_lower', 'critic/vf_clipfrac'):
    assert 0.02 < expected[share] < 0.9, share  # or the clip would not be tested
  np.testing.assert_array_equal(
    metrics.pop('ratio_counts'), np.histogram(np.clip(ratios, RATIO_EDGES[0], RATIO_EDGES[-1]), RATIO_EDGES)[0]
  )
  assert set(metrics) == set(expected)
  for name, x in expected.items():
    np.testing.assert_allclose(metrics[name], x, rtol=1e-4, atol=1e-5, err_msg=name)
  _assert_gradient(gradients, lambda w: plain_loss(w)[0], weights)


@pytest.mark.parametrize('kind', losses.POLICY_LOSSES)
def test_the_options_of_every_policy_loss_reach_it(kind):
  """No two options have the same value, so that an exchange changes the number."""
  options = {
    'policy_loss': kind, 'clip_ratio_low': 0.11, 'clip_ratio_high': 0.07, 'clip_ratio_c': 1.5, 'ratio_level': 'token',
    'tau_pos': 1.4, 'tau_neg': 2.3, 'dro_beta': 0.6,
  }  # fmt: skip
  model, settings = _model(), learning.loss(temperature=0.7, vocab_limit=_LIMIT, **options)
  (whole,) = _parts(_batch(), np.arange(7), size=6)

  @nnx.jit
  def both(model, batch):
    logprobs, _, _ = score_tokens(model, batch, settings.scoring)
    arrays = (logprobs, batch.old_logprobs, batch.advantages, batch.trained)
    expected = [
      losses.aggregate(
        losses.policy_loss(*arrays, importance_weights=batch.importance, **options | changed)[0], batch.weights
      )
      for changed in ({}, {'policy_loss': 'ppo' if kind != 'ppo' else 'cispo'})
    ]
    return policy_and_value_loss(model, batch, settings)[1][0]['actor/pg_loss'], expected

  got, (expected, other) = both(model, whole)
  np.testing.assert_allclose(got, expected, rtol=1e-5)
  assert abs(expected - other) > 1e-3


def test_the_loss_itself_is_the_plain_one_and_its_parts_add_up():
  model, batch, episode = _model(), _batch(), np.arange(7)
  settings = learning.loss(
    temperature=0.7, vocab_limit=_LIMIT, ratio_level='turn', kl_loss_coef=0.6, kl_kind='k3', value_coef=0.8,
    entropy_coef=0.3, clip_ratio_c=1.5,
  )  # fmt: skip
  (whole,) = _parts(batch, episode, size=6)

  @nnx.jit
  def ours(model, batch):
    each = {'whole': settings, **loss_parts(settings)}
    return {name: policy_and_value_loss(model, batch, part)[0] for name, part in each.items()}

  tokens = plain.score(
    _plain_weights(nnx.split(model)[1]), batch, _ROWS, episode, theta=_THETA, temperature=0.7, vocab_limit=_LIMIT
  )
  expected, metrics, _ = plain.loss(
    tokens, tokens, low=0.2, high=0.28, dual=1.5, level='turn', kl_coef=0.6, kl_kind='k3', value_clip=0.5,
    value_coef=0.8 / plain.value_unit(batch), entropy_coef=0.3, mode='token-mean', norm_length=_NORM_LENGTH,
  )  # fmt: skip
  assert {name: float(x) for name, x in ours(model, whole).items()} == pytest.approx(
    {
      'whole': expected,
      'task': metrics['actor/pg_loss'],
      'entropy': -0.3 * metrics['actor/entropy'],
      'kl': 0.6 * metrics['actor/kl_loss'],
    },
    rel=1e-4,
  )
  assert set(loss_parts(dataclasses.replace(settings, kl_loss_coef=0.0))) == {'task', 'entropy'}


@pytest.mark.parametrize('separate', [False, True])
@pytest.mark.slow_cases('True')
def test_the_critic_s_warm_up_has_no_gradient_in_the_policy(separate):
  """If this fails, the first `optimizer.critic_warmup` iterations move the policy, or clip by its gradient's norm."""
  model, batch, episode = _model(separate=separate), _batch(), np.arange(7)
  params = nnx.split(model)[1]
  learner = learning.learner(model, temperature=0.7, vocab_limit=_LIMIT, value_clip=0.4, value_coef=0.8)
  state = learning.state_of(learner, params)
  gradients, sums = learner.gradients(state, _parts(batch, episode), critic_only=True)

  def plain_loss(weights):
    tokens = plain.score(weights, batch, _ROWS, episode, theta=_THETA, temperature=0.7, vocab_limit=_LIMIT)
    return plain.value_loss(tokens, 0.4)

  weights = _plain_weights(params)
  _, expected = plain_loss(weights)
  assert {name: float(x) for name, x in token_means(sums).items()} == pytest.approx(expected, rel=1e-4)
  coef = 0.8 / plain.value_unit(batch)
  _assert_gradient(gradients, lambda w: coef * plain_loss(w)[0], weights, zero=lambda name: name.startswith("['policy"))


@pytest.mark.parametrize(
  ('returns', 'values', 'unit'),
  [(0.01, 0.02, 0.01), (0.5, 0.1, 0.25), (15.0, 3.0, 225.0), (0.0, 0.5, 0.25), (5e4, 4e4, 2.5e9)],
)
def test_the_value_loss_is_in_units_of_the_rewards(returns, values, unit):
  """If this fails, the critic of a game with rewards of 10 drives the shared trunk, and the policy learns little.

  `returns` and `values` are root mean squares, the last ones so large that the weights nearly vanish.
  """
  batch = _batch()
  valued = batch.valued & (np.arange(len(batch.mask)) % 2 == 0)[:, None]
  rng = np.random.default_rng(3)

  def numbers(size):
    x = rng.normal(size=valued.shape)
    x[valued] *= size / np.sqrt(np.mean(np.square(x[valued])))
    return np.where(valued, x, 1e6).astype(np.float32)  # those of other tokens do not count

  given = batch.replace(returns=numbers(returns), old_values=numbers(values), valued=valued)
  found = with_loss_weights(given, _ROWS[:4], np.arange(7), WeightSettings('token-mean', 9), multiple=1).value_weights
  expected = np.zeros(valued.shape)
  expected[_ROWS[:4]] = valued[_ROWS[:4]] / valued[_ROWS[:4]].sum() / unit
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  sums = {'value_weights': found.sum(), 'critic/vpred_mean': np.sum(found * given.old_values)}
  mean = given.old_values[_ROWS[:4]][valued[_ROWS[:4]]].mean(dtype=np.float64)
  assert token_means(sums)['critic/vpred_mean'] == pytest.approx(mean, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('separate', [False, True])
@pytest.mark.exhaustive_cases('False')
def test_steps_are_adamw_with_two_schedules(separate):
  """One step of the critic alone, three of both; the last two with half the learning rate, as after a rollback."""
  model, batch, episode = _model(separate=separate), _batch(), np.arange(7)
  fields = dict(warmup_steps=2, final_lr_fraction=0.25, b1=0.8, b2=0.95, weight_decay=0.2)
  lr, clip = {'actor': 3e-3, 'critic': 2e-2}, 0.05
  update = learning.optimizer(
    actor_lr=lr['actor'], critic_lr=lr['critic'], decay_steps=4, critic_steps=1, grad_clip=clip,
    separate_critic=separate, **fields,
  )  # fmt: skip
  learner = learning.learner(model, update, temperature=0.7, vocab_limit=_LIMIT, value_clip=0.4, value_coef=0.8)
  parts = _parts(batch, episode)
  state = learning.state_of(learner, learning.copied(nnx.split(model)[1]))

  def part(name):
    return 'actor' if name.startswith("['policy']") else 'critic'

  def decayed(name):
    return ('kernel' in name and 'value_head' not in name) or 'embed_tokens' in name

  # The policy's schedule has the three steps that are left for it, the critic's all four.
  rules = {name: plain.AdamW(lr=lr[name], decay_steps=4 - (name == 'actor'), decayed=decayed, **fields) for name in lr}
  weights = _leaves(nnx.to_pure_dict(state.trained))
  for k, scale in enumerate((1.0, 1.0, 0.5, 0.5)):
    alone = k == 0
    state = state.replace(lr_scale=scale)
    gradients = _leaves(nnx.to_pure_dict(learner.gradients(state, parts, critic_only=alone)[0]))
    of = {name: {n: g for n, g in gradients.items() if part(n) == name} for name in lr}
    norms = {name: plain.norm(of[name] if separate else gradients) for name in lr}
    state, metrics = learner.step(state, parts, critic_only=alone)
    for name in ('critic',) if alone else lr:
      assert norms[name] > clip
      own = {n: g * clip / norms[name] for n, g in of[name].items()}
      weights |= rules[name](weights, own, scale)
    found = _leaves(nnx.to_pure_dict(state.trained))
    for name, x in weights.items():
      np.testing.assert_allclose(found[name], x, rtol=1e-5, atol=2e-6, err_msg=f'{name} after step {k}')
    assert metrics['critic/grad_norm'] == pytest.approx(plain.norm(of['critic']), rel=1e-4)
    assert alone or metrics['actor/grad_norm'] == pytest.approx(norms['actor'], rel=1e-4)


@pytest.mark.parametrize(
  ('returns', 'values', 'unit'), [(3.0, 1.0, 9.0), (1.0, -4.0, 16.0), (0.01, 0.02, 0.01), (None, None, 1.0)]
)
def test_the_value_loss_is_divided_by_the_larger_mean_square_of_returns_and_values(returns, values, unit):
  batch = _batch()
  valued = batch.valued & (returns is not None)
  far = np.where(valued, 0, 1e3).astype(np.float32)  # elsewhere
  batch = batch.replace(valued=valued, returns=far + valued * (returns or 0), old_values=far + valued * (values or 0))
  assert value_unit(batch) == pytest.approx(unit)
