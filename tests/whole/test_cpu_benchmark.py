"""benchmarks/cpu.py at tiny sizes: it runs, and all sides compute the same loss."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import cpu_growth
from tests.support.paths import ROOT


@pytest.mark.parametrize('growth', [(), ('rows',), ('rows', 'turns', 'replies')])
@pytest.mark.parametrize('divided', [False, True])
def test_parts_that_were_measured_are_drawn(tmp_path, growth, divided):
  points = [{'value': n, 'sampling_s': 0.5 * n, 'update_s': 2.0 * n**2} for n in (1, 2, 4)]
  record = {'growth': {'base': {}, 'hardware': ''} | dict.fromkeys(growth, points)}
  record |= {'divided': {'episodes': 8, 'devices': points, 'processes': points}} if divided else {}
  drawn = [tmp_path / 'cpu_growth.png'] if growth or divided else []
  assert cpu_growth.draw(record, tmp_path) == drawn and all(path.stat().st_size > 1000 for path in drawn)
  for key, exponent in (('sampling_s', 1), ('update_s', 2)):
    found = cpu_growth.exponent([x['value'] for x in points], [x[key] for x in points])
    assert found == pytest.approx(exponent)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_benchmark_runs_and_all_sides_have_the_same_loss():
  command = [sys.executable, 'benchmarks/cpu.py', '--quick', '--parts=decode,update,turns,context']
  subprocess.run(command, cwd=ROOT, check=True, timeout=280, capture_output=True)
  found = json.loads((ROOT / 'runs' / 'quick' / 'cpu.json').read_text())
  for name in ('built-in', '0.5B'):
    losses = [x for key, x in found['update'][name].items() if key.endswith('loss')]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
  sizes = {(point['model'], point['columns']): point['row_bytes'] for point in found['context']['points']}
  grown = {name: (sizes[name, 8192] - sizes[name, 128]) / (8192 - 128) for name in ('tiny', 'tiny-hybrid')}
  assert grown == {
    'tiny': 2 * 2 * 2 * 16 * 4,
    'tiny-hybrid': 2 * 16 * 4,
  }  # layers, keys and values, heads, width, bytes
