"""Matrices in 8 bits: how far they are from the weights, what is computed with them, and how they are loaded."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import path_of
from ragen_jax.models import int8, lora
from ragen_jax.models.checkpoint.load import load_params
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.models.int8 import Int8
from ragen_jax.sampling.sampler import Sampler, changed_weights
from tests.support.models import EXPERTS, HYBRID_EXPERTS, WINDOWS, random_model
from tests.support.processes import copy_python

VOCAB = 40
TOKENS = jnp.arange(24).reshape(2, 12) * 7 % VOCAB
SHAPES = {
  'dense': {'num_layers': 1}, 'experts': EXPERTS | {'num_layers': 1, 'mlp_layers': ()}, 'hybrid': HYBRID_EXPERTS,
  'windows': WINDOWS, 'scanned': {'num_layers': 8},
}  # fmt: skip
FAST = ('dense', 'experts')
ALL = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SHAPES]


def dequantised(params):
  """The weights with arrays in place of `Int8`."""
  return jax.tree.map(
    lambda x: x.value * x.scale if isinstance(x, Int8) else x, params, is_leaf=lambda x: isinstance(x, Int8)
  )


def logits(model, remat: str = 'none') -> jax.Array:
  return model.policy.logits(model.policy(model.policy.embed(TOKENS), remat=remat)[0])


def filled(graphdef, params, seed: int = 0):
  """A model with random weights, made without compiling anything."""
  rng = np.random.default_rng(seed)
  return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.2, x.dtype), params))


@pytest.fixture(scope='module', params=ALL)
def models(request):
  """A random model with adapters that are not zero, in 8 bits; and the same with what the 8 bits stand for.

  Scales are powers of two, so that no product is rounded differently.
  """

  def make():
    model = random_model(VOCAB, **SHAPES[request.param])
    lora.attach(model.policy, lora.LoraConfig(2, 4, lora.targets(model.policy.cfg)), nnx.Rngs(1))
    return model

  model = filled(*nnx.split(nnx.eval_shape(make)))
  int8.quantise(model.policy)
  graphdef, params = nnx.split(model)
  params = jax.tree_util.tree_map_with_path(
    lambda path, x: jnp.exp2(jnp.round(jnp.log2(x))) if path_of(path).endswith('/scale') else x, params
  )
  return nnx.merge(graphdef, params), nnx.merge(graphdef, dequantised(params))


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('on_host', [True, False])
@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_not_hidden(bad, on_host):
  kernel = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
  kernel[2, 1] = bad
  found = int8.quantised(kernel if on_host else jnp.asarray(kernel), (-2,))
  found = int8.Int8(*map(jnp.asarray, (found.value, found.scale)))
  assert np.isnan(np.asarray(found(jnp.ones((2, 4))))).tolist() == [[False, True, False]] * 2


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(-2,), (-3,), (-3, -2)]), st.floats(-30, 30), st.booleans())
def test_no_weight_changes_by_more_than_half_the_scale_of_its_output(seed, axes, exponent, on_host):
  rng = np.random.default_rng(seed)
  kernel = (rng.normal(size=(5, 4, 3)) ** 3 * 10.0**exponent).astype(np.float32)
  kernel[..., 0] = 0
  found = int8.quantised(kernel if on_host else jnp.asarray(kernel), axes)
  assert isinstance(found.value, np.ndarray) == on_host
  assert found.value.dtype == np.int8 and found.scale.dtype == np.float32 and found.size == kernel.size
  scale = np.asarray(found.scale)
  assert scale.shape == np.max(kernel, axis=axes, keepdims=True).shape
  error = np.abs(np.asarray(found.value) * scale.astype(np.float64) - kernel)
  assert (error <= scale / 2 * (1 + 1e-5)).all()
  largest = np.abs(np.asarray(found.value)).max(axis=axes, keepdims=True)
  assert (largest == np.where(np.abs(kernel).max(axis=axes, keepdims=True) > 0, 127, 0)).all()
  np.testing.assert_allclose(scale[largest == 127] * 127, np.abs(kernel).max(axes, keepdims=True)[largest == 127], 1e-6)


@pytest.mark.slow_cases('dense')
def test_matrices_of_layers_are_in_8_bits_and_nothing_else_is(models):
  params = nnx.split(models[0])[1]
  held = {'/'.join(map(str, path[1:])): x.get_value() for path, x in nnx.to_flat_state(params) if path[0] == 'policy'}
  of_names = {
    name.split('/')[-2] if name.endswith('/kernel') else name.split('/')[-1]: isinstance(x, Int8)
    for name, x in held.items()
  }
  matrices = {*lora.TARGETS, 'in_proj_qkv', 'in_proj_z', 'out_proj'}
  others = {
    'embed_tokens', 'weight', 'bias', 'lora_a', 'lora_b', 'gate', 'shared_expert_gate', 'in_proj_a', 'in_proj_b',
    'conv1d', 'A_log', 'dt_bias',
  }  # fmt: skip
  assert {name for name, eight in of_names.items() if eight} <= matrices
  assert {name for name, eight in of_names.items() if not eight} <= others
  assert {'q_proj', 'o_proj', 'gate_proj', 'down_proj'} <= {name for name, eight in of_names.items() if eight}
  # One scale for each output, which is the last axis, and of q, k and v the last two.
  for name, x in held.items():
    if isinstance(x, Int8):
      outputs = 2 if re.search('/([qkv]_proj|in_proj_(qkv|z))/', name) else 1
      inputs = 2 if re.search('/(o|out)_proj/', name) else 1
      experts = x.value.ndim - outputs - inputs
      assert experts == ('/experts/' in name), name
      assert x.scale.shape == (*x.value.shape[:experts], *[1] * inputs, *x.value.shape[-outputs:]), name


@pytest.mark.parametrize('remat', ['none', pytest.param('layers', marks=pytest.mark.slow)])
@pytest.mark.slow_cases('experts-none')
@pytest.mark.exhaustive_cases(
  'hybrid-none', 'dense-layers', 'hybrid-layers', 'scanned-none', 'windows-none', 'windows-layers',
)  # fmt: skip
def test_what_is_computed_and_gradients_of_adapters_are_those_of_the_numbers_that_the_8_bits_stand_for(models, remat):
  found = []
  for model in models:
    graphdef, params = nnx.split(model)
    trained, frozen = lora.partition(params)
    assert not any(x.dtype == jnp.int8 for x in jax.tree.leaves(trained))

    @jax.jit
    def run(trained, frozen, graphdef=graphdef):
      def loss(trained):
        out = logits(lora.merge(graphdef, trained, frozen), remat)
        return jnp.sum(jnp.sin(out)), out

      return jax.grad(loss, has_aux=True)(trained)

    found.append(run(trained, frozen))
  (gradient, ours), (expected, theirs) = found
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())
  for (path, x), (_, y) in zip(nnx.to_flat_state(gradient), nnx.to_flat_state(expected), strict=True):
    x, y = np.asarray(x[...]), np.asarray(y[...])
    np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * max(np.abs(y).max(), 1e-3), err_msg=str(path))


@pytest.mark.slow_cases('experts')
def test_one_product_is_exactly_that_with_the_numbers_that_the_8_bits_stand_for(models):
  ours, theirs = (model.policy.layers[0].mlp for model in models)
  ours, theirs = (getattr(mlp, 'shared_expert', mlp) for mlp in (ours, theirs))
  x = jax.random.normal(jax.random.key(5), (2, 3, 32))
  for dtype in (jnp.float32, jnp.bfloat16):
    if hasattr(ours, 'down_proj'):
      np.testing.assert_array_equal(ours.gate_proj(x.astype(dtype)), theirs.gate_proj(x.astype(dtype)))
    else:
      np.testing.assert_array_equal(ours(x.astype(dtype)), theirs(x.astype(dtype)))


def test_the_backward_pass_keeps_kernels_in_8_bits_only(models):
  """Also without remat: a copy as computed with would take four times their memory."""
  graphdef, params = nnx.split(models[0])
  trained, frozen = lora.partition(params)
  kept = jax.tree.leaves(
    jax.eval_shape(lambda t, f: jax.vjp(lambda t: logits(lora.merge(graphdef, t, f)), t)[1], trained, frozen)
  )
  matrices = {(32, 16), (32, 32), (32, 64), (64, 32), (8, 32, 24), (8, 24, 32)}
  matrices |= {(8, *shape) for shape in matrices}  # of a loop over layers
  assert [x for x in kept if x.dtype == jnp.int8 and x.shape in matrices]
  assert not [x for x in kept if x.dtype != jnp.int8 and x.shape in matrices]


# -- loading and sampling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ALL[:3])
def test_kernels_become_8_bits_while_they_are_loaded(tmp_path, name):
  policy = filled(*nnx.split(nnx.eval_shape(lambda: random_model(VOCAB, **SHAPES[name])))).policy
  save_model(str(tmp_path / 'm'), policy, policy.cfg, 'bfloat16')
  plain, found = (
    dict(nnx.to_flat_state(load_params(str(tmp_path / 'm'), policy.cfg, jnp.bfloat16, in_int8=in_int8)))
    for in_int8 in (False, True)
  )
  assert found.keys() == plain.keys()
  assert any(isinstance(x.get_value(), Int8) for x in found.values())
  for path, x in found.items():
    axes = int8.input_axes('/'.join(map(str, path)))
    expected = np.asarray(plain[path].get_value())
    expected = expected if axes is None else int8.quantised(expected, axes)
    assert isinstance(x.get_value(), Int8) == (axes is not None)
    for a, b in zip(jax.tree.leaves(x.get_value()), jax.tree.leaves(expected), strict=True):
      assert a.dtype == b.dtype
      np.testing.assert_array_equal(a, b, err_msg=str(path))


_ON_A_MESH = """
import sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from ragen_jax.agent.language_model import weight_shardings
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.models.checkpoint.config import read_config
from ragen_jax.models.checkpoint.load import load_params

