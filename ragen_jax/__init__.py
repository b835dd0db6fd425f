"""RAGEN in JAX: multi-turn reinforcement learning of language-model agents (StarPO).

`import ragen_jax` imports no other module; the module of a name in `__all__` is imported when the name is first used.
docs/api.md shows how the names work together.

The letters of array shapes in this package:

  B  trajectories, P prompt groups times G members      T  columns of the token timeline
  S  columns of the key/value cache                     L  layers
  D  model width                                        F  width of the MLP
  N  query heads                                        K  key/value heads
  H  width of a head                                    V  vocabulary
  A  actions a turn
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from ragen_jax.api import load_config, load_policy, make_env, train_on
  from ragen_jax.build import make_evaluator, make_trainer
  from ragen_jax.envs import Budget, Environment, TextEnvironment
  from ragen_jax.evaluation.evaluator import Evaluator
  from ragen_jax.modes.chosen_checkpoint import load_checkpoint
  from ragen_jax.train import train_and_evaluate
  from ragen_jax.training.state import TrainState
  from ragen_jax.training.trainer import Trainer
  from ragen_jax.utils.errors import UserError

# transformers is used for its tokenizers only; its advice to install PyTorch is turned off.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')

# From this many MiB on, the compiler of TPUs cuts products of divided arrays into parts, and exchanges each by itself.
# A single exchange before or after the product is faster here (docs/performance.md has the times). The variable is read
# when a program first asks for devices; a value that is already set stays.
_WINDOWED_PRODUCTS = '--xla_jf_spmd_threshold_for_windowed_einsum_mib'
if _WINDOWED_PRODUCTS not in os.environ.get('LIBTPU_INIT_ARGS', ''):
  os.environ['LIBTPU_INIT_ARGS'] = f'{os.environ.get("LIBTPU_INIT_ARGS", "")} {_WINDOWED_PRODUCTS}=1000000'.strip()

__all__ = [
  'Budget',
  'Environment',
  'Evaluator',
  'TextEnvironment',
  'TrainState',
  'Trainer',
  'UserError',
  'load_checkpoint',
  'load_config',
  'load_policy',
  'make_env',
  'make_evaluator',
  'make_trainer',
  'train_and_evaluate',
  'train_on',
]

_MODULES = {
  'Budget': 'envs',
  'Environment': 'envs',
  'Evaluator': 'evaluation.evaluator',
  'TextEnvironment': 'envs',
  'TrainState': 'training.state',
  'Trainer': 'training.trainer',
  'UserError': 'utils.errors',
  'load_checkpoint': 'modes.chosen_checkpoint',
  'load_config': 'api',
  'load_policy': 'api',
  'make_env': 'api',
  'make_evaluator': 'build',
  'make_trainer': 'build',
  'train_and_evaluate': 'train',
  'train_on': 'api',
}


def __getattr__(name: str) -> Any:
  if name not in _MODULES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(f'{__name__}.{_MODULES[name]}'), name)


def __dir__() -> list[str]:
  return sorted(globals().keys() | set(__all__))
