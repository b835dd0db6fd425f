"""Every field is a flag, and each mistake on the command line is one line of error."""

from __future__ import annotations

import io
import logging
import re
import sys
import types

import pytest
from absl import flags
from ml_collections import config_flags

from configs import default
from ragen_jax import build
from ragen_jax.config import command_line
from ragen_jax.utils.errors import UserError
from tests.support.configs import leaves
from tests.support.paths import ROOT
from tests.support.processes import copy_main, copy_python, run_main


def _from_command_line(monkeypatch, *fields):
  """The config that configs/default.py and these flags give."""
  values = flags.FlagValues()
  holder = config_flags.DEFINE_config_file('config', flag_values=values)
  arguments = ['x', f'--config={ROOT}/configs/default.py', *fields]
  monkeypatch.setattr(sys, 'argv', arguments)  # where ml_collections looks for overrides
  values(arguments)
  return holder.value


def test_every_field_can_be_set_from_the_command_line(monkeypatch):
  changed = {bool: lambda x: not x, int: lambda x: x + 1, float: lambda x: x + 0.25, str: lambda x: x + 'z'}
  new = {
    name: changed[type(value)](value) if type(value) in changed else (*value, value[-1] if value else 1)
    for name, value in leaves(default.get_config())
  }
  config = _from_command_line(monkeypatch, *(f'--config.{name}={value}' for name, value in new.items()))
  assert dict(leaves(config)) == new


def test_an_environment_is_changed_by_flags(monkeypatch):
  config = _from_command_line(
    monkeypatch, '--config.envs.LargerSokoban.dim=(9,7)', "--config.envs.Bandit.arms=(('Clerk','Diver'),)"
  )
  larger, bandit = build.env_specs(config, ('LargerSokoban', 'Bandit'), (1, 1))
  assert larger.env.dim == (9, 7) and '9 rows and 7 columns' in larger.env.rules()
  assert bandit.env.names == ('Clerk', 'Diver')


_REFUSED = [
  ([], '--config=FILE is missing'),
  (['--config=configs/none.py'], 'there is no such file'),
  (['--config=configs/sft_tiny.py:big'], 'has no variants'),
  (['--config=configs/frozenlake_ppo.py', '--config.algorithm.gama=0.9'], "did you mean 'gamma'"),
  (['--config=configs/frozenlake_ppo.py', '--config.agent.think=False'], '.think: it is agent.format now, '),
  (['--config=configs/frozenlake_ppo.py', '--config.algorithm.gamma=much'], 'gamma=much: must be a number'),
  (['--config=configs/frozenlake_ppo.py', '--wordkir=x'], 'wordkir'),
  (['--config=configs/frozenlake_ppo.py', 'algorithm.gamma=0.9'], 'unknown argument'),
  (['--config=configs/frozenlake_ppo.py', '--config.model.path=tests'], 'no config.json'),
  (['--config=configs/frozenlake_ppo.py', '--config.optimizer.mini_batch_size=100'], 'must divide'),
  (['--config=configs/frozenlake_ppo.py', '--num_processes=2'], 'need --coordinator=HOST:PORT'),
  (
    ['--config=configs/frozenlake_ppo.py', '--coordinator=localhost:1', '--num_processes=2', '--process_id=2'],
    'must be the index of this process, from 0',
  ),
  (
    ['--config=configs/frozenlake_ppo.py', '--coordinator=localhost', '--num_processes=2', '--process_id=1'],
    'as HOST:PORT',
  ),
  (['--config=configs/frozenlake_ppo.py', '--coordinator=auto', '--process_id=1'], 'must not be given'),
  (
    ['--config=frozenlake_ppo', '--coordinator=a:1', '--connect_timeout=0'],
    'connect_timeout=0.0: must be from 1 to 864',
  ),
  (['--config=frozenlake_ppo', '--mode=plan', '--coordinator=auto'], 'error: --coordinator has no effect with --mode='),
  (['--config=frozenlake_ppo', '--mode=play'], 'error: --workdir has no effect with --mode=play'),
  (['--config=frozenlake_ppo', '--level=a.txt'], 'error: --level has no effect with --mode=train'),
]


@pytest.fixture(scope='module')
def outcomes(tmp_path_factory):
  """What the program does with each of the arguments above, and the workdirs that none of them may make."""
  workdirs = [tmp_path_factory.getbasetemp() / f'refused_{i}' for i in range(len(_REFUSED))]
  return [(copy_main(*arguments, f'--workdir={w}'), w) for (arguments, _), w in zip(_REFUSED, workdirs, strict=True)]


@pytest.mark.parametrize('case', range(len(_REFUSED)), ids=[message for _, message in _REFUSED])
def test_the_command_line_tells_what_is_wrong_in_one_line_and_fails(outcomes, case):
  result, workdir = outcomes[case]
  lines = [line for line in result.stderr.splitlines() if line.strip()]
  assert result.returncode == 2
  assert len(lines) == 1 and lines[0].startswith('error: ') and _REFUSED[case][1] in lines[0], result.stderr
  assert not workdir.exists()


