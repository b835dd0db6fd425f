"""From the costs of a run's programs to what the run needs: memory, time of an iteration, compilation, chip-hours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from ragen_jax import build
from ragen_jax.compilers import cost, needed
from ragen_jax.compilers.abstract import compute_dtype, episodes
from ragen_jax.compilers.ahead import threads
from ragen_jax.compilers.cost import Cost
from ragen_jax.compilers.lengths import Steps, shapes_of_run, steps_of
from ragen_jax.compilers.programs import Program, Run, calls
from ragen_jax.compilers.topologies import Topology
from ragen_jax.distributed.sharding import row_shards
from ragen_jax.sampling.division import weights_read
from ragen_jax.sampling.draw import GREEDY


@dataclasses.dataclass(frozen=True)
class Measured:
  """A program and what the compiler says of it.

  Attributes:
    program: the program.
    cost: None if the compiler refused it.
    failure: why it refused it.
  """

  program: Program
  cost: Cost | None
  failure: str = ''

  @property
  def memory(self) -> float:
    """Bytes a device while the program runs, what the run holds besides it included."""
    return math.inf if self.cost is None else self.cost.hbm + self.program.resident


@dataclasses.dataclass(frozen=True)
class Seconds:
  """Time of a part of an iteration.

  Attributes:
    device: of the device's own work.
    links: of collectives at least, with all links busy; none of it is hidden behind work.
  """

  device: float = 0.0
  links: float = 0.0

  def __add__(self, other: Seconds) -> Seconds:
    return Seconds(self.device + other.device, self.links + other.links)

  @property
  def total(self) -> float:
    return self.device + self.links


@dataclasses.dataclass(frozen=True)
class DecodeStep:
  """One token for all rows, as the compiler's loop body has it.

  Attributes:
    seconds: of the step.
    floor: seconds that reading the device's weights once and the used part of the cache takes at least.
    gathered: bytes that a device receives of gathered weights.
    collectives: bytes of all collectives.
  """

  seconds: Seconds
  floor: float
  gathered: float
  collectives: float


@dataclasses.dataclass(frozen=True)
class Compilation:
  """Programs of a run and the CPU seconds that compiling them takes.

  Attributes:
    programs: numbers after the first iteration and at the end.
    cpu_seconds: the same.
    awaited: CPU seconds of those that the run waits for at least, since they were not compiled ahead. What is compiled
      ahead is assumed to be ready by the next iteration.
    last_awaited: the last iteration that waits for one of these, from 1.
    most: the most programs that a run of this config can need, whatever the lengths of its episodes.
  """

  programs: tuple[int, int]
  cpu_seconds: tuple[float, float]
  awaited: tuple[float, float]
  last_awaited: int
  most: int


@dataclasses.dataclass(frozen=True)
class Estimate:
  """What a run needs. Where the compiler refused a program, what follows from it is not a number.

  Attributes:
    memory: bytes a device by phase, of the phase's largest program.
    parts: seconds of an iteration by part.
    evaluation: seconds of evaluations for each iteration.
    mfu: share of the peak that the products of the update need, of the time of the update.
    decode: the decode step.
    rollout: the steps of a rollout.
    compilation: programs and their compilation.
    sampled: tokens that an iteration samples.
    iterations: of the run.
    chips: of the machine.
  """

  memory: dict[str, float]
  parts: dict[str, Seconds]
  evaluation: float
  mfu: float
  decode: DecodeStep
  rollout: Steps
  compilation: Compilation
  sampled: int
  iterations: int
  chips: int

  @property
  def iteration(self) -> float:
    """Seconds of an iteration, without evaluation."""
    return sum(x.total for x in self.parts.values())

  @property
  def chip_hours(self) -> float:
    """Of the whole run, evaluations included, without compilation."""
    return self.chips * self.iterations * (self.iteration + self.evaluation) / 3600


def measure(program: Program, topology: Topology) -> Measured:
  """Compiles a program; a refusal is a result too."""
  try:
    return Measured(program, cost.compile_program(program.lower(), topology, program.loop_trips))
  except cost.CompileFailure as e:
    return Measured(program, None, str(e))


def of_run(run: Run, topology: Topology, measured: Sequence[Measured]) -> Estimate:
  """Adds the costs of the programs of `programs.of_run` up."""

  def part(phase: str, *kinds: str) -> Seconds:
    chosen = (m for m in measured if m.program.phase == phase and m.program.kind in kinds)
    return sum((_seconds(m, topology) for m in chosen), Seconds())

  parts = {
    'extend': part('rollout', 'extend'),
    'decode': part('rollout', 'decode'),
    'arrange': part('rollout', 'weights', 'resize'),
    'scoring': part('scoring', 'score'),
    'gradients': part('update', 'gradient'),
    'optimiser': part('update', 'apply'),
  }
  memory: dict[str, float] = {}
  for m in measured:
    memory[m.program.phase] = max(memory.get(m.program.phase, 0), m.memory)
  update = (parts['gradients'] + parts['optimiser']).total
  rows, n = episodes(run.config, 'rollout'), run.lengths
  return Estimate(
    memory=memory,
    parts=parts,
    evaluation=part('evaluation', 'extend', 'decode').total,
    mfu=useful_operations(run) / (update * topology.size * topology.chip.flops) if update else math.nan,
    decode=_decode_step(run, topology, next((m for m in measured if m.program.name == 'decode'), None)),
    rollout=steps_of(calls(run, 'rollout')),
    compilation=_compilation(run, topology, measured),
    sampled=rows * n.turns * n.reply,
    iterations=run.config.num_iterations,
    chips=topology.size,
  )


def useful_operations(run: Run) -> float:
  """Operations of the products that the update of an iteration needs: nothing twice, and no padding.

  Each weight of the layers meets all tokens, and the head the sampled ones; a pass forward, and two backward, or one
  where the weights are frozen. Attention is causal.
  """
  c, n = run.cfg, run.lengths
  rows = episodes(run.config, 'rollout') * n.rows
  body, head = _weights(run)
  passes = 2 if run.config.lora.rank else 3
  attention = 2 * c.num_layers * c.num_heads * c.head_dim * n.row**2
  once = rows * (2 * (body * n.row + head * n.sampled) + attention)
  return passes * once * run.config.algorithm.ppo_epochs


def _weights(run: Run) -> tuple[int, int]:
  """Weights of the layers that a token is multiplied with, and of the head."""
  c = run.cfg
  attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
  return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size), c.vocab_size * c.hidden_size


def _seconds(m: Measured, topology: Topology) -> Seconds:
  """Of all runs of a program in an iteration."""
  if m.program.runs == 0:
    return Seconds()
  if m.cost is None or m.cost.work is None:
    return Seconds(math.nan, math.nan)
  work = m.cost.work
  return Seconds(m.program.runs * work.seconds, m.program.runs * work.link_seconds(topology.chip))


def _decode_step(run: Run, topology: Topology, m: Measured | None) -> DecodeStep:
  c, n, mesh = run.cfg, run.lengths, run.mesh
  size, tensor = compute_dtype(run.config).itemsize, mesh.shape['tensor']
  rows = run.rows('rollout') // row_shards(mesh)
  cache = 2 * size * c.num_layers * c.num_kv_heads * c.head_dim * rows * (n.row // 2)
  weights = weights_read(run.trainer.model.sampler.decode_shards, c, tensor)
  floor = (weights * size + cache / tensor) / topology.chip.hbm_bandwidth
  loops = m.cost.work.loops if m and m.cost and m.cost.work else ()
  if not loops:
    return DecodeStep(Seconds(math.nan, math.nan), floor, math.nan, math.nan)
  body = max(loops, key=lambda w: w.seconds)
  seconds = Seconds(body.seconds, body.link_seconds(topology.chip))
  return DecodeStep(seconds, floor, body.collectives.get('all-gather', 0), sum(body.collectives.values()))


def _compilation(run: Run, topology: Topology, measured: Sequence[Measured]) -> Compilation:
  costs: dict[str, list[float]] = {}
  for m in measured:
    if m.cost is not None and m.program.runs and m.program.phase != 'evaluation':
      costs.setdefault(m.program.kind, []).append(m.cost.compile_cpu_seconds)
  if 'apply' in costs:  # its programs count as one
    costs['apply'] = [sum(costs['apply'])]
  config = run.config
  hosts = len({device.process_index for device in run.mesh.devices.flat})
  counts = shapes_of_run(
    config, run.lengths, run.batching, config.num_iterations, rows=run.rows('rollout'), shards=row_shards(run.mesh),
    ahead=threads(config, platform=topology.chip.platform, processes=hosts) > 0,
  )  # fmt: skip
  once = {'weights': 1} if run.sampling.copied else {}

  def known(numbers: dict[str, int]) -> dict[str, int]:
    return {kind: n for kind, n in (numbers | once).items() if kind in costs}

  def total(part: str, iteration: int, of: Callable[[str], float]) -> float:
    found = known(getattr(counts[iteration], part))
    again = _again(run, known(getattr(counts[0], part))) if config.eval.every else {}
    return sum(found[kind] * of(kind) for kind in found) + sum(again[kind] * of(kind) for kind in again)

  def seconds(kind: str) -> float:
    return sum(costs[kind]) / len(costs[kind])

  changes = [i for i in range(1, len(counts)) if known(counts[i].awaited) != known(counts[i - 1].awaited)]
  return Compilation(
    programs=(int(total('programs', 0, lambda _: 1)), int(total('programs', -1, lambda _: 1))),
    cpu_seconds=(total('programs', 0, seconds), total('programs', -1, seconds)),
    awaited=(total('awaited', 0, seconds), total('awaited', -1, seconds)),
    last_awaited=1 + (changes[-1] if changes else 0),
    most=len(needed.programs(config, run.trainer, run.sampling.rows)),
  )


def _again(run: Run, first: dict[str, int]) -> dict[str, int]:
  """Programs that evaluations compile besides those of the first rollout, by kind."""
  config = run.config
  other_rows = run.rows('evaluation') != run.rows('rollout')
  again = {kind: first[kind] for kind in ('extend', 'decode', 'resize') if kind in first and other_rows}
  # Temperatures above 0 share a program.
  trained, *others = (
    (x.temperature > 0, x.top_p, x.top_k)
    for x in (build.sampling(config.train), build.sampling(config.eval), *([GREEDY] if config.eval.greedy_too else []))
  )
  more = len(set(others)) if other_rows else len(set(others) - {trained})
  return again | {'decode': first['decode'] * more} if 'decode' in first else again
