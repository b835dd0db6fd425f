"""Searches for settings in which StarPO collapses on the built-in model, and compares it with StarPO-S there.

  python benchmarks/echo_trap.py                          all runs that are not in the JSON file yet, then the figure
  python benchmarks/echo_trap.py --game=Bandit --jobs=2  one game, two runs at a time
  python benchmarks/echo_trap.py --part=search            the search of learning rates only
  python benchmarks/echo_trap.py --quick                  two iterations of two runs, to runs/quick

StarPO is the paper's: PPO with a critic, 8 groups of 16 episodes, four optimiser steps an iteration, no discount, a
KL term of 0.001, a clip of 0.2 on both sides. The search trains it with seed 0 and several learning rates of policy and
critic. The comparison takes the learning rates `RATES` of a game, and adds StarPO-S, each of its changes alone, one
optimiser step an iteration (the filter leaves one of four), no critic (GRPO), and a rollback after a warning.

A run collapsed if the mean success of its last five iterations is below a half of its best such mean. The means of the
first four iterations are over the iterations so far, so a run that falls at once is compared with its first iteration.
The collapse began with the last iteration whose mean was above that half.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning_curves import check_matplotlib, hardware  # noqa: E402
from benchmarks.training_runs import flags, number_of_jobs, run_all, train, write  # noqa: E402
from configs import default  # noqa: E402
from ragen_jax.algorithms.collapse import EchoTrap, EchoTrapSettings  # noqa: E402
from ragen_jax.build import fill  # noqa: E402

# Game -> config, and iterations of a run.
GAMES = {
  'FrozenLake': ('configs/frozenlake_ppo.py', 60),
  'SimpleSokoban': ('configs/sokoban_ppo.py', 60),
  'Bandit': ('configs/bandit_ppo.py', 100),
}
STARPO = flags(
  train__groups=8, train__group_size=16, optimizer__mini_batch_size=32, optimizer__warmup_steps=0,
  optimizer__final_lr_fraction=1.0, reward__credit='trajectory', algorithm__lam=1.0, algorithm__entropy_coef=0.001,
  algorithm__clip_ratio_high=0.2, algorithm__kl_loss_coef=0.001, algorithm__kl_kind='k1',
  eval__groups=128, eval__group_size=1, eval__greedy_too=False, eval__every=0, checkpoint__every=0,
)  # fmt: skip
_FILTER = flags(filter__strategy='top_k', filter__value=0.25, filter__fixed_steps=False)
_NO_KL = flags(algorithm__kl_loss_coef=0.0)
_CLIP = flags(algorithm__clip_ratio_high=0.28)
# Setting -> the flags that it changes. Each one's name stands in the figure.
SETTINGS: dict[str, tuple[str, ...]] = {
  'StarPO': (),
  'StarPO-S': (*_FILTER, *_NO_KL, *_CLIP),
  'one step': flags(optimizer__mini_batch_size=128),
  'filter': _FILTER,
  'no KL': _NO_KL,
  'clip 0.28': _CLIP,
  'no critic': flags(algorithm__adv_estimator='grpo'),
  # Back to the best checkpoint, with half the learning rate, after a warning.
  'rollback': flags(monitor__echo_trap='rollback', eval__every=5, checkpoint__every=5),
}
SEARCHED = {
  'FrozenLake': (5e-4, 1e-3, 2e-3, 4e-3),
  'SimpleSokoban': (5e-4, 1e-3, 2e-3, 4e-3),
  'Bandit': (5e-4, 1e-3, 2e-3, 4e-3, 6e-3, 8e-3, 1.6e-2),
}
# Chosen by the search: the learning rates of the comparison. The figure shows the last one.
RATES = {'FrozenLake': (2e-3, 4e-3), 'SimpleSokoban': (2e-3,), 'Bandit': (6e-3,)}
SEEDS = (0, 1, 2, 3, 4)
_WINDOW = 5
# Name in the JSON file -> name in the metrics of a run; TAG is the game.
CURVES = {
  'success': 'train/TAG/success',
  'valid': 'train/TAG/action_is_valid',
  'format': 'train/format_correct',
  'reply_tokens': 'response_length/mean',
  'in_group_reward_std': 'rollout/in_group_reward_std',
  'repeats': 'rollout/repeated_replies',
  'entropy': 'actor/entropy',
  'grad_norm': 'actor/grad_norm',
  'ppo_kl': 'actor/ppo_kl',
}

Key = tuple[str, str, float, int]  # game, setting, learning rate, seed


def name_of(key: Key) -> str:
  game, setting, rate, seed = key
  return f'{game} / {setting} / {rate:g} / {seed}'


def run(key: Key, cache: str, cores: set[int] | None, overrides: tuple[str, ...] = ()) -> dict:
  """One run: its curves, whether it collapsed and when, the first warning, and held-out success before and after."""
  game, setting, rate, seed = key
  config, iterations = GAMES[game]
  given = flags(
    num_iterations=iterations, seed=seed, optimizer__actor_lr=rate, optimizer__critic_lr=rate, eval__tags=(game,),
    eval__tag_groups=(),
  )  # fmt: skip
  wall, lines = train([f'--config={config}', *STARPO, *SETTINGS[setting], *given, *overrides], cache, cores)
  tested = [line[f'val-env/{game}/success'] for line in lines if f'val-env/{game}/success' in line]
  steps = [line for line in lines if CURVES['success'].replace('TAG', game) in line]
  curves = {
    name: [_rounded(line.get(metric.replace('TAG', game))) for line in steps] for name, metric in CURVES.items()
  }
  return {
    'wall_s': wall,
    'held_out': [tested[0], tested[-1]],
    'collapsed_at': collapsed_at(curves['success']),
    'warned_at': warned_at(curves),
    'curves': curves,
  }


def _rounded(x: float | None) -> float | None:
  return None if x is None or math.isnan(x) else float(f'{x:.4g}')


def collapsed_at(success: list[float]) -> int | None:
  """The iteration, from 1, after which the mean of `_means` stays below a half of its maximum; None if it is above at
  the end, or if it has never been above 0."""
  means = _means(success)
  half = max(means) / 2
  if means[-1] >= half:
    return None
  return max(i for i, mean in enumerate(means) if mean >= half) + 1


def _means(values: list[float]) -> list[float]:
  """The mean of each value and the four before it, or as many as there are."""
  return [statistics.fmean(values[max(i - _WINDOW + 1, 0) : i + 1]) for i in range(len(values))]


def warned_at(curves: dict[str, list[float | None]]) -> int | None:
  """The iteration, from 1, of the first warning by today's rule with its default settings; None without one."""
  rules, state = fill(EchoTrapSettings, default.get_config().monitor), EchoTrap.create()
  names = {'reward_std': 'in_group_reward_std', 'repeats': 'repeats', 'entropy': 'entropy', 'grad_norm': 'grad_norm',
           'format': 'format'}  # fmt: skip
  for i in range(len(curves['success'])):
    seen = {name: curves[curve][i] for name, curve in names.items()}
    state, _, warning = state.after_step(rules, **{k: math.nan if x is None else x for k, x in seen.items()})
    if warning:
      return i + 1
  return None


