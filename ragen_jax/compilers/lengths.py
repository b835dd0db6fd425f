"""Assumed lengths of episodes in tokens, and the shapes that a run with such episodes compiles programs for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from ml_collections import ConfigDict

from ragen_jax.agent.rollout import round_up
from ragen_jax.training.batches import BatchingSettings, plan_micro_batches

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

  def before(self, turn: int) -> int:
    """Columns of the longest row before the observation of a turn; replies are between the mean and the longest."""
    if turn == 0 or not self.whole:
      return 0
    return min(self._columns((self.reply + self.longest) // 2, turn), self.limit)

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
  return Lengths(
    prompt=min(p.prompt_tokens, room),
    observation=min(p.observation_tokens, room),
    reply=min(p.reply_tokens, longest),
    longest=longest,
    turns=min(p.turns or max_turns, max_turns),
    whole=agent.context == 'full',
    limit=agent.max_context,
  )


def observation_columns(config: ConfigDict, tokens: int) -> int:
  """Columns of an observation, as `SamplerSpeaker` rounds them."""
  return round_up(tokens, max(config.length_step // 4, 1))


def cache_size(config: ConfigDict, before: int, width: int) -> int:
  """Columns of the cache of a turn, as `SamplerSpeaker` rounds them."""
  return round_up(before + width + config.agent.max_response_tokens, config.length_step)


def shapes_of_run(
  config: ConfigDict, lengths: Lengths, batching: BatchingSettings, iterations: int
) -> list[dict[str, int]]:
  """How many programs of each kind a run has compiled after each of its iterations.

  Episodes are simulated: replies are log-normal around the assumed mean, which rises over the run, and some episodes
  end in every turn. The shapes follow as in a run, from `SamplerSpeaker` and `plan_micro_batches`.

  Args:
    config: the run's.
    lengths: the assumptions.
    batching: how the trainer cuts micro-batches.
    iterations: of the run.

  Returns:
    Numbers of programs by kind, one dict an iteration; kinds are those of `programs.Program`.
  """
  seen: dict[str, set] = {kind: set() for kind in ('extend', 'decode', 'order', 'pick', 'gradient')}
  rng, counts = np.random.default_rng(0), []
  rows = config.train.groups * config.train.group_size
  for iteration in range(iterations):
    mean = lengths.reply * (_FROM + (_TO - _FROM) * iteration / max(iterations - 1, 1))
    replies, turns = _episodes(rng, lengths, config, rows, mean)
    for kind, shape in _rollout_shapes(config, lengths, replies, turns):
      seen[kind].add(shape)
    for shape in _update_shapes(config, lengths, batching, replies, turns, rng):
      seen['gradient'].add(shape)
    counts.append({kind: len(shapes) for kind, shapes in seen.items()} | {'score': len(seen['gradient']), 'apply': 1})
  return counts


def _episodes(rng, lengths: Lengths, config: ConfigDict, rows: int, mean: float) -> tuple[np.ndarray, np.ndarray]:
  """Tokens i32[rows, turns] of replies, and the turns i32[rows] that each episode has."""
  drawn = mean * np.exp(rng.normal(-(_SPREAD**2) / 2, _SPREAD, (rows, lengths.turns)))
  replies = np.clip(drawn, 1, config.agent.max_response_tokens).astype(np.int64)
  ends = rng.random((rows, lengths.turns)) < _ENDING
  ends[:, -1] = True
  return replies, ends.argmax(axis=1) + 1


def _rollout_shapes(
  config: ConfigDict, lengths: Lengths, replies: np.ndarray, turns: np.ndarray
) -> Iterator[tuple[str, tuple[int, ...]]]:
  rows, used, before = len(replies), np.zeros(len(replies), np.int64), None
  for turn in range(lengths.turns):
    live = turns > turn
    if not live.any():
      return
    if not lengths.whole:
      used[:] = 0
    tokens = lengths.prompt if turn == 0 or not lengths.whole else lengths.observation
    width = observation_columns(config, tokens)
    held = _bucket(rows, int(live.sum()))
    now = (held, cache_size(config, int(used[live].max()), width))
    yield 'extend', (*now, width)
    yield 'decode', now
    if before is not None:
      yield 'order', (*before, *now)
      yield 'pick', (*before, *now)
    used[live] += tokens + replies[live, turn]
    used = np.minimum(used, lengths.limit - config.agent.max_response_tokens)
    before = now


def _bucket(rows: int, live: int) -> int:
  """Rows that programs are compiled for: halves of the full number, down to an eighth."""
  sizes = [rows >> i for i in range(4) if rows % (1 << i) == 0]
  return min(size for size in sizes if size >= live)


def _update_shapes(
  config: ConfigDict,
  lengths: Lengths,
  batching: BatchingSettings,
  replies: np.ndarray,
  turns: np.ndarray,
  rng: np.random.Generator,
) -> Iterator[tuple[int, int]]:
  played = np.arange(lengths.turns)[None] < turns[:, None]
  if lengths.whole:
    sampled = np.where(played, replies, 0).sum(axis=1)
    length = lengths.prompt + sampled + (turns - 1) * lengths.observation
  else:
    sampled = replies[played]
    length = lengths.prompt + sampled
  length = np.minimum(length, lengths.limit)
  size = config.optimizer.mini_batch_size * lengths.rows
  cut = {'size': batching.micro_batch_size, 'length_step': batching.length_step}
  order = rng.permutation(len(length))
  for start in range(0, len(order), size):
    part = order[start : start + size].astype(np.int32)
    for plan in plan_micro_batches(part, length, sampled, **cut):
      yield plan.width, plan.replies
