"""`--mode=plan`: predicts the memory per device of a run, without its weights and on any machine.

The memory of weights, optimiser state and cache follows exactly from shapes and layout. The memory of activations is
read from the programs: they are compiled ahead of time for as many CPU devices as the planned machine has.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.language_model import LanguageModel, make_sampler, param_state
from ragen_jax.config.checks import check_config, check_plan
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import row_sharding, row_shards, tree_shardings
from ragen_jax.models import lora, presets
from ragen_jax.models.attention import EINSUM
from ragen_jax.models.attention_choice import choose_attention
from ragen_jax.models.checkpoint.config import trunk_config
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.runs.config_fields import select
from ragen_jax.sampling.capacity import bytes_per_device
from ragen_jax.sampling.draw import PLAIN
from ragen_jax.training.batch_sizes import micro_batch_size
from ragen_jax.training.batches import MiniBatch, abstract_mini_batch
from ragen_jax.training.memory import USABLE
from ragen_jax.training.state import TrainState
from ragen_jax.training.trainer import Trainer
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.sizes import round_up

# Upper limit for the number of accepted changes in `fit`.
_MAX_CHANGES = 24
_GIB = 2**30
# The fields of the `-lora` variant of a config that affect memory.
_ADAPTERS = {'lora.rank': 64, 'model.param_dtype': 'bfloat16'}

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


def plan(config: ConfigDict, out: TextIO) -> None:
  """Writes a table of the memory per device, whether it fits, and if not, changes of the config with which it fits.

  Args:
    config: the config of the run; `config.plan` describes the machine.
    out: the stream to write to.

  Raises:
    UserError: a field has a value that is not allowed.
  """
  check_plan(config)
  use_cpu_devices(config.plan.devices)
  check_config(config, weights=False)
  config = with_micro_batch_size(config)
  compiled: dict[Any, int] = {}
  found = estimate(config, compiled)
  _write(config, found, out)
  if found.fits:
    return
  changes, changed, better = fit(config, found, compiled)
  flags = _flags(changes)
  if better.fits:
    out.write(f'It would fit with\n  {flags}\n\n')
    _write(changed, better, out)
    return
  kept = sum(size for name, size in better.phases['update'].items() if name != 'activations')
  # A power of two, which divides the dimensions of the models.
  more = 1 << (math.ceil(config.plan.devices * kept / better.limit) - 1).bit_length()
  if flags:
    out.write(f'Nor with {flags}: {better.total(better.worst) / _GIB:.1f} GiB in the {better.worst}.\n')
  out.write(
    f'Take more devices (plan.devices; for the weights and the optimiser alone {more}, with mesh.fsdp={more}), '
    'more memory, a smaller model or a shorter agent.max_context.\n'
  )
  if not config.lora.rank:
    lighter = changed.copy_and_resolve_references()
    lighter.update_from_flattened_dict(_ADAPTERS)
    more_changes, _, lighter_plan = fit(lighter, estimate(lighter, compiled), compiled)
    if lighter_plan.fits:
      out.write(
        f'Or train adapters in place of all weights: {lighter_plan.total(lighter_plan.worst) / _GIB:.1f} GiB with\n'
        f'  {_flags(changes | _ADAPTERS | more_changes)}\n'
      )


def with_micro_batch_size(config: ConfigDict) -> ConfigDict:
  """The config with the micro-batches that a run would choose on the planned machine."""
  policy, chosen = abstract_policy(config, jnp.float32), config.copy_and_resolve_references()
  found = build.update_memory(config, policy, dtype=_compute_dtype(config))
  limit = USABLE * config.plan.memory_gb * _GIB
  chosen.optimizer.micro_batch_size = micro_batch_size(build.size_settings(config, policy), found, limit)
  return chosen


def _flags(changes: dict[str, Any]) -> str:
  return ' '.join(f'--config.{name}={value}' for name, value in changes.items())


def estimate(config: ConfigDict, compiled: dict[Any, int]) -> MemoryPlan:
  """Predicts the memory of a run on a mesh over all devices of this process.

  Args:
    config: the config of the run; the weights of its model are not needed.
    compiled: bytes of activations by the fields that determine them. Missing entries are compiled and added.
  """
  policy = abstract_policy(config, jnp.float32)
  trainer = build.make_trainer(config, policy)
  state = abstract_state(trainer)
  params, opt_state = state.params, state.opt_state
  mesh, low = policy.mesh, _compute_dtype(config).itemsize
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
    sampler_state = policy.sampler.abstract_state(_rows(config, phase), columns)
    rows[phase] = _rows(config, phase) // row_shards(mesh)
    phases[phase]['key/value cache'] = cache = bytes_per_device(sampler_state.cache) * low // 4
    # Between turns, the old and the new cache of one layer are held at the same time.
    phases[phase]['one layer of it twice'] = cache // policy.sampler.cfg.num_layers
  found = MemoryPlan(phases, limit, sum(x.size for x in jax.tree.leaves(params)), rows, columns)
  for phase, kinds in phases.items():
    # A phase that does not fit without its activations is not compiled.
    if found.total(phase) <= limit:
      key = _shaped_by(config, phase)
      if key not in compiled:
        compiled[key] = _activations(config, trainer, state, phase)
      kinds['activations'] = compiled[key]
  return found


def _shaped_by(config: ConfigDict, phase: str) -> tuple:
  """The fields that determine a phase's programs, among those that `fit` and the advice to use adapters change."""
  if phase == 'update':
    rows = select(config.to_dict(), 'memory')
  else:
    rows = _rows(config, phase)
  weights = (config.lora.rank, config.model.param_dtype)
  return ('update' if phase == 'update' else 'rollout', rows, weights, select(config.to_dict(), 'devices'))


