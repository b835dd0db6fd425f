"""The registry of environments: a type's name in the config to its class, or the class's import path."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from ragen_jax.envs.bandit import Bandit
from ragen_jax.envs.base import Budget, Environment
from ragen_jax.envs.countdown import Countdown
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.game_2048 import Game2048
from ragen_jax.envs.outside.gymnasium_env import GymnasiumEnvironment
from ragen_jax.envs.outside.http_env import HttpEnvironment
from ragen_jax.envs.outside.text_env import PythonEnvironment, TextEnvironment, import_object
from ragen_jax.envs.rubik import Rubik2x2
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.envs.sudoku import Sudoku

TYPES: dict[str, type[Environment | TextEnvironment]] = {
  'frozen_lake': FrozenLake,
  'sokoban': Sokoban,
  'bandit': Bandit,
  'countdown': Countdown,
  'game_2048': Game2048,
  'rubik_2x2': Rubik2x2,
  'sudoku': Sudoku,
  'python': PythonEnvironment,
  'gymnasium': GymnasiumEnvironment,
  'http': HttpEnvironment,
}

__all__ = ['TYPES', 'Budget', 'Environment', 'TextEnvironment', 'make']


def make(env_type: str, options: Mapping[str, Any]) -> Environment | TextEnvironment:
  """Builds an environment.

  Args:
    env_type: one of `TYPES`, or 'package.module:ClassName' for a class of the user's own.
    options: its class's fields.

  Raises:
    ValueError: no such type, no such option, or an option's value is not allowed; the message names it.
  """
  cls = TYPES[env_type] if env_type in TYPES else _imported(env_type)
  fields = [f for f in dataclasses.fields(cls) if f.init]
  allowed = [f.name for f in fields]
  unknown = sorted(set(options) - set(allowed))
  if unknown:
    raise ValueError(f'{unknown[0]} is no option of {env_type}; allowed: {", ".join(allowed)}')
  needed = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
  missing = [name for name in needed if name not in options]
  if missing:
    raise ValueError(f'{missing[0]} is missing; {env_type} needs {", ".join(needed)}')
  return cls(**options)


def _imported(env_type: str) -> type[Environment | TextEnvironment]:
  """The class at an import path; raises ValueError where it is no environment that can be made."""
  if ':' not in env_type:
    raise ValueError(f"type={env_type!r}; allowed: {', '.join(TYPES)}, or 'package.module:ClassName'")
  cls = import_object('type', env_type)
  if not inspect.isclass(cls) or not issubclass(cls, Environment | TextEnvironment):
    raise ValueError(f"type={env_type!r} is no subclass of Environment or TextEnvironment; see type='python'")
  abstract = sorted(cls.__abstractmethods__)
  if abstract or not isinstance(getattr(cls, 'name', None), str):
    raise ValueError(f'type={env_type!r} lacks {", ".join(abstract) or "name"}, which environments must have')
  if '__dataclass_params__' not in vars(cls) or not cls.__dataclass_params__.frozen:
    raise ValueError(f'type={env_type!r} is no frozen dataclass, which environments must be')
  return cls
