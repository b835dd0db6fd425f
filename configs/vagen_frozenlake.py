"""VAGEN-Full on FrozenLake 4x4 without slipping (arXiv 2510.16907): bi-level GAE, and a reward for described states.

python main.py --config=configs/vagen_frozenlake.py

docs/reproduce_vagen.md compares the settings with the paper's. Not run: it needs a GPU or TPU.
"""

from configs import default
from configs.vagen_sokoban import with_vagen


def get_config(model: str = 'qwen2.5-vl-3b'):
  """FrozenLake with VAGEN's settings."""
  config = default.get_config(model)
  config.train.tags = config.eval.tags = ('FrozenLake',)
  env = config.envs.FrozenLake
  env.is_slippery = False
  env.observation = 'image'
  env.max_turns, env.max_actions, env.max_actions_per_turn = 3, 9, 3
  config = with_vagen(config)
  # A board has up to ten holes or so, and each is a sentence of about ten words in both descriptions.
  env.max_words = 250
  config.agent.max_response_tokens = 400
  # VAGEN pays 10 at the goal in all, the environment here pays 1: replies earn a tenth, too.
  config.reward.format_reward = config.reward.state_reward = 0.05
  return config
