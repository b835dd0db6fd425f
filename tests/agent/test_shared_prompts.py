"""Prompts that rows share go through the model once: the same tokens and log-probs as if each row had read its own."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests.support.paths import ROOT
from tests.support.processes import environment
from tests.support.shared_prompts import Episodes, compare, make_sampler


@pytest.fixture(scope='module')
def sampler():
  return make_sampler()


@pytest.mark.parametrize('seed', [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))])
@pytest.mark.parametrize(
  ('schedule', 'drop', 'in_flight'),
  [('lockstep', False, 0), ('lockstep', True, 8), ('continuous', True, 0), ('continuous', False, 8)],
)
@pytest.mark.parametrize('window', [False, True])
@pytest.mark.slow_cases(
  'False-lockstep-True-8-0', 'False-continuous-True-0-0', 'True-lockstep-False-0-0', 'False-lockstep-False-0-0',
)  # fmt: skip
@pytest.mark.exhaustive_cases('True-lockstep-True-8-0', 'True-continuous-False-8-0', 'False-continuous-False-8-0')
def test_sharing_changes_no_row(sampler, seed, schedule, drop, in_flight, window):
  """Groups of random sizes; prompts of random lengths, fed in several pieces; all or half of the episodes at a time."""
  episodes = Episodes(10 * seed + window, 2 * in_flight or 8, window)
  some, every = compare(*sampler, episodes, schedule=schedule, drop_finished=drop, rows_in_flight=in_flight)
  assert some < every


@pytest.mark.slow
def test_only_one_row_of_a_group_reads_its_prompt(sampler, monkeypatch):
  """Each shard reads what all prompts have in common once, then the rest of each."""
  episodes = Episodes(3, 16, False)
  prompts = [episodes.prompt(row, 0).ids for row in range(16)]
  different = set(prompts)
  common = 0
  while len({prompt[: common + 1] for prompt in different}) == 1:
    common += 1
  assert 2 < len(different) < 12 and common >= 16
  some, every = compare(*sampler, episodes, schedule='lockstep', length_step=16)
  saved = sum(map(len, prompts)) - sum(map(len, different)) + (len(different) - 1) * common
  assert every - some == saved


@pytest.mark.slow
@pytest.mark.parametrize('mesh', ['8x1x1', '2x2x2'])
@pytest.mark.exhaustive_cases('8x1x1')
def test_sharing_changes_no_row_on_eight_devices(mesh):
  done = subprocess.run(
    [sys.executable, '-m', 'tests.support.shared_prompts', mesh],
    cwd=ROOT, env=environment(8), capture_output=True, text=True, timeout=550,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-3000:]
  fed = np.asarray(done.stdout.split(), int).reshape(-1, 2)
  assert len(fed) == 3 and (fed[:, 0] < fed[:, 1]).all()
