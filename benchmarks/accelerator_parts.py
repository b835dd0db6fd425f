"""What a process of `accelerator.py` measures; `jobs` of that file lists the calls.

python -m benchmarks.accelerator_parts JOB RESULT.json SETTINGS_AS_JSON
"""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from benchmarks import accelerator_decode
from benchmarks.accelerator_numbers import attention, parity
from benchmarks.accelerator_work import Work, compute_dtype, has_torch
from benchmarks.learning_curves import hardware
from configs import frozenlake_ppo
from ragen_jax import build
from ragen_jax.config.checks import check_config
from ragen_jax.distributed.chips import CHIPS
from ragen_jax.models import presets
from ragen_jax.models.checkpoint.load import load_model
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.models.qwen import Qwen
from ragen_jax.planning import estimate, memory, programs, topologies
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.utils.files import replace_file

ROOT = pathlib.Path(__file__).parents[1]
_GIB = 2**30


def setup(work: Work) -> None:
  """Random weights with the built-in tokenizer, and what the machine is."""
  model = Qwen(work.shape, rngs=nnx.Rngs(work.seed))
  save_model(work.checkpoint, model, work.shape, 'bfloat16', tokenizer_dir=presets.resolve('tiny', ''))
  limit = (jax.devices()[0].memory_stats() or {}).get('bytes_limit', 0)
  work.record(hardware() | {'backend': jax.default_backend(), 'device_memory_gib': limit / _GIB})


def decode(work: Work) -> None:
  """The sampler with each kernel for the attention to the cache, with the flags of this process."""
  dtype = compute_dtype()
  model = load_model(work.checkpoint, dtype=dtype, param_dtype=dtype)
  accelerator_decode.time_kernels(model, work.sizes.decode, work.peak_bandwidth, work.record)


def transformers(work: Work) -> None:
  """The same as `decode`, by `transformers`."""
  if not has_torch():
    work.record({'left_out': 'PyTorch is not installed'})
    return
  work.record(accelerator_decode.time_transformers(work.checkpoint, work.sizes.decode))


def main_job(work: Work) -> None:
  """A run of configs/frozenlake_ppo.py by `main.py`, in a process of its own; `quick` plays fewer levels."""
  with tempfile.TemporaryDirectory() as workdir:
    command = [sys.executable, 'main.py', '--config=configs/frozenlake_ppo.py', f'--workdir={workdir}']
    command += [f'--config.num_iterations={work.sizes.iterations}', f'--config.seed={work.seed}']
    if work.quick:
      command += ['--config.train.groups=32', '--config.eval.groups=32']
    start = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    wall, lines = time.monotonic() - start, read_metrics(workdir)
  tested = [line for line in lines if 'val-env/success' in line]
  steps = [line['timing_s/step'] for line in lines if 'timing_s/step' in line]
  work.record({
    'iterations': work.sizes.iterations,
    'wall_s': wall,
    'median_iteration_s': statistics.median(steps),
    'sampled': [tested[0]['val-env/FrozenLake/success'], tested[-1]['val-env/FrozenLake/success']],
    'greedy': [tested[0]['val-greedy/FrozenLake/success'], tested[-1]['val-greedy/FrozenLake/success']],
    'optimal': tested[-1]['val-env/FrozenLake/optimal'],
    'largest_logprob_gap': max(line.get('rollout/logprob_gap_max', 0.0) for line in lines),
  })  # fmt: skip


def run_config(work: Work) -> ConfigDict:
  """The config that `plan_memory` and `plan_compiler` plan and `iteration` runs; random weights rarely end a reply."""
  config = frozenlake_ppo.get_config('' if work.quick else 'qwen2.5-0.5b')
  config.model.path, config.seed = work.checkpoint, work.seed
  if work.quick:
    config.train.groups, config.train.group_size, config.eval.groups = 4, 4, 4
    config.optimizer.mini_batch_size, config.optimizer.micro_batch_size = 8, 8
    config.agent.max_response_tokens, config.envs.FrozenLake.max_turns = 8, 2
  config.plan.reply_tokens = config.plan.longest_reply = config.agent.max_response_tokens
  return config


def plan_memory(work: Work) -> None:
  """The memory that `--mode=plan` predicts for `iteration`, from programs for CPU; GiB by phase."""
  config = run_config(work)
  config.plan.memory_gb = (work.chip.hbm_bytes if work.chip else CHIPS['h100'].hbm_bytes) / _GIB
  memory.use_cpu_devices(1)
  check_config(config, weights=False)
  found = memory.estimate(memory.with_micro_batch_size(config), {})
  work.record({'memory_gib': {phase: found.total(phase) / _GIB for phase in found.phases}, 'fits': found.fits})


