"""Pauses between tries."""

from __future__ import annotations


def pause_s(failed: int, first: float, longest: float) -> float:
  """Seconds before the next try after so many failures, at least 1: doubled each time, up to `longest`."""
  return min(first * 2 ** min(failed - 1, 64), longest)
