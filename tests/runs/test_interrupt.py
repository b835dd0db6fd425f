"""What a signal does while a run is between two steps."""

from __future__ import annotations

import os
import signal

import pytest

from ragen_jax.runs.interrupt import Interrupt, Stopped


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


def test_without_a_signal_the_handlers_are_put_back():
  handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
  with Interrupt() as interrupt:
    pass
  assert interrupt.requested == 0
  assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
