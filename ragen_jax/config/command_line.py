"""Parses the command line. Each error is one line with the wrong argument and the allowed values."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
import re
import sys
import traceback
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from ragen_jax.config import rules, shipped
from ragen_jax.runs.config_fields import REPLACED, flatten, sections
from ragen_jax.utils.errors import UserError, describe_error, did_you_mean, printable

TYPES = {int: 'a whole number', float: 'a number', bool: 'true or false'}


class _Printable(logging.Formatter):
  """Messages without control characters, also in the texts of servers and in exceptions."""

  def format(self, record: logging.LogRecord) -> str:
    return printable(super().format(record), also='\n\t')


def set_up_logging() -> None:
  """Writes the log messages of this package, and only these, to standard error, without prefixes."""
  own = logging.getLogger('ragen_jax')
  own.setLevel(logging.INFO)
  handler = logging.StreamHandler()
  handler.setFormatter(_Printable())
  own.addHandler(handler)
  own.propagate = False


def default_workdir(config_path: str) -> str:
  """The default workdir, runs/<name of the config>-<variant>: 'configs/a.py:b' -> 'runs/a-b'."""
  path, _, variant = config_path.partition(':')
  name = os.path.splitext(os.path.basename(path))[0]
  return os.path.join('runs', f'{name}-{variant}' if variant else name)


def workdirs(values: flags.FlagValues) -> list[str]:
  """The directories of the flag `workdir`, or the default for the flags `config` and `mode`.

  The default of a warm start differs from that of training with the same config. Raises UserError if a workdir is
  empty, or several workdirs or `output` are given for a mode other than plot.
  """
  given = values.workdir
  if not given:
    default = default_workdir(config_flags.get_config_filename(values['config']))
    beside = values.mode == 'sft' and not os.path.basename(default).startswith('sft_')
    given = [f'{default}-sft' if beside else default]
  if not all(given):
    raise UserError('--workdir= is empty; name a directory, or leave the flag out for the default')
  given = [os.path.expanduser(x) for x in given]  # a shell leaves ~ in quotes as it is
  if values.mode != 'plot':
    if len(given) > 1:
      raise UserError(f'--workdir is given {len(given)} times; only --mode=plot takes several, {values.mode} takes one')
    if values.output:
      raise UserError(f'--output has no effect with --mode={values.mode} (export has --config.export.output)')
  return given


def parse(argv: list[str]) -> list[str]:
  """Parses the flags, for `app.run(flags_parser=...)`.

  Raises UserError if a flag or a field of the config does not exist, a value has the wrong type, or the config cannot
  be loaded.
  """
  if any(re.fullmatch(r'--?(help|helpshort|helpfull|helpxml|h|\?)(=.*)?', a) for a in argv):
    return _show_help(argv)
  # view and plot read the workdir, but no config.
  mode = _find_value(argv, 'mode')
  needless = mode in ('view', 'plot') and _find_value(argv, 'workdir') and not _find_value(argv, 'config')
  if not needless and not _find_value(argv, 'config'):
    _check_flags(argv)
    if mode in ('view', 'plot'):
      raise UserError(f'--mode={mode}: --workdir=DIR is missing, the directory of a run')
  path = '' if needless else _value_of(argv, 'config')
  config = ConfigDict() if needless else load_config(path)
  argv = argv if needless else [argv[0], *_with_files(argv[1:])]
  config_given = False
  for argument in argv[1:]:
    name = argument.split('=', 1)[0].lstrip('-')
    if argument.startswith('-') and name.startswith('config.'):
      if needless:
        raise UserError(f'{argument} has no effect with --mode={mode}')
      if not config_given:
        raise UserError(f'{argument} precedes --config={path}; give --config first')
      check_field(config, name.removeprefix('config.'))
    config_given |= argument.startswith('-') and name == 'config'
  try:
    with shipped.importable(shipped.find_file(path.partition(':')[0]) or ''):
      return flags.FLAGS(argv)
  except flags.IllegalFlagValueError as e:
    raise UserError(_wrong_value(config, argv, str(e))) from e
  except flags.UnrecognizedFlagError as e:
    raise UserError(f'unknown flag --{e.flagname}{_hint(e.flagname, config)}') from e
  except flags.Error as e:
    raise UserError(' '.join(str(e).split())) from e


def _hint(name: str, config: ConfigDict) -> str:
  """The end of an error about an unknown flag: fields of the config with this name, or the most similar flag."""
  fields = [f'config.{x}' for x in flatten(config.to_dict()) if x == name or x.endswith(f'.{name}')]
  near = fields[:3] or difflib.get_close_matches(name, list(flags.FLAGS), 1)
  return f'; did you mean {" or ".join(f"--{x}" for x in near)}?' if near else ''


def _check_flags(argv: list[str]) -> None:
  """Raises UserError for the first flag that does not exist, with the nearest one that does."""
  if 'config' not in flags.FLAGS:  # the program's flags are not defined, as in a test of this module
    return
  for argument in argv[1:]:
    name = argument.split('=', 1)[0].lstrip('-')
    negated = name.startswith('no') and name[2:] in flags.FLAGS
    if argument.startswith('--') and name and not (name in flags.FLAGS or negated or name.startswith('config.')):
      raise UserError(f'unknown flag --{name}{_hint(name, ConfigDict())}')


def _with_files(arguments: list[str]) -> list[str]:
  """The arguments, with the name of a shipped config replaced by its file, because the config flag reads files."""
  found = []
  for before, argument in zip(['', *arguments], arguments, strict=False):
    match = re.fullmatch(r'(--?config=)?(.*)', argument, re.DOTALL)
    if match[1] or before in ('-config', '--config'):
      name, colon, variant = match[2].partition(':')
      argument = f'{match[1] or ""}{shipped.find_file(name) or name}{colon}{variant}'
    found.append(argument)
  return found


def show_in_help(*holders: flags.FlagHolder) -> None:
  """Makes --help list these flags in every program that uses them."""
  for holder in holders:
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[holder.name])


def _show_help(argv: list[str]) -> list[str]:
  """Shows absl's help and exits with status 0; absl itself would exit with status 1."""
  try:
    return flags.FLAGS(['--help' if re.fullmatch('--?h', a) else a for a in argv])
  except SystemExit:
    sys.stdout.write(
      '\nEvery field of the config is a flag too: --config.FIELD=VALUE (docs/configuration.md lists the fields).\n'
      f'Shipped configs: {", ".join(shipped.names())}.\n'
    )
    sys.stdout.flush()
    raise SystemExit(0) from None


