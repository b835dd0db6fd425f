"""What the compilers of TPUs and GPUs say of the programs of real models: memory, time, MFU, collectives, compilation.

  python benchmarks/aot.py                               all cases; hours on 2 cores
  python benchmarks/aot.py --only='0.5b v5e*'            cases by pattern
  python benchmarks/aot.py --only='0.5b v5e:2x4/decode*' programs of a case
  python benchmarks/aot.py --missing                     what the results do not have yet, after an interruption
  python benchmarks/aot.py --quick                       two layers of the smallest model, to runs/quick
  python benchmarks/aot.py --page                        only writes the tables of docs/performance.md

No accelerator is used, and nothing runs: programs are compiled ahead of time (requirements-aot.txt). Memory,
compilation and the bytes of collectives are facts of the compiler, times are estimates (docs/performance.md says how).
Each case is compiled by a process of its own, so that a compiler that crashes loses one program. Results are written
after each.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import fnmatch
import json
import math
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import aot_tables  # noqa: E402

RESULTS = ROOT / 'benchmarks' / 'results' / 'aot.json'
BEFORE = ROOT / 'benchmarks' / 'results' / 'aot_before.json'
PAGE = ROOT / 'docs' / 'performance.md'
# FrozenLake with Qwen's tokenizer; replies as the paper's runs have them.
LENGTHS = {
  'plan.prompt_tokens': 255, 'plan.observation_tokens': 69, 'plan.reply_tokens': 150, 'plan.longest_reply': 300,
  'plan.turns': 5,
}  # fmt: skip
# Programs of the cases that only show how a machine grows.
GROWING = ('extend_*', 'decode*', 'resize*', 'gradient', 'apply*')
SEED = 0


@dataclasses.dataclass(frozen=True)
class Case:
  """A model on a machine.

  Attributes:
    preset: the model.
    topology: the machine.
    fields: fields of the config.
    programs: patterns of names of `planning.programs`; empty for all.
  """

  preset: str
  topology: str
  fields: dict[str, int] = dataclasses.field(default_factory=dict)
  programs: tuple[str, ...] = ()


def _growing(chips: int) -> dict[str, int]:
  """The paper's batch of 128 episodes for each 8 chips."""
  scale = chips // 8
  return {
    'train.groups': 8 * scale, 'eval.groups': 64 * scale, 'optimizer.mini_batch_size': 32 * scale,
  }  # fmt: skip


CASES = {
  '0.5b v5e:2x4': Case('qwen2.5-0.5b', 'v5e:2x4'),
  '0.5b v5e:4x4': Case('qwen2.5-0.5b', 'v5e:4x4', _growing(16), GROWING),
  '0.5b v5e:8x8': Case('qwen2.5-0.5b', 'v5e:8x8', _growing(64), GROWING),
  '0.5b v5e:16x16': Case('qwen2.5-0.5b', 'v5e:16x16', _growing(256), GROWING),
  '0.5b v6e:2x2': Case('qwen2.5-0.5b', 'v6e:2x2'),
  '0.5b h100:1': Case('qwen2.5-0.5b', 'h100:1'),
  '0.5b h100:8': Case('qwen2.5-0.5b', 'h100:8'),
  '3.5-0.8b v5e:2x4': Case('qwen3.5-0.8b', 'v5e:2x4'),
  '1.5b v5e:2x4': Case('qwen2.5-1.5b', 'v5e:2x4'),
  '1.5b h100:8': Case('qwen2.5-1.5b', 'h100:8'),
  '7b v5p:2x2x1 fsdp': Case('qwen2.5-7b', 'v5p:2x2x1', {'mesh.fsdp': 4}),
  '7b v5p:2x2x1 tensor': Case('qwen2.5-7b', 'v5p:2x2x1', {'mesh.tensor': 4}),
  '7b h100:8 data': Case('qwen2.5-7b', 'h100:8', {}),
  '7b h100:8 fsdp': Case('qwen2.5-7b', 'h100:8', {'mesh.fsdp': 8}),
  '7b h100:8 mixed': Case('qwen2.5-7b', 'h100:8', {'mesh.fsdp': 2, 'mesh.tensor': 4}),
}  # fmt: skip
QUICK = ('0.5b v5e:2x4', '0.5b h100:8')


# -- A process of its own: compiles the programs of a case. ------------------------------------------------------------


