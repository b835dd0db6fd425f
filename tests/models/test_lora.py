"""Adapters: what they compute and learn is what PEFT's do, and files of them go both ways."""

from __future__ import annotations

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from ragen_jax.models import lora
from ragen_jax.models.checkpoint import hf
from ragen_jax.models.checkpoint import peft as adapter_files
from ragen_jax.models.qwen import Qwen, QwenConfig
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.utils.errors import UserError

SMALL = QwenConfig(
  vocab_size=70, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6
)
SMALL3 = QwenConfig(**(vars(SMALL) | {'architecture': 'qwen3', 'tie_word_embeddings': False}))
CONFIG = lora.LoraConfig(4, 6)
TOKENS = np.random.default_rng(3).integers(0, 70, size=(3, 11)).astype(np.int32)


def adapted(
  cfg: QwenConfig = SMALL, config: lora.LoraConfig | None = CONFIG, *, param_dtype='float32', seed: int = 0
) -> Qwen:
  """A random model whose adapters are not zero, made without compiling anything."""

  def make():
    model = Qwen(cfg, param_dtype=param_dtype, rngs=nnx.Rngs(0))
    if config is not None:
      lora.attach(model, config, nnx.Rngs(0))
    return model

  graphdef, params = nnx.split(nnx.eval_shape(make))
  rng = np.random.default_rng(seed)
  return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.3, x.dtype), params))


@nnx.jit
def logits(model: Qwen, tokens) -> jax.Array:
  return model.logits(model(model.embed(tokens))[0])


def _save_base(directory, model: Qwen) -> str:
  """The model without its adapters, as a checkpoint."""
  base = {path: x for path, x in nnx.to_flat_state(nnx.state(model)) if 'adapter' not in path}
  hf.save_model(str(directory), nnx.from_flat_state(base), model.cfg, 'float32')
  return str(directory)


def test_fresh_adapters_change_nothing_and_are_drawn_as_peft_draws_them():
  model = adapted(config=None)
  before = logits(model, TOKENS)
  lora.attach(model, lora.LoraConfig(64, 64), nnx.Rngs(1))
  np.testing.assert_array_equal(logits(model, TOKENS), before)
  found = lora.adapters(model)
  assert len(found) == 2 * 7
  a = np.asarray(found['layers', 0, 'mlp', 'down_proj'].lora_a[...])
  bound = 24**-0.5
  assert a.shape == (24, 64) and np.abs(a).max() < bound
  np.testing.assert_allclose(a.std(), bound / 3**0.5, rtol=0.05)


@pytest.mark.parametrize(
  ('text', 'names'),
  [('all-linear', lora.TARGETS), ('v_proj, q_proj', ('q_proj', 'v_proj')), ('down_proj', ('down_proj',))],
)
def test_targets_are_where_adapters_are(text, names):
  model = adapted(config=lora.LoraConfig(2, 2, lora.parse_targets(text)))
  assert {path[-1] for path in lora.adapters(model)} == set(names)


@pytest.mark.parametrize('text', ['', 'q_proj,lm_head', 'all_linear'])
def test_targets_that_do_not_exist_are_refused(text):
  with pytest.raises(ValueError, match=r'allowed: all-linear, or some of q_proj, k_proj'):
    lora.parse_targets(text)


@pytest.mark.parametrize('width', [16, 512])
def test_the_adapted_model_is_the_merged_model(tmp_path, width):
  """Both ways of running projections: those of narrow models are fused."""
  cfg = QwenConfig(**(vars(SMALL) | {'hidden_size': width, 'num_layers': 1}))
  model = adapted(cfg, lora.LoraConfig(4, 6, ('q_proj', 'v_proj', 'o_proj', 'up_proj', 'down_proj')))
  hf.save_model(str(tmp_path / 'merged'), model, cfg, 'float32', max_shard_bytes=50_000)
  merged = hf.load_model(str(tmp_path / 'merged'), dtype=jnp.float32, param_dtype=jnp.float32)
  assert not lora.adapters(merged)
  ours = logits(model, TOKENS)
  np.testing.assert_allclose(logits(merged, TOKENS), ours, atol=2e-5)
  for adapter in lora.adapters(model).values():
    adapter.lora_b.set_value(jnp.zeros_like(adapter.lora_b[...]))
  assert np.abs(logits(model, TOKENS) - ours).max() > 0.05  # the adapters did matter


