"""How alike two pictures are to DINO (arXiv 2104.14294) or DINOv2 (arXiv 2304.07193), from a folder of the user.

The folder has Hugging Face's format: config.json, preprocessor_config.json, and weights in safetensors files. Both
models are plain vision transformers, so they are written here, and PyTorch is not needed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from PIL import Image
from safetensors import SafetensorError
from safetensors.flax import load_file

from ragen_jax.envs.options import is_integer, is_number
from ragen_jax.utils.errors import one_line

DINO = 'dino'  # the name of this part of the score

_LARGEST_SIDE = 1024  # pixels that the model sees
_KEPT = 4096  # pictures whose features are kept
_LEAST_GAP = 1e-9  # of the cosines of two pictures that differ to the model

# Our name of a layer of a block -> its name in a checkpoint, by type of model.
_ATTENTION = {
  'query': 'attention.attention.query', 'key': 'attention.attention.key', 'value': 'attention.attention.value',
  'out': 'attention.output.dense',
}  # fmt: skip
_LAYERS = {
  'vit': _ATTENTION | {
    'norm1': 'layernorm_before', 'norm2': 'layernorm_after', 'fc1': 'intermediate.dense', 'fc2': 'output.dense',
  },
  'dinov2': _ATTENTION | {'norm1': 'norm1', 'norm2': 'norm2', 'fc1': 'mlp.fc1', 'fc2': 'mlp.fc2'},
}  # fmt: skip
_SCALES = {'out': 'layer_scale1.lambda1', 'fc2': 'layer_scale2.lambda1'}  # of the outputs of these layers, in DINOv2


@struct.dataclass
class _Weights:
  """The weights of a model, f32. A layer is {'weight', 'bias'}, as in PyTorch; those of blocks are [L, ...]."""

  patches: dict[str, Any]  # weight [D, 3, patch, patch]
  first: Any  # [D], the first token with its position
  positions: Any  # [side, side, D], of the patches
  blocks: dict[str, dict[str, Any]]
  norm: dict[str, Any]
  heads: int = struct.field(pytree_node=False)
  eps: float = struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True)
class _Preparation:
  """How a picture becomes the input: resized to `size` pixels a side, its middle of `crop` pixels, normalised."""

  size: int
  crop: int
  resample: int
  mean: np.ndarray
  std: np.ndarray


@jax.jit
def _features(weights: _Weights, picture: jax.Array) -> jax.Array:
  """The mean over all tokens of the last layer, f32[D], for an input f32[height, width, 3]."""
  side, _, width = weights.positions.shape
  patch = weights.patches['weight'].shape[-1]
  with jax.default_matmul_precision('highest'):
    x = picture[: side * patch, : side * patch].reshape(side, patch, side, patch, 3)
    x = jnp.einsum('hpwqc,dcpq->hwd', x, weights.patches['weight']) + weights.patches['bias'] + weights.positions
    x = jnp.concatenate([weights.first[None], x.reshape(-1, width)])  # [T, D]

    def block(x: jax.Array, layers: dict[str, dict[str, jax.Array]]) -> tuple[jax.Array, None]:
      h = _norm(x, layers['norm1'], weights.eps)
      q, k, v = (_linear(h, layers[name]).reshape(len(x), weights.heads, -1) for name in ('query', 'key', 'value'))
      x += _linear(jax.nn.dot_product_attention(q, k, v).reshape(x.shape), layers['out'])
      h = _linear(_norm(x, layers['norm2'], weights.eps), layers['fc1'])
      return x + _linear(jax.nn.gelu(h, approximate=False), layers['fc2']), None

    x, _ = jax.lax.scan(block, x, weights.blocks)
    return _norm(x, weights.norm, weights.eps).mean(0)


def _linear(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
  return x @ layer['weight'].T + layer['bias']


def _norm(x: jax.Array, layer: dict[str, jax.Array], eps: float) -> jax.Array:
  centred = x - x.mean(-1, keepdims=True)
  return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + eps) * layer['weight'] + layer['bias']


class Dino:
  """A model that was read. Threads may share it."""

  def __init__(self, weights: _Weights, preparation: _Preparation):
    self._weights, self._preparation = weights, preparation
    self._kept: collections.OrderedDict[bytes, np.ndarray] = collections.OrderedDict()
    self._lock = threading.Lock()

  def features(self, picture: np.ndarray) -> np.ndarray:
    """The direction of the features of a picture u8[side, side, 3]: f64[D] of length 1.

    Each picture goes through the model alone, so its features do not depend on what else is drawn in a turn.
    """
    key = hashlib.blake2b(picture.tobytes(), digest_size=16).digest()
    with self._lock:
      if key in self._kept:
        self._kept.move_to_end(key)
        return self._kept[key]
    found = np.asarray(_features(self._weights, self._prepared(picture)), np.float64)
    found /= np.linalg.norm(found)
    with self._lock:
      self._kept[key] = found
      if len(self._kept) > _KEPT:
        self._kept.popitem(last=False)
    return found

  def score(self, target: np.ndarray, drawing: np.ndarray) -> float:
    """From 0 for what is no more like the target than a white canvas, to 1 for equal pictures.

    It is (c - w) / (1 - w), at least 0, of the cosines c of the two pictures' features and w of the target's and the
    canvas's. It is 0 if the model does not tell the target from the canvas.
    """
    if np.array_equal(target, drawing):
      return 1.0
    wanted = self.features(target)
    cosine, white = (float(wanted @ self.features(x)) for x in (drawing, np.full_like(target, 255)))
    return min(max((cosine - white) / (1 - white), 0.0), 1.0) if 1 - white > _LEAST_GAP else 0.0

  def _prepared(self, picture: np.ndarray) -> np.ndarray:
    how = self._preparation
    resized = Image.fromarray(picture).resize((how.size, how.size), how.resample)
    start = (how.size - how.crop) // 2
    inside = np.asarray(resized, np.float32)[start : start + how.crop, start : start + how.crop]
    return (inside / 255 - how.mean) / how.std


# -- reading a folder --------------------------------------------------------------------------------------------------


def load_dino(folder: str) -> Dino:
  """The model of a folder, read once while its files do not change; ValueError, with one line, if it cannot be read."""
  path = pathlib.Path(os.path.expanduser(folder))
  if not any(path.glob('*.safetensors')):
    raise ValueError(
      f'svg: dino_path={folder!r}: has no *.safetensors; allowed: a folder with a DINO or DINOv2 model that '
      'save_pretrained of transformers has written'
    )
  try:
    stamp = tuple((x.name, x.stat().st_size, x.stat().st_mtime_ns) for x in sorted(path.iterdir()))
    return _read(path, stamp)
  except (OSError, SafetensorError, ValueError, TypeError, IndexError) as e:
    raise ValueError(f'svg: dino_path={folder!r}: {one_line(e, str)}') from e


@functools.lru_cache(maxsize=2)
def _read(path: pathlib.Path, stamp: tuple) -> Dino:
  config, stored = _json(path / 'config.json'), {}
  for name, _, _ in stamp:
    stored |= load_file(path / name) if name.endswith('.safetensors') else {}
  preparation = _read_preparation(_json(path / 'preprocessor_config.json'))
  found = Dino(_read_weights(config, stored, preparation.crop), preparation)
  if not np.isfinite(found.features(np.zeros((preparation.size, preparation.size, 3), np.uint8))).all():
    raise ValueError('the features of a picture are not finite numbers; allowed: sound weights')
  return found


def _json(file: pathlib.Path) -> dict[str, Any]:
  try:
    found = json.loads(file.read_text(encoding='utf-8'))
  except (OSError, ValueError) as e:
    raise ValueError(f'{file.name} cannot be read ({one_line(e, str)})') from e
  if not isinstance(found, dict):
    raise ValueError(f'{file.name} is no JSON object')
  return found


def _must(right: bool, field: str, value: Any, allowed: str) -> None:
  if not right:
    raise ValueError(f'{field}={one_line(value)}; allowed: {allowed}')


def _read_preparation(raw: dict[str, Any]) -> _Preparation:
  """Pictures here are square, so a shortest edge and a height with an equal width mean the same."""
  for step in ('do_resize', 'do_rescale', 'do_normalize'):
    _must(raw.get(step, True) is True, step, raw.get(step), 'True')
  size = _side(raw, 'size')
  crop = _side(raw, 'crop_size') if raw.get('do_center_crop', False) else size
  _must(crop <= size, 'crop_size', crop, f'up to size={size}')
  resample = raw.get('resample')
  _must(is_integer(resample) and 0 <= resample <= 5, 'resample', resample, "a number of Pillow's filters, 0 to 5")
  factor = raw.get('rescale_factor', 1 / 255)
  _must(is_number(factor) and math.isclose(factor, 1 / 255, rel_tol=1e-6), 'rescale_factor', factor, '1/255')
  mean, std = raw.get('image_mean'), raw.get('image_std')
  for field, value in (('image_mean', mean), ('image_std', std)):
    right = isinstance(value, list) and len(value) == 3 and all(is_number(x) and 0 < x < 1 for x in value)
    _must(right, field, value, 'three numbers between 0 and 1')
  return _Preparation(size, crop, resample, np.asarray(mean, np.float32), np.asarray(std, np.float32))


def _side(raw: dict[str, Any], field: str) -> int:
  """Pixels of a side: a number, {'shortest_edge': number}, or {'height': number, 'width': number}."""
  value = raw.get(field)
  sides = list(value.values()) if isinstance(value, dict) else [value]
  side = sides[0] if sides and all(x == sides[0] for x in sides) else None
  _must(is_integer(side) and 1 <= side <= _LARGEST_SIDE, field, value, f'equal sides of 1 to {_LARGEST_SIDE} pixels')
  return side


def _read_weights(config: dict[str, Any], stored: dict[str, jax.Array], crop: int) -> _Weights:
  """The weights for pictures of `crop` pixels a side."""
  kind, depth, heads = (config.get(name) for name in ('model_type', 'num_hidden_layers', 'num_attention_heads'))
  eps = config.get('layer_norm_eps')
  _must(isinstance(kind, str) and kind in _LAYERS, 'model_type', kind, ', '.join(_LAYERS))
  _must(config.get('hidden_act', 'gelu') == 'gelu', 'hidden_act', config.get('hidden_act'), 'gelu')
  _must(not config.get('use_swiglu_ffn', False), 'use_swiglu_ffn', config.get('use_swiglu_ffn'), 'False')
  _must(is_integer(depth) and 1 <= depth <= 100, 'num_hidden_layers', depth, 'integers from 1 to 100')
  _must(is_number(eps) and 0 < eps < 1, 'layer_norm_eps', eps, 'numbers between 0 and 1')

  def tensor(name: str) -> np.ndarray:
    if name not in stored:
      raise ValueError(f'the weights have no {name}; allowed: those of a model without a head')
    return np.asarray(stored[name], np.float32)

  def layer(name: str) -> dict[str, np.ndarray]:
    return {part: tensor(f'{name}.{part}') for part in ('weight', 'bias')}

  def block(prefix: str) -> dict[str, dict[str, np.ndarray]]:
    layers = {own: layer(f'{prefix}.{theirs}') for own, theirs in _LAYERS[kind].items()}
    for own, scale in _SCALES.items() if kind == 'dinov2' else ():
      by = tensor(f'{prefix}.{scale}')
      layers[own] = {'weight': layers[own]['weight'] * by[:, None], 'bias': layers[own]['bias'] * by}
    return layers

  patches = layer('embeddings.patch_embeddings.projection')
  table = tensor('embeddings.position_embeddings')[0]  # of the first token, then of the patches row by row
  width, _, patch, _ = patches['weight'].shape
  _must(is_integer(heads) and heads > 0 and width % heads == 0, 'num_attention_heads', heads, f'divisors of {width}')
  _must(patch <= crop, 'patch_size', patch, f'up to the {crop} pixels of a picture')
  weights = _Weights(
    patches=patches,
    first=tensor('embeddings.cls_token')[0, 0] + table[0],
    positions=_resized(table[1:], crop // patch),
    blocks=jax.tree.map(lambda *layers: np.stack(layers), *(block(f'encoder.layer.{i}') for i in range(depth))),
    norm=layer('layernorm'),
    heads=heads,
    eps=eps,
  )
  return jax.device_put(weights, jax.local_devices()[0])


def _resized(table: np.ndarray, side: int) -> np.ndarray:
  """Positions f32[n * n, D] as f32[side, side, D], by the bicubic filter of PyTorch's `interpolate` (a = -0.75)."""
  n = math.isqrt(len(table))
  places = (np.arange(side) + 0.5) * n / side - 0.5
  shares = np.zeros((side, n))
  for offset in range(-1, 3):
    near = np.floor(places) + offset
    d = np.abs(places - near)
    share = np.where(d <= 1, (1.25 * d - 2.25) * d**2 + 1, ((-0.75 * d + 3.75) * d - 6) * d + 3)
    np.add.at(shares, (np.arange(side), np.clip(near, 0, n - 1).astype(int)), share)
  return np.einsum('ia,jb,abd->ijd', shares, shares, table.reshape(n, n, -1)).astype(np.float32)
