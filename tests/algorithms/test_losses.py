"""Losses against NumPy in float64, their gradients against finite differences, and sums that no split changes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.algorithms import losses as module
from tests.support.estimators import SURROGATE

STEP = 1e-6  # of finite differences, in float64
NORM_LENGTH = 50.0

# Each is one program in place of one for each operation.
policy_loss = jax.jit(module.policy_loss, static_argnames=tuple(SURROGATE))
value_loss = jax.jit(module.value_loss, static_argnames='clip')
kl_penalty = jax.jit(module.kl_penalty, static_argnums=3)


def finite_differences(f, x, mask):
  """The gradient of f: f64[B, T] -> float at x over the masked-in entries, by central differences."""
  gradient = np.zeros(x.shape)
  for at in zip(*np.nonzero(mask), strict=True):
    up, down = x.copy(), x.copy()
    up[at] += STEP
    down[at] -= STEP
    gradient[at] = (f(up) - f(down)) / (2 * STEP)
  return gradient


# --- aggregation ------------------------------------------------------------------------------------------------------


def loop_aggregate(x, mask, mode, sequence=None):
  """The loss by its definition; x and mask are [B, T], `sequence` the id of each entry's sequence."""
  ids = np.broadcast_to(np.arange(len(x))[:, None] if sequence is None else sequence, x.shape)
  sums = [x[mask & (ids == s)] for s in np.unique(ids) if (mask & (ids == s)).any()]
  if mode == 'token-mean':
    return np.concatenate(sums).mean()
  if mode == 'seq-mean-token-mean':
    return np.mean([of.mean() for of in sums])
  total = np.mean([of.sum() for of in sums])
  return total / NORM_LENGTH if mode == 'seq-mean-token-sum-norm' else total


@jax.jit
def every_weights(mask, sequence=None):
  """token_weights by mode: one compilation for all of them."""
  return {
    mode: module.token_weights(mask, mode, sequence=sequence, norm_length=NORM_LENGTH) for mode in module.AGGREGATIONS
  }


@jax.jit
def aggregates(x, weights):
  return {mode: module.aggregate(x, of) for mode, of in weights.items()}


def test_aggregation(batch):
  for seed in range(3):
    b = batch(seed)
    weights = every_weights(b.loss_mask)
    got = aggregates(b.values, weights)  # values are not numbers off the mask
    for mode in module.AGGREGATIONS:
      expected = loop_aggregate(b.values.astype(float), b.loss_mask, mode)
      np.testing.assert_allclose(got[mode], expected, rtol=1e-5)
      assert not np.asarray(weights[mode])[~b.loss_mask].any()
  assert not any(np.asarray(of).any() for of in every_weights(np.zeros_like(b.loss_mask)).values())


@jax.jit
def model_gradient(parameters, features, old, advantages, mask, weights):
  """Of a small model whose loss goes through `policy_loss`."""

  def loss(parameters):
    logprobs = old + jnp.tanh(features @ parameters)
    return module.aggregate(module.policy_loss(logprobs, old, advantages, mask, **SURROGATE)[0], weights)

  return jax.grad(loss)(parameters)


def test_gradient_is_the_same_for_every_split_into_micro_batches(batch):
  """Micro-batches of 1, 2, 3 and 8 rows, in shuffled order."""
  b = batch(5)
  features = b.rng.normal(size=(8, 32, 3)).astype(np.float32)
  parameters = jnp.array([0.3, -0.2, 0.1])
  for weights in every_weights(b.loss_mask).values():
    arrays = (features, b.logprobs, b.values, b.loss_mask, np.asarray(weights))
    whole = model_gradient(parameters, *arrays)
    assert np.abs(whole).max() > 1e-3
    for size in (1, 2, 3):
      order = b.rng.permutation(8)
      pieces = [order[i : i + size] for i in range(0, 8, size)]
      total = sum(model_gradient(parameters, *(x[piece] for x in arrays)) for piece in pieces)
      np.testing.assert_allclose(total, whole, rtol=2e-5, atol=1e-7)


