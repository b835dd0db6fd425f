"""Checks of a config that come before anything is compiled: one line that names field, value and what is allowed."""

from __future__ import annotations

from typing import Any

import jax
from ml_collections import ConfigDict

from ragen_jax import experiment
from ragen_jax.algorithms.advantages import ESTIMATORS
from ragen_jax.algorithms.losses import AGGREGATIONS
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.processes import row_share
from ragen_jax.distributed.sharding import row_shards
from ragen_jax.models import presets
from ragen_jax.utils.errors import UserError


def check_config(config: ConfigDict) -> None:
  """Raises UserError for the first field that cannot be run with.

  A model from the hub is downloaded here, so that a wrong name or path is known before the workdir is touched.
  """
  a, o = config.algorithm, config.optimizer
  _one_of(config, 'model.dtype', ('auto', 'float32', 'bfloat16'))
  _one_of(config, 'algorithm.adv_estimator', tuple(ESTIMATORS))
  _one_of(config, 'algorithm.loss_agg_mode', AGGREGATIONS)
  _one_of(config, 'algorithm.old_logprobs', ('sampler', 'trainer'))
  for field in (
    'num_iterations', 'train.groups', 'train.group_size', 'eval.groups', 'eval.group_size',
    'agent.max_response_tokens', 'agent.max_context', 'algorithm.ppo_epochs', 'optimizer.mini_batch_size',
    'optimizer.micro_batch_size', 'checkpoint.keep', 'length_step',
  ):  # fmt: skip
    _at_least(config, field, 1)
  for field in (
    'seed', 'train.top_k', 'eval.top_k', 'eval.every', 'eval.temperature', 'checkpoint.every', 'logging.trajectories',
    'model.logits_chunk', 'algorithm.value_clip', 'algorithm.value_coef', 'optimizer.actor_lr', 'optimizer.critic_lr',
    'optimizer.warmup_steps', 'optimizer.weight_decay', 'algorithm.clip_ratio_low', 'algorithm.clip_ratio_high',
    'train.first_level', 'eval.first_level',
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
    part = config[section]
    tags = tuple(part.tags)
    if len(set(tags)) != len(tags):
      raise UserError(f'{section}.tags={tags}: a tag may be named once')
    specs = experiment.env_groups(config, tags, experiment.equal_shares(part.groups, tags, f'{section}.groups'))
    del specs
  _check_levels(config)
  presets.resolve(config.model.preset, config.model.path)


def check_sft(config: ConfigDict) -> None:
  """Raises UserError for the first field of `config.sft` that cannot be run with."""
  sft = config.sft
  if jax.process_count() > 1:
    raise UserError(f'--mode=sft runs in one process, there are {jax.process_count()}')
  for field in ('sft.group_size', 'sft.steps', 'sft.batch_size'):
    _at_least(config, field, 1)
  for field in ('sft.first_level', 'sft.actions_per_turn', 'sft.learning_rate', 'sft.value_coef'):
    _at_least(config, field, 0)
  for field in ('sft.noise', 'sft.beginner', 'sft.timid', 'sft.hurry', 'sft.discount'):
    _check(config, field, 0 <= _get(config, field) <= 1, 'must be between 0 and 1')
  _check(config, 'sft.noise', sft.noise + sft.beginner <= 1, f'and sft.beginner={sft.beginner} add up to more than 1')
  same = len(sft.tags) == len(sft.levels) and len(sft.tags) > 0 and min(sft.levels, default=0) > 0
  _check(config, 'sft.levels', same, f'must be one positive number for each of sft.tags={tuple(sft.tags)}')
  experiment.env_groups(config, tuple(sft.tags), tuple(sft.levels))
  count = sum(sft.levels) * sft.group_size
  _check(config, 'sft.batch_size', sft.batch_size <= count, f'must be at most the number of demonstrations, {count}')
  first, last = config.eval.first_level, config.eval.first_level + config.eval.groups
  apart = sft.first_level >= last or sft.first_level + max(sft.levels) <= first
  _check(config, 'sft.first_level', apart, f'demonstrated levels overlap with the held-out levels {first}..{last - 1}')
  _check(config, 'sft.shape', len(sft.shape) == 6 and min(sft.shape) > 0, 'must be six positive numbers')


def _check_levels(config: ConfigDict) -> None:
  """Training never sees a held-out level."""
  _check(
    config,
    'num_iterations',
    config.num_iterations * config.train.groups <= experiment.LEVELS_PER_SEED,
    f'times train.groups must be at most {experiment.LEVELS_PER_SEED}',
  )
  first = config.train.first_level + config.seed * experiment.LEVELS_PER_SEED
  last = first + config.num_iterations * config.train.groups
  held_out = (config.eval.first_level, config.eval.first_level + config.eval.groups)
  _check(config, 'seed', last <= 2**32, f'at most 428; the last training level would be {last}, past 2**32')
  _check(config, 'eval.first_level', held_out[1] <= 2**32, 'the last held-out level would be past 2**32')
  _check(
    config,
    'eval.first_level',
    last <= held_out[0] or held_out[1] <= first,
    f'held-out levels {held_out[0]}..{held_out[1] - 1} overlap with training levels {first}..{last - 1}',
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
