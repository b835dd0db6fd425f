"""Configs of runs that take seconds, and configs that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from ml_collections import ConfigDict

from configs import default
from ragen_jax.utils.errors import UserError


def small_config(values: Mapping[str, Any] | None = None, **fields: Any) -> ConfigDict:
  """The default config, cut down to seconds.

  Args:
    values: dotted name of a field -> value.
    **fields: the same, with '__' for the dot: `small_config(train__groups=8)`.
  """
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
  # Large steps: few programs are compiled, which takes most of the time of a small run.
  config.length_step = 256
  with config.unlocked():
    config.update_from_flattened_dict(dict(values or {}) | {k.replace('__', '.'): x for k, x in fields.items()})
  return config


def leaves(config: ConfigDict, prefix: str = '') -> Iterator[tuple[str, Any]]:
  """(dotted name, value) of every field."""
  for name, value in config.items():
    if isinstance(value, ConfigDict):
      yield from leaves(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', value


def assert_refused(check: Callable[[ConfigDict], Any], config: ConfigDict, message: str) -> None:
  """Asserts that a check raises a UserError of one line that matches a pattern."""
  with pytest.raises(UserError, match=message) as e:
    check(config)
  assert '\n' not in str(e.value)
