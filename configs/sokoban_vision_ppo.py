"""PPO with a value head on Sokoban 6x6 with one box, from images alone, from the built-in model that sees.

python main.py --config=configs/sokoban_vision_ppo.py

See configs/frozenlake_vision_ppo.py.
"""

from configs import frozenlake_vision_ppo


def get_config(model: str = ''):
  """FrozenLake's settings on Sokoban.

  Args:
    model: a model that reads images, see configs/default.py; empty means 'tiny-vl'.
  """
  config = frozenlake_vision_ppo.get_config(model)
  config.train.tags = ('SimpleSokoban',)
  config.eval.tags = ('SimpleSokoban',)
  config.envs.SimpleSokoban.observation = 'image'
  if config.model.preset == 'tiny-vl':
    # Its boards are harder to read than those of FrozenLake, and the tower is small.
    config.model.vision = 'trained'
  return config
