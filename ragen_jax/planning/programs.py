"""The programs of a run for given devices: what is compiled, and how often an iteration runs it."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.distributed.sharding import row_shards
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.planning import abstract, lengths
from ragen_jax.planning.abstract import SamplerPlan
from ragen_jax.planning.calls import Call, rollout_calls
from ragen_jax.planning.lengths import Lengths
from ragen_jax.planning.lowering import (
  abstract_rows,
  lower_gradient,
  lower_resize,
  lower_sampler,
  lower_score,
  lower_weights,
  step_programs,
)
from ragen_jax.planning.serving import SERVER_CACHE, server_memory
from ragen_jax.sampling.capacity import bytes_per_device
from ragen_jax.sampling.draw import PLAIN
from ragen_jax.sampling.kv_cache import with_columns
from ragen_jax.training.batches import BatchingSettings
from ragen_jax.training.state import TrainState
from ragen_jax.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Program:
  """A program of a run at one shape."""

  name: str  # unique among the programs of a run
  kind: str  # what it is compiled from, at any shape; an optimiser step runs all programs of the kind 'apply'
  phase: str  # 'rollout', 'evaluation', 'scoring' or 'update': when it runs
  shape: str  # the sizes that it is compiled for, in words
  lower: Callable[[], jax.stages.Lowered]
  runs: float  # how often an iteration runs it
  resident: int  # bytes a device that the run holds meanwhile and that are no arguments of the program
  loop_trips: int = 1  # how often loops run that end when data says so


@dataclasses.dataclass(frozen=True)
class PlannedRun:
  """A run on given devices, without its weights."""

  config: ConfigDict
  trainer: Trainer  # with an abstract policy
  state: TrainState  # with abstract arrays
  lengths: Lengths  # the assumed lengths of its episodes
  batching: BatchingSettings  # the sizes of micro-batches, chosen for the planned memory
  sampling: SamplerPlan  # the weights and rows that it samples with
  served: dict[str, int]  # what the server of agents holds all the time, see `server_memory`

  @property
  def cfg(self) -> QwenConfig:
    """The shape of the policy."""
    return self.trainer.model.sampler.cfg

  def rows(self, phase: str) -> int:
    """Rows of the devices, in 'rollout' or 'evaluation'."""
    return self.sampling.rows[phase]

  @property
  def mesh(self) -> jax.sharding.Mesh:
    return self.trainer.model.mesh


def make_run(config: ConfigDict, devices: Sequence[Any] | None = None) -> PlannedRun:
  """The run of a config on devices that need not be there; default those of this process."""
  policy = abstract.abstract_policy(config, abstract.compute_dtype(config), devices)
  trainer = build.make_trainer(config, policy, limit=lambda: abstract.usable_bytes(config))
  state = abstract.abstract_state(trainer)
  kept = bytes_per_device((state.params, state.opt_state)) + abstract.reference_bytes(trainer, state)
  served = server_memory(config, policy)
  return PlannedRun(
    config, trainer, state, lengths.from_config(config, trainer.player.max_turns),
    batching=trainer.settings.estimate.batching,
    sampling=abstract.sampler_plan(config, policy, state, kept + sum(served.values())),
    served=served,
  )  # fmt: skip


def programs_of(run: PlannedRun) -> list[Program]:
  """The programs of an iteration and of an evaluation, at the assumed lengths and at the largest shapes."""
  return [*_rollout(run), *_evaluation(run), *_update(run)]


def calls(run: PlannedRun, phase: str) -> list[Call]:
  """Of the sampler in 'rollout' or 'evaluation', for episodes of the assumed lengths."""
  replies, turns = lengths.assumed(run.lengths, abstract.episodes(run.config, phase))
  shards = row_shards(run.mesh)
  size = (run.config.eval if phase == 'evaluation' else run.config.train).group_size
  return list(
    rollout_calls(run.config, run.lengths, replies, turns, rows=run.rows(phase), shards=shards, group_size=size)
  )


def _rollout(run: PlannedRun) -> list[Program]:
  """One program for each shape; those of a kind in the order of the tokens that they decode, or of their calls."""
  made = calls(run, 'rollout')
  found = [*_cast(run)]
  for name, make, chosen in (
    ('extend_first', _extend, [c for c in made if c.kind == 'extend' and c.first]),
    ('extend_later', _extend, [c for c in made if c.kind == 'extend' and not c.first]),
    ('decode', _decode, [c for c in made if c.kind == 'decode']),
    ('resize', _resize, [c for c in made if c.kind == 'resize']),
  ):
    weight: collections.Counter = collections.Counter()
    for c in chosen:
      weight[c.shape] += c.steps or 1
    for i, (shape, _) in enumerate(weight.most_common()):
      found.append(make(run, f'{name}_{i + 1}' if i else name, 'rollout', [c for c in chosen if c.shape == shape], 1))
  return found


def _evaluation(run: PlannedRun) -> list[Program]:
  """The largest cache that an evaluation may need."""
  config, made = run.config, calls(run, 'evaluation')
  size = abstract.cache_columns(config)
  share = (1 + config.eval.greedy_too) / config.eval.every if config.eval.every else 0
  extend, decode = (
    [dataclasses.replace(c, size=max(c.size, size)) for c in made if c.kind == kind] for kind in ('extend', 'decode')
  )
  return [
    _extend(run, 'eval_extend', 'evaluation', extend, share),
    _decode(run, 'eval_decode', 'evaluation', decode, share),
  ]


def _update(run: PlannedRun) -> list[Program]:
  n, config, trainer = run.lengths, run.config, run.trainer
  rows = abstract.episodes(config, 'rollout') * n.rows
  size = min(config.optimizer.mini_batch_size * n.rows, rows)
  plan = functools.partial(abstract.micro_batches, config, trainer, run.batching)
  calls, mean = plan(length=n.row, sampled=n.sampled, rows=size)
  _, widest = plan(rows=size)
  score_calls, score_shape = plan(length=n.row, sampled=n.sampled, rows=rows)
  runs = config.algorithm.ppo_epochs * rows / size * calls
  served = sum(run.served.values()) + (run.sampling.copied if run.served else 0)
  held = _bytes(run, 'opt_state', 'reference') + served
  scored = (config.algorithm.old_logprobs == 'trainer') + trainer.settings.reference

  def batch(shape):
    return abstract.abstract_batch(config, trainer, shape)

  def gradient(shape):
    return lambda: lower_gradient(trainer.learner, run.state, batch(shape))

  def text(shape):
    return f'{shape[0]} {"bins" if run.batching.packing else "rows"}, {shape[1]} tokens, {shape[2]} sampled'

  found = [
    Program(
      'score', 'score', 'scoring', text(score_shape),
      lambda: lower_score(trainer.scorer, run.state.params, batch(score_shape)), score_calls * scored, held,
    ),
    Program('gradient', 'gradient', 'update', text(mean), gradient(mean), runs, held),
  ]  # fmt: skip
  if widest != mean:
    found.append(Program('gradient_widest', 'gradient', 'update', text(widest), gradient(widest), 0, held))
  gradients = trainer.learner.abstract(run.state.trained)
  held = _bytes(run, 'params', 'opt_state', 'reference') + bytes_per_device(gradients) + served
  steps = build.steps_per_iteration(config)
  for p in step_programs(trainer.learner, run.state, batch(mean)):
    resident = held - bytes_per_device(p.arrays)
    found.append(Program(p.name, 'apply', 'update', p.weights, p.lower, steps * p.times, resident))
  return found


def _lower_rollout(run: PlannedRun, name: str, call: Call, rows: int) -> jax.stages.Lowered:
  config, sampler = run.config, run.trainer.model.sampler
  width = call.width or max(config.length_step // 4, 1)
  return lower_sampler(
    sampler,
    run.sampling.params,
    abstract_rows(sampler, rows, call.size),
    width=width,
    images=lambda fed: abstract.sampler_images(config, run.trainer.model, fed, width),
    columns=abstract.chunk_columns(config),
    sampling=PLAIN,
    rows=call.rows,
  )[name]


def _largest(calls: list[Call]) -> Call:
  """Of calls with different sizes one: the rows and the columns of the largest."""
  largest = max(calls, key=lambda c: c.rows * c.size)
  return dataclasses.replace(largest, width=max(c.width for c in calls), first=all(c.first for c in calls))


def _extend(run: PlannedRun, name: str, phase: str, calls: list[Call], share: float) -> Program:
  call, rows = _largest(calls), run.rows(phase)
  lower = functools.partial(_lower_rollout, run, 'extend', call, rows)
  shape = f'{call.rows} of {rows} rows, {call.width} of {call.size} columns'
  return Program(name, 'extend', phase, shape, lower, share * len(calls), _held(run))


def _decode(run: PlannedRun, name: str, phase: str, calls: list[Call], share: float) -> Program:
  """Calls end when enough replies are complete; the program's loop counts with their mean."""
  call, rows = _largest(calls), run.rows(phase)
  lower, steps = functools.partial(_lower_rollout, run, 'decode', call, rows), sum(c.steps for c in calls)
  trips = max(round(steps / len(calls)), 1)
  shape = f'{call.rows} of {rows} rows, {call.size} columns'
  return Program(name, 'decode', phase, shape, lower, share * steps / trips, _held(run), loop_trips=trips)


