"""Checks of a config that come before anything is compiled: one line that names field, value and what is allowed."""

from __future__ import annotations

import math
import os
import urllib.parse
from typing import Any

import jax
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.context_manager import CONTEXTS, OVERLONG
from ragen_jax.agent.env_manager import LEVELS_PER_SEED, first_training_level
from ragen_jax.algorithms import filters, losses, rewards
from ragen_jax.algorithms.advantages import ESTIMATORS
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.processes import row_share
from ragen_jax.distributed.sharding import row_shards
from ragen_jax.models import presets
from ragen_jax.models.checkpoint import hf
from ragen_jax.models.checkpoint import peft as adapter_files
from ragen_jax.sft import data as sft_data
from ragen_jax.training.monitor import ECHO_TRAP_ACTIONS
from ragen_jax.utils.errors import UserError

EXPORT_FORMS = ('merged', 'adapter')
BASELINES = ('random', 'solver')
# Estimators that do not see what lies on a turn's other tokens.
_READ_AT_TURN_ENDS = ('turn_wise_gae', 'bi_level_gae')


def check_config(config: ConfigDict, *, weights: bool = True) -> None:
  """Raises UserError for the first field that cannot be run with.

  A model from the hub is downloaded here, so that a wrong name or path is known before the workdir is touched.

  Args:
    config: the run's.
    weights: whether the model's weights must be there; without, nothing is downloaded.
  """
  a, o = config.algorithm, config.optimizer
  _one_of(config, 'model.dtype', ('auto', 'float32', 'bfloat16'))
  _check_lora(config)
  _one_of(config, 'algorithm.adv_estimator', tuple(ESTIMATORS))
  _one_of(config, 'algorithm.loss_agg_mode', losses.AGGREGATIONS)
  _one_of(config, 'algorithm.old_logprobs', ('sampler', 'trainer'))
  _check_algorithm(config)
  for field in (
    'num_iterations', 'train.groups', 'train.group_size', 'eval.groups', 'eval.group_size',
    'agent.max_response_tokens', 'agent.max_context', 'algorithm.ppo_epochs', 'optimizer.mini_batch_size',
    'optimizer.micro_batch_size', 'checkpoint.keep', 'length_step',
  ):  # fmt: skip
    _at_least(config, field, 1)
  for field in (
    'seed', 'train.top_k', 'eval.top_k', 'eval.every', 'eval.temperature', 'checkpoint.every', 'logging.trajectories',
    'logging.episodes', 'logging.episodes_every',
    'model.logits_chunk', 'algorithm.value_clip', 'algorithm.value_coef', 'optimizer.actor_lr', 'optimizer.critic_lr',
    'optimizer.warmup_steps', 'optimizer.weight_decay', 'algorithm.clip_ratio_low', 'algorithm.clip_ratio_high',
    'train.first_level', 'eval.first_level', 'optimizer.critic_warmup',
  ):  # fmt: skip
    _at_least(config, field, 0)
  for field in ('train.temperature', 'optimizer.grad_clip'):
    _check(config, field, _get(config, field) > 0, 'must be above 0')
  for field in ('train.top_p', 'eval.top_p'):
    _check(config, field, 0 < _get(config, field) <= 1, 'must be above 0 and at most 1')
  for field in (
    'algorithm.gamma', 'algorithm.lam', 'algorithm.high_level_gamma', 'optimizer.final_lr_fraction',
  ):  # fmt: skip
    _check(config, field, 0 <= _get(config, field) <= 1, 'must be between 0 and 1')
  for field in ('optimizer.b1', 'optimizer.b2'):
    _check(config, field, 0 <= _get(config, field) < 1, 'must be at least 0 and below 1')
  _check(config, 'agent.format_penalty', config.agent.format_penalty <= 0, 'must be 0 or negative')
  _check(config, 'algorithm.clip_ratio_c', a.clip_ratio_c == 0 or a.clip_ratio_c > 1, 'must be above 1, or 0 for off')
  _check(config, 'agent.action_sep', bool(config.agent.action_sep.strip()), 'must not be blank')
  _check(
    config,
    'logging.trajectories',
    config.logging.trajectories <= config.logging.episodes,
    f'must be at most logging.episodes = {config.logging.episodes}',
  )

  rows = config.train.groups * config.train.group_size
  _check(
    config,
    'optimizer.mini_batch_size',
    rows % o.mini_batch_size == 0,
    f'must divide train.groups * train.group_size = {rows}',
  )
  _check(
    config,
    'optimizer.micro_batch_size',
    o.mini_batch_size % o.micro_batch_size == 0,
    f'must divide optimizer.mini_batch_size = {o.mini_batch_size}',
  )
  mesh = make_mesh(**config.mesh)
  shards, parts = row_shards(mesh), row_share(mesh).parts
  _check(
    config, 'optimizer.micro_batch_size', o.micro_batch_size % shards == 0, f'must be a multiple of {shards} row shards'
  )
  for section in ('train', 'eval'):
    count = config[section].groups * config[section].group_size
    if count % shards:
      raise UserError(f'{section}.groups * {section}.group_size = {count}: must be a multiple of {shards} row shards')
    if config[section].groups % parts:
      raise UserError(
        f'{section}.groups={config[section].groups}: must be a multiple of {parts}, the parts that processes play'
      )
  filtered = config.train.top_p < 1 or config.train.top_k > 0
  _check(
    config,
    'algorithm.old_logprobs',
    a.old_logprobs == 'trainer' or not filtered,
    "with train.top_p or train.top_k on it must be 'trainer', as the sampler then records another distribution",
  )
  if ESTIMATORS[a.adv_estimator].needs_groups:
    _check(
      config,
      'train.group_size',
      config.train.group_size > 1,
      f'algorithm.adv_estimator={a.adv_estimator!r} compares the members of a group, so it must be at least 2',
    )
  for section in ('train', 'eval'):
    counts = build.group_counts(config[section], section)
    build.env_groups(config, tuple(config[section].tags), counts, field=f'{section}.tags')
  _check_levels(config)
  _check_level_files(config, 'train')
  if weights:
    directory = presets.resolve(config.model.preset, config.model.path)
    build.weight_shardings(hf.read_config(directory), mesh)
    if config.model.separate_critic:
      build.weight_shardings(hf.read_config(hf.critic_directory(directory)), mesh)


