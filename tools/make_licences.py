"""Writes requirements.lock and docs/licences.md from the output of `uv pip compile`, or checks both.

  python tools/make_licences.py new.lock    replaces requirements.lock, keeping its comment, and writes the licences
  python tools/make_licences.py --check     tells whether the lock fits the requirements, and the page fits the lock

The licences are those that the installed packages state, so the locked packages must be installed in their locked
versions. Everything that a package states about its licence must be known and allowed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import itertools
import pathlib
import re
import sys
from collections.abc import Mapping

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = pathlib.Path(__file__).parents[1]
LOCK, PAGE = ROOT / 'requirements.lock', ROOT / 'docs' / 'licences.md'
RANGES = ('requirements.txt', 'requirements-serve.txt', 'requirements-endpoint.txt', 'requirements-stores.txt')

# The systems and Pythons that the lock is for; later Pythons are as good as the last of these.
_SYSTEMS = {'linux': ('Linux', 'posix'), 'darwin': ('Darwin', 'posix'), 'win32': ('Windows', 'nt')}
_PYTHONS = tuple(f'3.{minor}' for minor in range(11, 20))

# SPDX names of what packages state instead, in a classifier or in the first line of the field License.
_SPDX = {
  '3-Clause BSD License': 'BSD-3-Clause',
  'Apache 2.0': 'Apache-2.0',
  'Apache 2.0 License': 'Apache-2.0',
  'Apache Software License': 'Apache-2.0',
  'BSD': 'BSD-3-Clause',
  'BSD 3-Clause License': 'BSD-3-Clause',
  'BSD License': 'BSD-3-Clause',
  'ISC License': 'ISC',
  'ISC License (ISCL)': 'ISC',
  'MIT License': 'MIT',
  'Mozilla Public License 2.0 (MPL 2.0)': 'MPL-2.0',
  'Python Software Foundation License': 'PSF-2.0',
}
# Packages that are installed on other systems only, such as Windows; stated by their files.
_OTHER_SYSTEMS = {'colorama': 'BSD-3-Clause', 'httpx2-jsfetch': 'BSD-3-Clause', 'nest-asyncio': 'BSD-2-Clause'}
# Packages whose field License names none, and whose classifiers are complete: it has the text of a licence, or, for
# python-dateutil, 'Dual License'.
_BY_CLASSIFIERS = {'cycler', 'kiwisolver', 'matplotlib', 'python-dateutil', 'scipy'}
# Licences that a program under Apache-2.0 may depend on.
_PERMISSIVE = (
  '0BSD',
  'Apache-2.0',
  'BSD-2-Clause',
  'BSD-3-Clause',
  'CC0-1.0',
  'ISC',
  'MIT',
  'MIT-0',
  'MIT-CMU',
  'PSF-2.0',
  'Zlib',
)
_ALLOWED = frozenset((*_PERMISSIVE, 'AFL-2.1', 'CNRI-Python', 'MPL-2.0'))

_TITLE = """# Licences of the dependencies

`python tools/make_licences.py` writes this page from the packages of [requirements.lock](../requirements.lock).

