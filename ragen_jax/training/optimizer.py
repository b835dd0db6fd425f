"""AdamW with one learning rate for the policy and one for the critic."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ragen_jax.utils.alike import made_once


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
  """The optimiser of a run. Fields of `config.optimizer`, and the following.

  Attributes:
    decay_steps: optimiser steps after which `final_lr_fraction` of the learning rates is left.
    critic_steps: first optimiser steps, which train the critic alone; the policy's decay begins after them.
  """

  actor_lr: float
  critic_lr: float
  warmup_steps: int
  decay_steps: int
  final_lr_fraction: float
  b1: float
  b2: float
  weight_decay: float
  grad_clip: float
  critic_steps: int
  separate_critic: bool


def is_critic_weight(path: tuple[Any, ...]) -> bool:
  """Whether a leaf of the weights or of the optimiser's state belongs to the critic: its trunk or the value head."""
  return not {str(getattr(p, 'key', '')) for p in path}.isdisjoint(('critic', 'value_head'))


def weight_decay_mask(params: Any) -> Any:
  """True for the weights that AdamW decays: matrices, not norms, nor biases and convolutions of single channels.

  A bias of heads has two axes too, and a convolution three.
  """

  def is_matrix(path, x):
    name = jax.tree_util.keystr(path[-2:])
    return x.ndim >= 2 and not any(other in name for other in ('bias', 'conv1d'))

  return jax.tree_util.tree_map_with_path(is_matrix, params)


def clip_by_norm(max_norm: float, of: str) -> optax.GradientTransformationExtraArgs:
  """Clips gradients by a global norm that the caller has computed; `update` may be given only some of the gradients.

  Like `optax.clip_by_global_norm`, but `update` takes `norms`: the global norms of all gradients ('all'), and of those
  of the 'policy' and of the 'critic'. `of` is the one that is used.
  """

  def update(gradients, state, params=None, *, norms, **_):
    del params
    norm = norms[of]
    return jax.tree.map(lambda g: jnp.where(norm < max_norm, g, g / norm.astype(g.dtype) * max_norm), gradients), state

  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformationExtraArgs:
  """AdamW with the critic's own learning rate; `update` takes `norms`, which clip the gradient, see `clip_by_norm`.

  Settings that make the same steps give one optimiser, so that its steps share programs.
  """
  if settings.final_lr_fraction == 1:  # the learning rate is constant
    settings = dataclasses.replace(settings, decay_steps=1, critic_steps=0)
  return _make_optimizer(settings)


@made_once(8)
def _make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformationExtraArgs:
  s = settings

  def schedule(lr, steps):
    """lr * min(1, (step + 1) / warmup_steps) * (1 - (1 - final_lr_fraction) * min(1, step / steps))."""

    def at(step):
      warm = jnp.minimum(1.0, (step + 1) / s.warmup_steps) if s.warmup_steps else 1.0
      left = 1.0 - (1.0 - s.final_lr_fraction) * jnp.minimum(step / max(steps, 1), 1.0)
      return lr * warm * left

    return at

  def adamw(lr, steps, of):
    update = optax.adamw(schedule(lr, steps), b1=s.b1, b2=s.b2, weight_decay=s.weight_decay, mask=weight_decay_mask)
    return optax.chain(clip_by_norm(s.grad_clip, of), update) if s.separate_critic else update

  def label(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: 'critic' if is_critic_weight(path) else 'actor', params)

  models = {
    'actor': adamw(s.actor_lr, s.decay_steps - s.critic_steps, 'policy'),
    'critic': adamw(s.critic_lr, s.decay_steps, 'critic'),
  }
  clip = optax.identity() if s.separate_critic else clip_by_norm(s.grad_clip, 'all')
  return optax.chain(clip, optax.multi_transform(models, label))
