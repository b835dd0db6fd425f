"""GRPO, without a critic, on FrozenLake 4x4, slippery, from the built-in model.

python main.py --config=configs/frozenlake_grpo.py

2026-11-28, seeds 0, 1, 2 (benchmarks/learning_curves.py): success on 256 held-out levels from 0.306 to 0.437, 0.420,
0.454 at temperature 0.5 and from 0.270 to 0.425, 0.424, 0.439 greedy, where 0.491 is the best possible, in 309, 462 and
460 s on one core of an AMD EPYC that other work was using as well.
"""

from configs import frozenlake_ppo
from ragen_jax.models.presets import BUILT_IN


def get_config(model: str = ''):
  """PPO's settings with group-relative advantages; the built-in model's groups are larger, to compare within them."""
  config = frozenlake_ppo.get_config(model)
  config.algorithm.adv_estimator = 'grpo'
  if config.model.preset in BUILT_IN:
    config.train.groups = 64
    config.train.group_size = 8
  return config