def plan_compiler(work: Work) -> None:
  """What the compiler of the chip estimates for `iteration`: GiB by phase, seconds by part."""
  name = next((f'{name}:1' for name, chip in CHIPS.items() if chip == work.chip and '1' in chip.shapes), '')
  problem = topologies.missing(work.chip.platform) if name else 'the plan does not know this device'
  if problem:
    work.record({'left_out': problem})
    return
  topology, config = topologies.parse(name), run_config(work)
  topologies.prepare(topology)
  memory.use_cpu_devices(1)
  config.plan.topology = name
  check_config(config, weights=False)
  run = programs.make_run(config, topologies.devices(topology))
  costs = [estimate.measure(program, topology) for program in programs.programs_of(run)]
  found = estimate.estimate_of(run, topology, costs)
  work.record({
    'topology': name,
    'memory_gib': {phase: size / _GIB for phase, size in found.memory.items()},
    'seconds': {part: x.total for part, x in found.parts.items()},
    'iteration_s': found.iteration,
    'sampled_tokens': found.sampled,
    'refused': [x.failure for x in costs if x.failure],
  })  # fmt: skip


def iteration(work: Work) -> None:
  """Two iterations in this process: the first compiles, the second is 'timed'."""
  config = run_config(work)
  policy = build.load_policy(config)
  trainer = build.make_trainer(config, policy)
  state = trainer.init()
  size = sum(x.size for x in jax.tree.leaves(state.params))
  recomputed = trainer.settings.loss.scoring.remat.choices[0][0] == 'layers'
  compiling: list[float] = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compiling.append(seconds) if event.endswith('backend_compile_duration') else None
  )
  for name in ('first', 'timed'):
    compiling.clear()
    clock, peaks = [time.perf_counter()], []

    def mark(clock=clock, peaks=peaks):
      clock.append(time.perf_counter())
      peaks.append((jax.devices()[0].memory_stats() or {}).get('peak_bytes_in_use', 0) / _GIB)

    rollout, selection = trainer.collect(state)
    mark()
    batch, metrics = trainer.estimate(state, selection)
    mark()
    state, more = trainer.update(state, batch, selection)
    jax.block_until_ready(state.trained)
    mark()
    seconds = np.diff(clock)
    tokens = int(rollout.trajectory.length.sum()) * config.algorithm.ppo_epochs
    # Operations for each weight and token: 2 forward and 4 backward. Attention is not counted, and what rows share goes
    # through the model once.
    computed = tokens * (1 - more.get('perf/shared_tokens', 0.0))
    used = work.peak_flops and 6 * size * computed / work.peak_flops / seconds[2]
    work.record({name: {
      'episodes': len(rollout.episodes),
      'timeline_tokens': tokens,
      'computed_tokens': computed,
      'sampled_tokens': rollout.tokens_sampled,
      'seconds': dict(zip(('rollout', 'advantages', 'update'), seconds.tolist(), strict=True)),
      'compile_s': sum(compiling),
      'sampled_tokens_per_s': rollout.tokens_sampled / seconds[0],
      'update_tokens_per_s': tokens / seconds[2],
      'update_mfu': used,
      'update_mfu_with_recomputation': used and used * (8 / 6 if recomputed else 1),
      'peak_memory_gib_until': dict(zip(('rollout', 'advantages', 'update'), peaks, strict=True)),
      'logprob_gap_max': more.get('rollout/logprob_gap_max'),
      'entropy': more['actor/entropy'],
      'grad_norm': more['actor/grad_norm'],
      'finite': bool(np.all(np.isfinite([x for x in (metrics | more).values() if isinstance(x, float)]))),
    }, 'parameters': size, 'attention': policy.model.policy.attention.implementation})  # fmt: skip


WORKERS = {
  'setup': setup,
  'parity': parity,
  'attention': attention,
  'decode': decode,
  'transformers': transformers,
  'plan_memory': plan_memory,
  'plan_compiler': plan_compiler,
  'iteration': iteration,
  'main_job': main_job,
}


def main() -> None:
  name, out, settings = sys.argv[1:]
  results: dict[str, Any] = {}

  def record(found: dict[str, Any]) -> None:
    results.update(found)
    replace_file(out, json.dumps(results, default=float))

  try:
    WORKERS[name](Work(**json.loads(settings), record=record))
  except BaseException as e:
    record({'error': accelerator_decode.one_line_of(e)})
    raise


if __name__ == '__main__':
  main()
