"""Every requirement is imported, and everything that is imported is required."""

from __future__ import annotations

import ast
import email.message
import importlib.metadata
import importlib.util
import re
import sys

import pytest

from tests.support.paths import ROOT

# Requirements that users start and the program does not import.
STARTED_BY_USERS = {'tensorboard'}
# Requirements that another requirement imports only where it is asked to: transformers renders chat templates with it.
IMPORTED_BY_OTHERS = {'jinja2'}
# Packages that are imported where a feature needs them, and come with another requirement or are installed by the user.
OPTIONAL = {
  'ai2thor', 'anyio', 'bm25s', 'datasets', 'fast_downward', 'gymnasium', 'httpx2', 'huggingface_hub', 'mani_skill',
  'math_verify', 'mcp', 'mcp_types', 'mlflow', 'pyarrow', 'pydantic', 'reasoning_gym', 'sapien', 'textworld', 'trackio',
  'verifiers', 'wandb',
}  # fmt: skip


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
  ours = {'ragen_jax', 'configs', 'main', 'tests', 'docs', 'benchmarks', 'tools', '__future__'}
  return found - sys.stdlib_module_names - ours


def _distributions(packages, providers=None):
  """The distributions, in lower case, that provide these packages; to read them all takes a moment."""
  providers = providers or importlib.metadata.packages_distributions()
  return {name.lower().replace('_', '-') for package in packages for name in providers.get(package, [package])}


PROGRAM = ('ragen_jax', 'configs', 'benchmarks', 'main.py')


@pytest.mark.slow
def test_every_requirement_is_imported():
  unused = set(_requirements('requirements.txt')) - _distributions(_imported(*PROGRAM))
  assert unused == STARTED_BY_USERS | IMPORTED_BY_OTHERS


@pytest.mark.slow
def test_everything_that_the_program_imports_is_required():
  packages = _imported('ragen_jax', 'configs', 'main.py') - OPTIONAL
  required = {
    name for file in ('', '-endpoint', '-serve', '-stores') for name in _requirements(f'requirements{file}.txt')
  }
  providers = importlib.metadata.packages_distributions()
  missing = {package for package in packages if not _distributions({package}, providers) & required}
  assert missing == set()


@pytest.mark.parametrize('file', sorted(path.name for path in ROOT.glob('requirements-*.txt')))
def test_extras_are_files_of_their_own(file):
  extra = file.removeprefix('requirements-').removesuffix('.txt')
  line = f'optional-dependencies.{extra} = {{ file = ["{file}"] }}'
  assert line in (ROOT / 'pyproject.toml').read_text().splitlines()


@pytest.mark.parametrize(
  'file', ['requirements-endpoint.txt', 'requirements-openenv.txt', 'requirements-serve.txt', 'requirements-stores.txt']
)
def test_the_tests_install_what_the_extras_need(file):
  assert set(_requirements(file).values()) <= set(_requirements('requirements-dev.txt').values())


def _lock_page():
  spec = importlib.util.spec_from_file_location('make_licences', ROOT / 'tools' / 'make_licences.py')
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module
  spec.loader.exec_module(module)
  return module


def test_the_lock_meets_the_requirements_and_names_the_licences():
  """That the files have these hashes and licences is checked in CI, in an environment made from the lock."""
  tool = _lock_page()
  lock = tool.read_lock(tool.LOCK.read_text())
  assert tool.problems(lock, tool.read_ranges()) == []
  listed = set(re.findall(r'^\| ([a-z0-9-]+) \|', tool.PAGE.read_text(), flags=re.MULTILINE))
  assert {x.name for x in lock} == listed


def test_the_lock_is_made_from_all_that_users_install():
  """Users of an accelerator, a tracker or data sets add these, and only contributors install what the tests need."""
  tool = _lock_page()
  files = {path.name for path in ROOT.glob('requirements*.txt')}
  assert sorted(tool.RANGES) == sorted(
    files
    - {
      f'requirements-{x}.txt'
      for x in (
        'ai2thor',
        'alfworld',
        'aot',
        'data',
        'dev',
        'maniskill',
        'openenv',
        'textworld',
        'trackers',
        'verifiers',
      )
    }
  )
  (command,) = re.findall('^#   uv pip compile (.*)$', tool.LOCK.read_text(), flags=re.MULTILINE)
  assert [word for word in command.split() if word.endswith('.txt')] == list(tool.RANGES)


def test_a_lock_that_does_not_fit_is_refused():
  tool = _lock_page()
  digest = 'a' * 64
  lock = tool.read_lock(
    f'# a comment\njax==0.4.0 ; python_version < "3.12" \\\n  --hash=sha256:{digest}\nflax==0.12.8\n'
  )
  assert [(x.name, x.version, x.hashes) for x in lock] == [('jax', '0.4.0', 1), ('flax', '0.12.8', 0)]
  ranges = [tool.Requirement(x) for x in ('jax>=0.10.2', 'flax>=0.12.8', 'chex>=0.1')]
  assert tool.problems(lock, ranges) == [
    'flax==0.12.8 has no hash',
    'jax has 0 versions for Python 3.12 on linux; must have 1',
    'jax==0.4.0 is not in jax>=0.10.2',
    'chex has 0 versions for Python 3.11 on linux; must have 1',
  ]
  with pytest.raises(ValueError, match='one version'):
    tool.read_lock('jax>=0.10.2\n')


