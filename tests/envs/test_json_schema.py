"""Values against JSON schemas."""

from __future__ import annotations

import json

import pytest

from ragen_jax.envs.json_schema import describe, fits, read_json, resolve

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


def test_schemas_that_refer_to_themselves_are_described():
  assert describe({'$ref': '#/$defs/tree'}, TREE) == 'whole number or list'
  assert describe(WIDE, WIDE) == 'value'
  forks = [{'anyOf': [{'$ref': f'#/$defs/{i + 1}'}, {'$ref': f'#/$defs/{i + 1}', 'title': 'x'}]} for i in range(40)]
  assert describe(forks[0], {'$defs': dict(zip(map(str, range(40)), forks, strict=True))}) == 'value'


@pytest.mark.parametrize(
  'schema',
  [
    {'minimum': '0'}, {'maximum': None}, {'minLength': 'x'}, {'maxItems': 'x'}, {'enum': 3}, {'anyOf': 3},
    {'oneOf': {}}, {'allOf': None}, {'type': 3}, {'type': [3]}, {'properties': None}, {'required': 3},
  ],
)  # fmt: skip
def test_keywords_that_are_not_as_json_schema_has_them_exclude_nothing(schema):
  assert all(fits(value, schema) for value in (1, 'a', [1], {'a': 1}, None))
  assert describe(schema) == 'value'


def test_values_that_cannot_be_sent_on_are_no_json():
  for text in ('{"a": [1, "\\u00e9", null, 1e308]}', '3', '[' * 64 + ']' * 64):
    assert read_json(text) == json.loads(text)
  for text in (
    '1e999', '{"a": [-1e999]}', '[NaN]', '"\\ud800"', '{"\\ud800": 1}', '[' * 66 + ']' * 66, '[' * 90_000, '', '[1',
  ):  # fmt: skip
    with pytest.raises(ValueError):
      read_json(text)
