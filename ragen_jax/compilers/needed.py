"""The programs that a run may need, whatever the lengths of its episodes: a closed list, known before the run."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from ragen_jax import build, build_agents
from ragen_jax.agent.sampler_speaker import rows_at_once
from ragen_jax.compilers.abstract import chunk_columns, episodes, planned_room, sampler_shapes, shape_of
from ragen_jax.distributed.sharding import row_shards
from ragen_jax.sampling.draw import GREEDY, Sampling
from ragen_jax.sampling.sampler import Sampler
from ragen_jax.training.batches import BatchingSettings
from ragen_jax.training.packing import bin_shapes, plan_batches
from ragen_jax.training.trainer import Trainer
from ragen_jax.utils.sizes import round_up

# Tokens of replies in the next rollouts, as factors of those of the last one, the most urgent first.
FACTORS = (1.0, 1.08, 0.92, 1.16)

# The most shapes of micro-batches that are listed.
_MOST = 100_000

# A program: its name, and what it is compiled for, as the observers of `Sampler`, `Learner` and `Scorer` are told.
Program = tuple[str, tuple[Any, ...]]


def programs(config: ConfigDict, trainer: Trainer, rows: Mapping[str, int]) -> list[Program]:
  """The programs of rollouts, evaluations, scoring and updates of a run.

  Programs that take little time to compile are not listed: those of environments and of advantages, and the copy of
  the weights for decoding. Nor are the measurements of `config.monitor` and, if programs play the episodes, rollouts.

  Args:
    config: the run's.
    trainer: of the config.
    rows: of the devices in 'rollout' and 'evaluation'.
  """
  found = [] if build_agents.plays_agents(config) else of_sampler(config, row_shards(trainer.model.mesh), rows)
  for name in scored(config, trainer):
    found += [(name, shape) for shape in batch_shapes(config, trainer)]
  if trainer.settings.estimate.bootstrap_truncated:
    found += [('values', shape) for shape in bootstrap_shapes(config, trainer)]
  for name, step in updates(config).items():
    found += [*((name, shape) for shape in batch_shapes(config, trainer)), (step, ())]
  return list(dict.fromkeys(found))


def rows(config: ConfigDict, sampler: Sampler) -> dict[str, int]:
  """Rows of the devices in 'rollout' and 'evaluation', as `SamplerSpeaker` chooses them. Every process must call."""
  limits, room = build.episode_limits(config, []), planned_room(config)
  share = sampler.share
  return {
    phase: share.shards * rows_at_once(sampler, limits, episodes(config, phase) // share.shards, room)
    for phase in ('rollout', 'evaluation')
  }


def of_sampler(config: ConfigDict, shards: int, rows: Mapping[str, int]) -> list[Program]:
  """The programs of rollouts and evaluations of environments; see `Shapes.programs`."""
  agent, found = config.agent, []
  for phase, drawn in samplings(config).items():
    found += sampler_shapes(config, rows[phase], shards).programs(
      drawn, room=agent.max_context - agent.max_response_tokens, whole=agent.context == 'full',
      drop_finished=agent.drop_finished,
    )  # fmt: skip
  return list(dict.fromkeys(found))


def samplings(config: ConfigDict) -> dict[str, tuple[Sampling, ...]]:
  """How tokens are drawn in an evaluation and in a rollout, as programs are compiled for it."""
  greedy = (GREEDY.compiled,) if config.eval.greedy_too else ()
  evaluation = dict.fromkeys((build.sampling(config.eval).compiled, *greedy))
  return {'evaluation': tuple(evaluation), 'rollout': (build.sampling(config.train).compiled,)}


def scored(config: ConfigDict, trainer: Trainer) -> tuple[str, ...]:
  """Names of the programs that score rows, as in `Scorer.traces`."""
  s, separate = trainer.settings.estimate, config.model.separate_critic
  again = s.old_logprobs == 'trainer'
  wanted = {
    'score': again or (trainer.settings.reference and not separate),
    'logprobs': trainer.settings.reference and separate,
    'values': s.bootstrap_truncated or (s.needs_critic and not s.records_values and not again),
  }
  return tuple(name for name, needed in wanted.items() if needed)


def updates(config: ConfigDict) -> dict[str, str]:
  """Names of the programs of gradients, with those of the optimiser steps that follow."""
  warmup, iterations = config.optimizer.critic_warmup, config.num_iterations
  found = {'gradient_critic': 'apply_critic'} if warmup else {}
  return found | ({'gradient': 'apply'} if warmup < iterations else {})


def batch_shapes(config: ConfigDict, trainer: Trainer) -> list[tuple[int, int, int]]:
  """Rows or bins, columns and scored tokens of micro-batches.

  Without packing, a small `length_step` leads to so many that only the first `_MOST` are listed.
  """
  batching: BatchingSettings = trainer.settings.estimate.batching
  longest = config.agent.max_context
  if batching.packing is not None:
    return bin_shapes(batching.packing, longest)
  half = max(batching.length_step // 2, 1)
  whole = batching.whole_rows
  turns = trainer.player.max_turns if config.agent.context == 'full' else 1
  most = longest if whole else min(config.agent.max_response_tokens * turns, longest)
  found = (
    (batching.micro_batch_size, width, replies)
    for width in range(batching.length_step, round_up(longest, batching.length_step) + 1, batching.length_step)
    for replies in range(half, min(round_up(most, half), round_up(width, half)) + 1, half)
    if not whole or replies > width - batching.length_step
  )
  return list(itertools.islice(found, _MOST))


def bootstrap_shapes(config: ConfigDict, trainer: Trainer) -> list[tuple[int, int, int]]:
  """The same for `Estimator.bootstrap`: one scored token of each row, in the column after its last one."""
  batching: BatchingSettings = trainer.settings.estimate.batching
  longest = config.agent.max_context + 1
  if batching.packing is not None:
    # If a row is wider than the bins, all widths are others.
    return list(dict.fromkeys((*bin_shapes(batching.packing), *bin_shapes(batching.packing, longest))))
  step, half = batching.length_step, max(batching.length_step // 2, 1)
  widths = range(step, round_up(longest, step) + 1, step)
  return [(batching.micro_batch_size, width, half) for width in itertools.islice(widths, _MOST)]


class LikelyCaches:
  """The sampler's programs that a run is likely to need next, in view of its calls and of the rows of its rollouts.

  - When prompts of a width are fed for the first time: the programs that feed this width to the cache of this call and
    to the next larger cache, those that sample for all rows with these two caches, and the one that enlarges the first
    to the second. Programs that feed all rows at once are among them only if this call fed all rows. (This does not
    hold if no program feeds fewer rows.) None of them feeds first prompts if this call fed those of all episodes.
  - When tokens are sampled for a part of the rows for the first time: the program for the next smaller part.
  - When a cache is enlarged for the first time: those that feed the known widths to the larger cache, and the one that
    samples for all rows with it. If parts of the rows have sampled, it is the one for the smallest such part.
  - When a rollout has ended: those that feed the known widths, up to the cache that replies longer by the largest of
    `FACTORS` would need. With each cache from the one for the smallest factor on, those that sample for as many rows
    as would then need this cache, and for fewer.
  """

  def __init__(self, config: ConfigDict, shards: int, rows: Mapping[str, int]):
    """Nothing has been called.

    Args:
      config: the run's.
      shards: parts into which rows are divided.
      rows: of the devices in 'rollout' and 'evaluation', or in one of them.
    """
    self._config, self._shards = config, shards
    # Rows that get first prompts again and again: those of each turn, or of episodes that wait for a row.
    turns = config.agent.context != 'full'
    self._begin_again = {n for phase, n in rows.items() if turns or n < episodes(config, phase)}
    # Rows, width and whether they are first prompts -> the cache of the first call, and whether it fed all rows.
    self._fed: dict[tuple[int, int, bool], tuple[int, bool]] = {}
    self._sampled: dict[int, int] = {}  # rows -> the fewest of them that a call has sampled for

  def called(self, name: str, shape: tuple[Any, ...]) -> list[tuple[int, Program]]:
    """What is likely after the first call of a program of `Shapes.programs`, with urgencies (`Background.want`)."""
    if name == 'extend':
      every, part, size, width, begin = shape
      if (every, width, begin) in self._fed:
        return []
      self._fed[every, width, begin] = size, part == every
      larger = next((n for n in self._caches(every) if n > size), size)
      sampling = (found for n in (size, larger) for found in self._sampling(every, n, (every,), 1 + (n > size)))
      return [*self._feeding(every, width, begin, larger), *dict.fromkeys(sampling)]
    if name == 'decode':
      every, part, size, sampling = shape
      if part == every:
        return []
      self._sampled[every] = min(part, self._sampled.get(every, part))
      smaller = [n for n in self._parts(every) if n < part][:1]
      return [(n, p) for n, p in self._sampling(every, size, smaller, 2) if p[1][3] == sampling]
    if name == 'resize':
      every, _, size = shape
      if fed := [key for key in self._fed if key[0] == every]:
        feeding = (found for key in fed for found in self._feeding(*key, size))
        return [*feeding, *self._sampling(every, size, (self._sampled.get(every, every),), 2)]
    return []

  def ended(self, length: np.ndarray, scored: np.ndarray) -> list[tuple[int, Program]]:
    """What is likely after a rollout of rows with `length` i32[B] columns, `scored` i32[B] of them sampled."""
    chunk, factors = chunk_columns(self._config), (min(FACTORS), max(FACTORS))
    fewer, more = ((length + (factor - 1) * scored).astype(np.int64) + chunk for factor in factors)
    found: list[tuple[int, Program]] = []
    for every in dict.fromkeys(rows for rows, _, _ in self._fed):
      caches = self._caches(every)
      first, last = (next((n for n in caches if n >= x.max(initial=0)), caches[-1]) for x in (fewer, more))
      found += (x for fed in self._fed if fed[0] == every for x in self._feeding(*fed, last))
      for smaller, size in zip((0, *caches), caches, strict=False):
        if first <= size <= last:
          enough = [n for n in self._parts(every) if n >= (more > smaller).sum()]
          parts = [n for n in self._parts(every) if n <= min(enough, default=every)]
          found += self._sampling(every, size, parts, 2)
    return found

  def _caches(self, every: int) -> tuple[int, ...]:
    return sampler_shapes(self._config, every, self._shards).caches

  def _listed(self, every: int, name: str) -> list[Program]:
    listed = of_sampler(self._config, self._shards, {'rollout': every, 'evaluation': every})
    return [program for program in listed if program[0] == name]

  def _parts(self, every: int) -> list[int]:
    """Numbers of rows that programs sample for, in descending order."""
    return sorted({shape[1] for _, shape in self._listed(every, 'decode')}, reverse=True)

  def _sampling(self, every: int, size: int, parts: Collection[int], urgency: int) -> Iterator[tuple[int, Program]]:
    """Those that sample for such numbers of rows with a cache."""
    for p in self._listed(every, 'decode'):
      if p[1][1] in parts and p[1][2] == size:
        # An evaluation's greedy part comes after its sampled one.
        yield urgency + (p[1][3].temperature == 0), p

  def _feeding(self, every: int, width: int, begin: bool, largest: int) -> Iterator[tuple[int, Program]]:
    """Those that feed and enlarge, from the cache that the width was fed to first, to the largest."""
    size, whole = self._fed[every, width, begin]
    for p in self._listed(every, 'resize'):
      if size <= p[1][1] and p[1][2] <= largest:
        yield 1 + (p[1][1] > size), p
    if begin and whole and every not in self._begin_again:
      return
    listed = [p for p in self._listed(every, 'extend') if p[1][3:] == (width, begin) and size <= p[1][2] <= largest]
    parts = any(p[1][1] < every for p in listed)
    for p in listed:
      if p[1][1] < every or not parts or (whole and not (begin and p[1][2] > size)):
        yield 1 + (p[1][2] > size), p


def factors(*, updated: bool) -> tuple[float, ...]:
  """The factors for which programs of updates and of scoring are compiled after a rollout.

  Before the first update, those within 10 % of 1.
  """
  return FACTORS if updated else tuple(factor for factor in FACTORS if abs(factor - 1) < 0.1)


def shapes_after(
  config: ConfigDict, batching: BatchingSettings, length: np.ndarray, scored: np.ndarray, played: int, factor: float
) -> dict[str, list[tuple[int, int, int]]]:
  """The shapes of micro-batches of a rollout like another one.

  Args:
    config: the run's.
    batching: the sizes of micro-batches.
    length: i32[B], columns of the rows of the other rollout.
    scored: i32[B], their scored tokens.
    played: its episodes.
    factor: the number of scored tokens is multiplied with it; the other columns stay.

  Returns:
    Shapes of 'gradient', whose rows are divided over mini-batches, and of 'score'.
  """
  rng, rollout = np.random.default_rng(0), episodes(config, 'rollout')
  wanted = max(len(length) * rollout // played, 1)
  rows = rng.choice(len(length), wanted, replace=wanted > len(length))
  more = np.ceil(factor * scored).astype(np.int64)
  length = np.minimum(length - scored + more, config.agent.max_context)
  scored = np.minimum(more, length)
  mini_batches = np.array_split(rows, min(max(rollout // config.optimizer.mini_batch_size, 1), wanted))
  return {
    name: list(dict.fromkeys(shape_of(p) for own in plan_batches(parts, length, scored, batching) for p in own))
    for name, parts in (('gradient', mini_batches), ('score', [rows]))
  }


def describe(found: Sequence[Program], *, images: bool) -> str:
  """How many programs of each name there are, and whether a run can need more, in words; `images` as below."""
  number, missing = _counted(found), uncounted(found, images=images)
  return f'{number}, not counting {missing}' if missing else f'at most {number}, whatever the lengths of episodes'


def _counted(found: Sequence[Program]) -> str:
  counts = collections.Counter(name for name, _ in found)
  return f'{len(found)} (' + ', '.join(f'{n} {name}' for name, n in counts.items()) + ')'


def uncounted(found: Sequence[Program], *, images: bool) -> str:
  """What a list does not count, in words; '' if it is complete.

  Args:
    found: see `programs`.
    images: the run has images. Vision towers, the further tables of packed rows (`ImageRoom`), and prompts that are fed
      at the end of the context (`SamplerSpeaker`) have other programs.
  """
  counts = collections.Counter(name for name, _ in found if name not in ('extend', 'decode', 'resize'))
  parts = ['other programs with images'] if images else []
  if max(counts.values(), default=0) >= _MOST:
    parts.append(f'shapes of micro-batches after the first {_MOST}')
  return ' and '.join(parts)
