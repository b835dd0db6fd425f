"""Breaks the program at random, one place at a time, and reports the breaks that no test notices.

  python tools/breaks.py --count=200 --seed=0            # about an hour on 2 cores
  python tools/breaks.py --only=algorithms,replay        # files whose path contains one of these
  python tools/breaks.py --count=20 --list               # prints breaks and runs nothing
  python tools/breaks.py --quoted                        # all quoted breaks, and no drawn ones

A break is one change of the source, as in mutation testing: a sign, a comparison, a branch. Operators on the syntax
tree make it, so a line of source can change without a change here. tools/breaks.toml names the files and the tests that
must notice. It also quotes a few breaks that no operator makes. What names a file, a function or a text that is gone is
reported as stale.

A broken program runs with your rights. Files that delete folders are not in the table, and calls of `os.kill` stay.

A draw takes a row of the table, then an operator, then a place, each with equal probability: neither a large file nor
a common operator dominates. The tests run in copies of the checkout, first without a break. A break is 'killed' if a
test fails, and a 'time-out', which counts as killed, if the tests do not end: breaks make endless loops. One that
survived needs a test, unless it changes nothing that matters.

The exit status is 1 if less than `--least` of the breaks are killed, if something in the table is stale, or if a test
fails without a break.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib

from break_operators import OPERATORS, Source, walk

ROOT = pathlib.Path(__file__).resolve().parents[1]
TABLE = 'tools/breaks.toml'


@dataclasses.dataclass(frozen=True)
class Row:
  """A file, the functions or classes of it that are broken (none: all of it), and the tests that must notice."""

  file: str
  names: tuple[str, ...]
  tests: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Break:
  """A change of one piece of a file: bytes `start` to `end` become `new`."""

  row: Row
  operator: str
  start: int
  end: int
  new: str

  def applied(self, source: str) -> str:
    """The broken source."""
    data = source.encode()
    return (data[: self.start] + self.new.encode() + data[self.end :]).decode()

  def described(self, source: str) -> str:
    """File, line, operator, and the line before and after, in one line."""
    line = source.encode()[: self.start].count(b'\n')
    before, after = (' '.join(text.split('\n')[line].split()) for text in (source, self.applied(source)))
    return f'{self.row.file}:{line + 1}  {self.operator}: {before}  ->  {after}'


def breaks(text: str, row: Row) -> dict[str, list[Break]]:
  """All breaks of a source that operators make, by the operator's name."""
  source = Source(text)
  named = [n for n in ast.walk(source.tree) if getattr(n, 'name', None) in row.names and hasattr(n, 'body')]
  nodes = dict.fromkeys(n for top in (named if row.names else [source.tree]) for n in walk(top))
  found = {
    name: list(dict.fromkeys(Break(row, name, *change) for node in nodes for change in operator(source, node)))
    for name, operator in OPERATORS.items()
  }
  return {name: each for name, each in found.items() if each}


def _differs(before: str, after: str) -> bool:
  """Whether a changed source is a program, and another one."""
  try:
    return ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
  except SyntaxError:
    return False


def draw(sources: dict[str, str], rows: list[Row], count: int, seed: int) -> list[Break]:
  """`count` different breaks, or fewer if there are no more."""
  chance, drawn = random.Random(seed), []
  left = [found for row in rows if (found := breaks(sources[row.file], row))]
  while left and len(drawn) < count:
    row = chance.choice(left)
    operator = chance.choice(sorted(row))
    one = row[operator].pop(chance.randrange(len(row[operator])))
    if not row[operator]:
      del row[operator]
    left = [row for row in left if row]
    if _differs(sources[one.row.file], one.applied(sources[one.row.file])):
      drawn.append(one)
  return drawn


# -- the table ---------------------------------------------------------------------------------------------------------


def read_table(root: pathlib.Path) -> tuple[list[Row], list[dict[str, str]]]:
  """The rows and the quoted breaks of tools/breaks.toml."""
  table = tomllib.loads((root / TABLE).read_text())
  keys = {key: key.partition('::') for key in table['tests']}
  rows = [
    Row(file, tuple(filter(None, names.split(','))), tuple(table['tests'][key].split()))
    for key, (file, _, names) in keys.items()
  ]
  return rows, table.get('quoted', [])


def quoted_breaks(sources: dict[str, str], quoted: list[dict[str, str]]) -> tuple[list[Break], list[str]]:
  """The quoted breaks, and the names of those that are stale: their text does not occur exactly once."""
  found, stale = [], []
  for q in quoted:
    text = sources[q['file']]
    if text.count(q['old']) == 1 and _differs(text, text.replace(q['old'], q['new'])):
      start = len(text[: text.index(q['old'])].encode())
      row = Row(q['file'], (), tuple(q['tests'].split()))
      found.append(Break(row, 'quoted', start, start + len(q['old'].encode()), q['new']))
    else:
      stale.append(f'{q["file"]}: {q["old"]}')
  return found, stale


def stale_rows(sources: dict[str, str], rows: list[Row]) -> list[str]:
  """The files of the table that are gone or empty, and its names of functions and classes that are gone."""
  found = [row.file for row in rows if not sources[row.file]]
  for row in rows:
    names = {getattr(node, 'name', None) for node in ast.walk(ast.parse(sources[row.file]))}
    found += [f'{row.file}::{name}' for name in row.names if name not in names]
  return found


