"""What the compiler of a chip says of a run, in words: `--mode=plan` with `plan.topology`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TextIO

import jax
from ml_collections import ConfigDict

from ragen_jax.models import presets
from ragen_jax.modes.plan_changes import candidates
from ragen_jax.planning import estimate, program_list, programs, topologies
from ragen_jax.planning.abstract import visual_columns
from ragen_jax.planning.estimate import Estimate, Measured
from ragen_jax.planning.programs import PlannedRun
from ragen_jax.planning.topologies import Topology
from ragen_jax.training.memory import USABLE
from ragen_jax.utils.sizes import GIB


def report(config: ConfigDict, topology: Topology, out: TextIO) -> None:
  """Compiles the run's programs for a topology and writes what they need; each program as soon as it is compiled.

  The config is checked, and `topologies.prepare` has been called for the topology. Raises UserError if the installed
  compiler does not know the topology, or the mesh does not divide the model.
  """
  devices = topologies.devices(topology)
  run = programs.make_run(config, devices)
  _write_head(run, topology, devices[0].device_kind, out)
  measured = []
  for program in programs.programs_of(run):
    measured.append(estimate.measure(program, topology))
    _write_program(measured[-1], topology, out)
    out.flush()
  found = estimate.estimate_of(run, topology, measured)
  _write_memory(run, found, topology, out)
  _write_time(run, found, topology, measured, out)


def size_in_words(config: ConfigDict, parameters: int) -> str:
  """The number of parameters; of models with experts also what a token needs of them."""
  found, cfg = f'{parameters / 1e6:.1f}M parameters', presets.shape(config.model.preset, config.model.path)
  if cfg.experts is None:
    return found
  active, trunks = cfg.mlp_matrices(active=True), 1 + bool(config.model.separate_critic)
  met = parameters - trunks * (cfg.mlp_matrices() - active)
  operations = 2 * (cfg.mixer_matrices + active + cfg.vocab_size * cfg.hidden_size)
  return f'{found}, of which a token uses {met / 1e6:.1f}M, with {operations / 1e9:.1f} GFLOP to predict the next,'


def _write_head(run: PlannedRun, topology: Topology, kind: str, out: TextIO) -> None:
  c, n = run.config, run.lengths
  parameters = sum(x.size for x in jax.tree.leaves(run.state.params))
  seen = visual_columns(c)
  images = f' ({seen} of each for images)' if seen else ''
  arranged = ', '.join(f'{axis}={size}' for axis, size in run.mesh.shape.items())
  out.write(
    f'{c.model.path or c.model.preset}: {size_in_words(c, parameters)} on {topology.name}, {topology.size} x '
    f'{kind} ({arranged}), compiled for it\n'
    f'Assumed (plan.*): a prompt of {n.prompt} tokens, later observations of {n.observation}{images}, '
    f'replies of {n.reply} and {n.longest} for the longest of a turn, {n.turns} turns.\n\n'
    f'{"program":16}{"runs":>6}{"compile CPU s":>15}{"GiB":>8}{"ms":>10}{"links ms":>10}  shape\n'
  )


def _write_program(m: Measured, topology: Topology, out: TextIO) -> None:
  p = m.program
  runs = f'{p.runs:.4g}'
  if m.cost is None:
    out.write(f'{p.name:16}{runs:>6}  refused: {m.failure}\n')
    return
  work = m.cost.work
  times = ('-', '-')
  if work is not None:
    times = (f'{1e3 * work.seconds:.2f}', f'{1e3 * work.link_seconds(topology.chip):.2f}')
  out.write(
    f'{p.name:16}{runs:>6}{m.cost.compile_cpu_seconds:15.1f}{m.cost.hbm / GIB:8.2f}{times[0]:>10}{times[1]:>10}  '
    f'{p.shape}\n'
  )


def _write_memory(run: PlannedRun, found: Estimate, topology: Topology, out: TextIO) -> None:
  limit = USABLE * topology.chip.hbm_bytes
  phases = '   '.join(f'{phase} {_gib(size)}' for phase, size in found.memory.items())
  worst = max(found.memory, key=found.memory.__getitem__)
  fits = found.memory[worst] <= limit
  out.write(
    f'\nMemory, GiB per device:   {phases}\n'
    f'{"It fits" if fits else "It does not fit"}: up to {_gib(found.memory[worst])} GiB in the {worst}, of '
    f'{limit / GIB:.1f} that may be filled ({USABLE:.0%} of {topology.chip.hbm_bytes / GIB:.0f}).\n'
  )
  if not fits:
    sized = run.config.copy_and_resolve_references()
    sized.optimizer.micro_batch_size = run.batching.micro_batch_size
    phase = 'update' if worst == 'scoring' else worst
    change = next(candidates(sized, phase, run.sampling.rows.get(phase, 0)), {})
    if change:
      out.write('What would help: ' + ' '.join(f'--config.{name}={value}' for name, value in change.items()) + '\n')


def _gib(size: float) -> str:
  return f'{size / GIB:.2f}' if math.isfinite(size) else 'too much'


def _write_time(
  run: PlannedRun, found: Estimate, topology: Topology, measured: Sequence[Measured], out: TextIO
) -> None:
  parts = '   '.join(
    f'{name} {x.device:.2f}' + (f' + {x.links:.2f}' if x.links >= 0.005 else '')
    for name, x in found.parts.items()
    if x.total
  )
  waiting = sum(x.waiting for x in found.parts.values())
  waits = f' ({waiting:.2f} s of them waiting for memory)' if waiting >= 0.005 else ''
  costs = [m.cost for m in measured if m.cost is not None]
  source = 'operations and bytes at what such a chip reaches'
  if all(cost.timed for cost in costs):
    source = "the compiler's cycles"
  listed = program_list.programs(run.config, run.trainer, run.sampling.rows)
  out.write(
    f'\nSeconds of an iteration, + collectives:   {parts}\n'
    f'Together {found.iteration:.2f} s{waits}, {found.sampled / found.iteration:.0f} sampled tokens a second; '
    f'evaluations {found.evaluation:.2f} s an iteration.\n'
    f'Cost of the run: {found.chip_hours:.1f} chip-hours of device time in {found.iterations} iterations.\n'
    f'Programs: {len(costs)} above, which take {sum(cost.compile_cpu_seconds for cost in costs):.0f} CPU s of '
    f'compilation; a run needs {program_list.describe(listed, images=bool(visual_columns(run.config)))}.\n'
    f'Times are {source}, at the assumed lengths; the work of the host is not in them.\n'
    f'Numbers of the chip: {topology.chip.source}\n'
  )
