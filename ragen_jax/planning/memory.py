"""The memory per device of a run, from shapes and layout and from its programs compiled for CPU.

The memory of weights, optimiser state and cache follows exactly from shapes and layout. The memory of activations is
read from the programs: they are compiled ahead of time in float32 for as many CPU devices as the planned machine has,
which bounds bfloat16 from above. (CPU programs in bfloat16 would tell nothing: they compute products in float32 and
hold both.)
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.distributed.sharding import row_shards
from ragen_jax.models import int8
from ragen_jax.planning.abstract import (
  SamplerPlan,
  abstract_batch,
  abstract_policy,
  abstract_state,
  cache_columns,
  chunk_columns,
  compute_dtype,
  micro_batches,
  prompt_columns,
  reference_bytes,
  sampler_images,
  sampler_plan,
  sampler_shapes,
  temporary_bytes,
  usable_bytes,
)
from ragen_jax.planning.lowering import abstract_rows, lower_gradient, lower_sampler, step_programs
from ragen_jax.planning.serving import server_memory
from ragen_jax.runs.config_fields import select
from ragen_jax.sampling.capacity import bytes_per_device
from ragen_jax.sampling.draw import PLAIN
from ragen_jax.sampling.kv_cache import with_columns
from ragen_jax.training.batch_sizes import micro_batch_size
from ragen_jax.training.state import TrainState
from ragen_jax.training.trainer import Trainer

# By default, XLA's CPU compiler schedules for parallel speed; these flags make it schedule for memory, as compilers for
# accelerators do. The programs are never run, so their machine code is not optimised.
_XLA_FLAGS = (
  '--xla_cpu_enable_concurrency_optimized_scheduler=false',
  '--xla_backend_optimization_level=0',
  '--xla_llvm_disable_expensive_passes=true',
)


@dataclasses.dataclass
class MemoryPlan:
  """Predicted memory of a run, in bytes per device."""

  phases: dict[str, dict[str, int]]  # of 'update', 'rollout' and 'evaluation', bytes of each kind of array by name
  limit: float  # bytes that a device may hold
  parameters: int  # number of parameters of the model
  cache_rows: dict[str, int]  # of one device, in 'rollout' and 'evaluation'; at most the episodes
  columns: int  # of the cache
  micro_batch: tuple[int, int, int] = (0, 0, 0)  # rows or bins, columns, and sampled tokens of each

  def total(self, phase: str) -> int:
    """Total bytes of a phase."""
    return sum(self.phases[phase].values())

  @property
  def worst(self) -> str:
    """The phase with the largest total."""
    return max(self.phases, key=self.total)

  @property
  def fits(self) -> bool:
    """Whether every phase is within the limit."""
    return self.total(self.worst) <= self.limit


def use_cpu_devices(count: int) -> None:
  """Gives this process `count` CPU devices and schedules programs for memory. Call it before any other use of JAX."""
  flags = [f for f in os.environ.get('XLA_FLAGS', '').split() if 'host_platform_device_count' not in f]
  os.environ['XLA_FLAGS'] = ' '.join([*flags, *_XLA_FLAGS])
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', count)


def with_micro_batch_size(config: ConfigDict) -> ConfigDict:
  """The config with the micro-batches that a run would choose on the planned machine."""
  policy, chosen = abstract_policy(config, jnp.float32), config.copy_and_resolve_references()
  found = build.update_memory(config, policy, dtype=compute_dtype(config))
  chosen.optimizer.micro_batch_size = micro_batch_size(build.size_settings(config, policy), found, usable_bytes(config))
  return chosen


def estimate(config: ConfigDict, compiled: dict[Any, int]) -> MemoryPlan:
  """Predicts the memory of a run, with micro-batches chosen, on a mesh over all devices of this process.

  `compiled` has bytes of activations by the fields that determine them. Missing entries are compiled and added.
  """
  policy, as_run = (abstract_policy(config, dtype) for dtype in (jnp.float32, compute_dtype(config)))
  trainer = build.make_trainer(config, policy, limit=lambda: usable_bytes(config))
  state = abstract_state(trainer)
  params, opt_state = state.params, state.opt_state
  limit = usable_bytes(config)
  kept = {f'weights ({_types(params)})': bytes_per_device(params), "optimiser's state": bytes_per_device(opt_state)}
  if trainer.settings.reference:
    kept['reference weights'] = reference_bytes(trainer, state)
  served = server_memory(config, as_run)
  kept |= served
  sampling = sampler_plan(config, as_run, state, sum(kept.values()))
  phases = {'update': dict(kept), 'rollout': dict(kept), 'evaluation': dict(kept)}
  phases['update']['gradients'] = bytes_per_device(trainer.learner.abstract(state.trained))
  low = compute_dtype(config).itemsize
  # The update casts the weights of a layer when it runs the layer; without remat, they are kept for the backward pass.
  if low < 4 and not config.model.remat:
    wide = [x for name, part in params.items() if name != 'value_head' for x in jax.tree.leaves(part)]
    phases['update']['weights as computed with'] = (
      bytes_per_device([x for x in wide if x.dtype == jnp.float32]) * low // 4
    )
  columns, shards = cache_columns(config), row_shards(policy.mesh)
  if served and sampling.copied:
    phases['update']['server: weights'] = sampling.copied
  for phase in ('rollout', 'evaluation'):
    if sampling.copied:
      phases[phase]['weights as computed with'] = sampling.copied
    if served:
      continue
    state_of_rows = abstract_rows(as_run.sampler, sampling.rows[phase], columns)
    columns_of_rows = with_columns(state_of_rows.cache)
    phases[phase]['key/value cache'] = cache = bytes_per_device(columns_of_rows)
    # Between turns, the old and the new cache of one layer are held at the same time.
    phases[phase]['one layer of it twice'] = cache // len(columns_of_rows)
    if states := bytes_per_device(state_of_rows.cache) - cache:
      phases[phase]['states of linear attention'] = states
  rows = {phase: (config.serve.slots if served else n) // shards for phase, n in sampling.rows.items()}
  _, micro = micro_batches(config, trainer, build.batching_settings(config, policy, lambda: limit))
  if as_run.sampler.experts:
    cfg = as_run.sampler.cfg
    column = math.prod(cfg.choices_shape) * cfg.experts.number_type.itemsize
    phases['update']['recorded experts'] = micro[0] // shards * micro[1] * column
    for phase in ('rollout', 'evaluation'):
      own = sampling.rows[phase]
      fed = sampler_shapes(config, own, shards).fed * prompt_columns(config)
      phases[phase]['recorded experts'] = max(own // shards * chunk_columns(config), fed) * column
  found = MemoryPlan(phases, limit, sum(x.size for x in int8.leaves(params)), rows, columns, micro)
  for phase, kinds in phases.items():
    # A phase that does not fit without its activations is not compiled.
    if found.total(phase) <= limit:
      key = shaped_by(config, phase, sampling.rows.get(phase, 0), sampling.gathered)
      if key not in compiled:
        compiled[key] = _activations(config, trainer, state, phase, sampling, micro)
      kinds['activations'] = compiled[key]
  return found


def shaped_by(config: ConfigDict, phase: str, rows: int = 0, gathered: bool = True) -> tuple:
  """What determines a phase's programs, among what `fit` and the advice to use adapters change.

  `rows` of the devices, and whether weights are `gathered`, count in the phases 'rollout' and 'evaluation' only.
  """
  sizes = (*select(config.to_dict(), 'memory'), config.model.remat) if phase == 'update' else (rows, gathered)
  weights = (config.lora.rank, config.model.param_dtype)
  return ('update' if phase == 'update' else 'rollout', sizes, weights, select(config.to_dict(), 'devices'))


def _activations(
  config: ConfigDict,
  trainer: Trainer,
  state: TrainState,
  phase: str,
  sampling: SamplerPlan,
  micro: tuple[int, int, int],
) -> int:
  """Bytes per device that the largest program of a phase needs in addition to its arguments and results."""
  sampler = trainer.model.sampler
  if phase == 'update':
    learner, batch = trainer.learner, abstract_batch(config, trainer, micro)
    step = (program.lower() for program in step_programs(learner, state, batch))
    return max(temporary_bytes(x) for x in (lower_gradient(learner, state, batch), *step))
  rows, shards = sampling.rows[phase], row_shards(trainer.model.mesh)
  lower = functools.partial(
    lower_sampler,
    sampler,
    sampler.abstract_weights(state.params, sampling.gathered),
    abstract_rows(sampler, rows, cache_columns(config)),
    width=prompt_columns(config),
    columns=chunk_columns(config),
    sampling=PLAIN,
    images=lambda fed: sampler_images(config, trainer.model, fed, prompt_columns(config)),
  )
  shapes = sampler_shapes(config, rows, shards)
  _, *parts = shapes.decoded
  lowered = [lower(names=('decode',))['decode'], lower(rows=shapes.fed * shards, names=('extend',))['extend']]
  if parts and config.agent.drop_finished:
    lowered.append(lower(rows=parts[0] * shards)['decode'])
  return max(temporary_bytes(x) for x in lowered)


def _types(tree: Any) -> str:
  return ' and '.join(sorted({np.dtype(x.dtype).name for x in jax.tree.leaves(tree) if x.size > 1}))
