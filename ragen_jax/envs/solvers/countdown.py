"""Exact Countdown: an exhaustive search of expressions over sets of numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction

from ragen_jax.envs.countdown_expressions import MINUS, OVER, PLUS, TIMES, Tokens

# The given numbers, and the target.
Level = tuple[tuple[int, ...], int]


def find_expression(given: tuple[int, ...], target: int) -> Tokens | None:
  """An expression, without padding, that uses each number exactly once and equals the target, or None.

  Expressions whose intermediate values are positive integers are tried first, then those with fractions.
  """
  for whole in (True, False):
    tokens = _search(given, target, whole)
    if tokens is not None:
      return tokens
  return None


def _search(given: tuple[int, ...], target: int, whole: bool) -> Tokens | None:
  """Dynamic programming over sets of numbers (bits of an integer): a set's values from those of its two parts."""
  full = 2 ** len(given) - 1
  values: list[dict[int | Fraction, Tokens]] = [{} for _ in range(full + 1)]
  for i, v in enumerate(given):
    values[1 << i][v if whole else Fraction(v)] = (v + 1,)
  for members in range(1, full + 1):
    known = values[members]
    part = (members - 1) & members
    while part > members ^ part:  # each split once; the larger integer leads
      for (a, left), (b, right) in itertools.product(values[part].items(), values[members ^ part].items()):
        for value, sign, swapped in _results(a, b, whole):
          if members == full:
            if value == target:
              return (*right, *left, sign) if swapped else (*left, *right, sign)
          elif value not in known:
            known[value] = (*right, *left, sign) if swapped else (*left, *right, sign)
      part = (part - 1) & members
  return None


def _results(a: int | Fraction, b: int | Fraction, whole: bool) -> Iterator[tuple[int | Fraction, int, bool]]:
  """The ways to join two values: the result, the operator, and whether b is the left operand."""
  yield a + b, PLUS, False
  yield a * b, TIMES, False
  if whole:
    swapped = b > a
    high, low = (b, a) if swapped else (a, b)
    if high > low:
      yield high - low, MINUS, swapped
    if high % low == 0:
      yield high // low, OVER, swapped
    return
  yield a - b, MINUS, False
  yield b - a, MINUS, True
  if b:
    yield a / b, OVER, False
  if a:
    yield b / a, OVER, True


def find_expressions(levels: Sequence[Level]) -> dict[Level, Tokens | None]:
  """An expression for each different level, or None; equal levels share one search."""
  return {level: find_expression(*level) for level in dict.fromkeys(levels)}
