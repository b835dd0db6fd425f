"""Warm start on SVG: the built-in model that sees learns the programs of pictures.

python main.py --mode=sft --config=configs/sft_svg.py
python main.py --config=configs/svg_vision_ppo.py --config.model.path=runs/sft_svg/model

Not run to its end.
"""

from configs import svg_vision_ppo


def get_config(model: str = ''):
  """The targets' own programs, packed into rows; the thoughts tell shapes, colours and places.

  Args:
    model: see configs/svg_vision_ppo.py.
  """
  config = svg_vision_ppo.get_config(model)
  config.sft.output = 'runs/sft_svg/model'
  config.sft.tags = ('SVG',)
  config.sft.packing = True
  config.eval.group_size = 1
  config.eval.greedy_too = False
  if config.model.preset == 'tiny-vl':
    config.sft.levels = (6000,)
    config.sft.batch_size = 16
    config.sft.steps = 500
    config.sft.learning_rate = 2e-3
    config.sft.eval_every = 100
  return config
