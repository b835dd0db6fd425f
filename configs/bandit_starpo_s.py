"""StarPO-S on the Bandit, Phoenix against Dragon: PPO that learns from the groups whose rewards vary most.

python main.py --config=configs/bandit_starpo_s.py
"""

from configs import bandit_ppo, frozenlake_starpo_s


def get_config(model: str = ''):
  """PPO with the paper's filter."""
  return frozenlake_starpo_s.with_filter(bandit_ppo.get_config(model))