def test_padding_and_packing_do_not_change_the_loss(batch):
  b = batch(6)
  x = np.where(b.loss_mask, b.values, 0.0)
  plain = aggregates(x, every_weights(b.loss_mask))

  wide = ((0, 8), (0, 16))
  padded = aggregates(np.pad(x, wide, constant_values=np.inf), every_weights(np.pad(b.loss_mask, wide)))

  def pack(y):
    """Two episodes a row."""
    return np.concatenate([y[:4], y[4:]], axis=1)

  ids = np.broadcast_to(7 * np.arange(8)[:, None] - 3, x.shape)  # which token is whose
  packed = aggregates(pack(x), every_weights(pack(b.loss_mask), pack(ids)))

  episode = np.array([3, 3, -9, 4, 4, 4, 5, 6])  # one id for an episode's several rows
  rows = aggregates(x, every_weights(b.loss_mask, episode))
  for mode in module.AGGREGATIONS:
    np.testing.assert_allclose(padded[mode], plain[mode], rtol=1e-6)
    np.testing.assert_allclose(packed[mode], plain[mode], rtol=1e-6)
    expected = loop_aggregate(x.astype(float), b.loss_mask, mode, episode[:, None])
    np.testing.assert_allclose(rows[mode], expected, rtol=1e-5)


def test_aggregation_errors():
  mask = np.ones((2, 3), bool)
  with pytest.raises(ValueError, match=r"loss_agg_mode is 'mean'; it may be one of token-mean, "):
    module.token_weights(mask, 'mean')
  for length in (None, 0):
    with pytest.raises(ValueError, match='loss_norm_length'):
      module.token_weights(mask, 'seq-mean-token-sum-norm', norm_length=length)


# --- the policy's loss ------------------------------------------------------------------------------------------------

LOW, HIGH, DUAL = 0.2, 0.28, 3.0


def numpy_surrogate(ratio, advantage, dual):
  """One token's loss, case by case: where the clip binds it is a constant."""
  bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
  loss = max(-advantage * ratio, -advantage * bounded)
  if dual is not None and advantage < 0:
    loss = min(loss, -advantage * dual)
  return loss


def numpy_policy_loss(logprobs, old, advantages, mask, turn, level, dual):
  loss = np.zeros(mask.shape)
  for row, column in zip(*np.nonzero(mask), strict=True):
    span = mask[row].copy()
    if level == 'token':
      span = np.arange(mask.shape[1]) == column
    elif level == 'turn':
      span &= turn[row] == turn[row, column]
    ratio = np.exp(np.clip((logprobs[row, span] - old[row, span]).mean(), -20, 20))
    loss[row, column] = numpy_surrogate(ratio, advantages[row, column], dual)
  return loss


def policy_case(batch, seed, level):
  """log-probs that have moved far enough for every clip, and advantages that are constant over the ratio's span."""
  b = batch(seed)
  mask = b.loss_mask
  old = b.logprobs
  own = b.rng.normal(size=mask.shape) * 0.8
  common = b.rng.normal(size=(8, 5)) * 1.0
  columns = {'token': b.turn * 0 - 1, 'sequence': b.turn * 0, 'turn': b.turn}[level]
  shared = np.where(columns >= 0, np.take_along_axis(common, np.maximum(columns, 0), axis=-1), 0.0)
  logprobs = np.where(mask, old + own + shared, np.nan)
  of = b.rng.normal(size=(8, 5))
  advantages = b.values if level == 'token' else np.take_along_axis(of, np.maximum(columns, 0), axis=-1)
  return b, logprobs.astype(np.float32), old, np.where(mask, advantages, np.nan).astype(np.float32)


