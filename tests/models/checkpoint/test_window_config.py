"""Checkpoints of Gemma 3: configs of the hub, where any version of `transformers` puts fields, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ragen_jax.models import presets
from ragen_jax.models.checkpoint.config import read_config
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.models.qwen_config import FULL, WINDOWED, QwenConfig
from ragen_jax.models.rotary import LinearScaling
from ragen_jax.utils.errors import UserError
from tests.support.checkpoints import GEMMA, edit_config, random_params

# What published files of text models have in common.
_TEXT = {
  'architectures': ['Gemma3ForCausalLM'], 'attention_bias': False, 'attn_logit_softcapping': None,
  'cache_implementation': 'hybrid', 'eos_token_id': [1, 106], 'final_logit_softcapping': None, 'head_dim': 256,
  'hidden_activation': 'gelu_pytorch_tanh', 'max_position_embeddings': 32768, 'model_type': 'gemma3_text',
  'num_attention_heads': 4, 'num_key_value_heads': 1, 'query_pre_attn_scalar': 256, 'rms_norm_eps': 1e-6,
  'rope_local_base_freq': 10000, 'rope_scaling': None, 'rope_theta': 1000000, 'sliding_window': 512,
  'vocab_size': 262144,
}  # fmt: skip


def test_published_configs_are_those_of_the_presets(tmp_path):
  """The layers by their kinds, by their interval, and by the interval that a file lacks."""
  kinds = [*[WINDOWED] * 5, FULL] * 3
  small = _TEXT | {'hidden_size': 640, 'intermediate_size': 2048, 'num_hidden_layers': 18}
  large = _TEXT | {'hidden_size': 1152, 'intermediate_size': 6912, 'num_hidden_layers': 26}
  for name, raw in (
    ('gemma3-270m', small | {'layer_types': kinds, '_sliding_window_pattern': 6}),
    ('gemma3-1b', large | {'sliding_window_pattern': 6}),
    ('gemma3-1b', large),
  ):
    (tmp_path / 'config.json').write_text(json.dumps(raw))
    assert read_config(str(tmp_path)) == presets.shape(name, '')


@pytest.fixture
def saved(tmp_path):
  directory = tmp_path / 'gemma'
  save_model(str(directory), random_params(GEMMA), GEMMA, 'float32')
  return directory


_ROPE = ('rope_theta', 'rope_scaling', 'rope_local_base_freq')


@pytest.mark.parametrize(
  ('remove', 'changes', 'expected'),
  [
    (_ROPE, {}, {'rope_theta': 1e6, 'window_rope_theta': 1e4, 'rope_scaling': None}),
    (
      _ROPE,
      {'rope_parameters': {FULL: {'rope_type': 'linear', 'factor': 8.0}, WINDOWED: {'rope_theta': 20.0}}},
      {'rope_theta': 1e6, 'window_rope_theta': 20.0, 'rope_scaling': LinearScaling(8.0)},
    ),
    ((), {'query_pre_attn_scalar': GEMMA.head_dim}, {'query_scalar': 0}),
    (('tie_word_embeddings', 'query_pre_attn_scalar'), {}, {'query_scalar': 256}),
    (('layer_types',), {'sliding_window_pattern': 1}, {'layer_kinds': (FULL, FULL), 'window': 0}),
  ],
)
def test_fields_are_found_where_any_version_puts_them(saved, remove, changes, expected):
  edit_config(saved, remove=remove, **changes)
  assert read_config(str(saved)) == dataclasses.replace(GEMMA, **expected)


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'layer_types': [WINDOWED, 'linear_attention']}, "layer_types=['linear_attention'] is not supported"),
    ({'layer_types': [WINDOWED]}, 'each of the 2 layers'),
    ({'layer_types': 'full_attention'}, "layer_types='full_attention' is not supported"),
    ({'layer_types': None, 'sliding_window_pattern': 0}, 'sliding_window_pattern=0 must be a positive integer'),
    ({'sliding_window': None}, 'sliding_window=None must be a positive integer'),
    ({'query_pre_attn_scalar': 0}, 'query_pre_attn_scalar=0 must be a positive integer'),
    ({'attn_logit_softcapping': 50.0}, 'attn_logit_softcapping=50.0 is not supported'),
    ({'final_logit_softcapping': 30.0}, 'final_logit_softcapping=30.0 is not supported'),
    ({'use_bidirectional_attention': True}, 'use_bidirectional_attention=True is not supported'),
    ({'attention_bias': True}, 'attention_bias=True is not supported'),
    ({'hidden_activation': 'gelu'}, "hidden_activation='gelu' is not supported; only 'gelu_pytorch_tanh' is"),
    ({'rope_scaling': {'rope_type': 'yarn', 'factor': 8.0}}, "rope_type='yarn' is not supported; only 'default'"),
    ({'rope_scaling': 'linear'}, "rope_scaling='linear' must be an object"),
    ({'rope_scaling': {'rope_type': 'linear', 'factor': 0}}, 'factor=0 must be a positive number'),
    ({'rope_parameters': {'rope_theta': 1e6}}, "must have the objects 'full_attention' and 'sliding_attention'"),
    ({'rope_parameters': {FULL: 1e6}}, "must have the objects 'full_attention' and 'sliding_attention'"),
    ({'rope_parameters': {WINDOWED: {'rope_type': 'linear', 'factor': 8.0}}}, "rope_type='linear' is not supported"),
    # A model that reads images.
    ({'architectures': ['Gemma3ForConditionalGeneration'], 'model_type': 'gemma3'}, 'Gemma3ForCausalLM'),
    ({'architectures': ['Gemma2ForCausalLM'], 'model_type': 'gemma2'}, 'Gemma2ForCausalLM'),
  ],
)
def test_configs_that_cannot_be_followed_are_one_line(saved, changes, words):
  edit_config(saved, **changes)
  with pytest.raises(UserError) as e:
    read_config(str(saved))
  assert words in str(e.value) and '\n' not in str(e.value) and str(saved) in str(e.value)


@pytest.mark.parametrize('fields', [{'layer_kinds': (WINDOWED, FULL)}, {'window': 4}])
def test_a_window_goes_with_layers_that_have_it(fields):
  with pytest.raises(ValueError, match='window'):
    QwenConfig(architecture='gemma3', num_layers=2, **fields)
