"""Digests of files tell changed data from the data of the run so far."""

from __future__ import annotations

import pytest

from ragen_jax.runs import file_digests
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config


def test_blocks_of_large_files_are_compared_up_to_the_last_byte(tmp_path):
  path = tmp_path / 'weights'
  content = bytearray(2 * 64 * 2**14)
  path.write_bytes(content)
  digests = {file_digests.digest(path)}
  for place in (0, len(content) - 1):
    changed = content.copy()
    changed[place] = 1
    path.write_bytes(changed)
    digests.add(file_digests.digest(path))
  path.write_bytes(content + b'\0')
  assert len({*digests, file_digests.digest(path)}) == 4


def _found(config):
  return file_digests.data_digests(config.to_dict())


def test_the_data_of_the_tags_that_are_played_is_described(tmp_path):
  config = small_config()
  data = {name: tmp_path / name for name in ('train', 'other', 'tasks', 'prompt', 'game.py')}
  for path in data.values():
    path.write_text('1')
  config.envs.Dataset.path, config.envs.DatasetTest.path = str(data['train']), str(data['other'])
  config.envs.Agent.tasks, config.envs.SimpleSokoban.levels = str(data['tasks']), str(tmp_path / 'missing')
  config.envs.GSM8K.path, config.prompt.file = f'{data["game.py"]}:Game', str(data['prompt'])
  config.train.tags, config.eval.tags = ('Dataset', 'GSM8K', 'SimpleSokoban'), ('Agent', 'Dataset')
  found = _found(config)
  assert set(found) == {'envs.Dataset.path', 'envs.Agent.tasks', 'prompt.file'}
  for name, field in (('train', 'envs.Dataset.path'), ('tasks', 'envs.Agent.tasks'), ('prompt', 'prompt.file')):
    data[name].write_text('2')
    now = _found(config)
    assert {field} == {x for x in found if now[x] != found[x]}
    with pytest.raises(UserError, match=f'^--workdir=x: the files of {field} are not those of the run so far') as e:
      file_digests.check_data(found, now, '--workdir=x')
    assert '\n' not in str(e.value)
    found = now
  for other in ({}, found, {'envs.Other.path': 'abc'}):  # of an earlier version, the same, and of other tags
    file_digests.check_data(other, found, '--workdir=x')
