"""GRPO on the household tasks of ALFWorld in text: training games, and new games in rooms that training does not have.

pip install -r requirements-alfworld.txt && pip install --no-deps alfworld && alfworld-download
python main.py --config=configs/alfworld_grpo.py:qwen2.5-0.5b-instruct

docs/alfworld.md says what takes tokens, time and memory. No model has been trained with this config yet. The built-in
model writes no command; with it, this config only shows that the parts work together.
"""

from configs import frozenlake_grpo
from ragen_jax.models.presets import BUILT_IN


def get_config(model: str = ''):
  """FrozenLake's settings on ALFWorld, with the last turns as context, so that episodes of 50 turns fit."""
  config = frozenlake_grpo.get_config(model)
  config.train.tags = ('ALFWorld',)
  config.eval.tags = ('ALFWorldSeen', 'ALFWorldUnseen')
  # About as many levels as each part has games: 140 and 134.
  config.eval.groups = 280
  config.eval.group_size = 1
  config.agent.context = 'limited_multi_turn'
  config.agent.context_turns = 5
  config.agent.max_context = 4096
  config.sft.tags = ('ALFWorld',)
  config.sft.output = 'runs/alfworld_sft'
  if config.model.preset in BUILT_IN:
    # The built-in tokenizer was not made for these texts and takes a token for one or two letters.
    config.agent.max_context = 8192
    config.agent.max_response_tokens = 64
    config.train.groups = 2
    config.train.group_size = 4
    config.optimizer.mini_batch_size = 8
    config.optimizer.micro_batch_size = 8
    config.eval.groups = 4
  return config
