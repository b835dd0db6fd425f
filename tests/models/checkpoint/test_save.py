"""Saving checkpoints: round trips, exports that `transformers` opens, and replacing an older checkpoint."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pathlib
import shutil
import signal
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ragen_jax.models.attention_settings import AttentionSettings
from ragen_jax.models.checkpoint.config import critic_directory, read_config, trunk_config
from ragen_jax.models.checkpoint.load import load_model, load_params, load_value_head
from ragen_jax.models.checkpoint.names import weights
from ragen_jax.models.checkpoint.save import as_stored, check_target, new_checkpoint, save_model
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.models.value_head import ValueHead
from ragen_jax.utils.errors import UserError
from tests.support.checkpoints import (
  EXPERTS,
  GEMMA,
  HYBRID,
  HYBRID_EXPERTS,
  LLAMA,
  SMALL,
  SMALL3,
  assert_identical,
  contents,
  edit_config,
  flat,
  random_params,
)
from tests.support.processes import copy_python

EVERY = {
  'qwen2': SMALL, 'qwen3': SMALL3, 'qwen3_5': HYBRID, 'llama': LLAMA, 'qwen3_moe': EXPERTS,
  'qwen3_5_moe': HYBRID_EXPERTS, 'gemma3': GEMMA,
}  # fmt: skip


@pytest.mark.parametrize('cfg', EVERY.values(), ids=EVERY)
@pytest.mark.parametrize(('dtype', 'max_shard_bytes'), [('float32', 1 << 30), ('bfloat16', 3000), ('float16', 3000)])
@pytest.mark.slow_cases(*(f'float16-3000-{name}' for name in EVERY if name != 'qwen3'))
def test_what_is_saved_is_loaded_bit_for_bit(tmp_path, cfg, dtype, max_shard_bytes):
  params = random_params(cfg, dtype)
  save_model(str(tmp_path / 'out'), params, cfg, dtype, max_shard_bytes=max_shard_bytes)
  files = [name for name in os.listdir(tmp_path / 'out') if name.endswith('.safetensors')]
  assert (len(files) == 1) == (max_shard_bytes == 1 << 30)
  largest = max(weight.size for weight in weights(cfg)) * jnp.dtype(dtype).itemsize
  assert all(os.path.getsize(tmp_path / 'out' / f) < max(3000, largest) + 4000 for f in files) or len(files) == 1
  assert read_config(str(tmp_path / 'out')) == cfg
  assert_identical(load_params(str(tmp_path / 'out'), cfg, dtype), params)


def test_a_loaded_model_has_its_dtypes_and_a_pure_dict_can_be_saved(tmp_path):
  params = random_params(SMALL, 'bfloat16')
  save_model(str(tmp_path / 'out'), nnx.to_pure_dict(params), SMALL, jnp.bfloat16)
  by_row = AttentionSettings('blocks', None)
  model = load_model(str(tmp_path / 'out'), dtype=jnp.bfloat16, param_dtype=jnp.float32, attention=by_row)
  assert model.cfg == SMALL and model.dtype == jnp.bfloat16 and model.layers[1].self_attn.attention == by_row
  assert_identical(nnx.state(model), jax.tree.map(lambda x: x.astype(jnp.float32), params))
  # A whole model is saved like its state.
  save_model(str(tmp_path / 'again'), model, SMALL, 'bfloat16')
  assert contents(tmp_path / 'again') == contents(tmp_path / 'out')


@pytest.mark.parametrize('cfg', EVERY.values(), ids=EVERY)
@pytest.mark.slow_cases('llama', 'qwen3', 'qwen3_5', 'qwen3_moe')
def test_transformers_opens_an_export_and_gives_the_same_logits(tmp_path, tokenizer_dir, cfg, transformers):
  import torch

  out = str(tmp_path / 'out')
  save_model(out, random_params(cfg), cfg, 'float32', tokenizer_dir=tokenizer_dir, max_shard_bytes=3000)
  assert not os.path.exists(os.path.join(out, 'unrelated.py'))
  for file in pathlib.Path(out).glob('*.safetensors'):
    with safe_open(file, framework='np') as tensors:
      assert tensors.metadata() == {'format': 'pt'}
  theirs, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
  assert not any(report[kind] for kind in ('missing_keys', 'unexpected_keys', 'mismatched_keys')), report
  mixture = 'Moe' if cfg.experts else ''
  assert type(theirs).__name__ == f'{cfg.architecture.capitalize()}{mixture}ForCausalLM'
  assert theirs.dtype == torch.float32
  assert (theirs.config.eos_token_id, theirs.config.pad_token_id) == (61, 60)
  assert theirs.generation_config.eos_token_id == 61

  ours = load_model(out, dtype=jnp.float32, param_dtype=jnp.float32)
  tokens = np.random.default_rng(0).integers(0, 60, (2, 9))
  with torch.no_grad():
    expected = theirs(torch.tensor(tokens)).logits.numpy()
  logits = nnx.jit(lambda model: model.logits(model(model.embed(jnp.asarray(tokens)))[0]))(ours)
  assert np.std(expected) > 0.5
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.std(expected))


def test_export_keeps_what_the_source_says_beyond_the_shape(tmp_path, checkpoint):
  edit_config(checkpoint, eos_token_id=[61, 60], bos_token_id=59, max_position_embeddings=4096, auto_map={'x': 'y.Z'})
  (pathlib.Path(checkpoint) / 'generation_config.json').write_text('{"temperature": 0.7}')
  save_model(str(tmp_path / 'out'), random_params(SMALL), SMALL, 'bfloat16', tokenizer_dir=checkpoint)
  raw = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert (raw['eos_token_id'], raw['bos_token_id'], raw['max_position_embeddings']) == ([61, 60], 59, 4096)
  assert raw['torch_dtype'] == 'bfloat16'
  assert 'auto_map' not in raw, 'it names code'
  assert json.loads((tmp_path / 'out' / 'generation_config.json').read_text()) == {'temperature': 0.7}


def test_the_value_head_lies_beside_the_model(tmp_path, checkpoint):
  head = ValueHead(16)
  assert not load_value_head(checkpoint, head)
  head.kernel.set_value(jnp.arange(16.0) / 7)
  head.bias.set_value(jnp.float32(0.3))
  save_model(str(tmp_path / 'out'), random_params(SMALL), SMALL, 'bfloat16', value_head=head)
  loaded = ValueHead(16)
  assert load_value_head(str(tmp_path / 'out'), loaded)
  assert_identical(nnx.state(loaded), nnx.state(head))
  assert_identical(load_params(str(tmp_path / 'out'), SMALL, jnp.bfloat16), random_params(SMALL, 'bfloat16'))
  with pytest.raises(UserError, match=r'value_head\.safetensors: holds .*16.* and the value head of this model is .*8'):
    load_value_head(str(tmp_path / 'out'), ValueHead(8))


@pytest.mark.parametrize('cfg', [SMALL, SMALL3], ids=['tied', 'untied'])
@pytest.mark.slow
def test_a_critic_lies_in_a_directory_of_the_model_s_and_has_no_output_projection(tmp_path, cfg):
  out, shape = str(tmp_path / 'out'), trunk_config(cfg)
  own, head = random_params(shape, seed=7), ValueHead(16)
  head.bias.set_value(jnp.float32(0.3))
  save_model(out, random_params(cfg), cfg, 'float32', value_head=head, critic=own, max_shard_bytes=3000)
  assert critic_directory(out) == os.path.join(out, 'critic')
  assert_identical(load_params(out, cfg, jnp.float32), random_params(cfg))
  loaded, read = ValueHead(16), ValueHead(16)
  critic = load_model(critic_directory(out), dtype=jnp.float32, param_dtype=jnp.float32, trunk_only=True)
  assert_identical(nnx.state(critic), own)
  assert load_value_head(critic_directory(out), read) and not load_value_head(out, loaded)
  assert float(read.bias[...]) == np.float32(0.3)
  # An export without one leaves none behind, and then the trunk is the policy's.
  save_model(out, random_params(cfg, seed=1), cfg, 'float32', value_head=head)
  assert critic_directory(out) == out and load_value_head(out, loaded)
  trunk = load_model(out, dtype=jnp.float32, param_dtype=jnp.float32, trunk_only=True)
  ours, theirs = flat(nnx.state(trunk)), flat(random_params(cfg, seed=1))
  assert theirs.keys() - ours.keys() == ({('lm_head', 'kernel')} if cfg is SMALL3 else set())
  for path in ours:
    np.testing.assert_array_equal(ours[path], theirs[path])
  # Both trunks compute the same hidden states.
  whole = load_model(out, dtype=jnp.float32, param_dtype=jnp.float32)
  tokens = jnp.arange(5)[None]
  np.testing.assert_array_equal(trunk(trunk.embed(tokens))[0], whole(whole.embed(tokens))[0])


@pytest.mark.parametrize('failing', ['second shard', 'safetensors', 'config', 'rename'])
def test_an_export_that_fails_leaves_the_previous_one(tmp_path, monkeypatch, failing):
  out = tmp_path / 'out'
  save_model(str(out), random_params(SMALL), SMALL, 'float32', max_shard_bytes=3000)
  (out / 'README.md').write_text('mine')
  before = contents(out)
  rename, calls = os.rename, []

  def fail_on_second(*args, **kwargs):
    calls.append(args)
    if len(calls) == 2:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    save_file(*args, **kwargs)

  def fail_to_take_the_place(source, target):
    if target == str(out) and not source.endswith('.old'):
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    rename(source, target)

  def fail(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  def fail_in_safetensors(*_, **__):
    raise SafetensorError('Error while serializing: I/O error:\nNo space left on device (os error 28)')

  if failing == 'second shard':
    monkeypatch.setattr('ragen_jax.models.checkpoint.save.save_file', fail_on_second)
  elif failing == 'safetensors':
    monkeypatch.setattr('ragen_jax.models.checkpoint.save.save_file', fail_in_safetensors)
  elif failing == 'config':
    monkeypatch.setattr('ragen_jax.models.checkpoint.save.write_json', fail)
  else:
    monkeypatch.setattr(os, 'rename', fail_to_take_the_place)
  with pytest.raises(UserError) as e:
    save_model(str(out), random_params(SMALL3, seed=1), SMALL3, 'float32', max_shard_bytes=3000)
  reason = {'safetensors': 'Error while serializing: I/O error: No space left on device (os error 28)'}
  assert str(e.value) == (
    f'{out}: the model was not written: {reason.get(failing, "No space left on device")}; '
    'what was there before is unchanged'
  )
  assert contents(out) == before
  assert os.listdir(tmp_path) == ['out'], 'something was left behind'


# Each export runs in a copy of the process that has imported the package.
_KILLED = """
import json, os, signal, sys, warnings
from ragen_jax.models.checkpoint import save
from tests.support.checkpoints import SMALL3, random_params
warnings.filterwarnings('ignore', message='os.fork')
def after(module, name, times):
  original, calls = getattr(module, name), []
  def called(*arguments, **others):
    result = original(*arguments, **others)
    calls.append(arguments)
    if len(calls) == times:
      os.kill(os.getpid(), signal.SIGKILL)
    return result
  setattr(module, name, called)
