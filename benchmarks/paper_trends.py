"""Repeats nine of the paper's comparisons with the built-in model on a CPU. Writes a JSON file and a figure.

  python benchmarks/paper_trends.py                     all runs that are not in the JSON file yet
  python benchmarks/paper_trends.py --only=clip,online  some comparisons
  python benchmarks/paper_trends.py --jobs=2            two runs at a time, each on half of the cores
  python benchmarks/paper_trends.py --quick             two iterations of two settings, to runs/quick

Each run is one command of `main.py`, with the flags that the JSON file lists: FrozenLake 4x4, slippery, 256 episodes an
iteration, 20 iterations, three seeds. The result of a run is added to the JSON file at once, so an interrupted
benchmark continues where it stopped. A trend "shows" if the difference of two means exceeds twice its standard error
and has the paper's sign; with the other sign it is "reversed", and otherwise "not seen". Three seeds estimate a
variance badly (three that agree by chance would make any difference significant), so the standard error uses the
variance within settings, pooled over all settings.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning_curves import check_matplotlib, hardware  # noqa: E402
from benchmarks.training_runs import flags, number_of_jobs, run_all, train, write  # noqa: E402

SEEDS = (0, 1, 2)
COMMON = (
  '--config=configs/frozenlake_ppo.py',
  '--config.num_iterations=20',
  '--config.train.groups=64',
  '--config.eval.every=0',  # the usual evaluations would take as long as the training
  '--config.eval.group_size=2',
  '--config.eval.greedy_too=False',
  '--config.checkpoint.every=0',
)
BASE = 'PPO'


# Setting -> the flags that it changes.
SETTINGS: dict[str, tuple[str, ...]] = {
  BASE: (),
  'GRPO': flags(algorithm__adv_estimator='grpo'),
  'StarPO-S': flags(filter__strategy='top_k', filter__value=0.25),
  'keep 75 %': flags(filter__strategy='top_k', filter__value=0.75),
  'keep 50 %': flags(filter__strategy='top_k', filter__value=0.5),
  'KL 0.001': flags(algorithm__kl_loss_coef=0.001, algorithm__kl_kind='k1'),
  'KL 0.1': flags(algorithm__kl_loss_coef=0.1, algorithm__kl_kind='k3'),
  'clip 0.2/0.2': flags(algorithm__clip_ratio_high=0.2),
  'Online-5': flags(train__online_k=5),
  'Online-10': flags(train__online_k=10),
  '1 a prompt': flags(train__groups=256, train__group_size=1),
  '2 a prompt': flags(train__groups=128, train__group_size=2),
  '8 a prompt': flags(train__groups=32, train__group_size=8),
  '16 a prompt': flags(train__groups=16, train__group_size=16),
  '1 action': flags(envs__FrozenLake__max_actions_per_turn=1),
  '2 actions': flags(envs__FrozenLake__max_actions_per_turn=2),
  '3 actions': flags(envs__FrozenLake__max_actions_per_turn=3),
  'bi-level GAE': flags(algorithm__adv_estimator='bi_level_gae'),
}

# Comparison -> (title, name of the base in it, settings in the order of the figure, (better, worse) according to the
# paper, the paper's claim).
COMPARISONS: dict[str, tuple[str, str, tuple[str, ...], tuple[str, str], str]] = {
  'estimator': ('PPO and GRPO', BASE, (BASE, 'GRPO'), (BASE, 'GRPO'), 'PPO is the more stable of the two'),
  'starpo_s': (
    'StarPO and StarPO-S',
    'StarPO',
    (BASE, 'StarPO-S'),
    ('StarPO-S', BASE),
    'filtering by reward deviation helps',
  ),
  'filter': (
    'Groups kept',
    'all',
    (BASE, 'keep 75 %', 'keep 50 %', 'StarPO-S'),
    ('keep 50 %', BASE),
    'keeping half of the groups prevents collapse',
  ),
  'kl': (
    'KL to the first weights',
    'none',
    (BASE, 'KL 0.001', 'KL 0.1'),
    (BASE, 'KL 0.1'),
    'training without KL does better',
  ),
  'clip': ('Clip', '0.2/0.28', (BASE, 'clip 0.2/0.2'), (BASE, 'clip 0.2/0.2'), 'a higher upper clip helps'),
  'online': (
    'Rollout reuse',
    'Online-1',
    (BASE, 'Online-5', 'Online-10'),
    (BASE, 'Online-10'),
    'fresh rollouts do better',
  ),
  'responses': (
    'Responses a prompt, 256 in all',
    '4',
    ('1 a prompt', '2 a prompt', BASE, '8 a prompt', '16 a prompt'),
    (BASE, '16 a prompt'),
    'more prompts with about 4 responses each do best',
  ),
  'actions': (
    'Actions a turn at most',
    '5',
    ('1 action', '2 actions', '3 actions', BASE),
    (BASE, '1 action'),
    '5 or 6 actions a turn do better than one',
  ),
  'bi_level': ('Credit', 'GAE', (BASE, 'bi-level GAE'), ('bi-level GAE', BASE), 'bi-level GAE does better (VAGEN)'),
}


def run(setting: str, seed: int, cache: str, overrides: tuple[str, ...], cores: set[int] | None = None) -> dict:
  """One run, on some of the cores: its evaluations, its curves, and its wall time in seconds."""
  wall, lines = train([*COMMON, f'--config.seed={seed}', *SETTINGS[setting], *overrides], cache, cores)
  tested = [line for line in lines if 'val-env/success' in line]
  steps = [line for line in lines if 'actor/entropy' in line]
  tag = 'FrozenLake'
  return {
    'wall_s': wall,
    'update_s': sum(line['timing_s/update_actor'] for line in steps),
    'step': [int(t['step']) for t in tested],
    'sampled': [t[f'val-env/{tag}/success'] for t in tested],
    'optimal': tested[-1][f'val-env/{tag}/optimal'],
    'entropy': [line['actor/entropy'] for line in steps],
    'grad_norm': [line['actor/grad_norm'] for line in steps],
    'in_group_reward_std': [line['rollout/in_group_reward_std'] for line in steps],
  }


def finals(runs: dict[str, dict], setting: str, seeds: tuple[int, ...]) -> list[float]:
  """The last sampled held-out success of each seed; empty if a run is missing."""
  found = [runs[f'{setting} / {s}']['sampled'][-1] for s in seeds if f'{setting} / {s}' in runs]
  return found if len(found) == len(seeds) else []


def standard_error(runs: dict[str, dict], seeds: tuple[int, ...]) -> float:
  """The standard error of a setting's mean over seeds, from the pooled variance within settings; NaN with one seed."""
  found = [f for f in (finals(runs, setting, seeds) for setting in SETTINGS) if f]
  if len(seeds) < 2 or not found:
    return math.nan
  return (statistics.fmean(statistics.variance(f) for f in found) / len(seeds)) ** 0.5


