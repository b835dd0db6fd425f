"""Writes docs/images/svg.png: targets of SVG, a row for each of three difficulties.

python tools/make_svg.py
"""

from __future__ import annotations

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from ragen_jax.envs.svg import targets  # noqa: E402
from ragen_jax.envs.svg.environment import SvgEnvironment  # noqa: E402
from ragen_jax.envs.svg.program import read_program  # noqa: E402
from ragen_jax.envs.svg.raster import draw  # noqa: E402
from ragen_jax.utils.files import encode_png, replace_file  # noqa: E402

SHEET = ROOT / 'docs' / 'images' / 'svg.png'
ROWS = (
  SvgEnvironment(max_shapes=1),
  SvgEnvironment(min_shapes=3, overlap=False),
  SvgEnvironment(min_shapes=5, max_shapes=6, kinds=targets.KINDS, outlines=True),
)
COLUMNS = 6
SIDE = 96
_GAP = 6  # pixels


def sheet() -> np.ndarray:
  """u8[H, W, 3], a row of targets for each difficulty, with grey lines between them."""
  rows = []
  for env in ROWS:
    pictures = [draw(read_program(env.target(seed).program), SIDE) for seed in range(COLUMNS)]
    padded = [np.pad(x, ((0, _GAP), (0, _GAP), (0, 0)), constant_values=200) for x in pictures]
    rows.append(np.concatenate(padded, axis=1)[:, :-_GAP])
  return np.concatenate(rows, axis=0)[:-_GAP]


if __name__ == '__main__':
  replace_file(SHEET, encode_png(sheet()))
