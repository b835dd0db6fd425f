"""benchmarks/mutants.py: each of its breaks can still be made, and its results are of the breaks that it has."""

from __future__ import annotations

import json

import pytest

from tests.support.benchmarks import benchmark
from tests.support.paths import ROOT


@pytest.fixture(scope='module')
def mutants():
  with benchmark('mutants') as module:
    yield module


def test_every_break_can_be_made(mutants):
  """Where this fails, the code of a break has changed: make the break in the new code, and run it."""
  assert len({m.name for m in mutants.MUTATIONS}) == len(mutants.MUTATIONS) >= 30
  for mutation in mutants.MUTATIONS:
    compile(mutation.applied(), mutation.file, 'exec')
    for test in mutation.tests:
      assert (ROOT / 'tests' / test.split('::')[0]).is_file(), test


def test_a_break_whose_text_is_not_there_once_is_refused(mutants):
  for old, times in (('no such text', 0), ('import', 'times')):
    with pytest.raises(ValueError, match='found 0 times' if times == 0 else 'it must be once'):
      mutants.Mutation('training/learner.py', old, '', ()).applied()
  with pytest.raises(ValueError, match='nothing would change'):
    mutants.Mutation('training/optimizer_step.py', 'lr_scale * u', 'lr_scale * u', ()).applied()


def test_every_break_was_killed_when_it_was_run(mutants):
  """Where this fails, run the breaks that changed: python benchmarks/mutants.py --only=... --out=..."""
  results = json.loads(mutants.RESULT.read_text())['results']
  assert [(r['file'], r['old'], r['new']) for r in results] == [(m.file, m.old, m.new) for m in mutants.MUTATIONS]
  assert all(r['result'] == 'killed' and r['killed_by'] for r in results)


def test_results_of_other_breaks_stay(mutants, tmp_path):
  first, second = ({'file': m.file, 'old': m.old, 'new': m.new, 'result': 'killed'} for m in mutants.MUTATIONS[:2])
  gone = first | {'old': 'a text of long ago'}
  mutants.write(tmp_path / 'x.json', [second, gone])
  mutants.write(tmp_path / 'x.json', [first | {'result': 'survived'}])
  written = json.loads((tmp_path / 'x.json').read_text())
  assert [r['result'] for r in written['results']] == ['survived', 'killed']
  assert (written['mutations'], written['killed']) == (2, 1)
