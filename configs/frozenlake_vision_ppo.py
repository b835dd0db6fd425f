"""PPO with a value head on FrozenLake 4x4, slippery, from images alone, from the built-in model that sees.

python main.py --config=configs/frozenlake_vision_ppo.py

The prompt has the board as an image and no text of it. `agent.format` selects another form of replies: the model knows
all five. With a form that describes the board, `--config.reward.state_reward=0.02` rewards true descriptions.
`python benchmarks/vision_learning.py` measures what it learns.
"""

from configs import frozenlake_ppo


def get_config(model: str = ''):
  """The settings of the text model, with images.

  Args:
    model: a model that reads images, see configs/default.py; empty means 'tiny-vl'.
  """
  config = frozenlake_ppo.get_config(model or 'tiny-vl')
  config.envs.FrozenLake.observation = 'image'
  if config.model.preset == 'tiny-vl':
    # The longest form describes the board twice, with a sentence for each hole.
    config.agent.max_response_tokens = 48
    config.agent.max_context = 640
  return config