def _resize(run: PlannedRun, name: str, phase: str, calls: list[Call], share: float) -> Program:
  sampler, layers, call = run.trainer.model.sampler, run.cfg.attention_layers, calls[0]
  state = abstract_rows(sampler, call.rows, call.size)
  after = abstract_rows(sampler, call.rows, call.width).cache
  cache = bytes_per_device(with_columns(after))
  # The layers before are new already, those after still old.
  held = _held(run) + bytes_per_device(run.sampling.params) + bytes_per_device(after) - cache // layers
  shape = f'{call.rows} rows, {call.size} to {call.width} columns'

  def lower():
    return lower_resize(sampler, state, call.width)

  return Program(name, 'resize', phase, shape, lower, share * len(calls) * layers, held)


def _cast(run: PlannedRun) -> list[Program]:
  """The program that makes the weights of decoding, where they are not the trained ones."""
  sampler, s = run.trainer.model.sampler, run.sampling
  if not s.copied:
    return []
  shape = f'to {run.trainer.model.model.policy.dtype}' + (', gathered' if s.gathered else '')
  if sampler.decode_shards > 1:
    shape += f', MLP and vocabulary over {sampler.decode_shards} devices'
  held = _bytes(run, 'params', 'opt_state', 'reference') - _copied_from(run)
  return [
    Program(
      'weights', 'weights', 'rollout', shape, lambda: lower_weights(sampler, run.state.params, s.gathered), 1, held
    )
  ]


def _held(run: PlannedRun) -> int:
  """Bytes a device besides the arguments while rows are sampled; the weights that were copied are among them."""
  others = sum(size for kind, size in run.served.items() if kind != SERVER_CACHE)
  return _bytes(run, 'opt_state', 'reference') + _copied_from(run) + others


def _copied_from(run: PlannedRun) -> int:
  """Bytes a device of the weights that decoding has copies of."""
  return _bytes(run, 'params') + run.sampling.copied - bytes_per_device(run.sampling.params)


def _bytes(run: PlannedRun, *parts: str) -> int:
  """Bytes a device of parts of the state."""
  trees = {'params': run.state.params, 'frozen': run.state.frozen, 'opt_state': run.state.opt_state}
  return sum(
    abstract.reference_bytes(run.trainer, run.state) if part == 'reference' else bytes_per_device(trees[part])
    for part in parts
  )
