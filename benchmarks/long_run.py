"""Memory, time, threads, open files and compiled programs of a long run. Writes a JSON file and a figure.

  python benchmarks/long_run.py           2,000 iterations of 16 episodes
  python benchmarks/long_run.py --quick   6 iterations, to runs/quick

The run is FrozenLake with the built-in model, with evaluations, checkpoints and logs of episodes. After each iteration
its process measures itself. A quantity is 'flat' if its median over the last tenth of the iterations exceeds its median
over the sixth tenth by at most 5 %. The first half is not compared, because the policy learns there: its replies become
shorter, and programs of new shapes are compiled. The resident memory contains the compiled programs. Live arrays are
what JAX keeps on the device, which is this machine's memory on a CPU. An interrupted benchmark starts again.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning_curves import check_matplotlib, hardware  # noqa: E402
from ragen_jax.plots.style import figure_style  # noqa: E402

ITERATIONS = 2_000
# Quantity -> its title and the factor from the measured unit.
QUANTITIES = {
  'resident': ('Resident memory, GiB', 2**-30),
  'arrays': ('Live arrays, MiB', 2**-20),
  'seconds': ('Seconds of an iteration', 1.0),
  'programs': ('Programs compiled since the start', 1.0),
  'threads': ('Threads', 1.0),
  'files': ('Open files', 1.0),
}
LIMIT = 1.05
FLAGS = (
  '--config=configs/frozenlake_ppo.py', '--config.train.groups=4', '--config.train.group_size=4',
  '--config.optimizer.mini_batch_size=16', '--config.optimizer.micro_batch_size=16', '--config.eval.groups=16',
  '--config.eval.every=50', '--config.checkpoint.every=50', '--config.logging.episodes_every=10',
)  # fmt: skip


def measure(programs: int) -> dict[str, float]:
  """What this process holds: bytes, threads and open files. Linux only."""
  import jax

  pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
  return {
    'resident': pages * os.sysconf('SC_PAGE_SIZE'),
    'arrays': sum(x.nbytes for x in jax.live_arrays()),
    'programs': programs,
    'threads': threading.active_count(),
    'files': len(os.listdir('/proc/self/fd')),
  }


def child(out: str, flags: list[str]) -> None:
  """Runs main.py with `flags` in this process, and writes a JSON line after each iteration."""
  import jax

  from ragen_jax.__main__ import run
  from ragen_jax.training.run import Run

  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compiled.append(seconds) if event.endswith('backend_compile_duration') else None
  )
  finish = Run.finish_iteration

  @functools.wraps(finish)
  def finish_and_measure(self, state, *arguments):
    result = finish(self, state, *arguments)
    with open(out, 'a') as file:
      file.write(json.dumps({'step': state.iteration} | measure(len(compiled))) + '\n')
    return result

  Run.finish_iteration = finish_and_measure
  sys.argv = ['main.py', *flags]
  run()


def run_and_measure(iterations: int) -> dict[str, list[float]]:
  """One run in a process of its own; each quantity by iteration."""
  with tempfile.TemporaryDirectory() as folder:
    out, workdir = pathlib.Path(folder) / 'measured.jsonl', pathlib.Path(folder) / 'run'
    flags = [*FLAGS, f'--config.num_iterations={iterations}', f'--workdir={workdir}']
    done = subprocess.run(
      [sys.executable, __file__, '--child', str(out), *flags], cwd=ROOT, check=False, text=True,
      stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    if done.returncode:
      sys.exit(f'error: the run ended with status {done.returncode}: {done.stderr[-2000:]}')
    from ragen_jax.runs.metrics import read_metrics

    measured = [json.loads(line) for line in out.read_text().splitlines()]
    seconds = {int(line['step']): line['timing_s/step'] for line in read_metrics(workdir) if 'timing_s/step' in line}
  lines = [line | {'seconds': seconds[line['step']]} for line in measured]
  if [line['step'] for line in lines] != list(range(1, iterations + 1)):
    sys.exit('error: not every iteration was measured')
  return {name: [line[name] for line in lines] for name in QUANTITIES}


def growth(values: list[float]) -> dict[str, float | str]:
  """Medians over the sixth and the last tenth, their ratio, and whether it is flat."""
  n = max(len(values) // 10, 1)
  before, after = statistics.median(values[5 * n : 6 * n]), statistics.median(values[-n:])
  ratio = after / before if before else float(after == before)
  return {'before': before, 'after': after, 'ratio': round(ratio, 4), 'verdict': 'flat' if ratio <= LIMIT else 'grows'}


def draw(measured: dict[str, list[float]], path: pathlib.Path) -> None:
  """Draws each quantity over the iterations."""
  import matplotlib

  matplotlib.use('Agg')
  import matplotlib.pyplot as plt

  path.parent.mkdir(parents=True, exist_ok=True)
  with figure_style():
    figure, axes = plt.subplots(2, 3, figsize=(7.0, 3.6), layout='constrained')
    for axis, (name, (title, factor)) in zip(axes.flat, QUANTITIES.items(), strict=True):
      axis.plot(range(1, len(measured[name]) + 1), [x * factor for x in measured[name]], linewidth=0.8)
      axis.set_title(title)
      axis.set_ylim(0, None)
    for axis in axes[1]:
      axis.set_xlabel('iteration')
    figure.savefig(path, bbox_inches='tight')


def main() -> None:
  if sys.argv[1:2] == ['--child']:
    child(sys.argv[2], sys.argv[3:])
    return
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true')
  arguments = parser.parse_args()
  check_matplotlib()
  if not pathlib.Path('/proc/self/statm').exists():
    sys.exit('error: this benchmark reads /proc, which only Linux has')
  out, image = ROOT / 'benchmarks' / 'results' / 'long_run.json', ROOT / 'docs' / 'images' / 'long_run.png'
  if arguments.quick:
    out, image = ROOT / 'runs' / 'quick' / out.name, ROOT / 'runs' / 'quick' / image.name
  measured = run_and_measure(6 if arguments.quick else ITERATIONS)
  verdicts = {name: growth(values) for name, values in measured.items()}
  record = {'command': ' '.join(sys.argv), 'hardware': hardware(), 'flags': FLAGS, 'verdicts': verdicts}
  record['every_tenth_iteration'] = {name: [round(x, 4) for x in values[9::10]] for name, values in measured.items()}
  out.parent.mkdir(parents=True, exist_ok=True)
  out.write_text(json.dumps(record, indent=1) + '\n')
  draw(measured, image)
  for name, told in verdicts.items():
    print(f'{name}: {told["before"]:.6g} -> {told["after"]:.6g}, {told["verdict"]}')


if __name__ == '__main__':
  main()
