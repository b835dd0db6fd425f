"""Writes docs/images/tiles.png: an image of each environment that draws itself, as a policy sees it.

python tools/make_tiles.py
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402

from ragen_jax.envs.frozen_lake import FrozenLake  # noqa: E402
from ragen_jax.envs.game_2048 import Game2048  # noqa: E402
from ragen_jax.envs.rubik import Rubik2x2  # noqa: E402
from ragen_jax.envs.sokoban import Sokoban  # noqa: E402
from ragen_jax.envs.sudoku import Sudoku  # noqa: E402
from ragen_jax.utils.files import encode_png, replace_file  # noqa: E402

SHEET = ROOT / 'docs' / 'images' / 'tiles.png'
TILE = 32
_GAP = 16  # pixels

_SOKOBAN = Sokoban(dim=(6, 7), num_boxes=2)
_LAKE = FrozenLake()
_2048 = Game2048()
_SUDOKU = Sudoku(hints=False)
_LARGE_SUDOKU = Sudoku(side=9, empty_cells=40)
_CUBE = Rubik2x2(scramble_depth=4)


def _level(env: Any, seed: int) -> Any:
  return jax.device_get(env.reset(jax.random.key(seed)))


def boards() -> list[list[tuple[Any, Any]]]:
  """Environments and states, row by row of the sheet; together they show every kind of tile."""
  fresh = _level(_2048, 0)
  numbers = np.array([[1, 2, 3, 4], [8, 7, 6, 5], [9, 10, 11, 0], [0, 0, 1, 2]], np.int32)
  half = _level(_LARGE_SUDOKU, 3)
  rows = np.arange(9)[:, None]
  sudoku = _SUDOKU.from_text(
    '[1] 2 |[3] 4 \n 3  . | . [2]\n------+------\n[2] . | 4  . \n . [3]|[2][1]'.replace('[2][1]', ' . [1]')
  )
  return [
    [
      (_SOKOBAN, _SOKOBAN.from_text('#######\n#_P_O_#\n#_X#__#\n#__√__#\n#_____#\n#######')),
      (_SOKOBAN, _SOKOBAN.from_text('#######\n#_S_O_#\n#_X#__#\n#_X___#\n#_____#\n#######')),
      (_LAKE, _LAKE.from_text('P_O_\n___G\nO___\n____')),
      (_LAKE, _LAKE.from_text('__X_\n___G\nO___\n____')),
      (_LAKE, _LAKE.from_text('__O_\n___√\nO___\n____')),
    ],
    [
      (_2048, fresh.replace(board=numbers)),
      (_SUDOKU, sudoku),
      (_LARGE_SUDOKU, half.replace(board=np.where(rows < 4, half.solution, half.board))),
      (_CUBE, _level(_CUBE, 1)),
    ],
  ]


def sheet() -> np.ndarray:
  """u8[H, W, 3], all boards with white between them."""
  rows = [_row([np.asarray(env.pixels(state, TILE)) for env, state in row], 1) for row in boards()]
  return np.pad(_row(rows, 0), ((_GAP, _GAP), (_GAP, _GAP), (0, 0)), constant_values=255)


def _row(images: list[np.ndarray], axis: int) -> np.ndarray:
  """Images beside (1) or below (0) one another, filled up with white."""
  other = 1 - axis
  most = max(image.shape[other] for image in images)
  padded = []
  for i, image in enumerate(images):
    pad = [(0, 0)] * 3
    pad[other] = (0, most - image.shape[other])
    pad[axis] = (_GAP if i else 0, 0)
    padded.append(np.pad(image, pad, constant_values=255))
  return np.concatenate(padded, axis)


if __name__ == '__main__':
  replace_file(SHEET, encode_png(sheet()))
