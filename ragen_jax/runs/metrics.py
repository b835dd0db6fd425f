"""Metrics of a run: TensorBoard events, and one JSON line per step.

  <workdir>/tb/              event files; scalars, text, histograms, images, hyper-parameters
  <workdir>/metrics.jsonl    {"step": 3, "actor/entropy": 0.71, ...}: the same scalars in full precision

A run that was stopped and resumed has the same metrics.jsonl as a run that was never stopped. While a line is replaced,
its earlier text is in metrics.jsonl.line, so an end in the middle of it loses nothing.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from ragen_jax.runs.config_fields import flatten
from ragen_jax.utils.errors import DiskError, UserError, short
from ragen_jax.utils.files import encode_png, replace_file
from ragen_jax.utils.imports import hidden

# It would import these where they are installed, for tensors and buckets: three seconds.
with hidden('torch', 'boto3', 'google.cloud.storage'):
  from tensorboardX import summary
  from tensorboardX.event_file_writer import EventsWriter
  from tensorboardX.proto.event_pb2 import Event, SessionLog
  from tensorboardX.proto.summary_pb2 import HistogramProto, Summary

if TYPE_CHECKING:
  from ragen_jax.runs.trackers import Tracker

HISTOGRAM_BINS = 64  # of equal width, from the smallest to the largest value

_NOT_FINITE = {'NaN': math.nan, 'Infinity': math.inf, '-Infinity': -math.inf}


class Counts(NamedTuple):
  """A histogram with counts from the caller."""

  edges: np.ndarray  # f64[K], ascending; values outside are counted in the first or the last bin
  counts: np.ndarray  # [K - 1], number of values between adjacent edges


class MetricWriter:
  """Writes the metrics of a run; only the first process of a run has an enabled writer.

  The caller's thread writes the events without a queue, so after `flush` everything is in the files. A run that flushes
  before it saves the checkpoint of step k loses no metrics of earlier steps, even if it is killed.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    start_step: int = 0,
    enabled: bool = True,
    tracker: Tracker | None = None,
  ):
    """Opens the logs of `workdir` and drops their entries of `start_step` and later steps.

    Lines of metrics.jsonl from this step on and a half-written last line are removed; an event makes TensorBoard ignore
    old events from this step on. The tracker gets the scalars of each step that is over, and is closed after this
    writer. Without `enabled` (processes other than the first) every method does nothing. Raises UserError if the
    directory is not writable, or metrics.jsonl is damaged before its last line.
    """
    self._file: BinaryIO | None = None
    self._tracker = tracker
    if not enabled:
      return
    workdir = pathlib.Path(workdir)
    self._path = workdir / 'metrics.jsonl'
    self._step = start_step
    self._row: dict[str, float] = {}
    self._untracked: dict[str, float] = {}  # of the row, those that the tracker does not have
    self._changed = False
    self._written = ''  # the text of the current step's line in the file
    with self._disk_errors():
      (workdir / 'tb').mkdir(parents=True, exist_ok=True)
      _truncate(self._path, start_step)
      self._file = self._path.open('r+b' if self._path.exists() else 'w+b')
      self._offset = self._file.seek(0, os.SEEK_END)  # start of the current step's line
      earlier = len(list((workdir / 'tb').glob('*tfevents*')))
      # The number distinguishes files opened in the same second, and sorts them for TensorBoard.
      self._events = EventsWriter(str(workdir / 'tb' / 'events'), filename_suffix=f'.{earlier:04d}')
      if earlier:
        self._events.write_event(
          Event(wall_time=time.time(), step=start_step, session_log=SessionLog(status=SessionLog.START))
        )

  def scalars(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes scalars to TensorBoard and to the line of `step`; the line has the last value of each name.

    Steps ascend. Values are numbers or arrays of one element; NaN and infinities are kept. Raises ValueError if a value
    is not a scalar or a metric is named 'step', and DiskError if the disk is full or not writable.
    """
    if self._file is None:
      return
    if 'step' in values:
      raise ValueError("a metric cannot be named 'step'")
    row = {name: _scalar(name, value) for name, value in values.items()}
    if step != self._step and not (step < self._step and not self._row and self._continue_line(step)):
      self._write_line()
      self._track()
      self._offset, self._step, self._row, self._written = self._file.tell(), step, {}, ''
      self._untracked = {}
    self._row.update(row)
    self._untracked.update(row)
    self._changed = True
    self._add(step, Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in row.items()]))

  def _continue_line(self, step: int) -> bool:
    """Goes on with the last line of the file if it is of this step, whose evaluation was stopped."""
    lines = self._path.read_bytes().splitlines(keepends=True)
    row = json.loads(lines[-1]) if lines else {}
    if row.pop('step', None) != step:
      return False
    self._step, self._written = step, lines[-1].decode()
    self._offset -= len(lines[-1])
    self._row = {name: _NOT_FINITE[x] if isinstance(x, str) else x for name, x in row.items()}
    return True

  def text(self, step: int, texts: Mapping[str, str]) -> None:
    """Writes Markdown texts by name to TensorBoard's text page."""
    if self._file is None:
      return
    for name, markdown in texts.items():
      self._add(step, summary.text(name, markdown))

  def histograms(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes arrays of any shape, or `Counts`, by name to TensorBoard as histograms; metrics.jsonl has no histograms.

    Values that are not finite are omitted. An empty histogram is not written.
    """
    if self._file is None:
      return
    for name, array in values.items():
      if isinstance(array, Counts):
        if np.any(array.counts):
          self._add(step, Summary(value=[_histogram_of_counts(name, array)]))
        continue
      array = np.asarray(array, np.float64).ravel()
      array = array[np.isfinite(array)]
      if array.size:
        self._add(step, summary.histogram(name, array, bins=HISTOGRAM_BINS))

  def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
    """Writes images, u8[H, W, 3], by name to TensorBoard's image page; ValueError for another shape or dtype."""
    if self._file is None:
      return
    for name, image in images.items():
      image = np.asarray(image)
      if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
        raise ValueError(f'image {name} is {image.dtype}{list(image.shape)}, not uint8[H, W, 3]')
      picture = Summary.Image(
        height=image.shape[0], width=image.shape[1], colorspace=3, encoded_image_string=encode_png(image)
      )
      self._add(step, Summary(value=[Summary.Value(tag=name, image=picture)]))

  def page(self, path: str | None) -> None:
    """Gives the page of episodes to the tracker, if there are both."""
    if self._tracker is not None and path is not None:
      self._tracker.file(path)

  def hparams(self, config: Mapping[str, Any], metrics: Sequence[str]) -> None:
    """Writes the run's row of TensorBoard's HParams table, at the start of the run.

    The config is nested; columns have dotted names, and values other than numbers, booleans and text become text.
    `metrics` names scalars; the table shows the newest value of each.
    """
    if self._file is None:
      return
    columns = {name: x if isinstance(x, bool | int | float | str) else str(x) for name, x in flatten(config).items()}
    experiment, start, _ = summary.hparams(columns, dict.fromkeys(metrics))
    self._add(self._step, experiment)
    self._add(self._step, start)

  def flush(self) -> None:
    """Writes everything to the files; raises DiskError if the disk is full or not writable."""
    if self._file is None:
      return
    self._write_line()
    with self._disk_errors():
      self._events.flush()

  def close(self) -> None:
    """Flushes and closes the files; a second call does nothing."""
    if self._file is None:
      return
    self.flush()
    self._track()
    with self._disk_errors():
      self._events.close()
      self._file.close()
    self._file = None

  def __enter__(self) -> MetricWriter:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()

  def _add(self, step: int | None, value: Summary) -> None:
    with self._disk_errors():
      self._events.write_event(Event(wall_time=time.time(), step=step, summary=value))

  def _track(self) -> None:
    if self._tracker is not None and self._untracked:
      self._tracker.scalars(self._step, self._untracked)

  def _write_line(self) -> None:
    """Writes the line of the current step, replacing the line of an earlier flush."""
    if not self._changed:
      return
    values = {name: _to_json(value) for name, value in self._row.items()}
    line = json.dumps({'step': self._step, **values}, allow_nan=False) + '\n'
    with self._disk_errors():
      if self._written:
        replace_file(_spare(self._path), self._written, f'metrics were not written in {self._path.parent}')
      self._file.seek(self._offset)
      self._file.write(line.encode())
      self._file.flush()
      self._file.truncate()
      _spare(self._path).unlink(missing_ok=True)
    self._changed, self._written = False, line

  @contextlib.contextmanager
  def _disk_errors(self) -> Iterator[None]:
    try:
      yield
    except OSError as e:
      raise DiskError(f'metrics were not written in {self._path.parent}: {e.strerror or e}') from e


def write_events(directory: str | os.PathLike[str], name: str, step: int, values: Mapping[str, float]) -> None:
  """Writes scalars of one step to a separate event file, which replaces an earlier file with the same `name`.

  The directory is one of TensorBoard's runs. Raises DiskError if the disk is full or not writable.
  """
  directory = pathlib.Path(directory)
  try:
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob(f'*tfevents*.{glob.escape(name)}'):
      path.unlink()
    events = EventsWriter(str(directory / 'events'), filename_suffix=f'.{name}')
    scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
    events.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
    events.close()
  except OSError as e:
    raise DiskError(f'events were not written in {directory}: {e.strerror or e}') from e


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, float]]:
  """Reads metrics.jsonl: one dict per step, {'step': 3, 'actor/entropy': 0.71, ...}, in the order written.

  The half-written last line of a killed run has its earlier values, or is left out if it had none. Raises UserError if
  the file does not exist, or a line before the last is damaged.
  """
  path = pathlib.Path(workdir) / 'metrics.jsonl'
  if not path.exists():
    raise UserError(f'{path} does not exist: {workdir} is not the workdir of a run that has written metrics')
  rows: dict[int, dict[str, float]] = {}
  for row, _ in _parse(path):
    values = {name: _NOT_FINITE[value] if isinstance(value, str) else value for name, value in row.items()}
    rows.setdefault(row['step'], {}).update(values)
  return list(rows.values())


