"""A generator of bad overrides over all fields: each is refused in one line that names the field."""

from __future__ import annotations

import functools
import math
import re
import sys

import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags

from ragen_jax.config import command_line, limits
from ragen_jax.config.agent_checks import check_prompt_search
from ragen_jax.config.checks import check_config, check_eval, check_plan, check_sft
from ragen_jax.utils.errors import UserError
from tests.support.configs import assert_refused, leaves, small_config

_check_run = functools.partial(check_config, weights=False)

# Values that no field of the type may have.
_NEVER = {
  bool: ('maybe', '2', ''),
  int: ('nan', '1.5', 'abc', '', str(2**32), str(-(2**31) - 1), str(10**30)),
  float: ('nan', 'inf', '-inf', 'abc', '', '1e39', '-1e39', '1e-42'),
}
# Fields that may be negative, with the meaning of -1.
_MAY_BE_NEGATIVE = {
  'agent.format_penalty': 'a penalty',
  'algorithm.entropy_coef': 'less entropy',
  'algorithm.high_level_lam': 'the same as lam',
  'algorithm.critic_lam': 'that of the advantages',
  'compile_ahead': 'as many as the machine has processors for',
  'mesh.data': 'all devices that are left',
  'serve.success_score': 'a score',
  'prompt.failed_score': 'a score',
}
# Fields with free text, such as paths, names and addresses. All other texts are words of a list.
_FREE_TEXT = {
  'agent.action_sep', 'agent.request', 'compilation_cache', 'eval.endpoint_model', 'export.output', 'export.step',
  'logging.project', 'prompt.critic_key', 'prompt.critic_model', 'prompt.file', 'prompt.text', 'serve.host',
  'serve.model', 'serve.success_reward', 'serve.trained', 'sft.data', 'sft.output', 'sft.save_data', 'envs.*.tasks',
}  # fmt: skip
_FREE_TEXT_OF_ENVS = ('.tasks', '.runner', '.symbols', '.request')
_CONFIG = {False: 'configs/frozenlake_ppo.py', True: 'configs/agents_ppo.py'}


