"""A run without its weights: shapes, types and layout of what its programs take, on any devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.language_model import LanguageModel, make_sampler, param_state
from ragen_jax.agent.rollout import round_up
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import row_sharding, tree_shardings
from ragen_jax.models import lora, presets
from ragen_jax.models.checkpoint.config import trunk_config
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.training.batches import MiniBatch, abstract_mini_batch
from ragen_jax.training.state import TrainState
from ragen_jax.training.trainer import Trainer


def abstract_policy(config: ConfigDict, dtype: Any, devices: Sequence[Any] | None = None) -> LanguageModel:
  """The policy with abstract weights.

  Its tokenizer is that of the built-in model, since only the chat format affects the programs.

  Args:
    config: the run's; the weights of its model are not needed.
    dtype: type of computations.
    devices: that `config.mesh` arranges; default those of this process.
  """
  mesh = make_mesh(**config.mesh, devices=devices)
  shape = presets.shape(config.model.preset, config.model.path)
  adapters = build.lora_config(config)

  def make():
    rngs = nnx.Rngs(0)
    policy = Qwen(shape, dtype=dtype, param_dtype=jnp.dtype(config.model.param_dtype), rngs=rngs)
    if adapters is not None:
      lora.attach(policy, adapters, rngs)
    critic = Qwen(trunk_config(shape), dtype=dtype, rngs=rngs) if config.model.separate_critic else None
    for model in (policy, critic):
      if model is not None and mesh.size > 1:
        model.activation_sharding = row_sharding(mesh)
    return ActorCritic(policy, critic)

  model = nnx.eval_shape(make)
  directory = presets.resolve(presets.TINY, '')
  tokenizer = ChatTokenizer(directory)
  return LanguageModel(directory, model, tokenizer, make_sampler(model, tokenizer, mesh), mesh)


def abstract_state(trainer: Trainer) -> TrainState:
  """Shapes, types and layout of the arrays of `Trainer.init`, without the reference."""
  params = param_state(trainer.model.model)
  trained, frozen = lora.partition(laid_out(params, tree_shardings(params, trainer.model.mesh)))
  opt_state = jax.eval_shape(trainer.learner.optimizer.init, trained)
  return TrainState(trained, frozen, laid_out(opt_state, tree_shardings(opt_state, trainer.model.mesh)))


def laid_out(tree: Any, shardings: Any) -> Any:
  """A tree of arrays as shapes and types with the layout of `shardings`, a tree of the same structure."""
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def abstract_batch(
  config: ConfigDict, trainer: Trainer, rows: int, *, length: int | None = None, sampled: int | None = None
) -> MiniBatch:
  """A micro-batch.

  Args:
    config: the run's.
    trainer: of the config.
    rows: rows of the micro-batch.
    length: tokens of its longest row before rounding; default the longest possible.
    sampled: the most sampled tokens of a row before rounding; default the most possible.
  """
  agent, a = config.agent, config.algorithm
  length = agent.max_context if length is None else min(length, agent.max_context)
  if sampled is None:
    sampled = agent.max_response_tokens * (trainer.proxy.limits.max_turns if agent.context == 'full' else 1)
  if not (a.mask_loss and a.mask_advantages):
    sampled = length
  return abstract_mini_batch(
    rows,
    round_up(length, config.length_step),
    round_up(min(sampled, length), max(config.length_step // 2, 1)),
    reference=trainer.settings.reference,
    importance=a.tis_cap > 0,
    sharding=row_sharding(trainer.model.mesh),
  )


def prompt_columns(config: ConfigDict) -> int:
  """Columns of the longest observation, after rounding."""
  agent = config.agent
  room = agent.max_context - agent.max_response_tokens
  tokens = min(config.plan.prompt_tokens, room) if agent.context == 'full' else room
  return round_up(tokens, max(config.length_step // 4, 1))


def cache_columns(config: ConfigDict) -> int:
  """Maximum number of columns of the cache: observations are rounded up before the columns of the reply are added."""
  step = config.length_step
  return round_up(config.agent.max_context + max(step // 4, 1) - 1, step)


def bytes_per_device(tree: Any) -> int:
  """Bytes of a tree of arrays, concrete or abstract, on one device."""
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def temporary_bytes(lowered: jax.stages.Lowered) -> int:
  """Bytes per device that a program needs in addition to its arguments and results."""
  return lowered.compile().memory_analysis().temp_size_in_bytes


def compute_dtype(config: ConfigDict) -> np.dtype:
  """The type of computations on the planned machine, assumed to have accelerators."""
  return np.dtype(jnp.bfloat16 if config.model.dtype == 'auto' else config.model.dtype)


def rollout_rows(config: ConfigDict, phase: str) -> int:
  """Episodes of a rollout or an evaluation."""
  section = config.eval if phase == 'evaluation' else config.train
  return section.groups * section.group_size