def _check_lora(config: ConfigDict) -> None:
  """The adapters, the type of frozen weights, and the form of what is written."""
  _one_of(config, 'model.param_dtype', ('float32', 'bfloat16'))
  _at_least(config, 'lora.rank', 0)
  _check(config, 'lora.alpha', config.lora.alpha > 0, 'must be above 0')
  adapters = build.lora_config(config)
  _check(
    config, 'model.param_dtype', adapters is not None or config.model.param_dtype == 'float32',
    "weights that are trained are kept in 'float32'; frozen ones (lora.rank above 0) may be 'bfloat16'",
  )  # fmt: skip
  _one_of(config, 'export.lora', EXPORT_FORMS)
  _one_of(config, 'export.dtype', ('float32', 'bfloat16', 'float16'))
  if not config.lora.path:
    return
  _check(config, 'lora.path', adapters is not None, 'needs lora.rank above 0')
  found = adapter_files.read_config(config.lora.path)
  if found != adapters:
    raise UserError(
      f'lora.path={config.lora.path!r}: has rank {found.rank}, alpha {found.alpha} and targets '
      f'{",".join(found.targets)}; set lora.rank, lora.alpha and lora.targets to these'
    )


def _check_algorithm(config: ConfigDict) -> None:
  """The algorithm's options, and which of them go together."""
  a, f, m = config.algorithm, config.filter, config.monitor
  _one_of(config, 'agent.context', CONTEXTS)
  _one_of(config, 'agent.overlong', OVERLONG)
  _at_least(config, 'agent.context_turns', 1)
  _one_of(config, 'algorithm.ratio_level', losses.RATIO_LEVELS)
  _one_of(config, 'algorithm.kl_kind', losses.KL_KINDS)
  _one_of(config, 'reward.credit', rewards.CREDITS)
  _one_of(config, 'reward.grouping', rewards.GROUPINGS)
  _one_of(config, 'reward.method', rewards.METHODS)
  _one_of(config, 'filter.metric', filters.METRICS)
  _one_of(config, 'filter.strategy', filters.STRATEGIES)
  _one_of(config, 'filter.type', filters.TYPES)
  _one_of(config, 'filter.top_p_mode', filters.TOP_P_MODES)
  _one_of(config, 'filter.loss_scaling', filters.LOSS_SCALINGS)
  _one_of(config, 'monitor.echo_trap', ECHO_TRAP_ACTIONS)
  _one_of(config, 'monitor.bucket_mode', ('quantile', 'fixed_rv'))
  for field in (
    'train.online_k', 'filter.max_rollouts', 'monitor.baseline_steps', 'monitor.min_signals', 'monitor.patience',
    'monitor.gradient_buckets',
  ):  # fmt: skip
    _at_least(config, field, 1)
  _at_least(config, 'monitor.information_samples', 2)
  for field in (
    'algorithm.kl_loss_coef', 'algorithm.kl_reward_coef', 'algorithm.tis_cap', 'algorithm.loss_norm_length',
    'algorithm.step_weight', 'filter.value', 'monitor.max_rollbacks', 'monitor.flat_reward_patience',
    'monitor.hopeless_patience', 'monitor.empty_patience', 'monitor.information_every', 'monitor.gradients_every',
  ):  # fmt: skip
    _at_least(config, field, 0)
  _check(config, 'algorithm.step_gamma', 0 <= a.step_gamma <= 1, 'must be between 0 and 1')
  _check(config, 'algorithm.high_level_lam', a.high_level_lam <= 1, 'must be at most 1; negative is the same as lam')
  _check(config, 'monitor.ema_decay', 0 <= m.ema_decay < 1, 'must be at least 0 and below 1')
  _check(config, 'monitor.rollback_lr', 0 < m.rollback_lr <= 1, 'must be above 0 and at most 1')
  _check(
    config, 'reward.method', config.reward.credit == 'trajectory' or config.reward.method == 'identity',
    "with reward.credit='turn' it may be 'identity' only",
  )  # fmt: skip
  for field in ('mask_loss', 'mask_advantages', 'tis_cap'):
    needs = a.tis_cap > 0 if field == 'tis_cap' else not a[field]
    _check(
      config, f'algorithm.{field}', not needs or a.old_logprobs == 'trainer', "needs algorithm.old_logprobs='trainer'"
    )
  _at_least(config, 'replay.groups', 0)
  _at_least(config, 'replay.max_age', 1)
  _check(
    config, 'replay.max_age', not config.replay.groups or config.replay.max_age >= config.train.online_k,
    f'must be at least train.online_k = {config.train.online_k}',
  )  # fmt: skip
  _check(config, 'replay.groups', not config.replay.groups or a.tis_cap > 0, 'needs algorithm.tis_cap above 0')
  k = config.train.online_k
  for field in ('num_iterations', 'checkpoint.every'):
    _check(config, field, _get(config, field) % k == 0, f'must be a multiple of train.online_k = {k}')
  whole = config.agent.context == 'full' and config.agent.overlong == 'end'
  _check(
    config, 'algorithm.ratio_level', a.ratio_level != 'sequence' or whole,
    "'sequence' needs an episode in one row: agent.context='full' and agent.overlong='end'",
  )  # fmt: skip
  _check(
    config, 'algorithm.kl_reward_coef', not a.kl_reward_coef or a.adv_estimator not in _READ_AT_TURN_ENDS,
    f'algorithm.adv_estimator={a.adv_estimator!r} reads rewards at the ends of turns only; use algorithm.kl_loss_coef',
  )  # fmt: skip
  _check(
    config, 'reward.method', config.reward.method == 'identity' or config.reward.grouping != 'state'
    or config.train.group_size > 1, "a 'state' of one episode leaves nothing; train.group_size must be at least 2",
  )  # fmt: skip
  _check(
    config, 'filter.value', f.strategy != 'top_k' or int(f.value * config.train.groups + 1e-9) > 0,
    f'of train.groups={config.train.groups} no group would be kept',
  )  # fmt: skip
  estimator = ESTIMATORS[a.adv_estimator]
  _check(
    config, 'algorithm.bootstrap_truncated', estimator.needs_critic or not a.bootstrap_truncated,
    f'algorithm.adv_estimator={a.adv_estimator!r} has no critic',
  )  # fmt: skip
  for field in ('model.separate_critic', 'optimizer.critic_warmup'):
    learns = estimator.needs_critic and a.value_coef > 0
    _check(
      config, field, learns or not _get(config, field),
      f'needs a critic that learns, not algorithm.adv_estimator={a.adv_estimator!r} with value_coef={a.value_coef}',
    )  # fmt: skip
  warmup = config.optimizer.critic_warmup
  _check(
    config, 'optimizer.critic_warmup', not warmup or warmup < config.num_iterations,
    f'must be below num_iterations = {config.num_iterations}, or the policy never learns',
  )  # fmt: skip
  if f.metric in ('reward_std', 'entropy_variance'):
    drops = f.strategy != 'top_p' or f.value < 1 or not f.include_zero
    _check(
      config, 'filter.metric', not drops or config.train.group_size > 1,
      'compares the members of a group, so train.group_size must be at least 2',
    )  # fmt: skip


