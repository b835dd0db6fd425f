"""Tests and times one accelerator: equal numbers, kernels, XLA flags, one iteration of a real model's shape, learning.

  python benchmarks/accelerator.py                        all parts, in at most 25 minutes, at Qwen2.5-0.5B's shape
  python benchmarks/accelerator.py --parts=decode         some parts
  python benchmarks/accelerator.py --budget=60            in at most an hour
  python benchmarks/accelerator.py --quick                all parts at a tiny shape, to runs/quick; also on a CPU

Weights are random, because no measurement depends on them, and nothing is downloaded. The tokenizer is the built-in
model's; the vocabulary is padded to the shape's.

  parity     float32 logits, log-probs and gradients of one program on the device and on the CPU, and of `transformers`
             (needs PyTorch); rounding must explain the differences. The same in bfloat16, for information
  attention  seconds and temporary memory of a gradient with each `model.attention` that the device has, for whole and
             for packed rows, and the distance of the gradient from that of 'einsum'
  decode     tokens a second of the sampler for each combination of XLA flags (command buffers, latency-hiding
             scheduler, Triton's matrix products) and with each kernel for the attention to the cache; and of
             `transformers` on the same device (needs PyTorch)
  iteration  what `--mode=plan` predicts for configs/frozenlake_ppo.py with the settings of 0.5B, and the second of two
             iterations: seconds, MFU of the update, peak memory. `beside_plan` has both
  main_job   configs/frozenlake_ppo.py with the built-in model by main.py: success before and after, seconds of an
             iteration

XLA reads its flags once, so each job is a process with a time limit. What a job has recorded is in the JSON when it
ends, even if it was cut. Jobs run in the order of `jobs`. What the budget leaves no time for is recorded as left out.
A combination of flags or a kernel that fails is a result; any other failure makes the exit status 1.

`share_of_bandwidth` is the bytes of weights and cache that decoding must read, over the bandwidth and the measured
time; `update_mfu` is 6 operations for each weight and token, over the peak and the measured time. The peaks are those
of ragen_jax/distributed/chips.py, or --flops and --bandwidth; null if unknown.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.accelerator_decode import flag_sets  # noqa: E402
from ragen_jax.utils.files import replace_file  # noqa: E402

PARTS = ('parity', 'attention', 'decode', 'iteration', 'main_job')
# How the error of a job begins that took too long.
ENDED = 'ended after'


@dataclasses.dataclass(frozen=True)
class Job:
  """One process.

  Attributes:
    part: one of `PARTS`, or 'hardware'.
    name: of its results in the part; '' if they are the part's.
    worker: of `accelerator_parts.WORKERS`.
    least: seconds without which it is not started, a guess.
    limit: seconds after which it is ended.
    flags: for XLA.
    on_cpu: it sees no accelerator.
    may_fail: its failure is a result.
  """

  part: str
  name: str
  worker: str
  least: float
  limit: float
  flags: tuple[str, ...] = ()
  on_cpu: bool = False
  may_fail: bool = False

  @property
  def title(self) -> str:
    return f'{self.part}, {self.name}' if self.name else self.part


SETUP = Job('hardware', '', 'setup', 0, 240)


def jobs(parts: tuple[str, ...], quick: bool) -> list[Job]:
  """The jobs of some parts, those of most value first; quick has two sets of flags."""
  flags = flag_sets()[: 2 if quick else None]
  combinations = [Job('decode', x.name, 'decode', 60, 240, x.flags, may_fail=bool(x.flags)) for x in flags]
  alone = [x for x in combinations if len(x.flags) == 1]
  order = [
    Job('parity', '', 'parity', 30, 240),
    Job('attention', '', 'attention', 60, 300),
    *[x for x in combinations if not x.flags],
    Job('iteration', 'run', 'iteration', 120, 600),
    Job('main_job', '', 'main_job', 90, 300),
    Job('decode', 'transformers', 'transformers', 60, 180, may_fail=True),
    Job('iteration', 'plan', 'plan_memory', 60, 240, on_cpu=True),
    Job('iteration', 'compiler', 'plan_compiler', 60, 240, on_cpu=True, may_fail=True),
    *alone,
    *[x for x in combinations if len(x.flags) > 1],
  ]
  if quick:  # on a slow machine its compilations take longer, and nothing is measured
    order = [dataclasses.replace(job, limit=1500) for job in order]
  return [job for job in order if job.part in parts]


def environment(job: Job, base: Mapping[str, str]) -> dict[str, str]:
  """The variables of a job's process."""
  found = dict(base)
  found['XLA_FLAGS'] = ' '.join([base.get('XLA_FLAGS', ''), *job.flags]).strip()
  # PyTorch, and the process that a job starts, have to get memory too.
  found.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
  if job.on_cpu:
    found['JAX_PLATFORMS'] = 'cpu'
  elif base.get('JAX_PLATFORMS') and 'cpu' not in base['JAX_PLATFORMS'].split(','):
    found['JAX_PLATFORMS'] = base['JAX_PLATFORMS'] + ',cpu'  # for the comparison with the CPU
  return found


