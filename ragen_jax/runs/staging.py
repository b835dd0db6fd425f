"""A workdir in a bucket: the program reads and writes a copy on the local disk, which is copied to the bucket.

Files of the workdir, such as metrics.jsonl, are copied as a whole if they have changed: before each checkpoint, at the
end, and every `PUSH_SECONDS` seconds. Checkpoints go one of two ways:

  gs://    Orbax writes them to the bucket itself; many processes can write one.
  s3://    Orbax cannot write there. It writes to the local copy, and `publish_checkpoint` copies the files. The object
           COMMITTED is written last; a checkpoint without it was interrupted, and is ignored and removed.

While the bucket cannot be reached, the requests of a checkpoint are repeated for some minutes (store_retries.py). All
methods may be called again after an error. A killed run resumes from its last complete checkpoint with the metrics that
belong to it, because files are copied before the checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pathlib
import posixpath
import shutil
import tempfile
import threading
from collections.abc import Iterator

from ragen_jax.runs import checksums
from ragen_jax.runs.store_lock import LOCK_RENEWAL, LOCK_SILENCE, StoreLock
from ragen_jax.runs.store_retries import until_reached
from ragen_jax.runs.stores import Store, StoreError
from ragen_jax.utils.errors import DiskError, UserError

_log = logging.getLogger(__name__)

COMMITTED = 'upload_complete'
_COMMITTED_BY_ORBAX = 'commit_success.txt'
PUSH_SECONDS = 60.0
_PREFIX = 'ragen-workdir-'
_CHECKPOINTS = 'checkpoints/'
_LOCAL_ONLY = (_CHECKPOINTS, 'xla_cache/')  # not copied as files
_NOT_READ = ('tb/', 'damaged_checkpoints/', 'export/')  # only written; they may be large
_REPLACED = 'export/'  # written as a whole

# Size and time of modification of a file, from which a change is seen.
_Stamp = tuple[int, int]


class StagedWorkdir(os.PathLike):
  """A workdir in a bucket. As a path it is the local copy, as text it is the address; their last parts are equal.

  A process that only reads has no lock.
  """

  def __init__(self, store: Store, path: pathlib.Path, lock: StoreLock | None):
    """Takes an empty directory; `pull` fills it."""
    self.store, self.path, self.lock = store, path, lock
    self._copied: dict[str, _Stamp] = {}  # files that are equal in the bucket, by key
    self._missing: dict[int, list[str]] = {}  # step -> keys that have not been read yet
    self._remote: dict[str, _Stamp | None] = {}  # objects of checkpoints; None: not compared
    self._replaced: set[str] = set()
    self._mutex = threading.Lock()

  def __fspath__(self) -> str:
    return str(self.path)

  def __str__(self) -> str:
    return self.store.url

  @property
  def orbax_directory(self) -> str:
    """Where Orbax reads and writes checkpoints: in the bucket, or in the local copy."""
    return f'{self.store.url}/checkpoints' if self._native else str(self.path / 'checkpoints')

  @property
  def _native(self) -> bool:
    return self.store.url.startswith('gs://')

  @property
  def _marker(self) -> str:
    """The object of a complete checkpoint that is written last."""
    return _COMMITTED_BY_ORBAX if self._native else COMMITTED

  def pull(self) -> None:
    """Copies the files of the workdir, and from s3:// the small files of complete checkpoints.

    Event files are not copied. An empty file takes the place of each, because new event files are numbered after them.
    Raises StoreError if a request failed, DiskError or OSError if the local disk is full or not writable.
    """
    keys = self.store.sizes()
    files = [key for key in keys if not key.startswith((*_LOCAL_ONLY, *_NOT_READ)) and key != '.lock']
    self._replaced = {key for key in keys if key.startswith(_REPLACED)}
    events = [key for key in keys if key.startswith('tb/')]
    marker = self._marker
    steps = {int(parts[1]) for key in keys if _is_step(parts := key.split('/')) and parts[2:] == [marker]}
    small = []
    for key in keys if not self._native else ():
      parts = key.split('/')
      if not key.startswith(_CHECKPOINTS):
        continue
      self._remote[key] = None
      if _is_step(parts) and int(parts[1]) in steps and parts[2:] != [COMMITTED]:
        if parts[2] == 'state':
          self._missing.setdefault(int(parts[1]), []).append(key)
        else:
          small.append(key)
    self.store.download({key: self.path / key for key in files + small})
    for key in events:
      (self.path / key).parent.mkdir(parents=True, exist_ok=True)
      (self.path / key).touch()
    for step in steps:  # with gs:// the directories are empty; they show that the run has checkpoints
      (self.path / 'checkpoints' / str(step)).mkdir(parents=True, exist_ok=True)
    self._copied = {key: _stamp(self.path / key) for key in files + events}
    self._remote |= {key: _stamp(self.path / key) for key in small}

  def push(self) -> None:
    """Copies changed files to the bucket and deletes objects of removed ones. Raises StoreError if a request failed."""
    with self._mutex:
      found = self._files()
      changed = {key: stamp for key, stamp in found.items() if self._copied.get(key) != stamp}
      removed = self.store.upload({key: self.path / key for key in changed}, missing_ok=True)
      found = {key: stamp for key, stamp in found.items() if key not in removed}
      gone = self._copied.keys() - found.keys()
      if any(key.startswith(_REPLACED) for key in found):
        gone |= self._replaced - found.keys()
        self._replaced = set()
      self.store.delete(gone)
      self._copied = found

  def fetch_checkpoint(self, step: int) -> None:
    """Copies the arrays of a checkpoint to the local disk, if they are not there yet; as `Store.download`."""
    if keys := self._missing.get(step):
      self.store.download({key: self.path / key for key in keys})
      self._remote |= {key: _stamp(self.path / key) for key in keys}
      del self._missing[step]

  def before_checkpoint(self) -> None:
    """Copies the files that a run which resumes from the next checkpoint needs.

    Raises UserError if another process has taken over the lock, and StoreError if a request failed.
    """
    if self.lock is not None:
      self.lock.check()
    self.push()

  def publish_checkpoint(self, step: int) -> None:
    """Copies a checkpoint from the local copy to the bucket, and deletes those that are not in the local copy.

    With gs:// it does nothing, since Orbax has written and deleted the checkpoints. Raises StoreError if a request
    failed; the checkpoints in the bucket are still complete.
    """
    if self._native:
      return
    prefix = f'{_CHECKPOINTS}{step}/'
    found = {key: _stamp(self.path / key) for key in _keys_below(self.path, prefix)}
    changed = {key for key, stamp in found.items() if self._remote.get(key) != stamp}
    record, committed = prefix + checksums.NAME, prefix + COMMITTED
    if committed in self._remote and any(key.startswith(f'{prefix}state/') for key in changed):
      # Without it, a run that is killed during the upload leaves no mixture of arrays that counts as a checkpoint.
      self.store.delete([committed])
      del self._remote[committed]
    if changed - {record} and record in self._remote:
      # A checkpoint without checksums is valid, one with checksums of other files is not.
      self.store.delete([record])
    self.store.upload({key: self.path / key for key in changed - {record}})
    self.store.upload({key: self.path / key for key in changed & {record}})
    if committed not in self._remote:
      self.store.write(committed, b'')
    self._remote |= found | {committed: None}
    kept = {path.name for path in (self.path / 'checkpoints').iterdir()}
    gone = [key for key in self._remote if key not in found and key != committed and
            (key.startswith(prefix) or key.split('/')[1] not in kept)]  # fmt: skip
    self.store.delete([key for key in gone if key.endswith(f'/{COMMITTED}')])  # first, so none is half deleted
    self.store.delete(gone)
    self._remote = {key: stamp for key, stamp in self._remote.items() if key not in set(gone)}

  def set_checkpoint_aside(self, step: int) -> None:
    """Moves a checkpoint that was fetched to `damaged_checkpoints/`, in the bucket and in the local copy.

    Raises UserError if another process has taken over the lock, StoreError if a request failed, and OSError if a
    directory of the local copy cannot be moved.
    """
    prefix, aside = f'{_CHECKPOINTS}{step}/', self.path / 'damaged_checkpoints' / str(step)
    keys = list(self.store.sizes(prefix))
    if self._native:
      self.store.download({key: aside / key[len(prefix) :] for key in keys})
    else:
      move_directory(self.path / prefix, aside)
    self.before_checkpoint()
    marker = prefix + self._marker
    self.store.delete([marker])  # first, so it is not taken for a complete one
    self._remote.pop(marker, None)
    self.store.delete(keys)
    self._remote = {key: stamp for key, stamp in self._remote.items() if not key.startswith(prefix)}

  def _files(self) -> dict[str, _Stamp]:
    """Key -> stamp of the local files that belong in the bucket."""
    keys = [key for key in _keys_below(self.path, '') if not key.startswith(_LOCAL_ONLY) and not key.endswith('.tmp')]
    found = {}
    for key in keys:
      with contextlib.suppress(FileNotFoundError):  # replaced by another thread in the meantime
        found[key] = _stamp(self.path / key)
    return found


def move_directory(source: pathlib.Path, target: pathlib.Path) -> None:
  """Moves a directory, if it is still there, and replaces `target`; raises OSError."""
  if source.exists():
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
      shutil.rmtree(target)
    source.rename(target)


def address(path: str | os.PathLike[str], workdir: str | os.PathLike[str]) -> str:
  """The path of a file of a workdir, for messages; for a workdir in a bucket the address."""
  if not isinstance(workdir, StagedWorkdir) or not pathlib.Path(path).is_relative_to(workdir.path):
    return str(path)
  return posixpath.join(workdir.store.url, pathlib.Path(path).relative_to(workdir.path).as_posix())


@contextlib.contextmanager
def staged(store: Store, *, write: bool, first: bool) -> Iterator[StagedWorkdir]:
  """Context manager: a local copy of a workdir in a bucket. Changes are copied to the bucket at the end.

  With `write`, it takes the lock of the workdir and copies changes every `PUSH_SECONDS` seconds, as a run does.
  Processes that are not the `first` copy nothing; only Orbax reads and writes for them. Raises UserError if another
  process holds the lock, or the bucket cannot be read or written.
  """
  with contextlib.ExitStack() as stack:
    path = stack.enter_context(_local_directory()) / posixpath.basename(store.url)
    path.mkdir()
    if not first:
      yield StagedWorkdir(store, path, None)
      return
    lock = StoreLock(store, renewal=LOCK_RENEWAL, silence=LOCK_SILENCE) if write else None
    workdir = StagedWorkdir(store, path, lock)
    with _as_user_error(store, 'cannot be read'):
      if lock is not None:
        lock.acquire()
        stack.callback(_release, lock)
      workdir.pull()
    if write:
      stack.enter_context(_pushing(workdir))
    try:
      yield workdir
    except BaseException:
      with contextlib.suppress(UserError, StoreError):  # the first error is the one to show
        workdir.before_checkpoint()
      raise
    with _as_user_error(store, 'was not written completely'):
      until_reached(workdir.before_checkpoint, store.url)


@contextlib.contextmanager
def _as_user_error(store: Store, what: str) -> Iterator[None]:
  try:
    yield
  except StoreError as e:
    raise e.as_user_error(f'--workdir={store.url}: {what}: {e}') from e
  except OSError as e:
    message = f'--workdir={store.url}: {what}: {e.strerror or e}; TMPDIR chooses the disk of its copy'
    raise DiskError(message) from e


def _release(lock: StoreLock) -> None:
  try:
    lock.release()
  except StoreError as e:
    _log.warning('the lock was not released, so the next run waits for %g seconds: %s', LOCK_SILENCE, e)


@contextlib.contextmanager
def _pushing(workdir: StagedWorkdir) -> Iterator[None]:
  """Context manager: copies changed files every `PUSH_SECONDS` seconds, so that others see the run's progress."""
  ended = threading.Event()

  def push() -> None:
    while not ended.wait(PUSH_SECONDS):
      try:
        workdir.before_checkpoint()
      except (StoreError, UserError) as e:
        _log.warning('files were not copied to %s: %s', workdir, e)

  thread = threading.Thread(target=push, name='copy of the workdir', daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()


@contextlib.contextmanager
def _local_directory() -> Iterator[pathlib.Path]:
  """Context manager: a new temporary directory. Those of killed processes are removed."""
  parent = pathlib.Path(tempfile.gettempdir())
  for path in parent.glob(f'{_PREFIX}*/.owner'):
    with contextlib.suppress(OSError), path.open('a') as file:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the owner lives
      shutil.rmtree(path.parent, ignore_errors=True)
  try:
    directory = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX))
    file = (directory / '.new').open('a')
  except OSError as e:
    raise UserError(f'the local copy of the workdir cannot be made in {parent} (TMPDIR): {e.strerror or e}') from e
  try:
    with file:
      fcntl.flock(file, fcntl.LOCK_EX)
      (directory / '.new').rename(directory / '.owner')  # it has this name only while it is locked, or left behind
      yield directory
  finally:
    shutil.rmtree(directory, ignore_errors=True)


def _is_step(parts: list[str]) -> bool:
  return len(parts) > 2 and parts[0] == _CHECKPOINTS.rstrip('/') and parts[1].isdigit()


def _stamp(path: pathlib.Path) -> _Stamp:
  stat = path.stat()
  return stat.st_size, stat.st_mtime_ns


def _keys_below(root: pathlib.Path, prefix: str) -> list[str]:
  """The files below root/prefix as keys."""
  found = []
  for directory, _, names in os.walk(root / prefix):
    found += [(pathlib.Path(directory) / name).relative_to(root).as_posix() for name in names]
  return found
