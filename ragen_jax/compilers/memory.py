"""The memory per device of a run, from shapes and layout and from its programs compiled for CPU.

The memory of weights, optimiser state and cache follows exactly from shapes and layout. The memory of activations is
read from the programs: they are compiled ahead of time in float32 for as many CPU devices as the planned machine has.
For bfloat16, all of it but logits and the gradient of the head is counted with half its bytes. (CPU programs in
bfloat16 would tell nothing: they compute products in float32 and hold both.)
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.compilers.abstract import (
  abstract_batch,
  abstract_policy,
  abstract_state,
  bytes_per_device,
  cache_columns,
  compute_dtype,
  prompt_columns,
  rollout_rows,
  temporary_bytes,
)
from ragen_jax.distributed.sharding import row_shards
from ragen_jax.runs.config_fields import select
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.training.state import TrainState
from ragen_jax.training.trainer import Trainer

# Share of a device's memory that a run may fill. The rest is for the runtime, its libraries and fragmentation.
USABLE = 0.9
_GIB = 2**30

# By default, XLA's CPU compiler schedules for parallel speed; these flags make it schedule for memory, as compilers for
# accelerators do. The programs are never run, so their machine code is not optimised.
_XLA_FLAGS = (
  '--xla_cpu_enable_concurrency_optimized_scheduler=false',
  '--xla_backend_optimization_level=0',
  '--xla_llvm_disable_expensive_passes=true',
)


@dataclasses.dataclass
class MemoryPlan:
  """Predicted memory of a run, in bytes per device.

  Attributes:
    phases: for 'update', 'rollout' and 'evaluation', the bytes of each kind of array by name.
    limit: bytes that a device may hold.
    parameters: number of parameters of the model.
    cache_rows: rows of the cache on one device, in 'rollout' and 'evaluation'.
    columns: columns of the cache.
  """

  phases: dict[str, dict[str, int]]
  limit: float
  parameters: int
  cache_rows: dict[str, int]
  columns: int

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


def estimate(config: ConfigDict, compiled: dict[Any, dict[str, int]]) -> MemoryPlan:
  """Predicts the memory of a run on a mesh over all devices of this process.

  Args:
    config: the config of the run; the weights of its model are not needed.
    compiled: temporary bytes of programs in float32 by name, by the fields that determine them. Missing entries are
      compiled and added.
  """
  policy = abstract_policy(config, jnp.float32)
  trainer = build.make_trainer(config, policy)
  state = abstract_state(trainer)
  params, opt_state = state.params, state.opt_state
  mesh, low = policy.mesh, compute_dtype(config).itemsize
  limit = USABLE * config.plan.memory_gb * _GIB
  kept = {f'weights ({_types(params)})': bytes_per_device(params), "optimiser's state": bytes_per_device(opt_state)}
  if trainer.settings.reference:
    kept['reference weights'] = bytes_per_device(state.trained['policy'])
  phases = {'update': dict(kept), 'rollout': dict(kept), 'evaluation': dict(kept)}
  phases['update']['gradients'] = bytes_per_device(state.trained)
  if low < 4:

    def copied(tree):
      return bytes_per_device([x for x in jax.tree.leaves(tree) if x.dtype == jnp.float32]) * low // 4

    # Decoding casts all weights once, before its loop. The update casts the weights of a layer when it runs the layer;
    # without remat, the cast weights are kept for the backward pass.
    phases['rollout']['weights as computed with'] = copied(params['policy'])
    phases['evaluation']['weights as computed with'] = copied(params['policy'])
    if not config.model.remat:
      phases['update']['weights as computed with'] = copied(
        {name: part for name, part in params.items() if name != 'value_head'}
      )
  columns, rows = cache_columns(config), {}
  for phase in ('rollout', 'evaluation'):
    sampler_state = policy.sampler.abstract_state(rollout_rows(config, phase), columns)
    rows[phase] = rollout_rows(config, phase) // row_shards(mesh)
    phases[phase]['key/value cache'] = bytes_per_device(sampler_state.cache) * low // 4
  found = MemoryPlan(phases, limit, sum(x.size for x in jax.tree.leaves(params)), rows, columns)
  for phase, kinds in phases.items():
    # A phase that does not fit without its activations is not compiled.
    if found.total(phase) <= limit:
      key = shaped_by(config, phase)
      if key not in compiled:
        compiled[key] = _temporary(config, trainer, state, phase)
      kinds['activations'] = _activations(config, trainer, phase, compiled[key], kinds)
  return found


def shaped_by(config: ConfigDict, phase: str) -> tuple:
  """The fields that determine a phase's programs, among those that `fit` and the advice to use adapters change."""
  if phase == 'update':
    rows = select(config.to_dict(), 'memory')
  else:
    rows = rollout_rows(config, phase)
  weights = (config.lora.rank, config.model.param_dtype)
  return ('update' if phase == 'update' else 'rollout', rows, weights, select(config.to_dict(), 'devices'))


def _activations(
  config: ConfigDict, trainer: Trainer, phase: str, temporary: dict[str, int], kinds: dict[str, int]
) -> int:
  """Bytes per device of the largest program of a phase, besides the `kinds` that are counted already.

  Args:
    config: the run's.
    trainer: of the config.
    phase: of the programs.
    temporary: their bytes in float32.
    kinds: bytes of the phase by kind.
  """
  cfg, mesh = trainer.model.sampler.cfg, trainer.model.mesh
  low, rows = compute_dtype(config).itemsize, rollout_rows(config, phase)
  vocabulary = cfg.vocab_size // mesh.shape['tensor']
  wide = 0
  if phase == 'update':
    batch = abstract_batch(config, trainer, config.optimizer.micro_batch_size)
    rows = min(config.model.logits_chunk or batch.columns.size, batch.columns.size)
    if not config.lora.rank:
      wide = 4 * vocabulary * cfg.hidden_size // mesh.shape['fsdp']
  # Logits, and their gradient or what is drawn from.
  wide += 2 * 4 * rows * vocabulary // row_shards(mesh)
  found = {name: min(wide, size) + max(size - wide, 0) * low // 4 for name, size in temporary.items()}
  if phase == 'update':
    return max(found.values(), default=0)
  # Decoding alone has the weights as it computes with them, and between turns one layer's cache is there twice.
  copies = kinds.get('weights as computed with', 0)
  found['arrange'] = kinds['key/value cache'] // cfg.num_layers
  return max(0, *(size - (0 if name == 'decode' else copies) for name, size in found.items()))


def _temporary(config: ConfigDict, trainer: Trainer, state: TrainState, phase: str) -> dict[str, int]:
  """Bytes per device that each program of a phase needs in addition to its arguments and results."""
  sampler = trainer.model.sampler
  if phase == 'update':
    lowered = trainer.learner.lower(state, abstract_batch(config, trainer, config.optimizer.micro_batch_size))
  else:
    lowered = sampler.lower(
      state.params,
      sampler.abstract_state(rollout_rows(config, phase), cache_columns(config)),
      width=prompt_columns(config),
      max_new=config.agent.max_response_tokens,
      sampling=Sampling(),
    )
  return {name: temporary_bytes(x) for name, x in lowered.items()}


def _types(tree: Any) -> str:
  return ' and '.join(sorted({np.dtype(x.dtype).name for x in jax.tree.leaves(tree) if x.size > 1}))
