"""The command line's own errors, each in one line that says what would be right."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from ragen_jax.utils.errors import UserError


def parse(argv: list[str]) -> list[str]:
  """Parses the flags, for `app.run(flags_parser=...)`.

  Raises:
    UserError: an unknown flag, an unknown field of the config, a value of the wrong type, or a config file that cannot
      be read.
  """
  config = _load_config(_value_of(argv, 'config'))
  for argument in argv[1:]:
    name = argument.split('=', 1)[0].lstrip('-')
    if argument.startswith('-') and name.startswith('config.'):
      _check_field(config, name.removeprefix('config.'))
  try:
    return flags.FLAGS(argv)
  except flags.Error as e:
    raise UserError(' '.join(str(e).split())) from e


def _value_of(argv: list[str], flag: str) -> str:
  for i, argument in reversed(list(enumerate(argv))):  # of several the last one counts
    match = re.fullmatch(rf'--?{flag}(?:=(.*))?', argument, re.DOTALL)
    if match:
      value = match.group(1) if match.group(1) is not None else ''.join(argv[i + 1 : i + 2])
      if value:
        return value
  if any(re.fullmatch(r'--?(help|helpshort|helpfull|helpxml|h|\?)(=.*)?', a) for a in argv):
    return ''
  raise UserError(f'--{flag}=FILE is missing, for instance --{flag}=configs/frozenlake_ppo.py')


def _load_config(value: str) -> ConfigDict | None:
  """The config that `FILE` or `FILE:VARIANT` gives; the flag itself loads it again, and would fail with a traceback."""
  if not value:
    return None
  path, colon, variant = value.partition(':')
  if not os.path.isfile(path):
    raise UserError(f'--config={path}: there is no such file')
  spec = importlib.util.spec_from_file_location('_config_of_the_command_line', path)
  if spec is None or spec.loader is None:
    raise UserError(f'--config={path}: is no Python file')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  if not callable(getattr(module, 'get_config', None)):
    raise UserError(f'--config={path}: has no function get_config')
  try:
    return module.get_config(variant) if colon else module.get_config()
  except TypeError as e:
    if colon and 'positional argument' in str(e):
      raise UserError(f'--config={value}: {path} has no variants') from e
    raise


def _check_field(config: Any, field: str) -> None:
  at, done = config, []
  for name in field.split('.'):
    if not isinstance(at, ConfigDict) or name not in at:
      where = '.'.join(['config', *done])
      known = sorted(at) if isinstance(at, ConfigDict) else []
      close = difflib.get_close_matches(name, known, n=1)
      hint = f'did you mean {close[0]!r}? ' if close else ''
      raise UserError(f'--config.{field}: {where} has no field {name!r}; {hint}allowed: {", ".join(known) or "none"}')
    at = at[name]
    done.append(name)
