"""Repeats what needs a bucket while the bucket is away: a network or a service often comes back within minutes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ragen_jax.runs.stores import StoreError
from ragen_jax.utils.retry import pause_s

_log = logging.getLogger(__name__)

REPEAT_SECONDS = 300.0  # less than the time that other processes wait for the first one (--patience)
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 60.0


def until_reached(operation: Callable[[], None], store: str) -> None:
  """Calls a function until it raises no `StoreError`, for `REPEAT_SECONDS` at most and with growing pauses.

  A first Ctrl-C or SIGTERM of a run does not end the pauses (see `interrupt.Interrupt`), because the checkpoint that it
  waits for would be lost; a second one ends the process. Raises the last StoreError, or one that lasts
  (`StoreError.lasting`).
  """
  begun, failed = None, 0
  while True:
    try:
      operation()
    except StoreError as e:
      now, failed = time.monotonic(), failed + 1
      if begun is None and not e.lasting:
        begun = now
        _log.warning('%s: %s; trying again for %g minutes', store, e, REPEAT_SECONDS / 60)
      left = 0.0 if e.lasting else begun + REPEAT_SECONDS - now
      if left <= 0:
        raise
    else:
      if begun is not None:
        _log.warning('%s is reached again after %.0f s', store, time.monotonic() - begun)
      return
    time.sleep(min(pause_s(failed, _FIRST_PAUSE, _LONGEST_PAUSE), left))
