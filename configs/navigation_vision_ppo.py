"""PPO with a value head on Navigation, from first-person pictures alone, with the built-in model that sees.

python main.py --mode=sft --config=configs/sft_navigation.py
python main.py --config=configs/navigation_vision_ppo.py --config.model.path=runs/sft_navigation/model

PPO has not helped after this warm start; GRPO does (configs/navigation_vision_grpo.py; docs/navigation.md).
"""

from configs import frozenlake_vision_ppo


def get_config(model: str = ''):
  """Small rooms with three coloured balls, and settings for the built-in model after its warm start.

  Args:
    model: a model that reads images, see configs/default.py; empty means 'tiny-vl'.
  """
  config = frozenlake_vision_ppo.get_config(model)
  config.train.tags = ('Navigation',)
  config.eval.tags = ('NavigationValidation',)
  env = config.envs.Navigation
  env.observation = 'image'
  if config.model.preset == 'tiny-vl':
    env.dim, env.inner_walls, env.num_objects = (9, 9), 0, 3
    env.kinds, env.colours = ('ball',), ('red', 'green', 'blue', 'yellow')
    env.fov = 90.0
    env.radius = 1.0
    env.start, env.min_path = 'facing', 2
    # As many visual tokens as the model has read before.
    env.picture = 6
    env.max_turns, env.max_actions, env.max_actions_per_turn = 4, 12, 3
    # Its tokenizer has no words of this game and writes them letter by letter.
    config.agent.max_response_tokens = 88
    config.agent.max_context = 1536
    config.model.vision = 'trained'
  return config
