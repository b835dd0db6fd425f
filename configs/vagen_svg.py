"""VAGEN-Base on the reconstruction of pictures by SVG programs (arXiv 2510.16907).

python main.py --config=configs/vagen_svg.py

docs/reproduce_vagen.md compares the settings with the paper's; pictures are made here, and the score needs no model.
Not run: it needs a GPU or TPU.
"""

from configs import default
from configs.vagen_sokoban import with_vagen


def get_config(model: str = 'qwen2.5-vl-3b'):
  """SVG with VAGEN's limits; states are not described in sentences, so there is no reward for descriptions."""
  config = default.get_config(model)
  config.train.tags, config.eval.tags = ('SVG',), ('SVGTest',)
  env = config.envs.SVG
  env.max_turns = env.max_actions = 2
  env.kinds = ('rect', 'circle', 'ellipse', 'line', 'polygon', 'path')
  env.max_shapes = 5
  env.outlines = True
  env.score_reward = 5.0
  config = with_vagen(config)
  config.reward.state_reward = 0.0
  config.agent.max_response_tokens = 750
  config.agent.max_context = 3600
  return config
