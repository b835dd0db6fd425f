"""The device mesh: the axes that rows, weights and heads are divided over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ragen_jax.utils.errors import UserError

AXES = ('data', 'fsdp', 'tensor')


def make_mesh(data: int, fsdp: int, tensor: int, devices: Sequence[Any] | None = None) -> Mesh:
  """A mesh over all devices; the sizes of its axes are those of `config.mesh`, where data=-1 takes all that remain.

  The devices are by default those of this process and of the others of its run; programs can be compiled for others.
  Raises UserError if a size is not allowed, or the product is not the number of devices.
  """
  # The devices of a process are adjacent, so that its rows are a contiguous range.
  devices = sorted(jax.devices() if devices is None else devices, key=lambda d: (d.process_index, d.id))
  asked = f'mesh.data={data}, mesh.fsdp={fsdp}, mesh.tensor={tensor}'
  if min(fsdp, tensor) < 1 or (data < 1 and data != -1):
    raise UserError(f'{asked}: each must be at least 1, and data may be -1 for the devices that are left')
  if data == -1:
    if len(devices) % (fsdp * tensor):
      raise UserError(f'{asked}: fsdp * tensor must divide the number of devices, {len(devices)}')
    data = len(devices) // (fsdp * tensor)
  if math.prod((data, fsdp, tensor)) != len(devices):
    raise UserError(f'{asked}: must multiply to the number of devices, {len(devices)}')
  return Mesh(np.asarray(devices).reshape(data, fsdp, tensor), AXES)
