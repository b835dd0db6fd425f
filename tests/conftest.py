"""What all tests share.

Tests run on one CPU device unless the environment says otherwise (`JAX_PLATFORMS=cuda python -m pytest`). A test that
needs several devices or processes starts a subprocess with its own `XLA_FLAGS`.
"""

import gc
import os
import pathlib
import tempfile

# Read by JAX when it is imported, so before any test module is.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Compiling is most of the tests' time, and what they compile runs for moments.
if os.environ['JAX_PLATFORMS'] == 'cpu':
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_backend_optimization_level=0'.strip()
# Tests and their subprocesses share what they compile, which is most of their time. Nothing comes from an earlier run:
# a compilation that fails must fail every time.
if 'PYTEST_XDIST_WORKER' not in os.environ:  # the workers inherit it
  _CACHE = tempfile.TemporaryDirectory(prefix='ragen-jax-tests-')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = _CACHE.name
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.2')
# No test reaches for a model hub.
os.environ.setdefault('HF_HUB_OFFLINE', '1')

import jax
import pytest

REPO = pathlib.Path(__file__).resolve().parents[1]

# Files that take longest come first, so that no worker is left with one of them at the end.
_LONG = (
  'test_train.py',
  'test_trainer.py',
  'test_critic.py',
  'test_lora.py',
  'test_mesh.py',
  'test_memory.py',
  'test_sft.py',
  'test_sampler.py',
  'test_token_fidelity.py',
  'test_launch.py',
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Sorts files by length, roughly; tests of a file stay together and in order."""
  items.sort(key=lambda item: _LONG.index(item.path.name) if item.path.name in _LONG else len(_LONG))


@pytest.fixture(scope='module', autouse=True)
def _forget_programs():
  """Programs stay in memory until the end of a process; those of a file that is done are of no more use."""
  yield
  jax.clear_caches()
  gc.collect()


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
