"""VAGEN-Full on PrimitiveSkill (arXiv 2510.16907), its four tasks mixed: bi-level GAE, a reward for described states.

python main.py --config=configs/vagen_manipulation.py

docs/reproduce_vagen.md compares the settings with the paper's; the skills are exact rules and no ManiSkill. Not run: it
needs a GPU or TPU.
"""

from configs import default
from configs.vagen_sokoban import with_vagen

TASKS = ('AlignTwoCube', 'PlaceTwoCube', 'StackThreeCube', 'PutAppleInDrawer')


def get_config(model: str = 'qwen2.5-vl-3b'):
  """The four tasks with VAGEN's settings: a picture of about 300 x 300 pixels, and positions without names."""
  config = default.get_config(model)
  config.train.tags = TASKS
  config.eval.tags = tuple(f'{tag}Test' for tag in TASKS)
  for tag in TASKS:
    env = config.envs[tag]
    env.observation, env.positions = 'image', 'list'
    env.picture = 11
    env.max_words = 120
  config = with_vagen(config)
  config.train.groups, config.train.group_size = 64, 2
  # Both descriptions have a sentence of about twenty tokens for each cube.
  config.agent.max_response_tokens = 300
  config.agent.max_context = 3800
  return config
