"""What a signal does while a run is between two steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types

import pytest

from ragen_jax.runs.interrupt import Interrupt, Stopped, lost_interrupts_again
from tests.support.paths import ROOT


@pytest.mark.parametrize(('number', 'status'), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_and_the_second_kills(number, status, capfd):
  seen = []
  before = signal.signal(number, lambda *_: seen.append('old'))
  try:
    with Interrupt() as interrupt:
      assert interrupt.requested == 0
      os.kill(os.getpid(), number)
      assert interrupt.requested == number and not seen
      assert signal.getsignal(number) is signal.SIG_DFL
    os.kill(os.getpid(), number)
    assert seen == ['old']
  finally:
    signal.signal(number, before)
  assert Stopped(interrupt.requested).status == status
  assert 'stopping after this iteration or evaluation; what has been learnt is saved; ' in capfd.readouterr().err


def test_before_the_first_iteration_a_signal_says_that_nothing_has_been_learnt(capfd):
  before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
  try:
    with Interrupt('evaluation') as interrupt:
      with interrupt.before_learning():
        os.kill(os.getpid(), signal.SIGTERM)
      os.kill(os.getpid(), signal.SIGINT)
  finally:
    signal.signal(signal.SIGTERM, before)
  first, second = capfd.readouterr().err.strip().split('\n\n')
  assert 'nothing has been learnt yet; SIGTERM again stops at once' in first and 'is saved' not in first
  assert 'what has been learnt is saved; Ctrl-C again' in second


def test_without_a_signal_the_handlers_are_put_back():
  handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
  with Interrupt() as interrupt:
    pass
  assert interrupt.requested == 0
  assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


_FRESH = 'import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); '


def _ended(code, tmp_path, said):
  """(status, errors) of a program that gets SIGINT when it has written a line."""
  environment = os.environ | {'PYTHONPATH': f'{tmp_path}{os.pathsep}{ROOT}'}
  command = [sys.executable, '-c', _FRESH + code]
  with subprocess.Popen(
    command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  ) as process:
    try:
      assert process.stdout.readline().strip() == said
      process.send_signal(signal.SIGINT)
      return process.wait(60), process.stderr.read()
    finally:
      process.kill()


def test_ctrl_c_during_the_imports_ends_without_a_traceback(tmp_path):
  (tmp_path / 'absl').mkdir()
  (tmp_path / 'absl' / '__init__.py').write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
  assert _ended("runpy.run_path('main.py', run_name='__main__')", tmp_path, 'importing') == (-signal.SIGINT, '')


def test_ctrl_c_before_the_flags_are_parsed_is_told_in_one_line(tmp_path):
  waiting = "lambda *_, **__: (print('parsing', flush=True), time.sleep(60))"
  code = (
    f'import time; import ragen_jax.__main__ as m; m.app.run = {waiting}; signal.signal(2, signal.SIG_DFL); m.run()'
  )
  assert _ended(code, tmp_path, 'parsing') == (130, 'interrupted\n')


_IN_A_CALLBACK = """
import time

class Slow:
  def __del__(self):
    print('in a callback', flush=True)
    time.sleep(60)

def main(*_, **__):
  Slow()
  time.sleep(60)

import ragen_jax.__main__ as m
m.app.run = main
m.run()
"""


@pytest.mark.slow
def test_ctrl_c_in_a_callback_that_swallows_it_is_raised_again(tmp_path):
  assert _ended(_IN_A_CALLBACK, tmp_path, 'in a callback') == (130, 'interrupted\n')


def test_other_errors_of_callbacks_are_shown_as_before(monkeypatch):
  seen = []
  monkeypatch.setattr(sys, 'unraisablehook', seen.append)
  before = sys.unraisablehook
  with lost_interrupts_again():
    assert sys.unraisablehook is not before
    sys.unraisablehook(types.SimpleNamespace(exc_type=ValueError))
  assert [lost.exc_type for lost in seen] == [ValueError] and sys.unraisablehook is before
