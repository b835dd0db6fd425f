"""Adapter files: round trips, refused files, and PEFT on the same adapters."""

from __future__ import annotations

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from ragen_jax.models import lora
from ragen_jax.models.checkpoint import peft as adapter_files
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.utils.errors import UserError
from tests.support.adapters import CONFIG, SMALL, SMALL3, TOKENS, adapted, logits, save_base
from tests.support.checkpoints import EXPERTS, GEMMA, HYBRID, HYBRID_EXPERTS


@pytest.fixture
def saved(tmp_path):
  """A model and the directory of its adapters."""
  model = adapted()
  base = save_base(tmp_path / 'base', model)
  adapter_files.save(str(tmp_path / 'adapter'), model, CONFIG, 'float32', base=base, tokenizer_dir=base)
  return model, tmp_path / 'adapter'


def test_adapters_that_are_saved_are_loaded(saved):
  model, directory = saved
  assert adapter_files.read_config(str(directory)) == CONFIG
  again = adapted()
  for adapter in lora.adapters(again).values():
    adapter.lora_a.set_value(adapter.lora_a[...] + 1)
  adapter_files.load(str(directory), again)
  np.testing.assert_array_equal(logits(again, TOKENS), logits(model, TOKENS))
  # One kind of checkpoint takes the place of the other, and nothing of it stays behind.
  save_model(str(directory), model, SMALL, 'float32')
  assert sorted(os.listdir(directory)) == ['config.json', 'model.safetensors']
  adapter_files.save(str(directory), model, CONFIG, 'bfloat16', base='x', tokenizer_dir=str(directory))
  assert sorted(os.listdir(directory)) == ['adapter_config.json', 'adapter_model.safetensors']


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'peft_type': 'IA3'}, r"peft_type='IA3' is not supported"),
    ({'use_dora': True}, r'use_dora=True is not supported; only False'),
    ({'use_rslora': True}, r'use_rslora=True'),
    ({'init_lora_weights': 'pissa'}, r"init_lora_weights='pissa' is not supported; only True"),
    ({'init_lora_weights': 'pissa_niter_4'}, r"init_lora_weights='pissa_niter_4'"),
    ({'init_lora_weights': 'olora'}, r"init_lora_weights='olora'"),
    ({'lora_ga_config': {}}, r'lora_ga_config=\{\} is not supported; only None'),
    ({'modules_to_save': ['lm_head']}, r"modules_to_save=\['lm_head'\]"),
    ({'target_modules': ['q_proj', 'lm_head']}, r'target_modules=.*lm_head.*all-linear'),
    ({'target_modules': '.*_proj'}, r'target_modules=.*all-linear'),
    ({'r': 0}, r'r=0 must be a positive number'),
  ],
)
def test_adapters_that_are_more_than_plain_lora_are_refused(saved, change, message):
  file = saved[1] / 'adapter_config.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | change))
  with pytest.raises(UserError, match=message) as e:
    adapter_files.read_config(str(saved[1]))
  assert '\n' not in str(e.value)


def test_adapters_of_another_model_are_refused(saved):
  file = saved[1] / 'adapter_model.safetensors'
  tensors = load_file(file)
  name = 'base_model.model.model.layers.1.mlp.up_proj.lora_B.weight'
  save_file({k.replace('.1.mlp.up', '.1.mlp.upp'): v for k, v in tensors.items()}, file)
  with pytest.raises(UserError, match=rf'{name} is missing.*upp_proj.*is unexpected'):
    adapter_files.load(str(saved[1]), saved[0])
  save_file(tensors | {name: tensors[name][:-1]}, file)
  with pytest.raises(UserError, match=rf'{name} is \[23, 4\] instead of \[24, 4\]'):
    adapter_files.load(str(saved[1]), saved[0])
  file.write_bytes(b'nothing')
  with pytest.raises(UserError, match=r'cannot be read as safetensors'):
    adapter_files.load(str(saved[1]), saved[0])


@pytest.fixture(scope='module')
def peft():
  torch = pytest.importorskip('torch', reason='the comparison with PEFT needs PyTorch')
  torch.set_num_threads(1)
  return pytest.importorskip('peft', reason='the comparison with PEFT needs it')


