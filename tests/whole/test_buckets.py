"""A run in a bucket, killed and resumed, gives what a run on a disk gives; its other commands work on the bucket."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys

import fsspec
import jax
import numpy as np
import pytest

from ragen_jax import train
from ragen_jax.modes import sft
from ragen_jax.modes.evaluate import evaluate
from ragen_jax.modes.export import export
from ragen_jax.modes.plot import plot
from ragen_jax.modes.view import view
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.runs.staging import COMMITTED
from ragen_jax.runs.stores import open_store
from ragen_jax.runs.workdir import open_workdir
from ragen_jax.utils.errors import UserError
from tests.support.buckets import s3_server
from tests.support.configs import small_config
from tests.support.processes import environment

_URL = 's3://bucket/run'
_FIELDS = {'train__groups': 2, 'eval__groups': 8, 'eval__every': 1, 'eval__greedy_too': False}
_RUN = """
import sys
from ragen_jax import train
from tests.support.configs import small_config
from tests.whole.test_buckets import _FIELDS
train.train_and_evaluate(small_config(num_iterations=2, **_FIELDS), sys.argv[1])
"""


@pytest.fixture(scope='module')
def s3():
  with s3_server() as variables:
    fsspec.filesystem('s3').clear_instance_cache()
    yield variables


def _results(workdir):
  """Metrics without times, and the weights of the last checkpoint."""
  rows = [_without_times(row) for row in read_metrics(workdir)]
  with Checkpointer(workdir, keep=2) as checkpointer:
    step = checkpointer.latest_step()
    checkpointer.verify(step)
    shapes = checkpointer._read_record(step)['leaves']
    like = {name: _array(text) for name, text in shapes.items() if name.startswith('params')}
    weights, _ = checkpointer.restore(like, partial=True)
  return rows, weights


def _without_times(row):
  return {name: x for name, x in row.items() if not name.startswith(('timing_s/', 'perf/'))}


def _array(text):
  dtype, _, shape = text.rstrip(']').partition('[')
  return np.zeros([int(n) for n in shape.split(',') if n], dtype)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)  # three short runs, two of which compile all programs
def test_a_killed_run_in_a_bucket_ends_like_a_run_on_a_disk(s3, tmp_path):
  config = small_config(num_iterations=2, **_FIELDS)
  train.train_and_evaluate(config, str(tmp_path / 'run'))

  process = subprocess.Popen([sys.executable, '-c', _RUN, _URL], env=environment() | s3)
  store = open_store(_URL)
  try:
    while store.read(f'checkpoints/1/{COMMITTED}') is None:  # the test's limit of time ends the loop
      assert process.poll() is None
  finally:
    process.kill()
    process.wait(timeout=60)
  for key in [key for key in store.sizes('checkpoints/') if key.split('/')[1] != '1']:
    store.delete([key])  # as if it had been killed before the next checkpoint
  train.train_and_evaluate(config, _URL)

  with open_workdir(_URL, write=False) as workdir:
    rows, weights = _results(workdir)
  wanted_rows, wanted_weights = _results(str(tmp_path / 'run'))
  assert rows == wanted_rows and [row['step'] for row in rows] == [0, 1, 2]  # floats, to the last bit
  assert wanted_weights
  jax.tree.map(np.testing.assert_array_equal, weights, wanted_weights)
  assert '.lock' not in store.sizes()

  result = evaluate(small_config(eval__greedy_too=False, eval__groups=8), _URL, given=True)
  assert result['checkpoint'] == 2 and result['path'].startswith(f'{_URL}/evaluation/step_2')
  assert json.loads(store.read(result['path'].removeprefix(f'{_URL}/')))['rows']
  assert f'{_URL}/plots/curves.png' in plot([_URL])
  assert store.read('plots/curves.png').startswith(b'\x89PNG')
  assert view(_URL) == f'{_URL}/trajectories.html' and b'<html' in store.read('trajectories.html')

  assert export(config, _URL) == f'{_URL}/export'
  on_disk = export(config, str(tmp_path / 'run'))
  names = sorted(path.name for path in pathlib.Path(on_disk).iterdir())
  assert sorted(store.sizes('export/')) == [f'export/{name}' for name in names] and 'model.safetensors' in names
  assert all(store.read(f'export/{name}') == pathlib.Path(on_disk, name).read_bytes() for name in names)


@pytest.mark.slow
@pytest.mark.timeout(900)  # two short warm starts
@pytest.mark.exhaustive
def test_a_warm_start_in_a_bucket_goes_on_and_ends_like_one_on_a_disk(s3, tmp_path, monkeypatch):
  def config(name):
    return small_config(
      sft__tags=('Bandit',), sft__levels=(64,), sft__steps=6, sft__batch_size=8, sft__hurry=0.0, sft__val_fraction=0.1,
      sft__checkpoint_every=2, sft__eval_every=3, sft__output=str(tmp_path / name), eval__tags=('Bandit',),
      eval__groups=4, eval__greedy_too=False,
    )  # fmt: skip

  sft.train_sft(config('disk'), str(tmp_path / 'run'))
  url, original, count = 's3://bucket/sft', sft.SftTrainer.step, 0

  def step(self, batches):
    nonlocal count
    count += 1
    if count == 4:
      signal.raise_signal(signal.SIGINT)
    return original(self, batches)

  monkeypatch.setattr(sft.SftTrainer, 'step', step)
  with pytest.raises(KeyboardInterrupt):
    sft.train_sft(config('bucket'), url)
  assert not (tmp_path / 'bucket').exists()
  sft.train_sft(config('bucket'), url)
  assert count == 6  # none of the steps before the signal was taken again
  weights = [(tmp_path / name / 'model.safetensors').read_bytes() for name in ('disk', 'bucket')]
  assert weights[0] == weights[1]
  with open_workdir(url, write=False) as workdir:
    lines = [[_without_times(row) for row in read_metrics(place)] for place in (workdir, str(tmp_path / 'run'))]
  assert lines[0] == lines[1] and [row['step'] for row in lines[0]] == [3, 6]
  other = config('bucket')
  other.sft.output = 's3://bucket/model'
  with pytest.raises(UserError, match=r's3://bucket/model.*must be a directory on disk'):
    sft.train_sft(other, 's3://bucket/other')


@pytest.mark.slow
def test_a_command_on_a_bucket_that_is_missing_is_one_line_before_anything_is_compiled(s3):
  code = (
    'import sys\nfrom ragen_jax import __main__\nsys.argv[1:] = ["--config=frozenlake_ppo", '
    '"--workdir=s3://nothing/run"]\n__main__.run()'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], env=environment() | s3, capture_output=True, text=True, check=False, timeout=280
  )
  assert done.returncode == 2
  assert done.stderr == 'error: --workdir=s3://nothing/run: there is no such bucket\n'


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['s3://bucket/a', 's3://bucket/a/'], r'--workdir=s3://bucket/a/ is given twice, also as s3://bucket/a'),
    (['s3://bucket/a', 's3://bucket/b'], '--output is missing'),
  ],
)
def test_figures_of_runs_in_a_bucket_need_different_runs_and_a_place(s3, arguments, message):
  with pytest.raises(UserError, match=message):
    plot(arguments)


def test_agent_programs_need_a_disk():
  from ragen_jax.modes.serve import serve

  with pytest.raises(UserError, match=r'^--workdir=s3://bucket/run: --mode=serve keeps rollouts in a database'):
    serve(small_config(), 's3://bucket/run', given=True, stop=None)


def test_a_hugging_face_checkpoint_is_written_to_a_disk():
  from ragen_jax.models.checkpoint.save import check_target

  with pytest.raises(UserError, match=r'^gs://bucket/model: must be a directory on disk'):
    check_target('gs://bucket/model')
  assert not pathlib.Path('gs:').exists()
