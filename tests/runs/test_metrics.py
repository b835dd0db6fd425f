"""The log of a run that was killed and resumed is the log of the run that was not."""

from __future__ import annotations

import io
import json
import os
import pathlib
import signal
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing import event_file_loader
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util
from tensorboardX.proto.event_pb2 import SessionLog
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from ragen_jax.runs.metrics import Counts, MetricWriter, read_metrics
from ragen_jax.utils.errors import UserError
from tests.support.events import read_events
from tests.support.processes import copy_python


def values_of(step: int) -> dict[str, float]:
  rng = np.random.default_rng(step)
  return {'actor/entropy': rng.random(), 'frozen_lake/pass@8': rng.random() / 3, 'rollout/kl': float('nan')}


def write_steps(workdir: pathlib.Path, start: int, stop: int) -> None:
  with MetricWriter(workdir, start) as writer:
    for step in range(start, stop):
      writer.scalars(step, values_of(step))
      writer.flush()
      writer.scalars(step, {'timing_s/rollout': step / 7})


def shown_scalars(workdir: pathlib.Path) -> list[tuple[int, str, float]]:
  """The scalars that TensorBoard shows: a restart at step k hides what was written before of the steps from k on."""
  shown = []
  for event in read_events(workdir / 'tb'):
    if event.session_log.status == SessionLog.START:
      shown = [point for point in shown if point[0] < event.step]
    shown += [
      (event.step, value.tag, repr(value.simple_value))
      for value in event.summary.value
      if value.HasField('simple_value')
    ]
  return shown


def summaries(workdir: pathlib.Path) -> dict:
  return {value.tag: value for event in read_events(workdir / 'tb') for value in event.summary.value}


# -- scalars -----------------------------------------------------------------------------------------------------------


def test_numbers_come_back_exactly(tmp_path):
  numbers = {
    'third': 1 / 3,
    'tiny': 5e-324,
    'huge': 1.7976931348623157e308,
    'minus_zero': -0.0,
    'float32': np.float32(0.1),
    'bfloat16': jnp.asarray(0.1, jnp.bfloat16),
    'array': jnp.ones((1, 1)) * 0.7,
    'int': 2**53,
    'bool': True,
    'nan': float('nan'),
    'inf': jnp.inf,
    'minus_inf': -np.inf,
  }
  with MetricWriter(tmp_path) as writer:
    writer.scalars(0, numbers)
  (row,) = read_metrics(tmp_path)
  assert row.pop('step') == 0
  assert list(row) == list(numbers)
  for name, value in numbers.items():
    expected = float(np.asarray(value).item())
    assert struct.pack('d', row[name]) == struct.pack('d', expected), name
  # Strict JSON: any reader can open the file.
  json.loads((tmp_path / 'metrics.jsonl').read_text(), parse_constant=lambda name: pytest.fail(f'{name} is not JSON'))


def test_one_line_a_step(tmp_path):
  writer = MetricWriter(tmp_path)
  writer.scalars(3, {'a': 1, 'b': 2})
  writer.scalars(3, {'c': 3})
  assert read_metrics(tmp_path) == []
  writer.flush()
  assert read_metrics(tmp_path) == [{'step': 3, 'a': 1, 'b': 2, 'c': 3}]
  writer.scalars(3, {'b': 123456789.5})  # after a flush: the line is written again, longer ...
  writer.flush()
  writer.scalars(3, {'b': 0, 'd': 4})  # ... and shorter
  writer.scalars(4, {'a': 5})
  assert read_metrics(tmp_path) == [{'step': 3, 'a': 1, 'b': 0, 'c': 3, 'd': 4}]
  writer.close()
  writer.close()
  assert (tmp_path / 'metrics.jsonl').read_text().splitlines() == [
    '{"step": 3, "a": 1.0, "b": 0.0, "c": 3.0, "d": 4.0}',
    '{"step": 4, "a": 5.0}',
  ]


def test_what_is_no_scalar_is_refused(tmp_path):
  with MetricWriter(tmp_path) as writer:
    with pytest.raises(ValueError, match=r'metric a/b has shape \[2\], not one value'):
      writer.scalars(0, {'a/b': np.zeros(2)})
    with pytest.raises(ValueError, match="cannot be named 'step'"):
      writer.scalars(0, {'step': 1})
    with pytest.raises(ValueError, match=r'image x is float32\[2, 2, 3\], not uint8\[H, W, 3\]'):
      writer.images(0, {'x': np.zeros((2, 2, 3), np.float32)})
  assert read_metrics(tmp_path) == []


