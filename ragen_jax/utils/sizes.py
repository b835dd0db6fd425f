"""Sizes of arrays that come from a small set, so that few programs are compiled; a unit of memory."""

from __future__ import annotations

GIB = 2**30  # bytes


def round_up(n: int, step: int) -> int:
  """The smallest multiple of `step` that is at least n; `step` is positive."""
  return -(-n // step) * step


def next_power(n: int, step: int = 1) -> int:
  """The smallest of `step`, 2 `step`, 4 `step` and so on that is at least n."""
  return step << (-(-max(n, 1) // step) - 1).bit_length()
