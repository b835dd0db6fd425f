"""tools/same_numbers.py: its commands can run, and a difference is found and named."""

from __future__ import annotations

import copy

import pytest

from ragen_jax import api
from ragen_jax.config.checks import check_config, check_eval, check_sft
from tests.support.benchmarks import benchmark


@pytest.fixture(scope='module')
def same_numbers():
  with benchmark('same_numbers', 'tools') as module:
    yield module


def test_every_command_can_run(same_numbers, tmp_path):
  for name, run in same_numbers.RUNS.items():
    config = api.load_config(run.config, same_numbers.SHORT | dict(run.fields))
    check_config(config)
    if run.mode in ('eval', 'sft'):
      {'eval': check_eval, 'sft': check_sft}[run.mode](config)
    assert f'--mode={run.mode}' in same_numbers.command(name, tmp_path)
    assert not run.of or list(same_numbers.RUNS).index(run.of) < list(same_numbers.RUNS).index(name)


def test_differences_are_named(same_numbers, capsys):
  before = {'versions': same_numbers.versions(), 'runs': {'ppo': {'metrics of step 1': {'a': '1.0', 'b': 'nan'}}}}
  assert same_numbers.compare(before, copy.deepcopy(before))
  after = copy.deepcopy(before)
  after['runs']['ppo']['metrics of step 1'] = {'a': '1.0000000000000002', 'c': '0'}
  capsys.readouterr()
  assert not same_numbers.compare(before, after)
  assert capsys.readouterr().out.splitlines() == [
    'ppo: 3 differences',
    '  metrics of step 1: a was 1.0 and is 1.0000000000000002',
    '  metrics of step 1: b was nan and is absent',
    '  metrics of step 1: c was absent and is 0',
  ]
