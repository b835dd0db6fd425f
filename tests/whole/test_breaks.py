"""tools/breaks.py: what its operators change and leave, and runs on a small package."""

from __future__ import annotations

import ast
import subprocess

import pytest

from tests.support.benchmarks import benchmark

SAMPLE = '''"""A sample, with 1 + 2 in its docstring."""

import logging

_log = logging.getLogger(__name__)
LIMIT: int | None = 3  # 1 + 1, and é before a change of this line


def clipped(x: list[int | float], low: float = -0.5, *, high=1) -> int | None:
  """Between `low` and `high`, if x > 0 and x < 1."""
  if not x:
    raise ValueError(f'{len(x) + 1} is not above {0}' + str(2 + 3))
  _log.info('of %d', len(x) + 7)
  total = sum(x, start=0)
  total = total * (
    2  # a comment with a * and a +
  )
  name = 'é' + str(total); found = total - LIMIT
  for i in sorted(x[1:]):
    if i is None or i == high:
      continue
    total += max(i, low)
  return where(total >= low, total, found) if name else None
'''
OPERATORS = {
  'arithmetic': ['total / (', 'total + LIMIT', 'total -= max', '= 0.5'],
  'comparison': ['i is not None', 'i != high', 'total > low'],
  'logic': ['if  x:', 'i is None and i'],
  'constant': ['high=2', 'start=1', '    3  # a', 'x[2:]', '| None = 4', '-1.5'],
  'keyword': ['sum(x, )'],
  'branch': ['return (where(total >= low, total, found))', 'return (None)', 'return (total) if', 'return (found) if'],
  'extreme': ['min(i, low)'],
  'bound': ['sorted(x[:])'],
  'statement': [
    'high:\n      pass\n', '\n    pass\n    total +=', '\n    pass\n  return', '\n  pass\n  _log', '\n  pass\n  name',
  ],
  'operand': [
    'total = (total)', 'total = (2)', 'found = (total)', 'found = (LIMIT)', 'if (i is None):', 'if (i == high):',
    'total = max(i, low)', 'total += (i)', 'total += (low)',
  ],
  'wrapper': ['for i in (x[1:]):'],
}  # fmt: skip


@pytest.fixture(scope='module')
def tool():
  with benchmark('break_operators', 'tools'), benchmark('breaks', 'tools') as module:
    yield module


def _breaks(tool, names=()):
  return tool.breaks(SAMPLE, tool.Row('sample.py', names, ()))


@pytest.mark.parametrize('operator', OPERATORS)
def test_an_operator_makes_these_changes_and_no_others(tool, operator):
  sources = [b.applied(SAMPLE) for b in _breaks(tool)[operator]]
  for source in sources:
    compile(source, 'sample.py', 'exec')
    # Texts, annotations, errors and messages stay.
    for kept in (
      '"""A sample, with 1 + 2 in its docstring."""', 'LIMIT: int | None', 'x: list[int | float], low: float',
      '-> int | None:', '"""Between `low` and `high`, if x > 0 and x < 1."""', "_log.info('of %d', len(x) + 7)",
      '# 1 + 1, and é before', "'é' + str(total)",
      '# a comment with a * and a +' if operator not in ('statement', 'operand') else '',
      "f'{len(x) + 1} is not above {0}' + str(2 + 3)" if operator != 'statement' else '',
    ):  # fmt: skip
      assert kept in source
  made = [[change in source for source in sources] for change in OPERATORS[operator]]
  assert all(sum(row) == 1 for row in made)
  assert len(set(sources)) == len(sources) == len(made)


def test_every_operator_has_a_test(tool):
  assert tool.OPERATORS.keys() == OPERATORS.keys() == _breaks(tool).keys()


def test_only_the_named_functions_are_broken(tool):
  lines = {b.described(SAMPLE).split()[0] for each in _breaks(tool, ('clipped',)).values() for b in each}
  assert 'sample.py:6' not in lines
  assert 'sample.py:9' in lines
  assert not _breaks(tool, ('other',))


def test_a_draw_depends_on_the_seed_only_and_repeats_nothing(tool):
  rows = [tool.Row('sample.py', (), ())]
  first, again, other = (tool.draw({'sample.py': SAMPLE}, rows, 8, seed) for seed in (0, 0, 1))
  assert first == again != other
  assert len(set(first)) == 8
  every = tool.draw({'sample.py': SAMPLE}, rows, 1000, 0)
  assert len(set(every)) == len(every) == sum(map(len, OPERATORS.values()))
  assert all(ast.dump(ast.parse(b.applied(SAMPLE))) != ast.dump(ast.parse(SAMPLE)) for b in every)


