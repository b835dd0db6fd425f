"""Learning curves from pixels, beside those of the built-in text model. Writes a JSON file and a figure.

  python benchmarks/vision_learning.py           all runs that are not in the JSON file yet; 2 to 3 hours on 2 cores
  python benchmarks/vision_learning.py --quick   two short iterations of each, one seed, to runs/quick; 5 minutes

FrozenLake and Sokoban, three seeds each, from images with the model 'tiny-vl' (configs/*_vision_ppo.py) and from text
with the model 'tiny' (configs/*_ppo.py). Both models come from imitation of solvers, 'tiny' of many more levels and
steps (configs/sft_tiny.py, configs/sft_tiny_vl.py). Success is measured on the same 256 held-out levels, and reported
as a fraction of the best possible success on them.

The JSON file has the success on held-out levels and in training. For each setting it has the rise over seeds, which
'shows' if it is above 0 by a one-sided t-test at 5 %, and for each game the difference between images and text after
training. Each run is one process with a new workdir; its result is added to the JSON file at once, so an interrupted
benchmark continues where it stopped. A run whose flags have changed since is repeated.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import pathlib
import statistics
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning_curves import hardware, run  # noqa: E402
from ragen_jax.plots.curves import Panel, draw_panels  # noqa: E402
from ragen_jax.plots.runs import Curve, Run  # noqa: E402
from ragen_jax.plots.style import figure_style  # noqa: E402

SEEDS = (0, 1, 2)
LEVELS = 256  # held out
# Number of seeds -> the 95 % quantile of Student's t with one degree of freedom less.
QUANTILES = {2: 6.314, 3: 2.920}
EPISODES = 4  # of a level
# Game -> its tag, and the configs by what is read.
GAMES = {
  'FrozenLake': ('FrozenLake', {'images': 'frozenlake_vision_ppo', 'text': 'frozenlake_ppo'}),
  'Sokoban': ('SimpleSokoban', {'images': 'sokoban_vision_ppo', 'text': 'sokoban_ppo'}),
}
LABELS = {'images': 'tiny-vl, images', 'text': 'tiny, text'}
PANELS = tuple(Panel(game, game, f'{game}: held-out success / best possible', every_iteration=False) for game in GAMES)
FLAGS = (
  '--config.num_iterations=40', '--config.eval.every=5', f'--config.eval.groups={LEVELS}',
  '--config.eval.tag_groups=()', '--config.checkpoint.every=0', '--config.logging.episodes_every=0',
)  # fmt: skip
QUICK = (
  '--config.num_iterations=2', '--config.train.groups=16', '--config.eval.groups=16', '--config.eval.every=1',
  '--config.optimizer.mini_batch_size=32', '--config.optimizer.micro_batch_size=32',
)  # fmt: skip


def flags(game: str, quick: bool) -> list[str]:
  """The flags of main.py that both settings of a game share."""
  tag, _ = GAMES[game]
  own = [*FLAGS, f"--config.eval.tags=('{tag}',)", f'--config.eval.group_size={EPISODES}']
  return [*own, *(QUICK if quick else ())]


def fractions(result: dict, key: str = 'sampled') -> list[float]:
  """Held-out success as a fraction of the best possible, by evaluation."""
  return [x / result['optimal'] for x in result[key]]


def mean_and_error(values: list[float]) -> dict[str, float | None]:
  """The mean over seeds and its standard error; no error for a single seed."""
  error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
  return {'mean': round(statistics.fmean(values), 4), 'standard_error': None if error is None else round(error, 4)}


def verdict(told: dict[str, float | None], seeds: int) -> str:
  """Whether a mean over seeds lies above 0: a one-sided t-test at 5 %."""
  if told['standard_error'] is None:
    return 'one seed only'
  return 'shows' if told['mean'] > QUANTILES[seeds] * told['standard_error'] else 'not seen'


def is_done(record: dict, key: str, own: list[str]) -> bool:
  """Whether a JSON file has a run with these flags; a run with others is repeated."""
  return record['runs'].get(key, {}).get('flags') == own


def of_seeds(runs: dict[str, dict], *setting: str) -> dict[int, dict]:
  """The runs of a setting by seed; seeds that have not been run are missing."""
  keys = {seed: ' / '.join((*setting, str(seed))) for seed in SEEDS}
  return {seed: runs[key] for seed, key in keys.items() if key in runs}


def difference(ours: dict[int, dict], others: dict[int, dict]) -> dict[str, float | None] | None:
  """The mean difference of success after training over the seeds that both settings have; None without such a seed."""
  seeds = sorted(ours.keys() & others.keys())
  return mean_and_error([fractions(ours[s])[-1] - fractions(others[s])[-1] for s in seeds]) if seeds else None


def with_noise_of_before(rise: dict[str, float | None], found: list[dict], episodes: int) -> dict[str, float | None]:
  """A rise whose error includes the sampling error of the evaluation before training.

  This evaluation is the same for all seeds, so the variation over seeds does not show its error. The binomial one is an
  upper bound, because the levels are the same after training.
  """
  if rise['standard_error'] is None or len({r['sampled'][0] for r in found}) > 1:
    return rise
  p = found[0]['sampled'][0]
  noise = math.sqrt(p * (1 - p) / episodes) / found[0]['optimal']
  return rise | {'standard_error': round(math.hypot(rise['standard_error'], noise), 4)}


def verdicts(runs: dict[str, dict]) -> dict[str, dict]:
  """For each setting the fractions before and after and their rise; for each game the difference of the settings."""
  told = {}
  for game, (_, configs) in GAMES.items():
    for kind in configs:
      if found := list(of_seeds(runs, game, kind).values()):
        rise = mean_and_error([fractions(r)[-1] - fractions(r)[0] for r in found])
        rise = with_noise_of_before(rise, found, LEVELS * EPISODES)
        told[f'{game}, {kind}'] = {
          'before': mean_and_error([fractions(r)[0] for r in found]),
          'after': mean_and_error([fractions(r)[-1] for r in found]),
          'rise': rise,
          'learning': verdict(rise, len(found)),
          'wall_s': [r['wall_s'] for r in found],
        }
    if compared := difference(of_seeds(runs, game, 'images'), of_seeds(runs, game, 'text')):
      told[f'{game}, images - text'] = compared
  return told


def draw(runs: dict[str, dict], path: pathlib.Path) -> None:
  """Draws the fraction of the best possible success of all settings, sampled."""
  curves = []
  for kind, label in LABELS.items():
    drawn = []
    for game in GAMES:
      for found in of_seeds(runs, game, kind).values():
        series = {game: (np.asarray(found['step']), np.asarray(fractions(found)))}
        drawn.append(Run(f'{game} {kind}', {}, series, [], None, {}))
    if drawn:
      curves.append(Curve(label, tuple(drawn)))
  path.parent.mkdir(parents=True, exist_ok=True)
  with figure_style():
    draw_panels(PANELS, curves, 7.0).savefig(path, bbox_inches='tight')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true')
  arguments = parser.parse_args()
  if importlib.util.find_spec('matplotlib') is None:
    sys.exit('error: matplotlib is missing; pip install -r requirements.txt')
  results, images, seeds = ROOT / 'benchmarks' / 'results', ROOT / 'docs' / 'images', SEEDS
  if arguments.quick:
    results = images = ROOT / 'runs' / 'quick'
    seeds = SEEDS[:1]
    (results / 'vision_learning.json').unlink(missing_ok=True)
  out = results / 'vision_learning.json'
  record = json.loads(out.read_text()) if out.exists() else {'runs': {}}
  with tempfile.TemporaryDirectory() as scratch:
    cache = [f'--config.compilation_cache={scratch}/cache']
    for seed in seeds:  # seed by seed, so an interrupted benchmark can compare
      for game, (_, configs) in GAMES.items():
        for kind, config in configs.items():
          key, own = f'{game} / {kind} / {seed}', flags(game, arguments.quick)
          if is_done(record, key, own):
            continue
          workdir = pathlib.Path(scratch) / key.replace(' / ', '-')
          last = run(f'configs/{config}.py', seed, workdir, [*own, *cache])
          record['runs'][key] = last | {'flags': own}
          record |= {'command': ' '.join(sys.argv), 'hardware': hardware()}
          record['verdicts'] = verdicts(record['runs'])
          out.parent.mkdir(parents=True, exist_ok=True)
          out.write_text(json.dumps(record, indent=1) + '\n')
          told = fractions(last)
          print(f'{key}: {last["wall_s"]} s, {told[0]:.3f} -> {told[-1]:.3f} of the best possible', flush=True)
  draw(record['runs'], images / 'vision_learning.png')
  for name, told in record['verdicts'].items():
    print(f'{name}: {told}')


if __name__ == '__main__':
  main()
