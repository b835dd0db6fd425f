"""Scores of descriptions that do not look at the board: lower bounds for the floor of the state reward.

  python benchmarks/description_floors.py [--levels=300] [--output=benchmarks/results/description_floors.json]

`another board` is the mean score of the true description of the next level. `constant` is the best mean score of one
description for all levels: one claim for the first kind, and one claim, said once or several times, for the second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ragen_jax.agent.world_model.descriptions import describe, write_claim  # noqa: E402
from ragen_jax.agent.world_model.state_reward import score_description  # noqa: E402
from ragen_jax.envs.frozen_lake import FrozenLake  # noqa: E402
from ragen_jax.envs.sokoban import Sokoban  # noqa: E402

CASES = {'Sokoban 6x6, 1 box': Sokoban(), 'FrozenLake 4x4': FrozenLake()}
MOST_REPEATS = 3


def measure(levels: int) -> dict[str, dict[str, Any]]:
  """The scores of every case on fresh levels of the seeds 0, 1, ..."""
  found = {}
  for name, env in CASES.items():
    states = jax.device_get(jax.jit(jax.vmap(env.reset))(jax.vmap(jax.random.key)(np.arange(levels))))
    scenes = env.scenes(states)
    others = [describe(scene) for scene in scenes[1:] + scenes[:1]]
    first, second = scenes[0].things
    claims = {kind: [write_claim(kind, r, c) for r in range(3) for c in range(3)] for kind in (first, second)}
    texts = [
      '; '.join([a, *[b] * repeats])
      for a, b, repeats in itertools.product(claims[first], claims[second], range(1, MOST_REPEATS + 1))
    ]
    means = [np.mean([score_description(text, scene) for scene in scenes]) for text in texts]
    best = int(np.argmax(means))
    found[name] = {
      'another board': round(float(np.mean(list(map(score_description, others, scenes)))), 3),
      'constant': round(float(means[best]), 3),
      'constant description': texts[best],
    }
  return {'levels': levels, 'cases': found}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--levels', type=int, default=300, help='number of levels')
  results = ROOT / 'benchmarks' / 'results'
  parser.add_argument('--output', type=pathlib.Path, default=results / 'description_floors.json')
  arguments = parser.parse_args()
  found = measure(arguments.levels)
  for name, told in found['cases'].items():
    print(name, told)
  arguments.output.write_text(json.dumps(found, indent=2) + '\n')


if __name__ == '__main__':
  main()
