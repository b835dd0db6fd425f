"""A pool plays what is queued, several at a time, and outlives its agents and its queue's errors."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from ragen_jax.serving.client import Queue
from ragen_jax.serving.play.pool import LocalQueue, RunnerPool
from ragen_jax.serving.play.runners import FunctionRunner, Outcome
from ragen_jax.serving.rollouts.lifecycle import Lifecycle
from ragen_jax.serving.rollouts.records import Claim, task_of
from ragen_jax.serving.rollouts.store import Store
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.serving.types import AttemptState, RolloutState
from ragen_jax.utils.errors import UserError
from tests.support.endpoint_store import new_rollout
from tests.support.paths import ROOT

_LONG = 60.0


@pytest.fixture
def lifecycle(tmp_path):
  with Store(tmp_path / 'store.sqlite') as store:
    yield Lifecycle(store, time.time)


def _pool(lifecycle, agent, max_concurrency=4, grace_s=_LONG, heartbeat_s=_LONG, queue=None, pause_s=1.0):
  """A pool with short claims, since its end waits for one."""
  queue, runner = queue or LocalQueue(lifecycle, 'pool', 'http://127.0.0.1:1/'), FunctionRunner(agent, grace_s)
  return RunnerPool(queue, runner, max_concurrency, heartbeat_s, stop_s=_LONG, claim_s=0.05, pause_s=pause_s)


def _create(lifecycle, *names, **options):
  for name in names:
    lifecycle.create(new_rollout(name, **options))


def _wait(lifecycle, condition):
  """Waits until a condition holds; changes of the store wake it."""
  deadline = time.monotonic() + _LONG
  while not condition():
    assert time.monotonic() < deadline
    lifecycle.changes.wait(lifecycle.changes.count, 0.01)


def _states(lifecycle):
  return {x.rollout_id: str(x.state) for x in lifecycle.store.ask(Tables.recent, 2**60, 1000)}


def test_rollouts_are_played_and_rewarded(lifecycle):
  _create(lifecycle, *(f'r{i}' for i in range(12)), task={'x': 3})
  tasks = []

  async def agent(task):
    tasks.append(task)
    return 0.5

  with _pool(lifecycle, agent) as pool:
    _wait(lifecycle, lambda: pool.progress().succeeded == 12)
    assert set(_states(lifecycle).values()) == {'succeeded'}
    progress = pool.progress()
  assert (progress.running, progress.failed, progress.timed_out, progress.cancelled, progress.error) == (0, 0, 0, 0, '')
  for task in tasks:
    assert task.input == {'x': 3} and task.base_url == f'http://127.0.0.1:1/attempts/{task.attempt_id}/v1'
    assert lifecycle.authenticate(task.api_key, for_reward=True).attempt_id == task.attempt_id
    (reward,) = lifecycle.store.ask(Tables.rewards, task.attempt_id)
    assert (reward.value, reward.call_id) == (0.5, '')


# Plays sixty short tasks, several at a time; a file notes what begins, and which ends are stored. The process kills
# itself when it has noted a given number of ends.
_PLAYS = """
import os, random, signal, sys, time
from ragen_jax.serving.play.pool import LocalQueue, RunnerPool
from ragen_jax.serving.play.runners import FunctionRunner
from ragen_jax.serving.rollouts.lifecycle import Lifecycle
from ragen_jax.serving.rollouts.store import Store
from ragen_jax.serving.rollouts.tables import Tables
from tests.support.endpoint_store import new_rollout

log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
note = lambda *words: os.write(log, (' '.join(words) + chr(10)).encode())
names = [f'r{i}' for i in range(60)]
stored = []

def note_ends(ended):
  for attempt in ended:
    note('stored', store.ask(Tables.attempt, attempt).rollout_id, attempt)
  stored.extend(ended)
  if len(stored) >= int(sys.argv[3]):
    os.kill(os.getpid(), signal.SIGKILL)

def play(task):
  note('begin', task.rollout_id, task.attempt_id)
  time.sleep(random.random() / 50)
  return 1.0

with Store(sys.argv[1]) as store:
  lifecycle = Lifecycle(store, time.time)
  lifecycle.recover(['pool'])
  lifecycle.changes.subscribe(note_ends)
  for name in names:
    lifecycle.create(new_rollout(name))
  print('ready', flush=True)
  with RunnerPool(LocalQueue(lifecycle, 'pool', 'http://127.0.0.1:1'), FunctionRunner(play, 9.0), 6, 60.0, 9.0):
    while any(store.ask(Tables.rollout, name).state != 'succeeded' for name in names):
      time.sleep(0.01)
