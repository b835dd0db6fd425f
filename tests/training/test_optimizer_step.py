"""The optimiser step of a deep model, part by part, against a step in one program and against optax."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ragen_jax.distributed.sharding import optimizer_shardings, trained_shardings
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.training import bad_steps, optimizer_step
from ragen_jax.training.optimizer_step import SKIPPED, OptimizerStep
from tests.support import learning
from tests.support.compilations import compiled
from tests.support.processes import copy_python

_FOUND = {'loss': jnp.float32(1)}
_SCALE = np.float32(0.7)


def _weights(layers=2, *, separate=False):
  cfg = QwenConfig(
    vocab_size=30, hidden_size=32, intermediate_size=64, num_layers=layers, num_heads=4, num_kv_heads=2, head_dim=8,
    rope_theta=10_000.0,
  )  # fmt: skip
  shapes = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.split(ActorCritic(Qwen(cfg, rngs=nnx.Rngs(0))))[1]))
  policy = _noise(shapes, seed=0, scale=0.1)
  return {**policy, 'critic': _copied(policy['policy'])} if separate else policy


def _noise(tree, seed, scale=1.0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: jnp.asarray(scale * rng.normal(size=x.shape), jnp.float32), tree)


def _copied(tree):
  """Copies on the host, which compile nothing."""
  return jax.tree.map(lambda x: jnp.array(np.asarray(x)), tree)


def _norm(tree):
  return np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree)))


def _gradients(trained, seed=0):
  return _noise(trained, seed)


def _steps(step, optimizer, trained, number, scale=_SCALE, found=_FOUND):
  trained = _copied(trained)
  state = optimizer.init(trained)
  for i in range(number):
    trained, state, metrics = step(trained, state, _gradients(trained, i), found, scale)
  return jax.device_get((trained, state, metrics))


@pytest.fixture(autouse=True)
def _few_layers_are_many(monkeypatch):
  monkeypatch.setattr(optimizer_step, '_FROM_LAYERS', 2)


@functools.cache
def _shared():
  """An optimiser and its step, of which the programs are compiled once."""
  optimizer = learning.optimizer()
  return optimizer, OptimizerStep(optimizer, None)


def _in_one_program(monkeypatch):
  monkeypatch.setattr(optimizer_step, '_FROM_LAYERS', 100)


@pytest.mark.parametrize(('layers', 'number'), [(7, 1), (8, 8)])
def test_models_of_eight_layers_are_updated_in_parts(monkeypatch, layers, number):
  monkeypatch.undo()
  optimizer, trained = learning.optimizer(), jax.eval_shape(lambda: _weights(layers))
  state = jax.eval_shape(optimizer.init, trained)
  assert len(OptimizerStep(optimizer, None).programs(trained, state, trained, _FOUND, _SCALE)) == number


@pytest.mark.slow
def test_layers_of_other_shapes_are_parts_too():
  """Weights in some layers only, none outside of layers, and blocks of a vision tower."""
  trained = {
    'policy': {
      'layers': {i: {'a': jnp.ones((2, 3))} | ({'b': jnp.ones(4)} if i % 2 else {}) for i in range(6)},
      'visual': {'blocks': {i: {'w': jnp.ones((5, 2))} for i in range(4)}},
    }
  }
  optimizer = learning.optimizer(grad_clip=0.1)
  step = OptimizerStep(optimizer, None)
  found = _steps(step, optimizer, trained, 2)
  names = {p.name: p.times for p in step.programs(trained, optimizer.init(trained), trained, _FOUND, np.float32(1))}
  assert [names[f'apply_update{n}'] for n in ('', '_2', '_3', '_4')] == [3, 3, 4, 1]
  expected, state = jax.tree.map(jnp.copy, trained), optimizer.init(trained)
  for i in range(2):
    gradients = _gradients(expected, i)
    norms = dict.fromkeys(('all', 'policy', 'critic'), optax.tree.norm(gradients))
    updates, state = optimizer.update(gradients, state, expected, norms=norms)
    expected = optax.apply_updates(expected, jax.tree.map(lambda u: 0.7 * u, updates))
  for a, b in zip(jax.tree.leaves(found[:2]), jax.tree.leaves((expected, state)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('layers', [1, 2])
@pytest.mark.slow_cases('2')
def test_a_step_is_that_of_optax(layers):
  trained = _weights(layers)
  optimizer = learning.optimizer(grad_clip=0.5, weight_decay=0.1, b2=0.99)
  found, _, metrics = _steps(OptimizerStep(optimizer, None), optimizer, trained, 3, scale=None)
  decayed = jax.tree_util.tree_map_with_path(
    lambda path, x: x.ndim > 1 and 'bias' not in jax.tree_util.keystr(path), trained
  )
  expected = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, b2=0.99, weight_decay=0.1, mask=decayed))
  state = expected.init(trained)

  @jax.jit  # one program in place of one for each operation
  def follow(trained, state, gradients):
    updates, state = expected.update(gradients, state, trained)
    return optax.apply_updates(trained, updates), state

  for i in range(3):
    gradients = _gradients(trained, i)
    trained, state = follow(trained, state, gradients)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(jax.device_get(trained)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(metrics['actor/grad_norm'], _norm(gradients), rtol=1e-5)
  np.testing.assert_allclose(metrics['critic/grad_norm'], _norm(gradients['value_head']), rtol=1e-5)


def _poisoned(tree, name, x):
  names = [bad_steps.name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
  assert names.count(name) == 1
  leaves, structure = jax.tree.flatten(tree)
  at = names.index(name)
  leaves[at] = leaves[at].at[(0,) * leaves[at].ndim].set(x)
  return jax.tree.unflatten(structure, leaves)


@pytest.mark.parametrize(
  ('where', 'name', 'text'),
  [('gradients', 'policy/layers/1/mlp/up_proj/kernel', 'gradient of policy/layers/1/mlp/up_proj/kernel'),
   ('state', 'mu/policy/layers/0/mlp/up_proj/kernel', 'optimiser state mu/policy/layers/0/mlp/up_proj/kernel'),
   ('state', 'nu/value_head/bias', 'optimiser state nu/value_head/bias'),
   ('weights', 'policy/layers/1/mlp/down_proj/kernel', 'new weights policy/layers/1/mlp/down_proj/kernel'),
   ('weights', 'policy/embed_tokens', 'new weights policy/embed_tokens'),
   ('found', 'loss', 'loss')],
)  # fmt: skip
@pytest.mark.parametrize('x', [np.nan, np.inf])
def test_numbers_that_are_not_finite_keep_all_parts_as_they_are_and_are_named(where, name, text, x):
  (optimizer, step), trained = _shared(), _weights()
  state = optimizer.init(trained)
  trained, state, _ = step(trained, state, _gradients(trained), _FOUND, np.float32(1))
  given = {'weights': trained, 'state': state, 'gradients': _gradients(trained, 1), 'found': _FOUND}
  given[where] = {'loss': jnp.float32(x)} if where == 'found' else _poisoned(given[where], name, x)
  before = jax.device_get((given['weights'], given['state']))
  *after, metrics = step(*(given[key] for key in ('weights', 'state', 'gradients', 'found')), np.float32(1))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(tuple(after)), before)
  assert metrics[SKIPPED] == 1
  stats, bad = bad_steps.split(jax.device_get(metrics | given['found']))
  named = bad_steps.describe(stats, bad, *before)
  assert named.endswith(text) if where in ('gradients', 'found') else named == text, named


def test_weights_that_overflow_in_one_layer_stop_the_step_of_all():
  optimizer = learning.optimizer(actor_lr=1e30)
  trained, step = _weights(), OptimizerStep(optimizer, None)
  before = jax.device_get(trained)
  gradients = _noise(trained, seed=0, scale=0.0)
  gradients['policy']['layers'][1]['mlp']['up_proj']['kernel'] += 1
  trained, state, metrics = step(trained, optimizer.init(trained), gradients, _FOUND, np.float32(1))
  assert metrics[SKIPPED] == 1 and np.flatnonzero(metrics[bad_steps.WEIGHTS]).size == 1
  assert not np.any(metrics[bad_steps.GRADIENT])
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(trained), before)
  assert all(np.all(np.asarray(x) == 0) for x in jax.tree.leaves(state))


@pytest.mark.parametrize('least', [4, 100])
def test_a_metric_that_is_not_finite_stops_the_step(monkeypatch, least):
  monkeypatch.setattr(optimizer_step, '_FROM_LAYERS', least)
  optimizer, trained = learning.optimizer(), {'policy': {'layers': {i: {'a': jnp.ones(3)} for i in range(4)}}}
  before, skipped = jax.device_get(trained), []
  step, state = OptimizerStep(optimizer, None), optimizer.init(trained)
  for x in (np.nan, -np.inf, 1.0):
    found = {'loss': jnp.float32(1), 'entropy': jnp.float32(x)}
    trained, state, metrics = step(trained, state, jax.tree.map(jnp.ones_like, trained), found, _SCALE)
    skipped.append(int(metrics[SKIPPED]))
    same = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(trained), jax.tree.leaves(before), strict=True))
    assert same == bool(metrics[SKIPPED])
  assert skipped == [1, 1, 0]


@pytest.mark.parametrize('least', [4, 100])
def test_types_stay_as_they_are(monkeypatch, least):
  """A vision tower may be trained in bfloat16."""
  monkeypatch.setattr(optimizer_step, '_FROM_LAYERS', least)
  layers = {i: {'a': jnp.ones((2, 3), jnp.bfloat16), 'b': jnp.ones((2, 3))} for i in range(4)}
  optimizer, trained = learning.optimizer(grad_clip=0.1), {'policy': {'visual': {'blocks': layers}}}
  state = optimizer.init(trained)
  types = [x.dtype for x in jax.tree.leaves((trained, state))]
  new, state, _ = OptimizerStep(optimizer, None)(trained, state, jax.tree.map(jnp.ones_like, trained), _FOUND, _SCALE)
  assert [x.dtype for x in jax.tree.leaves((new, state))] == types


def test_weights_and_state_are_donated():
  (optimizer, step), trained = _shared(), _weights()
  given = trained, optimizer.init(trained)
  step(*given, _gradients(trained), _FOUND, np.float32(1))
  assert all(x.is_deleted() for x in jax.tree.leaves(given) if x.size > 1)


@pytest.mark.usefixtures('new_programs')
@pytest.mark.usefixtures('new_programs')
@pytest.mark.parametrize('layers', [1, 2])
@pytest.mark.parametrize('critic_only', [False, True])
@pytest.mark.slow_cases('False-2', 'True-2')
def test_a_step_runs_what_was_compiled_before(layers, critic_only):
  optimizer = learning.optimizer()
  trained = _weights(layers)
  state, step = optimizer.init(trained), OptimizerStep(optimizer, None, critic_only=critic_only)
  given = trained, state, _gradients(trained), _FOUND, np.float32(1)
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
  with compiled() as ahead:
    for program in step.programs(*abstract):
      program.lower().compile()
  with compiled() as later:
    step(*given)
  assert [name for name in ahead if '_apply' in name] and not [name for name in later if '_apply' in name]


@pytest.mark.parametrize(
  ('clip', 'separate', 'critic_only'),
  [
    (0.5, False, True),
    *(pytest.param(*x, marks=pytest.mark.slow) for x in [(0.5, True, False), (0.5, False, False), (0.5, True, True)]),
    *(pytest.param(1e9, *x, marks=pytest.mark.slow) for x in itertools.product([False, True], repeat=2)),
  ],
)  # fmt: skip
@pytest.mark.usefixtures('new_programs')
@pytest.mark.slow_cases('0.5-False-True')
@pytest.mark.exhaustive_cases(
  '1000000000.0-True-True', '1000000000.0-True-False', '0.5-True-False', '0.5-False-False', '1000000000.0-False-False',
)  # fmt: skip
def test_parts_take_the_step_of_one_program(monkeypatch, critic_only, separate, clip):
  optimizer = learning.optimizer(
    grad_clip=clip, separate_critic=separate, weight_decay=0.1, warmup_steps=2, critic_lr=3e-2
  )
  trained = _weights(separate=separate)
  step = OptimizerStep(optimizer, None, critic_only=critic_only)
  parts = _steps(step, optimizer, trained, 3)
  last = _gradients(trained, 2)
  norms = {name: optax.tree.norm(last[name]) for name in last}
  critic = jnp.hypot(norms['value_head'], norms.get('critic', 0))
  np.testing.assert_allclose(parts[2]['critic/grad_norm'], critic, rtol=1e-5)
  if not critic_only:
    actor = norms['policy'] if separate else optax.tree.norm(last)
    np.testing.assert_allclose(parts[2]['actor/grad_norm'], actor, rtol=1e-5)
  # Three of a layer and three of the rest, the norms and the verdict; of the critic's layers two more.
  in_parts = step.compiled
  assert in_parts == 8 + 2 * separate - critic_only
  _in_one_program(monkeypatch)
  step = OptimizerStep(optimizer, None, critic_only=critic_only)
  whole = _steps(step, optimizer, trained, 3)
  assert step.compiled == in_parts + 1
  assert jax.tree.structure(parts) == jax.tree.structure(whole)
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(parts), jax.tree.leaves(whole), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7, err_msg=jax.tree_util.keystr(path))
  moved = jax.tree.map(lambda x, y: bool(np.any(x != y)), parts[0], jax.device_get(trained))
  policy = jax.tree.leaves(moved['policy'])
  assert not any(policy) if critic_only else all(policy)
  assert all(jax.tree.leaves({name: x for name, x in moved.items() if name != 'policy'}))


_ON_A_MESH = """
from tests.training import test_optimizer_step