def run(job: Job, settings: dict[str, Any], limit: float) -> dict[str, Any]:
  """What a job recorded, with an 'error' if it failed or was ended."""
  with tempfile.TemporaryDirectory() as folder:
    out, log = pathlib.Path(folder) / 'result.json', pathlib.Path(folder) / 'log'
    command = [sys.executable, '-m', 'benchmarks.accelerator_parts', job.worker, str(out), json.dumps(settings)]
    start = time.monotonic()
    with log.open('wb') as stream:
      process = subprocess.Popen(command, cwd=ROOT, env=environment(job, os.environ), stdout=stream,
                                 stderr=stream, start_new_session=True)  # fmt: skip
      try:
        status = process.wait(limit)
        problem = f'exit status {status}' if status else ''
      except subprocess.TimeoutExpired:
        problem = f'{ENDED} {limit:.0f} s'
      finally:
        end(process)
    found = json.loads(out.read_text()) if out.is_file() else {}
    if problem and 'error' not in found:
      lines = [line for line in log.read_text(errors='replace').splitlines() if line.strip()]
      found['error'] = problem + (f': {lines[-1].strip()[:400]}' if lines else '')
  return found | {'job_s': time.monotonic() - start, 'xla_flags': list(job.flags)}


def end(process: subprocess.Popen) -> None:
  """Ends a process and those that it has started."""
  with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()


def run_all(
  wanted: list[Job],
  record: dict[str, Any],
  settings: dict[str, Any],
  seconds: float,
  write: Callable[[], None],
  execute: Callable[[Job, dict[str, Any], float], dict[str, Any]] = run,
  clock: Callable[[], float] = time.monotonic,
) -> list[str]:
  """Runs jobs within a number of seconds, and adds what each records to `record`.

  Args:
    write: is called after each job.

  Returns:
    What failed and is not a result, a line for each.
  """
  start, failures = clock(), []
  for job in wanted:
    left = seconds - (clock() - start)
    if left < job.least:
      found = {'left_out': f'needs {job.least:.0f} s of the budget, and {max(left, 0):.0f} s are left'}
    else:
      limit = min(job.limit, left)
      found = execute(job, settings, limit)
      if limit < job.limit and found.get('error', '').startswith(ENDED):
        found['left_out'] = f'the rest, as the budget {found.pop("error")}'
      problem = problem_of(found)
      if problem and not job.may_fail:
        failures.append(f'{job.title}: {problem}')
    if job.name:
      record.setdefault(job.part, {})[job.name] = found
    else:
      record[job.part] = found
    if 'run' in record.get('iteration', {}):
      record['iteration']['beside_plan'] = beside_plan(record['iteration'])
    print(f'{job.title}: {json.dumps(found)}', flush=True)
    write()
  return failures


def problem_of(found: Mapping[str, Any]) -> str:
  """Why a result is a failure; '' if it is none."""
  if 'error' in found:
    return found['error']
  if found.get('over_limits'):
    return f'differences above the limits: {", ".join(found["over_limits"])}'
  usual = found.get('einsum', {})  # runs everywhere: of `decode`, or in `attention` of each kind of rows
  for result in (usual, *(x for x in usual.values() if isinstance(x, dict))):
    if 'error' in result:
      return f'einsum: {result["error"]}'
  return '' if found.get('timed', {}).get('finite', True) else 'numbers of the iteration are not finite'


