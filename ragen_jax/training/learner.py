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
from ragen_jax.training.optimizer import is_critic_weight
from ragen_jax.training.state import TrainState

# loss(module, micro_batch) -> (loss f32[], (sums, maxima)): metrics that are added, or of which the largest is taken,
# over the micro-batches of a step. The loss itself is a sum over micro-batches too.
Loss = Callable[[ActorCritic, Any], tuple[jax.Array, tuple[dict[str, jax.Array], dict[str, jax.Array]]]]


# Metric of a step: 1 if it was skipped, 0 if it was taken.
SKIPPED = 'train/skipped_steps'


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
        # Always the same layouts: `apply` takes both, and another layout would compile it anew.
        gradients = jax.tree.map(jnp.add, gradients, self._divided(new))
        found = self._as_weights((sums, maxima))
        return self._divided(gradients), found, bad_steps.not_finite(found)

      return jax.jit(program, donate_argnums=2)

    def apply(trained, opt_state, gradients, found, lr_scale):
      def update(gradients, opt_state, trained):
        updates, new_state = optimizer.update(gradients, opt_state, trained)
        if lr_scale is None:  # a product with 1 would round the sum with the weights otherwise
          return updates, new_state
        return jax.tree.map(lambda u: lr_scale * u, updates), new_state

      norms = _norms(gradients)
      updates, new_state = update(gradients, opt_state, trained)
      bad = {
        bad_steps.GRADIENT: bad_steps.bad_arrays(gradients),
        bad_steps.OPT_STATE: bad_steps.bad_arrays(new_state),
        bad_steps.WEIGHTS: bad_steps.bad_arrays(optax.apply_updates(trained, updates)),
      }
      finite = ~(bad_steps.not_finite((found, norms)) | jnp.concatenate(list(bad.values())).any())
      # The updates are computed a second time, because the compiler would otherwise hold all of them until it knows
      # whether the step is taken. The norm of the gradient is computed once.
      opt_state, trained, finite = jax.lax.optimization_barrier((opt_state, trained, finite))
      updates, new_state = update(gradients, opt_state, trained)
      new = optax.apply_updates(trained, updates)
      new, new_state = jax.tree.map(lambda x, old: jnp.where(finite, x, old), (new, new_state), (trained, opt_state))
      # First divided: the compiler would otherwise exchange towers, which are whole, before the step and after it.
      new, new_state = self._divided((new, new_state))
      return self._as_weights(new), new_state, norms | bad | {SKIPPED: 1 - finite.astype(jnp.int32)}

    def apply_critic(trained, opt_state, gradients, found, lr_scale):
      def select(path, new, old):
        return new if is_critic_weight(path) else old

      new, new_state, stats = apply(trained, opt_state, gradients, found, lr_scale)
      new = jax.tree_util.tree_map_with_path(select, new, trained)
      new_state = jax.tree_util.tree_map_with_path(select, new_state, opt_state)
      del stats['actor/grad_norm']
      return new, new_state, stats

    def stats(trained, frozen, batch):
      return loss(lora.merge(graphdef, trained, frozen).gathered(), batch)[1]

    self._accumulate, self._apply = accumulate(loss), jax.jit(apply, donate_argnums=(0, 1))
    self._accumulate_critic = critic_loss and accumulate(critic_loss)
    self._apply_critic = jax.jit(apply_critic, donate_argnums=(0, 1))
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

  def lower(
    self,
    state: TrainState,
    batch: Any,
    *,
    critic_only: bool = False,
    names: tuple[str, ...] = ('accumulate', 'apply'),
  ) -> dict[str, jax.stages.Lowered]:
    """The programs of `step` for these shapes, to be compiled without being run; arguments may be abstract.

    A call with arguments of these shapes, types and layouts then runs what was compiled.
    """
    trained, scale = state.trained, None if state.lr_scale is None else np.float32(1)
    gradients, _ = self.abstract(trained)
    program = self._accumulate_critic if critic_only else self._accumulate
    accumulate = program.trace(trained, state.frozen, gradients, batch)
    found = {'accumulate': accumulate.lower} if 'accumulate' in names else {}
    if 'apply' in names:
      sums, maxima = accumulate.out_info[1]
      layout = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
      stats = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), sums | maxima)
      apply = self._apply_critic if critic_only else self._apply
      found['apply'] = lambda: apply.lower(trained, state.opt_state, gradients, stats, scale)
    return {name: lower() for name, lower in found.items()}


def _combine(found: dict[str, Any], stats: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
  """Adds the sums, and takes the maxima, of one more micro-batch."""
  sums, maxima = stats
  added = {name: found[name] + x if name in found else x for name, x in sums.items()}
  largest = {name: jnp.maximum(found[name], x) if name in found else x for name, x in maxima.items()}
  return added | largest


def _norms(gradients: Any) -> dict[str, jax.Array]:
  """Global norms as they are clipped: of all gradients, or of the policy's with a separate critic; and the critic's."""
  leaves = jax.tree_util.tree_leaves_with_path(gradients)
  critic = optax.tree.norm([x for path, x in leaves if is_critic_weight(path)])
  actor = optax.tree.norm([x for path, x in leaves if 'critic' not in gradients or not is_critic_weight(path)])
  return {'actor/grad_norm': actor, 'critic/grad_norm': critic}
