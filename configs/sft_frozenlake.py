"""Warm start on FrozenLake 4x4, slippery: the built-in model learns the exact solver's play, without noise.

python main.py --mode=sft --config=configs/sft_frozenlake.py
python main.py --config=configs/frozenlake_ppo.py --config.model.path=runs/sft_frozenlake/model --workdir=runs/after_sft
"""

from configs import default


def get_config(model: str = ''):
  """The solver's plays, several packed into a row. Real models get RAGEN's: 1000 levels, five passes in batches of 128.

  Args:
    model: as in configs/default.py; with '-lora' behind it, adapters are trained.
  """
  config = default.get_config(model)
  config.sft.output = 'runs/sft_frozenlake/model'
  config.sft.tags = ('FrozenLake',)
  config.sft.hurry = 0.0
  config.sft.packing = True
  if config.model.preset == 'tiny':
    config.sft.levels = (4096,)
    # What the solver would still reach, for the critic of a PPO that begins here.
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
