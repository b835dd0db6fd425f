"""Rules for single fields of a config.

Each raises a UserError of one line with the field, its value and the allowed values.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from ragen_jax.runs import config_fields
from ragen_jax.utils.errors import UserError, did_you_mean


def get(config: ConfigDict, field: str) -> Any:
  """The value of a field by its dotted name."""
  for name in field.split('.'):
    config = config[name]
  return config


def check(config: ConfigDict, field: str, ok: bool, allowed: str) -> None:
  """Raises UserError unless `ok`; `allowed` describes the allowed values."""
  if not ok:
    raise UserError(f'{field}={get(config, field)!r}: {allowed}')


def fields_of_this_version(config: ConfigDict, where: str = '') -> None:
  """The config has all fields of this version and, outside `envs`, no others; `where` precedes the error.

  What a config file assigns to a misspelt name is a new field, which would have no effect.
  """
  known = [name for name, _ in config_fields.names()]
  present = config_fields.flatten(config.to_dict())
  for field in present:
    if config_fields.role_of(field) is None:
      raise UserError(f'{where}{field}={get(config, field)!r}: {_unknown(field, known)}')
  lacking = [name for name in known if name not in present and not name.endswith('.*')]
  if lacking:
    raise UserError(f'{where}lacks the field {lacking[0]}; begin with configs.default.get_config()')


def _unknown(field: str, known: Sequence[str]) -> str:
  """What is wrong with a field that is not one of `known`, dotted names."""
  if field in config_fields.REPLACED:
    return config_fields.REPLACED[field]
  section, _, name = field.partition('.')
  beside = [x.removeprefix(f'{section}.') for x in known if x.startswith(f'{section}.')]
  at = f'config.{section}'
  if not beside:  # the section does not exist, or it is a field by itself
    at, name, beside = 'config', section, list(dict.fromkeys(x.partition('.')[0] for x in known))
  return f'{at} has no field {name!r}; {did_you_mean(name, beside)}allowed: {", ".join(sorted(beside))}'


def one_of(config: ConfigDict, field: str, allowed: Sequence[str]) -> None:
  """The field is one of `allowed`."""
  check(config, field, get(config, field) in allowed, 'allowed: ' + ', '.join(x or "''" for x in allowed))


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


def path(config: ConfigDict, field: str, *, empty: bool = True) -> None:
  """The field is a path of printable characters that ends in a name; `empty`: or is empty, for none."""
  value = get(config, field)
  check(config, field, isinstance(value, str) and bool(value or empty), 'must be a path')
  check(config, field, value.isprintable(), 'must be a path of printable characters')
  last = os.path.basename(value.rstrip('/'))
  check(
    config, field, not value or last not in ('', '.', '..'), "must be a path that ends in a name, not in '.' or '..'"
  )


def is_address(url: str) -> bool:
  """Whether `url` is an HTTP address without user name, password, query or fragment."""
  try:
    parts = urllib.parse.urlsplit(url)
    plain = url.isascii() and url.isprintable() and ' ' not in url and not {'@', '?', '#'} & set(url)
    return parts.scheme in ('http', 'https') and bool(parts.hostname) and parts.port != 0 and plain
  except ValueError:  # the port is not a number
    return False
