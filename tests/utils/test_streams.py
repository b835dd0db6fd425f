"""A command goes on without a terminal, and says in one line that its results cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ragen_jax.runs.progress import Progress
from ragen_jax.utils import streams
from ragen_jax.utils.errors import DiskError
from tests.support.processes import run_main


@pytest.fixture(params=[True, False])
def broken(request):
  """A pipe that nobody reads, written at each line or not."""
  read, write = os.pipe()
  os.close(read)
  yield open(write, 'w', buffering=1 if request.param else -1)  # noqa: SIM115, it cannot be closed without an error


def test_messages_that_nobody_reads_are_left_out(broken):
  stream = streams.Messages(broken)
  with Progress(2, 0, stream) as progress:
    progress.write('before training: success 0.24')
    progress.update(2)
  assert stream.fileno() == broken.fileno()


def test_results_that_nobody_reads_are_one_error(broken):
  stream = streams.Results(broken)
  with pytest.raises(DiskError, match=r'^standard output cannot be written: Broken pipe$'):
    stream.write('success 0.24\n'), stream.flush()
  stream.write('success 0.24\n'), stream.flush()


def test_messages_and_results_arrive(tmp_path):
  for kind in (streams.Messages, streams.Results):
    with (tmp_path / 'a').open('w') as file:
      stream = kind(file)
      assert stream.write('é\n') == 2
      stream.flush()
      assert (tmp_path / 'a').read_text() == 'é\n'


def test_a_process_without_streams_gets_some_that_lead_nowhere():
  code = """
import os, sys
from ragen_jax.utils import streams
streams.open_missing()
numbers = [sys.stdin.fileno(), sys.stdout.fileno(), sys.stderr.fileno()]
assert sys.stdin.read() == '' and numbers == [0, 1, 2], numbers
"""
  command = [sys.executable, '-c', code]
  assert subprocess.run(['sh', '-c', 'exec "$@" <&- >&- 2>&-', 'sh', *command], check=False).returncode == 0


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='Linux only')
def test_the_command_line_keeps_its_exit_statuses_on_a_full_disk():
  with open('/dev/full', 'w') as full:
    assert run_main('--config=none', capture_output=False, stderr=full).returncode == 2
    found = run_main('--help', capture_output=False, stdout=full, stderr=subprocess.PIPE)
  assert found.returncode == 74
  assert found.stderr == 'error: standard output cannot be written: No space left on device\n'
