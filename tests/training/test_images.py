"""What micro-batches read of images, sorted or packed, from tables of features and of pixels."""

from __future__ import annotations

import types

import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.agent.image_table_sizes import ImageCounts, ImageTableSizes
from ragen_jax.agent.segments import ImageSegment, ImageSpan
from ragen_jax.agent.trajectory import Timeline
from ragen_jax.models.vision.positions import rope_positions
from ragen_jax.models.vision.tower import Features
from ragen_jax.training.batches import BatchingSettings, PackingSettings, TokenRows, micro_batches, sampled_columns
from ragen_jax.training.images import CRITIC, POLICY, FrozenFeatures, ImageInputsMaker, Pixels
from ragen_jax.training.packing import plan_rows, tokens_to_share
from tests.models.vision.test_encoder import _PROCESSOR as PROCESSOR
from tests.models.vision.test_encoder import _TOWER as TOWER

_PAD = TOWER.image_token_id
# Height and width in tokens.
_SIZES = ((1, 2), (2, 2), (1, 2), (2, 2), (1, 1))
_IMAGES = [np.full((8 * h, 8 * w, 3), 10 * i, np.uint8) for i, (h, w) in enumerate(_SIZES)]
_ROOM = ImageTableSizes(tuple(ImageCounts((8 * h, 8 * w), 1, h * w, 3) for h, w in dict.fromkeys(_SIZES)))
# The images that each row shows; the third row shows none, and the last one a single image twice.
_ROWS = ((0, 1), (4,), (), (2, 3, 0), (1, 1))


def _features(number: int) -> Features:
  count = _SIZES[number][0] * _SIZES[number][1]
  return Features(np.stack([np.full(count, number), np.arange(count)], axis=1).astype(np.float32), None)


def _encoder(weights, images) -> list[Features]:
  assert weights == 'the weights'
  return [_features(next(i for i, own in enumerate(_IMAGES) if np.array_equal(own, image))) for image in images]


def _played():
  """A trajectory that shows `_ROWS`, and its images in the order of their appearance."""
  timeline = Timeline(len(_ROWS), 40)
  for row, shown in enumerate(_ROWS):
    for turn, number in enumerate((*shown, None)):
      count = 0 if number is None else _SIZES[number][0] * _SIZES[number][1]
      spans = [] if number is None else [ImageSpan(ImageSegment(_IMAGES[number], count), 2, 2 + count)]
      timeline.append_context(row, (7, 8, *[_PAD] * count, 9), turn, spans)
      timeline.append_reply(row, (5,) * (row + 1), turn)
  of = np.arange(len(_ROWS))
  return timeline.trajectory(group=of, episode=of, env=of, status=of, policy_version=0, pad_id=0), timeline.images