def beside_plan(part: Mapping[str, Any]) -> dict[str, Any]:
  """Predicted and measured numbers of an iteration; None for those that are missing.

  The measured peak of the update is that since the process began, so it is the rollout's if that needs more.
  """
  timed, compiler = part['run'].get('timed', {}), part.get('compiler', {})
  peaks, seconds = timed.get('peak_memory_gib_until', {}), compiler.get('seconds', {})
  parts = {'rollout': ('extend', 'decode', 'arrange'), 'advantages': ('scoring',), 'update': ('gradients', 'optimiser')}
  told: dict[str, Any] = {'memory_gib': {}, 'seconds': {}}
  for phase in ('rollout', 'update'):
    told['memory_gib'][phase] = {
      'plan': part.get('plan', {}).get('memory_gib', {}).get(phase),
      'compiler': compiler.get('memory_gib', {}).get(phase),
      'measured_peak': peaks.get(phase) or None,
    }
  for phase, names in parts.items():
    told['seconds'][phase] = {
      'compiler': sum(seconds[name] for name in names) if seconds else None,
      'measured': timed.get('seconds', {}).get(phase),
    }
  told['sampled_tokens'] = {'compiler': compiler.get('sampled_tokens'), 'measured': timed.get('sampled_tokens')}
  return told


def commit() -> str:
  """Of the checkout, with '+' if files differ from it; '' outside of one."""
  try:
    head, changed = (
      subprocess.run(['git', *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
      for words in (['rev-parse', 'HEAD'], ['status', '--porcelain', '--untracked-files=no'])
    )
  except (OSError, subprocess.CalledProcessError):
    return ''
  return head + ('+' if changed else '')


def kept_parts(out: pathlib.Path, record: Mapping[str, Any], wanted: tuple[str, ...]) -> dict[str, Any]:
  """The parts of an earlier file that are not wanted again, if it has the same machine, day, commit, seed and sizes."""
  earlier = json.loads(out.read_text()) if out.is_file() else {}

  def identity(of):
    machine = of.get('hardware', {})
    return (
      *(machine.get(name) for name in ('cpu', 'device', 'jax', 'python', 'date')),
      *(of.get(name) for name in ('commit', 'seed', 'quick', 'xla_flags', 'flops', 'bandwidth')),
    )

  if identity(earlier) != identity(record):
    return {}
  return {part: earlier[part] for part in PARTS if part in earlier and part not in wanted}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--parts', default=','.join(PARTS), help='parts to run, separated by commas')
  parser.add_argument('--budget', type=float, default=25, help='minutes for everything')
  parser.add_argument('--quick', action='store_true', help='a tiny shape, and two sets of flags')
  parser.add_argument('--seed', type=int, default=0, help='of weights, tokens and runs')
  parser.add_argument('--flops', type=float, default=0, help="the device's bfloat16 operations a second")
  parser.add_argument('--bandwidth', type=float, default=0, help="the device's bytes a second")
  parser.add_argument('--out', type=pathlib.Path, help='the JSON file; by default in benchmarks/results')
  arguments = parser.parse_args()
  # The job that runs is ended too.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  start, parts = time.monotonic(), tuple(arguments.parts.split(','))
  unknown = sorted(set(parts) - set(PARTS))
  if unknown:
    sys.exit(f'error: --parts={unknown[0]}: allowed: {", ".join(PARTS)}')
  out = arguments.out or ROOT / ('runs/quick' if arguments.quick else 'benchmarks/results') / 'accelerator.json'
  out.parent.mkdir(parents=True, exist_ok=True)
  record: dict[str, Any] = {'command': ' '.join(sys.argv), 'commit': commit(), 'seed': arguments.seed,
                            'quick': arguments.quick, 'budget_minutes': arguments.budget,
                            'flops': arguments.flops,
                            'bandwidth': arguments.bandwidth, 'xla_flags': os.environ.get('XLA_FLAGS', '')}  # fmt: skip

  def write() -> None:
    replace_file(out, json.dumps(record, indent=1) + '\n')

  with tempfile.TemporaryDirectory() as folder:
    settings = {'quick': arguments.quick, 'checkpoint': f'{folder}/checkpoint', 'seed': arguments.seed,
                'flops': arguments.flops, 'bandwidth': arguments.bandwidth}  # fmt: skip
    failures = run_all([SETUP], record, settings, 60 * arguments.budget, lambda: None)
    if failures:
      sys.exit(f'error: {failures[0]}')
    record |= kept_parts(out, record, parts)
    settings['device'] = record['hardware']['device']
    left = 60 * arguments.budget - (time.monotonic() - start)
    failures = run_all(jobs(parts, arguments.quick), record, settings, left, write)
  record['failures'], record['wall_s'] = failures, time.monotonic() - start
  write()
  print(f'written to {out}')
  if failures:
    sys.exit('\n'.join(['error: failed:', *failures]))


if __name__ == '__main__':
  main()
