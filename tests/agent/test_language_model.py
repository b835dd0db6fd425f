"""A model with its tokenizer and sampler: what is loaded from which files, and what is said of it."""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax import build
from ragen_jax.agent import language_model
from ragen_jax.agent.language_model import LanguageModel, ModelSettings, param_state, weight_shardings
from ragen_jax.distributed.mesh import AXES
from ragen_jax.models import layers, lora
from ragen_jax.models.checkpoint import peft
from ragen_jax.models.checkpoint.config import read_config
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.models.vision.config import QWEN2_5_VL, QWEN3_VL
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config
from tests.support.models import random_model, random_policy
from tests.support.seeing import FACTOR, VISION_TOKENS, checkpoint, seeing_config, seeing_policy

_ADAPTERS = lora.LoraConfig(rank=2, alpha=6, targets=('q_proj', 'down_proj'))


def _equal(ours, theirs):
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_array_equal(a, b)


def _size(params) -> int:
  return sum(x.size for x in jax.tree.leaves(params))


def _describe(model: ActorCritic, devices: str) -> str:
  told, where = LanguageModel('', model, None, None, None).describe().rsplit(', ', 1)
  assert where == devices
  return told


@pytest.mark.slow
@pytest.mark.parametrize('vision', ['frozen', 'trained'])
def test_a_tower_is_trained_if_it_is_not_frozen(tmp_path, vision):
  config = seeing_config(model__vision=vision, model__separate_critic=True)
  loaded = seeing_policy(config, tmp_path, QWEN3_VL)
  trained, frozen = (nnx.to_flat_state(part) for part in lora.partition(param_state(loaded.model)))
  towers = {('policy', 'visual'), ('critic', 'visual')}
  assert {path[:2] for path, _ in frozen} == (towers if vision == 'frozen' else set())
  assert towers & {path[:2] for path, _ in trained} == (towers if vision == 'trained' else set())
  # Frozen towers of one checkpoint are equal, so one encoder serves both.
  assert set(loaded.encoders) == ({'policy'} if vision == 'frozen' else {'policy', 'critic'})
  assert loaded.processor.factor == FACTOR
  assert {loaded.tokenizer.decode([i]) for i in loaded.sampler.banned} == set(VISION_TOKENS)


@pytest.mark.slow
def test_a_critic_has_the_policys_tower_if_both_are_the_same_for_ever(tmp_path):
  config = seeing_config(model__separate_critic=True)
  assert set(seeing_policy(config, tmp_path, QWEN3_VL).encoders) == {'policy'}
  for field, value in (('vision', 'trained'), ('param_dtype', 'bfloat16')):
    other = config.copy_and_resolve_references()
    other.model[field] = value
    assert set(build.load_policy(other).encoders) == {'policy', 'critic'}
  shutil.copytree(config.model.path, tmp_path / 'both')
  shutil.copytree(config.model.path, tmp_path / 'both' / 'critic')
  config.model.path = str(tmp_path / 'both')
  assert set(build.load_policy(config).encoders) == {'policy', 'critic'}


def test_a_model_that_reads_text_only_has_no_tower_to_train():
  with pytest.raises(UserError, match=r"^model\.vision='trained': the model reads text only"):
    build.load_policy(small_config(model__vision='trained'))


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
  config = seeing_config()
  directory = pathlib.Path(checkpoint(config, tmp_path, QWEN2_5_VL))
  raw = json.loads((directory / 'config.json').read_text())
  raw['image_token_id'] += 1
  (directory / 'config.json').write_text(json.dumps(raw))
  config.model.path = str(directory)
  with pytest.raises(UserError, match=rf"config\.json has image_token_id={raw['image_token_id']}, and the tokenizer's"):
    build.load_policy(config)


def test_a_description_counts_the_parameters(monkeypatch):
  device = type('Device', (), {'device_kind': 'H200'})()
  for count, devices in ((1, '1 device (H200)'), (4, '4 devices (H200)')):
    monkeypatch.setattr(jax, 'devices', lambda *_, count=count: [device] * count)
    monkeypatch.setattr(jax, 'device_count', lambda count=count: count)
    model = random_model(40)
    size = _size(nnx.state(model.policy))
    assert 10_000 < size < 100_000
    assert _describe(model, devices) == f'{size / 1000:.0f}k parameters, float32'
  with_critic = ActorCritic(model.policy, random_model(40, kv_heads=4).policy)
  critic = _size(nnx.state(with_critic.critic))
  assert critic > size + 500
  assert (
    _describe(with_critic, devices) == f'{size / 1000:.0f}k parameters, {critic / 1000:.0f}k of the critic, float32'
  )
  lora.attach(model.policy, _ADAPTERS, nnx.Rngs(0))
  adapters = _size(nnx.state(model.policy)) - size
  assert _describe(model, devices) == (
    f'{size / 1000:.0f}k frozen parameters and {adapters / 1000:.0f}k in adapters, float32'
  )
  frozen = random_model(40)
  layers.freeze(frozen.policy.layers[0])
  assert re.fullmatch(r'\d+k frozen parameters and \d+k that are trained, float32', _describe(frozen, devices))


def test_millions_of_parameters_are_told_as_millions():
  model = nnx.eval_shape(lambda: random_model(80_000))
  told = LanguageModel('', model, None, None, None).describe()
  assert told.startswith(f'{_size(nnx.state(model.policy)) / 1e6:.0f}M parameters, float32, ')


# -- loading -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A random policy that was saved, and the settings that load it."""
  policy = random_policy(small_config(), tmp_path_factory.mktemp('saved'))
  settings = ModelSettings(
    preset='', path=policy.directory, param_dtype='float32', separate_critic=False, attention='auto',
    dtype=jnp.float32, adapters=None, weights='float', vision='frozen', adapter_path='', seed=0,
    records_values=True, replay_experts=False, decode_shards=0,
  )  # fmt: skip
  return policy, settings


