"""The tokens that have a probability: not the padding of an embedding, and not those that are never sampled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def masked(logits: jax.Array, limit: int, banned: tuple[int, ...], value: float) -> jax.Array:
  """Logits [..., V] with `value` for tokens without a probability; arguments as for `allowed`."""
  found = allowed(logits.shape[-1], limit, banned)
  return logits if found is None else jnp.where(found, logits, value)


def allowed(size: int, limit: int, banned: tuple[int, ...]) -> jax.Array | np.ndarray | None:
  """bool[V], True for tokens with a probability; None if all have one. Sampler and update use the same.

  Ids from `limit` on are padding of the embedding; 0 is no limit. `banned` are others without a probability, such as
  the placeholders of images.
  """
  limited = 0 < limit < size
  if banned:
    found = np.arange(size) < (limit if limited else size)
    found[list(banned)] = False
    return found
  return jnp.arange(size) < limit if limited else None
