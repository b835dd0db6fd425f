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
from ragen_jax.models.qwen import Qwen, QwenConfig
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.sft import tiny_tokenizer


def random_model(vocab_size: int, *, seed: int = 0, kv_heads: int = 2) -> ActorCritic:
  """A tiny random policy whose value head is not zero."""
  cfg = QwenConfig(
    vocab_size=vocab_size,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=kv_heads,
    head_dim=8,
    rope_theta=10_000.0,
  )
  model = ActorCritic(Qwen(cfg, rngs=nnx.Rngs(seed)))
  model.value_head.kernel.set_value(jax.random.normal(jax.random.key(seed + 1), (cfg.hidden_size,)))
  return model


def random_policy(config: ConfigDict, directory, *, seed: int = 0) -> LanguageModel:
  """A random policy with a tokenizer made from the prompts of `config.train.tags`, saved to `directory`."""
  tags = tuple(config.train.tags)
  specs = build.env_specs(config, tags, (1,) * len(tags))
  files = directory / 'tokenizer'
  files.mkdir(parents=True, exist_ok=True)
  pieces = prompt_pieces(specs, build.fill(ContextSettings, config.agent))
  tiny_tokenizer.save(tiny_tokenizer.build(pieces, images=False), str(files))
  model = random_model(ChatTokenizer(files).size, seed=seed)
  directory = directory / 'model'
  save_model(
    str(directory), model.policy, model.policy.cfg, 'float32', tokenizer_dir=str(files), value_head=model.value_head
  )
  # With the config beside it, the tokenizer is loaded as a user's would be.
  tokenizer, mesh = ChatTokenizer(directory), make_mesh(-1, 1, 1)
  return LanguageModel(str(directory), model, tokenizer, make_sampler(model, tokenizer, mesh), mesh)
