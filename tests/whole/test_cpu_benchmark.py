"""benchmarks/cpu.py at tiny sizes: it runs, and all sides compute the same loss."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


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
