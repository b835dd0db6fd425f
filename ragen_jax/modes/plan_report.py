"""What the compiler of a chip says of a run, in words: `--mode=plan` with `plan.topology`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TextIO

import jax
from ml_collections import ConfigDict

from ragen_jax.compilers import estimate, programs, topologies
from ragen_jax.compilers.abstract import compute_dtype, visual_columns
from ragen_jax.compilers.estimate import Estimate, Measured
from ragen_jax.compilers.programs import Run
from ragen_jax.compilers.topologies import Topology
from ragen_jax.distributed.sharding import row_shards
from ragen_jax.modes.plan_changes import candidates
from ragen_jax.sampling import division
from ragen_jax.training.memory import USABLE

_GIB = 2**30
# When advice is given: share of the update that is collectives, factor over the floor of a decode step, and bytes of
# weights that are gathered for each token.
_MUCH_EXCHANGE, _FAR_FROM_FLOOR, _MUCH_GATHERED = 0.2, 1.3, 1e8


def report(config: ConfigDict, topology: Topology, out: TextIO) -> None:
  """Compiles the run's programs for a topology and writes what they need; each program as soon as it is compiled.

  Args:
    config: the config of the run, checked.
    topology: the machine; `topologies.prepare` has been called for it.
    out: the stream to write to.

  Raises:
    UserError: the installed compiler does not know the topology, or the mesh does not divide the model.
  """
  devices = topologies.devices(topology)
  run = programs.make_run(config, devices)
  _write_head(run, topology, devices[0].device_kind, out)
  measured = []
  for program in programs.of_run(run):
    measured.append(estimate.measure(program, topology))
    _write_program(measured[-1], topology, out)
    out.flush()
  found = estimate.of_run(run, topology, measured)
  _write_memory(found, topology, out)
  _write_time(found, topology, measured, out)
  _write_advice(run, found, topology, out)


def _write_head(run: Run, topology: Topology, kind: str, out: TextIO) -> None:
  c, n = run.config, run.lengths
  parameters = sum(x.size for x in jax.tree.leaves(run.state.params))
  seen = visual_columns(c)
  images = f' ({seen} of each for images)' if seen else ''
  arranged = ', '.join(f'{axis}={size}' for axis, size in run.mesh.shape.items())
  out.write(
    f'{c.model.path or c.model.preset}: {parameters / 1e6:.1f}M parameters on {topology.name}, {topology.size} x '
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
    f'{p.name:16}{runs:>6}{m.cost.compile_cpu_seconds:15.1f}{m.cost.hbm / _GIB:8.2f}{times[0]:>10}{times[1]:>10}  '
    f'{p.shape}\n'
  )


def _write_memory(found: Estimate, topology: Topology, out: TextIO) -> None:
  limit = USABLE * topology.chip.hbm_bytes
  phases = '   '.join(f'{phase} {_gib(size)}' for phase, size in found.memory.items())
  worst = max(found.memory, key=found.memory.__getitem__)
  fits = found.memory[worst] <= limit
  out.write(
    f'\nMemory, GiB per device:   {phases}\n'
    f'{"It fits" if fits else "It does not fit"}: up to {_gib(found.memory[worst])} GiB in the {worst}, of '
    f'{limit / _GIB:.1f} that may be filled ({USABLE:.0%} of {topology.chip.hbm_bytes / _GIB:.0f}).\n'
  )


def _gib(size: float) -> str:
  return f'{size / _GIB:.2f}' if math.isfinite(size) else 'too much'


def _write_time(found: Estimate, topology: Topology, measured: Sequence[Measured], out: TextIO) -> None:
  step, made = found.decode, found.compilation
  parts = '   '.join(
    f'{name} {x.device:.2f}' + (f' + {x.links:.2f}' if x.links >= 0.005 else '')
    for name, x in found.parts.items()
    if x.total
  )
  by_compiler = all(m.cost.timed for m in measured if m.cost is not None)
  source = "the compiler's cycles" if by_compiler else 'operations and bytes at what such a chip reaches'
  seconds = found.iteration
  out.write(
    f'\nSeconds of an iteration, + collectives:   {parts}\n'
    f'Together {seconds:.2f} s, {found.sampled / seconds:.0f} sampled tokens a second; evaluations '
    f'{found.evaluation:.2f} s an iteration.\n'
    f'MFU of the update: {found.mfu:.1%}.\n'
    f'Decode step: {1e3 * step.seconds.total:.2f} ms, {step.seconds.total / step.floor:.2f} times the floor of reading '
    f'weights and cache ({1e3 * step.floor:.2f} ms); {step.gathered / 1e9:.3f} GB of weights gathered a token.\n'
    f'Steps of a rollout: {found.rollout.decode}, in which {found.rollout.idle:.0%} of the rows sample no token, and '
    f'{found.rollout.extend} calls that feed prompts.\n'
    f'Programs: {made.programs[0]} for the first iteration and its evaluation ({made.cpu_seconds[0]:.0f} CPU s of '
    f'compilation), {made.programs[1]} for {found.iterations} iterations ({made.cpu_seconds[1]:.0f} CPU s), at most '
    f'{made.most} whatever the lengths. The run waits for at least {made.awaited[1]:.0f} CPU s of compilation, until '
    f'iteration {made.last_awaited} or later.\n'
    f'Cost of the run: {found.chip_hours:.1f} chip-hours of device time, and '
    f'{found.chips * made.awaited[1] / 3600:.1f} or more while the chips wait for one core to compile.\n'
    f'Times are {source}, at the assumed lengths; the host, and what is read ahead too late, are not in them.\n'
    f'Numbers of the chip: {topology.chip.source}\n'
  )


def _write_advice(run: Run, found: Estimate, topology: Topology, out: TextIO) -> None:
  advice = list(_advice(run, found, topology))
  if advice:
    out.write('\nWhat may be better:\n' + ''.join(f'- {line}\n' for line in advice))


def _advice(run: Run, found: Estimate, topology: Topology) -> Iterator[str]:
  c, mesh = run.config, run.mesh.shape
  limit = USABLE * topology.chip.hbm_bytes
  worst = max(found.memory, key=found.memory.__getitem__)
  if found.memory[worst] > limit:
    sized = c.copy_and_resolve_references()
    sized.optimizer.micro_batch_size = run.batching.micro_batch_size
    phase = 'update' if worst == 'scoring' else worst
    change = next(candidates(sized, phase, run.sampling.rows.get(phase, 0)), None)
    if change is not None:
      flags = ' '.join(f'--config.{name}={value}' for name, value in change.items())
      yield f'the {worst} does not fit: {flags}'
  best = division.choose(0, run.cfg, compute_dtype(c), run.mesh)
  if c.agent.decode_shards == 1 and best > 1:
    yield f'each device reads all weights for every token: --config.agent.decode_shards={best}'
  elif found.decode.gathered > _MUCH_GATHERED and mesh['fsdp'] > 1:
    heads = run.cfg.num_kv_heads
    tensor = max(n for n in range(1, heads + 1) if heads % n == 0 and (mesh['fsdp'] * mesh['tensor']) % n == 0)
    if tensor > mesh['tensor']:
      yield (
        f'every token gathers {found.decode.gathered / 1e9:.1f} GB of weights: --config.mesh.tensor={tensor} '
        f'--config.mesh.fsdp={mesh["fsdp"] * mesh["tensor"] // tensor}'
      )
  update = found.parts['gradients'] + found.parts['optimiser']
  rows, whole = run.batching.micro_batch_size, c.optimizer.mini_batch_size
  if update.links > _MUCH_EXCHANGE * update.total and 0 < rows < whole and found.memory['update'] < limit / 2:
    yield (
      f'{update.links / update.total:.0%} of the update are collectives, once a micro-batch: '
      f'--config.optimizer.micro_batch_size={min(2 * rows, whole)} or more, in multiples of {row_shards(run.mesh)}'
    )
  if found.decode.seconds.total > _FAR_FROM_FLOOR * found.decode.floor and mesh['tensor'] == 1 and mesh['data'] > 1:
    heads = run.cfg.num_kv_heads
    tensor = max(n for n in range(1, heads + 1) if heads % n == 0 and mesh['data'] % n == 0)
    if tensor > 1:
      yield f'decoding is far from its floor: try --config.mesh.tensor={tensor}, which divides weights and cache'
  if found.compilation.awaited[1] > found.iterations * found.iteration:
    yield (
      'compilation takes longer than the work: a larger --config.length_step needs fewer programs '
      f'(now {c.length_step})'
    )
