"""A run's directory: its lock, and the record of its config.

<workdir>/config.json           the config of the run
<workdir>/.lock                 locked by the process that writes to the workdir
<workdir>/checkpoints/<step>/   see checkpoints.py

`open_workdir` makes a workdir in a bucket usable like one on disk, see staging.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import jax

from ragen_jax.runs.config_fields import flatten, in_this_version
from ragen_jax.runs.staging import StagedWorkdir, staged
from ragen_jax.runs.stores import is_address, open_store
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.files import replace_file
from ragen_jax.utils.locks import file_lock

_log = logging.getLogger(__name__)

# The database of what agent programs play, and the files that SQLite keeps beside it while it is open.
STORE = 'agents.sqlite'
_OF_SQLITE = ('-wal', '-shm', '')


@contextlib.contextmanager
def open_workdir(workdir: str, *, write: bool) -> Iterator[str | StagedWorkdir]:
  """Context manager: a workdir on disk, or the local copy of a workdir in a bucket (gs://BUCKET/FOLDER, s3://...).

  All processes of a run call it; the first one takes the lock. With `write` it holds the lock, as a run does; an
  evaluation of the run needs none. Raises UserError if the workdir is empty, another process holds the lock, or the
  workdir cannot be read or written.
  """
  first = jax.process_index() == 0
  if not workdir:
    raise UserError('the workdir is empty; name a directory')
  if is_address(workdir):
    if jax.process_count() > 1 and not workdir.startswith('gs://'):
      raise UserError(
        f'--workdir={workdir}: a run of {jax.process_count()} processes needs a directory on a shared disk or gs://'
      )
    with staged(open_store(workdir), write=write, first=first) as copy:
      yield copy
  elif write and first:
    _check_name(workdir)
    with workdir_lock(workdir):
      yield workdir
  else:
    yield workdir


def _check_name(workdir: str) -> None:
  """Raises UserError for a path that Orbax, which reads it as a pattern, does not find again."""
  path = os.path.abspath(workdir)
  if found := re.search(r'\[[^]]*\]|\\', path):
    raise UserError(
      f'--workdir={workdir}: no checkpoint can be saved below a path with {found[0]}; choose another directory'
    )


def need_disk(workdir: str, reason: str) -> None:
  """Raises UserError if a workdir is in a bucket; `reason` says what needs a disk."""
  if is_address(workdir):
    raise UserError(f'--workdir={workdir}: {reason}; choose a directory on disk')


@contextlib.contextmanager
def workdir_lock(workdir: str | os.PathLike[str]) -> Iterator[None]:
  """Context manager: holds `<workdir>/.lock` while a run writes to the workdir; one process of a run takes the lock.

  It is a `file_lock`, which ends with the process. Raises UserError if another process holds the lock, or the directory
  is not writable.
  """
  with file_lock(pathlib.Path(workdir) / '.lock', f'workdir {workdir}', 'wait for it or choose another --workdir'):
    yield


def record_config(
  workdir: str | os.PathLike[str],
  config: Mapping[str, Any],
  free_fields: Set[str] = frozenset(),
  reasons: Mapping[str, str] | None = None,
  anew: Callable[[], None] = lambda: None,
) -> None:
  """Writes the config to `<workdir>/config.json`. If there is a checkpoint, first compares it with the recorded config.

  Fields in `free_fields` may change between starts; config.json then contains their new values. Before the first
  checkpoint every field may change, with a warning. Several processes may call this at the same time; all of them write
  the same text.

  Args:
    config: nested dict of JSON values, such as `config.to_dict()`.
    free_fields: dotted names of the fields that may differ, such as {'num_iterations'}.
    reasons: dotted name of a field -> the reason why it may not differ, for the error message.
    anew: called before the config is written if a run without a checkpoint differed in fields that are not free.

  Raises:
    UserError: a field that is not free differs, the record cannot be read, or the directory is not writable.
  """
  path = pathlib.Path(workdir) / 'config.json'
  text = json.dumps(config, indent=2) + '\n'
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    has_checkpoint = any(p.name.isdigit() for p in (path.parent / 'checkpoints').glob('*'))
    old_text = path.read_text(errors='replace') if path.exists() else None
  except (FileExistsError, NotADirectoryError) as e:
    raise UserError(f'workdir {workdir} cannot be used: it is a file, or lies in one') from e
  except OSError as e:
    raise UserError(f'workdir {workdir} cannot be used: {e.strerror or e}') from e
  if has_checkpoint and old_text is not None:
    _check_same(f'workdir {workdir}', _differences(path, old_text, text), free_fields, reasons or {})
  elif old_text is not None and old_text != text:
    changed = _tell_new_config(workdir, path, old_text, text)
    if not changed <= free_fields:
      anew()
  if text != old_text:
    replace_file(path, text, many_writers=True)


def _tell_new_config(workdir: str | os.PathLike[str], path: pathlib.Path, old_text: str, text: str) -> Set[str]:
  """Warns that a run begins anew where one with another config ended before its first checkpoint.

  Returns the fields that differ; '' stands for a config that cannot be read.
  """
  found: Mapping[str, tuple[str, str]] = {'': ('', '')}
  try:
    found = _differences(path, old_text, text)
    changed = '; '.join(f'{name} was {was} and is {now}' for name, (was, now) in found.items())
  except UserError:
    changed = f'{path} was not a config that this program wrote'
  if changed:
    _log.warning('workdir %s has no checkpoint, so its run begins anew, with another config: %s', workdir, changed)
  return found.keys()


def compare_config(
  workdir: str | os.PathLike[str], config: Mapping[str, Any], free_fields: Set[str] = frozenset()
) -> None:
  """Compares like `record_config`, but writes nothing.

  Raises UserError if `workdir` has no recorded config, or a field that is not free differs.
  """
  changed = changed_fields(workdir, config)[1]
  _check_same(f'workdir {workdir}', changed, free_fields, {}, remedy='give the flags of the run')


def check_recorded(
  where: str,
  recorded: Mapping[str, Any],
  config: Mapping[str, Any],
  free_fields: Set[str] = frozenset(),
  reasons: Mapping[str, str] | None = None,
) -> None:
  """Compares like `record_config`, with a config that was recorded elsewhere than in config.json.

  In the error, `where` says what `recorded` belongs to: 'checkpoint of step 4 in /tmp/run/checkpoints'. Raises
  UserError if a field that is not free differs.
  """
  changed = _differences(pathlib.Path(where), json.dumps(recorded), json.dumps(config))
  _check_same(where, changed, free_fields, reasons or {})


def changed_fields(
  workdir: str | os.PathLike[str], config: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
  """Reads the recorded config of `workdir`, and lists the fields of `config` that differ from it.

  These are dotted name -> (recorded value, value in `config`), as JSON text or 'absent'. Raises UserError if `workdir`
  has no recorded config.
  """
  path = pathlib.Path(workdir) / 'config.json'
  try:
    old_text = path.read_text(errors='replace')
  except OSError as e:
    raise UserError(f'workdir {workdir} holds no run: {path} cannot be read ({e.strerror})') from e
  changed = _differences(path, old_text, json.dumps(config))
  return json.loads(old_text), changed


def _check_same(
  where: str,
  changed: Mapping[str, tuple[str, str]],
  free_fields: Set[str],
  reasons: Mapping[str, str],
  remedy: str = 'choose another --workdir or set these fields back',
) -> None:
  """Raises UserError if a field changed that may not change; `remedy` ends the message."""
  refused = [
    f'{name} was {was} and is {now}' + (f' ({reasons[name]})' if name in reasons else '')
    for name, (was, now) in changed.items()
    if name not in free_fields
  ]
  if refused:
    raise UserError(f'{where} belongs to another config: {"; ".join(refused)}; {remedy}')


def _differences(path: pathlib.Path, old_text: str, new_text: str) -> dict[str, tuple[str, str]]:
  """Dotted name of a field that differs -> (old value, new value)."""
  try:
    old = flatten(json.loads(old_text))
  except ValueError as e:
    raise UserError(f'{path} is not a config that this program wrote ({e}); choose another --workdir') from e
  new = flatten(json.loads(new_text))
  old, new = _as_text(in_this_version(old, new)), _as_text(new)
  names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
  return {name: (old.get(name, 'absent'), new.get(name, 'absent')) for name in names}


def _as_text(config: dict[str, Any]) -> dict[str, str]:
  """The values of a flat config as JSON text, so that NaN equals NaN and True differs from 1."""
  return {name: json.dumps(value) for name, value in config.items()}


def set_store_aside(workdir: str | os.PathLike[str]) -> None:
  """Renames the store of agent programs, whose attempts belong to another config, to agents.sqlite.old.

  An earlier one of this name is replaced. Raises UserError if it cannot be renamed.
  """
  store = pathlib.Path(workdir) / STORE
  if not store.exists():
    return
  old = store.with_name(f'{STORE}.old')
  try:
    for suffix in _OF_SQLITE:
      old.with_name(old.name + suffix).unlink(missing_ok=True)
    for suffix in _OF_SQLITE:
      with contextlib.suppress(FileNotFoundError):
        store.with_name(store.name + suffix).replace(old.with_name(old.name + suffix))
  except OSError as e:
    raise UserError(f'{store} cannot be renamed to {old.name}: {e.strerror or e}') from e
  _log.warning('%s is renamed to %s, because its attempts were played with another config', store, old.name)
