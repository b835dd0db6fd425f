"""The optimiser and the compiled programs of supervised training on replies."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from ragen_jax.distributed.sharding import place_rows, tree_shardings
from ragen_jax.models import lora
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.sft.packing import SftBatch
from ragen_jax.training.optimizer import weight_decay_mask
from ragen_jax.training.scoring import ScoringSettings, score_tokens


@dataclasses.dataclass(frozen=True)
class SftSettings:
  """The optimiser and the loss.

  Attributes:
    steps: optimiser steps of the whole training.
    learning_rate: the highest one, after the warm-up over a twentieth of the steps; a cosine falls to a tenth of it.
    value_coef: weight of the value loss.
    b1, b2, weight_decay: of AdamW.
    grad_clip: largest norm of the gradient.
  """

  steps: int
  learning_rate: float
  value_coef: float
  b1: float
  b2: float
  weight_decay: float
  grad_clip: float


def make_schedule(settings: SftSettings) -> optax.Schedule:
  """The learning rate of each step: linear warm-up, then a cosine."""
  warmup = max(settings.steps // 20, 1)
  rate = settings.learning_rate
  return optax.warmup_cosine_decay_schedule(0.0, rate, warmup, max(settings.steps, warmup + 1), 0.1 * rate)


def make_loss(graphdef: Any, settings: SftSettings, scoring: ScoringSettings) -> Callable:
  """The loss of a micro-batch: the negative log-likelihood of the trained tokens, and the value loss.

  The weights of the tokens sum to 1 over a step, so the losses and gradients of its micro-batches are added.

  Args:
    graphdef: of the `ActorCritic`.
    settings: reads `value_coef`.
    scoring: how the tokens are scored.

  Returns:
    (trained, frozen, batch) -> (the loss, f32[2] of its two parts).
  """

  def loss(trained: nnx.State, frozen: nnx.State, batch: SftBatch) -> tuple[jax.Array, jax.Array]:
    model = lora.merge(graphdef, trained, frozen)
    logprobs, _, values = score_tokens(model, batch.tokens, batch.columns, scoring, batch.segments)
    nll = -jnp.sum(logprobs * batch.weights)
    vf_loss = 0.5 * jnp.sum(jnp.square(values - batch.values) * batch.value_weights)
    return nll + settings.value_coef * vf_loss, jnp.stack([nll, vf_loss])

  return loss


class SftTrainer:
  """Trains a model on batches of replies; with LoRA, only adapters and the value head.

  Attributes:
    params: the trained weights.
    frozen: the other weights, which never change.
    opt_state: of the optimiser.
    schedule: the learning rate of each step.
  """

  def __init__(self, settings: SftSettings, scoring: ScoringSettings, model: ActorCritic, mesh: Mesh):
    """Compiles nothing before the first call.

    Args:
      settings: the optimiser and the loss.
      scoring: how the tokens are scored.
      model: its weights are where training begins; they are not changed.
      mesh: the devices over which rows and weights are divided.
    """
    self._mesh = mesh
    self.schedule = make_schedule(settings)
    adamw = optax.adamw(
      self.schedule, b1=settings.b1, b2=settings.b2, weight_decay=settings.weight_decay, mask=weight_decay_mask
    )
    optimizer = optax.chain(optax.clip_by_global_norm(settings.grad_clip), adamw)
    graphdef, params = nnx.split(model)
    self.params, self.frozen = lora.partition(params)
    self.opt_state = self._as_weights(optimizer.init(self.params))
    loss = make_loss(graphdef, settings, scoring)

    @functools.partial(jax.jit, donate_argnums=2)
    def accumulate(params, frozen, gradients, batch):
      new, parts = jax.grad(loss, has_aux=True)(params, frozen, batch)
      return self._as_weights(jax.tree.map(jnp.add, gradients, new)), parts

    @jax.jit
    def apply(params, opt_state, gradients):
      updates, opt_state = optimizer.update(gradients, opt_state, params)
      return self._as_weights(optax.apply_updates(params, updates)), self._as_weights(opt_state)

    self._accumulate, self._apply = accumulate, apply
    self._losses = jax.jit(lambda params, frozen, batch: loss(params, frozen, batch)[1])

  def state(self) -> dict[str, Any]:
    """The state of a checkpoint: trained weights and optimiser state."""
    return {'params': self.params, 'opt_state': self.opt_state}

  def load_state(self, state: dict[str, Any]) -> None:
    """Continues from a `state`."""
    self.params, self.opt_state = state['params'], state['opt_state']

  def _as_weights(self, tree: Any) -> Any:
    """Divides a tree over the devices as the weights are."""
    if self._mesh.size == 1:
      return tree
    return jax.lax.with_sharding_constraint(tree, tree_shardings(tree, self._mesh))

  def _place(self, batch: SftBatch) -> SftBatch:
    return batch if self._mesh.size == 1 else place_rows(batch, self._mesh)

  def gradients(self, batches: list[SftBatch]) -> tuple[Any, jax.Array]:
    """The gradients of a step from its micro-batches, and f32[2]: its loss and value loss."""
    gradients, parts = jax.tree.map(jnp.zeros_like, self.params), 0.0
    for batch in batches:
      gradients, part = self._accumulate(self.params, self.frozen, gradients, self._place(batch))
      parts = parts + part
    return gradients, parts

  def step(self, batches: list[SftBatch]) -> jax.Array:
    """Takes one optimiser step; returns f32[2], loss and value loss before it."""
    gradients, parts = self.gradients(batches)
    self.params, self.opt_state = self._apply(self.params, self.opt_state, gradients)
    return parts

  def losses(self, batches: list[SftBatch]) -> jax.Array:
    """f32[2], loss and value loss; the weights do not change."""
    return sum(self._losses(self.params, self.frozen, self._place(batch)) for batch in batches)
