"""More of a run than `--mode=plan` tells: MFU, the decode step, all programs of a run, and what may be better."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from benchmarks.aot_compiled import shapes_of_run
from ragen_jax import build
from ragen_jax.distributed.sharding import row_shards
from ragen_jax.planning import program_list
from ragen_jax.planning.abstract import compute_dtype, episodes
from ragen_jax.planning.ahead import threads
from ragen_jax.planning.calls import Call
from ragen_jax.planning.estimate import Estimate, Measured, Seconds
from ragen_jax.planning.programs import PlannedRun, calls
from ragen_jax.planning.topologies import Topology
from ragen_jax.sampling import division
from ragen_jax.sampling.capacity import state_bytes
from ragen_jax.sampling.division import weights_read
from ragen_jax.sampling.draw import GREEDY
from ragen_jax.training.memory import USABLE

# When advice is given: share of the update that is collectives, factor over the floor of a decode step, and bytes of
# weights that are gathered for each token.
_MUCH_EXCHANGE, _FAR_FROM_FLOOR, _MUCH_GATHERED = 0.2, 1.3, 1e8


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
class Steps:
  """What a rollout decodes.

  Attributes:
    decode: tokens of each row that takes part, over all calls of `decode`.
    extend: calls of `extend`.
    idle: share of the decoded rows that sampled no token.
  """

  decode: int
  extend: int
  idle: float


@dataclasses.dataclass(frozen=True)
class Details:
  """Attributes:
  mfu: share of the peak that the products of the update need, of the time of the update.
  decode: the decode step.
  rollout: the steps of a rollout.
  compilation: programs and their compilation.
  """

  mfu: float
  decode: DecodeStep
  rollout: Steps
  compilation: Compilation


def details_of(run: PlannedRun, topology: Topology, measured: Sequence[Measured], found: Estimate) -> Details:
  """What the costs of all programs of a run say besides its estimate."""
  update = (found.parts['gradients'] + found.parts['optimiser']).total
  return Details(
    mfu=useful_operations(run) / (update * topology.size * topology.chip.flops) if update else math.nan,
    decode=_decode_step(run, topology, next((m for m in measured if m.program.name == 'decode'), None)),
    rollout=steps_of(calls(run, 'rollout')),
    compilation=_compilation(run, topology, measured),
  )


def steps_of(calls: Iterable[Call]) -> Steps:
  """The steps of the calls of a rollout."""
  decode, extend, rows, used = 0, 0, 0, 0
  for c in calls:
    extend += c.kind == 'extend'
    decode, rows, used = decode + c.steps, rows + c.steps * c.rows, used + c.used
  return Steps(decode, extend, 1 - used / max(rows, 1))


def useful_operations(run: PlannedRun) -> float:
  """Operations of the products that the update of an iteration needs: nothing twice, and no padding.

  Each weight of the layers meets all tokens, and the head the sampled ones; a pass forward, and two backward, or one
  where the weights are frozen. Attention is causal; a memory is asked, changed and read by each token.
  """
  c, n = run.cfg, run.lengths
  rows = episodes(run.config, 'rollout') * n.rows
  body, head = _weights(run)
  passes = 2 if run.config.lora.rank else 3
  attention = 2 * c.attention_layers * c.num_heads * c.head_dim * n.row**2
  if c.linear is not None:
    attention += 6 * (c.num_layers - c.attention_layers) * c.linear.memory_values * n.row
  once = rows * (2 * (body * n.row + head * n.sampled) + attention)
  return passes * once * run.config.algorithm.ppo_epochs


def _weights(run: PlannedRun) -> tuple[int, int]:
  """Weights of the layers that a token is multiplied with, and of the head."""
  c = run.cfg
  return c.mixer_matrices + c.mlp_matrices(active=True), c.vocab_size * c.hidden_size


def _decode_step(run: PlannedRun, topology: Topology, m: Measured | None) -> DecodeStep:
  c, n, mesh = run.cfg, run.lengths, run.mesh
  size, tensor = compute_dtype(run.config).itemsize, mesh.shape['tensor']
  rows = run.rows('rollout') // row_shards(mesh)
  cache = 2 * size * c.attention_layers * c.num_kv_heads * c.head_dim * rows * (n.row // 2)
  cache += 2 * (c.num_layers - c.attention_layers) * state_bytes(c, size) * rows  # read and written
  weights = weights_read(run.trainer.model.sampler.decode_shards, c, tensor)
  floor = (weights * size + cache / tensor) / topology.chip.hbm_bandwidth
  loops = m.cost.work.loops if m and m.cost and m.cost.work else ()
  if not loops:
    return DecodeStep(Seconds(math.nan, math.nan, math.nan), floor, math.nan, math.nan)
  body = max(loops, key=lambda w: w.seconds)
  seconds = Seconds(body.seconds, body.link_seconds(topology.chip), body.memory_waits)
  return DecodeStep(seconds, floor, body.collectives.get('all-gather', 0), sum(body.collectives.values()))


def _compilation(run: PlannedRun, topology: Topology, measured: Sequence[Measured]) -> Compilation:
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
    most=len(program_list.programs(config, run.trainer, run.sampling.rows)),
  )


def _again(run: PlannedRun, first: dict[str, int]) -> dict[str, int]:
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


def advice(run: PlannedRun, found: Estimate, more: Details, topology: Topology) -> Iterator[str]:
  """Changes of the config that may make the run faster."""
  c, mesh, limit = run.config, run.mesh.shape, USABLE * topology.chip.hbm_bytes
  best = division.choose(0, run.cfg, compute_dtype(c), run.mesh)
  if c.agent.decode_shards == 1 and best > 1:
    yield f'each device reads all weights for every token: --config.agent.decode_shards={best}'
  elif more.decode.gathered > _MUCH_GATHERED and mesh['fsdp'] > 1:
    heads = run.cfg.num_kv_heads
    tensor = max(n for n in range(1, heads + 1) if heads % n == 0 and (mesh['fsdp'] * mesh['tensor']) % n == 0)
    if tensor > mesh['tensor']:
      yield (
        f'every token gathers {more.decode.gathered / 1e9:.1f} GB of weights: --config.mesh.tensor={tensor} '
        f'--config.mesh.fsdp={mesh["fsdp"] * mesh["tensor"] // tensor}'
      )
  update = found.parts['gradients'] + found.parts['optimiser']
  rows, whole = run.batching.micro_batch_size, c.optimizer.mini_batch_size
  if update.links > _MUCH_EXCHANGE * update.total and 0 < rows < whole and found.memory['update'] < limit / 2:
    yield (
      f'{update.links / update.total:.0%} of the update are collectives, once a micro-batch: '
      f'--config.optimizer.micro_batch_size={min(2 * rows, whole)} or more, in multiples of {row_shards(run.mesh)}'
    )
  if more.decode.seconds.total > _FAR_FROM_FLOOR * more.decode.floor and mesh['tensor'] == 1 and mesh['data'] > 1:
    heads = run.cfg.num_kv_heads
    tensor = max(n for n in range(1, heads + 1) if heads % n == 0 and mesh['data'] % n == 0)
    if tensor > 1:
      yield f'decoding is far from its floor: try --config.mesh.tensor={tensor}, which divides weights and cache'
  if more.compilation.awaited[1] > found.iterations * found.iteration:
    yield (
      'compilation takes longer than the work: a larger --config.length_step needs fewer programs '
      f'(now {c.length_step})'
    )
