"""The name mapping: every parameter has one tensor, and conversions are inverses of one another."""

from __future__ import annotations

import chex
import numpy as np
import pytest
from flax import nnx

from ragen_jax.models.checkpoint.names import abstract_model, list_names, weights
from tests.support.checkpoints import HYBRID, LLAMA, SMALL, SMALL3


@pytest.mark.parametrize('cfg', [SMALL, SMALL3, HYBRID, LLAMA], ids=['qwen2', 'qwen3', 'qwen3_5', 'llama'])
def test_every_parameter_has_one_tensor_of_its_size(cfg):
  plan = weights(cfg)
  shapes = {path: leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(abstract_model(cfg)))}
  assert {w.path: w.shape for w in plan} == shapes
  assert len({w.name for w in plan}) == len(plan)
  assert all(w.size == np.prod(w.hf_shape) for w in plan)


@pytest.mark.parametrize('cfg', [SMALL, SMALL3, HYBRID, LLAMA], ids=['qwen2', 'qwen3', 'qwen3_5', 'llama'])
def test_conversions_are_inverses_and_a_kernel_is_the_transposed_matrix_of_a_linear_layer(cfg):
  rng = np.random.default_rng(0)
  x = rng.normal(size=cfg.hidden_size)
  for w in weights(cfg):
    tensor = rng.normal(size=w.hf_shape)
    parameter = w.from_hf(tensor)
    chex.assert_shape(parameter, w.shape)
    np.testing.assert_array_equal(w.to_hf(parameter), tensor)
    if w.path[-2:] == ('in_proj_qkv', 'kernel'):
      channels, c = tensor @ x, cfg.linear  # of all queries, all keys, all values
      q, k, v = (part.reshape(2, -1) for part in np.split(channels, [8, 16]))
      np.testing.assert_allclose(np.einsum('D,DJC->JC', x, parameter), np.concatenate([q, k, v], axis=1))
      assert v.shape == (2, c.groups * c.value_dim)
    if w.path[-2:] == ('q_proj', 'kernel'):
      np.testing.assert_allclose(np.einsum('D,DNH->NH', x, parameter).ravel(), tensor @ x)


def test_an_error_lists_eight_names_and_counts_the_others():
  assert list_names(['a', 'b']) == 'a, b'
  assert list_names([str(i) for i in range(10)]) == '0, 1, 2, 3, 4, 5, 6, 7 and 2 more'
