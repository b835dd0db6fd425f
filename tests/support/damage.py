"""Damages the files of a run."""

from __future__ import annotations

import pathlib


def flip_bytes(workdir: pathlib.Path, step: int, count: int = 512) -> pathlib.Path:
  """Inverts bytes in the middle of the largest file of a checkpoint."""
  files = [path for path in (workdir / 'checkpoints' / str(step)).rglob('*') if path.is_file()]
  files = [path for path in files if path.name != 'checksums.json']
  path = max(files, key=lambda path: path.stat().st_size)
  data = bytearray(path.read_bytes())
  middle = max(len(data) - count, 0) // 2
  data[middle : middle + count] = bytes(255 - x for x in data[middle : middle + count])
  path.write_bytes(data)
  return path