def check_eval(config: ConfigDict) -> None:
  """Raises UserError for the first field of `config.eval` that --mode=eval cannot be run with."""
  e = config.eval
  _check(config, 'eval.temperature', e.temperature < math.inf, 'must be a number')
  named = e.step in ('latest', 'best', 'base', 'none') or e.step.isdecimal()
  _check(config, 'eval.step', named, 'must be latest, best, the number of an iteration, base or none')
  known = len(set(e.baselines)) == len(e.baselines) and set(e.baselines) <= set(BASELINES)
  _check(config, 'eval.baselines', known, f'allowed: each at most once of {", ".join(BASELINES)}')
  nobody = e.step == 'none' and not e.baselines and not e.endpoint
  _check(config, 'eval.step', not nobody, 'nobody would play; name eval.baselines or eval.endpoint')
  for field in ('eval.endpoint_workers', 'eval.endpoint_tries'):
    _at_least(config, field, 1)
  _at_least(config, 'eval.endpoint_max_tokens', 0)
  _check(config, 'eval.endpoint_timeout', 0 < e.endpoint_timeout < math.inf, 'must be above 0, in seconds')
  an_address = not e.endpoint or _is_address(e.endpoint)
  _check(config, 'eval.endpoint', an_address, "must be an address such as 'http://localhost:8000/v1', or empty")
  both = bool(e.endpoint_model) == bool(e.endpoint)
  _check(
    config, 'eval.endpoint_model', both, f'must name a model of eval.endpoint={e.endpoint!r}, and none without one'
  )