@pytest.mark.parametrize(
  'cfg',
  [SMALL, SMALL3, HYBRID, GEMMA, *(pytest.param(cfg, marks=pytest.mark.slow) for cfg in (EXPERTS, HYBRID_EXPERTS))],
  ids=['qwen2', 'qwen3', 'qwen3_5', 'gemma3', 'qwen3_moe', 'qwen3_5_moe'],
)
@pytest.mark.slow_cases('qwen3_5', 'gemma3', 'qwen3')
@pytest.mark.exhaustive_cases('qwen3_moe')
def test_peft_opens_our_adapters_and_gives_the_same_logits_and_gradients(tmp_path, cfg, peft):
  import torch
  from transformers import AutoModelForCausalLM

  config = dataclasses.replace(CONFIG, targets=lora.targets(cfg))
  model = adapted(cfg, config)
  base = save_base(tmp_path / 'base', model)
  adapter_files.save(str(tmp_path / 'adapter'), model, config, 'float32', base=base, tokenizer_dir=base)
  theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
  theirs = peft.PeftModel.from_pretrained(theirs, str(tmp_path / 'adapter'), is_trainable=True)
  tokens = torch.tensor(TOKENS, dtype=torch.long)
  expected = theirs(tokens).logits
  np.testing.assert_allclose(logits(model, TOKENS), expected.detach().numpy(), atol=1e-4)

  torch.nn.functional.cross_entropy(expected[:, :-1].reshape(-1, 70), tokens[:, 1:].reshape(-1)).backward()
  graphdef, params = nnx.split(model)

  @jax.jit
  @jax.grad
  def gradient(params):
    logp = jax.nn.log_softmax(logits(nnx.merge(graphdef, params), TOKENS))[:, :-1]
    return -jnp.take_along_axis(logp, TOKENS[:, 1:, None], axis=-1).mean()

  ours = lora.adapters(nnx.merge(graphdef, gradient(params)))
  compared = 0
  for name, weight in theirs.named_parameters():
    if weight.requires_grad:
      path = name.removeprefix('base_model.model.model.').split('.')
      adapter = ours[(path[0], int(path[1]), *path[2:-3])]
      a = 'lora_A' in name
      own = np.asarray((adapter.lora_a if a else adapter.lora_b)[...]).reshape((-1, 4) if a else (4, -1)).T
      if 'in_proj_qkv' in name and not a:
        own = own[np.argsort(cfg.linear.channel_order())]
      np.testing.assert_allclose(own, weight.grad.numpy(), rtol=1e-3, atol=1e-6, err_msg=name)
      assert np.abs(own).max() > 1e-5
      compared += 1
  # Of experts, the shared one has adapters, with its gate.
  mlps = 2 * (4 if cfg is HYBRID_EXPERTS else 3) * (cfg is not EXPERTS)
  assert compared == 2 * ((2 * 4 if cfg.linear is None else 5 + 4) + mlps) == 2 * len(ours)


@pytest.mark.parametrize(
  'cfg',
  [SMALL, HYBRID, *(pytest.param(cfg, marks=pytest.mark.slow) for cfg in (EXPERTS, HYBRID_EXPERTS, GEMMA))],
  ids=['qwen2', 'qwen3_5', 'qwen3_moe', 'qwen3_5_moe', 'gemma3'],
)
@pytest.mark.slow_cases('qwen3_5')
def test_adapters_that_peft_wrote_are_loaded(tmp_path, cfg, peft):
  import torch
  from transformers import AutoModelForCausalLM

  model = adapted(cfg, config=None)
  base = save_base(tmp_path / 'base', model)
  names = lora.targets(cfg)

  def write(wanted, directory):
    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=wanted, init_lora_weights=False)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings)
    theirs.save_pretrained(str(tmp_path / directory))
    return theirs

  if cfg is EXPERTS:  # all that is linear are its experts too
    write('all-linear', 'more')
    # PEFT writes them in the order of a set.
    with pytest.raises(UserError, match=r"target_parameters=\[.*'gate_up_proj'.*\] is not supported; only \[\] is"):
      adapter_files.read_config(str(tmp_path / 'more'), names)
  theirs = write([*names] if cfg is EXPERTS else 'all-linear', 'theirs')
  config = adapter_files.read_config(str(tmp_path / 'theirs'), lora.targets(cfg))
  assert config == lora.LoraConfig(3, 5, names)
  lora.attach(model, config, nnx.Rngs(0))
  adapter_files.load(str(tmp_path / 'theirs'), model)
  with torch.no_grad():
    expected = theirs.eval()(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
  np.testing.assert_allclose(logits(model, TOKENS), expected, atol=1e-4)
