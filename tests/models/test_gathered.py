"""Weights that lie divided over `data` between programs: a model that gathers them computes what one device does."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ragen_jax.distributed import sharding
from ragen_jax.distributed.mesh import AXES
from ragen_jax.distributed.sharding import gathered, row_sharding, trained_spec, weight_spec
from ragen_jax.models import lora
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import FULL, WINDOWED, QwenConfig
from ragen_jax.models.value_head import ActorCritic
from tests.support import adapters
from tests.support.processes import copy_python

_GRADIENTS = """
import json
import sys

import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import optimizer_shardings, place_rows, row_sharding
from ragen_jax.models import lora
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.sampling.sampler import Sampler

def differences(dtype, layers, vocabulary, same, meshes):
  cfg = QwenConfig(
    vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_layers=layers, num_heads=4, num_kv_heads=2,
    head_dim=16, rope_theta=1e4,
  )
  # 4 x 96 tokens: more than the small vocabulary has, fewer than the large one.
  tokens = np.random.default_rng(0).integers(0, vocabulary, (4, 96)).astype(np.int32)
  weights = np.random.default_rng(1).normal(size=(96, 64)).astype(np.float32)
  if same:
    tokens[:], weights[:] = 7, weights[0]

  def gradient(mesh):
    dtypes = dict(dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    model = ActorCritic(Qwen(cfg, **dtypes), Qwen(cfg, **dtypes))
    rows = tokens
    if mesh is not None:
      model.policy.activation_sharding = model.critic.activation_sharding = row_sharding(mesh)
      rows = place_rows(tokens, mesh)
    graphdef, params = nnx.split(model)
    if mesh is not None:
      params = jax.device_put(params, lora.shardings(params, mesh))

    @jax.jit
    @jax.grad
    def run(params):
      model, total = nnx.merge(graphdef, params).gathered(), 0
      for trunk in (model.policy, model.critic):
        hidden, _ = trunk(trunk.embed(rows), remat='layers')
        total += jnp.mean(jnp.sin(trunk.logits(hidden))) + jnp.sum(hidden.astype(jnp.float32) * weights) / 64
      return total + jnp.mean(model.value_head(hidden))

    compiled = run.lower(params).compile()
    found = compiled(params)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(found))
    if mesh is not None and mesh.shape['data'] == 4:
      loops, _, entry = compiled.as_text().partition('ENTRY ')
      worst['gathers'] = [part.count(' all-gather(') for part in (loops, entry)]
      sampler = Sampler(model, stop_ids=(1,), mesh=mesh)
      for (path, x), own in zip(nnx.to_flat_state(sampler.abstract_weights(params)), jax.tree.leaves(params)):
        if path[0] == 'critic':
          assert x.get_value().sharding == own.sharding, path
        else:
          assert x.get_value().sharding.is_fully_replicated, path
    return params, found

  worst = {'held': 0}
  _, want = gradient(None)
  for shape in meshes:
    params, found = gradient(make_mesh(*shape))
    parts = {}
    for (path, x), y in zip(nnx.to_flat_state(found), jax.tree.leaves(want), strict=True):
      error, size = parts.get('/'.join(path[:2]), (0, 0))
      x, y = np.asarray(x[...], np.float64), np.asarray(y, np.float64)
      parts['/'.join(path[:2])] = error + np.sum((x - y) ** 2), size + np.sum(y**2)
    for name, (error, size) in parts.items():
      worst[name] = max(worst.get(name, 0), float(np.sqrt(error / size)))
    held = sum(s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards if s.device.id == 0)
    worst['held'] = max(worst['held'], held / sum(x.nbytes for x in jax.tree.leaves(params)))
  return worst