def _rows(config: ConfigDict, phase: str) -> int:
  """Episodes of a rollout or an evaluation."""
  section = config.eval if phase == 'evaluation' else config.train
  return section.groups * section.group_size


def _activations(config: ConfigDict, trainer: Trainer, state: TrainState, phase: str) -> int:
  """Bytes per device that the largest program of a phase needs in addition to its arguments and results."""
  sampler = trainer.model.sampler
  if phase == 'update':
    lowered = trainer.learner.lower(state, abstract_batch(config, trainer, config.optimizer.micro_batch_size))
  else:
    lowered = sampler.lower(
      state.params,
      sampler.abstract_state(_rows(config, phase), cache_columns(config)),
      width=prompt_columns(config),
      columns=min(config.agent.decode_chunk, config.agent.max_response_tokens),
      sampling=PLAIN,
    )
  return max(temporary_bytes(x) for x in lowered.values())


def temporary_bytes(lowered: jax.stages.Lowered) -> int:
  """Bytes per device that a program needs in addition to its arguments and results."""
  return lowered.compile().memory_analysis().temp_size_in_bytes


def abstract_policy(config: ConfigDict, dtype: Any) -> LanguageModel:
  """The policy with abstract weights of type `dtype` in computations.

  Its tokenizer is that of the built-in model, since only the chat format affects the programs.
  """
  mesh = make_mesh(**config.mesh)
  shape = presets.shape(config.model.preset, config.model.path)
  # CPUs, which stand for the planned devices, compile no kernels of accelerators. 'einsum' needs the most memory.
  attention = EINSUM
  if mesh.devices.flat[0].platform != 'cpu':
    attention = choose_attention(config.model.attention, shape, dtype, mesh)
  adapters = build.lora_config(config)

  def make():
    rngs = nnx.Rngs(0)
    common = dict(dtype=dtype, attention=attention, rngs=rngs)
    policy = Qwen(shape, param_dtype=jnp.dtype(config.model.param_dtype), **common)
    if adapters is not None:
      lora.attach(policy, adapters, rngs)
    critic = Qwen(trunk_config(shape), **common) if config.model.separate_critic else None
    for model in (policy, critic):
      if model is not None and mesh.size > 1:
        model.activation_sharding = row_sharding(mesh)
    return ActorCritic(policy, critic)

  model = nnx.eval_shape(make)
  directory = presets.resolve(presets.TINY, '')
  tokenizer = ChatTokenizer(directory)
  return LanguageModel(directory, model, tokenizer, make_sampler(model, tokenizer, mesh), mesh)


def abstract_state(trainer: Trainer) -> TrainState:
  """Shapes, types and layout of the arrays of `Trainer.init`, without the reference."""
  params = param_state(trainer.model.model)
  trained, frozen = lora.partition(_laid_out(params, tree_shardings(params, trainer.model.mesh)))
  opt_state = jax.eval_shape(trainer.learner.optimizer.init, trained)
  return TrainState(trained, frozen, _laid_out(opt_state, tree_shardings(opt_state, trainer.model.mesh)))


