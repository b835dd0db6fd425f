"""The value head: a dot product in fp32 on hidden states of any type, zero before training."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ragen_jax.models.value_head import ActorCritic, ValueHead
from tests.support.models import random_model


def test_values_are_a_dot_product_in_float32_and_zero_before_training():
  head = ValueHead(16)
  hidden = jax.random.normal(jax.random.key(0), (3, 5, 16), jnp.bfloat16)
  np.testing.assert_array_equal(head(hidden), np.zeros((3, 5)))
  kernel = jnp.linspace(-1, 1, 16)
  head.kernel.set_value(kernel)
  head.bias.set_value(jnp.float32(0.5))
  values = head(hidden)
  chex.assert_shape(values, (3, 5))
  chex.assert_type(values, jnp.float32)
  np.testing.assert_allclose(values, np.asarray(hidden, np.float32) @ np.asarray(kernel) + 0.5, rtol=0, atol=1e-5)


def test_the_head_has_the_width_of_the_trunk_that_it_reads():
  wide = nnx.eval_shape(lambda: random_model(20)).policy
  assert ActorCritic(wide).value_head.kernel.shape == (wide.cfg.hidden_size,)
  assert ActorCritic(wide, wide).critic is wide
