"""GRPO, without a critic, on the 2x2 cube, one turn from solved.

python main.py --config=configs/rubik_2x2_grpo.py:qwen2.5-0.5b
"""

from configs import rubik_2x2_ppo
from ragen_jax.models.presets import BUILT_IN


def get_config(model: str = ''):
  """PPO's settings with group-relative advantages; small models get larger groups, to compare within them."""
  config = rubik_2x2_ppo.get_config(model)
  config.algorithm.adv_estimator = 'grpo'
  if config.model.preset in BUILT_IN:
    config.train.groups = 64
    config.train.group_size = 8
  return config
