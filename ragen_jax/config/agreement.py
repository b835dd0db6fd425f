"""All processes of a run need the same config, the same code and the same files; differences are found at the start."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import pathlib
import platform
from collections.abc import Mapping

import jax
from ml_collections import ConfigDict

from ragen_jax.distributed import processes
from ragen_jax.models import presets
from ragen_jax.runs.config_fields import flatten, role_of
from ragen_jax.runs.file_digests import ABSENT, digest, digest_of_value
from ragen_jax.utils.errors import UserError

# Roles of fields that may differ between machines, since training does not read them.
_FREE = ('other_modes', 'prompt_search', 'warm_start')
_WRITTEN = ('compilation_cache', 'sft.output', 'sft.save_data')  # may differ: where something is written
_PATHS = ('model.path', 'lora.path', 'prompt.file')  # may differ if the files are equal


def check_same_config(config: ConfigDict) -> None:
  """Raises a UserError in all processes if their configs or versions differ; all must call, before anything else."""
  if jax.process_count() > 1:
    free = (*_PATHS, *_WRITTEN)
    fields = {name: json.dumps(x) for name, x in flatten(config.to_dict()).items() if name not in free}
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
  code = hashlib.sha256()
  for path in sorted(root.rglob('*.py')):
    code.update(f'{path.relative_to(root)}\n'.encode() + path.read_bytes())
  libraries = {f'the version of {name}': importlib.metadata.version(name) for name in ('jax', 'jaxlib', 'numpy')}
  python = {'the version of Python': platform.python_version()}
  return libraries | python | {'the code of ragen_jax': code.hexdigest()[:12]}


def digests(config: ConfigDict) -> dict[str, str]:
  """Digest of the files that each field names, by dotted name; 'absent' if a path does not exist here.

  Raises UserError if the model cannot be found or read.
  """
  found = {'model.preset': digest(pathlib.Path(presets.resolve(config.model.preset, config.model.path)))}
  free = ('logging', *_FREE)
  for name, value in flatten(config.to_dict()).items():
    if isinstance(value, str) and value and role_of(name) not in free and name not in ('model.preset', 'model.path'):
      found[name] = digest_of_value(value)
  return {f'the files of {name}': value for name, value in found.items()}


def _check_same(values: Mapping[str, str]) -> None:
  first, *others = processes.gather(dict(values))
  for i, other in enumerate(others, start=1):
    for name in sorted(first.keys() | other.keys()):
      ours, theirs = first.get(name, ABSENT), other.get(name, ABSENT)
      if ours != theirs:
        raise UserError(
          f'{name}: is {theirs} in process {i} and {ours} in process 0; all processes of a run need the same config, '
          'code and files',
          everywhere=True,
        )
