"""Two processes of one run, started as a user would: the numbers of a single process, and no one left waiting."""

from __future__ import annotations

import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import pytest

from ragen_jax.utils.metrics import read_metrics

ROOT = pathlib.Path(__file__).parents[1]
FLAGS = [
  '--config=configs/frozenlake_ppo.py',
  '--config.train.groups=4',
  '--config.train.group_size=4',
  '--config.eval.groups=8',
  '--config.eval.group_size=1',
  '--config.eval.greedy_too=False',
  '--config.optimizer.mini_batch_size=8',
  '--config.optimizer.micro_batch_size=4',
  '--config.optimizer.final_lr_fraction=1.0',
  '--config.checkpoint.every=1',
  '--config.length_step=256',
  '--config.compilation_cache=',  # that of the tests
]


def _environment():
  return os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '', 'PYTHON': sys.executable}


def _start(workdir, processes, *flags):
  return subprocess.Popen(
    ['launch/local.sh', str(processes), *FLAGS, f'--workdir={workdir}', *flags],
    cwd=ROOT,
    env=_environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


@pytest.mark.skipif(shutil.which('bash') is None, reason='launch/local.sh is a bash script')
def test_two_processes_train_and_resume_as_one_does(tmp_path):
  one, two = tmp_path / 'one', tmp_path / 'two'
  alone = _start(one, 1, '--config.num_iterations=2')
  output = alone.communicate(timeout=240)[0]
  assert alone.returncode == 0, output

  for iterations in (1, 2):  # the second goes on after the first
    pair = _start(two, 2, f'--config.num_iterations={iterations}')
    output = pair.communicate(timeout=240)[0]
    assert pair.returncode == 0, output
    assert output.count('Success on 8 held-out levels') == 1  # only the first process talks
  for ours, theirs in zip(read_metrics(two), read_metrics(one), strict=True):
    assert ours['step'] == theirs['step']
    for name in theirs:
      if not name.startswith(('timing_s/', 'perf/', 'rollout/logprob_gap')):
        assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=1e-4), (theirs['step'], name)


def test_a_process_whose_partner_died_stops_with_one_clear_line(tmp_path):
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{s.getsockname()[1]}'
  command = [sys.executable, 'main.py', *FLAGS, f'--workdir={tmp_path / "run"}', '--config.num_iterations=1000']
  command += [f'--coordinator={address}', '--num_processes=2']
  log = (tmp_path / 'log').open('w+')
  workers = [
    subprocess.Popen([*command, f'--process_id={i}'], cwd=ROOT, env=_environment(), stdout=log, stderr=log)
    for i in range(2)
  ]
  try:
    while not (tmp_path / 'run' / 'checkpoints' / '1').exists():
      assert all(w.poll() is None for w in workers), (tmp_path / 'log').read_text()
      time.sleep(0.2)
    workers[1].kill()
    assert workers[0].wait(timeout=60) == 1
  finally:
    for w in workers:
      w.kill()
  output = (tmp_path / 'log').read_text()
  assert 'error: another process of this run has stopped or cannot be reached' in output
  assert 'Traceback' not in output
