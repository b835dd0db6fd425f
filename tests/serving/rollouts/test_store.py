"""The store keeps what it acknowledged, to the bit and once, and says in one line when it cannot."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys

import numpy as np
import pytest

from ragen_jax.models.vision.encoder import digest
from ragen_jax.serving.errors import Conflict, Gone, Invalid, NotFound
from ragen_jax.serving.rollouts import schema
from ragen_jax.serving.rollouts.lifecycle import Lifecycle
from ragen_jax.serving.rollouts.store import Store
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.serving.types import AttemptState, Finish, PlacedImage, RolloutState
from ragen_jax.utils.errors import UserError
from tests.support.endpoint_store import Clock, bits, make_call, new_rollout
from tests.support.paths import ROOT
from tests.support.vision import image_of


@pytest.fixture
def store(tmp_path):
  with Store(tmp_path / 'store.sqlite') as opened:
    yield opened


def _claimed(store, rollout_id='a', **options):
  """A lifecycle and the running attempt of a new rollout."""
  lifecycle = Lifecycle(store, Clock())
  lifecycle.create(new_rollout(rollout_id, **options))
  return lifecycle, lifecycle.start(rollout_id, 'w').attempt.attempt_id


def _over(store, rollout_id, state=AttemptState.SUCCEEDED, **options):
  lifecycle, attempt_id = _claimed(store, rollout_id, **options)
  lifecycle.finish(attempt_id, state, '')
  return attempt_id


def test_calls_come_back_to_the_bit(tmp_path):
  path = tmp_path / 'store.sqlite'
  hard = np.array([np.nan, -np.inf, -0.0, 1e-45, np.float32(1) / 3], '<f4')
  with Store(path) as store:
    _, attempt_id = _claimed(store)
    call = make_call(
      attempt_id, n=5, text='a\x00b\ud800 Grüße', top=(((3, -0.1), (2**31 - 1, -1e-300)), (), ((0, 0.0),), (), ())
    )
    call = dataclasses.replace(
      call, agent='writer \udfff', messages='[{"content": "\ud83d"}]',
      generated=dataclasses.replace(call.generated, logprobs=hard, values=-hard, stop_text='\x00END'),
    )  # fmt: skip
    empty = make_call(attempt_id, index=1, n=0, finish=Finish.LENGTH)
    store.add_calls([call], (), 1.0)
    store.add_calls([empty], (), 1.0)
  with Store(path) as store:
    assert [bits(x) for x in store.ask(Tables.calls, attempt_id)] == [bits(call), bits(empty)]
    assert bits(store.ask(Tables.call, attempt_id, call.call_id)) == bits(call)
    assert store.ask(Tables.calls, 'b.1') == []
    with pytest.raises(NotFound):
      store.ask(Tables.call, 'b.1', call.call_id)


def test_images_are_stored_once_an_attempt_and_deleted_with_it(store):
  pictures = [image_of(8, 16, seed) for seed in range(2)]
  pixels = {digest(p): p for p in pictures}
  first, second = (PlacedImage(3, 5, key) for key in pixels)
  for rollout_id in ('a', 'b'):
    _, attempt_id = _claimed(store, rollout_id)
    calls = [make_call(attempt_id, i, images=images) for i, images in enumerate([(first,), (first, second), ()])]
    for call in calls:
      store.add_calls([call], (), 1.0, pixels)
    assert [bits(x) for x in store.ask(Tables.calls, attempt_id)] == [bits(call) for call in calls]
    found = store.ask(Tables.images, attempt_id)
    assert found.keys() == pixels.keys() and all(np.array_equal(found[key], p) for key, p in pixels.items())
  with store.write() as tables:
    tables.delete_rollout('a')
    assert tables._sql('SELECT count(*) FROM images').fetchone() == (2,)


def test_a_call_with_arrays_of_a_wrong_kind_is_not_stored(store):
  _, attempt_id = _claimed(store)
  call = make_call(attempt_id)
  for name, wrong in (('logprobs', np.zeros(3)), ('versions', np.zeros(2, '<i4')), ('top', ((),))):
    with pytest.raises(ValueError, match=name):
      store.add_calls(
        [dataclasses.replace(call, generated=dataclasses.replace(call.generated, **{name: wrong}))], (), 0
      )
  with pytest.raises(OverflowError):
    store.add_calls([dataclasses.replace(call, context=(2**31,))], (), 0)
  with pytest.raises(ValueError, match='allowed: calls of one attempt'):
    store.add_calls([], (), 0)
  assert store.ask(Tables.calls, attempt_id) == []


def test_the_calls_of_a_request_are_stored_together_or_not_at_all(store):
  _, attempt_id = _claimed(store)
  first = [make_call(attempt_id, index) for index in range(3)]
  store.add_calls(first, ('digest', 'header'), 1.0)
  taken = make_call(attempt_id, 9, call_id=first[1].call_id)
  with pytest.raises(sqlite3.IntegrityError):
    store.add_calls([make_call(attempt_id, 3), taken], ('digest',), 1.0)
  assert len(store.ask(Tables.calls, attempt_id)) == 3
  for key in ('digest', 'header'):
    assert [x.call_id for x in store.ask(Tables.calls_of_request, attempt_id, key)] == [x.call_id for x in first]
  assert store.ask(Tables.calls_of_request, attempt_id, 'new') == []
  again = make_call(attempt_id, 3)
  store.add_calls([again], ('digest',), 1.0)  # the same body as a new request
  assert [x.call_id for x in store.ask(Tables.calls_of_request, attempt_id, 'digest')] == [again.call_id]
  assert len(store.ask(Tables.calls_of_request, attempt_id, 'header')) == 3


def test_an_attempt_that_is_over_takes_aborted_calls_only(store):
  lifecycle, attempt_id = _claimed(store, max_attempts=2)
  store.add_calls([make_call(attempt_id)], (), 1005.0)
  assert store.ask(Tables.attempt, attempt_id).last_heartbeat == 1005.0
  lifecycle.finish(attempt_id, AttemptState.FAILED, '')
  with pytest.raises(Gone, match=r"^attempt 'a.1' is over \(failed\)"):
    store.add_calls([make_call(attempt_id, 1)], (), 1006.0)
  store.add_calls([make_call(attempt_id, 2, finish=Finish.ABORTED)], (), 1006.0)
  assert [x.index for x in store.ask(Tables.calls, attempt_id)] == [0, 2]
  assert store.ask(Tables.attempt, attempt_id).last_heartbeat == 1005.0
  with pytest.raises(NotFound):
    store.add_calls([make_call('no.1')], (), 1.0)


def test_rollouts_are_listed_in_the_order_of_their_ends(store):
  lifecycle = Lifecycle(store, Clock())
  attempts = {}
  for name in 'abcde':
    lifecycle.create(new_rollout(name, group='g'))
    attempts[name] = lifecycle.start(name, 'w').attempt.attempt_id
  lifecycle.finish(attempts['d'], AttemptState.SUCCEEDED, '')
  lifecycle.cancel('b')
  lifecycle.finish(attempts['a'], AttemptState.FAILED, '')
  page = store.ask(Tables.completed, 0, 2)
  assert [x.rollout_id for x in page] == ['d', 'b']
  lifecycle.finish(attempts['e'], AttemptState.SUCCEEDED, '')
  assert [x.rollout_id for x in store.ask(Tables.completed, page[-1].completed, 10)] == ['a', 'e']
  assert [x.rollout_id for x in store.ask(Tables.group, 'g')] == list('abcde')
  assert [x.ordinal for x in store.ask(Tables.group, 'g')] == list(range(5))
  latest = store.ask(Tables.recent, 2**60, 3)
  assert [x.rollout_id for x in latest] == ['e', 'd', 'c']
  assert [x.rollout_id for x in store.ask(Tables.recent, latest[-1].seq, 3)] == ['b', 'a']
  assert [x.attempt_id for x in store.ask(Tables.running)] == [attempts['c']]
  assert store.ask(Tables.counts) == {
    RolloutState.QUEUED: 0, RolloutState.RUNNING: 1, RolloutState.SUCCEEDED: 2, RolloutState.FAILED: 1,
    RolloutState.CANCELLED: 1,
  }  # fmt: skip


def test_an_iteration_takes_its_rollouts_once(tmp_path):
  path = tmp_path / 'store.sqlite'
  with Store(path) as store:
    for name in 'abcd':
      _over(store, name, AttemptState.FAILED if name == 'b' else AttemptState.SUCCEEDED)
    store.take_batch(3, ['c', 'b'], 5.0)
    store.take_batch(3, ['c', 'b'], 6.0)
    for iteration, ids, message in (
      (3, ['c'], 'iteration 3 took 2 other rollouts before'),
      (3, ['b', 'c'], 'iteration 3 took 2 other rollouts before'),
      (4, ['a', 'b'], "rollout 'b' was taken by iteration 3 before"),
      (4, ['a', 'a'], 'iteration 4 takes 2 rollouts, 1 of them different'),
      (4, [], 'iteration 4 takes 0 rollouts'),
    ):
      with pytest.raises(Conflict, match=message):
        store.take_batch(iteration, ids, 7.0)
    with pytest.raises(NotFound):
      store.take_batch(4, ['a', 'none'], 7.0)
  with Store(path) as store:
    assert store.ask(Tables.batch, 3) == ('c', 'b') and store.ask(Tables.batch, 4) == ()
    assert store.ask(Tables.rollout, 'c').iteration == 3 and store.ask(Tables.rollout, 'c').closed == 5.0
    assert store.ask(Tables.rollout, 'a').iteration is None and store.ask(Tables.rollout, 'a').closed is None
    store.take_batch(4, ['a'], 8.0)


def test_only_rollouts_that_are_over_are_taken_or_closed(store):
  lifecycle, _ = _claimed(store, 'running')
  lifecycle.create(new_rollout('queued'))
  lifecycle.create(new_rollout('cancelled'))
  lifecycle.cancel('cancelled')
  _over(store, 'a')
  _over(store, 'val', mode='val')
  for name in ('running', 'queued', 'cancelled', 'val'):
    with pytest.raises(Conflict, match=f'{name}'):
      store.take_batch(0, ['a', name], 1.0)
  for name in ('running', 'queued'):
    with pytest.raises(Conflict, match=f"^rollout '{name}' is {name} .* closed"):
      store.close_rollouts([name], 1.0)
  store.close_rollouts(['cancelled', 'a'], 1.0)
  store.close_rollouts(['a'], 2.0)
  assert store.ask(Tables.rollout, 'a').closed == 1.0
  with pytest.raises(Conflict, match='was closed before'):
    store.take_batch(0, ['a'], 1.0)
  _over(store, 'b')
  store.take_batch(0, ['b'], 1.0)
  with pytest.raises(Conflict, match='taken by iteration 0'):
    store.close_rollouts(['b'], 1.0)


def test_pruning_deletes_old_rollouts_and_trains_none_again(store):
  attempts = {name: _over(store, name) for name in 'abcdef'}
  store.take_batch(0, ['a', 'b'], 10.0)
  store.take_batch(1, ['c'], 20.0)
  store.take_batch(2, ['d'], 30.0)
  store.close_rollouts(['e'], 15.0)
  assert store.prune(0, 100.0, 10) == 1  # e, which no iteration took
  assert store.prune(2, 15.0, 1) == 1 and store.prune(2, 15.0, 10) == 1
  assert store.prune(2, 15.0, 10) == 0
  assert [x.rollout_id for x in store.ask(Tables.completed, 0, 10)] == ['c', 'd', 'f']
  assert store.ask(Tables.attempts, 'a') == [] and store.ask(Tables.rewards, attempts['a']) == []
  assert store.ask(Tables.batch, 0) == ('a', 'b')
  lifecycle = Lifecycle(store, Clock())
  with pytest.raises(Conflict, match=r"^rollout 'a' was trained by iteration 0"):
    lifecycle.create(new_rollout('a'))
  last = store.ask(Tables.completed, 0, 10)[-1].completed
  store.close_rollouts(['f'], 15.0)
  assert store.prune(0, 100.0, 10) == 1
  _over(store, 'g')
  assert [x.rollout_id for x in store.ask(Tables.completed, last, 10)] == ['g']  # places are not given twice


def test_discarded_rollouts_may_be_created_again(store):
  attempts = {name: _over(store, name) for name in 'abc'}
  store.take_batch(0, ['c'], 10.0)
  with pytest.raises(Conflict, match='taken by iteration 0'):
    store.discard(['a', 'c'], 11.0)
  assert store.ask(Tables.rollout, 'a').closed is None, 'all or none'
  store.discard(['a', 'b'], 11.0)
  assert [x.rollout_id for x in store.ask(Tables.completed, 0, 10)] == ['c'] and store.ask(
    Tables.calls, attempts['a']
  ) == []
  assert Lifecycle(store, Clock()).create(new_rollout('a')).attempts == 0


def test_deleted_rollouts_make_room_for_new_ones(store):
  def fill(names):
    for name in names:
      lifecycle, attempt_id = _claimed(store, name)
      store.add_calls([make_call(attempt_id, text='x' * 200_000)], (), 0.0)
      lifecycle.post_reward(attempt_id, 1.0, 0, '', '', '')
      lifecycle.finish(attempt_id, AttemptState.SUCCEEDED, '')
      store.close_rollouts([name], 0.0)

  def pages():
    with store.read():
      return store._reader.execute('PRAGMA page_count').fetchone()[0]

  fill(f'a{i}' for i in range(10))
  size = pages()
  for turn in range(5):
    assert store.prune(0, 1.0, 10_000) == 10
    fill(f'b{turn}-{i}' for i in range(10))
  assert pages() <= size + 10


def test_a_transaction_that_fails_leaves_nothing(store):
  with pytest.raises(RuntimeError), store.write() as tables:
    tables.insert_batch(1, ['a'])
    raise RuntimeError
  assert store.ask(Tables.batch, 1) == ()
  with pytest.raises(Invalid, match='lone surrogate'):
    store.ask(Tables.rollout, '\ud800')


def test_heartbeats_alone_do_not_wait_for_the_disk(store):
  found = []
  for durable in (False, True):
    with store.write(durable=durable):
      found.append(store._writer.execute('PRAGMA synchronous').fetchone()[0])
  assert found == [1, 2]  # NORMAL, FULL
  assert store._writer.execute('PRAGMA journal_mode').fetchone()[0] == 'wal'


def test_threads_share_a_store(store):
  names = [f'r{i}' for i in range(40)]
  for name in names:
    _over(store, name)
  _, attempt_id = _claimed(store, 'running')

  def write(part):
    for i in range(50):
      store.add_calls([make_call(attempt_id, 2 * i + part)], (), 0.0)

  def take(part):
    won = []
    for i, name in enumerate(names):
      with contextlib.suppress(Conflict):
        store.take_batch(1000 * part + i, [name], 0.0)
        won.append(name)
    return won

  def read():
    return [len(store.ask(Tables.calls, attempt_id)) for _ in range(100)]

  with concurrent.futures.ThreadPoolExecutor(5) as pool:
    first, second, seen, *writers = [pool.submit(take, 0), pool.submit(take, 1), pool.submit(read)] + [
      pool.submit(write, part) for part in (0, 1)
    ]
    for writer in writers:
      writer.result(60)
    assert sorted(first.result(60) + second.result(60)) == sorted(names)
    assert seen.result(60) == sorted(seen.result())
  assert [x.index for x in store.ask(Tables.calls, attempt_id)] == list(range(100))


# -- files


def test_two_processes_cannot_use_one_store(store):
  with pytest.raises(UserError, match=r'^store .* in use .* --workdir'):
    Store(store.path)
  store.close()
  Store(store.path).close()


def _refused(path, message):
  with pytest.raises(UserError, match=message) as error:
    Store(path)
  assert '\n' not in str(error.value) and str(path) in str(error.value)


def test_files_of_others_are_refused_and_not_touched(tmp_path):
  path = tmp_path / 'a'
  path.write_text('a text that is longer than a header')
  _refused(path, r'is not an SQLite file; move it away or choose another --workdir$')
  assert path.read_text().startswith('a text')
  other = tmp_path / 'b'
  with sqlite3.connect(other) as connection:
    connection.execute('CREATE TABLE t (x)')
  connection.close()
  before = other.read_bytes()
  _refused(other, 'was written by another program')
  assert other.read_bytes() == before
  (tmp_path / 'folder').mkdir()
  _refused(tmp_path / 'folder', 'cannot be used')


def test_a_store_of_another_version_is_refused(tmp_path, monkeypatch):
  path = tmp_path / 'a'
  Store(path).close()
  monkeypatch.setattr(schema, 'VERSION', schema.VERSION + 1)
  told = f'has version {schema.VERSION - 1}; allowed: {schema.VERSION}; move it away or choose another --workdir$'
  _refused(path, told)


def test_an_empty_file_becomes_a_store(tmp_path):
  (tmp_path / 'a').touch()
  with Store(tmp_path / 'a') as store:
    assert store.ask(Tables.completed, 0, 1) == []
  with sqlite3.connect(tmp_path / 'b') as connection:  # killed before its tables were made
    connection.execute('PRAGMA journal_mode = WAL')
  connection.close()
  with Store(tmp_path / 'b') as store:
    assert store.ask(Tables.completed, 0, 1) == []


def _filled(path):
  """A closed store with calls; returns them by attempt."""
  with Store(path) as store:
    attempts = []
    for name in 'abc':
      lifecycle, attempt_id = _claimed(store, name)
      for index in range(8):
        store.add_calls([make_call(attempt_id, index, n=100, text=f'text {index} ' * 40)], (), 0.0)
      lifecycle.finish(attempt_id, AttemptState.SUCCEEDED, '')
      attempts.append(attempt_id)
    return {attempt_id: [bits(x) for x in store.ask(Tables.calls, attempt_id)] for attempt_id in attempts}


def test_a_truncated_store_is_refused(tmp_path):
  _filled(tmp_path / 'a')
  data = (tmp_path / 'a').read_bytes()
  for size in (50, 100, 4096, len(data) // 2, len(data) - 4096):
    path = tmp_path / f'cut{size}'
    path.write_bytes(data[:size])
    _refused(path, r'store .*(cannot be used|damaged|not an SQLite file|another program)')


def test_a_page_that_is_damaged_is_noticed_when_the_store_is_opened(tmp_path):
  _filled(tmp_path / 'a')
  with contextlib.closing(sqlite3.connect(tmp_path / 'a')) as connection:
    (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'rewards'").fetchone()
    (size,) = connection.execute('PRAGMA page_size').fetchone()
  data = bytearray((tmp_path / 'a').read_bytes())
  data[(page - 1) * size : (page - 1) * size + 8] = b'\xff' * 8
  (tmp_path / 'a').write_bytes(data)
  _refused(tmp_path / 'a', r'^store .* is damaged \(.*\); restore it from a copy$')


def test_damaged_calls_are_never_returned(tmp_path):
  calls = _filled(tmp_path / 'a')
  data = (tmp_path / 'a').read_bytes()
  found, refused, path = 0, 0, tmp_path / 'flipped'
  for offset in range(200, len(data), 1999):
    damaged = bytearray(data)
    damaged[offset : offset + 8] = bytes(255 - x for x in data[offset : offset + 8])
    del damaged[len(data) - offset % 3 :]
    for leftover in tmp_path.glob('flipped*'):
      leftover.unlink()
    path.write_bytes(damaged)
    try:
      with Store(path) as store:
        store.ask(Tables.completed, 0, 10)
        for attempt_id, expected in calls.items():
          assert [bits(x) for x in store.ask(Tables.calls, attempt_id)] in (expected, [])
      found += 1
    except UserError as e:
      refused += 1
      assert '\n' not in str(e)
  assert refused > 20 and found > 0


# Each writer is a copy of the process that has imported the store. It writes to a pipe of its own, which ends with it.
_WRITERS = """
import os, sys, time
from ragen_jax.serving.rollouts.lifecycle import Lifecycle
from ragen_jax.serving.rollouts.store import Store
from ragen_jax.serving.types import AttemptState
from tests.support.endpoint_store import make_call, new_rollout