@pytest.mark.parametrize('level', module.RATIO_LEVELS)
@pytest.mark.parametrize('dual', [None, DUAL])
@pytest.mark.slow_cases('None-turn', 'None-sequence')
def test_policy_loss_and_gradient(batch, level, dual):
  """Sum of weighted losses, differentiated: by jax here, by finite differences of the NumPy form there."""
  mode = {'token': 'token-mean', 'sequence': 'seq-mean-token-mean', 'turn': 'token-mean'}[level]
  seen = {'clipfrac': 0.0, 'clipfrac_lower': 0.0}

  @jax.jit
  def ours(logprobs, old, advantages, mask, turn):
    def loss(logprobs):
      per_token, stats = module.policy_loss(
        logprobs, old, advantages, mask, turn=turn, **SURROGATE | {'clip_ratio_c': dual, 'ratio_level': level}
      )
      return module.aggregate(per_token, module.token_weights(mask, mode)), (per_token, stats)

    return jax.value_and_grad(loss, has_aux=True)(logprobs)

  for seed in range(3):
    b, logprobs, old, advantages = policy_case(batch, seed, level)
    mask = b.loss_mask
    arrays = [np.where(mask, x, 0.0).astype(np.float64) for x in (logprobs, old, advantages)]

    def theirs(x, arrays=arrays, mask=mask, turn=b.turn):
      return numpy_policy_loss(x, arrays[1], arrays[2], mask, turn, level, dual)

    (value, (per_token, stats)), gradient = ours(logprobs, old, advantages, mask, b.turn)
    np.testing.assert_allclose(per_token, theirs(arrays[0]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(value, loop_aggregate(theirs(arrays[0]), mask, mode), rtol=1e-4, atol=1e-5)
    expected = finite_differences(lambda x, f=theirs, m=mask: loop_aggregate(f(x), m, mode), arrays[0], mask)
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=2e-6)  # and 0, not nan, off the mask
    assert np.abs(expected).max() > 1e-3
    for key in seen:
      seen[key] += float(np.asarray(stats[key]).sum())
    np.testing.assert_allclose(np.asarray(stats['approx_kl'])[mask], (arrays[1] - arrays[0])[mask], atol=1e-5)
  assert seen['clipfrac'] > 3  # the case is one where clips act
  assert (seen['clipfrac_lower'] > 0) == (dual is not None)


@pytest.mark.parametrize('level', ['sequence', 'turn'])
def test_each_token_keeps_its_own_advantage_under_a_shared_ratio(batch, level):
  """Unclipped, the gradient at a token is -advantage * shared ratio: what other tokens' advantages are is not in it."""
  b = batch(0)
  m = b.loss_mask
  logprobs = np.where(m, b.logprobs + 0.01 * b.rng.normal(size=m.shape), 0.0)
  options = SURROGATE | {'ratio_level': level}

  @jax.jit
  def ours(x):
    f = lambda y: module.policy_loss(y, b.logprobs, b.values, m, turn=b.turn, **options)  # noqa: E731
    return jax.grad(lambda y: f(y)[0].sum())(x), f(x)[1]['ratio']

  gradient, ratio = ours(logprobs.astype(np.float32))
  d = np.where(m, logprobs - b.logprobs, 0.0)
  for row, column in zip(*np.nonzero(m), strict=True):
    span = m[row] & ((b.turn[row] == b.turn[row, column]) | (level == 'sequence'))
    np.testing.assert_allclose(ratio[row, column], np.exp(d[row, span].mean()), rtol=1e-5)
    np.testing.assert_allclose(gradient[row, column], -b.values[row, column] * ratio[row, column], rtol=1e-5)


@pytest.mark.parametrize('level', ['sequence', 'turn'])
def test_ratios_of_neighbouring_spans_of_a_packed_row(level):
  """Spans of one token or more, from the first column on, with tokens off the mask at their ends and within."""
  rng = np.random.default_rng(0)
  spans = np.cumsum(rng.random((40, 24)) < 0.4, axis=1).astype(np.int32)
  mask = rng.random(spans.shape) < 0.8
  moved = np.where(mask, rng.normal(size=mask.shape), np.nan).astype(np.float32)
  options = SURROGATE | {'ratio_level': level, 'turn': spans if level == 'turn' else 0 * spans, 'sequence': spans}
  ratio = jax.jit(lambda x: module.policy_loss(x, 0 * x, x, mask, **options)[1]['ratio'])(moved)
  for row, column in zip(*np.nonzero(mask), strict=True):
    span = mask[row] & (spans[row] == spans[row, column])
    np.testing.assert_allclose(ratio[row, column], np.exp(moved[row, span].mean()), rtol=1e-4)


@functools.partial(jax.jit, static_argnames='dual')
def one_token(logprob, advantage, dual=DUAL):
  """Loss, gradient with respect to the log-prob, and stats of a single token that had log-prob 0."""

  def loss(x):
    per_token, stats = module.policy_loss(
      x,
      jnp.zeros((1, 1)),
      jnp.full((1, 1), advantage),
      jnp.ones((1, 1), bool),
      **SURROGATE | {'clip_ratio_c': dual},
    )
    return per_token[0, 0], {key: y[0, 0] for key, y in stats.items()}

  (value, stats), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.full((1, 1), logprob))
  return value, gradient[0, 0], stats


