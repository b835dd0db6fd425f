"""The optimiser: what it decays, two learning rates, their schedules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ragen_jax.training.optimizer import clip_by_norm, is_critic_weight, weight_decay_mask
from tests.support import learning
from tests.support.models import HYBRID, random_model


def test_weight_decay_spares_norms_and_biases():
  mask = nnx.to_pure_dict(weight_decay_mask(nnx.split(random_model(30))[1]))
  attention = mask['policy']['layers'][0]['self_attn']
  assert attention['k_proj'] == {'kernel': True, 'bias': False}
  assert mask['policy']['embed_tokens'] and not mask['policy']['norm']['weight']
  assert mask['value_head'] == {'kernel': False, 'bias': False}
  linear = nnx.to_pure_dict(weight_decay_mask(nnx.split(random_model(30, **HYBRID))[1]))['policy']['layers'][0]
  decayed = {name for name, own in linear['linear_attn'].items() if own in (True, {'kernel': True})}
  assert decayed == {'in_proj_qkv', 'in_proj_z', 'in_proj_b', 'in_proj_a', 'out_proj'}


def test_the_critic_s_weights_and_moments_are_told_by_their_path():
  params = nnx.split(random_model(30))[1]
  state = learning.optimizer().init(params)
  own = [is_critic_weight(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  assert own.count(True) == 2  # kernel and bias of the head
  moments = [is_critic_weight(p) for p, x in jax.tree_util.tree_leaves_with_path(state) if x.ndim or 'bias' in str(p)]
  assert moments.count(True) >= 4


def _norms(gradients):
  critic = {name: x for name, x in gradients.items() if name in ('critic', 'value_head')}
  parts = {'all': gradients, 'policy': gradients['policy'], 'critic': critic}
  return {name: optax.tree.norm(tree) for name, tree in parts.items()}


def _moved(steps, **fields):
  """How far the first weight of each part moves in each step, under gradients of one."""
  params = {'policy': {'kernel': jnp.zeros(1)}, 'value_head': {'kernel': jnp.zeros(1)}}
  optimizer = learning.optimizer(**{'actor_lr': 1.0, 'critic_lr': 1.0} | fields)
  state, moved = optimizer.init(params), []
  for _ in range(steps):
    gradients = jax.tree.map(jnp.ones_like, params)
    updates, state = optimizer.update(gradients, state, params, norms=_norms(gradients))
    moved.append([-float(updates[name]['kernel'][0]) for name in ('policy', 'value_head')])
  return moved


def test_the_policy_s_schedule_begins_after_the_critic_s_steps():
  moved = _moved(2, decay_steps=4, final_lr_fraction=0.0, critic_steps=2)
  np.testing.assert_allclose(moved, [[1, 1], [0.5, 0.75]], rtol=1e-4)  # halfway of two steps, and of four


def test_the_schedule_is_its_formula():
  moved = _moved(8, actor_lr=0.5, critic_lr=2.0, warmup_steps=3, decay_steps=5, final_lr_fraction=0.2)
  expected = [min(1, (k + 1) / 3) * (1 - 0.8 * min(1, k / 5)) for k in range(8)]
  np.testing.assert_allclose(moved, [[0.5 * x, 2.0 * x] for x in expected], rtol=1e-4)


@pytest.mark.parametrize('separate', [False, True])
def test_gradients_are_clipped_together_or_each_by_its_own_norm(separate):
  params = {'policy': {'kernel': jnp.zeros(1)}, 'critic': {'kernel': jnp.zeros(1)}}
  gradients = {'policy': {'kernel': jnp.full(1, 3.0)}, 'critic': {'kernel': jnp.full(1, 4.0)}}
  optimizer = learning.optimizer(grad_clip=1.0, separate_critic=separate)
  _, state = optimizer.update(gradients, optimizer.init(params), params, norms=_norms(gradients))
  # The first moment after one step is a tenth of the clipped gradient.
  paths = [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(state)]
  found = {
    name: [float(x[0]) * 10 for path, x in paths if f"'{name}'" in path.split('mu')[-1] and 'mu' in path]
    for name in ('policy', 'critic')
  }
  expected = {'policy': [1.0], 'critic': [1.0]} if separate else {'policy': [0.6], 'critic': [0.8]}
  for name, values in expected.items():
    np.testing.assert_allclose(found[name], values, rtol=1e-5)


@pytest.mark.parametrize('limit', [0.5, 2.0, 1e3])
def test_clipping_by_a_given_norm_is_that_of_optax(limit):
  gradients = {'a': jnp.arange(4.0), 'b': {'c': jnp.full((2, 2), -1.5, jnp.bfloat16)}}
  given, optaxs = clip_by_norm(limit, 'critic'), optax.clip_by_global_norm(limit)
  found, _ = given.update(gradients, given.init(gradients), norms={'critic': optax.tree.norm(gradients), 'all': 0.0})
  expected, _ = optaxs.update(gradients, optaxs.init(gradients))
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(gradients)]
