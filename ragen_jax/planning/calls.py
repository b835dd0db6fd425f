"""The calls of the sampler's programs in a rollout of episodes with assumed lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from ml_collections import ConfigDict

from ragen_jax.planning import program_list
from ragen_jax.planning.abstract import prompt_room, sampler_shapes
from ragen_jax.planning.lengths import Lengths
from ragen_jax.sampling.draw import Sampling
from ragen_jax.sampling.schedule import Asked, Feed, Schedule


@dataclasses.dataclass(frozen=True)
class Call:
  """A call of a program of the sampler, with the sizes that it is compiled for."""

  kind: str  # 'extend', 'decode', or 'resize' for each layer
  rows: int  # of the devices that take part
  size: int  # columns of the cache; before, where they change; 0 where the cache is not read
  width: int = 0  # columns of the observation, or of the cache after
  first: bool = False  # all observations begin rows
  steps: int = 0  # tokens that `decode` samples for each row
  used: int = 0  # those of them that were needed, over all rows

  @property
  def shape(self) -> tuple[int | bool, ...]:
    """What a program is compiled for."""
    return self.rows, self.size, self.width, self.first

  def program(self, every: int, sampling: Sampling) -> program_list.Program:
    """The program as `Shapes.programs` names it, with `every` rows on the devices, and tokens drawn like that."""
    if self.kind == 'extend':
      return self.kind, (every, *self.shape[:3])
    return self.kind, (every, self.size, self.width) if self.kind == 'resize' else (every, *self.shape[:2], sampling)


def rollout_calls(
  config: ConfigDict,
  lengths: Lengths,
  replies: np.ndarray,
  turns: np.ndarray,
  *,
  rows: int,
  shards: int,
  group_size: int,
) -> Iterator[Call]:
  """The calls of the sampler in a rollout that a `Schedule` decides on.

  Args:
    replies: i32[E, turns], tokens of replies.
    turns: i32[E], turns of the episodes.
    rows: of the devices.
    shards: parts into which they are divided.
    group_size: episodes in a row that have the same first prompt.
  """
  lockstep, room = config.agent.schedule == 'lockstep', prompt_room(config)
  shapes = sampler_shapes(config, rows, shards)
  schedule = Schedule(shapes, shards, lockstep=lockstep, drop_finished=config.agent.drop_finished)
  waiting = list(range(rows, len(turns)))
  turn, left, used = (np.zeros(len(turns), np.int64) for _ in range(3))
  size = 0

  def resize(columns: int) -> Iterator[Call]:
    nonlocal size
    wanted = shapes.cache(columns)
    if size and wanted > size:
      yield Call('resize', rows, size, wanted)
    size = max(size, wanted)

  while True:
    schedule.release(turn < turns)
    while waiting and schedule.has_room:
      schedule.admit(waiting.pop(0))
    held, asked = np.asarray(schedule.held, np.int64), {}
    for row in held[left[held] == 0].tolist():
      if turn[row] == 0 or not lengths.whole:
        # Members of a group have the same first prompt; later prompts that begin a row differ.
        used[row], beginning = 0, (row, turn[row]) if turn[row] else (row // group_size, -1)
        asked[row] = Asked(min(lengths.prompt, room), beginning)
      else:
        asked[row] = Asked(lengths.observation, None)
        used[row] = min(used[row], room - lengths.observation)
      left[row] = replies[row, turn[row]]
    feeding = schedule.feed(asked, used, min(lengths.common, lengths.prompt - 1))
    if feeding is None:
      return
    yield from resize(feeding.columns)
    for call in feeding.calls:
      if isinstance(call, Feed):
        first = call.stage.kind != 'follow'
        yield from (Call('extend', len(call.episodes), size, width, first) for width in call.stage.pieces)
    for row, prompt in asked.items():
      used[row] += prompt.tokens
    decoded = feeding.decoded
    while True:
      call = schedule.decode(held[left[held] > 0].tolist(), decoded)
      steps = min(shapes.chunk, int(left[held].max()))
      if call.enough is not None:
        steps = min(steps, _until(np.where(schedule.slots >= 0, left[schedule.slots], 0), call.enough))
      taken = np.minimum(left[held], steps)
      yield Call('decode', len(call.at), size, steps=steps, used=int(taken.sum()))
      used[held] += taken
      left[held] -= taken
      if not lockstep or not left[held].any():
        break
      decoded, columns = schedule.go_on(held[left[held] > 0].tolist(), used)
      yield from resize(columns)
    turn[held[left[held] == 0]] += 1


def _until(left: np.ndarray, enough: int) -> int:
  """Steps until a shard has enough complete replies: `left` i64[shards, rows], 0 for rows without a reply."""
  ordered = np.sort(np.where(left > 0, left, np.iinfo(np.int64).max), axis=1)
  return int(ordered[:, min(enough, left.shape[1]) - 1].min())
