"""The registry of environments: a type's name in the config to its class."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ragen_jax.envs.bandit import Bandit
from ragen_jax.envs.base import Budget, Environment
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.sokoban import Sokoban

TYPES: dict[str, type[Environment]] = {
  'frozen_lake': FrozenLake,
  'sokoban': Sokoban,
  'bandit': Bandit,
}

__all__ = ['TYPES', 'Budget', 'Environment', 'make']


def make(env_type: str, options: Mapping[str, Any]) -> Environment:
  """Builds an environment.

  Args:
    env_type: one of `TYPES`.
    options: its class's fields.

  Raises:
    ValueError: no such type, no such option, or an option's value is not allowed; the message names it.
  """
  if env_type not in TYPES:
    raise ValueError(f'type={env_type!r}; allowed: {", ".join(TYPES)}')
  cls = TYPES[env_type]
  allowed = [f.name for f in dataclasses.fields(cls)]
  unknown = sorted(set(options) - set(allowed))
  if unknown:
    raise ValueError(f'{unknown[0]} is no option of {env_type}; allowed: {", ".join(allowed)}')
  return cls(**options)
