"""The numbers of chips, and the time of the smallest exchange between them."""

from __future__ import annotations

import types

import pytest

from ragen_jax.distributed.chips import CHIPS, chip_of


@pytest.mark.parametrize(
  ('kind', 'name'),
  [
    ('TPU v5 lite', 'v5e'), ('TPU v5', 'v5p'), ('TPU v6 lite', 'v6e'), ('NVIDIA H100 80GB HBM3', 'h100'),
    ('NVIDIA H200', 'h200'), ('cpu', None), ('NVIDIA A100', None),
  ],
)  # fmt: skip
def test_a_device_is_known_by_its_kind(kind, name):
  assert chip_of(types.SimpleNamespace(device_kind=kind)) is (CHIPS[name] if name else None)


@pytest.mark.parametrize(
  ('name', 'group', 'microseconds'),
  [
    ('v5e', 1, 0), ('v5e', 2, 3 + 1), ('v5e', 4, 3 + 2), ('v5e', 8, 3 + 1 + 3), ('v5e', 16, 3 + 3 + 3),
    ('v5e', 256, 3 + 8 + 8), ('v5p', 4, 3 + 2), ('v5p', 8, 3 + 3), ('h100', 2, 6.6 + 0.6), ('h100', 8, 6.6 + 7 * 0.6),
  ],
)  # fmt: skip
def test_an_exchange_takes_a_start_and_its_hops(name, group, microseconds):
  assert CHIPS[name].exchange_seconds(group) == pytest.approx(1e-6 * microseconds)
