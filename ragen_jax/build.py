"""Makes the parts of a run from its config.

A settings dataclass has no defaults and is defined next to the class that takes it; `fill` fills it by field name from
a section of the config. No module of a lower layer uses a `ConfigDict`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from ragen_jax.agent import language_model as language_models
from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import ContextManager, ContextSettings
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Limits
from ragen_jax.agent.image_table_sizes import ImageTableSizes, image_room, largest_images
from ragen_jax.agent.language_model import LanguageModel, ModelSettings
from ragen_jax.agent.player import EnvironmentPlayer, Player
from ragen_jax.agent.prompt_images import PromptImages
from ragen_jax.agent.world_model.state_reward import ReplyRewardSettings
from ragen_jax.algorithms.advantages import ESTIMATORS, AdvantageSettings
from ragen_jax.algorithms.collapse import EarlyStopSettings, EchoTrapSettings
from ragen_jax.algorithms.spikes import SpikeSettings
from ragen_jax.build_environments import env_specs, group_counts, played_by_programs
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import row_shards
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.evaluation.evaluator import EvaluationSettings, Evaluator
from ragen_jax.models import lora, presets
from ragen_jax.models.checkpoint.config import is_checkpoint
from ragen_jax.models.checkpoint.export import ExportSettings
from ragen_jax.models.vision.processor import ProcessorConfig
from ragen_jax.runs.config_fields import read_by_training
from ragen_jax.runs.file_digests import data_digests
from ragen_jax.runs.trackers import TrackerSettings
from ragen_jax.sampling.sampler import Sampler, Sampling
from ragen_jax.training import batch_sizes, memory
from ragen_jax.training.batch_sizes import SizeSettings
from ragen_jax.training.batches import BatchingSettings
from ragen_jax.training.curriculum import Curriculum, CurriculumSettings
from ragen_jax.training.estimate import EstimateSettings, RewardSettings
from ragen_jax.training.memory import SeenColumns, UpdateMemory
from ragen_jax.training.monitor import Monitor, MonitorSettings
from ragen_jax.training.objective import LossSettings, WeightSettings
from ragen_jax.training.optimizer import OptimizerSettings
from ragen_jax.training.probes import Probes, ProbeSettings
from ragen_jax.training.records import RecordSettings
from ragen_jax.training.replay import ReplaySettings
from ragen_jax.training.run import RunSettings
from ragen_jax.training.run_log import BEST, LogSettings
from ragen_jax.training.scoring import ANY_COLUMNS, ScoringSettings
from ragen_jax.training.selection import FilterSettings
from ragen_jax.training.trainer import RolloutSettings, Trainer, TrainerSettings, UpdateSettings
from ragen_jax.utils.errors import UserError

_Settings = TypeVar('_Settings')


def fill(settings: type[_Settings], section: Mapping[str, Any], **given: Any) -> _Settings:
  """A settings dataclass filled by field name from a section of the config, whose further names are ignored.

  The values `given` take precedence. Raises TypeError if a field is neither in the section nor given.
  """
  names = {f.name for f in dataclasses.fields(settings)}
  found = {name: section[name] for name in names if name in section}
  return settings(**found | given)


def context_manager(config: ConfigDict, tokenizer: ChatTokenizer, specs: list[EnvSpec]) -> ContextManager:
  """Makes the context manager, which writes the prompts of a run."""
  return ContextManager(tokenizer, specs, fill(ContextSettings, config.agent))


def episode_limits(config: ConfigDict, specs: list[EnvSpec]) -> Limits:
  """The limits of episodes in some environments, in turns and in tokens."""
  max_turns = max((s.budget.max_turns for s in specs), default=0)
  replies = fill(ReplyRewardSettings, config.reward)
  return fill(Limits, config.agent, max_turns=max_turns, length_step=config.length_step, replies=replies)


def agent_proxy(
  config: ConfigDict,
  tokenizer: ChatTokenizer,
  sampler: Sampler,
  specs: list[EnvSpec],
  group_size: int,
  held_out: frozenset[bytes] = frozenset(),
  processor: ProcessorConfig | None = None,
) -> AgentProxy:
  """Makes the rollout loop over a batch of environments; `EnvStateManager` describes `held_out` and `processor`."""
  share = sampler.share
  envs = EnvStateManager(
    specs, group_size, share=share.index, shares=share.parts, held_out=held_out, processor=processor
  )
  return AgentProxy(envs, context_manager(config, tokenizer, specs), episode_limits(config, specs), share=share)


def environment_player(
  config: ConfigDict,
  model: LanguageModel,
  specs: list[EnvSpec],
  group_size: int,
  held_out: frozenset[bytes] = frozenset(),
) -> EnvironmentPlayer:
  """The policy's player of environments. Raises UserError if the model cannot read the images of one of them."""
  proxy = agent_proxy(config, model.tokenizer, model.sampler, specs, group_size, held_out, model.processor)
  room = image_room(specs, model.processor)
  eyes = None if room is None else PromptImages(model.encoders['policy'], model.model.policy.cfg.vision, room)
  return EnvironmentPlayer(proxy, model.sampler, eyes)


