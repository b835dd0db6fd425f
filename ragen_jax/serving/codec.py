"""Calls as rows of the store: numbers keep their bits, and a checksum detects a row that was damaged on disk."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ragen_jax.serving.types import Finish, Generated, SamplingParams, StoredCall

# Columns of the table `calls`, in the order of `encode_call`. Arrays are little-endian bytes of the given type.
CALL_COLUMNS = {
  'attempt_id': 'TEXT',
  'idx': 'INTEGER',
  'call_id': 'TEXT',
  'row': 'INTEGER',
  'agent': 'BLOB',
  'trained': 'INTEGER',
  'context': 'BLOB',  # i32
  'ids': 'BLOB',  # i32
  'logprobs': 'BLOB',  # f32
  'critic_values': 'BLOB',  # f32
  'entropies': 'BLOB',  # f32
  'versions': 'BLOB',  # i32
  'top_counts': 'BLOB',  # i32, number of alternatives of each token
  'top_ids': 'BLOB',  # i32, of all tokens one after another
  'top_logprobs': 'BLOB',  # f64
  'text': 'BLOB',
  'finish': 'TEXT',
  'cached_tokens': 'INTEGER',
  'stop_text': 'BLOB',
  'params': 'TEXT',  # JSON
  'request_digest': 'TEXT',
  'messages': 'BLOB',
  'new_row_cause': 'TEXT',
  'checksum': 'INTEGER',  # CRC-32 of all other columns
}


class Damaged(Exception):
  """A row whose checksum does not fit."""


def encode_call(call: StoredCall) -> tuple[Any, ...]:
  """The values of `CALL_COLUMNS`.

  Raises:
    ValueError: an array has another type or length than `types.Generated` states.
  """
  generated, n = call.generated, len(call.generated.ids)
  if len(generated.top) not in (0, n):
    raise ValueError(f'call {call.call_id}: top has {len(generated.top)} entries; allowed: none or {n}')
  flat = [pair for token in generated.top for pair in token]
  values = (
    call.attempt_id,
    int(call.index),
    call.call_id,
    int(call.row),
    encode_text(call.agent),
    int(call.trained),
    _integers(call.context),
    _integers(generated.ids),
    *(
      _array(call.call_id, name, getattr(generated, name), dtype, n)
      for name, dtype in (('logprobs', '<f4'), ('values', '<f4'), ('entropies', '<f4'), ('versions', '<i4'))
    ),
    _integers([len(token) for token in generated.top]),
    _integers([i for i, _ in flat]),
    np.array([x for _, x in flat], '<f8').tobytes(),
    encode_text(generated.text),
    str(generated.finish),
    int(generated.cached_tokens),
    encode_text(generated.stop_text),
    _encode_params(call.params),
    call.request_digest,
    encode_text(call.messages),
    call.new_row_cause,
  )
  return (*values, _checksum(values))


def decode_call(row: Sequence[Any]) -> StoredCall:
  """The call of a row of `encode_call`.

  Raises:
    Damaged: the row is not what was written.
  """
  if _checksum(row[:-1]) != row[-1]:
    raise Damaged(f'call {row[2]!r} of attempt {row[0]!r}')
  x = dict(zip(CALL_COLUMNS, row, strict=True))
  counts = _read(x['top_counts'], '<i4')
  pairs = list(zip(_read(x['top_ids'], '<i4').tolist(), _read(x['top_logprobs'], '<f8').tolist(), strict=True))
  ends = np.cumsum(counts).tolist()
  generated = Generated(
    ids=tuple(_read(x['ids'], '<i4').tolist()),
    logprobs=_read(x['logprobs'], '<f4'),
    values=_read(x['critic_values'], '<f4'),
    entropies=_read(x['entropies'], '<f4'),
    versions=_read(x['versions'], '<i4'),
    top=tuple(tuple(pairs[end - count : end]) for end, count in zip(ends, counts.tolist(), strict=True)),
    text=_untext(x['text']),
    finish=Finish(x['finish']),
    cached_tokens=x['cached_tokens'],
    stop_text=_untext(x['stop_text']),
  )
  return StoredCall(
    call_id=x['call_id'],
    attempt_id=x['attempt_id'],
    index=x['idx'],
    row=x['row'],
    agent=_untext(x['agent']),
    trained=bool(x['trained']),
    context=tuple(_read(x['context'], '<i4').tolist()),
    generated=generated,
    params=_decode_params(x['params']),
    request_digest=x['request_digest'],
    messages=_untext(x['messages']),
    new_row_cause=x['new_row_cause'],
  )


def _encode_params(params: SamplingParams) -> str:
  return json.dumps({**vars(params), 'stop': list(params.stop)})


def _decode_params(text: str) -> SamplingParams:
  fields = json.loads(text)
  return SamplingParams(**{**fields, 'stop': tuple(fields['stop'])})


def _integers(values: Sequence[int]) -> bytes:
  """i32 bytes; OverflowError for a number that does not fit."""
  return np.array(values, '<i4').tobytes()


def _array(call_id: str, name: str, values: np.ndarray, dtype: str, n: int) -> bytes:
  values = np.asarray(values)
  if values.dtype != np.dtype(dtype) or values.shape != (n,):
    raise ValueError(
      f'call {call_id}: {name} is {values.dtype}{list(values.shape)}; allowed: {np.dtype(dtype).name}[{n}]'
    )
  return values.astype(dtype).tobytes()


def _read(data: bytes, dtype: str) -> np.ndarray:
  return np.frombuffer(data, dtype).astype(np.dtype(dtype).newbyteorder('='))


def encode_text(text: str) -> bytes:
  """UTF-8 that also takes lone surrogates, which JSON of a client may contain."""
  return text.encode('utf-8', 'surrogatepass')


def _untext(data: bytes) -> str:
  return data.decode('utf-8', 'surrogatepass')


def _checksum(values: Sequence[Any]) -> int:
  total = 0
  for value in values:
    data = value if isinstance(value, bytes) else str(value).encode('utf-8', 'surrogatepass')
    total = zlib.crc32(data, zlib.crc32(len(data).to_bytes(8, 'little'), total))
  return total