def _fields(config, prefix=''):
  for name, value in config.items():
    if isinstance(value, ConfigDict):
      yield from _fields(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', value


def _is_agents(field):
  return field.startswith(('serve.', 'prompt.', 'envs.Agent.'))


def bad_overrides():
  """(field, value) of bad overrides over all fields of all shipped kinds of runs."""
  found = []
  for agents, path in _CONFIG.items():
    config = command_line.load_config(path)
    for field, value in _fields(config):
      if _is_agents(field) != agents or (field.startswith('envs.') and field.split('.')[1] not in config.train.tags):
        continue
      found += [(field, x) for x in _NEVER.get(type(value), ())]
      if type(value) in (int, float) and field not in _MAY_BE_NEGATIVE:
        found.append((field, '-1'))
      if limits._bound(field) < 2**31 - 1:
        found.append((field, str(int(limits._bound(field)) + 1)))
      free = field in _FREE_TEXT or (field.startswith('envs.') and field.endswith(_FREE_TEXT_OF_ENVS))
      if isinstance(value, str) and not free:
        found.append((field, 'no such value'))
      if isinstance(value, tuple) and value and isinstance(value[0], str):
        found += [(field, "('NoSuchName',)"), (field, '(1,)')]
  return found


def _check(arguments, field, monkeypatch):
  """What a command does with its config before anything else."""
  with monkeypatch.context() as m:
    values = flags.FlagValues()
    config_flags.DEFINE_config_file('config', lock_config=True, flag_values=values)
    flags.DEFINE_string('mode', 'train', '', flag_values=values)
    m.setattr(flags, 'FLAGS', values)
    m.setattr(sys, 'argv', ['main.py', *arguments])
    command_line.parse(['main.py', *arguments])
    config = values.config
  if field.startswith('plan.'):
    check_plan(config)
  if field.startswith(('eval.', 'prompt.')):
    check_eval(config)
  check_config(config)
  if field.startswith('sft.'):
    check_sft(config)
  if field.startswith('prompt.'):
    check_prompt_search(config)


def _wrong_refusals(overrides, monkeypatch):
  wrong = []
  for field, value in overrides:
    try:
      _check([f'--config={_CONFIG[_is_agents(field)]}', f'--config.{field}={value}'], field, monkeypatch)
    except UserError as e:
      # An option of an environment is named as the environment writes it.
      name = field.rsplit('.', 1)[1] if field.startswith('envs.') else field
      if '\n' in str(e) or name not in str(e) or e.status != 2:
        wrong.append(f'{field}={value}: {e}')
    else:
      wrong.append(f'{field}={value} is accepted')
  return wrong


@pytest.mark.slow
def test_a_sixteenth_of_the_bad_overrides_is_refused(monkeypatch):
  assert _wrong_refusals(bad_overrides()[::16], monkeypatch) == []


@pytest.mark.slow
@pytest.mark.exhaustive
def test_all_bad_overrides_are_refused(monkeypatch):
  overrides = bad_overrides()
  assert len(overrides) > 1000
  assert _wrong_refusals(overrides, monkeypatch) == []


@pytest.mark.parametrize('field', limits.AT_MOST)
def test_every_bound_is_of_a_field(field):
  config = command_line.load_config('configs/agents_ppo.py')
  assert any(limits.fnmatch.fnmatchcase(name, field) for name, _ in _fields(config))


def test_the_largest_values_are_allowed():
  config = ConfigDict({'agent': {'max_context': 2**20}, 'train': {'first_level': 2**32 - 1, 'temperature': 100.0}})
  limits.check_numbers(config)
  config.train.first_level = 2**32
  with pytest.raises(UserError, match=r'train.first_level=4294967296: must be from 0 to 4294967295'):
    limits.check_numbers(config)


# -- numbers that the programs can hold --------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('train.temperature', math.inf, r'^train\.temperature=inf: must be a finite number$'),
    ('algorithm.entropy_coef', math.nan, r'^algorithm\.entropy_coef=nan: must be a finite number$'),
    ('optimizer.critic_lr', math.inf, r'^optimizer\.critic_lr=inf: must be a finite number$'),
    ('agent.format_penalty', -math.inf, r'^agent\.format_penalty=-inf: must be a finite number$'),
    ('optimizer.weight_decay', 1e39, r'optimizer\.weight_decay=1e\+39: must be at most 3\.4e\+38 in magnitude'),
    ('agent.format_penalty', -1e39, r'agent\.format_penalty=-1e\+39: must be at most 3\.4e\+38 in magnitude'),
    ('train.temperature', 1e-45, r'train\.temperature=1e-45: must be 0 or at least 1\.2e-38'),
    ('optimizer.warmup_steps', 2**31, r'optimizer\.warmup_steps=2147483648: must be at most 2147483647'),
    ('seed', -(2**31), r'seed=-2147483648: must be at most 2147483647 in magnitude'),
    ('train.tag_groups', (4, 2**31), r'train\.tag_groups=\(4, 2147483648\): must be at most 2147483647'),
    ('sft.shape', (64, math.nan), r'sft\.shape=\(64, nan\): must be a finite number'),
  ],
)
def test_numbers_that_float32_or_int32_cannot_hold_are_refused(field, value, message):
  config = small_config()
  with config.unlocked(), config.ignore_type():
    config.update_from_flattened_dict({field: value})
  assert_refused(_check_run, config, message)


def test_the_largest_and_smallest_numbers_are_allowed():
  limits.check_numbers(
    ConfigDict({'a': 3.4e38, 'b': -3.4e38, 'c': 1.2e-38, 'd': 0.0, 'e': 2**31 - 1, 'f': (1 - 2**31, 0.5), 'g': 'inf'})
  )


@pytest.mark.slow
def test_no_number_of_the_config_may_be_infinite_or_nan():
  # Sections of an environment's options are read by the environment.
  config = small_config()
  found = {name: value for name, value in leaves(config) if isinstance(value, float)}
  fields = {name: x for name, x in found.items() if not (name.startswith('envs.') and name.count('.') > 2)}
  assert len(fields) > 60 and any(name.startswith('envs.') for name in fields)
  for name, before in fields.items():
    for x in (math.inf, -math.inf, math.nan):
      config.update_from_flattened_dict({name: x})
      assert_refused(_check_run, config, rf'^{re.escape(name)}={x}: must be a finite number$')
    config.update_from_flattened_dict({name: before})


def test_what_is_handed_to_foreign_code_and_seeds_of_levels_have_ranges_of_their_own():
  config = ConfigDict(
    {'envs': {'Own': {'kwargs': {'far': math.inf, 'big': 2**40}}}, 'eval': {'first_level': 2**32 - 1}}
  )
  limits.check_numbers(config)
  config.envs.Own.size = 2**40
  assert_refused(limits.check_numbers, config, r'^envs\.Own\.size=1099511627776: must be at most 2147483647')
