"""Checkpoints that several tests start from."""

from __future__ import annotations

import json

import pytest

from ragen_jax.models.checkpoint.save import save_model
from tests.support.checkpoints import SMALL, random_params


@pytest.fixture
def checkpoint(tmp_path):
  """A small Qwen2 checkpoint with tied embeddings, in one file."""
  directory = tmp_path / 'checkpoint'
  save_model(str(directory), random_params(SMALL), SMALL, 'float32')
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


@pytest.fixture(scope='module')
def transformers():
  torch = pytest.importorskip('torch', reason='the comparison with transformers needs PyTorch')
  torch.set_num_threads(1)
  import transformers

  return transformers
