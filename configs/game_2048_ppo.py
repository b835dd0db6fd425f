"""PPO with a value head on 2048 up to the tile 64.

python main.py --config=configs/game_2048_ppo.py:qwen2.5-0.5b

The built-in model has never seen this game, and there is no solver to imitate.
"""

from configs import frozenlake_ppo
from ragen_jax.models.presets import BUILT_IN


def get_config(model: str = ''):
  """FrozenLake's settings on 2048 up to the tile 64."""
  config = frozenlake_ppo.get_config(model)
  config.train.tags = ('Game2048',)
  config.eval.tags = ('Game2048',)
  # Tiles appear by chance, so each level is played several times.
  config.eval.group_size = 4
  if config.model.preset in BUILT_IN:
    # The built-in tokenizer was not made for this game and encodes its prompts byte by byte.
    config.agent.max_context = 4096
  else:
    config.agent.max_response_tokens = 200
    config.agent.max_context = 8192
  return config
