"""From the costs of a run's programs to what the run needs: memory, time of an iteration, chip-hours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ragen_jax.planning import cost
from ragen_jax.planning.abstract import episodes
from ragen_jax.planning.cost import Cost
from ragen_jax.planning.programs import PlannedRun, Program
from ragen_jax.planning.topologies import Topology


@dataclasses.dataclass(frozen=True)
class Measured:
  """A program and what the compiler says of it."""

  program: Program
  cost: Cost | None  # None if the compiler refused it
  failure: str = ''  # why it refused it

  @property
  def memory(self) -> float:
    """Bytes a device while the program runs, what the run holds besides it included."""
    return math.inf if self.cost is None else self.cost.hbm + self.program.resident


@dataclasses.dataclass(frozen=True)
class Seconds:
  """Time of a part of an iteration."""

  device: float = 0.0  # of the device's own work
  links: float = 0.0  # of collectives at least, with all links busy; none of it is hidden behind work
  waiting: float = 0.0  # of `device`, the time in which kernels wait for copies from memory

  def __add__(self, other: Seconds) -> Seconds:
    return Seconds(self.device + other.device, self.links + other.links, self.waiting + other.waiting)

  @property
  def total(self) -> float:
    return self.device + self.links


@dataclasses.dataclass(frozen=True)
class Estimate:
  """What a run needs. Where the compiler refused a program, what follows from it is not a number."""

  memory: dict[str, float]  # bytes a device by phase, of the phase's largest program
  parts: dict[str, Seconds]  # of an iteration, by part
  evaluation: float  # seconds of evaluations for each iteration
  sampled: int  # tokens that an iteration samples
  iterations: int  # of the run
  chips: int  # of the machine

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


def estimate_of(run: PlannedRun, topology: Topology, measured: Sequence[Measured]) -> Estimate:
  """Adds the costs of the programs of `programs.programs_of` up."""

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
  rows, n = episodes(run.config, 'rollout'), run.lengths
  return Estimate(
    memory=memory,
    parts=parts,
    evaluation=part('evaluation', 'extend', 'decode').total,
    sampled=rows * n.turns * n.reply,
    iterations=run.config.num_iterations,
    chips=topology.size,
  )


def _seconds(m: Measured, topology: Topology) -> Seconds:
  """Of all runs of a program in an iteration."""
  if m.program.runs == 0:
    return Seconds()
  if m.cost is None or m.cost.work is None:
    return Seconds(math.nan, math.nan, math.nan)
  work = m.cost.work
  seconds = Seconds(work.seconds, work.link_seconds(topology.chip), work.memory_waits)
  return Seconds(*(m.program.runs * x for x in dataclasses.astuple(seconds)))
