"""PPO with a value head on two tasks of Manipulation, from pictures and named positions, with the model that sees.

python main.py --config=configs/manipulation_vision_ppo.py

Not run to its end: nothing is known about how fast it learns.
"""

from configs import frozenlake_vision_ppo


def get_config(model: str = ''):
  """Small pictures, and settings for the built-in model.

  Args:
    model: a model that reads images, see configs/default.py; empty means 'tiny-vl'.
  """
  config = frozenlake_vision_ppo.get_config(model)
  config.train.tags = ('PlaceTwoCube', 'StackThreeCube')
  config.eval.tags = ('PlaceTwoCubeTest', 'StackThreeCubeTest')
  for tag in config.train.tags:
    env = config.envs[tag]
    env.observation = 'image'
    if config.model.preset == 'tiny-vl':
      # As many visual tokens as the model has read before.
      env.picture = 6
  if config.model.preset == 'tiny-vl':
    # Its tokenizer has no words of this game and writes them letter by letter.
    config.agent.max_response_tokens = 128
    config.agent.max_context = 3072
    config.model.vision = 'trained'
  return config
