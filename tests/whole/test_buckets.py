"""A run in a bucket, killed and resumed, gives what a run on a disk gives; its other commands work on the bucket."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import fsspec
import jax
import numpy as np
import pytest

from ragen_jax import train
from ragen_jax.modes.evaluate import evaluate
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
  rows = [
    {name: x for name, x in row.items() if not name.startswith(('timing_s/', 'perf/'))} for row in read_metrics(workdir)
  ]
  with Checkpointer(workdir, keep=2) as checkpointer:
    step = checkpointer.latest_step()
    checkpointer.verify(step)
    shapes = checkpointer._read_record(step)['leaves']
    like = {name: _array(text) for name, text in shapes.items() if name.startswith('params')}
    weights, _ = checkpointer.restore(like, partial=True)
  return rows, weights


def _array(text):
  dtype, _, shape = text.rstrip(']').partition('[')
  return np.zeros([int(n) for n in shape.split(',') if n], dtype)


@pytest.mark.slow
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
