"""Adapters: initial values, targets, merging, and the split into trained and frozen weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax.models import lora
from ragen_jax.models.checkpoint.load import load_model
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.models.value_head import ActorCritic
from tests.support.adapters import SMALL, TOKENS, adapted, logits


def test_fresh_adapters_change_nothing_and_are_drawn_as_peft_draws_them():
  model = adapted(config=None)
  before = logits(model, TOKENS)
  lora.attach(model, lora.LoraConfig(64, 64, lora.TARGETS), nnx.Rngs(1))
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
@pytest.mark.slow_cases('512')
def test_the_adapted_model_is_the_merged_model(tmp_path, width):
  """Both ways of running projections: those of narrow models are fused."""
  cfg = QwenConfig(**(vars(SMALL) | {'hidden_size': width, 'num_layers': 1}))
  model = adapted(cfg, lora.LoraConfig(4, 6, ('q_proj', 'v_proj', 'o_proj', 'up_proj', 'down_proj')))
  save_model(str(tmp_path / 'merged'), model, cfg, 'float32', max_shard_bytes=50_000)
  merged = load_model(str(tmp_path / 'merged'), dtype=jnp.float32, param_dtype=jnp.float32)
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
