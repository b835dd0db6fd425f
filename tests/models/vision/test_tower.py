"""Towers against `transformers` on the same weights, and our ways of running them against one another."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax.models.attention_settings import EINSUM
from ragen_jax.models.vision.config import QWEN2_5_VL, QWEN3_VL, VisionConfig
from ragen_jax.models.vision.tower import VisionTower
from ragen_jax.utils.errors import UserError
from tests.support.adapters import adapted
from tests.support.vision import END, IMAGE, START, VIDEO

_SMALL = VisionConfig(
  family=QWEN2_5_VL, depth=3, hidden_size=16, intermediate_size=12, num_heads=2, out_hidden_size=8, patch_size=2,
  temporal_patch_size=2, merge_size=2, window_size=8, full_blocks=(2,), num_positions=0, deepstack_blocks=(),
  image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
)  # fmt: skip
_SMALL3 = dataclasses.replace(
  _SMALL, family=QWEN3_VL, window_size=0, full_blocks=(), num_positions=16, deepstack_blocks=(1, 2)
)


def test_features_are_those_of_transformers_and_of_each_image_alone(pair):
  import torch

  # More tokens a side than a window, and sides that windows do not divide.
  grid = (12, 18)
  patches = np.random.default_rng(0).normal(size=(2, grid[0] * grid[1], pair.ours.cfg.vision.patch_values))
  patches = patches.astype(np.float32)
  with torch.no_grad():
    expected = pair.theirs.model.visual(
      torch.tensor(patches.reshape(-1, patches.shape[-1])), grid_thw=torch.tensor([[1, *grid]] * 2)
    )
  run = nnx.jit(lambda model, x: model.see(x, grid))
  found = run(pair.ours, patches)
  merged = expected.pooler_output.numpy()
  assert np.std(merged) > 0.3, 'too flat to show a difference'
  np.testing.assert_allclose(found.embeddings, merged.reshape(found.embeddings.shape), rtol=0, atol=1e-5)
  other = run(pair.ours, patches + np.arange(2, dtype=np.float32)[:, None, None])
  np.testing.assert_array_equal(other.embeddings[0], found.embeddings[0])
  assert (other.embeddings[1] != found.embeddings[1]).any()
  if pair.family != QWEN3_VL:
    assert found.deepstack is None
    return
  assert found.deepstack.shape == (2, 2, *found.embeddings.shape[1:]) and len(expected.deepstack_features) == 2
  for i, feature in enumerate(expected.deepstack_features):
    own = found.deepstack[:, i]
    np.testing.assert_allclose(own, feature.numpy().reshape(own.shape), rtol=0, atol=1e-5)


def _tower(cfg: VisionConfig, dtype=jnp.float32) -> VisionTower:
  make = lambda: VisionTower(cfg, dtype=dtype, param_dtype=jnp.float32, attention=EINSUM, rngs=nnx.Rngs(0))  # noqa: E731
  graphdef, params = nnx.split(nnx.eval_shape(make))
  rng = np.random.default_rng(0)
  return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), params))


@pytest.mark.parametrize('full', [(), (1,), (0, 1, 2)])
@pytest.mark.slow_cases('full1', 'full2')
def test_blocks_attend_within_windows_but_for_those_that_attend_to_the_whole_image(full):
  tower = _tower(dataclasses.replace(_SMALL, full_blocks=full))
  patches = np.random.default_rng(1).normal(size=(1, 64, _SMALL.patch_values)).astype(np.float32)
  other = patches.copy()
  other[:, :4] += 1  # the first of 4 x 4 tokens; windows have 2 x 2
  see = nnx.jit(lambda tower, x: tower(x, (8, 8)).embeddings)
  changed = np.any(np.abs(see(tower, patches) - see(tower, other)) > 1e-6, axis=-1)[0]
  assert np.flatnonzero(changed).tolist() == (list(range(16)) if full else [0, 1, 4, 5])


@pytest.mark.slow
def test_blocks_in_a_loop_and_computed_again_give_the_same_features_and_gradients():
  patches = np.random.default_rng(1).normal(size=(1, 48, _SMALL.patch_values)).astype(np.float32)

  @functools.partial(nnx.jit, static_argnames='remat')
  @functools.partial(nnx.value_and_grad, argnums=0)
  def loss(tower, remat):
    return jnp.sum(jnp.sin(tower(patches, (6, 8), remat=remat).embeddings))

  tower = _tower(_SMALL)
  value, gradient = loss(tower, remat=False)
  tower.scan_blocks = True  # the first two, which attend to windows
  other, other_gradient = loss(tower, remat=True)
  np.testing.assert_allclose(other, value, rtol=1e-5)
  found = dict(nnx.to_flat_state(other_gradient))
  for path, want in nnx.to_flat_state(gradient):
    assert np.linalg.norm(want[...]) > 0, path
    assert np.linalg.norm(found[path][...] - want[...]) <= 1e-4 * np.linalg.norm(want[...]), path


@pytest.mark.parametrize('scanned', [False, True])
def test_blocks_are_computed_again_only_if_asked_for(scanned):
  tower = _tower(_SMALL)
  tower.scan_blocks = scanned
  graphdef, params = nnx.split(tower)
  patches = jnp.zeros((1, 48, _SMALL.patch_values))

  def computes_again(remat):
    def loss(params):
      return nnx.merge(graphdef, params)(patches, (6, 8), remat=remat).embeddings.sum()

    equations = str(jax.make_jaxpr(jax.grad(loss))(params))
    return 'remat' in equations or 'checkpoint[' in equations  # by the version of JAX

  assert computes_again(True) and not computes_again(False)


def test_deep_towers_are_scanned_between_the_blocks_that_give_features():
  tower = _tower(_SMALL3)
  patches = np.random.default_rng(1).normal(size=(1, 48, _SMALL3.patch_values)).astype(np.float32)
  run = nnx.jit(lambda tower: tower(patches, (6, 8)))
  expected = run(tower)
  tower.scan_blocks = True
  found = run(tower)
  np.testing.assert_allclose(found.embeddings, expected.embeddings, rtol=0, atol=1e-5)
  np.testing.assert_allclose(found.deepstack, expected.deepstack, rtol=0, atol=1e-5)
  assert not tower_of_depth(7).scan_blocks and tower_of_depth(8).scan_blocks


def tower_of_depth(depth: int) -> VisionTower:
  return nnx.eval_shape(
    lambda: VisionTower(
      dataclasses.replace(_SMALL, depth=depth), dtype=jnp.float32, param_dtype=jnp.float32, attention=EINSUM,
      rngs=nnx.Rngs(0),
    )
  )  # fmt: skip


def test_features_have_the_type_of_activations():
  found = jax.eval_shape(lambda x: _tower(_SMALL3, jnp.bfloat16)(x, (4, 6)), jnp.zeros((5, 24, _SMALL3.patch_values)))
  assert found.embeddings.dtype == found.deepstack.dtype == jnp.bfloat16
  assert (found.embeddings.shape, found.deepstack.shape) == ((5, 6, 8), (5, 2, 6, 8))


def test_patches_of_another_grid_are_refused():
  with pytest.raises(ValueError, match=r'patches of shape \(24, 24\) are not those of a grid \(4, 4\)'):
    _tower(_SMALL)(jnp.zeros((1, 24, 24)), (4, 4))
  with pytest.raises(ValueError, match=r'are not those of a grid \(3, 8\)'):
    _tower(_SMALL)(jnp.zeros((1, 24, 24)), (3, 8))


def test_a_text_model_reads_no_images():
  with pytest.raises(UserError, match=r'^the model reads text only, and there are images$'):
    adapted(config=None).see(jnp.zeros((1, 24, 24)), (4, 6))