def _tokens_of(image: np.ndarray) -> np.ndarray:
  """The numbers of `_features` for the pixels of an image."""
  count = image.shape[0] * image.shape[1] // 64
  return np.stack([np.full(count, image[0, 0, 0] // 10), np.arange(count)], axis=1)


def _batches(trained: bool, packed: bool, room: ImageTableSizes | None = None):
  t, images = _played()
  sight = ImageInputsMaker(TOWER, PROCESSOR, {POLICY: _encoder}, room, trained=trained)
  found = sight.inputs({POLICY: {'visual': 'the weights'}}, t, images)
  columns, mask = sampled_columns(t.loss_mask)
  packing = PackingSettings(8, 48, 96, shards=1, reply_step=1, most_shared=48) if packed else None
  settings = BatchingSettings(micro_batch_size=2, length_step=8, whole_rows=False, packing=packing)
  (plans,) = plan_rows([np.arange(len(_ROWS))], t, settings)
  rows = TokenRows(t.tokens, columns, mask, images=found)
  return t, images, list(micro_batches(rows, plans))


def _paths(seen_until: np.ndarray, filled: int) -> list[np.ndarray]:
  """The columns of each row of a bin, which may share their first ones: those that its last column sees."""
  leaves = np.flatnonzero(seen_until[:filled] == np.arange(1, filled + 1))
  return [np.flatnonzero(seen_until[: leaf + 1] > leaf) for leaf in leaves]


@pytest.mark.parametrize('room', [None, _ROOM], ids=['images', 'room'])
@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('trained', [False, True])
def test_every_column_reads_its_token_of_its_image_and_has_its_position(trained, packed, room):
  t, _, parts = _batches(trained, packed, room)
  expected = {}  # a row's tokens -> what its columns show
  for row, shown in enumerate(_ROWS):
    length = int(t.length[row])
    tokens = t.tokens[row, :length]
    grids = [(2 * h, 2 * w) for h, w in (_SIZES[i] for i in shown)]
    reads = np.full((length, 2), -1.0)
    reads[tokens == _PAD] = np.concatenate([_features(i).embeddings for i in shown] or [np.zeros((0, 2))])
    expected[tokens.tobytes()] = reads, rope_positions(tokens, grids, TOWER)[0]
  sizes, found = set(), 0
  for part in parts:
    source = part.images.source
    assert isinstance(source, Pixels if trained else FrozenFeatures)
    if trained:
      table = np.concatenate([_tokens_of(image) for group in source.groups for image in group])
      size = tuple(group.shape for group in source.groups)
    else:
      table = source.by_trunk[POLICY].embeddings
      size = table.shape
      if room is not None:  # the tokens of the images that are shown come first
        needed = int(part.images.index.max()) + 1
        assert len(table) == room.tokens(needed, *part.tokens.shape, packed=packed)
    sizes.add((size, part.tokens.shape))
    for row in range(len(part.tokens)):
      filled = int((part.tokens[row] > 0).sum())
      for own in _paths(part.seen_until[row], filled) if packed else [np.arange(filled)] * (filled > 0):
        reads, positions = expected.pop(part.tokens[row, own].astype(np.int32).tobytes())
        index = part.images.index[row, own]
        np.testing.assert_array_equal(index >= 0, reads[:, 0] >= 0)
        np.testing.assert_array_equal(table[index[index >= 0]], reads[index >= 0])
        np.testing.assert_array_equal(part.images.positions[row, own], positions)
        found += 1
      assert (part.images.index[row, filled:] == -1).all()
  shapes = {shape for _, shape in sizes}  # of the rows
  assert found == len(_ROWS) and not expected
  if room is None:
    assert len({size for size, _ in sizes}) == 1
  elif not packed:
    assert len(sizes) == len(shapes) > 1


def test_the_table_of_a_micro_batch_has_its_own_images_only():
  t, images, parts = _batches(trained=True, packed=False)
  shown = [{int(images[i][0, 0, 0]) for i in row[row >= 0]} for row in t.image]
  rows = {t.tokens[row, : t.length[row]].tobytes(): own for row, own in enumerate(shown)}
  for part in parts:
    found = {int(image[0, 0, 0]) for group in part.images.source.groups for image in group} - {0}
    own = [rows[tokens[: (tokens > 0).sum()].tobytes()] for tokens in part.tokens if tokens.any()]
    assert found == set().union(*own) - {0}


def test_a_tower_sees_the_images_of_each_size_with_their_grid():
  sizes = [(3, 8, 24), (2, 16, 8)]  # images, height, width
  seen = []

  def see(patches, grid, *, remat):
    assert remat
    seen.append((patches.shape, grid))
    return Features(jnp.full((len(patches), 1, 5), len(seen)), None)

  pixels = Pixels(tuple(jnp.zeros((*size, 3), jnp.uint8) for size in sizes), PROCESSOR)
  found = pixels.features(types.SimpleNamespace(activation_sharding=None, see=see), POLICY, remat=True)
  np.testing.assert_array_equal(found.embeddings[:, 0], [1, 1, 1, 2, 2])
  side = PROCESSOR.patch_size
  assert [grid for _, grid in seen] == [(h // side, w // side) for _, h, w in sizes]
  assert [shape[:2] for shape, _ in seen] == [(n, h * w // side**2) for n, h, w in sizes]


def test_rows_of_text_have_no_inputs():
  t, images = _played()
  sight = ImageInputsMaker(TOWER, PROCESSOR, {POLICY: _encoder}, None, trained=False)
  assert sight.inputs({}, t.replace(image=None), images) is None


def test_more_columns_of_text_show_nothing():
  t, images = _played()
  found = ImageInputsMaker(TOWER, PROCESSOR, {}, None, trained=True).inputs({}, t, images)
  wide = found.widened(2)
  assert wide.index.shape[1] == wide.positions.shape[1] == found.index.shape[1] + 2
  assert (wide.index[:, -2:] == -1).all() and wide.gallery is found.gallery
  assert jnp.asarray(wide.positions).shape[2] == 3


def test_a_critic_without_a_table_of_its_own_reads_the_policys():
  both = FrozenFeatures({POLICY: 'table'})
  assert both.features(None, CRITIC, remat=False) == both.features(None, POLICY, remat=False) == 'table'
  assert FrozenFeatures({POLICY: 'table', CRITIC: 'other'}).features(None, CRITIC, remat=False) == 'other'


def test_columns_are_shared_where_they_show_the_same_image():
  timeline, shown = Timeline(3, 40), (0, 1, 0)
  images = [_IMAGES[0], _IMAGES[0] + 1]  # of one size
  count = _SIZES[0][0] * _SIZES[0][1]
  for row, number in enumerate(shown):
    segment = ImageSegment(images[number], count)
    timeline.append_context(row, (7, 8, *[_PAD] * count, 9), 0, [ImageSpan(segment, 2, 2 + count)])
    timeline.append_reply(row, (5, 6 + row), 0)
  of = np.arange(3)
  t = timeline.trajectory(group=of, episode=of, env=of, status=of, policy_version=0, pad_id=0)
  found = tokens_to_share(t)
  n = count + 4  # the first token of the reply too
  assert (found[0, :n] == found[2, :n]).all() and (found[0, 2 : 2 + count] != found[1, 2 : 2 + count]).all()
  assert (found[:, [0, 1, 2 + count]] == t.tokens[:, [0, 1, 2 + count]]).all()
  packing = PackingSettings(8, 48, 96, shards=1, reply_step=1, most_shared=48)
  settings = BatchingSettings(micro_batch_size=2, length_step=8, whole_rows=False, packing=packing)
  (plans,) = plan_rows([np.arange(3)], t, settings)
  shared = {int(row): int(s) for plan in plans for own, of in zip(plan.bins, plan.shared, strict=True)
            for row, s in zip(own, of, strict=True)}  # fmt: skip
  assert sorted(shared.values())[-1] == n and sorted(shared.values())[:2] in ([0, 0], [0, 2])
