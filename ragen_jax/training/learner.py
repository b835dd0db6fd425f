"""The optimiser step: gradients of a loss, summed over micro-batches, then one update of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from ragen_jax.distributed.sharding import optimizer_shardings, trained_shardings
from ragen_jax.models import lora
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.training import bad_steps
from ragen_jax.training.optimizer_step import OptimizerStep
from ragen_jax.training.state import TrainState
from ragen_jax.utils.alike import made_once
from ragen_jax.utils.observer import Observer

# loss(module, micro_batch) -> (loss f32[], (sums, maxima)): metrics that are added, or of which the largest is taken,
# over the micro-batches of a step. The loss itself is a sum over micro-batches too.
Loss = Callable[[ActorCritic, Any], tuple[jax.Array, tuple[dict[str, jax.Array], dict[str, jax.Array]]]]


class _Gradient:
  """The compiled programs of a loss of a model on a mesh, and how often that of its gradient was traced."""

  def __init__(self, graphdef: Any, loss: Loss, mesh: Mesh | None):
    self.traces = 0

    def program(trained, frozen, gradients, batch):
      self.traces += 1
      gradient = jax.grad(lambda p: loss(lora.merge(graphdef, p, frozen).gathered(), batch), has_aux=True)
      new, (sums, maxima) = gradient(trained)
      gradients = jax.tree.map(jnp.add, gradients, _as_moments(new, mesh))
      found = _as_weights((sums, maxima), mesh)
      return _as_moments(gradients, mesh), found, bad_steps.not_finite(found)

    self.program = jax.jit(program, donate_argnums=2)
    self.stats = jax.jit(
      lambda trained, frozen, batch: loss(lora.merge(graphdef, trained, frozen).gathered(), batch)[1]
    )


_gradient = made_once(8)(_Gradient)  # of policy and critic, and of the parts of the loss that probes look at


def _as_weights(tree: Any, mesh: Mesh | None) -> Any:
  """Inside a program: lays a tree out as the weights are."""
  return tree if mesh is None else jax.lax.with_sharding_constraint(tree, trained_shardings(tree, mesh))


def _as_moments(tree: Any, mesh: Mesh | None) -> Any:
  """Inside a program: lays a tree out as gradients and optimiser state are."""
  return tree if mesh is None else jax.lax.with_sharding_constraint(tree, optimizer_shardings(tree, mesh))


class Learner:
  """The compiled programs of an optimiser step; those of an equal model, loss and optimiser share them.

  With LoRA, gradients and optimiser state exist for the trained weights only. On a mesh, they and the trained weights
  are divided over `data` (`sharding.trained_spec`): each device updates its part, and gradient programs gather. All
  programs lay out what they return like this; with another layout, the next program would be compiled anew.

    trained weights, metrics         `_as_weights`
    gradients, optimiser's state     `_as_moments`; outside programs `abstract`

  Attributes:
    programs: the compiled functions of gradients: 'gradient', and for the critic alone 'gradient_critic'.
    steps: the optimiser steps that follow them.
  """

  def __init__(
    self,
    graphdef: Any,
    optimizer: optax.GradientTransformation,
    loss: Loss,
    mesh: Mesh | None = None,
    *,
    critic_loss: Loss | None = None,
    observer: Observer | None = None,
  ):
    """Nothing is compiled before the first call.

    A loss is hashable; equal ones compute the same. `observer` is told of the programs of `step`; None for a loss of
    other batches than `MiniBatch`.
    """
    self.mesh = mesh
    self.optimizer = optimizer
    self._observer = observer
    self._of = {'gradient': _gradient(graphdef, loss, mesh)}
    if critic_loss is not None:
      self._of['gradient_critic'] = _gradient(graphdef, critic_loss, mesh)
    self.programs = {name: of.program for name, of in self._of.items()}
    self.steps = {
      'gradient': OptimizerStep(optimizer, mesh), 'gradient_critic': OptimizerStep(optimizer, mesh, critic_only=True)
    }  # fmt: skip

  @property
  def traces(self) -> int:
    """How often gradient programs were traced, by all who share them: once for each pair of widths."""
    return sum(of.traces for of in self._of.values())

  def init(self, trained: Any) -> Any:
    """The optimiser's state for the trained weights."""
    if self.mesh is None:
      return jax.jit(self.optimizer.init)(trained)
    shardings = optimizer_shardings(jax.eval_shape(self.optimizer.init, trained), self.mesh)
    return jax.jit(self.optimizer.init, out_shardings=shardings)(trained)

  def abstract(self, tree: Any) -> Any:
    """Gradients or the optimiser's state, perhaps abstract, as shapes, types and layouts."""
    leaves, structure = jax.tree.flatten(tree)
    if self.mesh is None:
      shardings = [getattr(x, 'sharding', None) for x in leaves]
    else:
      shardings = jax.tree.leaves(optimizer_shardings(tree, self.mesh))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(leaves, shardings, strict=True)]
    return jax.tree.unflatten(structure, shapes)

  def gradients(
    self, state: TrainState, micro_batches: Iterable[Any], *, critic_only: bool = False
  ) -> tuple[Any, dict[str, jax.Array]]:
    """The gradients of the loss, or of `critic_loss`, over all micro-batches for `state.trained`, and its metrics."""
    return self._gradients(state, micro_batches, critic_only=critic_only)[:2]

  def _gradients(
    self, state: TrainState, micro_batches: Iterable[Any], *, critic_only: bool
  ) -> tuple[Any, dict[str, jax.Array], list[jax.Array]]:
    """The result of `gradients`, and for each micro-batch bool[], whether one of its metrics is not finite."""
    name = gradient_of(critic_only)
    # Laid out as they will be, so that the first micro-batch runs the others' program.
    zeros = self.abstract(state.trained)
    gradients, found = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), zeros), {}
    bad = []
    for batch in micro_batches:
      if self._observer is not None:
        self._observer.runs(name, (*batch.tokens.shape, batch.columns.shape[1]))
      gradients, stats, flag = self.programs[name](state.trained, state.frozen, gradients, batch)
      found = _combine(found, stats)
      bad.append(flag)
    return gradients, found, bad

  def step(
    self, state: TrainState, micro_batches: Iterable[Any], *, critic_only: bool = False
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimiser step over the micro-batches of a mini-batch.

    The step is skipped, and weights and optimiser state stay as they are to the last bit, if the loss's metrics, the
    gradient, the new optimiser state or the new weights are not finite.

    The state's `trained` and `opt_state` are donated; its `lr_scale` multiplies the update. With `critic_only`, the
    policy and its part of the optimiser's state stay as they are; with a shared trunk the value head alone is trained.

    Returns:
      The state with new weights and optimiser state (its counters are the caller's), and metrics as device arrays: the
      loss's, the gradient norms, under `SKIPPED` i32[], 1 if the step was skipped and 0 if it was taken, and the
      entries of `bad_steps`, which say what was not finite.
    """
    gradients, found, bad = self._gradients(state, micro_batches, critic_only=critic_only)
    apply = self.steps[gradient_of(critic_only)]
    scale = None if state.lr_scale is None else np.float32(state.lr_scale)
    if self._observer is not None:
      self._observer.runs('apply_critic' if critic_only else 'apply', ())
    trained, opt_state, more = apply(state.trained, state.opt_state, gradients, found, scale)
    return state.replace(trained=trained, opt_state=opt_state), found | more | {bad_steps.MICRO_BATCHES: bad}

  def evaluate(self, state: TrainState, micro_batches: Iterable[Any]) -> dict[str, jax.Array]:
    """The loss's metrics over all micro-batches, without gradients."""
    found: dict[str, jax.Array] = {}
    for batch in micro_batches:
      found = _combine(found, self._of['gradient'].stats(state.trained, state.frozen, batch))
    return found


def gradient_of(critic_only: bool) -> str:
  """The name of a program of gradients."""
  return 'gradient_critic' if critic_only else 'gradient'


def _combine(found: dict[str, Any], stats: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
  """Adds the sums, and takes the maxima, of one more micro-batch."""
  sums, maxima = stats
  added = {name: found[name] + x if name in found else x for name, x in sums.items()}
  largest = {name: jnp.maximum(found[name], x) if name in found else x for name, x in maxima.items()}
  return added | largest
