"""PPO with a value head on FrozenLake 4x4, slippery, from the built-in model.

python main.py --config=configs/frozenlake_ppo.py
"""

from configs import default


def get_config(model: str = ''):
  """The defaults are this experiment."""
  return default.get_config(model)
