"""Files that are replaced as a whole, and PNG pictures."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import socket

import numpy as np
from PIL import Image

from ragen_jax.utils.errors import DiskError


def replace_file(
  path: str | os.PathLike[str], content: bytes | str, error: str = '', *, many_writers: bool = False
) -> None:
  """Writes a file in one step: readers see the old content or the new content, never a part of it.

  The content, text as UTF-8, is written to `<path>.tmp`, which is then renamed to `path`. A missing directory is
  created. With `many_writers`, several processes may write the file at the same time; each has its own temporary file.
  Raises DiskError if the disk is full or not writable; its message begins with `error`, by default '<path> was not
  written'.
  """
  path = pathlib.Path(path)
  own = f'.{socket.gethostname()}.{os.getpid()}' if many_writers else ''
  temporary = path.with_name(f'{path.name}{own}.tmp')
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(temporary, path)
  except OSError as e:
    with contextlib.suppress(OSError):
      temporary.unlink(missing_ok=True)
    raise DiskError(f'{error or f"{path} was not written"}: {e.strerror or e}') from e


def encode_png(image: np.ndarray) -> bytes:
  """Encodes a picture, u8[H, W, 3], as a PNG file."""
  file = io.BytesIO()
  Image.fromarray(image).save(file, 'PNG')
  return file.getvalue()
