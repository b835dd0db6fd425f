"""The optimiser step against simpler ones: a NumPy loss, other micro-batches, another way to the same gradients."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ragen_jax.training import bad_steps
from ragen_jax.training.batches import micro_batches
from ragen_jax.training.learner import Learner
from ragen_jax.training.optimizer_step import SKIPPED
from ragen_jax.training.state import TrainState
from ragen_jax.utils.observer import Observer
from tests.support import learning
from tests.support.models import random_model


def _batch(seed, rows=12, width=40):
  """(batch, used columns of each row)."""
  rng = np.random.default_rng(seed)
  length = rng.integers(6, width + 1, size=rows)
  loss_mask = np.zeros((rows, width), bool)
  for r in range(rows):
    loss_mask[r, rng.choice(np.arange(1, length[r]), size=rng.integers(1, 6), replace=False)] = True
  return learning.mini_batch(loss_mask, 30, seed=seed), length


def _learner(model, **fields):
  return learning.learner(model, learning.optimizer(critic_lr=3e-2, grad_clip=1e9), **fields)


@pytest.mark.slow
@pytest.mark.exhaustive_cases('12', '1')
@pytest.mark.parametrize('size', [1, 5, 12])
def test_the_update_does_not_depend_on_micro_batches_chunks_or_remat(size):
  model = random_model(30)
  batch, length = _batch(0)
  results = []
  # Of micro-batches of one row each width is a program of its own.
  parts = {'logits_chunk': 7, 'remat': 'layers' if size == 5 else 'elementwise'}
  for micro, length_step, loss in ((12, 40, {}), (size, 20 if size == 1 else 8, parts)):
    # The step is the gradient itself; Adam divides one that is nearly 0 by itself, rounding included.
    learner = learning.learner(model, optax.sgd(1.0), **loss)
    state = learning.state_of(learner, learning.copied(nnx.split(model)[1]))
    plans = learning.plans(batch, micro, length, length_step)
    new, metrics = learning.step(learner, state, batch, plans)
    results.append((jax.device_get(new.trained), jax.device_get(metrics)))
  (whole, whole_metrics), (parts, parts_metrics) = results
  for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
    np.testing.assert_allclose(a, b, atol=3e-5)
  for name, x in whole_metrics.items():
    np.testing.assert_allclose(x, parts_metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_the_gradient_is_that_of_the_loss_written_out_in_numpy():
  """PPO with dual and value clip, entropy bonus: directional derivatives by finite differences of a NumPy loss."""
  model = random_model(30)
  batch, length = _batch(1)
  fields = dict(temperature=1.3, clip_ratio_low=0.2, clip_ratio_high=0.3, entropy_coef=0.05, value_coef=0.7)
  settings = learning.loss(**fields).scoring
  graphdef, params = nnx.split(model)

  def numpy_loss(params):
    scores = learning.score(nnx.merge(graphdef, params), batch, settings)
    logprobs, entropies, values = (np.asarray(x, np.float64) for x in scores)
    total = 0.0
    n = batch.mask.sum()
    for b, r in zip(*np.nonzero(batch.mask), strict=True):
      a, ratio = float(batch.advantages[b, r]), np.exp(logprobs[b, r] - batch.old_logprobs[b, r])
      surrogate = max(-a * ratio, -a * min(max(ratio, 0.8), 1.3))
      if a < 0:
        surrogate = min(surrogate, -3.0 * a)
      v, old, ret = values[b, r], float(batch.old_values[b, r]), float(batch.returns[b, r])
      clipped = old + min(max(v - old, -0.5), 0.5)
      value = 0.5 * max((v - ret) ** 2, (clipped - ret) ** 2)
      total += (surrogate - 0.05 * entropies[b, r] + 0.7 * value) / n
    return total

  learner = _learner(model, **fields)
  state = learning.state_of(learner, params)
  found, _ = learner.gradients(state, micro_batches(batch, learning.plans(batch, 12, length)))
  leaves, tree = jax.tree.flatten(params)
  gradients = jax.tree.leaves(found)
  for trial in range(4):
    rng = np.random.default_rng(trial)
    direction = [rng.normal(size=x.shape).astype(np.float32) for x in leaves]
    exact = sum(float(np.sum(np.asarray(g, np.float64) * d)) for g, d in zip(gradients, direction, strict=True))
    norm = np.sqrt(sum(float(np.sum(np.asarray(g, np.float64) ** 2)) for g in gradients))
    step = 2e-4
    up, down = (
      numpy_loss(jax.tree.unflatten(tree, [x + s * step * d for x, d in zip(leaves, direction, strict=True)]))
      for s in (1, -1)
    )
    np.testing.assert_allclose((up - down) / (2 * step), exact, rtol=0.02, atol=0.02 * norm)


@pytest.mark.slow
def test_the_value_head_has_its_own_learning_rate_and_both_are_scaled():
  model = random_model(30)
  batch, length = _batch(2)
  learner, before = _learner(model), jax.device_get(nnx.split(model)[1])
  moved = {}
  for scale in (1.0, 0.5):
    state = learning.state_of(learner, learning.copied(before)).replace(lr_scale=scale)
    after, _ = learning.step(learner, state, batch, learning.plans(batch, 12, length))
    moved[scale] = nnx.to_pure_dict(jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b), after.trained, before))
  # Adam's first step moves every weight by its learning rate.
  for scale, found in moved.items():
    np.testing.assert_allclose(found['value_head']['kernel'], 3e-2 * scale, rtol=1e-2)
    np.testing.assert_allclose(np.median(found['policy']['embed_tokens'][batch.tokens[0, 1]]), 1e-2 * scale, rtol=1e-2)


@pytest.mark.parametrize(
  ('fields', 'options', 'lr'),
  [
    ({'advantages': np.nan}, {}, 1e-2),
    pytest.param({'returns': np.inf}, {}, 1e-2, marks=pytest.mark.slow),
    pytest.param({'returns': np.nan}, {'critic_only': True}, 1e-2, marks=pytest.mark.slow),
    ({}, {}, 1e30),  # loss and gradient are finite, and the step is not
  ],
)
@pytest.mark.exhaustive_cases('fields1-options1-0.01', 'fields2-options2-0.01')
@pytest.mark.slow_cases('fields0-options0-0.01', 'fields3-options3-1e+30')
def test_a_step_that_is_not_finite_leaves_weights_and_optimiser_as_they_are_to_the_last_bit(fields, options, lr):
  model = random_model(30)
  batch, length = _batch(3)
  bad = batch
  for name, x in fields.items():  # in one token, so in one of three micro-batches
    array = getattr(batch, name).copy()
    array[0, 0] = x
    bad = bad.replace(**{name: array})
  plans = learning.plans(batch, 4, length)
  learner = learning.learner(model, learning.optimizer(actor_lr=lr))
  state = learning.state_of(learner, learning.copied(nnx.split(model)[1]))
  if lr < 1:  # the moments and the count of steps are not 0
    state, metrics = learning.step(learner, state, batch, plans, **options)
    assert metrics[SKIPPED] == 0
  before = jax.device_get(state.saved())
  state, metrics = learning.step(learner, state, bad, plans, **options)
  assert metrics[SKIPPED] == 1
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.saved()), before)
  # What follows is what would have been without it.
  again = learning.copied(state)
  if lr < 1:
    state, metrics = learning.step(learner, state, batch, plans, **options)
    assert metrics[SKIPPED] == 0
    assert any(
      np.any(x != y) for x, y in zip(jax.tree.leaves(state.trained), jax.tree.leaves(again.trained), strict=True)
    )


@pytest.mark.parametrize('critic_only', [False, True])
def test_the_observer_is_told_of_each_program_before_it_runs(critic_only):
  """The programs themselves are replaced by ones that note that they run."""
  observer, batch = Observer(), _batch(0)[0]
  learner = _learner(random_model(30), observer=observer)
  suffix, told = '_critic' if critic_only else '', []
  learner.programs[f'gradient{suffix}'] = lambda *given: told.append('gradients') or (given[2], ({}, {}), False)
  learner.steps[f'gradient{suffix}'] = lambda *given: told.append('weights') or (None, None, {'norm': 2})
  with observer.told_to(types.SimpleNamespace(runs=lambda name, shape, weights: told.append((name, shape)))):
    _, metrics = learner.step(TrainState(trained={}, frozen={}, opt_state={}), [batch], critic_only=critic_only)
  assert metrics == {'norm': 2, bad_steps.MICRO_BATCHES: [False]}
  shape = (*batch.tokens.shape, batch.columns.shape[1])
  assert told == [(f'gradient{suffix}', shape), 'gradients', (f'apply{suffix}', ()), 'weights']


@pytest.mark.slow
def test_any_loss_of_a_module_and_a_batch_can_be_learnt():
  """A loss that is not PPO's: its sums add up, its maxima are the largest, and the weights go where it is smaller."""

  def loss(module, batch):
    error = module.value_head(batch['hidden']) - batch['target']
    return jnp.sum(error**2), (
      {'sum': jnp.sum(error**2), 'rows': jnp.float32(len(error))},
      {'worst': jnp.max(error**2)},
    )

  model, rng = random_model(30), np.random.default_rng(0)
  data = {'hidden': rng.normal(size=(8, 32)).astype(np.float32), 'target': rng.normal(size=8).astype(np.float32)}
  parts = [{name: x[i : i + 4] for name, x in data.items()} for i in (0, 4)]
  learner = Learner(nnx.split(model)[0], learning.optimizer(critic_lr=0.1), loss)
  state = learning.state_of(learner, learning.copied(nnx.split(model)[1]))
  found = jax.device_get(learner.evaluate(state, parts))
  errors = (data['hidden'] @ np.asarray(model.value_head.kernel[...]) - data['target']) ** 2
  np.testing.assert_allclose([found['sum'], found['rows'], found['worst']], [errors.sum(), 8, errors.max()], rtol=1e-5)
  for _ in range(20):
    state, metrics = learner.step(state, parts)
  assert isinstance(state, TrainState) and metrics['sum'] < 0.5 * found['sum']
  assert state.iteration == 0  # the counters are the caller's
