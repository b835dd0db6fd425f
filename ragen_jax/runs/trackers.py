"""Trackers of experiments beside TensorBoard: Weights & Biases, trackio and MLflow.

They get the config, the scalars of each step once the step is over, and the page of episodes after each evaluation.
A thread of its own sends them, so a tracker that is slow, hangs or fails is reported in one line and never delays or
ends a run. What it has not got is sent from metrics.jsonl at the next start.

  <workdir>/tracker.json    {"tracker": "wandb", "project": "ragen-jax", "id": "3f...", "step": 12}: the tracker's run,
                            which a resumed run continues, and the last step that was sent
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import queue
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from ragen_jax.runs.config_fields import flatten
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.utils.errors import UserError, describe_error
from ragen_jax.utils.files import replace_file

_log = logging.getLogger(__name__)

TRACKERS = ('', 'wandb', 'trackio', 'mlflow')
_RECORD = 'tracker.json'
_MAX_WAITING = 10_000  # rows and files that wait for a slow tracker
_CLOSE_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class TrackerSettings:
  """Fields of `config.logging`."""

  tracker: str
  project: str


class Target(Protocol):
  """A run of a tracker; its id identifies it, to continue it."""

  id: str

  def scalars(self, step: int, row: Mapping[str, float]) -> None:
    """Sends the scalars of a step."""

  def file(self, path: str) -> None:
    """Sends a file, in place of an earlier one with its name."""

  def close(self) -> None:
    """Waits until everything is sent, and ends the tracker's run."""


class Tracker:
  """Sends a run's metrics to its tracker in a thread; no method raises or waits, but `close` for a minute at most."""

  def __init__(
    self, settings: TrackerSettings, workdir: str | os.PathLike[str], config: dict[str, Any], start_step: int
  ):
    """Starts the thread, and sends those steps before `start_step`, the first new one, that the tracker lacks."""
    self._settings, self._workdir = settings, pathlib.Path(workdir)
    self._config = {name: _cleaned(x) for name, x in flatten(config).items()}
    self._failed, self._earlier = False, []
    with contextlib.suppress(UserError):  # there are none
      self._earlier = [row for row in read_metrics(workdir) if row['step'] < start_step]
    self._waiting: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(_MAX_WAITING)
    self._thread = threading.Thread(target=self._send_all, name='tracker', daemon=True)
    self._thread.start()

  def scalars(self, step: int, row: Mapping[str, float]) -> None:
    """Sends the scalars of a step that is over."""
    self._put(('scalars', (step, dict(row))))

  def file(self, path: str | os.PathLike[str]) -> None:
    """Sends a file of the run, in place of an earlier one with its name."""
    self._put(('file', (os.fspath(path),)))

  def close(self) -> None:
    """Waits until everything is sent, for a minute at most."""
    self._put(None)
    self._thread.join(_CLOSE_SECONDS)
    if self._thread.is_alive():
      self._fail(f'it has not taken everything within {_CLOSE_SECONDS:g} s')

  def _put(self, item: tuple[str, tuple[Any, ...]] | None) -> None:
    if not self._failed:
      try:
        self._waiting.put_nowait(item)
      except queue.Full:
        self._fail(f'{_MAX_WAITING} items wait for it')

  def _fail(self, why: str) -> None:
    """Says once that the tracker is off."""
    if not self._failed:
      self._failed = True
      _log.warning(
        'logging.tracker=%r gets no more metrics: %s; the run goes on, and sends the rest when it is resumed',
        self._settings.tracker, why,
      )  # fmt: skip

  def _send_all(self) -> None:
    try:
      record = self._read_record()
      target = _OPEN[self._settings.tracker](self._settings.project, self._workdir, record.get('id', ''), self._config)
      last = record.get('step', -1)
      for row in self._earlier:
        if row['step'] >= last:
          last = int(row.pop('step'))
          target.scalars(last, row)
      self._write_record(target.id, last)
      while (item := self._waiting.get()) is not None:
        method, arguments = item
        # A step that was sent before the run was killed is not sent again, but for the last, which may lack metrics.
        if method == 'file' or arguments[0] >= last:
          getattr(target, method)(*arguments)
        if method == 'scalars' and arguments[0] > last:
          last = arguments[0]
          self._write_record(target.id, last)
      target.close()
    except BaseException as e:  # noqa: BLE001, foreign code may raise anything, and must not end a run
      self._fail(without_secrets(describe_error(e))[:300])

  def _read_record(self) -> dict[str, Any]:
    """The record of the tracker's run; empty if there is none."""
    try:
      record = json.loads((self._workdir / _RECORD).read_text())
    except (OSError, ValueError):
      return {}
    own = dataclasses.asdict(self._settings)
    return record if isinstance(record, dict) and record.items() >= own.items() else {}

  def _write_record(self, run: str, step: int) -> None:
    record = dataclasses.asdict(self._settings) | {'id': run, 'step': step}
    replace_file(self._workdir / _RECORD, json.dumps(record) + '\n')


