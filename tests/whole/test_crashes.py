"""The benchmark that ends runs at random moments: what it calls a mistake, and some ends of real runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.support.benchmarks import benchmark
from tests.support.paths import ROOT


@pytest.fixture(scope='module')
def crashes():
  with benchmark('crashes', 'tools') as module:
    yield module


_KILL, _TERM, _ABORT = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT
_ERROR = 'error: the disk is full\n'


@pytest.mark.parametrize(
  ('kind', 'statuses', 'output', 'found'),
  [
    ('', [0], '', ''),
    ('', [2], _ERROR, 'a run that nobody ends fails'),
    ('SIGKILL', [_KILL], '', ''),
    ('SIGKILL', [0], '', ''),
    ('SIGKILL', [1], _ERROR, r'process 0 ended with 1, and not with -9'),
    ('SIGKILL', [_KILL, 1], _ERROR, ''),
    ('SIGKILL', [_KILL, 1], 'bye', 'process 1 ended with 1 and no word'),
    ('SIGKILL', [_KILL, None], '', 'processes hang'),
    ('SIGKILL', [_KILL, 0], '', 'process 1 ended with 0, although'),
    ('SIGKILL', [_KILL, _ABORT], 'most likely another task died', ''),
    ('SIGTERM', [143], 'interrupted; the same command', ''),
    ('SIGTERM', [_TERM], '', ''),
    ('SIGTERM', [143], 'Traceback (most recent call last):', 'a traceback'),
    ('full', [2], _ERROR, ''),
    ('full', [74], _ERROR, ''),
    ('full', [1], _ERROR, 'process 0 ended with 1, and not with 2 or 74'),
    ('read_only', [2], 'bye', 'process 0 ended with 2 and no word'),
  ],
)
def test_mistakes_are_found(crashes, kind, statuses, output, found):
  end = crashes.End(kind, 'save', 1, 0.0, 0) if kind else None
  mistake = crashes.mistake(end, crashes.Attempt(statuses, [output] * len(statuses), 1.0))
  assert mistake.startswith(found) if found else mistake == ''


def test_a_run_whose_processes_were_ended_at_the_limit_is_not_complete(crashes):
  assert crashes.Attempt([0, 0], ['', ''], 1.0).complete
  assert not crashes.Attempt([0, None], ['', ''], 1.0).complete
  assert not crashes.Attempt([1], [''], 1.0).complete


def test_numbers_that_differ_or_are_missing_are_named(crashes):
  assert crashes.differences({'a': 1, 'b': 2}, {'a': 1, 'b': 2}) == []
  assert crashes.differences({'a': 1, 'b': 2}, {'a': 3, 'c': 4}) == [
    'a is 3 and not 1', 'b is missing and not 2', 'c is 4 and not missing',
  ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(('processes', 'kills'), [(1, 4), (2, 2)])
@pytest.mark.exhaustive
def test_runs_that_are_ended_and_started_again_have_the_numbers_of_one_that_was_not(tmp_path, processes, kills):
  command = [sys.executable, 'tools/crashes.py', f'--processes={processes}', f'--kills={kills}']
  # Without the tests' own flags and cache: the runs have a cache of their own, and take seconds if XLA optimises.
  environment = {name: x for name, x in os.environ.items() if not name.startswith(('XLA_', 'JAX_'))}
  done = subprocess.run(
    [*command, f'--out={tmp_path / "out.json"}'], cwd=ROOT, capture_output=True, text=True, timeout=3500, check=False,
    env=environment | {'JAX_PLATFORMS': 'cpu'},
  )  # fmt: skip
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
  (found,) = json.loads((tmp_path / 'out.json').read_text())['runs']
  assert found['kills'] == kills and not found['differences'] and not found['mistakes']
