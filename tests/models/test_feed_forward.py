"""Mixtures of experts against a loop over all experts, and the grouped products that they consist of."""

from __future__ import annotations

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax.models import feed_forward
from ragen_jax.models import grouped_product as products
from ragen_jax.models.feed_forward import ExpertsConfig, MixtureOfExperts
from ragen_jax.models.qwen_config import QwenConfig
from tests.support.processes import copy_python

# Groups: empty ones, some of a part of a tile, and one of several tiles; rows behind all groups.
_SIZES = (0, 9, 3, 0, 22, 1)


def _by_loop(x, kernels, upstream, sizes):
  """Products of the rows of each group with its kernel, and the gradients of rows and kernels, in NumPy."""
  y, of_x, of_kernels, start = np.zeros_like(upstream), np.zeros_like(x), np.zeros_like(kernels), 0
  for i, n in enumerate(sizes):
    rows = slice(start, start + n)
    y[rows], of_x[rows] = x[rows] @ kernels[i], upstream[rows] @ kernels[i].T
    of_kernels[i] = x[rows].T @ upstream[rows]
    start += n
  return y, of_x, of_kernels


@pytest.mark.parametrize('way', ['cpu', 'tpu', 'default'])
def test_grouped_products_and_their_gradients_are_those_of_a_loop(way, monkeypatch):
  monkeypatch.setattr(products, '_TILE', (4, 4))
  # What other devices do.
  monkeypatch.setattr(jax.lax, 'platform_dependent', lambda *args, **ways: ways[way](*args))
  rng = np.random.default_rng(0)
  x, kernels, noise = (rng.normal(size=s).astype(np.float32) for s in ((40, 5), (6, 5, 3), (40, 3)))

  @jax.jit
  def run(x, kernels, upstream, sizes):
    found, pull = jax.vjp(lambda x, w: products.grouped_product(x, w, sizes), x, kernels)
    return found, *pull(upstream)

  for sizes in (_SIZES, (40, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0)):
    upstream = np.where(np.arange(40)[:, None] < sum(sizes), noise, 0)
    found, *gradients = run(x, kernels, upstream, np.asarray(sizes))
    expected, *expected_gradients = _by_loop(x, kernels, upstream, sizes)
    np.testing.assert_allclose(found[: sum(sizes)], expected[: sum(sizes)], atol=1e-5)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
      np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.slow
def test_what_a_kernel_leaves_behind_its_groups_reaches_no_gradient(monkeypatch):
  """On a mesh, a device has some experts, and rows of others stand behind its own."""
  mixture, x = _mixture(shared_width=0), jnp.asarray(np.random.default_rng(2).normal(size=(1, 30, 8)), jnp.float32)
  _, chosen, weights = mixture._route(x)
  kernels = [p.kernel[...][:2] for p in (mixture.experts.gate_proj, mixture.experts.up_proj, mixture.experts.down_proj)]

  def gradients():
    def total(x, weights, *kernels):
      return jnp.sum(jnp.sin(feed_forward._of_experts(x, chosen, weights, *kernels, first=0)))

    return jax.grad(total, argnums=range(5))(x, weights, *kernels)

  real = products.in_tiles

  def left_over(rows, kernels, sizes, **options):
    behind = np.arange(len(rows))[:, None] >= jnp.sum(sizes)
    return jnp.where(behind, jnp.nan, real(rows, kernels, sizes, **options))

  expected = gradients()
  monkeypatch.setattr(products, 'in_tiles', left_over)
  chex.assert_trees_all_close(gradients(), expected, rtol=1e-5)


def _mixture(**changes) -> MixtureOfExperts:
  """Weights as large as their results, so that each part matters."""
  cfg = ExpertsConfig(**dict(count=6, chosen=3, width=10, normalised=True, shared_width=7) | changes)
  graphdef, state = nnx.split(
    nnx.eval_shape(lambda: MixtureOfExperts(8, cfg, param_dtype=jnp.float32, rngs=nnx.Rngs(0)))
  )
  rng = np.random.default_rng(0)
  return nnx.merge(graphdef, jax.tree.map(lambda w: jnp.asarray(rng.normal(size=w.shape) * 0.5, jnp.float32), state))


def _dense(mixture: MixtureOfExperts, x: jax.Array, given: np.ndarray | None = None) -> jax.Array:
  """Every expert for every column, times 0 where it is not chosen, or not among those that are given."""
  cfg, experts = mixture.cfg, mixture.experts
  shares = jax.nn.softmax(x @ mixture.gate.kernel[...])
  used = shares >= jnp.sort(shares, axis=-1)[..., -cfg.chosen, None]
  if given is not None:
    used = (given[..., None] == np.arange(cfg.count)).any(axis=-2)
  weights = jnp.where(used, shares, 0)
  if cfg.normalised:
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  y = 0
  for e in range(cfg.count):
    gate, up, down = (p.kernel[...][e] for p in (experts.gate_proj, experts.up_proj, experts.down_proj))
    y = y + weights[..., e, None] * ((jax.nn.silu(x @ gate) * (x @ up)) @ down)
  if cfg.shared_width:
    y = y + jax.nn.sigmoid(mixture.shared_expert_gate(x)) * mixture.shared_expert(x)
  return y


