"""GRPO, without a critic, on Sokoban 6x6 with one box, evaluated on RAGEN's other grid games too.

python main.py --config=configs/sokoban_grpo.py
"""

from configs import sokoban_ppo
from ragen_jax.models.presets import BUILT_IN


def get_config(model: str = ''):
  """PPO's settings with group-relative advantages; the built-in model's groups are larger, to compare within them."""
  config = sokoban_ppo.get_config(model)
  config.algorithm.adv_estimator = 'grpo'
  if config.model.preset in BUILT_IN:
    config.optimizer.actor_lr = 5e-4
    config.train.groups = 64
    config.train.group_size = 8
  return config
