"""Images a second that environments draw of themselves, as a policy with Qwen2.5-VL or Qwen3-VL sees them.

  python benchmarks/images.py [--quick] [--only=rooms] [--output=benchmarks/results/images.json]

A batch of 128 states goes through one compiled call of `pixels`, with tiles of 28 and 32 pixels: one visual token a
tile. The states are fresh levels. The images stay on the device. Compilation is not timed. The cases take turns, and
the result is the median over these turns.

First-person pictures of Navigation have a part of the file of their own, `rooms`, and the pictures of Manipulation have
`tables`; `--only` measures one of them. As other programs may use the machine, these parts also have the pictures a
second of processor time.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ragen_jax.envs.base import Environment  # noqa: E402
from ragen_jax.envs.frozen_lake import FrozenLake  # noqa: E402
from ragen_jax.envs.game_2048 import Game2048  # noqa: E402
from ragen_jax.envs.manipulation import Manipulation  # noqa: E402
from ragen_jax.envs.navigation import Navigation  # noqa: E402
from ragen_jax.envs.rubik import Rubik2x2  # noqa: E402
from ragen_jax.envs.sokoban import Sokoban  # noqa: E402
from ragen_jax.envs.sudoku import Sudoku  # noqa: E402

BATCH = 128
TILES = (28, 32)
CASES: dict[str, Environment] = {
  'FrozenLake 4x4': FrozenLake(),
  'Sokoban 6x6': Sokoban(),
  '2048': Game2048(),
  'Sudoku 4x4': Sudoku(),
  'Sudoku 9x9': Sudoku(side=9, empty_cells=30),
  "Rubik's cube": Rubik2x2(),
}

# Name of a size -> Navigation with as many tiles, and the side of a tile in pixels.
ROOMS = {'64x64': (Navigation(picture=8), 8), '128x128': (Navigation(picture=4), 32), '252x252': (Navigation(), 28)}
# Task and size -> Manipulation with as many tiles, and the side of a tile in pixels.
TABLES = {
  f'{task}, {tiles * tile}x{tiles * tile}': (Manipulation(task=task, picture=tiles), tile)
  for task, tiles, tile in (('stack', 8, 8), ('stack', 4, 32), ('stack', 9, 28), ('drawer', 4, 32))
}
# Part of the file -> its cases.
PICTURES = {'rooms': ROOMS, 'tables': TABLES}


class Program:
  """The compiled drawing of a batch of fresh levels."""

  def __init__(self, env: Environment, tile: int):
    keys = jax.random.split(jax.random.key(0), BATCH)
    self._states = jax.jit(jax.vmap(env.reset))(keys)
    draw = jax.jit(jax.vmap(lambda state: env.pixels(state, tile)))
    self._draw = draw.lower(self._states).compile()
    self.shape = tuple(self.images().shape[1:])

  def images(self) -> np.ndarray:
    """u8[128, H, W, 3]."""
    return np.asarray(self._draw(self._states))

  def seconds(self, calls: int) -> float:
    """The time of some calls after one another."""
    began = time.perf_counter()
    for _ in range(calls):
      images = self._draw(self._states)
    images.block_until_ready()
    return time.perf_counter() - began


def measure(quick: bool) -> dict[str, Any]:
  """Images a second of every case and size of tiles."""
  repeats, calls = (2, 2) if quick else (9, 50)
  programs = {(case, tile): Program(env, tile) for case, env in CASES.items() for tile in TILES}
  seconds = {name: [] for name in programs}
  for _ in range(repeats):
    for name, program in programs.items():
      seconds[name].append(program.seconds(calls))
  found: dict[str, Any] = {case: {} for case in CASES}
  for (case, tile), program in programs.items():
    middle = statistics.median(seconds[case, tile])
    found[case][f'{tile} pixels a tile'] = {
      'height': program.shape[0],
      'width': program.shape[1],
      'visual tokens': program.shape[0] * program.shape[1] // tile**2,
      'images a second': float(f'{BATCH * calls / middle:.4g}'),
    }
  return {'batch': BATCH, 'repeats': repeats, 'calls': calls, 'cases': found}


def measure_pictures(cases: dict[str, tuple[Environment, int]], quick: bool) -> dict[str, Any]:
  """Pictures a second, of time that passes and of processor time, of environments with tiles of so many pixels."""
  repeats, calls = (2, 2) if quick else (9, 20)
  found = {}
  for size, (env, tile) in cases.items():
    program = Program(env, tile)
    passed, used = [], []
    for _ in range(repeats):
      began = time.process_time()
      passed.append(program.seconds(calls))
      used.append(time.process_time() - began)
    found[size] = {
      name: float(f'{BATCH * calls / statistics.median(seconds):.4g}')
      for name, seconds in (('images a second', passed), ('images a processor second', used))
    }
  return {'batch': BATCH, 'repeats': repeats, 'calls': calls, 'cases': found}


def hardware() -> dict[str, Any]:
  """The machine of the measurement, and the versions of the packages."""
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
  models = [line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')]
  return {
    'cpu': models[0] if models else platform.processor(),
    'cores': len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
    'load': os.getloadavg()[0],
    'device': jax.devices()[0].device_kind,
    'python': platform.python_version(),
    'versions': {name: importlib.metadata.version(name) for name in ('jax', 'jaxlib', 'numpy')},
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true', help='few calls; writes nothing unless --output is given')
  parser.add_argument('--output', type=pathlib.Path, help='the JSON file')
  parser.add_argument('--only', choices=PICTURES, help='measures one part, and keeps the rest of the JSON file')
  arguments = parser.parse_args()
  output = arguments.output
  if output is None and not arguments.quick:
    output = ROOT / 'benchmarks' / 'results' / 'images.json'
  origin = {'date': datetime.date.today().isoformat(), 'quick': arguments.quick, 'hardware': hardware()}
  found = {}
  if not arguments.only:
    found = origin | measure(arguments.quick)
    for case, sizes in found['cases'].items():
      for size, told in sizes.items():
        print(f'{case:16}{size}: {told["height"]}x{told["width"]}, {told["images a second"]:12,.0f} images/s')
  elif output is not None and output.exists():
    found = json.loads(output.read_text())
  for part in [arguments.only] if arguments.only else PICTURES:
    found[part] = origin | measure_pictures(PICTURES[part], arguments.quick)
    for case, told in found[part]['cases'].items():
      print(f'{part}, {case}: ' + ', '.join(f'{number:,.0f} {unit}' for unit, number in told.items()))
  if output is not None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=2) + '\n')


if __name__ == '__main__':
  main()
