"""Checkpoints are restored bit for bit, whatever interrupted the run."""

from __future__ import annotations

import errno
import functools
import os
import signal
import subprocess
import sys
import time
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ragen_jax.runs import checkpoints as checkpoint_lib
from ragen_jax.runs import checksums
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.workdir import record_config
from ragen_jax.utils.errors import DiskError, UserError
from tests.support.damage import flip_bytes
from tests.support.processes import coordinator, copy_python, environment


class Moments(NamedTuple):
  mu: dict
  nothing: tuple
  count: jax.Array


@struct.dataclass
class TrainState:
  step: jax.Array
  params: dict
  moments: Moments


def make_state(seed: int, width: int = 3) -> TrainState:
  k1, k2 = jax.random.split(jax.random.key(seed))
  params = {
    'layers': [
      {'kernel': jax.random.normal(k1, (4, width))},
      {'kernel': jax.random.normal(k2, (4, width), jnp.bfloat16)},
    ],
    'lora': jnp.zeros((0, 8)),
  }
  return TrainState(
    step=jnp.asarray(seed, jnp.int32),
    params=params,
    moments=Moments(
      mu={'a.b': jnp.full((5,), -0.0), 'c': jnp.array([True, False])},
      nothing=(),
      count=jax.random.key_data(k1),
    ),
  )


def assert_same_bits(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    assert type(a) is type(e)
    assert a.dtype == e.dtype and a.shape == e.shape
    assert np.asarray(a).tobytes() == np.asarray(e).tobytes()


def message_of(error) -> str:
  message = str(error.value)
  assert '\n' not in message
  return message


# Calls a function of this file with a workdir, in a process of its own.
_CALL = 'import sys; from tests.runs import test_checkpoints; test_checkpoints.{}(sys.argv[1])'


# -- round trips -------------------------------------------------------------------------------------------------------


def test_round_trip_is_bit_exact(tmp_path):
  state = make_state(7)
  meta = {'iteration': 7, 'lr': 0.1 + 0.2, 'seen': [1, 2], 'nested': {'done': False}}
  with Checkpointer(tmp_path, keep=2) as saver:
    saver.save(7, state, meta)
  with Checkpointer(tmp_path, keep=2) as reader:
    restored, restored_meta = reader.restore(jax.tree.map(jnp.zeros_like, state))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    from_abstract, _ = reader.restore(abstract)
    bare, _ = reader.restore(jax.eval_shape(lambda: make_state(7)))
    assert reader.meta() == meta
  assert_same_bits(restored, state)
  assert_same_bits(from_abstract, state)
  assert_same_bits(bare, state)
  assert restored_meta == meta


def test_a_checkpoint_that_orbax_wrote_in_part_is_no_checkpoint(tmp_path):
  """As below a path that it reads as a pattern."""
  with Checkpointer(tmp_path / 'lr=[1e-3]', keep=2) as checkpointer:
    for _ in range(2):
      with pytest.raises(UserError, match=r'^checkpoint of step 1 was not saved in .*: Orbax wrote no manifest'):
        checkpointer.save(1, {'x': jnp.zeros(3)})
      assert not checkpointer.steps()


def test_special_values_and_dtypes(tmp_path):
  # a NaN with a payload, -NaN, -0, infinity, the least denormal
  bits = np.array([0x7FC00001, 0xFFC00000, 0x80000000, 0x7F800000, 1], np.uint32)
  state = {
    'f32': jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float32),
    'bf16': jax.lax.bitcast_convert_type(jnp.asarray((bits >> 16).astype(np.uint16)), jnp.bfloat16),
    'zeros': jnp.zeros((6, 2), jnp.bfloat16),
    'i8': jnp.arange(-3, 3, dtype=jnp.int8),
    'numpy_f64': np.array([np.pi, -0.0, np.nan]),
    'numpy_scalar': np.array(3),
  }
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    checkpointer.save(0, state)
    restored, meta = checkpointer.restore(state)
  assert_same_bits(restored, state)
  assert meta == {}


def test_partial_restore_reads_the_parameters_only(tmp_path):
  state = make_state(3)
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    checkpointer.save(3, state)
    restored, _ = checkpointer.restore({'params': state.params}, partial=True)
  assert_same_bits(restored, {'params': state.params})


