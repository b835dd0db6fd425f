"""One result for arguments that are alike, such as compiled programs for equal settings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar('_T')

_made: list[Any] = []


def made_once(most: int) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
  """Decorator: calls with positional arguments that are equal, and written alike, return one object.

  Equal arguments may differ: 0.0 equals -0.0, and True equals 1. At most `most` objects are kept, the last ones used.
  Arguments must be hashable. What is made must hold no arrays: it lives as long as the process.
  """

  def decorate(make: Callable[..., _T]) -> Callable[..., _T]:
    cached = functools.lru_cache(maxsize=most)(lambda written, *arguments: make(*arguments))
    _made.append(cached)
    return functools.wraps(make)(lambda *arguments: cached(repr(arguments), *arguments))

  return decorate


def forget() -> None:
  """Makes everything anew from now on. What was made stays with those who have it."""
  for cached in _made:
    cached.cache_clear()