def _scalar(name: str, value: Any) -> float:
  array = np.asarray(value)
  if array.size != 1:
    raise ValueError(f'metric {name} has shape {list(array.shape)}, not one value')
  return float(array.item())


def _histogram_of_counts(name: str, histogram: Counts) -> Summary.Value:
  edges, counts = (np.asarray(x, np.float64) for x in histogram)
  filled = np.flatnonzero(counts)
  first, last = filled[0], filled[-1] + 1
  middles = (edges[:-1] + edges[1:]) / 2
  proto = HistogramProto(
    min=edges[first],
    max=edges[last],
    num=counts.sum(),
    sum=counts @ middles,
    sum_squares=counts @ middles**2,
    # TensorBoard stores right edges only; an empty bucket before the first gives its left edge.
    bucket_limit=edges[first : last + 1].tolist(),
    bucket=[0.0, *counts[first:last].tolist()],
  )
  return Summary.Value(tag=name, histo=proto)


def _to_json(value: float) -> float | str:
  """A number for JSON; NaN and infinities become text, because JSON does not have them."""
  if math.isfinite(value):
    return value
  return 'NaN' if math.isnan(value) else 'Infinity' if value > 0 else '-Infinity'


def _spare(path: pathlib.Path) -> pathlib.Path:
  """The file with the earlier text of the last line of a metrics.jsonl, while the line is replaced."""
  return path.with_name(f'{path.name}.line')


