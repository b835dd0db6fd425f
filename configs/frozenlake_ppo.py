"""PPO with a value head on FrozenLake 4x4, slippery, from the built-in model.

python main.py --config=configs/frozenlake_ppo.py
"""

from configs import default


def get_config(model: str = ''):
  """The defaults, and for the built-in model more entropy and a falling learning rate."""
  config = default.get_config(model)
  if config.model.preset == 'tiny':
    config.algorithm.entropy_coef = 0.01
    config.optimizer.final_lr_fraction = 0.2
    config.num_iterations = 60
    config.eval.every = 20
  return config