"""


@pytest.mark.slow
def test_attempts_whose_end_was_stored_are_not_played_again_after_a_kill(tmp_path):
  path, log, rng, kills = tmp_path / 'store.sqlite', tmp_path / 'log', random.Random(0), 3
  log.touch()
  for kill in range(kills + 1):
    # At most 17 ends with those of programs that have returned and wait for the disk: three kills leave tasks to play.
    ends = rng.randrange(3, 12) if kill < kills else 100
    command = [sys.executable, '-c', _PLAYS, path, log, str(ends)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as pool:
      assert pool.stdout.readline() == 'ready\n'
      assert pool.wait(_LONG) == (-signal.SIGKILL if kill < kills else 0)
  over, begun = set(), 0
  for what, rollout, _ in map(str.split, log.read_text().splitlines()):
    if what == 'stored':
      over.add(rollout)
    else:
      assert rollout not in over  # an attempt whose end was stored is not played again
      begun += 1
  assert len(over) <= 60 <= begun <= 60 + 6 * kills
  with Store(path) as store:
    for i in range(60):  # played to the end once, whatever was begun
      states = [str(attempt.state) for attempt in store.ask(Tables.attempts, f'r{i}')]
      assert states[-1] == 'succeeded' and set(states[:-1]) <= {'unresponsive'}  # those lost with a process
      (reward,) = store.ask(Tables.rewards, store.ask(Tables.attempts, f'r{i}')[-1].attempt_id)
      assert reward.value == 1.0


def test_as_many_run_at_a_time_as_are_allowed(lifecycle):
  together, busy, pools = threading.Barrier(3), [], []

  class Watched(LocalQueue):
    def claim(self, wait_s):
      busy.extend(pool.progress().running for pool in pools)
      return super().claim(wait_s)

  def agent(task):
    together.wait(_LONG)  # three must be here at the same time

  queue = Watched(lifecycle, 'pool', 'http://127.0.0.1:1')
  with _pool(lifecycle, agent, max_concurrency=3, queue=queue) as pool:
    pools.append(pool)
    _create(lifecycle, *(f'r{i}' for i in range(30)))  # now: what is claimed before is not seen
    _wait(lifecycle, lambda: pool.progress().succeeded == 30)
  assert max(busy) == 2


def test_failures_become_states_and_are_retried(lifecycle):
  async def agent(task):
    if task.input == 'hangs':
      await asyncio.Event().wait()
    if task.input == 'raises' or task.number == 1:
      raise ValueError(f'with the key {task.api_key}')
    return float('nan') if task.input == 'nan' else None

  for name in ('raises', 'nan', 'good'):
    _create(lifecycle, name, task=name, max_attempts=2)
  _create(lifecycle, 'hangs', task='hangs', timeout_s=0.2, max_attempts=2)
  with _pool(lifecycle, agent) as pool:
    _wait(lifecycle, lambda: {'queued', 'running'}.isdisjoint(_states(lifecycle).values()))
    _wait(lifecycle, lambda: not pool.progress().running)
    progress = pool.progress()
  assert _states(lifecycle) == {'raises': 'failed', 'nan': 'failed', 'good': 'succeeded', 'hangs': 'failed'}
  assert (progress.failed, progress.timed_out, progress.succeeded) == (5, 2, 1)
  error = lifecycle.store.ask(Tables.rollout, 'raises').error
  assert error.startswith('agent raised ValueError: with the key *** (test_pool.py:')
  assert lifecycle.store.ask(Tables.rollout, 'hangs').error == 'took longer than timeout_s=0.2'
  assert lifecycle.store.ask(Tables.rollout, 'nan').error == 'agent returned nan; allowed: a number within 1e+15, None'


def test_no_part_of_the_key_is_left_where_the_error_of_a_runner_is_cut(lifecycle):
  keys = []

  class Broken:
    def run(self, task, watch):
      keys.append(task.api_key)
      raise RuntimeError('.' * (250 + int(task.rollout_id)) + task.api_key)

  _create(lifecycle, *map(str, range(0, 30, 5)))
  with RunnerPool(LocalQueue(lifecycle, 'pool', 'http://127.0.0.1:1'), Broken(), 4, _LONG, _LONG, 0.05):
    _wait(lifecycle, lambda: set(_states(lifecycle).values()) == {'failed'})
  errors = [lifecycle.store.ask(Tables.rollout, name).error for name in _states(lifecycle)]
  assert len(keys) == 6 and all(error.startswith('runner raised RuntimeError: ...') for error in errors)
  assert not [error for error in errors for key in keys if key[:5] in error]


def test_the_key_of_an_attempt_is_in_no_file_of_the_store(lifecycle, tmp_path):
  keys = []

  class Talkative:
    def run(self, task, watch):
      keys.append(task.api_key)
      return Outcome.failed(f'called with {task.api_key} twice: {task.api_key}')

  _create(lifecycle, 'a')
  with RunnerPool(LocalQueue(lifecycle, 'pool', 'http://127.0.0.1:1'), Talkative(), 1, _LONG, _LONG):
    _wait(lifecycle, lambda: _states(lifecycle) == {'a': 'failed'})
  assert lifecycle.store.ask(Tables.rollout, 'a').error == 'called with *** twice: ***'
  content = b''.join(path.read_bytes() for path in tmp_path.iterdir())
  assert len(keys) == 1 and keys[0].encode() not in content and b'called with' in content


def test_an_attempt_that_the_server_ends_is_stopped(lifecycle):
  started, ended = threading.Event(), threading.Event()

  async def agent(task):
    started.set()
    try:
      await asyncio.Event().wait()
    finally:
      ended.set()

  _create(lifecycle, 'a')
  with _pool(lifecycle, agent, heartbeat_s=0.01) as pool:
    assert started.wait(_LONG)
    lifecycle.cancel('a')
    assert ended.wait(_LONG)
    _wait(lifecycle, lambda: pool.progress().cancelled == 1)
    assert pool.progress().error == ''
  assert lifecycle.store.ask(Tables.rollout, 'a').state == RolloutState.CANCELLED


def test_heartbeats_keep_an_attempt_alive(lifecycle):
  go_on = threading.Event()
  _create(lifecycle, 'a')
  with _pool(lifecycle, lambda task: go_on.wait(_LONG), heartbeat_s=0.01):
    _wait(lifecycle, lambda: lifecycle.store.ask(Tables.attempts, 'a'))
    first = lifecycle.store.ask(Tables.attempt, 'a.1').last_heartbeat
    _wait(lifecycle, lambda: lifecycle.store.ask(Tables.attempt, 'a.1').last_heartbeat > first)
    go_on.set()
    _wait(lifecycle, lambda: _states(lifecycle) == {'a': 'succeeded'})


def test_an_attempt_can_be_stopped_at_once(lifecycle):
  started = threading.Event()

  async def agent(task):
    started.set()
    await asyncio.Event().wait()

  _create(lifecycle, 'a')
  with _pool(lifecycle, agent) as pool:
    assert started.wait(_LONG)
    lifecycle.cancel('a')
    pool.cancel('b.1')
    pool.cancel('a.1')
    _wait(lifecycle, lambda: pool.progress().cancelled == 1)


def test_a_pool_that_stops_gives_its_attempts_back(lifecycle):
  started = threading.Barrier(3)

  async def agent(task):
    started.wait(_LONG)
    await asyncio.Event().wait()

  _create(lifecycle, 'a', 'b', 'c', max_attempts=1, retry_on=())
  pool = _pool(lifecycle, agent, max_concurrency=2)
  started.wait(_LONG)
  assert pool.stop(_LONG)
  assert pool.stop(0.0)
  assert _states(lifecycle) == {'a': 'queued', 'b': 'queued', 'c': 'queued'}
  assert [(x.state, x.lost) for x in lifecycle.store.ask(Tables.attempts, 'a')] == [(AttemptState.UNRESPONSIVE, True)]
  with _pool(lifecycle, lambda task: 1.0) as pool:
    _wait(lifecycle, lambda: set(_states(lifecycle).values()) == {'succeeded'})


def test_a_task_that_is_claimed_too_late_is_given_back(lifecycle):
  entered, go_on = threading.Event(), threading.Event()

  class Slow(LocalQueue):
    def claim(self, wait_s):
      entered.set()
      go_on.wait(_LONG)
      return super().claim(wait_s)

  async def agent(task):
    await asyncio.Event().wait()

  _create(lifecycle, 'a')
  pool = _pool(lifecycle, agent, queue=Slow(lifecycle, 'pool', 'http://127.0.0.1:1'))
  assert entered.wait(_LONG)
  assert not pool.stop(0.0)  # the claim may still bring a task
  go_on.set()
  _wait(lifecycle, lambda: pool.progress().cancelled == 1)
  assert pool.stop(_LONG)
  assert _states(lifecycle) == {'a': 'queued'}


def test_an_agent_may_end_its_attempt_itself(lifecycle):
  def agent(task):
    state = AttemptState.SUCCEEDED if task.rollout_id == 'good' else AttemptState.FAILED
    lifecycle.finish(task.attempt_id, state, 'own')
    return 1.0 if task.rollout_id == 'late' else None

  _create(lifecycle, 'good', 'bad', 'late')
  with _pool(lifecycle, agent) as pool:
    _wait(lifecycle, lambda: pool.progress().succeeded == 3)
    assert pool.progress().error == ''
  assert _states(lifecycle) == {'good': 'succeeded', 'bad': 'failed', 'late': 'failed'}
  assert lifecycle.store.ask(Tables.rollout, 'bad').error == 'own'


def test_a_pool_outlives_the_errors_of_its_queue(lifecycle, caplog):
  failures = iter([UserError('the disk is full')] * 3)

  class Broken(LocalQueue):
    def claim(self, wait_s):
      for failure in failures:
        raise failure
      return super().claim(wait_s)

    def finish(self, task, state, error):
      super().finish(task, state, error)
      raise UserError('the disk is full again')

  _create(lifecycle, 'a')
  queue = Broken(lifecycle, 'pool', 'http://127.0.0.1:1')
  with _pool(lifecycle, lambda task: None, queue=queue, pause_s=0.01) as pool:
    _wait(lifecycle, lambda: pool.progress().succeeded == 1)
  messages = [record.getMessage() for record in caplog.records]
  assert messages.count('no task can be claimed: UserError: the disk is full') == 1
  assert 'the end of a.1 cannot be reported: UserError: the disk is full again' in messages


def test_failures_of_one_kind_are_told_at_the_first_the_tenth_and_the_hundredth(lifecycle, caplog):
  def agent(task):
    raise ValueError('other' if task.rollout_id == 'r5' else 'no such file')

  _create(lifecycle, *(f'r{i}' for i in range(12)))
  with _pool(lifecycle, agent) as pool:
    _wait(lifecycle, lambda: pool.progress().failed == 12)
  told = [record.getMessage() for record in caplog.records if record.getMessage().startswith('attempt ')]
  assert len(told) == 3 and sum('other' in line for line in told) == 1
  assert sum('(so did 9 before it): ' in line and 'no such file' in line for line in told) == 1


def test_abandoned_threads_give_their_places_back(lifecycle):
  go_on = threading.Event()
  _create(lifecycle, *(f'r{i}' for i in range(5)), timeout_s=0.05)
  with _pool(lifecycle, lambda task: go_on.wait(_LONG), max_concurrency=1, grace_s=0.01) as pool:
    _wait(lifecycle, lambda: pool.progress().abandoned == 5)
    progress = pool.progress()
    assert set(_states(lifecycle).values()) == {'failed'} and not progress.full
    assert progress.oldest == 'ragen_jax-agent-r0.1'
    go_on.set()
    _wait(lifecycle, lambda: pool.progress().abandoned == 0)
    assert pool.progress().oldest == ''


def test_no_task_is_claimed_while_too_many_agents_hang(lifecycle, monkeypatch):
  monkeypatch.setattr('ragen_jax.serving.play.pool.ABANDONED_PER_PLACE', 1)
  go_on, rounds, forget_ended = threading.Event(), [], RunnerPool._forget_ended

  def counted(self):
    rounds.append(threading.current_thread().name)
    forget_ended(self)

  def wait_for_rounds():
    """A claim that had begun is over, and a later look found no place."""
    before = rounds.count('ragen_jax-pool-claim')
    _wait(lifecycle, lambda: rounds.count('ragen_jax-pool-claim') >= before + 2)

  monkeypatch.setattr(RunnerPool, '_forget_ended', counted)
  _create(lifecycle, 'a', 'b', timeout_s=0.05)
  with _pool(lifecycle, lambda task: go_on.wait(_LONG), max_concurrency=2, grace_s=0.01, pause_s=0.01) as pool:
    _wait(lifecycle, lambda: pool.progress().abandoned == 2)
    wait_for_rounds()
    _create(lifecycle, 'c')
    wait_for_rounds()
    assert _states(lifecycle)['c'] == 'queued' and pool.progress().running == 0 and pool.progress().full
    go_on.set()
    _wait(lifecycle, lambda: _states(lifecycle)['c'] == 'succeeded')
    # Either thread's end lets `c` be claimed; the other's may come later.
    _wait(lifecycle, lambda: pool.progress().abandoned == 0)
    assert not pool.progress().full


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
def test_a_mistake_that_ends_the_claims_is_told(lifecycle):
  class Wrong(LocalQueue):
    def claim(self, wait_s):
      raise KeyError('a mistake')

  with _pool(lifecycle, lambda task: None, queue=Wrong(lifecycle, 'pool', 'http://127.0.0.1:1')) as pool:
    _wait(lifecycle, lambda: pool.progress().fault)
    assert pool.progress().fault == "the claim thread has ended: KeyError: 'a mistake'"
  with _pool(lifecycle, lambda task: None) as pool:
    pass
  assert pool.progress().fault == '', 'a pool that was stopped has no fault'


def test_a_thread_that_cannot_be_started_costs_an_attempt(lifecycle, monkeypatch):
  refused, start = ['ragen_jax-play-a.1'], threading.Thread.start

  def scarce(self):
    if self.name in refused:
      raise RuntimeError("can't start new thread")
    start(self)

  monkeypatch.setattr(threading.Thread, 'start', scarce)
  _create(lifecycle, 'a', max_attempts=2)
  with _pool(lifecycle, lambda task: None, pause_s=0.01) as pool:
    _wait(lifecycle, lambda: _states(lifecycle) == {'a': 'succeeded'})
    assert pool.progress().fault == '' and pool.progress().failed == 1
  assert lifecycle.store.ask(Tables.attempt, 'a.1').error == "RuntimeError: can't start new thread"


def test_a_queue_waits_for_a_rollout(lifecycle):
  queue = LocalQueue(lifecycle, 'pool', 'http://127.0.0.1:1')
  assert queue.claim(0.0) is None and queue.claim(0.01) is None
  found = []
  waiter = threading.Thread(target=lambda: found.append(queue.claim(_LONG)))
  waiter.start()
  _create(lifecycle, 'a')
  waiter.join(_LONG)
  assert found[0].rollout_id == 'a'


def test_settings_of_a_pool_are_checked(lifecycle):
  with pytest.raises(UserError, match=r'^max_concurrency=0; allowed'):
    _pool(lifecycle, lambda task: None, max_concurrency=0)


def test_a_server_that_does_not_answer_is_an_error_of_the_queue(lifecycle, monkeypatch):
  monkeypatch.setattr('ragen_jax.serving.client._PATIENCE_S', 0.0)
  with socket.socket() as silent:
    silent.bind(('127.0.0.1', 0))  # it does not listen, and nobody else can
    queue = Queue(f'http://127.0.0.1:{silent.getsockname()[1]}', 'admin')
    with _pool(lifecycle, lambda task: None, queue=queue) as pool:
      _wait(lifecycle, lambda: 'does not answer' in pool.progress().error)


@pytest.mark.parametrize(
  ('metadata', 'prompt'),
  [(None, ''), ({'tag': 'a'}, ''), ({'prompt': 'Go.'}, 'Go.'), ({'prompt': 3}, ''), ('prompt', ''), (['prompt'], '')],
)
def test_the_prompt_of_a_task_is_in_the_metadata_of_its_rollout(lifecycle, metadata, prompt):
  _create(lifecycle, 'r', metadata=metadata)
  assert LocalQueue(lifecycle, 'pool', 'http://127.0.0.1:1').claim(0.0).prompt == prompt


def test_an_attempt_is_not_late_while_calls_are_held(lifecycle, monkeypatch):
  monkeypatch.setattr('ragen_jax.serving.play.runners._LEAST_S', 0.01)
  left, asked, end = [0.02, None, 0.01], threading.Event(), threading.Event()

  class Held(LocalQueue):
    def time_left(self, task):
      if not left:
        asked.set()
        return super().time_left(task)
      return left.pop()

  _create(lifecycle, 'a', timeout_s=0.05)
  with _pool(lifecycle, lambda task: end.wait(_LONG) and None, queue=Held(lifecycle, 'pool', 'http://x'), grace_s=0.01):
    assert asked.wait(_LONG) and not left
    _wait(lifecycle, lambda: lifecycle.store.ask(Tables.rollout, 'a').state == RolloutState.FAILED)
    end.set()
  (attempt,) = lifecycle.store.ask(Tables.attempts, 'a')
  assert attempt.state == AttemptState.TIMEOUT
  task = task_of(Claim(lifecycle.store.ask(Tables.rollout, 'a'), attempt, 'key'), 'http://x')
  assert LocalQueue(lifecycle, 'pool', 'http://x').time_left(task) == 0.0  # it is over

  def fails(_):
    raise UserError('the disk is full')

  monkeypatch.setattr(lifecycle, 'heartbeat', fails)
  assert LocalQueue(lifecycle, 'pool', 'http://x').time_left(task) is None
