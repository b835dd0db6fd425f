"""Loading checkpoints: weights that do not fit the config, placement on devices, and memory."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from configs import default
from ragen_jax import build
from ragen_jax.models import presets
from ragen_jax.models.checkpoint.config import read_config
from ragen_jax.models.checkpoint.load import load_model, load_params
from ragen_jax.models.checkpoint.names import weights
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.utils.errors import UserError
from tests.support.checkpoints import SMALL, assert_identical, contents, edit_config, flat
from tests.support.processes import copy_python


def test_no_fresh_weights_are_made_while_loading(checkpoint, monkeypatch):
  drawn = []
  normal = jax.random.normal

  def spy(key, shape, dtype):
    drawn.append(isinstance(key, jax.core.Tracer))
    return normal(key, shape, dtype)

  monkeypatch.setattr(jax.random, 'normal', spy)
  load_model(checkpoint, dtype=jnp.float32, param_dtype=jnp.float32)
  assert drawn and all(drawn)


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
  cfg = read_config(str(tmp_path))
  assert (cfg.architecture, cfg.rope_theta, cfg.rms_norm_eps, cfg.head_dim) == ('qwen3', 777.0, 1e-3, 6)
  assert not cfg.tie_word_embeddings
  loaded = flat(load_params(str(tmp_path), cfg, jnp.float32))
  expected = {name: weight.detach().float().numpy() for name, weight in theirs.named_parameters()}
  plan = weights(cfg)
  assert {w.name for w in plan} == set(expected)
  for w in plan:
    np.testing.assert_array_equal(w.to_hf(loaded[w.path]), expected[w.name], err_msg=w.name)


def load(directory) -> nnx.State:
  return load_params(directory, read_config(directory), jnp.float32)


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


def test_a_tensor_in_two_files_is_refused(checkpoint):
  directory = pathlib.Path(checkpoint)
  tensors = load_file(directory / 'model.safetensors')
  (directory / 'model.safetensors').unlink()
  first, second = 'model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'
  save_file(tensors, directory / first)
  save_file({'model.norm.weight': tensors['model.norm.weight'] + 1}, directory / second)
  index = dict.fromkeys(tensors, first) | {'model.norm.weight': second}
  (directory / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': index}))
  with pytest.raises(UserError, match=r'1 in several files or under several names: model\.norm\.weight'):
    load(checkpoint)


def test_a_long_list_of_names_is_cut(checkpoint):
  edit_config(checkpoint, num_hidden_layers=9)
  with pytest.raises(UserError, match=r'84 missing: (\S+, ){7}\S+ and 76 more$'):
    load(checkpoint)


def test_tensors_are_checked_before_any_is_loaded(checkpoint):
  edit_config(checkpoint, num_hidden_layers=3)
  with pytest.raises(UserError, match='12 missing'):
    load_params(checkpoint, read_config(checkpoint), jnp.float32, lambda path: pytest.fail(f'{path} was loaded'))


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


def output(code: str, *args: str, devices: int) -> str:
  """What the code prints in a process of its own."""
  done = copy_python(code, *args, devices=devices)
  assert done.returncode == 0, done.stderr
  return done.stdout


_SHARDED = """
import sys
import jax, numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from ragen_jax.models.checkpoint.config import critic_directory, read_config, trunk_config
from ragen_jax.models.checkpoint.load import load_model, load_params, load_value_head
from ragen_jax.models.checkpoint.names import weights
from ragen_jax.models.checkpoint.save import save_model

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
model = load_model(source, dtype='float32', param_dtype='float32', sharding_fn=sharding_fn)
q = model.layers[0].self_attn.q_proj.kernel[...]
assert q.shape == (16, 4, 6) and q.sharding.spec == P('fsdp', 'tensor', None), q.sharding
assert {s.data.shape for s in q.addressable_shards} == {(8, 2, 6)} and len(q.addressable_shards) == 4
assert {s.data.shape for s in model.embed_tokens[...].addressable_shards} == {(35, 8)}
assert sorted(map(str, seen)) == sorted(str(path) for path, _ in nnx.to_flat_state(nnx.state(model)))
save_model(target, model, model.cfg, 'float32')
"""


def test_weights_go_to_the_shards_that_are_asked_for_and_come_back(tmp_path, checkpoint):
  output(_SHARDED, checkpoint, str(tmp_path / 'out'), devices=4)
  assert contents(tmp_path / 'out') == contents(checkpoint)


_MEMORY = """
import json, pathlib, sys
import jax
from safetensors.numpy import load_file
from ragen_jax import build
from ragen_jax import build
from ragen_jax.agent.language_model import weight_shardings
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.models.checkpoint.config import critic_directory, read_config, trunk_config
from ragen_jax.models.checkpoint.load import load_model, load_params, load_value_head
from ragen_jax.models.checkpoint.names import weights
from ragen_jax.models.checkpoint.save import save_model