@pytest.mark.parametrize(
  ('ratio', 'advantage', 'value', 'gradient', 'clipped', 'lower'),
  [
    (1.0, 2.0, -2.0, -2.0, 0, 0),
    (1.27, 1.0, -1.27, -1.27, 0, 0),  # below the higher clip
    (1.5, 1.0, -1.28, 0.0, 1, 0),
    (0.5, 1.0, -0.5, -0.5, 0, 0),  # nothing holds a good token back from coming up
    (0.5, -1.0, 0.8, 0.0, 1, 0),
    (2.0, -1.0, 2.0, 2.0, 0, 0),
    (4.0, -1.0, 3.0, 0.0, 0, 1),  # the dual clip
    (np.exp(30.0), 0.0, 0.0, 0.0, 0, 0),
  ],
)
def test_policy_loss_by_hand(ratio, advantage, value, gradient, clipped, lower):
  got = one_token(np.log(ratio), advantage)
  np.testing.assert_allclose(got[:2], (value, gradient), rtol=1e-5, atol=1e-6)
  assert (got[2]['clipfrac'], got[2]['clipfrac_lower']) == (clipped, lower)


def numpy_other_loss(kind, logp, logq, advantage, low, high, tau_pos, tau_neg, beta):
  """One token's loss, or None if it has none: each in the notation of its paper. `weight` is CISPO's constant."""
  p, q = np.exp(logp), np.exp(logq)
  if kind == 'cispo':
    return lambda x: -advantage * min(max(p / q, 1 - low), 1 + high) * x
  if kind == 'sapo':
    tau = tau_pos if advantage > 0 else tau_neg
    return lambda x: -advantage * 4 / tau / (1 + np.exp(-tau * (np.exp(x) / q - 1)))
  if kind == 'dro':
    return lambda x: -advantage * x + beta / 2 * (x - logq) ** 2
  divergence = abs(q - p) if kind == 'dppo_tv' else q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
  away = divergence > high if p > q and advantage > 0 else divergence > low if p < q and advantage < 0 else False
  return lambda x: 0.0 if away else -advantage * np.exp(x) / q


