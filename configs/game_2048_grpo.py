"""GRPO, without a critic, on 2048 up to the tile 64.

python main.py --config=configs/game_2048_grpo.py:qwen2.5-0.5b
"""

from configs import game_2048_ppo
from ragen_jax.models.presets import BUILT_IN


def get_config(model: str = ''):
  """PPO's settings with group-relative advantages; small models get larger groups, to compare within them."""
  config = game_2048_ppo.get_config(model)
  config.algorithm.adv_estimator = 'grpo'
  if config.model.preset in BUILT_IN:
    config.train.groups = 64
    config.train.group_size = 8
  return config
