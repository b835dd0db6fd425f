"""Values against JSON schemas."""

from __future__ import annotations

import pytest

from ragen_jax.envs.json_schema import describe, fits, resolve

LOOP = {'$defs': {'a': {'$ref': '#/$defs/a'}}, '$ref': '#/$defs/a'}
TREE = {
  '$defs': {'tree': {'anyOf': [{'type': 'integer'}, {'type': 'array', 'items': {'$ref': '#/$defs/tree'}}]}},
  '$ref': '#/$defs/tree',
}
WIDE = {'anyOf': [{'$ref': '#'}, {'$ref': '#'}]}


@pytest.mark.parametrize(
  ('schema', 'good', 'bad'),
  [
    ({'type': 'integer', 'exclusiveMinimum': 1, 'maximum': 3}, [2, 3], [1, 4, 2.0, True, '2', None]),
    ({'type': 'number', 'exclusiveMaximum': 2}, [1.5, 0], [2, float('inf'), float('nan'), False]),
    ({'type': ['string', 'null'], 'maxLength': 2}, ['ab', None], ['abc', 3]),
    ({'const': 1}, [1], [True, 2]),
    ({'enum': [True, 'x']}, [True, 'x'], [1, 'y']),
    ({'type': 'array', 'minItems': 1, 'items': {'type': 'boolean'}}, [[True]], [[], [1], 'x']),
    ({'allOf': [{'type': 'string'}, {'minLength': 2}]}, ['ab'], ['a', 2]),
    ({'type': 'object', 'additionalProperties': {'type': 'integer'}}, [{}, {'x': 1}], [{'x': '1'}, []]),
    ({'properties': {'a': {'type': 'string'}}, 'required': ['a']}, [{'a': 'x', 'b': 1}, 5], [{}, {'a': 1}]),
    (TREE, [3, [1, [2, []]]], ['x', [1, ['x']]]),
    ({}, [1, None], []),
    (False, [], [1]),
  ],
)
def test_fits(schema, good, bad):
  assert all(fits(value, schema) for value in good)
  assert not any(fits(value, schema) for value in bad)


def test_schemas_without_an_end_take_no_time():
  assert resolve(LOOP, LOOP) == {} and fits(3, LOOP)
  assert not fits(3, WIDE)
  deep = 1
  for _ in range(500):
    deep = [deep]
  assert not fits(deep, TREE)


def test_describe():
  assert describe({'type': 'integer'}) == 'whole number'
  assert describe({'anyOf': [{'enum': ['a', 1]}, {'type': 'null'}, {'const': None}]}) == '"a" or 1 or null'
  assert describe({'type': ['string', 'number']}) == 'text or number'
  assert describe({'$ref': '#/x'}, {'x': {'type': 'array'}}) == 'list' and describe({}) == 'value'
