"""PPO with a value head on the 2x2 cube, one turn from solved.

python main.py --config=configs/rubik_2x2_ppo.py:qwen2.5-0.5b

The built-in model has never seen this game. These commands imitate the solver's play first, and then train:

python main.py --mode=sft --config=configs/rubik_2x2_ppo.py
python main.py --config=configs/rubik_2x2_ppo.py --config.model.path=runs/rubik_2x2_sft
"""

from configs import frozenlake_ppo
from ragen_jax.models.presets import BUILT_IN


def get_config(model: str = ''):
  """FrozenLake's settings on the 2x2 cube, one turn from solved."""
  config = frozenlake_ppo.get_config(model)
  config.train.tags = ('Rubik2x2',)
  config.eval.tags = ('Rubik2x2',)
  # The game is deterministic, so one episode a level is enough.
  config.eval.group_size = 1
  config.sft.output = 'runs/rubik_2x2_sft'
  config.sft.from_scratch = True
  config.sft.tags = ('Rubik2x2',)
  config.sft.levels = (8192,)
  config.sft.noise = 0.35
  # Packed conversations read the rules that they share once: 2.5 times the tokens a second, once compiled.
  config.sft.packing = True
  config.sft.value_coef = 1.0
  config.sft.learning_rate = 3e-3
  if config.model.preset in BUILT_IN:
    # The built-in tokenizer was not made for this game and encodes its prompts byte by byte.
    config.agent.max_context = 2048
  return config