def test_what_is_trained_and_what_is_frozen_make_the_whole():
  params = nnx.split(ActorCritic(adapted(param_dtype='bfloat16')))[1]
  trained, frozen = lora.partition(params)
  flat = dict(nnx.to_flat_state(trained))
  assert {path[-1] for path in flat if path[0] == 'policy'} == {'lora_a', 'lora_b'}
  assert {path for path in flat if path[0] != 'policy'} == {('value_head', 'kernel'), ('value_head', 'bias')}
  assert {x.dtype for x in jax.tree.leaves(trained)} == {jnp.dtype('float32')}
  assert {x.dtype for x in jax.tree.leaves(frozen)} == {jnp.dtype('bfloat16')}
  whole = lora.join(trained, frozen)
  assert jax.tree.structure(whole) == jax.tree.structure(params)
  assert all(a is b for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(params), strict=True))
  # Without adapters everything is trained.
  plain = nnx.split(ActorCritic(adapted(config=None)))[1]
  trained, frozen = lora.partition(plain)
  assert trained is plain and not jax.tree.leaves(frozen) and lora.join(trained, frozen) is plain


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
  """A model and the directory of its adapters."""
  model = adapted()
  base = _save_base(tmp_path / 'base', model)
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
  hf.save_model(str(directory), model, SMALL, 'float32')
  assert sorted(os.listdir(directory)) == ['config.json', 'model.safetensors']
  adapter_files.save(str(directory), model, CONFIG, 'bfloat16', base='x', tokenizer_dir=str(directory))
  assert sorted(os.listdir(directory)) == ['adapter_config.json', 'adapter_model.safetensors']


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'peft_type': 'IA3'}, r"peft_type='IA3' is not supported"),
    ({'use_dora': True}, r'use_dora=True is not supported; only False'),
    ({'use_rslora': True}, r'use_rslora=True'),
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


# -- against PEFT ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def peft():
  torch = pytest.importorskip('torch', reason='the comparison with PEFT needs PyTorch')
  torch.set_num_threads(1)
  return pytest.importorskip('peft', reason='the comparison with PEFT needs it')


@pytest.mark.parametrize('cfg', [SMALL, SMALL3], ids=['qwen2', 'qwen3'])
def test_peft_opens_our_adapters_and_gives_the_same_logits_and_gradients(tmp_path, cfg, peft):
  import torch
  from transformers import AutoModelForCausalLM

  model = adapted(cfg)
  base = _save_base(tmp_path / 'base', model)
  adapter_files.save(str(tmp_path / 'adapter'), model, CONFIG, 'float32', base=base, tokenizer_dir=base)
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
      adapter = ours[(path[0], int(path[1]), *path[2:4])]
      a = 'lora_A' in name
      own = np.asarray((adapter.lora_a if a else adapter.lora_b)[...]).reshape((-1, 4) if a else (4, -1)).T
      np.testing.assert_allclose(own, weight.grad.numpy(), rtol=1e-3, atol=1e-6, err_msg=name)
      assert np.abs(own).max() > 1e-5
      compared += 1
  assert compared == 2 * 7 * 2


def test_adapters_that_peft_wrote_are_loaded(tmp_path, peft):
  import torch
  from transformers import AutoModelForCausalLM

  model = adapted(config=None)
  base = _save_base(tmp_path / 'base', model)
  settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules='all-linear', init_lora_weights=False)
  theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings)
  theirs.save_pretrained(str(tmp_path / 'theirs'))
  config = adapter_files.read_config(str(tmp_path / 'theirs'))
  assert config == lora.LoraConfig(3, 5)
  lora.attach(model, config, nnx.Rngs(0))
  adapter_files.load(str(tmp_path / 'theirs'), model)
  with torch.no_grad():
    expected = theirs.eval()(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
  np.testing.assert_allclose(logits(model, TOKENS), expected, atol=1e-4)
