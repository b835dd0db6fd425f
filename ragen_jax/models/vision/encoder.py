"""Computes the features of images on the devices, a fixed number at a time, and keeps those of a frozen tower."""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ragen_jax.distributed import processes
from ragen_jax.distributed.sharding import place_rows, row_shards
from ragen_jax.models.layers import is_frozen
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.vision.processor import ProcessorConfig, patches_of
from ragen_jax.models.vision.tower import Features
from ragen_jax.utils.alike import made_once
from ragen_jax.utils.sizes import round_up

# Images of a call of the program, which is compiled for each size of images: as many as have so many tokens, between 1
# and 16. The number depends on the size only, because features of another program differ by rounding, and a resumed run
# computes features in another order.
_IMAGES, _TOKENS = 16, 4096
# Features of a frozen tower that are kept, in bytes.
_KEPT_BYTES = 2 * 2**30


def digest(image: np.ndarray) -> bytes:
  """Identifies the pixels of an image u8[H, W, 3]: equal images have equal digests."""
  found = hashlib.blake2b(repr(image.shape).encode(), digest_size=16)
  found.update(np.ascontiguousarray(image))
  return found.digest()


class _Program:
  """The compiled program of towers of one structure."""

  def __init__(self, graphdef: Any, processor: ProcessorConfig):
    self.traces = 0

    def see(weights: Any, images: jax.Array) -> Features:
      self.traces += 1
      patch = processor.patch_size
      grid = (images.shape[1] // patch, images.shape[2] // patch)
      return nnx.merge(graphdef, weights)(patches_of(images, processor), grid)

    self.run = jax.jit(see)


_program = made_once(8)(_Program)


class Encoder:
  """The vision tower of a model as a program of its own; `encoded` counts the images that went through it."""

  def __init__(self, model: Qwen, processor: ProcessorConfig, mesh: Mesh | None = None):
    """Compiles nothing. If the tower is frozen, features are kept from call to call."""
    self.processor = processor
    self.encoded = 0
    cfg, dtype = model.cfg.vision, np.dtype(model.dtype)
    stacked = np.zeros((len(cfg.deepstack_blocks), 0, cfg.out_hidden_size), dtype) if cfg.deepstack_blocks else None
    self.empty = Features(np.zeros((0, cfg.out_hidden_size), dtype), stacked)
    self._shared = _program(nnx.split(model.visual)[0], processor)
    self._mesh = mesh
    self._keeps = is_frozen(model.visual)
    self._kept: collections.OrderedDict[bytes, Features] = collections.OrderedDict()
    self._bytes = 0

  @property
  def traces(self) -> int:
    """How often the program was traced, also for other encoders of an equal tower."""
    return self._shared.traces

  def __call__(self, weights: Any, images: Sequence[np.ndarray]) -> list[Features]:
    """The features of images, on the host: embeddings [tokens, D], and with DeepStack [n, tokens, D].

    The images are u8[H, W, 3] each, of sizes that need no resizing. The weights of a frozen tower are always the same.
    All processes must call, each with images of its own; the devices of all divide the images of all.

    Raises:
      UserError: the processor would resize an image.
    """
    keys = [digest(image) for image in images]
    found = {key: self._kept[key] for key in keys if key in self._kept}
    new = _of_all_processes({key: image for key, image in zip(keys, images, strict=True) if key not in found})
    by_size: dict[tuple[int, ...], list[bytes]] = {}
    for key, image in new.items():
      by_size.setdefault(image.shape, []).append(key)
    for own in by_size.values():
      found |= zip(own, self._encode(weights, [new[key] for key in own]), strict=True)
    self.encoded += len(new)
    if self._keeps:
      self._keep(found)
    return [found[key] for key in keys]

  def _encode(self, weights: Any, images: list[np.ndarray]) -> list[Features]:
    """The features of images of one size."""
    height, width, _ = images[0].shape
    count = min(max(_TOKENS * self.processor.factor**2 // (height * width), 1), _IMAGES)
    count, found = round_up(count, 1 if self._mesh is None else row_shards(self._mesh)), []
    running = None  # the next call is prepared while a call runs; the device holds the features of two calls at most
    for start in [*range(0, len(images), count), None]:
      call = None
      if start is not None:
        own = images[start : start + count]
        part = np.zeros((count, *own[0].shape), np.uint8)
        part[: len(own)] = own
        call = self._shared.run(weights, part if self._mesh is None else place_rows(part, self._mesh))
      if running is not None:
        running = processes.all_rows(running)
        found += [jax.tree.map(functools.partial(_one, i), running) for i in range(count)]
      running = call
    return found[: len(images)]

  def _keep(self, found: dict[bytes, Features]) -> None:
    """Keeps features, and drops those that were not used for the longest time."""
    for key, features in found.items():
      if key not in self._kept:
        self._bytes += _bytes(features)
      self._kept[key] = features
      self._kept.move_to_end(key)
    while self._bytes > _KEPT_BYTES:
      self._bytes -= _bytes(self._kept.popitem(last=False)[1])


def _of_all_processes(own: Mapping[bytes, np.ndarray]) -> dict[bytes, np.ndarray]:
  """The images that processes pass, by digest, each once and in one order. All must call."""
  senders: dict[bytes, int] = {}
  for process, keys in enumerate(processes.gather(list(own))):
    senders |= dict.fromkeys([key for key in keys if key not in senders], process)
  if not senders:
    return {}
  sent = processes.gather([own[key] for key, process in senders.items() if process == jax.process_index()])
  return dict(zip(senders, itertools.chain(*sent), strict=True))


def _one(i: int, x: np.ndarray) -> np.ndarray:
  return np.array(x[i])


def _bytes(features: Features) -> int:
  return sum(x.nbytes for x in jax.tree.leaves(features))
