"""Which calls feed prompts: a prompt that rows of a shard share goes through the model once, and is copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from ragen_jax.sampling.shapes import Shapes


@dataclasses.dataclass(frozen=True)
class Beginning:
  """Prompts with which rows begin.

  Attributes:
    source: i32[shards, rows], the first row of the shard with the same prompt; itself if it has none of its own.
    read: bool[shards, rows], rows whose prompt the model reads: the first of those with the same prompt.
    first: i32[shards, rows], for these rows the first of them; otherwise the row itself.
  """

  source: np.ndarray
  read: np.ndarray
  first: np.ndarray

  @classmethod
  def of(cls, prompts: Sequence[Sequence[Hashable]]) -> Beginning:
    """Of the prompts of each row of each shard; None for rows that do not begin."""
    own = np.tile(np.arange(len(prompts[0]), dtype=np.int32), (len(prompts), 1))
    source, read, first = own.copy(), np.zeros(own.shape, bool), own.copy()
    for shard, of_shard in enumerate(prompts):
      seen: dict[Hashable, int] = {}
      for row, prompt in enumerate(of_shard):
        if prompt is not None:
          source[shard, row] = seen.setdefault(prompt, row)
      rows = list(seen.values())
      read[shard, rows] = True
      first[shard, rows] = rows[:1] * len(rows)
    return cls(source, read, first)

  def rows(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """What a stage does, 'common' or 'begin': bool[B], rows that read; i32[B], the source of each row afterwards."""
    own = np.arange(self.source.shape[1])
    read, source = (self.read & (self.first == own), self.first) if kind == 'common' else (self.read, self.source)
    return read.reshape(-1), source.reshape(-1)

  @property
  def copied(self) -> bool:
    """Whether a row gets the prompt of another one."""
    return bool((self.source != np.arange(self.source.shape[1])).any())


@dataclasses.dataclass(frozen=True)
class Wanted:
  """What is to be fed: of a process, or the largest of all processes.

  Attributes:
    live: rows of a shard that hold an episode.
    longest: columns of the longest row after its prompt.
    begin: different prompts of a shard with which rows begin.
    begin_tokens: of the longest of them.
    common: tokens with which all of them begin, fewer than any of them has.
    copied: whether rows of a shard share a prompt.
    follow: rows of a shard that go on with a prompt.
    follow_tokens: of the longest of their prompts.
    follow_before: the most columns of these rows before.
  """

  live: int
  longest: int
  begin: int
  begin_tokens: int
  common: int
  copied: bool
  follow: int
  follow_tokens: int
  follow_before: int

  def agreed(self, largest: Callable[[Sequence[int]], Sequence[int]]) -> Wanted:
    """The numbers with which all processes make the same calls, from a function that finds the largest of each."""
    own = dataclasses.replace(self, common=-self.common)
    found = Wanted(*largest(dataclasses.astuple(own)))
    return dataclasses.replace(found, common=-found.common, copied=bool(found.copied))


@dataclasses.dataclass(frozen=True)
class Stage:
  """Calls that feed the same columns of all rows that need them.

  Attributes:
    kind: 'common', the tokens with which all prompts begin, to one row of a shard; 'begin', the rest of prompts that
      begin rows; 'follow', prompts that continue rows.
    calls: rows of a shard in each round of calls.
    tokens: which of a prompt's.
    pieces: columns of the calls of a round, one behind the other.
    before: the most columns of the rows before.
    columns: of the cache, with which the calls have room.
    shared: columns that are copied to other rows afterwards; 0 for none.
  """

  kind: str
  calls: tuple[int, ...]
  tokens: slice
  pieces: tuple[int, ...]
  before: int
  columns: int
  shared: int

  @property
  def empties(self) -> bool:
    """Whether the first call of a round empties its rows."""
    return self.kind != 'follow' and not self.before


def stages(shapes: Shapes, wanted: Wanted, *, whole: bool) -> list[Stage]:
  """The calls that feed what is wanted of all processes, in their order.

  With `whole`, each prompt goes through the model in one call, as those with images must.
  """

  def stage(kind, rows, which, tokens, before, shared):
    pieces = (shapes.whole(tokens, before),) if whole else shapes.pieces(tokens, before)
    needed = before + sum(pieces)  # rows with tokens left for the last pieces have less before
    needed = needed if whole else min(needed, shapes.caches[-1])
    return Stage(kind, shapes.calls(rows), which, pieces, before, needed, shapes.shared(before + tokens) * shared)

  w, found, common = wanted, [], 0 if whole else _worth(shapes, wanted)
  if common:
    found.append(stage('common', 1, slice(common), common, 0, shared=True))
  if w.begin:
    found.append(stage('begin', w.begin, slice(common, None), w.begin_tokens - common, common, w.copied))
  if w.follow:
    found.append(stage('follow', w.follow, slice(None), w.follow_tokens, w.follow_before, shared=False))
  return found


def columns(shapes: Shapes, wanted: Wanted, planned: Sequence[Stage]) -> int:
  """Columns of the cache with which the calls of `stages` and one of `decode` have room."""
  return max(wanted.longest + shapes.chunk, *(stage.columns for stage in planned), 0)


def _worth(shapes: Shapes, wanted: Wanted) -> int:
  """Columns with which all prompts begin if it saves clearly more than a call costs to read them once; otherwise 0."""
  saved = (wanted.begin - 1) * wanted.common
  return wanted.common if wanted.common >= shapes.step and saved >= 4 * shapes.step else 0


def common_tokens(prompts: Sequence[Sequence[int]]) -> int:
  """Tokens with which all prompts begin, fewer than the shortest has, so that each has a last token of its own."""
  if not prompts:
    return np.iinfo(np.int32).max  # no limit beside the prompts of other processes
  shortest, *others = sorted(set(map(tuple, prompts)), key=len)
  same = len(shortest) - 1
  for other in others:
    differs = np.flatnonzero(np.asarray(shortest[:same]) != np.asarray(other[:same]))
    same = int(differs[0]) if len(differs) else same
  return same