def verdicts(runs: dict[str, dict], seeds: tuple[int, ...]) -> dict[str, dict]:
  """For each comparison with all runs: the difference that the paper claims, and whether it shows."""
  told, error = {}, 2**0.5 * standard_error(runs, seeds)
  for name, (_, _, _, (better, worse), claim) in COMPARISONS.items():
    a, b = finals(runs, better, seeds), finals(runs, worse, seeds)
    if not a or not b:
      continue
    difference = statistics.fmean(a) - statistics.fmean(b)
    seen = 'shows' if difference > 2 * error else 'reversed' if difference < -2 * error else 'not seen'
    told[name] = {
      'paper': claim,
      'compared': f'{better} - {worse}',
      'difference': round(difference, 4),
      'standard_error': None if math.isnan(error) else round(error, 4),
      'trend': 'one seed only' if math.isnan(error) else seen,
    }
  return told


def draw(runs: dict[str, dict], seeds: tuple[int, ...], path: pathlib.Path) -> None:
  """Draws one panel for each comparison: final held-out success of each setting, with its standard error over seeds."""
  import matplotlib

  matplotlib.use('Agg')
  import matplotlib.pyplot as plt

  shown = {
    name: (title, base, [s for s in settings if finals(runs, s, seeds)])
    for name, (title, base, settings, _, _) in COMPARISONS.items()
  }
  shown = {name: of for name, of in shown.items() if of[2]}
  columns = min(3, len(shown))
  rows = -(-len(shown) // columns)
  figure, axes = plt.subplots(
    rows, columns, figsize=(3.6 * columns, 2.5 * rows), squeeze=False, sharey=True, layout='constrained'
  )
  for axis in axes.flat[len(shown) :]:
    axis.set_visible(False)
  error = standard_error(runs, seeds)
  for axis, (title, base, settings) in zip(axes.flat, shown.values(), strict=False):
    for x, setting in enumerate(settings):
      each = finals(runs, setting, seeds)
      axis.scatter([x] * len(each), each, s=12, color='#9db8d6', zorder=2)
      axis.errorbar(x, statistics.fmean(each), yerr=error, fmt='o', capsize=4, color='#1f4e8c', zorder=3)
      best = runs[f'{setting} / {seeds[0]}']['optimal']  # lower with fewer actions a turn
      axis.hlines(best, x - 0.5, x + 0.5, color='black', linewidth=1)
    axis.axhline(next(iter(runs.values()))['sampled'][0], color='gray', linewidth=1, linestyle=':')
    names = [base if s == BASE else s.removesuffix(' a prompt').removeprefix('clip ') for s in settings]
    axis.set_xticks(range(len(settings)), names, fontsize=8)
    axis.set_xlim(-0.6, len(settings) - 0.4)
    axis.set_title(title, fontsize=10)
    axis.grid(axis='y', alpha=0.3)
  figure.suptitle(
    'Held-out success after 20 iterations: mean over seeds with its standard error, and each seed.\n'
    'Solid: best possible. Dotted: before training, with five actions a turn.',
    fontsize=10,
  )
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=110)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--only', default='', help=f'comparisons, separated by commas: {", ".join(COMPARISONS)}')
  parser.add_argument('--jobs', type=int, default=1, help='number of runs at a time (Linux)')
  parser.add_argument('--quick', action='store_true')
  arguments = parser.parse_args()
  number_of_jobs(arguments.jobs)
  check_matplotlib()
  wanted = arguments.only.split(',') if arguments.only else list(COMPARISONS)
  unknown = sorted(set(wanted) - set(COMPARISONS))
  if unknown:
    sys.exit(f'error: --only={unknown[0]}: allowed: {", ".join(COMPARISONS)}')
  out, image = ROOT / 'benchmarks' / 'results' / 'paper_trends.json', ROOT / 'docs' / 'images' / 'paper_trends.png'
  seeds, overrides = SEEDS, ()
  if arguments.quick:
    out, image = ROOT / 'runs' / 'quick' / 'paper_trends.json', ROOT / 'runs' / 'quick' / 'paper_trends.png'
    seeds, wanted = (0,), ['starpo_s']
    overrides = ('--config.num_iterations=2', '--config.eval.groups=32')
    out.unlink(missing_ok=True)
  record = json.loads(out.read_text()) if out.exists() else {'runs': {}}
  settings = dict.fromkeys(s for name in wanted for s in COMPARISONS[name][2])
  keys = [(setting, seed) for seed in seeds for setting in settings]  # by seed, so an interrupted one can compare
  todo = [key for key in keys if '{} / {}'.format(*key) not in record['runs']]

  def add(key: tuple, result: dict) -> None:
    name = '{} / {}'.format(*key)
    record['runs'][name] = result
    record.update(command=' '.join(sys.argv), hardware=hardware(), common=list(COMMON))
    record['settings'] = {name: list(given) for name, given in SETTINGS.items()}
    record['verdicts'] = verdicts(record['runs'], seeds)
    write(out, record)
    print(f'{name}: {result["wall_s"]} s, {result["sampled"][0]:.3f} -> {result["sampled"][-1]:.3f}', flush=True)

  run_all(todo, lambda key, cache, cores: run(*key, cache, overrides, cores), add, arguments.jobs)
  record['verdicts'] = verdicts(record['runs'], seeds)
  write(out, record)
  for name, v in record['verdicts'].items():
    print(f'{name}: {v["compared"]} = {v["difference"]:+.3f} (standard error {v["standard_error"]}): {v["trend"]}')
  draw(record['runs'], seeds, image)


if __name__ == '__main__':
  main()
