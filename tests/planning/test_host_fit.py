"""A machine that is too small for an update is refused before weights are read, with a change that fits."""

from __future__ import annotations

import json
import re

import pytest

from ragen_jax import train
from ragen_jax.planning import host_fit
from ragen_jax.training import memory
from ragen_jax.utils.errors import UserError
from tests.support.configs import assert_refused, small_config

_SHAPE = {
  'architectures': ['Qwen2ForCausalLM'], 'model_type': 'qwen2', 'vocab_size': 32768, 'hidden_size': 512,
  'intermediate_size': 2048, 'num_hidden_layers': 4, 'num_attention_heads': 4, 'num_key_value_heads': 2,
  'tie_word_embeddings': True, 'rope_theta': 1e6, 'rms_norm_eps': 1e-6,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
  """Of a model without weights: no check may need them."""
  (tmp_path / 'config.json').write_text(json.dumps(_SHAPE))
  return small_config(
    model__path=str(tmp_path), model__logits_chunk=64, model__remat='auto', optimizer__packing=True,
    optimizer__mini_batch_size=8, optimizer__micro_batch_size=0, agent__max_context=2048,
  )  # fmt: skip


def _need(config):
  """Bytes of the update with the smallest sizes that a run would choose."""
  return host_fit._needed(config, host_fit.as_it_runs(config), 0)


def _changed(config, **fields):
  other = config.copy_and_resolve_references()
  with other.ignore_type():
    other.update_from_flattened_dict({name.replace('__', '.'): x for name, x in fields.items()})
  return other


def test_what_fits_is_not_refused_and_a_byte_less_is(config, monkeypatch):
  need = _need(config)
  monkeypatch.setattr(memory, 'usable', lambda: need)
  host_fit.check_host_memory(config)
  monkeypatch.setattr(memory, 'usable', lambda: need - 1)
  assert_refused(host_fit.check_host_memory, config, r'optimizer.micro_batch_size=0, .* GiB of this machine')


@pytest.mark.parametrize(
  ('own', 'change'),
  [
    ({'optimizer__micro_batch_size': 8}, {'optimizer__micro_batch_size': 4}),
    ({'optimizer__micro_batch_size': 8}, {'optimizer__micro_batch_size': 1}),
    ({'model__logits_chunk': 0}, {'model__logits_chunk': 256}),
    ({'model__remat': False}, {'model__remat': True}),
    ({}, {'lora__rank': 64, 'model__param_dtype': 'bfloat16'}),
  ],
)
@pytest.mark.slow_cases('own1-change1', 'own3-change3', 'own4-change4')
def test_the_message_names_a_change_that_fits(config, monkeypatch, own, change):
  config = _changed(config, **own)
  limit = _need(_changed(config, **change))
  monkeypatch.setattr(memory, 'usable', lambda: limit)
  with pytest.raises(UserError) as e:
    host_fit.check_host_memory(config)
  flags = ' '.join(f'--config.{name.replace("__", ".")}={x}' for name, x in change.items())
  assert re.search(f'fit with {re.escape(flags)}[ ,]', str(e.value)), str(e.value)
  host_fit.check_host_memory(_changed(config, **change))


@pytest.mark.slow
def test_several_changes_are_named_if_none_is_enough_and_a_larger_machine_if_all_are_not(config, monkeypatch):
  config = _changed(config, optimizer__micro_batch_size=8, model__remat=False)
  change = {'optimizer__micro_batch_size': 1, 'model__remat': True}
  limit = _need(_changed(config, **change))
  monkeypatch.setattr(memory, 'usable', lambda: limit)
  assert_refused(
    host_fit.check_host_memory, config, r'--config.optimizer.micro_batch_size=1 --config.model.remat=True,'
  )
  monkeypatch.setattr(memory, 'usable', lambda: 0)
  assert_refused(host_fit.check_host_memory, config, 'smaller model or a larger machine')


def test_a_run_is_refused_before_it_loads_weights(config, tmp_path, monkeypatch):
  monkeypatch.setattr(memory, 'usable', lambda: 0)
  monkeypatch.setattr(train.build, 'load_policy', lambda config: pytest.fail('loaded'))
  with pytest.raises(UserError, match='of this machine may be filled'):
    train._train(config, str(tmp_path / 'run'))


def test_plans_and_several_devices_are_not_refused(config, monkeypatch):
  monkeypatch.setattr(memory, 'usable', lambda: 0)
  host_fit.check_host_memory(_changed(config, model__attention='einsum'))
