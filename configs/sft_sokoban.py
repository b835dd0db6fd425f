"""Warm start on Sokoban 6x6 with one box: the built-in model learns the exact solver's play, without noise.

python main.py --mode=sft --config=configs/sft_sokoban.py
python main.py --config=configs/sokoban_ppo.py --config.model.path=runs/sft_sokoban/model --workdir=runs/after_sft
"""

from configs import sft_frozenlake


def get_config(model: str = ''):
  """FrozenLake's settings on Sokoban.

  Args:
    model: see configs/default.py.
  """
  config = sft_frozenlake.get_config(model)
  config.sft.output = 'runs/sft_sokoban/model'
  config.sft.tags = ('SimpleSokoban',)
  config.eval.tags = ('SimpleSokoban',)
  # The game is deterministic, so one episode a level is enough.
  config.eval.group_size = 1
  return config
