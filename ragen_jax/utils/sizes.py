"""Sizes of arrays that come from a small set, so that few programs are compiled."""

from __future__ import annotations


def round_up(n: int, step: int) -> int:
  """The smallest multiple of `step` that is at least n; `step` is positive."""
  return -(-n // step) * step