def _is_address(url: str) -> bool:
  """Whether requests can be sent there; passwords and queries have no place in it."""
  try:
    parts = urllib.parse.urlsplit(url)
    plain = url.isascii() and url.isprintable() and ' ' not in url and not {'@', '?', '#'} & set(url)
    return parts.scheme in ('http', 'https') and bool(parts.hostname) and parts.port != 0 and plain
  except ValueError:  # a port that is none
    return False


def check_sft(config: ConfigDict) -> None:
  """Raises UserError for the first field of `config.sft` that cannot be run with."""
  sft = config.sft
  if jax.process_count() > 1:
    raise UserError(f'--mode=sft runs in one process, there are {jax.process_count()}')
  _check(
    config, 'model.separate_critic', not config.model.separate_critic,
    '--mode=sft trains the policy and the value head on its trunk, and a separate critic begins with both of them; '
    'it must be False there',
  )  # fmt: skip
  for field in ('sft.group_size', 'sft.steps', 'sft.batch_size'):
    _at_least(config, field, 1)
  for field in (
    'sft.first_level', 'sft.actions_per_turn', 'sft.learning_rate', 'sft.value_coef', 'sft.eval_every',
    'sft.checkpoint_every',
  ):  # fmt: skip
    _at_least(config, field, 0)
  _check(config, 'sft.val_fraction', 0 <= sft.val_fraction < 1, 'must be at least 0 and below 1')
  shards, rows = row_shards(make_mesh(**config.mesh)), max(sft.batch_size // 2, 1)
  _check(
    config, 'sft.batch_size', sft.packing or rows % shards == 0,
    f'half of it, {rows}, goes through the model at once and must be a multiple of {shards} row shards',
  )  # fmt: skip
  for field in ('sft.noise', 'sft.beginner', 'sft.timid', 'sft.hurry', 'sft.discount'):
    _check(config, field, 0 <= _get(config, field) <= 1, 'must be between 0 and 1')
  _check(config, 'sft.noise', sft.noise + sft.beginner <= 1, f'and sft.beginner={sft.beginner} add up to more than 1')
  _check(config, 'lora.rank', not (sft.from_scratch and config.lora.rank), 'fresh weights must all be trained')
  _check(
    config, 'export.lora', config.lora.rank > 0 or config.export.lora == 'merged', "'adapter' needs lora.rank above 0"
  )
  _check(config, 'sft.shape', len(sft.shape) == 6 and min(sft.shape) > 0, 'must be six positive numbers')
  if sft.data:
    _check(config, 'sft.value_coef', not sft.value_coef, 'conversations of sft.data have no values; must be 0')
    _check(config, 'sft.save_data', not sft.save_data, 'writes what solvers play; must be empty with sft.data')
  same = len(sft.tags) == len(sft.levels) and len(sft.tags) > 0 and min(sft.levels, default=0) > 0
  _check(config, 'sft.levels', same, f'must be one positive number for each of sft.tags={tuple(sft.tags)}')
  specs = build.env_groups(config, tuple(sft.tags), tuple(sft.levels), field='sft.tags')
  if sft.data:
    return
  for spec in specs:
    if not spec.env.has_solver:
      raise UserError(f'sft.tags: {spec.tag!r} has no solver whose play could be demonstrated')
  first, last = config.eval.first_level, config.eval.first_level + config.eval.groups
  apart = sft.first_level >= last or sft.first_level + max(sft.levels) <= first
  _check(config, 'sft.first_level', apart, f'demonstrated levels overlap with the held-out levels {first}..{last - 1}')
  _check_level_files(config, 'sft')
  count = (sum(sft.levels) - sft_data.validation_levels(sum(sft.levels), sft.val_fraction)) * sft.group_size
  _check(
    config, 'sft.batch_size', sft.batch_size <= count,
    f'must be at most the number of demonstrations that are learnt from, {count}',
  )  # fmt: skip


def _check_levels(config: ConfigDict) -> None:
  """Training and evaluation draw from different seeds; that they give different boards, `EnvStateManager` sees to."""
  _check(
    config,
    'num_iterations',
    config.num_iterations * config.train.groups * config.filter.max_rollouts <= LEVELS_PER_SEED,
    f'times train.groups and filter.max_rollouts must be at most {LEVELS_PER_SEED}',
  )
  rollouts = config.num_iterations * config.filter.max_rollouts
  first, last = (
    first_training_level(config.train.first_level, config.seed, rollout=number, groups=config.train.groups)
    for number in (0, rollouts)
  )
  held_out = (config.eval.first_level, config.eval.first_level + config.eval.groups)
  _check(config, 'seed', last <= 2**32, f'at most 428; the last training level would be {last}, past 2**32')
  _check(config, 'eval.first_level', held_out[1] <= 2**32, 'the last held-out level would be past 2**32')
  _check(
    config,
    'eval.first_level',
    last <= held_out[0] or held_out[1] <= first,
    f'held-out levels {held_out[0]}..{held_out[1] - 1} overlap with training levels {first}..{last - 1}',
  )


def _check_level_files(config: ConfigDict, section: str) -> None:
  """Levels of a file are not made from their seeds, so held-out ones come from a file of their own."""

  def files(tags):
    return {os.path.realpath(config.envs[tag].levels): tag for tag in tags if config.envs[tag].get('levels')}

  seen, held_out = files(config[section].tags), files(config.eval.tags)
  for path in sorted(set(seen) & set(held_out)):
    raise UserError(
      f'envs.{held_out[path]}.levels={config.envs[held_out[path]].levels!r}: a file of eval.tags must be none of '
      f'{section}.tags, where {seen[path]} plays it'
    )


def _get(config: ConfigDict, field: str) -> Any:
  for name in field.split('.'):
    config = config[name]
  return config


def _check(config: ConfigDict, field: str, ok: bool, allowed: str) -> None:
  if not ok:
    raise UserError(f'{field}={_get(config, field)!r}: {allowed}')


def _one_of(config: ConfigDict, field: str, allowed: tuple[str, ...]) -> None:
  _check(config, field, _get(config, field) in allowed, 'allowed: ' + ', '.join(allowed))


def _at_least(config: ConfigDict, field: str, least: int) -> None:
  _check(config, field, _get(config, field) >= least, f'must be at least {least}')
