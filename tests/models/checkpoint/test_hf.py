"""Checkpoints: what we load is what was stored, what we store is what `transformers` opens, and errors say it all."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from configs import default
from ragen_jax import build
from ragen_jax.models import presets
from ragen_jax.models.checkpoint import hf
from ragen_jax.models.qwen import Qwen, QwenConfig
from ragen_jax.models.value_head import ValueHead
from ragen_jax.utils.errors import UserError
from tests.support.paths import ROOT

SMALL = QwenConfig(
  vocab_size=70,
  hidden_size=16,
  intermediate_size=24,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  rope_theta=5e4,
  rms_norm_eps=1e-5,
)
SMALL3 = QwenConfig(**(vars(SMALL) | {'architecture': 'qwen3', 'tie_word_embeddings': False}))


def random_params(cfg: QwenConfig, param_dtype='float32', seed: int = 0) -> nnx.State:
  abstract = nnx.state(nnx.eval_shape(lambda: Qwen(cfg, param_dtype=param_dtype, rngs=nnx.Rngs(0))))
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), abstract)


def flat(params: nnx.State) -> dict:
  return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(params)}


def assert_identical(a: nnx.State, b: nnx.State):
  a, b = flat(a), flat(b)
  assert a.keys() == b.keys()
  for path in a:
    assert a[path].dtype == b[path].dtype, path
    np.testing.assert_array_equal(a[path], b[path], err_msg=str(path))


def contents(directory) -> dict[str, bytes]:
  return {name: (pathlib.Path(directory) / name).read_bytes() for name in os.listdir(directory)}


def edit_config(directory, remove=(), **changes):
  path = pathlib.Path(directory) / 'config.json'
  raw = {k: v for k, v in json.loads(path.read_text()).items() if k not in remove}
  path.write_text(json.dumps(raw | changes))


@pytest.fixture
def checkpoint(tmp_path):
  """A small Qwen2 checkpoint with tied embeddings, in one file."""
  directory = tmp_path / 'checkpoint'
  hf.save_model(str(directory), random_params(SMALL), SMALL, 'float32')
  return str(directory)


@pytest.fixture
def tokenizer_dir(tmp_path):
  directory = tmp_path / 'tokenizer'
  directory.mkdir()
  tokens = [{'id': 60, 'content': '<pad>'}, {'id': 61, 'content': '<end>'}]
  (directory / 'tokenizer.json').write_text(json.dumps({'added_tokens': tokens}))
  (directory / 'tokenizer_config.json').write_text(
    json.dumps({'eos_token': {'content': '<end>'}, 'pad_token': '<pad>', 'bos_token': None})
  )
  (directory / 'unrelated.py').write_text('raise SystemExit')
  return str(directory)


# -- round trips -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('cfg', [SMALL, SMALL3], ids=['qwen2', 'qwen3'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('max_shard_bytes', [1 << 30, 3000], ids=['single', 'sharded'])
def test_what_is_saved_is_loaded_bit_for_bit(tmp_path, cfg, dtype, max_shard_bytes):
  params = random_params(cfg, dtype)
  hf.save_model(str(tmp_path / 'out'), params, cfg, dtype, max_shard_bytes=max_shard_bytes)
  files = [name for name in os.listdir(tmp_path / 'out') if name.endswith('.safetensors')]
  assert (len(files) == 1) == (max_shard_bytes == 1 << 30)
  assert all(os.path.getsize(tmp_path / 'out' / f) < 3000 + 4000 for f in files) or len(files) == 1
  assert hf.read_config(str(tmp_path / 'out')) == cfg
  assert_identical(hf.load_params(str(tmp_path / 'out'), cfg, dtype), params)


def test_a_loaded_model_has_its_dtypes_and_a_pure_dict_can_be_saved(tmp_path):
  params = random_params(SMALL, 'bfloat16')
  hf.save_model(str(tmp_path / 'out'), nnx.to_pure_dict(params), SMALL, jnp.bfloat16)
  model = hf.load_model(str(tmp_path / 'out'), dtype=jnp.bfloat16, param_dtype=jnp.float32, attend_by_row=True)
  assert model.cfg == SMALL and model.dtype == jnp.bfloat16 and model.layers[1].self_attn.by_row
  assert_identical(nnx.state(model), jax.tree.map(lambda x: x.astype(jnp.float32), params))
  # A whole model is saved like its state.
  hf.save_model(str(tmp_path / 'again'), model, SMALL, 'bfloat16')
  assert contents(tmp_path / 'again') == contents(tmp_path / 'out')


def test_no_fresh_weights_are_made_while_loading(checkpoint, monkeypatch):
  drawn = []
  normal = jax.random.normal

  def spy(key, shape, dtype):
    drawn.append(isinstance(key, jax.core.Tracer))
    return normal(key, shape, dtype)

  monkeypatch.setattr(jax.random, 'normal', spy)
  hf.load_model(checkpoint, dtype=jnp.float32, param_dtype=jnp.float32)
  assert drawn and all(drawn)


# -- against transformers ----------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def transformers():
  torch = pytest.importorskip('torch', reason='the comparison with transformers needs PyTorch')
  torch.set_num_threads(1)
  import transformers

  return transformers


@pytest.mark.parametrize('cfg', [SMALL, SMALL3], ids=['qwen2', 'qwen3'])
def test_transformers_opens_an_export_and_gives_the_same_logits(tmp_path, tokenizer_dir, cfg, transformers):
  import torch

  out = str(tmp_path / 'out')
  hf.save_model(out, random_params(cfg), cfg, 'float32', tokenizer_dir=tokenizer_dir, max_shard_bytes=3000)
  assert not os.path.exists(os.path.join(out, 'unrelated.py'))
  for file in pathlib.Path(out).glob('*.safetensors'):
    with safe_open(file, framework='np') as tensors:
      assert tensors.metadata() == {'format': 'pt'}
  theirs, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
  assert not any(report[kind] for kind in ('missing_keys', 'unexpected_keys', 'mismatched_keys')), report
  assert type(theirs).__name__ == {'qwen2': 'Qwen2ForCausalLM', 'qwen3': 'Qwen3ForCausalLM'}[cfg.architecture]
  assert theirs.dtype == torch.float32
  assert (theirs.config.eos_token_id, theirs.config.pad_token_id) == (61, 60)
  assert theirs.generation_config.eos_token_id == 61

  ours = hf.load_model(out, dtype=jnp.float32, param_dtype=jnp.float32)
  tokens = np.random.default_rng(0).integers(0, 60, (2, 9))
  with torch.no_grad():
    expected = theirs(torch.tensor(tokens)).logits.numpy()
  logits = nnx.jit(lambda model: model.logits(model(model.embed(jnp.asarray(tokens)))[0]))(ours)
  assert np.std(expected) > 0.5
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.std(expected))


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_shards_written_by_transformers_are_read_as_they_are(tmp_path, dtype, transformers):
  import torch

  config = transformers.Qwen3Config(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    rope_parameters={'rope_type': 'default', 'rope_theta': 777.0},
    rms_norm_eps=1e-3,
  )
  theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
  theirs.save_pretrained(tmp_path, max_shard_size='2KB')
  assert len(list(tmp_path.glob('*.safetensors'))) > 2
  cfg = hf.read_config(str(tmp_path))
  assert (cfg.architecture, cfg.rope_theta, cfg.rms_norm_eps, cfg.head_dim) == ('qwen3', 777.0, 1e-3, 6)
  assert not cfg.tie_word_embeddings
  loaded = flat(hf.load_params(str(tmp_path), cfg, jnp.float32))
  expected = {name: weight.detach().float().numpy() for name, weight in theirs.named_parameters()}
  plan = hf.weights(cfg)
  assert {w.name for w in plan} == set(expected)
  for w in plan:
    np.testing.assert_array_equal(w.to_hf(loaded[w.path]), expected[w.name], err_msg=w.name)


def test_export_keeps_what_the_source_says_beyond_the_shape(tmp_path, checkpoint):
  edit_config(checkpoint, eos_token_id=[61, 60], bos_token_id=59, max_position_embeddings=4096, auto_map={'x': 'y.Z'})
  (pathlib.Path(checkpoint) / 'generation_config.json').write_text('{"temperature": 0.7}')
  hf.save_model(str(tmp_path / 'out'), random_params(SMALL), SMALL, 'bfloat16', tokenizer_dir=checkpoint)
  raw = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert (raw['eos_token_id'], raw['bos_token_id'], raw['max_position_embeddings']) == ([61, 60], 59, 4096)
  assert raw['torch_dtype'] == 'bfloat16'
  assert 'auto_map' not in raw, 'it names code'
  assert json.loads((tmp_path / 'out' / 'generation_config.json').read_text()) == {'temperature': 0.7}


# -- config.json -------------------------------------------------------------------------------------------------------


def write_config(directory, **raw) -> str:
  pathlib.Path(directory).mkdir(exist_ok=True)
  (pathlib.Path(directory) / 'config.json').write_text(json.dumps(raw))
  return str(directory)


def test_configs_of_the_hub(tmp_path):
  instruct = write_config(
    tmp_path / 'instruct',
    architectures=['Qwen2ForCausalLM'],
    attention_dropout=0.0,
    bos_token_id=151643,
    eos_token_id=151645,
    hidden_act='silu',
    hidden_size=896,
    initializer_range=0.02,
    intermediate_size=4864,
    max_position_embeddings=32768,
    max_window_layers=21,
    model_type='qwen2',
    num_attention_heads=14,
    num_hidden_layers=24,
    num_key_value_heads=2,
    rms_norm_eps=1e-06,
    rope_theta=1000000.0,
    sliding_window=32768,
    tie_word_embeddings=True,
    torch_dtype='bfloat16',
    use_cache=True,
    use_sliding_window=False,
    vocab_size=151936,
  )
  assert hf.read_config(instruct) == QwenConfig()  # the defaults are Qwen2.5-0.5B
  qwen3 = write_config(
    tmp_path / 'qwen3',
    architectures=['Qwen3ForCausalLM'],
    attention_bias=False,
    head_dim=128,
    hidden_act='silu',
    hidden_size=1024,
    intermediate_size=3072,
    max_window_layers=28,
    model_type='qwen3',
    num_attention_heads=16,
    num_hidden_layers=28,
    num_key_value_heads=8,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=None,
    tie_word_embeddings=True,
    use_sliding_window=False,
    vocab_size=151936,
  )
  assert hf.read_config(qwen3) == QwenConfig(
    architecture='qwen3',
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
  )


def test_defaults_are_those_of_transformers(checkpoint, transformers):
  remove = ('rope_theta', 'rms_norm_eps', 'tie_word_embeddings', 'head_dim', 'use_sliding_window')
  edit_config(checkpoint, remove=remove)
  cfg, theirs = hf.read_config(checkpoint), transformers.AutoConfig.from_pretrained(checkpoint)
  assert cfg.rope_theta == theirs.rope_parameters['rope_theta'] == 10000.0
  assert cfg.rms_norm_eps == theirs.rms_norm_eps == 1e-6
  assert cfg.tie_word_embeddings is theirs.tie_word_embeddings is False
  assert cfg.head_dim == 16 // 4
  edit_config(checkpoint, architectures=['Qwen3ForCausalLM'], model_type='qwen3', num_key_value_heads=None)
  cfg, theirs = hf.read_config(checkpoint), transformers.AutoConfig.from_pretrained(checkpoint)
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
  assert hf.read_config(checkpoint).rope_theta == theta


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'architectures': ['LlamaForCausalLM']}, ['architectures', 'LlamaForCausalLM', 'Qwen2ForCausalLM']),
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
    (
      {'architectures': ['Qwen3ForCausalLM'], 'model_type': 'qwen3', 'attention_bias': True},
      ['attention_bias', 'True'],
    ),
    ({'num_key_value_heads': 3}, ['num_key_value_heads=3', 'num_attention_heads=4']),
    ({'head_dim': 5}, ['head_dim=5', 'even']),
    ({'hidden_size': '16'}, ["hidden_size='16'", 'positive integer']),
    ({'vocab_size': None}, ['vocab_size=None']),
  ],
)
def test_configs_that_these_models_cannot_follow_are_refused_by_name(checkpoint, changes, words):
  edit_config(checkpoint, **changes)
  with pytest.raises(UserError) as error:
    hf.read_config(checkpoint)
  message = str(error.value)
  assert '\n' not in message and checkpoint in message
  for word in words:
    assert word in message


def test_a_sliding_window_that_no_layer_has_is_accepted(checkpoint):
  edit_config(checkpoint, use_sliding_window=True, sliding_window=8, max_window_layers=2)
  assert hf.read_config(checkpoint) == SMALL


def test_a_config_that_is_not_json_or_not_there(tmp_path):
  with pytest.raises(UserError, match=r'config\.json: cannot be read \(No such file'):
    hf.read_config(str(tmp_path))
  (tmp_path / 'config.json').write_text('{"a":')
  with pytest.raises(UserError, match='is not JSON'):
    hf.read_config(str(tmp_path))
  (tmp_path / 'config.json').write_text('[]')
  with pytest.raises(UserError, match='must hold a JSON object, not list'):
    hf.read_config(str(tmp_path))


# -- weights that do not fit -------------------------------------------------------------------------------------------


def load(directory) -> nnx.State:
  return hf.load_params(directory, hf.read_config(directory), jnp.float32)


def test_all_that_is_wrong_with_the_tensors_is_said_at_once(checkpoint):
  file = os.path.join(checkpoint, 'model.safetensors')
  tensors = load_file(file)
  del tensors['model.norm.weight'], tensors['model.layers.1.self_attn.q_proj.bias']
  tensors['model.layers.0.mlp.experts.weight'] = np.zeros(3, np.float32)
  tensors['model.layers.0.mlp.up_proj.weight'] = tensors['model.layers.0.mlp.up_proj.weight'].T.copy()
  tensors['model.layers.1.mlp.up_proj.weight'] = tensors['model.layers.1.mlp.up_proj.weight'].astype(np.int32)
  tensors['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.zeros(3, np.float32)  # harmless, in old checkpoints
  save_file(tensors, file)
  with pytest.raises(UserError) as error:
    load(checkpoint)
  message = str(error.value)
  assert '\n' not in message and checkpoint in message
  assert '2 missing: ' in message
  assert 'model.norm.weight' in message and 'model.layers.1.self_attn.q_proj.bias' in message
  assert '1 unexpected: model.layers.0.mlp.experts.weight' in message
  assert '1 of another shape: model.layers.0.mlp.up_proj.weight [16, 24] instead of [24, 16]' in message
  assert 'F32/BF16/F16: model.layers.1.mlp.up_proj.weight I32' in message
  assert 'inv_freq' not in message


def test_a_long_list_of_names_is_cut(checkpoint):
  edit_config(checkpoint, num_hidden_layers=9)
  with pytest.raises(UserError, match=r'84 missing: (\S+, ){7}\S+ and 76 more$'):
    load(checkpoint)


def test_tensors_are_checked_before_any_is_loaded(checkpoint, monkeypatch):
  edit_config(checkpoint, num_hidden_layers=3)
  monkeypatch.setattr(hf, '_place', lambda *a: pytest.fail('a tensor was loaded'))
  with pytest.raises(UserError, match='12 missing'):
    load(checkpoint)


def test_an_output_projection_beside_tied_embeddings_must_be_the_embedding(checkpoint):
  expected = load(checkpoint)
  file = os.path.join(checkpoint, 'model.safetensors')
  tensors = load_file(file)
  tensors['lm_head.weight'] = tensors['model.embed_tokens.weight'].copy()
  save_file(tensors, file)
  assert_identical(load(checkpoint), expected)
  tensors['lm_head.weight'][69, 3] += 1
  save_file(tensors, file)
  with pytest.raises(UserError, match=r'lm_head\.weight differs .* set tie_word_embeddings to false'):
    load(checkpoint)
  edit_config(checkpoint, tie_word_embeddings=False)
  head = load(checkpoint)['lm_head']['kernel'][...]
  np.testing.assert_array_equal(head, tensors['lm_head.weight'].T)


def test_broken_directories(tmp_path, checkpoint):
  file, index = (pathlib.Path(checkpoint) / name for name in ('model.safetensors', 'model.safetensors.index.json'))
  whole = file.read_bytes()
  file.write_bytes(whole[: len(whole) // 2])
  with pytest.raises(UserError, match=r'model\.safetensors: cannot be read as safetensors'):
    load(checkpoint)
  file.unlink()
  with pytest.raises(UserError, match=r'neither model\.safetensors nor model\.safetensors\.index\.json'):
    load(checkpoint)
  index.write_text(json.dumps({'weight_map': {'a': 'one.safetensors', 'b': 'two.safetensors'}}))
  (pathlib.Path(checkpoint) / 'two.safetensors').write_bytes(whole)
  with pytest.raises(UserError, match=r'lacks 1 of the 2 files .*: one\.safetensors$'):
    load(checkpoint)
  (tmp_path / 'elsewhere.safetensors').write_bytes(whole)
  index.write_text(json.dumps({'weight_map': {'a': '../elsewhere.safetensors'}}))
  with pytest.raises(UserError, match='outside its directory'):
    load(checkpoint)
  index.write_text('{}')
  with pytest.raises(UserError, match='has no weight_map'):
    load(checkpoint)


def test_code_that_comes_with_a_checkpoint_is_never_run(tmp_path):
  directory, ran = tmp_path / 'model', tmp_path / 'ran'
  shutil.copytree(presets.resolve('tiny', ''), directory)
  for name in ('configuration_evil', 'modeling_evil', 'tokenization_evil', 'setup', '__init__'):
    (directory / f'{name}.py').write_text(f'open({str(ran)!r}, "w").close()\nclass Evil: pass\n')
  (directory / 'pytorch_model.bin').write_bytes(b'not even a pickle')
  edit_config(
    directory, auto_map={'AutoConfig': 'configuration_evil.Evil', 'AutoModelForCausalLM': 'modeling_evil.Evil'}
  )
  settings = directory / 'tokenizer_config.json'
  raw = json.loads(settings.read_text()) | {'auto_map': {'AutoTokenizer': [None, 'tokenization_evil.Evil']}}
  settings.write_text(json.dumps(raw))
  config = default.get_config()
  config.model.path = str(directory)
  assert build.load_policy(config).directory == str(directory)
  # A class of its own: without the code there is no such tokenizer, and nobody is asked whether it may run.
  settings.write_text(json.dumps(raw | {'tokenizer_class': 'Evil'}))
  with contextlib.suppress(UserError):
    build.load_policy(config)
  assert not ran.exists()


# -- value head --------------------------------------------------------------------------------------------------------


def test_the_value_head_lies_beside_the_model(tmp_path, checkpoint):
  head = ValueHead(16)
  assert not hf.load_value_head(checkpoint, head)
  head.kernel.set_value(jnp.arange(16.0) / 7)
  head.bias.set_value(jnp.float32(0.3))
  hf.save_model(str(tmp_path / 'out'), random_params(SMALL), SMALL, 'bfloat16', value_head=head)
  loaded = ValueHead(16)
  assert hf.load_value_head(str(tmp_path / 'out'), loaded)
  assert_identical(nnx.state(loaded), nnx.state(head))
  assert_identical(hf.load_params(str(tmp_path / 'out'), SMALL, jnp.bfloat16), random_params(SMALL, 'bfloat16'))
  with pytest.raises(UserError, match=r'value_head\.safetensors: holds .*16.* and the value head of this model is .*8'):
    hf.load_value_head(str(tmp_path / 'out'), ValueHead(8))


@pytest.mark.parametrize('cfg', [SMALL, SMALL3], ids=['tied', 'untied'])
def test_a_critic_lies_in_a_directory_of_the_model_s_and_has_no_output_projection(tmp_path, cfg):
  out, shape = str(tmp_path / 'out'), hf.trunk_config(cfg)
  own, head = random_params(shape, seed=7), ValueHead(16)
  head.bias.set_value(jnp.float32(0.3))
  hf.save_model(out, random_params(cfg), cfg, 'float32', value_head=head, critic=own, max_shard_bytes=3000)
  assert hf.critic_directory(out) == os.path.join(out, 'critic')
  assert_identical(hf.load_params(out, cfg, jnp.float32), random_params(cfg))
  loaded, read = ValueHead(16), ValueHead(16)
  critic = hf.load_model(hf.critic_directory(out), dtype=jnp.float32, param_dtype=jnp.float32, trunk_only=True)
  assert_identical(nnx.state(critic), own)
  assert hf.load_value_head(hf.critic_directory(out), read) and not hf.load_value_head(out, loaded)
  assert float(read.bias[...]) == np.float32(0.3)
  # An export without one leaves none behind, and then the trunk is the policy's.
  hf.save_model(out, random_params(cfg, seed=1), cfg, 'float32', value_head=head)
  assert hf.critic_directory(out) == out and hf.load_value_head(out, loaded)
  trunk = hf.load_model(out, dtype=jnp.float32, param_dtype=jnp.float32, trunk_only=True)
  ours, theirs = flat(nnx.state(trunk)), flat(random_params(cfg, seed=1))
  assert theirs.keys() - ours.keys() == ({('lm_head', 'kernel')} if cfg is SMALL3 else set())
  for path in ours:
    np.testing.assert_array_equal(ours[path], theirs[path])
  # Both trunks compute the same hidden states.
  whole = hf.load_model(out, dtype=jnp.float32, param_dtype=jnp.float32)
  tokens = jnp.arange(5)[None]
  np.testing.assert_array_equal(trunk(trunk.embed(tokens))[0], whole(whole.embed(tokens))[0])


# -- replacing what was there ------------------------------------------------------------------------------------------


@pytest.mark.parametrize('failing', ['second shard', 'config', 'rename'])
def test_an_export_that_fails_leaves_the_previous_one(tmp_path, monkeypatch, failing):
  out = tmp_path / 'out'
  hf.save_model(str(out), random_params(SMALL), SMALL, 'float32', max_shard_bytes=3000)
  (out / 'README.md').write_text('mine')
  before = contents(out)
  save, rename, calls = hf.save_file, os.rename, []

  def fail_on_second(*args, **kwargs):
    calls.append(args)
    if len(calls) == 2:
      raise OSError('disk full')
    save(*args, **kwargs)

  def fail_to_take_the_place(source, target):
    if target == str(out) and not source.endswith('.old'):
      raise OSError('disk full')
    rename(source, target)

  if failing == 'second shard':
    monkeypatch.setattr(hf, 'save_file', fail_on_second)
  elif failing == 'config':
    monkeypatch.setattr(hf, 'write_json', lambda *a: (_ for _ in ()).throw(OSError('disk full')))
  else:
    monkeypatch.setattr(os, 'rename', fail_to_take_the_place)
  with pytest.raises(OSError, match='disk full'):
    hf.save_model(str(out), random_params(SMALL3, seed=1), SMALL3, 'float32', max_shard_bytes=3000)
  assert contents(out) == before
  assert os.listdir(tmp_path) == ['out'], 'something was left behind'


def test_a_new_export_replaces_all_of_the_old_and_nothing_else(tmp_path, tokenizer_dir):
  out = tmp_path / 'out'
  head = ValueHead(16)
  hf.save_model(str(out), random_params(SMALL), SMALL, 'float32', value_head=head, max_shard_bytes=3000)
  (out / 'README.md').write_text('mine')
  (out / 'logs').mkdir()
  (out / 'logs' / 'a').write_text('b')
  (out / 'merges.txt').write_text('of another tokenizer')
  hf.save_model(str(out), random_params(SMALL3), SMALL3, 'float32', tokenizer_dir=tokenizer_dir)
  assert sorted(os.listdir(out)) == [
    'README.md', 'config.json', 'logs', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json',
  ]  # fmt: skip
  assert (out / 'README.md').read_text() == 'mine' and (out / 'logs' / 'a').read_text() == 'b'
  assert_identical(hf.load_params(str(out), SMALL3, jnp.float32), random_params(SMALL3))
  # Onto itself, and without a tokenizer to copy: the one that is there stays.
  hf.save_model(str(out), random_params(SMALL), SMALL, 'float32', tokenizer_dir=str(out))
  hf.save_model(str(out), random_params(SMALL), SMALL, 'float32')
  assert (out / 'tokenizer.json').read_text() == (pathlib.Path(tokenizer_dir) / 'tokenizer.json').read_text()
  assert sorted(os.listdir(tmp_path)) == ['out', 'tokenizer']


def test_places_and_parameters_that_cannot_be_saved(tmp_path, tokenizer_dir):
  params = random_params(SMALL)
  with pytest.raises(UserError, match='is not empty and is no checkpoint'):
    hf.save_model(tokenizer_dir, params, SMALL, 'float32')
  (tmp_path / 'file').write_text('x')
  with pytest.raises(UserError, match='is not a directory'):
    hf.save_model(str(tmp_path / 'file'), params, SMALL, 'float32')
  out = str(tmp_path / 'out')
  with pytest.raises(UserError, match='nowhere: is not a directory'):
    hf.save_model(out, params, SMALL, 'float32', tokenizer_dir=str(tmp_path / 'nowhere'))
  small_vocabulary = QwenConfig(**(vars(SMALL) | {'vocab_size': 61}))
  with pytest.raises(UserError, match=r'eos_token_id=61 is outside of vocab_size=61'):
    hf.save_model(out, random_params(small_vocabulary), small_vocabulary, 'float32', tokenizer_dir=tokenizer_dir)
  with pytest.raises(ValueError, match=r'layers\.0\.self_attn\.q_norm\.weight'):
    hf.save_model(out, params, SMALL3, 'float32')
  with pytest.raises(ValueError, match=r"dtype='int8'"):
    hf.save_model(out, params, SMALL, 'int8')
  assert not os.path.exists(out)


# -- placement and memory ----------------------------------------------------------------------------------------------


def run_python(code: str, *args: str, **env: str) -> str:
  done = subprocess.run(
    [sys.executable, '-c', code, *args],
    env=os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'} | env,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


_SHARDED = """
import sys
import jax, numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from ragen_jax.models.checkpoint import hf

