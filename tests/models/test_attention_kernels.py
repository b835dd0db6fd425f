"""Attention by kernels of JAX against attention with all scores in memory: outputs and gradients.

The kernels for TPUs run in interpret mode. Compilers of the accelerators are asked where they are installed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.models import attention_kernels, trees
from ragen_jax.models.attention import attend, causal
from ragen_jax.models.attention_settings import EINSUM, AttentionSettings
from tests.support.paths import ROOT
from tests.support.processes import environment
from tests.support.trees import random_tree, seen_until_of

# Rows, columns, query heads, key/value heads, head width, and the lengths of the sequences of each row if it is packed;
# what is left of a row is a sequence too. Or 'trees'.
SHAPES = {
  # The heads of Qwen2.5-0.5B; a packed row, one without padding and one that is padding. Pads 200 to 256 columns.
  'packed': (3, 200, 14, 2, 64, ((90, 1, 79), (150, 50), ())),
  # Groups of 4 and wide heads; two blocks of 384 columns for TPUs, and the second sequence lies in both.
  'packed over blocks': (1, 540, 4, 1, 128, ((300, 200),)),
  'one sequence a row': (2, 130, 7, 1, 64, None),
  # Trees that begin and end within blocks, and over several.
  'trees': (3, 400, 6, 2, 64, 'trees'),
}
KERNELS = ('flash', 'splash')


def make(name: str, dtype=np.float32):
  """q, k, v, the weights of the output in the loss, and `seen_until` or None."""
  b, t, n, k, h, lengths = SHAPES[name]
  rng = np.random.default_rng(0)
  arrays = [jnp.asarray(rng.normal(size=(b, t, heads, h)), dtype) for heads in (n, k, k, n)]
  if lengths is None:
    return (*arrays, None)
  if lengths == 'trees':
    return (*arrays, jnp.asarray(np.stack([random_tree(rng, t)[1] for _ in range(b)])))
  rows = [np.repeat(range(len(x) + 1), (*x, t - sum(x))) for x in lengths]
  return (*arrays, jnp.asarray(seen_until_of(np.stack(rows))))


def outputs_and_gradients(settings, q, k, v, weights, seen_until, window=0):
  """The output, and the gradients of its weighted sum."""

  @jax.jit
  def both(q, k, v):
    out, pull = jax.vjp(lambda *x: causal(*x, seen_until, settings, window), q, k, v)
    return out, *pull(weights)

  return [np.asarray(x, np.float32) for x in both(q, k, v)]


@functools.cache
def expected(name, window=0):
  return outputs_and_gradients(EINSUM, *make(name), window)


# Of all pairs, those that the default tests run.
_QUICK = {('blocks', 'trees'), ('flash', 'packed'), ('flash', 'trees'), ('splash', 'packed over blocks')}


@pytest.mark.parametrize(
  ('kernel', 'shape'),
  [
    pytest.param(kernel, shape, marks=() if (kernel, shape) in _QUICK else pytest.mark.slow)
    for kernel in ('blocks', *KERNELS)
    for shape in SHAPES
  ],
)
@pytest.mark.slow_cases('flash-packed', 'splash-packed over blocks', 'blocks-trees')
def test_kernels_are_attention_and_have_its_gradients(kernel, shape):
  if shape == 'trees' and not AttentionSettings(kernel, None).tree_columns(64):
    assert kernel == 'splash'
    return
  found = outputs_and_gradients(AttentionSettings(kernel, None, interpret=True), *make(shape))
  for x, want, name in zip(found, expected(shape), ('out', 'q', 'k', 'v'), strict=True):
    # Sums of up to 540 products in float32, in another order.
    np.testing.assert_allclose(x, want, rtol=0, atol=2e-6 * np.abs(want).max(), err_msg=name)


@pytest.mark.parametrize(
  ('kernel', 'shape', 'window'),
  [
    ('blocks', 'packed', 33),
    ('flash', 'packed over blocks', 130),
    *(
      pytest.param(*x, marks=pytest.mark.slow)
      for x in [
        ('blocks', 'packed over blocks', 130),
        ('blocks', 'trees', 25),
        ('flash', 'packed', 33),
        ('flash', 'trees', 25),
        ('splash', 'packed', 33),
        ('splash', 'packed over blocks', 130),
        ('splash', 'trees', 25),
      ]
    ),
  ],
)
@pytest.mark.slow_cases('blocks-packed-33', 'flash-packed over blocks-130')
@pytest.mark.exhaustive_cases('flash-packed-33', 'blocks-packed over blocks-130')
def test_kernels_attend_to_windows(kernel, shape, window):
  q, k, v, _, seen_until = make(shape)
  # What is near in a tree is so by depth.
  places = np.arange(q.shape[1])[None] if seen_until is None else np.asarray(trees.depths(seen_until))
  mask = np.asarray(trees.still_seen(seen_until)) & np.tri(q.shape[1], dtype=bool)
  mask &= places[:, :, None] - places[:, None] < window
  want = expected(shape, window)
  np.testing.assert_allclose(want[0], attend(q, k, v, jnp.asarray(mask)), rtol=0, atol=1e-5)
  if shape == 'trees' and kernel != 'blocks':
    return  # `Qwen.tree_columns` allows none
  found = outputs_and_gradients(AttentionSettings(kernel, None, interpret=True), *make(shape), window)
  for x, of_all, name in zip(found, want, ('out', 'q', 'k', 'v'), strict=True):
    np.testing.assert_allclose(x, of_all, rtol=0, atol=2e-6 * np.abs(of_all).max(), err_msg=name)


@pytest.mark.slow
def test_cudnn_gets_windows_in_its_mask(monkeypatch):
  """The rest of it runs on NVIDIA GPUs only; here, attention with all scores takes its place."""
  real = jax.nn.dot_product_attention
  monkeypatch.setattr(jax.nn, 'dot_product_attention', lambda *x, implementation, **more: real(*x, **more))
  for shape in ('packed', 'one sequence a row'):
    q, k, v, _, seen_until = make(shape)
    found = attention_kernels.cudnn(q, k, v, seen_until, window=33)
    np.testing.assert_allclose(found, expected(shape, 33)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
  ('kernel', 'ratio'),
  [('flash', 1.2), pytest.param('splash', 1.2, marks=pytest.mark.slow)],
)
@pytest.mark.slow_cases('flash-1.2')
def test_kernels_in_bfloat16_are_about_as_near_as_attention_in_bfloat16(kernel, ratio):
  want = expected('packed')
  plain = outputs_and_gradients(EINSUM, *make('packed', jnp.bfloat16))
  found = outputs_and_gradients(AttentionSettings(kernel, None, interpret=True), *make('packed', jnp.bfloat16))
  for x, y, exact, name in zip(found, plain, want, ('out', 'q', 'k', 'v'), strict=True):
    error, error_of_plain = np.linalg.norm(x - exact), np.linalg.norm(y - exact)
    assert 0 < error <= ratio * error_of_plain, name


@pytest.mark.parametrize(
  ('columns', 'block'),
  [(1, 128), (128, 128), (200, 256), (512, 512), (540, 384), (1280, 256), (1408, 512), (3712, 384)],
)
def test_the_block_of_splash_attention_pads_least(columns, block):
  assert attention_kernels.splash_block(columns) == block


@pytest.mark.parametrize('kernel', KERNELS)
def test_kernels_are_lowered_for_tpus(kernel):
  q, k, v, _, seen_until = make('packed', jnp.bfloat16)
  settings = AttentionSettings(kernel, None)
  gradient = jax.jit(
    jax.grad(lambda *x: jnp.sum(causal(*x, seen_until, settings).astype(jnp.float32)), argnums=(0, 1, 2))
  )
  text = gradient.trace(q, k, v).lower(lowering_platforms=('tpu',)).as_text()
  # Forward, and backward; splash attention has two kernels for that.
  assert text.count('tpu_custom_call') >= 2


def worker(*arguments: str, **variables: str):
  """What tests.support.attention_worker prints."""
  found = subprocess.run(
    [sys.executable, '-m', 'tests.support.attention_worker', *arguments],
    cwd=ROOT, env=os.environ | {'PYTHONPATH': os.pathsep.join((str(ROOT), *sys.path))} | variables,
    capture_output=True, text=True,
  )  # fmt: skip
  assert found.returncode == 0, found.stderr[-3000:]
  return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.slow
def test_eight_devices_attend_as_one_does():
  """Each device attends with its rows and heads, and needs nothing of the others."""
  found = worker('mesh', **environment(devices=8))
  assert found.pop('model') < 1e-5
  assert found.keys() == {'einsum', 'blocks', 'flash', 'splash'}
  for implementation, result in found.items():
    assert result['difference'] < 2e-6, implementation
    assert result['parts'] == [8, 8, 8, 8], implementation
    assert result['collectives'] == 0, implementation


needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None, reason="needs libtpu, which has the TPUs' compiler: pip install libtpu"
)


@needs_libtpu
@pytest.mark.parametrize('mesh', ['1x1x1', '2x2x2'])
@pytest.mark.parametrize(
  ('kernel', 'columns', 'heads'),
  [('flash', 1408, '14,2,64'), ('flash', 8192, '28,4,128'), ('splash', 3712, '14,2,64'), ('splash', 2048, '28,4,128')],
)
def test_the_compiler_of_tpus_accepts_the_kernels_and_keeps_no_scores(kernel, columns, heads, mesh):
  found = worker('tpu', kernel, str(columns), heads, mesh)
  # Forward, forward again in the backward pass, and the gradients: all of them, or those of q and of k and v.
  assert found['kernels'] == {'flash': 3, 'splash': 4}[kernel]
  assert found['collectives'] == 0
  # Scores in float32 of one row and the heads that a device has.
  scores = int(heads.split(',')[0]) // int(mesh[-1]) * columns**2 * 4
  assert found['temp'] < scores / 2
