"""Pauses between tries."""

from __future__ import annotations

from ragen_jax.utils.retry import pause_s


def test_a_pause_is_doubled_up_to_the_longest():
  assert [pause_s(n, 0.5, 5.0) for n in (1, 2, 3, 4, 5, 10**6)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
