"""The programs of a run for given devices: what is compiled, and how often an iteration runs it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.compilers import abstract, lengths
from ragen_jax.compilers.lengths import Lengths
from ragen_jax.models.qwen import QwenConfig
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.training.batches import BatchingSettings
from ragen_jax.training.state import TrainState
from ragen_jax.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Program:
  """A program of a run at one shape.

  Attributes:
    name: unique among the programs of a run.
    kind: what it is compiled from; programs of one kind differ in their shapes.
    phase: 'rollout', 'evaluation', 'scoring' or 'update': when it runs.
    shape: the sizes that it is compiled for, in words.
    lower: lowers it.
    runs: how often an iteration runs it.
    resident: bytes a device that the run holds meanwhile and that are no arguments of the program.
    loop_trips: how often loops run that end when data says so.
  """

  name: str
  kind: str
  phase: str
  shape: str
  lower: Callable[[], jax.stages.Lowered]
  runs: float
  resident: int
  loop_trips: int = 1


@dataclasses.dataclass(frozen=True)
class Run:
  """A run on given devices, without its weights.

  Attributes:
    config: of the run.
    trainer: with an abstract policy.
    state: with abstract arrays.
    lengths: the assumed lengths of its episodes.
  """

  config: ConfigDict
  trainer: Trainer
  state: TrainState
  lengths: Lengths

  @property
  def cfg(self) -> QwenConfig:
    """The shape of the policy."""
    return self.trainer.model.sampler.cfg

  @property
  def batching(self) -> BatchingSettings:
    """The sizes of micro-batches."""
    return self.trainer.settings.estimate.batching

  @property
  def mesh(self) -> jax.sharding.Mesh:
    """The devices."""
    return self.trainer.model.mesh


def make_run(config: ConfigDict, devices: Sequence[Any] | None = None) -> Run:
  """The run of a config on devices that need not be there; default those of this process."""
  policy = abstract.abstract_policy(config, abstract.compute_dtype(config), devices)
  trainer = build.make_trainer(config, policy)
  return Run(
    config, trainer, abstract.abstract_state(trainer), lengths.from_config(config, trainer.proxy.limits.max_turns)
  )


def of_run(run: Run) -> list[Program]:
  """The programs of an iteration and of an evaluation, at the assumed lengths and at the largest shapes."""
  return [*_rollout(run), *_evaluation(run), *_update(run)]


def _rollout(run: Run) -> list[Program]:
  n, config = run.lengths, run.config
  rows = abstract.rollout_rows(config, 'rollout')
  first, later = (lengths.observation_columns(config, x) for x in (n.prompt, n.observation))
  start, end = lengths.cache_size(config, 0, first), lengths.cache_size(config, n.before(n.turns - 1), later)
  found = [_extend(run, 'extend_first', 'rollout', rows, start, first, runs=1 if n.whole else n.turns)]
  if n.whole and n.turns > 1:
    found.append(_extend(run, 'extend_later', 'rollout', rows, end, later, runs=n.turns - 1))
  found.append(_decode(run, 'decode', 'rollout', rows, end if n.whole else start, runs=n.turns))
  if n.turns > 1:
    found += _arrange(run, rows, max(end - config.length_step, start) if n.whole else start, end if n.whole else start)
  return found


def _evaluation(run: Run) -> list[Program]:
  """The largest cache that an evaluation may need; its rows all play as long as they may."""
  n, config = run.lengths, run.config
  rows, size = abstract.rollout_rows(config, 'evaluation'), abstract.cache_columns(config)
  width = lengths.observation_columns(config, n.prompt)
  share = (1 + config.eval.greedy_too) / config.eval.every if config.eval.every else 0
  return [
    _extend(run, 'eval_extend', 'evaluation', rows, size, width, runs=share * n.turns),
    _decode(run, 'eval_decode', 'evaluation', rows, size, runs=share * n.turns),
  ]


def _update(run: Run) -> list[Program]:
  n, config, trainer = run.lengths, run.config, run.trainer
  micro = run.batching.micro_batch_size
  rows = abstract.rollout_rows(config, 'rollout') * n.rows
  passes = config.algorithm.ppo_epochs
  mean = abstract.abstract_batch(config, trainer, micro, length=n.row, sampled=n.sampled)
  widest = abstract.abstract_batch(config, trainer, micro)
  held = _bytes(run, 'opt_state', 'reference')
  a = config.algorithm
  scored = (a.old_logprobs == 'trainer') + trainer.settings.reference

  def learn(name, batch):
    return lambda: trainer.learner.lower(run.state, batch)[name]

  def shape(batch):
    return f'{micro} rows, {batch.tokens.shape[1]} tokens, {batch.columns.shape[1]} sampled'

  found = [
    Program(
      'score', 'score', 'scoring', shape(mean),
      lambda: trainer.scorer.lower(run.state.params, mean), rows / micro * scored, held,
    ),
    Program('gradient', 'gradient', 'update', shape(mean), learn('accumulate', mean), passes * rows / micro, held),
    Program('apply', 'apply', 'update', 'all weights', learn('apply', mean),
            build.steps_per_iteration(config), _bytes(run, 'frozen', 'reference')),
  ]  # fmt: skip
  if (widest.tokens.shape, widest.columns.shape) != (mean.tokens.shape, mean.columns.shape):
    found.insert(
      2, Program('gradient_widest', 'gradient', 'update', shape(widest), learn('accumulate', widest), 0, held)
    )
  return found


def _lower_rollout(run: Run, name: str, rows: int, columns: int, width: int) -> jax.stages.Lowered:
  sampler = run.trainer.model.sampler
  return sampler.lower(
    run.state.params,
    sampler.abstract_state(rows, columns),
    width=width,
    max_new=run.config.agent.max_response_tokens,
    sampling=Sampling(),
  )[name]


def _extend(run: Run, name: str, phase: str, rows: int, columns: int, width: int, runs: float) -> Program:
  lower = functools.partial(_lower_rollout, run, 'extend', rows, columns, width)
  shape = f'{rows} rows, {width} of {columns} columns'
  return Program(name, 'extend', phase, shape, lower, runs, _bytes(run, 'opt_state', 'reference'))


def _decode(run: Run, name: str, phase: str, rows: int, columns: int, runs: float) -> Program:
  width = lengths.observation_columns(run.config, 1)  # of the observation, which decoding does not see
  lower = functools.partial(_lower_rollout, run, 'decode', rows, columns, width)
  shape, held = f'{rows} rows, {columns} columns', _bytes(run, 'opt_state', 'reference')
  return Program(name, 'decode', phase, shape, lower, runs, held, loop_trips=run.lengths.longest)


def _arrange(run: Run, rows: int, before: int, after: int) -> list[Program]:
  sampler, runs = run.trainer.model.sampler, run.lengths.turns - 1
  state = sampler.abstract_state(rows, before)
  held = _bytes(run, 'params', 'opt_state', 'reference')
  cache = abstract.bytes_per_device(sampler.abstract_state(rows, after).cache)
  layers = run.cfg.num_layers
  shape = f'{rows} rows, {before} to {after} columns'

  def lower(name):
    return lambda: sampler.lower_arrange(state, rows=rows, size=after)[name]

  return [
    Program('order', 'order', 'rollout', shape, lower('order'), runs, held + cache),
    # The layers before are new already, those after still old.
    Program('pick', 'pick', 'rollout', shape, lower('pick'), runs * layers, held + cache * (layers - 1) // layers),
  ]


def _bytes(run: Run, *parts: str) -> int:
  """Bytes a device of parts of the state; the reference has the policy's trained weights a second time."""
  trees = {
    'params': run.state.params,
    'frozen': run.state.frozen,
    'opt_state': run.state.opt_state,
    'reference': run.state.trained['policy'] if run.trainer.settings.reference else (),
  }
  return sum(abstract.bytes_per_device(trees[part]) for part in parts)
