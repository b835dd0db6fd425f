"""Values from JSON against a JSON schema, and the values of a schema in words.

Only what schemas of arguments and actions use is read: types, choices, bounds, properties, items, alternatives and
references into the schema itself. Other keywords, such as `pattern` and `format`, exclude nothing, nor do keywords
whose values are not as JSON schema defines them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ragen_jax.envs.options import is_integer, is_number

# How usages and messages write the types of JSON.
_WORDS = {
  'string': 'text',
  'integer': 'whole number',
  'number': 'number',
  'boolean': 'true or false',
  'array': 'list',
  'object': 'object',
  'null': 'null',
}
_MOST_STEPS = 10_000  # of one check; schemas may refer to themselves
_DEEPEST = 64
_MOST_NESTED = 3  # alternatives of alternatives that are put in words


def read_json(text: str) -> Any:
  """The value that a text writes, of which every part can be sent on as JSON.

  Raises ValueError also for numbers beyond the range of floats, NaN, halves of surrogate pairs, and values that are
  nested more than 64 deep: clients and servers lose their connection over these.
  """
  try:
    value = json.loads(text, parse_constant=_no_constant)
  except RecursionError as e:
    raise ValueError('the value is nested too deep') from e
  layer = [value]
  for _ in range(_DEEPEST + 1):
    if not layer:
      return value
    parts = []
    for part in layer:
      if isinstance(part, str):
        part.encode()
      elif isinstance(part, float) and not math.isfinite(part):
        raise ValueError('a number is beyond the range of floats')
      elif isinstance(part, dict):
        parts += [*part, *part.values()]
      elif isinstance(part, list):
        parts += part
    layer = parts
  raise ValueError('the value is nested too deep')


def _no_constant(name: str) -> None:
  raise ValueError(f'{name} is no JSON')


def describe(schema: Any, root: Any = None) -> str:
  """The values of a schema in words, such as 'whole number' or '"a" or "b"'; references are looked up in `root`.

  Alternatives that are nested too deep, as in schemas that refer to themselves, are a 'value'.
  """
  return ' or '.join(dict.fromkeys(_words_of(schema, root, 0))) or 'value'


def _words_of(schema: Any, root: Any, nested: int) -> list[str]:
  schema = resolve(schema, root)
  choices = _list(schema, 'enum') or ([schema['const']] if 'const' in schema else [])
  if choices:
    return list(map(json.dumps, choices))
  alternatives = _list(schema, 'anyOf') or _list(schema, 'oneOf')
  if alternatives is None:
    return [_WORDS.get(kind, 'value') if isinstance(kind, str) else 'value' for kind in _kinds(schema) or ()]
  if nested == _MOST_NESTED:
    return ['value']
  parts = [part for part in alternatives[:_DEEPEST] if part != schema]
  return [words for part in parts for words in _words_of(part, root, nested + 1) or ['value']]


def resolve(schema: Any, root: Any = None) -> Mapping[str, Any]:
  """The schema that a reference such as {'$ref': '#/$defs/Move'} stands for; {}, which all values fit, if unknown."""
  for _ in range(_DEEPEST):
    if not isinstance(schema, Mapping):
      return {}
    if '$ref' not in schema:
      return schema
    found = root
    for name in str(schema['$ref']).removeprefix('#').split('/')[1:]:
      found = found.get(name) if isinstance(found, Mapping) else None
    schema = found
  return {}


def fits(value: Any, schema: Any, root: Any = None) -> bool:
  """Whether a value from JSON fits a schema; references are looked up in `root`, by default the schema.

  False also if an answer would take thousands of steps.
  """
  try:
    return _Check(schema if root is None else root).fits(value, schema, 0)
  except _TooLong:
    return False


class _TooLong(Exception):
  pass


class _Check:
  """One check, whose steps are counted."""

  def __init__(self, root: Any):
    self._root, self._steps = root, 0

  def fits(self, value: Any, schema: Any, depth: int) -> bool:
    self._steps += 1
    if self._steps > _MOST_STEPS or depth > _DEEPEST:
      raise _TooLong
    if schema is False:
      return False
    schema = resolve(schema, self._root)
    if 'const' in schema and not _equal(value, schema['const']):
      return False
    choices, kinds = _list(schema, 'enum'), _kinds(schema)
    if choices is not None and not any(_equal(value, one) for one in choices):
      return False
    if kinds is not None and not any(_has_type(value, kind) for kind in kinds):
      return False
    if not all(self.fits(value, part, depth + 1) for part in _list(schema, 'allOf') or ()):
      return False
    for key in ('anyOf', 'oneOf'):
      parts = _list(schema, key)
      if parts is not None and not any(self.fits(value, part, depth + 1) for part in parts):
        return False
    return _within(value, schema) and self._parts_fit(value, schema, depth)

  def _parts_fit(self, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    """Whether the fields of an object or the items of a list fit."""
    if isinstance(value, list):
      return 'items' not in schema or all(self.fits(item, schema['items'], depth + 1) for item in value)
    if not isinstance(value, dict):
      return True
    known, other = schema.get('properties'), schema.get('additionalProperties', True)
    known = known if isinstance(known, Mapping) else {}
    if any(name not in value for name in _list(schema, 'required') or () if isinstance(name, str)):
      return False
    return all(self.fits(x, known.get(name, other), depth + 1) for name, x in value.items())


def _list(schema: Mapping[str, Any], key: str) -> list[Any] | None:
  """The list of a keyword; None if there is none."""
  value = schema.get(key)
  return list(value) if isinstance(value, list | tuple) else None


def _kinds(schema: Mapping[str, Any]) -> list[Any] | None:
  """The types of a schema; None if it names none."""
  kind = schema.get('type')
  return [kind] if isinstance(kind, str) else _list(schema, 'type')


def _equal(one: Any, other: Any) -> bool:
  """Equality of JSON, where true is not 1."""
  return one == other and isinstance(one, bool) == isinstance(other, bool)


def _has_type(value: Any, kind: Any) -> bool:
  if kind in ('integer', 'number'):
    return is_integer(value) or (kind == 'number' and is_number(value) and math.isfinite(value))
  known = {'string': str, 'boolean': bool, 'array': list, 'object': dict, 'null': type(None)}
  return not isinstance(kind, str) or kind not in known or isinstance(value, known[kind])


def _within(value: Any, schema: Mapping[str, Any]) -> bool:
  """Whether the bounds of numbers and of lengths hold."""

  def bound(key: str, default: float) -> Any:
    return schema[key] if is_number(schema.get(key)) else default

  if is_number(value):
    low, high = bound('minimum', -math.inf), bound('maximum', math.inf)
    above, below = bound('exclusiveMinimum', -math.inf), bound('exclusiveMaximum', math.inf)
    return low <= value <= high and (value > above or above == -math.inf) and (value < below or below == math.inf)
  for kind, name in ((str, 'Length'), (list, 'Items')):
    if isinstance(value, kind):
      return bound(f'min{name}', 0) <= len(value) <= bound(f'max{name}', math.inf)
  return True
