"""Whole iterations of models of the shapes of Qwen2.5-0.5B and Qwen3.5-0.8B on a CPU, in the memory of a laptop."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from ragen_jax import api, build
from ragen_jax.models import presets
from ragen_jax.models.checkpoint.config import hf_config, read_config
from ragen_jax.models.checkpoint.names import weights
from ragen_jax.planning.host_fit import as_it_runs
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.training import batch_sizes
from ragen_jax.training.memory import WORKSPACE
from tests.support.paths import ROOT

FLAGS = [
  '--config.num_iterations=1',
  '--config.train.groups=2',
  '--config.train.group_size=2',
  '--config.eval.groups=2',
  '--config.eval.group_size=1',
  '--config.eval.greedy_too=False',
  '--config.envs.FrozenLake.max_turns=2',
  '--config.agent.max_response_tokens=8',
  '--config.agent.max_context=1024',
  '--config.optimizer.mini_batch_size=4',
  '--config.compilation_cache=',  # that of the tests
]
# What the update may fill where 16 GiB are free, and what the process holds beside it: Python, libraries, compilers.
MEMORY = 15 << 30
PROCESS = 2**29 + WORKSPACE


def _write_checkpoint(directory, tokenizer_dir, cfg):
  """Random weights of the full shape, in one bfloat16 file as the hub has it."""
  directory.mkdir()
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    shutil.copyfile(tokenizer_dir / name, directory / name)
  config = hf_config(cfg, np.dtype(ml_dtypes.bfloat16), str(tokenizer_dir))
  (directory / 'config.json').write_text(json.dumps(config))
  assert read_config(str(directory)) == cfg
  rng = np.random.default_rng(0)

  def tensor(weight):
    if weight.name.endswith('norm.weight'):  # a factor of 1, to which the norms of Qwen3.5 add their weights
      added = cfg.linear is not None and not weight.name.endswith('linear_attn.norm.weight')
      return np.full(weight.hf_shape, 0 if added else 1, ml_dtypes.bfloat16)
    return (0.02 * rng.standard_normal(weight.hf_shape, np.float32)).astype(ml_dtypes.bfloat16)

  save_file({w.name: tensor(w) for w in weights(cfg)}, directory / 'model.safetensors', metadata={'format': 'pt'})


def _planned(log, model):
  """Bytes of the update of the bins that a run has logged, and bytes that it may fill."""
  fields = {'model.path': str(model), 'agent.max_context': 1024, 'optimizer.mini_batch_size': 4}
  config = api.load_config('frozenlake_ppo:qwen2.5-0.5b', fields)
  found = build.update_memory(config, as_it_runs(config))
  (shape,) = re.findall(r'shape 1, compiled once: (\d+) bins of (\d+) columns', log)
  (filled,) = re.findall(r'chosen for the ([\d.]+) GiB that may be filled', log)
  limit, columns = float(filled) * 2**30, math.prod(map(int, shape))
  policy = as_it_runs(config).model.policy
  remat = batch_sizes.remat_settings(config.model.remat, policy, lambda: found, lambda: limit)
  return found.total(columns, remat.choose(columns)), limit


def _run(tmp_path, preset):
  """A run of one iteration: its log, the peak memory of its process in bytes, and its metrics by step."""
  workdir, model = tmp_path / 'run', tmp_path / 'model'
  config = f'--config=configs/frozenlake_ppo.py:{preset}'
  command = [sys.executable, 'main.py', config, *FLAGS, f'--config.model.path={model}', f'--workdir={workdir}']
  start = time.monotonic()
  with (tmp_path / 'log').open('w+') as log:
    child = subprocess.Popen(command, cwd=ROOT, env=os.environ | {'JAX_PLATFORMS': 'cpu'}, stdout=log, stderr=log)
    # Of this child alone, whatever other tests have started; in kibibytes on Linux.
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    log.seek(0)
    text = log.read()
    assert child.returncode == 0, text[-5000:]
  peak = usage.ru_maxrss * (1024 if sys.platform == 'linux' else 1)
  print(f'{time.monotonic() - start:.0f} s, peak memory {peak / 2**30:.1f} GiB')
  assert (workdir / 'checkpoints' / '1').is_dir()
  rows = {row['step']: row for row in read_metrics(workdir)}
  shutil.rmtree(workdir)
  return text, peak, rows


def _check(rows):
  assert set(rows) == {0, 1}
  for row in rows.values():
    assert all(math.isfinite(value) for value in row.values()), row
  # Random weights this small leave the choice of a token nearly uniform, over the tokens that the tokenizer has.
  assert rows[1]['actor/entropy'] == pytest.approx(math.log(151665), abs=0.5)
  assert rows[1]['actor/grad_norm'] > 0
  assert rows[1]['rollout/logprob_gap_max'] < 1e-2  # the update's forward pass agrees with the sampler's
  assert 0 <= rows[1]['val-env/FrozenLake/success'] <= rows[1]['val-env/FrozenLake/optimal']


_measures_children = pytest.mark.skipif(not hasattr(os, 'wait4'), reason='measures the memory of a child as POSIX does')


@pytest.mark.slow
@pytest.mark.timeout(3000)
@_measures_children
def test_a_whole_iteration_at_full_size(tmp_path, qwen_tokenizer_dir):
  cfg = presets.shape('qwen2.5-0.5b', '')
  _write_checkpoint(tmp_path / 'model', qwen_tokenizer_dir, cfg)
  text, peak, rows = _run(tmp_path, 'qwen2.5-0.5b')
  planned, limit = _planned(text, tmp_path / 'model')
  assert peak < MEMORY and peak < limit + PROCESS
  assert peak > 4 * 4 * sum(w.size for w in weights(cfg))  # weights, gradients and Adam's moments, in float32
  assert peak == pytest.approx(planned + PROCESS, rel=0.15)
  _check(rows)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@_measures_children
def test_an_iteration_of_a_hybrid_with_adapters(tmp_path, qwen_tokenizer_dir):
  cfg = dataclasses.replace(presets.shape('qwen3.5-0.8b', ''), vision=None)
  _write_checkpoint(tmp_path / 'model', qwen_tokenizer_dir, cfg)
  _, peak, rows = _run(tmp_path, 'qwen3.5-0.8b-lora')
  assert 4 * sum(w.size for w in weights(cfg)) < peak < 20 << 30
  _check(rows)
