"""What is written of a warm start's steps: which of them, and numbers that belong to them."""

from __future__ import annotations

import io
import json
import logging

import numpy as np
import pytest

from ragen_jax.algorithms.spikes import Spike
from ragen_jax.runs.metrics import MetricWriter, read_metrics
from ragen_jax.runs.progress import Progress
from ragen_jax.sft.log import SftLog
from ragen_jax.sft.packing import batches
from ragen_jax.sft.step_watch import Watched
from ragen_jax.utils import heartbeat
from tests.support.examples import made_up_examples

_LAST = 23


@pytest.fixture
def writer(tmp_path):
  return MetricWriter(tmp_path)


def _log(writer, stream=None, *, value_loss=True):
  progress = Progress(_LAST, stream=stream or io.StringIO(), clock=lambda: 0.0)
  return SftLog(writer, progress, lambda step: 0.5 / (1 + step), _LAST, value_loss=value_loss)


def _play(log, *, found=None):
  """All steps: step i has a loss of i, a value loss of 2 i, and micro-batches of 400 columns in all."""
  data = made_up_examples()
  cut = list(batches(data, np.asarray([0, 1, 2, 3]), batch_size=4, length_step=100, packing=None, mesh=None))
  assert len(cut) > 1 and sum(batch.tokens.size for batch in cut) == 400
  tokens = int(data.length[:4].sum())
  log.timer.pop = lambda: {'timing_s/step': 2.0}
  for step in range(1, _LAST + 1):
    log.watched((found or {}).get(step, Watched([], '', [], {})))
    log.step(step, np.asarray([step, 2.0 * step], np.float32), np.float32(3.0 * step), cut, tokens)
  return tokens


def _lines(writer, tmp_path):
  writer.flush()
  return read_metrics(tmp_path)


def test_every_tenth_step_and_the_last_are_written(writer, tmp_path):
  log = _log(writer)
  tokens = _play(log)
  lines = _lines(writer, tmp_path)
  assert [line['step'] for line in lines] == [10, 20, 23] == [s for s in range(1, _LAST + 1) if log.due(s)]
  for line, steps in zip(lines, (10, 10, 3), strict=True):
    step = line['step']
    assert (line['sft/loss'], line['sft/value_loss'], line['sft/grad_norm']) == (step, 2 * step, 3 * step)
    assert line['sft/lr'] == 0.5 / step  # steps count from 1, and the schedule from 0
    assert line['sft/columns_per_token'] == pytest.approx(400 / tokens)
    assert line['perf/throughput'] == pytest.approx(steps * tokens / 2.0)  # of all steps since the last line


def test_slow_steps_are_told_between_two_lines(writer, monkeypatch, caplog):
  caplog.set_level(logging.INFO)
  _play(_log(writer))
  assert not caplog.records  # none was slow
  monkeypatch.setattr(heartbeat, 'SECONDS', 0.0)
  _play(_log(writer))
  told = [record.getMessage().partition(' after')[0] for record in caplog.records]
  assert told[:2] == ['steps 1 to 10: 1 of 10 began', 'steps 1 to 10: 2 of 10 began'] and len(told) == _LAST - 3
  assert told[-2:] == ['steps 21 to 23: 1 of 3 began', 'steps 21 to 23: 2 of 3 began']  # the others have their line


def test_the_first_step_of_a_start_is_told_unless_all_are_done(writer):
  stream = io.StringIO()
  log = _log(writer, stream)
  log.begin(_LAST + 1)
  assert stream.getvalue() == ''
  log.begin(_LAST)
  assert stream.getvalue().startswith(f'step {_LAST} of {_LAST} begins; ')


def test_skipped_steps_are_counted_from_line_to_line_and_named(writer, tmp_path):
  stream = io.StringIO()
  found = {step: Watched(skipped, 'the loss', [], {}) for step, skipped in ((3, [3]), (9, [7, 8, 9]), (15, [15]))}
  _play(_log(writer, stream), found=found)
  assert [line['sft/skipped_steps'] for line in _lines(writer, tmp_path)] == [4, 1, 0]
  told = [line for line in stream.getvalue().splitlines() if line.endswith(': skipped, because not finite: the loss')]
  assert [line.split(':')[0] for line in told] == ['step 3', '3 steps from 7 to 9', 'step 15']


def test_spikes_are_told_at_once_and_are_on_the_next_line_of_metrics(writer, tmp_path):
  stream, name = io.StringIO(), 'monitor/loss_spike'
  spikes = [(7, Spike('sft/loss', 40.0, 2.0))]
  found = {7: Watched([], '', spikes, {name: 1.0}), 8: Watched([], '', [], {name: 0.0})}
  _play(_log(writer, stream), found=found | {15: Watched([], '', [], {name: 0.0})})
  assert [line.get(name) for line in _lines(writer, tmp_path)] == [1.0, 0.0, None]
  assert 'step 7: sft/loss is 40, 20.0 times its usual 2 (monitor.spike_factor)' in stream.getvalue().splitlines()


def test_what_is_counted_between_two_lines_goes_on_after_a_stop(writer, tmp_path):
  first, second = _log(writer), _log(writer)
  first.watched(Watched([1, 2], 'the loss', [], {'monitor/loss_spike': 1.0}))
  second.load_state_dict(json.loads(json.dumps(first.state_dict())))
  _play(second, found={3: Watched([3], 'the loss', [], {})})
  assert _lines(writer, tmp_path)[0].items() >= {'sft/skipped_steps': 3, 'monitor/loss_spike': 1.0}.items()


def test_the_line_on_the_terminal_shows_the_losses(writer):
  stream = io.StringIO()
  log = _log(writer, stream)
  _play(log)
  assert 'iteration 10/23 | loss 10.00 | value loss 20.00' in stream.getvalue()


def test_a_value_loss_that_is_not_trained_is_not_shown(writer, tmp_path):
  stream = io.StringIO()
  log = _log(writer, stream, value_loss=False)
  _play(log)
  log.validation(_LAST, np.asarray([1.5, 9.0], np.float32))
  assert not any('value_loss' in name for line in _lines(writer, tmp_path) for name in line)
  assert 'value loss' not in stream.getvalue()


def test_losses_of_validation_stand_on_the_line_of_their_step(writer, tmp_path):
  log = _log(writer)
  _play(log)
  log.validation(_LAST, np.asarray([1.5, 0.25], np.float32))
  last = _lines(writer, tmp_path)[-1]
  assert (last['step'], last['sft/loss'], last['sft/val_loss'], last['sft/val_value_loss']) == (_LAST, 23.0, 1.5, 0.25)