@pytest.mark.parametrize(
  ('markers', 'wanted', 'problem'),
  [
    ([''], 'jax', ''),
    (['; python_full_version < "3.12"', '; python_full_version >= "3.12"'], 'jax', ''),
    (['; python_version < "3.12"'], 'jax ; python_version < "3.12"', ''),
    (['; python_version < "3.12"'], 'jax', 'jax has 0 versions for Python 3.12 on linux; must have 1'),
    (['; python_version > "3.12"'], 'jax', 'jax has 0 versions for Python 3.11 on linux; must have 1'),
    (['; sys_platform != "win32"'], 'jax', 'jax has 0 versions for Python 3.11 on win32; must have 1'),
    (['', '; python_version >= "3.13"'], 'jax', 'jax has 2 versions for Python 3.13 on linux; must have 1'),
  ],
)
def test_a_requirement_has_one_version_for_each_python_and_system(markers, wanted, problem):
  tool = _lock_page()
  digest = 'a' * 64
  lock = tool.read_lock('\n'.join(f'jax==0.12.0 {marker} \\\n  --hash=sha256:{digest}' for marker in markers))
  assert tool.problems(lock, [tool.Requirement(wanted)]) == [problem][: bool(problem)]


def test_licences_are_read_from_the_locked_versions(monkeypatch):
  tool = _lock_page()
  installed = {'jax': '0.10.2', 'flax': '0.12.0'}

  def version(name):
    if name not in installed:
      raise importlib.metadata.PackageNotFoundError(name)
    return installed[name]

  monkeypatch.setattr(tool.importlib.metadata, 'version', version)
  lines = ['jax==0.10.2.0', 'jax==9.9 ; python_version < "3.0"', 'flax==0.12.8', 'chex==1.0']
  assert tool.not_installed(tool.read_lock('\n'.join(lines))) == [
    'flax==0.12.8 is locked, 0.12.0 is installed; pip install -r requirements.lock',
    'chex==1.0 is locked, nothing is installed; pip install -r requirements.lock',
  ]


OSI = 'License :: OSI Approved'


@pytest.mark.parametrize(
  ('stated', 'licence'),
  [
    ([('License-Expression', 'MIT AND Zlib')], 'MIT AND Zlib'),
    ([('License', 'Apache 2.0 License\nand the text of it')], 'Apache-2.0'),
    ([('Classifier', f'{OSI} :: BSD License')], 'BSD-3-Clause'),
    ([('Classifier', OSI), ('Classifier', f'{OSI} :: MIT License'), ('Classifier', 'Topic :: Games')], 'MIT'),
    ([('Classifier', f'{OSI} :: MIT License'), ('Classifier', f'{OSI} :: Apache Software License')],
     'Apache-2.0 OR MIT'),
    ([('Classifier', f'{OSI} :: MIT License'), ('License', 'MIT')], 'MIT'),
    ([('Classifier', f'{OSI} :: BSD License'), ('License', 'BSD-2-Clause')], 'BSD-2-Clause'),
  ],
)  # fmt: skip
def test_licences_are_read(monkeypatch, stated, licence):
  assert _licence_of(monkeypatch, stated) == licence


@pytest.mark.parametrize(
  ('stated', 'refused'),
  [
    ([], ''),
    ([('Classifier', OSI)], ''),
    ([('License-Expression', 'AGPL-3.0-only')], 'AGPL-3.0-only'),
    ([('License-Expression', 'MIT AND AGPL-3.0-only')], 'AGPL-3.0-only'),
    ([('Classifier', f'{OSI} :: MIT License'), ('Classifier', f'{OSI} :: GNU Affero General Public License v3')],
     'GNU Affero General Public License v3'),
    ([('License-Expression', 'MIT'), ('Classifier', 'License :: Other/Proprietary License')],
     'Other/Proprietary License'),
    ([('Classifier', f'{OSI} :: MIT License'), ('License', 'AGPL-3.0-only')], 'AGPL-3.0-only'),
    ([('License-Expression', 'MIT'), ('License', 'AGPL-3.0-only')], 'AGPL-3.0-only'),
    ([('Classifier', f'{OSI} :: BSD License'), ('License', 'Permission is granted\nto all')], 'Permission is granted'),
  ],
)  # fmt: skip
def test_every_statement_about_a_licence_must_be_known(monkeypatch, stated, refused):
  with pytest.raises(ValueError, match=re.escape(f'thing: its licence is {refused!r}; allowed are 0BSD, ')):
    _licence_of(monkeypatch, stated)


def _licence_of(monkeypatch, stated):
  tool, message = _lock_page(), email.message.Message()
  for field, value in stated:
    message[field] = value
  monkeypatch.setattr(tool.importlib.metadata, 'metadata', lambda _: message)
  return tool.licence_of('thing')
