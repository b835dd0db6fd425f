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
def _sums(leaves: list[jax.Array]) -> list[jax.Array]:
  """For each array u32[], the sum of its bits, read as unsigned numbers of its width: no rounding, in any order."""
  bits = (jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]) for x in leaves)
  return [jnp.sum(x, dtype=jnp.uint32) for x in bits]


def digest_of(weights: Any) -> str:
  """The types and a digest of a tree of arrays of up to 32 bits, such as 'float32 1f0c…'; '' for a tree without arrays.

  It is the same on every mesh. Weights that differ have different digests, but for a chance of one in 2^32 an array.
  """
  leaves = jax.tree.leaves(weights)
  if not leaves:
    return ''
  types = ' '.join(sorted({str(x.dtype) for x in leaves}))
  sums = np.asarray(jax.device_get(_sums(leaves)), np.uint32)
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
