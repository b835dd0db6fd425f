"""Assumed lengths of episodes in tokens, and the shapes that a run with such episodes compiles programs for."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Iterator

import numpy as np
from ml_collections import ConfigDict

from ragen_jax.compilers import needed
from ragen_jax.compilers.abstract import chunk_columns, sampler_shapes, shape_of, visual_columns
from ragen_jax.sampling.draw import Sampling
from ragen_jax.training.batches import BatchingSettings
from ragen_jax.training.packing import plan_batches

# Simulated episodes: the spread of a reply's length (of its logarithm), the share of episodes that end in each turn,
# and how the mean of replies changes from the first iteration to the last.
_SPREAD, _ENDING, _FROM, _TO = 0.4, 0.1, 0.8, 1.2


@dataclasses.dataclass(frozen=True)
class Lengths:
  """Tokens of the episodes of a run; the fields of `config.plan`, within the limits of `config.agent`.

  Attributes:
    prompt: of the first observation.
    observation: of each later one.
    reply: of a reply, on average.
    longest: of the longest reply of a turn, over all rows.
    turns: of an episode.
    whole: an episode is one row, and not one for each turn.
    limit: columns of a row.
  """

  prompt: int
  observation: int
  reply: int
  longest: int
  turns: int
  whole: bool
  limit: int

  @property
  def row(self) -> int:
    """Tokens of a row of the update, on average."""
    return min(self._columns(self.reply, self.turns), self.limit)

  @property
  def sampled(self) -> int:
    """Sampled tokens of a row of the update, on average."""
    return min(self.reply * (self.turns if self.whole else 1), self.row)

  @property
  def rows(self) -> int:
    """Rows of an episode."""
    return 1 if self.whole else self.turns

  def _columns(self, reply: int, turns: int) -> int:
    turns = turns if self.whole else 1
    return self.prompt + turns * reply + (turns - 1) * self.observation


def from_config(config: ConfigDict, max_turns: int) -> Lengths:
  """The assumptions of `config.plan`.

  Args:
    config: the run's.
    max_turns: of its environments; `plan.turns=0` takes it.
  """
  p, agent = config.plan, config.agent
  room = agent.max_context - agent.max_response_tokens
  longest = min(p.longest_reply, agent.max_response_tokens)
  seen = visual_columns(config)
  return Lengths(
    prompt=min(p.prompt_tokens + seen, room),
    observation=min(p.observation_tokens + seen, room),
    reply=min(p.reply_tokens, longest),
    longest=longest,
    turns=min(p.turns or max_turns, max_turns),
    whole=agent.context == 'full',
    limit=agent.max_context,
  )


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
    config: the run's.
    lengths: the assumptions.
    batching: how the trainer cuts or packs micro-batches.
    iterations: of the run.
    rows: of the devices in a rollout.
    shards: parts into which rows are divided.
    ahead: the programs that an iteration makes likely (`needed`) are compiled before the next one.

  Returns:
    One for each iteration.
  """
  ready: set[needed.Program] = set()
  awaited: set[needed.Program] = set()
  caches, rng, found = needed.LikelyCaches(config, shards), np.random.default_rng(0), []
  episodes, drawn = config.train.groups * config.train.group_size, needed.samplings(config)['rollout'][0]
  for iteration in range(iterations):
    mean = lengths.reply * (_FROM + (_TO - _FROM) * iteration / max(iterations - 1, 1))
    replies, turns = simulated(rng, lengths, config, episodes, mean)
    calls = list(rollout_calls(config, lengths, replies, turns, rows=rows, shards=shards))
    length, scored = _rows(lengths, batching, replies, turns)
    met = dict.fromkeys([*(c.program(rows, drawn) for c in calls), ('apply', ())])
    met |= dict.fromkeys(_update_shapes(config, lengths, batching, length, scored, rng))
    awaited.update(program for program in met if program not in ready)
    ready.update(met)
    if ahead:
      ready.update(_likely_to_sample(config, caches, met, length, scored))
      ready.update(_likely_to_learn(config, batching, length, scored, needed.factors(updated=iteration > 0)))
    found.append(Compiled(_counts(ready), _counts(awaited)))
  return found


