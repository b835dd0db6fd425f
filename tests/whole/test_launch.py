"""Two processes of one run, started as a user would: the numbers of a single process, and no one left waiting."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from ragen_jax.models.presets import resolve
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.runs.workdir import open_workdir
from tests.support.buckets import gs_server
from tests.support.metrics import comparable_metrics
from tests.support.paths import ROOT
from tests.support.processes import coordinator, environment, run_main, start_main

FLAGS = [
  '--config=configs/frozenlake_ppo.py',
  '--config.train.groups=4',
  '--config.train.group_size=4',
  '--config.eval.groups=8',
  '--config.eval.group_size=1',
  '--config.eval.greedy_too=False',
  '--config.eval.every=1',  # else a run that is stopped evaluates once more than one that is not
  '--config.envs.FrozenLake.max_turns=3',  # fewer programs
  '--config.optimizer.mini_batch_size=8',
  '--config.optimizer.micro_batch_size=4',
  '--config.optimizer.final_lr_fraction=1.0',
  '--config.checkpoint.every=1',
  '--config.length_step=256',
  '--config.compilation_cache=',  # that of the tests
]


def _start(workdir, processes, *flags, common=FLAGS):
  command = ['launch/local.sh', str(processes), *common, f'--workdir={workdir}', *flags]
  variables = environment(devices=1, PYTHON=sys.executable)
  return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def address():
  with coordinator() as held:
    yield held


def _start_pair(workdir, log, address, *flags, own=((), ())):
  """Two processes without launch/local.sh, which would stop one when the other fails; `own` has the flags of each."""
  flags = [*FLAGS, f'--workdir={workdir}', *flags, f'--coordinator={address}', '--num_processes=2']
  variables = environment(devices=1)
  return [start_main(*flags, *own[i], f'--process_id={i}', env=variables, stdout=log, stderr=log) for i in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_processes_that_cannot_connect_say_what_they_wait_for_and_give_up_in_one_line(tmp_path, address):
  # A name that does not resolve, detected by JAX or given; a port at which nobody listens; no second process.
  slurm = {'SLURM_JOB_ID': '1', 'SLURM_NTASKS': '2', 'SLURM_PROCID': '1', 'SLURM_LOCALID': '0'}
  slurm |= {'SLURM_STEP_NODELIST': 'nowhere.invalid', 'JAX_COORDINATOR_PORT': '2222'}
  cases = [
    ('auto', None, 'nowhere.invalid:2222', 'process 0 cannot be reached at nowhere.invalid:2222 ('),
    ('nowhere.invalid:8476', 0, 'nowhere.invalid:8476', 'process 0 cannot be reached at nowhere.invalid:8476 ('),
    ('127.0.0.1:9', 1, '127.0.0.1:9', 'process 0 cannot be reached at 127.0.0.1:9 (Connection refused'),
    (address, 0, address, f'process 0 answers at {address}, but not all processes have connected there'),
  ]
  workers = []
  for coordinator_, index, _, _ in cases:
    flags = ['--config=configs/frozenlake_ppo.py', f'--workdir={tmp_path / "run"}', '--connect_timeout=2']
    own = [] if index is None else ['--num_processes=2', f'--process_id={index}']
    variables = environment(devices=1, **(slurm if index is None else {}))
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    workers.append(start_main(*flags, f'--coordinator={coordinator_}', *own, env=variables, **pipes))
  for worker, (coordinator_, _, shown, problem) in zip(workers, cases, strict=True):
    out, err = worker.communicate(timeout=200)
    waits, error = err.splitlines()
    assert worker.returncode == 1 and not out
    assert waits == f'waiting until all processes are connected at {shown}, 2 s at most'
    assert error.startswith(f'error: --coordinator={coordinator_}: {problem}')
    assert error.endswith('; waited 2 s (--connect_timeout)')
  assert not (tmp_path / 'run').exists()


@pytest.mark.slow
@pytest.mark.timeout(900)  # most of it is compilation, and machines are busy
@pytest.mark.skipif(shutil.which('bash') is None, reason='launch/local.sh is a bash script')
def test_two_processes_train_as_one_stop_when_one_is_killed_and_resume(tmp_path, address):
  one, two = tmp_path / 'one', tmp_path / 'two'
  alone = _start(one, 1, '--config.num_iterations=3')
  output = alone.communicate(timeout=300)[0]
  assert alone.returncode == 0, output

  log = (tmp_path / 'log').open('w+')
  workers = _start_pair(two, log, address, '--config.num_iterations=1000')
  try:
    while not (two / 'checkpoints' / '1').exists():
      assert all(w.poll() is None for w in workers), (tmp_path / 'log').read_text()
      time.sleep(0.05)
    workers[1].kill()
    # A collective fails at once; in the middle of a checkpoint it is JAX that gives up, after a minute of silence.
    assert workers[0].wait(timeout=150) in (1, -signal.SIGABRT)
  finally:
    for w in workers:
      w.kill()
  output = (tmp_path / 'log').read_text()
  named = r'error: process 1 of 2 \(.*\) '  # by the watchdog
  assert re.search(f'{named}|error: another process of this run has stopped|another task died', output), output
  assert 'Traceback' not in output

  pair = _start(two, 2, '--config.num_iterations=3')
  output = pair.communicate(timeout=300)[0]
  assert pair.returncode == 0, output
  assert output.count(f'resuming {two} after iteration') == 1  # only the first process talks
  assert output.count('Success on 8 held-out levels') == 1
  _assert_same_metrics(two, one)


def _assert_same_metrics(run, other):
  ours, theirs = (comparable_metrics(workdir, without=('rollout/logprob_gap', 'perf/')) for workdir in (run, other))
  for line, expected in zip(ours, theirs, strict=True):
    assert line['step'] == expected['step']
    for name in expected:
      assert line[name] == pytest.approx(expected[name], rel=2e-3, abs=1e-4), (expected['step'], name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which('bash') is None, reason='launch/local.sh is a bash script')
@pytest.mark.exhaustive
def test_two_processes_with_a_workdir_in_a_bucket_train_as_one_on_a_disk_and_resume(tmp_path):
  with gs_server():
    for iterations, told in ((1, 'the run is saved in gs://bucket/pair'), (2, 'resuming gs://bucket/pair after')):
      pair = _start('gs://bucket/pair', 2, f'--config.num_iterations={iterations}')
      output = pair.communicate(timeout=400)[0]
      assert pair.returncode == 0, output
      assert output.count(told) == 1 and 'Traceback' not in output, output
    alone = _start(tmp_path, 1, '--config.num_iterations=2')
    assert alone.wait(timeout=300) == 0
    with open_workdir('gs://bucket/pair', write=False) as workdir, Checkpointer(workdir, keep=2) as checkpointer:
      _assert_same_metrics(workdir, tmp_path)
      assert checkpointer.steps() == [1, 2]
      checkpointer.verify(2)


def _train(workdir, devices, *flags):
  return run_main(*FLAGS, f'--workdir={workdir}', *flags, devices=devices, check=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_on_another_mesh(tmp_path):
  one, other = tmp_path / 'one', tmp_path / 'other'
  _train(one, 1, '--config.num_iterations=2')
  _train(other, 8, '--config.num_iterations=1', '--config.mesh.fsdp=2', '--config.mesh.tensor=2')
  told = _train(other, 2, '--config.num_iterations=2', '--config.mesh.tensor=2').stderr
  assert f'resuming {other} after iteration 1' in told
  _assert_same_metrics(other, one)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sigterm_saves_the_iteration_in_all_processes(tmp_path):
  pair = _start(tmp_path, 2, '--config.num_iterations=1000', '--config.checkpoint.every=0')
  while not (tmp_path / 'metrics.jsonl').exists() or len(read_metrics(tmp_path)) < 2:
    assert pair.poll() is None, pair.communicate()[0]
    time.sleep(0.1)
  pair.send_signal(signal.SIGTERM)
  output = pair.communicate(timeout=300)[0]
  assert pair.returncode == 143, output
  assert 'the same command resumes from the last checkpoint' in output and 'Traceback' not in output
  steps = [int(p.name) for p in (tmp_path / 'checkpoints').iterdir()]
  assert steps == [read_metrics(tmp_path)[-1]['step']]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_agent_programs_in_two_processes_are_refused_before_anything_starts(tmp_path):
  workdir = tmp_path / 'run'
  pair = _start(workdir, 2, '--config=configs/agents_ppo.py', common=())
  output = pair.communicate(timeout=300)[0]
  assert pair.returncode == 2, output
  errors = [line for line in output.splitlines() if 'error: ' in line]
  assert len(errors) == 1 and errors[0].endswith('play in runs of one process, and there are 2'), output
  assert not workdir.exists()


def _model_with_another_byte(directory):
  """The built-in model with one bit of its weights flipped."""
  shutil.copytree(resolve('tiny', ''), directory)
  weights = directory / 'model.safetensors'
  content = bytearray(weights.read_bytes())
  content[-5] ^= 1
  weights.write_bytes(content)
  return directory


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize('differs', ['config', 'files'])
@pytest.mark.exhaustive_cases('files')
def test_processes_with_another_config_or_other_files_end_before_anything_is_written(tmp_path, address, differs):
  if differs == 'config':
    own = ((), ('--config.algorithm.clip_ratio_high=0.3',))
    expected = 'algorithm.clip_ratio_high: is 0.3 in process 1 and '
  else:
    path = shutil.copytree(resolve('tiny', ''), tmp_path / 'model')
    other = _model_with_another_byte(tmp_path / 'other')
    own = ((f'--config.model.path={path}',), (f'--config.model.path={other}',))
    expected = 'the files of model.preset: is '
  with (tmp_path / 'log').open('w') as log:
    workers = _start_pair(tmp_path / 'run', log, address, '--config.num_iterations=2', own=own)
    try:
      assert [worker.wait(timeout=300) for worker in workers] == [2, 2], (tmp_path / 'log').read_text()
    finally:
      for worker in workers:
        worker.kill()
        worker.wait()
  errors = [line for line in (tmp_path / 'log').read_text().splitlines() if 'error: ' in line]
  assert len(errors) == 1 and errors[0].startswith(f'error: {expected}'), errors
  assert not (tmp_path / 'run').exists()
