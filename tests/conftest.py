"""What all tests share.

Tests run on one CPU device unless the environment says otherwise (`JAX_PLATFORMS=cuda python -m pytest`). A test that
needs several devices or processes starts a subprocess with its own `XLA_FLAGS`.
"""

import gc
import importlib.resources
import mmap
import os
import pathlib
import tempfile

# Read by JAX when it is imported, so before any test module is.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Compilation takes most of the tests' time, and the compiled programs run for moments.
if os.environ['JAX_PLATFORMS'] == 'cpu':
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_backend_optimization_level=0'.strip()
# Tests and their subprocesses share compiled programs. The cache ends with the run of pytest: a compilation that fails
# must fail every time.
if 'PYTEST_XDIST_WORKER' not in os.environ:  # workers inherit the variable
  _CACHE = tempfile.TemporaryDirectory(prefix='ragen-jax-tests-')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = _CACHE.name
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.03')
# No test connects to a model hub.
os.environ.setdefault('HF_HUB_OFFLINE', '1')

import jax
import pytest

from tests.support.paths import ROOT


def pytest_configure(config: pytest.Config) -> None:
  """Lets the default tests compile without XLA's emitters of fusions, in half the time. Slow tests keep them."""
  on_cpu, is_worker = os.environ['JAX_PLATFORMS'] == 'cpu', 'PYTEST_XDIST_WORKER' in os.environ
  if config.option.markexpr != 'not slow' or not on_cpu or is_worker:  # workers inherit the variable
    return
  for library in importlib.resources.files('jaxlib').glob('libjax_common.*'):
    with library.open('rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as contents:
      if contents.find(b'xla_cpu_use_fusion_emitters') >= 0:  # an unknown flag would end the process
        os.environ['XLA_FLAGS'] += ' --xla_cpu_use_fusion_emitters=false'


# Folders in the order of the import contract, from the top down. What stands higher runs more of the program and takes
# longer, and long files must start first, so that no worker is left with one of them at the end.
_FOLDERS = ('whole', '', 'modes', 'compilers', 'training', 'sft', 'evaluation', 'agent', 'sampling', 'models', 'envs')


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Sorts the tests by folder; those of a file stay together and in order."""

  def rank(item: pytest.Item) -> int:
    folder, *below = item.path.relative_to(ROOT / 'tests').parts
    folder = folder if below else ''
    return _FOLDERS.index(folder) if folder in _FOLDERS else len(_FOLDERS)

  items.sort(key=rank)


# Programs that were compiled, or read from the cache, since the compiled programs were last freed.
_programs = 0
_MOST_PROGRAMS = 300


def _count_programs(event: str, duration: float, **_: object) -> None:
  del duration
  global _programs
  _programs += event == '/jax/core/compile/backend_compile_duration'


jax.monitoring.register_event_duration_secs_listener(_count_programs)


@pytest.fixture(scope='module', autouse=True)
def _forget_programs():
  """Frees the compiled programs of test files, which would stay in memory until the process ends.

  It takes half a second, so it waits until there are many.
  """
  global _programs
  yield
  if _programs > _MOST_PROGRAMS:
    jax.clear_caches()
    gc.collect()
    _programs = 0


@pytest.fixture(scope='session')
def shared_dir() -> pathlib.Path:
  """The directory `shared` beside the repository, with reference data that is too large for it or not ours."""
  path = ROOT.parent / 'shared'
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
