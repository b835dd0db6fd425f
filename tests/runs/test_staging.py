"""Workdirs in buckets: the copy on the disk and the bucket, checkpoints in both services, and killed runs."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.runs import checksums, staging
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.metrics import MetricWriter, read_metrics
from ragen_jax.runs.staging import COMMITTED, StagedWorkdir, address, staged
from ragen_jax.runs.stores import open_store
from ragen_jax.runs.workdir import need_disk, open_workdir, record_config
from ragen_jax.utils.errors import DiskError, StoreAway, UserError
from ragen_jax.viewer.store import EpisodeWriter
from tests.support.buckets import Pauses, away, gs_server, memory_store, s3_server
from tests.support.processes import environment


@pytest.fixture
def store():
  with memory_store() as found:
    yield found


@pytest.fixture
def pauses(monkeypatch):
  return Pauses.put(monkeypatch)


@pytest.fixture(scope='module')
def s3():
  with s3_server() as variables:
    fsspec.filesystem('s3').clear_instance_cache()
    yield variables


@pytest.fixture(scope='module')
def gs():
  with gs_server() as variables:
    yield variables


@pytest.fixture(params=['s3', pytest.param('gs', marks=pytest.mark.slow)])
def url(request):
  """A new folder in a bucket of each service."""
  request.getfixturevalue(request.param)
  return f'{request.param}://bucket/{request.node.originalname}'


def _state(number):
  return {'params': {'kernel': jnp.full((4, 8), number, jnp.float32)}, 'count': np.arange(3) + number}


def _save(workdir, step, metrics=None, **arguments):
  with MetricWriter(workdir, start_step=step) as writer, Checkpointer(workdir, keep=2, **arguments) as checkpointer:
    writer.scalars(step, {'loss': step / 3})
    writer.flush()
    checkpointer.save(step, _state(step), {'iteration': step}, metrics)


def _assert_restored(workdir, step):
  with Checkpointer(workdir, keep=2) as checkpointer:
    assert checkpointer.latest_step() == step
    state, meta = checkpointer.restore(_state(0))
  assert meta == {'iteration': step}
  jax.tree.map(np.testing.assert_array_equal, state, _state(step))


# -- Files. ------------------------------------------------------------------------------------------------------------


def test_a_workdir_in_a_bucket_is_a_directory_as_a_path_and_an_address_as_text(store):
  with staged(store, write=True, first=True) as workdir:
    assert pathlib.Path(workdir).is_dir() and os.path.basename(workdir) == 'run'
    assert f'{workdir}' == 's3://bucket/run'
    assert address(pathlib.Path(workdir) / 'a' / 'b', workdir) == 's3://bucket/run/a/b'
    assert address('/else/where', workdir) == '/else/where' and address('runs/a', 'runs') == 'runs/a'
  assert not pathlib.Path(workdir).exists()


def test_files_are_in_the_bucket_at_the_end_and_in_the_next_copy(store):
  with staged(store, write=True, first=True) as workdir:
    record_config(workdir, {'seed': 3})
    (workdir.path / 'xla_cache').mkdir()
    for name in ('episodes/train-00000001.jsonl.gz', 'notes.tmp', 'xla_cache/program', 'plots/curves.png'):
      (workdir.path / name).parent.mkdir(exist_ok=True)
      (workdir.path / name).write_bytes(name.encode())
    assert '.lock' in store.sizes()
  assert sorted(store.sizes()) == ['config.json', 'episodes/train-00000001.jsonl.gz', 'plots/curves.png']
  with staged(store, write=False, first=True) as workdir:
    assert '.lock' not in store.sizes()  # a reader needs no lock
    assert json.loads((workdir.path / 'config.json').read_text()) == {'seed': 3}
    assert (workdir.path / 'plots/curves.png').read_bytes() == b'plots/curves.png'


def test_only_what_has_changed_is_copied_and_what_was_removed_is_deleted(store, monkeypatch):
  with staged(store, write=True, first=True) as workdir:
    for name in ('same', 'changed', 'removed'):
      (workdir.path / name).write_text(name)
  uploads = []
  upload = store.upload

  def note(files, **options):
    uploads.extend(files)
    return upload(files, **options)

  monkeypatch.setattr(store, 'upload', note)
  with staged(store, write=True, first=True) as workdir:
    (workdir.path / 'changed').write_text('another text')
    (workdir.path / 'removed').unlink()
    workdir.push()
    assert uploads == ['changed']
  assert uploads == ['changed'] and sorted(store.sizes()) == ['changed', 'same']
  assert store.read('changed') == b'another text'


def test_a_reader_leaves_the_files_of_the_run_alone(store):
  with staged(store, write=True, first=True) as run:
    (run.path / 'metrics.jsonl').write_text('{"step": 0}\n')
    run.push()
    with staged(store, write=False, first=True) as reader:
      (reader.path / 'evaluation').mkdir()
      (reader.path / 'evaluation' / 'step_1.json').write_text('{}')
      (run.path / 'metrics.jsonl').write_text('{"step": 0}\n{"step": 1}\n')
      run.push()
    assert store.read('metrics.jsonl').count(b'\n') == 2 and store.read('evaluation/step_1.json') == b'{}'


def test_event_files_are_numbered_on_and_not_copied_again(store):
  for step in (0, 1):
    with staged(store, write=True, first=True) as workdir, MetricWriter(workdir, start_step=step) as writer:
      writer.scalars(step, {'loss': 1.0})
      if step:
        (old,) = (path for path in (workdir.path / 'tb').iterdir() if path.name.endswith('.0000'))
        assert old.stat().st_size == 0
  sizes = {key.rpartition('.')[2]: size for key, size in store.sizes('tb/').items()}
  assert sorted(sizes) == ['0000', '0001'] and min(sizes.values()) > 0


def test_an_export_replaces_the_one_before(store):
  store.write('export/old.safetensors', b'')
  with staged(store, write=False, first=True) as workdir:
    assert not (workdir.path / 'export').exists()
  assert 'export/old.safetensors' in store.sizes()
  with staged(store, write=False, first=True) as workdir:
    (workdir.path / 'export').mkdir()
    (workdir.path / 'export' / 'new.safetensors').write_text('weights')
  assert list(store.sizes('export/')) == ['export/new.safetensors']


def test_a_copy_that_fails_is_one_line_and_an_earlier_error_is_not_hidden(store, monkeypatch, pauses):
  def fail(files, **options):
    raise away()

  monkeypatch.setattr(store, 'upload', fail)
  with pytest.raises(UserError) as e, staged(store, write=True, first=True) as workdir:
    (workdir.path / 'config.json').write_text('{}')
  assert str(e.value) == '--workdir=s3://bucket/run: was not written completely: the network is down'
  assert isinstance(e.value, StoreAway) and sum(pauses.taken) == 300
  pauses.taken.clear()
  with pytest.raises(ZeroDivisionError), staged(store, write=True, first=True) as workdir:
    (workdir.path / 'config.json').write_text('{}')
    1 / 0  # noqa: B018
  assert not pauses.taken  # an error does not wait for the bucket
  monkeypatch.undo()
  with pytest.raises(ZeroDivisionError), staged(store, write=True, first=True) as workdir:
    (workdir.path / 'config.json').write_text('{}')
    1 / 0  # noqa: B018
  assert store.read('config.json') == b'{}'  # what a failed run has written is kept


def test_nothing_is_written_after_the_lock_was_lost(store):
  with pytest.raises(UserError, match='has taken over the lock'), staged(store, write=True, first=True) as workdir:
    store.write('.lock', b'{"host": "far", "pid": 7, "token": "theirs"}')
    (workdir.path / 'config.json').write_text('{}')
  assert sorted(store.sizes()) == ['.lock']


def test_changes_are_copied_from_time_to_time(store, monkeypatch):
  monkeypatch.setattr(staging, 'PUSH_SECONDS', 0.01)
  with staged(store, write=True, first=True) as workdir:
    (workdir.path / 'metrics.jsonl').write_text('{"step": 0}\n')
    while store.read('metrics.jsonl') is None:  # the test's own limit of time ends a copy that is never made
      pass


def test_a_file_that_is_removed_during_a_copy_is_not_copied(store, monkeypatch):
  upload = store.upload
  with staged(store, write=True, first=True) as workdir:
    for name in ('metrics.jsonl', 'metrics.jsonl.line', 'old'):
      (workdir.path / name).write_text(name)
    workdir.push()
    (workdir.path / 'metrics.jsonl').write_text('another line')
    for name in ('metrics.jsonl.line', 'new'):
      (workdir.path / name).write_text('is removed')

    def remove_first(files, **options):
      for name in ('metrics.jsonl.line', 'new'):
        (workdir.path / name).unlink(missing_ok=True)
      return upload(files, **options)

    monkeypatch.setattr(store, 'upload', remove_first)
    workdir.push()
    assert sorted(set(store.sizes()) - {'.lock'}) == ['metrics.jsonl', 'old']
    assert store.read('metrics.jsonl') == b'another line'
    monkeypatch.undo()
    (workdir.path / 'new').write_text('is there again')
  assert store.read('new') == b'is there again'


@pytest.mark.parametrize('part', ['get_file', 'touch'])
def test_a_full_local_disk_at_the_start_is_not_the_fault_of_the_bucket(store, monkeypatch, part):
  with staged(store, write=True, first=True) as workdir, MetricWriter(workdir, start_step=0) as writer:
    writer.scalars(0, {'loss': 1.0})

  def fail(*_, **__):
    raise OSError(errno.ENOSPC, 'No space left on device')

  monkeypatch.setattr(store._files if part == 'get_file' else pathlib.Path, part, fail)
  with pytest.raises(DiskError, match='No space left on device; TMPDIR chooses the disk'):
    staged(store, write=False, first=True).__enter__()


def test_a_full_local_disk_does_not_wait_for_the_bucket(store, monkeypatch, pauses):
  with staged(store, write=True, first=True) as workdir:
    _save(workdir, 1)
  with staged(store, write=False, first=True) as workdir, Checkpointer(workdir, keep=2) as checkpointer:

    def fail(*_, **__):
      raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(store._files, 'get_file', fail)
    with pytest.raises(DiskError, match=r'/checkpoints/1/state/.* was not written: No space left on device; TMPDIR'):
      checkpointer.restore(_state(0))
    assert not pauses.taken
    monkeypatch.undo()


def test_the_other_processes_of_a_run_copy_nothing(store):
  store.write('config.json', b'{}')
  with staged(store, write=True, first=False) as workdir:
    assert list(workdir.path.iterdir()) == []
    (workdir.path / 'file').write_text('')
  assert list(store.sizes()) == ['config.json']


@pytest.mark.slow
def test_copies_of_killed_processes_are_removed(tmp_path, monkeypatch):
  monkeypatch.setenv('TMPDIR', str(tmp_path))
  monkeypatch.setattr(tempfile, 'tempdir', None)
  code = (
    'import os, sys\n'
    'from ragen_jax.runs.staging import _local_directory\n'
    'with _local_directory() as directory:\n'
    '  print(directory, flush=True)\n'
    '  sys.stdin.read()\n'
  )
  pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'text': True}
  processes = [subprocess.Popen([sys.executable, '-c', code], env=environment(), **pipes) for _ in range(2)]
  killed, alive = (pathlib.Path(process.stdout.readline().strip()) for process in processes)
  processes[0].kill()
  processes[0].wait(timeout=60)
  assert killed.is_dir() and alive.is_dir()
  with staging._local_directory():
    assert not killed.exists() and alive.is_dir()
  processes[1].communicate('', timeout=60)
  assert list(tmp_path.iterdir()) == []


# -- Checkpoints. ------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive_cases('gs')
@pytest.mark.slow_cases('s3')
def test_a_run_goes_on_from_its_checkpoint_in_the_bucket(url):
  for step in (1, 2, 3):
    with open_workdir(url, write=True) as workdir:
      if step > 1:
        _assert_restored(workdir, step - 1)
      _save(workdir, step)
      if step == 2:
        EpisodeWriter(workdir)  # nothing to remove
  with open_workdir(url, write=False) as workdir:
    _assert_restored(workdir, 3)
    assert [row['loss'] for row in read_metrics(workdir)] == [1 / 3, 2 / 3, 1.0]
    with Checkpointer(workdir, keep=2) as checkpointer:
      assert checkpointer.steps() == [2, 3]
    with pytest.raises(UserError, match=f'^workdir {url} belongs to another config|seed was 0 and is 1'):
      record_config(workdir, {'seed': 0})
      record_config(workdir, {'seed': 1})
  steps = {key.split('/')[1] for key in open_store(url).sizes('checkpoints/')}
  assert steps == {'2', '3'}


def test_metrics_of_a_checkpoint_are_in_the_bucket_before_it(url, monkeypatch):
  """Otherwise a run that is killed in between would resume without them."""
  with open_workdir(url, write=True) as workdir:
    found = []
    publish = StagedWorkdir.publish_checkpoint

    def look(self, step):
      found.append(self.store.read('metrics.jsonl'))
      publish(self, step)

    monkeypatch.setattr(StagedWorkdir, 'publish_checkpoint', look)
    _save(workdir, 1)
  assert found and b'"step": 1' in found[0]


def test_the_record_of_a_checkpoint_is_amended_in_the_bucket(url):
  with open_workdir(url, write=True) as workdir:
    _save(workdir, 1, save_best='success')
    with Checkpointer(workdir, keep=2, save_best='success') as checkpointer:
      checkpointer.amend({'iteration': 1, 'more': True}, metrics={'success': 0.5})
  with open_workdir(url, write=False) as workdir, Checkpointer(workdir, keep=2, save_best='success') as checkpointer:
    checkpointer.verify(1)
    assert checkpointer.meta() == {'iteration': 1, 'more': True} and checkpointer.best_step() == 1


@pytest.mark.slow
@pytest.mark.exhaustive_cases('gs')
def test_a_damaged_checkpoint_in_the_bucket_is_set_aside(url, caplog):
  with open_workdir(url, write=True) as workdir:
    _save(workdir, 1)
    _save(workdir, 2)
  store = open_store(url)
  key = next(key for key in store.sizes('checkpoints/2/state/') if '/d/' in key)
  store.write(key, b'other bytes')
  message = rf'checkpoint of step 2 in {url}/checkpoints cannot be read: .* its checksum'
  with open_workdir(url, write=False) as workdir, Checkpointer(workdir, keep=2) as checkpointer:  # noqa: SIM117
    with pytest.raises(UserError, match=message):
      checkpointer.restore(_state(0))
  with open_workdir(url, write=True) as workdir:
    with caplog.at_level('WARNING'), Checkpointer(workdir, keep=2) as checkpointer:
      checkpointer.set_damaged_aside()
    assert f'was moved to {url}/damaged_checkpoints/2; resuming from step 1' in caplog.text
    _assert_restored(workdir, 1)
    _save(workdir, 2)
  with open_workdir(url, write=False) as workdir:
    _assert_restored(workdir, 2)
  assert store.sizes('damaged_checkpoints/2/')


class _Killed(BaseException):
  """Ends a run; its checkpoints are then as after SIGKILL."""


def _kill_at(monkeypatch, store, operation, number):
  """Ends the run at the request of this number that concerns checkpoints."""
  original, requests = getattr(store, operation), []

  def ask(keys, *rest, **options):
    if any('checkpoints/' in key for key in keys):
      requests.append(keys)
      if len(requests) == number:
        monkeypatch.undo()
        raise _Killed
    return original(keys, *rest, **options)

  monkeypatch.setattr(store, operation, ask)


def _damage(store, step):
  """Changes a digit in the record of a checkpoint, which can still be read."""
  key = f'checkpoints/{step}/meta/metadata'
  store.write(key, store.read(key).replace(b'"iteration": %d' % step, b'"iteration": 7'))


def test_a_damaged_checkpoint_is_taken_out_of_the_bucket(store):
  for step in (1, 2):
    with staged(store, write=True, first=True) as workdir:
      _save(workdir, step)
  before = {key.removeprefix('checkpoints/2/') for key in store.sizes('checkpoints/2/')}
  _damage(store, 2)
  with staged(store, write=True, first=True) as workdir, Checkpointer(workdir, keep=2) as checkpointer:
    checkpointer.set_damaged_aside()
    assert checkpointer.steps() == [1] and not store.sizes('checkpoints/2/')
    aside = {key.removeprefix('damaged_checkpoints/2/') for key in store.sizes('damaged_checkpoints/2/')}
    assert aside == before - {COMMITTED}
  _damage(store, 1)
  message = 'The same command starts from the beginning'
  with pytest.raises(UserError, match=message), staged(store, write=True, first=True) as workdir:  # noqa: SIM117
    with Checkpointer(workdir, keep=2) as checkpointer:
      checkpointer.set_damaged_aside()
  with staged(store, write=True, first=True) as workdir, Checkpointer(workdir, keep=2) as checkpointer:
    checkpointer.set_damaged_aside()
    assert checkpointer.latest_step() is None


@pytest.mark.parametrize(('operation', 'number'), [('upload', 1), ('upload', 2), ('delete', 1), ('delete', 2)])
@pytest.mark.slow_cases('upload-2', 'delete-2')
def test_a_run_that_is_killed_after_damage_goes_on_from_an_intact_checkpoint(store, monkeypatch, operation, number):
  """It is killed while the damaged checkpoint is moved, or while its step is saved again."""
  with staged(store, write=True, first=True) as workdir:
    _save(workdir, 1)
    _save(workdir, 2)
  _damage(store, 2)
  _kill_at(monkeypatch, store, operation, number)
  with contextlib.suppress(_Killed), staged(store, write=True, first=True) as workdir:
    with Checkpointer(workdir, keep=2) as checkpointer:
      checkpointer.set_damaged_aside()
      _save(workdir, 2)
    raise AssertionError('the run was not killed')
  with staged(store, write=True, first=True) as workdir:
    with Checkpointer(workdir, keep=2) as checkpointer:
      checkpointer.set_damaged_aside()
    _assert_restored(workdir, 1)
    _save(workdir, 2)
  with staged(store, write=False, first=True) as workdir:
    _assert_restored(workdir, 2)


def test_a_checkpoint_is_moved_away_after_requests_that_failed(store, monkeypatch, pauses):
  with staged(store, write=True, first=True) as workdir:
    _save(workdir, 1)
    _save(workdir, 2)
  _damage(store, 2)
  with staged(store, write=True, first=True) as workdir:
    failed = []

    def fail_at_first(name, original, *arguments, **options):
      if name not in failed:
        failed.append(name)
        raise away()
      return original(*arguments, **options)

    for name in ('sizes', 'upload', 'delete'):
      monkeypatch.setattr(store, name, functools.partial(fail_at_first, name, getattr(store, name)))
    with Checkpointer(workdir, keep=2) as checkpointer:
      checkpointer.set_damaged_aside()
    assert failed == ['sizes', 'upload', 'delete'] and len(pauses.taken) == 3
    monkeypatch.undo()
    assert not store.sizes('checkpoints/2/') and store.sizes('damaged_checkpoints/2/')


def test_a_checkpoint_that_cannot_be_moved_away_is_one_line(store, monkeypatch, pauses):
  with staged(store, write=True, first=True) as workdir:
    _save(workdir, 1)
  _damage(store, 1)
  with staged(store, write=True, first=True) as workdir, Checkpointer(workdir, keep=2) as checkpointer:

    def fail(keys):
      raise away()

    monkeypatch.setattr(store, 'delete', fail)
    message = 'is damaged: .* moving it to s3://bucket/run/damaged_checkpoints/1 failed: the network is down$'
    with pytest.raises(StoreAway, match=message):
      checkpointer.set_damaged_aside()
    monkeypatch.undo()


def test_a_damaged_best_checkpoint_is_taken_out_of_the_bucket(store):
  with staged(store, write=True, first=True) as workdir:
    for step, success in ((1, 0.5), (2, 0.9), (3, 0.1), (4, 0.2)):
      _save(workdir, step, {'success': success}, save_best='success')
  _damage(store, 2)
  with staged(store, write=True, first=True) as workdir, Checkpointer(workdir, 2, 'success') as checkpointer:
    assert checkpointer.best_step() == 2 and checkpointer.intact_best_step() == 4
    state, meta = checkpointer.restore(_state(0), step=4)
    assert meta == {'iteration': 4} and state['count'][0] == 4
    assert not store.sizes('checkpoints/2/') and store.sizes('damaged_checkpoints/2/')


def test_arrays_are_never_uploaded_under_the_mark_of_a_complete_checkpoint(store, monkeypatch):
  with staged(store, write=True, first=True) as workdir:
    _save(workdir, 1)
    path = next(path for path in (workdir.path / 'checkpoints/1/state').rglob('*') if path.is_file())
    path.write_bytes(path.read_bytes() + b'more')
    marked, upload = [], store.upload

    def look(files):
      marked.append(COMMITTED in str(store.sizes('checkpoints/1/')))
      return upload(files)

    monkeypatch.setattr(store, 'upload', look)
    workdir.publish_checkpoint(1)
    assert marked and not any(marked)
    assert f'checkpoints/1/{COMMITTED}' in store.sizes()
    monkeypatch.undo()


@pytest.mark.slow
def test_an_upload_that_was_interrupted_does_not_count(s3):
  url = 's3://bucket/interrupted'
  with open_workdir(url, write=True) as workdir:
    _save(workdir, 1)
    _save(workdir, 2)
  store = open_store(url)
  store.delete([f'checkpoints/2/{COMMITTED}', 'checkpoints/2/checksums.json'])
  store.write('checkpoints/2/state/left', b'of the interrupted upload')
  with open_workdir(url, write=True) as workdir:
    _assert_restored(workdir, 1)
    _save(workdir, 2)
  assert 'checkpoints/2/state/left' not in store.sizes()
  with open_workdir(url, write=False) as workdir:
    _assert_restored(workdir, 2)


def test_a_checkpoint_is_marked_after_its_files_and_unmarked_before(store):
  events = []

  def note(name):
    method = getattr(store, name)

    def noted(what, *rest, **options):
      keys = [what] if name == 'write' else list(what)
      events.extend((name, key) for key in keys if key.startswith('checkpoints/'))
      return method(what, *rest, **options)

    setattr(store, name, noted)

  for name in ('upload', 'write', 'delete'):
    note(name)
  with staged(store, write=True, first=True) as workdir:
    _save(workdir, 1)
    assert events[-1] == ('write', f'checkpoints/1/{COMMITTED}')
    assert events[-2] == ('upload', 'checkpoints/1/checksums.json')
    events.clear()
    with Checkpointer(workdir, keep=2) as checkpointer:
      checkpointer.amend({'iteration': 1}, metrics={'success': 1.0})
    changed = [('delete', 'checkpoints/1/checksums.json'), ('upload', 'checkpoints/1/meta/metadata')]
    assert events == [*changed, ('upload', 'checkpoints/1/checksums.json')]
    _save(workdir, 2)
    events.clear()
    _save(workdir, 3)
    deleted = [key for name, key in events if name == 'delete']
    assert deleted[0] == f'checkpoints/1/{COMMITTED}' and len(deleted) > 5
    assert all(key.startswith('checkpoints/1/') for key in deleted)


def test_a_checkpoint_that_cannot_be_copied_is_one_line(s3, monkeypatch, pauses):
  url = 's3://bucket/fails'
  with open_workdir(url, write=True) as workdir:
    _save(workdir, 1)

    def fail(files, **options):
      raise away()

    monkeypatch.setattr(workdir.store, 'upload', fail)
    with Checkpointer(workdir, keep=2) as checkpointer, pytest.raises(UserError) as e:
      checkpointer.save(2, _state(2), {'iteration': 2})
    monkeypatch.undo()
  assert str(e.value) == (
    f'checkpoint of step 2 was not saved in {url}/checkpoints: the network is down; step 1 is intact'
  )
  assert isinstance(e.value, StoreAway) and pauses.taken
  with open_workdir(url, write=False) as workdir:
    _assert_restored(workdir, 1)


@pytest.mark.parametrize('part', ['checksums', 'deletion of older ones'])
def test_a_checkpoint_that_orbax_has_written_is_copied_whatever_fails_afterwards(store, monkeypatch, caplog, part):
  def fail(*_, **__):
    raise OSError(errno.ENOSPC, 'No space left on device')

  with staged(store, write=True, first=True) as workdir:
    _save(workdir, 1)
    with caplog.at_level('WARNING'), Checkpointer(workdir, keep=2) as checkpointer:
      if part == 'checksums':
        monkeypatch.setattr(checksums, 'write', fail)
      else:
        monkeypatch.setattr(checkpointer._manager._checkpoint_deleter, 'delete_steps', fail)
      checkpointer.save(2, _state(2), {'iteration': 2})
    monkeypatch.undo()
    assert 'step 2 is saved in s3://bucket/run/checkpoints, but without checksums or' in caplog.text
  assert f'checkpoints/2/{COMMITTED}' in store.sizes()
  with staged(store, write=False, first=True) as workdir:
    _assert_restored(workdir, 2)


def test_a_checkpoint_is_not_reported_as_saved_if_it_is_only_on_the_local_disk(store, monkeypatch, caplog):
  with staged(store, write=True, first=True) as workdir:
    _save(workdir, 1)

    def fail(self, step):
      raise OSError(errno.EIO, 'Input/output error')

    monkeypatch.setattr(StagedWorkdir, 'publish_checkpoint', fail)
    message = (
      '^checkpoint of step 2 was not saved in s3://bucket/run/checkpoints: Input/output error; step 1 is intact$'
    )
    with pytest.raises(DiskError, match=message):
      _save(workdir, 2)
  assert 'is saved' not in caplog.text
  with staged(store, write=False, first=True) as workdir:
    _assert_restored(workdir, 1)


@pytest.mark.parametrize('operation', ['upload', 'write', 'delete', 'read'])
def test_a_checkpoint_is_whole_after_requests_that_failed(store, monkeypatch, pauses, operation):
  """Each new request fails once, so that all steps of a copy are interrupted in turn."""
  with staged(store, write=True, first=True) as workdir:
    _save(workdir, 1)
    original, requests = getattr(store, operation), set()

    def fail_at_first(keys, *rest, **options):
      if str(keys) not in requests:
        requests.add(str(keys))
        raise away()
      return original(keys, *rest, **options)

    monkeypatch.setattr(store, operation, fail_at_first)
    for step in (2, 3):  # keeps two, so that the first is deleted
      _save(workdir, step)
    with Checkpointer(workdir, keep=2) as checkpointer:
      checkpointer.amend({'iteration': 3}, metrics={'success': 1.0})
    assert len(pauses.taken) == len(requests) > 0
    monkeypatch.undo()
  with staged(store, write=False, first=True) as workdir:
    _assert_restored(workdir, 3)
    with Checkpointer(workdir, keep=2) as checkpointer:
      assert checkpointer.steps() == [2, 3]
  assert not store.sizes('checkpoints/1/')


def test_a_checkpoint_is_read_after_requests_that_failed(store, monkeypatch, pauses):
  with staged(store, write=True, first=True) as workdir:
    _save(workdir, 1)
  with staged(store, write=False, first=True) as workdir:
    original, calls = store.download, []

    def fail_once(files):
      calls.append(files)
      if len(calls) == 1:
        raise away()
      original(files)

    monkeypatch.setattr(store, 'download', fail_once)
    _assert_restored(workdir, 1)
    assert calls[0] == calls[1] and len(pauses.taken) == 1


_RUN = """
import sys
from ragen_jax.runs.workdir import open_workdir
from tests.runs.test_staging import _save
with open_workdir(sys.argv[1], write=True) as workdir:
  _save(workdir, 1)
  print('saved', flush=True)
  sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_run_keeps_its_checkpoint_and_its_lock_is_taken_over(s3):
  url = 's3://bucket/killed'
  process = subprocess.Popen(
    [sys.executable, '-c', _RUN, url], env=environment() | s3, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
  )
  assert process.stdout.readline() == 'saved\n'
  process.send_signal(signal.SIGKILL)
  process.wait(timeout=60)
  assert '.lock' in open_store(url).sizes()
  with open_workdir(url, write=True) as workdir:
    _assert_restored(workdir, 1)
  assert '.lock' not in open_store(url).sizes()


# -- What needs a disk. ------------------------------------------------------------------------------------------------


def test_several_processes_need_gs_or_a_disk(monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  with pytest.raises(UserError, match=r'^--workdir=s3://bucket/run: a run of 2 processes needs a directory on a sh'):
    open_workdir('s3://bucket/run', write=True).__enter__()


def test_what_needs_a_disk_is_refused():
  need_disk('runs/a', 'it needs a disk')
  with pytest.raises(UserError, match=r'^--workdir=gs://bucket/run: it needs a disk; choose a directory on disk$'):
    need_disk('gs://bucket/run', 'it needs a disk')