@pytest.mark.slow
def test_another_mesh(tmp_path):
  """One device saves, eight restore their shards and save, one restores."""
  state = {'w': jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8), 'b': jnp.arange(8.0)}
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    checkpointer.save(1, state)
  copy_python(_CALL.format('eight_devices'), tmp_path, devices=8, check=True)
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    assert checkpointer.latest_step() == 2
    restored, _ = checkpointer.restore(state)
  assert_same_bits(restored, {'w': state['w'] + 1, 'b': state['b']})


def eight_devices(workdir: str) -> None:
  mesh = jax.make_mesh((4, 2), ('fsdp', 'tensor'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  like = {
    'w': jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=NamedSharding(mesh, P('fsdp', 'tensor'))),
    'b': jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P())),
  }
  with Checkpointer(workdir, keep=2) as checkpointer:
    state, _ = checkpointer.restore(like)
    assert state['w'].sharding == like['w'].sharding and state['w'].addressable_shards[0].data.shape == (2, 4)
    assert len(state['b'].devices()) == 8
    checkpointer.save(2, {'w': state['w'] + 1, 'b': state['b']})


# -- which checkpoints there are ---------------------------------------------------------------------------------------


def test_keeps_the_last_and_the_best(tmp_path):
  success = {1: 0.2, 2: 0.5, 3: float('nan'), 4: 0.3, 5: 0.5, 6: 0.1}
  seen = []
  for step in range(1, 9):
    # Opened anew each time: a resumed run knows the best of the runs before it.
    with Checkpointer(tmp_path, keep=2, save_best='eval/success') as checkpointer:
      metrics = {'eval/success': success[step], 'eval/reward': -step} if step in success else None
      checkpointer.save(step, {'x': jnp.full(2, step)}, {'step': step}, metrics)
      seen.append((checkpointer.steps(), checkpointer.best_step()))
  assert seen == [
    ([1], 1),
    ([1, 2], 2),
    ([2, 3], 2),
    ([2, 3, 4], 2),
    ([4, 5], 5),
    ([5, 6], 5),
    ([5, 6, 7], 5),
    ([5, 7, 8], 5),
  ]
  with Checkpointer(tmp_path, keep=2, save_best='eval/success') as checkpointer:
    state, meta = checkpointer.restore({'x': jnp.zeros(2, jnp.int32)}, step=checkpointer.best_step())
  assert meta == {'step': 5} and state['x'].tolist() == [5, 5]


@pytest.mark.parametrize('order', [(float('nan'), 0.1, 0.2), (0.1, 0.2, float('nan')), (0.2, float('nan'), 0.1)])
def test_a_score_that_is_not_a_number_is_never_the_best(tmp_path, order):
  with Checkpointer(tmp_path, keep=3, save_best='eval/success') as checkpointer:
    for step, success in enumerate(order, start=1):
      checkpointer.save(step, {'x': jnp.ones(2)}, metrics={'eval/success': success})
    assert checkpointer.best_step() == order.index(0.2) + 1
  with Checkpointer(tmp_path, keep=3, save_best='eval/success') as checkpointer:
    assert checkpointer.best_step() == order.index(0.2) + 1
  with Checkpointer(tmp_path / 'alone', keep=3, save_best='eval/success') as checkpointer:
    checkpointer.save(1, {'x': jnp.ones(2)}, metrics={'eval/success': float('nan')})
    assert checkpointer.best_step() is None


def test_without_a_metric_only_the_last_stay(tmp_path):
  with Checkpointer(tmp_path, keep=1) as checkpointer:
    for step in (1, 2, 3):
      checkpointer.save(step, {'x': jnp.zeros(2)}, metrics={'eval/success': -step})
    assert checkpointer.steps() == [3] and checkpointer.best_step() is None


def test_looking_changes_nothing(tmp_path):
  workdir = tmp_path / 'no_run_yet'
  with Checkpointer(workdir, keep=2) as checkpointer:
    assert checkpointer.latest_step() is None
    with pytest.raises(UserError, match='there is no checkpoint in'):
      checkpointer.restore({'x': jnp.zeros(2)})
  assert not workdir.exists()
  unfinished = workdir / 'checkpoints' / '4.orbax-checkpoint-tmp'  # another process is saving
  unfinished.mkdir(parents=True)
  with Checkpointer(workdir, keep=2) as checkpointer:
    assert checkpointer.steps() == []
  assert unfinished.exists()


