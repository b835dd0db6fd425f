"""What all tests share.

Tests run on one CPU device unless the environment says otherwise (`JAX_PLATFORMS=cuda python -m pytest`). A test that
needs several devices or processes starts a subprocess with its own `XLA_FLAGS`.
"""

import os
import pathlib

# Read by JAX when it is imported, so before any test module is. Nothing is taken from a compilation cache that an
# earlier run left behind: a compilation that fails must fail every time.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'false'
# No test reaches for a model hub.
os.environ.setdefault('HF_HUB_OFFLINE', '1')

import pytest

REPO = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope='session')
def shared_dir() -> pathlib.Path:
  """The directory `shared` beside the repository: reference data too large, or not ours, to be in it."""
  path = REPO.parent / 'shared'
  if not path.is_dir():
    pytest.skip(f'needs the reference data in {path}, which is not there')
  return path


@pytest.fixture(scope='session')
def qwen_tokenizer_dir(shared_dir: pathlib.Path) -> pathlib.Path:
  """The tokenizer of Qwen2.5 as a Hugging Face directory, with `encode_vectors.json`: texts and their ids."""
  path = shared_dir / 'qwen2.5-tokenizer'
  if not (path / 'tokenizer.json').is_file():
    pytest.skip(f'needs the Qwen2.5 tokenizer in {path}, which is not there')
  return path
