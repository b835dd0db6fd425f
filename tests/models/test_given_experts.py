"""Models whose experts are given, against a loop over their layers, and what their routers choose."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax.models.qwen_config import FULL, LINEAR
from tests.support.models import EXPERTS, HYBRID_EXPERTS, random_model

# Two turns of a loop over layers and a layer behind it; two turns over memories, with several layers in a row.
_TURNS = EXPERTS | {'num_layers': 5, 'mlp_layers': (1, 3)}
_RUNS = HYBRID_EXPERTS | {'num_layers': 6, 'layer_kinds': (LINEAR, LINEAR, FULL) * 2}


@pytest.mark.slow
@pytest.mark.parametrize(('shape', 'remat'), [(_TURNS, 'none'), (_TURNS, 'elementwise'), (_RUNS, 'layers')])
@pytest.mark.exhaustive_cases('shape0-none', 'shape2-layers')
def test_given_experts_are_used_layer_by_layer(shape, remat):
  model, rng = random_model(40, **shape).policy, np.random.default_rng(0)
  tokens = rng.integers(0, 40, (2, 7)).astype(np.int32)
  given = np.argsort(rng.random((2, 7, *model.cfg.choices_shape[:1], 8)))[..., :3].astype(np.uint8)
  graphdef, params = nnx.split(model)

  def run(params, scan):
    policy = nnx.merge(graphdef, params)
    policy.scan_layers = scan
    hidden, window, own = policy.run(policy.embed(tokens), remat=remat, experts=given, with_choices=True)
    assert window is None
    return jnp.sum(jnp.sin(hidden)), (hidden, own)

  def by_layer(params):
    policy = nnx.merge(graphdef, params)
    x, chosen, positions = policy.embed(tokens), [], jnp.broadcast_to(jnp.arange(7), (2, 7))
    for i, layer in enumerate(policy.layers):
      x, _, own = layer(x, positions, None, None, None, 0, None, given[:, :, i])
      chosen.append(np.zeros((2, 7, 3), np.uint8) if own is None else own)
    return jnp.sum(jnp.sin(policy.norm(x))), (policy.norm(x), jnp.stack(chosen, axis=2))

  of = [lambda p: run(p, False), lambda p: run(p, True), by_layer]
  one, loop, expected = (jax.jit(jax.value_and_grad(f, has_aux=True))(params) for f in of)
  for (_, (hidden, own)), gradient in (one, loop):
    assert own.dtype == np.uint8
    np.testing.assert_allclose(hidden, expected[0][1][0], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(own, expected[0][1][1])
    # Gradients are sums of terms as large as the largest of their array, here above 40.
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected[1]), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * max(1.0, np.abs(b).max()))
  routed = [i for i, found in enumerate(model.cfg.with_experts) if found]
  assert (np.sort(one[0][1][1]) != np.sort(given))[:, :, routed].any()


@pytest.mark.slow
def test_what_a_model_chooses_changes_no_bit_if_it_is_given():
  model = random_model(40, **EXPERTS).policy
  x = model.embed(np.random.default_rng(0).integers(0, 40, (3, 9)).astype(np.int32))
  hidden, _, own = model.run(x, with_choices=True)
  same, _, again = model.run(x, experts=own, with_choices=True)
  np.testing.assert_array_equal(same, hidden)
  np.testing.assert_array_equal(again, own)
  assert own.shape == (3, 9, 2, 3) and not own[:, :, 1].any() and own[:, :, 0].any()
  np.testing.assert_array_equal(model(x)[0], hidden)
  assert model.run(x)[2] is None


@pytest.mark.slow
def test_experts_without_a_share_reach_no_other_column():
  """As in columns of padding, whose experts are 0 while a router is sure of others."""
  model = random_model(40, **EXPERTS).policy
  gate = model.layers[0].mlp.gate.kernel
  gate.set_value(60 * gate[...])
  tokens = np.random.default_rng(0).integers(0, 40, (2, 9)).astype(np.int32)
  hidden, _, own = model.run(model.embed(tokens), with_choices=True)
  given = own.at[:, 6:].set(0)

  @nnx.jit
  def both(model, experts):
    return nnx.value_and_grad(lambda m: jnp.sum(m.run(m.embed(tokens), experts=experts)[0][:, :6] ** 2))(model)

  (total, gradient), (expected, of_own) = both(model, given), both(model, own)
  assert np.isfinite(hidden).all() and total == pytest.approx(float(expected))
  chex.assert_trees_all_close(gradient, of_own, rtol=1e-3, atol=1e-4)
