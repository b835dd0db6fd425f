"""Tests and times one accelerator: equal numbers, learning, and the speed of an iteration at a real model's shape.

  python benchmarks/accelerator.py                          all parts, on the default device, at Qwen2.5-0.5B's shape
  python benchmarks/accelerator.py --parts=decode,iteration some parts
  python benchmarks/accelerator.py --quick                  all parts at a tiny shape, to runs/quick; also on a CPU

Weights are random, because no measurement depends on them, and nothing is downloaded. The tokenizer is the built-in
model's; the vocabulary is padded to the shape's. The numbers of a part are added to the JSON when the part ends:

  parity     logits and greedy tokens against `transformers` in float32 on the same weights (needs PyTorch)
  main_job   configs/frozenlake_ppo.py in a process of its own: success before and after, seconds an iteration
  decode     tokens a second of the sampler, and of `transformers` on the same device in the same run (needs PyTorch)
  iteration  rollout, log-probs and update of configs/frozenlake_ppo.py with the variant's settings: seconds of each,
             and the floating-point operations of the update

Times of `decode` are medians after the compilation; `iteration` times the second of two. `roofline` is the shortest
possible time divided by the measured time. The shortest possible time of decoding is the bytes of weights and cache
that it reads over --bandwidth, that of the update its operations over --flops. The defaults are 90 % and 80 % of the
peaks of an H200.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

# The device's memory is shared with the main job's process and with PyTorch.
os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

from benchmarks.learning_curves import hardware  # noqa: E402
from configs import frozenlake_ppo  # noqa: E402
from ragen_jax import build  # noqa: E402
from ragen_jax.agent.language_model import param_state  # noqa: E402
from ragen_jax.models import presets  # noqa: E402
from ragen_jax.models.checkpoint.load import load_model  # noqa: E402
from ragen_jax.models.checkpoint.save import save_model  # noqa: E402
from ragen_jax.models.qwen import Qwen, QwenConfig  # noqa: E402
from ragen_jax.models.value_head import ActorCritic  # noqa: E402
from ragen_jax.runs.metrics import read_metrics  # noqa: E402
from ragen_jax.sampling.draw import GREEDY, PLAIN, Sampling  # noqa: E402
from ragen_jax.sampling.sampler import Sampler  # noqa: E402

SHAPE = QwenConfig(
  vocab_size=151_936,
  hidden_size=896,
  intermediate_size=4864,
  num_layers=24,
  num_heads=14,
  num_kv_heads=2,
  head_dim=64,
  rope_theta=1e6,
  tie_word_embeddings=True,
)
# Rows, prompt tokens and new tokens of `decode`.
DECODE = (128, 512, 256)
QUICK_SHAPE = dataclasses.replace(
  SHAPE, vocab_size=1024, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, head_dim=16
)
QUICK_DECODE = (4, 32, 8)
REPEATS = 3


def has_torch() -> bool:
  return importlib.util.find_spec('torch') is not None


def measured(run) -> float:
  """Median seconds of a function that waits for its result, without its first call, which compiles."""
  run()
  times = []
  for _ in range(REPEATS):
    start = time.perf_counter()
    run()
    times.append(time.perf_counter() - start)
  return statistics.median(times)


def make_checkpoint(shape: QwenConfig, directory: str) -> None:
  """Random weights with the built-in tokenizer."""
  model = Qwen(shape, rngs=nnx.Rngs(0))
  save_model(directory, model, shape, 'bfloat16', tokenizer_dir=presets.resolve('tiny', ''))


def parity(shape: QwenConfig, checkpoint: str) -> dict:
  """Differences from `transformers` for a model of this shape with two layers, both in float32."""
  if not has_torch():
    return {'skipped': 'PyTorch is not installed'}
  import torch
  from transformers import AutoModelForCausalLM

  small = dataclasses.replace(shape, num_layers=min(shape.num_layers, 2))
  with tempfile.TemporaryDirectory() as directory:
    model = Qwen(small, rngs=nnx.Rngs(1))
    save_model(directory, model, small, 'float32', tokenizer_dir=checkpoint)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
  tokens = np.random.default_rng(0).integers(0, small.vocab_size, (4, 64))
  with torch.no_grad(), jax.default_matmul_precision('highest'):
    expected = theirs(torch.as_tensor(tokens)).logits.numpy()
    hidden, _ = model(model.embed(jnp.asarray(tokens)))
    logits = np.asarray(model.logits(hidden))
    greedy = theirs.generate(
      torch.as_tensor(tokens), attention_mask=torch.ones_like(torch.as_tensor(tokens)), max_new_tokens=16,
      do_sample=False, eos_token_id=None, pad_token_id=0,
    ).numpy()[:, 64:]  # fmt: skip
    _, reply = decode_once(*sampler_of(model), tokens.astype(np.int32), 16, GREEDY)
  return {
    'largest_logit_difference': float(np.abs(logits - expected).max()),
    'largest_logit': float(np.abs(expected).max()),
    'equal_greedy_tokens': float((np.asarray(reply.tokens) == greedy).mean()),
  }


def sampler_of(model: Qwen) -> tuple[Sampler, nnx.State]:
  """A sampler without stop tokens, and its weights."""
  policy = ActorCritic(model)
  return Sampler(policy, stop_ids=(model.cfg.vocab_size,)), param_state(policy)


def decode_once(sampler: Sampler, params: nnx.State, tokens: np.ndarray, new: int, sampling: Sampling):
  """Reads the prompts and draws `new` tokens for each; returns (seconds of decoding, reply)."""
  rows, width = tokens.shape
  state = sampler.init(rows, width + new)
  state = sampler.extend(params, state, tokens, np.full(rows, width, np.int32))
  jax.block_until_ready(state)
  keys, budget = jax.random.split(jax.random.key(0), rows), np.full(rows, new)
  start = time.perf_counter()
  _, reply, _ = sampler.decode(params, state, keys, budget, columns=new, sampling=sampling)
  jax.block_until_ready(reply)
  return time.perf_counter() - start, reply


def decode(shape: QwenConfig, checkpoint: str, sizes: tuple[int, int, int], bandwidth: float) -> dict:
  """Tokens a second at temperature 1, without the time for the prompts."""
  rows, width, new = sizes
  tokens = np.random.default_rng(0).integers(0, 1000, (rows, width)).astype(np.int32)
  dtype = jnp.float32 if jax.default_backend() == 'cpu' else jnp.bfloat16
  sampler, params = sampler_of(load_model(checkpoint, dtype=dtype, param_dtype=dtype))
  decode_once(sampler, params, tokens, new, PLAIN)
  ours = statistics.median(decode_once(sampler, params, tokens, new, PLAIN)[0] for _ in range(REPEATS))
  weights = sum(x.nbytes for x in jax.tree.leaves(params))
  cache = 2 * shape.num_layers * rows * (width + new / 2) * shape.num_kv_heads * shape.head_dim * dtype.dtype.itemsize
  told = {
    'rows': rows,
    'prompt_tokens': width,
    'new_tokens': new,
    'tokens_per_s': rows * new / ours,
    'roofline': (weights + cache) * new / bandwidth / ours,
  }
  del sampler, params
  if not has_torch():
    return told | {'transformers': 'PyTorch is not installed'}
  import torch
  from transformers import AutoModelForCausalLM

  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  model = AutoModelForCausalLM.from_pretrained(
    checkpoint, dtype=torch.bfloat16 if device == 'cuda' else torch.float32
  ).to(device)
  ids = torch.as_tensor(tokens, dtype=torch.long, device=device)

  def generate(count: int) -> None:
    with torch.no_grad():
      model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=True,
        pad_token_id=0,
      )  # fmt: skip
    if device == 'cuda':
      torch.cuda.synchronize()

  # The time for the prompts is subtracted.
  theirs = max(measured(lambda: generate(new)) - measured(lambda: generate(1)), 1e-9)
  return told | {'transformers_device': device, 'transformers_tokens_per_s': rows * (new - 1) / theirs,
                 'ratio': (rows * new / ours) / (rows * (new - 1) / theirs)}  # fmt: skip


def main_job(iterations: int) -> dict:
  """A run of configs/frozenlake_ppo.py by `main.py`, in a process of its own."""
  with tempfile.TemporaryDirectory() as workdir:
    command = [sys.executable, 'main.py', '--config=configs/frozenlake_ppo.py', f'--workdir={workdir}']
    command += [f'--config.num_iterations={iterations}']
    start = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    wall, lines = time.monotonic() - start, read_metrics(workdir)
  tested = [line for line in lines if 'val-env/success' in line]
  steps = [line['timing_s/step'] for line in lines if 'timing_s/step' in line]
  return {
    'iterations': iterations,
    'wall_s': wall,
    'median_iteration_s': statistics.median(steps),
    'sampled': [tested[0]['val-env/FrozenLake/success'], tested[-1]['val-env/FrozenLake/success']],
    'greedy': [tested[0]['val-greedy/FrozenLake/success'], tested[-1]['val-greedy/FrozenLake/success']],
    'optimal': tested[-1]['val-env/FrozenLake/optimal'],
    'largest_logprob_gap': max(line.get('rollout/logprob_gap_max', 0.0) for line in lines),
  }


def iteration(checkpoint: str, quick: bool, flops: float) -> dict:
  """Two iterations in this process; the second is timed."""
  config = frozenlake_ppo.get_config('' if quick else 'qwen2.5-0.5b')
  config.model.path = checkpoint
  if quick:
    config.train.groups, config.train.group_size = 4, 4
    config.optimizer.mini_batch_size, config.optimizer.micro_batch_size = 8, 8
    config.agent.max_response_tokens, config.envs.FrozenLake.max_turns = 8, 2
  policy = build.load_policy(config)
  trainer = build.make_trainer(config, policy)
  state = trainer.init()
  size = sum(x.size for x in jax.tree.leaves(state.params))
  for _ in range(2):
    clock = [time.perf_counter()]
    rollout, selection = trainer.collect(state)
    clock.append(time.perf_counter())
    batch, metrics = trainer.estimate(state, selection)
    clock.append(time.perf_counter())
    state, more = trainer.update(state, batch, selection)
    jax.block_until_ready(state.trained)
    clock.append(time.perf_counter())
  seconds = np.diff(clock)
  tokens = int(rollout.trajectory.length.sum()) * config.algorithm.ppo_epochs
  # Operations for each weight and token: 2 forward, 4 backward, and 2 for another forward pass with remat of whole
  # layers. Attention is not counted.
  operations = (8 if trainer.settings.loss.scoring.remat.remat == 'layers' else 6) * size * tokens
  stats = jax.devices()[0].memory_stats() or {}
  return {
    'parameters': size,
    'episodes': len(rollout.episodes),
    'timeline_tokens': tokens,
    'sampled_tokens': rollout.tokens_sampled,
    'rollout_s': seconds[0],
    'advantages_s': seconds[1],
    'update_s': seconds[2],
    'sampled_tokens_per_s': rollout.tokens_sampled / seconds[0],
    'update_tokens_per_s': tokens / seconds[2],
    'roofline': operations / flops / seconds[2],
    'peak_memory_gib': stats.get('peak_bytes_in_use', 0) / 2**30,
    'logprob_gap_max': more.get('rollout/logprob_gap_max'),
    'entropy': more['actor/entropy'],
    'grad_norm': more['actor/grad_norm'],
    'finite': bool(np.all(np.isfinite([x for x in (metrics | more).values() if isinstance(x, float)]))),
  }


def main() -> None:
  parts = ('parity', 'main_job', 'decode', 'iteration')
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--parts', default=','.join(parts), help='parts to run, separated by commas')
  parser.add_argument('--quick', action='store_true', help='a tiny shape')
  parser.add_argument('--bandwidth', type=float, default=4.3e12, help="the device's bytes a second")
  parser.add_argument('--flops', type=float, default=790e12, help="the device's bfloat16 operations a second")
  parser.add_argument('--out', type=pathlib.Path, help='the JSON file; by default in benchmarks/results')
  arguments = parser.parse_args()
  wanted = arguments.parts.split(',')
  unknown = sorted(set(wanted) - set(parts))
  if unknown:
    sys.exit(f'error: --parts={unknown[0]}: allowed: {", ".join(parts)}')
  shape, sizes = (QUICK_SHAPE, QUICK_DECODE) if arguments.quick else (SHAPE, DECODE)
  out = arguments.out or ROOT / ('runs/quick' if arguments.quick else 'benchmarks/results') / 'accelerator.json'
  record = {'hardware': hardware(), 'command': ' '.join(sys.argv), 'bandwidth': arguments.bandwidth}
  record |= {'flops': arguments.flops, 'shape': dataclasses.asdict(shape)}
  with tempfile.TemporaryDirectory() as directory:
    checkpoint = os.path.join(directory, 'checkpoint')
    make_checkpoint(shape, checkpoint)
    runs = {
      'parity': lambda: parity(shape, checkpoint),
      'main_job': lambda: main_job(2 if arguments.quick else 40),
      'decode': lambda: decode(shape, checkpoint, sizes, arguments.bandwidth),
      'iteration': lambda: iteration(checkpoint, arguments.quick, arguments.flops),
    }
    for part in wanted:
      record[part] = runs[part]()
      print(f'{part}: {json.dumps(record[part], default=float)}', flush=True)
      out.parent.mkdir(parents=True, exist_ok=True)
      out.write_text(json.dumps(record, indent=1, default=float) + '\n')
  print(f'written to {out}')


if __name__ == '__main__':
  main()