def test_files_and_operators_are_drawn_alike(tool):
  sources = {'sample.py': SAMPLE, 'long.py': 'x = [' + '1 + 1, ' * 500 + 'min(x)]'}
  drawn = tool.draw(sources, [tool.Row(file, (), ()) for file in sources], 40, 0)
  assert sum(b.row.file == 'sample.py' for b in drawn) > 10
  assert any(b.operator == 'extreme' and b.row.file == 'long.py' for b in drawn)


def test_a_quoted_break_is_made_or_reported_as_stale(tool):
  def quoted(old, new):
    return {'file': 'sample.py', 'old': old, 'new': new, 'tests': 'a b'}

  q = [quoted('found = total', 'found = low'), quoted('gone', 'x'), quoted('total', 'x'), quoted('LIMIT:', 'LIMIT)')]
  found, stale = tool.quoted_breaks({'sample.py': SAMPLE}, q)
  assert [b.applied(SAMPLE) for b in found] == [SAMPLE.replace('found = total', 'found = low')]
  assert found[0].row.tests == ('a', 'b')
  assert stale == ['sample.py: gone', 'sample.py: total', 'sample.py: LIMIT:']


def _package(root, *quoted):
  """A package with a test of one of its two functions, and a table with these quoted breaks (old, new)."""
  for file, text in {
    'shop/__init__.py': '',
    'shop/price.py': 'def paid(x):\n  while x > 10:\n    x -= 10\n  return x\n\n\ndef untested(x):\n  return x + 1\n',
    'tests/test_price.py': 'from shop.price import paid\ndef test_price():\n  assert (paid(20), paid(11)) == (10, 1)\n',
    'tools/breaks.toml': "[tests]\n'shop/price.py' = 'tests/test_price.py'\n"
    + ''.join(
      f"[[quoted]]\nfile = 'shop/price.py'\nold = '{old}'\nnew = '{new}'\ntests = 'tests/test_price.py'\n"
      for old, new in quoted
    ),
  }.items():
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(text)
  subprocess.run(['git', 'init', '-q'], cwd=root, check=True)


@pytest.mark.slow
def test_breaks_are_killed_or_survive(tool, tmp_path, capfd):
  _package(tmp_path, ('x > 10', 'x > 30'), ('x + 1', 'x + 2'))
  before = (tmp_path / 'shop' / 'price.py').read_text()
  flags = [f'--root={tmp_path}', '--quoted', '--workers=2']
  assert tool.main(flags) == 1
  lines = capfd.readouterr().out.splitlines()
  assert [line.split()[0] for line in lines] == ['killed', 'SURVIVED', '1', 'SURVIVED']
  assert 'shop/price.py:8  quoted: return x + 1  ->  return x + 2' in lines[1]
  assert lines[2] == '1 of 2 killed (50.0%)'
  assert tool.main([*flags, '--least=0.5']) == 0
  assert (tmp_path / 'shop' / 'price.py').read_text() == before


@pytest.mark.slow
def test_tests_that_fail_without_a_break_kill_nothing(tool, tmp_path):
  _package(tmp_path)
  (tmp_path / 'tests' / 'test_price.py').write_text('def test_price():\n  assert False\n')
  with pytest.raises(SystemExit, match='tests fail without a break'):
    tool.main([f'--root={tmp_path}', '--count=2', '--workers=1'])


def test_a_list_runs_nothing_and_has_an_exit_status_for_stale_breaks(tool, tmp_path, capfd):
  for quoted, stale in ((), ''), ((('gone', 'x'),), 'stale     shop/price.py: gone\n'):
    _package(tmp_path, *quoted)
    assert tool.main([f'--root={tmp_path}', '--list', '--count=3']) == bool(stale)
    out = capfd.readouterr().out
    assert out.startswith(stale)
    assert out.removeprefix(stale).count('shop/price.py:') == 3
  (tmp_path / 'tools' / 'breaks.toml').write_text("[tests]\n'gone.py' = ''\n'shop/price.py::paid,gone' = ''\n")
  assert tool.main([f'--root={tmp_path}', '--list', '--count=0']) == 1
  assert capfd.readouterr().out == 'stale     gone.py\nstale     shop/price.py::gone\n'


@pytest.mark.slow
@pytest.mark.exhaustive
def test_drawn_breaks_of_tested_code_are_killed_or_run_forever(tool, tmp_path, capfd):
  """Every break of `paid` changes its result, or it makes an endless loop."""
  _package(tmp_path)
  table = tmp_path / 'tools' / 'breaks.toml'
  table.write_text(table.read_text().replace("price.py'", "price.py::paid'", 1))
  assert tool.main([f'--root={tmp_path}', '--count=100', '--seconds=45', '--least=1']) == 0
  results = {line.split()[0] for line in capfd.readouterr().out.splitlines()}
  assert {'killed', 'time-out'} <= results
