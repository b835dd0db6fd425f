"""What all tests share.

Tests run on one CPU device unless the environment says otherwise (`JAX_PLATFORMS=cuda python -m pytest`). A test that
needs several devices or processes starts a subprocess with its own `XLA_FLAGS`.
"""

import gc
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable

# Read by JAX when it is imported, so before any test module is.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Where the command ignores Ctrl-C (`nohup`, a background job of a script), tests would not receive the signals that
# they send, and their subprocesses would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests and their subprocesses share compiled programs. The cache ends with the run of pytest: a compilation that fails
# must fail every time.
if 'PYTEST_XDIST_WORKER' not in os.environ:  # workers inherit the variable
  _CACHE = tempfile.TemporaryDirectory(prefix='ragen-jax-tests-')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = _CACHE.name
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.5')  # to write and read one takes 0.3 s
# No test connects to a model hub.
os.environ.setdefault('HF_HUB_OFFLINE', '1')

import jax
import pytest

from tests.support.paths import ROOT


def pytest_configure(config: pytest.Config) -> None:
  """Lets tests compile in a fifth of the time: the compiled programs run for moments.

  Parts of a program that are compiled at the same time take more time together, and the workers use all cores. Tests
  need neither XLA's emitters of fusions nor the lines of the source in programs, a third of the time of lowering.
  """
  if os.environ['JAX_PLATFORMS'] != 'cpu' or 'PYTEST_XDIST_WORKER' in os.environ:  # workers inherit the variable
    return
  flags = [
    '--xla_backend_optimization_level=0', '--xla_cpu_parallel_codegen_split_count=1',
    '--xla_cpu_use_fusion_emitters=false',
  ]  # fmt: skip
  os.environ['JAX_TRACEBACK_IN_LOCATIONS_LIMIT'] = '0'
  jax.config.update('jax_traceback_in_locations_limit', 0)
  given = os.environ.get('XLA_FLAGS', '')
  all_of_them = ' '.join([given, *flags]).strip()
  os.environ['XLA_FLAGS'] = all_of_them if _starts(all_of_them) else ' '.join([given, *filter(_starts, flags)]).strip()


def _starts(flags: str) -> bool:
  """Whether this version of JAX starts with the flags of XLA; one that it does not know ends the process."""
  command = [sys.executable, '-c', 'import jax; jax.devices()']
  return not subprocess.run(command, env=os.environ | {'XLA_FLAGS': flags}, capture_output=True, timeout=120).returncode


# Folders in the order of the import contract, from the top down. What stands higher runs more of the program and takes
# longer, and long files must start first, so that no worker is left with one of them at the end.
_FOLDERS = ('whole', '', 'modes', 'planning', 'training', 'sft', 'evaluation', 'agent', 'sampling', 'models', 'envs')


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  """Marks cases of tests, and sorts the tests by folder; those of a file stay together and in order."""
  unknown: dict[tuple[str, str], set[str]] = {}  # ids that marks name, by test
  for item in items:
    for kind in ('exhaustive', 'slow'):
      named = {id_ for mark in item.iter_markers(f'{kind}_cases') for id_ in mark.args}
      if named:
        unknown.setdefault((item.nodeid.partition('[')[0], kind), set(named)).discard(item.callspec.id)
      if named and item.callspec.id in named:
        item.add_marker(kind)
    if item.get_closest_marker('exhaustive'):
      item.add_marker('slow')

  if not any('::' in argument for argument in config.args):  # else some cases are not collected
    stale = [f'{test}: {kind}_cases names no case {ids}' for (test, kind), ids in unknown.items() if ids]
    if stale:
      raise pytest.UsageError('\n'.join(stale))

  def rank(item: pytest.Item) -> int:
    folder, *below = item.path.relative_to(ROOT / 'tests').parts
    folder = folder if below else ''
    return _FOLDERS.index(folder) if folder in _FOLDERS else len(_FOLDERS)

  items.sort(key=rank)


def pytest_collection() -> None:
  """What is imported and collected stays; looking for garbage in it took a seventh of the time."""
  gc.disable()


def pytest_collection_finish() -> None:
  """Lets Python look for garbage less often, and not in the modules, which stay: it took a tenth of the time."""
  gc.collect()
  gc.freeze()
  gc.enable()
  gc.set_threshold(100_000, 50, 50)


# Programs that were compiled, or read from the cache, since the compiled programs were last freed.
_programs = 0
_MOST_PROGRAMS = 800  # three gigabytes


def _count_programs(event: str, duration: float, **_: object) -> None:
  del duration
  global _programs
  _programs += event == '/jax/core/compile/backend_compile_duration'


jax.monitoring.register_event_duration_secs_listener(_count_programs)


@pytest.fixture(scope='module', autouse=True)
def _forget_programs():
  """Frees the compiled programs of test files, which would stay in memory until the process ends.

  It takes half a second, and the next files compile the same small programs again, so it waits until there are many.
  """
  global _programs
  yield
  if _programs > _MOST_PROGRAMS:
    jax.clear_caches()
    gc.collect()
    _programs = 0


@pytest.fixture
def new_programs() -> None:
  """For tests that count traces: no test before has traced the programs of equal models and settings."""
  from ragen_jax.utils import alike

  alike.forget()


@pytest.fixture(scope='session')
def shared_dir() -> pathlib.Path:
  """The directory `shared` beside the repository, with reference data that is too large for it or not ours."""
  path = ROOT.parent / 'shared'
  if not path.is_dir():
    pytest.skip(f'needs the reference data in {path}, which is not there')
  return path


@pytest.fixture(scope='session')
def real_model() -> Callable[[str], pathlib.Path]:
  """The directory of a published model by its name, in the folder that the variable RAGEN_REAL_MODELS names."""

  def find(name: str) -> pathlib.Path:
    folder = os.environ.get('RAGEN_REAL_MODELS', '')
    if not folder:
      pytest.skip('needs published models in a folder that RAGEN_REAL_MODELS names')
    path = pathlib.Path(folder) / name
    if not (path / 'config.json').is_file():
      pytest.skip(f'needs the model {name} in the folder that RAGEN_REAL_MODELS names, which is not there')
    return path

  return find


@pytest.fixture(scope='session')
def qwen_tokenizer_dir(shared_dir: pathlib.Path) -> pathlib.Path:
  """The tokenizer of Qwen2.5 as a Hugging Face directory, with `encode_vectors.json`: texts and their ids."""
  path = shared_dir / 'qwen2.5-tokenizer'
  if not (path / 'tokenizer.json').is_file():
    pytest.skip(f'needs the Qwen2.5 tokenizer in {path}, which is not there')
  return path


@pytest.fixture(scope='session')
def qwen_tokenizer(qwen_tokenizer_dir: pathlib.Path):
  """The `ChatTokenizer` of Qwen2.5, which takes a second to read."""
  from ragen_jax.agent.chat import ChatTokenizer

  return ChatTokenizer(qwen_tokenizer_dir)
