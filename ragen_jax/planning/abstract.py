"""A run without its weights: shapes, types and layout of what its programs take, on any devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from ragen_jax import build, build_agents
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.language_model import INT8, LanguageModel, has_policys_tower, make_sampler, param_state
from ragen_jax.agent.sampler_speaker import fed_image_tokens
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import row_sharding, row_shards
from ragen_jax.models import int8, lora, presets
from ragen_jax.models.attention_choice import choose_attention
from ragen_jax.models.attention_settings import EINSUM
from ragen_jax.models.checkpoint.config import trunk_config
from ragen_jax.models.layers import freeze
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.rotary import AXES
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.models.vision.features import ImageColumns, abstract_features
from ragen_jax.planning import topologies
from ragen_jax.sampling import capacity, division
from ragen_jax.sampling.capacity import bytes_per_device
from ragen_jax.sampling.sampler import changed_weights
from ragen_jax.sampling.shapes import Shapes, largest_cache
from ragen_jax.training.batches import BatchingSettings, MicroBatch, MiniBatch, abstract_mini_batch
from ragen_jax.training.images import ImageInputs, abstract_inputs
from ragen_jax.training.memory import USABLE
from ragen_jax.training.packing import PackedBatch, plan_batches
from ragen_jax.training.state import TrainState
from ragen_jax.training.trainer import Trainer
from ragen_jax.utils.sizes import GIB


def abstract_policy(config: ConfigDict, dtype: Any, devices: Sequence[Any] | None = None) -> LanguageModel:
  """The policy with abstract weights, on the devices that `config.mesh` arranges, by default those of this process.

  Its tokenizer is that of the built-in model, since only the chat format affects the programs.
  """
  mesh = make_mesh(**config.mesh, devices=devices)
  shape = presets.shape(config.model.preset, config.model.path)
  # CPUs, which stand for the planned devices, compile no kernels of accelerators. 'einsum' needs the most memory.
  attention = EINSUM
  if mesh.devices.flat[0].platform != 'cpu':
    attention = choose_attention(config.model.attention, shape, dtype, mesh)
  adapters = build.lora_config(config)

  def make():
    rngs = nnx.Rngs(0)
    common = dict(dtype=dtype, attention=attention, rngs=rngs)
    policy = Qwen(shape, param_dtype=jnp.dtype(config.model.param_dtype), **common)
    if adapters is not None:
      lora.attach(policy, adapters, rngs)
    policy.int8 = config.model.weights == INT8
    if policy.int8 and adapters is not None:
      int8.quantise(policy)
    critic = Qwen(trunk_config(shape), **common) if config.model.separate_critic else None
    for model in filter(None, (policy, critic)):
      if model.visual is not None and config.model.vision == 'frozen':  # as in `language_model.load`
        freeze(model.visual)
      if mesh.size > 1:
        model.activation_sharding = row_sharding(mesh)
    return ActorCritic(policy, critic)

  model = nnx.eval_shape(make)
  directory = presets.resolve(presets.TINY, '')
  tokenizer = ChatTokenizer(directory)
  sampler = make_sampler(
    model, tokenizer, mesh, experts=config.algorithm.replay_experts,
    decode_shards=division.choose(config.agent.decode_shards, shape, dtype, mesh),
  )  # fmt: skip
  return LanguageModel(directory, model, tokenizer, sampler, mesh)


def abstract_state(trainer: Trainer) -> TrainState:
  """Shapes, types and layout of the arrays of `Trainer.init`, without the reference."""
  params = param_state(trainer.model.model)
  trained, frozen = lora.partition(laid_out(params, lora.shardings(params, trainer.model.mesh)))
  return TrainState(trained, frozen, trainer.learner.abstract(jax.eval_shape(trainer.learner.optimizer.init, trained)))


def laid_out(tree: Any, shardings: Any) -> Any:
  """A tree of arrays as shapes and types with the layout of `shardings`, a tree of the same structure."""
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def micro_batches(
  config: ConfigDict, trainer: Trainer, batching: BatchingSettings, *, length: int = 0, sampled: int = 0, rows: int = 0
) -> tuple[int, tuple[int, int, int]]:
  """The number of micro-batches of a mini-batch whose rows are all equally long, and the shape of each.

  The shape is rows or bins, columns, and sampled tokens of a row or a bin. By default, rows have the longest possible
  `length` and the most possible `sampled` tokens, and each episode of the mini-batch is one of its `rows`.
  """
  agent = config.agent
  length = min(length or agent.max_context, agent.max_context)
  turns = trainer.player.max_turns if agent.context == 'full' else 1
  sampled = length if batching.whole_rows else min(sampled or agent.max_response_tokens * turns, length)
  rows = rows or config.optimizer.mini_batch_size
  (plans,) = plan_batches([np.arange(rows)], np.full(rows, length), np.full(rows, sampled), batching)
  return len(plans), shape_of(plans[0])


def shape_of(plan: MicroBatch | PackedBatch) -> tuple[int, int, int]:
  """The rows or bins of a micro-batch, its columns, and the sampled tokens of each."""
  return len(plan.bins if isinstance(plan, PackedBatch) else plan.rows), plan.width, plan.replies


def abstract_batch(config: ConfigDict, trainer: Trainer, shape: tuple[int, int, int]) -> MiniBatch:
  """A micro-batch of a shape of `micro_batches`."""
  cfg = trainer.model.sampler.cfg
  return abstract_mini_batch(
    *shape,
    reference=trainer.settings.reference,
    importance=config.algorithm.tis_cap > 0,
    sharding=row_sharding(trainer.model.mesh),
    packed=config.optimizer.packing,
    images=_abstract_images(config, trainer, shape),
    experts=(cfg.choices_shape, cfg.experts.number_type) if trainer.model.sampler.experts else None,
  )


def _abstract_images(config: ConfigDict, trainer: Trainer, shape: tuple[int, int, int]) -> ImageInputs | None:
  """What a micro-batch reads of images, if all of them differ; None for text."""
  room, (rows, width, _) = build.trained_images(config), shape
  if room is None:
    return None
  model = config.model
  return abstract_inputs(
    trainer.model, presets.processor(model.preset, model.path), room, rows, width,
    packed=config.optimizer.packing,
    shared=has_policys_tower(model.vision, model.param_dtype, model.path),
  )  # fmt: skip


def visual_columns(config: ConfigDict) -> int:
  """Columns of the images of an observation of training, of the environment that has most; 0 for text. A call of an
  agent program is assumed to add one image, the largest."""
  room = build.trained_images(config)
  return 0 if room is None else max(own.count * (own.tokens + 2) for own in room.shown)


def sampler_images(config: ConfigDict, policy: LanguageModel, rows: int, width: int) -> ImageColumns | None:
  """What fed rows read of images; None for text."""
  room = build.trained_images(config)
  if room is None:
    return None
  by_rows, dtype = row_sharding(policy.mesh), policy.model.policy.dtype
  return ImageColumns(
    jax.ShapeDtypeStruct((rows, width), np.int32, sharding=by_rows),
    jax.ShapeDtypeStruct((rows, width, AXES), np.int32, sharding=by_rows),
    abstract_features(
      policy.model.policy.cfg.vision,
      room.tokens(0, rows, width, packed=False),
      dtype,
      by_rows,
      row_sharding(policy.mesh, axis=1),
    ),
  )


def reply_limits(config: ConfigDict) -> list[int]:
  """The most tokens of a reply in each environment of the run."""
  agent, tags = config.agent, {*config.train.tags, *config.eval.tags}
  return [config.envs[tag].get('max_response_tokens', 0) or agent.max_response_tokens for tag in tags]


def prompt_room(config: ConfigDict) -> int:
  """The most tokens of a prompt, and of a row with its next prompt, in the environment with the shortest replies."""
  return config.agent.max_context - min(reply_limits(config), default=config.agent.max_response_tokens)


def prompt_columns(config: ConfigDict) -> int:
  """Columns of the longest observation, or of the piece of it, that one call feeds."""
  most = prompt_room(config)
  tokens = min(config.plan.prompt_tokens + visual_columns(config), most) if config.agent.context == 'full' else most
  shapes = sampler_shapes(config, 1, 1)
  return shapes.whole(tokens, before=0) if visual_columns(config) else max(shapes.pieces(tokens, before=0))


def chunk_columns(config: ConfigDict) -> int:
  """Columns that are decoded by one call of the program."""
  return min(config.agent.decode_chunk, config.agent.max_response_tokens)


def sampler_shapes(config: ConfigDict, rows: int, shards: int) -> Shapes:
  """The sizes that `SamplerSpeaker` chooses from, with `rows` rows of `shards` devices."""
  return Shapes(rows // shards, shards, config.agent.max_context, chunk_columns(config), config.length_step)


def cache_columns(config: ConfigDict) -> int:
  """The columns that `SamplerSpeaker` counts with where it chooses how many rows it samples at a time."""
  return largest_cache(config.agent.max_context, chunk_columns(config), config.length_step)


def temporary_bytes(lowered: jax.stages.Lowered) -> int:
  """Bytes per device that a program needs in addition to its arguments and results."""
  return lowered.compile().memory_analysis().temp_size_in_bytes


def compute_dtype(config: ConfigDict) -> np.dtype:
  """The type of computations on the planned machine, assumed to have accelerators."""
  return np.dtype(jnp.bfloat16 if config.model.dtype == 'auto' else config.model.dtype)


def episodes(config: ConfigDict, phase: str) -> int:
  """Episodes of a rollout or an evaluation."""
  section = config.eval if phase == 'evaluation' else config.train
  return section.groups * section.group_size


def usable_bytes(config: ConfigDict) -> float:
  """Bytes of a planned device that a run may fill."""
  p = config.plan
  return USABLE * (topologies.parse(p.topology).chip.hbm_bytes if p.topology else p.memory_gb * GIB)


@dataclasses.dataclass(frozen=True)
class SamplerPlan:
  """What a run samples with on the planned machine."""

  params: Any  # the weights that the sampler's programs take
  gathered: bool  # whether they are laid out for decoding, and not over `fsdp` as the trained ones
  copied: int  # bytes a device of those that are not the trained ones
  rows: dict[str, int]  # of the devices, in 'rollout' and 'evaluation'; at most the episodes


def sampler_plan(config: ConfigDict, policy: LanguageModel, state: TrainState, kept: int) -> SamplerPlan:
  """What `SamplerSpeaker` would choose on a machine of the planned memory.

  The abstract policy computes in the type of the planned machine. `kept` are the bytes a device of weights, reference
  and optimiser's state.
  """
  sampler, mesh, limit = policy.sampler, policy.mesh, usable_bytes(config)
  needed = 2 * bytes_per_device(sampler.abstract_weights({'policy': state.params['policy']}))
  gathered = mesh.shape['fsdp'] == 1 or sampler.decode_shards > 1 or needed <= limit - kept
  params = sampler.abstract_weights(state.params, gathered)
  leaves = int8.leaves(params)
  copied = bytes_per_device([leaves[i] for i in changed_weights(state.params, params)])
  shards = row_shards(mesh)
  row = capacity.bytes_per_row(
    sampler.cfg, cache_columns(config), compute_dtype(config), mesh.shape['tensor'],
    image_tokens=fed_image_tokens(config.agent.max_context, build.trained_images(config)), shards=shards,
  )  # fmt: skip
  rows = {}
  for phase in ('rollout', 'evaluation'):
    size = episodes(config, phase) // shards
    if build_agents.plays_agents(config):
      size = min(size, config.serve.slots // shards)
    elif config.agent.rows_in_flight:
      size = min(size, config.agent.rows_in_flight // shards)
    rows[phase] = shards * capacity.rows_that_fit(size, row, int(limit - kept - copied))
  return SamplerPlan(params, gathered, copied, rows)


def reference_bytes(trainer: Trainer, state: TrainState) -> int:
  """Bytes a device of the reference, which has the policy's trained weights a second time."""
  return bytes_per_device(state.trained['policy']) if trainer.settings.reference else 0
