"""`--mode=plan`: predicts what a run needs of a machine, without its weights and without the machine.

Without `plan.topology` it predicts the memory per device, from programs compiled for CPU. With it, the compiler of the
chip says memory, time and what would be better (`plan_report`).
"""

from __future__ import annotations

import logging
import math
from typing import Any, TextIO

from ml_collections import ConfigDict

from ragen_jax.config.checks import check_config, check_plan
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import row_shards
from ragen_jax.modes.plan_changes import fit
from ragen_jax.modes.plan_report import report, size_in_words
from ragen_jax.planning import memory, program_list, programs, topologies
from ragen_jax.planning.abstract import prompt_columns, visual_columns
from ragen_jax.planning.host_fit import ADAPTERS
from ragen_jax.planning.memory import MemoryPlan
from ragen_jax.training.memory import USABLE
from ragen_jax.utils.sizes import GIB, next_power

_log = logging.getLogger(__name__)


def plan(config: ConfigDict, out: TextIO) -> None:
  """Writes what a run needs of a machine: of `plan.topology`, or else of `plan.devices` devices.

  For the latter, a table of the memory per device, whether it fits, and if not, changes of the config with which it
  fits. Raises UserError if a field has a value that is not allowed.
  """
  check_plan(config)
  if config.plan.topology:
    topology = topologies.parse(config.plan.topology)
    problem = topologies.missing(topology.chip.platform)
    if not problem:
      topologies.prepare(topology)
      memory.use_cpu_devices(topology.size)
      check_config(config, weights=False, played=())
      report(config, topology, out)
      return
    out.write(f'plan.topology={topology.name!r}: {problem}\nUntil then, the estimate from programs for CPU:\n\n')
    machine = {'plan.topology': '', 'plan.devices': topology.size, 'plan.memory_gb': topology.chip.hbm_bytes / GIB}
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(machine)
  memory.use_cpu_devices(config.plan.devices)
  check_config(config, weights=False, played=())
  _log.info('compiling programs to measure their memory; with a pretrained model this takes minutes')
  config = memory.with_micro_batch_size(config)
  compiled: dict[Any, int] = {}
  found = memory.estimate(config, compiled)
  _write(config, found, out)
  if found.fits:
    return
  out.flush()
  _log.info('searching for changes with which it fits; their programs are compiled, which takes minutes, too')
  changes, changed, better = fit(config, found, compiled)
  flags = _flags(changes)
  if better.fits:
    out.write(f'It would fit with\n  {flags}\n\n')
    _write(changed, better, out)
    return
  kept = sum(size for name, size in better.phases['update'].items() if name != 'activations')
  # A power of two, which divides the dimensions of the models.
  more = next_power(math.ceil(config.plan.devices * kept / better.limit))
  if flags:
    out.write(f'Nor with {flags}: {_most(better)}.\n')
  out.write(
    f'Take more devices (plan.devices; for the weights and the optimiser alone {more}, with mesh.fsdp={more}), '
    'more memory, a smaller model or a shorter agent.max_context.\n'
  )
  if not config.lora.rank:
    out.flush()
    _log.info('searching for changes with which adapters fit')
    lighter = changed.copy_and_resolve_references()
    lighter.update_from_flattened_dict(ADAPTERS)
    more_changes, _, lighter_plan = fit(lighter, memory.estimate(lighter, compiled), compiled)
    if lighter_plan.fits:
      out.write(
        f'Or train adapters in place of all weights: {_most(lighter_plan)} with\n'
        f'  {_flags(changes | ADAPTERS | more_changes)}\n'
      )


def _flags(changes: dict[str, Any]) -> str:
  return ' '.join(f'--config.{name}={value}' for name, value in changes.items())


def _most(found: MemoryPlan) -> str:
  """The memory of the largest phase, in words: "at least" if a phase exceeds the limit without its activations."""
  least = '' if all('activations' in kinds for kinds in found.phases.values()) else 'at least '
  return f'{least}{found.total(found.worst) / GIB:.1f} GiB in the {found.worst}'


def _write(config: ConfigDict, found: MemoryPlan, out: TextIO) -> None:
  """Writes the table and whether it fits."""
  mesh, p = make_mesh(**config.mesh), config.plan
  model = config.model.path or config.model.preset
  devices = f'{p.devices} device{"s" * (p.devices > 1)} of {p.memory_gb:g} GiB'
  arranged = ', '.join(f'{axis}={size}' for axis, size in mesh.shape.items())
  out.write(f'{model}: {size_in_words(config, found.parameters)} on {devices} ({arranged})\n\n')
  names = list(dict.fromkeys(name for kinds in found.phases.values() for name in kinds))
  if 'activations' not in names:  # of no phase, because none has room for the rest
    names.append('activations')
  width = max(map(len, [*names, 'GiB per device']))
  out.write(f'{"GiB per device":{width}}' + ''.join(f'{phase:>12}' for phase in found.phases) + '\n')
  for name in names:
    cells = []
    for phase, kinds in found.phases.items():
      unknown = name == 'activations' and name not in kinds and found.total(phase) > found.limit
      cells.append('more' if unknown else f'{kinds[name] / GIB:.2f}' if name in kinds else '-')
    out.write(f'{name:{width}}' + ''.join(f'{cell:>12}' for cell in cells) + '\n')
  out.write(f'{"together":{width}}' + ''.join(f'{found.total(x) / GIB:12.2f}' for x in found.phases) + '\n\n')
  rows, (micro, width, _) = found.cache_rows, found.micro_batch
  bins, seen = micro // row_shards(mesh), visual_columns(config)
  images = f', {seen} of them for images' if seen else ''
  out.write(
    f'Update: {bins} {"bin" if config.optimizer.packing else "row"}{"s" * (bins > 1)} of '
    f'{width} tokens a device at once. Caches: {rows["rollout"]} row{"s" * (rows["rollout"] > 1)} '
    f'(evaluation: {rows["evaluation"]}) of {found.columns} columns a device, and calls that feed '
    f'up to {prompt_columns(config)} tokens of a prompt{images}.\n'
    'Activations are those of the programs compiled for CPU in float32, which bounds bfloat16 from above; an '
    "accelerator's compiler orders and fuses otherwise (plan.topology asks it). All else is counted exactly.\n"
  )
  most = found.total(found.worst) / GIB
  verdict = 'It fits: up to' if found.fits else 'It does not fit:'
  out.write(
    f'{verdict} {_most(found)}, of {found.limit / GIB:.1f} that may be filled ({USABLE:.0%} of {p.memory_gb:g}).\n'
  )
  if found.fits and most > 0.75 * p.memory_gb:
    out.write('On GPUs set XLA_CLIENT_MEM_FRACTION=0.95: JAX takes three quarters of the memory by itself.\n')
  run = programs.make_run(config)
  listed = program_list.programs(config, run.trainer, run.sampling.rows)
  out.write(f'Programs: {program_list.describe(listed, images=bool(seen))}.\n\n')
