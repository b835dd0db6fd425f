"""GRPO, without a critic, on FrozenLake 4x4, slippery, from the built-in model.

python main.py --config=configs/frozenlake_grpo.py

2026-11-28, seeds 0, 1, 2 (benchmarks/learning_curves.py): success on 256 held-out levels from 0.302 to 0.434, 0.421,
0.447 at temperature 0.5 and from 0.271 to 0.436, 0.440, 0.455 greedy, where 0.491 is the best possible, in 2,093, 544
and 299 s on 2 cores of an AMD EPYC that other work was using as well for the first two.
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