mesh = jax.make_mesh((2, 2), ('fsdp', 'tensor'))
seen = []
def sharding_fn(path):
  seen.append(path)
  if path[-2:] == ('q_proj', 'kernel'):
    return NamedSharding(mesh, P('fsdp', 'tensor', None))
  if path == ('embed_tokens',):
    return NamedSharding(mesh, P('tensor', 'fsdp'))
  return NamedSharding(mesh, P())

source, target = sys.argv[1:]
model = hf.load_model(source, dtype='float32', param_dtype='float32', sharding_fn=sharding_fn)
q = model.layers[0].self_attn.q_proj.kernel[...]
assert q.shape == (16, 4, 6) and q.sharding.spec == P('fsdp', 'tensor', None), q.sharding
assert {s.data.shape for s in q.addressable_shards} == {(8, 2, 6)} and len(q.addressable_shards) == 4
assert {s.data.shape for s in model.embed_tokens[...].addressable_shards} == {(35, 8)}
assert sorted(map(str, seen)) == sorted(str(path) for path, _ in nnx.to_flat_state(nnx.state(model)))
hf.save_model(target, model, model.cfg, 'float32')
"""


def test_weights_go_to_the_shards_that_are_asked_for_and_come_back(tmp_path, checkpoint):
  run_python(_SHARDED, checkpoint, str(tmp_path / 'out'), XLA_FLAGS='--xla_force_host_platform_device_count=4')
  assert contents(tmp_path / 'out') == contents(checkpoint)


_MEMORY = """
import json, pathlib, sys
import jax
from safetensors.numpy import load_file
from ragen_jax import build
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.models.checkpoint import hf

