"""What play and descriptions that do not look reach on Manipulation, beside the planner. Writes a JSON file.

  python benchmarks/manipulation.py [--levels=512] [--output=benchmarks/results/manipulation.json]

Levels are of the test part, and a play has six skills. `random` draws each skill among those that random play knows,
which are at the true places (`Manipulation.legal_actions`). `average` plays, on every level, the plan for objects at
the means of their start regions. `another table` is the mean score of the true description of the next level,
`average table` that of the description of the means. The numbers do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ragen_jax.agent.world_model.descriptions import describe  # noqa: E402
from ragen_jax.agent.world_model.state_reward import score_description  # noqa: E402
from ragen_jax.envs.base import Budget  # noqa: E402
from ragen_jax.envs.manipulation import Manipulation  # noqa: E402
from ragen_jax.envs.manipulation_tasks import TASKS  # noqa: E402

BUDGET = Budget(3, 6, 2)


def measure(task: str, count: int) -> dict[str, Any]:
  """The success of each way to play, and the scores of descriptions, on `count` levels of the test part."""
  env = Manipulation(task=task, split='test')
  states = jax.device_get(jax.jit(jax.vmap(env.reset))(jax.vmap(jax.random.key)(jnp.arange(count))))
  middle = np.array(states.table.places[:1])
  middle[0, :, :2] = np.mean(env.task_of_levels.starts, axis=2)
  average = jax.tree.map(lambda leaf: leaf[:1], states)
  average = average.replace(table=average.table.replace(places=middle))
  (plan,) = env.solve(average, Budget(1, 6, 6)).plan(average, 1, 6)
  scenes, (mean,) = env.scenes(states), env.scenes(average)
  others = [score_description(describe(other), own) for other, own in zip(scenes[1:] + scenes[:1], scenes, strict=True)]
  found = {
    'random': _random(env, states),
    'average': _play(env, states, np.resize(plan, (count, 6, 7))).mean(),
    'solver': env.solve(states, BUDGET).success.mean(),
    'another table': np.mean(others),
    'average table': np.mean([score_description(describe(mean), own) for own in scenes]),
  }
  return {name: round(float(value), 3) for name, value in found.items()}


def _random(env: Manipulation, states: Any) -> float:
  rng, step = np.random.default_rng(0), jax.jit(jax.vmap(env.step, (0, 0, None)))
  for _ in range(BUDGET.most_actions):
    skills = [legal[rng.integers(len(legal))] for legal in env.legal_actions(states)]
    states = jax.device_get(step(states, np.array(skills), jax.random.key(0))[0])
  return states.success.mean()


def _play(env: Manipulation, states: Any, skills: np.ndarray) -> np.ndarray:
  """bool[N], which of N levels are won by skills [N, A, 7], one after another."""

  def one(state, own):
    return jax.lax.scan(lambda state, skill: (env.step(state, skill, jax.random.key(0))[0], None), state, own)[0]

  return np.asarray(jax.jit(jax.vmap(one))(states, skills).success)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--levels', type=int, default=512, help='levels of each task')
  parser.add_argument('--output', type=pathlib.Path, default=ROOT / 'benchmarks' / 'results' / 'manipulation.json')
  arguments = parser.parse_args()
  found = {'levels': arguments.levels, 'cases': {task: measure(task, arguments.levels) for task in TASKS}}
  for task, told in found['cases'].items():
    print(task, told)
  arguments.output.write_text(json.dumps(found, indent=2) + '\n')


if __name__ == '__main__':
  main()
