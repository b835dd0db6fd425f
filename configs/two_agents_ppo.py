"""PPO on FrozenLake 4x4 for one of two agents that move in turns; the other plays with frozen weights.

docs/agent_training.md explains both.

pip install -r requirements-serve.txt -r requirements-endpoint.txt
python main.py --config=configs/two_agents_ppo.py
"""

from configs import agents_ppo


def get_config(model: str = ''):
  """The settings of agents_ppo.py with the program docs/examples/two_agents.py; 'partner' stays as it is."""
  config = agents_ppo.get_config(model)
  config.envs.Agent.runner = 'docs/examples/two_agents.py:play'
  config.serve.trained = 'walker'
  config.serve.frozen = ('partner=base',)
  return config
