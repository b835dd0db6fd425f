"""GRPO on the tasks of a package of the library `verifiers` (docs/verifiers.md).

python main.py --config=configs/verifiers_grpo.py:qwen2.5-0.5b-instruct --config.envs.Verifiers.package=NAME

A tenth of the tasks is held out for the evaluation.
"""

from configs import frozenlake_grpo
from ragen_jax.models.presets import BUILT_IN


def get_config(model: str = ''):
  """FrozenLake's settings on a package; each held-out task is played once."""
  config = frozenlake_grpo.get_config(model)
  config.train.tags = ('Verifiers',)
  config.eval.tags = ('VerifiersTest',)
  config.eval.group_size = 1
  config.serve.slots = config.serve.max_concurrency = 64
  if config.model.preset in BUILT_IN:
    # The built-in tokenizer was not made for prose and encodes it byte by byte.
    config.agent.max_context = 1024
    config.agent.max_response_tokens = 64
  return config
