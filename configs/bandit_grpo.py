"""GRPO, without a critic, on the Bandit, Phoenix against Dragon, evaluated on names that were not trained on too.

python main.py --config=configs/bandit_grpo.py
"""

from configs import bandit_ppo
from ragen_jax.models.presets import BUILT_IN


def get_config(model: str = ''):
  """PPO's settings with group-relative advantages, in groups of 16.

  In groups of four or eight, GRPO favours the safe arm on average, although it pays less: see docs/algorithms.md.
  """
  config = bandit_ppo.get_config(model)
  config.algorithm.adv_estimator = 'grpo'
  if config.model.preset in BUILT_IN:
    config.train.groups = 32
    config.train.group_size = 16
  return config
