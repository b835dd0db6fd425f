"""One whole iteration of a model of Qwen2.5-0.5B's shape, with its tokenizer, on a CPU, in the memory of a laptop."""

from __future__ import annotations

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
from ragen_jax.models.checkpoint.config import read_config
from ragen_jax.models.checkpoint.names import weights
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.planning.host_fit import as_it_runs
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.training import batch_sizes
from ragen_jax.training.memory import WORKSPACE
from tests.support.paths import ROOT

FLAGS = [
  '--config=configs/frozenlake_ppo.py:qwen2.5-0.5b',
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


def _write_checkpoint(directory, tokenizer_dir):
  """Random weights of the full shape, in one bfloat16 file as the hub has it."""
  directory.mkdir()
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    shutil.copyfile(tokenizer_dir / name, directory / name)
  cfg = QwenConfig()  # the defaults are Qwen2.5-0.5B
  config = {
    'architectures': ['Qwen2ForCausalLM'], 'model_type': 'qwen2', 'vocab_size': cfg.vocab_size,
    'hidden_size': cfg.hidden_size, 'intermediate_size': cfg.intermediate_size,
    'num_hidden_layers': cfg.num_layers, 'num_attention_heads': cfg.num_heads,
    'num_key_value_heads': cfg.num_kv_heads, 'rope_theta': cfg.rope_theta, 'rms_norm_eps': cfg.rms_norm_eps,
    'tie_word_embeddings': cfg.tie_word_embeddings, 'eos_token_id': 151643,
  }  # fmt: skip
  (directory / 'config.json').write_text(json.dumps(config))
  assert read_config(str(directory)) == cfg
  rng = np.random.default_rng(0)

  def tensor(weight):
    if weight.name.endswith('norm.weight'):
      return np.ones(weight.hf_shape, ml_dtypes.bfloat16)
    return (0.02 * rng.standard_normal(weight.hf_shape, np.float32)).astype(ml_dtypes.bfloat16)

  save_file({w.name: tensor(w) for w in weights(cfg)}, directory / 'model.safetensors', metadata={'format': 'pt'})
  return cfg


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


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(not hasattr(os, 'wait4'), reason='measures the memory of a child as POSIX does')
def test_a_whole_iteration_at_full_size(tmp_path, qwen_tokenizer_dir):
  cfg = _write_checkpoint(tmp_path / 'model', qwen_tokenizer_dir)
  workdir = tmp_path / 'run'
  command = [sys.executable, 'main.py', *FLAGS, f'--config.model.path={tmp_path / "model"}', f'--workdir={workdir}']
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
  planned, limit = _planned(text, tmp_path / 'model')
  assert peak < MEMORY and peak < limit + PROCESS
  assert peak > 4 * 4 * sum(w.size for w in weights(cfg))  # weights, gradients and Adam's moments, in float32
  assert peak == pytest.approx(planned + PROCESS, rel=0.15)

  assert (workdir / 'checkpoints' / '1').is_dir()
  rows = {row['step']: row for row in read_metrics(workdir)}
  assert set(rows) == {0, 1}
  for row in rows.values():
    assert all(math.isfinite(value) for value in row.values()), row
  # Random weights this small leave the choice of a token nearly uniform, over the tokens that the tokenizer has.
  assert rows[1]['actor/entropy'] == pytest.approx(math.log(151665), abs=0.5)
  assert rows[1]['actor/grad_norm'] > 0
  assert rows[1]['rollout/logprob_gap_max'] < 1e-2  # the update's forward pass agrees with the sampler's
  assert 0 <= rows[1]['val-env/FrozenLake/success'] <= rows[1]['val-env/FrozenLake/optimal']
  shutil.rmtree(workdir)
