"""Values that processes send to each other, as bytes: plain values and arrays in msgpack.

A reader can only get values of plain types and of the dataclasses that it names; no code runs, as it would with pickle.
What msgpack has no value for is a list whose first item is a tag:

  ["l" | "t" | "s" | "f", items...]   list, tuple, set, frozenset     ["d", [key, value]...]   dict
  ["o", type, fields...]              dataclass                       ["e", type, value]       member of an enum
  ["i", digits]                       number above 64 bits            ["u", bytes]             text that is not Unicode
  ["a" | "n", dtype, shape, bytes]    array, scalar of NumPy          ["x", type, text]        `Foreign`

Worker processes, which should start at once, load this module. So it imports NumPy only where a message has an array.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from ragen_jax.utils.errors import short

_PLAIN = (float, bool, bytes, type(None))
_SEQUENCES = {list: 'l', tuple: 't', set: 's', frozenset: 'f'}
_READERS = {str: str.__str__, int: int.__int__, float: float.__float__, bytes: bytes.__bytes__}
_MAKERS = {tag: kind for kind, tag in _SEQUENCES.items()}
_NUMBERS, _TEXTS = 'biufc', 'US'  # NumPy's kinds of dtypes


class Foreign:
  """Stands for a value that cannot travel.

  Its `repr` is that of the value, in one line of at most 300 characters, and its class has the name of the value's.
  """

  def __init__(self, text: str):
    self._text = text

  def __repr__(self) -> str:
    return self._text


def pack(value: Any, types: Sequence[type] = (), *, describe: bool = False) -> bytes:
  """Writes a value.

  Args:
    value: None, numbers, text, bytes, NumPy arrays and scalars, members of enums, dataclasses, and lists, tuples, sets
      and dicts of these. Of a subclass of a text or a number only the text or the number is sent.
    types: the dataclasses and enums that may occur, in the same order as for `unpack`.
    describe: whether the value is one of foreign code: a part of another type is read as a `Foreign`, and of a subclass
      of a collection or an array, and of a mapping, only the contents are sent.

  Raises:
    TypeError: the value has a part of another type, and `describe` is False.
  """
  return msgpack.packb(_tree(value, {kind: i for i, kind in enumerate(types)}, describe))


def unpack(data: bytes, types: Sequence[type] = ()) -> Any:
  """Reads a value that `pack` wrote, with the same `types`. Arrays are writable copies.

  Raises:
    ValueError, or another Exception: the bytes are not such a message.
  """
  return _value(msgpack.unpackb(data, ext_hook=_refuse), types)


def _tree(value: Any, types: Mapping[type, int], describe: bool) -> Any:
  kind = type(value)
  if kind is str:
    try:
      value.encode()
    except UnicodeEncodeError:  # lone surrogates
      return ['u', value.encode('utf-8', 'surrogatepass')]
    return value
  if kind is int:
    return value if -(2**63) <= value < 2**63 else ['i', hex(value)]  # Python limits the length of decimals
  if kind in _PLAIN:
    return value
  if kind in types and isinstance(value, enum.Enum):
    return ['e', types[kind], value.value]
  if kind in types:
    return ['o', types[kind], *(_tree(getattr(value, f.name), types, describe) for f in dataclasses.fields(kind))]
  if kind in _SEQUENCES:
    return [_SEQUENCES[kind], *(_tree(x, types, describe) for x in value)]
  if kind is dict or (describe and isinstance(value, Mapping)):
    return ['d', *([_tree(k, types, describe), _tree(x, types, describe)] for k, x in value.items())]
  array = _array(value, describe)
  if array is not None:
    return array
  for plain, read in _READERS.items():
    if isinstance(value, plain) and (describe or not isinstance(value, enum.Enum)):
      return _tree(read(value), types, describe)
  if not describe:
    raise TypeError(f'a message between processes cannot hold a {kind.__name__}')
  for plain, tag in _SEQUENCES.items():
    if isinstance(value, plain):
      return [tag, *(_tree(x, types, describe) for x in plain.__iter__(value))]
  return ['x', *(_tree(text, types, describe) for text in (kind.__name__, short(value)))]


def _array(value: Any, describe: bool) -> list[Any] | None:
  """The tree of an array or a scalar of NumPy; None for other values."""
  np = sys.modules.get('numpy')  # where it was not imported, no value is of it
  if np is None or not isinstance(value, np.ndarray | np.generic):
    return None
  if isinstance(value, np.generic):
    return ['n', value.dtype.str, [], value.tobytes()] if value.dtype.kind in _NUMBERS else None
  if type(value) is not np.ndarray and not describe:
    return None
  value = np.asarray(value)  # of a subclass, too
  if value.dtype.kind not in _NUMBERS + _TEXTS:
    return None
  return ['a', value.dtype.str, list(value.shape), value.tobytes()]


def _refuse(code: int, data: bytes) -> Any:
  raise ValueError(f'a message between processes has a value of the unknown type {code}')


def _value(tree: Any, types: Sequence[type]) -> Any:
  if type(tree) in (*_PLAIN, str, int):
    return tree
  if type(tree) is not list:
    raise ValueError(f'a message between processes has a {type(tree).__name__}')
  tag, *rest = tree
  if tag in _MAKERS:
    return _MAKERS[tag](_value(x, types) for x in rest)
  if tag == 'd':
    return {_value(k, types): _value(x, types) for k, x in rest}
  if tag == 'u':
    return rest[0].decode('utf-8', 'surrogatepass')
  if tag == 'i':
    return int(rest[0], 16)
  if tag == 'x':
    name, text = (_value(x, types) for x in rest)
    return type(name, (Foreign,), {})(str(text))
  if tag in ('a', 'n'):
    return _array_of(*rest, is_array=tag == 'a')
  kind = types[rest[0]]
  if tag == 'e':
    return kind(rest[1])
  names = (f.name for f in dataclasses.fields(kind))
  return kind(**{name: _value(x, types) for name, x in zip(names, rest[1:], strict=True)})


def _array_of(name: str, shape: list[int], content: bytes, *, is_array: bool) -> Any:
  import numpy as np

  dtype = np.dtype(name)
  if dtype.kind not in _NUMBERS + _TEXTS:
    raise ValueError(f'a message between processes has an array of {name}')
  array = np.frombuffer(content, dtype).reshape(shape)
  return array.copy() if is_array else array[()]
