"""The device mesh: how many ways rows, weights and heads are divided."""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import Mesh

from ragen_jax.utils.errors import UserError

AXES = ('data', 'fsdp', 'tensor')


def make_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
  """A mesh over all devices.

  Args:
    data: copies of the weights, each with its own rows; -1 for as many as there are devices for.
    fsdp: ways in which weights are divided, with rows of their own as well.
    tensor: ways in which heads, MLP and vocabulary are divided.

  Raises:
    UserError: the axes do not multiply to the number of devices.
  """
  # A process's devices stay together, so that its rows are a contiguous range.
  devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
  asked = f'mesh.data={data}, mesh.fsdp={fsdp}, mesh.tensor={tensor}'
  if min(fsdp, tensor) < 1 or (data < 1 and data != -1):
    raise UserError(f'{asked}: each must be at least 1, and data may be -1 for the devices that are left')
  if data == -1:
    data = len(devices) // (fsdp * tensor)
  if math.prod((data, fsdp, tensor)) != len(devices):
    raise UserError(f'{asked}: must multiply to the number of devices, {len(devices)}')
  return Mesh(np.asarray(devices).reshape(data, fsdp, tensor), AXES)
