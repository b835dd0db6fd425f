"""Lock files, which keep a second process from writing to the same place."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pathlib
from collections.abc import Iterator

from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def file_lock(path: str | os.PathLike[str], what: str, remedy: str) -> Iterator[None]:
  """Context manager: holds a lock on a file, which is created if it does not exist and never removed.

  The operating system releases the lock when the process ends, even if it is killed. Raises UserError if another
  process holds it, or the file cannot be written; the error says `what` is locked, such as 'workdir /tmp/a', and the
  `remedy`.
  """
  path = pathlib.Path(path)
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open('a')
  except (FileExistsError, NotADirectoryError) as e:
    raise UserError(f'{what} cannot be used: it is a file, or lies in one') from e
  except OSError as e:
    raise UserError(f'{what} cannot be used: {e.strerror or e}') from e
  with file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
      raise UserError(f'{what} is in use by another run; {remedy}') from e
    except OSError as e:  # some network file systems have no locks
      _log.warning('%s is not locked: %s', what, e.strerror or e)
    yield


@contextlib.contextmanager
def owned(directory: str) -> Iterator[None]:
  """Context manager: marks a directory, under any name, as that of a process that lives; see `has_owner`."""
  file = os.open(directory, os.O_RDONLY)
  try:
    with contextlib.suppress(OSError):  # a disk without locks
      fcntl.flock(file, fcntl.LOCK_EX)
    yield
  finally:
    os.close(file)


def has_owner(directory: str) -> bool | None:
  """Whether a process that lives writes a directory; None if the disk cannot tell. One that is missing has no owner."""
  try:
    file = os.open(directory, os.O_RDONLY)
  except FileNotFoundError:
    return False
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return True
  except OSError:
    return None
  finally:
    os.close(file)
  return False
