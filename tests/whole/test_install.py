"""The installed package: built as a wheel, used from a folder that has nothing to do with the repository."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.support.paths import ROOT
from tests.support.processes import environment, run_python

SOURCES = (
  'pyproject.toml', 'setup.py', 'README.md', 'LICENSE', *(path.name for path in ROOT.glob('requirements*.txt')),
)  # fmt: skip

_USE = """
import pathlib, ragen_jax, sys
assert pathlib.Path(ragen_jax.__file__).parents[1] == pathlib.Path(sys.argv[1])
config = ragen_jax.load_config('frozenlake_ppo:tiny-lora', {'train.groups': 8})
assert config.lora.rank == 64 and config.train.groups == 8
config = ragen_jax.load_config('bandit_starpo_s')
policy = ragen_jax.load_policy(config)
print(policy.describe())
"""


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  """The wheel, built from a copy so that the repository stays clean."""
  setuptools = pytest.importorskip('setuptools', reason='needs setuptools 77 or newer to build without a network')
  if int(setuptools.__version__.split('.')[0]) < 77:
    pytest.skip(f'needs setuptools 77 or newer, and {setuptools.__version__} is installed')
  directory = tmp_path_factory.mktemp('wheel')
  source = directory / 'source'
  for name in ('ragen_jax', 'configs'):
    shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns('__pycache__'))
  for name in SOURCES:
    shutil.copy(ROOT / name, source / name)
  options = ['--no-deps', '--no-build-isolation', '--no-index', '-q']
  command = [sys.executable, '-m', 'pip', 'wheel', *options, '-w', str(directory), str(source)]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr[-3000:]
  (path,) = directory.glob('*.whl')
  return path


@pytest.fixture(scope='module')
def site(wheel, tmp_path_factory):
  """A directory with the installed package and nothing else."""
  directory = tmp_path_factory.mktemp('site')
  command = [sys.executable, '-m', 'pip', 'install', '--no-deps', '--no-index', '-q', '--target', directory, wheel]
  subprocess.run(command, check=True)
  return directory


@pytest.mark.slow
def test_the_wheel_has_the_package_its_data_and_the_configs(wheel):
  names = {name for name in zipfile.ZipFile(wheel).namelist() if '.dist-info/' not in name}
  package = {
    str(path.relative_to(ROOT))
    for path in (ROOT / 'ragen_jax').rglob('*')
    if path.is_file() and '__pycache__' not in path.parts
  }
  configs = {f'ragen_jax/configs/{path.name}' for path in (ROOT / 'configs').glob('*.py')}
  assert names == package | configs


@pytest.mark.slow
def test_the_package_is_used_from_any_folder(site, tmp_path):
  result = run_python(_USE, str(site), cwd=tmp_path, env=environment(PYTHONPATH=str(site)))
  assert result.returncode == 0, result.stderr[-3000:]
  assert re.match(r'\d+k parameters, float32, 1 device', result.stdout)


@pytest.mark.slow
def test_the_command_is_installed(site, tmp_path):
  (script,) = (site / 'bin').iterdir()
  assert script.name == 'ragen-jax'
  command = [sys.executable, script, '--config=frozenlake_ppo', '--config.train.groups=0']
  result = subprocess.run(
    command, cwd=tmp_path, env=environment(PYTHONPATH=str(site)), capture_output=True, text=True, check=False
  )
  assert result.returncode == 2 and result.stderr == 'error: train.groups=0: must be at least 1\n'
  assert list(tmp_path.iterdir()) == []
