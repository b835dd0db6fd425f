"""The programs that a run may need, whatever the lengths of its episodes: a closed list, known before the run."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from ragen_jax import build, build_agents
from ragen_jax.agent.player import shares_at_once
from ragen_jax.agent.sampler_speaker import rows_at_once
from ragen_jax.distributed.sharding import row_shards
from ragen_jax.planning.abstract import chunk_columns, episodes, prompt_room, sampler_shapes, shape_of
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
  """The programs of rollouts, evaluations, scoring and updates of a run; `rows` of the devices by phase.

  Programs that take little time to compile are not listed: those of environments and of advantages, the copy of the
  weights for decoding, and the copies of prompts that rows share. Nor are the measurements of `config.monitor` and, if
  programs play the episodes, rollouts.
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
  """Rows of the devices in 'rollout' and 'evaluation', of a share if threads play several. Every process must call."""
  limits, room, shards = build.episode_limits(config, []), build.trained_images(config), sampler.share.shards
  found = {}
  for phase, name in (('rollout', 'train'), ('evaluation', 'eval')):
    section, parts = config[name], shards
    if room is None and not build_agents.plays_agents(config):
      specs = build.env_specs(config, tuple(section.tags), build.group_counts(section, name))
      parts *= shares_at_once(sampler, limits, specs, section.group_size)
    found[phase] = shards * rows_at_once(sampler, limits, episodes(config, phase) // parts, room)
  return found


def of_sampler(config: ConfigDict, shards: int, rows: Mapping[str, int]) -> list[Program]:
  """The programs of rollouts and evaluations of environments; see `Shapes.programs`."""
  found = []
  for phase, drawn in samplings(config).items():
    found += sampler_shapes(config, rows[phase], shards).programs(
      drawn, room=prompt_room(config), drop_finished=config.agent.drop_finished,
    )  # fmt: skip
  return list(dict.fromkeys(found))


def samplings(config: ConfigDict) -> dict[str, tuple[Sampling, ...]]:
  """How tokens are drawn in an evaluation and in a rollout, as programs are compiled for it."""
  greedy = (GREEDY.compiled,) if config.eval.greedy_too else ()
  evaluation = dict.fromkeys((build.sampling(config.eval).compiled, *greedy))
  return {'evaluation': tuple(evaluation), 'rollout': (build.sampling(config.train).compiled,)}


def scored(config: ConfigDict, trainer: Trainer) -> tuple[str, ...]:
  """Names of the programs that score rows, as in `Scorer.traces`."""
  s, alone = trainer.settings.estimate, config.model.separate_critic or config.algorithm.replay_experts
  again = s.old_logprobs == 'trainer'
  wanted = {
    'score': again or (trainer.settings.reference and not alone),
    'logprobs': trainer.settings.reference and alone,
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

  - When prompts of a width are fed to a number of rows for the first time: the programs that do so with the cache of
    this call and with the next larger cache, those that feed this width to other numbers of rows with the cache of this
    call, those that sample for all rows with these two caches, and the one that enlarges the first to the second.
  - When a cache is enlarged for the first time: the same programs for the larger cache.
  - When tokens are sampled for a part of the rows for the first time: those that sample for all other parts, with the
    same cache, and from then on also with each cache that is made by enlarging.
  - When a rollout has ended: those of the first point, up to the cache that replies longer by the largest of `FACTORS`
    would need; and those that sample for parts of the rows, from the cache for the smallest factor to that for the
    largest.
  """

  def __init__(self, config: ConfigDict, shards: int):
    """Nothing has been called; rows are divided into `shards` parts."""
    self._config, self._shards = config, shards
    self._fed: dict[tuple[int, int, int], int] = {}  # rows, fed rows and width -> the cache of the first call
    self._in_parts: set[int] = set()  # rows of which parts have sampled

  def called(self, name: str, shape: tuple[Any, ...]) -> list[tuple[int, Program]]:
    """What is likely after a call of a program of `Shapes.programs`, each with its urgency (`Background.want`)."""
    if name == 'extend':
      every, part, size, width = shape
      if (every, part, width) in self._fed:
        return []
      self._fed[every, part, width] = size
      larger = (n for n in self._caches(every) if n > size)
      return list(self._programs(every, part, width, next(larger, size)))
    if name not in ('decode', 'resize'):
      return []
    every, size = shape[0], shape[2]
    found: list[tuple[int, Program]] = []
    if name == 'resize':
      found += (x for fed in self._fed if fed[0] == every for x in self._programs(*fed, size))
      found += self._parts(every, size, size) if every in self._in_parts else ()
    elif shape[1] < every:
      self._in_parts.add(every)
      found += ((n, p) for n, p in self._parts(every, size, size) if p[1][3] == shape[3])
    return found

  def ended(self, length: np.ndarray, scored: np.ndarray) -> list[tuple[int, Program]]:
    """What is likely after a rollout of rows with `length` i32[B] columns, `scored` i32[B] of them sampled."""
    shortest, longest = (
      int((length + (factor - 1) * scored).max(initial=0)) + chunk_columns(self._config)
      for factor in (min(FACTORS), max(FACTORS))
    )
    found: list[tuple[int, Program]] = []
    for every in dict.fromkeys(rows for rows, _, _ in self._fed):
      caches = self._caches(every)
      first, last = (next((n for n in caches if n >= columns), caches[-1]) for columns in (shortest, longest))
      for fed in self._fed:
        if fed[0] == every:
          found += self._programs(*fed, last)
      found += self._parts(every, first, last)
    return found

  def _parts(self, every: int, smallest: int, largest: int) -> Iterator[tuple[int, Program]]:
    """Those that sample for parts of the rows, with the caches from the smallest to the largest."""
    for p in self._listed(every):
      if p[0] == 'decode' and p[1][1] < every and smallest <= p[1][2] <= largest:
        yield 2, p

  def _caches(self, every: int) -> tuple[int, ...]:
    return sampler_shapes(self._config, every, self._shards).caches

  def _listed(self, every: int) -> list[Program]:
    return of_sampler(self._config, self._shards, {'rollout': every, 'evaluation': every})

  def _programs(self, every: int, part: int, width: int, largest: int) -> Iterator[tuple[int, Program]]:
    """Those of the caches from the one that the width was fed to first, to the largest."""
    size = self._fed[every, part, width]
    for name, shape in self._listed(every):
      rows, at = (every, shape[1]) if name == 'resize' else shape[1:3]
      if at < size or shape[2] > largest:
        continue
      if name == 'extend':
        wanted = shape[3] == width and (rows == part or at == size)
      else:
        wanted = rows == every
      if wanted:
        yield 1 + (at > size), (name, shape)


def factors(*, updated: bool) -> tuple[float, ...]:
  """Factors for which updates and scoring are compiled after a rollout; before the first update, those near 1."""
  return FACTORS if updated else tuple(factor for factor in FACTORS if abs(factor - 1) < 0.1)


def shapes_after(
  config: ConfigDict,
  batching: BatchingSettings,
  length: np.ndarray,
  scored: np.ndarray,
  played: int,
  factor: float,
  tokens: np.ndarray | None = None,
) -> dict[str, list[tuple[int, int, int]]]:
  """The shapes of micro-batches of a rollout like another one.

  They are those of 'gradient', whose rows are divided over mini-batches, and of 'score'.

  Args:
    length: i32[B], columns of the rows of the other rollout.
    scored: i32[B], their scored tokens.
    played: its episodes.
    factor: the number of scored tokens is multiplied with it; the other columns stay.
    tokens: i32[B, T], of its rows, if rows may share their beginnings; None if they may not.
  """
  rng, rollout = np.random.default_rng(0), episodes(config, 'rollout')
  wanted = max(len(length) * rollout // played, 1)
  rows = rng.choice(len(length), wanted, replace=wanted > len(length))
  length, more = length[rows], np.ceil(factor * scored[rows]).astype(np.int64)
  longer = np.minimum(length - scored[rows] + more, config.agent.max_context)
  if tokens is not None:
    tokens = _with_replies(tokens, rows, length, scored[rows], int(longer.max()))
  scored, every = np.minimum(more, longer), np.arange(wanted)
  mini_batches = np.array_split(every, min(max(rollout // config.optimizer.mini_batch_size, 1), wanted))
  return {
    name: list(dict.fromkeys(shape_of(p) for own in plan_batches(parts, longer, scored, batching, tokens) for p in own))
    for name, parts in (('gradient', mini_batches), ('score', [every]))
  }


def _with_replies(
  tokens: np.ndarray, rows: np.ndarray, length: np.ndarray, scored: np.ndarray, width: int
) -> np.ndarray:
  """The tokens of chosen rows, i32[n, width]; those after a row's end, and a repeated row's replies, no other row has.

  `rows`, i64[n], chooses rows of tokens i32[B, T]; `length` and `scored`, i64[n], are their columns and scored tokens.
  """
  number, columns = np.arange(len(rows))[:, None], np.arange(width)
  repeated = np.ones(len(rows), bool)
  repeated[np.unique(rows, return_index=True)[1]] = False
  own = columns >= (length - np.where(repeated, scored, 0))[:, None]
  found = np.pad(tokens[rows, :width], ((0, 0), (0, max(width - tokens.shape[1], 0))))
  return np.where(own, -1 - number, found)


def describe(found: Sequence[Program], *, images: bool) -> str:
  """How many programs of each name there are, and whether a run can need more, in words; `images` as below."""
  number, missing = _counted(found), uncounted(found, images=images)
  return f'{number}, not counting {missing}' if missing else f'at most {number}, whatever the lengths of episodes'


def _counted(found: Sequence[Program]) -> str:
  counts = collections.Counter(name for name, _ in found)
  return f'{len(found)} (' + ', '.join(f'{n} {name}' for name, n in counts.items()) + ')'


def uncounted(found: Sequence[Program], *, images: bool) -> str:
  """What a list of `programs` does not count, in words; '' if it is complete.

  With images, vision towers, the further tables of packed rows (`ImageTableSizes`), and prompts that are fed at the end
  of the context (`SamplerSpeaker`) have other programs.
  """
  counts = collections.Counter(name for name, _ in found if name not in ('extend', 'decode', 'resize'))
  parts = ['other programs with images'] if images else []
  if max(counts.values(), default=0) >= _MOST:
    parts.append(f'shapes of micro-batches after the first {_MOST}')
  return ' and '.join(parts)
