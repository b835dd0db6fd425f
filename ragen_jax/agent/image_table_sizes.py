"""How many images rows can show, so that the tables of images have sizes that are known before the run."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence

from ragen_jax.agent.image_observations import observed_images, shows_images
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models.vision.processor import ProcessorConfig

# Tables of packed rows have room for a quarter, for half or for all of the images that their columns could hold: few
# columns belong to images, and a tower that is trained looks at as many images as a table has room for.
_PARTS = (4, 2, 1)


@dataclasses.dataclass(frozen=True)
class ImageCounts:
  """The images that an episode of an environment shows: their (height, width) in pixels as the tower reads them, their
  number in an observation, the tokens of each, and the maximum number of observations.
  """

  size: tuple[int, int]
  count: int
  tokens: int
  turns: int

  def images(self, columns: int, *, packed: bool) -> int:
    """The most images in so many columns, of one row or, packed, of any number of rows."""
    fit = columns // (self.count * (self.tokens + 2))  # with the tokens before and after each image
    return self.count * (fit if packed else min(fit, self.turns))


@dataclasses.dataclass(frozen=True)
class ImageTableSizes:
  """The sizes of tables of images, by the shape of the rows that read them.

  Rows that are not packed have one size of tables, with room for all images that they can show. Packed rows have three:
  with room for a quarter, for half and for all of the images that their columns could hold.

  `shown` has an entry for each environment with images. Methods take a number of rows, or of `packed` bins with several
  rows each, and their width in columns.
  """

  shown: tuple[ImageCounts, ...]

  def images(
    self, needed: Mapping[tuple[int, int], int], rows: int, width: int, *, packed: bool
  ) -> dict[tuple[int, int], int]:
    """Number of images of a table that holds at least the `needed` ones, by height and width."""
    most = self.most_images(rows, width, packed=packed)
    return {size: _enough(needed.get(size, 0), most.get(size, 1), packed) for size in sorted(most | needed)}

  def most_images(self, rows: int, width: int, *, packed: bool) -> dict[tuple[int, int], int]:
    """Number of images of the largest table, by height and width.

    How many images packed rows show depends on their lengths, which are not known before the run.
    """
    most: dict[tuple[int, int], int] = {}
    for own in self.shown:
      most[own.size] = max(most.get(own.size, 1), rows * own.images(width, packed=packed))
    return most

  def most_tokens(self, rows: int, width: int, *, packed: bool) -> int:
    """Rows of the largest table of features: the same number for each of `rows`, and at least one."""
    return max(rows, *(rows * own.tokens * own.images(width, packed=packed) for own in self.shown))

  def tokens(self, needed: int, rows: int, width: int, *, packed: bool) -> int:
    return _enough(needed, self.most_tokens(rows, width, packed=packed), packed)


def _enough(needed: int, most: int, packed: bool) -> int:
  """The smallest size of a table that is large enough."""
  sizes = [-(-most // n) for n in _PARTS] if packed else [most]
  return next((size for size in sizes if size >= needed), needed)


def largest_images(tokens: int, factor: int) -> ImageTableSizes:
  """The room of rows that hold as many images as their columns do, of at most so many tokens with sides of `factor`
  pixels."""
  rows = math.isqrt(tokens)
  columns = tokens // rows
  return ImageTableSizes((ImageCounts((rows * factor, columns * factor), 1, rows * columns, sys.maxsize),))


def image_room(specs: Sequence[EnvSpec], processor: ProcessorConfig | None) -> ImageTableSizes | None:
  """The room of rows that play some environments; None if none shows images, or the model has no processor for them."""
  if processor is None:
    return None
  shown = []
  for spec in filter(shows_images, specs):
    count, size = observed_images(spec, processor)
    shown.append(ImageCounts(size, count, size[0] * size[1] // processor.factor**2, spec.budget.max_turns))
  return ImageTableSizes(tuple(shown)) if shown else None
