"""The memory of this host: what this process may still take, and the return of what it no longer needs."""

from __future__ import annotations

import ctypes
import os
import pathlib
from collections.abc import Iterator

# What cgroups report if they have no limit is larger than this.
_NO_LIMIT = 2**60
# glibc's parameter M_MMAP_THRESHOLD of `mallopt`, and the bytes from which on an allocation has pages of its own.
_MMAP_THRESHOLD, _OWN_PAGES = -3, 2**22
# Its parameters M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD, with which freed memory stays in one heap,
# which grows by 256 MiB at a time.
_ONE_HEAP = ((-8, 1), (-4, 0), (-1, 2**31 - 1), (-2, 2**28))


def available(root: str = '/') -> int:
  """Bytes that processes of this host can take without swapping, and within the cgroup of this process."""
  place = pathlib.Path(root)
  try:
    lines = (place / 'proc/meminfo').read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith('MemAvailable:'))
  except (OSError, StopIteration):  # not Linux
    free = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  return max(min([free, *_left_in_cgroups(place)]), 0)


def _left_in_cgroups(root: pathlib.Path) -> Iterator[int]:
  """The bytes left in each cgroup with a limit that this process is in."""
  try:
    lines = (root / 'proc/self/cgroup').read_text().splitlines()
  except OSError:
    return
  for line in lines:
    _, controllers, path = line.split(':', 2)
    if not controllers:
      home, names = root / 'sys/fs/cgroup', ('memory.max', 'memory.current', 'inactive_file')
    elif 'memory' in controllers.split(','):
      home = root / 'sys/fs/cgroup/memory'
      names = 'memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file'
    else:
      continue
    own = home / path.lstrip('/')
    # In a container the path may be the host's, which is not there; its own cgroup is then the outermost.
    for folder in (own, *own.parents):
      found = _left(folder, *names)
      if found is not None:
        yield found
      if folder == home:
        break


def _left(folder: pathlib.Path, limit: str, usage: str, inactive: str) -> int | None:
  """The bytes left in a cgroup, with the pages of files that the kernel drops first; None without a limit."""
  try:
    most, used = ((folder / name).read_text().strip() for name in (limit, usage))
    if most == 'max' or int(most) > _NO_LIMIT:
      return None
    stat = dict(line.split() for line in (folder / 'memory.stat').read_text().splitlines())
    return int(most) - int(used) + int(stat.get(inactive, 0))
  except (OSError, ValueError):
    return None


def return_what_is_freed() -> None:
  """Makes `free` return arrays of 4 MiB or more to the host at once. Does nothing where the C library is not glibc.

  By itself, glibc raises the size from which on it does so to that of the arrays that a run frees, up to 32 MiB. Arrays
  of a layer then leave holes that stay with the process. A threshold in the environment takes precedence.
  """
  if 'MALLOC_MMAP_THRESHOLD_' not in os.environ:
    _set((_MMAP_THRESHOLD, _OWN_PAGES))


def keep_what_is_freed() -> None:
  """Makes `free` keep memory for the next arrays. Does nothing where the C library is not glibc.

  By itself, glibc returns the memory of a call of a program to the host, and every call gets its pages anew. For arrays
  of a small model this takes longer than some of the computations. Must be called before the first device is used,
  because its threads choose their heaps then. Settings of glibc's allocator in the environment take precedence.
  """
  given = any(name.startswith('MALLOC_') for name in os.environ) or 'malloc' in os.environ.get('GLIBC_TUNABLES', '')
  if not given:
    _set(*_ONE_HEAP)


def _set(*parameters: tuple[int, int]) -> None:
  mallopt = getattr(_libc(), 'mallopt', None)
  if mallopt is not None:
    for parameter in parameters:
      mallopt(*parameter)


def _libc() -> ctypes.CDLL | None:
  try:
    return ctypes.CDLL(None)
  except (OSError, TypeError):  # Windows
    return None
