"""The best possible success on the held-out FrozenLake levels, by how many actions one turn may plan.

  python benchmarks/planning_depth.py

Exact (dynamic programming), so it depends on no machine.
"""

from __future__ import annotations

import pathlib
import sys

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from configs import frozenlake_ppo  # noqa: E402
from ragen_jax import build  # noqa: E402
from ragen_jax.agent.env_manager import EnvStateManager  # noqa: E402


def main() -> None:
  config = frozenlake_ppo.get_config()
  for depth in range(1, config.envs.FrozenLake.max_actions_per_turn + 1):
    config.envs.FrozenLake.max_actions_per_turn = depth
    specs = build.env_specs(config, ('FrozenLake',), (config.eval.groups,))
    levels = EnvStateManager(specs, 1)
    levels.reset(config.eval.first_level)
    print(f'{depth} a turn: {np.mean(levels.optimal()):.4f}')


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')
  main()
