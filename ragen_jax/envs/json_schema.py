"""Values from JSON against a JSON schema, and the values of a schema in words.

Only what schemas of arguments and actions use is read: types, choices, bounds, properties, items, alternatives and
references into the schema itself. Other keywords, such as `pattern` and `format`, exclude nothing.
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


def describe(schema: Any, root: Any = None) -> str:
  """The values of a schema in words, such as 'whole number' or '"a" or "b"'; references are looked up in `root`."""
  schema = resolve(schema, root)
  if 'enum' in schema or 'const' in schema:
    return ' or '.join(map(json.dumps, schema.get('enum', [schema.get('const')])))
  if 'anyOf' in schema or 'oneOf' in schema:
    parts = [describe(part, root) for part in schema.get('anyOf', schema.get('oneOf'))[:_DEEPEST] if part != schema]
    return ' or '.join(dict.fromkeys(parts))
  kinds = schema.get('type', ())
  return ' or '.join(_WORDS.get(kind, 'value') for kind in ([kinds] if isinstance(kinds, str) else kinds)) or 'value'


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
    if 'enum' in schema and not any(_equal(value, one) for one in schema['enum']):
      return False
    kinds = schema.get('type')
    if kinds is not None and not any(_has_type(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
      return False
    if not all(self.fits(value, part, depth + 1) for part in schema.get('allOf', ())):
      return False
    for key in ('anyOf', 'oneOf'):
      if key in schema and not any(self.fits(value, part, depth + 1) for part in schema[key]):
        return False
    return _within(value, schema) and self._parts_fit(value, schema, depth)

  def _parts_fit(self, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    """Whether the fields of an object or the items of a list fit."""
    if isinstance(value, list):
      return 'items' not in schema or all(self.fits(item, schema['items'], depth + 1) for item in value)
    if not isinstance(value, dict):
      return True
    known, other = schema.get('properties', {}), schema.get('additionalProperties', True)
    if any(name not in value for name in schema.get('required', ())):
      return False
    return all(self.fits(x, known.get(name, other), depth + 1) for name, x in value.items())


def _equal(one: Any, other: Any) -> bool:
  """Equality of JSON, where true is not 1."""
  return one == other and isinstance(one, bool) == isinstance(other, bool)


def _has_type(value: Any, kind: Any) -> bool:
  if kind in ('integer', 'number'):
    return is_integer(value) or (kind == 'number' and is_number(value) and math.isfinite(value))
  known = {'string': str, 'boolean': bool, 'array': list, 'object': dict, 'null': type(None)}
  return kind not in known or isinstance(value, known[kind])


def _within(value: Any, schema: Mapping[str, Any]) -> bool:
  """Whether the bounds of numbers and of lengths hold."""
  if is_number(value):
    low, high = schema.get('minimum', -math.inf), schema.get('maximum', math.inf)
    above, below = schema.get('exclusiveMinimum', -math.inf), schema.get('exclusiveMaximum', math.inf)
    return low <= value <= high and (value > above or above == -math.inf) and (value < below or below == math.inf)
  for kind, name in ((str, 'Length'), (list, 'Items')):
    if isinstance(value, kind):
      return schema.get(f'min{name}', 0) <= len(value) <= schema.get(f'max{name}', math.inf)
  return True
