"""Learning curves of agent programs that play over HTTP. Writes a JSON file and a figure.

  python benchmarks/agents_learning.py           all runs that are not in the JSON file yet; 1.5 to 2.5 hours on 2 cores
  python benchmarks/agents_learning.py --quick   two short iterations of each, one seed, to runs/quick; 5 minutes

Three settings, three seeds each. 'environment' is FrozenLake played turn by turn by the rollout loop; 'program' is the
same game played by docs/examples/frozenlake.py over HTTP. With equal seeds both begin with equal rows, and later differ
by the rounding of other programs. 'two agents' is docs/examples/two_agents.py: two agents move in turns, one is
trained, and the other plays with the weights of the beginning. Its success is that of both together.

The JSON file has the success on held-out levels and in training, and for each setting the rise over seeds. A rise
'shows' if it exceeds twice its standard error. Each run is one process with a new workdir; its result is added to the
JSON file at once, so an interrupted benchmark continues where it stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning_curves import hardware  # noqa: E402
from ragen_jax.plots.curves import Panel, draw_panels  # noqa: E402
from ragen_jax.plots.runs import Curve, Run  # noqa: E402
from ragen_jax.plots.style import figure_style  # noqa: E402
from ragen_jax.runs.metrics import read_metrics  # noqa: E402

SEEDS = (0, 1, 2)
# Setting -> its config, its tag, and the panel of its curve.
SETTINGS = {
  'environment': ('frozenlake_ppo', 'FrozenLake', 'one agent'),
  'program': ('agents_ppo', 'Agent', 'one agent'),
  'two agents': ('two_agents_ppo', 'Agent', 'two agents'),
}
LABELS = {
  'environment': 'rollout loop',
  'program': 'program over HTTP',
  'two agents': 'two agents over HTTP, one trained',
}
PANELS = (
  Panel('success', 'one agent', 'FrozenLake, one agent: held-out success', every_iteration=False),
  Panel('two_agents', 'two agents', 'FrozenLake, two agents in turns: held-out success', every_iteration=False),
)
FLAGS = ('--config.eval.every=5', '--config.checkpoint.every=0', '--config.logging.episodes_every=0')
# Of settings that programs play.
SERVER = ('--config.serve.port=0',)
QUICK = (
  '--config.num_iterations=2', '--config.train.groups=16', '--config.eval.groups=16', '--config.eval.every=1',
  '--config.optimizer.mini_batch_size=32', '--config.optimizer.micro_batch_size=32',
)  # fmt: skip


def flags(setting: str, seed: int, quick: bool) -> list[str]:
  """The flags of main.py, without the workdir."""
  config, tag, _ = SETTINGS[setting]
  own = [f'--config=configs/{config}.py', f'--config.seed={seed}', *FLAGS]
  return [*own, *(SERVER if tag == 'Agent' else ()), *(QUICK if quick else ())]


def run(setting: str, seed: int, cache: str, quick: bool) -> dict:
  """One run: success by iteration, on held-out levels and in training, and the wall time in seconds."""
  tag = SETTINGS[setting][1]
  with tempfile.TemporaryDirectory() as workdir:
    command = [sys.executable, 'main.py', *flags(setting, seed, quick), f'--config.compilation_cache={cache}']
    start = time.monotonic()
    done = subprocess.run(
      [*command, f'--workdir={workdir}'], cwd=ROOT, check=False, text=True, stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
    )  # fmt: skip
    wall = time.monotonic() - start
    if done.returncode:
      sys.exit(f'error: {setting}, seed {seed}: {done.stderr[-2000:]}')
    lines = read_metrics(workdir)
  tested = [line for line in lines if 'val-env/success' in line]
  trained = [line for line in lines if f'train/{tag}/success' in line]
  found = {
    'wall_s': round(wall, 1),
    'median_iteration_s': statistics.median(line['timing_s/step'] for line in trained),
    'step': [int(line['step']) for line in tested],
    'sampled': [line[f'val-env/{tag}/success'] for line in tested],
    'greedy': [line[f'val-greedy/{tag}/success'] for line in tested],
    'train': [line[f'train/{tag}/success'] for line in trained],
    'scores': [line['critic/score/mean'] for line in trained],
  }
  best = tested[-1].get(f'val-env/{tag}/optimal', math.nan)
  if math.isfinite(best):  # it is not known of programs
    found['optimal'] = best
  if tag == 'Agent':
    found['calls'] = sum(line['serving/calls'] for line in trained)
    found['calls_not_trained'] = sum(line['serving/calls_not_trained'] for line in trained)
  return found


def of_seeds(runs: dict[str, dict], setting: str) -> list[dict]:
  """The runs of a setting."""
  return [runs[f'{setting} / {seed}'] for seed in SEEDS if f'{setting} / {seed}' in runs]


def rise(runs: list[dict]) -> dict:
  """How much the success on held-out levels rose, sampled: mean over seeds with its standard error."""
  each = [r['sampled'][-1] - r['sampled'][0] for r in runs]
  told = {
    'before': round(statistics.fmean(r['sampled'][0] for r in runs), 4),
    'after': round(statistics.fmean(r['sampled'][-1] for r in runs), 4),
    'rise': round(statistics.fmean(each), 4),
  }
  if len(each) < 2:
    return told | {'learning': 'one seed only'}
  error = statistics.stdev(each) / len(each) ** 0.5
  seen = 'shows' if statistics.fmean(each) > 2 * error else 'not seen'
  return told | {'standard_error': round(error, 4), 'learning': seen}


def equal_iterations(one: dict, other: dict) -> int:
  """Number of iterations at the beginning whose episodes earned the same in two runs of one seed."""
  pairs = zip(one['scores'], other['scores'], strict=False)
  same = [abs(a - b) < 1e-6 for a, b in pairs]
  return same.index(False) if False in same else len(same)


def verdicts(runs: dict[str, dict]) -> dict[str, dict]:
  """The rise of each setting, and how the program compares with the environment."""
  told = {setting: rise(found) for setting in SETTINGS if (found := of_seeds(runs, setting))}
  inside, outside = of_seeds(runs, 'environment'), of_seeds(runs, 'program')
  if inside and len(inside) == len(outside):
    pairs = list(zip(outside, inside, strict=True))
    each = [a['sampled'][-1] - b['sampled'][-1] for a, b in pairs]
    told['program - environment'] = {
      'difference': round(statistics.fmean(each), 4),
      'standard_error': round(statistics.stdev(each) / len(each) ** 0.5, 4) if len(each) > 1 else None,
      'equal_iterations': [equal_iterations(a, b) for a, b in pairs],
      'time': round(statistics.fmean(a['wall_s'] / b['wall_s'] for a, b in pairs), 2),
    }
  return told


def draw(runs: dict[str, dict], path: pathlib.Path) -> None:
  """Draws the success on held-out levels of all settings, sampled."""
  curves = []
  for setting, (_, _, panel) in SETTINGS.items():
    found = of_seeds(runs, setting)
    if found:
      series = [{panel: (np.asarray(r['step']), np.asarray(r['sampled']))} for r in found]
      drawn = tuple(Run(setting, {}, s, [], r.get('optimal'), {}) for s, r in zip(series, found, strict=True))
      curves.append(Curve(LABELS[setting], drawn))
  path.parent.mkdir(parents=True, exist_ok=True)
  with figure_style():
    draw_panels(PANELS, curves, 7.0).savefig(path, bbox_inches='tight')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true')
  arguments = parser.parse_args()
  for package in ('matplotlib', 'uvicorn', 'openai'):
    if importlib.util.find_spec(package) is None:
      sys.exit(f'error: {package} is missing; pip install -r requirements-serve.txt -r requirements-endpoint.txt')
  out, image = (
    ROOT / 'benchmarks' / 'results' / 'agents_learning.json',
    ROOT / 'docs' / 'images' / 'agents_learning.png',
  )
  seeds = SEEDS
  if arguments.quick:
    out, image, seeds = ROOT / 'runs' / 'quick' / out.name, ROOT / 'runs' / 'quick' / image.name, SEEDS[:1]
    out.unlink(missing_ok=True)
  record = json.loads(out.read_text()) if out.exists() else {'runs': {}}
  with tempfile.TemporaryDirectory() as cache:
    for seed in seeds:  # seed by seed, so an interrupted benchmark can compare
      for setting in SETTINGS:
        key = f'{setting} / {seed}'
        if key in record['runs']:
          continue
        record['runs'][key] = last = run(setting, seed, cache, arguments.quick)
        record |= {'command': ' '.join(sys.argv), 'hardware': hardware()}
        record['flags'] = {s: flags(s, 0, arguments.quick) for s in SETTINGS}
        record['verdicts'] = verdicts(record['runs'])
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + '\n')
        print(
          f'{key}: {last["wall_s"]} s, sampled {last["sampled"][0]:.3f} -> {last["sampled"][-1]:.3f}, '
          f'greedy {last["greedy"][0]:.3f} -> {last["greedy"][-1]:.3f}',
          flush=True,
        )
  draw(record['runs'], image)
  for name, told in record['verdicts'].items():
    print(f'{name}: ' + ', '.join(f'{k} {x}' for k, x in told.items()))


if __name__ == '__main__':
  main()