def test_a_disabled_writer_writes_nothing(tmp_path):
  with MetricWriter(tmp_path / 'run', enabled=False) as writer:
    # Not even looked at: on several hosts an array may not be readable from here.
    writer.scalars(0, {'a': object()})
    writer.text(0, {'a': 'b'})
    writer.histograms(0, {'a': object()})
    writer.images(0, {'a': object()})
    writer.hparams({'a': object()}, ['a'])
    writer.flush()
  assert not (tmp_path / 'run').exists()


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('start', [0, 3, 6, 9])
def test_resumed_equals_uninterrupted(tmp_path, start):
  write_steps(tmp_path / 'whole', 0, 9)
  write_steps(tmp_path / 'resumed', 0, 6)
  write_steps(tmp_path / 'resumed', start, 9)
  if start > 6:  # nothing was lost, nothing was written: a run that is started again after its end
    assert len(read_metrics(tmp_path / 'resumed')) == 6
    return
  whole, resumed = (tmp_path / name / 'metrics.jsonl' for name in ('whole', 'resumed'))
  assert resumed.read_bytes() == whole.read_bytes()
  assert shown_scalars(tmp_path / 'resumed') == shown_scalars(tmp_path / 'whole')
  assert [row['step'] for row in read_metrics(tmp_path / 'resumed')] == list(range(9))


def test_an_evaluation_that_was_stopped_goes_on_in_the_line_of_its_iteration(tmp_path):
  with MetricWriter(tmp_path) as writer:
    for step in (1, 2):
      writer.scalars(step, {'actor/entropy': step / 3, 'actor/kl': float('nan')})
  with MetricWriter(tmp_path, start_step=3) as writer:
    writer.scalars(2, {'val-env/FrozenLake/success': 0.5})
    writer.flush()
    writer.scalars(3, {'actor/entropy': 1.0})
  lines = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
  assert [line['step'] for line in lines] == [1, 2, 3]
  assert lines[1] == {'step': 2, 'actor/entropy': 2 / 3, 'actor/kl': 'NaN', 'val-env/FrozenLake/success': 0.5}
  assert lines[0]['actor/entropy'] == 1 / 3 and lines[2] == {'step': 3, 'actor/entropy': 1.0}


