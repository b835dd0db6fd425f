"""Which checkpoint is evaluated or served, and what is refused."""

from __future__ import annotations

import json

import jax.numpy as jnp
import pytest

from ragen_jax.modes import chosen_checkpoint
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.workdir import record_config
from ragen_jax.training.run_log import BEST
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """A run with two checkpoints, the first of them the best."""
  path = str(tmp_path_factory.mktemp('run'))
  record_config(path, small_config().to_dict())
  with Checkpointer(path, keep=2, save_best=BEST) as checkpointer:
    for step, score in ((1, 0.4), (2, 0.3)):
      checkpointer.save(step, {'params': {'x': jnp.zeros(2)}}, metrics={BEST: score})
  return path


def find(path, step, *, given=True, **fields):
  with Checkpointer(path, keep=2, save_best=BEST) as checkpointer:
    return chosen_checkpoint.find_step(small_config({'eval.step': step, **fields}), path, checkpointer, given)


@pytest.mark.parametrize(('step', 'found'), [('latest', 2), ('best', 1), ('1', 1), ('base', None), ('none', None)])
def test_the_step_of_a_name(workdir, step, found):
  assert find(workdir, step) == found


def test_a_step_that_is_not_there(workdir, tmp_path):
  with pytest.raises(UserError, match=r'eval\.step'):
    find(workdir, '7')
  for fields in ({'step': 'best', 'given': False}, {'step': 'latest', 'given': True}):
    with pytest.raises(UserError, match=rf'^--workdir={tmp_path}: there is no checkpoint in it; '):
      find(str(tmp_path), **fields)


def test_without_a_run_the_model_is_the_configs(tmp_path):
  assert find(str(tmp_path), 'latest', given=False) is None
  assert find(str(tmp_path), 'latest', given=True, **{'model.path': 'somewhere'}) is None
  (tmp_path / 'config.json').write_text(json.dumps({}))
  with pytest.raises(UserError, match='there is no checkpoint in it'):
    find(str(tmp_path), 'latest', given=False)


def test_checkpoints_of_another_model_are_refused(workdir):
  assert chosen_checkpoint.compare_with_run(small_config(), workdir) == ['FrozenLake']
  with pytest.raises(UserError, match=r'has checkpoints of another model: lora\.rank was 0 and is 4; set these'):
    chosen_checkpoint.compare_with_run(small_config({'lora.rank': 4}), workdir)


def test_fields_that_do_not_define_weights_may_change(workdir, caplog):
  caplog.set_level('INFO')
  config = small_config({'agent.max_context': 777, 'envs.FrozenLake.max_turns': 9, 'seed': 5})
  chosen_checkpoint.compare_with_run(config, workdir)
  told = [r.getMessage() for r in caplog.records]
  assert any('agent.max_context was 512 and is 777' in line for line in told)
  assert any('envs.FrozenLake.max_turns was 3 and is 9' in line for line in told)
  assert not any('seed' in line for line in told)


def test_the_name_of_the_model():
  assert chosen_checkpoint.model_name(small_config({'model.preset': 'tiny'})) == 'tiny'
  named = small_config({'model.path': 'a/b', 'lora.path': 'c'})
  assert chosen_checkpoint.model_name(named) == 'a/b with c'