@pytest.mark.parametrize('kind', [kind for kind in module.POLICY_LOSSES if kind != 'ppo'])
def test_other_losses_and_gradients(batch, kind):
  """Values and gradients of every token, with options away from the defaults and every case of each equation."""
  low, high = {'cispo': (0.6, 0.4), 'dppo_tv': (0.1, 0.2), 'dppo_kl': (0.04, 0.09)}.get(kind, (0.2, 0.28))
  options = {'tau_pos': 1.7, 'tau_neg': 2.6, 'dro_beta': 0.35}

  @jax.jit
  def ours(logprobs, old, advantages, mask):
    def loss(x):
      per_token, stats = module.policy_loss(
        x, old, advantages, mask,
        **SURROGATE | options | {'policy_loss': kind, 'clip_ratio_low': low, 'clip_ratio_high': high},
      )  # fmt: skip
      return per_token.sum(), (per_token, stats)

    return jax.grad(loss, has_aux=True)(logprobs)

  cases = np.zeros((2, 2), int)  # by the sign of the advantage, and whether the gradient is cut or bounded
  for seed in range(6):
    b = batch(seed)
    mask = b.loss_mask
    moved = np.minimum(b.logprobs + b.rng.normal(size=mask.shape) * 0.7, -1e-3).astype(np.float32)
    gradient, (value, stats) = ours(np.where(mask, moved, np.nan), b.logprobs, b.values, mask)
    assert not np.asarray(gradient)[~mask].any() and not np.asarray(value)[~mask].any()
    for at in zip(*np.nonzero(mask), strict=True):
      x, q, advantage = (float(y[at]) for y in (moved, b.logprobs, b.values))
      f = numpy_other_loss(kind, x, q, advantage, low, high, 1.7, 2.6, 0.35)
      slope = (f(x + STEP) - f(x - STEP)) / (2 * STEP)
      np.testing.assert_allclose(value[at], f(x), rtol=1e-4, atol=1e-5)
      np.testing.assert_allclose(gradient[at], slope, rtol=1e-3, atol=1e-5)
      np.testing.assert_allclose(stats['approx_kl'][at], q - x, atol=1e-6)
      ratio = np.exp(x - q)
      cut = slope == 0 if kind.startswith('dppo') else kind == 'cispo' and not 1 - low <= ratio <= 1 + high
      assert stats['clipfrac'][at] == cut
      cases[int(advantage > 0), int(cut)] += 1
    assert not np.asarray(stats['clipfrac_lower']).any()
  assert (cases[:, 0] > 5).all() and ((cases[:, 1] > 5).all() or kind in ('sapo', 'dro'))


@pytest.mark.parametrize('kind', module.POLICY_LOSSES)
def test_losses_are_policy_gradients_at_the_old_policy_and_finite_at_certainty(kind):
  """Where the policy is the old one, every loss has the gradient -A; tokens of probability 1 or 0 give no NaN."""
  old = np.array([[-0.7, -3.0, 0.0, -1e-9]], np.float32)
  advantages = np.array([[1.5, -2.0, 0.5, -1.0]], np.float32)
  options = SURROGATE | {'policy_loss': kind, 'tau_pos': 3.0, 'tau_neg': 0.5}

  @jax.jit
  @jax.grad
  def gradient(x):
    return module.policy_loss(x, old, advantages, np.ones((1, 4), bool), **options)[0].sum()

  np.testing.assert_allclose(gradient(old), -advantages, rtol=1e-5)
  assert np.isfinite(gradient(np.array([[-0.7, -3.0, -60.0, -60.0]], np.float32))).all()


def test_log_ratio_is_clamped():
  value, gradient, stats = one_token(25.0, -1.0, dual=None)
  np.testing.assert_allclose([value, stats['ratio']], np.exp(20.0), rtol=1e-5)
  assert gradient == 0.0


def test_importance_weights_scale_the_loss(batch):
  b, logprobs, old, advantages = policy_case(batch, 0, 'token')
  weights = np.where(b.loss_mask, 0.5 + b.rng.random(b.loss_mask.shape), np.nan).astype(np.float32)
  plain, _ = policy_loss(logprobs, old, advantages, b.loss_mask, **SURROGATE)
  scaled, _ = policy_loss(logprobs, old, advantages, b.loss_mask, importance_weights=weights, **SURROGATE)
  np.testing.assert_allclose(scaled, np.where(b.loss_mask, plain * weights, 0.0), rtol=1e-6)


def test_truncated_importance_weights(batch):
  b = batch(0)
  sampler = b.logprobs
  trainer = (sampler + b.rng.normal(size=sampler.shape)).astype(np.float32)
  weights_of = jax.jit(module.truncated_importance_weights, static_argnames='cap')
  got = np.asarray(weights_of(trainer, sampler, b.loss_mask, cap=1.5))
  m = b.loss_mask
  np.testing.assert_allclose(got[m], np.minimum(np.exp((trainer - sampler)[m]), 1.5), rtol=1e-5)
  assert not got[~m].any() and (got == 1.5).any() and (got[m] < 1.5).any()
  gradient = jax.jit(jax.grad(lambda x: weights_of(x, b.values, m, cap=2.0).sum()))(b.logprobs)
  assert not np.asarray(gradient).any()
  with pytest.raises(ValueError, match='tis_cap is 0'):
    module.truncated_importance_weights(trainer, sampler, m, cap=0)


