"""Every field of the config is explained, can be set from the command line, and is read; what cannot run is refused."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags

from configs import default, frozenlake_grpo, frozenlake_ppo, sft_tiny
from ragen_jax import config_check, sft, train
from ragen_jax.config_check import check_config
from ragen_jax.distributed.processes import RowShare
from ragen_jax.utils.errors import UserError
from tests import helpers

ROOT = pathlib.Path(__file__).parents[1]


def _leaves(config, prefix=''):
  for name, value in config.items():
    if isinstance(value, ConfigDict):
      yield from _leaves(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', value


def test_every_field_has_a_comment_line_above_it():
  lines = (ROOT / 'configs' / 'default.py').read_text().splitlines()
  assigned = [i for i, line in enumerate(lines) if re.match(r'  config\.[\w.]+ = (?!ConfigDict)', line)]
  assigned = [i for i in assigned if not any('def _real_model' in before for before in lines[:i])]
  assert len(assigned) > 50
  for i in assigned:
    assert lines[i - 1].strip().startswith('#'), f'configs/default.py:{i + 1}: {lines[i].strip()} is not explained'
  # Fields of environments: those that all have are explained above them, the others one by one.
  common = {'type', 'max_turns', 'max_actions', 'max_actions_per_turn', 'max_words'}
  for i, line in enumerate(lines):
    option = re.match(r"      '(\w+)': ", line)
    if option and option.group(1) not in common and option.group(1) != 'arms':
      assert lines[i - 1].strip().startswith('#'), f'configs/default.py:{i + 1}: {line.strip()} is not explained'


def test_every_field_can_be_set_from_the_command_line(monkeypatch):
  changed = {bool: lambda x: not x, int: lambda x: x + 1, float: lambda x: x + 0.25, str: lambda x: x + 'z'}
  for name, value in _leaves(default.get_config()):
    new = changed[type(value)](value) if type(value) in changed else (*value, value[-1])
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file('config', flag_values=values)
    arguments = ['x', f'--config={ROOT}/configs/default.py', f'--config.{name}={new}']
    monkeypatch.setattr(sys, 'argv', arguments)  # where ml_collections looks for overrides
    values(arguments)
    assert dict(_leaves(holder.value))[name] == new, name


def test_every_field_is_read_by_some_run(tmp_path, monkeypatch):
  """A short training run and a short warm start, with every access to the config written down."""
  read = set()
  original = ConfigDict.__getitem__

  def spy(self, key):
    read.add((id(self), key))
    return original(self, key)

  fields = dict(agent__max_response_tokens=8, eval__greedy_too=False, num_iterations=1, train__group_size=2)
  config = helpers.small_config(
    **fields, optimizer__mini_batch_size=8, train__tags=('FrozenLake', 'SimpleSokoban'), train__groups=4,
    eval__tags=('FrozenLake', 'SimpleSokoban', 'Bandit'), eval__groups=3,
  )  # fmt: skip
  config.sft.steps, config.sft.batch_size, config.sft.levels = 1, 4, (8,)
  config.sft.output = str(tmp_path / 'out')
  monkeypatch.setattr(train, 'record_config', lambda *a, **k: None)
  monkeypatch.setattr(ConfigDict, '__getitem__', spy)
  train.train_and_evaluate(config, str(tmp_path / 'run'))
  sft.train_sft(config)
  config.sft.from_scratch, config.sft.output = True, str(tmp_path / 'fresh')
  sft.train_sft(config)
  monkeypatch.undo()

  def unread(part, prefix=''):
    for name, value in part.items():
      if isinstance(value, ConfigDict):
        yield from unread(value, f'{prefix}{name}.')
      elif (id(part), name) not in read:
        yield f'{prefix}{name}'

  assert not list(unread(config))


def test_the_shipped_configs_can_run():
  for module in (frozenlake_ppo, frozenlake_grpo, sft_tiny):
    check_config(module.get_config())
  assert frozenlake_grpo.get_config().algorithm.adv_estimator == 'grpo'


def test_a_variant_brings_the_settings_of_its_size():
  config = frozenlake_ppo.get_config('qwen2.5-0.5b')
  assert config.model.preset == 'qwen2.5-0.5b'
  assert (config.optimizer.actor_lr, config.optimizer.critic_lr) == (1e-6, 1e-5)
  assert (config.train.groups, config.train.group_size, config.agent.max_context) == (8, 16, 3600)


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('algorithm.adv_estimator', 'ppo', r"algorithm\.adv_estimator='ppo'.*gae.*grpo"),
    ('algorithm.loss_agg_mode', 'mean', r"algorithm\.loss_agg_mode='mean'.*token-mean"),
    ('algorithm.clip_ratio_c', 0.5, r'algorithm\.clip_ratio_c=0\.5.*above 1'),
    ('algorithm.gamma', 1.5, r'algorithm\.gamma=1\.5.*between 0 and 1'),
    ('optimizer.mini_batch_size', 7, r'optimizer\.mini_batch_size=7.*divide.* 16'),
    ('optimizer.micro_batch_size', 3, r'optimizer\.micro_batch_size=3.*divide.* 8'),
    ('train.groups', 0, r'train\.groups=0'),
    ('train.tags', (), r'train\.tags'),
    ('train.tags', ('FrozenLake', 'Bandit', 'SimpleSokoban'), r'train\.groups=4.*multiple of.*3'),
    ('train.tags', ('Nowhere',), r"'Nowhere'.*FrozenLake"),
    ('train.tags', ('FrozenLake', 'FrozenLake'), r'named once'),
    ('train.temperature', 0.0, r'train\.temperature=0\.0.*above 0'),
    ('train.first_level', 120, r'overlap'),
    ('eval.top_p', 0.0, r'eval\.top_p=0\.0'),
    ('envs.FrozenLake.p', 1.5, r'envs\.FrozenLake.*p=1\.5'),
    ('envs.FrozenLake.type', 'lake', r"envs\.FrozenLake.*'lake'.*frozen_lake"),
    ('envs.FrozenLake.max_turns', 0, r'envs\.FrozenLake\.max_turns=0'),
    ('agent.format_penalty', 0.1, r'agent\.format_penalty=0\.1'),
    ('model.preset', 'gpt', r"model\.preset='gpt'.*tiny"),
    ('model.path', '/does/not/exist', r"model\.path='/does/not/exist' does not exist"),
    ('model.dtype', 'int8', r"model\.dtype='int8'.*bfloat16"),
    ('seed', 500, r'seed=500.*at most 428'),
    ('train.top_p', 0.9, r"algorithm\.old_logprobs='sampler'.*'trainer'"),
  ],
)
def test_what_cannot_run_is_refused_in_one_line(field, value, message):
  config = helpers.small_config()
  with config.unlocked():
    config.update_from_flattened_dict({field: value})
  with pytest.raises(UserError, match=message) as e:
    check_config(config)
  assert '\n' not in str(e.value)


def test_processes_play_equal_numbers_of_groups(monkeypatch):
  monkeypatch.setattr(config_check, 'row_share', lambda mesh: RowShare(shards=3, first=1, own=1))
  with pytest.raises(UserError, match=r'train\.groups=4: must be a multiple of 3, the parts'):
    check_config(helpers.small_config())


def test_grpo_needs_a_group_to_compare_with():
  config = helpers.small_config(algorithm__adv_estimator='grpo', train__group_size=1, train__groups=16)
  with pytest.raises(UserError, match=r'train\.group_size=1.*at least 2'):
    check_config(config)


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ([], '--config=FILE is missing'),
    (['--config=configs/none.py'], 'there is no such file'),
    (['--config=configs/sft_tiny.py:big'], 'has no variants'),
    (['--config=configs/frozenlake_ppo.py', '--config.algorithm.gama=0.9'], "did you mean 'gamma'"),
    (['--config=configs/frozenlake_ppo.py', '--config.algorithm.gamma=much'], "'much'"),
    (['--config=configs/frozenlake_ppo.py', '--wordkir=x'], 'wordkir'),
    (['--config=configs/frozenlake_ppo.py', 'algorithm.gamma=0.9'], 'unknown argument'),
    (['--config=configs/frozenlake_ppo.py', '--config.model.path=tests'], 'no config.json'),
    (['--config=configs/frozenlake_ppo.py', '--config.optimizer.mini_batch_size=100'], 'must divide'),
    (['--config=configs/frozenlake_ppo.py', '--num_processes=2'], 'need --coordinator=HOST:PORT'),
    (
      ['--config=configs/frozenlake_ppo.py', '--coordinator=localhost:1', '--num_processes=2', '--process_id=2'],
      'which of them this is, from 0',
    ),
    (
      ['--config=configs/frozenlake_ppo.py', '--coordinator=localhost', '--num_processes=2', '--process_id=1'],
      'as HOST:PORT',
    ),
    (['--config=configs/frozenlake_ppo.py', '--coordinator=auto', '--process_id=1'], 'must not be given'),
  ],
)
def test_the_command_line_tells_what_is_wrong_in_one_line_and_fails(tmp_path, arguments, message):
  workdir = tmp_path / 'run'
  result = subprocess.run(
    [sys.executable, 'main.py', *arguments, f'--workdir={workdir}'],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  lines = [line for line in result.stderr.splitlines() if line.strip()]
  assert result.returncode != 0
  assert len(lines) == 1 and lines[0].startswith('error: ') and message in lines[0], result.stderr
  assert not workdir.exists()