print(json.dumps([differences(*case) for case in json.loads(sys.argv[1])]))
"""


# Layers by themselves or as a loop; fewer or more tokens than embeddings; the type of activations; only one token.
_CASES = {
  'layers': ('float32', 2, 2048, False),
  'loop': ('float32', 8, 96, False),
  'one token': ('bfloat16', 2, 2048, True),
}
_DATA, _OTHERS = [(4, 1, 1)], [(2, 2, 1), (2, 1, 2)]


def _differences(case, meshes):
  """The largest relative difference of the gradient of each weight from that of one device, on meshes of 4."""
  done = copy_python(_GRADIENTS, json.dumps([[*_CASES[case], meshes]]), devices=4)
  assert done.returncode == 0, done.stderr[-3000:]
  (found,) = json.loads(done.stdout.splitlines()[-1])
  return found


@pytest.mark.slow
@pytest.mark.parametrize('case', ['layers', 'loop'])
@pytest.mark.parametrize('meshes', [_DATA, _OTHERS])
@pytest.mark.exhaustive_cases('meshes1-loop', 'meshes0-layers')
def test_gradients_of_divided_weights_are_those_of_one_device(case, meshes):
  found = _differences(case, meshes)
  assert found.pop('held') < 0.4  # a quarter, and small arrays
  if meshes == _DATA:
    # The embedding of each trunk, and five matrices of each layer, or of all layers that a loop runs over.
    assert found.pop('gathers') == ([0, 2 + 2 * 5] if case == 'loop' else [0, 2 + 2 * 2 * 5])
  assert len(found) == 8 and max(found.values()) < 1e-5, found


@pytest.mark.slow
@pytest.mark.parametrize('meshes', [_DATA, _OTHERS])
@pytest.mark.exhaustive_cases('meshes1')
def test_the_gradient_of_an_embedding_adds_up_in_float32(meshes):
  # One token in 384 columns: in bfloat16, a sum of so many would lose the last ones.
  found = _differences('one token', meshes)
  assert max(found['policy/embed_tokens'], found['critic/embed_tokens']) < 1e-2, found


_APPLY = """
import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from configs import default
from ragen_jax import build
from ragen_jax.distributed.sharding import optimizer_spec, weight_spec

