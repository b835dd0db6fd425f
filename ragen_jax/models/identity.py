"""A digest of weights, by which a run recognises those that its checkpoints do not contain."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.utils.errors import UserError

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@jax.jit
def _sum(x: jax.Array) -> jax.Array:
  """u32[], the sum of the bits of an array, each times an odd number of its place: no rounding, in any order."""
  place = jnp.zeros(x.shape, jnp.uint32)
  for axis in range(x.ndim):
    place = (place ^ jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)) * jnp.uint32(0x9E3779B1)
    place ^= place >> 15
  bits = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)
  return jnp.sum(bits * (place | 1), dtype=jnp.uint32)


def digest_of(weights: Any) -> str:
  """The types and a digest of a tree of arrays of up to 32 bits, such as 'float32 1f0c…'; '' for a tree without arrays.

  It is the same on every mesh, and depends on every weight and its place. A CPU needs room for 4 bytes for each weight
  of the largest array.
  """
  leaves = jax.tree.leaves(weights)
  if not leaves:
    return ''
  types = ' '.join(sorted({str(x.dtype) for x in leaves}))
  sums = np.asarray(jax.device_get([_sum(x) for x in leaves]), np.uint32)
  return f'{types} {hashlib.sha256(sums.tobytes()).hexdigest()[:16]}'


def check_unsaved(meta: Mapping[str, Any], found: Mapping[str, str], where: str) -> None:
  """Raises UserError if weights that checkpoints do not contain are not those that a checkpoint was made with.

  Weights of other types, such as those of an export in float32, cannot be compared, and checkpoints of earlier versions
  have no digests.

  Args:
    meta: of the checkpoint; its 'unsaved' has the digests.
    found: name of some weights -> their digest now.
    where: the beginning of the error, such as '--workdir=runs/x'.
  """
  for name, now in found.items():
    was = meta.get('unsaved', {}).get(name, '')
    if was != now and was and was.rpartition(' ')[0] == now.rpartition(' ')[0]:
      raise UserError(
        f'{where}: the {name} weights of the model (model.path, model.preset, lora.path) are not those that it was '
        'trained with, and checkpoints do not contain them; put the files back, or choose another --workdir'
      )