def _wrong_value(config: ConfigDict, argv: list[str], message: str) -> str:
  """The message for a value of the wrong type. For a field of the config it names the allowed type."""
  match = re.match(r'flag --config\.([\w.]+)=', message)
  if match:
    old = config
    for name in match.group(1).split('.'):
      old = old[name]
    given = _find_value(argv, re.escape(f'config.{match.group(1)}')) or ''
    if isinstance(old, ConfigDict):
      return f'--config.{match.group(1)}={given}: is a section; its fields are {", ".join(sorted(old)) or "none"}'
    if type(old) in TYPES:
      return f'--config.{match.group(1)}={given}: must be {TYPES[type(old)]}, like the {old} of the config'
  return ' '.join(message.split())


def _value_of(argv: list[str], flag: str) -> str:
  """Like `_find_value`, but raises UserError if the flag is missing."""
  value = _find_value(argv, flag)
  if value is None:
    raise UserError(
      f'--{flag}=FILE is missing, for instance --{flag}=configs/frozenlake_ppo.py; --help lists the flags'
    )
  return value


def _find_value(argv: list[str], flag: str) -> str | None:
  """The last value of a flag in the arguments; None if it is missing or empty."""
  for i, argument in reversed(list(enumerate(argv))):
    match = re.fullmatch(rf'--?{flag}(?:=(.*))?', argument, re.DOTALL)
    if match:
      value = match.group(1) if match.group(1) is not None else ''.join(argv[i + 1 : i + 2])
      if value:
        return value
  return None


def load_config(value: str, flag: str = '--config=') -> ConfigDict:
  """Loads 'FILE' or 'FILE:VARIANT'; FILE is relative to the working directory, or the name of a shipped config.

  The config flag loads the file again later. Errors are raised here, because the flag would show a traceback. Raises
  UserError if there is no such file or shipped config, or the file fails or returns no config; the error shows `flag`
  before its name.
  """
  name, colon, variant = value.partition(':')
  path = shipped.find_file(name)
  if path is None:
    raise UserError(f'{flag}{name}: there is no such file; {shipped.suggest(name)}')
  spec = importlib.util.spec_from_file_location('_config_of_the_command_line', path)
  if spec is None or spec.loader is None:
    raise UserError(f'{flag}{name}: is not a Python file')
  with shipped.importable(path):
    try:
      module = importlib.util.module_from_spec(spec)
      spec.loader.exec_module(module)
      if not callable(getattr(module, 'get_config', None)):
        raise UserError(f'{flag}{name}: has no function get_config')
      config = module.get_config(variant) if colon else module.get_config()
    except (UserError, MemoryError):
      raise
    except Exception as e:
      if colon and isinstance(e, TypeError) and 'positional argument' in str(e):
        raise UserError(f'{flag}{value}: {name} has no variants') from e
      # ml_collections quotes its messages, as KeyError does.
      told = describe_error(e).replace('\\n', ' ').replace("\\'", "'")
      raise UserError(f'{flag}{name}: {_place(e, path)}{told}') from e
  _check_sections(config, f'{flag}{name}')
  rules.fields_of_this_version(config, f'{flag}{name}: ')
  return config


def _place(error: Exception, path: str) -> str:
  """'line 3: ' for an error of the third line of a file; '' if it is of none."""
  lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
  if isinstance(error, SyntaxError) and error.filename == path:
    lines.append(error.lineno)
  return f'line {lines[-1]}: ' if lines and lines[-1] else ''


def _check_sections(config: Any, where: str) -> None:
  """Raises UserError, which begins with `where`, if what a file returns is no config of this program."""
  if not isinstance(config, ConfigDict):
    raise UserError(f'{where}: get_config returns a {type(config).__name__}; it must return a ConfigDict')
  lacking = [name for name in sections() if not isinstance(config.get(name), ConfigDict)]
  if lacking:
    raise UserError(
      f'{where}: is no config of ragen-jax, because it lacks the section{"s" * (len(lacking) > 1)} '
      f'{", ".join(lacking)}; begin with configs.default.get_config()'
    )


def check_field(config: Any, field: str, flag: str = '--config.') -> None:
  """Raises UserError if the config has no field of this dotted name; `flag` precedes the name in the error."""
  if field in REPLACED:
    raise UserError(f'{flag}{field}: {REPLACED[field]}')
  at, done = config, []
  for name in field.split('.'):
    if not isinstance(at, ConfigDict) or name not in at:
      where = '.'.join(['config', *done])
      known = sorted(at) if isinstance(at, ConfigDict) else []
      hint = did_you_mean(name, known)
      raise UserError(f'{flag}{field}: {where} has no field {name!r}; {hint}allowed: {", ".join(known) or "none"}')
    at = at[name]
    done.append(name)
