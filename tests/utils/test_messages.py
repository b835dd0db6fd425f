"""Messages between processes: what is read is what was written, in value, type and every bit."""

from __future__ import annotations

import dataclasses
import enum
import math
import pickle

import numpy as np
import pytest

from ragen_jax.utils.messages import pack, unpack


class Colour(enum.IntEnum):
  RED = 1
  BLUE = 2


@dataclasses.dataclass(frozen=True)
class Point:
  x: float
  name: str


class Text(str):
  pass


def there_and_back(value, types=()):
  return unpack(pack(value, types), types)


@pytest.mark.parametrize(
  'value',
  [
    None, True, False, 0, -(2**70), 0.1 + 0.2, -0.0, math.inf, '', 'naïve \ud800 \x00', b'', b'\x00\xff', [], (), {},
    [1, 'a', [None]], (1, (2.5, 'l')), ['l', 1], {'a': (1,), 2: [b'x']}, {(1, 2): 'key'}, {b'a'},
    frozenset({1, 2}), [True, 1],
  ],
)  # fmt: skip
def test_plain_values_keep_their_types(value):
  back = there_and_back(value)
  assert back == value and repr(back) == repr(value)


def test_nan_is_a_number_too():
  assert math.isnan(there_and_back(math.nan))


@pytest.mark.parametrize(
  'array',
  [
    np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 3), np.float32), np.asarray([np.nan, -0.0, np.inf]),
    np.asarray(True), np.arange(12, dtype=np.uint8).reshape(3, 4).T, np.asarray(['left', 'up']), np.float32(1) / 3,
    np.int64(-1), np.bool_(True), np.arange(3, dtype='>i4'),
  ],
)  # fmt: skip
def test_arrays_keep_every_bit_and_may_be_changed(array):
  back = there_and_back([array, b'between', array])
  assert back[1] == b'between'
  for found in (back[0], back[2]):
    assert type(found) is type(array) and found.dtype == array.dtype and found.shape == array.shape
    assert found.tobytes() == array.tobytes()
  if array.ndim and array.size:
    back[0][...] = back[0][::-1]
    assert back[2].tobytes() == array.tobytes()


def test_dataclasses_and_enums_are_read_as_the_types_that_the_reader_names():
  value = {'points': (Point(1.5, 'a'), Point(math.inf, 'b')), 'colour': Colour.BLUE}
  back = there_and_back(value, (Point, Colour))
  assert back == value and type(back['colour']) is Colour


def test_of_a_subclass_of_text_the_text_is_sent():
  assert type(there_and_back(Text('a'))) is str


@pytest.mark.parametrize('value', [Point(1.0, 'a'), Colour.RED, object(), [lambda: 0], np.asarray([object()]), 1j])
def test_other_types_are_refused(value):
  with pytest.raises(TypeError, match='cannot hold a'):
    pack(value)


def test_a_message_that_is_a_pickle_runs_no_code():
  class Bomb:
    def __reduce__(self):
      return exec, ('raise SystemExit',)

  with pytest.raises(ValueError):
    unpack(pickle.dumps(Bomb()))