def _parse(path: pathlib.Path) -> list[tuple[dict[str, Any], str]]:
  """The rows of a metrics.jsonl, parsed and as text; of a half-written last line the earlier text, if there is one."""
  lines = path.read_text(encoding='utf-8', errors='replace').splitlines()
  parsed: list[tuple[dict[str, Any], str]] = []
  for number, line in enumerate(lines, start=1):
    try:
      row = json.loads(line)
      if not isinstance(row, dict) or not isinstance(row.get('step'), int):
        raise ValueError('no step')
      if texts := [x for x in row.values() if isinstance(x, str) and x not in _NOT_FINITE]:
        raise ValueError(f'{short(texts[0])} is no number')
    except ValueError as e:
      if number < len(lines):
        raise UserError(f'line {number} of {path} is damaged ({e}); remove it or choose another --workdir') from e
      return parsed + _parse_spare(path)
    parsed.append((row, line))
  return parsed


def _parse_spare(path: pathlib.Path) -> list[tuple[dict[str, Any], str]]:
  try:
    text = _spare(path).read_text(encoding='utf-8').rstrip('\n')
  except FileNotFoundError:  # there is none, or the run that is being read has just removed it
    return []
  return [(json.loads(text), text)]


def _truncate(path: pathlib.Path, start_step: int) -> None:
  """Drops the lines from `start_step` on and a half-written last line."""
  if path.exists():
    kept = [line for row, line in _parse(path) if row['step'] < start_step]
    replace_file(path, ''.join(f'{line}\n' for line in kept), f'metrics were not written in {path.parent}')
    _spare(path).unlink(missing_ok=True)
