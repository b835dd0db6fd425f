"""The value head of the critic, and the pair of policy and critic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ragen_jax.models.qwen import Qwen


class ValueHead(nnx.Module):
  """A linear layer from a hidden state to the expected return from that state. Initially zero, always in fp32."""

  def __init__(self, hidden_size: int):
    self.kernel = nnx.Param(jnp.zeros((hidden_size,), jnp.float32))
    self.bias = nnx.Param(jnp.zeros((), jnp.float32))

  def __call__(self, hidden: jax.Array) -> jax.Array:
    """Hidden states [..., D] -> values f32[...]."""
    return jnp.einsum('...D,D->...', hidden.astype(jnp.float32), self.kernel[...]) + self.bias[...]


class ActorCritic(nnx.Module):
  """A policy and its critic. The value of column t is read from the hidden state of column t-1, which predicts token t.

  Attributes:
    policy: the model that tokens are sampled from.
    critic: the trunk that values are read from; None if they are read from the policy's trunk.
    value_head: the layer that reads values.
  """

  def __init__(self, policy: Qwen, critic: Qwen | None = None):
    self.policy = policy
    self.critic = critic
    self.value_head = ValueHead((critic or policy).cfg.hidden_size)
