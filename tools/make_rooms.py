"""Writes docs/images/navigation.png: pictures of three rooms of Navigation, as a policy sees them.

python tools/make_rooms.py
"""

from __future__ import annotations

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402

from ragen_jax.envs.navigation import Navigation  # noqa: E402
from ragen_jax.utils.files import encode_png, replace_file  # noqa: E402

SHEET = ROOT / 'docs' / 'images' / 'navigation.png'
ROOM = Navigation(start='facing', num_objects=8, inner_walls=2)
SEEDS = (9, 23, 31)
TILE = 24
_GAP = 12  # pixels


def sheet() -> np.ndarray:
  """u8[H, W, 3], the first pictures of three levels beside one another, with white between them."""
  draw = jax.jit(jax.vmap(lambda key: ROOM.pixels(ROOM.reset(key), TILE)))
  pictures = np.asarray(draw(jax.vmap(jax.random.key)(np.array(SEEDS))))
  padded = [np.pad(picture, ((0, 0), (0, _GAP), (0, 0)), constant_values=255) for picture in pictures]
  return np.concatenate(padded, axis=1)[:, :-_GAP]


if __name__ == '__main__':
  replace_file(SHEET, encode_png(sheet()))