@pytest.mark.parametrize(
  'changes',
  [
    {'normalised': False, 'shared_width': 0},
    *(pytest.param(x, marks=pytest.mark.slow) for x in ({}, {'chosen': 1}, {'chosen': 6, 'normalised': False})),
  ],
)
def test_a_mixture_and_its_gradients_are_those_of_a_loop_over_all_experts(changes):
  mixture = _mixture(**changes)
  x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 9, 8)), jnp.float32)
  (found, gradient), (expected, expected_gradient) = (_gradients(mixture, x, of) for of in (lambda m, x: m(x), _dense))
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True)
  for i, (ours, theirs) in enumerate(pairs):
    # With one expert, whose weight is 1 in any case, the router has no gradient.
    assert np.linalg.norm(theirs) > 0 or changes.get('chosen') == 1
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=str(i))


def _gradients(mixture, x, of):
  graphdef, state = nnx.split(mixture)
  upstream = jnp.cos(jnp.arange(x.size)).reshape(x.shape)
  return jax.jit(jax.value_and_grad(lambda s, x: jnp.sum(of(nnx.merge(graphdef, s), x) * upstream), (0, 1)))(state, x)


@pytest.mark.parametrize(
  'changes', [{}, pytest.param({'normalised': False, 'shared_width': 0}, marks=pytest.mark.slow)]
)
@pytest.mark.slow_cases('changes0')
def test_given_experts_take_the_place_of_the_router_s(changes):
  mixture, rng = _mixture(**changes), np.random.default_rng(1)
  x = jnp.asarray(rng.normal(size=(2, 9, 8)), jnp.float32)
  given = np.argsort(rng.random((2, 9, 6)))[..., :3].astype(np.uint8)
  y, own = mixture.with_choices(x, None, given)
  assert own.dtype == np.uint8 and (np.sort(own) != np.sort(given)).any(axis=-1).sum() > 9
  of = [lambda m, x: m.with_choices(x, None, given)[0], lambda m, x: _dense(m, x, given)]
  (found, gradient), (expected, expected_gradient) = (_gradients(mixture, x, f) for f in of)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  chex.assert_trees_all_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)
  # The router learns how much it should trust what it did not choose.
  direction, kernel = jnp.asarray(rng.normal(size=(8, 6)), jnp.float32), mixture.gate.kernel[...]
  slope = float(jnp.sum(gradient[0]['gate']['kernel'].get_value() * direction))
  ends = []
  for step in (0.01, -0.01):
    mixture.gate.kernel.set_value(kernel + step * direction)
    ends.append(float(_gradients(mixture, x, of[0])[0]))
  mixture.gate.kernel.set_value(kernel)
  assert abs(slope) > 0.1 and (ends[0] - ends[1]) / 0.02 == pytest.approx(slope, rel=0.02)
  # And its own choice, given back, changes no bit.
  np.testing.assert_array_equal(mixture.with_choices(x, None, own)[0], mixture(x))
  np.testing.assert_array_equal(mixture.with_choices(x, None, own)[1], mixture.with_choices(x)[1])
  assert (np.asarray(y) != np.asarray(mixture(x))).any()


def test_numbers_of_many_experts_have_room():
  kinds = [ExpertsConfig(count, 1, 4, True).number_type for count in (1, 256, 257)]
  assert kinds == [np.uint8, np.uint8, np.uint16]


@pytest.mark.slow
def test_no_column_is_left_out_however_many_choose_one_expert():
  """All columns are equal, so they choose the same experts; and a column does not depend on the others."""
  mixture = _mixture()
  x = jnp.asarray(np.random.default_rng(2).normal(size=8), jnp.float32)
  many = mixture(jnp.broadcast_to(x, (3, 200, 8)))
  np.testing.assert_allclose(many, jnp.broadcast_to(mixture(x[None, None]), many.shape), rtol=1e-5, atol=1e-6)
  others = jnp.asarray(np.random.default_rng(3).normal(size=(3, 200, 8)), jnp.float32).at[1, 7].set(x)
  np.testing.assert_allclose(mixture(others)[1, 7], many[0, 0], rtol=1e-5, atol=1e-6)


_ON_A_MESH = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import SamplingLayout, place_rows, row_sharding, sampling_mesh, sampling_spec
from ragen_jax.distributed.sharding import path_of, tree_shardings
from jax.sharding import NamedSharding
from tests.models.test_feed_forward import _mixture

x = np.random.default_rng(1).normal(size=(8, 5, 8)).astype(np.float32)
upstream = np.cos(np.arange(x.size)).reshape(x.shape)
mixture = _mixture(count=8, shared_width=8)
given = np.argsort(np.random.default_rng(2).random((8, 5, 8)))[..., :3].astype(np.uint8)

