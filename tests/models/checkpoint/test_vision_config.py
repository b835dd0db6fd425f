"""Checkpoints of models that read images: configs, names of tensors, exports that `transformers` opens, adapters."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from ragen_jax.models import lora, presets
from ragen_jax.models.checkpoint import peft as adapter_files
from ragen_jax.models.checkpoint.config import hf_config, read_config, write_json
from ragen_jax.models.checkpoint.load import load_model, load_params
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.models.vision.config import QWEN2_5_VL, QWEN3_5, QWEN3_VL
from ragen_jax.utils.errors import UserError
from tests.support.checkpoints import assert_identical, contents, edit_config
from tests.support.vision import conversation

_PRESETS = (
  'qwen2.5-vl-3b', 'qwen2.5-vl-7b', 'qwen3-vl-2b', 'qwen3-vl-4b', 'qwen3-vl-8b', 'qwen3.5-0.8b', 'qwen3.5-27b',
  'qwen3.5-35b-a3b',
)  # fmt: skip


@pytest.mark.parametrize('preset', _PRESETS)
def test_a_config_that_is_written_is_read(tmp_path, preset):
  cfg = presets.shape(preset, '')
  raw = hf_config(cfg, np.dtype('float32'), None)
  write_json(str(tmp_path / 'config.json'), raw)
  assert read_config(str(tmp_path)) == cfg
  assert ('text_config' in raw) == (cfg.vision.family != QWEN2_5_VL)
  if 'text_config' in raw:
    assert raw['text_config']['model_type'] == f'{raw["model_type"]}_text'


def test_published_configs(tmp_path):
  """As the hub has them: Qwen2.5-VL flat, with older names; Qwen3-VL nested."""
  ids = {'image_token_id': 151655, 'video_token_id': 151656, 'vision_start_token_id': 151652,
         'vision_end_token_id': 151653}  # fmt: skip
  flat = ids | {
    'architectures': ['Qwen2_5_VLForConditionalGeneration'], 'model_type': 'qwen2_5_vl', 'hidden_act': 'silu',
    'hidden_size': 2048, 'intermediate_size': 11008, 'max_window_layers': 70, 'num_attention_heads': 16,
    'num_hidden_layers': 36, 'num_key_value_heads': 2, 'rms_norm_eps': 1e-06, 'rope_theta': 1000000.0,
    'sliding_window': 32768, 'tie_word_embeddings': True, 'use_sliding_window': False, 'vocab_size': 151936,
    'rope_scaling': {'type': 'mrope', 'mrope_section': [16, 24, 24]}, 'vision_token_id': 151654,
    'vision_config': {
      'depth': 32, 'hidden_act': 'silu', 'hidden_size': 1280, 'intermediate_size': 3420, 'num_heads': 16,
      'in_chans': 3, 'out_hidden_size': 2048, 'patch_size': 14, 'spatial_merge_size': 2, 'spatial_patch_size': 14,
      'window_size': 112, 'fullatt_block_indexes': [7, 15, 23, 31], 'tokens_per_second': 2, 'temporal_patch_size': 2,
    },
  }  # fmt: skip
  write_json(str(tmp_path / 'config.json'), flat)
  assert read_config(str(tmp_path)) == presets.shape('qwen2.5-vl-3b', '')
  nested = ids | {
    'architectures': ['Qwen3VLForConditionalGeneration'], 'model_type': 'qwen3_vl', 'tie_word_embeddings': True,
    'text_config': {
      'attention_bias': False, 'head_dim': 128, 'hidden_act': 'silu', 'hidden_size': 2048, 'intermediate_size': 6144,
      'model_type': 'qwen3_vl_text', 'num_attention_heads': 16, 'num_hidden_layers': 28, 'num_key_value_heads': 8,
      'rms_norm_eps': 1e-06, 'rope_theta': 5000000, 'vocab_size': 151936, 'tie_word_embeddings': True,
      'rope_scaling': {'mrope_interleaved': True, 'mrope_section': [24, 20, 20], 'rope_type': 'default'},
    },
    'vision_config': {
      'deepstack_visual_indexes': [5, 11, 17], 'depth': 24, 'hidden_act': 'gelu_pytorch_tanh', 'hidden_size': 1024,
      'in_channels': 3, 'intermediate_size': 4096, 'model_type': 'qwen3_vl', 'num_heads': 16,
      'num_position_embeddings': 2304, 'out_hidden_size': 2048, 'patch_size': 16, 'spatial_merge_size': 2,
      'temporal_patch_size': 2,
    },
  }  # fmt: skip
  write_json(str(tmp_path / 'config.json'), nested)
  assert read_config(str(tmp_path)) == presets.shape('qwen3-vl-2b', '')


@pytest.mark.parametrize(
  ('family', 'part', 'change', 'message'),
  [
    (QWEN2_5_VL, '', {'vision_config': None}, r'vision_config=None must describe the vision tower of a qwen2_5_vl'),
    (QWEN3_VL, '', {'vision_config': {}}, r'vision_config=\{\} must describe'),
    (QWEN3_VL, 'vision_config', {'depth': 0}, r'vision_config: depth=0 must be a positive integer'),
    (QWEN3_VL, 'vision_config', {'hidden_act': 'silu'}, r"hidden_act='silu' is not supported; only 'gelu_py"),
    (QWEN3_VL, 'vision_config', {'in_channels': 1}, r'in_channels=1 is not supported; only 3 is'),
    (QWEN3_VL, 'vision_config', {'out_hidden_size': 99}, r'out_hidden_size=99 must be the hidden_size=2048'),
    (QWEN3_VL, 'vision_config', {'num_heads': 7}, r'hidden_size=1024 must be a multiple of 4 num_heads=28'),
    (QWEN3_VL, 'vision_config', {'num_position_embeddings': 7}, r'num_position_embeddings=7 must be a square number'),
    (QWEN3_VL, 'vision_config', {'deepstack_visual_indexes': [24]}, r'=\[24\] must be ascending indices of the 24'),
    (QWEN3_VL, 'vision_config', {'deepstack_visual_indexes': [[5]]}, r'=\[\[5\]\] must be ascending indices of the 24'),
    (QWEN3_VL, 'text_config', {'num_hidden_layers': 2}, r'deepstack_visual_indexes names more blocks than'),
    (QWEN3_VL, 'text_config', {'rope_scaling': {'mrope_section': [1, 2]}}, r'mrope_section=\[1, 2\] must be 3 numbers'),
    (QWEN3_VL, 'text_config', {'rope_scaling': {'mrope_section': ['24', 20, 20]}}, r"=\['24', 20, 20\] must be 3"),
    (QWEN3_5, '', {'vision_config': None}, r'vision_config=None must describe the vision tower of a qwen3_5 model'),
    (QWEN3_5, '', {'text_config': [1]}, r'text_config=\[1\] must be an object'),
    (QWEN3_5, 'vision_config', {'num_position_embeddings': 7}, r'num_position_embeddings=7 must be a square number'),
    (QWEN3_5, '', {'quantization_config': {'bits': 4}}, r'quantization_config=.* is not supported'),
    (QWEN2_5_VL, 'vision_config', {'window_size': 27}, r'window_size=27 is less than the pixels of a token'),
    (QWEN2_5_VL, '', {'num_attention_heads': 8, 'head_dim': 128}, r'head_dim=128 must be hidden_size / num_attention'),
    (QWEN2_5_VL, '', {'quantization_config': {'bits': 4}}, r'quantization_config=.* is not supported'),
    (QWEN2_5_VL, '', {'use_sliding_window': True, 'max_window_layers': 2}, r'use_sliding_window=True is not supported'),
  ],
)  # fmt: skip
def test_configs_that_are_refused(tmp_path, family, part, change, message):
  preset = {QWEN2_5_VL: 'qwen2.5-vl-3b', QWEN3_VL: 'qwen3-vl-2b', QWEN3_5: 'qwen3.5-0.8b'}[family]
  raw = hf_config(presets.shape(preset, ''), np.dtype('float32'), None)
  (raw[part] if part else raw).update(change)
  write_json(str(tmp_path / 'config.json'), raw)
  with pytest.raises(UserError, match=message) as error:
    read_config(str(tmp_path))
  assert '\n' not in str(error.value) and 'config.json' in str(error.value)


def _renamed(directory: str, target: pathlib.Path, *pairs: tuple[str, str]) -> str:
  """A copy of a checkpoint with other beginnings of names."""
  shutil.copytree(directory, target)
  tensors = {}
  for name, x in load_file(target / 'model.safetensors').items():
    old, new = next((pair for pair in pairs if name.startswith(pair[0])), ('', ''))
    tensors[new + name.removeprefix(old)] = x
  save_file(tensors, target / 'model.safetensors')
  return str(target)


@pytest.mark.slow_cases('qwen3_vl')
def test_names_of_older_and_newer_transformers_are_read(pair, tmp_path):
  nested = (('visual.', 'model.visual.'), ('model.', 'model.language_model.'))
  pairs = nested if pair.family == QWEN2_5_VL else [(b, a) for a, b in nested]
  other = _renamed(pair.directory, tmp_path / 'other', *pairs)
  before, after = (set(load_file(f'{d}/model.safetensors')) for d in (pair.directory, other))
  assert before != after and before & after <= {'lm_head.weight'}
  cfg = read_config(other)
  assert_identical(load_params(other, cfg, jnp.float32), load_params(pair.directory, cfg, jnp.float32))


def test_a_checkpoint_without_its_tower_is_one_line(pair, tmp_path):
  other = _renamed(pair.directory, tmp_path / 'other')
  file = pathlib.Path(other) / 'model.safetensors'
  save_file({name: x for name, x in load_file(file).items() if 'visual.' not in name}, file)
  with pytest.raises(
    UserError, match=r'other: has no vision tower, which config\.json describes: \S*visual\.\S+ is missing$'
  ):
    load_model(other, dtype=jnp.float32, param_dtype=jnp.float32)
  # Of a tower with holes, as of a decoder, the missing tensors are named.
  tensors = load_file(f'{pair.directory}/model.safetensors')
  hole = next(name for name in tensors if name.endswith('visual.blocks.1.norm2.weight'))
  save_file({name: x for name, x in tensors.items() if name != hole}, file)
  with pytest.raises(UserError, match=rf'1 missing: {hole}$'):
    load_model(other, dtype=jnp.float32, param_dtype=jnp.float32)


def test_transformers_opens_an_export_with_the_same_bits(pair, tmp_path, transformers):
  import torch

  out = str(tmp_path / 'out')
  source = json.loads((pathlib.Path(pair.directory) / 'config.json').read_text())
  source['vision_config']['tokens_per_second'] = 7
  edit_config(pair.directory, **source)
  save_model(out, pair.ours, pair.ours.cfg, 'float32', tokenizer_dir=pair.directory, max_shard_bytes=50_000)
  files = contents(out)
  assert files['preprocessor_config.json'] == contents(pair.directory)['preprocessor_config.json']
  assert read_config(out) == pair.ours.cfg and len(files) > 5
  theirs, report = type(pair.theirs).from_pretrained(out, output_loading_info=True, dtype=torch.float32)
  assert not any(report[kind] for kind in ('missing_keys', 'unexpected_keys', 'mismatched_keys')), report
  expected = dict(pair.theirs.named_parameters())
  found = dict(theirs.named_parameters())
  assert found.keys() == expected.keys()
  for name, weight in found.items():
    assert torch.equal(weight, expected[name]), name
  assert theirs.config.vision_config.tokens_per_second == 7
  # The rest of the config is right too: the same logits with images, of which one is wider than a window.
  row = conversation(((12, 18), (4, 6)), pair.ours.cfg.vision.patch_values, (2, 3, 1))
  tokens = torch.tensor(row.tokens)[None]
  inputs = {
    'input_ids': tokens,
    'mm_token_type_ids': (tokens == pair.ours.cfg.vision.image_token_id).int(),
    'pixel_values': torch.tensor(np.concatenate(row.patches)),
    'image_grid_thw': torch.tensor([[1, *grid] for grid in row.grids]),
  }
  # Experts that are loaded are multiplied in another way than those that are made.
  before = type(pair.theirs).from_pretrained(pair.directory, dtype=torch.float32)
  with torch.no_grad():
    assert torch.equal(theirs.eval()(**inputs).logits, before.eval()(**inputs).logits)
  # What is loaded again is written again with the same bytes.
  again = load_model(out, dtype=jnp.float32, param_dtype=jnp.float32)
  save_model(str(tmp_path / 'again'), again, again.cfg, 'float32', tokenizer_dir=out, max_shard_bytes=50_000)
  assert contents(tmp_path / 'again') == files


def test_what_a_file_leaves_out_is_what_transformers_takes(pair, tmp_path, transformers):
  shutil.copytree(pair.directory, tmp_path / 'other')
  raw = json.loads((tmp_path / 'other' / 'config.json').read_text())
  text = raw['text_config']
  for field in ('rope_parameters', 'rms_norm_eps'):
    del text[field]
  text |= {'hidden_size': 512, 'head_dim': 128}
  raw['vision_config']['out_hidden_size'] = 512
  ids = ('image_token_id', 'video_token_id', 'vision_start_token_id', 'vision_end_token_id')
  edit_config(tmp_path / 'other', remove=ids, **{field: x for field, x in raw.items() if field not in ids})
  cfg = read_config(str(tmp_path / 'other'))
  theirs = transformers.AutoConfig.from_pretrained(tmp_path / 'other')
  assert [getattr(cfg.vision, name) for name in ids] == [getattr(theirs, name) for name in ids]
  theirs = theirs.text_config
  assert cfg.rms_norm_eps == theirs.rms_norm_eps
  assert cfg.rope_theta == theirs.rope_parameters['rope_theta']
  # Of the rotated quarter of a head of Qwen3.5, the axes take turns.
  assert cfg.rope_sections == {QWEN2_5_VL: (16, 24, 24), QWEN3_VL: (24, 20, 20)}.get(pair.family, (6, 5, 5))


@pytest.mark.slow_cases('qwen2_5_vl')
def test_peft_opens_adapters_of_the_decoder(pair, tmp_path):
  import torch

  peft = pytest.importorskip('peft', reason='the comparison with PEFT needs it')
  graphdef, params = nnx.split(pair.ours)
  model = nnx.merge(graphdef, params)
  config = lora.LoraConfig(2, 3, lora.TARGETS)
  lora.attach(model, config, nnx.Rngs(0))
  rng = np.random.default_rng(0)
  for adapter in lora.adapters(model).values():
    adapter.lora_b.set_value(jnp.asarray(rng.normal(size=adapter.lora_b.shape), jnp.float32))
  directory = str(tmp_path / 'adapter')
  adapter_files.save(directory, model, config, 'float32', base=pair.directory, tokenizer_dir=pair.directory)
  assert adapter_files.read_config(directory) == config

  base = type(pair.theirs).from_pretrained(pair.directory, dtype=torch.float32)
  theirs = peft.PeftModel.from_pretrained(base, directory).merge_and_unload()
  save_model(str(tmp_path / 'merged'), model, model.cfg, 'float32')
  merged = type(pair.theirs).from_pretrained(str(tmp_path / 'merged'), dtype=torch.float32)
  before, expected = dict(pair.theirs.named_parameters()), dict(theirs.named_parameters())
  changed = 0
  for name, weight in merged.named_parameters():
    np.testing.assert_allclose(weight.detach(), expected[name].detach(), rtol=0, atol=1e-5, err_msg=name)
    changed += not torch.equal(weight, before[name])
    assert 'visual' not in name or torch.equal(weight, before[name])
  assert changed == len(lora.adapters(model)) >= 7 * model.cfg.attention_layers
  again = nnx.merge(graphdef, params)
  lora.attach(again, config, nnx.Rngs(1))
  adapter_files.load(directory, again)
  for path, adapter in lora.adapters(again).items():
    np.testing.assert_array_equal(adapter.lora_b[...], lora.adapters(model)[path].lora_b[...])


@pytest.mark.parametrize('family', [QWEN2_5_VL, QWEN3_VL])
def test_a_text_model_has_no_tensors_of_a_tower(tmp_path, checkpoint, family):
  file = pathlib.Path(checkpoint) / 'model.safetensors'
  save_file(load_file(file) | {f'{"model." * (family == QWEN3_VL)}visual.norm': np.zeros(2, np.float32)}, file)
  with pytest.raises(UserError, match=r'1 unexpected: (model\.)?visual\.norm$'):
    load_model(checkpoint, dtype=jnp.float32, param_dtype=jnp.float32)