test_optimizer_step.on_a_mesh()
"""


def on_a_mesh():
  """On four devices: the numbers and layouts of one, and programs that were compiled ahead."""
  optimizer_step._FROM_LAYERS = 2
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(4, 1, 1), ('data', 'fsdp', 'tensor'))
  optimizer = learning.optimizer(grad_clip=0.5, weight_decay=0.1)
  trained = _weights()
  one = _steps(OptimizerStep(optimizer, None), optimizer, trained, 2)
  put = functools.partial(jax.tree.map, jax.device_put)
  weights = put(_copied(trained), trained_shardings(trained, mesh))
  state = optimizer.init(trained)
  state = put(state, optimizer_shardings(state, mesh))
  found = put(_FOUND, optimizer_shardings(_FOUND, mesh))
  step = OptimizerStep(optimizer, mesh)
  layouts = [x.sharding for x in jax.tree.leaves((weights, state))]
  for i in range(2):
    gradients = _gradients(trained, i)
    given = weights, state, put(gradients, optimizer_shardings(gradients, mesh)), found, np.float32(0.7)
    if i == 0:
      described = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, 'sharding', None)), given
      )
      for program in step.programs(*described):
        program.lower().compile()
    with compiled() as later:
      weights, state, metrics = step(*given)
    assert not [name for name in later if '_apply' in name], later
  assert all(
    x.sharding.is_equivalent_to(s, x.ndim) for x, s in zip(jax.tree.leaves((weights, state)), layouts, strict=True)
  )
  for a, b in zip(jax.tree.leaves((weights, state, metrics)), jax.tree.leaves(one), strict=True):
    np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=1e-7)
  print('as on one device')


@pytest.mark.slow
def test_parts_on_a_mesh():
  done = copy_python(_ON_A_MESH, devices=4)
  assert done.returncode == 0, done.stderr[-3000:]
  assert done.stdout.endswith('as on one device\n')
