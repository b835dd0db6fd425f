"""The watchdog's judgement about processes that are silent, late or have failed, with a clock of the tests."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys

import pytest

from ragen_jax.distributed import watchdog
from ragen_jax.distributed.watchdog import SILENCE, Watchdog
from tests.support.paths import ROOT
from tests.support.processes import coordinator, environment

PATIENCE = 100.0
STEP = SILENCE / 10  # seconds between two looks


class Clock:
  now = 0.0

  def __call__(self) -> float:
    return self.now


class Table(dict):
  """A store that can be cut off from a process."""

  broken = False

  def set(self, key, text):
    if self.broken:
      raise RuntimeError('UNAVAILABLE')
    self[key] = text

  def all(self):
    if self.broken:
      raise RuntimeError('UNAVAILABLE')
    return dict(self)


class Run:
  """Processes of a run that look at one another every `STEP` seconds."""

  def __init__(self, count=3, patience=PATIENCE):
    self.clock, self.store, self.ended = Clock(), Table(), []
    self.dogs = [
      Watchdog(self.store, i, count, patience=patience, end=self.ended.append, clock=self.clock) for i in range(count)
    ]

  def pass_time(self, seconds, alive=None):
    """Lets the processes in `alive` (default: all) look; their last words by process."""
    alive, words = range(len(self.dogs)) if alive is None else alive, {}
    for _ in range(round(seconds / STEP)):
      self.clock.now += STEP
      for i in alive:
        self.dogs[i].exchange()
      words |= {i: word for i in alive if (word := self.dogs[i].judge())}
    return words


def test_processes_that_wait_together_are_left_alone_however_long_it_takes():
  run = Run()
  for dog in run.dogs:
    dog.passed('update_actor')
  assert run.pass_time(50 * PATIENCE) == {}


def test_one_that_passes_points_slowly_is_left_alone():
  run = Run()
  for _ in range(5):
    run.dogs[0].passed('gen')
    run.dogs[2].passed()
    assert run.pass_time(0.9 * PATIENCE) == {}
    run.dogs[1].passed()


def test_one_that_hangs_is_named_by_all_and_by_itself_with_its_phase():
  run = Run()
  for dog in run.dogs:
    dog.passed('gen')
  assert run.pass_time(5 * PATIENCE) == {}  # nobody waited for it yet
  run.dogs[0].passed()
  assert run.pass_time(0.9 * PATIENCE) == {}
  run.dogs[2].passed()
  words = run.pass_time(0.5 * PATIENCE)
  assert sorted(words) == [0, 1, 2] and len(set(words.values())) == 1
  assert words[0].startswith('process 1 of 3 (') and 'hangs for 100 s in the phase gen, at ' in words[0]
  assert 'process 0' not in words[0] and 'process 2' not in words[0]


def test_without_patience_one_may_hang():
  run = Run(patience=0.0)
  run.dogs[0].passed('gen')
  assert run.pass_time(20 * PATIENCE) == {}


def test_one_that_is_silent_is_named_with_its_last_phase_and_not_earlier():
  run = Run()
  run.dogs[2].passed('save_checkpoint')
  assert run.pass_time(STEP) == {}
  assert run.pass_time(0.9 * SILENCE, alive=[0, 1]) == {}
  words = run.pass_time(0.4 * SILENCE, alive=[0, 1])
  assert sorted(words) == [0, 1]
  assert words[0].startswith('process 2 of 3 (') and 'has not answered for 60 s' in words[0]
  assert 'in the phase save_checkpoint' in words[0]


def test_the_first_process_is_named_if_its_store_cannot_be_reached():
  run = Run()
  run.pass_time(STEP)
  run.store.broken = True
  words = run.pass_time(1.4 * SILENCE, alive=[1, 2])
  assert sorted(words) == [1, 2] and words[1].startswith('process 0 of 3 (')


@pytest.mark.parametrize('stopped', [1.2 * SILENCE, 10 * SILENCE])
def test_one_that_was_stopped_and_goes_on_does_not_accuse_the_others(stopped):
  run = Run(count=2)
  run.pass_time(STEP)
  run.clock.now += stopped
  assert run.dogs[1].judge() == ''
  assert run.pass_time(5 * STEP) == {}


def test_one_that_fails_is_named_with_its_reason_at_the_next_look(monkeypatch):
  monkeypatch.setattr(watchdog, 'INTERVAL', 0.0)
  run = Run()
  run.pass_time(STEP)
  run.dogs[0].fail('MemoryError: no room')
  words = run.pass_time(STEP, alive=[1, 2])
  assert sorted(words) == [1, 2] and words[1].endswith(' has ended: MemoryError: no room')
  assert run.dogs[0].judge() == ''  # it does not name itself


def test_after_a_failed_operation_the_longest_silent_one_is_blamed(monkeypatch):
  monkeypatch.setattr(watchdog, 'INTERVAL', 0.0)
  run = Run()
  run.pass_time(STEP)
  run.clock.now += 1.0
  run.dogs[0].exchange()
  run.dogs[2].exchange()
  run.dogs[0].exchange()
  ticks = iter(range(1000))
  run.dogs[0]._clock = lambda: run.clock.now + next(ticks) / 2
  real = run.dogs[0]._closed.wait
  monkeypatch.setattr(run.dogs[0]._closed, 'wait', lambda seconds: (run.dogs[0].exchange(), real(0))[1])
  assert run.dogs[0].blame().startswith('process 1 of 3 (')


def test_after_a_failed_operation_nobody_is_blamed_if_all_answer(monkeypatch):
  run = Run(count=2)
  run.pass_time(STEP)

  def look(seconds):
    run.pass_time(STEP / 10)
    run.clock.now += 1.0
    for dog in run.dogs:
      dog.exchange()
    return False

  monkeypatch.setattr(run.dogs[0]._closed, 'wait', look)
  assert run.dogs[0].blame() == ''


def test_a_judgement_stands_if_an_operation_fails_while_the_first_process_waits_to_end(monkeypatch):
  # Others end by the same judgement, earlier; the operation that fails then must not hide it.
  run = Run(count=2)
  run.pass_time(STEP)
  run.dogs[0].passed('gen')
  run.pass_time(PATIENCE)
  run.clock.now += STEP
  blamed = []

  def fails(seconds):
    run.clock.now += 1.0
    if not blamed:
      blamed.append('')
      blamed[0] = run.dogs[0].blame()
    return False

  monkeypatch.setattr(run.dogs[0]._closed, 'wait', fails)
  run.dogs[0]._judge_and_end()
  assert blamed == run.ended and ' hangs for 100 s ' in blamed[0]
  assert run.dogs[0].blame() == blamed[0]  # nor after it has ended


def test_a_record_says_where_the_main_thread_is():
  run = Run(count=1)
  run.dogs[0].exchange()
  record = json.loads(run.store['0'])
  assert record['place'].startswith('watchdog.py:') and record['place'].endswith(', _place')
  assert record['beat'] == 1 and 'pid ' in record['who']


def test_the_threads_end_the_process_once(monkeypatch):
  monkeypatch.setattr(watchdog, 'INTERVAL', 0.001)
  run, done = Run(count=2, patience=PATIENCE), []
  run.dogs[0]._end = done.append
  run.dogs[0]._closed = type('Closed', (), {'wait': lambda self, s: bool(done), 'set': lambda self: None})()
  run.pass_time(STEP)
  run.dogs[1].fail('interrupted')
  run.dogs[0]._repeat(lambda: (run.dogs[0].exchange(), run.dogs[0]._judge_and_end()))
  assert len(done) == 1 and done[0].endswith('has ended: interrupted')


@pytest.mark.parametrize('count', [1, 4])
def test_closed_threads_stop(count):
  run = Run(count=count)
  run.dogs[0].close()
  run.dogs[0]._repeat(lambda: pytest.fail('a closed watchdog looked again'))


# -- real processes ----------------------------------------------------------------------------------------------------

_LIMIT = 120  # seconds; far more than any process needs


@contextlib.contextmanager
def _processes(*modes, silence=8.0, patience=8.0):
  """Starts one `waiting_worker` for each mode, and waits until all have met."""
  with coordinator() as address:
    workers = []
    try:
      for i, mode in enumerate(modes):
        arguments = [address, str(len(modes)), str(i), mode, str(silence), str(patience)]
        command = [sys.executable, '-m', 'tests.support.waiting_worker', *arguments]
        workers.append(
          subprocess.Popen(
            command, cwd=ROOT, env=environment(1), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
          )
        )
      for worker in workers:
        # Gloo writes lines of its own first.
        assert 'round 0\n' in iter(worker.stdout.readline, ''), worker.stderr.read()
      yield workers
    finally:
      for worker in workers:
        worker.kill()
        worker.communicate()


def _last_words(worker):
  """The exit status and the lines of errors of a worker, which must end by itself."""
  errors = worker.communicate(timeout=_LIMIT)[1]
  assert 'Traceback' not in errors or 'MemoryError' in errors, errors
  return worker.returncode, [line for line in errors.splitlines() if line.startswith('error: ')]


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.exhaustive_cases('19')
def test_processes_end_and_name_the_one_that_was_killed_or_stopped(number):
  with _processes('', '', '') as workers:
    workers[1].send_signal(number)
    for i in (0, 2):
      status, lines = _last_words(workers[i])
      if i and not lines:  # on a slow machine, JAX ends it after the first process has said who is missing
        assert status
        continue
      (line,) = lines
      assert status == 1
      assert re.match(
        rf'error: process 1 of 3 \(.+, pid {workers[1].pid}\) (does not answer|has not answered for 8 s); it was last '
        r'in the phase (start|gen), at .+; the same command resumes from the last checkpoint',
        line,
      ), line


@pytest.mark.slow
def test_the_others_end_if_the_first_process_is_stopped():
  with _processes('', '') as workers:
    workers[0].send_signal(signal.SIGSTOP)
    status, (line,) = _last_words(workers[1])
    assert status == 1 and line.startswith('error: process 0 of 2') and 'has not answered for 8 s' in line


@pytest.mark.slow
@pytest.mark.parametrize('victim', [0, 1])
@pytest.mark.exhaustive_cases('0')
def test_all_processes_end_and_name_the_one_that_hangs(victim):
  with _processes(*('hang' if i == victim else '' for i in range(2))) as workers:
    for worker in workers:
      status, (line,) = _last_words(worker)
      assert status == 1
      assert (
        line.startswith(f'error: process {victim} of 2 (') and 'waiting_worker.py:' in line and ', slow_step' in line
      )
      # A process that ends by its own verdict no longer answers, which another one may notice first.
      hangs = 'hangs for 8 s in the phase gen, at ' in line and ', and others wait' in line
      assert hangs or 'does not answer; it was last in the phase gen, at ' in line


@pytest.mark.slow
@pytest.mark.parametrize('victim', [0, 1])
@pytest.mark.parametrize(
  ('mode', 'reason', 'own_status'), [('error', 'MemoryError: no room', 1), ('user error', 'metrics were not', 2)]
)
@pytest.mark.exhaustive_cases('user error-metrics were not-2-0', 'error-MemoryError: no room-1-0')
def test_the_others_name_the_error_of_the_one_that_failed(victim, mode, reason, own_status):
  with _processes(*(mode if i == victim else '' for i in range(2)), silence=60.0) as workers:
    status, (line,) = _last_words(workers[1 - victim])
    assert status == 1 and line.startswith(f'error: process {victim} of 2 (') and f'has ended: {reason}' in line
    assert _last_words(workers[victim])[0] == own_status
