from __future__ import annotations

from ragen_jax.utils.sizes import round_up


def test_rounding_up():
  assert [round_up(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
  for n in range(40):
    for step in (1, 3, 7):
      assert round_up(n, step) % step == 0 and 0 <= round_up(n, step) - n < step
