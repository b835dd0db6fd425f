"""The registry of environments, which maps the `type` of a config to a class, and levels from text files."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ragen_jax.envs.alfworld.environment import ALFWorldEnvironment
from ragen_jax.envs.bandit import Bandit
from ragen_jax.envs.base import Budget, Environment, Game
from ragen_jax.envs.countdown import Countdown
from ragen_jax.envs.dataset.environment import DatasetEnvironment
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.game_2048 import Game2048
from ragen_jax.envs.lean.environment import LeanEnvironment
from ragen_jax.envs.manipulation import Manipulation
from ragen_jax.envs.navigation import Navigation
from ragen_jax.envs.outside.base import Session, TextEnvironment
from ragen_jax.envs.outside.gymnasium import GymnasiumEnvironment
from ragen_jax.envs.outside.http import HttpEnvironment
from ragen_jax.envs.outside.openenv import OpenEnvEnvironment
from ragen_jax.envs.outside.python import PythonEnvironment
from ragen_jax.envs.outside.tasks import AgentTasks
from ragen_jax.envs.outside.verifiers import VerifiersTasks
from ragen_jax.envs.rubik import Rubik2x2
from ragen_jax.envs.simulators.ai2thor import ThorEnvironment
from ragen_jax.envs.simulators.maniskill import ManiSkillEnvironment
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.envs.sudoku import Sudoku
from ragen_jax.envs.svg.environment import SvgEnvironment
from ragen_jax.envs.textworld.environment import TextWorldEnvironment
from ragen_jax.envs.traced import check_traced, one_line_errors
from ragen_jax.envs.webshop.environment import WebShopEnvironment
from ragen_jax.utils.errors import did_you_mean, one_line
from ragen_jax.utils.imports import import_object
from ragen_jax.utils.threads import Fault

TYPES: dict[str, type[Environment | TextEnvironment]] = {
  'frozen_lake': FrozenLake,
  'sokoban': Sokoban,
  'bandit': Bandit,
  'countdown': Countdown,
  'game_2048': Game2048,
  'rubik_2x2': Rubik2x2,
  'sudoku': Sudoku,
  'navigation': Navigation,
  'manipulation': Manipulation,
  'python': PythonEnvironment,
  'gymnasium': GymnasiumEnvironment,
  'http': HttpEnvironment,
  'openenv': OpenEnvEnvironment,
  'agent': AgentTasks,
  'dataset': DatasetEnvironment,
  'textworld': TextWorldEnvironment,
  'lean': LeanEnvironment,
  'webshop': WebShopEnvironment,
  'verifiers': VerifiersTasks,
  'alfworld': ALFWorldEnvironment,
  'svg': SvgEnvironment,
  'ai2thor': ThorEnvironment,
  'maniskill': ManiSkillEnvironment,
}
# Type of a simulator -> the type whose game it plays. The options of both are the same: those of the game, and under
# 'simulator' those of the simulator.
SIMULATORS = {'ai2thor': 'navigation', 'maniskill': 'manipulation'}

__all__ = [
  'SIMULATORS',
  'TYPES',
  'AgentTasks',
  'Budget',
  'Environment',
  'Fault',
  'Game',
  'Session',
  'TextEnvironment',
  'VerifiersTasks',
  'load_level',
  'make',
  'with_level',
]


def make(env_type: str, options: Mapping[str, Any]) -> Environment | TextEnvironment:
  """Makes an environment of a type: a key of `TYPES`, or 'package.module:ClassName' for a class outside this package.

  Raises:
    ValueError: the type or an option does not exist, a value is not allowed, or a class outside this package raises an
      exception or, in JAX, does not return what it should; one line names it.
  """
  cls = TYPES[env_type] if env_type in TYPES else _imported(env_type)
  if env_type in SIMULATORS:
    shared = {name: value for name, value in options.items() if name not in ('simulator', 'observation')}
    own = {**options.get('simulator', {}), 'observation': options.get('observation', 'image')}
    options = {'world': make(SIMULATORS[env_type], shared), **own}
  elif env_type in SIMULATORS.values():
    options = {name: value for name, value in options.items() if name != 'simulator'}
  fields = [f for f in dataclasses.fields(cls) if f.init]
  allowed = [f.name for f in fields]
  unknown = sorted(set(options) - set(allowed))
  if unknown:
    hint = did_you_mean(unknown[0], allowed)
    raise ValueError(f'{unknown[0]} is not an option of {env_type}; {hint}allowed: {", ".join(allowed)}')
  needed = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
  missing = [name for name in needed if name not in options]
  if missing:
    raise ValueError(f'{missing[0]} is missing; {env_type} needs {", ".join(needed)}')
  if env_type in TYPES:
    return cls(**options)
  with one_line_errors(cls.__name__, cls, keep=ValueError):
    env = cls(**options)
  if isinstance(env, Environment):
    check_traced(env)
  return env


def _imported(env_type: str) -> type[Environment | TextEnvironment]:
  """The class at an import path; raises ValueError if it is not an environment that can be made."""
  if ':' not in env_type:
    raise ValueError(f"type={env_type!r}; allowed: {', '.join(TYPES)}, or 'package.module:ClassName'")
  cls = import_object('type', env_type)
  if not inspect.isclass(cls) or not issubclass(cls, Environment | TextEnvironment):
    raise ValueError(f"type={env_type!r} is not a subclass of Environment or TextEnvironment; see type='python'")
  abstract = sorted(cls.__abstractmethods__)
  if abstract or not isinstance(getattr(cls, 'name', None), str):
    raise ValueError(f'type={env_type!r} lacks {", ".join(abstract) or "name"}, which environments must have')
  if '__dataclass_params__' not in vars(cls) or not cls.__dataclass_params__.frozen:
    raise ValueError(f'type={env_type!r} is not a frozen dataclass, which environments must be')
  return cls


def load_level(env: Game, path: str | pathlib.Path) -> Any:
  """Reads a level from a text file, in the form of the observations that `env.render` writes.

  The options of `env` (size, symbols, ...) must be those of the level. The result is a state without a batch axis, with
  NumPy leaves, whose episode is not over.

  Raises:
    ValueError: the file cannot be read, its text is not a level of this environment, or the level is already over; one
      line names the file and the reason.
  """
  try:
    state = env.from_text(pathlib.Path(path).read_text(encoding='utf-8'))
  except OSError as e:
    raise ValueError(f'level file {str(path)!r} cannot be read ({e.strerror})') from e
  except UnicodeDecodeError as e:
    raise ValueError(f'level file {str(path)!r} is not UTF-8 text') from e
  except ValueError as e:
    raise ValueError(f'level file {str(path)!r}: {one_line(e, str)}') from e
  if state.done:
    raise ValueError(f'level file {str(path)!r}: {env.name}: the level is already over')
  return state


def with_level(env: Environment, state: Any) -> Environment:
  """The environment with one level: `reset` returns this state (without a batch axis), whatever its key."""

  def reset(self, key):
    del self, key
    return jax.tree.map(jnp.asarray, state)

  kind = type(env)
  fixed = object.__new__(type(kind.__name__, (kind,), {'reset': reset}))
  vars(fixed).update(vars(env))
  return fixed