def worker(name: str, log: pathlib.Path, only: str, quick: bool) -> None:
  """Compiles the programs of a case that `log` does not have, adds a line for each, and the estimate at the end."""
  from ragen_jax.planning import memory, topologies

  case = CASES[name]
  topology = topologies.parse(case.topology)
  topologies.prepare(topology)
  memory.use_cpu_devices(topology.size)

  from benchmarks import aot_details
  from configs import frozenlake_ppo
  from ragen_jax.config.checks import check_config, check_plan
  from ragen_jax.models import presets
  from ragen_jax.planning import estimate, programs

  config = frozenlake_ppo.get_config(case.preset)
  config.update_from_flattened_dict({'plan.topology': case.topology, **LENGTHS, **case.fields})
  if quick:
    shape = dataclasses.replace(presets.shape(case.preset, ''), num_layers=2)
    presets.shape = lambda preset, path: shape
  check_plan(config)
  check_config(config, weights=False)
  run = programs.make_run(config, topologies.devices(topology))
  found = [
    p for p in programs.programs_of(run) if any(fnmatch.fnmatch(p.name, pattern) for pattern in case.programs or '*')
  ]
  known = {x['program']: x for x in _lines(log) if 'seconds' in x or 'failure' in x}
  measured = []
  for program in found:
    if program.name in known:
      measured.append(_recalled(program, known[program.name]))
      _add(log, _record(measured[-1], topology))  # what the run holds besides the program may have changed
    elif fnmatch.fnmatch(program.name, only):
      _add(log, {'program': program.name, 'started': True})
      measured.append(estimate.measure(program, topology))
      _add(log, _record(measured[-1], topology))
  if len(measured) == len(found):
    made = estimate.estimate_of(run, topology, measured)
    more = aot_details.details_of(run, topology, measured, made)
    _add(log, {'estimate': _plain(made, more) | {'advice': list(aot_details.advice(run, made, more, topology))}})


def _record(m: Any, topology: Any) -> dict[str, Any]:
  """A measured program as JSON."""
  record = {'program': m.program.name, 'phase': m.program.phase, 'shape': m.program.shape, 'runs': m.program.runs}
  if m.cost is None:
    return record | {'failure': m.failure}
  work = m.cost.work
  return record | {
    'hbm': m.cost.hbm,
    'temporary': m.cost.temporary,
    'memory': m.memory,
    'compile_cpu_seconds': round(m.cost.compile_cpu_seconds, 2),
    'seconds': work and work.seconds,
    'link_seconds': work and work.link_seconds(topology.chip),
    'collectives': work and work.collectives,
    'kernels': work and work.kernels,
    'cost': dataclasses.asdict(m.cost),
  }


def _recalled(program: Any, record: dict[str, Any]) -> Any:
  """The `Measured` of a line of the log."""
  from ragen_jax.planning.cost import Cost
  from ragen_jax.planning.estimate import Measured
  from ragen_jax.planning.kernel_times import Work

  if 'failure' in record:
    return Measured(program, None, record['failure'])
  return Measured(program, Cost(**record['cost'] | {'work': Work.from_dict(record['cost']['work'])}))


def _plain(found: Any, details: Any) -> dict[str, Any]:
  """An `Estimate` and its `Details` as JSON, with what follows from them."""
  more = {
    'iteration': found.iteration,
    'chip_hours': found.chip_hours,
    'tokens_per_second': found.sampled / found.iteration,
    'decode_to_floor': details.decode.seconds.total / details.decode.floor,
  }
  return _finite(dataclasses.asdict(found) | dataclasses.asdict(details) | more)


def _finite(x: Any) -> Any:
  """What JSON can hold: None for infinity and for what is not a number."""
  if isinstance(x, dict):
    return {name: _finite(value) for name, value in x.items()}
  if isinstance(x, list | tuple):
    return [_finite(value) for value in x]
  return None if isinstance(x, float) and not math.isfinite(x) else x


# -- The main process: starts workers, and collects what they found. ---------------------------------------------------


def measure(name: str, only: str, results: dict[str, Any], args: argparse.Namespace) -> None:
  """Measures a case and adds it to the results, which are written after each program."""
  held = results['cases'].setdefault(name, {'programs': {}, 'estimate': None})
  held |= {key: dataclasses.asdict(CASES[name])[key] for key in ('preset', 'topology', 'fields')}
  keep = {n: r for n, r in held['programs'].items() if args.missing or not fnmatch.fnmatch(n, only)}
  held['programs'] = dict(keep)  # what the case no longer has goes
  with tempfile.TemporaryDirectory() as folder:
    log = pathlib.Path(folder) / 'log'
    for record in keep.values():
      _add(log, record)
    while True:
      command = [sys.executable, str(pathlib.Path(__file__)), f'--worker={name}', f'--log={log}', f'--programs={only}']
      child = subprocess.Popen(command + ['--quick'] * args.quick, cwd=ROOT, stderr=subprocess.PIPE, text=True)
      seen = -1
      while child.poll() is None:
        try:
          child.wait(timeout=2)
        except subprocess.TimeoutExpired:
          lines = _lines(log)
          if len(lines) != seen:
            seen = len(lines)
            _collect(held, lines)
            write(results, args.output)
      _, errors = child.communicate()
      lines = _lines(log)
      started = [x['program'] for x in lines if 'started' in x]
      ended = {x['program'] for x in lines if 'seconds' in x or 'failure' in x}
      lost = [x for x in started if x not in ended]
      if child.returncode == 0 or not lost:
        break
      said = (errors.strip().splitlines() or [''])[-1][:300]
      _add(log, {'program': lost[0], 'failure': f'the process ended with status {child.returncode}: {said}'})
    _collect(held, _lines(log))
  if child.returncode != 0:
    held['failure'] = (errors.strip().splitlines() or ['?'])[-1][:300]
    print(f'{name}: {held["failure"]}')
  else:
    held.pop('failure', None)
  write(results, args.output)


