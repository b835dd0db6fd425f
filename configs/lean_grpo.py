"""GRPO on theorems in Lean 4, checked by a server: one JSON object a line, with the field `formal_statement`.

python main.py --config=configs/lean_grpo.py:qwen2.5-3b-instruct --config.envs.Lean.path=minif2f.jsonl

The server, kimina-lean-server with Mathlib, is started first (docs/lean.md) and listens at envs.Lean.url. A tenth of
the statements is held out for the evaluation. Nothing has been trained yet.

The built-in model cannot write Lean. With a warm start on proofs of the data (--config.envs.Lean.fields.proof=NAME,
--mode=sft) it learns little more than that this program works.
"""

from configs import frozenlake_grpo
from ragen_jax.models.presets import BUILT_IN


def get_config(model: str = ''):
  """FrozenLake's settings on theorems, with RAGEN's lengths; each held-out statement is tried once."""
  config = frozenlake_grpo.get_config(model)
  config.train.tags = ('Lean',)
  config.eval.tags = ('LeanTest',)
  config.eval.group_size = 1
  config.sft.tags = ('Lean',)
  config.sft.output = 'runs/lean_sft'
  if config.model.preset in BUILT_IN:
    # The built-in tokenizer was not made for Lean and encodes it byte by byte.
    config.agent.max_context = 4096
    config.agent.max_response_tokens = 64
  else:
    config.agent.max_context = 8192
    config.agent.max_response_tokens = 512
    config.envs.Lean.max_words = 100
  return config
