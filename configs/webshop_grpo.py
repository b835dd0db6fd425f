"""GRPO on WebShop, a shop with a thousand or a million products, whose server runs beside this program.

python main.py --config=configs/webshop_grpo.py:qwen2.5-3b-instruct --config.envs.WebShop.goals=12087

The server is started first (docs/webshop.md); it prints its number of goals. Nothing has been trained yet. The built-in
model cannot shop, and reads pages byte by byte: with it, use --mode=play and the baselines of --mode=eval.
"""

from configs import frozenlake_grpo
from ragen_jax.models.presets import BUILT_IN


def get_config(model: str = ''):
  """FrozenLake's settings on WebShop, with RAGEN's lengths; each goal of the evaluation is tried once."""
  config = frozenlake_grpo.get_config(model)
  config.train.tags = ('WebShop',)
  config.eval.tags = ('WebShopValidation',)
  config.eval.group_size = 1
  if config.model.preset in BUILT_IN:
    # The built-in tokenizer was not made for these pages and encodes them byte by byte.
    config.agent.max_context = 16384
  else:
    config.agent.max_context = 15000
    config.envs.WebShop.max_words = 100
  return config
