"""Checkpoints that several tests start from."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax.numpy as jnp
import pytest

from ragen_jax.models.checkpoint.load import load_model
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.vision.config import FAMILIES, QWEN3_5
from tests.support import vision
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


@dataclasses.dataclass(frozen=True)
class Pair:
  """A model that reads images, by `transformers` and by us, and its directory."""

  family: str
  theirs: Any
  ours: Qwen
  directory: str


@functools.cache
def _pair(transformers, family: str, directory) -> Pair:
  theirs = vision.hf_model(transformers, family, directory)
  return Pair(family, theirs, load_model(str(directory), dtype=jnp.float32, param_dtype=jnp.float32), str(directory))


@pytest.fixture(scope='module', params=[*FAMILIES, pytest.param(QWEN3_5 + vision.EXPERTS, marks=pytest.mark.slow)])
def pair(request, transformers, tmp_path_factory) -> Pair:
  # One model a family, however many files of tests ask for it.
  return _pair(transformers, request.param, tmp_path_factory.getbasetemp() / request.param)