def test_policy_errors(batch):
  b = batch(0)
  arrays = (b.logprobs, b.logprobs, b.values, b.loss_mask)
  with pytest.raises(ValueError, match="ratio_level is 'row'; it may be one of token, sequence, turn"):
    module.policy_loss(*arrays, **SURROGATE | {'ratio_level': 'row'})
  with pytest.raises(ValueError, match='turn'):
    module.policy_loss(*arrays, **SURROGATE | {'ratio_level': 'turn'})
  with pytest.raises(ValueError, match="policy_loss is 'a2c'; it may be one of ppo, cispo, dppo_tv, dppo_kl"):
    module.policy_loss(*arrays, **SURROGATE | {'policy_loss': 'a2c'})
  with pytest.raises(ValueError, match=r"ratio_level is 'turn'; algorithm\.policy_loss='sapo' needs 'token'"):
    module.policy_loss(*arrays, turn=b.turn, **SURROGATE | {'policy_loss': 'sapo', 'ratio_level': 'turn'})
  with pytest.raises(ValueError, match='clip_ratio_c is 1'):
    module.policy_loss(*arrays, **SURROGATE | {'clip_ratio_c': 1.0})


# --- KL, entropy, log-probs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', module.KL_KINDS)
def test_kl_penalty(batch, kind):
  b = batch(0)
  m = b.loss_mask
  reference = np.where(m, b.logprobs + b.rng.normal(size=m.shape) * 2.0, np.nan).astype(np.float32)
  d = (b.logprobs.astype(float) - reference)[m]
  expected = {'k1': d, 'abs': np.abs(d), 'k2': d * d / 2, 'k3': np.minimum(np.exp(-d) + d - 1, 10)}[kind]
  got = np.asarray(kl_penalty(b.logprobs, reference, m, kind))
  np.testing.assert_allclose(got[m], expected, rtol=1e-4, atol=1e-5)
  assert not got[~m].any()


def test_k3_is_clamped_and_never_negative():
  mask = np.ones((1, 5), bool)
  d = np.array([[-100.0, -3.0, 0.0, 1e-4, 100.0]], np.float32)
  got = np.asarray(kl_penalty(d, np.zeros_like(d), mask, 'k3'))
  assert (got >= 0).all() and got[0, 0] == 10.0 and got[0, 2] == 0.0 and got[0, 4] == 10.0
  with pytest.raises(ValueError, match="kl_kind is 'low_var'; it may be one of k1, abs, k2, k3"):
    module.kl_penalty(d, d, mask, 'low_var')


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_unbiased_kinds_agree_with_the_exact_kl(seed):
  """Summed over a whole distribution, k1 and k3 are the KL divergence."""
  rng = np.random.default_rng(seed)
  p, q = rng.dirichlet(np.ones(6), size=2)
  p, q = p * 0.4 + 0.1, q * 0.4 + 0.1  # k3 stays below its clamp
  exact = float((p * np.log(p / q)).sum())
  mask = np.ones((1, 6), bool)
  for kind in ('k1', 'k3'):
    estimate = kl_penalty(np.log(p)[None], np.log(q)[None], mask, kind)
    np.testing.assert_allclose(float((p * estimate).sum()), exact, atol=1e-5)


def test_token_entropy_and_logprobs():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(4, 5, 11)) * 3
  logits[0, 0, 3:] = -np.inf
  tokens = rng.integers(0, 3, size=(4, 5))
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0).sum(-1)
  token_entropy = jax.jit(module.token_entropy)
  np.testing.assert_allclose(token_entropy(logits), entropy, atol=1e-5)
  expected = np.log(np.take_along_axis(p, tokens[..., None], axis=-1))[..., 0]
  np.testing.assert_allclose(jax.jit(module.token_logprobs)(logits, tokens), expected, atol=1e-5)
  gradient = jax.jit(jax.grad(lambda x: module.token_entropy(x).sum()))(logits.astype(np.float32))
  assert np.isfinite(gradient).all()
  uniform = token_entropy(np.full((1, 7), 1e4, np.float32))
  np.testing.assert_allclose(uniform, np.log(7.0), rtol=1e-5)


