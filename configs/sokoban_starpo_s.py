"""StarPO-S on Sokoban 6x6 with one box: PPO that learns from the groups whose rewards vary most.

python main.py --config=configs/sokoban_starpo_s.py
"""

from configs import frozenlake_starpo_s, sokoban_ppo


def get_config(model: str = ''):
  """PPO with the paper's filter."""
  return frozenlake_starpo_s.with_filter(sokoban_ppo.get_config(model))
