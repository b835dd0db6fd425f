"""VAGEN-Full on Navigation (arXiv 2510.16907): bi-level GAE, and a reward for described states.

python main.py --config=configs/vagen_navigation.py

docs/reproduce_vagen.md compares the settings with the paper's; the rooms are made here and are no scenes of AI2-THOR.
Not run: it needs a GPU or TPU.
"""

from configs import default
from configs.vagen_sokoban import with_vagen


def get_config(model: str = 'qwen2.5-vl-3b'):
  """Navigation with VAGEN's settings: steps of 0.5 m, found within 1.5 m, seen or not."""
  config = default.get_config(model)
  config.train.tags, config.eval.tags = ('Navigation',), ('NavigationTest',)
  env = config.envs.Navigation
  env.observation = 'image'
  env.must_see = False
  env.max_turns, env.max_actions, env.max_actions_per_turn = 5, 25, 5
  config = with_vagen(config)
  # Up to six objects are in view, and each is a sentence of about ten words in both descriptions.
  env.max_words = 150
  config.agent.max_response_tokens = 256
  config.agent.max_context = 5000
  return config