def _counts(programs: Collection[needed.Program]) -> dict[str, int]:
  kinds = dict.fromkeys(('extend', 'decode', 'resize', 'gradient', 'score', 'apply'), 0)
  return kinds | collections.Counter(name for name, _ in programs)


def _likely_to_sample(
  config: ConfigDict,
  caches: needed.LikelyCaches,
  met: Collection[needed.Program],
  length: np.ndarray,
  scored: np.ndarray,
) -> Iterator[needed.Program]:
  """What a run compiles ahead for its sampler in an iteration with these programs; greedy evaluations not included."""
  drawn = needed.samplings(config)['rollout']
  likely = [found for name, shape in met for found in caches.called(name, shape)]
  for _, program in (*likely, *caches.ended(length, scored)):
    if program[0] != 'decode' or program[1][3] in drawn:
      yield program


def _likely_to_learn(
  config: ConfigDict, batching: BatchingSettings, length: np.ndarray, scored: np.ndarray, factors: Iterable[float]
) -> Iterator[needed.Program]:
  """What a run compiles ahead for updates after a rollout of these rows."""
  played = config.train.groups * config.train.group_size
  for factor in factors:
    shapes = needed.shapes_after(config, batching, length, scored, played, factor)
    yield from ((name, shape) for name, own in shapes.items() for shape in own)


def simulated(rng, lengths: Lengths, config: ConfigDict, episodes: int, mean: float) -> tuple[np.ndarray, np.ndarray]:
  """Tokens i32[episodes, turns] of replies, and the turns i32[episodes] that each episode has."""
  replies = _replies(rng, lengths, episodes, mean, config.agent.max_response_tokens)
  ends = rng.random((episodes, lengths.turns)) < _ENDING
  ends[:, -1] = True
  return replies, ends.argmax(axis=1) + 1


def assumed(lengths: Lengths, episodes: int) -> tuple[np.ndarray, np.ndarray]:
  """The same for episodes that all have the assumed turns, and replies around the assumed mean up to the longest."""
  replies = _replies(np.random.default_rng(0), lengths, episodes, lengths.reply, lengths.longest)
  turns = np.arange(lengths.turns)
  replies[turns % episodes, turns] = lengths.longest  # one of each turn
  return replies, np.full(episodes, lengths.turns)


def _replies(rng, lengths: Lengths, episodes: int, mean: float, most: int) -> np.ndarray:
  drawn = mean * np.exp(rng.normal(-(_SPREAD**2) / 2, _SPREAD, (episodes, lengths.turns)))
  return np.clip(drawn, 1, most).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Call:
  """A call of a program of the sampler, with the sizes that it is compiled for.

  Attributes:
    kind: 'extend', 'decode', or 'resize' for each layer.
    rows: of the devices that take part.
    size: columns of the cache; before, where they change. 0 where the cache is not read.
    width: columns of the observation, or of the cache after.
    first: all observations are first prompts.
    steps: tokens that `decode` samples for each row.
    used: those of them that were needed, over all rows.
  """

  kind: str
  rows: int
  size: int
  width: int = 0
  first: bool = False
  steps: int = 0
  used: int = 0

  @property
  def shape(self) -> tuple[int | bool, ...]:
    """What a program is compiled for."""
    return self.rows, self.size, self.width, self.first

  def program(self, every: int, sampling: Sampling) -> needed.Program:
    """The program as `Shapes.programs` names it, with `every` rows on the devices, and tokens drawn like that."""
    if self.kind == 'extend':
      return self.kind, (every, *self.shape)
    return self.kind, (every, self.size, self.width) if self.kind == 'resize' else (every, *self.shape[:2], sampling)


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


def steps_of(calls: Iterable[Call]) -> Steps:
  """The steps of the calls of a rollout."""
  decode, extend, rows, used = 0, 0, 0, 0
  for c in calls:
    extend += c.kind == 'extend'
    decode, rows, used = decode + c.steps, rows + c.steps * c.rows, used + c.used
  return Steps(decode, extend, 1 - used / max(rows, 1))


