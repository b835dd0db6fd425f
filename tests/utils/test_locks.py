"""A lock is held by one process at a time and ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from ragen_jax.utils.errors import UserError
from ragen_jax.utils.locks import file_lock
from tests.support.paths import ROOT

_HOLD = """
import sys
from ragen_jax.utils.locks import file_lock
with file_lock(sys.argv[1], 'it', 'wait'):
  print('held', flush=True)
  sys.stdin.read()
"""


def test_a_lock_is_released_by_a_process_that_is_killed(tmp_path):
  path = tmp_path / 'new' / 'lock'
  holder = subprocess.Popen(
    [sys.executable, '-c', _HOLD, path], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
  )
  with holder:
    assert holder.stdout.readline() == 'held\n'
    with pytest.raises(UserError, match=r'^it is in use by another run; wait$'), file_lock(path, 'it', 'wait'):
      pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
  with file_lock(path, 'it', 'wait'):
    pass


def test_a_lock_below_a_file_cannot_be_taken(tmp_path):
  (tmp_path / 'file').touch()
  with pytest.raises(UserError, match=r'^it cannot be used: '), file_lock(tmp_path / 'file' / 'lock', 'it', 'wait'):
    pass