| Package | Licence |
|---|---|
"""


@dataclasses.dataclass(frozen=True)
class Locked:
  """A line of the lock.

  Attributes:
    name: the package.
    version: its only version.
    marker: the systems and Pythons that the line is for; None for all.
    hashes: number of SHA-256 hashes.
  """

  name: str
  version: str
  marker: Marker | None
  hashes: int


def read_lock(text: str) -> list[Locked]:
  """The packages of a lock.

  Raises:
    ValueError: a line names no single version.
  """
  found = []
  for entry in re.split(r'\n(?=\S)', re.sub(r'^#.*\n', '', text, flags=re.MULTILINE)):
    line, *rest = entry.split('\\\n')
    requirement = Requirement(line.strip())
    versions = list(requirement.specifier)
    if len(versions) != 1 or versions[0].operator != '==':
      raise ValueError(f'{line.strip()!r}: must name one version')
    hashes = sum(bool(re.fullmatch(r'\s*--hash=sha256:[0-9a-f]{64}\s*', x)) for x in rest)
    found.append(Locked(canonicalize_name(requirement.name), versions[0].version, requirement.marker, hashes))
  return found


def read_ranges(files: tuple[str, ...] = RANGES) -> list[Requirement]:
  """The requirements in some files."""
  lines = [line.partition('#')[0].strip() for file in files for line in (ROOT / file).read_text().splitlines()]
  return [Requirement(line) for line in lines if line]


def _environment(python: str, system: str) -> dict[str, str]:
  """What markers ask about a machine."""
  platform_system, os_name = _SYSTEMS[system]
  return {
    'python_version': python,
    'python_full_version': f'{python}.0',
    'implementation_version': f'{python}.0',
    'sys_platform': system,
    'platform_system': platform_system,
    'os_name': os_name,
    'platform_machine': 'x86_64',
    'implementation_name': 'cpython',
    'platform_python_implementation': 'CPython',
  }


def _is_for(marker: Marker | None, environment: Mapping[str, str] | None = None) -> bool:
  """Whether a line with this marker is for an environment; without one, for the environment of this process."""
  return marker is None or marker.evaluate(environment)


def problems(lock: list[Locked], ranges: list[Requirement]) -> list[str]:
  """What is wrong with a lock: lines without a hash, and requirements that it does not meet; one line each.

  A requirement must have exactly one version for each system and Python that it is for.
  """
  found = [f'{x.name}=={x.version} has no hash' for x in lock if not x.hashes]
  for wanted in ranges:
    own = [x for x in lock if x.name == canonicalize_name(wanted.name)]
    for python, system in itertools.product(_PYTHONS, _SYSTEMS):
      environment = _environment(python, system)
      versions = [x.version for x in own if _is_for(x.marker, environment)]
      if _is_for(wanted.marker, environment) and len(versions) != 1:
        found.append(f'{wanted.name} has {len(versions)} versions for Python {python} on {system}; must have 1')
        break  # one line tells it
    found += [f'{x.name}=={x.version} is not in {wanted}' for x in own if not wanted.specifier.contains(x.version)]
  return found


def not_installed(lock: list[Locked]) -> list[str]:
  """The packages that are not installed here in the locked version, one line each."""
  found = []
  for x in lock:
    if _is_for(x.marker):
      try:
        version = importlib.metadata.version(x.name)
      except importlib.metadata.PackageNotFoundError:
        version = 'nothing'
      if version == 'nothing' or Version(version) != Version(x.version):
        found.append(f'{x.name}=={x.version} is locked, {version} is installed; pip install -r requirements.lock')
  return found


def licence_of(name: str) -> str:
  """The SPDX expression of a package's licence.

  Raises:
    ValueError: the package is not installed, or one of its statements is a licence that is unknown or not allowed.
  """
  try:
    told = importlib.metadata.metadata(name)
  except importlib.metadata.PackageNotFoundError:
    if name not in _OTHER_SYSTEMS:
      raise ValueError(f'{name} is not installed; pip install -r requirements.lock') from None
    return _OTHER_SYSTEMS[name]
  classifiers = [x for x in told.get_all('Classifier') or [] if x.startswith('License ::')]
  named = [x.rpartition(' :: ')[2] for x in classifiers if x != 'License :: OSI Approved']  # which alone names none
  known = sorted({_SPDX.get(x, x) for x in named})
  field = (told.get('License') or '').partition('\n')[0].strip()
  field = '' if known and name in _BY_CLASSIFIERS else _SPDX.get(field, field)
  expression = told.get('License-Expression') or ''
  stated = {*known, *_parts(field), *_parts(expression)}
  if not stated or stated - _ALLOWED:
    shown = ', '.join(sorted(stated - _ALLOWED))
    raise ValueError(f'{name}: its licence is {shown!r}; allowed are {", ".join(sorted(_ALLOWED))}')
  # The field is more exact than a classifier, which knows only one licence of the BSD.
  return expression or (field if set(_parts(field)) - set(known) else ' OR '.join(known))


def _parts(expression: str) -> list[str]:
  """The licences of an SPDX expression without parentheses."""
  return [x for x in re.split(r' (?:AND|OR) ', expression) if x]


def page(lock: list[Locked]) -> str:
  """The page of licences."""
  names = sorted({x.name for x in lock})
  return _TITLE + ''.join(f'| {name} | {licence_of(name)} |\n' for name in names)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('lock', nargs='?', help='output of `uv pip compile`')
  parser.add_argument('--check', action='store_true')
  arguments = parser.parse_args()
  if bool(arguments.lock) == arguments.check:
    parser.error('give a lock, or --check')
  text = LOCK.read_text()
  if arguments.lock:
    comment = ''.join(re.findall(r'^#.*\n', text, flags=re.MULTILINE))
    text = comment + pathlib.Path(arguments.lock).read_text()
  try:
    lock = read_lock(text)
    wrong = [*problems(lock, read_ranges()), *not_installed(lock)]
    licences = page(lock)
  except ValueError as e:
    sys.exit(f'error: {e}')
  if arguments.check and licences != PAGE.read_text():
    wrong.append(f'{PAGE.name} is not up to date; run python tools/make_licences.py with a new lock')
  if wrong:
    sys.exit('\n'.join(f'error: {line}' for line in wrong))
  if arguments.lock:
    LOCK.write_text(text)
    PAGE.write_text(licences)


if __name__ == '__main__':
  main()
