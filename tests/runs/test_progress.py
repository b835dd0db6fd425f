"""The live line on a real terminal, plain lines elsewhere."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios

import pytest

from ragen_jax.runs.progress import Progress

_END = '\N{SYMBOL FOR END OF TEXT}'


class Clock:
  def __init__(self):
    self.now = 100.0

  def __call__(self) -> float:
    return self.now


@pytest.fixture
def terminal(monkeypatch):
  """A terminal of 80 columns: (what a program writes to, a function that reads what was written)."""
  monkeypatch.setenv('TERM', 'xterm')
  main, child = pty.openpty()
  fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 80, 0, 0))
  with os.fdopen(child, 'w') as stream:

    def read() -> str:
      # A terminal hands on what it got in pieces of its own: an end of our own says that all of it is here.
      stream.write(_END)
      stream.flush()
      written = ''
      while not written.endswith(_END):
        written += os.read(main, 2**16).decode()
      return written.removesuffix(_END)

    yield stream, read
  os.close(main)


def screen(written: str) -> list[str]:
  """The lines that a terminal shows in the end."""
  lines, column = [''], 0
  for sign in re.findall(r'\x1b\[K|.', written, re.DOTALL):
    if sign == '\n':
      lines.append('')
    elif sign == '\r':
      column = 0
    elif sign == '\x1b[K':
      lines[-1] = lines[-1][:column]
    else:
      lines[-1] = lines[-1][:column] + sign + lines[-1][column + 1 :]
      column += 1
  return [line.rstrip() for line in lines]


def test_plain_lines_every_ten_seconds():
  clock, stream = Clock(), io.StringIO()
  with Progress(60, 0, stream, clock=clock) as progress:
    progress.write('before training: success 0.24')
    clock.now += 30  # compiles
    progress.update(1, {'success': 0.2, 'reward': -0.111}, tokens=30_000)
    for done in range(2, 13):
      clock.now += 2.1
      progress.update(done, {'success': 0.41, 'reward': 0.39}, tokens=94_920)
  assert stream.getvalue().splitlines() == [
    'before training: success 0.24',
    'iteration 1/60 | success 0.20 | reward -0.11 | 1.0k tok/s | 30.0 s/it | --:-- left',
    'iteration 6/60 | success 0.41 | reward 0.39 | 45.2k tok/s | 2.1 s/it | 01:53 left',
    'iteration 11/60 | success 0.41 | reward 0.39 | 45.2k tok/s | 2.1 s/it | 01:43 left',
    'iteration 12/60 | success 0.41 | reward 0.39 | 45.2k tok/s | 2.1 s/it | 01:41 left',
  ]
  assert '\x1b' not in stream.getvalue() and '\r' not in stream.getvalue()


def test_time_left_leaves_the_first_iteration_out_and_follows_the_last_ones():
  clock, stream = Clock(), io.StringIO()
  progress = Progress(1000, 500, stream, clock=clock)  # resumed: the first update compiles here too
  clock.now += 600
  progress.update(501)
  for done in range(502, 512):
    clock.now += 11
    progress.update(done)
  assert '11.0 s/it | 1:29:39 left' in stream.getvalue().splitlines()[-1]  # 489 iterations
  for done in range(512, 540):
    clock.now += 0.5
    progress.update(done)
  clock.now += 0.5
  progress.update(540)
  progress.close()
  progress.close()
  assert stream.getvalue().splitlines()[-1] == 'iteration 540/1000 | 0.50 s/it | 03:50 left'


def test_an_evaluation_before_training_is_not_counted():
  clock, stream = Clock(), io.StringIO()
  with Progress(2, 0, stream, clock=clock) as progress:
    clock.now += 60
    progress.restart()
    clock.now += 4
    progress.update(1, tokens=400)
  assert '| 100 tok/s | 4.0 s/it |' in stream.getvalue()


def test_the_last_line_has_no_time_left():
  clock, stream = Clock(), io.StringIO()
  with Progress(2, 0, stream, clock=clock) as progress:
    for done in (1, 2):
      clock.now += 3
      progress.update(done, tokens=30_000_000 * (done - 1))
  assert stream.getvalue().splitlines()[-1] == 'iteration 2/2 | 10.0M tok/s | 3.0 s/it | 00:00 left'


def test_disabled():
  stream = io.StringIO()
  with Progress(2, 0, stream, enabled=False) as progress:
    progress.write('text')
    progress.update(2)
  assert stream.getvalue() == ''


def test_live_line(terminal):
  stream, read = terminal
  clock = Clock()
  with Progress(3, 0, stream, clock=clock) as progress:
    for done in (1, 2):
      clock.now += 1
      progress.update(done, {'success': done / 10})
    progress.write('evaluation: success 0.30')
    clock.now += 1
    progress.update(3, {'success': 0.3})
  written = read()
  assert screen(written) == [
    'evaluation: success 0.30',
    'iteration 3/3 | success 0.30 | 1.0 s/it | 00:00 left',
    '',
  ]
  assert 'iteration 1/3 | success 0.10' in written


def test_live_line_fits_the_terminal(terminal):
  stream, read = terminal
  with Progress(40, 0, stream, clock=Clock()) as progress:
    progress.update(12, {'train success': 0.4, 'reward': 0.4, 'a number of less interest': 1, 'another': 2})
  line = screen(read())[0]
  assert line == 'iteration 12/40 | train success 0.40 | reward 0.40 | 00:00 left'
  with Progress(3, 0, stream, clock=Clock()) as progress:
    progress.update(1, {'a name of more than eighty columns, which nothing can make room for,' + 20 * ' really': 0})
  assert len(screen(read())[0]) == len('iteration 1/3 | 00:00 left')


def test_dumb_terminals_get_lines(terminal, monkeypatch):
  stream, read = terminal
  monkeypatch.setenv('TERM', 'dumb')
  with Progress(3, 0, stream) as progress:
    progress.update(1)
  assert '\x1b' not in read()
