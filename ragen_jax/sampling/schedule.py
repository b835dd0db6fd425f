"""The one schedule of the device's rows: which episodes have them, what is fed to them, and how many decode.

It decides with numbers on the host only. `agent.sampler_speaker` executes what it says, and `planning.calls` asks it
what a run with assumed lengths would execute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

import numpy as np

from ragen_jax.sampling.feeding import Beginning, Stage, Wanted, columns, stages
from ragen_jax.sampling.shapes import Shapes


@dataclasses.dataclass(frozen=True)
class Asked:
  """A prompt of so many tokens that an episode waits with.

  `beginning` is the same for equal prompts that begin a row; None for one that continues its row.
  """

  tokens: int
  beginning: Hashable


@dataclasses.dataclass(frozen=True)
class Feed:
  """Calls of `extend` with the same rows: a stage's tokens, piece by piece.

  Attributes:
    episodes: i32[b], the episode of each row that takes part; -1 if it reads nothing.
    rows: i32[b], the rows, numbered within their shards; None for all.
  """

  stage: Stage
  episodes: np.ndarray
  rows: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Share:
  """A call of `share_rows`, with its arguments: `source` i32[B], `columns`."""

  source: np.ndarray
  columns: int


@dataclasses.dataclass(frozen=True)
class Feeding:
  """How prompts are fed; processes agree on all but the rows.

  Attributes:
    calls: in their order.
    columns: of the cache, with which these and a call of `decode` have room.
    decoded: rows of a shard that `decode` then runs on.
    begins: whether rows begin.
  """

  calls: tuple[Feed | Share, ...]
  columns: int
  decoded: int
  begins: bool


@dataclasses.dataclass(frozen=True)
class Decode:
  """A call of `Sampler.decode` on the rows that are `at` i64[b] in `Schedule.slots`, one shard after the other."""

  at: np.ndarray
  rows: np.ndarray | None
  enough: int | None


class Schedule:
  """Gives episodes rows of the device: `slots` i32[shards of this process, rows of a shard], -1 if one is free."""

  def __init__(
    self,
    shapes: Shapes,
    shards: int,
    *,
    lockstep: bool,
    drop_finished: bool,
    whole: bool = False,
    largest: Callable[[Sequence[int]], Sequence[int]] = tuple,
  ):
    """Gives the first episodes slots, shard by shard in turn, so that a level with long ones is spread over all.

    If `lockstep`, all replies are completed before prompts are fed again. If `drop_finished`, `decode` runs on parts of
    the rows. `whole` is that of `feeding.stages`. `largest` gives, of each of several numbers, the largest of all
    processes.
    """
    self.shapes = shapes
    self.slots = np.arange(shapes.rows * shards, dtype=np.int32).reshape(-1, shards).T.copy()
    self._lockstep, self._drop_finished, self._whole, self._largest = lockstep, drop_finished, whole, largest

  @property
  def held(self) -> list[int]:
    """The episodes that have a slot."""
    return self.slots[self.slots >= 0].tolist()

  @property
  def has_room(self) -> bool:
    """Whether a slot is free."""
    return bool((self.slots < 0).any())

  def release(self, running: np.ndarray) -> None:
    """Frees the slots of episodes that are over; `running` bool[E]."""
    self.slots[(self.slots >= 0) & ~running[self.slots]] = -1

  def admit(self, episode: int) -> None:
    """Gives an episode a slot of the shard that has most free ones; one must be free."""
    own = self.slots[int((self.slots < 0).sum(axis=1).argmax())]
    own[np.flatnonzero(own < 0)[0]] = episode

  def feed(self, asked: Mapping[int, Asked], length: np.ndarray, common: int) -> Feeding | None:
    """How prompts are fed; None if no process has an episode that goes on. Every process must call.

    `asked` is by episodes that have a slot. `length` i32[E] are the columns of each episode's row, 0 if its prompt
    begins it. `common` is the number of tokens with which all prompts begin that begin a row, fewer than any of them
    has.
    """
    begin = Beginning.of(
      [[asked[row].beginning if row in asked else None for row in own] for own in self.slots.tolist()]
    )
    fresh = [row for row, prompt in asked.items() if prompt.beginning is not None]
    follow = [row for row, prompt in asked.items() if prompt.beginning is None]
    wanted = Wanted(
      live=int((self.slots >= 0).sum(axis=1).max()),
      longest=max((int(length[row]) + (asked[row].tokens if row in asked else 0) for row in self.held), default=0),
      begin=int(begin.read.sum(axis=1).max()),
      begin_tokens=max((asked[row].tokens for row in fresh), default=0),
      common=common,
      copied=begin.copied,
      follow=int(np.isin(self.slots, follow).sum(axis=1).max()),
      follow_tokens=max((asked[row].tokens for row in follow), default=0),
      follow_before=int(length[follow].max(initial=0)),
    ).agreed(self._largest)
    if not wanted.live:
      return None
    planned, calls = stages(self.shapes, wanted, whole=self._whole), []
    for stage in planned:
      left, source = np.isin(self.slots, follow if stage.kind == 'follow' else fresh).reshape(-1), None
      if stage.kind != 'follow':
        read, source = begin.rows(stage.kind)
        left &= read
      for rows in stage.calls:
        at, selected = self._selection(left, rows)
        calls.append(Feed(stage, np.where(left[at], self.slots.reshape(-1)[at], -1), selected))
        left[at] = False
      if stage.shared:
        calls.append(Share(source, stage.shared))
    return Feeding(tuple(calls), columns(self.shapes, wanted, planned), self._decoded(wanted.live), bool(wanted.begin))

  def decode(self, episodes: Collection[int], decoded: int) -> Decode:
    """A call that samples for the open replies of `episodes`; `decoded` is that of `Feeding` or `go_on`."""
    at, rows = self._selection(np.isin(self.slots, list(episodes)).reshape(-1), decoded)
    return Decode(at, rows, None if self._lockstep else self.shapes.enough(decoded))

  def go_on(self, episodes: Collection[int], length: np.ndarray) -> tuple[int, int]:
    """What the open replies of `episodes` still need: rows of a shard, and columns. Every process must call.

    `length` i32[E] are the columns of each episode's row.
    """
    still = np.isin(self.slots, list(episodes))
    live, longest = self._largest((int(still.sum(axis=1).max()), int(length[self.slots[still]].max(initial=0))))
    return self._decoded(live), longest + self.shapes.chunk

  def _decoded(self, live: int) -> int:
    return self.shapes.decoded_rows(live) if self._drop_finished else self.shapes.rows

  def _selection(self, wanted: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray | None]:
    """`rows` rows of each shard, those of `wanted` bool[B] first.

    Gives their positions i64[b], and their numbers i32[b] within the shards, None for all.
    """
    if rows == self.shapes.rows:
      return np.arange(self.slots.size), None
    taken = np.argsort(~wanted.reshape(self.slots.shape), axis=1, kind='stable')[:, :rows].astype(np.int32)
    return (taken + self.shapes.rows * np.arange(len(taken))[:, None]).reshape(-1), taken.reshape(-1)
