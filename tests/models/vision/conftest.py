"""Models that read images, of both families, by `transformers` and by us."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import pytest

from ragen_jax.models.checkpoint.load import load_model
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.vision.config import FAMILIES
from tests.support import vision


@dataclasses.dataclass(frozen=True)
class Pair:
  """The same weights twice, and their directory."""

  family: str
  theirs: Any
  ours: Qwen
  directory: str


@functools.cache
def _pair(transformers, family: str, directory) -> Pair:
  theirs = vision.hf_model(transformers, family, directory)
  return Pair(family, theirs, load_model(str(directory), dtype=jnp.float32, param_dtype=jnp.float32), str(directory))


@pytest.fixture(scope='module', params=FAMILIES)
def pair(request, transformers, tmp_path_factory) -> Pair:
  # One model a family, however many files of tests ask for it.
  return _pair(transformers, request.param, tmp_path_factory.getbasetemp() / request.param)
