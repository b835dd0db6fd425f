"""The memory mappings of this process, of which compiled programs have many on CPUs."""

from __future__ import annotations

import logging
import pathlib

import jax

# Share of the mappings that Linux allows a process, above which it drops its programs. Tens of programs may be compiled
# before it is asked again.
_MOST = 0.5

_log = logging.getLogger(__name__)


def drop_programs(root: str = '/') -> bool:
  """Makes JAX drop its compiled programs if this process has half of the memory mappings that Linux allows it.

  On a CPU, a program of a large model has hundreds of mappings. A process that reaches `vm.max_map_count` (65,530 by
  default) is killed by a signal when it compiles the next program. Dropped programs are compiled again, or read from
  the cache on disk, when they are needed.

  Returns:
    Whether it dropped them. False on accelerators, whose programs are elsewhere, and where there is no limit to read.
  """
  if jax.default_backend() != 'cpu':
    return False
  place = pathlib.Path(root) / 'proc'
  try:
    most = int((place / 'sys/vm/max_map_count').read_text())
    with (place / 'self/maps').open('rb') as f:
      count = sum(1 for _ in f)
  except (OSError, ValueError):  # not Linux
    return False
  if count <= _MOST * most:
    return False
  jax.clear_caches()
  _log.info(
    'the compiled programs are dropped, because this process has %d of the %d memory mappings that it may have '
    '(sysctl vm.max_map_count); a program that is needed again is compiled again', count, most,
  )  # fmt: skip
  return True
