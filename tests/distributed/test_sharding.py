"""Layouts of weights and rows on meshes that need no devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from ragen_jax.distributed.mesh import AXES
from ragen_jax.distributed.sharding import (
  SamplingLayout,
  optimizer_shardings,
  optimizer_spec,
  row_sharding,
  row_shards,
  sampling_spec,
  tree_shardings,
  weight_spec,
)
from ragen_jax.utils.errors import UserError
from tests.support import adapters

MESH = AbstractMesh((2, 2, 2), AXES)


def test_a_dimension_that_does_not_divide_is_named():
  mesh = AbstractMesh((1, 1, 4), AXES)
  with pytest.raises(UserError, match=r'mesh\.tensor=4: does not divide the 2 of .*k_proj.*divide it: 1, 2') as e:
    weight_spec('policy/layers/0/self_attn/k_proj/kernel', (64, 2, 16), mesh)
  assert '\n' not in str(e.value)
  assert weight_spec('policy/layers/0/self_attn/q_proj/kernel', (64, 4, 16), mesh) == PartitionSpec(
    'fsdp', 'tensor', None
  )


@pytest.mark.parametrize(
  ('path', 'shape', 'axes'),
  [
    ('policy/embed_tokens', (96, 64), ('tensor', 'fsdp')),
    ('policy/layers/3/self_attn/k_proj/bias', (2, 16), ('tensor', None)),
    ('policy/layers/3/self_attn/o_proj/kernel', (4, 16, 64), ('tensor', None, 'fsdp')),
    ('policy/layers/3/mlp/down_proj/kernel', (128, 64), ('tensor', 'fsdp')),
    ('policy/layers/3/self_attn/q_proj/adapter/lora_b', (4, 4, 16), (None, 'tensor', None)),
    ('policy/layers/3/input_layernorm/weight', (64,), ()),
    ('value_head/kernel', (64,), ()),
    ('policy/visual/blocks/3/attn/qkv/kernel', (32, 3, 4, 8), ('fsdp', None, 'tensor', None)),
    ('policy/visual/blocks/3/attn/qkv/bias', (3, 4, 8), (None, 'tensor', None)),
    ('policy/visual/blocks/3/attn/proj/kernel', (4, 8, 32), ('tensor', None, 'fsdp')),
    ('policy/visual/blocks/3/mlp/gate_proj/kernel', (32, 64), ('fsdp', 'tensor')),
    ('policy/visual/deepstack_mergers/0/linear_fc2/kernel', (128, 64), ('tensor', 'fsdp')),
    ('policy/visual/patch_embed/proj/kernel', (1536, 32), (None, 'fsdp')),
    ('policy/visual/pos_embed', (64, 32), (None, 'fsdp')),
    ('policy/visual/blocks/3/norm1/weight', (32,), ()),
  ],
)
def test_every_kind_of_weight_has_its_axes(path, shape, axes):
  assert weight_spec(path, shape, MESH) == PartitionSpec(*axes)


def test_heads_of_adapters_and_their_moments_are_divided_like_the_heads_of_the_model():
  params = nnx.state(adapters.adapted())
  shardings = tree_shardings(params, MESH)
  q_proj = shardings['layers'][0]['self_attn']['q_proj']
  assert q_proj['kernel'].get_value().spec == PartitionSpec('fsdp', 'tensor', None)
  assert q_proj['adapter']['lora_b'].get_value().spec == PartitionSpec(None, 'tensor', None)
  moments = jax.eval_shape(optax.adam(1e-3).init, params)
  found = [x.spec for x in jax.tree.leaves(tree_shardings(moments, MESH)[0].mu)]
  assert found == [x.spec for x in jax.tree.leaves(shardings)]


@pytest.mark.parametrize(
  ('path', 'shape', 'axes'),
  [
    ('mu/policy/embed_tokens', (4096, 64), (('tensor', 'data'), 'fsdp')),
    ('mu/policy/embed_tokens', (4098, 64), ('tensor', ('fsdp', 'data'))),  # its halves are odd
    ('mu/policy/layers/3/self_attn/q_proj/kernel', (64, 4, 16), (('fsdp', 'data'), 'tensor', None)),
    ('nu/policy/layers/3/self_attn/o_proj/kernel', (2, 64, 64), ('tensor', 'data', 'fsdp')),
    ('nu/policy/layers/3/mlp/down_proj/kernel', (66, 66), ('tensor', 'fsdp')),  # nothing that 4 divides
    ('mu/policy/layers/3/self_attn/k_proj/kernel', (64, 2, 16), ('fsdp', 'tensor', None)),  # small
    ('mu/policy/norm/weight', (8192,), ('data',)),
    ('count', (), ()),
  ],
)
def test_the_optimisers_arrays_are_divided_over_the_copies_of_the_weights_too(path, shape, axes):
  assert optimizer_spec(path, shape, MESH) == PartitionSpec(*axes)
  one_copy = AbstractMesh((1, 2, 2), AXES)
  assert optimizer_spec(path, shape, one_copy) == weight_spec(path, shape, one_copy)


def test_gradients_and_moments_have_one_layout():
  params = {'policy': {'embed_tokens': jax.ShapeDtypeStruct((4096, 64), 'float32')}}
  moments = jax.eval_shape(optax.adam(1e-3).init, params)
  (gradient,) = jax.tree.leaves(optimizer_shardings(params, MESH))
  assert [x.spec for x in jax.tree.leaves(optimizer_shardings(moments, MESH)[0].mu)] == [gradient.spec]
  assert gradient.shard_shape((4096, 64)) == (1024, 32)


def test_rows_are_divided_over_two_axes():
  assert row_shards(MESH) == 4
  assert row_sharding(MESH).shard_shape((16, 5)) == (4, 5)


@pytest.mark.parametrize(
  ('path', 'shape', 'axes'),
  [
    ('policy/embed_tokens', (96, 64), (('tensor', 'fsdp'), None)),
    ('policy/lm_head/kernel', (64, 96), (None, ('tensor', 'fsdp'))),
    ('policy/layers/3/self_attn/k_proj/kernel', (64, 2, 16), (None, 'tensor', None)),
    ('policy/layers/3/self_attn/o_proj/kernel', (4, 16, 64), ('tensor', None, None)),
    ('policy/layers/3/mlp/up_proj/kernel', (64, 128), (None, ('tensor', 'fsdp'))),
    ('policy/layers/3/mlp/down_proj/kernel', (128, 64), (('tensor', 'fsdp'), None)),
    ('policy/layers/3/mlp/gate_proj/adapter/lora_a', (64, 4), (None, None)),
    ('policy/layers/3/mlp/gate_proj/adapter/lora_b', (4, 128), (None, ('tensor', 'fsdp'))),
    ('policy/layers/3/self_attn/q_proj/adapter/lora_b', (4, 4, 16), (None, 'tensor', None)),
    # A tower is no part of the sampled layers; its MLP may have a width that neighbours do not divide.
    ('policy/visual/blocks/0/mlp/gate_proj/kernel', (64, 90), (None, 'tensor')),
    # The width stays whole, so neighbours need not divide it.
    ('policy/embed_tokens', (96, 63), (('tensor', 'fsdp'), None)),
    ('policy/layers/3/self_attn/q_proj/kernel', (63, 4, 16), (None, 'tensor', None)),
    ('policy/norm/weight', (64,), ()),
  ],
)
def test_neighbours_divide_the_mlp_and_the_vocabulary_while_they_sample(path, shape, axes):
  assert sampling_spec(path, shape, MESH) == PartitionSpec(*axes)


def test_weights_that_neighbours_cannot_divide_are_named():
  with pytest.raises(UserError, match=r'agent\.decode_shards=2: with mesh\.tensor=2 .* the 98 of .*embed_tokens') as e:
    sampling_spec('policy/embed_tokens', (98, 64), MESH)
  assert '\n' not in str(e.value)


def test_rows_of_zeros_come_and_go():
  layout, x = SamplingLayout(None, False, 8), jnp.arange(6.0).reshape(3, 2)
  padded = layout.padded(x)
  np.testing.assert_array_equal(padded, np.pad(x, ((0, 5), (0, 0))))
  np.testing.assert_array_equal(layout.without_padding(padded, 3), x)
  many = jnp.ones((9, 2))
  assert layout.padded(many) is many and layout.without_padding(many, 9) is many
