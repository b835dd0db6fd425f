"""Values that processes of a run send to each other, as bytes: a JSON text, followed by the bytes of its arrays.

A reader can only get values of plain types and of the dataclasses that it names; no code runs, as it would with pickle.

  length of the JSON text, u64 little-endian │ JSON text, UTF-8 │ contents of arrays and bytes

Numbers, texts, booleans and None are JSON values. Others are lists whose first item is a tag:

  ["l" | "t" | "s" | "f", items...]   list, tuple, set, frozenset     ["d", [key, value]...]       dict
  ["o", type, fields...]              dataclass                       ["e", type, value]           member of an enum
  ["a", dtype, shape, offset, whether it is a scalar]    array        ["b", offset, length]        bytes
"""

from __future__ import annotations

import dataclasses
import enum
import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

_LENGTH = struct.Struct('<Q')
_PLAIN = (int, float, str, bool, type(None))
_SEQUENCES = {list: 'l', tuple: 't', set: 's', frozenset: 'f'}
_MAKERS = {tag: kind for kind, tag in _SEQUENCES.items()}
_KINDS = 'biufcUS'  # NumPy's kinds of dtypes that bytes describe completely


def pack(value: Any, types: Sequence[type] = ()) -> bytes:
  """Writes a value.

  Args:
    value: None, numbers, text, bytes, NumPy arrays and scalars, members of enums, dataclasses, and lists, tuples, sets
      and dicts of these. Of a subclass of a text or a number only the text or the number is sent.
    types: the dataclasses and enums that may occur, in the same order as for `unpack`.

  Raises:
    TypeError: the value has a part of another type.
  """
  return _Packer(types).pack(value)


def unpack(data: bytes, types: Sequence[type] = ()) -> Any:
  """Reads a value that `pack` wrote, with the same `types`. Arrays are writable copies."""
  (length,) = _LENGTH.unpack_from(data)
  start = _LENGTH.size + length
  return _unpack(json.loads(data[_LENGTH.size : start]), data[start:], types)


class _Packer:
  """The state of one `pack`."""

  def __init__(self, types: Sequence[type]):
    self._types = {kind: number for number, kind in enumerate(types)}
    self._fields = {
      kind: [f.name for f in dataclasses.fields(kind)] for kind in types if dataclasses.is_dataclass(kind)
    }
    self._parts: list[bytes] = []
    self._size = 0

  def pack(self, value: Any) -> bytes:
    text = json.dumps(self._tree(value), separators=(',', ':')).encode()
    return b''.join([_LENGTH.pack(len(text)), text, *self._parts])

  def _tree(self, value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
      return value
    if kind in _SEQUENCES:
      items = list(value)
      return [_SEQUENCES[kind], *(items if all(type(x) in _PLAIN for x in items) else map(self._tree, items))]
    if kind is dict:
      return ['d', *([self._tree(k), self._tree(x)] for k, x in value.items())]
    if kind is bytes:
      return ['b', self._append(value), len(value)]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _KINDS:
      return ['a', value.dtype.str, list(value.shape), self._append(value.tobytes()), isinstance(value, np.generic)]
    if kind in self._fields:
      return ['o', self._types[kind], *(self._tree(getattr(value, name)) for name in self._fields[kind])]
    if kind in self._types and isinstance(value, enum.Enum):
      return ['e', self._types[kind], value.value]
    for plain in (str, int, float):
      if isinstance(value, plain) and not isinstance(value, enum.Enum):
        return plain(value)
    raise TypeError(f'a message between processes cannot hold a {kind.__name__}')

  def _append(self, content: bytes) -> int:
    """Adds bytes to the contents; their offset."""
    offset, self._size = self._size, self._size + len(content)
    self._parts.append(content)
    return offset


def _unpack(tree: Any, contents: bytes, types: Sequence[type]) -> Any:
  if type(tree) is not list:
    return tree
  tag, *rest = tree
  if tag in _MAKERS:
    return _MAKERS[tag](_unpack(x, contents, types) if type(x) is list else x for x in rest)
  if tag == 'd':
    return {_unpack(k, contents, types): _unpack(x, contents, types) for k, x in rest}
  if tag == 'b':
    offset, length = rest
    return contents[offset : offset + length]
  if tag == 'a':
    dtype, shape, offset, scalar = rest
    count = int(np.prod(shape, dtype=np.int64))
    array = np.frombuffer(contents, np.dtype(dtype), count, offset).reshape(shape).copy()
    return array[()] if scalar else array
  kind = types[rest[0]]
  if tag == 'e':
    return kind(rest[1])
  names = (f.name for f in dataclasses.fields(kind))
  return kind(**{name: _unpack(x, contents, types) for name, x in zip(names, rest[1:], strict=True)})
