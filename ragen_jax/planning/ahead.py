"""Compiles the programs that a run needs next in background threads, while it plays and learns."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from ragen_jax import build_agents
from ragen_jax.agent.rollout import Rollout
from ragen_jax.distributed.sharding import row_shards
from ragen_jax.planning import program_list
from ragen_jax.planning.abstract import abstract_batch, chunk_columns, visual_columns
from ragen_jax.planning.lowering import (
  abstract_rows,
  lower_gradient,
  lower_resize,
  lower_sampler,
  lower_score,
  step_programs,
)
from ragen_jax.planning.program_list import Program
from ragen_jax.sampling.draw import PLAIN
from ragen_jax.training.packing import tokens_to_share
from ragen_jax.training.state import TrainState
from ragen_jax.training.trainer import Trainer
from ragen_jax.utils.background import Background

_log = logging.getLogger(__name__)

# Processors for each thread, and the most threads, that 'auto' takes.
_PROCESSORS, _MOST_THREADS = 4, 4


def threads(config: ConfigDict, *, platform: str, processes: int) -> int:
  """How many threads compile ahead in a run.

  None with several processes, or with images, whose programs have shapes of their own. Otherwise
  `config.compile_ahead`, of which -1 takes none on CPUs, because the run needs all processors.
  """
  if processes > 1 or visual_columns(config):
    return 0
  if config.compile_ahead >= 0:
    return config.compile_ahead
  if platform == 'cpu':
    return 0
  return max(1, min((os.cpu_count() or 1) // _PROCESSORS, _MOST_THREADS))


class CompileAhead:
  """Watches which programs a run calls, and compiles those that it is likely to call next.

  - When a program of the sampler is called for the first time, and when a rollout ends, it compiles those that the
    sampler is likely to call (`program_list.LikelyCaches`).
  - When a rollout ends, it compiles the programs of updates with its lengths, and with somewhat other lengths.

  The run's own calls take the compiled programs from the caches of `jax.jit`.
  """

  def __init__(
    self,
    config: ConfigDict,
    trainer: Trainer,
    state: TrainState,
    listed: Collection[Program],
    background: Background,
  ):
    """Waits for programs and episodes (`Observer.told_to`). For updates it compiles only the programs of `listed`."""
    self._config, self._trainer, self._background = config, trainer, background
    self._listed = set(listed)
    self._state = _abstract(state)
    self._caches = program_list.LikelyCaches(config, row_shards(trainer.model.mesh))
    self._updated = False
    self._weights: Any = None  # of the sampler, as it is called with them
    self._numbers = itertools.count()

  def runs(self, name: str, shape: tuple[Any, ...], weights: Any) -> None:
    """Compiles what is likely after a program; see `Observer.runs`."""
    if name not in ('extend', 'decode', 'resize'):
      self._updated |= name in program_list.updates(self._config)
      self._background.need((name, shape))
    elif not build_agents.plays_agents(self._config):  # a server of agents compiles its programs when it opens
      if weights is not None and self._weights is None:
        self._weights = _abstract(weights)
      if self._background.need((name, shape)):
        for urgency, program in self._caches.called(name, shape):
          self._want([program], urgency)

  def played(self, rollout: Rollout, iteration: int) -> None:
    """Compiles the programs that rollouts like this one lead to, if there is such an iteration."""
    if iteration >= self._config.num_iterations:
      return
    t = rollout.trajectory
    batching = self._trainer.settings.estimate.batching
    scored = t.length if batching.whole_rows else t.loss_mask.sum(axis=1)
    length, played = np.asarray(t.length), len(np.unique(t.episode))
    factors = program_list.factors(updated=self._updated)
    job = functools.partial(self._plan, length, np.asarray(scored), played, factors, tokens_to_share(t))
    self._background.want([(('plan', next(self._numbers)), job)], urgency=0)
    for urgency, program in self._caches.ended(length, np.asarray(t.loss_mask).sum(axis=1)):
      self._want([program], urgency)

  def _plan(
    self, length: np.ndarray, scored: np.ndarray, played: int, factors: Sequence[float], tokens: np.ndarray | None
  ) -> None:
    """Asks for the programs of `length` i32[B], `scored` i32[B] and `tokens` i32[B, T], of rows of so many episodes."""
    config, batching = self._config, self._trainer.settings.estimate.batching
    gradients, scores = program_list.updates(config), program_list.scored(config, self._trainer)
    for urgency, factor in enumerate(factors):
      shapes = program_list.shapes_after(config, batching, length, scored, played, factor, tokens)
      wanted = [(name, shape) for name in gradients for shape in shapes['gradient']]
      wanted += [(name, shape) for name in scores for shape in shapes['score']]
      self._want([program for program in wanted if program in self._listed], urgency)
      for gradient, step in gradients.items() if urgency == 0 else ():
        # The optimiser step is the same for all shapes of micro-batches.
        compile_step = functools.partial(self._compile_step, gradient, shapes['gradient'][0])
        self._background.want([((step, ()), compile_step)], urgency)

  def _want(self, programs: list[Program], urgency: int) -> None:
    self._background.want(((p, functools.partial(self._compile, *p)) for p in programs), urgency)

  def _compile(self, name: str, shape: tuple[Any, ...]) -> None:
    trainer = self._trainer
    if name in trainer.scorer.traces:
      batch = abstract_batch(self._config, trainer, shape)
      batch = batch.replace(experts=None) if name == 'logprobs' else batch
      lower_score(trainer.scorer, self._state.params, batch, name).compile()
    elif name in program_list.updates(self._config):
      batch, critic_only = abstract_batch(self._config, trainer, shape), name == 'gradient_critic'
      lower_gradient(trainer.learner, self._state, batch, critic_only=critic_only).compile()
    else:
      self._compile_sampler(name, shape)

  def _compile_step(self, gradient: str, shape: tuple[int, int, int]) -> None:
    batch, critic_only = abstract_batch(self._config, self._trainer, shape), gradient == 'gradient_critic'
    for program in step_programs(self._trainer.learner, self._state, batch, critic_only=critic_only):
      program.lower().compile()

  def _compile_sampler(self, name: str, shape: tuple[Any, ...]) -> None:
    sampler = self._trainer.model.sampler
    if name == 'resize':
      every, before, after = shape
      lower_resize(sampler, abstract_rows(sampler, every, before), after).compile()
      return
    every, part, size, *rest = shape
    width, sampling = (rest[0], PLAIN) if name == 'extend' else (1, rest[0])
    lower_sampler(
      sampler, self._weights, abstract_rows(sampler, every, size), width=width, columns=chunk_columns(self._config),
      sampling=sampling, rows=part, names=(name,),
    )[name].compile()  # fmt: skip


@contextlib.contextmanager
def open_ahead(config: ConfigDict, trainer: Trainer, state: TrainState, background: Background) -> Iterator[None]:
  """Logs how many programs the run may need, and compiles ahead while it is open, if there are threads.

  `background` has as many threads as `threads` says. At the end it is asked to stop, and the caller closes it.
  """
  listed = program_list.programs(config, trainer, program_list.rows(config, trainer.model.sampler))
  count = background.threads
  how = f'compiled in {count} threads before they are needed' if count else 'each compiled when it is needed first'
  _log.info('programs: %s; %s', program_list.describe(listed, images=bool(visual_columns(config))), how)
  if not count:
    yield
    return
  with trainer.model.sampler.observer.told_to(CompileAhead(config, trainer, state, listed, background)):
    try:
      yield
    finally:
      background.stop()


def _abstract(tree: Any) -> Any:
  """Shapes, types and layouts of arrays."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
