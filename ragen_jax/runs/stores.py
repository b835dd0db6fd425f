"""Buckets of Google Cloud Storage and S3: whole objects, by the key that follows the address of a workdir.

An object store has no directories, cannot append to an object, and renames by copying. It replaces an object in one
step, and can refuse to replace one. `Store` has only operations that work like this on both services.
"""

from __future__ import annotations

import contextlib
import errno
import pathlib
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ragen_jax.utils.errors import DiskError, StoreAway, UserError, describe_error

# Scheme of an address -> fsspec's name of the service, and the package that fsspec needs for it.
SERVICES = {'gs': ('gcs', 'gcsfs'), 's3': ('s3', 's3fs')}
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # no service's library raises them
_THREADS = 8  # transfers at the same time; each waits for the network most of the time


class StoreError(OSError):
  """A request to an object store failed; the message is one line."""

  @property
  def lasting(self) -> bool:
    """Whether the same request will fail again: an object or a bucket is missing, or something is not allowed."""
    cause = self.__cause__
    known = isinstance(cause, FileNotFoundError | FileExistsError | PermissionError)
    refused = getattr(cause, 'errno', None) == errno.EINVAL or str(getattr(cause, 'code', '')) in ('400', '401', '403')
    return known or refused or 'Credentials' in type(cause).__name__ or str(cause).startswith('Forbidden')

  def as_user_error(self, message: str) -> UserError:
    """A `UserError` with this message: `StoreAway` unless the error is lasting."""
    return (UserError if self.lasting else StoreAway)(message)


def is_address(path: object) -> bool:
  """Whether a path is an address with a scheme, such as gs://bucket/run, instead of a path on disk."""
  return re.match(r'[a-zA-Z][\w+.-]*://', str(path)) is not None


class Store:
  """The objects whose names begin with one address. Keys are relative to it: 'tb/events' in s3://bucket/run.

  All methods raise `StoreError` if a request fails, after the repetitions of the service's own library.
  """

  def __init__(self, url: str, files: Any):
    """Takes an address and fsspec's file system of its service."""
    self.url = url.rstrip('/')
    self._root = self.url.partition('://')[2]
    self._files = files

  def sizes(self, prefix: str = '') -> dict[str, int]:
    """Key -> bytes of all objects whose key begins with the folder `prefix`, which ends in a slash or is empty."""
    with _errors():
      self._files.invalidate_cache()
      found = self._files.find(f'{self._root}/{prefix}'.rstrip('/'), detail=True)
    start = len(self._root) + 1
    sizes = {name.lstrip('/')[start:]: info['size'] for name, info in found.items() if info['type'] == 'file'}
    return {key: size for key, size in sizes.items() if key and not key.endswith('/')}

  def read(self, key: str) -> bytes | None:
    """The content of an object; None if it does not exist."""
    try:
      with _errors():
        return self._files.cat_file(self._path(key))
    except StoreError as e:
      if isinstance(e.__cause__, FileNotFoundError):
        return None
      raise

  def write(self, key: str, content: bytes) -> None:
    """Writes or replaces an object in one step."""
    with _errors():
      self._files.pipe_file(self._path(key), content)

  def create(self, key: str, content: bytes) -> bool:
    """Writes an object unless it exists; the service itself decides. Returns whether it was written."""
    try:
      with _errors():
        self._files.pipe_file(self._path(key), content, mode='create')
    except StoreError as e:
      if isinstance(e.__cause__, FileExistsError):
        return False
      raise
    return True

  def upload(self, files: dict[str, pathlib.Path], *, missing_ok: bool = False) -> set[str]:
    """Writes or replaces objects by key with the contents of files, several at the same time.

    With `missing_ok`, files that do not exist are left out instead of raising an error; returns their keys.
    """
    left_out = set()

    def put(item: tuple[str, pathlib.Path]) -> None:
      key, path = item
      try:
        self._files.put_file(str(path), self._path(key))
      except FileNotFoundError as e:
        if not missing_ok or e.filename != str(path):
          raise
        left_out.add(key)

    _each(put, files.items())
    return left_out

  def download(self, files: dict[str, pathlib.Path]) -> None:
    """Writes objects by key to files, whose directories are created. Raises DiskError if a file cannot be written."""

    def get(item: tuple[str, pathlib.Path]) -> None:
      key, path = item
      try:
        self._files.get_file(self._path(key), str(path))
      except OSError as e:
        if e.errno in _DISK_ERRORS or e.filename == str(path):
          raise self._not_written(path, e) from e
        raise

    for path in files.values():
      try:
        path.parent.mkdir(parents=True, exist_ok=True)
      except OSError as e:
        raise self._not_written(path, e) from e
    _each(get, files.items())

  def delete(self, keys: Iterable[str]) -> None:
    """Deletes objects; those that do not exist are left out."""

    def delete(key: str) -> None:
      with contextlib.suppress(FileNotFoundError):
        self._files.rm_file(self._path(key))

    _each(delete, keys)

  def check(self) -> None:
    """Raises UserError if the bucket does not exist or cannot be read."""
    try:
      with _errors():
        self._files.info(self._root.partition('/')[0])
    except StoreError as e:
      if isinstance(e.__cause__, FileNotFoundError):
        raise UserError(f'--workdir={self.url}: there is no such bucket') from e
      # Some credentials may use the objects of a bucket, but not look at the bucket itself.
      if not isinstance(e.__cause__, PermissionError) and 'Forbidden' not in str(e):
        raise e.as_user_error(f'--workdir={self.url}: the bucket cannot be read: {e}') from e

  def _not_written(self, path: pathlib.Path, error: OSError) -> DiskError:
    return DiskError(f'{path} was not written: {error.strerror}; TMPDIR chooses the disk of the copy of {self.url}')

  def _path(self, key: str) -> str:
    return f'{self._root}/{key}'


def open_store(url: str) -> Store:
  """The store of an address, whose bucket exists.

  Raises UserError if the address is not one of a supported service, a package is not installed, or the bucket does not
  exist or cannot be read.
  """
  scheme, _, rest = url.partition('://')
  bucket, _, folder = rest.partition('/')
  if scheme not in SERVICES or not bucket or not folder.strip('/'):
    raise UserError(f'--workdir={url}: must be a directory on disk, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER')
  service, package = SERVICES[scheme]
  try:
    import fsspec

    # Also for the file systems that Orbax opens: other processes write and delete objects.
    fsspec.config.conf.setdefault(service, {})['use_listings_cache'] = False
    with _errors():
      files = fsspec.filesystem(service)
  except ImportError as e:
    raise UserError(
      f'--workdir={url}: needs the package {package}; pip install -r requirements-stores.txt, or pip install {package}'
    ) from e
  except StoreError as e:
    raise e.as_user_error(f'--workdir={url}: the bucket cannot be read: {e}') from e
  store = Store(url, files)
  store.check()
  return store


def _each(function: Any, items: Iterable[Any]) -> None:
  """Calls a function with each item, several at the same time; raises the first error when all have ended."""
  with _errors(), ThreadPoolExecutor(_THREADS) as pool:
    for _ in pool.map(function, items):
      pass


@contextlib.contextmanager
def _errors() -> Iterator[None]:
  """Turns every error of the services' libraries, which have no common class, into a `StoreError` of one line."""
  try:
    yield
  except (ImportError, StoreError, UserError):
    raise
  except Exception as e:
    raise StoreError(f'{e.strerror}' if isinstance(e, OSError) and e.strerror else describe_error(e)) from e
