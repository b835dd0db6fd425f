"""A process of a run that meets the others again and again, until it is told to fail.

python -m tests.support.waiting_worker ADDRESS PROCESSES INDEX MODE SILENCE PATIENCE
"""

from __future__ import annotations

import contextlib
import sys
import time

from ragen_jax.distributed import processes, watchdog
from ragen_jax.utils.errors import UserError

ROUNDS = 100_000  # more than a test waits for
_FAILS = 3  # the round in which it fails


def slow_step(mode: str) -> None:
  """What the process does in the round in which it fails."""
  if mode == 'hang':
    time.sleep(600)
  if mode == 'error':
    raise MemoryError('no room')
  if mode == 'user error':
    raise UserError('metrics were not written in /full: No space left on device')


def main() -> None:
  """Plays the rounds."""
  address, count, index, mode, silence, patience = sys.argv[1:]
  watchdog.SILENCE = float(silence)
  processes.connect(address, int(count), int(index), float(patience))
  for i in range(ROUNDS):
    processes.mark_progress('gen')
    if i == _FAILS:
      slow_step(mode)
    processes.largest([i])
    with contextlib.suppress(BrokenPipeError):
      print(f'round {i}', flush=True)
    time.sleep(0.1)


if __name__ == '__main__':
  try:
    main()
  except UserError as e:
    sys.stderr.write(f'error: {e}\n')
    processes.exit_process(e.status, reason=str(e))