def memory(field):  # not getrusage, whose maximum a child inherits from the process that started it
  with open('/proc/self/status') as f:
    return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field + ':'))

def load(directory):
  cfg = hf.read_config(directory)
  shardings = weight_shardings(cfg, make_mesh(1, 4, 2))
  return jax.tree.leaves(hf.load_params(directory, cfg, 'float32', shardings.__getitem__))

def load_naively(directory):
  tensors = {}
  for file in sorted(pathlib.Path(directory).glob('*.safetensors')):
    tensors |= load_file(file)
  cfg = hf.read_config(directory)
  shardings = weight_shardings(cfg, make_mesh(1, 4, 2))
  return [jax.device_put(w.from_hf(tensors[w.name]).astype('float32'), shardings[w.path]) for w in hf.weights(cfg)]

how, small, large = sys.argv[1:]
load(small)  # what JAX allocates on first use
before, peak_before = memory('VmRSS'), memory('VmHWM')
arrays = (load if how == 'ours' else load_naively)(large)
peak = memory('VmHWM')
stays = sum(part.data.nbytes for array in arrays for part in array.addressable_shards)
print(json.dumps({'grown': peak - before, 'stays': stays, 'noise': peak_before - before}))
"""


@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='reads its memory from /proc')
@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_loading_holds_no_more_than_what_stays_and_a_part_of_a_shard(tmp_path, checkpoint, dtype):
  # 10 layers of 11 million weights and an embedding of 17 million.
  fields = {'vocab_size': 16384, 'hidden_size': 1024, 'intermediate_size': 2816, 'num_layers': 10}
  cfg = QwenConfig(**(vars(SMALL) | fields | {'num_heads': 16, 'num_kv_heads': 8, 'head_dim': 64}))
  dtype = np.dtype(dtype)
  params = jax.tree.map(
    lambda x: np.zeros(x.shape, dtype), nnx.state(nnx.eval_shape(lambda: Qwen(cfg, rngs=nnx.Rngs(0))))
  )
  large = tmp_path / 'large'
  hf.save_model(str(large), params, cfg, dtype, max_shard_bytes=(25 << 20) * dtype.itemsize)
  sizes = [file.stat().st_size for file in large.glob('*.safetensors')]
  assert len(sizes) == 6

  def measure(how):
    flags = '--xla_force_host_platform_device_count=8'
    measured = json.loads(run_python(_MEMORY, how, checkpoint, str(large), XLA_FLAGS=flags))
    assert measured['noise'] < 0.3 * max(sizes), 'the peak before loading hides what loading takes'
    return measured['grown'] - measured['stays'], measured

  beside, measured = measure('ours')
  assert measured['stays'] > sum(sizes) * 4 / dtype.itemsize * 0.99
  assert beside < 1.3 * max(sizes), measured
  if dtype == 'float32':  # that the measurement would show it
    beside, measured = measure('naive')
    assert beside > 1.3 * max(sizes), measured
  shutil.rmtree(large)


# -- presets -----------------------------------------------------------------------------------------------------------


def test_a_path_goes_before_the_preset(checkpoint):
  assert presets.resolve('qwen2.5-0.5b', checkpoint) == checkpoint


def test_paths_that_are_no_checkpoint(tmp_path, checkpoint):
  def message(path):
    with pytest.raises(UserError) as error:
      presets.resolve('tiny', str(path))
    assert f"model.path='{path}'" in str(error.value) and '\n' not in str(error.value)
    return str(error.value)

  assert 'does not exist' in message(tmp_path / 'nowhere')
  assert 'is not a directory' in message(pathlib.Path(checkpoint) / 'config.json')
  (tmp_path / 'empty').mkdir()
  assert 'has no config.json' in message(tmp_path / 'empty')
  os.rename(os.path.join(checkpoint, 'model.safetensors'), os.path.join(checkpoint, 'value_head.safetensors'))
  assert 'has no *.safetensors' in message(checkpoint)


def test_unknown_presets_are_told_the_known_ones():
  with pytest.raises(UserError) as error:
    presets.resolve('qwen2.5-0.6b', '')
  assert "model.preset='qwen2.5-0.6b'" in str(error.value)
  for name in ('tiny', 'qwen2.5-0.5b', 'qwen2.5-7b-instruct', 'r1-distill-qwen-1.5b', 'qwen3-8b'):
    assert name in str(error.value) and name in presets.names()


def test_presets_are_downloaded_without_code(monkeypatch):
  import huggingface_hub

  asked = {}
  monkeypatch.setattr(
    huggingface_hub, 'snapshot_download', lambda repository, **kwargs: asked.update(kwargs) or f'/hub/{repository}'
  )
  assert presets.resolve('qwen2.5-0.5b-instruct', '') == '/hub/Qwen/Qwen2.5-0.5B-Instruct'
  assert set(asked['allow_patterns']) == {'*.json', '*.safetensors', '*.txt'}


def test_a_hub_that_cannot_be_reached_is_one_line_with_a_way_out(monkeypatch, tmp_path):
  import huggingface_hub

  def unreachable(*args, **kwargs):
    raise ConnectionError('no route\nto host')

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', unreachable)
  with pytest.raises(UserError) as error:
    presets.resolve('qwen3-0.6b', '')
  message = str(error.value)
  assert '\n' not in message
  assert 'Qwen/Qwen3-0.6B' in message and 'no route to host' in message and '--config.model.path=DIR' in message