def keys(games: list[str], part: str) -> list[Key]:
  """The runs, in the order in which they are made: the search, then all settings of one seed after the other."""
  search = [(game, 'StarPO', rate, 0) for game in games for rate in SEARCHED[game]]
  compared = [
    (game, setting, rate, seed) for seed in SEEDS for game in games for rate in RATES[game] for setting in SETTINGS
  ]
  return list(dict.fromkeys((search if part != 'comparison' else []) + (compared if part != 'search' else [])))


def summary(runs: dict[str, dict]) -> dict[str, dict]:
  """For each case of the comparison: how many runs collapsed, when, and how early the warning was."""
  told = {}
  for game in GAMES:
    for rate, setting in itertools.product(RATES[game], SETTINGS):
      found = [runs[n] for s in SEEDS if (n := name_of((game, setting, rate, s))) in runs]
      if not found:
        continue
      fallen = [r for r in found if r['collapsed_at'] is not None]
      warned = [r['collapsed_at'] - r['warned_at'] for r in fallen if r['warned_at'] is not None]
      told[f'{game} / {setting} / {rate:g}'] = {
        'runs': len(found),
        'collapsed': len(fallen),
        'collapsed_at': [r['collapsed_at'] for r in fallen],
        'iterations_from_warning_to_collapse': warned,
        'warned_without_collapse': sum(r['collapsed_at'] is None and r['warned_at'] is not None for r in found),
        'held_out_before': round(statistics.fmean(r['held_out'][0] for r in found), 4),
        'held_out_after': [r['held_out'][1] for r in found],
      }
  return told


