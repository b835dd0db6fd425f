"""GRPO, without a critic, on FrozenLake 4x4, slippery, from the built-in model.

python main.py --config=configs/frozenlake_grpo.py
"""

from configs import frozenlake_ppo


def get_config(model: str = ''):
  """PPO's settings with group-relative advantages; the built-in model's groups are larger, to compare within them."""
  config = frozenlake_ppo.get_config(model)
  config.algorithm.adv_estimator = 'grpo'
  if config.model.preset == 'tiny':
    config.train.groups = 64
    config.train.group_size = 8
  return config
