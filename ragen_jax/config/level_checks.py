"""Checks that training, warm starts and evaluation play different levels."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ml_collections import ConfigDict

from ragen_jax.agent.env_manager import LEVELS_PER_SEED, first_training_level
from ragen_jax.config import rules
from ragen_jax.utils.errors import UserError


def check_levels(config: ConfigDict) -> None:
  """Checks that training and evaluation use different seeds for their levels.

  Different seeds can still give the same board; `EnvStateManager` replaces such a training level.

  Raises:
    UserError: the ranges of seeds overlap, or exceed 2**32.
  """
  rollouts = config.num_iterations * config.filter.max_rollouts
  rules.check(
    config, 'num_iterations', rollouts * config.train.groups <= LEVELS_PER_SEED,
    f'times train.groups and filter.max_rollouts must be at most {LEVELS_PER_SEED}',
  )  # fmt: skip
  first, last = (
    first_training_level(config.train.first_level, config.seed, rollout=rollout, groups=config.train.groups)
    for rollout in (0, rollouts)
  )
  held_out = (config.eval.first_level, config.eval.first_level + config.eval.groups)
  rules.check(config, 'seed', last <= 2**32, f'at most 428; the last training level would be {last}, past 2**32')
  rules.check(config, 'eval.first_level', held_out[1] <= 2**32, 'the last held-out level would be past 2**32')
  rules.check(
    config, 'eval.first_level', last <= held_out[0] or held_out[1] <= first,
    f'held-out levels {held_out[0]}..{held_out[1] - 1} overlap with training levels {first}..{last - 1}',
  )  # fmt: skip


def check_level_files(config: ConfigDict, section: str) -> None:
  """Checks that the environments of `eval` and of `section` read their levels from different files.

  Levels of a file are not drawn from seeds, so different seeds do not separate them.

  Raises:
    UserError: a tag of `config.eval` and a tag of `config[section]` read the same file.
  """
  used, held_out = _level_files(config, config[section].tags), _level_files(config, config.eval.tags)
  for path in sorted(set(used) & set(held_out)):
    raise UserError(
      f'envs.{held_out[path]}.levels={config.envs[held_out[path]].levels!r}: must not be a file of '
      f'{section}.tags, and {used[path]} plays it'
    )


def _level_files(config: ConfigDict, tags: Sequence[str]) -> dict[str, str]:
  """File of levels -> the tag that reads it."""
  return {os.path.realpath(config.envs[tag].levels): tag for tag in tags if config.envs[tag].get('levels')}
