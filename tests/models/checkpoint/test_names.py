"""The name mapping: every parameter has one tensor, and conversions are inverses of one another."""

from __future__ import annotations

import chex
import numpy as np
import pytest
from flax import nnx

from ragen_jax.models.checkpoint.names import abstract_model, list_names, stored, weights
from tests.support.checkpoints import EXPERTS, GEMMA, HYBRID, HYBRID_EXPERTS, LLAMA, SMALL, SMALL3

EVERY = {
  'qwen2': SMALL, 'qwen3': SMALL3, 'qwen3_5': HYBRID, 'llama': LLAMA, 'qwen3_moe': EXPERTS,
  'qwen3_5_moe': HYBRID_EXPERTS, 'gemma3': GEMMA,
}  # fmt: skip


@pytest.mark.parametrize('cfg', EVERY.values(), ids=EVERY)
def test_every_parameter_has_one_tensor_of_its_size(cfg):
  plan = weights(cfg)
  shapes = {path: leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(abstract_model(cfg)))}
  assert {w.path: w.whole_shape for w in plan} == shapes
  assert len({w.name for w in plan}) == len(plan)
  assert all(w.size == np.prod(w.hf_shape) for w in plan)


@pytest.mark.parametrize('cfg', EVERY.values(), ids=EVERY)
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


def test_experts_of_a_layer_have_a_tensor_each_or_two_together():
  found = stored(EXPERTS)
  assert found.keys() - {w.name for w in weights(EXPERTS)} == {
    f'model.layers.0.mlp.experts.{name}' for name in ('gate_up_proj', 'down_proj')
  }
  # Gates stand above the others, as rows of each expert's matrix.
  together = found['model.layers.0.mlp.experts.gate_up_proj']
  assert together.shape == (6, 24, 16) and found['model.layers.0.mlp.experts.down_proj'].shape == (6, 16, 12)
  names = {w.name: place for w, place in together.parts}
  assert names['model.layers.0.mlp.experts.4.gate_proj.weight'] == (4, slice(0, 12))
  assert names['model.layers.0.mlp.experts.4.up_proj.weight'] == (4, slice(12, 24))
  assert len(names) == 12


def test_an_error_lists_eight_names_and_counts_the_others():
  assert list_names(['a', 'b']) == 'a, b'
  assert list_names([str(i) for i in range(10)]) == '0, 1, 2, 3, 4, 5, 6, 7 and 2 more'
