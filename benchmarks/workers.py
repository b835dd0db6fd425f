"""Steps a second of a Python game against the number of worker processes, and in threads.

  python benchmarks/workers.py [--quick] [--output=benchmarks/results/workers.json]

Two games: one computes for 5 ms of processor time in a step, in pure Python; the other sleeps for 20 ms, as one that
waits for a server. 16 rows play them, as in a rollout: each step is one action of every row. The numbers of processes
take turns, round by round, and the ratios are medians over the rounds, each against one process in the same round.
`threads` is the same without processes: `workers` of as many threads.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

ROWS = 16
COMPUTES_S, SLEEPS_S = 0.005, 0.020


class Computes:
  """A step is a sum in pure Python that takes 5 ms of processor time."""

  rules = 'Compute.'

  def reset(self, seed: int) -> str:
    return str(seed)

  def step(self, action: str) -> tuple[str, float, bool, bool]:
    end, total = time.thread_time() + COMPUTES_S, 0
    while time.thread_time() < end:
      total += sum(i * i for i in range(200))
    return action, 0.0, False, False


class Sleeps(Computes):
  """A step waits for 20 ms."""

  rules = 'Sleep.'

  def step(self, action: str) -> tuple[str, float, bool, bool]:
    time.sleep(SLEEPS_S)
    return action, 0.0, False, False


class Returns(Computes):
  """A step does nothing, which leaves the time of the calls."""

  rules = 'Return.'

  def step(self, action: str) -> tuple[str, float, bool, bool]:
    return action, 0.0, False, False


def measure(game: type[Computes], counts: list[int], rounds: int, steps: int) -> dict[str, Any]:
  """Steps a second of each number of processes and threads, and their ratios to one process."""
  from ragen_jax import envs

  # The processes load this file, which imports little. In threads it is the same module.
  path = f'{pathlib.Path(__file__).resolve()}:{game.__name__}'
  ways = [('processes', n) for n in counts] + [('threads', n) for n in counts]
  sessions = {}
  for way, n in ways:
    options = {'processes': n} if way == 'processes' else {'workers': n}
    sessions[way, n] = envs.make('python', {'class_path': path, 'step_timeout_s': 120.0} | options).open(ROWS)
    sessions[way, n].reset(range(ROWS), [0] * ROWS, [0] * ROWS)
  speeds: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
  for i in range(rounds):
    for way in ways[i % len(ways) :] + ways[: i % len(ways)]:  # each goes first in turn
      began = time.perf_counter()
      for _ in range(steps):
        results = sessions[way].step(range(ROWS), ['a'] * ROWS)
        if any(not isinstance(x, tuple) for x in results):
          sys.exit(f'error: a step failed: {results}')
      speeds[way].append(ROWS * steps / (time.perf_counter() - began))
  one = speeds['processes', 1]
  return {
    f'{way}={n}': {
      'steps a second': statistics.median(own),
      'times one process': statistics.median(a / b for a, b in zip(own, one, strict=True)),
    }
    for (way, n), own in speeds.items()
  }


def hardware() -> dict[str, Any]:
  """The machine of the measurement."""
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
  models = [line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')]
  return {
    'cpu': models[0] if models else platform.processor(),
    'cores': len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
    'load': os.getloadavg()[0],
    'python': platform.python_version(),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true', help='few steps; writes nothing unless --output is given')
  parser.add_argument('--output', type=pathlib.Path, help='the JSON file')
  parser.add_argument('--note', default='', help='what else is to be known of the machine, for the file')
  arguments = parser.parse_args()
  output = arguments.output
  if output is None and not arguments.quick:
    output = ROOT / 'benchmarks' / 'results' / 'workers.json'
  counts, rounds, steps = ([1, 2, 4], 3, 2) if arguments.quick else ([1, 2, 4, 8], 9, 4)
  found: dict[str, Any] = {'date': datetime.date.today().isoformat(), 'quick': arguments.quick, 'note': arguments.note}
  found |= {'hardware': hardware(), 'rows': ROWS, 'rounds': rounds, 'games': {}}
  for game in (Computes, Sleeps, Returns):
    found['games'][game.__name__] = measure(game, counts, rounds, steps * (50 if game is Returns else 1))
    print(game.__doc__)
    for way, own in found['games'][game.__name__].items():
      print(f'  {way:14}{own["steps a second"]:12,.0f} steps/s   {own["times one process"]:6.2f} times one process')
  if output is not None:
    output.parent.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(json.dumps(found), parse_float=lambda x: float(f'{float(x):.4g}'))
    output.write_text(json.dumps(rounded, indent=2) + '\n')


if __name__ == '__main__':
  main()
