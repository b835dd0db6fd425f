from __future__ import annotations

from ragen_jax.utils.sizes import next_power, round_up


def test_rounding_up():
  assert [round_up(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
  for n in range(40):
    for step in (1, 3, 7):
      assert round_up(n, step) % step == 0 and 0 <= round_up(n, step) - n < step


def test_the_next_power():
  assert [next_power(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
  assert [next_power(n, 24) for n in (1, 24, 25, 49, 96, 97)] == [24, 24, 48, 96, 96, 192]
