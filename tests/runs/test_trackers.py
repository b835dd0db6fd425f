"""Trackers: each step once, a run that goes on where it was, failures that stop nothing, and no secret.

The packages themselves are tried without a network, each in processes of its own; without a package its test is
skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading

import pytest

from ragen_jax.config.checks import check_config
from ragen_jax.runs import trackers
from ragen_jax.runs.metrics import MetricWriter, read_metrics
from ragen_jax.runs.trackers import TrackerSettings, open_tracker, without_secrets
from tests.support.configs import assert_refused, small_config
from tests.support.paths import ROOT

_KEY = 'k3y-' * 10  # as long as a real one
_CONFIG = {
  'seed': 3, 'eval': {'endpoint': 'https://me:hidden@host/v1', 'tags': ('A', 'x://me@y')}, 'name': f'a {_KEY} b',
  'options': [{'urls': ['x://me@y']}],
}  # fmt: skip


class _Memory:
  """A tracker's run that is kept by its id; `fails` raises, and may wait."""

  def __init__(self, runs, fails=lambda step: None):
    self.runs, self.fails = runs, fails

  def __call__(self, project, workdir, run, config):
    self.id = run or f'run{len(self.runs)}'
    self.sent = self.runs.setdefault(self.id, {'config': config, 'rows': [], 'files': [], 'closed': 0})
    return self

  def scalars(self, step, row):
    self.fails(step)
    self.sent['rows'].append({'step': step, **row})

  def file(self, path):
    self.sent['files'].append(path)

  def close(self):
    self.sent['closed'] += 1


def _write(workdir, steps, start=0, tracker='wandb', project='p'):
  """Steps of a run as a run writes them: in two parts, with a flush between, and the page after step 1."""
  settings = TrackerSettings(tracker, project)
  with (
    open_tracker(settings, workdir, _CONFIG, start, enabled=True) as opened,
    MetricWriter(workdir, start, tracker=opened) as writer,
  ):
    for step in steps:
      writer.scalars(step, {'a': step + 0.5})
      writer.flush()
      if step == 1:
        (workdir / 'page.html').write_text('<p>')
        writer.page(str(workdir / 'page.html'))
      writer.scalars(step, {'pass@2': -step})


def _rows(steps):
  return [{'step': step, 'a': step + 0.5, 'pass@2': -step} for step in steps]


def _use(monkeypatch, target):
  monkeypatch.setitem(trackers._OPEN, 'wandb', target)


def test_every_step_is_sent_once_and_a_resumed_run_continues_it(tmp_path, monkeypatch):
  monkeypatch.setenv('SOME_API_KEY', _KEY)
  runs = {}
  _use(monkeypatch, _Memory(runs))
  _write(tmp_path, range(4))
  assert runs['run0']['rows'] == _rows(range(4)) and runs['run0']['closed'] == 1
  assert runs['run0']['files'] == [str(tmp_path / 'page.html')]
  assert json.loads((tmp_path / 'tracker.json').read_text()) == {
    'tracker': 'wandb', 'project': 'p', 'id': 'run0', 'step': 3
  }  # fmt: skip
  assert runs['run0']['config'] == {
    'seed': 3, 'eval.endpoint': 'https://***@host/v1', 'eval.tags': ['A', 'x://***@y'], 'name': 'a *** b',
    'options': [{'urls': ['x://***@y']}],
  }  # fmt: skip
  # A checkpoint of step 1: steps 2 and 3 are played again, and only 3 and what follows are sent.
  _write(tmp_path, range(2, 6), start=2)
  assert runs['run0']['rows'][4:] == _rows([3, 4, 5])
  # Another project is another run, which gets the steps before.
  _write(tmp_path, [6], start=6, project='q')
  assert list(runs) == ['run0', 'run1'] and runs['run1']['rows'] == _rows(range(7))


def test_the_metrics_of_an_evaluation_that_was_cut_off_are_sent(tmp_path, monkeypatch):
  """The run is resumed after step 1 and then evaluates it."""
  runs = {}
  _use(monkeypatch, _Memory(runs))
  _write(tmp_path, range(2))
  settings = TrackerSettings('wandb', 'p')
  with (
    open_tracker(settings, tmp_path, _CONFIG, 2, enabled=True) as opened,
    MetricWriter(tmp_path, 2, tracker=opened) as writer,
  ):
    writer.scalars(1, {'val': 0.25})
  assert runs['run0']['rows'] == [*_rows(range(2)), *_rows([1]), {'step': 1, 'val': 0.25}]


