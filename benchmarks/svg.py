"""What drawings of SVG score that are nearly right, wrong or empty, and the speed of drawing. Writes a JSON file.

  python benchmarks/svg.py [--targets=40] [--output=benchmarks/results/svg.json]

The scores are means over targets of the test part, with the default weights. `off by 2` and `off by 5` change each
number of a program by up to as many units of the canvas; `last shape missing` leaves out the last shape; `another
target` is what random play draws. The scores do not depend on the machine; the speeds are of processor time, the least
of five passes over the targets.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import re
import sys
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from ragen_jax.envs.svg.environment import SvgEnvironment  # noqa: E402
from ragen_jax.envs.svg.program import read_program  # noqa: E402
from ragen_jax.envs.svg.raster import draw  # noqa: E402

CASES = {'1 shape': (1, 1), '1 to 3 shapes': (1, 3), '6 shapes': (6, 6)}
PASSES = 5
_NUMBER = re.compile(r'(?<=[" ,])\d+(?=[" ,])')


def moved(program: str, by: int, rng: random.Random) -> str:
  """The program with each number of its shapes changed by up to `by`; none becomes negative."""
  head, rest = program.split('>', 1)
  return f'{head}>{_NUMBER.sub(lambda x: str(max(int(x[0]) + rng.randint(-by, by), 0)), rest)}'


def drawings(env: SvgEnvironment, seed: int) -> dict[str, str]:
  """Programs by the name of what is wrong with them."""
  program, rng = env.target(seed).program, random.Random(seed)
  shapes = re.findall(r'<\w+ [^>]*/>', program)
  return {
    'equal': program,
    'off by 2': moved(program, 2, rng),
    'off by 5': moved(program, 5, rng),
    'last shape missing': program.replace(shapes[-1] + '</svg>', '</svg>'),
    'another target': env.random_program(seed, 0),
    'empty': '<svg></svg>',
  }


def measure(env: SvgEnvironment, count: int) -> dict[str, float]:
  """The mean score of each kind of drawing over `count` targets."""
  found: dict[str, list[float]] = {}
  for seed in range(count):
    pictures = {name: draw(read_program(text), env.side) for name, text in drawings(env, seed).items()}
    for name, picture in pictures.items():
      found.setdefault(name, []).append(env.score(pictures['equal'], picture)[0])
  return {name: round(float(np.mean(scores)), 3) for name, scores in found.items()}


def speeds(env: SvgEnvironment, count: int) -> dict[str, float]:
  """Milliseconds of processor time: to read a program, to draw it, and to score a drawing."""
  programs = [env.target(seed).program for seed in range(count)]

  def ms(call: Callable[[int], Any]) -> tuple[float, list[Any]]:
    took = []
    for _ in range(PASSES):
      began = time.process_time()
      results = [call(i) for i in range(count)]
      took.append(time.process_time() - began)
    return round(min(took) / count * 1000, 2), results

  read, layers = ms(lambda i: read_program(programs[i]))
  drawn, pictures = ms(lambda i: draw(layers[i], env.side))
  scored, _ = ms(lambda i: env.score(pictures[i], pictures[i - 1]))
  return {'read': read, 'draw': drawn, 'score': scored}


def main(count: int, output: pathlib.Path) -> None:
  """Measures all cases and writes the file."""
  cases = {
    name: measure(SvgEnvironment(min_shapes=low, max_shapes=high, split='test'), count)
    for name, (low, high) in CASES.items()
  }
  env = {side: SvgEnvironment(image_size=(side, side)) for side in (48, 256)}
  found = {
    'targets': count,
    'cases': cases,
    'processor milliseconds': {f'{side}x{side}': speeds(x, count) for side, x in env.items()},
  }
  output.write_text(json.dumps(found, indent=2) + '\n')
  for name, scores in cases.items():
    print(f'{name}: ' + ', '.join(f'{kind} {score:.3f}' for kind, score in scores.items()))
  print(found['processor milliseconds'])


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--targets', type=int, default=40)
  parser.add_argument('--output', type=pathlib.Path, default=ROOT / 'benchmarks' / 'results' / 'svg.json')
  arguments = parser.parse_args()
  main(arguments.targets, arguments.output)
