"""The tokenizer that is made from pieces, fresh models, and the model that ships."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import jax
import numpy as np
import pytest

from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.language_model import param_state
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.models import presets
from ragen_jax.models.qwen_config import FULL, LINEAR
from ragen_jax.sft import tiny_tokenizer
from tests.support.adapters import logits as logits_of
from tests.support.configs import small_config


def test_a_piece_is_one_token_and_any_text_comes_back(tmp_path):
  tiny_tokenizer.save(tiny_tokenizer.build(['Turn ', 'Turn left', 'a', '<answer>'], images=False), str(tmp_path))
  tokenizer = ChatTokenizer(tmp_path)
  assert [len(tokenizer.encode(text)) for text in ('Turn ', 'Turn left', '<answer>', 'a')] == [1, 1, 1, 1]
  for text in ('Turn left, then Turn right', 'Gruß 你好 🙂', '\n\t '):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_fresh_model_has_the_shape_that_was_asked_for():
  mesh = make_mesh(1, 1, 1) if jax.device_count() == 1 else make_mesh(-1, 1, 1)
  shape = (32, 2, 4, 2, 8, 64)
  make = functools.partial(
    tiny_tokenizer.make_model, num_tokens=301, tower=None, dtype='float32', attention='auto', seed=0, mesh=mesh
  )
  model = make(shape, linear_layers=0)
  cfg = model.policy.cfg
  assert (
    cfg.hidden_size,
    cfg.num_layers,
    cfg.num_heads,
    cfg.num_kv_heads,
    cfg.head_dim,
    cfg.intermediate_size,
  ) == shape
  assert cfg.vocab_size == 304 and param_state(model)
  hybrid = make((32, 6, 4, 2, 8, 64), linear_layers=2).policy.cfg
  assert hybrid.kinds == (LINEAR, LINEAR, FULL) * 2 and hybrid.architecture == 'qwen3_5'
  assert dataclasses.astuple(hybrid.linear) == (4, 4, 8, 8, 4)


@pytest.mark.slow
@pytest.mark.parametrize('name', [presets.TINY, presets.TINY_HYBRID])
def test_a_built_in_model_is_small_and_opens_in_transformers(name):
  directory = pathlib.Path(presets.resolve(name, ''))
  assert sum(f.stat().st_size for f in directory.iterdir()) < 1e6
  pytest.importorskip('torch', reason='transformers needs PyTorch to run a model')
  import torch
  from transformers import AutoModelForCausalLM, AutoTokenizer

  tokenizer = AutoTokenizer.from_pretrained(str(directory))
  ids = tokenizer('Actions: Left, Down <think>I am at (1, 2)')['input_ids']
  theirs = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
  policy = build.load_policy(small_config({'model.preset': name}))
  assert tuple(ids) == policy.tokenizer.encode('Actions: Left, Down <think>I am at (1, 2)')
  with torch.no_grad():
    expected = theirs(torch.tensor([ids])).logits[0].numpy()
  found = logits_of(policy.model.policy, jax.numpy.asarray([ids]))
  np.testing.assert_allclose(np.asarray(found)[0], expected, atol=1e-4)
