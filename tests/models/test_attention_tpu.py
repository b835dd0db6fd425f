"""The kernels for TPUs: what they skip, beside attention with all scores (tests/models/test_attention_kernels.py)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.models import attention_kernels, attention_tpu
from ragen_jax.models.attention import causal
from ragen_jax.models.attention_settings import EINSUM
from tests.support.trees import seen_until_of


def test_blocks_of_keys_before_the_sequences_of_a_block_are_skipped():
  #                    block 0        1                      2          3
  lengths = np.array([[100, 28, 0, 0], [200, 184, 100, 28], [512, 0, 0, 0]])
  segments = np.stack([np.repeat(range(5), [*x, 512 - x.sum()]) for x in lengths])
  first = attention_tpu._first_blocks(jnp.asarray(seen_until_of(segments)))
  # A block begins in the middle of a sequence, or with one; what is left of a row is a sequence of its own.
  assert first.tolist() == [[0, 1, 1, 1], [0, 0, 1, 3], [0, 0, 0, 0]]


@pytest.mark.parametrize('blocks', range(1, 8))
def test_every_block_of_keys_is_visited_once(blocks):
  def run(j, n):
    jax.debug.callback(lambda j, n=n: visited.extend(range(int(j), int(j) + n)), j, ordered=True)

  visited = []
  jax.jit(functools.partial(attention_tpu._over_keys, run, blocks=3 + blocks))(jnp.int32(3), jnp.int32(3 + blocks))
  jax.effects_barrier()
  assert visited == [*range(3, 3 + blocks)]


def test_hidden_keys_are_not_read():
  """Keys of another sequence and of later blocks may hold anything."""
  rng = np.random.default_rng(0)
  q, k, v = (jnp.asarray(rng.normal(size=(1, n, 384, 64)), jnp.float32) for n in (2, 1, 1))
  seen_until = jnp.asarray(seen_until_of(np.repeat([0, 1], [256, 128])[None]))

  @jax.jit
  def gradients(k, v):
    def total(q, k, v):
      out = attention_tpu.attention(jnp.swapaxes(q, 2, 3), k, v, seen_until, 'kept', True)
      return jnp.sum(jnp.sin(out[..., 256:]))

    return jax.grad(total, argnums=(0, 1, 2))(q, k, v)

  nothing = [x.at[:, :, :256].set(jnp.nan) for x in (k, v)]
  for x, want in zip(gradients(*nothing), gradients(k, v), strict=True):
    np.testing.assert_array_equal(x[:, :, 256:], want[:, :, 256:])
    assert np.abs(np.asarray(want[:, :, 256:])).max() > 0


@pytest.mark.slow
def test_longer_rows_than_the_chip_holds_are_attended_to_by_splash_attention(monkeypatch):
  rng = np.random.default_rng(0)
  q, k, v = (jnp.asarray(rng.normal(size=(1, 140, n, 64)), jnp.float32) for n in (2, 1, 1))
  want = causal(q, k, v, None, EINSUM)
  asked = []
  splash = attention_kernels.splash
  monkeypatch.setattr(attention_kernels, 'splash', lambda *args, **names: asked.append(1) or splash(*args, **names))
  for most, times in ((140, 0), (139, 1)):
    monkeypatch.setattr(attention_kernels, 'MOST_FLASH_COLUMNS', most)
    found = attention_kernels.flash(q, k, v, interpret=True)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)
    assert len(asked) == times
