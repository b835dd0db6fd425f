"""PPO with a value head on SVG, from pictures alone, with the built-in model that sees.

python main.py --mode=sft --config=configs/sft_svg.py
python main.py --config=configs/svg_vision_ppo.py --config.model.path=runs/sft_svg/model

Not run to its end.
"""

from configs import frozenlake_vision_ppo


def get_config(model: str = ''):
  """One or two shapes on a coarse grid, and settings for the built-in model after its warm start.

  Args:
    model: a model that reads images, see configs/default.py; empty means 'tiny-vl'.
  """
  config = frozenlake_vision_ppo.get_config(model)
  config.train.tags, config.eval.tags = ('SVG',), ('SVGTest',)
  env = config.envs.SVG
  if config.model.preset == 'tiny-vl':
    # As many visual tokens as the model has read before, in each picture.
    env.image_size = (48, 48)
    env.max_shapes, env.grid, env.overlap = 2, 10, False
    env.kinds, env.colours = ('rect', 'circle'), ('red', 'green', 'blue', 'gold')
    env.max_turns = env.max_actions = 2
    # Its tokenizer has no words of SVG and writes them letter by letter.
    config.agent.max_response_tokens = 384
    config.agent.max_context = 3072
    config.model.vision = 'trained'
  return config