@pytest.mark.slow
def test_main_itself_fails_in_one_line(tmp_path):
  result = run_main('--config=configs/frozenlake_ppo.py', '--config.model.path=tests', f'--workdir={tmp_path}/run')
  assert result.returncode == 2 and re.fullmatch(r'error: .*no config\.json.*\n', result.stderr), result.stderr
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ([], r'^--config=FILE is missing, for instance --config=configs/frozenlake_ppo\.py; --help lists'),
    (['--config=none.py'], r'^--config=none\.py: there is no such file; '),
    (['--config=FILE.txt'], r'^--config=.*FILE\.txt: is not a Python file$'),
    (['--config=EMPTY.py'], r'^--config=.*EMPTY\.py: has no function get_config$'),
    (['--config=configs/sft_tiny.py:big'], r'^--config=configs/sft_tiny\.py:big: .* has no variants$'),
    (
      ['--config.seed=1', '--config=frozenlake_ppo'],
      r'^--config\.seed=1 precedes --config=frozenlake_ppo; give --config',
    ),
    (['--config=frozenlake_ppo', '--config.agent.think=1'], r'^--config\.agent\.think: it is agent\.format now'),
    (
      ['--config=frozenlake_ppo', '--config.seeds=1'],
      r"^--config\.seeds: config has no field 'seeds'; did you mean 'seed'",
    ),
    (['--mode=view', '--workdir=x', '--config.seed=1'], r'^--config\.seed=1 has no effect with --mode=view$'),
    (['--wordkir=x'], r'^unknown flag --wordkir; did you mean --workdir\?$'),
    (['--config=frozenlake_ppo', '--mode=learn'], r'^flag --mode=learn: '),
    (['--config=frozenlake_ppo', '--wordkir=x'], r'^unknown flag --wordkir; did you mean --workdir\?$'),
    (
      ['--config=frozenlake_ppo', '--num_iterations=2'],
      r'^unknown flag --num_iterations; did you mean --config\.num_iterations\?$',
    ),
    (
      ['--config=frozenlake_ppo', '--groups=2'],
      r'^unknown flag --groups; did you mean --config\.eval\.groups or .* or --config\.train\.groups\?$',
    ),
    (
      ['--config=frozenlake_ppo', '--config.model=gpt2'],
      r'^--config\.model=gpt2: is a section; its fields are .* preset,',
    ),
    (['--config=frozenlake'], r'^--config=frozenlake: there is no such file; did you mean .* or frozenlake_ppo or '),
  ],
)
def test_what_parsing_refuses(tmp_path, monkeypatch, arguments, message):
  (tmp_path / 'FILE.txt').write_text('text')
  (tmp_path / 'EMPTY.py').write_text('x = 1')
  argv = ['main.py', *(re.sub(r'=(FILE|EMPTY)', rf'={tmp_path}/\1', a) for a in arguments)]
  monkeypatch.setattr(flags, 'FLAGS', _flags())
  monkeypatch.setattr(sys, 'argv', argv)
  with pytest.raises(UserError, match=message) as e:
    command_line.parse(argv)
  assert '\n' not in str(e.value)


_DEFAULT = 'from configs import default\n\n\ndef get_config():\n  config = default.get_config()\n'


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('import no_such_package\n', r"line 1: ModuleNotFoundError: No module named 'no_such_package'$"),
    ('x = 1\ndef get_config(:\n', r'line 2: SyntaxError: invalid syntax'),
    (f'{_DEFAULT}  config.trian.groups = 3\n', r'line 6: AttributeError: .*trian'),
    (f"{_DEFAULT}  config.num_iterations = '3'\n", r"line 6: TypeError: .*'num_iterations'"),
    (
      f'{_DEFAULT}  config.algorithm.gama = 0.9\n  return config\n',
      r"algorithm\.gama=0\.9: config\.algorithm has no field 'gama'; did you mean 'gamma'\? allowed: adv_estimator, ",
    ),
    (
      f"{_DEFAULT}  config.update({{'optimiser': {{'b1': 0.8}}}})\n  return config\n",
      r"optimiser\.b1=0\.8: config has no field 'optimiser'; did you mean 'optimizer'\? allowed: agent, algorithm, ",
    ),
    (
      f'{_DEFAULT}  config.seeds = 3\n  return config\n',
      r"seeds=3: config has no field 'seeds'; did you mean 'seed'\?",
    ),
    (
      f'{_DEFAULT}  config.agent.think = False\n  return config\n',
      r'agent\.think=False: it is agent\.format now, ',
    ),
    (
      f"{_DEFAULT}  config.algorithm = {{'gamma': 0.9}}\n  return config\n",
      r'lacks the field algorithm\.\w+; begin with configs\.default\.get_config\(\)$',
    ),
    ('def get_config():\n  pass\n', r'get_config returns a NoneType; it must return a ConfigDict$'),
    (f'{_DEFAULT}  return config.to_dict()\n', r'get_config returns a dict; it must'),
    (
      f"{_DEFAULT}  del config['sft']\n  return config\n",
      r'is no config of ragen-jax, because it lacks the section sft; begin with configs\.default\.get_config\(\)$',
    ),
    (
      'from ml_collections import ConfigDict\n\n\ndef get_config():\n  return ConfigDict({"model": "gpt2"})\n',
      r'is no config of ragen-jax, because it lacks the sections agent, .*, model, .*; begin with',
    ),
  ],
)
def test_a_config_file_with_a_mistake_is_refused_in_one_line(tmp_path, text, message):
  path = tmp_path / 'own.py'
  path.write_text(text)
  with pytest.raises(UserError, match=f'^--config={path}: {message}') as e:
    command_line.load_config(str(path))
  assert '\n' not in str(e.value)


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--workdir='], r'^--workdir= is empty; name a directory'),
    (['--workdir=a', '--workdir=b'], r'^--workdir is given 2 times; only --mode=plot takes several, train takes one$'),
    (['--output=a'], r'^--output has no effect with --mode=train'),
  ],
)
def test_workdirs_and_outputs_that_a_mode_does_not_take(arguments, message):
  values = _flags()
  values(['main.py', f'--config={ROOT}/configs/frozenlake_ppo.py', *arguments])
  with pytest.raises(UserError, match=message):
    command_line.workdirs(values)


