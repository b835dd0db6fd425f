"""Digests of the files that fields of a config name, by which runs and processes recognise changed files."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from ragen_jax.runs.config_fields import flatten
from ragen_jax.utils.errors import UserError

ABSENT = 'absent'  # the digest of a path that does not exist
# Files of a model's directory that a run reads.
_MODEL_FILES = ('.json', '.safetensors', '.txt', '.jinja', '.model')
_BLOCKS, _BLOCK = 64, 1 << 14  # blocks that are compared of a large file, and their bytes
# Last names of the fields of `envs` that name files of tasks, levels or questions.
_DATA = ('path', 'levels', 'tasks')


def data_digests(config: Mapping[str, Any]) -> dict[str, str]:
  """Digests of the data of a run by dotted name of the field: those of the tags that it plays, and `prompt.file`.

  Code, such as the module of an environment, is none, nor is what does not exist. `config` is nested.
  """
  tags = {*config['train']['tags'], *config['eval']['tags']}
  fields = {'prompt.file': config['prompt']['file']}
  for tag in sorted(tags):
    for name, value in flatten(config['envs'][tag]).items():
      if name.rpartition('.')[2] in _DATA and isinstance(value, str):
        fields[f'envs.{tag}.{name}'] = value
  found = {name: digest_of_value(x) for name, x in fields.items() if x and _path(x).suffix != '.py'}
  return {name: value for name, value in found.items() if value != ABSENT}


def check_data(recorded: Mapping[str, str], now: Mapping[str, str], where: str) -> None:
  """Raises UserError, which begins with `where`, if data is not what it was when a checkpoint was made.

  Both are of `data_digests`. Only fields that both have are compared: other changes of fields are found elsewhere.
  """
  for name, was in recorded.items():
    if now.get(name, was) != was:
      raise UserError(
        f'{where}: the files of {name} are not those of the run so far, so it may have learnt from what it would now '
        'hold out; put the files back, or choose another --workdir'
      )


def digest_of_value(value: str) -> str:
  """Digest of the file that a value may mean or, as for data sets, of several separated by commas."""
  found = digest(_path(value))
  if found == ABSENT and ',' in value:
    parts = [digest(_path(part.strip())) for part in value.split(',')]
    return ' '.join(parts) if set(parts) != {ABSENT} else ABSENT
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


def digest(path: pathlib.Path) -> str:
  """Digest of a file, or of the files of a model's directory."""
  try:
    if os.path.isfile(path):  # false for a text that is too long for a path
      files = [path]
    elif os.path.isdir(path):
      files = sorted(p for p in path.iterdir() if p.suffix in _MODEL_FILES and p.is_file())
    else:
      return ABSENT
    found = hashlib.sha256()
    for file in files:
      _update(found, file)
  except (OSError, ValueError) as e:
    raise UserError(f'{path} cannot be read: {e}') from e
  return found.hexdigest()[:12]


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
