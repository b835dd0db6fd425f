"""Seconds of each phase of a run, and its peak memory."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator

import jax

from ragen_jax.utils.sizes import GIB

# How the names of metrics begin that differ between two equal runs: seconds, tokens a second, and memory.
MEASURED = ('timing_s/', 'perf/throughput', 'perf/sampled_tokens_per_s', 'perf/max_')


class Timer:
  """Adds up the seconds of a run's phases.

    timer = Timer()
    with timer('rollout'):
      ...
    timer.pop()  # {'timing_s/rollout': 1.7}

  JAX computes asynchronously, so the whole phase is timed only if it ends with `jax.block_until_ready` or reads a
  result. A phase may be entered many times. Phases may nest; the inner seconds then count for both.
  """

  def __init__(self, entered: Callable[[str], None] = lambda phase: None):
    """Starts at 0 seconds; `entered` is called with the name of each phase that begins."""
    self._seconds: dict[str, float] = {}
    self._entered = entered

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    """Adds the seconds of the `with` block to `phase`, even if the block raises."""
    self._entered(phase)
    start = time.perf_counter()
    try:
      with jax.profiler.TraceAnnotation(phase):  # for profiles
        yield
    finally:
      self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

  def pop(self) -> dict[str, float]:
    """Returns the seconds of each phase since the last call, as {'timing_s/<phase>': seconds}."""
    popped = {f'timing_s/{phase}': seconds for phase, seconds in self._seconds.items()}
    self._seconds = {}
    return popped


def memory() -> dict[str, float]:
  """The peak memory since the process began, in GiB.

  `perf/max_host_memory_gb` of this process; and, if the devices report it (GPUs and TPUs do),
  `perf/max_memory_allocated_gb` of this process's fullest device.
  """
  unit = 1 if sys.platform == 'darwin' else 1024  # macOS reports bytes, Linux KiB
  found = {'perf/max_host_memory_gb': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}
  peaks = [(device.memory_stats() or {}).get('peak_bytes_in_use') for device in jax.local_devices()]
  peaks = [peak for peak in peaks if peak is not None]
  return found | ({'perf/max_memory_allocated_gb': max(peaks) / GIB} if peaks else {})