def test_a_tilde_that_the_shell_left_is_the_home_directory(monkeypatch, tmp_path):
  monkeypatch.setenv('HOME', str(tmp_path))
  values = _flags()
  values(['main.py', f'--config={ROOT}/configs/frozenlake_ppo.py', '--workdir=~/runs/a'])
  assert command_line.workdirs(values) == [f'{tmp_path}/runs/a']


@pytest.mark.parametrize('flag', ['--help', '-h'])
def test_help_lists_the_modes_and_the_shipped_configs(flag):
  result = copy_main(flag)
  assert result.returncode == 0 and result.stderr == ''
  modes = '<train|eval|sft|play|view|export|plan|serve|optimize_prompt|plot>'
  for text in ('--config:', '--workdir:', modes, 'frozenlake_ppo'):
    assert text in result.stdout


def _flags() -> flags.FlagValues:
  """The flags of the program that parsing reads."""
  values = flags.FlagValues()
  config_flags.DEFINE_config_file('config', flag_values=values)
  flags.DEFINE_multi_string('workdir', None, '', flag_values=values)
  flags.DEFINE_enum('mode', 'train', ['train', 'view', 'plot'], '', flag_values=values)
  flags.DEFINE_string('output', None, '', flag_values=values)
  return values


@pytest.mark.parametrize('arguments', [['--config=sudoku_ppo:qwen3-4b'], ['--config', 'sudoku_ppo:qwen3-4b']])
def test_a_shipped_config_is_given_by_its_name(arguments, monkeypatch):
  """The flag gets the file, so the default workdir is that of the file."""
  values = flags.FlagValues()
  holder = config_flags.DEFINE_config_file('config', flag_values=values)
  flags.DEFINE_multi_string('workdir', None, '', flag_values=values)
  flags.DEFINE_string('mode', 'train', '', flag_values=values)
  flags.DEFINE_string('output', None, '', flag_values=values)
  monkeypatch.setattr(flags, 'FLAGS', values)
  argv = ['main.py', *arguments, '--config.seed=3']
  monkeypatch.setattr(sys, 'argv', argv)
  assert command_line.parse(argv) == ['main.py']
  assert (holder.value.model.preset, holder.value.seed) == ('qwen3-4b', 3)
  assert holder.value.train.tags == ('Sudoku',)
  assert command_line.workdirs(values) == ['runs/sudoku_ppo-qwen3-4b']


def test_the_module_is_the_same_program(tmp_path):
  code = "import runpy, sys; sys.argv[0] = 'ragen-jax'; runpy.run_module('ragen_jax', run_name='__main__')"
  result = copy_python(code, '--config=frozenlake_ppo', '--config.model.path=none', cwd=tmp_path)
  assert result.returncode == 2 and result.stderr == "error: model.path='none' does not exist\n"


def test_log_messages_have_no_control_characters(monkeypatch):
  """Servers write a part of them, also of the exceptions below."""
  own = logging.Logger('ragen_jax')  # in place of the one that other tests use
  others = types.SimpleNamespace(**vars(logging) | {'getLogger': {'ragen_jax': own}.get})
  monkeypatch.setattr(command_line, 'logging', others)
  monkeypatch.setattr(sys, 'stderr', io.StringIO())
  command_line.set_up_logging()
  try:
    raise ValueError('\x1b[2J')
  except ValueError:
    own.info('a %s\n\tb', '\x1b]0;title\x07', exc_info=True)
  written = sys.stderr.getvalue()
  assert written.startswith('a ?]0;title?\n\tb\nTraceback') and written.endswith('\nValueError: ?[2J\n')
