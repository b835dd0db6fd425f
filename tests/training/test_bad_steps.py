"""Where an optimiser step went bad: the flags of its arrays and micro-batches, and the text about them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax.training import bad_steps
from ragen_jax.training.batches import MicroBatch
from ragen_jax.training.learner import Learner
from ragen_jax.training.optimizer_step import SKIPPED
from ragen_jax.training.packing import PackedBatch
from tests.support import learning
from tests.support.models import random_model

_TREE = {'policy': {'a': np.ones(2, np.float32), 'b': np.ones((2, 2), np.float32)}, 'count': np.int32(3)}
_STATE = {'inner_state': {'mu': _TREE['policy'], 'nu': _TREE['policy'], 'count': np.int32(1)}}


@pytest.mark.parametrize('x', [np.nan, np.inf, -np.inf, 1e20])
def test_arrays_with_a_number_that_is_not_finite_are_flagged_and_named(x):
  tree = jax.tree.map(np.copy, _TREE)
  assert bad_steps.bad_arrays(tree).tolist() == [False, False]
  tree['policy']['b'][1, 0] = x
  assert bad_steps.bad_arrays(tree).tolist() == [False, True]
  assert bad_steps.names(tree) == ['policy/a', 'policy/b']  # numbers that are no floats are always finite
  assert bad_steps.names(_STATE) == ['mu/a', 'mu/b', 'nu/a', 'nu/b']
  assert bad_steps.not_finite({'x': np.asarray([1.0, x], np.float32)}) == (
    not np.isfinite(x)
  ) and not bad_steps.not_finite(_TREE)


def test_the_cause_is_named_with_rows_and_its_consequences_are_not():
  def flags(n, *at):
    return np.isin(np.arange(n), at)

  bad = {
    bad_steps.GRADIENT: flags(2, 0, 1), bad_steps.OPT_STATE: flags(4, 1, 3), bad_steps.WEIGHTS: flags(2, 1),
    bad_steps.MICRO_BATCHES: [False, True, True],
  }  # fmt: skip
  stats, rows = {'loss': np.nan, 'entropy': 1.0}, [np.asarray(x) for x in ([0, 1], [7, 4], [5])]
  assert bad_steps.describe(stats, bad, _TREE, _STATE, rows) == (
    'loss, in a micro-batch of rows 4, 5, 7, gradient of policy/a and 1 more'
  )
  assert bad_steps.describe(stats, bad, _TREE, _STATE) == (
    'loss, in micro-batch 2, 3 of 3, gradient of policy/a and 1 more'
  )
  bad |= {bad_steps.MICRO_BATCHES: [False] * 3, bad_steps.GRADIENT: flags(2)}
  assert bad_steps.describe({'loss': 1.0}, bad, _TREE, _STATE, rows) == 'optimiser state mu/b and 1 more'
  bad[bad_steps.OPT_STATE] = flags(4)
  assert bad_steps.describe({}, bad, _TREE, _STATE, rows) == 'new weights policy/b'
  assert bad_steps.describe({}, {}, _TREE, _STATE) == ''
  assert bad_steps.split(stats | bad) == (stats, bad)


def test_a_plan_knows_its_rows():
  assert MicroBatch(np.asarray([4, 2, -1]), 8, 4).members.tolist() == [4, 2]
  packed = PackedBatch((np.asarray([3]), np.asarray([], np.int64), np.asarray([1, 0])), np.ones(4, np.int32), 8, 4)
  assert packed.members.tolist() == [3, 1, 0]


@pytest.mark.slow
def test_each_place_of_a_step_is_caught_and_named():
  """A loss of one number for each row: its value, its gradient, the moments and the weights go bad one by one."""

  def loss(module, batch):
    # The square root has an infinite gradient at 0, the bias.
    x = jnp.sum(module.value_head.kernel[...] * batch['x'], axis=-1)
    return jnp.sum(x + jnp.sqrt(batch['floor'] + jnp.sum(module.value_head.bias[...]))), ({'sum': jnp.sum(x)}, {})

  model = random_model(30)
  learner = Learner(nnx.split(model)[0], learning.optimizer(critic_lr=0.1, weight_decay=0.01), loss)
  start = learning.state_of(learner, nnx.split(model)[1])

  class Batch(dict):
    tokens = columns = np.zeros((1, 1))

  def step(x=1.0, floor=1.0, change=lambda state: state):
    parts = [Batch(x=np.full((1, 32), x_, np.float32), floor=np.float32(floor)) for x_ in (1.0, x)]
    jitted = [jax.tree.map(jnp.asarray, dict(p)) for p in parts]
    state = change(learning.copied(start))
    before = jax.device_get(state.saved())
    new, found = learner.step(state, jitted)
    stats, bad = bad_steps.split(jax.device_get(found))
    skipped = stats.pop(SKIPPED)
    if skipped:
      jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(new.saved()))
    text = bad_steps.describe(stats, bad, new.trained, new.opt_state)
    assert skipped == bool(text)
    return text

  def poisoned(tree, name, x):
    def poison(path, y):
      at = jax.tree_util.keystr(path)
      return y.at[(0,) * y.ndim].set(x) if all(part in at for part in name) else y

    return jax.tree_util.tree_map_with_path(poison, tree)

  assert step() == ''
  assert step(x=np.inf).startswith('actor/grad_norm, critic/grad_norm, sum, in micro-batch 2 of 2, gradient of value')
  assert step(floor=0.0) == 'actor/grad_norm, critic/grad_norm, gradient of value_head/bias'
  for x in (np.nan, np.inf):
    assert (
      step(change=lambda s, x=x: s.replace(opt_state=poisoned(s.opt_state, ('nu', 'value_head', 'kernel'), x)))
      == 'optimiser state nu/value_head/kernel'
    )
    # A weight that the loss does not read.
    assert (
      step(change=lambda s, x=x: s.replace(trained=poisoned(s.trained, ('embed_tokens',), x)))
      == 'new weights policy/embed_tokens'
    )
    # The update of a norm has no weight decay, so it is finite.
    found = step(change=lambda s, x=x: s.replace(trained=poisoned(s.trained, ("['policy']['norm']",), x)))
    assert found.startswith('new weights policy/norm')