def sampling(section: ConfigDict) -> Sampling:
  """The sampling settings of `config.train` or `config.eval`."""
  return Sampling(section.temperature, section.top_p, section.top_k)


def evaluation_settings(config: ConfigDict) -> EvaluationSettings:
  return fill(EvaluationSettings, config.eval, episodes=config.logging.episodes)


def make_evaluator(config: ConfigDict, model: LanguageModel, player: Player | None = None) -> Evaluator:
  """The evaluation on the levels of `config.eval`, by `player` or else the policy; it plays when it is called."""
  if player is None:
    specs = env_specs(config, tuple(config.eval.tags), group_counts(config.eval, 'eval'))
    player = environment_player(config, model, specs, config.eval.group_size)
  return Evaluator(evaluation_settings(config), player, model)


def held_out_levels(config: ConfigDict) -> set[bytes]:
  """The levels of `config.eval`, as `EnvStateManager.levels` gives them; external environments have none."""
  specs = env_specs(config, tuple(config.eval.tags), group_counts(config.eval, 'eval'))
  return EnvStateManager(specs, 1).levels_from(config.eval.first_level)


def compute_dtype(config: ConfigDict) -> Any:
  if config.model.dtype == 'auto':
    return jnp.float32 if jax.default_backend() == 'cpu' else jnp.bfloat16
  return jnp.dtype(config.model.dtype)


def lora_config(config: ConfigDict) -> lora.LoraConfig | None:
  """The adapters of `config.lora`; None if they are off. Raises UserError if a target is unknown."""
  try:
    targets = lora.parse_targets(config.lora.targets, lora_targets(config))
  except ValueError as e:
    raise UserError(f'lora.targets={config.lora.targets!r}: {e}') from e
  return lora.LoraConfig(config.lora.rank, config.lora.alpha, targets) if config.lora.rank else None


def lora_targets(config: ConfigDict) -> tuple[str, ...]:
  """The projections of the model that can have adapters; those of all models while there is no checkpoint to ask."""
  model = config.model
  if not config.lora.rank or (model.path and not is_checkpoint(model.path)):
    return lora.TARGETS + lora.LINEAR_TARGETS
  return lora.targets(presets.shape(model.preset, model.path))


def load_policy(config: ConfigDict) -> LanguageModel:
  """Loads the initial language model of a run, see `language_model.load`."""
  a = config.algorithm
  settings = fill(
    ModelSettings,
    config.model,
    dtype=compute_dtype(config),
    adapters=lora_config(config),
    adapter_path=config.lora.path,
    seed=config.seed,
    records_values=ESTIMATORS[a.adv_estimator].needs_critic and a.old_logprobs == 'sampler',
    replay_experts=a.replay_experts,
    decode_shards=config.agent.decode_shards,
  )
  return language_models.load(settings, make_mesh(**config.mesh))


