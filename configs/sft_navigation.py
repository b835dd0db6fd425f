"""Warm start on Navigation: the built-in model that sees learns the exact solver's play from first-person pictures.

python main.py --mode=sft --config=configs/sft_navigation.py
python main.py --config=configs/navigation_vision_grpo.py --config.model.path=runs/sft_navigation/model

2026-11-27, seed 0: success on 128 validation rooms 0.08, 0.23, 0.28 and 0.34 after 100, 200, 300 and 400 steps, in 46
minutes on one core of an AMD EPYC that other programs used as well. The best fixed sequence of actions reaches 0.24.
"""

from configs import navigation_vision_ppo


def get_config(model: str = ''):
  """Play with some random turns, packed into rows; the thoughts tell where the target is.

  Args:
    model: see configs/navigation_vision_ppo.py.
  """
  config = navigation_vision_ppo.get_config(model)
  config.sft.output = 'runs/sft_navigation/model'
  config.sft.tags = ('Navigation',)
  config.sft.hurry = 0.0
  config.sft.noise = 0.15
  config.sft.packing = True
  config.eval.group_size = 1
  config.eval.greedy_too = False
  if config.model.preset == 'tiny-vl':
    config.sft.levels = (6000,)
    config.sft.value_coef = 0.05
    config.sft.batch_size = 32
    config.sft.steps = 400
    config.sft.learning_rate = 2e-3
    config.sft.eval_every = 100
  return config
