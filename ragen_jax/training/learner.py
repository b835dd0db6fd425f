"""The optimiser step: gradients of a loss, summed over micro-batches, then one update of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax.distributed.sharding import optimizer_shardings, trained_shardings
from ragen_jax.models import lora
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.training import bad_steps
from ragen_jax.training.optimizer_step import OptimizerStep, StepProgram
from ragen_jax.training.state import TrainState

# loss(module, micro_batch) -> (loss f32[], (sums, maxima)): metrics that are added, or of which the largest is taken,
# over the micro-batches of a step. The loss itself is a sum over micro-batches too.
Loss = Callable[[ActorCritic, Any], tuple[jax.Array, tuple[dict[str, jax.Array], dict[str, jax.Array]]]]


class Learner:
  """The compiled programs of an optimiser step.

  With LoRA, gradients and optimiser state exist for the trained weights only. On a mesh, they and the trained weights
  are divided over `data` (`sharding.trained_spec`): each device updates its part, and gradient programs gather.

  Attributes:
    optimizer: see `make_optimizer`.
    mesh: the devices; None for one.
    traces: how often a gradient program has been traced: once for each pair of widths.
    observer: called before a program of `step` runs: with 'gradient' and the rows, columns and scored tokens of the
      micro-batch, or with 'apply' and (); for the critic alone, 'gradient_critic' and 'apply_critic'. None if nobody
      observes.
  """

  def __init__(
    self,
    graphdef: Any,
    optimizer: optax.GradientTransformation,
    loss: Loss,
    mesh: Mesh | None = None,
    *,
    critic_loss: Loss | None = None,
  ):
    """Nothing is compiled before the first call.

    Args:
      graphdef: of the `ActorCritic`.
      optimizer: of the trained weights.
      loss: of a micro-batch.
      mesh: the devices; None for one.
      critic_loss: the loss of steps that train the critic alone.
    """
    self.mesh = mesh
    self.optimizer = optimizer
    self.traces = 0
    self.observer: Callable[[str, tuple[int, ...]], None] | None = None

    def accumulate(loss):
      def program(trained, frozen, gradients, batch):
        self.traces += 1
        gradient = jax.grad(lambda p: loss(lora.merge(graphdef, p, frozen).gathered(), batch), has_aux=True)
        new, (sums, maxima) = gradient(trained)
        # Always the same layouts: the optimiser step takes both, and another layout would compile it anew.
        gradients = jax.tree.map(jnp.add, gradients, self._divided(new))
        found = self._as_weights((sums, maxima))
        return self._divided(gradients), found, bad_steps.not_finite(found)

      return jax.jit(program, donate_argnums=2)

    def stats(trained, frozen, batch):
      return loss(lora.merge(graphdef, trained, frozen).gathered(), batch)[1]

    self._accumulate, self._apply = accumulate(loss), OptimizerStep(optimizer, mesh)
    self._accumulate_critic = critic_loss and accumulate(critic_loss)
    self._apply_critic = OptimizerStep(optimizer, mesh, critic_only=True)
    self._stats = jax.jit(stats)

  def _as_weights(self, tree: Any) -> Any:
    """Inside a program: lays a tree out as the weights are; another layout would compile the programs anew."""
    return tree if self.mesh is None else jax.lax.with_sharding_constraint(tree, trained_shardings(tree, self.mesh))

  def _divided(self, tree: Any) -> Any:
    """Inside a program: lays a tree out as gradients and optimiser state are."""
    return tree if self.mesh is None else jax.lax.with_sharding_constraint(tree, optimizer_shardings(tree, self.mesh))

  def init(self, trained: Any) -> Any:
    """The optimiser's state for the trained weights."""
    if self.mesh is None:
      return jax.jit(self.optimizer.init)(trained)
    shardings = optimizer_shardings(jax.eval_shape(self.optimizer.init, trained), self.mesh)
    return jax.jit(self.optimizer.init, out_shardings=shardings)(trained)

  def abstract(self, trained: Any) -> tuple[Any, Any]:
    """The gradients and the optimiser's state of (abstract) trained weights, as shapes, types and layouts."""
    return self._laid_out(trained), self._laid_out(jax.eval_shape(self.optimizer.init, trained))

  def _laid_out(self, tree: Any) -> Any:
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
    """The gradients of the loss over all micro-batches.

    Args:
      state: read only.
      micro_batches: what the loss takes, one after the other.
      critic_only: take `critic_loss`.

    Returns:
      Gradients of `state.trained`, and the loss's metrics over all micro-batches.
    """
    return self._gradients(state, micro_batches, critic_only=critic_only)[:2]

  def _gradients(
    self, state: TrainState, micro_batches: Iterable[Any], *, critic_only: bool
  ) -> tuple[Any, dict[str, jax.Array], list[jax.Array]]:
    """The result of `gradients`, and for each micro-batch bool[], whether one of its metrics is not finite."""
    accumulate = self._accumulate_critic if critic_only else self._accumulate
    # Laid out as they will be, so that the first micro-batch runs the others' program.
    zeros = self._laid_out(state.trained)
    gradients, found = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), zeros), {}
    bad = []
    for batch in micro_batches:
      if self.observer is not None:
        name = 'gradient_critic' if critic_only else 'gradient'
        self.observer(name, (*batch.tokens.shape, batch.columns.shape[1]))
      gradients, stats, flag = accumulate(state.trained, state.frozen, gradients, batch)
      found = _combine(found, stats)
      bad.append(flag)
    return gradients, found, bad

  def step(
    self, state: TrainState, micro_batches: Iterable[Any], *, critic_only: bool = False
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimiser step over a mini-batch.

    The step is skipped, and weights and optimiser state stay as they are to the last bit, if the loss's metrics, the
    gradient, the new optimiser state or the new weights are not finite.

    Args:
      state: its `trained` and `opt_state` are donated; `lr_scale` multiplies the update.
      micro_batches: what the loss takes, one after the other.
      critic_only: leave the policy and its part of the optimiser's state as they are; with a shared trunk the value
        head alone is trained.

    Returns:
      The state with new weights and optimiser state (its counters are the caller's), and metrics as device arrays: the
      loss's, the gradient norms, under `SKIPPED` i32[], 1 if the step was skipped and 0 if it was taken, and the
      entries of `bad_steps`, which say what was not finite.
    """
    gradients, found, bad = self._gradients(state, micro_batches, critic_only=critic_only)
    apply = self._apply_critic if critic_only else self._apply
    scale = None if state.lr_scale is None else np.float32(state.lr_scale)
    if self.observer is not None:
      self.observer('apply_critic' if critic_only else 'apply', ())
    trained, opt_state, more = apply(state.trained, state.opt_state, gradients, found, scale)
    return state.replace(trained=trained, opt_state=opt_state), found | more | {bad_steps.MICRO_BATCHES: bad}

  def evaluate(self, state: TrainState, micro_batches: Iterable[Any]) -> dict[str, jax.Array]:
    """The loss's metrics over all micro-batches, without gradients."""
    found: dict[str, jax.Array] = {}
    for batch in micro_batches:
      found = _combine(found, self._stats(state.trained, state.frozen, batch))
    return found

  def lower(self, state: TrainState, batch: Any, *, critic_only: bool = False) -> jax.stages.Lowered:
    """The program of gradients for these shapes, to be compiled without being run; arguments may be abstract.

    A call with arguments of these shapes, types and layouts then runs what was compiled.
    """
    return self._traced(state, batch, critic_only).lower()

  def step_programs(self, state: TrainState, batch: Any, *, critic_only: bool = False) -> list[StepProgram]:
    """The programs of the optimiser step after gradients of such micro-batches, as above."""
    sums, maxima = self._traced(state, batch, critic_only).out_info[1]
    layout = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
    found = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), sums | maxima)
    apply, scale = self._apply_critic if critic_only else self._apply, None if state.lr_scale is None else np.float32(1)
    return apply.programs(state.trained, state.opt_state, self._laid_out(state.trained), found, scale)

  def _traced(self, state: TrainState, batch: Any, critic_only: bool) -> Any:
    program = self._accumulate_critic if critic_only else self._accumulate
    return program.trace(state.trained, state.frozen, self._laid_out(state.trained), batch)


def _combine(found: dict[str, Any], stats: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
  """Adds the sums, and takes the maxima, of one more micro-batch."""
  sums, maxima = stats
  added = {name: found[name] + x if name in found else x for name, x in sums.items()}
  largest = {name: jnp.maximum(found[name], x) if name in found else x for name, x in maxima.items()}
  return added | largest