KILLED = """
import os, signal, sys
from ragen_jax.runs.metrics import MetricWriter
from tests.runs.test_metrics import values_of
writer = MetricWriter(sys.argv[1])
for step in range(5):
  writer.scalars(step, values_of(step))
  writer.flush()
  writer.scalars(step, {'timing_s/rollout': step / 7})
writer.flush()  # as before a checkpoint
writer.scalars(5, values_of(5))
writer.scalars(6, values_of(6))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize('rubbish', ['', '{"step": 6, "actor/entr', '{"step": 6}', '\0\0\0'])
def test_killed_then_resumed(tmp_path, rubbish):
  """What was flushed is there after a kill, the half-written rest is ignored by the reader and gone on resuming."""
  killed, whole = tmp_path / 'killed', tmp_path / 'whole'
  if rubbish:  # the process is slow to start: one kill is enough, the other cases are what it may leave
    write_steps(killed, 0, 5)
  else:
    assert copy_python(KILLED, str(killed)).returncode == -signal.SIGKILL
  with (killed / 'metrics.jsonl').open('a') as file:
    file.write(rubbish)
  assert [row['step'] for row in read_metrics(killed)][:5] == list(range(5))
  write_steps(killed, 5, 8)
  write_steps(whole, 0, 8)
  assert (killed / 'metrics.jsonl').read_bytes() == (whole / 'metrics.jsonl').read_bytes()
  assert shown_scalars(killed) == shown_scalars(whole)
  assert sorted(path.name for path in killed.iterdir()) == ['metrics.jsonl', 'tb']


def test_the_old_lines_stay_until_the_new_file_is_whole(tmp_path, monkeypatch):
  write_steps(tmp_path, 0, 4)
  before = (tmp_path / 'metrics.jsonl').read_bytes()

  def no_space(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, 'replace', no_space)
  with pytest.raises(UserError, match=r'metrics were not written in .*: No space left on device') as error:
    MetricWriter(tmp_path, 2)
  assert '\n' not in str(error.value)
  assert (tmp_path / 'metrics.jsonl').read_bytes() == before


class _Torn:
  """A file of which a write stops half-way, as on a full disk."""

  def __init__(self, file):
    self._file = file

  def __getattr__(self, name):
    return getattr(self._file, name)

  def write(self, content):
    self._file.write(content[: len(content) // 2])
    self._file.flush()
    raise OSError(28, 'No space left on device')


@pytest.mark.parametrize('later', ['timing_s/step', 'a'])  # longer than the earlier line or not
def test_a_line_that_is_replaced_half_way_keeps_its_earlier_values(tmp_path, later):
  writer = MetricWriter(tmp_path)
  writer.scalars(1, {'loss': 1.0})
  writer.scalars(2, {'loss': 0.123456789, 'reward': 7.0})
  writer.flush()  # as before a checkpoint
  writer.scalars(2, {'loss': 3.0, later: 1.0 if later == 'a' else 0.123456789123})
  writer._file, file = _Torn(writer._file), writer._file
  with pytest.raises(UserError, match='No space left'):
    writer.flush()
  file.close()
  earlier = [{'step': 1, 'loss': 1.0}, {'step': 2, 'loss': 0.123456789, 'reward': 7.0}]
  with pytest.raises(ValueError, match=r'(?i)expecting|extra|unterminated'):
    json.loads((tmp_path / 'metrics.jsonl').read_text().splitlines()[-1])
  assert read_metrics(tmp_path) == earlier
  with MetricWriter(tmp_path, 3) as writer:
    writer.scalars(3, {'loss': 0.0})
  assert read_metrics(tmp_path) == [*earlier, {'step': 3, 'loss': 0.0}]
  assert sorted(path.name for path in tmp_path.iterdir()) == ['metrics.jsonl', 'tb']
  MetricWriter(tmp_path, 2).close()
  assert read_metrics(tmp_path) == earlier[:1]


def test_a_first_line_of_a_step_that_is_written_half_way_is_dropped(tmp_path):
  writer = MetricWriter(tmp_path)
  writer.scalars(1, {'loss': 1.0})
  writer.flush()
  writer.scalars(2, {'loss': 2.0})
  writer._file, file = _Torn(writer._file), writer._file
  with pytest.raises(UserError, match='No space left'):
    writer.flush()
  file.close()
  MetricWriter(tmp_path, 3).close()
  assert (tmp_path / 'metrics.jsonl').read_text() == '{"step": 1, "loss": 1.0}\n'


def test_damage_before_the_last_line_is_named(tmp_path):
  write_steps(tmp_path, 0, 3)
  path = tmp_path / 'metrics.jsonl'
  lines = path.read_text().splitlines()
  for damaged in (lines[1][:9], '{"step": 1, "a": "hello"}'):
    path.write_text('\n'.join([lines[0], damaged, lines[2]]) + '\n')
    for use in (lambda: read_metrics(tmp_path), lambda: MetricWriter(tmp_path, 2)):
      with pytest.raises(UserError, match=r'line 2 of .*metrics.jsonl is damaged'):
        use()


def test_places_that_cannot_be_used(tmp_path):
  (tmp_path / 'file').touch()
  with pytest.raises(UserError, match=r'metrics were not written in .*: Not a directory'):
    MetricWriter(tmp_path / 'file')
  with pytest.raises(UserError, match=r'metrics.jsonl does not exist'):
    read_metrics(tmp_path)


# -- TensorBoard -------------------------------------------------------------------------------------------------------


def test_tensorboard_scalars_keep_their_names(tmp_path):
  with MetricWriter(tmp_path) as writer:
    writer.scalars(2, {'frozen_lake/pass@8': 0.5})
    writer.flush()
    assert shown_scalars(tmp_path) == [(2, 'frozen_lake/pass@8', '0.5')]  # on disk before the file is closed


def test_tensorboard_text_histogram_image(tmp_path):
  image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
  ratios = np.array([[0.5, 1.0], [1.5, np.nan]])
  with MetricWriter(tmp_path) as writer:
    writer.text(1, {'episodes/0': '**Turn 1**: `Left`'})
    writer.histograms(1, {'actor/ratio': ratios, 'actor/empty': np.full(3, np.nan)})
    writer.images(1, {'episodes/board': image})
  shown = summaries(tmp_path)
  assert 'actor/empty' not in shown
  assert shown['episodes/0/text_summary'].tensor.string_val[0] == b'**Turn 1**: `Left`'
  histogram = shown['actor/ratio'].histo
  assert (histogram.num, histogram.min, histogram.max, histogram.sum) == (3, 0.5, 1.5, 3.0)
  assert sum(histogram.bucket) == 3
  picture = shown['episodes/board'].image
  assert (picture.height, picture.width) == (5, 7)
  decoder = pytest.importorskip('PIL.Image', reason='Pillow decodes the picture')
  np.testing.assert_array_equal(np.asarray(decoder.open(io.BytesIO(picture.encoded_image_string))), image)


def test_tensorboard_histogram_that_was_counted_elsewhere(tmp_path):
  """TensorBoard draws each bucket between its own edges, without the empty ones at the ends."""
  edges, counts = np.array([0.5, 0.9, 1.1, 2.0, 8.0]), np.array([0, 3, 1, 0])
  with MetricWriter(tmp_path) as writer:
    writer.histograms(2, {'actor/ratio': Counts(edges, counts), 'actor/none': Counts(edges, 0 * counts)})
  assert read_metrics(tmp_path) == []
  reader = event_file_loader.EventFileLoader(str(next((tmp_path / 'tb').iterdir())))
  (value,) = [value for event in reader.Load() for value in event.summary.value]
  assert value.tag == 'actor/ratio'
  buckets = tensor_util.make_ndarray(value.tensor)  # left, right, count
  np.testing.assert_allclose(buckets[buckets[:, 2] > 0], [[0.9, 1.1, 3], [1.1, 2.0, 1]])
  assert (buckets[:, 0].min(), buckets[:, 1].max()) == pytest.approx((0.9, 2.0))


def test_tensorboard_hparams(tmp_path):
  """A row in the table of runs, from the run's own file, with the newest success."""
  config = {'seed': 0, 'train': {'lr': 1e-3, 'on': True, 'betas': (0.9, 0.99)}, 'env': {'name': 'lake', 'none': None}}
  for start, success in ((0, 0.25), (7, 0.5)):  # and again when the run goes on
    with MetricWriter(tmp_path, start) as writer:
      writer.hparams(config, ['eval/success'])
      writer.scalars(7, {'eval/success': success})
  shown = summaries(tmp_path)
  assert set(shown) == {'_hparams_/experiment', '_hparams_/session_start_info', 'eval/success'}
  content = shown['_hparams_/session_start_info'].metadata.plugin_data.content
  columns = HParamsPluginData.FromString(content).session_start_info.hparams
  assert {name: getattr(value, value.WhichOneof('kind')) for name, value in columns.items()} == {
    'seed': 0.0,
    'train.lr': 1e-3,
    'train.on': True,
    'train.betas': '(0.9, 0.99)',
    'env.name': 'lake',
    'env.none': 'None',
  }
  content = shown['_hparams_/experiment'].metadata.plugin_data.content
  experiment = HParamsPluginData.FromString(content).experiment
  assert [metric.name.tag for metric in experiment.metric_infos] == ['eval/success']
  assert {info.name for info in experiment.hparam_infos} == set(columns)
  assert read_metrics(tmp_path) == [{'step': 7, 'eval/success': 0.5}]
  assert EventAccumulator(str(tmp_path / 'tb')).Reload().Scalars('eval/success')[-1].value == 0.5


def test_tensorboard_forgets_what_was_written_after_the_checkpoint(tmp_path):
  """Its own reader, on a run that was cut off after step 4 and went on from step 2."""
  for start, stop, x in ((0, 5, 0.0), (2, 6, 1.0)):
    with MetricWriter(tmp_path, start) as writer:
      for step in range(start, stop):
        writer.scalars(step, {'actor/entropy': x})
        writer.histograms(step, {'critic/advantages': [x, x + 1]})
  events = EventAccumulator(str(tmp_path / 'tb'), size_guidance={'scalars': 0, 'histograms': 0}).Reload()
  assert [(e.step, e.value) for e in events.Scalars('actor/entropy')] == [
    (0, 0), (1, 0), (2, 1), (3, 1), (4, 1), (5, 1)
  ]  # fmt: skip
  advantages = events.Histograms('critic/advantages')
  assert [(e.step, e.histogram_value.max) for e in advantages] == [(0, 1), (1, 1), (2, 2), (3, 2), (4, 2), (5, 2)]
