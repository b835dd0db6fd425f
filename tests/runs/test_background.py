"""Programs that are compiled in background threads: which, in what order, and what the run waits for."""

from __future__ import annotations

import logging
import threading

import pytest

from ragen_jax.runs.background import Background

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


def test_the_run_waits_for_what_is_being_compiled(background):
  go_on, returned = _blocked(background), []

  def need():
    returned.append((background.need('first'), go_on.is_set()))

  caller = threading.Thread(target=need, daemon=True)
  caller.start()
  assert not returned
  go_on.set()
  caller.join(_LONG)
  assert returned == [(True, True)] and background.done == ['first']


def test_a_failure_is_logged_and_the_next_program_compiled(background, caplog):
  def fail():
    raise ValueError('two\nlines')

  with caplog.at_level(logging.WARNING):
    background.want([('a', fail), ('b', lambda: None)], urgency=0)
    assert background.wait(_LONG)
  assert background.done == ['b'] and background.need('a')
  (record,) = caplog.records
  assert record.getMessage() == 'a program was not compiled ahead, a: two lines'


def test_closed_it_finishes_what_it_compiles_and_drops_the_rest():
  background, compiled = Background(2), []
  holds = threading.Barrier(3)
  go_on = threading.Event()
  background.want([(key, lambda: (holds.wait(_LONG), go_on.wait(_LONG))) for key in ('a', 'b')], urgency=0)
  holds.wait(_LONG)
  background.want([('c', lambda: compiled.append('c'))], urgency=0)
  closer = threading.Thread(target=background.close, daemon=True)
  closer.start()
  go_on.set()
  closer.join(_LONG)
  assert not closer.is_alive() and sorted(background.done) <= ['a', 'b', 'c'] and {'a', 'b'} <= set(background.done)
  threads = [t for t in threading.enumerate() if t.name.startswith('ragen_jax-compile')]
  assert not any(t in background._threads for t in threads)
  background.want([('d', lambda: compiled.append('d'))], urgency=0)
  assert 'd' not in compiled and background.wait(_LONG)