def test_a_run_that_begins_anew_has_a_run_of_its_own(tmp_path, monkeypatch):
  runs = {}
  _use(monkeypatch, _Memory(runs))
  settings = TrackerSettings('wandb', 'p')
  for _ in range(2):
    with (
      open_tracker(settings, tmp_path, _CONFIG, 0, enabled=True) as opened,
      MetricWriter(tmp_path, 0, tracker=opened) as writer,
    ):
      writer.scalars(0, {'a': 0.5})
    trackers.forget_run(tmp_path)
  assert [run['rows'] for run in runs.values()] == [[{'step': 0, 'a': 0.5}]] * 2
  trackers.forget_run(tmp_path)  # there is none


@pytest.mark.parametrize('at', ['open', 2])
def test_a_tracker_that_fails_is_told_once_stops_nothing_and_catches_up(tmp_path, monkeypatch, caplog, at):
  monkeypatch.setenv('SOME_TOKEN', _KEY)

  def fails(step):
    if step == at:
      raise SystemExit(f'no\nroute to https://me:{_KEY}@host')

  def cannot_open(*_):
    fails('open')

  runs = {}
  _use(monkeypatch, cannot_open if at == 'open' else _Memory(runs, fails))
  _write(tmp_path, range(6))
  (line,) = [record.getMessage() for record in caplog.records]
  assert line == (
    "logging.tracker='wandb' gets no more metrics: SystemExit: no route to https://***@host; the run goes on, and "
    'sends the rest when it is resumed'
  )
  assert [row['step'] for row in read_metrics(tmp_path)] == list(range(6))
  _use(monkeypatch, _Memory(runs))
  _write(tmp_path, [6], start=6)
  sent = runs['run0']['rows']
  assert [row for i, row in enumerate(sent) if row not in sent[:i]] == _rows(range(7))


