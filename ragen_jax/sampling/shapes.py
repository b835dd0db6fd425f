"""The sizes that the sampler's programs are compiled for: a few of each, whatever the lengths of prompts and replies.

`agent.sampler_speaker` chooses from them, and `compilers.lengths` counts the programs that follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from ragen_jax.sampling.draw import Sampling
from ragen_jax.utils.sizes import round_up


@dataclasses.dataclass(frozen=True)
class Shapes:
  """The sizes of a rollout.

  Attributes:
    rows: rows of a shard of the devices.
    shards: number of parts that the rows are divided into.
    max_context: most columns of a row.
    chunk: columns that a call of `decode` writes.
    step: the smallest cache; larger ones are multiples of it, and prompts of a quarter of it.
  """

  rows: int
  shards: int
  max_context: int
  chunk: int
  step: int

  @property
  def fed(self) -> int:
    """Rows of a shard that a call of `extend` feeds, unless it feeds all: a quarter."""
    return max(self.rows // 4, 1)

  @property
  def decoded(self) -> tuple[int, ...]:
    """Rows of a shard that `decode` may run on, in descending order: all, and 12, 8, 5 and 2 sixteenths.

    Parts have at least two rows, with which a product of matrices is not one of vectors, and four of all shards.
    """
    parts = (self.rows * n // 16 for n in (12, 8, 5, 2) if self.rows * n % 16 == 0)
    return (self.rows, *(n for n in parts if n > 1 and n * self.shards >= 4))

  @property
  def caches(self) -> tuple[int, ...]:
    """Columns of the cache, in ascending order: a quarter, a half and all of the largest one."""
    largest = largest_cache(self.max_context, self.chunk, self.step)
    return tuple(sorted({round_up(-(-largest // n), self.step) for n in (4, 2, 1)}))

  def cache(self, columns: int) -> int:
    """The smallest cache with so many columns."""
    return next((size for size in self.caches if size >= columns), round_up(columns, self.step))

  def calls(self, fed: int) -> tuple[int, int]:
    """How often `extend` is called to feed `fed` rows of the shard with most, and the rows of a shard in each call."""
    calls = -(-fed // self.fed)
    return (calls, self.fed) if calls * self.fed < self.rows else (1, self.rows)

  def decoded_rows(self, live: int) -> int:
    """The fewest rows of a shard that `decode` may run on if `live` of them must be among them."""
    return min(n for n in self.decoded if n >= live)

  def enough(self, decoded: int) -> int:
    """Complete replies of a shard for which `decode` ends early, of `decoded` rows, so that their rows can be fed."""
    return min(self.fed, max(decoded // 4, 1))

  @property
  def widths(self) -> tuple[int, ...]:
    """Columns that a call of `extend` feeds, in ascending order: 2^n and 3 * 2^n quarters of `step`."""
    unit, largest = max(self.step // 4, 1), self.caches[-1]
    quarters = sorted(m << n for m in (1, 3) for n in range(largest.bit_length()))
    return tuple(n * unit for n in quarters if n * unit <= largest)

  def pieces(self, tokens: int, before: int) -> tuple[int, ...]:
    """Columns of the calls that feed prompts of up to `tokens` tokens, which follow up to `before` columns.

    One call, unless the largest cache has no room for its columns. Each row has room for its tokens.
    """
    found: list[int] = []
    while (fed := sum(found)) < max(tokens, 1):
      wide = [width for width in self.widths[1:] if before + fed + width <= self.caches[-1]]
      enough = (width for width in self.widths if width >= tokens - fed)
      width = next(enough, self.widths[-1])
      # A call of the least width has room in every row with tokens that are left.
      found.append(min(width, max(wide, default=self.widths[0])))
    return tuple(found)

  def programs(
    self, samplings: Collection[Sampling], *, room: int, whole: bool, drop_finished: bool
  ) -> list[tuple[str, tuple[Any, ...]]]:
    """The programs that rollouts of these rows may need, in the order in which most of them are needed.

    Args:
      samplings: how tokens are drawn, as they are compiled in.
      room: the most tokens of a prompt, and of a row with its next prompt.
      whole: an episode is one row; otherwise each prompt begins a row.
      drop_finished: `decode` runs on parts of the rows.

    Returns:
      Names and shapes, with numbers of rows of all shards:
      'extend', (rows, those that are fed, columns of the cache, columns of the prompt, whether all begin);
      'decode', (rows, those that sample, columns of the cache, sampling);
      'resize', (rows, columns of the cache before, and after).
    """
    every, rest = self.rows * self.shards, room - self.widths[-1]  # of a prompt, after its first piece
    longest, later = (next((w for w in self.widths if w >= tokens), self.widths[-1]) for tokens in (room, rest))
    later = longest if whole else later if rest > 0 else 0
    fed = sorted({self.calls(n)[1] * self.shards for n in range(1, self.rows + 1)}, reverse=True)
    found: list[tuple[str, tuple[Any, ...]]] = []
    for size in self.caches:
      first, follow = ([w for w in self.widths if w <= min(size, most)] for most in (longest, later))
      found += [('extend', (every, part, size, width, True)) for part in fed for width in first]
      found += [
        ('decode', (every, part * self.shards, size, sampling))
        for sampling in samplings
        for part in (self.decoded if drop_finished else (self.rows,))
      ]
      found += [('extend', (every, part, size, width, False)) for part in fed for width in follow]
      found += [('resize', (every, size, after)) for after in self.caches if after > size]
    return found


def largest_cache(max_context: int, chunk: int, step: int) -> int:
  """The most columns that a cache needs: a row of full length, and what a program writes behind it."""
  return round_up(max_context + max(step // 4, chunk, 1), step)
