"""How many programs a run with episodes of assumed lengths has compiled after each of its iterations."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Iterator

import numpy as np
from ml_collections import ConfigDict

from ragen_jax.planning import program_list
from ragen_jax.planning.abstract import shape_of, visual_columns
from ragen_jax.planning.calls import rollout_calls
from ragen_jax.planning.lengths import Lengths, draw_replies
from ragen_jax.training.batches import BatchingSettings
from ragen_jax.training.packing import plan_batches

# The share of episodes that end in each turn, and how the mean of replies changes from the first iteration to the last.
_ENDING, MEAN_FROM, MEAN_TO = 0.1, 0.8, 1.2


@dataclasses.dataclass(frozen=True)
class Compiled:
  """Programs of a run after an iteration, by kind; kinds are those of `programs.Program`.

  Attributes:
    programs: numbers of those that are compiled.
    awaited: numbers of those among them that the run waited for, since they were not compiled ahead.
  """

  programs: dict[str, int]
  awaited: dict[str, int]


def shapes_of_run(
  config: ConfigDict, lengths: Lengths, batching: BatchingSettings, iterations: int, *, rows: int, shards: int,
  ahead: bool,
) -> list[Compiled]:  # fmt: skip
  """How many programs of each kind a run has compiled after each of its iterations.

  Episodes are simulated: replies are log-normal around the assumed mean, which rises over the run, and some episodes
  end in every turn. The shapes follow as in a run, from `SamplerSpeaker` and `plan_batches`.

  Args:
    batching: how the trainer cuts or packs micro-batches.
    rows: of the devices in a rollout.
    shards: parts into which rows are divided.
    ahead: the programs that an iteration makes likely (`needed`) are compiled before the next one.

  Returns:
    One for each iteration.
  """
  ready: set[program_list.Program] = set()
  awaited: set[program_list.Program] = set()
  caches, rng, found = program_list.LikelyCaches(config, shards), np.random.default_rng(0), []
  episodes, drawn = config.train.groups * config.train.group_size, program_list.samplings(config)['rollout'][0]
  for iteration in range(iterations):
    mean = lengths.reply * (MEAN_FROM + (MEAN_TO - MEAN_FROM) * iteration / max(iterations - 1, 1))
    replies, turns = simulated(rng, lengths, config, episodes, mean)
    calls = list(
      rollout_calls(config, lengths, replies, turns, rows=rows, shards=shards, group_size=config.train.group_size)
    )
    length, scored = _rows(lengths, batching, replies, turns)
    # Rows with images share nothing.
    tokens = None if visual_columns(config) else _tokens(lengths, length, turns, config.train.group_size)
    met = dict.fromkeys([*(c.program(rows, drawn) for c in calls), ('apply', ())])
    met |= dict.fromkeys(_update_shapes(config, lengths, batching, length, scored, tokens, rng))
    awaited.update(program for program in met if program not in ready)
    ready.update(met)
    if ahead:
      ready.update(_likely_to_sample(config, caches, met, length, scored))
      ready.update(
        _likely_to_learn(config, batching, length, scored, tokens, program_list.factors(updated=iteration > 0))
      )
    found.append(Compiled(_counts(ready), _counts(awaited)))
  return found


def simulated(rng, lengths: Lengths, config: ConfigDict, episodes: int, mean: float) -> tuple[np.ndarray, np.ndarray]:
  """Tokens i64[episodes, turns] of replies, and the turns i64[episodes] that each episode has."""
  replies = draw_replies(rng, lengths, episodes, mean, config.agent.max_response_tokens)
  ends = rng.random((episodes, lengths.turns)) < _ENDING
  ends[:, -1] = True
  return replies, ends.argmax(axis=1) + 1


def _counts(programs: Collection[program_list.Program]) -> dict[str, int]:
  kinds = dict.fromkeys(('extend', 'decode', 'resize', 'gradient', 'score', 'apply'), 0)
  return kinds | collections.Counter(name for name, _ in programs)


def _likely_to_sample(
  config: ConfigDict,
  caches: program_list.LikelyCaches,
  met: Collection[program_list.Program],
  length: np.ndarray,
  scored: np.ndarray,
) -> Iterator[program_list.Program]:
  """What a run compiles ahead for its sampler in an iteration with these programs; greedy evaluations not included."""
  drawn = program_list.samplings(config)['rollout']
  likely = [found for name, shape in met for found in caches.called(name, shape)]
  for _, program in (*likely, *caches.ended(length, scored)):
    if program[0] != 'decode' or program[1][3] in drawn:
      yield program


def _likely_to_learn(
  config: ConfigDict,
  batching: BatchingSettings,
  length: np.ndarray,
  scored: np.ndarray,
  tokens: np.ndarray | None,
  factors: Iterable[float],
) -> Iterator[program_list.Program]:
  """What a run compiles ahead for updates after a rollout of these rows."""
  played = config.train.groups * config.train.group_size
  for factor in factors:
    shapes = program_list.shapes_after(config, batching, length, scored, played, factor, tokens)
    yield from ((name, shape) for name, own in shapes.items() for shape in own)


def _rows(
  lengths: Lengths, batching: BatchingSettings, replies: np.ndarray, turns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Columns i64[B] and scored tokens i64[B] of the rows of an update."""
  played = np.arange(lengths.turns)[None] < turns[:, None]
  if lengths.whole:
    sampled = np.where(played, replies, 0).sum(axis=1)
    length = lengths.prompt + sampled + (turns - 1) * lengths.observation
  else:
    sampled = replies[played]
    length = lengths.prompt + sampled
  length = np.minimum(length, lengths.limit)
  return length, length if batching.whole_rows else np.minimum(sampled, length)


def _tokens(lengths: Lengths, length: np.ndarray, turns: np.ndarray, group_size: int) -> np.ndarray:
  """Tokens i64[B, T] of rows that share what they are assumed to: rules, and in a group the first prompt."""
  group, columns = np.arange(len(turns)) // group_size, np.arange(length.max(initial=0))
  prompt = group if lengths.whole else np.repeat(group, turns)
  if not lengths.whole:  # prompts of later turns are their own
    first = np.cumsum(turns) - turns
    later = ~np.isin(np.arange(len(length)), first)
    prompt[later] = len(turns) + np.flatnonzero(later)
  own = -1 - np.arange(len(length))[:, None]
  return np.where(columns < lengths.common, 0, np.where(columns < lengths.prompt, 1 + prompt[:, None], own))


def _update_shapes(
  config: ConfigDict,
  lengths: Lengths,
  batching: BatchingSettings,
  length: np.ndarray,
  scored: np.ndarray,
  tokens: np.ndarray | None,
  rng: np.random.Generator,
) -> Iterator[program_list.Program]:
  size, groups = config.optimizer.mini_batch_size * lengths.rows, []
  for _ in range(config.algorithm.ppo_epochs):
    order = rng.permutation(len(length)).astype(np.int32)
    groups += [order[start : start + size] for start in range(0, len(order), size)]
  for kind, parts in (('gradient', groups), ('score', [np.arange(len(length))])):
    for plans in plan_batches(parts, length, scored, batching, tokens):
      yield from ((kind, shape_of(plan)) for plan in plans)