def rollout_calls(
  config: ConfigDict, lengths: Lengths, replies: np.ndarray, turns: np.ndarray, *, rows: int, shards: int
) -> Iterator[Call]:
  """The calls of the sampler in a rollout, as `SamplerSpeaker` makes them.

  Args:
    config: the run's.
    lengths: the assumptions.
    replies: i32[E, turns], tokens of replies.
    turns: i32[E], turns of the episodes.
    rows: of the devices.
    shards: parts into which they are divided.
  """
  agent, chunk, sizes = config.agent, chunk_columns(config), sampler_shapes(config, rows, shards)
  room = lengths.limit - agent.max_response_tokens
  slots = np.arange(rows).reshape(-1, shards).T.copy()  # the episode of each row of the devices, -1 if none
  waiting = list(range(rows, len(turns)))
  turn, left, used = (np.zeros(len(turns), np.int64) for _ in range(3))
  size = 0

  def resize(columns: int) -> Iterator[Call]:
    nonlocal size
    wanted = sizes.cache(columns)
    if size and wanted > size:
      yield Call('resize', rows, size, wanted)
    size = max(size, wanted)

  while True:
    while waiting and (slots < 0).any():
      shard = int((slots < 0).sum(axis=1).argmax())
      slots[shard, np.flatnonzero(slots[shard] < 0)[0]] = waiting.pop(0)
    held = slots[slots >= 0]
    if not len(held):
      return
    asks = held[left[held] == 0]
    fresh = turn[asks] == 0 if lengths.whole else np.ones(len(asks), bool)
    used[asks[fresh]] = 0
    feeds = []
    for first, fed, tokens in ((True, asks[fresh], lengths.prompt), (False, asks[~fresh], lengths.observation)):
      if len(fed):
        before = int(used[fed].max())
        feeds.append((first, fed, before, sizes.pieces(tokens, before)))
        used[fed] = np.minimum(used[fed] + tokens, room)
    longest = int(used[held].max())
    wanted = max((before + sum(pieces) for _, _, before, pieces in feeds), default=0)
    yield from resize(max(longest + chunk, min(wanted, sizes.caches[-1])))
    for first, fed, _, pieces in feeds:
      calls, part = sizes.calls(int(np.isin(slots, fed).sum(axis=1).max()))
      for i in range(calls * len(pieces)):
        at = i % len(pieces)
        yield Call('extend', part * shards, size, pieces[at], first and not at)
    left[asks] = replies[asks, turn[asks]]
    bucket = sizes.rows
    if agent.drop_finished:
      bucket = sizes.decoded_rows(int((slots >= 0).sum(axis=1).max()))
    while True:
      steps = min(chunk, int(left[held].max()))
      if agent.schedule != 'lockstep':
        steps = min(steps, _until(np.where(slots >= 0, left[slots], 0), sizes.enough(bucket)))
      taken = np.minimum(left[held], steps)
      yield Call('decode', bucket * shards, size, steps=steps, used=int(taken.sum()))
      used[held] += taken
      left[held] -= taken
      if agent.schedule != 'lockstep' or not left[held].any():
        break
      live = left[held] > 0
      longest = int(used[held[live]].max())
      if agent.drop_finished:
        bucket = sizes.decoded_rows(int((np.where(slots >= 0, left[slots], 0) > 0).sum(axis=1).max()))
      yield from resize(longest + chunk)
    done = held[left[held] == 0]
    turn[done] += 1
    slots[np.isin(slots, done[turn[done] >= turns[done]])] = -1


def _until(left: np.ndarray, enough: int) -> int:
  """Steps until a shard has enough complete replies: `left` i64[shards, rows], 0 for rows without a reply."""
  ordered = np.sort(np.where(left > 0, left, np.iinfo(np.int64).max), axis=1)
  return int(ordered[:, min(enough, left.shape[1]) - 1].min())


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


def _update_shapes(
  config: ConfigDict,
  lengths: Lengths,
  batching: BatchingSettings,
  length: np.ndarray,
  scored: np.ndarray,
  rng: np.random.Generator,
) -> Iterator[needed.Program]:
  size, groups = config.optimizer.mini_batch_size * lengths.rows, []
  for _ in range(config.algorithm.ppo_epochs):
    order = rng.permutation(len(length)).astype(np.int32)
    groups += [order[start : start + size] for start in range(0, len(order), size)]
  for kind, parts in (('gradient', groups), ('score', [np.arange(len(length))])):
    for plans in plan_batches(parts, length, scored, batching):
      yield from ((kind, shape_of(plan)) for plan in plans)
