"""Small parts that several tests build runs from."""

from __future__ import annotations

import jax
from flax import nnx
from ml_collections import ConfigDict

from configs import default
from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.language_model import LanguageModel, make_sampler
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.models.checkpoint import hf
from ragen_jax.models.qwen import Qwen, QwenConfig
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.modes import sft
from ragen_jax.sft import tiny_tokenizer


def small_config(**fields) -> ConfigDict:
  """The defaults, cut down to seconds; `fields` are dotted names with '__' for the dot."""
  config = default.get_config()
  config.num_iterations = 3
  config.train.groups = 4
  config.train.group_size = 4
  config.eval.groups = 16  # as many rows as in training, and so the same programs
  config.envs.FrozenLake.max_turns = 3
  config.eval.every = 2
  config.optimizer.mini_batch_size = 8
  config.optimizer.micro_batch_size = 4
  config.checkpoint.every = 1
  config.compilation_cache = ''
  config.eval.group_size = 1
  # Wide steps: few programs, and compiling them is what takes a small run's time.
  config.length_step = 256
  with config.unlocked():
    for name, value in fields.items():
      config.update_from_flattened_dict({name.replace('__', '.'): value})
  return config


def leaves(config: ConfigDict, prefix: str = ''):
  """(dotted name, value) of every field."""
  for name, value in config.items():
    if isinstance(value, ConfigDict):
      yield from leaves(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', value


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
  specs = build.env_groups(config, tags, (1,) * len(tags))
  files = directory / 'tokenizer'
  files.mkdir(parents=True, exist_ok=True)
  tiny_tokenizer.save(tiny_tokenizer.build(sft.prompt_pieces(specs, config)), str(files))
  model = random_model(ChatTokenizer(files).size, seed=seed)
  directory = directory / 'model'
  hf.save_model(
    str(directory), model.policy, model.policy.cfg, 'float32', tokenizer_dir=str(files), value_head=model.value_head
  )
  # With the config beside it, the tokenizer is loaded as a user's would be.
  tokenizer, mesh = ChatTokenizer(directory), make_mesh(-1, 1, 1)
  return LanguageModel(str(directory), model, tokenizer, make_sampler(model, tokenizer, mesh), mesh)
