"""The value head of the critic, and the pair of policy and critic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ragen_jax.distributed.sharding import gathered
from ragen_jax.models import lora
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

  `critic` is the trunk that values are read from; None if they are read from the policy's trunk.
  """

  def __init__(self, policy: Qwen, critic: Qwen | None = None):
    self.policy = policy
    self.critic = critic
    self.value_head = ValueHead((critic or policy).cfg.hidden_size)

  def gathered(self) -> ActorCritic:
    """Inside a program: this model with trained weights as programs compute with them, see `sharding.gathered`.

    A loop over layers gathers theirs by itself (`layers.scan_layers`).
    """
    if self.policy.activation_sharding is None:
      return self
    mesh = self.policy.activation_sharding.mesh
    graphdef, weights = nnx.split(self)
    trained, frozen = lora.partition(weights)
    found = {}
    for name, part in trained.raw_mapping.items():
      trunk = {'policy': self.policy, 'critic': self.critic}.get(name)
      layers, own = dict(part.get('layers', {})), dict(part)
      if layers:
        own['layers'] = {i: x for i, x in layers.items() if i >= trunk.looped}
      found[name] = gathered(own, mesh, None if trunk is None else trunk.dtype)
      if layers:
        found[name]['layers'] = layers | found[name]['layers']
    return nnx.merge(graphdef, lora.join(nnx.State(found), frozen))
