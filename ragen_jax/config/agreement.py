"""All processes of a run need the same config, the same code and the same files; differences are found at the start."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from ragen_jax.distributed import processes
from ragen_jax.models import presets
from ragen_jax.runs.config_fields import flatten, role_of
from ragen_jax.utils.errors import UserError

_ABSENT = 'absent'
# Roles of fields that may differ between machines: what is written where, and what training does not read.
_FREE = ('logging', 'other_modes', 'prompt_search', 'warm_start')
_PATHS = ('model.path', 'lora.path', 'prompt.file')  # may differ if the files are equal
# Files of a model's directory that a run reads.
_MODEL_FILES = ('.json', '.safetensors', '.txt', '.jinja', '.model')
_BLOCKS, _BLOCK = 64, 1 << 14  # blocks that are compared of a large file, and their bytes


def check_same_config(config: ConfigDict) -> None:
  """Raises a UserError in all processes if their configs or versions differ; all must call, before anything else."""
  if jax.process_count() > 1:
    fields = {name: json.dumps(x) for name, x in flatten(config.to_dict()).items() if name not in _PATHS}
    _check_same({name: text for name, text in fields.items() if role_of(name) not in _FREE} | versions())


def check_same_files(config: ConfigDict) -> None:
  """Raises the same UserError in all processes if one sees other files than the rest; all must call.

  They are those that the config names: models, adapters, prompts, data, and modules of environments. Large files are
  compared by their sizes and by blocks of their contents.
  """
  if jax.process_count() > 1:
    with processes.same_errors():
      found = digests(config)
    _check_same(found)


def versions() -> dict[str, str]:
  """The versions of the libraries that compute, and a digest of this package's source files."""
  root = pathlib.Path(__file__).parents[1]
  digest = hashlib.sha256()
  for path in sorted(root.rglob('*.py')):
    digest.update(f'{path.relative_to(root)}\n'.encode() + path.read_bytes())
  libraries = {f'the version of {name}': importlib.metadata.version(name) for name in ('jax', 'jaxlib', 'numpy')}
  python = {'the version of Python': platform.python_version()}
  return libraries | python | {'the code of ragen_jax': digest.hexdigest()[:12]}


def digests(config: ConfigDict) -> dict[str, str]:
  """Digest of the files that each field names, by dotted name; 'absent' if a path does not exist here.

  Raises UserError if the model cannot be found or read.
  """
  found = {'model.preset': _digest(pathlib.Path(presets.resolve(config.model.preset, config.model.path)))}
  for name, value in flatten(config.to_dict()).items():
    if isinstance(value, str) and value and role_of(name) not in _FREE and name not in ('model.preset', 'model.path'):
      found[name] = _digest_of_files(value)
  return {f'the files of {name}': digest for name, digest in found.items()}


def _digest_of_files(value: str) -> str:
  """Digest of the file that a value may mean or, as for data sets, of several separated by commas."""
  found = _digest(_path(value))
  if found == _ABSENT and ',' in value:
    parts = [_digest(_path(part.strip())) for part in value.split(',')]
    return ' '.join(parts) if set(parts) != {_ABSENT} else _ABSENT
  return found


def _path(value: str) -> pathlib.Path:
  """The file that a value may mean: a path, or a module as 'module:object' or 'file.py:object'."""
  module, _, attribute = value.rpartition(':')
  if not attribute.isidentifier() or not module:
    return pathlib.Path(value)
  if module.endswith('.py'):
    return pathlib.Path(module)
  try:
    spec = importlib.util.find_spec(module)
  except (ImportError, ValueError):
    return pathlib.Path(value)
  return pathlib.Path(spec.origin if spec is not None and spec.origin else value)


def _digest(path: pathlib.Path) -> str:
  """Digest of a file, or of the files of a model's directory."""
  try:
    if os.path.isfile(path):  # false for a text that is too long for a path
      files = [path]
    elif os.path.isdir(path):
      files = sorted(p for p in path.iterdir() if p.suffix in _MODEL_FILES and p.is_file())
    else:
      return _ABSENT
    digest = hashlib.sha256()
    for file in files:
      _update(digest, file)
  except (OSError, ValueError) as e:
    raise UserError(f'{path} cannot be read: {e}') from e
  return digest.hexdigest()[:12]


def _update(digest: Any, path: pathlib.Path) -> None:
  """Adds a file's name, its size, and its content or blocks of it."""
  size = path.stat().st_size
  digest.update(f'{path.name} {size}\n'.encode())
  with path.open('rb') as f:
    if size <= _BLOCKS * _BLOCK:
      digest.update(f.read())
      return
    for i in range(_BLOCKS):
      f.seek(i * (size - _BLOCK) // (_BLOCKS - 1))
      digest.update(f.read(_BLOCK))


def _check_same(values: Mapping[str, str]) -> None:
  first, *others = processes.gather(dict(values))
  for i, other in enumerate(others, start=1):
    for name in sorted(first.keys() | other.keys()):
      ours, theirs = first.get(name, _ABSENT), other.get(name, _ABSENT)
      if ours != theirs:
        raise UserError(
          f'{name}: is {theirs} in process {i} and {ours} in process 0; all processes of a run need the same config, '
          'code and files',
          everywhere=True,
        )
