"""PPO with a value head on Sokoban 6x6 with one box, evaluated on RAGEN's other grid games too.

python main.py --config=configs/sokoban_ppo.py

RAGEN's other games are tags too (configs/default.py has them all). The length of the shortest solution chooses the
difficulty, and levels can come from a file; held-out ones then come from another file, by another tag:

--config.train.tags="('LargerSokoban',)"
--config.envs.SimpleSokoban.min_solution=4 --config.envs.SimpleSokoban.max_solution=6
--config.envs.LargerSokoban.levels=FILE --config.envs.LargerSokoban.dim="(10,10)"
"""

from configs import frozenlake_ppo


def get_config(model: str = ''):
  """FrozenLake's settings on Sokoban."""
  config = frozenlake_ppo.get_config(model)
  config.train.tags = ('SimpleSokoban',)
  # A level has no luck in it, so one episode each of more levels tells more.
  config.eval.tags = ('SimpleSokoban', 'SokobanDifferentGridVocab', 'LargerSokoban', 'FrozenLake')
  config.eval.groups = 640
  config.eval.tag_groups = (256, 128, 128, 128)
  config.eval.group_size = 1
  if config.model.preset == 'tiny':
    # Its tokenizer spells out what the prompts of the games say that it was not made for.
    config.agent.max_context = 1024
  return config