def test_a_saved_step_is_not_overwritten(tmp_path):
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    checkpointer.save(5, {'x': jnp.zeros(2)}, {'first': True})
    checkpointer.save(5, {'x': jnp.ones(2)}, {'first': False})
    assert checkpointer.restore({'x': jnp.ones(2)})[1] == {'first': True}
    with pytest.raises(UserError, match=r'checkpoint of step 4 was not saved: .* already has step 5; .*--workdir'):
      checkpointer.save(4, {'x': jnp.zeros(2)})
    with pytest.raises(UserError, match=r'no checkpoint of step 3 in .*; it has 5'):
      checkpointer.restore({'x': jnp.ones(2)}, step=3)
  with pytest.raises(UserError, match=r'keep is 0; .* 1 or more'):
    Checkpointer(tmp_path, keep=0)


# -- wrong trees -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('like', 'message'),
  [
    ({'a': jnp.zeros(2), 'b': {'w': jnp.zeros((3, 5))}}, r'b/w is float32\[3,4\] there and float32\[3,5\] here'),
    (
      {'a': jnp.zeros(2), 'b': {'w': jnp.zeros((3, 4), jnp.bfloat16)}},
      r'b/w is float32\[3,4\] there and bfloat16\[3,4\]',
    ),
    ({'a': jnp.zeros(2), 'b': {'v': jnp.zeros((3, 4))}}, r'it has no b/v, which is float32\[3,4\] here'),
    ({'a': jnp.zeros(2)}, r'b/w, which is float32\[3,4\] there, does not exist here'),
  ],
)
def test_another_model_is_named(tmp_path, like, message):
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    checkpointer.save(1, {'a': jnp.zeros(2), 'b': {'w': jnp.zeros((3, 4))}})
    with pytest.raises(UserError, match=f'checkpoint of step 1 in .* does not fit this model: {message}') as error:
      checkpointer.restore(like)
  message_of(error)


def test_what_is_not_an_array_is_refused(tmp_path):
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    with pytest.raises(TypeError, match='leaf a/lr of the state is a float'):
      checkpointer.save(1, {'a': {'lr': 0.1}})
    with pytest.raises(TypeError, match='leaf key of the state is a typed PRNG key'):
      checkpointer.save(1, {'key': jax.random.key(0)})
    with pytest.raises(TypeError, match='JSON'):
      checkpointer.save(1, {'x': jnp.zeros(1)}, {'array': jnp.zeros(1)})
    assert checkpointer.steps() == []


