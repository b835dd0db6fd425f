"""Checksums of a checkpoint's files, which reveal a damaged file before a run uses it.

`checksums.json` is in the checkpoint's directory and lists every other file with its SHA-256 digest. It is written
last. A checkpoint without it was interrupted before its checksums were written, or is older than this module.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import pathlib
from typing import Any

from ragen_jax.runs.stores import is_address

NAME = 'checksums.json'
_CHUNK = 1 << 22  # bytes
_THREADS = 8  # threads help, because hashlib releases the interpreter lock


def write(directory: pathlib.Path | Any) -> None:
  """Writes the checksums of all files below the directory of a complete checkpoint, on disk or in an object store.

  Raises OSError if a file cannot be read, or the disk is full.
  """
  record = json.dumps({'algorithm': 'sha256', 'files': _digests(directory)}, indent=1)
  replace_text(directory / NAME, record)


def replace_text(path: pathlib.Path | Any, text: str) -> None:
  """Writes a file in one step, as `write` does: on disk by a rename, in an object store by writing the object."""
  if is_address(path):
    path.write_text(text)
    return
  temporary = path.with_name(f'{path.name}.tmp')
  try:
    temporary.write_text(text)
    temporary.replace(path)
  except OSError:
    with contextlib.suppress(OSError):
      temporary.unlink(missing_ok=True)  # the room is needed, and files of a checkpoint are copied to buckets
    raise


def find_damage(directory: pathlib.Path | Any) -> str | None:
  """Names the first file below `directory` that differs, such as "state/d/0f3a differs from its checksum".

  None if all files are unchanged, or if there are no checksums (see `exist`).
  """
  if not exist(directory):
    return None
  try:
    wanted = json.loads((directory / NAME).read_text())['files']
    found = _digests(directory)
  except (OSError, ValueError, KeyError, TypeError) as e:
    return f'{NAME} or a file beside it cannot be read ({type(e).__name__})'
  if not isinstance(wanted, dict):
    return f'{NAME} does not name the files'
  missing = sorted(set(wanted) - set(found))
  if missing:
    return f'{missing[0]} is missing'
  changed = [name for name in sorted(wanted) if wanted[name] != found[name]]
  return f'{changed[0]} differs from its checksum' if changed else None


def exist(directory: pathlib.Path | Any) -> bool:
  """Whether `directory` has checksums."""
  return (directory / NAME).exists()


def _digests(directory: pathlib.Path | Any) -> dict[str, str]:
  """File name relative to `directory` -> SHA-256, without the file of checksums."""
  names = sorted(_files(directory, ''))
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    return dict(zip(names, pool.map(lambda name: _digest(directory / name), names), strict=True))


def _files(directory: pathlib.Path | Any, prefix: str) -> list[str]:
  found = []
  for path in directory.iterdir():
    if path.is_dir():
      found += _files(path, f'{prefix}{path.name}/')
    elif f'{prefix}{path.name}' not in (NAME, f'{NAME}.tmp'):
      found.append(f'{prefix}{path.name}')
  return found


def _digest(path: pathlib.Path | Any) -> str:
  digest = hashlib.sha256()
  with path.open('rb') as f:
    while chunk := f.read(_CHUNK):
      digest.update(chunk)
  return digest.hexdigest()
