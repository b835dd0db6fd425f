"""Equality of mathematical expressions by the package math-verify, for a process of its own.

The package parses with sympy, which can take for ever or all of the memory, and its own time limit works in a main
thread only. `utils.workers` runs this module in a child process, so it imports nothing of the project and no JAX.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from typing import Any

PACKAGE = 'math_verify'
_WRITTEN = re.compile(r'(?<!\\)\$\$?(.+?)(?<!\\)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]', re.DOTALL)


def is_installed() -> bool:
  """Whether the package can be imported."""
  return importlib.util.find_spec(PACKAGE) is not None


def expression_of(answer: str) -> tuple[str, str] | None:
  """The one expression that stands between dollars, or other delimiters of LaTeX; the whole text without such.

  Returns:
    (expression, text around it); None if there are several expressions, because a verifier may not choose the answer
    among them; or if there is none.
  """
  found = list(_WRITTEN.finditer(answer))
  if len(found) > 1:
    return None
  text, around = answer, ''
  for match in found:
    text, around = next(filter(None, match.groups())), f'{answer[: match.start()]} {answer[match.end() :]}'
  text = text.strip().removesuffix('.').strip()
  return None if not text or re.search(r'(?<!\\)\$', text) else (text, around)


def make_checker() -> MathChecker:
  """The object of a worker."""
  return MathChecker()


class MathChecker:
  """Compares expressions. The package's time limits are off: whoever started the process ends it."""

  def __init__(self):
    import math_verify  # an optional package

    self._package = math_verify
    # It warns with each call that its limits are off.
    logging.getLogger(PACKAGE).setLevel(logging.ERROR)

  def _parse(self, text: str) -> list[Any]:
    return self._package.parse(f'${text}$', parsing_timeout=None)

  def can_read(self, gold: str) -> bool:
    """Whether the package finds an expression in a gold."""
    return bool(self._parse(gold))

  def is_equal(self, gold: str, answer: str) -> bool | None:
    """Whether an answer equals a gold; None if the package finds no expression in the gold."""
    parsed = self._parse(gold)
    if not parsed:
      return None
    expression = self._parse(answer)
    return bool(expression) and bool(self._package.verify(parsed, expression, timeout_seconds=None))
