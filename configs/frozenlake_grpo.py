"""GRPO, without a critic, on FrozenLake 4x4, slippery, from the built-in model.

python main.py --config=configs/frozenlake_grpo.py

2026-11-21, seeds 0, 1, 2, with the previous built-in model (benchmarks/learning_curves.py): success on 256
held-out levels from 0.312 to 0.450, 0.435, 0.445 at temperature 0.5 and from 0.273 to 0.460, 0.445, 0.451 greedy, where
0.491 is the best possible. It took 404, 429 and 757 s on 2 cores of an AMD EPYC that other work was using as well.
"""

from configs import frozenlake_ppo


def get_config(model: str = ''):
  """PPO's settings with group-relative advantages; the built-in model's groups are larger, to compare within them."""
  config = frozenlake_ppo.get_config(model)
  config.algorithm.adv_estimator = 'grpo'
  if config.model.preset == 'tiny':
    config.train.groups = 64
    config.train.group_size = 8
  return config
