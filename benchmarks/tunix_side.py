"""The sides of google-tunix in benchmarks/cpu.py: its sampler, and a step of its trainer, for a checkpoint.

Install them as benchmarks/requirements-tunix.txt says, in an environment of their own.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh


def has_tunix() -> bool:
  return importlib.util.find_spec('tunix') is not None


def load(path: str) -> Any:
  """The model of a checkpoint of Qwen2, in float32."""
  from tunix.models.qwen2 import model, params

  shape = json.loads((pathlib.Path(path) / 'config.json').read_text())
  config = model.ModelConfig(
    num_layers=shape['num_hidden_layers'],
    vocab_size=shape['vocab_size'],
    embed_dim=shape['hidden_size'],
    hidden_dim=shape['intermediate_size'],
    num_heads=shape['num_attention_heads'],
    head_dim=shape.get('head_dim') or shape['hidden_size'] // shape['num_attention_heads'],
    num_kv_heads=shape['num_key_value_heads'],
    rope_theta=int(shape['rope_theta']),
    norm_eps=shape['rms_norm_eps'],
    use_tied_embedding=shape['tie_word_embeddings'],
    dtype=jnp.float32,
    param_dtype=jnp.float32,
  )
  return params.create_model_from_safe_tensors(
    path, config, mesh=Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('fsdp', 'tp'))
  )


class _Prompts:
  """A tokenizer whose texts are the numbers of prompts, so that only the sampler's work is timed."""

  def __init__(self, tokens: np.ndarray):
    self._tokens = tokens

  def encode(self, text: str) -> list[int]:
    return self._tokens[int(text)].tolist()

  def decode(self, ids: list[int]) -> str:
    del ids
    return ''

  def bos_id(self) -> int:
    return 0  # none

  def eos_id(self) -> int:
    return -1  # never sampled

  def pad_id(self) -> int:
    return -1


def sampling(path: str, tokens: np.ndarray, new: int) -> Callable[[], None]:
  """A function that samples `new` tokens and their log-probs after prompts i32[B, T], at temperature 1."""
  from tunix.generate.sampler import CacheConfig, Sampler

  model, (rows, width) = load(path), tokens.shape
  shape = model.config
  cache = CacheConfig(width + new, shape.num_layers, shape.num_kv_heads, shape.head_dim)
  sampler = Sampler(model, _Prompts(tokens), cache)

  def run() -> None:
    found = sampler(
      [str(row) for row in range(rows)],
      max_generation_steps=new,
      max_prompt_length=width,
      temperature=1.0,
      top_p=1.0,
      return_logprobs=True,
      eos_tokens=[-1],
      seed=0,
    )
    if any(len(reply) != new for reply in found.tokens):
      raise RuntimeError('a reply ended early')

  return run


def updating(path: str, tokens: np.ndarray, sampled: np.ndarray, learning_rate: float) -> Callable[[], float]:
  """A function that makes a step of its trainer: AdamW on the mean log-prob of the columns `sampled` of i32[B, T]."""
  from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

  rows, width = tokens.shape
  mask = np.zeros((rows, width), bool)
  mask[:, sampled] = True
  trainer = PeftTrainer(load(path), optax.adamw(learning_rate), TrainingConfig(eval_every_n_steps=10**9))
  step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)
  batch = {
    'input_tokens': jnp.asarray(tokens),
    'input_mask': jnp.asarray(mask),
    'positions': jnp.broadcast_to(jnp.arange(width), (rows, width)),
    'attention_mask': jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (rows, width, width)),
  }

  def run() -> float:
    loss, _, norm = step(batch)
    return float(jax.block_until_ready((loss, norm))[0])

  return run
