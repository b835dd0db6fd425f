"""Comparison of numbers that were summed in different orders.

Two episodes with the same rewards can differ in the last bits of their sums. A division by their standard deviation
would turn this difference into an advantage of full size. Every comparison that decides whether a set of numbers varies
therefore uses the slack below. Scores of episodes are added exactly on the host (`Episode.score`); the slack is for
sums inside compiled programs and for environments that return inexact rewards.
"""

from __future__ import annotations

from typing import Any

RELATIVE = 2e-6  # relative to the largest absolute value: about 16 units in the last place of float32
ABSOLUTE = 2e-7  # for sums whose terms cancel; a fifth of the 1e-6 that is added to standard deviations


def is_constant(least: Any, greatest: Any) -> Any:
  """Whether all numbers of a set, from `least` to `greatest`, are equal up to rounding; elementwise for arrays."""
  return greatest - least <= slack(least, greatest)


def slack(least: Any, greatest: Any) -> Any:
  """The largest difference that rounding explains between numbers from `least` to `greatest`."""
  return RELATIVE * (abs(least) + abs(greatest)) / 2 + ABSOLUTE
