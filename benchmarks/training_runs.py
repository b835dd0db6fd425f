"""Runs of `main.py` for benchmarks that compare settings: each is added to a JSON file as it ends."""

from __future__ import annotations

import json
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent import futures

from ragen_jax.runs.metrics import read_metrics

ROOT = pathlib.Path(__file__).parents[1]


def flags(**fields: object) -> tuple[str, ...]:
  """Flags of the program: `optimizer__actor_lr=1e-3` is `--config.optimizer.actor_lr=0.001`."""
  return tuple(f'--config.{name.replace("__", ".")}={value}' for name, value in fields.items())


def train(given: Sequence[str], cache: str, cores: set[int] | None = None) -> tuple[float, list[dict]]:
  """One run with these flags, on some of the cores: its wall time in seconds, and the lines of its metrics.

  `cache` is the folder that runs share for compiled programs. CalledProcessError if the run fails.
  """
  with tempfile.TemporaryDirectory() as workdir:
    if cores:
      os.sched_setaffinity(0, cores)  # affects this thread, and the processes that it starts
    start = time.monotonic()
    subprocess.run(
      [sys.executable, 'main.py', *given, f'--config.compilation_cache={cache}', f'--workdir={workdir}'],
      cwd=ROOT,
      check=True,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    return round(time.monotonic() - start, 1), read_metrics(workdir)


def write(path: pathlib.Path, record: dict) -> None:
  """Writes the JSON file atomically, so an interrupted benchmark keeps the previous file."""
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_suffix('.tmp')
  temporary.write_text(json.dumps(record, indent=1) + '\n')
  os.replace(temporary, path)


def number_of_jobs(given: int) -> int:
  """A number of runs at a time. SystemExit if it is not from 1 to the number of cores."""
  if not 1 <= given <= (os.cpu_count() or 1):
    sys.exit(f'error: --jobs={given}: must be 1 to {os.cpu_count()}, the number of cores')
  return given


def run_all(
  todo: Sequence[tuple[Hashable, ...]],
  run: Callable[[tuple, str, set[int] | None], dict],
  add: Callable[[tuple, dict], None],
  jobs: int,
) -> None:
  """Makes the runs of `todo`, `jobs` at a time, each on its share of the cores.

  Args:
    todo: a key for each run, in the order in which they start.
    run: gives the result for a key, a folder for compiled programs, and cores (None: all).
    add: gets each key and result as the run ends, one at a time.
    jobs: from 1 to the number of cores; above 1 on Linux only.
  """
  shares: queue.Queue = queue.Queue()
  for i in range(jobs):
    shares.put({*range(os.cpu_count())[i::jobs]} if jobs > 1 else None)
  lock = threading.Lock()

  def one(key: tuple, cache: str) -> None:
    cores = shares.get()
    try:
      result = run(key, cache, cores)
    finally:
      shares.put(cores)
    with lock:
      add(key, result)

  with tempfile.TemporaryDirectory() as cache, futures.ThreadPoolExecutor(jobs) as pool:
    running = [pool.submit(one, key, cache) for key in todo]
    try:
      for each in futures.as_completed(running):
        each.result()
    except BaseException:
      pool.shutdown(cancel_futures=True)  # waits for current runs and starts no others
      raise