def forget_run(workdir: str | os.PathLike[str]) -> None:
  """Removes the record of the tracker's run, so that the run of `workdir` that begins anew gets one of its own."""
  with contextlib.suppress(OSError):
    (pathlib.Path(workdir) / _RECORD).unlink()


@contextlib.contextmanager
def open_tracker(
  settings: TrackerSettings, workdir: str | os.PathLike[str], config: dict[str, Any], start_step: int, *, enabled: bool
) -> Iterator[Tracker | None]:
  """Context manager: the tracker of a run, None if it has none or `enabled` is False; see `Tracker`."""
  if not enabled or not settings.tracker:
    yield None
    return
  with contextlib.closing(Tracker(settings, workdir, config, start_step)) as tracker:
    yield tracker


def without_secrets(text: str) -> str:
  """The text without the user parts of addresses, and without the values of environment variables that hold keys."""
  secrets = {
    x for name, x in os.environ.items() if len(x) >= 8 and re.search('KEY|TOKEN|SECRET|PASSWORD', name.upper())
  }
  for value in sorted(secrets, key=len, reverse=True):  # one may be the beginning of another
    text = text.replace(value, '***')
  return re.sub(r'://[^/\s]+@', '://***@', text)


def _cleaned(x: Any) -> Any:
  """A value of the config whose texts are `without_secrets`."""
  if isinstance(x, str):
    return without_secrets(x)
  if isinstance(x, dict):
    return {name: _cleaned(y) for name, y in x.items()}
  return [_cleaned(y) for y in x] if isinstance(x, list | tuple) else x


class _Wandb:
  """A run of Weights & Biases, in <workdir>/wandb. Its metrics have the axis 'iteration', which may be sent again."""

  def __init__(self, project: str, workdir: pathlib.Path, run: str, config: dict[str, Any]):
    import wandb

    self.id = run or uuid.uuid4().hex[:16]
    # Without the terminal's output, the program's code, its arguments and the address of a repository.
    settings = wandb.Settings(
      console='off', silent=True, disable_git=True, disable_code=True, save_code=False, x_disable_meta=True
    )
    self._run = wandb.init(
      project=project, name=workdir.name, id=self.id, resume='allow', dir=str(workdir), settings=settings
    )
    self._run.config.update(config, allow_val_change=True)
    self._run.define_metric('*', step_metric='iteration')

  def scalars(self, step: int, row: Mapping[str, float]) -> None:
    self._run.log({'iteration': step, **row})

  def file(self, path: str) -> None:
    copy = shutil.copy(path, self._run.dir)
    self._run.save(copy, base_path=self._run.dir, policy='now')

  def close(self) -> None:
    self._run.finish()


class _Trackio:
  """A run of trackio, which finds it by its name."""

  def __init__(self, project: str, workdir: pathlib.Path, run: str, config: dict[str, Any]):
    import trackio

    self.id = run or f'{workdir.name}-{uuid.uuid4().hex[:8]}'
    self._run = trackio.init(project, name=self.id, resume='allow', config=config, embed=False)

  def scalars(self, step: int, row: Mapping[str, float]) -> None:
    self._run.log(dict(row), step=step)

  def file(self, path: str) -> None:
    self._run.log_artifact(path, name=f'{self.id}-{pathlib.Path(path).stem}', type='episodes', overwrite=True)

  def close(self) -> None:
    self._run.finish()


class _Mlflow:
  """A run of MLflow, in <workdir>/mlflow.db unless MLFLOW_TRACKING_URI names a server or another store."""

  def __init__(self, project: str, workdir: pathlib.Path, run: str, config: dict[str, Any]):
    import mlflow
    from mlflow.entities import Metric, Param

    self._metric, workdir = Metric, workdir.resolve()
    own = 'MLFLOW_TRACKING_URI' not in os.environ
    self._client = mlflow.MlflowClient(f'sqlite:///{workdir}/mlflow.db' if own else None)
    if run:
      self.id = run
      self._client.update_run(run, status='RUNNING')
      return
    found = self._client.get_experiment_by_name(project)
    where = (workdir / 'mlartifacts').as_uri() if own else None
    experiment = found.experiment_id if found else self._client.create_experiment(project, artifact_location=where)
    self.id = self._client.create_run(experiment, run_name=workdir.name).info.run_id
    params = [Param(name, str(value)[:500]) for name, value in config.items()]
    for i in range(0, len(params), 100):  # the most of one request
      self._client.log_batch(self.id, params=params[i : i + 100])

  def scalars(self, step: int, row: Mapping[str, float]) -> None:
    now = int(time.time() * 1000)
    metrics = [self._metric(re.sub(r'[^\w./ -]', '_', name), value, now, step) for name, value in row.items()]
    self._client.log_batch(self.id, metrics=metrics)

  def file(self, path: str) -> None:
    self._client.log_artifact(self.id, path)

  def close(self) -> None:
    self._client.set_terminated(self.id)


_OPEN: dict[str, Callable[[str, pathlib.Path, str, dict[str, Any]], Target]] = {
  'wandb': _Wandb, 'trackio': _Trackio, 'mlflow': _Mlflow,
}  # fmt: skip
