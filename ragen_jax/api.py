"""The functions of `import ragen_jax`: a config, environments, and the language model of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax import envs as registry
from ragen_jax.agent.language_model import LanguageModel
from ragen_jax.config import command_line
from ragen_jax.config.checks import check_config
from ragen_jax.envs import Budget, Environment, TextEnvironment
from ragen_jax.envs.spec import OPTIONAL
from ragen_jax.utils.errors import UserError, short


def load_config(file: str, fields: Mapping[str, Any] | None = None) -> ConfigDict:
  """The config that `main.py --config=FILE --config.FIELD=VALUE` reads, locked: setting any other name is an error.

  Args:
    file: the name of a shipped config, such as 'frozenlake_ppo', or the path of a file; the suffix ':NAME' selects
      another model.
    fields: values by dotted name, such as 'train.groups'.

  Raises:
    UserError: there is no such file or field, or a value has the wrong type.
  """
  config = command_line.load_config(file, flag='').lock()
  for field, value in (fields or {}).items():
    command_line.check_field(config, field, flag='')
    *sections, name = field.split('.')
    at = config
    for section in sections:
      at = at[section]
    old = at[name]
    # Python treats True as a number, and the config accepts None for any field.
    wrong = value is None or (type(old) in (int, float) and isinstance(value, bool))
    if isinstance(old, ConfigDict) or wrong:
      raise UserError(f'{field}={value!r}: {_allowed(old)}')
    try:
      at[name] = value
    except TypeError as e:
      raise UserError(f'{field}={value!r}: {_allowed(old)}') from e
  return config


def _allowed(old: Any) -> str:
  if isinstance(old, ConfigDict):
    return f'is a section; name one of its fields: {", ".join(old)}'
  return f'must be {command_line.TYPES.get(type(old), f"a {type(old).__name__}")}, like the {old!r} of the config'


def make_env(env_type: str, **options: Any) -> Environment | TextEnvironment:
  """Makes an environment.

  Args:
    env_type: a name of `ragen_jax.envs.TYPES`, such as 'frozen_lake', or 'package.module:ClassName'.
    **options: fields of its class; missing fields have their defaults.

  Raises:
    UserError: the type or an option does not exist, or a value is not allowed.
  """
  try:
    return registry.make(env_type, options)
  except ValueError as e:
    raise UserError(str(e)) from e


def train_on(
  config: ConfigDict,
  environments: Mapping[str, Environment | TextEnvironment],
  budget: Budget | None = None,
  max_words: int = 100,
) -> None:
  """Changes a config to train and evaluate on the given environments instead of its own.

  Args:
    config: the run's config; `envs`, `train.tags` and `eval.tags` are changed, with equal shares for all tags.
    environments: tag -> environment; the tag is part of the names of the metrics.
    budget: turns and actions of an episode; None for 5 turns, 10 actions, and 5 actions a turn.
    max_words: the reply length that the prompt requests.

  Raises:
    UserError: there is no environment, a tag is no name of a field, or a class cannot be imported by its name; the
      config stores the name only.
  """
  if not environments:
    raise UserError('environments={}: name at least one environment')
  budget = budget or Budget()
  sections = {}
  for tag, env in environments.items():
    if not (isinstance(tag, str) and tag) or '.' in tag:
      raise UserError(f'environments: the tag {tag!r} must be a text without dots, since it names a field of envs')
    if not isinstance(env, Environment | TextEnvironment):
      raise UserError(f'environments[{tag!r}]={short(env)}: must be an environment, such as ragen_jax.make_env returns')
    options = {f.name: getattr(env, f.name) for f in dataclasses.fields(env) if f.init}
    env_type = _type_name(type(env))
    try:
      same = type(registry.make(env_type, options)) is type(env)
    except ValueError as e:
      raise UserError(f'environments[{tag!r}]: {e}') from e
    if not same:
      raise UserError(f'environments[{tag!r}]: {env_type} names another class by now')
    own = {'type': env_type, **options, **dataclasses.asdict(budget), 'max_words': max_words}
    sections[tag] = own | OPTIONAL
  with config.unlocked():
    for tag, section in sections.items():
      if tag in config.envs:  # otherwise the new fields would need the types of the old ones
        del config.envs[tag]
      config.envs[tag] = section
  for part in (config.train, config.eval):
    part.tags, part.tag_groups = tuple(sections), ()


def _type_name(cls: type) -> str:
  """The value of `envs.TAG.type` for a class."""
  names = [name for name, known in registry.TYPES.items() if known is cls]
  return names[0] if names else f'{cls.__module__}:{cls.__qualname__}'


def load_policy(config: ConfigDict) -> LanguageModel:
  """Checks the whole config and loads the initial language model of a run.

  Raises:
    UserError: a field has a value that is not allowed, or the checkpoint does not exist.
  """
  check_config(config)
  return build.load_policy(config)
