"""Compares the five forms of replies, with and without the state reward, from pixels. Writes a JSON file and a figure.

  python benchmarks/vision_ablation.py                    FrozenLake; all runs that are not in the JSON file yet
  python benchmarks/vision_ablation.py --game=sokoban     Sokoban
  python benchmarks/vision_ablation.py --quick            one short iteration of each, one seed, to runs/quick

The built-in model 'tiny-vl' is trained with PPO (configs/*_vision_ppo.py) with each form of `agent.format`. Forms that
describe the board are trained without a reward for descriptions and with one: `reward.state_reward=0.02`, so that all
descriptions of an episode together earn a fifth of the goal at most. Scores below `reward.state_floor=0.5` earn
nothing, which is above the mean score of one description for all boards (benchmarks/description_floors.py).
Everything else is equal. Three seeds give the error bars: the mean over seeds and its standard error, of the success on
held-out levels before and after 20 iterations, as a fraction of the best possible. A run takes 3 to 10 minutes on 2
cores.

The result of a run is added to the JSON file at once, so an interrupted benchmark continues where it stopped. A run
whose flags have changed since is repeated.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning_curves import hardware, run  # noqa: E402
from benchmarks.vision_learning import EPISODES, LEVELS, difference, fractions, is_done, mean_and_error, of_seeds  # noqa: E402
from ragen_jax.agent.world_model.formats import FORMATS, described_sections  # noqa: E402
from ragen_jax.plots.style import figure_style  # noqa: E402

SEEDS = (0, 1, 2)
# Game -> its config and its tag.
GAMES = {
  'frozenlake': ('frozenlake_vision_ppo', 'FrozenLake'),
  'sokoban': ('sokoban_vision_ppo', 'SimpleSokoban'),
}
OFF, ON = 'without', 'with'
STATE_REWARD = ('--config.reward.state_reward=0.02', '--config.reward.state_floor=0.5')
FLAGS = (
  '--config.num_iterations=20', '--config.eval.every=20', f'--config.eval.groups={LEVELS}',
  '--config.eval.greedy_too=True', '--config.checkpoint.every=0', '--config.logging.episodes_every=0',
)  # fmt: skip
QUICK = (
  '--config.num_iterations=1', '--config.train.groups=8', '--config.eval.groups=8',
  '--config.optimizer.mini_batch_size=16', '--config.optimizer.micro_batch_size=16',
)  # fmt: skip


def settings() -> list[tuple[str, str]]:
  """(form, state reward) of each setting; forms without descriptions have no state reward."""
  return [(form, reward) for form in FORMATS for reward in ((OFF, ON) if described_sections(form) else (OFF,))]


def flags(game: str, form: str, reward: str, quick: bool) -> list[str]:
  """The flags of main.py for a setting, without config, seed and workdir."""
  _, tag = GAMES[game]
  own = [
    *FLAGS,
    f"--config.eval.tags=('{tag}',)",
    '--config.eval.tag_groups=()',
    f'--config.eval.group_size={EPISODES}',
  ]
  own += [f'--config.agent.format={form}', *(STATE_REWARD if reward == ON else ('--config.reward.state_reward=0.0',))]
  return [*own, *(QUICK if quick else ())]


def verdicts(runs: dict[str, dict], game: str) -> dict[str, dict]:
  """For each setting success before and after training; for each form with both what the state reward changes."""
  found = {(form, reward): of_seeds(runs, game, form, reward) for form, reward in settings()}
  told = {}
  for (form, reward), by_seed in found.items():
    if own := list(by_seed.values()):
      told[f'{form}, {reward} state reward'] = {
        'before': mean_and_error([fractions(r)[0] for r in own]),
        'after': mean_and_error([fractions(r)[-1] for r in own]),
        'after_greedy': mean_and_error([fractions(r, 'greedy')[-1] for r in own]),
      }
  for form in FORMATS:
    if compared := difference(found.get((form, ON), {}), found[form, OFF]):
      told[f'{form}, with - without'] = compared
  return told


def draw(told: dict[str, dict], path: pathlib.Path) -> None:
  """Draws success after training by form, with standard errors."""
  from matplotlib.figure import Figure

  forms = list(FORMATS)
  with figure_style():
    figure = Figure(figsize=(7.0, 2.8), layout='constrained')
    axis = figure.subplots()
    for shift, reward, colour in ((-0.12, OFF, '#0072B2'), (0.12, ON, '#D55E00')):
      shown = [(i, told[f'{form}, {reward} state reward']['after'])
               for i, form in enumerate(forms) if f'{form}, {reward} state reward' in told]  # fmt: skip
      axis.errorbar(
        [i + shift for i, _ in shown], [x['mean'] for _, x in shown], [x['standard_error'] or 0 for _, x in shown],
        fmt='o', capsize=3, color=colour, label=f'{reward} state reward',
      )  # fmt: skip
    axis.set_xticks(range(len(forms)), forms)
    axis.set_ylabel('success / best possible')
    axis.set_ylim(0, 1.05)
    axis.legend(loc='lower right')
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches='tight')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--game', choices=GAMES, default='frozenlake')
  parser.add_argument('--quick', action='store_true')
  arguments = parser.parse_args()
  if importlib.util.find_spec('matplotlib') is None:
    sys.exit('error: matplotlib is missing; pip install -r requirements.txt')
  name, game = f'vision_ablation_{arguments.game}', arguments.game
  results, images, seeds = ROOT / 'benchmarks' / 'results', ROOT / 'docs' / 'images', SEEDS
  if arguments.quick:
    results = images = ROOT / 'runs' / 'quick'
    seeds = SEEDS[:1]
    (results / f'{name}.json').unlink(missing_ok=True)
  out = results / f'{name}.json'
  record = json.loads(out.read_text()) if out.exists() else {'runs': {}}
  with tempfile.TemporaryDirectory() as scratch:
    for seed in seeds:  # seed by seed, so an interrupted benchmark can compare
      for form, reward in settings():
        key, own = f'{game} / {form} / {reward} / {seed}', flags(game, form, reward, arguments.quick)
        if is_done(record, key, own):
          continue
        workdir = pathlib.Path(scratch) / key.replace(' / ', '-')
        last = run(f'configs/{GAMES[game][0]}.py', seed, workdir, [*own, f'--config.compilation_cache={scratch}/cache'])
        record['runs'][key] = last | {'flags': own}
        record |= {'command': ' '.join(sys.argv), 'hardware': hardware()}
        record['verdicts'] = verdicts(record['runs'], game)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + '\n')
        told = fractions(last)
        print(f'{key}: {last["wall_s"]} s, {told[0]:.3f} -> {told[-1]:.3f} of the best possible', flush=True)
  draw(record['verdicts'], images / f'{name}.png')
  for setting, told in record['verdicts'].items():
    print(f'{setting}: {told}')


if __name__ == '__main__':
  main()