where = sys.argv[1]
cfg = read_config(where)
one = nnx.to_flat_state(load_params(where, cfg, jnp.float32, in_int8=True))
for mesh in ((4, 2, 1), (4, 1, 2), (2, 2, 2)):
  layout = weight_shardings(cfg, make_mesh(*mesh), frozen=True)
  many = nnx.to_flat_state(load_params(where, cfg, jnp.float32, in_int8=True, sharding_fn=layout.__getitem__))
  divided = set()
  for (path, x), (_, y) in zip(one, many, strict=True):
    for a, b in zip(jax.tree.leaves(x.get_value()), jax.tree.leaves(y.get_value()), strict=True):
      np.testing.assert_array_equal(a, b, err_msg=str(path))
      divided |= {(a.dtype.name, a.ndim)} if not b.is_fully_replicated and 'experts' in path else set()
  assert divided == {('int8', 3), ('float32', 3)}, divided  # scales, too
"""


@pytest.mark.parametrize('name', ['experts', pytest.param('hybrid', marks=pytest.mark.slow)])
def test_kernels_that_a_mesh_divides_are_loaded_as_on_one_device(tmp_path, name):
  policy = filled(*nnx.split(nnx.eval_shape(lambda: random_model(VOCAB, **SHAPES[name])))).policy
  save_model(str(tmp_path / 'm'), policy, policy.cfg, 'float32')
  copy_python(_ON_A_MESH, str(tmp_path / 'm'), devices=8, check=True)


@pytest.mark.parametrize('name', ALL[:3])
def test_the_samplers_copy_is_made_from_the_trained_weights(name):
  model = filled(*nnx.split(nnx.eval_shape(lambda: random_model(VOCAB, **SHAPES[name]))))
  params = nnx.split(model)[1]
  assert Sampler(model, stop_ids=(1,)).decode_weights(params) is params
  model.policy.int8 = True
  sampler = Sampler(model, stop_ids=(1,))
  made = sampler.decode_weights(params)
  assert not changed_weights(made, sampler.abstract_weights(made)) and sampler.decode_weights(made) is made
  wanted = sampler.abstract_weights(params)
  assert jax.tree.structure(made) == jax.tree.structure(wanted)
  for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
  for (path, x), y in zip(nnx.to_flat_state(made), jax.tree.leaves(params), strict=True):
    x, axes = x.get_value(), int8.input_axes('/'.join(map(str, path)))
    if axes is None:
      assert x is y
      continue
    expected = int8.quantised(np.asarray(y), axes)
    np.testing.assert_allclose(x.scale, expected.scale, rtol=1e-6, atol=0)
    # A compiler may round a quotient near a half to the other side.
    differ = np.abs(np.asarray(x.value, np.int32) - expected.value)
    assert differ.max() <= 1 and differ.mean() < 1e-3
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('float32')}


@pytest.mark.slow
def test_scales_are_laid_out_as_the_outputs_of_their_kernels():
  mesh = jax.sharding.AbstractMesh((1, 1, 1), make_mesh(1, 1, 1).axis_names)
  like = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  found = {
    name: tuple(int8.scale_sharding(f'layers/0/{name}/kernel', shape, like).spec)
    for name, shape in {
      'self_attn/q_proj': (1, 4, 8), 'self_attn/o_proj': (1, 1, 32), 'mlp/up_proj': (1, 64), 'mlp/down_proj': (1, 32),
      'mlp/experts/up_proj': (8, 1, 24), 'mlp/experts/down_proj': (8, 1, 32), 'linear_attn/in_proj_z': (1, 4, 8),
    }.items()
  }  # fmt: skip
  assert found == {
    'self_attn/q_proj': (None, 'tensor', None), 'self_attn/o_proj': (None, None, 'fsdp'),
    'mlp/up_proj': (None, 'tensor'), 'mlp/down_proj': (None, 'fsdp'),
    'mlp/experts/up_proj': ('tensor', None, None), 'mlp/experts/down_proj': ('tensor', None, 'fsdp'),
    'linear_attn/in_proj_z': (None, 'tensor', None),
  }  # fmt: skip
