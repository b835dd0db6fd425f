"""PPO with a value head on the Bandit, Phoenix against Dragon, evaluated on names that were not trained on too.

python main.py --config=configs/bandit_ppo.py

The built-in model nearly always solves Phoenix against Dragon. It has never seen other names and gives no valid reply
for them. Generalisation to other names needs a pretrained model (configs/bandit_ppo.py:qwen2.5-0.5b).

Other tags are the paper's professions, their reverse, and RAGEN-2's pairs:

--config.train.tags="('BanditProfessions',)" --config.eval.tags="('BanditProfessions','BanditProfessionsTest')"
--config.train.tags="('BanditRev',)" --config.eval.tags="('BanditRev','BanditRevTest')"
--config.train.tags="('BanditPairs',)" --config.eval.tags="('BanditPairs','BanditPairsTest')"
"""

from configs import frozenlake_ppo
from ragen_jax.models.presets import BUILT_IN


def get_config(model: str = ''):
  """FrozenLake's settings on the Bandit; pretrained models get RAGEN's longer replies for its one turn."""
  config = frozenlake_ppo.get_config(model)
  config.train.tags = ('Bandit',)
  config.eval.tags = ('Bandit', 'BanditTest')
  if config.model.preset not in BUILT_IN:
    config.agent.max_response_tokens = 500
  return config
