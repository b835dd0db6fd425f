"""The state of training, which one iteration passes to the next."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct

from ragen_jax.models import identity, lora


@struct.dataclass
class TrainState:
  """Weights, optimiser state and counters.

  An optimiser step donates `trained` and `opt_state`; after `Trainer.update`, use only the returned state.

  Attributes:
    trained: nnx.State, the trained weights: all that are not frozen.
    frozen: nnx.State, the other weights: with LoRA the policy's without its adapters, and vision towers unless they are
      trained. They never change and are not saved in checkpoints.
    opt_state: the optimiser's state for `trained`.
    reference: nnx.State, the policy's weights at the start, for the KL terms; None if no KL term is on. It is not saved
      in checkpoints.
    iteration: number of finished iterations; also the index of the next one.
    lr_scale: factor of all learning rates, below 1 after a rollback; None for a training without such a factor.
  """

  trained: Any
  frozen: Any
  opt_state: Any
  reference: Any = None
  iteration: int = struct.field(pytree_node=False, default=0)
  lr_scale: float | None = struct.field(pytree_node=False, default=1.0)

  @property
  def params(self) -> Any:
    """All weights of the `ActorCritic`."""
    return lora.join(self.trained, self.frozen)

  @property
  def reference_params(self) -> Any:
    """The weights with the reference in place of the policy."""
    # Plain dicts inside, as in `params`: programs that are compiled for one take the other.
    return nnx.State({**self.params.raw_mapping, 'policy': self.reference.raw_mapping})

  def saved(self) -> dict[str, Any]:
    """Name in a checkpoint -> array, for all arrays of a checkpoint."""
    return {'params': self.trained, 'opt_state': self.opt_state}

  def unsaved(self) -> dict[str, str]:
    """Digests of the weights that checkpoints do not contain, see `identity.digest_of`; shared arrays are read once."""
    frozen = {id(x) for x in jax.tree.leaves(self.frozen)}
    reference = [x for x in jax.tree.leaves(self.reference) if id(x) not in frozen]
    return {'frozen': identity.digest_of(self.frozen), 'reference': identity.digest_of(reference)}

  def with_saved(self, arrays: dict[str, Any], **fields: Any) -> TrainState:
    """This state with the arrays of a checkpoint and other replaced `fields`."""
    return self.replace(trained=arrays['params'], opt_state=arrays['opt_state'], **fields)


def copy_of_policy(params: Any) -> Any:
  """A reference for `TrainState`: the policy's trained weights are copied, the frozen ones shared."""
  trained, frozen = (part.get('policy', nnx.State({})) for part in lora.partition(params))
  return lora.join(jax.tree.map(jnp.copy, trained), frozen)
