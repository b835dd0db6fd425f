"""What the programs of the update read of images: from the images of a rollout and the columns that show them.

A trajectory says which image each column shows. `ImageInputsMaker.inputs` makes of it, on the host, `ImageInputs`:
rotary positions, and for each column a row of a table that has all tokens of all images, one image after the other.
`batches.micro_batches` cuts or packs them like tokens, and gives each micro-batch a table of its own images:

- of features, if the tower is frozen. They are computed once, by the `Encoder` that the sampler uses, too;
- of pixels, if it is trained. The program then runs the tower, and its gradient reaches the tower's weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax.agent.image_table_sizes import ImageTableSizes
from ragen_jax.agent.language_model import LanguageModel
from ragen_jax.agent.trajectory import Trajectory
from ragen_jax.distributed.sharding import copied, place_rows, row_sharding, row_shards
from ragen_jax.models.layers import is_frozen
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.rotary import AXES
from ragen_jax.models.vision.config import VisionConfig
from ragen_jax.models.vision.encoder import Encoder
from ragen_jax.models.vision.features import ImageColumns, abstract_features, stacked, table, table_rows
from ragen_jax.models.vision.positions import feature_columns, rope_positions
from ragen_jax.models.vision.processor import ProcessorConfig, patches_of, token_count
from ragen_jax.models.vision.tower import Features
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.sizes import next_power, round_up

# The trunks, each with a tower of its own.
POLICY, CRITIC = 'policy', 'critic'

# Key of the number of rows of a table of features, see `ImageInputs.sizes`.
_TOKENS = (0, 0)


@struct.dataclass
class FrozenFeatures:
  """A table of features of each trunk, by name; a critic without one of its own reads that of the policy."""

  by_trunk: dict[str, Features]

  def features(self, trunk: Qwen, name: str, *, remat: bool) -> Features:
    """The table of a trunk."""
    del trunk, remat
    return self.by_trunk.get(name, self.by_trunk[POLICY])


@struct.dataclass
class Pixels:
  """Images that the program looks at; each of `groups` has those of one size, u8[I, H, W, 3]."""

  groups: tuple[jax.Array, ...]
  processor: ProcessorConfig = struct.field(pytree_node=False)

  def features(self, trunk: Qwen, name: str, *, remat: bool) -> Features:
    """The table of a trunk, computed with its tower; the devices of a mesh divide the images."""
    del name
    mesh = None if trunk.activation_sharding is None else trunk.activation_sharding.mesh
    parts = []
    for images in self.groups:
      grid = tuple(side // self.processor.patch_size for side in images.shape[1:3])
      patches = patches_of(images, self.processor)
      if mesh is not None:
        patches = jax.lax.with_sharding_constraint(patches, row_sharding(mesh))
      parts.append(trunk.see(patches, grid, remat=remat))
    found = table(parts)
    if mesh is None:
      return found
    return jax.lax.with_sharding_constraint(found, NamedSharding(mesh, PartitionSpec()))


@dataclasses.dataclass(frozen=True, eq=False)
class RolloutImages:
  """The images of a rollout on the host.

  Attributes:
    pixels: u8[H, W, 3] each.
    first: i64[n + 1], row of the table with the first token of each image; the last number is that of all tokens.
    features: of each image by trunk, see `FrozenFeatures`; empty if towers are trained.
    room: sizes of tables, by the shape of the rows that read them; None for sizes that follow from the images.
  """

  pixels: tuple[np.ndarray, ...]
  first: np.ndarray
  features: Mapping[str, Sequence[Features]]
  processor: ProcessorConfig
  room: ImageTableSizes | None


@struct.dataclass
class ImageInputs:
  """What rows read of images.

  Attributes:
    index: i32[B, T], the row of the table that each column reads, -1 in text columns.
    positions: i32[B, T, 3], rotary positions.
    source: where the table comes from; None on the host.
    gallery: all images; None on devices.
  """

  index: jax.Array
  positions: jax.Array
  source: FrozenFeatures | Pixels | None = None
  gallery: RolloutImages | None = struct.field(default=None, pytree_node=False)

  def columns(self, trunk: Qwen, name: str, *, remat: bool) -> ImageColumns:
    """What the columns of a trunk (`POLICY`, `CRITIC`) read; with `remat`, the backward pass runs the tower again."""
    return ImageColumns(self.index, self.positions, self.source.features(trunk, name, remat=remat))

  def widened(self, columns: int) -> ImageInputs:
    """The same rows with more columns of text behind them."""
    index = np.pad(self.index, ((0, 0), (0, columns)), constant_values=-1)
    return self.replace(index=index, positions=np.pad(self.positions, ((0, 0), (0, columns), (0, 0))))

  def _used(self) -> np.ndarray:
    """i64[n], ascending: the images of these rows."""
    return np.unique(np.searchsorted(self.gallery.first, self.index[self.index >= 0], side='right') - 1)

  def sizes(self) -> dict[tuple[int, int], int]:
    """What the table of these rows must hold: images by height and width, or (0, 0) -> rows of features."""
    used, gallery = self._used(), self.gallery
    if gallery.features:
      return {_TOKENS: int((gallery.first[used + 1] - gallery.first[used]).sum())}
    shapes = [gallery.pixels[i].shape[:2] for i in used]
    return {size: shapes.count(size) for size in sorted({image.shape[:2] for image in gallery.pixels})}

  def _table(self, sizes: Mapping[tuple[int, int], int], packed: bool) -> dict[tuple[int, int], int]:
    room, shape = self.gallery.room, self.index.shape
    if room is None:
      return {key: table_rows(n) if key == _TOKENS else _step_up(n) for key, n in sizes.items()}
    if self.gallery.features:
      return {_TOKENS: room.tokens(self.sizes()[_TOKENS], *shape, packed=packed)}
    return room.images(self.sizes(), *shape, packed=packed)

  def with_source(self, sizes: Mapping[tuple[int, int], int], mesh: Mesh | None, *, packed: bool) -> ImageInputs:
    """These rows with a table of their own images, as the programs take them; `packed`: they are bins of several rows.

    If the gallery has no `room`, the table has room for `sizes` at least; numbers are rounded up, so that there are few
    programs. Rows are divided over `mesh`, and tables copied; None leaves all on the host.
    """
    used, gallery, sizes = self._used(), self.gallery, self._table(sizes, packed)
    if gallery.features:
      rows = sizes[_TOKENS]
      source = FrozenFeatures({k: stacked([x[i] for i in used], rows, x[0]) for k, x in gallery.features.items()})
      counts = gallery.first[used + 1] - gallery.first[used]
      first = dict(zip(used.tolist(), (np.cumsum(counts) - counts).tolist(), strict=True))
    else:
      source, first = self._pixels(used, sizes, 1 if mesh is None else row_shards(mesh))
    moved = np.zeros(len(gallery.pixels), np.int64)
    for image, row in first.items():
      moved[image] = row - gallery.first[image]
    is_image = self.index >= 0
    image = np.searchsorted(gallery.first, np.where(is_image, self.index, 0), side='right') - 1
    index = np.where(is_image, self.index + moved[image], -1).astype(np.int32)
    found = ImageInputs(index, self.positions)
    if mesh is None:
      return found.replace(source=source)
    return place_rows(found, mesh).replace(source=copied(source, mesh))

  def _pixels(
    self, used: np.ndarray, sizes: Mapping[tuple[int, int], int], multiple: int
  ) -> tuple[Pixels, dict[int, int]]:
    """The images `used` by size, and the first row of each in their table."""
    gallery, groups, first, start = self.gallery, [], {}, 0
    for size, count in sizes.items():
      own = [i for i in used.tolist() if gallery.pixels[i].shape[:2] == size]
      images = np.zeros((round_up(count, multiple), *size, 3), np.uint8)
      tokens = token_count(_grid(size, gallery.processor), gallery.processor.merge_size)
      for place, i in enumerate(own):
        images[place] = gallery.pixels[i]
        first[i] = start + place * tokens
      groups.append(images)
      start += len(images) * tokens
    return Pixels(tuple(groups), gallery.processor), first


def _step_up(count: int) -> int:
  """The next of 1, 2, 3, 4, 6, 8, 12, 16, ...: two sizes an octave."""
  size = next_power(count)
  return size * 3 // 4 if size >= 4 and count <= size * 3 // 4 else size


def _grid(size: tuple[int, int], processor: ProcessorConfig) -> tuple[int, int]:
  return size[0] // processor.patch_size, size[1] // processor.patch_size


class ImageInputsMaker:
  """Makes the inputs of the update from the images of rollouts."""

  def __init__(
    self,
    vision: VisionConfig,
    processor: ProcessorConfig,
    encoders: Mapping[str, Encoder],
    room: ImageTableSizes | None,
    *,
    trained: bool,
  ):
    """Nothing runs before the first call. `trained`: whether the towers are; `room` is that of `RolloutImages`."""
    self._vision = vision
    self._processor = processor
    self._encoders = encoders
    self._room = room
    self._trained = trained

  def inputs(self, params: Any, trajectory: Trajectory, images: Sequence[np.ndarray]) -> ImageInputs | None:
    """What the rows of a trajectory read of `images`, u8[H, W, 3] each, on the host; None if none of them shows any.

    Of `params`, the weights of frozen towers are read.

    Raises:
      UserError: the placeholders of a row are not those of its images.
    """
    if trajectory.image is None:
      return None
    return self.of_rows(params, trajectory.tokens, trajectory.length, trajectory.image, images)

  def of_rows(
    self, params: Any, tokens: np.ndarray, length: np.ndarray, image: np.ndarray, images: Sequence[np.ndarray]
  ) -> ImageInputs:
    """`inputs` for rows of i32[B, T] tokens, i32[B] used columns, and i32[B, T] images, see `Trajectory.image`."""
    grids = [_grid(image.shape[:2], self._processor) for image in images]
    counts = [token_count(grid, self._processor.merge_size) for grid in grids]
    first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    index = np.full(tokens.shape, -1, np.int32)
    positions = np.zeros((*index.shape, AXES), np.int32)
    for row, end in enumerate(length.tolist()):
      ids = tokens[row, :end]
      own = self._shown(row, ids, image[row, :end])
      of_row = [grids[i] for i in own]
      positions[row, :end], _ = rope_positions(ids, of_row, self._vision)
      index[row, :end] = feature_columns(ids, of_row, self._vision, [int(first[i]) for i in own])
    features = {}
    if not self._trained:
      features = {name: encoder(params[name]['visual'], images) for name, encoder in self._encoders.items()}
    return ImageInputs(
      index, positions, gallery=RolloutImages(tuple(images), first, features, self._processor, self._room)
    )

  def _shown(self, row: int, tokens: np.ndarray, shown: np.ndarray) -> list[int]:
    """The images of a row, in order."""
    is_image = shown >= 0
    if not np.array_equal(is_image, tokens == self._vision.image_token_id):
      raise UserError(
        f'row {row}: {int((tokens == self._vision.image_token_id).sum())} image placeholders do not match '
        f'{int(is_image.sum())} columns of images'
      )
    begins = np.flatnonzero(is_image & ~np.concatenate([[False], is_image[:-1]]))
    return shown[begins].tolist()


def abstract_inputs(
  model: LanguageModel,
  processor: ProcessorConfig,
  room: ImageTableSizes,
  rows: int,
  width: int,
  *,
  packed: bool,
  shared: bool,
) -> ImageInputs:
  """The shapes and types of `ImageInputs` for a micro-batch of `rows` rows or bins and T = `width`, to compile for.

  The table is the largest, see `ImageTableSizes.images`. `shared`: whether a separate critic reads the policy's table.
  """
  mesh, vision = model.mesh, model.model.policy.cfg.vision
  divided = row_sharding(mesh)
  index = jax.ShapeDtypeStruct((rows, width), np.int32, sharding=divided)
  positions = jax.ShapeDtypeStruct((rows, width, AXES), np.int32, sharding=divided)
  whole = NamedSharding(mesh, PartitionSpec())
  if is_frozen(model.model.policy.visual):
    trunks = [POLICY] if model.model.critic is None or shared else [POLICY, CRITIC]
    tokens = room.most_tokens(rows, width, packed=packed)
    features = abstract_features(vision, tokens, model.model.policy.dtype, whole)
    return ImageInputs(index, positions, FrozenFeatures(dict.fromkeys(trunks, features)))
  groups = tuple(
    jax.ShapeDtypeStruct((round_up(count, row_shards(mesh)), *size, 3), np.uint8, sharding=whole)
    for size, count in sorted(room.most_images(rows, width, packed=packed).items())
  )
  return ImageInputs(index, positions, Pixels(groups, processor))


def make_sight(model: LanguageModel, room: ImageTableSizes | None) -> ImageInputsMaker | None:
  """The sight of a model; None for one that reads text only. `room` is that of `RolloutImages`."""
  cfg = model.model.policy.cfg
  if cfg.vision is None:
    return None
  return ImageInputsMaker(
    cfg.vision, model.processor, model.encoders, room, trained=not is_frozen(model.model.policy.visual)
  )
