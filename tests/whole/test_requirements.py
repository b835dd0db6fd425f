"""Every requirement is imported, and everything that is imported is required."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys

import pytest

from tests.support.paths import ROOT

# Requirements that users start and the program does not import.
STARTED_BY_USERS = {'tensorboard'}
# Packages that are imported where a feature needs them, and come with another requirement or are installed by the user.
OPTIONAL = {'gymnasium', 'huggingface_hub'}


def _requirements(file):
  """Name -> whole line, of a requirements file."""
  lines = [line.split('#')[0].strip() for line in (ROOT / file).read_text().splitlines()]
  return {re.split('[>=<]', line)[0].lower(): line for line in lines if line}


def _imported(*folders):
  """The top-level packages that the Python files in these folders or files import, without our own."""
  found = set()
  for folder in folders:
    for path in [ROOT / folder] if folder.endswith('.py') else (ROOT / folder).rglob('*.py'):
      for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
          found |= {alias.name.partition('.')[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
          found.add(node.module.partition('.')[0])
  return found - sys.stdlib_module_names - {'ragen_jax', 'configs', 'main', 'tests', 'docs', 'benchmarks', '__future__'}


def _distributions(packages):
  """The distributions, in lower case, that provide these packages."""
  providers = importlib.metadata.packages_distributions()
  return {name.lower().replace('_', '-') for package in packages for name in providers.get(package, [package])}


PROGRAM = ('ragen_jax', 'configs', 'benchmarks', 'main.py')


def test_every_requirement_is_imported():
  unused = set(_requirements('requirements.txt')) - _distributions(_imported(*PROGRAM)) - STARTED_BY_USERS
  assert unused == set()


def test_everything_that_the_program_imports_is_required():
  packages = _imported('ragen_jax', 'configs', 'main.py') - OPTIONAL
  files = ('requirements.txt', 'requirements-endpoint.txt', 'requirements-serve.txt')
  required = {name for file in files for name in _requirements(file)}
  missing = {package for package in packages if not _distributions({package}) & required}
  assert missing == set()


@pytest.mark.parametrize('file', sorted(path.name for path in ROOT.glob('requirements-*.txt')))
def test_extras_are_files_of_their_own(file):
  extra = file.removeprefix('requirements-').removesuffix('.txt')
  line = f'optional-dependencies.{extra} = {{ file = ["{file}"] }}'
  assert line in (ROOT / 'pyproject.toml').read_text().splitlines()


def test_the_tests_install_what_the_extras_need():
  installed = set(_requirements('requirements-dev.txt').values())
  for file in ('requirements-endpoint.txt', 'requirements-serve.txt'):
    assert set(_requirements(file).values()) <= installed
