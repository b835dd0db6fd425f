"""The numbers of accelerators as their makers give them, and how long the smallest exchange between them takes."""

from __future__ import annotations

import dataclasses
from typing import Any

from ragen_jax.utils.sizes import GIB

_GB = 10**9


@dataclasses.dataclass(frozen=True)
class Chip:
  """The numbers of one chip."""

  platform: str  # 'tpu' or 'cuda'
  flops: float  # bf16 operations a second at most, products of dense matrices with float32 sums
  hbm_bytes: float  # memory
  hbm_bandwidth: float  # bytes a second between memory and chip
  link_bandwidth: float  # bytes a second that a chip sends to the others, over all its links, one way
  clock: float  # Hz of the compiler's cycles: the clock at which the matrix units have the peak `flops`
  matrix_width: int  # numbers of a row of a matrix unit; narrower products fill a part of it
  shapes: tuple[str, ...]  # names of machines that follow the colon, '2x4' for TPUs and '8' for GPUs; the most common
  kind: str  # how `jax.Device.device_kind` begins
  source: str  # where the numbers come from

  def exchange_seconds(self, group: int) -> float:
    """Seconds of a gather, or of a sum whose parts stay divided, among `group` neighbours, however few its bytes.

    TPUs: jax-ml.github.io/scaling-book/sharding has about 1 us a hop, and a measured 8 us for 32 kB over three hops of
    v5e, of which the bytes take 2.1 us; so 3 us belong to every exchange. GPUs: NCCL's own model for NVLink
    (src/graph/tuning.cc, ring, protocol LL).
    """
    if group <= 1:
      return 0.0
    start, hop = (3e-6, 1e-6) if self.platform == 'tpu' else (6.6e-6, 0.6e-6)
    return start + hop * (_hops(group, 3 if self.shapes == _CUBES else 2) if self.platform == 'tpu' else group - 1)


def _hops(group: int, axes: int) -> int:
  """The longest way between two of `group` neighbours on a grid whose sides are as equal as possible.

  Sides of 16 are closed to rings; the smallest machines have none that are.
  """
  sides = [1] * axes
  while group > 1:
    factor = next(n for n in range(2, group + 1) if group % n == 0)
    sides[sides.index(min(sides))] *= factor
    group //= factor
  return sum(n // 2 if n >= 16 else n - 1 for n in sides)


_FLAT = ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
_CUBES = ('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x8x8')
_GPUS = ('1', '2', '4', '8')

# Links of TPUs: half of the documented bandwidth, which counts both directions. The memory of TPUs is in GiB.
CHIPS: dict[str, Chip] = {
  'v5e': Chip(
    'tpu', 197e12, 16 * GIB, 819e9, 100e9, 1.5e9, 128, _FLAT, 'TPU v5 lite', 'https://cloud.google.com/tpu/docs/v5e'
  ),
  'v6e': Chip(
    'tpu', 918e12, 32 * GIB, 1640e9, 224e9, 1.75e9, 256, _FLAT, 'TPU v6 lite', 'https://cloud.google.com/tpu/docs/v6e'
  ),
  'v5p': Chip(
    'tpu', 459e12, 95 * GIB, 2765e9, 300e9, 1.75e9, 128, _CUBES, 'TPU v5', 'https://cloud.google.com/tpu/docs/v5p'
  ),
  'h100': Chip(
    'cuda', 989e12, 80 * GIB, 3352e9, 450e9, 1.98e9, 128, _GPUS, 'NVIDIA H100',
    'https://www.nvidia.com/en-us/data-center/h100/'
  ),
  'h200': Chip(
    'cuda', 989e12, 141 * _GB, 4800e9, 450e9, 1.98e9, 128, _GPUS, 'NVIDIA H200',
    'https://www.nvidia.com/en-us/data-center/h200/'
  ),
}  # fmt: skip


def chip_of(device: Any) -> Chip | None:
  """The chip that a device is; None if it is none of `CHIPS`, as a CPU."""
  found = [c for c in CHIPS.values() if device.device_kind.startswith(c.kind)]
  return max(found, key=lambda c: len(c.kind), default=None)
