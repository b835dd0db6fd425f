"""From a run's checkpoint to a directory: which step, which weights, and in which form they are written."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.models import identity, lora
from ragen_jax.models.checkpoint import peft
from ragen_jax.models.checkpoint.config import read_config
from ragen_jax.models.checkpoint.export import ExportSettings, check_output, choose_step, restore_params, write_policy
from ragen_jax.models.checkpoint.load import load_params, load_value_head
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.utils.errors import UserError
from tests.support.adapters import logits as logits_of
from tests.support.models import random_model

_ADAPTERS = lora.LoraConfig(rank=2, alpha=6, targets=('q_proj', 'down_proj'))
_VOCAB = 70


def _model(adapters=None, *, critic=False, seed=0):
  model = random_model(_VOCAB, seed=seed)
  if adapters is not None:
    lora.attach(model.policy, adapters, nnx.Rngs(seed))
  if critic:
    kernel = model.value_head.kernel[...]
    model = ActorCritic(model.policy, random_model(_VOCAB, seed=seed + 5).policy)
    model.value_head.kernel.set_value(kernel)
  return model


def _params(model):
  return nnx.split(model)[1]


def _moved(params, amount):
  """Other weights, as training would leave them; the base of adapters stays."""
  rng = np.random.default_rng(0)
  trained, frozen = lora.partition(params)
  return jax.tree.map(lambda x: x + amount * rng.normal(size=x.shape).astype(np.float32), trained), frozen


def _load(directory, **options):
  return load_params(directory, read_config(directory), 'float32', **options)


def _equal(ours, theirs):
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


# -- the checkpoint ----------------------------------------------------------------------------------------------------


def test_the_step_is_the_latest_the_best_or_the_one_that_is_named(tmp_path):
  with Checkpointer(tmp_path / 'a', keep=3, save_best='score') as checkpointer:
    for step, score in ((2, 0.4), (5, 0.9), (10, 0.3)):
      checkpointer.save(step, {'x': jnp.ones(2)}, metrics={'score': score})
    found = {step: choose_step(checkpointer, step) for step in ('latest', 'best', '2', '10')}
    assert found == {'latest': 10, 'best': 5, '2': 2, '10': 10}
    for step in ('7', '02', '', 'newest', '-1'):
      with pytest.raises(UserError) as e:
        choose_step(checkpointer, step, field='eval.step')
      assert str(e.value) == f'eval.step={step!r}: must be latest, best or one of 2, 5, 10'


def test_a_run_without_the_checkpoint_that_is_asked_for(tmp_path):
  with Checkpointer(tmp_path / 'a', keep=2, save_best='score') as checkpointer:
    with pytest.raises(UserError, match=rf'^there is no checkpoint in {tmp_path}/a/checkpoints$'):
      choose_step(checkpointer, 'latest')
    checkpointer.save(1, {'x': jnp.ones(2)})
    assert choose_step(checkpointer, 'latest') == 1
    with pytest.raises(UserError, match=r"^export\.step='best': no checkpoint in .* was saved after an evaluation$"):
      choose_step(checkpointer, 'best')


@pytest.mark.parametrize('adapters', [None, _ADAPTERS], ids=['full', 'lora'])
@pytest.mark.slow_cases('full')
def test_restored_weights_take_the_place_of_those_that_were_loaded(tmp_path, adapters):
  expected = {}
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    for step in (1, 2):
      trained, frozen = _moved(_params(_model(adapters)), 0.02 * step)
      checkpointer.save(step, {'params': trained, 'opt_state': jax.tree.map(jnp.zeros_like, trained)})
      expected[step] = jax.device_get(lora.join(trained, frozen))
  for step in (1, 2):
    fresh = _model(adapters)
    with Checkpointer(tmp_path, keep=2) as checkpointer:
      params = restore_params(checkpointer, fresh, make_mesh(-1, 1, 1), step)
    assert all(x.is_deleted() for x in jax.tree.leaves(lora.partition(_params(fresh))[0]))
    _equal(params, expected[step])


def test_frozen_weights_that_are_not_those_of_the_run_are_refused(tmp_path):
  trained = _moved(_params(_model(_ADAPTERS)), 0.02)[0]
  digest, arrays = identity.digest_of(_moved(_params(_model(_ADAPTERS)), 0.0)[1]), {'params': trained}
  assert digest.startswith('float32 ')
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    checkpointer.save(1, arrays, {'unsaved': {'frozen': digest}})
    checkpointer.save(2, arrays, {'unsaved': {'frozen': 'float32 of-other-files'}})
    restore_params(checkpointer, _model(_ADAPTERS), make_mesh(-1, 1, 1), 1)
    with pytest.raises(UserError, match=r'^checkpoint of step 2 in .*: the frozen weights of the model .* are not'):
      restore_params(checkpointer, _model(_ADAPTERS), make_mesh(-1, 1, 1), 2)


# -- the directory -----------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(tokenizer_dir):
  return ExportSettings(lora='merged', dtype='float32', adapters=None, base='some/base', tokenizer_dir=tokenizer_dir)


def _head(directory):
  """The value head of a directory, None if it has none."""
  head = _model(seed=9).value_head
  return np.asarray(head.kernel[...]) if load_value_head(directory, head) else None


def test_a_complete_model_with_or_without_its_value_head(tmp_path, settings):
  model, out = _model(), str(tmp_path / 'out')
  for with_value_head in (True, False):
    write_policy(out, model, settings, with_value_head=with_value_head)
    _equal(_load(out), nnx.state(model.policy))
    head = _head(out)
    assert (head is not None) == with_value_head
    if with_value_head:
      np.testing.assert_array_equal(head, model.value_head.kernel[...])
  assert (tmp_path / 'out' / 'tokenizer.json').is_file()


def test_the_type_of_the_written_weights(tmp_path, settings):
  model = _model()
  write_policy(str(tmp_path / 'out'), model, dataclasses.replace(settings, dtype='bfloat16'), with_value_head=False)
  assert json.loads((tmp_path / 'out' / 'config.json').read_text())['torch_dtype'] == 'bfloat16'
  rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), nnx.state(model.policy))
  _equal(_load(str(tmp_path / 'out')), rounded)


def test_a_critic_of_its_own_is_written_beside_the_policy(tmp_path, settings):
  model, out = _model(critic=True), str(tmp_path / 'out')
  write_policy(out, model, settings, with_value_head=True)
  _equal(_load(out), nnx.state(model.policy))
  _equal(_load(f'{out}/critic', ignore_head=True), nnx.state(model.critic))
  np.testing.assert_array_equal(_head(f'{out}/critic'), model.value_head.kernel[...])


def test_adapters_alone_or_merged_into_the_weights(tmp_path, settings):
  model = _model(_ADAPTERS)
  nnx.update(model, lora.join(*_moved(_params(model), 0.1)))
  settings = dataclasses.replace(settings, adapters=_ADAPTERS)
  alone, merged = str(tmp_path / 'alone'), str(tmp_path / 'merged')
  write_policy(alone, model, dataclasses.replace(settings, lora='adapter'), with_value_head=True)
  write_policy(merged, model, settings, with_value_head=True)
  for directory in (alone, merged):
    np.testing.assert_array_equal(_head(directory), model.value_head.kernel[...])
  assert json.loads((tmp_path / 'alone' / 'adapter_config.json').read_text())['base_model_name_or_path'] == 'some/base'
  again = _model(_ADAPTERS, seed=0)
  peft.load(alone, again.policy)
  _equal(nnx.state(lora.adapters(again.policy)), nnx.state(lora.adapters(model.policy)))
  # Both are the same model.
  plain = _model().policy
  nnx.update(plain, _load(merged))
  tokens = jnp.arange(12)[None] % _VOCAB
  logits = [logits_of(qwen, tokens) for qwen in (plain, model.policy, _model().policy)]
  np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)
  assert np.abs(logits[1] - logits[2]).max() > 0.1


def test_beside_adapters_there_is_no_place_for_a_critic_of_its_own(tmp_path, settings, caplog):
  settings = dataclasses.replace(settings, adapters=_ADAPTERS, lora='adapter')
  with caplog.at_level('INFO', 'ragen_jax'):
    write_policy(str(tmp_path / 'out'), _model(_ADAPTERS, critic=True), settings, with_value_head=True)
  assert "export.lora='merged' writes it" in caplog.text
  assert _head(str(tmp_path / 'out')) is None and not (tmp_path / 'out' / 'critic').exists()


def test_the_directory_that_the_model_comes_from_is_no_target(tmp_path):
  (tmp_path / 'model').mkdir()
  (tmp_path / 'link').symlink_to(tmp_path / 'model')
  check_output(str(tmp_path / 'other'), 'export.output', str(tmp_path / 'model'))
  for output in (tmp_path / 'model', tmp_path / 'link', f'{tmp_path}/model/../model/'):
    with pytest.raises(UserError, match=r'^sft\.output=.*: is where the model comes from; choose another directory$'):
      check_output(str(output), 'sft.output', str(tmp_path / 'model'))