def _laid_out(tree: Any, shardings: Any) -> Any:
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def abstract_batch(config: ConfigDict, trainer: Trainer, rows: int) -> MiniBatch:
  """A micro-batch of `rows` rows of the maximum length."""
  agent, a = config.agent, config.algorithm
  sampled = agent.max_response_tokens * (trainer.proxy.limits.max_turns if agent.context == 'full' else 1)
  if not (a.mask_loss and a.mask_advantages):
    sampled = agent.max_context
  return abstract_mini_batch(
    rows,
    round_up(agent.max_context, config.length_step),
    round_up(min(sampled, agent.max_context), max(config.length_step // 2, 1)),
    reference=trainer.settings.reference,
    importance=a.tis_cap > 0,
    sharding=row_sharding(trainer.model.mesh),
  )


def prompt_columns(config: ConfigDict) -> int:
  """Columns of the longest observation, after rounding."""
  agent = config.agent
  room = agent.max_context - agent.max_response_tokens
  tokens = min(config.plan.prompt_tokens, room) if agent.context == 'full' else room
  return round_up(tokens, max(config.length_step // 4, 1))


def cache_columns(config: ConfigDict) -> int:
  """Maximum number of columns of the cache: observations are rounded up before the columns of the reply are added."""
  step = config.length_step
  return round_up(config.agent.max_context + max(step // 4, 1) - 1, step)


def _types(tree: Any) -> str:
  return ' and '.join(sorted({np.dtype(x.dtype).name for x in jax.tree.leaves(tree) if x.size > 1}))


def _compute_dtype(config: ConfigDict) -> np.dtype:
  """The type of computations on the planned machine, assumed to have accelerators."""
  return np.dtype(jnp.bfloat16 if config.model.dtype == 'auto' else config.model.dtype)


def fit(config: ConfigDict, found: MemoryPlan, compiled: Any) -> tuple[dict[str, Any], ConfigDict, MemoryPlan]:
  """Changes one field at a time, each time for the phase with the largest total, until the run fits.

  Args:
    config: the config of the run.
    found: its plan.
    compiled: see `estimate`.

  Returns:
    The changed fields, the config with them, and its plan. The plan does not fit if no candidate was left.
  """
  changes: dict[str, Any] = {}
  for _ in range(_MAX_CHANGES):
    if found.fits:
      break
    for change in _candidates(config, found.worst):
      tried = config.copy_and_resolve_references()
      tried.update_from_flattened_dict(change)
      try:
        check_config(tried, weights=False)
        after = estimate(tried, compiled)
      except UserError:
        continue
      # Activations count only if they were also compiled for the plan before the change.
      uncounted = 0 if 'activations' in found.phases[found.worst] else after.phases[found.worst].get('activations', 0)
      if after.total(found.worst) - uncounted < found.total(found.worst):
        config, changes, found = tried, changes | change, after
        break
    else:
      break
  return changes, config, found


def _candidates(config: ConfigDict, phase: str) -> Iterator[dict[str, Any]]:
  """Changes of fields that reduce a phase's memory; changes that affect learning come last."""
  o, mesh = config.optimizer, make_mesh(**config.mesh)
  if phase == 'update':
    if not config.model.remat:
      yield {'model.remat': True}
    if not 0 < config.model.logits_chunk <= 1024:
      yield {'model.logits_chunk': 1024}
    if o.micro_batch_size % 2 == 0:
      yield {'optimizer.micro_batch_size': o.micro_batch_size // 2}
  elif phase == 'evaluation':
    if config.eval.groups % 2 == 0 and not config.eval.tag_groups:
      yield {'eval.groups': config.eval.groups // 2}
    if config.eval.group_size % 2 == 0:
      yield {'eval.group_size': config.eval.group_size // 2}
  if mesh.shape['data'] % 2 == 0:
    yield {'mesh.data': mesh.shape['data'] // 2, 'mesh.fsdp': mesh.shape['fsdp'] * 2}
  if phase == 'rollout' and config.train.groups % 2 == 0 and not config.train.tag_groups:
    yield {'train.groups': config.train.groups // 2}


def _write(config: ConfigDict, found: MemoryPlan, out: TextIO) -> None:
  """Writes the table and whether it fits."""
  mesh, p = make_mesh(**config.mesh), config.plan
  model = config.model.path or config.model.preset
  devices = f'{p.devices} device{"s" * (p.devices > 1)} of {p.memory_gb:g} GiB'
  arranged = ', '.join(f'{axis}={size}' for axis, size in mesh.shape.items())
  out.write(f'{model}: {found.parameters / 1e6:.1f}M parameters on {devices} ({arranged})\n\n')
  names = list(dict.fromkeys(name for kinds in found.phases.values() for name in kinds))
  width = max(map(len, [*names, 'GiB per device']))
  out.write(f'{"GiB per device":{width}}' + ''.join(f'{phase:>12}' for phase in found.phases) + '\n')
  for name in names:
    cells = []
    for phase, kinds in found.phases.items():
      unknown = name == 'activations' and name not in kinds and found.total(phase) > found.limit
      cells.append('more' if unknown else f'{kinds[name] / _GIB:.2f}' if name in kinds else '-')
    out.write(f'{name:{width}}' + ''.join(f'{cell:>12}' for cell in cells) + '\n')
  out.write(f'{"together":{width}}' + ''.join(f'{found.total(x) / _GIB:12.2f}' for x in found.phases) + '\n\n')
  rows = found.cache_rows
  out.write(
    f'Update: {config.optimizer.micro_batch_size // row_shards(mesh)} rows of '
    f'{round_up(config.agent.max_context, config.length_step)} tokens a device at once. Caches: {rows["rollout"]} rows '
    f'(evaluation: {rows["evaluation"]}) of {found.columns} columns a device, and observations of up to '
    f'{prompt_columns(config)} tokens.\n'
    'Activations are those of the programs compiled for CPU in float32, which bounds bfloat16 from above; an '
    "accelerator's compiler orders and fuses otherwise. All else is counted exactly.\n"
  )
  most = found.total(found.worst) / _GIB
  verdict = 'It fits' if found.fits else 'It does not fit'
  out.write(
    f'{verdict}: up to {most:.1f} GiB in the {found.worst}, of {found.limit / _GIB:.1f} that may be filled '
    f'({USABLE:.0%} of {p.memory_gb:g}).\n'
  )
  if found.fits and most > 0.75 * p.memory_gb:
    out.write('On GPUs set XLA_CLIENT_MEM_FRACTION=0.95: JAX takes three quarters of the memory by itself.\n')
  out.write('\n')
