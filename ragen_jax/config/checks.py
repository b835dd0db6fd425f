"""Checks of a config before anything is compiled: `check_config` for every run, the others for one mode each.

The first field with a wrong value raises a UserError of one line with the field, its value and the allowed values.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence

import jax
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.language_model import FLOAT, VISION, WEIGHTS, check_vision, weight_shardings
from ragen_jax.algorithms.advantages import ESTIMATORS
from ragen_jax.build_environments import check_needs
from ragen_jax.config import limits, rules
from ragen_jax.config.agent_checks import check_held_out, check_prompt, check_serve
from ragen_jax.config.algorithm_checks import check_algorithm
from ragen_jax.config.image_checks import check_images
from ragen_jax.config.run_checks import (
  check_curriculum,
  check_eval,
  check_level_files,
  check_levels,
  check_parts,
  check_replies,
  check_separator,
)
from ragen_jax.config.sft_checks import check_sft
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.processes import row_share
from ragen_jax.distributed.sharding import row_shards
from ragen_jax.models import presets
from ragen_jax.models.attention_choice import AUTO, choose_attention
from ragen_jax.models.attention_settings import IMPLEMENTATIONS
from ragen_jax.models.checkpoint import peft as adapter_files
from ragen_jax.models.checkpoint.config import critic_directory, read_config
from ragen_jax.planning import topologies
from ragen_jax.runs.trackers import TRACKERS
from ragen_jax.sampling import division
from ragen_jax.serving.play.env_program import ENVIRONMENT
from ragen_jax.training import batch_sizes
from ragen_jax.utils.errors import UserError

__all__ = ['check_config', 'check_eval', 'check_plan', 'check_sft']

EXPORT_FORMS = ('merged', 'adapter')

_AT_LEAST_ONE = (
  'num_iterations', 'train.groups', 'train.group_size', 'eval.groups', 'eval.group_size', 'agent.max_response_tokens',
  'agent.max_context', 'algorithm.ppo_epochs', 'optimizer.mini_batch_size', 'checkpoint.keep', 'length_step',
  'agent.decode_chunk',
)  # fmt: skip
_NOT_NEGATIVE = (
  'seed', 'train.top_k', 'eval.top_k', 'eval.every', 'eval.temperature', 'checkpoint.every', 'logging.trajectories',
  'logging.episodes', 'logging.episodes_every', 'model.logits_chunk', 'algorithm.value_clip', 'algorithm.value_coef',
  'optimizer.actor_lr', 'optimizer.critic_lr', 'optimizer.warmup_steps', 'optimizer.weight_decay',
  'algorithm.clip_ratio_low', 'algorithm.clip_ratio_high',
  'optimizer.critic_warmup', 'agent.rows_in_flight', 'agent.env_threads', 'agent.episode_timeout',
  'agent.rollout_timeout', 'agent.decode_shards', 'optimizer.micro_batch_size',
)  # fmt: skip


def check_config(
  config: ConfigDict, *, weights: bool = True, model: bool = True, played: Sequence[str] = ('train', 'eval')
) -> None:
  """Checks everything but what other modes read (`eval.step` and later, `prompt.rounds` and later, `sft`, `plan`).

  A model from the hub is downloaded here, so a wrong name or path is reported before the workdir is written to.

  Args:
    weights: whether the model's weights must exist; False downloads nothing.
    model: whether `config.model` names the model; False if it is a fresh one.
    played: sections whose environments are played, and must have what they need.
  """
  rules.fields_of_this_version(config)
  limits.check_numbers(config)
  presets.check_name(config.model.preset)
  rules.one_of(config, 'model.dtype', ('auto', 'float32', 'bfloat16'))
  rules.one_of(config, 'model.attention', (AUTO, *IMPLEMENTATIONS))
  remat = config.model.remat
  allowed = any(remat is x or (isinstance(x, str) and remat == x) for x in (batch_sizes.AUTO, *batch_sizes.REMAT_OF))
  rules.check(config, 'model.remat', allowed, 'allowed: auto, False, elementwise, attention, True')
  rules.one_of(config, 'model.vision', VISION)
  rules.one_of(config, 'model.weights', WEIGHTS)
  rules.check(
    config, 'model.weights',
    config.model.weights == FLOAT or config.lora.rank > 0 or config.algorithm.old_logprobs == 'trainer',
    "without LoRA it needs algorithm.old_logprobs='trainer', because the sampler then has other weights",
  )  # fmt: skip
  _check_adapters(config)
  check_algorithm(config)
  if model and config.algorithm.replay_experts:
    _check_experts(config)
  _check_ranges(config)
  _check_batches(config)
  _check_sampling(config)
  for section in ('train', 'eval'):
    counts = build.group_counts(config[section], section)
    specs = build.env_specs(config, tuple(config[section].tags), counts, field=f'{section}.tags')
    check_separator(config, specs)
  if model:
    check_images(config, weights=weights)
  check_replies(config)
  check_serve(config)
  check_prompt(config)
  check_levels(config)
  check_level_files(config, 'train')
  check_parts(config)
  check_curriculum(config)
  if weights and model:
    _check_weights(config)
  _check_needs(config, played)


def _check_needs(config: ConfigDict, sections: Sequence[str]) -> None:
  """Checks that environments, also those that a built-in runner plays, have what they need."""
  counts: dict[str, dict[str, int]] = {}  # section -> tag -> how many this process plays at a time
  for section in sections:
    part = config[section]
    groups = dict(zip(part.tags, build.group_counts(part, section), strict=True))
    counts[section] = {tag: max(n * part.group_size // jax.process_count(), 1) for tag, n in groups.items()}
  episodes = dict.fromkeys((tag for own in counts.values() for tag in own), 1)
  runners = [config.envs[tag].get('runner', '') for tag in episodes]
  played = dict.fromkeys((name.removeprefix(ENVIRONMENT) for name in runners if name.startswith(ENVIRONMENT)), 1)
  tags = tuple(episodes | played)
  specs = build.env_specs(config, tags, (1,) * len(tags))
  answers = config.agent.format == 'no_think' and config.agent.force_prefix  # each reply begins with <answer>
  for spec in specs:
    rules.check(
      config, 'agent.force_prefix', not (answers and spec.env.functions),
      f"must be False with agent.format='no_think' and envs.{spec.tag}.tools_format='template'",
    )  # fmt: skip
  server = {spec.tag: spec.env.server or spec.tag for spec in specs}
  for own in counts.values():  # a rollout plays its tags at the same time
    for tag in own:
      at_once = sum(n for other, n in own.items() if server[other] == server[tag])
      episodes[tag] = max(episodes[tag], at_once)
  check_needs(specs, played | episodes, config.envs)
  if {'train', 'eval'} <= set(sections):
    check_held_out(config, specs)


def check_plan(config: ConfigDict) -> None:
  """Checks the section `plan`; raises UserError for the first field that cannot be used."""
  limits.check_numbers(config)
  counts = ('devices', 'prompt_tokens', 'observation_tokens', 'reply_tokens', 'longest_reply')
  rules.at_least(config, 1, *(f'plan.{name}' for name in counts))
  rules.at_least(config, 0, 'plan.turns')
  rules.check(
    config, 'plan.longest_reply', config.plan.longest_reply >= config.plan.reply_tokens,
    f'must be at least plan.reply_tokens={config.plan.reply_tokens}, the mean',
  )  # fmt: skip
  if config.plan.topology:
    topologies.parse(config.plan.topology)
  rules.above(config, 0, 'plan.memory_gb')


def _check_adapters(config: ConfigDict) -> None:
  """Checks the adapters, the dtype of frozen weights, and the form of exported weights."""
  rules.one_of(config, 'model.param_dtype', ('float32', 'bfloat16'))
  rules.at_least(config, 0, 'lora.rank')
  rules.above(config, 0, 'lora.alpha')
  adapters = build.lora_config(config)
  rules.check(
    config, 'model.param_dtype', adapters is not None or config.model.param_dtype == 'float32',
    "weights that are trained are kept in 'float32'; frozen ones (lora.rank above 0) may be 'bfloat16'",
  )  # fmt: skip
  rules.one_of(config, 'export.lora', EXPORT_FORMS)
  rules.check(
    config, 'export.lora', config.export.lora != 'adapter' or adapters is None or config.model.vision == 'frozen',
    "files of adapters have no vision tower; must be 'merged' with model.vision='trained'",
  )  # fmt: skip
  rules.path(config, 'export.output')
  rules.one_of(config, 'export.dtype', ('float32', 'bfloat16', 'float16'))
  for field in ('push', 'push_episodes'):
    name = config.export[field]
    allowed = not name or re.fullmatch(r'\w[\w.-]*/\w[\w.-]*', name, re.ASCII) is not None
    rules.check(config, f'export.{field}', allowed, "must be 'USER/NAME', a repository on the hub, or empty for none")
  if not config.lora.path:
    return
  rules.check(config, 'lora.path', adapters is not None, 'needs lora.rank above 0')
  found = adapter_files.read_config(config.lora.path, build.lora_targets(config))
  if found != adapters:
    raise UserError(
      f'lora.path={config.lora.path!r}: has rank {found.rank}, alpha {found.alpha} and targets '
      f'{",".join(found.targets)}; set lora.rank, lora.alpha and lora.targets to these'
    )


def _check_experts(config: ConfigDict) -> None:
  """Checks that there are experts whose choice can be recorded."""
  m = config.model
  rules.check(
    config, 'algorithm.replay_experts', presets.shape(m.preset, m.path).experts is not None,
    f'must be False: {m.path or m.preset} has no experts',
  )  # fmt: skip


def _check_ranges(config: ConfigDict) -> None:
  """Checks numbers that have their own bounds."""
  rules.at_least(config, 1, *_AT_LEAST_ONE)
  rules.at_least(config, 0, *_NOT_NEGATIVE)
  rules.at_least(config, -1, 'compile_ahead')
  rules.check(
    config, 'compile_ahead', config.compile_ahead < 1 or jax.process_count() == 1,
    f'must be -1 or 0 with {jax.process_count()} processes, whose compilers exchange results in one order',
  )  # fmt: skip
  rules.above(config, 0, 'train.temperature', 'optimizer.grad_clip')
  rules.positive_fraction(config, 'train.top_p', 'eval.top_p')
  rules.fraction(
    config, 'algorithm.gamma', 'algorithm.lam', 'algorithm.high_level_gamma', 'optimizer.final_lr_fraction'
  )
  rules.below_one(config, 'optimizer.b1', 'optimizer.b2')
  rules.check(config, 'agent.format_penalty', config.agent.format_penalty <= 0, 'must be 0 or negative')
  clip = config.algorithm.clip_ratio_c
  rules.check(config, 'algorithm.clip_ratio_c', clip == 0 or clip > 1, 'must be above 1, or 0 for off')
  separator = config.agent.action_sep
  rules.check(config, 'agent.action_sep', bool(separator.strip()), 'must not be blank')
  rules.check(
    config, 'agent.action_sep', separator == separator.strip(),
    'must not begin or end with a blank; one is written before it and one behind it',
  )  # fmt: skip
  rules.check(
    config, 'logging.trajectories', config.logging.trajectories <= config.logging.episodes,
    f'must be at most logging.episodes = {config.logging.episodes}',
  )  # fmt: skip
  span = config.profile
  rules.check(
    config, 'profile', len(span) in (0, 2) and all(type(x) is int for x in span) and tuple(span) == tuple(sorted(span))
    and (not span or span[0] > 0),
    'must be two numbers of iterations, the first at least 1 and the last not before it, or () for none',
  )  # fmt: skip
  rules.check(
    config, 'profile', not span or span[0] <= config.num_iterations,
    f'begins after the last iteration, num_iterations = {config.num_iterations}',
  )  # fmt: skip
  rules.one_of(config, 'logging.tracker', TRACKERS)
  tracker = config.logging.tracker
  rules.check(
    config, 'logging.tracker', not tracker or importlib.util.find_spec(tracker) is not None,
    f'needs a package that is not installed: pip install {tracker}',
  )  # fmt: skip
  rules.check(config, 'logging.project', bool(config.logging.project.strip()), 'must not be blank')


def _check_batches(config: ConfigDict) -> None:
  """Checks that episodes divide into mini-batches, micro-batches, row shards and processes."""
  rows = config.train.groups * config.train.group_size
  mini, micro = config.optimizer.mini_batch_size, config.optimizer.micro_batch_size
  rules.check(
    config, 'optimizer.mini_batch_size', rows % mini == 0, f'must divide train.groups * train.group_size = {rows}'
  )
  mesh = make_mesh(**config.mesh)
  shards, parts = row_shards(mesh), row_share(mesh).parts
  if micro:
    rules.check(
      config, 'optimizer.micro_batch_size', mini % micro == 0, f'must divide optimizer.mini_batch_size = {mini}'
    )
    rules.check(config, 'optimizer.micro_batch_size', micro % shards == 0, f'must be a multiple of {shards} row shards')
  elif not config.optimizer.packing:
    rules.check(config, 'optimizer.mini_batch_size', mini % shards == 0, f'must be a multiple of {shards} row shards')
  rules.check(
    config, 'agent.rows_in_flight', config.agent.rows_in_flight % shards == 0,
    f'must be a multiple of {shards} row shards, or 0',
  )  # fmt: skip
  in_threads = config.agent.schedule == 'continuous' and jax.process_count() == 1
  rules.check(
    config, 'agent.env_threads', not config.agent.env_threads or in_threads,
    f"must be 0 with agent.schedule='{config.agent.schedule}' and {jax.process_count()} processes; more needs "
    "'continuous' and one process",
  )  # fmt: skip
  for section in ('train', 'eval'):
    count = config[section].groups * config[section].group_size
    if count % shards:
      raise UserError(f'{section}.groups * {section}.group_size = {count}: must be a multiple of {shards} row shards')
    rules.check(
      config, f'{section}.groups', config[section].groups % parts == 0,
      f'must be a multiple of {parts}, the number of parts that processes play',
    )  # fmt: skip


def _check_sampling(config: ConfigDict) -> None:
  """Checks that the sampler records what the update needs, and that groups are large enough for the estimator."""
  a, agent = config.algorithm, config.agent
  rules.check(
    config, 'agent.max_response_tokens', agent.max_response_tokens < agent.max_context,
    f'must be below agent.max_context={agent.max_context}, which holds the prompt and the reply',
  )  # fmt: skip
  filtered = config.train.top_p < 1 or config.train.top_k > 0
  rules.check(
    config, 'algorithm.old_logprobs', a.old_logprobs == 'trainer' or not filtered,
    "must be 'trainer' with train.top_p or train.top_k, because the sampler then records another distribution",
  )  # fmt: skip
  rules.check(
    config, 'train.group_size', not ESTIMATORS[a.adv_estimator].needs_groups or config.train.group_size > 1,
    f'algorithm.adv_estimator={a.adv_estimator!r} compares the members of a group, so it must be at least 2',
  )  # fmt: skip


def _check_weights(config: ConfigDict) -> None:
  """Checks the checkpoint, that the mesh divides every weight, and that the devices have the kind of attention."""
  mesh = make_mesh(**config.mesh)
  directory = presets.resolve(config.model.preset, config.model.path)
  cfg = read_config(directory)
  check_vision(config.model.vision, cfg)
  weight_shardings(cfg, mesh)
  choose_attention(config.model.attention, cfg, build.compute_dtype(config), mesh)
  division.choose(config.agent.decode_shards, cfg, build.compute_dtype(config), mesh)
  if config.model.separate_critic:
    weight_shardings(read_config(critic_directory(directory)), mesh)
