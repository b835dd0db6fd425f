"""Processes with another config, other code or other files are named, with what differs."""

from __future__ import annotations

import shutil

import jax
import pytest

from ragen_jax.config import agreement
from ragen_jax.distributed import processes
from ragen_jax.models import presets
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config


@pytest.fixture
def others(monkeypatch):
  """Two processes; what the other one says is what this one says, changed by the function in the list."""
  changes = [lambda values: values]
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(processes, 'gather', lambda value, types=(): [value, changes[-1](value)])
  return changes


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'seed': '1'}, 'seed: is 1 in process 1 and 0 in process 0; all processes of a run need the same config'),
    ({'optimizer.actor_lr': '1.0'}, 'optimizer.actor_lr: is 1.0 in process 1 and'),
    ({'checkpoint.every': '7'}, 'checkpoint.every: is 7 in process 1 and 1 in process 0'),  # all save together
    ({'monitor.gradients_every': '7'}, 'monitor.gradients_every: is 7 in process 1 and 0 in process 0'),
    ({'envs.FrozenLake.size': '9'}, 'envs.FrozenLake.size: is 9 in process 1 and 4 in process 0'),
    ({'the code of ragen_jax': 'abc'}, 'the code of ragen_jax: is abc in process 1 and'),
    ({'the version of jax': '0.0.1'}, 'the version of jax: is 0.0.1 in process 1 and'),
    ({'new.field': '1'}, 'new.field: is 1 in process 1 and absent in process 0'),
  ],
)
def test_the_field_and_the_process_are_named(others, change, message):
  others.append(lambda values: values | change)
  with pytest.raises(UserError) as e:
    agreement.check_same_config(small_config())
  assert str(e.value).startswith(message) and '\n' not in str(e.value)
  assert e.value.everywhere


def test_equal_processes_agree_wherever_their_files_are(others):
  sent = []
  others.append(lambda values: sent.append(values) or values)
  config = small_config()
  agreement.check_same_config(config)
  agreement.check_same_files(config)
  fields, files = (values for values in sent if values is not None)
  assert 'model.path' not in fields and 'compilation_cache' not in fields and 'seed' in fields
  assert files['the files of model.preset'] != 'absent'


def _digest(config, name):
  return agreement.digests(config)[f'the files of {name}']


def test_models_are_equal_if_their_files_are(tmp_path):
  source, copy = presets.resolve('tiny', ''), tmp_path / 'model'
  shutil.copytree(source, copy)
  (copy / 'README.md').write_text('is not read')
  config = small_config()
  config.model.path = str(copy)
  assert _digest(config, 'model.preset') == _digest(small_config(), 'model.preset')
  weights = next(copy.glob('*.safetensors'))
  content = bytearray(weights.read_bytes())
  content[-1] ^= 1
  weights.write_bytes(content)
  assert _digest(config, 'model.preset') != _digest(small_config(), 'model.preset')


def test_files_of_environments_are_found(tmp_path):
  module, levels = tmp_path / 'game.py', tmp_path / 'levels.txt'
  module.write_text('class Game: ...')
  levels.write_text('#')
  config = small_config()
  with config.unlocked():
    config.envs.Own = {'type': 'python', 'class_path': f'{module}:Game', 'options': {'levels': str(levels)}}
    config.envs.Other = {'type': 'python', 'class_path': 'tests.support.configs:Game', 'options': {}}
  before = agreement.digests(config)
  module.write_text('class Game: pass')
  levels.write_text('##')
  after = agreement.digests(config)
  changed = {name for name in before if before[name] != after[name]}
  assert changed == {'the files of envs.Own.class_path', 'the files of envs.Own.options.levels'}
  assert before['the files of envs.Other.class_path'] != 'absent'


def test_each_of_several_data_files_is_compared(tmp_path):
  config, paths = small_config(), [tmp_path / 'a.jsonl', tmp_path / 'b.jsonl']
  config.envs.Dataset.path = f'{paths[0]}, {paths[1]}'
  found = {_digest(config, 'envs.Dataset.path')}
  assert found == {'absent'}
  for path in (*paths, *paths):
    path.write_text('{}\n' * len(found))
    found.add(_digest(config, 'envs.Dataset.path'))
  assert len(found) == 5


def test_long_texts_are_no_files():
  config = small_config()
  config.prompt.text = 'Think before you answer. ' * 20
  assert _digest(config, 'prompt.text') == 'absent'


def test_one_process_compares_nothing(monkeypatch):
  monkeypatch.setattr(agreement, 'versions', lambda: pytest.fail('compared'))
  monkeypatch.setattr(agreement, 'digests', lambda config: pytest.fail('compared'))
  agreement.check_same_config(small_config())
  agreement.check_same_files(small_config())
