"""launch/slurm.sbatch on a real Slurm: training on two nodes, time limits, killed tasks, nodes that go down."""

from __future__ import annotations

import os
import pathlib
import signal

import pytest

from ragen_jax.runs.metrics import read_metrics
from tests.support import slurm
from tests.support.processes import environment

pytestmark = [
  pytest.mark.slow,
  pytest.mark.timeout(3600),  # Slurm waits a minute before it starts a job again
  pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or 'nothing'),
]

FLAGS = [
  '--config=configs/frozenlake_ppo.py', '--config.train.groups=4', '--config.train.group_size=4',
  '--config.eval.groups=8', '--config.eval.group_size=1', '--config.eval.greedy_too=False', '--config.eval.every=0',
  '--config.optimizer.mini_batch_size=8', '--config.optimizer.micro_batch_size=4', '--config.checkpoint.every=1',
  '--config.length_step=256', '--config.compilation_cache=',
]  # fmt: skip


@pytest.fixture(scope='module')
def cluster(tmp_path_factory):
  with slurm.open_cluster(tmp_path_factory.mktemp('slurm') / 'cluster', nodes=3) as opened:
    yield opened


def _submit(cluster, place, iterations, *options):
  flags = [*FLAGS, f'--config.num_iterations={iterations}', f'--workdir={place / "run"}']
  return cluster.submit(place / 'log', *flags, options=options, variables=environment(devices=1))


def _state(cluster, job, *states):
  return lambda: cluster.job(job)['JobState'] in states


def _last_step(place):
  """The step of the newest checkpoint; 0 if there is none."""
  return max((int(x.name) for x in (place / 'run' / 'checkpoints').glob('*') if x.name.isdigit()), default=0)


def _minutes(run_time):
  """The whole minutes of a time as Slurm writes it: [days-]hours:minutes:seconds."""
  days, _, clock = run_time.rpartition('-')
  hours, minutes, _ = map(int, clock.split(':'))
  return (int(days or 0) * 24 + hours) * 60 + minutes


def _tasks(job):
  """Process ids of the tasks of a job on this machine, by their number."""
  found = {}
  for path in pathlib.Path('/proc').glob('[0-9]*'):
    try:
      words = (path / 'cmdline').read_text().split('\0')
      variables = dict(x.partition('=')[::2] for x in (path / 'environ').read_text(errors='replace').split('\0'))
    except OSError:  # it has ended
      continue
    if variables.get('SLURM_JOB_ID') == job and words[1:2] == ['main.py'] and 'SLURM_PROCID' in variables:
      found[int(variables['SLURM_PROCID'])] = int(path.name)
  return found


def test_a_job_is_saved_before_its_time_limit_goes_back_to_the_queue_and_goes_on(cluster, tmp_path):
  job = _submit(cluster, tmp_path, 5000, '--nodes=2', '--time=60', '--signal=INT@120')
  saved = 0
  for restarts in (1, 2):
    slurm.wait(lambda n=saved: _last_step(tmp_path) > n, 900)
    # However long the start took, the signal comes in the next minute.
    cluster.run('scontrol', 'update', f'JobId={job}', f'TimeLimit={_minutes(cluster.job(job)["RunTime"]) + 3}')
    slurm.wait(lambda n=restarts: cluster.job(job)['Restarts'] == str(n), 900)
    cluster.run('scontrol', 'update', f'JobId={job}', 'TimeLimit=60')
    saved = _last_step(tmp_path)
    slurm.wait(lambda: not _tasks(job), 60)
  slurm.wait(lambda n=saved: _last_step(tmp_path) > n, 900)
  log = (tmp_path / 'log').read_text()
  assert log.count('interrupted; the same command resumes') == 4  # two processes, twice
  assert saved > 0 and f'resuming {tmp_path / "run"} after iteration {saved}' in log
  steps = [row['step'] for row in read_metrics(tmp_path / 'run')]
  assert steps == list(range(len(steps)))  # none is missing, and none is there twice
  cluster.run('scancel', job)


def test_a_task_that_is_killed_is_named_and_the_job_fails(cluster, tmp_path):
  job = _submit(cluster, tmp_path, 5000, '--nodes=2', '--time=60')
  slurm.wait(lambda: _last_step(tmp_path) > 0, 900)
  os.kill(_tasks(job)[1], signal.SIGKILL)
  slurm.wait(_state(cluster, job, 'FAILED'), 200)
  log = (tmp_path / 'log').read_text()
  assert 'process 1 of 2 (' in log and 'does not answer; it was last in the phase' in log
  assert cluster.job(job)['Restarts'] == '0'


def test_four_tasks_on_two_nodes_start_again_on_others_after_one_goes_down(cluster, tmp_path):
  job = _submit(cluster, tmp_path, 5000, '--nodes=2', '--ntasks-per-node=2', '--time=60')
  slurm.wait(lambda: sorted(_tasks(job)) == [0, 1, 2, 3], 300)
  first, second, third = cluster.nodes
  assert cluster.job(job)['NodeList'] == f'{first},{second}'
  cluster.run('scontrol', 'update', f'NodeName={second}', 'State=DOWN', 'Reason=test')
  slurm.wait(lambda: cluster.job(job)['Restarts'] == '1', 120)
  slurm.wait(lambda: not _tasks(job), 120)  # nothing of the first start writes any more
  slurm.wait(lambda: sorted(_tasks(job)) == [0, 1, 2, 3], 300)
  assert cluster.job(job)['NodeList'] == f'{first},{third}'
  cluster.run('scontrol', 'update', f'NodeName={second}', 'State=RESUME')
  slurm.wait(lambda: 'evaluating before training' in (tmp_path / 'log').read_text(), 900)  # they are connected
  cluster.run('scancel', '--full', '--signal=KILL', job)
  cluster.run('scancel', job)
