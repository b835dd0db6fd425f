"""Images of boards read back, the nearest tile at each place, and pictures as clients send them."""

from __future__ import annotations

import base64
import functools
import io
from typing import Any

import jax
import numpy as np
from PIL import Image

from ragen_jax.envs.base import Environment


def data_url(pixels: np.ndarray, kind: str = 'PNG', **options) -> str:
  """A picture u8[H, W, 3] as a client sends it, without loss unless `kind` and `options` ask for some."""
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, kind, **options)
  return f'data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}'


@functools.partial(jax.jit, static_argnums=(0, 2))
def _draw(env: Environment, states: Any, tile: int) -> jax.Array:
  return jax.vmap(lambda state: env.pixels(state, tile))(states)


def draw(env: Environment, states: Any, tile: int) -> np.ndarray:
  """The images of states [N], u8[N, H, W, 3], in one compiled call."""
  return np.asarray(_draw(env, states, tile))


def nearest_tiles(image: np.ndarray, tiles: np.ndarray) -> np.ndarray:
  """i64[R, C], the index of the tile that is nearest to each place of an image, by the sum of squares."""
  side = tiles.shape[1]
  rows, columns = image.shape[0] // side, image.shape[1] // side
  places = image.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(rows * columns, -1).astype(np.float64)
  known = tiles.reshape(len(tiles), -1).astype(np.float64)
  distance = (places**2).sum(1)[:, None] - 2 * places @ known.T + (known**2).sum(1)
  return distance.argmin(axis=1).reshape(rows, columns)


def least_distance(tiles: np.ndarray) -> float:
  """The smallest distance of two tiles: the square root of the mean of squares over their values."""
  flat = tiles.reshape(len(tiles), -1).astype(np.float64)
  square = ((flat[:, None] - flat[None]) ** 2).mean(axis=2)
  return float(np.sqrt(square[~np.eye(len(tiles), dtype=bool)].min()))


def noisy(images: np.ndarray, seed: int = 0) -> np.ndarray:
  """Images with noise of at most 3 of 255 in each value."""
  noise = np.random.default_rng(seed).integers(-3, 4, images.shape)
  return (images.astype(np.int64) + noise).clip(0, 255).astype(np.uint8)