def run(mixture, x, rows=None, state=None):
  graphdef, own = nnx.split(mixture)
  def loss(s, x):
    model = nnx.merge(graphdef, s)
    y, (z, chosen) = model(x, rows), model.with_choices(x, rows, given)
    return jnp.sum(y * upstream) + jnp.sum(z), (y, z, chosen.astype(jnp.float32))
  (_, y), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(own if state is None else state, x)
  return [np.asarray(a) for a in jax.tree.leaves((y, gradients))]

expected, worst = run(mixture, x), {}
tree = {'policy': {'layers': {'0': {'mlp': nnx.state(mixture)}}}}

def compare(name, found):
  assert len(found) == len(expected)
  worst[name] = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected))

for shape in ((2, 2, 2), (1, 1, 8), (4, 2, 1)):
  mesh = make_mesh(*shape)
  placed = jax.device_put(tree, tree_shardings(tree, mesh))['policy']['layers']['0']['mlp']
  kernel = placed['experts']['gate_proj']['kernel'].get_value()
  assert kernel.sharding.shard_shape(kernel.shape) == (8 // shape[2], 8 // shape[1], 10)
  compare(str(shape), run(mixture, place_rows(x, mesh), row_sharding(mesh), placed))
# While tokens are sampled, neighbours divide the experts too.
mesh = sampling_mesh(make_mesh(4, 1, 2), 2)
mixture.sampling = SamplingLayout(mesh, True, 1)
shardings = jax.tree_util.tree_map_with_path(
  lambda path, w: NamedSharding(mesh, sampling_spec(path_of(path), w.shape, mesh)), tree)
placed = jax.device_put(tree, shardings)['policy']['layers']['0']['mlp']
kernel = placed['experts']['gate_proj']['kernel'].get_value()
assert kernel.sharding.shard_shape(kernel.shape) == (2, 8, 10)
compare('sampling', run(mixture, place_rows(x, mesh), row_sharding(mesh), placed))
print(json.dumps(worst))
"""


@pytest.mark.exhaustive
def test_eight_devices_give_what_one_does():
  done = copy_python(_ON_A_MESH, devices=8)
  assert done.returncode == 0, done.stderr[-3000:]
  found = json.loads(done.stdout.splitlines()[-1])
  assert len(found) == 4 and max(found.values()) < 1e-5, found


_SCANNED = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import place_rows, row_sharding
from ragen_jax.models import lora
from ragen_jax.models.value_head import ActorCritic
from tests.support.models import EXPERTS, random_model

tokens = np.random.default_rng(0).integers(0, 40, (8, 12)).astype(np.int32)

def gradient(mesh, scan, remat):
  model = random_model(40, **EXPERTS | {'mlp_layers': ()})
  model.policy.scan_layers = scan
  rows = tokens
  if mesh is not None:
    model.policy.activation_sharding, rows = row_sharding(mesh), place_rows(tokens, mesh)
  graphdef, params = nnx.split(model)
  if mesh is not None:
    params = jax.device_put(params, lora.shardings(params, mesh))

  @jax.jit
  @jax.grad
  def run(params):
    policy = nnx.merge(graphdef, params).gathered().policy
    return jnp.mean(jnp.sin(policy.logits(policy(policy.embed(rows), remat=remat)[0])))

  return jax.tree.leaves(run(params))

expected = gradient(None, False, 'none')
for found in (gradient(make_mesh(2, 2, 2), True, 'elementwise'), gradient(make_mesh(4, 2, 1), True, 'layers')):
  for x, y in zip(found, expected):
    error = np.linalg.norm(np.asarray(x) - np.asarray(y))
    assert error <= 1e-5 * np.linalg.norm(y) + 1e-9, (x.shape, error)
"""


@pytest.mark.slow
def test_layers_with_experts_are_scanned_and_computed_again_on_several_devices():
  done = copy_python(_SCANNED, devices=8)
  assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_numbers_of_matrices():
  shape = dict(hidden_size=4, intermediate_size=8, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=2)
  experts = ExpertsConfig(count=6, chosen=2, width=5, normalised=True, shared_width=3)
  assert QwenConfig(**shape).mlp_matrices() == QwenConfig(**shape).mlp_matrices(active=True) == 3 * 3 * 4 * 8
  cfg = QwenConfig(**shape, experts=experts, mlp_layers=(1,))
  mlp, shared = 3 * 4 * 8, 3 * 4 * 3 + 4
  assert cfg.mlp_matrices() == mlp + 2 * (4 * 6 + 6 * 3 * 4 * 5 + shared)
  assert cfg.mlp_matrices(active=True) == mlp + 2 * (4 * 6 + 2 * 3 * 4 * 5 + shared)
  assert cfg.mlp_parts() == (8, 6, 3)
  assert [s[1] for s in cfg.structures] == [True, False, True] and cfg.period == 3 and cfg.runs == (1, 1, 1)
  with pytest.raises(ValueError, match=r'mlp_layers=\(0,\): goes with experts'):
    QwenConfig(**shape, mlp_layers=(0,))
