"""The tower as a program of its own: a fixed number of images at a time, each distinct image once."""

from __future__ import annotations

import dataclasses
import threading
import types
from concurrent import futures

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from ragen_jax.models.layers import freeze
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.models.vision import encoder as encoders
from ragen_jax.models.vision.config import QWEN3_VL, VisionConfig
from ragen_jax.models.vision.encoder import Encoder, digest
from ragen_jax.models.vision.processor import ProcessorConfig, patches_of
from ragen_jax.models.vision.tower import Features
from ragen_jax.utils.errors import UserError

_PROCESSOR = ProcessorConfig(4, 2, 2, 64, 65536, (0.5, 0.4, 0.3), (0.5, 0.6, 0.7))
_TOWER = VisionConfig(
  family=QWEN3_VL, depth=1, hidden_size=8, intermediate_size=8, num_heads=1, out_hidden_size=16, patch_size=4,
  temporal_patch_size=2, merge_size=2, window_size=0, full_blocks=(), num_positions=16, deepstack_blocks=(0,),
  image_token_id=1, video_token_id=2, vision_start_token_id=3, vision_end_token_id=4,
)  # fmt: skip


def _model(*, frozen: bool, blocks: tuple[int, ...] = (0,)) -> Qwen:
  cfg = QwenConfig(
    vocab_size=20, hidden_size=16, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    rope_sections=(2, 1, 1), vision=dataclasses.replace(_TOWER, deepstack_blocks=blocks),
  )  # fmt: skip
  model = Qwen(cfg, rngs=nnx.Rngs(0))
  if frozen:
    freeze(model.visual)
  return model


def _images(*seeds: int, size=(16, 24)) -> list[np.ndarray]:
  return [np.random.default_rng(seed).integers(0, 256, (*size, 3)).astype(np.uint8) for seed in seeds]


@pytest.mark.usefixtures('new_programs')
@pytest.mark.parametrize('frozen', [True, False])
def test_features_are_those_of_the_tower_and_only_a_frozen_towers_are_kept(frozen):
  model = _model(frozen=frozen)
  weights, encoder = nnx.state(model.visual), Encoder(model, _PROCESSOR)
  wide, small = _images(*range(18)), _images(20, 21, size=(8, 16))
  # Of one size more images than a call holds, and two of another.
  found = encoder(weights, [small[0], *wide, small[1], wide[3]])
  assert encoder.traces == 2 and encoder.encoded == 20
  for image, own in zip([small[0], *wide, small[1], wide[3]], found, strict=True):
    tokens = image.shape[0] * image.shape[1] // 64
    assert own.embeddings.shape == (tokens, 16) and own.deepstack.shape == (1, tokens, 16)
  see = jax.jit(model.see, static_argnums=1)
  for image, own in ((small[0], found[0]), (wide[0], found[1]), (wide[17], found[18])):
    patches = patches_of(jax.numpy.asarray(image[None]), _PROCESSOR)
    expected = see(patches, (image.shape[0] // 4, image.shape[1] // 4))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y[0], rtol=0, atol=1e-5), own, expected)
  again = encoder(weights, [*_images(30), wide[3]])
  assert encoder.encoded == (21 if frozen else 22)
  # The same numbers in another place among others: a resumed run goes on exactly.
  np.testing.assert_array_equal(again[1].embeddings, found[4].embeddings)


@pytest.mark.parametrize(('size', 'count'), [((16, 24), 16), ((256, 512), 2), ((1024, 512), 1)])
def test_a_call_has_as_many_images_as_have_4096_tokens_and_16_at_most(size, count):
  model = _model(frozen=True)
  encoder, shapes = Encoder(model, _PROCESSOR), []
  none = Features(np.zeros((count, 1, 16), np.float32), np.zeros((count, 1, 1, 16), np.float32))
  encoder._shared = types.SimpleNamespace(run=lambda weights, images: shapes.append(images.shape) or none)
  encoder(nnx.state(model.visual), _images(*range(count), size=size))
  assert shapes == [(count, *size, 3)]


@pytest.mark.parametrize('blocks', [(0,), ()])
def test_no_features_have_the_widths_of_those_of_an_image(blocks):
  model = _model(frozen=True, blocks=blocks)
  encoder = Encoder(model, _PROCESSOR)
  (found,) = encoder(nnx.state(model.visual), _images(0))
  none = jax.tree.map(lambda x: x[..., :0, :], found)
  chex.assert_trees_all_equal_shapes_and_dtypes(encoder.empty, none)


def test_the_features_that_were_not_used_for_longest_are_dropped(monkeypatch):
  model = _model(frozen=True)
  weights, encoder = nnx.state(model.visual), Encoder(model, _PROCESSOR)
  a, b, c = _images(0, 1, 2)
  size = sum(x.nbytes for x in jax.tree.leaves(encoder(weights, [a])))
  monkeypatch.setattr(encoders, '_KEPT_BYTES', 2 * size)
  for image in (b, a, c):  # c drops b
    encoder(weights, [image])
  assert encoder.encoded == 3
  encoder(weights, [a, c])
  assert encoder.encoded == 3
  encoder(weights, [b])
  assert encoder.encoded == 4


def test_an_image_that_would_be_resized_is_refused():
  model = _model(frozen=True)
  with pytest.raises(UserError, match='images of 12x16 pixels would be resized to 16x16'):
    Encoder(model, _PROCESSOR)(nnx.state(model.visual), _images(0, size=(12, 16)))


def test_digests_tell_shapes_and_pixels_apart():
  (image,) = _images(0)
  assert digest(image) == digest(image.copy()) == digest(np.asfortranarray(image))
  assert len({digest(x) for x in (image, image ^ 1, image.reshape(24, 16, 3))}) == 3


def test_each_image_of_all_processes_is_sent_once(monkeypatch):
  a, b, c, d = (image for seed in range(2) for image in (*_images(seed), *_images(seed, size=(8, 16))))
  passed = [{b'a': a, b'b': b}, {}, {b'c': c, b'b': b.copy(), b'd': d}]
  process, together, found = threading.local(), threading.Barrier(len(passed)), [None] * len(passed)

  def gather(value):
    found[process.index] = value
    together.wait(10)
    values = list(found)
    together.wait(10)
    return values

  sent = []

  def run(index):
    process.index = index
    return encoders._of_all_processes(passed[index]), found[index]

  monkeypatch.setattr(encoders.processes, 'gather', gather)
  monkeypatch.setattr(jax, 'process_index', lambda: process.index)
  with futures.ThreadPoolExecutor(len(passed)) as threads:
    results = list(threads.map(run, range(len(passed))))
  for result, own in results:
    assert list(result) == [b'a', b'b', b'c', b'd']
    for image, expected in zip(result.values(), (a, b, c, d), strict=True):
      np.testing.assert_array_equal(image, expected)
    sent.append(len(own))
  assert sent == [2, 0, 2]
  passed = [{}] * 3
  with futures.ThreadPoolExecutor(len(passed)) as threads:
    assert [result for result, _ in threads.map(run, range(len(passed)))] == passed
