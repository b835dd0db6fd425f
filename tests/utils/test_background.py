"""Programs that are compiled in background threads: which, in what order, and what the run waits for."""

from __future__ import annotations

import logging
import threading

import pytest

from ragen_jax.distributed import processes
from ragen_jax.utils import background as background_module
from ragen_jax.utils.background import Background, still_compiling

_LONG = 60.0  # seconds; nothing here takes so long unless it hangs


@pytest.fixture
def background():
  found = Background(1)
  yield found
  found.close()


def _blocked(background):
  """Occupies the thread: (it is occupied, lets it go on)."""
  started, go_on = threading.Event(), threading.Event()
  background.want([('first', lambda: (started.set(), go_on.wait(_LONG)))], urgency=0)
  assert started.wait(_LONG)
  return go_on


def test_the_most_urgent_is_compiled_first_and_each_once(background):
  go_on, compiled = _blocked(background), []
  for key, urgency in (('c', 2), ('a', 1), ('b', 1), ('a', 0), ('first', 0)):
    background.want([(key, lambda key=key: compiled.append(key))], urgency)
  go_on.set()
  assert background.wait(_LONG)
  assert compiled == ['a', 'b', 'c'] and background.done == ['first', 'a', 'b', 'c']
  background.want([('a', lambda: compiled.append('again'))], urgency=0)
  assert background.wait(_LONG) and compiled == ['a', 'b', 'c']


def test_what_still_waits_is_left_to_the_run(background):
  go_on, compiled = _blocked(background), []
  background.want([('a', lambda: compiled.append('a'))], urgency=0)
  assert background.need('a') and not background.need('a')
  go_on.set()
  assert background.wait(_LONG) and not compiled and background.done == ['first']
  assert background.need('b')  # nobody asked for it
  background.want([('b', lambda: compiled.append('b'))], urgency=0)
  assert background.wait(_LONG) and not compiled


def test_the_run_waits_for_what_is_being_compiled(background, monkeypatch):
  """The program is only ready some time after the caller has begun to wait."""
  go_on, ready, wait_for = _blocked(background), [], background._changed.wait_for
  caller = threading.current_thread()

  def observed(predicate, timeout=None):
    if threading.current_thread() is not caller:
      return wait_for(predicate, timeout)
    go_on.set()
    found = wait_for(predicate, timeout)
    ready.append(list(background._done))  # the caller holds the lock: nothing was added since it stopped waiting
    return found

  monkeypatch.setattr(background._changed, 'wait_for', observed)
  assert background.need('first')
  go_on.set()
  assert ready == [['first']]


def test_a_failure_is_logged_and_the_next_program_compiled(background, caplog):
  def fail():
    raise ValueError('two\nlines')

  with caplog.at_level(logging.WARNING):
    background.want([('a', fail), ('b', lambda: None)], urgency=0)
    assert background.wait(_LONG)
  assert background.done == ['b'] and background.need('a')
  (record,) = caplog.records
  assert record.getMessage() == 'a program was not compiled ahead, a: two lines'


def test_stopped_it_finishes_what_it_compiles_and_drops_the_rest():
  background, compiled = Background(2), []
  holds = threading.Barrier(3)
  go_on = threading.Event()
  background.want([(key, lambda: (holds.wait(_LONG), go_on.wait(_LONG))) for key in ('a', 'b')], urgency=0)
  holds.wait(_LONG)
  background.want([('c', lambda: compiled.append('c'))], urgency=0)
  background.stop()  # returns although both threads are occupied
  assert background.threads == 2 and all(thread.is_alive() for thread in background._threads)
  background.want([('d', lambda: compiled.append('d'))], urgency=0)
  go_on.set()
  for thread in background._threads:
    thread.join(_LONG)
  assert not any(thread.is_alive() for thread in background._threads)
  assert sorted(background.done) == ['a', 'b'] and not compiled
  assert background.wait(_LONG)


def test_closed_it_waits_for_all_threads_together_until_one_deadline(monkeypatch):
  """A clock that goes on by what each thread is waited for: no thread ends before."""
  found, clock, patience = Background(3), [100.0], []

  class Busy:
    def join(self, timeout):
      patience.append(timeout)
      clock[0] += min(timeout, 3.0)

  real, found._threads = found._threads, [Busy() for _ in range(3)]
  monkeypatch.setattr(background_module.time, 'monotonic', lambda: clock[0])
  found.close()
  assert patience == [5.0, 2.0, 0.0]
  monkeypatch.undo()
  for thread in real:
    thread.join(_LONG)
  assert not any(thread.is_alive() for thread in real)


def test_closed_it_has_waited_for_what_it_compiles(background):
  go_on = _blocked(background)
  go_on.set()
  background.close()
  assert background.done == ['first'] and not any(thread.is_alive() for thread in background._threads)


def test_a_process_with_a_compiler_ends_at_once(monkeypatch):
  """The interpreter's own end would abort the process while a thread compiles."""
  ended = []
  monkeypatch.setattr(processes.os, '_exit', ended.append)
  background = Background(1)
  go_on = _blocked(background)
  assert still_compiling()
  with pytest.raises(SystemExit):  # as `os._exit` does not end the process here
    processes.exit_process(3)
  assert ended == [3]
  go_on.set()
  background.close()
  assert not still_compiling()
  with pytest.raises(SystemExit) as stopped:
    processes.exit_process(4)
  assert stopped.value.code == 4 and ended == [3]
