"""Request bodies: JSON and typed fields."""

from __future__ import annotations

import json

import pytest

from ragen_jax.serving.errors import ApiError
from ragen_jax.serving.wire.body import Body, read_json
from ragen_jax.serving.wire.fields import Field, Treatment

FIELDS = (
  Field('x', Treatment.HONOUR, ''),
  Field('y', Treatment.LENIENT, ''),
  Field('skipped', Treatment.IGNORE, ''),
  Field('penalty', Treatment.REFUSE, 'why'),
  Field('best_of', Treatment.REFUSE, 'use n', (1,)),
)


def _body(value):
  return Body({'x': value}, FIELDS)


@pytest.mark.parametrize(
  'raw',
  [b'', b'[]', b'3', b'{', b'\xff', b'{"a": NaN}', b'{"a": ' + b'9' * 5000 + b'}', b'[' * 10**5, b'{"a":' * 10**5],
)
def test_what_is_no_json_object_is_refused(raw):
  with pytest.raises(ApiError) as e:
    read_json(raw, 10**6)
  assert (e.value.status, e.value.code) == (400, 'invalid_json')
  assert '\n' not in e.value.message


def test_large_and_deep_bodies_are_refused():
  assert read_json(b'{"a": 1}', 8) == {'a': 1}
  with pytest.raises(ApiError) as e:
    read_json(b'{"a": 1} ', 8)
  assert e.value.status == 413
  nested = {}
  for _ in range(99):
    nested = {'a': nested}
  assert read_json(json.dumps(nested).encode(), 10**6) == nested
  for deeper in ({'a': nested}, {'a': [], 'b': [1, nested['a'], nested]}):
    with pytest.raises(ApiError, match='levels deep'):
      read_json(json.dumps(deeper).encode(), 10**6)


def test_lone_surrogates_are_replaced():
  raw = rb'{"k\udc00": ["a\ud800", {"b": "\ud83d\ude42 \\ud800"}, 1]}'
  assert read_json(raw, 1000) == {'k\ufffd': ['a\ufffd', {'b': '🙂 \\ud800'}, 1]}


def test_refused_fields_may_have_values_without_an_effect():
  for value in (None, 0, 0.0, {}):
    Body({'penalty': value, 'best_of': value, 'skipped': 7, 'unknown': 8}, FIELDS)
  Body({'best_of': 1}, FIELDS)
  for name, value, message in (
    ('penalty', 0.5, 'penalty=0.5: must be null, false, 0 or empty; why'),
    ('best_of', 2, 'best_of=2: must be null, false, 0, empty or 1; use n'),
  ):
    with pytest.raises(ApiError) as e:
      Body({name: value}, FIELDS)
    assert (e.value.param, e.value.message) == (name, message)


def test_fields_are_read_by_their_type():
  assert _body(None).boolean('x', True) is True
  assert _body(False).boolean('x', True) is False
  assert _body(None).integer('x', 1, 9) is None
  assert [_body(v).integer('x', 1, 9) for v in (1, 9, 4.0)] == [1, 9, 4]
  assert [_body(v).number('x', 0, 1) for v in (0, 1, 0.5, None)] == [0, 1, 0.5, None]
  assert [_body(v).string('x') for v in ('a', '', None)] == ['a', '', '']
  assert [_body(v).mapping('x') for v in ({'a': 1}, None)] == [{'a': 1}, {}]
  assert [_body(v).items('x', 2) for v in ([1, 2], None)] == [[1, 2], []]


@pytest.mark.parametrize(
  'read',
  [
    lambda: _body(1).boolean('x', True),
    lambda: _body('true').boolean('x', True),
    *(lambda v=v: _body(v).integer('x', 1, 9) for v in (0, 10, 1.5, '1', True, [1], 10**400, float('inf'))),
    *(lambda v=v: _body(v).number('x', 0, 1) for v in (-0.1, 1.1, '1', True, 10**400, float('inf'))),
    lambda: _body(0).number('x', 0, 1, above=True),
    lambda: _body(1).string('x'),
    lambda: _body([]).mapping('x'),
    lambda: _body({}).items('x', 2),
    lambda: _body([1, 2, 3]).items('x', 2),
  ],
)
def test_wrong_values_name_the_field(read):
  with pytest.raises(ApiError) as e:
    read()
  assert e.value.param == 'x'
  assert 'must be' in e.value.message


def test_only_fields_that_are_honoured_are_read():
  body = _body(1)
  assert body.unread == {'x', 'y'}
  body.value('x')
  assert body.unread == {'y'}
  for name in ('skipped', 'penalty', 'unknown'):
    with pytest.raises(KeyError):
      body.value(name)
