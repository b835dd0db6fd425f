"""VAGEN-Full on Sokoban 6x6 with one box (arXiv 2510.16907): bi-level GAE, and a reward for described states.

python main.py --config=configs/vagen_sokoban.py

docs/reproduce_vagen.md compares the settings with the paper's and has the commands of its other runs. Not run: it needs
a GPU or TPU.
"""

from configs import default


def get_config(model: str = 'qwen2.5-vl-3b'):
  """Sokoban with levels of at most five moves, and VAGEN's settings."""
  config = default.get_config(model)
  config.train.tags = config.eval.tags = ('SimpleSokoban',)
  env = config.envs.SimpleSokoban
  env.max_solution = 5
  env.observation = 'image'
  env.max_turns, env.max_actions, env.max_actions_per_turn = 3, 9, 3
  return with_vagen(config)


def with_vagen(config):
  """VAGEN-Full's settings for any environment whose state can be described."""
  config.num_iterations = 300
  config.train.groups, config.train.group_size = 128, 1
  config.train.temperature = config.eval.temperature = 0.7
  config.train.top_p = config.eval.top_p = 0.95
  # The sampler's probabilities are those of the truncated distribution.
  config.algorithm.old_logprobs = 'trainer'
  config.eval.groups, config.eval.group_size = 128, 1
  config.eval.every = 20
  config.eval.greedy_too = False

  config.agent.format = 'world_modeling'
  config.agent.max_response_tokens = 200
  config.agent.max_context = 2400
  config.agent.format_penalty = 0.0
  config.reward.format_reward = 0.5
  config.reward.state_reward = 0.5

  config.model.separate_critic = True
  config.algorithm.adv_estimator = 'bi_level_gae'
  config.algorithm.high_level_gamma = 0.95
  config.algorithm.clip_ratio_high = 0.2
  config.algorithm.kl_reward_coef = 0.001
  config.algorithm.kl_kind = 'k1'
  config.optimizer.mini_batch_size = 32
  return config
