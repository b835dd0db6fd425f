"""Files that are replaced as a whole, and PNG pictures."""

from __future__ import annotations

import os
import pathlib
import socket
import struct
import zlib

import numpy as np

from ragen_jax.utils.errors import DiskError


def replace_file(
  path: str | os.PathLike[str], content: bytes | str, error: str = '', *, many_writers: bool = False
) -> None:
  """Writes a file in one step: readers see the old content or the new content, never a part of it.

  The content is written to `<path>.tmp`, which is then renamed to `path`. A missing directory is created.

  Args:
    path: the file.
    content: bytes, or text, which is written as UTF-8.
    error: the first words of the error's message; by default '<path> was not written'.
    many_writers: whether several processes may write the file at the same time; each then has its own temporary file.

  Raises:
    DiskError: the disk is full or not writable.
  """
  path = pathlib.Path(path)
  own = f'.{socket.gethostname()}.{os.getpid()}' if many_writers else ''
  temporary = path.with_name(f'{path.name}{own}.tmp')
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(temporary, path)
  except OSError as e:
    raise DiskError(f'{error or f"{path} was not written"}: {e.strerror or e}') from e


def encode_png(image: np.ndarray) -> bytes:
  """Encodes a picture, u8[H, W, 3], as a PNG file."""

  def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))

  height, width, _ = image.shape
  rows = np.pad(image.reshape(height, width * 3), ((0, 0), (1, 0)))  # each row begins with its filter type; 0 is none
  header = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
  body = chunk(b'IHDR', header) + chunk(b'IDAT', zlib.compress(rows.tobytes())) + chunk(b'IEND', b'')
  return b'\x89PNG\r\n\x1a\n' + body
