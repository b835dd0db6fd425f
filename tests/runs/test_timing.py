"""Seconds of each phase, and the peak memory."""

from __future__ import annotations

import pathlib

import pytest

from ragen_jax.runs import timing
from ragen_jax.runs.timing import Timer


def test_memory_is_the_most_that_was_used(monkeypatch):
  """Against what the kernel says, and of several devices the fullest."""
  status = pathlib.Path('/proc/self/status')
  host = timing.memory()['perf/max_host_memory_gb']
  if status.exists():
    peak = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith('VmHWM'))
    assert host == pytest.approx(peak / 2**20, rel=0.05)

  class Device:
    def __init__(self, peak):
      self.memory_stats = lambda: peak and {'peak_bytes_in_use': peak, 'bytes_in_use': 1}

  devices = [Device(2**30), Device(3 * 2**30), Device(None)]
  monkeypatch.setattr(timing.jax, 'local_devices', lambda: devices)
  assert timing.memory()['perf/max_memory_allocated_gb'] == 3
  devices[:] = devices[-1:]  # a CPU keeps no count
  assert set(timing.memory()) == {'perf/max_host_memory_gb'}


def test_phases_that_begin_are_told():
  told = []
  timer = Timer(told.append)
  with timer('step'), timer('gen'):
    assert told == ['step', 'gen']
  with timer('gen'):
    pass
  assert told == ['step', 'gen', 'gen']


def test_timer(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(timing.time, 'perf_counter', lambda: now[0])
  timer = Timer()
  for _ in range(2):
    with timer('rollout'):
      now[0] += 1.5
      with timer('decode'):
        now[0] += 0.25
  with pytest.raises(KeyError), timer('update'):
    now[0] += 2
    raise KeyError
  assert timer.pop() == {'timing_s/decode': 0.5, 'timing_s/rollout': 3.5, 'timing_s/update': 2}
  assert timer.pop() == {}
  with timer('rollout'):
    now[0] += 1
  assert timer.pop() == {'timing_s/rollout': 1}
