"""Warm start on FrozenLake 4x4, slippery: the built-in model learns the exact solver's play, without noise.

python main.py --mode=sft --config=configs/sft_frozenlake.py
python main.py --config=configs/frozenlake_ppo.py --config.model.path=runs/sft_frozenlake/model --workdir=runs/after_sft
"""

from configs import default
from ragen_jax.models.presets import BUILT_IN


def get_config(model: str = ''):
  """The solver's play, packed into rows. Pretrained models get RAGEN's settings: 1000 levels, 5 passes, batches of 128.

  Args:
    model: see configs/default.py.
  """
  config = default.get_config(model)
  config.sft.output = 'runs/sft_frozenlake/model'
  config.sft.tags = ('FrozenLake',)
  config.sft.hurry = 0.0
  config.sft.packing = True
  if config.model.preset in BUILT_IN:
    config.sft.levels = (4096,)
    # Trains the value head on what the solver's play earned, for the critic of a later PPO run.
    config.sft.value_coef = 1.0
    config.sft.steps = 300
    config.sft.learning_rate = 2e-3
    config.sft.eval_every = 100
  else:
    config.sft.levels = (1000,)
    config.sft.batch_size = 128
    config.sft.steps = 40
    config.sft.learning_rate = 1e-4 if config.lora.rank else 1e-5
    config.sft.checkpoint_every = 10
  return config
