"""Draws against the distribution that they come from, and the filters of top-k and top-p."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.sampling.draw import (
  GREEDY,
  PLAIN,
  RowSampling,
  Sampling,
  draw_row_tokens,
  draw_tokens,
  filter_logits,
  filter_rows,
  inverse_cdf,
)

# Each is one program in place of one for each operation.


@functools.partial(jax.jit, static_argnums=3)
def _draw_compiled(logits, keys, positions, sampling, greedy):
  return draw_tokens(logits, keys, positions, sampling, greedy)


def _draw(logits, keys, positions, sampling):
  return _draw_compiled(logits, keys, positions, sampling.compiled, sampling.temperature == 0)


_draw_rows = jax.jit(draw_row_tokens, static_argnums=4)
_inverse_cdf = jax.jit(lambda p, u: inverse_cdf(jnp.log(p), u))


def _log_softmax(x):
  x = np.asarray(x, np.float64) - np.max(x, axis=-1, keepdims=True)
  return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize('size', [5, 300, *(pytest.param(size, marks=pytest.mark.slow) for size in (1920, 3000, 3072))])
@pytest.mark.slow_cases('300')
@pytest.mark.exhaustive_cases('3000', '1920')
def test_draw_follows_the_distribution_in_one_and_in_two_levels(size):
  rng = np.random.default_rng(size)
  p = rng.dirichlet(np.full(size, 0.3)).astype(np.float32)
  p[rng.integers(size, size=size // 5)] = 0
  p /= p.sum()
  n = 200_000

  @jax.jit
  def draws_of(i):
    u = jax.random.uniform(jax.random.fold_in(jax.random.key(1), i), (2000,))
    return inverse_cdf(jnp.broadcast_to(jnp.log(p), (2000, size)), u)

  draws = np.concatenate([np.asarray(draws_of(i)) for i in range(n // 2000)])
  counts = np.bincount(draws, minlength=size)
  assert counts[p == 0].sum() == 0
  big = p * n > 20
  chi2 = np.sum((counts[big] - n * p[big]) ** 2 / (n * p[big]))
  degrees = big.sum()
  assert chi2 < degrees + 5 * np.sqrt(2 * degrees)


def test_draw_takes_the_first_and_the_last_possible_token_at_the_ends_of_the_unit_interval():
  p = np.zeros((2, 1500), np.float32)
  p[:, 3], p[:, 1400] = 0.5, 0.5
  u = jnp.asarray([0.0, np.nextafter(np.float32(1), np.float32(0))])
  assert _inverse_cdf(p, u).tolist() == [3, 1400]
  # Also where a whole block of tokens before the first one, or behind the last one, is impossible.
  p = np.zeros((2, 3000), np.float32)
  p[:, 700], p[:, 1400] = 0.5, 0.5
  assert _inverse_cdf(p, u).tolist() == [700, 1400]
  assert _inverse_cdf(p[:, 600:800], u).tolist() == [100, 100]


def test_top_k_and_top_p_keep_the_right_tokens():
  logits = jnp.log(jnp.asarray([[0.1, 0.4, 0.2, 0.3]]))
  kept = lambda k, p: np.isfinite(np.asarray(filter_logits(logits, k, p)))[0].tolist()  # noqa: E731
  assert kept(2, 1.0) == [False, True, False, True]
  assert kept(0, 0.69) == [False, True, False, True]
  assert kept(0, 0.71) == [False, True, True, True]
  assert kept(0, 1e-6) == [False, True, False, False]
  assert kept(3, 0.5) == [False, True, False, True]  # of what k leaves, 0.4 / 0.9 < 0.5
  assert kept(2, 0.5) == [False, True, False, False]  # and 0.4 / 0.7 > 0.5
  assert kept(9, 1.0) == [True] * 4


@pytest.mark.parametrize('kept', [1, 2, 3])
def test_top_p_keeps_no_token_beyond_those_that_reach_it_exactly(kept):
  logits = jnp.asarray([[1.5, 0.25, -0.5, -1.0]])
  probs = jax.nn.softmax(logits)
  before = jnp.cumsum(probs, axis=-1) - probs
  top_p = float(before[0, kept])  # what `kept` tokens add up to, as the filters compute it
  expected = [True] * kept + [False] * (4 - kept)
  assert (filter_logits(logits, 0, top_p) > -jnp.inf)[0].tolist() == expected
  by_row = filter_rows(logits, jnp.zeros((1,), jnp.int32), jnp.asarray([top_p]))
  assert (by_row > -jnp.inf)[0].tolist() == expected


def test_a_row_s_draw_depends_on_its_key_and_position_only():
  logits = jnp.zeros((4, 1000))
  keys = jax.random.split(jax.random.key(0), 4)
  positions = jnp.asarray([3, 3, 8, 8])
  tokens, logprobs, entropies = _draw(logits, keys, positions, PLAIN)
  chex.assert_shape((tokens, logprobs, entropies), (4,))
  chex.assert_type((tokens, logprobs, entropies), (jnp.int32, jnp.float32, jnp.float32))
  np.testing.assert_allclose(logprobs, -np.log(1000), rtol=1e-5)
  np.testing.assert_allclose(entropies, np.log(1000), rtol=1e-5)
  order = jnp.asarray([2, 0, 3, 1])
  np.testing.assert_array_equal(_draw(logits, keys[order], positions[order], PLAIN)[0], tokens[order])
  moved = _draw(logits, keys, positions + 1, PLAIN)[0]
  assert (moved != tokens).all()


@pytest.mark.parametrize('filters', [(0, 1.0), (20, 0.9)], ids=['plain', 'filtered'])
def test_tokens_and_numbers_are_those_of_the_softmax(filters):
  """Against probabilities in float64; of 2,000 tokens some are impossible, and logits are far from 0."""
  k, p = filters
  logits = (4 * np.random.default_rng(1).normal(size=(64, 2000)) + 300).astype(np.float32)
  logits[:, 1500:] = -np.inf
  keys, positions = jax.random.split(jax.random.key(0), 64), jnp.arange(64)
  tokens, logprobs, entropies = _draw(logits, keys, positions, Sampling(1.0, p, k))

  def softmax(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)

  whole, kept = (softmax(np.asarray(x, np.float64)) for x in (logits, filter_logits(logits, k, p)))
  np.testing.assert_allclose(entropies, -np.sum(whole * np.log(np.maximum(whole, 1e-300)), axis=1), rtol=1e-5)
  np.testing.assert_allclose(logprobs, np.log(kept[np.arange(64), tokens]), rtol=1e-5, atol=1e-5)
  u = [float(jax.random.uniform(jax.random.fold_in(key, n))) for key, n in zip(keys, positions, strict=True)]
  upto = np.cumsum(kept, axis=1)
  for row, token in enumerate(tokens.tolist()):
    before = upto[row, token - 1] if token else 0.0
    assert before - 1e-5 <= u[row] <= upto[row, token] + 1e-5


def test_temperature_zero_takes_the_most_likely_token_whatever_the_key():
  logits = np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32)
  for seed in range(3):
    keys = jax.random.split(jax.random.key(seed), 6)
    tokens, logprobs, _ = _draw(logits, keys, np.zeros(6, np.int32), Sampling(temperature=0.0, top_p=1.0, top_k=2))
    np.testing.assert_array_equal(tokens, logits.argmax(axis=-1))
    np.testing.assert_allclose(logprobs, _log_softmax(logits).max(axis=-1), rtol=1e-6)


# Rows that differ in all that can differ; two draw from the model's own distribution.
BY_ROW = (
  PLAIN,
  GREEDY,
  Sampling(0.7, 1.0, 0),
  Sampling(1.3, 0.6, 0),
  Sampling(1.0, 1.0, 5),
  Sampling(0.8, 0.9, 20),
  Sampling(0.0, 0.5, 3),
  PLAIN,
)


def _arrays(rows):
  return RowSampling(
    temperature=jnp.asarray([r.temperature for r in rows], jnp.float32),
    top_p=jnp.asarray([r.top_p for r in rows], jnp.float32),
    top_k=jnp.asarray([r.top_k for r in rows], jnp.int32),
  )


@pytest.mark.parametrize(
  ('rows', 'size'), [(BY_ROW, 1500), (tuple(r for r in BY_ROW if r.top_p == 1 and not r.top_k), 50)]
)
@pytest.mark.slow_cases('rows0-1500')
def test_a_row_with_its_own_numbers_draws_what_a_batch_with_these_numbers_draws(rows, size):
  rows = rows * 8
  logits = 2 * jax.random.normal(jax.random.key(0), (len(rows), size))
  logits = logits.at[:, -3:].set(-jnp.inf)  # padding of the embedding
  keys, positions = jax.random.split(jax.random.key(1), len(rows)), jnp.arange(len(rows))
  got = jax.device_get(_draw_rows(logits, keys, positions, _arrays(rows), 0))
  for sampling in set(rows):
    divided = logits / sampling.temperature if sampling.temperature else logits
    want = jax.device_get(_draw(divided, keys, positions, sampling))
    own = [i for i, row in enumerate(rows) if row == sampling]
    np.testing.assert_array_equal(got[0][own], want[0][own])
    if sampling == PLAIN:  # nothing is computed in another way
      np.testing.assert_array_equal(got[1][own], want[1][own])
    np.testing.assert_allclose(got[1][own], want[1][own], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got[2][own], want[2][own], rtol=1e-5)
  assert len(set(got[0].tolist())) > len(rows) / 4


def test_the_likeliest_tokens_are_those_of_the_distribution_that_is_drawn_from():
  logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
  rows = (PLAIN, Sampling(0.5, 1.0, 2), GREEDY)
  keys, positions = jax.random.split(jax.random.key(1), 3), jnp.arange(3)
  tokens, logprobs, _, (top, top_logprobs) = _draw_rows(logits, keys, positions, _arrays(rows), 4)
  assert top.shape == top_logprobs.shape == (3, 4)
  order = np.argsort(-logits, axis=1)
  np.testing.assert_array_equal(top[0], order[0, :4])
  np.testing.assert_allclose(top_logprobs[0], _log_softmax(logits[0])[order[0, :4]], rtol=1e-6)
  # Two tokens are left in the second row, which share the probability.
  np.testing.assert_array_equal(top[1, :2], order[1, :2])
  assert np.isneginf(top_logprobs[1, 2:]).all()
  np.testing.assert_allclose(np.exp(top_logprobs[1, :2]).sum(), 1, rtol=1e-6)
  np.testing.assert_allclose(
    top_logprobs[1, 0] - top_logprobs[1, 1], 2 * (logits[1, order[1, 0]] - logits[1, order[1, 1]]), rtol=1e-5
  )
  assert tokens[2] == top[2, 0] and logprobs[2] == top_logprobs[2, 0]


@pytest.mark.parametrize('size', [50, 700, 1536])
def test_of_equally_likely_tokens_the_first_is_taken_greedily(size):
  logits = np.random.default_rng(0).normal(size=(5, size)).astype(np.float32)
  logits[:, -2:] = -np.inf
  logits[0, [7, 30]] = logits[0].max() + 1e-6
  logits[1, 3:] = -np.inf
  logits[2, 40] = 3e4
  logits[3, [-3, 0]] = logits[3].max() + 1
  logits[4] = np.nextafter(np.float32(4), np.float32(9))
  logits[4, 20] = np.nextafter(logits[4, 20], np.float32(9))
  keys = jax.random.split(jax.random.key(1), 5)
  for seed in range(3):
    tokens, logprobs, _ = _draw(logits, keys, np.full(5, seed, np.int32), GREEDY)
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    np.testing.assert_allclose(logprobs, _log_softmax(logits).max(axis=1), rtol=1e-5, atol=1e-6)