moments = {'while writing': (save, 'save_file', 1), 'between the renames': (os, 'rename', 1),
           'before other files are moved': (os, 'rename', 2), 'while other files are moved': (os, 'rename', 3)}
statuses = {}
for moment, out in json.loads(sys.argv[1]).items():
  process = os.fork()
  if not process:
    after(*moments[moment])
    save.save_model(out, random_params(SMALL3, seed=1), SMALL3, 'float32', max_shard_bytes=3000)
    os._exit(0)
  statuses[moment] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
print(json.dumps(statuses))
"""


_MINE = {'README.md': 'mine', 'notes.txt': 'mine, too', 'tokenizer.json': '{"mine": 1}'}
_MOMENTS = {
  'while writing': 'old',
  'between the renames': 'old',
  'before other files are moved': 'new',
  'while other files are moved': 'new',
}


@pytest.fixture(scope='module')
def killed_exports(tmp_path_factory):
  """Moment -> the directory of an export that was killed then, and what it contained before."""
  found = {}
  for moment in _MOMENTS:
    out = tmp_path_factory.mktemp('killed') / 'out'
    save_model(str(out), random_params(SMALL), SMALL, 'float32', max_shard_bytes=3000)
    for name, text in _MINE.items():
      (out / name).write_text(text)
    found[moment] = out, contents(out)
  done = copy_python(_KILLED, json.dumps({moment: str(out) for moment, (out, _) in found.items()}), check=True)
  assert json.loads(done.stdout) == dict.fromkeys(_MOMENTS, -signal.SIGKILL)
  return found


@pytest.mark.parametrize(('moment', 'there'), _MOMENTS.items())
def test_what_a_killed_export_leaves_is_cleaned_up(killed_exports, moment, there, caplog):
  out, before = killed_exports[moment]
  assert len(os.listdir(out.parent)) == 2
  assert out.exists() == (moment != 'between the renames')
  check_target(str(out))
  assert os.listdir(out.parent) == ['out']
  if there == 'old':
    assert contents(out) == before
  else:
    assert_identical(load_params(str(out), SMALL3, jnp.float32), random_params(SMALL3, seed=1))
  assert {name: (out / name).read_text() for name in _MINE} == _MINE
  told = [record.getMessage() for record in caplog.records]
  assert told == [f'{out}: replacing it was interrupted; the checkpoint from before is back'] * (
    moment == 'between the renames'
  )


@pytest.mark.parametrize('locks', [True, False])
def test_directories_of_processes_that_live_are_left_alone(tmp_path, monkeypatch, locks):
  """Without locks, as on NFS, nobody can tell; then nothing is removed, and a missing target comes back."""
  out = str(tmp_path / 'out')
  save_model(out, random_params(SMALL), SMALL, 'float32')
  if not locks:
    monkeypatch.setattr(fcntl, 'flock', unittest.mock.Mock(side_effect=OSError(errno.EBADF, 'no locks here')))
  with new_checkpoint(out, None) as new:
    names = sorted(os.listdir(tmp_path))
    assert len(names) == 2
    check_target(out)
    assert sorted(os.listdir(tmp_path)) == names
    os.rename(out, f'{new}.old')
    check_target(out)
    assert os.path.exists(out) == (not locks)
    if locks:
      os.rename(f'{new}.old', out)
    (pathlib.Path(new) / 'config.json').write_text('{"model_type": "new"}')
  assert os.listdir(tmp_path) == ['out'] and json.loads((tmp_path / 'out' / 'config.json').read_text())


def test_a_missing_target_with_two_old_ones_is_left_to_the_user(tmp_path):
  for name in ('.out.00000000.old', '.out.00000001.old', '.other.00000000.old', '.out.text.old'):
    (tmp_path / name).mkdir()
  check_target(str(tmp_path / 'out'))
  assert len(os.listdir(tmp_path)) == 4 and not (tmp_path / 'out').exists()


def test_a_new_export_replaces_all_of_the_old_and_nothing_else(tmp_path, tokenizer_dir):
  out = tmp_path / 'out'
  head = ValueHead(16)
  save_model(str(out), random_params(SMALL), SMALL, 'float32', value_head=head, max_shard_bytes=3000)
  (out / 'README.md').write_text('mine')
  (out / 'logs').mkdir()
  (out / 'logs' / 'a').write_text('b')
  (out / 'merges.txt').write_text('of another tokenizer')
  (out / 'additional_chat_templates').mkdir()
  (out / 'additional_chat_templates' / 'tool_use.jinja').write_text('of another tokenizer')
  save_model(str(out), random_params(SMALL3), SMALL3, 'float32', tokenizer_dir=tokenizer_dir)
  assert sorted(os.listdir(out)) == [
    'README.md', 'config.json', 'logs', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json',
  ]  # fmt: skip
  assert (out / 'README.md').read_text() == 'mine' and (out / 'logs' / 'a').read_text() == 'b'
  assert_identical(load_params(str(out), SMALL3, jnp.float32), random_params(SMALL3))
  # Onto itself, and without a tokenizer to copy: the one that is there stays.
  save_model(str(out), random_params(SMALL), SMALL, 'float32', tokenizer_dir=str(out))
  save_model(str(out), random_params(SMALL), SMALL, 'float32')
  assert (out / 'tokenizer.json').read_text() == (pathlib.Path(tokenizer_dir) / 'tokenizer.json').read_text()
  assert sorted(os.listdir(tmp_path)) == ['out', 'tokenizer']


def test_an_export_has_all_chat_templates_of_its_tokenizer(tmp_path, tokenizer_dir):
  source, out = tmp_path / 'source', tmp_path / 'out'
  shutil.copytree(tokenizer_dir, source)
  (source / 'additional_chat_templates').mkdir()
  (source / 'additional_chat_templates' / 'tool_use.jinja').write_text('{{ tools }}')
  for tokenizer in (str(source), None):  # the second one keeps what is there
    save_model(str(out), random_params(SMALL), SMALL, 'float32', tokenizer_dir=tokenizer)
    assert (out / 'additional_chat_templates' / 'tool_use.jinja').read_text() == '{{ tools }}'


def test_places_and_parameters_that_cannot_be_saved(tmp_path, tokenizer_dir):
  params = random_params(SMALL)
  with pytest.raises(UserError, match='is not empty and is no checkpoint'):
    save_model(tokenizer_dir, params, SMALL, 'float32')
  (tmp_path / 'file').write_text('x')
  with pytest.raises(UserError, match='is not a directory'):
    save_model(str(tmp_path / 'file'), params, SMALL, 'float32')
  out = str(tmp_path / 'out')
  with pytest.raises(UserError, match='nowhere: is not a directory'):
    save_model(out, params, SMALL, 'float32', tokenizer_dir=str(tmp_path / 'nowhere'))
  small_vocabulary = QwenConfig(**(vars(SMALL) | {'vocab_size': 61}))
  with pytest.raises(UserError, match=r'eos_token_id=61 is outside of vocab_size=61'):
    save_model(out, random_params(small_vocabulary), small_vocabulary, 'float32', tokenizer_dir=tokenizer_dir)
  with pytest.raises(ValueError, match=r'layers\.0\.self_attn\.q_norm\.weight'):
    save_model(out, params, SMALL3, 'float32')
  with pytest.raises(ValueError, match=r"dtype='int8'"):
    save_model(out, params, SMALL, 'int8')
  assert not os.path.exists(out)


@pytest.mark.parametrize(
  ('x', 'dtype'), [(np.nan, 'float32'), (-np.inf, 'bfloat16'), (np.nan, 'float16'), (7e4, 'float16')]
)
def test_weights_that_are_not_finite_are_not_written(tmp_path, x, dtype):
  """float16 ends at 65504."""
  params = random_params(SMALL, 'float32')
  save_model(str(tmp_path / 'out'), params, SMALL, dtype)
  before = contents(tmp_path / 'out')
  params = nnx.to_pure_dict(params)
  params['norm']['weight'] = params['norm']['weight'].at[1].set(x)
  with pytest.raises(UserError, match=rf'^model\.norm\.weight: 1 of \d+ weights are not finite as {dtype}, so nothing'):
    save_model(str(tmp_path / 'out'), params, SMALL, dtype)
  assert contents(tmp_path / 'out') == before and os.listdir(tmp_path) == ['out']
  if x == 7e4:
    save_model(str(tmp_path / 'out'), params, SMALL, 'bfloat16')


def test_adapters_that_are_not_finite_are_not_written():
  with pytest.raises(UserError, match=r'^a: 2 of 4 weights are not finite as float16, so nothing is written$'):
    as_stored('a', np.asarray([1.0, 65504.0, 65520.0, -np.inf], np.float32), np.dtype('float16'))
