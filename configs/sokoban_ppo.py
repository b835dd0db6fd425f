"""PPO with a value head on Sokoban 6x6 with one box, evaluated on RAGEN's other grid games too.

python main.py --config=configs/sokoban_ppo.py

2026-11-28, seeds 0, 1, 2 (benchmarks/learning_curves.py): success on 512 levels of Sokoban (command in
benchmarks/results/sokoban_ppo.json) from 0.602 to 0.863, 0.883, 0.854 at temperature 0.5 and from 0.680 to 0.863,
0.881, 0.863 greedy, in 3,169, 1,584 and 1,806 s on one core of an AMD EPYC that other work was using as well.

Other tags select other games (configs/environments.py defines them). Bounds on the length of the shortest solution set
the difficulty. Levels can come from a file; the held-out levels must then come from another file, through another tag:

--config.train.tags="('LargerSokoban',)"
--config.envs.SimpleSokoban.min_solution=4 --config.envs.SimpleSokoban.max_solution=6
--config.envs.LargerSokoban.levels=FILE --config.envs.LargerSokoban.dim="(10,10)"
"""

from configs import frozenlake_ppo
from ragen_jax.models.presets import BUILT_IN


def get_config(model: str = ''):
  """FrozenLake's settings on Sokoban."""
  config = frozenlake_ppo.get_config(model)
  config.train.tags = ('SimpleSokoban',)
  # Sokoban is deterministic, so more levels with one episode each give a more precise estimate.
  config.eval.tags = ('SimpleSokoban', 'SokobanDifferentGridVocab', 'LargerSokoban', 'FrozenLake')
  config.eval.groups = 640
  config.eval.tag_groups = (256, 128, 128, 128)
  config.eval.group_size = 1
  if config.model.preset in BUILT_IN:
    config.optimizer.actor_lr = 3e-4
    config.num_iterations = 200
    # Its tokenizer encodes the prompts of games that it was not made for byte by byte.
    config.agent.max_context = 1024
  return config
