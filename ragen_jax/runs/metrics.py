"""Metrics of a run: TensorBoard events, one JSON line a step, and the seconds of each phase.

  <workdir>/tb/              event files; scalars, text, histograms, images, hyper-parameters
  <workdir>/metrics.jsonl    {"step": 3, "actor/entropy": 0.71, ...}: the same scalars, exactly, one line a step

A run that is stopped and resumed leaves the metrics.jsonl of the run that was never stopped.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import pathlib
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import HistogramProto, Summary

from ragen_jax.utils.errors import UserError
from ragen_jax.utils.files import encode_png

HISTOGRAM_BINS = 64  # equal in width, from the least to the greatest value

GIB = 2**30

_NOT_FINITE = {'NaN': math.nan, 'Infinity': math.inf, '-Infinity': -math.inf}


class Counts(NamedTuple):
  """A histogram that was counted elsewhere.

  Attributes:
    edges: f64[K], ascending; what lies outside of them is counted in the first and the last bin.
    counts: [K - 1], how many values lie between two edges.
  """

  edges: np.ndarray
  counts: np.ndarray


class MetricWriter:
  """Writes the metrics of a run; one process of a run has one, the others have it disabled.

  Events are written by the caller's thread, not from a queue: after `flush`, everything is in the files, so a run that
  flushes before it saves a checkpoint of step k loses no metrics of the steps before k, however it dies.
  """

  def __init__(self, workdir: str | os.PathLike[str], start_step: int = 0, enabled: bool = True):
    """Opens the logs of `workdir`, and forgets what they say of `start_step` and later steps.

    Args:
      workdir: the run's directory, made when it does not exist.
      start_step: the first step that will be written; on resuming, lines of metrics.jsonl from this step on, and a
        half-written last line, are dropped, and TensorBoard is told to drop its events.
      enabled: False makes every method do nothing (processes other than the first).

    Raises:
      UserError: the directory is not writable, or metrics.jsonl is damaged before its last line.
    """
    self._file: BinaryIO | None = None
    if not enabled:
      return
    workdir = pathlib.Path(workdir)
    self._path = workdir / 'metrics.jsonl'
    self._step = start_step
    self._row: dict[str, float] = {}
    self._changed = False
    with self._disk_errors():
      (workdir / 'tb').mkdir(parents=True, exist_ok=True)
      _truncate(self._path, start_step)
      self._file = self._path.open('r+b' if self._path.exists() else 'w+b')
      self._offset = self._file.seek(0, os.SEEK_END)  # where the line of the current step begins
      earlier = len(list((workdir / 'tb').glob('*tfevents*')))
      # The number keeps apart files that were opened in the same second, and sorts them for TensorBoard.
      self._events = EventsWriter(str(workdir / 'tb' / 'events'), filename_suffix=f'.{earlier:04d}')
      if earlier:
        self._events.write_event(
          Event(wall_time=time.time(), step=start_step, session_log=SessionLog(status=SessionLog.START))
        )

  def scalars(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes scalars to TensorBoard and to the line of `step`; a name written again replaces its value in the line.

    Args:
      step: the iteration; steps come in ascending order.
      values: name -> number, or an array of one element (NaN and infinities are kept).

    Raises:
      ValueError: a value is no scalar, or a metric is named 'step'.
      UserError: the disk is full or not writable.
    """
    if self._file is None:
      return
    if 'step' in values:
      raise ValueError("a metric cannot be named 'step'")
    row = {name: _scalar(name, value) for name, value in values.items()}
    if step != self._step:
      self._write_line()
      self._offset, self._step, self._row = self._file.tell(), step, {}
    self._row.update(row)
    self._changed = True
    self._add(step, Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in row.items()]))

  def text(self, step: int, texts: Mapping[str, str]) -> None:
    """Writes name -> Markdown to TensorBoard's text page."""
    if self._file is None:
      return
    for name, markdown in texts.items():
      self._add(step, summary.text(name, markdown))

  def histograms(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes name -> array of any shape, or `Counts`, to TensorBoard as histograms, and not to metrics.jsonl.

    Values that are not finite are left out, and so is a histogram of nothing.
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
    """Writes name -> u8[H, W, 3] to TensorBoard's image page; raises ValueError for another shape or dtype."""
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

  def hparams(self, config: Mapping[str, Any], metrics: Sequence[str]) -> None:
    """Writes the run's row of TensorBoard's HParams table into the run's own event file: call it at the start.

    Args:
      config: nested dict; its columns get dotted names, values other than numbers, booleans and text are shown as text.
      metrics: names of scalars; the table shows the newest value of each, also while the run goes on.
    """
    if self._file is None:
      return
    experiment, start, _ = summary.hparams(_flatten(config), dict.fromkeys(metrics))
    self._add(self._step, experiment)
    self._add(self._step, start)

  def flush(self) -> None:
    """Puts everything written so far into the files; raises UserError when the disk is full or not writable."""
    if self._file is None:
      return
    self._write_line()
    with self._disk_errors():
      self._events.flush()

  def close(self) -> None:
    """Flushes and closes; nothing can be written afterwards. Closing twice is fine."""
    if self._file is None:
      return
    self.flush()
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

  def _write_line(self) -> None:
    """Writes the line of the current step, over the one that an earlier flush wrote for it."""
    if not self._changed:
      return
    values = {name: _to_json(value) for name, value in self._row.items()}
    line = json.dumps({'step': self._step, **values}, allow_nan=False) + '\n'
    with self._disk_errors():
      self._file.seek(self._offset)
      self._file.write(line.encode())
      self._file.flush()
      self._file.truncate()
    self._changed = False

  @contextlib.contextmanager
  def _disk_errors(self) -> Iterator[None]:
    try:
      yield
    except OSError as e:
      raise UserError(f'metrics were not written in {self._path.parent}: {e.strerror or e}') from e


def write_events(directory: str | os.PathLike[str], name: str, step: int, values: Mapping[str, float]) -> None:
  """Writes scalars of one step to an event file of their own, in place of those that `name` wrote there before.

  Args:
    directory: a run of TensorBoard's, made when it does not exist.
    name: whose events they are; the end of the file's name.
    step: the iteration.
    values: name -> number.

  Raises:
    UserError: the disk is full or not writable.
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
    raise UserError(f'events were not written in {directory}: {e.strerror or e}') from e


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, float]]:
  """Reads metrics.jsonl.

  Returns:
    One dict a step, {'step': 3, 'actor/entropy': 0.71, ...}, in the order written. A half-written last line, which a
    killed run leaves, is not part of it.

  Raises:
    UserError: the file does not exist, or a line before the last is damaged.
  """
  path = pathlib.Path(workdir) / 'metrics.jsonl'
  if not path.exists():
    raise UserError(f'{path} does not exist: {workdir} is not the workdir of a run that has written metrics')
  rows: dict[int, dict[str, float]] = {}
  for row, _ in _parse(path):
    values = {name: _NOT_FINITE[value] if isinstance(value, str) else value for name, value in row.items()}
    rows.setdefault(row['step'], {}).update(values)
  return list(rows.values())


def memory() -> dict[str, float]:
  """The most memory that was in use since the process began, in GiB, as scalars.

  Returns:
    `perf/max_host_memory_gb`, of this process; and, where devices keep count of theirs (GPUs and TPUs),
    `perf/max_memory_allocated_gb`, of the fullest device of this process.
  """
  unit = 1 if sys.platform == 'darwin' else 1024  # macOS tells bytes, Linux KiB
  found = {'perf/max_host_memory_gb': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}
  peaks = [(device.memory_stats() or {}).get('peak_bytes_in_use') for device in jax.local_devices()]
  peaks = [peak for peak in peaks if peak is not None]
  return found | ({'perf/max_memory_allocated_gb': max(peaks) / GIB} if peaks else {})


class Timer:
  """Adds up the seconds of a run's phases.

    timer = Timer()
    with timer('rollout'):
      ...
    timer.pop()  # {'timing_s/rollout': 1.7}

  JAX computes behind the caller's back: a phase that ends with `jax.block_until_ready` (or reads a result) is timed
  whole. A phase may be entered many times; phases may nest, and then both count.
  """

  def __init__(self):
    self._since_pop: dict[str, float] = {}
    self._totals: dict[str, float] = {}

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    """Adds the seconds that the `with` block takes to `phase`, also when it raises."""
    start = time.perf_counter()
    try:
      yield
    finally:
      seconds = time.perf_counter() - start
      self._since_pop[phase] = self._since_pop.get(phase, 0.0) + seconds
      self._totals[phase] = self._totals.get(phase, 0.0) + seconds

  def pop(self) -> dict[str, float]:
    """Seconds of each phase since the last `pop`, as {'timing_s/<phase>': seconds}."""
    popped = {f'timing_s/{phase}': seconds for phase, seconds in self._since_pop.items()}
    self._since_pop = {}
    return popped

  @property
  def totals(self) -> dict[str, float]:
    """Seconds of each phase since the timer was made, {'<phase>': seconds}, in the order first entered."""
    return dict(self._totals)


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
    # A bucket is told by its right edge: the empty one in front says where the first begins.
    bucket_limit=edges[first : last + 1].tolist(),
    bucket=[0.0, *counts[first:last].tolist()],
  )
  return Summary.Value(tag=name, histo=proto)


def _to_json(value: float) -> float | str:
  """JSON has no NaN: numbers that are not finite become text."""
  if math.isfinite(value):
    return value
  return 'NaN' if math.isnan(value) else 'Infinity' if value > 0 else '-Infinity'


def _parse(path: pathlib.Path) -> list[tuple[dict[str, Any], str]]:
  """The rows of a metrics.jsonl and their lines, without a half-written last one."""
  lines = path.read_text(encoding='utf-8', errors='replace').splitlines()
  parsed = []
  for number, line in enumerate(lines, start=1):
    try:
      row = json.loads(line)
      if not isinstance(row, dict) or not isinstance(row.get('step'), int):
        raise ValueError('no step')
    except ValueError as e:
      if number < len(lines):
        raise UserError(f'line {number} of {path} is damaged ({e}); remove it or choose another --workdir') from e
      break
    parsed.append((row, line))
  return parsed


def _truncate(path: pathlib.Path, start_step: int) -> None:
  """Drops the lines from `start_step` on and a half-written last one; the old file stays until the new one is whole."""
  if not path.exists():
    return
  temporary = path.with_suffix('.jsonl.tmp')
  temporary.write_text(''.join(f'{line}\n' for row, line in _parse(path) if row['step'] < start_step), encoding='utf-8')
  os.replace(temporary, path)


def _flatten(config: Mapping[str, Any], prefix: str = '') -> dict[str, bool | float | str]:
  flat: dict[str, bool | float | str] = {}
  for name, value in config.items():
    if isinstance(value, Mapping):
      flat |= _flatten(value, f'{prefix}{name}.')
    else:
      flat[f'{prefix}{name}'] = value if isinstance(value, bool | int | float | str) else str(value)
  return flat