def test_a_tracker_that_hangs_delays_a_run_by_its_limit_at_most(tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(trackers, '_CLOSE_SECONDS', 0.2)
  monkeypatch.setattr(trackers, '_MAX_WAITING', 9)
  go_on = threading.Event()
  _use(monkeypatch, _Memory({}, lambda _: go_on.wait(60)))
  _write(tmp_path, range(3))
  _write(tmp_path, range(3, 20), start=3)
  go_on.set()
  assert [record.getMessage().split(': ')[1].split(';')[0] for record in caplog.records] == [
    'it has not taken everything within 0.2 s', '9 items wait for it'
  ]  # fmt: skip
  assert [row['step'] for row in read_metrics(tmp_path)] == list(range(20))


def test_no_tracker_and_other_processes_write_nothing(tmp_path):
  for settings, enabled in ((TrackerSettings('', 'p'), True), (TrackerSettings('wandb', 'p'), False)):
    with open_tracker(settings, tmp_path, _CONFIG, 0, enabled=enabled) as opened:
      assert opened is None
  assert not list(tmp_path.iterdir())


def test_fields(monkeypatch):
  assert_refused(check_config, small_config({'logging.tracker': 'neptune'}), r"^logging\.tracker='neptune': allowed: ")
  assert_refused(check_config, small_config({'logging.project': ' '}), r"^logging\.project=' ': must not be blank$")
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  message = r"^logging\.tracker='mlflow': needs a package that is not installed: pip install mlflow$"
  assert_refused(check_config, small_config({'logging.tracker': 'mlflow'}), message)


@pytest.mark.parametrize('name', ['HF_TOKEN', 'a_key', 'MY_SECRETS', 'MLFLOW_TRACKING_PASSWORD'])
def test_secrets_are_replaced(monkeypatch, name):
  monkeypatch.setenv(name, _KEY)
  monkeypatch.setenv('TOKENIZERS_PARALLELISM', 'true')  # too short for a secret
  assert without_secrets(f'true {_KEY} s3://id:word@bucket/a@b') == 'true *** s3://***@bucket/a@b'
  # Everything before the last @ of an address is its user part.
  assert without_secrets('https://me:p@ss@host/v1') == 'https://***@host/v1'
  assert without_secrets('x://a@b y://c@d') == 'x://***@b y://***@d'


def test_a_secret_that_begins_another_leaves_nothing_of_it(monkeypatch):
  for name in ('A_KEY', 'B_TOKEN', 'C_SECRET', 'D_PASSWORD'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv('A_KEY', _KEY)
  monkeypatch.setenv('B_PASSWORD', f'{_KEY}tail')
  assert without_secrets(f'a {_KEY}tail {_KEY}') == 'a *** ***'


# --- the packages -----------------------------------------------------------------------------------------------------

_RUN = """
import os, pathlib, sys
from ragen_jax.runs.metrics import MetricWriter
from ragen_jax.runs.trackers import TrackerSettings, open_tracker
tracker, workdir, start, stop = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
config = {'seed': 3, 'eval': {'endpoint': 'https://me:hidden@host/v1', 'tags': ('A', 'B')}, 'name': os.environ['A_KEY']}
with (
  open_tracker(TrackerSettings(tracker, 'games'), workdir, config, start, enabled=True) as opened,
  MetricWriter(workdir, start, tracker=opened) as writer,
):
  for step in range(start, stop):
    writer.scalars(step, {'val-env/A/success': step / 4, 'A/pass@2': float('nan') if step == 1 else step})
    (workdir / 'trajectories.html').write_text(f'<p>after {step}')
    writer.page(str(workdir / 'trajectories.html'))
"""


def _read_wandb(run, workdir):
  """Rows and files of the offline runs, from their logs of records (LevelDB's format), and the config of the first."""
  from wandb.proto import wandb_internal_pb2

  rows, config = [], {}
  folders = sorted((workdir / 'wandb').glob(f'offline-run-*-{run}'))
  for folder in folders:
    (path,) = folder.glob('*.wandb')
    data, at, part = path.read_bytes(), 7, b''
    while at + 7 <= len(data):
      length, kind = int.from_bytes(data[at + 4 : at + 6], 'little'), data[at + 6]
      part += data[at + 7 : at + 7 + length]
      at += 7 + length
      at += -at % 32768 if -at % 32768 < 7 else 0
      if kind in (1, 4):  # whole, or the last part
        record, part = wandb_internal_pb2.Record.FromString(part), b''
        items = {x.key or '.'.join(x.nested_key): json.loads(x.value_json) for x in record.history.item}
        if items:
          rows.append({'step': items['iteration']} | {k: v for k, v in items.items() if '/' in k})
        for changed in (record.run.config, record.config):
          config |= {x.key: json.loads(x.value_json) for x in changed.update}
  page = folders[-1] / 'files' / 'trajectories.html'
  return rows, config, page.read_text()


def _read_trackio(run, workdir):
  from trackio import Api
  from trackio.sqlite_storage import SQLiteStorage

  rows = [
    {'step': row['step']} | {k: v for k, v in row.items() if '/' in k} for row in SQLiteStorage.get_logs('games', run)
  ]
  assert [x.name for x in Api().runs('games')] == [run]
  pages = sorted((workdir.parent / 'trackio').rglob('*'), key=lambda x: x.stat().st_mtime)
  page = [x.read_text() for x in pages if x.is_file() and x.read_bytes().startswith(b'<p>')][-1]
  return rows, SQLiteStorage.get_run_config('games', run), page


def _read_mlflow(run, workdir):
  import mlflow

  client = mlflow.MlflowClient(f'sqlite:///{workdir}/mlflow.db')
  found = client.get_run(run)
  assert found.info.status == 'FINISHED' and found.info.run_name == workdir.name
  rows = {}
  for name in found.data.metrics:
    for x in client.get_metric_history(run, name):
      rows.setdefault(x.step, {'step': x.step})[name] = x.value
  page = mlflow.artifacts.load_text(f'{found.info.artifact_uri}/trajectories.html')
  return [rows[step] for step in sorted(rows)], found.data.params, page


@pytest.mark.parametrize('tracker', ['wandb', 'trackio', 'mlflow'])
def test_a_run_and_its_continuation_without_a_network(tmp_path, monkeypatch, tracker):
  monkeypatch.setenv('TRACKIO_DIR', str(tmp_path / 'trackio'))  # read at the import
  pytest.importorskip(tracker, reason=f'needs {tracker}, of requirements-trackers.txt')
  workdir = tmp_path / 'run'
  settings = {'WANDB_MODE': 'offline', 'WANDB_API_KEY': _KEY, 'A_KEY': _KEY, 'MLFLOW_TRACKING_TOKEN': _KEY}
  environment = os.environ | settings | {'HOME': str(tmp_path), 'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path])}
  for start, stop in ((0, 2), (1, 4)):  # killed after step 1, with a checkpoint of step 0
    command = [sys.executable, '-c', _RUN, tracker, str(workdir), str(start), str(stop)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert 'gets no more metrics' not in done.stderr, done.stderr
    assert _KEY not in done.stdout + done.stderr
  record = json.loads((workdir / 'tracker.json').read_text())
  assert record['step'] == 3
  rows, config, page = {'wandb': _read_wandb, 'trackio': _read_trackio, 'mlflow': _read_mlflow}[tracker](
    record['id'], workdir
  )
  unique = {row['step']: row for row in rows}
  assert sorted(unique) == [0, 1, 2, 3] and len(rows) <= 5  # the last step before the end may be there twice
  assert [unique[step]['val-env/A/success'] for step in range(4)] == [0.0, 0.25, 0.5, 0.75]
  assert unique[3]['A/pass_2' if tracker == 'mlflow' else 'A/pass@2'] == 3
  assert str(config['seed']) == '3' and config['eval.endpoint'] == 'https://***@host/v1' and config['name'] == '***'
  assert page == '<p>after 3'
  written = [path for path in tmp_path.rglob('*') if path.is_file()]
  assert not [path for path in written if _KEY.encode() in path.read_bytes() or b'me:hidden' in path.read_bytes()]