def steps_per_iteration(config: ConfigDict) -> int:
  """Number of optimiser steps of an iteration whose filter keeps all groups."""
  rows = config.train.groups * config.train.group_size
  return config.algorithm.ppo_epochs * (rows // config.optimizer.mini_batch_size)


def make_trainer(
  config: ConfigDict,
  model: LanguageModel,
  held_out: frozenset[bytes] = frozenset(),
  player: Player | None = None,
  limit: Callable[[], float] = memory.usable,
) -> Trainer:
  """Makes the trainer of a run.

  Args:
    held_out: levels that are not trained on (`Evaluator.held_out`); games with very few levels keep them.
    player: plays the episodes; default the policy, turn by turn.
    limit: bytes that a device may hold, for what is chosen by memory.
  """
  if player is None:
    specs = env_specs(config, tuple(config.train.tags), group_counts(config.train, 'train'))
    player = environment_player(config, model, specs, config.train.group_size, held_out)
  curriculum = None
  if config.curriculum.order:
    curriculum = Curriculum(curriculum_settings(config), player.specs, held_out)
  return Trainer(trainer_settings(config, model, limit), model, player, curriculum)


def curriculum_settings(config: ConfigDict) -> CurriculumSettings:
  """The settings of the choice of items."""
  return fill(
    CurriculumSettings,
    config.curriculum,
    iterations=config.curriculum.iterations or config.num_iterations,
    seed=config.seed,
    online_k=config.train.online_k,
    max_rollouts=config.filter.max_rollouts,
  )


def _most_sampled(config: ConfigDict) -> int:
  """The maximum number of tokens that a training episode can sample."""
  envs = [config.envs[tag] for tag in config.train.tags]
  return max(env.max_turns * (env.get('max_response_tokens') or config.agent.max_response_tokens) for env in envs)


def trainer_settings(
  config: ConfigDict, model: LanguageModel, limit: Callable[[], float] = memory.usable
) -> TrainerSettings:
  a = config.algorithm
  estimator = ESTIMATORS[a.adv_estimator]
  roles = {'needs_critic': estimator.needs_critic, 'records_values': model.sampler.values}
  return TrainerSettings(
    seed=config.seed,
    reference=a.kl_loss_coef > 0 or a.kl_reward_coef > 0,
    rollout=fill(
      RolloutSettings,
      config.train,
      sampling=sampling(config.train),
      max_rollouts=config.filter.max_rollouts,
    ),
    filter=fill(FilterSettings, config.filter, needs_groups=estimator.needs_groups, groups=config.train.groups),
    replay=fill(ReplaySettings, config.replay),
    estimate=fill(
      EstimateSettings,
      a,
      advantages=fill(
        AdvantageSettings, a, **{name: None if a[name] < 0 else a[name] for name in ('high_level_lam', 'critic_lam')}
      ),
      reward=fill(RewardSettings, config.reward),
      batching=batching_settings(config, model, limit),
      banned=model.tokenizer.banned,
      **roles,
    ),
    loss=loss_settings(config, model, limit),
    update=fill(
      UpdateSettings,
      config.optimizer,
      ppo_epochs=a.ppo_epochs,
      fixed_steps=config.filter.fixed_steps,
      weights=fill(WeightSettings, a, loss_norm_length=a.loss_norm_length or _most_sampled(config)),
    ),
    optimizer=fill(
      OptimizerSettings,
      config.optimizer,
      decay_steps=config.num_iterations * steps_per_iteration(config),
      critic_steps=config.optimizer.critic_warmup * steps_per_iteration(config),
      separate_critic=config.model.separate_critic,
    ),
    records=fill(
      RecordSettings, config.logging, prompts_trained=not a.mask_loss, online_k=config.train.online_k, **roles
    ),
  )


def update_memory(config: ConfigDict, model: LanguageModel, dtype: Any = None) -> UpdateMemory:
  """The memory of the update per device; `dtype` of computations is that of the model unless it is given."""
  a = config.algorithm
  return memory.update_memory(
    model, logits_chunk=_logits_chunk(config, model), width=size_settings(config, model).widest,
    reference=a.kl_loss_coef > 0 or a.kl_reward_coef > 0, platform=model.mesh.devices.flat[0].platform, dtype=dtype,
    images=_seen_columns(config, model),
  )  # fmt: skip


def trained_images(config: ConfigDict) -> ImageTableSizes | None:
  """The images that rows of training can show, for the memory that they need; None for text.

  Programs may send as many images as fit into a row, of the size that needs the most memory.
  """
  processor, tags = presets.processor(config.model.preset, config.model.path), tuple(config.train.tags)
  if processor is None or not any(played_by_programs(config.envs[tag].type) for tag in tags):
    return image_room(env_specs(config, tags, (1,) * len(tags)), processor)
  of_processor = [pixels // processor.factor**2 for pixels in (processor.min_pixels, processor.max_pixels)]
  # Around it are two tokens, and a reply follows.
  tokens = min(config.serve.image_tokens, config.agent.max_context - 4, of_processor[1])
  fits = config.serve.max_images and tokens > of_processor[0]
  return largest_images(tokens, processor.factor) if fits else None


def _seen_columns(config: ConfigDict, model: LanguageModel) -> SeenColumns | None:
  """What the columns of the update read of images; None for text."""
  if model.model.policy.cfg.vision is None:
    return None
  width, processor = size_settings(config, model).width, presets.processor(config.model.preset, config.model.path)
  room = trained_images(config)
  if room is None:
    return None
  images = room.most_images(1, width, packed=config.optimizer.packing)
  patches = {size: size[0] * size[1] // processor.patch_size**2 for size in images}
  if config.model.vision == 'frozen':
    tokens = room.most_tokens(1, width, packed=config.optimizer.packing)
  else:
    tokens = sum(count * patches[size] for size, count in images.items()) // processor.merge_size**2
  return SeenColumns(tokens / width, max(patches.values()), row_shards(model.mesh))


def size_settings(config: ConfigDict, model: LanguageModel) -> SizeSettings:
  """What the sizes of micro-batches depend on."""
  a = config.algorithm
  trunks = [trunk for trunk in (model.model.policy, model.model.critic) if trunk is not None]
  return fill(
    SizeSettings, config.optimizer, max_context=config.agent.max_context, length_step=config.length_step,
    whole_rows=not (a.mask_loss and a.mask_advantages), shards=row_shards(model.mesh), remat=config.model.remat,
    most_columns=batch_sizes.HOST_COLUMNS if _on_one_cpu(model) else ANY_COLUMNS,
    most_shared=min(trunk.tree_columns for trunk in trunks),
    skips_unseen=_on_one_cpu(model) and model.model.policy.cfg.vision is None,  # images are not measured
  )  # fmt: skip


def _on_one_cpu(model: LanguageModel) -> bool:
  """Whether programs run on one CPU; those of a plan, which stand for an accelerator's, attend in another way."""
  return model.model.policy.attention.by_row


def _logits_chunk(config: ConfigDict, model: LanguageModel) -> int:
  """Token positions whose logits a device holds at once; 0 for all."""
  chunk = config.model.logits_chunk
  return min(chunk, batch_sizes.HOST_LOGITS) if _on_one_cpu(model) else chunk


def batching_settings(
  config: ConfigDict, model: LanguageModel, limit: Callable[[], float] = memory.usable
) -> BatchingSettings:
  """The sizes of micro-batches; with `optimizer.micro_batch_size=0` as much as fits into `limit` bytes a device."""
  return batch_sizes.batching(size_settings(config, model), lambda: update_memory(config, model), limit)


def describe_batching(config: ConfigDict, trainer: Trainer, limit: Callable[[], float] = memory.usable) -> str:
  """What goes through the model at once in the update, and why, in one line; `limit` is that of `make_trainer`."""
  sizes, found, s = size_settings(config, trainer.model), update_memory(config, trainer.model), trainer.settings
  return batch_sizes.describe(sizes, s.estimate.batching, s.loss.scoring.remat, found, limit())


def scoring_settings(
  config: ConfigDict, model: LanguageModel, temperature: float, limit: Callable[[], float] = memory.usable
) -> ScoringSettings:
  """The settings for scoring tokens that were sampled with this temperature."""
  policy = model.model.policy
  remat = batch_sizes.remat_settings(config.model.remat, policy, lambda: update_memory(config, model), limit)
  return fill(
    ScoringSettings, config.model, temperature=temperature, vocab_limit=model.tokenizer.size,
    banned=model.tokenizer.banned, remat=remat, logits_chunk=_logits_chunk(config, model),
  )  # fmt: skip


def loss_settings(config: ConfigDict, model: LanguageModel, limit: Callable[[], float] = memory.usable) -> LossSettings:
  """The loss settings of a run. Bounds of `config.algorithm` that are 0 (off) become None."""
  a = config.algorithm
  return fill(
    LossSettings,
    a,
    scoring=scoring_settings(config, model, config.train.temperature, limit),
    pg_coef=1.0,
    clip_ratio_c=a.clip_ratio_c or None,
    value_clip=a.value_clip or None,
    value_coef=a.value_coef if ESTIMATORS[a.adv_estimator].needs_critic else 0.0,
  )


def make_probes(config: ConfigDict, trainer: Trainer) -> Probes:
  """Makes the diagnostics of `config.monitor` that need additional passes."""
  return Probes(fill(ProbeSettings, config.monitor), trainer)


def make_monitor(config: ConfigDict) -> Monitor:
  """Makes the monitor, which detects a collapse."""
  m = config.monitor
  return Monitor(
    fill(
      MonitorSettings,
      m,
      early_stop=fill(EarlyStopSettings, m),
      echo_trap_rules=fill(EchoTrapSettings, m),
      spikes=fill(SpikeSettings, m),
    )
  )


def log_settings(config: ConfigDict) -> LogSettings:
  """The settings of the log of episodes and evaluations."""
  return fill(
    LogSettings,
    config.logging,
    train_tags=tuple(config.train.tags),
    eval_tags=tuple(config.eval.tags),
    eval_group_size=config.eval.group_size,
  )


def run_settings(config: ConfigDict) -> RunSettings:
  """The schedule of a run, and its row of TensorBoard's table, with the fields that the run reads."""
  splits = ('val-env', 'val-greedy') if config.eval.greedy_too else ('val-env',)
  return fill(
    RunSettings,
    config,
    online_k=config.train.online_k,
    eval_every=config.eval.every,
    checkpoint_every=config.checkpoint.every,
    keep=config.checkpoint.keep,
    rollback_lr=config.monitor.rollback_lr,
    log=log_settings(config),
    tracker=fill(TrackerSettings, config.logging),
    hparams=read_by_training(config.to_dict()),
    compared=(BEST, *(f'{split}/{tag}/success' for tag in config.eval.tags for split in splits)),
    config=config.to_dict(),
    files=data_digests(config.to_dict()),
  )


def export_settings(config: ConfigDict, model: LanguageModel) -> ExportSettings:
  """The settings of `config.export` for writing a policy."""
  hub_name = None if config.model.path else presets.PRESETS.get(config.model.preset)
  return fill(
    ExportSettings,
    config.export,
    adapters=lora_config(config),
    base=hub_name or os.path.abspath(model.directory),
    tokenizer_dir=model.directory,
  )