def draw(runs: dict[str, dict], path: pathlib.Path) -> None:
  """A row of panels for each game: four curves, as means over five iterations, with a line for each seed."""
  import matplotlib

  matplotlib.use('Agg')
  import matplotlib.pyplot as plt

  shown = (
    ('success', 'success in training'),
    ('in_group_reward_std', 'in-group reward deviation'),
    ('grad_norm', 'gradient norm'),
    ('reply_tokens', 'tokens of replies in an episode'),
  )
  colours = {'StarPO': '#b3432b', 'StarPO-S': '#1f4e8c', 'one step': '#8a8a8a'}
  games = [game for game in GAMES if any(n.startswith(f'{game} /') for n in runs)]
  figure, axes = plt.subplots(
    len(games), len(shown), figsize=(3.3 * len(shown), 2.5 * len(games)), squeeze=False, layout='constrained'
  )
  for row, game in zip(axes, games, strict=True):
    for axis, (curve, title) in zip(row, shown, strict=True):
      for setting, colour in colours.items():
        for i, seed in enumerate(SEEDS):
          found = runs.get(name_of((game, setting, RATES[game][-1], seed)))
          if found:
            y = _means([math.nan if x is None else x for x in found['curves'][curve]])
            axis.plot(range(1, len(y) + 1), y, color=colour, linewidth=0.9, label=setting if i == 0 else None)
      axis.set_title(f'{game}: {title}', fontsize=9)
      axis.grid(alpha=0.3)
    row[0].legend(fontsize=8)
    row[2].set_yscale('log')
    for axis in row:
      axis.set_xlabel('iteration', fontsize=8)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=110)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--game', choices=list(GAMES), help='one game; all without it')
  parser.add_argument('--part', choices=['search', 'comparison'], help='one part; both without it')
  parser.add_argument('--rate', type=float, help='one learning rate; all without it')
  parser.add_argument('--setting', choices=list(SETTINGS), nargs='+', default=list(SETTINGS), help='all by default')
  parser.add_argument('--jobs', type=int, default=1, help='number of runs at a time (Linux)')
  parser.add_argument('--quick', action='store_true')
  arguments = parser.parse_args()
  number_of_jobs(arguments.jobs)
  check_matplotlib()
  out, image = ROOT / 'benchmarks' / 'results' / 'echo_trap.json', ROOT / 'docs' / 'images' / 'echo_trap.png'
  todo, overrides = keys([arguments.game] if arguments.game else list(GAMES), arguments.part or ''), ()
  if arguments.quick:
    out, image = ROOT / 'runs' / 'quick' / 'echo_trap.json', ROOT / 'runs' / 'quick' / 'echo_trap.png'
    todo, overrides = [('Bandit', s, RATES['Bandit'][-1], 0) for s in ('StarPO', 'StarPO-S')], flags(num_iterations=2)
    out.unlink(missing_ok=True)
  record = json.loads(out.read_text()) if out.exists() else {'runs': {}}
  todo = [
    k for k in todo if name_of(k) not in record['runs'] and k[1] in arguments.setting and arguments.rate in (None, k[2])
  ]

  def add(key: Key, result: dict) -> None:
    record['runs'][name_of(key)] = result
    record.update(command=' '.join(sys.argv), hardware=hardware(), starpo=list(STARPO))
    record['settings'] = {name: list(given) for name, given in SETTINGS.items()}
    record['summary'] = summary(record['runs'])
    write(out, record)
    collapsed, warned = result['collapsed_at'], result['warned_at']
    print(
      f'{name_of(key)}: {result["wall_s"]} s, held-out success {result["held_out"][0]:.3f} -> '
      f'{result["held_out"][1]:.3f}, {f"collapsed at {collapsed}" if collapsed else "no collapse"}, '
      f'{f"warning at {warned}" if warned else "no warning"}',
      flush=True,
    )

  run_all(todo, lambda key, cache, cores: run(key, cache, cores, overrides), add, arguments.jobs)
  for name, told in summary(record['runs']).items():
    print(f'{name}: {told["collapsed"]} of {told["runs"]} collapsed; held-out success after: {told["held_out_after"]}')
  draw(record['runs'], image)


if __name__ == '__main__':
  main()
