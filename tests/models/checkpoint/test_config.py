"""Reading `config.json`: files of the hub, defaults of `transformers`, and unsupported models."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from ragen_jax.models.checkpoint.config import read_config
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.utils.errors import UserError
from tests.support.checkpoints import LLAMA, SMALL, edit_config, random_params


def write_hub_config(directory, **fields) -> str:
  """A config as the hub has it: what the published Qwen models have in common, and `fields`."""
  raw = {
    'hidden_act': 'silu', 'rms_norm_eps': 1e-06, 'rope_theta': 1_000_000, 'tie_word_embeddings': True,
    'use_sliding_window': False, 'vocab_size': 151936,
  }  # fmt: skip
  pathlib.Path(directory).mkdir(exist_ok=True)
  (pathlib.Path(directory) / 'config.json').write_text(json.dumps(raw | fields))
  return str(directory)


def test_configs_of_the_hub(tmp_path):
  instruct = write_hub_config(
    tmp_path / 'instruct', architectures=['Qwen2ForCausalLM'], attention_dropout=0.0, bos_token_id=151643,
    eos_token_id=151645, hidden_size=896, initializer_range=0.02, intermediate_size=4864, max_position_embeddings=32768,
    max_window_layers=21, model_type='qwen2', num_attention_heads=14, num_hidden_layers=24, num_key_value_heads=2,
    rope_theta=1000000.0, sliding_window=32768, torch_dtype='bfloat16', use_cache=True,
  )  # fmt: skip
  assert read_config(instruct) == QwenConfig()  # the defaults are Qwen2.5-0.5B
  qwen3 = write_hub_config(
    tmp_path / 'qwen3', architectures=['Qwen3ForCausalLM'], attention_bias=False, head_dim=128, hidden_size=1024,
    intermediate_size=3072, max_window_layers=28, model_type='qwen3', num_attention_heads=16, num_hidden_layers=28,
    num_key_value_heads=8, rope_scaling=None, sliding_window=None,
  )  # fmt: skip
  expected = {
    'vocab_size': 151936, 'hidden_size': 1024, 'intermediate_size': 3072, 'num_layers': 28, 'num_heads': 16,
    'num_kv_heads': 8, 'head_dim': 128, 'rope_theta': 1e6, 'rms_norm_eps': 1e-6, 'tie_word_embeddings': True,
  }  # fmt: skip
  assert read_config(qwen3) == QwenConfig(architecture='qwen3', **expected)


def test_defaults_are_those_of_transformers(checkpoint, transformers):
  def both():
    return read_config(checkpoint), transformers.AutoConfig.from_pretrained(checkpoint)

  remove = ('rope_theta', 'rms_norm_eps', 'tie_word_embeddings', 'head_dim', 'use_sliding_window')
  edit_config(checkpoint, remove=remove)
  cfg, theirs = both()
  assert cfg.rope_theta == theirs.rope_parameters['rope_theta'] == 10000.0
  assert cfg.rms_norm_eps == theirs.rms_norm_eps == 1e-6
  assert cfg.tie_word_embeddings is theirs.tie_word_embeddings is False
  assert cfg.head_dim == 16 // 4
  edit_config(checkpoint, architectures=['Qwen3ForCausalLM'], model_type='qwen3', num_key_value_heads=None)
  cfg, theirs = both()
  assert cfg.head_dim == theirs.head_dim == 128
  assert cfg.num_kv_heads == theirs.num_key_value_heads == 4


@pytest.mark.parametrize(
  ('remove', 'changes', 'theta'),
  [
    ((), {'rope_theta': 123.0}, 123.0),
    ((), {'rope_theta': 123.0, 'rope_scaling': None, 'rope_parameters': None}, 123.0),
    (('rope_theta',), {'rope_parameters': {'rope_type': 'default', 'rope_theta': 321.0}}, 321.0),
    ((), {'rope_theta': 123.0, 'rope_parameters': {'rope_theta': 321.0}}, 321.0),
    ((), {'rope_theta': 123.0, 'rope_scaling': {'type': 'default'}}, 123.0),
  ],
)
def test_rope_theta_is_found_where_any_version_puts_it(checkpoint, remove, changes, theta):
  edit_config(checkpoint, remove=remove, **changes)
  assert read_config(checkpoint).rope_theta == theta


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'architectures': ['MistralForCausalLM']}, ['architectures', 'MistralForCausalLM', 'LlamaForCausalLM']),
    ({'architectures': ['Qwen2MoeForCausalLM']}, ['Qwen2MoeForCausalLM']),
    ({'architectures': None, 'model_type': 'gpt2'}, ['architectures=None']),
    ({'model_type': 'qwen3'}, ['model_type', 'qwen3', 'qwen2']),
    ({'hidden_act': 'gelu'}, ['hidden_act', 'gelu', 'silu']),
    ({'quantization_config': {'quant_method': 'gptq'}}, ['quantization_config', 'gptq']),
    ({'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0}}, ['rope_scaling', 'yarn']),
    ({'rope_scaling': {'type': 'linear', 'factor': 2.0}}, ['rope_scaling', 'linear']),
    ({'rope_parameters': {'rope_type': 'dynamic', 'rope_theta': 1e6}}, ['rope_parameters', 'dynamic']),
    ({'rope_parameters': {'full_attention': {'rope_theta': 1e6}}}, ['rope_parameters', 'layer to layer']),
    ({'use_sliding_window': True, 'sliding_window': 8, 'max_window_layers': 1}, ['use_sliding_window']),
    ({'layer_types': ['full_attention', 'sliding_attention']}, ['layer_types', 'sliding_attention']),
    ({'layer_types': True}, ['layer_types', 'True']),
    ({'architectures': [['Qwen2ForCausalLM']]}, ['architectures', 'Qwen2ForCausalLM']),
    (
      {'architectures': ['Qwen3ForCausalLM'], 'model_type': 'qwen3', 'attention_bias': True},
      ['attention_bias', 'True'],
    ),
    ({'num_key_value_heads': 3}, ['num_key_value_heads=3', 'num_attention_heads=4']),
    ({'head_dim': 5}, ['head_dim=5', 'even']),
    ({'hidden_size': '16'}, ["hidden_size='16'", 'positive integer']),
    ({'vocab_size': None}, ['vocab_size=None']),
    ({'rms_norm_eps': -1e-6}, ['rms_norm_eps=-1e-06', 'positive number']),
    ({'rms_norm_eps': None}, ['rms_norm_eps=None', 'positive number']),
    ({'rms_norm_eps': '1e-6'}, ["rms_norm_eps='1e-6'", 'positive number']),
    ({'rope_theta': [1e4]}, ['rope_theta=[10000.0]', 'positive number']),
    ({'rope_scaling': 'linear'}, ["rope_scaling='linear'", 'object']),
    ({'rope_scaling': {'rope_type': None, 'factor': 2.0}}, ['rope_scaling.rope_type=None', "'default'"]),
  ],
)
def test_configs_that_these_models_cannot_follow_are_refused_by_name(checkpoint, changes, words):
  edit_config(checkpoint, **changes)
  with pytest.raises(UserError) as error:
    read_config(checkpoint)
  message = str(error.value)
  assert '\n' not in message and checkpoint in message
  for word in words:
    assert word in message


_LLAMA3 = {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
           'original_max_position_embeddings': 64}  # fmt: skip


@pytest.mark.parametrize(
  ('remove', 'changes', 'theta'),
  [
    ((), {'rope_theta': 123.0, 'rope_scaling': _LLAMA3}, 123.0),
    (('rope_theta', 'rope_scaling'), {'rope_parameters': {'rope_theta': 321.0, **_LLAMA3}}, 321.0),
  ],
)
def test_llama_3_s_scaling_is_found_where_any_version_puts_it(tmp_path, remove, changes, theta):
  directory = str(tmp_path / 'llama')
  save_model(directory, random_params(LLAMA), LLAMA, 'float32')
  edit_config(directory, remove=remove, **changes)
  assert read_config(directory) == dataclasses.replace(LLAMA, rope_theta=theta)


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'attention_bias': True}, ['attention_bias=True', 'must have no bias']),
    ({'mlp_bias': True}, ['mlp_bias=True', 'must have no bias']),
    ({'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0}}, ['rope_scaling', "'yarn'", "'default'", "'llama3'"]),
    ({'rope_scaling': {'type': 'linear', 'factor': 2.0}}, ['rope_scaling', "'linear'", "'llama3'"]),
    ({'rope_scaling': _LLAMA3 | {'factor': None}}, ['rope_scaling.factor=None', 'positive']),
    ({'rope_scaling': _LLAMA3 | {'low_freq_factor': True}}, ['low_freq_factor=True', 'positive']),
    ({'rope_scaling': _LLAMA3 | {'original_max_position_embeddings': -64}}, ['original_max_position_embeddings=-64']),
    ({'rope_scaling': _LLAMA3 | {'high_freq_factor': 1.0}}, ['high_freq_factor=1.0', 'low_freq_factor=1.0']),
    ({'partial_rotary_factor': 0.5}, ['partial_rotary_factor=0.5', '1.0']),
    ({'architectures': ['Qwen2ForCausalLM'], 'model_type': 'qwen2'}, ["rope_scaling.rope_type='llama3'", "'default'"]),
  ],
)
def test_llama_configs_that_cannot_be_followed_are_refused_by_name(tmp_path, changes, words):
  directory = str(tmp_path / 'llama')
  save_model(directory, random_params(LLAMA), LLAMA, 'float32')
  edit_config(directory, **changes)
  with pytest.raises(UserError) as error:
    read_config(directory)
  message = str(error.value)
  assert '\n' not in message and directory in message
  for word in words:
    assert word in message


def test_a_sliding_window_that_no_layer_has_is_accepted(checkpoint):
  edit_config(checkpoint, use_sliding_window=True, sliding_window=8, max_window_layers=2)
  assert read_config(checkpoint) == SMALL


def test_a_config_that_is_not_json_or_not_there(tmp_path):
  for content, message in (
    (None, r'config\.json: cannot be read \(No such file'),
    ('{"a":', 'is not JSON'),
    ('[]', 'must hold a JSON object, not list'),
  ):
    if content is not None:
      (tmp_path / 'config.json').write_text(content)
    with pytest.raises(UserError, match=message):
      read_config(str(tmp_path))
