"""StarPO-S on FrozenLake 4x4, slippery: PPO that learns from the groups whose rewards vary most.

python main.py --config=configs/frozenlake_starpo_s.py
"""

from configs import frozenlake_ppo
from ragen_jax.models.presets import BUILT_IN


def get_config(model: str = ''):
  """PPO with the paper's filter."""
  return with_filter(frozenlake_ppo.get_config(model))


def with_filter(config):
  """PPO's settings with StarPO-S's filter; no KL and a higher upper clip, its other changes, are defaults here."""
  config.filter.strategy = 'top_k'
  config.filter.value = 0.25
  if config.model.preset in BUILT_IN:
    # Larger groups give a better estimate of their deviation; the number of episodes stays the same.
    config.train.groups = 64
    config.train.group_size = 8
  return config
