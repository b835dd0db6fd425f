"""Calls with a tag for each argument: what is written is read back, and values have the types of their schema."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.utils.parameter_calls import read_parameters, write_parameters
from ragen_jax.utils.tool_calls import Problem

SCHEMAS = {
  'f': {
    'text': {'type': 'string'},
    'word': {'enum': ['a', '1']},
    'count': {'type': 'integer'},
    'size': {'type': 'number'},
    'flag': {'type': 'boolean'},
    'items': {'type': 'array'},
    'box': {'type': 'object'},
    'name': {'type': ['string', 'null']},
    'maybe': {'anyOf': [{'type': 'boolean'}, {'type': 'null'}]},
    'level': {'enum': [1, 2, None]},
    'free': {},
    'odd': True,
    'refers': {'anyOf': [{'$ref': '#/$defs/Size'}, {'type': 'null'}]},
    'python': {'type': 'dict'},
  }
}


def written(name, value):
  return f'\n<function=f>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n'


@pytest.mark.parametrize(
  ('name', 'value', 'expected'),
  [
    ('text', '5', '5'), ('text', 'null', 'null'), ('text', ' a\n', ' a\n'), ('text', '', ''), ('word', '1', '1'),
    ('text', '</parameter>', '</parameter>'), ('text', 'a</parameter> b', 'a</parameter> b'),
    ('count', '5', 5), ('count', ' 5 ', 5), ('count', 'five', 'five'), ('count', 'NaN', 'NaN'), ('size', '2.50', 2.5),
    ('flag', 'true', True), ('flag', 'True', True), ('flag', 'FALSE', False), ('flag', 'yes', 'yes'),
    ('items', '[1, "a"]', [1, 'a']), ('items', "['a']", "['a']"), ('box', '{"a": {}}', {'a': {}}),
    ('name', 'Ada', 'Ada'), ('name', 'null', None), ('name', 'None', None), ('maybe', 'None', None),
    ('maybe', 'False', False), ('level', '2', 2), ('level', 'null', None),
    # Values of another type.
    ('count', '"5"', '"5"'), ('count', '[1]', '[1]'), ('count', 'true', 'true'), ('count', 'None', 'None'),
    ('count', '2.0', 2.0), ('count', '2.5', '2.5'), ('size', '5', 5), ('flag', '1', '1'), ('items', '{}', '{}'),
    ('box', '[]', '[]'), ('level', '[2]', '[2]'),
    # Parameters whose type is not known.
    ('refers', '5', '5'), ('refers', 'None', None), ('refers', '{"a": 1}', {'a': 1}), ('python', '{"a": 1}', {'a': 1}),
    ('python', '5', '5'),
    ('free', '5', '5'), ('free', 'true', 'true'), ('free', '[1]', [1]), ('other', '{"a": 1}', {'a': 1}),
    ('odd', '1', '1'),
  ],
)  # fmt: skip
def test_values_have_the_types_of_the_schema(name, value, expected):
  function, arguments, problem = read_parameters(written(name, value), SCHEMAS)
  assert (function, problem) == ('f', None) and json.loads(arguments) == {name: expected}
  assert type(json.loads(arguments)[name]) is type(expected)


@pytest.mark.parametrize(
  'schema',
  [
    5, None, [], 'integer', {'type': None}, {'type': 5}, {'type': {}}, {'type': [None, 5]}, {'type': [['integer']]},
    {'anyOf': 5}, {'anyOf': None}, {'anyOf': {'type': 'integer'}}, {'anyOf': ['integer', None, 5]}, {'enum': 5},
    {'enum': None}, {'enum': {'5': 5}}, {'const': None}, {'$ref': '#/$defs/a'}, {'properties': {}},
  ],
)  # fmt: skip
def test_what_is_no_schema_names_no_type(schema):
  for value, expected in (('5', '5'), ('[5]', [5])):
    _, arguments, problem = read_parameters(written('a', value), {'f': {'a': schema}})
    assert problem is None and json.loads(arguments) == {'a': expected}


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('<function=f>\n</function>', ('f', '{}', None)),
    ('<function=f></function>', ('f', '{}', None)),
    ('<function=f><parameter=a>b</parameter></function>', ('f', '{"a": "b"}', None)),
    ('<function=f><parameter=a>b</parameter><parameter=a>c</parameter></function>', ('f', '{"a": "c"}', None)),
    ('', ('', '', Problem.INVALID_PARAMETERS)),
    ('{"name": "f", "arguments": {}}', ('', '{"name": "f", "arguments": {}}', Problem.INVALID_PARAMETERS)),
    ('<function= >\n</function>', ('', '<function= >\n</function>', Problem.MISSING_NAME)),
    ('<function=f>\n', ('f', '', Problem.INVALID_PARAMETERS)),
    ('<function=f>\n<parameter=a>\nb\n', ('f', '<parameter=a>\nb', Problem.INVALID_PARAMETERS)),
    ('<function=f>\nb\n</function>', ('f', 'b\n</function>', Problem.INVALID_PARAMETERS)),
    ('<function=f>\n</function>\nso', ('f', '</function>\nso', Problem.INVALID_PARAMETERS)),
    ('<function=f>\n<parameter=a>\nb\n</function>', ('f', '<parameter=a>\nb\n</function>', Problem.INVALID_PARAMETERS)),
  ],
)
def test_calls_that_are_read_or_not(text, expected):
  assert read_parameters(text, {}) == expected


@pytest.mark.parametrize(('as_json', 'values'), [(True, 'true null -0.5'), (False, 'True None -0.5')])
def test_scalars_are_written_as_json_or_as_python_writes_them(as_json, values):
  text = write_parameters('f', '{"a": true, "b": null, "c": -0.5, "d": [true, null, "é"], "e": "x"}', as_json=as_json)
  values = [*values.split(), '[true, null, "é"]', 'x']
  parameters = ''.join(f'<parameter={name}>\n{x}\n</parameter>\n' for name, x in zip('abcde', values, strict=True))
  assert text == f'<function=f>\n{parameters}</function>'
  assert write_parameters('f', 'oh', as_json=as_json) == '<function=f>\noh\n</function>'
  assert write_parameters('f', '[1]', as_json=as_json) == '<function=f>\n[1]\n</function>'


def test_arguments_that_are_nested_too_deeply_stay_as_they_are():
  for depth in (*range(900, 1000), 100_000):  # the limits of reading and of writing differ
    arguments = f'{{"a": {"[" * depth}{"]" * depth}}}'
    assert arguments[1:-1].removeprefix('"a": ') in write_parameters('f', arguments, as_json=True)


_TEXT = st.text(max_size=6) | st.sampled_from(
  ['\n', '\n\n', ' ', '<parameter=', '</function>', '</parameter>', '\u2028']
)
_ARGUMENTS = {
  'text': st.lists(_TEXT, max_size=4).map(''.join).filter(lambda x: '</parameter>' not in x),
  'count': st.integers(),
  'size': st.floats(allow_nan=False, allow_infinity=False),
  'flag': st.booleans(),
  'items': st.lists(st.none() | st.booleans() | _TEXT, max_size=3).filter(lambda x: '</parameter>' not in str(x)),
  'name': st.none() | st.text(min_size=9, max_size=20),
  'maybe': st.none() | st.booleans(),
}


@settings(deadline=None, max_examples=200)
@given(st.fixed_dictionaries({}, optional=_ARGUMENTS), st.booleans())
def test_what_is_written_is_read_back(arguments, as_json):
  text = write_parameters('f', json.dumps(arguments), as_json=as_json)
  name, read, problem = read_parameters(f'\n{text}\n', SCHEMAS)
  assert (name, problem) == ('f', None) and list(json.loads(read).items()) == list(arguments.items())
