"""GRPO on Navigation, from first-person pictures alone, with the built-in model that sees, after its warm start.

python main.py --mode=sft --config=configs/sft_navigation.py
python main.py --config=configs/navigation_vision_grpo.py --config.model.path=runs/sft_navigation/model

2026-11-28, seed 0: success on 1,024 test rooms from 0.222 to 0.404 (half of the 95 % interval 0.03) in 20 minutes on
one core of an AMD EPYC that other programs used as well. The best fixed sequence of actions reaches 0.24
(docs/navigation.md).
"""

from configs import navigation_vision_ppo


def get_config(model: str = ''):
  """The rooms of configs/navigation_vision_ppo.py, with group-relative advantages.

  Args:
    model: a model that reads images, see configs/default.py; empty means 'tiny-vl'.
  """
  config = navigation_vision_ppo.get_config(model)
  config.algorithm.adv_estimator = 'grpo'
  if config.model.preset == 'tiny-vl':
    config.num_iterations = 30
    config.train.groups = 32
    config.train.group_size = 8
    # At temperature 1 the model often misspells actions, which it writes letter by letter.
    config.train.temperature = 0.5
    config.optimizer.packing = True
    config.optimizer.micro_batch_size = 0
    config.optimizer.mini_batch_size = 256
    config.optimizer.actor_lr = 3e-4
    config.optimizer.warmup_steps = 2
    config.eval.group_size = 1
    config.eval.greedy_too = False
    config.eval.every = 5
  return config
