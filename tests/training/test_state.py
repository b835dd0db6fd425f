"""The training state: its halves, its reference, and what a checkpoint holds of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ragen_jax.models import lora
from ragen_jax.training.state import TrainState, copy_of_policy
from tests.support.models import random_model


def _params(adapters: bool):
  model = random_model(30)
  if adapters:
    lora.attach(model.policy, lora.LoraConfig(2, 4, lora.TARGETS), nnx.Rngs(1))
  return nnx.split(model)[1]


def _names(tree):
  return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def test_params_are_both_halves():
  for adapters in (False, True):
    params = _params(adapters)
    state = TrainState(*lora.partition(params), opt_state=())
    assert bool(state.frozen) == adapters
    jax.tree.map(np.testing.assert_array_equal, state.params, params)


def test_a_checkpoint_holds_what_is_trained_and_the_optimiser_only():
  state = TrainState(*lora.partition(_params(True)), opt_state={'count': jnp.zeros(())}, reference=_params(False))
  saved = state.saved()
  assert set(saved) == {'params', 'opt_state'} and _names(saved['params']) == _names(state.trained)
  moved = jax.tree.map(lambda x: x + 1, saved)
  restored = state.with_saved(moved, iteration=3, lr_scale=0.5)
  jax.tree.map(np.testing.assert_array_equal, restored.saved(), moved)
  assert (restored.iteration, restored.lr_scale) == (3, 0.5) and restored.frozen is state.frozen
  assert restored.reference is state.reference


def test_the_reference_outlives_the_weights_that_it_copies():
  params = _params(True)
  trained, frozen = lora.partition(params)
  state = TrainState(trained, frozen, opt_state=(), reference=copy_of_policy(params))
  before = jax.device_get(params['policy'])
  jax.tree.map(lambda x: x.delete(), trained)  # as an optimiser step does
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.reference), before)
  # With the state's own value head it scores as the policy did at the start.
  state = state.replace(trained=jax.tree.map(lambda x: jnp.ones_like(x), _params(True)), frozen=nnx.State({}))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.reference_params['policy']), before)
  assert (state.reference_params['value_head']['kernel'][...] == 1).all()
  # The frozen weights are shared, not copied.
  own = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.reference)}
  assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(frozen)} < own


def test_counters_are_no_arrays_of_the_state():
  state = TrainState(*lora.partition(_params(False)), opt_state=())
  assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(state.trained))
  assert jax.tree.map(lambda x: x, state.replace(iteration=7)).iteration == 7
