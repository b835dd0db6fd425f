"""A game in JAX with the mistakes that classes of users have."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.envs import base


@struct.dataclass
class State(base.State):
  n: jax.Array


@dataclasses.dataclass(frozen=True)
class Wrong(base.Environment):
  """A game that ends at once; `mistake` says what is wrong with it."""

  name, action_names, has_solver = 'wrong', ('Left', 'Right'), False
  mistake: str = ''

  def __post_init__(self):
    if self.mistake == 'options':
      raise TypeError('no such board')
    if self.mistake == 'refused':
      raise ValueError("mistake='refused'")

  def reset(self, key):
    if self.mistake == 'reset':
      raise RuntimeError('no level\nis there')
    if self.mistake == 'dict':
      return {'done': False}
    return State(done=False, success=jnp.bool_(False), n=jax.random.randint(key, (), 0, 9))

  def _step(self, state, action, key):
    over = state.replace(n=state.n + 1, done=jnp.bool_(True), success=jnp.bool_(True))
    changes: dict[str, Any] = {
      'shape': {'n': jnp.zeros(3, jnp.int32)},
      'dtype': {'n': 1.5},
      'int': {'done': jnp.int32(1)},
    }
    out = base.StepOutput(reward=jnp.ones(2) if self.mistake == 'rewards' else 1.0, effective=True)
    if self.mistake == 'branch' and state.n > 3:
      return over, out
    if self.mistake in ('alone', 'swapped'):
      return over if self.mistake == 'alone' else (out, over)
    return over.replace(**changes.get(self.mistake, {})), out

  def rules(self):
    return 'Walk.'

  def render(self, states):
    return [f'n {n}' for n in states.n]
