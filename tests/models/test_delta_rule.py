"""The delta rule in chunks against the rule itself, column by column, and its own ways of running."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.models import delta_rule

B, T, J, G, E, W = 2, 37, 2, 3, 8, 12
BEGINS = np.zeros((B, T), bool)
# The first chunk of 16 has no, one and two beginnings; one is on the border of chunks, one at the end.
BEGINS[0, [5, 6, 32]] = BEGINS[1, [16, 36]] = True


chunked = jax.jit(delta_rule.chunked, static_argnames='chunk')


def arrays(seed: int = 0) -> tuple[np.ndarray, ...]:
  """q, k, v, g, beta and a memory; decays from nearly none to nearly all within one row."""
  rng = np.random.default_rng(seed)
  q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.normal(size=(2, B, T, J, E)))
  g = -np.exp(rng.uniform(-5, 3, size=(J, G))) * np.logaddexp(0, 3 * rng.normal(size=(B, T, J, G)))
  beta = 1 / (1 + np.exp(-rng.normal(size=(B, T, J, G))))
  found = (q, k, rng.normal(size=(B, T, J, G, W)), g, beta, rng.normal(size=(B, J, G, E, W)))
  return tuple(x.astype(np.float32) for x in found)


@jax.jit
def by_columns(q, k, v, g, beta, memory, begins):
  def step(memory, of_column):
    begin, *of_column = of_column
    out, memory = delta_rule.one_column(*of_column, jnp.where(begin[:, None, None, None, None], 0, memory))
    return memory, out

  columns = [jnp.moveaxis(x, 1, 0) for x in (begins, q, k, v, g, beta)]
  memory, out = jax.lax.scan(step, memory, tuple(columns))
  return jnp.moveaxis(out, 0, 1), memory


def in_numpy(q, k, v, g, beta, memory):
  """The rule of the paper, with every head on its own and in float64."""
  out, memory = np.zeros(v.shape), memory.astype(np.float64)
  for b, j, i in np.ndindex(B, J, G):
    s = memory[b, j, i]
    for t in range(T):
      s = np.exp(np.float64(g[b, t, j, i])) * s
      s = s + np.outer(k[b, t, j], beta[b, t, j, i] * (v[b, t, j, i] - s.T @ k[b, t, j]))
      out[b, t, j, i] = s.T @ q[b, t, j]
    memory[b, j, i] = s
  return out, memory


def test_one_column_after_the_other_is_the_rule():
  x = arrays()
  out, memory = by_columns(*x, np.zeros((B, T), bool))
  expected, expected_memory = in_numpy(*x)
  np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
  np.testing.assert_allclose(memory, expected_memory, rtol=0, atol=2e-6)


@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.slow_cases('False')
def test_chunks_give_what_columns_give_and_its_gradients(packed):
  x, begins = arrays(), BEGINS if packed else np.zeros((B, T), bool)
  weight = np.random.default_rng(1).normal(size=(B, T, J, G, W)).astype(np.float32)

  def total(run, *x):
    out, memory = run(*x)
    return jnp.sum(out * weight) + jnp.sum(jnp.sin(memory)), (out, memory)

  def of(run):
    (_, found), gradients = jax.jit(
      jax.value_and_grad(functools.partial(total, run), argnums=tuple(range(6)), has_aux=True)
    )(*x)
    return (*found, *gradients)

  chunks = of(functools.partial(delta_rule.chunked, begins=jnp.asarray(begins) if packed else None, chunk=16))
  columns = of(lambda *x: by_columns(*x, begins))
  for got, want in zip(chunks, columns, strict=True):
    assert np.abs(got - want).max() <= 2e-6 * max(np.abs(want).max(), 1)


def test_a_column_without_rate_and_decay_leaves_the_memory_to_the_bit():
  q, k, v, g, beta, memory = arrays()
  own = (np.arange(T) < np.asarray([[11], [0]]))[..., None, None]
  _, after = chunked(q, k, v, np.where(own, g, 0), np.where(own, beta, 0), memory, chunk=8)
  np.testing.assert_array_equal(after[1], memory[1])
  _, short = by_columns(*(x[:, :11] for x in (q, k, v, g, beta)), memory, np.zeros((B, 11), bool))
  np.testing.assert_allclose(after[0], short[0], rtol=0, atol=1e-6)
  _, after = delta_rule.one_column(q[:, 0], k[:, 0], v[:, 0], 0 * g[:, 0], 0 * beta[:, 0], memory)
  np.testing.assert_array_equal(after, memory)


def test_equal_keys_that_are_never_forgotten_lose_no_bits():
  """The powers of such a chunk's matrix have entries of 1e9 and more, and its inverse has ones."""
  q, k, v, g, beta, memory = arrays()
  k = np.broadcast_to(k[:, :1], k.shape)
  out, _ = chunked(q, k, v, 0 * g, 0 * beta + 1, memory, chunk=64)
  expected, _ = in_numpy(q, k, v, 0 * g, 0 * beta + 1, memory)
  np.testing.assert_allclose(out, expected, rtol=0, atol=5e-6)


def test_chunks_are_as_wide_as_keys_within_bounds():
  assert [delta_rule.chunk_columns(e) for e in (1, 8, 9, 16, 64, 128)] == [8, 8, 16, 16, 64, 64]
