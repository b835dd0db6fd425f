"""Writes docs/images/manipulation.png: both cameras' pictures of a level of each task of Manipulation.

python tools/make_tables.py
"""

from __future__ import annotations

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402

from ragen_jax.envs.manipulation import Manipulation  # noqa: E402
from ragen_jax.envs.manipulation_tasks import TASKS  # noqa: E402
from ragen_jax.utils.files import encode_png, replace_file  # noqa: E402

SHEET = ROOT / 'docs' / 'images' / 'manipulation.png'
SEED, TILE = 1, 22
_GAP = 12  # pixels


def sheet() -> np.ndarray:
  """u8[H, W, 3], the tasks beside one another, with white between them and between the cameras."""
  columns = []
  for task in TASKS:
    env = Manipulation(task=task, cameras=2)
    picture = np.asarray(jax.jit(lambda key, env=env: env.pixels(env.reset(key), TILE))(jax.random.key(SEED)))
    framed = [np.pad(half, ((0, _GAP), (0, _GAP), (0, 0)), constant_values=255) for half in np.split(picture, 2)]
    columns.append(np.concatenate(framed)[:-_GAP])
  return np.concatenate(columns, axis=1)[:, :-_GAP]


if __name__ == '__main__':
  replace_file(SHEET, encode_png(sheet()))
