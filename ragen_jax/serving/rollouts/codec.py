"""Rollouts: calls as rows of the store; numbers keep their bits, and a checksum detects a damaged row."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax.serialization import msgpack_restore, msgpack_serialize
from PIL import Image

from ragen_jax.models.vision.encoder import digest
from ragen_jax.serving.types import Finish, Generated, PlacedImage, SamplingParams, StoredCall

# Columns of the table `calls`, in the order of `encode_call`: what SQL asks for, and everything else as msgpack.
CALL_COLUMNS = {
  'attempt_id': 'TEXT',
  'idx': 'INTEGER',
  'call_id': 'TEXT',
  'agent': 'BLOB',
  'finish': 'TEXT',
  'payload': 'BLOB',
  'checksum': 'INTEGER',  # CRC-32 of all other columns
}
_ARRAYS = {'logprobs': 'float32', 'values': 'float32', 'entropies': 'float32', 'versions': 'int32'}


class Damaged(Exception):
  """A row whose checksum does not fit."""


def encode_call(call: StoredCall) -> tuple[Any, ...]:
  """The values of `CALL_COLUMNS`.

  Raises:
    ValueError: an array has another type or length than `types.Generated` states.
    OverflowError: an id does not fit into 32 bits.
  """
  generated, n = call.generated, len(call.generated.ids)
  if len(generated.top) not in (0, n):
    raise ValueError(f'call {call.call_id}: top has {len(generated.top)} entries; allowed: none or {n}')
  arrays = {name: np.asarray(getattr(generated, name)) for name in _ARRAYS}
  for name, array in arrays.items():
    if array.dtype != _ARRAYS[name] or array.shape != (n,):
      found = f'{array.dtype}{list(array.shape)}'
      raise ValueError(f'call {call.call_id}: {name} is {found}; allowed: {_ARRAYS[name]}[{n}]')
  flat = [pair for token in generated.top for pair in token]  # alternatives of all tokens, one after another
  payload = arrays | {
    'row': int(call.row),
    'trained': bool(call.trained),
    'context': _integers(call.context),
    'ids': _integers(generated.ids),
    'top_counts': _integers([len(token) for token in generated.top]),
    'top_ids': _integers([i for i, _ in flat]),
    'top_logprobs': np.array([x for _, x in flat], np.float64),
    'text': encode_text(generated.text),
    'cached_tokens': int(generated.cached_tokens),
    'stop_text': encode_text(generated.stop_text),
    'params': vars(call.params) | {'stop': [encode_text(text) for text in call.params.stop]},
    'request_digest': call.request_digest,
    'messages': encode_text(call.messages),
    'new_row_cause': call.new_row_cause,
    'images': [[image.start, image.stop, image.digest] for image in call.images],
  }
  values = (call.attempt_id, int(call.index), call.call_id, encode_text(call.agent), str(generated.finish))
  values += (msgpack_serialize(payload),)
  return (*values, _checksum(values))


def decode_call(row: Sequence[Any]) -> StoredCall:
  """The call of a row of `encode_call`; Damaged if the row is not what was written."""
  if _checksum(row[:-1]) != row[-1]:
    raise Damaged(f'call {row[2]!r} of attempt {row[0]!r}')
  attempt_id, index, call_id, agent, finish, payload, _ = row
  x = msgpack_restore(payload)
  counts, params = x['top_counts'], x['params']
  pairs = list(zip(x['top_ids'].tolist(), x['top_logprobs'].tolist(), strict=True))
  ends = np.cumsum(counts).tolist()
  generated = Generated(
    ids=tuple(x['ids'].tolist()),
    top=tuple(tuple(pairs[end - count : end]) for end, count in zip(ends, counts.tolist(), strict=True)),
    text=_untext(x['text']),
    finish=Finish(finish),
    cached_tokens=x['cached_tokens'],
    stop_text=_untext(x['stop_text']),
    **{name: x[name] for name in _ARRAYS},
  )
  return StoredCall(
    call_id=call_id,
    attempt_id=attempt_id,
    index=index,
    agent=_untext(agent),
    context=tuple(x['context'].tolist()),
    generated=generated,
    params=SamplingParams(**params | {'stop': tuple(map(_untext, params['stop']))}),
    messages=_untext(x['messages']),
    images=tuple(PlacedImage(*image) for image in x['images']),
    **{name: x[name] for name in ('row', 'trained', 'request_digest', 'new_row_cause')},
  )


def encode_pixels(image: np.ndarray) -> bytes:
  """A PNG file of u8[H, W, 3]."""
  file = io.BytesIO()
  Image.fromarray(image).save(file, 'PNG', compress_level=1)
  return file.getvalue()


def decode_pixels(digest_: bytes, png: bytes) -> np.ndarray:
  """The image of a file of `encode_pixels`; Damaged if it has another digest."""
  try:
    with Image.open(io.BytesIO(png), formats=('PNG',)) as file:
      image = np.asarray(file)
  except (OSError, SyntaxError, ValueError) as e:
    raise Damaged(f'image {digest_.hex()}') from e
  if digest(image) != digest_:
    raise Damaged(f'image {digest_.hex()}')
  return image


def _integers(values: Sequence[int]) -> np.ndarray:
  return np.array(values, np.int32)


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
