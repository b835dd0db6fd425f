"""Writes requirements.lock and docs/licences.md from the output of `uv pip compile`, or checks both.

  python docs/make_licences.py new.lock    replaces requirements.lock, keeping its comment, and writes the licences
  python docs/make_licences.py --check     tells whether the lock fits the requirements, and the page fits the lock

The licences are those that the installed packages state, so the locked packages must be installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import pathlib
import re
import sys

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[1]
LOCK, PAGE = ROOT / 'requirements.lock', ROOT / 'docs' / 'licences.md'
RANGES = ('requirements.txt', 'requirements-serve.txt', 'requirements-endpoint.txt')

# SPDX names of what packages state instead, in a classifier or in the first line of the field License.
_SPDX = {
  '3-Clause BSD License': 'BSD-3-Clause',
  'Apache 2.0': 'Apache-2.0',
  'Apache 2.0 License': 'Apache-2.0',
  'Apache Software License': 'Apache-2.0',
  'BSD License': 'BSD-3-Clause',
  'ISC License (ISCL)': 'ISC',
  'MIT License': 'MIT',
  'Python Software Foundation License': 'PSF-2.0',
}
# Packages that are installed on other systems only, such as Windows; stated by their files.
_OTHER_SYSTEMS = {'colorama': 'BSD-3-Clause', 'httpx2-jsfetch': 'BSD-3-Clause', 'nest-asyncio': 'BSD-2-Clause'}
# Licences that a program under Apache-2.0 may depend on.
_PERMISSIVE = (
  '0BSD',
  'Apache-2.0',
  'BSD-2-Clause',
  'BSD-3-Clause',
  'CC0-1.0',
  'ISC',
  'MIT',
  'MIT-CMU',
  'PSF-2.0',
  'Zlib',
)
_ALLOWED = frozenset((*_PERMISSIVE, 'AFL-2.1', 'CNRI-Python', 'MPL-2.0'))

_TITLE = """# Licences of the dependencies

`python docs/make_licences.py` writes this page from the packages of [requirements.lock](../requirements.lock).

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


def problems(lock: list[Locked], ranges: list[Requirement]) -> list[str]:
  """What is wrong with a lock: lines without a hash, and requirements that it does not meet; one line each."""
  found = [f'{x.name}=={x.version} has no hash' for x in lock if not x.hashes]
  for wanted in ranges:
    own = [x for x in lock if x.name == canonicalize_name(wanted.name)]
    if not own:
      found.append(f'{wanted.name} is not locked')
    found += [f'{x.name}=={x.version} is not in {wanted}' for x in own if not wanted.specifier.contains(x.version)]
  return found


def licence_of(name: str) -> str:
  """The SPDX expression of a package's licence.

  Raises:
    ValueError: the package is not installed, or states a licence that is unknown or not allowed.
  """
  try:
    told = importlib.metadata.metadata(name)
  except importlib.metadata.PackageNotFoundError:
    if name not in _OTHER_SYSTEMS:
      raise ValueError(f'{name} is not installed; pip install -r requirements.lock') from None
    return _OTHER_SYSTEMS[name]
  classifiers = [x.split(' :: ')[-1] for x in told.get_all('Classifier') or [] if x.startswith('License ::')]
  field = (told.get('License') or '').partition('\n')[0]
  known = [_SPDX[x] for x in classifiers if x in _SPDX]
  expression = told.get('License-Expression') or ' OR '.join(sorted(known)) or _SPDX.get(field, field)
  unknown = set(re.split(r' (?:AND|OR) ', expression)) - _ALLOWED
  if unknown:
    raise ValueError(f'{name}: its licence is {expression!r}; allowed are {", ".join(sorted(_ALLOWED))}')
  return expression


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
    wrong = problems(lock, read_ranges())
    licences = page(lock)
  except ValueError as e:
    sys.exit(f'error: {e}')
  if arguments.check and licences != PAGE.read_text():
    wrong.append(f'{PAGE.name} is not up to date; run python docs/make_licences.py with a new lock')
  if wrong:
    sys.exit('\n'.join(f'error: {line}' for line in wrong))
  if arguments.lock:
    LOCK.write_text(text)
    PAGE.write_text(licences)


if __name__ == '__main__':
  main()
