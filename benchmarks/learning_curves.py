"""Trains a config with several seeds and measures success and time. Writes a JSON file and a figure.

  python benchmarks/learning_curves.py --config=configs/frozenlake_ppo.py --seeds=0,1,2

Each seed is one run of `main.py` in its own process and a new workdir. The wall time is that of the whole process,
including compilation. `--quick` runs two iterations of one seed, and writes to runs/quick unless `--out` and `--figure`
name other files.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ragen_jax.runs.metrics import read_metrics  # noqa: E402


def hardware() -> dict[str, str | int]:
  """The machine of the measurement."""
  import jax

  model = platform.processor()
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  if cpuinfo.exists():
    names = [
      line.split(':', 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith('model name')
    ]
    model = names[0] if names else model
  return {
    'cpu': model,
    'cores': os.cpu_count() or 0,
    'device': jax.devices()[0].device_kind,
    'jax': jax.__version__,
    'python': platform.python_version(),
    'date': datetime.date.today().isoformat(),
  }


def run(config: str, seed: int, workdir: pathlib.Path, overrides: list[str]) -> dict:
  """One run: its evaluations and its wall time in seconds."""
  command = [
    sys.executable,
    'main.py',
    f'--config={config}',
    f'--config.seed={seed}',
    f'--workdir={workdir}',
    *overrides,
  ]
  start = time.monotonic()
  subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
  wall = time.monotonic() - start
  lines = read_metrics(workdir)
  evaluations = [line for line in lines if 'val-env/success' in line]
  tag = next(name.split('/')[1] for name in evaluations[0] if name.startswith('val-greedy/'))
  iterations = [line['timing_s/step'] for line in lines if 'timing_s/step' in line]
  return {
    'seed': seed,
    'wall_s': round(wall, 1),
    'median_iteration_s': sorted(iterations)[len(iterations) // 2],
    'optimal': evaluations[-1].get(f'val-env/{tag}/optimal'),  # None if it is not known
    'step': [int(e['step']) for e in evaluations],
    'sampled': [e[f'val-env/{tag}/success'] for e in evaluations],
    'greedy': [e[f'val-greedy/{tag}/success'] for e in evaluations],
    'train': [line[f'train/{tag}/success'] for line in lines if f'train/{tag}/success' in line],
  }


def draw(runs: list[dict], title: str, path: pathlib.Path) -> None:
  """Draws held-out success over iterations, one line a seed, and a line for the best possible success."""
  import matplotlib

  matplotlib.use('Agg')
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout='constrained')
  for axis, key, label in zip(axes, ('sampled', 'greedy'), ('temperature 0.5', 'greedy'), strict=True):
    for r in runs:
      axis.plot(r['step'], r[key], marker='o', markersize=3, linewidth=1.5, label=f'seed {r["seed"]}')
    if runs[0]['optimal'] is not None:
      axis.axhline(runs[0]['optimal'], color='black', linewidth=1, label='best possible')
      axis.axhline(0.85 * runs[0]['optimal'], color='black', linewidth=1, linestyle=':', label='85 % of it')
    axis.set_title(label)
    axis.set_xlabel('iteration')
    axis.grid(alpha=0.3)
  axes[0].set_ylabel('success on held-out levels')
  axes[0].set_ylim(0, None)
  axes[1].legend(loc='lower right', fontsize=8)
  figure.suptitle(title)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=130)


def seed_list(text: str) -> list[int]:
  """Numbers between commas."""
  return [int(seed) for seed in text.split(',')]


def check_matplotlib() -> None:
  """Ends the process if the figure could not be drawn in the end."""
  if importlib.util.find_spec('matplotlib') is None:
    sys.exit('error: matplotlib is missing; pip install -r requirements.txt')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--config', default='configs/frozenlake_ppo.py')
  parser.add_argument('--seeds', type=seed_list, default='0,1,2')
  parser.add_argument('--out', default='', help='JSON; by default benchmarks/results/<config>.json')
  parser.add_argument('--figure', default='', help='PNG; by default docs/images/<config>.png')
  parser.add_argument('--quick', action='store_true')
  parser.add_argument('overrides', nargs='*', help='further flags of main.py, after --')
  arguments = parser.parse_args()
  check_matplotlib()
  name = pathlib.Path(arguments.config.partition(':')[0]).stem
  seeds = arguments.seeds[: 1 if arguments.quick else None]
  overrides = arguments.overrides + (['--config.num_iterations=2'] if arguments.quick else [])
  runs = []
  with tempfile.TemporaryDirectory() as scratch:
    for seed in seeds:
      runs.append(run(arguments.config, seed, pathlib.Path(scratch) / str(seed), overrides))
      last = runs[-1]
      print(
        f'seed {seed}: {last["wall_s"]} s, sampled {last["sampled"][0]:.3f} -> {last["sampled"][-1]:.3f}, '
        f'greedy {last["greedy"][0]:.3f} -> {last["greedy"][-1]:.3f}, best possible {last["optimal"]}',
        flush=True,
      )
  results, images = ROOT / 'benchmarks' / 'results', ROOT / 'docs' / 'images'
  if arguments.quick:
    results = images = ROOT / 'runs' / 'quick'
  out = pathlib.Path(arguments.out or results / f'{name}.json')
  out.parent.mkdir(parents=True, exist_ok=True)
  record = {'command': ' '.join(sys.argv), 'config': arguments.config, 'hardware': hardware(), 'runs': runs}
  out.write_text(json.dumps(record, indent=1) + '\n')
  draw(runs, name, pathlib.Path(arguments.figure or images / f'{name}.png'))


if __name__ == '__main__':
  main()