def memory(field):  # not getrusage, whose maximum a child inherits from the process that started it
  with open('/proc/self/status') as f:
    return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field + ':'))

def load(directory):
  cfg = read_config(directory)
  shardings = weight_shardings(cfg, make_mesh(1, 4, 2))
  return jax.tree.leaves(load_params(directory, cfg, 'float32', shardings.__getitem__))

def load_naively(directory):
  tensors = {}
  for file in sorted(pathlib.Path(directory).glob('*.safetensors')):
    tensors |= load_file(file)
  cfg = read_config(directory)
  shardings = weight_shardings(cfg, make_mesh(1, 4, 2))
  return [jax.device_put(w.from_hf(tensors[w.name]).astype('float32'), shardings[w.path]) for w in weights(cfg)]

how, small, large = sys.argv[1:]
load(small)  # what JAX allocates on first use
before, peak_before = memory('VmRSS'), memory('VmHWM')
arrays = (load if how == 'ours' else load_naively)(large)
peak = memory('VmHWM')
stays = sum(part.data.nbytes for array in arrays for part in array.addressable_shards)
print(json.dumps({'grown': peak - before, 'stays': stays, 'noise': peak_before - before}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='reads its memory from /proc')
@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
@pytest.mark.exhaustive_cases('bfloat16')
def test_loading_holds_no_more_than_what_stays_and_a_part_of_a_shard(tmp_path, checkpoint, dtype):
  # 10 layers of 11 million weights and an embedding of 17 million.
  fields = {'vocab_size': 16384, 'hidden_size': 1024, 'intermediate_size': 2816, 'num_layers': 10}
  cfg = QwenConfig(**(vars(SMALL) | fields | {'num_heads': 16, 'num_kv_heads': 8, 'head_dim': 64}))
  dtype = np.dtype(dtype)
  params = jax.tree.map(
    lambda x: np.zeros(x.shape, dtype), nnx.state(nnx.eval_shape(lambda: Qwen(cfg, rngs=nnx.Rngs(0))))
  )
  large = tmp_path / 'large'
  save_model(str(large), params, cfg, dtype, max_shard_bytes=(25 << 20) * dtype.itemsize)
  sizes = [file.stat().st_size for file in large.glob('*.safetensors')]
  assert len(sizes) == 6

  def measure(how):
    measured = json.loads(output(_MEMORY, how, checkpoint, str(large), devices=8))
    assert measured['noise'] < 0.3 * max(sizes), 'the peak before loading hides what loading takes'
    return measured['grown'] - measured['stays'], measured

  beside, measured = measure('ours')
  assert measured['stays'] > sum(sizes) * 4 / dtype.itemsize * 0.99
  assert beside < 1.3 * max(sizes), measured
  if dtype == 'float32':  # that the measurement would show it
    beside, measured = measure('naive')
    assert beside > 1.3 * max(sizes), measured
  shutil.rmtree(large)