# --- the critic's loss ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('clip', [None, 0.5])
def test_value_loss_and_gradient(batch, clip):
  clipped = 0.0

  @jax.jit
  def ours(values, returns, old, mask):
    def loss(values):
      per_token, stats = module.value_loss(values, returns, old, mask, clip=clip)
      return module.aggregate(per_token, module.token_weights(mask, 'token-mean')), (per_token, stats)

    return jax.value_and_grad(loss, has_aux=True)(values)

  for seed in range(3):
    b = batch(seed)
    m = b.loss_mask
    old = b.values
    values, returns = (np.where(m, old + b.rng.normal(size=m.shape), np.nan).astype(np.float32) for _ in range(2))
    v, r, o = (np.where(m, x, 0.0).astype(np.float64) for x in (values, returns, old))

    def theirs(x, r=r, o=o):
      losses = np.zeros(x.shape)
      for at in np.ndindex(x.shape):
        losses[at] = (x[at] - r[at]) ** 2
        if clip is not None:
          near = min(max(x[at], o[at] - clip), o[at] + clip)
          losses[at] = max(losses[at], (near - r[at]) ** 2)
      return 0.5 * losses

    (value, (per_token, stats)), gradient = ours(values, returns, old, m)
    np.testing.assert_allclose(np.asarray(per_token)[m], theirs(v)[m], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(value, theirs(v)[m].mean(), rtol=1e-5)
    expected = finite_differences(lambda x, f=theirs, m=m: f(x)[m].mean(), v, m)
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-6)
    clipped += float(np.asarray(stats['clipfrac']).sum())
  assert (clipped > 3) == (clip is not None)


def test_values_within_the_clip_are_not_counted_as_clipped():
  """Rounding in V_old + (V - V_old) makes either error the larger one."""
  rng = np.random.default_rng(0)
  old, values, returns = rng.normal(scale=0.4, size=(3, 10, 1000)).astype(np.float32)
  mask = np.ones(old.shape, bool)
  assert ((old + (values - old) - returns) ** 2 > (values - returns) ** 2).sum() > 100
  clipfrac = np.asarray(value_loss(values, returns, old, mask, clip=0.5)[1]['clipfrac']).astype(bool)
  assert 0.1 < clipfrac.mean() < 0.4 and not clipfrac[np.abs(values - old) <= 0.5].any()


def test_value_loss_by_hand():
  one = lambda x: np.full((1, 1), x, np.float32)  # noqa: E731
  mask = np.ones((1, 1), bool)
  # V = 2 went 2 away from V_old = 0; the target is 3: the clipped value .5 is farther off, so that the gradient is 0
  f = lambda v: module.value_loss(v, one(3.0), one(0.0), mask, clip=0.5)[0].sum()  # noqa: E731
  value, gradient = jax.jit(jax.value_and_grad(f))(one(2.0))
  np.testing.assert_allclose(value, 0.5 * 2.5**2)
  assert float(gradient[0, 0]) == 0.0


def test_explained_variance(batch):
  b = batch(0)
  m = b.loss_mask
  returns = np.where(m, b.values + 0.5 * b.rng.normal(size=m.shape), np.nan).astype(np.float32)
  expected = 1 - (returns - b.values)[m].astype(float).var() / returns[m].astype(float).var()
  explained_variance = jax.jit(module.explained_variance)
  np.testing.assert_allclose(explained_variance(b.values, returns, m), expected, rtol=1e-4)
  assert float(explained_variance(returns, returns, m)) == 1.0
  assert float(explained_variance(b.values, np.ones_like(returns), m)) == 0.0
