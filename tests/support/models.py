"""Small random models and policies."""

from __future__ import annotations

import jax
from flax import nnx
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import ContextSettings
from ragen_jax.agent.language_model import LanguageModel, make_sampler
from ragen_jax.agent.templates import prompt_pieces
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.models.feed_forward import ExpertsConfig
from ragen_jax.models.linear_attention import LinearConfig
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import FULL, LINEAR, WINDOWED, QwenConfig
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.sft import tiny_tokenizer

# What a tiny Qwen3.5 has beside the fields of `random_model`: of four layers, three have linear attention.
HYBRID = {
  'architecture': 'qwen3_5',
  'num_layers': 4,
  'rope_width': 4,
  'rope_sections': (1, 1, 0),
  'rope_interleaved': True,
  'layer_kinds': (LINEAR, LINEAR, LINEAR, FULL),
  'linear': LinearConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=6, taps=4),
}

# The same with wider heads: in heads of a few numbers, an answer of the memory may be near 0, of which the norm shows
# the rounding.
WIDE_HYBRID = HYBRID | {'linear': LinearConfig(key_heads=2, value_heads=4, key_dim=32, value_dim=32, taps=4)}

# What a tiny Gemma 3 has beside the fields of `random_model`.
WINDOWS = {
  'architecture': 'gemma3',
  'num_layers': 3,
  'layer_kinds': (WINDOWED, FULL, WINDOWED),
  'window': 5,
  'window_rope_theta': 300.0,
  'query_scalar': 12,
}


# What a tiny Qwen3 with experts has beside the fields of `random_model`: one layer of each kind.
EXPERTS = {
  'architecture': 'qwen3',
  'experts': ExpertsConfig(count=8, chosen=3, width=24, normalised=True),
  'mlp_layers': (1,),
}

# Mixtures with a shared expert behind both kinds of attention.
HYBRID_EXPERTS = WIDE_HYBRID | {
  'num_layers': 2,
  'layer_kinds': (LINEAR, FULL),
  'experts': ExpertsConfig(count=8, chosen=3, width=64, normalised=True, shared_width=24),
}


def random_model(vocab_size: int, *, seed: int = 0, kv_heads: int = 2, **fields) -> ActorCritic:
  """A tiny random policy whose value head is not zero; `fields` are others of its config."""
  shape = {
    'vocab_size': vocab_size,
    'hidden_size': 32,
    'intermediate_size': 64,
    'num_layers': 2,
    'num_heads': 4,
    'num_kv_heads': kv_heads,
    'head_dim': 8,
    'rope_theta': 10_000.0,
  }
  cfg = QwenConfig(**shape | fields)
  model = ActorCritic(Qwen(cfg, rngs=nnx.Rngs(seed)))
  for layer in model.policy.layers:
    if layer.kind == LINEAR:
      # Memories that forget all at once would leave tiny outputs, of which the norm shows the rounding.
      layer.linear_attn.A_log.set_value(layer.linear_attn.A_log[...] - 2)
  model.value_head.kernel.set_value(jax.random.normal(jax.random.key(seed + 1), (cfg.hidden_size,)))
  return model


def random_policy(config: ConfigDict, directory, *, seed: int = 0, **fields) -> LanguageModel:
  """A random policy with a tokenizer made from the prompts of `config.train.tags`, saved to `directory`.

  `fields` are those of `random_model`.
  """
  tags = tuple(config.train.tags)
  specs = build.env_specs(config, tags, (1,) * len(tags))
  files = directory / 'tokenizer'
  files.mkdir(parents=True, exist_ok=True)
  pieces = prompt_pieces(specs, build.fill(ContextSettings, config.agent))
  tiny_tokenizer.save(tiny_tokenizer.build(pieces, images=False), str(files))
  model = random_model(ChatTokenizer(files).size, seed=seed, **fields)
  directory = directory / 'model'
  save_model(
    str(directory), model.policy, model.policy.cfg, 'float32', tokenizer_dir=str(files), value_head=model.value_head
  )
  # With the config beside it, the tokenizer is loaded as a user's would be.
  tokenizer, mesh = ChatTokenizer(directory), make_mesh(-1, 1, 1)
  return LanguageModel(str(directory), model, tokenizer, make_sampler(model, tokenizer, mesh), mesh)
