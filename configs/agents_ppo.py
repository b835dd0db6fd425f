"""PPO with a value head on FrozenLake 4x4, played by a program that calls the policy over HTTP (docs/agents.md).

python main.py --config=configs/agents_ppo.py
"""

from configs import frozenlake_ppo


def get_config(model: str = ''):
  """The settings of frozenlake_ppo.py with the program docs/examples/frozenlake.py in place of the environment."""
  config = frozenlake_ppo.get_config(model)
  config.envs.Agent.runner = 'docs/examples/frozenlake.py:play'
  config.envs.Agent.max_turns = config.envs.FrozenLake.max_turns
  config.train.tags = config.eval.tags = ('Agent',)
  config.serve.slots = 64
  config.serve.max_concurrency = 64
  config.serve.success_reward = 'goal'
  return config
