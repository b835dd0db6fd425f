"""Rules for single fields of a config.

Each raises a UserError of one line with the field, its value and the allowed values.
"""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from ragen_jax.runs.config_fields import REPLACED
from ragen_jax.utils.errors import UserError

# The range of float32.
_LARGEST, _SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


def get(config: ConfigDict, field: str) -> Any:
  """The value of a field by its dotted name."""
  for name in field.split('.'):
    config = config[name]
  return config


def check(config: ConfigDict, field: str, ok: bool, allowed: str) -> None:
  """Raises UserError unless `ok`; `allowed` describes the allowed values."""
  if not ok:
    raise UserError(f'{field}={get(config, field)!r}: {allowed}')


def not_replaced(config: ConfigDict) -> None:
  """The config sets no field of an earlier version that has another name now."""
  for field, now in REPLACED.items():
    section, _, name = field.rpartition('.')
    if name in get(config, section):
      raise UserError(f'{field}={get(config, field)!r}: {now}')


def plain_numbers(config: ConfigDict) -> None:
  """Every number of the config is finite and representable in float32 or int32, the types of the compiled programs.

  Two kinds of fields are not checked: options that environments outside JAX pass to foreign code
  (`envs.TAG.kwargs.NAME`), and seeds of levels, which have their own range.
  """
  for field, value in _leaves(config):
    for x in value if isinstance(value, tuple | list) else (value,):
      if isinstance(x, float):
        check(config, field, math.isfinite(x), 'must be a finite number')
        check(config, field, abs(x) <= _LARGEST, f'must be at most {_LARGEST:.2g} in magnitude, the range of float32')
        check(
          config, field, x == 0 or abs(x) >= _SMALLEST, f'must be 0 or at least {_SMALLEST:.2g}; float32 rounds it to 0'
        )
      elif isinstance(x, int) and not field.endswith('.first_level'):
        check(config, field, abs(x) < 2**31, f'must be at most {2**31 - 1} in magnitude')


def _leaves(config: ConfigDict, prefix: str = '') -> Iterator[tuple[str, Any]]:
  for name, value in config.items():
    if not isinstance(value, ConfigDict):
      yield f'{prefix}{name}', value
    elif not (prefix.startswith('envs.') and prefix.count('.') == 2):
      yield from _leaves(value, f'{prefix}{name}.')


def one_of(config: ConfigDict, field: str, allowed: Sequence[str]) -> None:
  """The field is one of `allowed`."""
  check(config, field, get(config, field) in allowed, 'allowed: ' + ', '.join(allowed))


def at_least(config: ConfigDict, least: float, *fields: str) -> None:
  """Each field is at least `least`."""
  for field in fields:
    check(config, field, get(config, field) >= least, f'must be at least {least}')


def above(config: ConfigDict, bound: float, *fields: str) -> None:
  """Each field is above `bound`."""
  for field in fields:
    check(config, field, get(config, field) > bound, f'must be above {bound}')


def fraction(config: ConfigDict, *fields: str) -> None:
  """Each field is between 0 and 1, both included."""
  for field in fields:
    check(config, field, 0 <= get(config, field) <= 1, 'must be between 0 and 1')


def below_one(config: ConfigDict, *fields: str) -> None:
  """Each field is at least 0 and below 1."""
  for field in fields:
    check(config, field, 0 <= get(config, field) < 1, 'must be at least 0 and below 1')


def positive_fraction(config: ConfigDict, *fields: str) -> None:
  """Each field is above 0 and at most 1."""
  for field in fields:
    check(config, field, 0 < get(config, field) <= 1, 'must be above 0 and at most 1')


def is_address(url: str) -> bool:
  """Whether `url` is an HTTP address without user name, password, query or fragment."""
  try:
    parts = urllib.parse.urlsplit(url)
    plain = url.isascii() and url.isprintable() and ' ' not in url and not {'@', '?', '#'} & set(url)
    return parts.scheme in ('http', 'https') and bool(parts.hostname) and parts.port != 0 and plain
  except ValueError:  # the port is not a number
    return False
