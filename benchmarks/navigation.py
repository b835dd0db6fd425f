"""What play and descriptions that do not look reach on Navigation, beside the exact solver. Writes a JSON file.

  python benchmarks/navigation.py [--levels=512] [--output=benchmarks/results/navigation.json]

`forward` walks ahead only, `random` draws each action, and `sweep` repeats one sequence, the best of `SWEEPS` on as
many training rooms. All are measured on rooms of the test part, within the actions of the budget. The rule of distance
is VAGEN's, where the target need not be in view. `another room` is the mean score of the true description of the next
level, `constant claim` the best mean score of one claim about the target, whose name the instruction tells, that is the
same for all levels. The numbers do not depend on the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from configs import navigation_vision_ppo  # noqa: E402
from ragen_jax import build  # noqa: E402
from ragen_jax.agent.world_model.descriptions import describe, write_claim  # noqa: E402
from ragen_jax.agent.world_model.state_reward import score_description  # noqa: E402
from ragen_jax.envs.base import Budget  # noqa: E402
from ragen_jax.envs.navigation import Navigation  # noqa: E402

AHEAD, _, RIGHT, LEFT, TURN_RIGHT, *_ = range(8)
# Sequences that are repeated: moves ahead, and then moves to a side or a turn.
SWEEPS = [
  [AHEAD] * ahead + [other] * times
  for ahead, other, times in itertools.product((1, 2, 3, 4, 6), (RIGHT, LEFT, TURN_RIGHT), (1, 2))
]


def cases() -> dict[str, tuple[Navigation, Budget]]:
  """The default tag, the same with VAGEN's rule, and the small rooms of configs/navigation_vision_ppo.py."""
  (small,) = build.env_specs(navigation_vision_ppo.get_config(), ('Navigation',), (1,))
  budget = Budget(5, 25, 5)
  return {
    'Navigation': (Navigation(), budget),
    'the rule of distance': (Navigation(must_see=False), budget),
    'small rooms': (small.env, small.budget),
  }


def measure(env: Navigation, budget: Budget, count: int) -> dict[str, Any]:
  """The success of each way to play on `count` rooms of the test part."""
  train, test = (_levels(dataclasses.replace(env, split=split), count) for split in ('train', 'test'))
  steps = budget.most_actions
  play = jax.jit(lambda states, actions: _play(env, states, actions))
  repeated = [np.resize(sweep, (count, steps)) for sweep in SWEEPS]
  best = max(range(len(SWEEPS)), key=lambda i: float(play(train, repeated[i]).mean()))
  ways = {
    'forward': np.full((count, steps), AHEAD),
    'random': np.random.default_rng(0).integers(8, size=(count, steps)),
    'sweep': repeated[best],
  }
  found = {way: round(float(play(test, actions).mean()), 3) for way, actions in ways.items()}
  states = jax.device_get(test)
  return found | {
    'solver': round(float(env.solve(states, budget).success.mean()), 3),
    'descriptions': _descriptions(env, states),
    'actions of the sweep': [env.action_names[action] for action in SWEEPS[best]],
  }


def _descriptions(env: Navigation, states: Any) -> dict[str, float]:
  """Mean scores of descriptions that do not look."""
  scenes, words = env.scenes(states), env.scene_words
  others = [score_description(describe(other), own) for other, own in zip(scenes[1:] + scenes[:1], scenes, strict=True)]
  claims = [
    [score_description(write_claim(scene.target, *place, words), scene) for scene in scenes]
    for place in itertools.product(*map(range, words.shape))
  ]
  means = np.mean(claims, axis=1)
  return {'another room': round(float(np.mean(others)), 3), 'constant claim': round(float(means.max()), 3)}


def _levels(env: Navigation, count: int) -> Any:
  return jax.jit(jax.vmap(env.reset))(jax.vmap(jax.random.key)(jnp.arange(count)))


def _play(env: Navigation, states: Any, actions: jax.Array) -> jax.Array:
  """bool[N], which of N levels are won by actions [N, A], one after another."""
  keys = jax.random.split(jax.random.key(0), len(actions))

  def one(states, own):
    return jax.vmap(env.step)(states, own, keys)[0], None

  return jax.lax.scan(one, states, jnp.asarray(actions).T)[0].success


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--levels', type=int, default=512, help='number of rooms')
  parser.add_argument('--output', type=pathlib.Path, default=ROOT / 'benchmarks' / 'results' / 'navigation.json')
  arguments = parser.parse_args()
  found = {'levels': arguments.levels, 'cases': {}}
  for name, (env, budget) in cases().items():
    found['cases'][name] = measure(env, budget, arguments.levels)
    print(name, found['cases'][name], flush=True)
  arguments.output.write_text(json.dumps(found, indent=2) + '\n')


if __name__ == '__main__':
  main()