def _collect(held: dict[str, Any], lines: list[dict[str, Any]]) -> None:
  for x in lines:
    if 'estimate' in x:
      held['estimate'] = x['estimate']
    elif 'started' not in x:
      held['programs'][x['program']] = x


def _lines(log: pathlib.Path) -> list[dict[str, Any]]:
  return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _add(log: pathlib.Path, record: dict[str, Any]) -> None:
  with log.open('a') as f:
    f.write(json.dumps(record) + '\n')


def write(results: dict[str, Any], output: pathlib.Path) -> None:
  """Writes the results as one file, whole or not at all."""
  output.parent.mkdir(parents=True, exist_ok=True)
  beside = output.with_suffix('.part')
  beside.write_text(json.dumps(results, indent=1) + '\n')
  os.replace(beside, output)


def setting() -> dict[str, Any]:
  """What the programs were compiled with."""
  from importlib import metadata

  def version(package: str) -> str:
    try:
      return metadata.version(package)
    except metadata.PackageNotFoundError:
      return ''

  packages = {name: version(name) for name in ('jax', 'jaxlib', 'libtpu', 'jax-cuda12-plugin')}
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  names = re.findall(r'^model name\s*: (.*)$', cpuinfo.read_text(), re.M) if cpuinfo.exists() else []
  return {'cpu': names[0] if names else platform.machine(), 'cores': os.cpu_count(), **packages, 'seed': SEED,
          'date': datetime.date.today().isoformat(), 'lengths': LENGTHS}  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--only', default='*', help='CASE or CASE/PROGRAM, with wildcards')
  parser.add_argument('--missing', action='store_true', help='leave what the results have')
  parser.add_argument('--quick', action='store_true', help='two layers, fewer cases')
  parser.add_argument('--page', action='store_true', help='only write the tables')
  parser.add_argument('--output', type=pathlib.Path, help='default benchmarks/results/aot.json')
  parser.add_argument('--worker', help=argparse.SUPPRESS)
  parser.add_argument('--log', type=pathlib.Path, help=argparse.SUPPRESS)
  parser.add_argument('--programs', default='*', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    worker(args.worker, args.log, args.programs, args.quick)
    return
  args.output = args.output or (ROOT / 'runs' / 'quick' / 'aot.json' if args.quick else RESULTS)
  if not args.page:
    pattern, _, only = args.only.partition('/')
    names = [name for name in CASES if fnmatch.fnmatch(name, pattern) and (not args.quick or name in QUICK)]
    if not names:
      parser.error(f'--only={args.only}: no such case; there are: {"; ".join(CASES)}')
    results = json.loads(args.output.read_text()) if args.output.exists() else {'cases': {}}
    # The compilers of TPUs and GPUs may be installed in different environments, one after the other.
    found = {key: value for key, value in setting().items() if value != ''}
    results = {'setting': results.get('setting', {}) | found, 'cases': results['cases']}
    for name in names:
      measure(name, only or '*', results, args)
      print(summary(name, results['cases'][name]), flush=True)
  if not args.quick:
    aot_tables.write_page(PAGE, RESULTS, BEFORE)


def summary(name: str, case: dict[str, Any]) -> str:
  """What a case takes, in one line."""
  e = case['estimate']
  if not e:
    return f'{name}: {len(case["programs"])} programs'
  iteration, hours = aot_tables.number(e['iteration']), aot_tables.number(e['chip_hours'])
  steps, idle = e['rollout']['decode'], aot_tables.share(e['rollout']['idle'])
  return (
    f'{name}: iteration {iteration} s, {steps} decode steps with {idle} idle rows, MFU {aot_tables.share(e["mfu"])}, '
    f'chip-hours {hours}' + ''.join(f'; {line}' for line in e.get('advice', ()))
  )


if __name__ == '__main__':
  main()
