"""Log-probs and entropies in few passes against those that are differentiated operation by operation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.algorithms import losses
from ragen_jax.training.logits import logprobs_and_entropies


def _plain(logits, targets):
  return losses.token_logprobs(logits, targets), losses.token_entropy(logits)


def _compiled(function):
  """The function and the gradient of a weighted sum of its values, as programs."""

  @jax.jit
  @jax.grad
  def gradient(logits, targets, weights):
    return sum(jnp.sum(w * y) for w, y in zip(weights, function(logits, targets), strict=True))

  return jax.jit(function), gradient


_few_passes, _of_few_passes = _compiled(logprobs_and_entropies)
_by_operation, _of_operations = _compiled(_plain)


@pytest.mark.parametrize('scale', [1.0, 30.0, 1e4])
def test_values_and_gradients_are_those_of_the_plain_functions(scale):
  rng = np.random.default_rng(0)
  logits = (scale * rng.normal(size=(3, 5, 40))).astype(np.float32)
  targets = rng.integers(0, 33, size=(3, 5))
  few, none = logits.copy(), logits.copy()
  few[..., 33:], none[..., 33:] = -1e30, -np.inf
  weights = rng.normal(size=(2, 3, 5)).astype(np.float32)

  for found, expected in zip(_few_passes(few, targets), _by_operation(none, targets), strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
  # Gradients of -inf are not numbers in the plain functions, so there the logits stop at the last possible token.
  found, expected = _of_few_passes(few, targets, weights), _of_operations(few[..., :33], targets, weights)
  np.testing.assert_allclose(found[..., :33], expected, rtol=1e-4, atol=1e-5)
  assert not found[..., 33:].any()


def test_numbers_that_are_not_finite_are_not_hidden():
  logits = np.zeros((2, 4), np.float32)
  logits[0, 1] = np.nan
  logprobs, entropies = _few_passes(logits, np.asarray([0, 0]))
  assert np.isnan(logprobs[0]) and np.isnan(entropies[0])
  np.testing.assert_allclose([logprobs[1], entropies[1]], [-np.log(4), np.log(4)], rtol=1e-6)
