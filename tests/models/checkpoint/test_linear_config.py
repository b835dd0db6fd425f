"""Checkpoints of Qwen3.5: configs of the hub, text models, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from ragen_jax.models import presets
from ragen_jax.models.checkpoint.config import read_config
from ragen_jax.models.checkpoint.load import load_model
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.models.qwen_config import FULL, LINEAR
from ragen_jax.utils.errors import UserError
from tests.support.adapters import TOKENS, logits
from tests.support.checkpoints import HYBRID, edit_config, random_params

# What the text_config of the published files has in common.
_TEXT = {
  'attention_bias': False, 'attn_output_gate': True, 'eos_token_id': 248044, 'full_attention_interval': 4,
  'head_dim': 256, 'hidden_act': 'silu', 'linear_conv_kernel_dim': 4, 'linear_key_head_dim': 128,
  'linear_num_key_heads': 16, 'linear_value_head_dim': 128, 'mamba_ssm_dtype': 'float32',
  'max_position_embeddings': 262144, 'model_type': 'qwen3_5_text', 'mtp_num_hidden_layers': 1, 'rms_norm_eps': 1e-6,
  'vocab_size': 248320, 'rope_parameters': {
    'mrope_interleaved': True, 'mrope_section': [11, 11, 10], 'partial_rotary_factor': 0.25, 'rope_theta': 10000000,
    'rope_type': 'default',
  },
}  # fmt: skip


def hub_config(*, tied: bool, vision: tuple[int, int, int, int] = (27, 1152, 16, 4304), **text) -> dict:
  """`vision` are the depth of the tower, its width, its heads and the width of its MLP."""
  tower = dict(zip(('depth', 'hidden_size', 'num_heads', 'intermediate_size'), vision, strict=True))
  return {
    'architectures': ['Qwen3_5ForConditionalGeneration'], 'model_type': 'qwen3_5', 'image_token_id': 248056,
    'video_token_id': 248057, 'vision_start_token_id': 248053, 'vision_end_token_id': 248054,
    'tie_word_embeddings': tied, 'text_config': _TEXT | text,
    'vision_config': tower | {
      'model_type': 'qwen3_5', 'deepstack_visual_indexes': [], 'hidden_act': 'gelu_pytorch_tanh', 'in_channels': 3,
      'num_position_embeddings': 2304, 'out_hidden_size': text['hidden_size'], 'patch_size': 16,
      'spatial_merge_size': 2, 'temporal_patch_size': 2,
    },
  }  # fmt: skip


def test_published_configs_are_those_of_the_presets(tmp_path):
  """0.8B with the kinds of its layers, 27B with their interval."""
  small = hub_config(
    tied=True, vision=(12, 768, 12, 3072), hidden_size=1024, intermediate_size=3584, num_hidden_layers=24,
    num_attention_heads=8, num_key_value_heads=2, linear_num_value_heads=16,
    layer_types=[LINEAR, LINEAR, LINEAR, FULL] * 6,
  )  # fmt: skip
  large = hub_config(
    tied=False, hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24,
    num_key_value_heads=4, linear_num_value_heads=48,
  )  # fmt: skip
  for name, raw in (('qwen3.5-0.8b', small), ('qwen3.5-27b', large)):
    (tmp_path / 'config.json').write_text(json.dumps(raw))
    assert read_config(str(tmp_path)) == presets.shape(name, '')


@pytest.fixture
def hybrid(tmp_path):
  directory = tmp_path / 'hybrid'
  save_model(str(directory), random_params(HYBRID, 'bfloat16'), HYBRID, 'bfloat16')
  return directory


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'layer_types': [LINEAR, 'sliding_attention']}, "layer_types=['sliding_attention'] is not supported"),
    ({'layer_types': [LINEAR, LINEAR]}, 'both must occur'),
    ({'layer_types': [LINEAR, FULL, LINEAR]}, 'each of the 2 layers'),
    ({'layer_types': 'full_attention'}, "layer_types='full_attention' is not supported"),
    ({'layer_types': None, 'full_attention_interval': 0}, 'full_attention_interval=0 must be a positive integer'),
    ({'linear_num_value_heads': 3}, 'linear_num_value_heads=3 must be a multiple of linear_num_key_heads=2'),
    ({'linear_conv_kernel_dim': 1}, 'linear_conv_kernel_dim=1 must be at least 2'),
    ({'linear_key_head_dim': 4.5}, 'linear_key_head_dim=4.5 must be a positive integer'),
    ({'attn_output_gate': False}, 'attn_output_gate=False is not supported; only True is'),
    ({'output_gate_type': 'sigmoid'}, "output_gate_type='sigmoid' is not supported"),
    ({'attention_bias': True}, 'attention_bias=True is not supported'),
    ({'rope_parameters': {'partial_rotary_factor': 0.5}}, 'partial_rotary_factor=0.5 must make an even number'),
    ({'rope_parameters': {'partial_rotary_factor': 1, 'mrope_section': [1, 1, 0]}}, 'with the sum 3'),
    ({'rope_parameters': {'partial_rotary_factor': 1, 'mrope_section': [1, 1, '1']}}, 'whole numbers with the sum 3'),
    ({'rope_parameters': {'partial_rotary_factor': 1, 'mrope_section': [5, -1, -1]}}, 'whole numbers with the sum 3'),
    ({'rope_parameters': {'partial_rotary_factor': 1, 'mrope_interleaved': False}}, 'mrope_interleaved=False'),
    ({'rope_parameters': {'partial_rotary_factor': '0.25'}}, "partial_rotary_factor='0.25' must be a number above 0"),
    ({'rope_parameters': {'partial_rotary_factor': float('inf')}}, 'partial_rotary_factor=inf must be a number'),
    ({'rope_parameters': {'partial_rotary_factor': float('nan')}}, 'partial_rotary_factor=nan must be a number'),
    ({'rope_parameters': [1]}, 'rope_parameters=[1] must be an object'),
    (
      {'rope_parameters': {'rope_type': 'yarn', 'partial_rotary_factor': 1 / 3}},
      "rope_parameters.rope_type='yarn' is not supported",
    ),
    ({'quantization_config': {'quant_method': 'fp8'}}, "quantization_config={'quant_method': 'fp8'}"),
    ({'architectures': ['Qwen3_5MoeForConditionalGeneration']}, 'Qwen3_5MoeForConditionalGeneration'),
  ],
)
def test_configs_that_cannot_be_followed_are_one_line(hybrid, changes, words):
  edit_config(hybrid, **changes)
  with pytest.raises(UserError) as e:
    read_config(str(hybrid))
  assert words in str(e.value) and '\n' not in str(e.value)


@pytest.mark.parametrize('of_root, of_text', [(True, False), (False, True)])
def test_the_whole_file_says_whether_embeddings_are_tied_before_its_text_model_does(
  tmp_path, transformers, of_root, of_text
):
  small = hub_config(
    tied=of_root, tie_word_embeddings=of_text, hidden_size=32, intermediate_size=32, num_hidden_layers=4,
    num_attention_heads=2, num_key_value_heads=1, linear_num_value_heads=16, vision=(1, 16, 4, 8),
  )  # fmt: skip
  (tmp_path / 'config.json').write_text(json.dumps(small))
  cfg, theirs = read_config(str(tmp_path)), transformers.AutoConfig.from_pretrained(str(tmp_path))
  assert cfg.tie_word_embeddings is theirs.tie_word_embeddings is of_root


def test_what_a_file_leaves_out_is_what_transformers_takes(hybrid, transformers):
  fields = ('layer_types', 'head_dim', 'linear_num_key_heads', 'linear_num_value_heads', 'linear_key_head_dim',
            'linear_value_head_dim', 'linear_conv_kernel_dim')  # fmt: skip
  edit_config(hybrid, remove=(*fields, 'rope_parameters'), num_hidden_layers=8)
  cfg, theirs = read_config(str(hybrid)), transformers.AutoConfig.from_pretrained(str(hybrid))
  assert list(cfg.kinds) == theirs.layer_types == [LINEAR, LINEAR, LINEAR, FULL] * 2
  assert cfg.head_dim == theirs.head_dim and cfg.rope_width == theirs.rope_parameters['partial_rotary_factor'] * 256
  c = dataclasses.astuple(cfg.linear)
  assert c == tuple(getattr(theirs, name) for name in (*fields[2:],))


def test_types_of_a_file_come_back_and_decays_are_float32_in_any_case(hybrid, tmp_path):
  """As published: all in bfloat16 but A_log and the norm of the linear attention."""
  stored = load_file(hybrid / 'model.safetensors')
  wide = {name for name, x in stored.items() if x.dtype == np.float32}
  assert wide == {f'model.layers.0.linear_attn.{name}' for name in ('A_log', 'norm.weight')}
  assert stored['model.layers.0.linear_attn.dt_bias'].dtype == ml_dtypes.bfloat16
  for i, param_dtype in enumerate((jnp.float32, jnp.bfloat16)):
    model = load_model(str(hybrid), dtype=jnp.bfloat16, param_dtype=param_dtype)
    types = {path[-1]: x[...].dtype for path, x in nnx.to_flat_state(nnx.state(model))}
    assert types['A_log'] == types['dt_bias'] == jnp.float32 and types['conv1d'] == param_dtype
    save_model(str(tmp_path / f'again{i}'), model, model.cfg, 'bfloat16')
    again = load_file(tmp_path / f'again{i}' / 'model.safetensors')
    assert again.keys() == stored.keys()
    for name, x in stored.items():
      assert again[name].dtype == x.dtype
      np.testing.assert_array_equal(again[name], x, err_msg=name)


def test_the_head_for_several_tokens_is_left_out_and_the_tower_too_where_a_config_has_none(
  hybrid, tmp_path, transformers
):
  """Files of the hub, with their config or with the one that docs/models.md describes."""
  import torch

  text = transformers.AutoConfig.from_pretrained(str(hybrid)).to_dict()
  vision = {
    'depth': 1, 'hidden_size': 16, 'num_heads': 2, 'intermediate_size': 8, 'out_hidden_size': 16, 'patch_size': 4,
    'num_position_embeddings': 16,
  }  # fmt: skip
  config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
  theirs = transformers.Qwen3_5ForConditionalGeneration(config).float().eval()
  with torch.no_grad():
    for name, weight in theirs.named_parameters():
      noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
      weight.copy_(noise * (0.3 if weight.ndim < 2 else weight.shape[-1] ** -0.5))
  directory = tmp_path / 'hub'
  theirs.save_pretrained(str(directory))
  tensors = load_file(directory / 'model.safetensors')
  assert any(name.startswith('model.visual.') for name in tensors)
  assert 'model.language_model.layers.0.linear_attn.A_log' in tensors
  extra = {'mtp.fc.weight': np.zeros((16, 32), np.float32), 'mtp.layers.0.mlp.up_proj.weight': np.zeros((2, 2))}
  save_file(tensors | extra, directory / 'model.safetensors')
  with torch.no_grad():
    expected = theirs(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
  assert np.std(expected) > 0.3
  of_hub = json.loads((directory / 'config.json').read_text())
  of_text = of_hub['text_config'] | {
    'architectures': ['Qwen3_5ForCausalLM'], 'tie_word_embeddings': of_hub['tie_word_embeddings']
  }  # fmt: skip
  for config in (of_hub, of_text):
    (directory / 'config.json').write_text(json.dumps(config))
    ours = load_model(str(directory), dtype=jnp.float32, param_dtype=jnp.float32)
    assert (ours.visual is None) == (config is of_text) and dataclasses.replace(ours.cfg, vision=None) == HYBRID
    np.testing.assert_allclose(logits(ours, TOKENS), expected, rtol=0, atol=1e-4)
    save_file(tensors | {'model.audio.weight': np.zeros(2, np.float32)}, directory / 'model.safetensors')
    with pytest.raises(UserError, match=r'1 unexpected: model\..*audio.weight$'):
      load_model(str(directory), dtype=jnp.float32, param_dtype=jnp.float32)
    save_file(tensors | extra, directory / 'model.safetensors')