# -- running -----------------------------------------------------------------------------------------------------------


def copy_checkout(root: pathlib.Path, to: pathlib.Path) -> None:
  """Copies the files that git tracks or would track."""
  command = ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard']
  for name in subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split('\0'):
    if name and (root / name).is_file():
      (to / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(root / name, to / name)


def run_tests(copy: pathlib.Path, cache: str, tests: tuple[str, ...], seconds: float | None) -> tuple[str, str]:
  """Runs tests in a copy: ('killed', 'SURVIVED' or 'time-out', output). `cache` holds compiled programs."""
  command = [sys.executable, '-m', 'pytest', '-x', '-q', '-n', '0', '-p', 'no:cacheprovider', '--tb=short', *tests]
  # Tests use the cache that a worker of pytest-xdist inherits, because most programs are the same in spite of a break.
  environment = os.environ | {
    'PYTEST_XDIST_WORKER': 'gw0', 'JAX_COMPILATION_CACHE_DIR': cache, 'PYTHONPATH': str(copy),
    'PYTHONDONTWRITEBYTECODE': '1',
  }  # fmt: skip
  options = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'start_new_session': True}
  with subprocess.Popen(command, cwd=copy, env=environment, text=True, errors='replace', **options) as process:
    try:
      output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
      return 'time-out', ''
    finally:  # also what the tests have started and left behind
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
  if process.returncode == 5:
    raise SystemExit(f'no test was found: {" ".join(tests)}')
  return 'killed' if process.returncode else 'SURVIVED', output


def run(root: pathlib.Path, sources: dict[str, str], drawn: list[Break], workers: int, seconds: float) -> list[Break]:
  """Makes each break, runs its tests, prints a line about it, and returns those that survived."""
  survivors, copies = [], queue.SimpleQueue()
  with tempfile.TemporaryDirectory(prefix='breaks-') as directory:
    top = pathlib.Path(directory)
    for i in range(workers):
      copy_checkout(root, top / str(i))
      copies.put(top / str(i))

    def one(b: Break) -> tuple[str, float]:
      copy, start = copies.get(), time.monotonic()
      try:
        (copy / b.row.file).write_text(b.applied(sources[b.row.file]))
        return run_tests(copy, str(top / 'cache'), b.row.tests, seconds)[0], time.monotonic() - start
      finally:
        (copy / b.row.file).write_text(sources[b.row.file])
        copies.put(copy)

    tests = tuple(dict.fromkeys(test for b in drawn for test in b.row.tests))
    result, output = run_tests(top / '0', str(top / 'cache'), tests, None)
    if result != 'SURVIVED':
      raise SystemExit(f'{output[-4000:]}\ntests fail without a break')
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
      for b, (result, took) in zip(drawn, pool.map(one, drawn), strict=True):
        print(f'{result:8} {took:5.0f} s  {b.described(sources[b.row.file])}', flush=True)
        survivors += [b] if result == 'SURVIVED' else []
  return survivors


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--count', type=int, default=200, help='number of breaks that are drawn (default: 200)')
  parser.add_argument('--seed', type=int, default=0, help='seed of the draw (default: 0)')
  parser.add_argument('--only', default='', help='files whose path contains one of these, separated by commas')
  parser.add_argument('--list', action='store_true', help='print the breaks and run nothing')
  parser.add_argument('--quoted', action='store_true', help='all quoted breaks instead of drawn ones')
  parser.add_argument('--workers', type=int, default=2, help='number of breaks that run at a time (default: 2)')
  parser.add_argument('--seconds', type=float, default=600, help='time limit for the tests of a break (default: 600)')
  parser.add_argument('--least', type=float, default=0.95, help='share that must be killed (default: 0.95)')
  parser.add_argument('--root', type=pathlib.Path, default=ROOT, help='the checkout (default: that of this file)')
  args = parser.parse_args(argv)

  def chosen(file: str) -> bool:
    return any(part in file for part in args.only.split(','))

  rows, quoted = read_table(args.root)
  rows, quoted = [row for row in rows if chosen(row.file)], [q for q in quoted if chosen(q['file'])]
  files = {row.file for row in rows} | {q['file'] for q in quoted}
  sources = {file: (args.root / file).read_text() if (args.root / file).is_file() else '' for file in files}
  written, stale = quoted_breaks(sources, quoted)
  stale = stale_rows(sources, rows) + stale
  for name in stale:
    print(f'stale     {name}')
  drawn = written if args.quoted else draw(sources, rows, args.count, args.seed)
  if args.list:
    for b in drawn:
      print(b.described(sources[b.row.file]))
    return bool(stale)
  if not drawn:
    raise SystemExit('there is nothing to break')
  survivors = run(args.root, sources, drawn, args.workers, args.seconds)
  share = 1 - len(survivors) / len(drawn)
  print(f'{len(drawn) - len(survivors)} of {len(drawn)} killed ({share:.1%})')
  for b in survivors:
    print(f'SURVIVED  {b.described(sources[b.row.file])}')
  return 1 if stale or share < args.least else 0


if __name__ == '__main__':
  sys.exit(main())
