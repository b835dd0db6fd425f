"""The command line's own errors, each in one line that says what would be right."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
import re
import sys
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from ragen_jax.utils.errors import UserError

TYPES = {int: 'a whole number', float: 'a number', bool: 'true or false'}


def set_up_logging() -> None:
  """Lets the run's own messages, and no others, be seen plainly on standard error."""
  own = logging.getLogger('ragen_jax')
  own.setLevel(logging.INFO)
  own.addHandler(logging.StreamHandler())
  own.propagate = False


def default_workdir(config_path: str) -> str:
  """runs/<config file>, with the variant behind it: 'configs/a.py:b' -> 'runs/a-b'."""
  path, _, variant = config_path.partition(':')
  name = os.path.splitext(os.path.basename(path))[0]
  return os.path.join('runs', f'{name}-{variant}' if variant else name)


def workdirs(values: flags.FlagValues) -> list[str]:
  """Where the run is kept, or several are for --mode=plot, by the flags `workdir`, `config` and `mode`.

  A warm start has a place beside that of training with the same config.

  Raises:
    UserError: a workdir is empty, or a flag that is plot's alone is given for another mode.
  """
  given = values.workdir
  if not given:
    default = default_workdir(config_flags.get_config_filename(values['config']))
    beside = values.mode == 'sft' and not os.path.basename(default).startswith('sft_')
    given = [f'{default}-sft' if beside else default]
  if not all(given):
    raise UserError('--workdir= is empty; name a directory, or leave the flag out for the default')
  if values.mode != 'plot':
    if len(given) > 1:
      raise UserError(f'--workdir is given {len(given)} times; only --mode=plot takes several, {values.mode} takes one')
    if values.output:
      raise UserError(f'--output has no effect with --mode={values.mode} (export has --config.export.output)')
  return given


def parse(argv: list[str]) -> list[str]:
  """Parses the flags, for `app.run(flags_parser=...)`.

  Raises:
    UserError: an unknown flag, an unknown field of the config, a value of the wrong type, or a config file that cannot
      be read.
  """
  if any(re.fullmatch(r'--?(help|helpshort|helpfull|helpxml|h|\?)(=.*)?', a) for a in argv):
    return _show_help(argv)
  # What is shown of a workdir does not depend on a config.
  mode = _find_value(argv, 'mode')
  needless = mode in ('view', 'plot') and _find_value(argv, 'workdir') and not _find_value(argv, 'config')
  path = '' if needless else _value_of(argv, 'config')
  config = ConfigDict() if needless else load_config(path)
  config_given = False
  for argument in argv[1:]:
    name = argument.split('=', 1)[0].lstrip('-')
    if argument.startswith('-') and name.startswith('config.'):
      if needless:
        raise UserError(f'{argument} has no effect with --mode={mode}')
      if not config_given:
        raise UserError(f'{argument} stands before --config={path}; give --config first')
      check_field(config, name.removeprefix('config.'))
    config_given |= argument.startswith('-') and name == 'config'
  try:
    return flags.FLAGS(argv)
  except flags.IllegalFlagValueError as e:
    raise UserError(_wrong_value(config, argv, str(e))) from e
  except flags.Error as e:
    raise UserError(' '.join(str(e).split())) from e


def _show_help(argv: list[str]) -> list[str]:
  """absl's help leaves with status 1, as if something had failed."""
  try:
    return flags.FLAGS(argv)
  except SystemExit:
    sys.stdout.write('\nEvery field of the config is a flag too: --config.FIELD=VALUE; see configs/default.py.\n')
    raise SystemExit(0) from None


def _wrong_value(config: ConfigDict, argv: list[str], message: str) -> str:
  """absl's message about a flag's value, with what would be allowed for a field of the config."""
  match = re.match(r'flag --config\.([\w.]+)=', message)
  if match:
    old = config
    for name in match.group(1).split('.'):
      old = old[name]
    if type(old) in TYPES:
      given = _value_of(argv, re.escape(f'config.{match.group(1)}'))
      return f'--config.{match.group(1)}={given}: must be {TYPES[type(old)]}, like the {old} of the config'
  return ' '.join(message.split())


def _value_of(argv: list[str], flag: str) -> str:
  value = _find_value(argv, flag)
  if value is None:
    raise UserError(f'--{flag}=FILE is missing, for instance --{flag}=configs/frozenlake_ppo.py')
  return value


def _find_value(argv: list[str], flag: str) -> str | None:
  for i, argument in reversed(list(enumerate(argv))):  # of several the last one counts
    match = re.fullmatch(rf'--?{flag}(?:=(.*))?', argument, re.DOTALL)
    if match:
      value = match.group(1) if match.group(1) is not None else ''.join(argv[i + 1 : i + 2])
      if value:
        return value
  return None


def load_config(value: str, flag: str = '--config=') -> ConfigDict:
  """The config that `FILE` or `FILE:VARIANT` gives; the flag itself loads it again, and would fail with a traceback.

  Args:
    value: the file, relative to the present directory, and the variant.
    flag: what errors put before it.

  Raises:
    UserError: there is no such file, or no config in it.
  """
  path, colon, variant = value.partition(':')
  if not os.path.isfile(path):
    raise UserError(f'{flag}{path}: there is no such file')
  spec = importlib.util.spec_from_file_location('_config_of_the_command_line', path)
  if spec is None or spec.loader is None:
    raise UserError(f'{flag}{path}: is no Python file')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  if not callable(getattr(module, 'get_config', None)):
    raise UserError(f'{flag}{path}: has no function get_config')
  try:
    return module.get_config(variant) if colon else module.get_config()
  except TypeError as e:
    if colon and 'positional argument' in str(e):
      raise UserError(f'{flag}{value}: {path} has no variants') from e
    raise


def check_field(config: Any, field: str, flag: str = '--config.') -> None:
  """Raises UserError where a dotted name is no field of the config; `flag` is what the error puts before it."""
  at, done = config, []
  for name in field.split('.'):
    if not isinstance(at, ConfigDict) or name not in at:
      where = '.'.join(['config', *done])
      known = sorted(at) if isinstance(at, ConfigDict) else []
      close = difflib.get_close_matches(name, known, n=1)
      hint = f'did you mean {close[0]!r}? ' if close else ''
      raise UserError(f'{flag}{field}: {where} has no field {name!r}; {hint}allowed: {", ".join(known) or "none"}')
    at = at[name]
    done.append(name)