config = default.get_config('tiny-vl')
config.model.vision = 'trained'
trainer = build.make_trainer(config, build.load_policy(config))
state, learner, mesh = trainer.init(), trainer.learner, trainer.model.mesh
stats = {'x': jax.device_put(np.float32(0), NamedSharding(mesh, PartitionSpec()))}
gradients = learner.abstract(state.trained)
(program,) = learner.steps['gradient'].programs(state.trained, state.opt_state, gradients, stats, np.float32(1))
towers = [('/'.join(map(str, k)), x[...].shape) for k, x in nnx.to_flat_state(state.trained) if 'visual' in k]
divided = sum(optimizer_spec(*tower, mesh) != weight_spec(*tower, mesh) for tower in towers)
print(program.lower().compile().as_text().count(' all-gather('), divided)
"""


@pytest.mark.slow
def test_the_optimiser_step_gathers_each_matrix_of_a_trained_tower_once_and_nothing_else():
  done = copy_python(_APPLY, devices=4)
  assert done.returncode == 0, done.stderr[-3000:]
  gathers, divided = map(int, done.stdout.split()[-2:])
  assert gathers == divided > 5  # and none of the weights outside of the tower


def test_frozen_weights_under_adapters_are_not_gathered(monkeypatch):
  found = []
  monkeypatch.setattr(sharding, '_gathered', lambda x, whole, sent: found.append(x.shape) or x)

  def make():
    cfg = dataclasses.replace(adapters.SMALL, vocab_size=4096)
    policy = Qwen(cfg, rngs=nnx.Rngs(0))
    lora.attach(policy, lora.LoraConfig(256, 256, lora.TARGETS), nnx.Rngs(0))
    policy.activation_sharding = row_sharding(AbstractMesh((2, 1, 1), AXES))
    whole = ActorCritic(policy).gathered()
    return nnx.split(whole)[1]

  after = nnx.eval_shape(make)
  assert found and all(256 in shape for shape in found)
  assert {'embed_tokens', 'lora_a'} <= {path[-1] for path, _ in nnx.to_flat_state(after)}


def test_a_layer_behind_the_loop_over_the_others_is_gathered_like_weights_outside_of_it(monkeypatch):
  found = []
  monkeypatch.setattr(sharding, '_gathered', lambda x, whole, sent: found.append(x.shape) or x)
  cfg = QwenConfig(
    architecture='gemma3', vocab_size=128, hidden_size=64, intermediate_size=256, num_layers=9, num_heads=4,
    num_kv_heads=2, head_dim=16, layer_kinds=(WINDOWED, FULL) * 4 + (WINDOWED,), window=4,
  )  # fmt: skip

  def make():
    policy = Qwen(cfg, rngs=nnx.Rngs(0))
    assert policy.looped == 8
    policy.activation_sharding = row_sharding(AbstractMesh((2, 1, 1), AXES))
    return nnx.split(ActorCritic(policy).gathered())[1]

  after = nnx.eval_shape(make)
  assert len({path[2] for path, _ in nnx.to_flat_state(after) if path[1] == 'layers'}) == 9
  assert found.count((64, 256)) == 2 and found.count((256, 64)) == 1 and (128, 64) in found  # gate, up, down, embedding


MESH = AbstractMesh((2, 2, 2), AXES)


@pytest.mark.parametrize(
  ('path', 'shape', 'axes'),
  [
    ('policy/embed_tokens', (4096, 64), (('tensor', 'data'), 'fsdp')),
    ('critic/layers/3/mlp/down_proj/kernel', (128, 64), (('tensor', 'data'), 'fsdp')),
    ('policy/layers/3/self_attn/q_proj/adapter/lora_a', (2048, 4), (('fsdp', 'data'), None)),
    ('policy/layers/3/self_attn/q_proj/bias', (4, 16), ('tensor', None)),  # small
    ('policy/visual/blocks/3/mlp/gate_proj/kernel', (64, 128), ('fsdp', 'tensor')),  # read once an observation
    ('visual/merger/linear_fc1/kernel', (256, 256), ('fsdp', 'tensor')),
    ('policy/norm/weight', (8192,), ('data',)),
  ],
)
def test_trained_weights_lie_as_their_moments_and_towers_whole(path, shape, axes):
  assert trained_spec(path, shape, MESH) == PartitionSpec(*axes)


def test_frozen_weights_under_adapters_stay_whole():
  def make():
    cfg = dataclasses.replace(adapters.SMALL, vocab_size=4096)
    policy = Qwen(cfg, rngs=nnx.Rngs(0))
    lora.attach(policy, lora.LoraConfig(256, 256, lora.TARGETS), nnx.Rngs(0))
    return ActorCritic(policy, Qwen(cfg, rngs=nnx.Rngs(0)))

  params = nnx.split(nnx.eval_shape(make))[1]
  mesh, divided = AbstractMesh((2, 1, 1), AXES), set()
  for (path, layout), x in zip(nnx.to_flat_state(lora.shardings(params, mesh)), jax.tree.leaves(params), strict=True):
    trained, name = path[0] != 'policy' or 'adapter' in path, '/'.join(map(str, path))
    spec = (trained_spec if trained else weight_spec)(name, x.shape, mesh)
    assert layout.get_value().spec == spec, name
    divided |= {(path[0], path[-1])} if 'data' in str(spec) else set()
  assert {('policy', 'lora_a'), ('critic', 'embed_tokens')} <= divided and ('policy', 'embed_tokens') not in divided


def test_what_is_gathered_is_rounded_as_it_is_sent_and_its_gradient_is_not():
  mesh = jax.make_mesh((1, 1, 1), AXES, devices=jax.devices()[:1])
  abstract = {'kernel': (8192, 64), 'weight': (8192,), 'small': (4, 4)}
  calls = []

  def sent(x, sharding):
    calls.append((x.dtype, sharding.spec))
    return x

  # A mesh of one device divides nothing, so the layouts are those of two.
  with pytest.MonkeyPatch.context() as patch:
    two = AbstractMesh((2, 1, 1), AXES)
    patch.setattr('ragen_jax.distributed.sharding.NamedSharding', lambda _, spec: NamedSharding(mesh, spec))
    patch.setattr(jax.lax, 'with_sharding_constraint', sent)
    weights = {name: jnp.full(shape, 1.001) for name, shape in abstract.items()}
    found, pull = jax.vjp(lambda w: gathered(w, two, jnp.bfloat16), weights)
    (gradient,) = pull(weights)  # which bfloat16 would round
    stacked = jnp.full((3, 8192, 64), 1.001)
    np.testing.assert_array_equal(gathered({'kernel': stacked}, two, stacked=True)['kernel'], stacked)
  bfloat16, float32 = jnp.dtype('bfloat16'), jnp.dtype('float32')
  assert calls == [
    (bfloat16, PartitionSpec()), (float32, PartitionSpec()), (float32, PartitionSpec(None)),
  ]  # fmt: skip
  assert all(x.dtype == float32 for x in jax.tree.leaves((found, gradient)))
  np.testing.assert_array_equal(found['kernel'], weights['kernel'].astype(bfloat16).astype(float32))
  np.testing.assert_array_equal(found['weight'], weights['weight'])
  np.testing.assert_array_equal(gradient['kernel'], weights['kernel'])
