"""Reading single fields of a `config.json`."""

from __future__ import annotations

import math
from typing import Any

from ragen_jax.utils.errors import UserError


def unsupported(raw: dict[str, Any], field: str, allowed: str, where: str) -> UserError:
  """The error for a field with a value that is not supported."""
  return UserError(f'{where}: {field}={raw.get(field)!r} is not supported; {allowed}')


def integer(raw: dict[str, Any], field: str, where: str) -> int:
  """A positive integer.

  Raises:
    UserError: the field is missing or is something else.
  """
  value = raw.get(field)
  if isinstance(value, bool) or not isinstance(value, int) or value < 1:
    raise UserError(f'{where}: {field}={value!r} must be a positive integer')
  return value


def number(raw: dict[str, Any], field: str, default: float, where: str) -> float:
  """A positive number; `default` if the field is missing.

  Raises:
    UserError: the field is something else.
  """
  value = raw.get(field, default)
  if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
    raise UserError(f'{where}: {field}={value!r} must be a positive number')
  return float(value)
