"""PPO with a value head on FrozenLake 4x4, slippery, from the built-in model.

python main.py --config=configs/frozenlake_ppo.py

2026-11-28, seeds 0, 1, 2 (benchmarks/learning_curves.py): success on 256 held-out levels from 0.306 to 0.426, 0.437,
0.465 at temperature 0.5 and from 0.270 to 0.429, 0.436, 0.470 greedy, where 0.491 is the best possible, in 320, 376 and
462 s on one core of an AMD EPYC that other work was using as well.
"""

from configs import default
from ragen_jax.models.presets import BUILT_IN


def get_config(model: str = ''):
  """The defaults; for the built-in model, settings that suit its size and its warm-started critic."""
  config = default.get_config(model)
  if config.model.preset in BUILT_IN:
    config.num_iterations = 40
    config.train.groups = 128
    config.train.group_size = 4
    # The value head was trained on the returns of other play, so the critic's targets should not contain its own
    # values, whatever lam is.
    config.algorithm.critic_lam = 1.0
    config.algorithm.entropy_coef = 0.003
    config.optimizer.actor_lr = 5e-4
    config.optimizer.warmup_steps = 10
    config.optimizer.final_lr_fraction = 0.2
  return config
