"""Scores of descriptions that do not look at the board: lower bounds for the floor of the state reward.

  python benchmarks/description_floors.py [--levels=300] [--output=benchmarks/results/description_floors.json]

`another board` is the mean score of the true description of the next level. `constant` is the best mean score of one
description for all levels, of those with one claim about the first kind and up to three about the second.
`... after the floor` is the mean reward of such descriptions, the mean of max(0, (s - floor) / (1 - floor)) over their
scores s, as a fraction of `reward.state_reward`; of constant descriptions that of the one with the largest.
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

from configs import default  # noqa: E402
from ragen_jax.agent.world_model.descriptions import describe, write_claim  # noqa: E402
from ragen_jax.agent.world_model.state_reward import above_floor, score_description  # noqa: E402
from ragen_jax.envs.frozen_lake import FrozenLake  # noqa: E402
from ragen_jax.envs.sokoban import Sokoban  # noqa: E402

CASES = {
  'Sokoban 6x6, 1 box': Sokoban(),
  'the same, solved in at most 5 moves': Sokoban(max_solution=5),
  'FrozenLake 4x4': FrozenLake(),
}
MOST_CLAIMS = 3  # about the second kind


def measure(levels: int, floor: float) -> dict[str, Any]:
  """The scores and rewards of every case on fresh levels of the seeds 0, 1, ..."""
  found = {}
  for name, env in CASES.items():
    states = jax.device_get(jax.jit(jax.vmap(env.reset))(jax.vmap(jax.random.key)(np.arange(levels))))
    scenes = env.scenes(states)
    others = [describe(scene) for scene in scenes[1:] + scenes[:1]]
    first, second = scenes[0].things
    claims = {kind: [write_claim(kind, r, c) for r in range(3) for c in range(3)] for kind in (first, second)}
    several = [b for n in range(MOST_CLAIMS + 1) for b in itertools.combinations_with_replacement(claims[second], n)]
    texts = ['; '.join([a, *b]) for a, b in itertools.product(claims[first], several)]
    # A score depends on the relations only, and many scenes share them.
    different = {describe(scene): scene for scene in scenes}
    column = {text: i for i, text in enumerate(different)}
    scores = np.array([[score_description(text, scene) for scene in different.values()] for text in texts])
    scores = scores[:, [column[describe(scene)] for scene in scenes]]
    of_others = np.array(list(map(score_description, others, scenes)))
    best = int(np.argmax(scores.mean(axis=1)))
    paid = np.vectorize(lambda score: above_floor(score, floor))
    found[name] = {
      'another board': round(float(of_others.mean()), 3),
      'constant': round(float(scores[best].mean()), 3),
      'constant description': texts[best],
      'another board after the floor': round(float(paid(of_others).mean()), 3),
      'constant after the floor': round(float(paid(scores).mean(axis=1).max()), 3),
    }
  return {'levels': levels, 'floor': floor, 'cases': found}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--levels', type=int, default=300, help='number of levels')
  results = ROOT / 'benchmarks' / 'results'
  parser.add_argument('--output', type=pathlib.Path, default=results / 'description_floors.json')
  arguments = parser.parse_args()
  found = measure(arguments.levels, default.get_config().reward.state_floor)
  for name, told in found['cases'].items():
    print(name, told)
  arguments.output.write_text(json.dumps(found, indent=2) + '\n')


if __name__ == '__main__':
  main()