def test_a_damaged_checkpoint_is_named(tmp_path):
  state = {'x': jnp.arange(1000.0)}
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    checkpointer.save(1, state)
    checkpointer.save(2, state)
  for path in (tmp_path / 'checkpoints' / '2' / 'state').rglob('*'):
    if path.is_file():
      os.truncate(path, path.stat().st_size // 2)
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    with pytest.raises(
      UserError, match=r'checkpoint of step 2 .* cannot be read: .*; move .*/2 away .* step 1'
    ) as error:
      checkpointer.restore(state)
    message_of(error)
    assert_same_bits(checkpointer.restore(state, step=1)[0], state)


# -- interruptions -----------------------------------------------------------------------------------------------------


def big_state(step: int) -> dict:
  return {'x': np.random.default_rng(step).standard_normal(500_000, np.float32)}  # 2 MB that do not compress


def save_until_a_file_is_too_large(workdir: str) -> None:
  """Saves step 1, then is killed by the kernel (SIGXFSZ) while it writes the arrays of step 2."""
  import resource

  with Checkpointer(workdir, keep=2) as checkpointer:
    checkpointer.save(1, big_state(1), {'step': 1})
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    checkpointer.save(2, big_state(2), {'step': 2})


def test_killed_in_the_middle_of_a_save(tmp_path):
  done = copy_python(_CALL.format('save_until_a_file_is_too_large'), tmp_path)
  assert done.returncode == -signal.SIGXFSZ, done.stderr
  unfinished = tmp_path / 'checkpoints' / '2.orbax-checkpoint-tmp'
  assert any(path.is_file() and path.stat().st_size == 2**20 for path in unfinished.rglob('*'))
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    assert checkpointer.latest_step() == 1
    state, meta = checkpointer.restore(big_state(0))
    assert meta == {'step': 1}
    assert_same_bits(state, big_state(1))
    checkpointer.save(2, big_state(2), {'step': 2})
    assert not unfinished.exists()
    assert_same_bits(checkpointer.restore(big_state(0))[0], big_state(2))


def save_for_ever(workdir: str) -> None:
  with Checkpointer(workdir, keep=1) as checkpointer:
    for step in range(1, 10_000):
      checkpointer.save(step, big_state(step), {'step': step})


@pytest.mark.parametrize('milliseconds', [pytest.param(0, marks=pytest.mark.slow), 17])
def test_killed_at_any_moment(tmp_path, milliseconds):
  """Saving and deleting all the time: whenever the process dies, a whole checkpoint is left, and it is the last."""
  command = [sys.executable, '-c', _CALL.format('save_for_ever'), str(tmp_path)]
  child = subprocess.Popen(command, env=environment())
  try:
    deadline = time.monotonic() + 120
    # However many it has saved between two looks.
    while not any(int(path.name) >= 3 for path in (tmp_path / 'checkpoints').glob('*') if path.name.isdecimal()):
      assert time.monotonic() < deadline and child.poll() is None
      time.sleep(0.001)
    time.sleep(milliseconds / 1000)
  finally:
    child.kill()
    child.wait()
  with Checkpointer(tmp_path, keep=1) as checkpointer:
    state, meta = checkpointer.restore(big_state(0))
    assert meta['step'] == checkpointer.latest_step() >= 3
    assert_same_bits(state, big_state(meta['step']))
    checkpointer.save(10_000, big_state(0))
    assert checkpointer.steps() == [10_000]
  assert [path.name for path in (tmp_path / 'checkpoints').iterdir()] == ['10000']


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 4 MB."""
  disk = tmp_path / 'disk'
  disk.mkdir()
  mount = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', str(disk)], capture_output=True, text=True)
  if mount.returncode:
    pytest.skip(f'a small tmpfs cannot be mounted here: {mount.stderr.strip()}')
  yield disk
  subprocess.run(['umount', '--lazy', str(disk)], check=True)


def test_full_disk(small_disk, caplog):
  small, large = {'x': np.zeros(8)}, {'x': np.random.default_rng(0).standard_normal(1_000_000)}  # 8 MB
  with Checkpointer(small_disk, keep=2) as checkpointer:
    with pytest.raises(UserError, match=r'step 1 was not saved .*: No space left on device; there is no') as error:
      checkpointer.save(1, large)
    message_of(error)
    checkpointer.save(1, small, {'step': 1})
    with pytest.raises(UserError, match=r'step 2 was not saved .*: No space left on device; step 1 is') as error:
      checkpointer.save(2, large)
    message_of(error)
    assert [path.name for path in (small_disk / 'checkpoints').iterdir()] == ['1']  # the disk has its space back
    assert checkpointer.restore(small)[1] == {'step': 1}
    checkpointer.save(2, small, {'step': 2})  # something was deleted by hand: the run goes on
  with Checkpointer(small_disk, keep=2) as checkpointer:
    assert checkpointer.steps() == [1, 2]
  assert 'Traceback' not in caplog.text


def test_read_only_disk(small_disk):
  state = {'x': np.arange(8)}
  with Checkpointer(small_disk, keep=2) as checkpointer:
    checkpointer.save(1, state)
  subprocess.run(['mount', '-o', 'remount,ro', str(small_disk)], check=True)
  with Checkpointer(small_disk, keep=2) as checkpointer:
    assert_same_bits(checkpointer.restore(state)[0], state)
    with pytest.raises(UserError, match=r'step 2 was not saved in .*: Read-only file system; step 1 is intact'):
      checkpointer.save(2, state)
  with pytest.raises(UserError, match='Read-only file system'):
    record_config(small_disk, {'seed': 0})


@pytest.mark.parametrize(
  'error',
  [
    OSError(errno.ENOSPC, 'No space left on device'),
    ValueError("RESOURCE_EXHAUSTED: Failed to write to file 11: No space left on device [os_error_code='28']"),
  ],
)
def test_full_disk_without_a_disk(tmp_path, monkeypatch, error):
  """The two shapes of the error, where a small file system cannot be mounted: Python's and tensorstore's."""
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    checkpointer.save(1, {'x': jnp.zeros(2)})
    monkeypatch.setattr(checkpointer._manager, 'save', lambda *args, **kwargs: (_ for _ in ()).throw(error))
    with pytest.raises(DiskError, match=r'step 2 was not saved in .*: No space left on device; step 1 is intact'):
      checkpointer.save(2, {'x': jnp.zeros(2)})
    monkeypatch.undo()
    assert checkpointer.latest_step() == 1


def test_saved_although_an_older_one_cannot_be_deleted(tmp_path, monkeypatch):
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    save = checkpointer._manager.save

    def save_then_fail(*args, **kwargs):
      save(*args, **kwargs)
      raise OSError(errno.EACCES, 'Permission denied')

    monkeypatch.setattr(checkpointer._manager, 'save', save_then_fail)
    checkpointer.save(1, {'x': jnp.arange(2)})
    assert checkpointer.restore({'x': jnp.zeros(2, jnp.int32)})[0]['x'].tolist() == [0, 1]


def test_other_errors_are_not_hidden(tmp_path, monkeypatch):
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    monkeypatch.setattr(checkpointer._manager, 'save', lambda *args, **kwargs: int('a bug'))
    with pytest.raises(ValueError, match='a bug'):
      checkpointer.save(2, {'x': jnp.zeros(2)})


def test_threads_that_complete_after_a_failed_save_print_nothing(monkeypatch):
  reported = []
  monkeypatch.setattr(sys, 'unraisablehook', lambda unraisable: reported.append(str(unraisable.exc_value)))

  def complete(text):
    sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(text)))

  with checkpoint_lib._without_orbax_tracebacks():
    complete('Event loop is closed')
  complete('Event loop is closed')  # not of a save
  assert reported == ['Event loop is closed']
  for _ in range(2):
    with pytest.raises(OSError), checkpoint_lib._without_orbax_tracebacks():
      raise OSError
  complete('Event loop is closed')
  complete('another error')
  assert reported == ['Event loop is closed', 'another error']
  assert not isinstance(sys.unraisablehook.args[0], functools.partial)  # hooks do not pile up


def test_workdir_below_a_file(tmp_path):
  (tmp_path / 'file').touch()
  with (
    Checkpointer(tmp_path / 'file', keep=2) as checkpointer,
    pytest.raises(UserError, match=r'step 1 was not saved in .*/file/'),
  ):
    checkpointer.save(1, {'x': jnp.zeros(2)})


def test_disk_errors_are_found_in_the_chain():
  try:
    try:
      raise OSError(errno.EDQUOT, 'x')
    except OSError as e:
      raise ValueError('outer') from e
  except ValueError as e:
    assert checkpoint_lib._disk_error(e) == os.strerror(errno.EDQUOT)
  assert checkpoint_lib._disk_error(ValueError('no file in this')) is None


def test_a_checkpoint_with_flipped_bytes_is_refused_by_name(tmp_path):
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    checkpointer.save(1, make_state(1))
    checkpointer.save(2, make_state(2))
  path = flip_bytes(tmp_path, 2)
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    with pytest.raises(UserError) as error:
      checkpointer.restore(make_state(0))
    message = message_of(error)
    assert 'checkpoint of step 2' in message and path.name in message and 'differs from its checksum' in message
    assert 'away to use step 1' in message
    assert_same_bits(checkpointer.restore(make_state(0), step=1)[0], make_state(1))


def test_a_record_that_is_cut_short_is_told_once_and_by_its_file(tmp_path, caplog):
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    checkpointer.save(1, make_state(1))
    checkpointer.save(2, make_state(2))
  path = tmp_path / 'checkpoints' / '2' / 'meta' / 'metadata'
  path.write_text(path.read_text()[:100])
  with Checkpointer(tmp_path, keep=2, save_best='eval/success') as checkpointer:
    for _ in range(2):
      with pytest.raises(UserError, match=r'^checkpoint of step 2 .*: meta/metadata differs from its checksum; move'):
        checkpointer.meta()
  assert sum('the meta of checkpoint' in r.getMessage() for r in caplog.records) == 1


def test_damaged_checkpoints_are_set_aside_and_the_one_before_is_the_newest(tmp_path, caplog):
  with Checkpointer(tmp_path, keep=3) as checkpointer:
    for step in (1, 2, 3):
      checkpointer.save(step, make_state(step), {'step': step})
  flip_bytes(tmp_path, 3)
  flip_bytes(tmp_path, 2, count=1)
  with Checkpointer(tmp_path, keep=3) as checkpointer, caplog.at_level('WARNING'):
    checkpointer.set_damaged_aside()
    assert checkpointer.steps() == [1]
    state, meta = checkpointer.restore(make_state(0))
    assert_same_bits(state, make_state(1))
    assert meta == {'step': 1}
    # The steps that were set aside can be saved again.
    checkpointer.save(2, make_state(12))
    assert checkpointer.steps() == [1, 2]
  warnings = [r.getMessage() for r in caplog.records if 'is damaged' in r.getMessage()]
  assert [w.split(' (')[0] for w in warnings] == ['checkpoint of step 3 is damaged', 'checkpoint of step 2 is damaged']
  assert 'resuming from step 2' in warnings[0] and 'resuming from step 1' in warnings[1]
  assert sorted(p.name for p in (tmp_path / 'damaged_checkpoints').iterdir()) == ['2', '3']


def test_a_run_whose_checkpoints_are_all_damaged_does_not_silently_begin_anew(tmp_path):
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    checkpointer.save(1, make_state(1))
  flip_bytes(tmp_path, 1)
  with Checkpointer(tmp_path, keep=2) as checkpointer, pytest.raises(UserError) as error:
    checkpointer.set_damaged_aside()
  assert 'no earlier checkpoint' in message_of(error)


def _save_scored(workdir, scores):
  with Checkpointer(workdir, keep=len(scores), save_best='eval/success') as checkpointer:
    for step, score in scores.items():
      checkpointer.save(step, {'x': np.arange(1000.0) + step}, metrics={} if score is None else {'eval/success': score})


def _damage_warnings(caplog):
  return [r.getMessage() for r in caplog.records if 'is damaged' in r.getMessage()]


def test_a_damaged_best_checkpoint_is_set_aside_and_the_next_best_takes_its_place(tmp_path, caplog):
  _save_scored(tmp_path, {1: 0.2, 2: 0.9, 3: 0.5, 4: None})
  path = flip_bytes(tmp_path, 2)
  with caplog.at_level('WARNING'), Checkpointer(tmp_path, keep=4, save_best='eval/success') as checkpointer:
    with pytest.raises(UserError, match=r'checkpoint of step 2 .* move .*/checkpoints/2 away to go on without it$'):
      checkpointer.verify(2)
    for _ in range(2):  # the second call finds nothing to do
      assert checkpointer.intact_best_step() == checkpointer.best_step() == 3
    assert checkpointer.steps() == [1, 3, 4]
    assert checkpointer.restore({'x': np.zeros(1000)}, step=3)[0]['x'][0] == 3
  aside = tmp_path / 'damaged_checkpoints' / '2'
  assert aside.is_dir() and _damage_warnings(caplog) == [
    f'checkpoint of step 2 is damaged ({path.relative_to(tmp_path / "checkpoints" / "2")} differs from its checksum) '
    f'and was moved to {aside}; the best of the others is step 3'
  ]


def test_without_an_intact_checkpoint_that_has_a_score_there_is_no_best_one(tmp_path, caplog):
  _save_scored(tmp_path, {1: 0.2, 2: 0.9, 3: None})
  flip_bytes(tmp_path, 1)
  flip_bytes(tmp_path, 2)
  with caplog.at_level('WARNING'), Checkpointer(tmp_path, keep=3, save_best='eval/success') as checkpointer:
    assert checkpointer.intact_best_step() is None
    assert checkpointer.steps() == [3]  # which is not looked at
  first, second = _damage_warnings(caplog)
  assert first.endswith('the best of the others is step 1') and second.endswith('no other checkpoint has a score')


_SECOND_BEST = """
import sys
from ragen_jax.distributed import processes
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.utils.errors import UserError
processes.connect(sys.argv[2], 2, int(sys.argv[3]), 0)
with Checkpointer(sys.argv[1], keep=3, save_best='eval/success') as checkpointer:
  try:
    print('best', checkpointer.intact_best_step(), 'of', checkpointer.steps(), flush=True)
  except UserError as e:
    print(e, flush=True)
processes.exit_process(0, together=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize('movable', [True, False])
def test_two_processes_find_the_same_intact_best_checkpoint(tmp_path, movable):
  _save_scored(tmp_path, {1: 0.2, 2: 0.9, 3: 0.5})
  flip_bytes(tmp_path, 2)
  if not movable:
    (tmp_path / 'damaged_checkpoints').touch()
  with coordinator() as address:
    children = [
      subprocess.Popen(
        [sys.executable, '-c', _SECOND_BEST, str(tmp_path), address, str(index)],
        env=environment(1),
        stdout=subprocess.PIPE,
        text=True,
      )
      for index in range(2)
    ]
    first, second = (child.communicate(timeout=120)[0].splitlines()[-1] for child in children)
  assert first == second
  assert first == 'best 3 of [1, 3]' if movable else 'damaged_checkpoints/2 failed: ' in first


def test_damage_to_meta_is_found_too(tmp_path):
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    checkpointer.save(1, make_state(1), {'iteration': 1111})
  (path,) = (p for p in (tmp_path / 'checkpoints' / '1').rglob('*') if p.is_file() and b': 1111' in p.read_bytes())
  path.write_bytes(path.read_bytes().replace(b': 1111', b': 2222'))
  with Checkpointer(tmp_path, keep=2) as checkpointer, pytest.raises(UserError, match='differs from its checksum'):
    checkpointer.restore(make_state(0))


def test_a_checkpoint_of_an_older_version_without_checksums_is_read(tmp_path):
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    checkpointer.save(1, make_state(1))
  (tmp_path / 'checkpoints' / '1' / 'checksums.json').unlink()
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    checkpointer.set_damaged_aside()
    assert_same_bits(checkpointer.restore(make_state(0))[0], make_state(1))


def test_an_amended_checkpoint_has_other_metrics_and_valid_checksums(tmp_path):
  with Checkpointer(tmp_path, keep=1, save_best='eval/success') as checkpointer:
    checkpointer.save(1, {'x': jnp.ones(2)}, {'late': True})
    assert checkpointer.best_step() is None
    checkpointer.amend({'late': False}, {'eval/success': 0.5})
    assert checkpointer.best_step() == 1
  with Checkpointer(tmp_path, keep=1, save_best='eval/success') as checkpointer:
    checkpointer.verify(1)
    assert checksums.exist(checkpointer.directory / '1') and checkpointer.best_step() == 1
    state, meta = checkpointer.restore({'x': jnp.zeros(2)})
    assert meta == {'late': False} and state['x'].tolist() == [1, 1]
    flip_bytes(tmp_path, 1)
    checkpointer.reload()
  with Checkpointer(tmp_path, keep=1) as checkpointer, pytest.raises(UserError, match='cannot be read'):
    checkpointer.verify(1)


def test_a_checkpoint_whose_amendment_is_cut_off_is_valid(tmp_path, monkeypatch):
  with Checkpointer(tmp_path, keep=1, save_best='eval/success') as checkpointer:
    checkpointer.save(1, {'x': jnp.ones(2)}, {'late': True})

    def full(_):
      raise OSError(errno.ENOSPC, 'No space left on device')

    with monkeypatch.context() as patch, pytest.raises(DiskError, match='was not changed'):
      patch.setattr(checksums, 'write', full)  # the metadata are new already, and their checksums are not written
      checkpointer.amend({'late': False}, {'eval/success': 0.5})
  with Checkpointer(tmp_path, keep=1, save_best='eval/success') as checkpointer:
    checkpointer.set_damaged_aside()
    assert checkpointer.latest_step() == 1 and checkpointer.meta() == {'late': False}
    assert checkpointer.restore({'x': jnp.zeros(2)})[0]['x'].tolist() == [1, 1]
