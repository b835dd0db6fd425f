"""Values that processes of a run send to each other, as bytes: plain values and arrays in msgpack, as Flax writes it.

A reader can only get values of plain types and of the dataclasses that it names; no code runs, as it would with pickle.
What msgpack has no value for is a list whose first item is a tag:

  ["l" | "t" | "s" | "f", items...]   list, tuple, set, frozenset     ["d", [key, value]...]   dict
  ["o", type, fields...]              dataclass                       ["e", type, value]       member of an enum
  ["i", digits]                       number above 64 bits            ["u", bytes]             text that is not Unicode
  ["a", dtype, shape, bytes]          array of text
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax import serialization

_PLAIN = (float, bool, bytes, type(None))
_SEQUENCES = {list: 'l', tuple: 't', set: 's', frozenset: 'f'}
_MAKERS = {tag: kind for kind, tag in _SEQUENCES.items()}
_NUMBERS, _TEXTS = 'biufc', 'US'  # NumPy's kinds of dtypes


def pack(value: Any, types: Sequence[type] = ()) -> bytes:
  """Writes a value.

  Args:
    value: None, numbers, text, bytes, NumPy arrays and scalars, members of enums, dataclasses, and lists, tuples, sets
      and dicts of these. Of a subclass of a text or a number only the text or the number is sent.
    types: the dataclasses and enums that may occur, in the same order as for `unpack`.

  Raises:
    TypeError: the value has a part of another type.
  """
  return serialization.msgpack_serialize(_tree(value, {kind: i for i, kind in enumerate(types)}), in_place=True)


def unpack(data: bytes, types: Sequence[type] = ()) -> Any:
  """Reads a value that `pack` wrote, with the same `types`. Arrays are writable copies."""
  return _value(serialization.msgpack_restore(data), types)


def _tree(value: Any, types: Mapping[type, int]) -> Any:
  kind = type(value)
  if kind is str:
    try:
      value.encode()
    except UnicodeEncodeError:  # lone surrogates
      return ['u', value.encode('utf-8', 'surrogatepass')]
    return value
  if kind is int:
    return value if -(2**63) <= value < 2**63 else ['i', str(value)]
  if kind in _PLAIN:
    return value
  if kind in _SEQUENCES:
    return [_SEQUENCES[kind], *(_tree(x, types) for x in value)]
  if kind is dict:
    return ['d', *([_tree(k, types), _tree(x, types)] for k, x in value.items())]
  if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMBERS and value.dtype.isnative:
    return value
  if kind is np.ndarray and value.dtype.kind in _NUMBERS + _TEXTS:
    return ['a', value.dtype.str, list(value.shape), value.tobytes()]
  if kind in types and isinstance(value, enum.Enum):
    return ['e', types[kind], value.value]
  if kind in types:
    return ['o', types[kind], *(_tree(getattr(value, f.name), types) for f in dataclasses.fields(kind))]
  for plain in (str, int, float):
    if isinstance(value, plain) and not isinstance(value, enum.Enum):
      return _tree(plain(value), types)
  raise TypeError(f'a message between processes cannot hold a {kind.__name__}')


def _value(tree: Any, types: Sequence[type]) -> Any:
  if type(tree) is not list:
    return tree.copy() if type(tree) is np.ndarray else tree
  tag, *rest = tree
  if tag in _MAKERS:
    return _MAKERS[tag](_value(x, types) for x in rest)
  if tag == 'd':
    return {_value(k, types): _value(x, types) for k, x in rest}
  if tag == 'u':
    return rest[0].decode('utf-8', 'surrogatepass')
  if tag == 'i':
    return int(rest[0])
  if tag == 'a':
    dtype, shape, content = rest
    return np.frombuffer(content, np.dtype(dtype)).reshape(shape).copy()
  kind = types[rest[0]]
  if tag == 'e':
    return kind(rest[1])
  names = (f.name for f in dataclasses.fields(kind))
  return kind(**{name: _value(x, types) for name, x in zip(names, rest[1:], strict=True)})