def _load(saved, **changes):
  policy, settings = saved
  return language_model.load(dataclasses.replace(settings, **changes), policy.mesh)


def test_what_was_saved_is_loaded_with_a_sampler_of_its_tokenizer(saved):
  policy, settings = saved
  again = _load(saved)
  _equal(param_state(again.model), param_state(policy.model))
  assert again.directory == settings.path
  assert again.sampler.stop_ids == again.tokenizer.stop_ids and again.sampler.vocab_limit == again.tokenizer.size
  assert again.sampler.values and not _load(saved, records_values=False).sampler.values


def test_types_of_weights_and_of_computations_are_those_of_the_settings(saved):
  model = _load(saved, param_dtype='bfloat16', dtype=jnp.bfloat16, separate_critic=True).model
  assert {x.dtype for x in jax.tree.leaves(nnx.state(model.policy))} == {jnp.dtype('bfloat16')}
  # The critic is trained, so its weights are kept in full.
  assert {x.dtype for x in jax.tree.leaves(nnx.state((model.critic, model.value_head)))} == {jnp.dtype('float32')}
  assert model.policy.dtype == model.critic.dtype == jnp.bfloat16


def test_fresh_adapters_follow_the_seed_and_change_nothing_at_first(saved):
  policy, _ = saved
  first, second, other = (_load(saved, adapters=_ADAPTERS, seed=seed).model for seed in (3, 3, 4))
  _equal(param_state(first), param_state(second))
  a, b = (jax.tree.leaves(nnx.state(lora.adapters(m.policy))) for m in (first, other))
  assert any((x != y).any() for x, y in zip(a, b, strict=True))
  assert all(not x.lora_b[...].any() for x in lora.adapters(first.policy).values())
  _equal(lora.partition(param_state(first))[1]['policy'], nnx.state(policy.model.policy))


def test_the_value_head_beside_adapters_belongs_to_the_adapted_trunk(saved, tmp_path):
  policy, _ = saved
  adapted = _load(saved, adapters=_ADAPTERS)
  adapted.model.value_head.bias.set_value(jnp.float32(3.0))
  for head in (adapted.model.value_head, None):
    directory = str(tmp_path / f'adapter_{head is not None}')
    peft.save(
      directory, adapted.model.policy, _ADAPTERS, 'float32', base='x', tokenizer_dir=policy.directory, value_head=head
    )
    # A separate critic has the policy's first trunk, and its head.
    expected = {False: 3.0 if head else 0.0, True: 0.0}
    for separate, bias in expected.items():
      model = _load(saved, adapters=_ADAPTERS, adapter_path=directory, separate_critic=separate, seed=9).model
      assert float(model.value_head.bias[...]) == bias
      _equal(nnx.state(lora.adapters(model.policy)), nnx.state(lora.adapters(adapted.model.policy)))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(saved, tmp_path):
  policy, _ = saved
  size = policy.tokenizer.size
  for name, vocab in (('small', size - 1), ('large', size + 7)):
    qwen = random_model(vocab).policy
    save_model(str(tmp_path / name), qwen, qwen.cfg, 'float32', tokenizer_dir=policy.directory)
  # Rows of the embedding that are no tokens, as published models have them, are never sampled.
  assert _load(saved, path=str(tmp_path / 'large')).sampler.vocab_limit == size
  with pytest.raises(UserError) as e:
    _load(saved, path=str(tmp_path / 'small'))
  assert str(e.value) == f'model.path={tmp_path}/small: the tokenizer has {size} tokens, the model only {size - 1}'


def test_a_critic_that_was_saved_beside_the_policy_is_begun_with(tmp_path, caplog):
  config = small_config(model__separate_critic=True)
  policy = build.load_policy(config)
  model = policy.model
  # It begins as the policy does, in arrays of its own.
  _equal(nnx.state(model.critic), nnx.state(model.policy))
  model.critic.norm.weight.set_value(1.5 * model.critic.norm.weight[...])
  model.value_head.bias.set_value(jnp.float32(7.0))
  save_model(
    str(tmp_path / 'out'), model.policy, model.policy.cfg, 'float32', tokenizer_dir=policy.directory,
    value_head=model.value_head, critic=model.critic,
  )  # fmt: skip
  config.model.path = str(tmp_path / 'out')
  again = build.load_policy(config)
  _equal(param_state(again.model), param_state(model))
  assert '123k parameters, 123k of the critic' in again.describe()
  # The shared form does not take a head that reads another trunk.
  config.model.separate_critic = False
  with caplog.at_level(logging.INFO, 'ragen_jax'):
    assert float(build.load_policy(config).model.value_head.bias[...]) == 0
  assert 'is not used: model.separate_critic is off' in caplog.text


def test_each_weight_has_a_layout_or_is_named(saved):
  policy, settings = saved
  cfg = read_config(settings.path)
  found = weight_shardings(cfg, jax.sharding.AbstractMesh((1, 2, 2), AXES))
  paths = {path for path, _ in nnx.to_flat_state(nnx.state(policy.model.policy))}
  assert set(found) == paths
  divided = {path for path, sharding in found.items() if any(sharding.spec)}
  assert ('layers', 0, 'self_attn', 'k_proj', 'kernel') in divided and ('norm', 'weight') not in divided
  with pytest.raises(UserError, match=rf'^mesh\.tensor=64: does not divide the {cfg.vocab_size} of embed_tokens'):
    weight_shardings(cfg, jax.sharding.AbstractMesh((1, 1, 64), AXES))
