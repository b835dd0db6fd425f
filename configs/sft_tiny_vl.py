"""Makes the built-in model that sees: a small Qwen3-VL trained on noisy demonstrations of FrozenLake and Sokoban.

python main.py --mode=sft --config=configs/sft_tiny_vl.py

2026-11-22, seed 0: about 12 minutes of processor time, on 2 cores of an AMD EPYC whose time other work took most of, so
the 54 minutes that passed say nothing. Success on 128 held-out levels of each game at temperature 0.5, with free
thoughts: FrozenLake 0.270 of 0.482 at best, Sokoban 0.258 of 1.
"""

from configs import sft_tiny


def get_config():
  """The play of the text model's demonstrations, with the board as an image, in each form of replies."""
  config = sft_tiny.get_config()
  config.model.preset = 'tiny-vl'
  config.sft.output = 'ragen_jax/models/tiny_vl'
  config.sft.tags = ('FrozenLake', 'SimpleSokoban')
  config.sft.levels = (6_000, 2_000)
  config.sft.forms = ('no_think', 'free_think', 'state_estimation', 'transition_modeling', 'world_modeling')
  config.sft.tower = (64, 2, 4, 128)
  config.sft.short_steps = 600
  config.sft.steps = 1100
  config.sft.packing = True
  config.sft.skip_held_out_of += ('vagen_frozenlake', 'vagen_sokoban')
  config.model.vision = 'trained'
  config.envs.FrozenLake.observation = 'image'
  config.envs.SimpleSokoban.observation = 'image'
  config.eval.tags = ('FrozenLake', 'SimpleSokoban')
  config.eval.groups = 256
  return config