def write(path, first):
  with Store(path) as store:
    lifecycle = Lifecycle(store, time.time)
    lifecycle.recover({'w'})
    print('ready', os.getpid(), flush=True)
    for i in range(first, first + 2000):
      name = f'r{i}'
      lifecycle.create(new_rollout(name))
      attempt_id = lifecycle.start(name, 'w').attempt.attempt_id
      for index in range(2):
        store.add_calls([make_call(attempt_id, index, seed=i)], (), time.time())
        print('call', attempt_id, index, flush=True)
      lifecycle.post_reward(attempt_id, float(i), 'last', '', '', '')
      print('reward', attempt_id, i, flush=True)
      lifecycle.finish(attempt_id, AttemptState.SUCCEEDED, '')
      print('finish', name, 0, flush=True)
      store.take_batch(i, [name], time.time())
      print('batch', name, i, flush=True)

path, *pipes = sys.argv[1:]
for turn, pipe in enumerate(map(int, pipes)):
  sys.stdin.readline()
  process = os.fork()
  if not process:
    os.dup2(pipe, 1)
    os.close(pipe)
    write(path, 10_000 * turn)
    os._exit(0)
  os.close(pipe)
  os.waitpid(process, 0)
"""


@pytest.mark.slow
def test_a_killed_process_loses_nothing_that_it_acknowledged(tmp_path):
  path, rng, acknowledged = tmp_path / 'store.sqlite', random.Random(0), []
  pipes = [os.pipe() for _ in range(5)]
  command = [sys.executable, '-c', _WRITERS, path, *(str(out) for _, out in pipes)]
  writers = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, text=True, pass_fds=[out for _, out in pipes])
  for _, out in pipes:
    os.close(out)
  for pipe, _ in pipes:
    writers.stdin.write('next\n')
    writers.stdin.flush()
    with open(pipe) as written:
      what, writer = written.readline().split()
      assert what == 'ready'
      for _ in range(rng.randrange(1, 120)):
        acknowledged.append(written.readline())
      os.kill(int(writer), signal.SIGKILL)
      lines = written.read().splitlines(keepends=True)
      acknowledged += [line for line in lines if line.endswith('\n')]
    with Store(path) as store:
      lifecycle = Lifecycle(store, Clock())
      lifecycle.recover({'w'})
      assert store.ask(Tables.running) == []
      for line in acknowledged:
        what, name, number = line.split()
        i = int(name.split('.')[0][1:])
        if what == 'call':
          expected = make_call(name, int(number), seed=i)
          assert [bits(x) for x in store.ask(Tables.calls, name) if x.index == int(number)] == [bits(expected)]
        elif what == 'reward':
          assert [x.value for x in store.ask(Tables.rewards, name)] == [float(i)]
        elif what == 'finish':
          assert store.ask(Tables.rollout, name).state == RolloutState.SUCCEEDED
        else:
          assert store.ask(Tables.batch, i) == (name,)
      # What was not acknowledged is there as a whole, or not at all.
      for record in store.ask(Tables.completed, 0, 10_000):
        name = record.attempt_id
        assert len(store.ask(Tables.calls, name)) == 2 and len(store.ask(Tables.rewards, name)) == 1
  writers.stdin.close()
  assert writers.wait(60) == 0
  assert len(acknowledged) > 20


def test_a_copy_of_the_files_of_a_running_store_is_a_store(tmp_path):
  """What a loss of power leaves: the files as they are on the disk, without any end of the process."""
  (tmp_path / 'copy').mkdir()
  with Store(tmp_path / 'a') as store:
    attempt_id = _over(store, 'r')
    for name in ('a', 'a-wal'):
      shutil.copy(tmp_path / name, tmp_path / 'copy' / name)
  with Store(tmp_path / 'copy' / 'a') as store:
    assert store.ask(Tables.attempt, attempt_id).state == AttemptState.SUCCEEDED


def test_what_is_open_and_where_the_lists_end(store, monkeypatch):
  for module in ('store', 'tables'):
    monkeypatch.setattr(f'ragen_jax.serving.rollouts.{module}.LONGEST_LIST', 2)
  assert (store.ask(Tables.last_completed), store.ask(Tables.last_batch), store.unclosed('train')) == (0, -1, [])
  for name in 'abcde':
    _over(store, name)
  _over(store, 'v', mode='val')
  store.take_batch(4, ['b', 'd'], 1.0)
  store.close_rollouts(['a'], 1.0)
  Lifecycle(store, Clock()).create(new_rollout('f'))
  assert [r.rollout_id for r in store.unclosed('train')] == ['c', 'e', 'f'], 'over several pages'
  assert [r.rollout_id for r in store.unclosed('val')] == ['v']
  assert (
    store.ask(Tables.last_completed) == store.ask(Tables.rollout, 'v').completed == 6
    and store.ask(Tables.last_batch) == 4
  )
