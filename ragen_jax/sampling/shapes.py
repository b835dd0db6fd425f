"""The few sizes that the sampler's programs are compiled for, from which `schedule.py` chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from ragen_jax.sampling.draw import Sampling
from ragen_jax.utils.sizes import round_up

# Columns of a call of `extend`: a longer prompt is fed by several, which costs little beside its tokens.
_WIDEST = 512


@dataclasses.dataclass(frozen=True)
class Shapes:
  """The sizes of a rollout.

  Attributes:
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
    """Rows of a shard that a call of `extend` feeds, unless it feeds one: a quarter, but at least four."""
    return max(self.rows // 4, min(self.rows, 4))

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

  def calls(self, fed: int) -> tuple[int, ...]:
    """Rows of a shard in each call of `extend` that feeds `fed` rows of the shard with most.

    What is left of a quarter goes row by row if it is at most half of one: a call with a few hundred tokens takes
    little longer than its tokens need.
    """
    full, left = divmod(fed, self.fed)
    return (self.fed,) * full + ((1,) * left if 2 * left <= self.fed else (self.fed,))

  def decoded_rows(self, live: int) -> int:
    """The fewest rows of a shard that `decode` may run on if `live` of them must be among them."""
    return min(n for n in self.decoded if n >= live)

  def enough(self, decoded: int) -> int:
    """Complete replies of a shard for which `decode` ends early, of `decoded` rows, so that their rows can be fed."""
    return min(self.fed, max(decoded // 4, 1))

  @property
  def widths(self) -> tuple[int, ...]:
    """Columns that a call of `extend` feeds, in ascending order: 3 and 2^n quarters of `step`, at most 512."""
    most = min(max(_WIDEST, self.unit), self.caches[-1])
    return tuple(n * self.unit for n in sorted({3, *(1 << n for n in range(10))}) if n * self.unit <= most)

  @property
  def unit(self) -> int:
    """The least columns of a call of `extend`."""
    return max(self.step // 4, 1)

  def pieces(self, tokens: int, before: int) -> tuple[int, ...]:
    """Columns of the calls that feed prompts of up to `tokens` tokens, which follow up to `before` columns.

    As few columns as possible, where a further call counts as `unit` columns. Each row has room for its tokens.
    """
    # A call of the least width has room in every row with tokens that are left.
    fitting = [width for width in self.widths if before + width <= self.caches[-1]] or [self.unit]
    whole = next(((width,) for width in fitting if width >= tokens), ())
    part = max((width for width in fitting if width < tokens), default=0)
    if not part:
      return whole
    cut = (part, *self.pieces(tokens - part, before + part))
    return whole if whole and sum(whole) <= sum(cut) + (len(cut) - 1) * self.unit else cut

  def whole(self, tokens: int, before: int) -> int:
    """Columns of the one call that feeds prompts with images: 2^n or 3 * 2^n quarters of `step`, if there is room."""
    sizes = sorted(m << n for m in (1, 3) for n in range(max(tokens, 1).bit_length()))
    width = next(n * self.unit for n in sizes if n * self.unit >= tokens)
    return width if before + width <= self.caches[-1] else round_up(tokens, self.unit)

  def shared(self, tokens: int) -> int:
    """Columns of rows that are copied to others, of which the longest has `tokens`."""
    return next((width for width in self.widths if width >= tokens), self.cache(tokens))

  def programs(
    self, samplings: Collection[Sampling], *, room: int, drop_finished: bool
  ) -> list[tuple[str, tuple[Any, ...]]]:
    """The programs that rollouts of these rows may need, in the order in which most of them are needed.

    `room` is the most tokens of a prompt, and of a row with its next prompt. With `drop_finished`, `decode` runs on
    parts of the rows.

    Returns:
      Names and shapes, with numbers of rows of all shards:
      'extend', (rows, those that are fed, columns of the cache, columns of the prompt);
      'decode', (rows, those that sample, columns of the cache, sampling);
      'resize', (rows, columns of the cache before, and after).
    """
    every, longest = self.rows * self.shards, next((w for w in self.widths if w >= room), self.widths[-1])
    found: list[tuple[str, tuple[Any, ...]]] = []
    for size in self.caches:
      widths = [width for width in self.widths if width <= min(size, longest)]
      parts = sorted({self.fed * self.shards, self.shards}, reverse=True)
      found += [('extend', (every, part, size, width)) for part in parts for width in widths]
      found += [
        ('decode', (every, part * self.shards, size, sampling))
        for sampling in samplings
        for part in (self.decoded if drop_finished else (self.rows,))
      ]
      found += [('resize', (every, size, after)) for after in self.caches if after > size]
    return found


def largest_cache(max_context: int, chunk: int, step: int) -> int:
  """The most columns that a cache needs: a row of full length, and what a program writes behind it."""
  return round_up(max_context + max(step // 4, chunk, 1), step)
