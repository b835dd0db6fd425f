"""Compares imitation of the solver with plain RL, both from the built-in model. Writes a JSON file.

  python benchmarks/sft_and_rl.py           all runs that are not in the JSON file yet
  python benchmarks/sft_and_rl.py --quick   a few steps of each, one seed, to runs/quick

FrozenLake and Sokoban, three seeds each. Both methods learn from the same number of episodes, 10,240. RL (PPO as
shipped) plays them itself, in 20 iterations of 512: 128 new levels an iteration, each played 4 times. SFT learns from
the solver's play without noise, in 160 steps of 64, drawn from 4 plays of each of 2,560 levels. Seeds share no levels,
and held-out levels are never trained on. Wall times differ; the reported time is that of the whole process, including
compilation and evaluation. Success is measured on 256 held-out levels. The verdict is 'shows' if SFT's mean over seeds
exceeds RL's by more than twice the standard error of their difference, 'reversed' in the opposite case, and 'not seen'
otherwise.

The built-in model was made from noisy play of both games, so neither method starts from scratch. The result of a run is
added to the JSON file at once, so an interrupted benchmark continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning_curves import hardware  # noqa: E402
from ragen_jax.runs.metrics import read_metrics  # noqa: E402

SEEDS = (0, 1, 2)
FIRST_LEVEL = 1_000_000_000
# Game -> (its tag, episodes a held-out level: one if the game is deterministic).
GAMES = {'frozenlake': ('FrozenLake', 4), 'sokoban': ('SimpleSokoban', 1)}
RL = ('--config.num_iterations=20', '--config.eval.every=0', '--config.checkpoint.every=0')
SFT = (
  '--mode=sft', '--config.sft.group_size=4', '--config.sft.steps=160', '--config.sft.batch_size=64',
  '--config.sft.val_fraction=0', '--config.sft.eval_every=0', '--config.sft.checkpoint_every=0',
)  # fmt: skip
QUICK = {
  'SFT': ('--config.sft.steps=2', '--config.sft.group_size=1', '--config.sft.batch_size=32'),
  'RL': ('--config.num_iterations=1', '--config.train.groups=32'),
}


def flags(method: str, game: str, levels: int = 2560) -> list[str]:
  """The flags of one method on one game; `levels` is the number of demonstrated levels."""
  tag, episodes = GAMES[game]
  common = [f"--config.eval.tags=('{tag}',)", '--config.eval.groups=256', '--config.eval.tag_groups=()']
  common += [f'--config.eval.group_size={episodes}', '--config.logging.episodes_every=0']
  if method == 'RL':
    return [f'--config=configs/{game}_ppo.py', *common, *RL]
  return [f'--config=configs/sft_{game}.py', *common, *SFT, f'--config.sft.levels=({levels},)']


def run(method: str, game: str, seed: int, cache: str, quick: bool) -> dict:
  """One run: held-out success at the end (for RL also before), and the wall time in seconds."""
  tag = GAMES[game][0]
  with tempfile.TemporaryDirectory() as scratch:
    workdir = pathlib.Path(scratch) / 'run'
    own = [f'--config.seed={seed}', f'--config.compilation_cache={cache}', f'--workdir={workdir}']
    own += (*QUICK[method], '--config.eval.groups=8') if quick else ()
    if method == 'SFT':
      own += [f'--config.sft.output={scratch}/model', f'--config.sft.first_level={FIRST_LEVEL + 10_000 * seed}']
    start = time.monotonic()
    done = subprocess.run(
      [sys.executable, 'main.py', *flags(method, game, 32 if quick else 2560), *own],
      cwd=ROOT,
      check=False,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
    )
    wall = time.monotonic() - start
    if done.returncode:
      sys.exit(f'error: {method} on {game}, seed {seed}: {done.stderr[-2000:]}')
    tested = [line for line in read_metrics(workdir) if 'val-env/success' in line]
  return {
    'wall_s': round(wall, 1),
    'step': [int(line['step']) for line in tested],
    'sampled': [line[f'val-env/{tag}/success'] for line in tested],
    'greedy': [line[f'val-greedy/{tag}/success'] for line in tested],
    'optimal': tested[-1][f'val-env/{tag}/optimal'],
  }


def final(
  runs: dict[str, dict], method: str, game: str, how: str, seeds: tuple[int, ...]
) -> tuple[float, float] | None:
  """Mean and standard error over seeds of the last held-out success; None if a run is missing."""
  found = [runs[f'{game} / {method} / {s}'][how][-1] for s in seeds if f'{game} / {method} / {s}' in runs]
  if len(found) < len(seeds):
    return None
  return statistics.fmean(found), statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0


def verdicts(runs: dict[str, dict], seeds: tuple[int, ...]) -> dict[str, dict]:
  """For each game both means over the complete seeds, their difference, and whether the ordering shows."""
  told = {}
  seeds = tuple(s for s in seeds if all(f'{game} / {m} / {s}' in runs for game in GAMES for m in ('SFT', 'RL')))
  for game in GAMES if seeds else ():
    for how in ('sampled', 'greedy'):
      sft, rl = (final(runs, method, game, how, seeds) for method in ('SFT', 'RL'))
      if sft is None or rl is None:
        continue
      difference, error = sft[0] - rl[0], (sft[1] ** 2 + rl[1] ** 2) ** 0.5
      known = len(seeds) > 1  # one seed has no standard error
      seen = 'shows' if difference > 2 * error else 'reversed' if difference < -2 * error else 'not seen'
      told[f'{game}, {how}'] = {
        'sft': [round(x, 4) for x in sft],
        'rl': [round(x, 4) for x in rl],
        'difference': round(difference, 4),
        'standard_error': round(error, 4),
        'sft_beats_rl': seen if known else 'one seed only',
      }
  return told


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true')
  arguments = parser.parse_args()
  out, seeds = ROOT / 'benchmarks' / 'results' / 'sft_and_rl.json', SEEDS
  if arguments.quick:
    out, seeds = ROOT / 'runs' / 'quick' / 'sft_and_rl.json', (0,)
    out.unlink(missing_ok=True)
  record = json.loads(out.read_text()) if out.exists() else {'runs': {}}
  with tempfile.TemporaryDirectory() as cache:
    for seed in seeds:  # seed by seed, so an interrupted benchmark can compare
      for game in GAMES:
        for method in ('SFT', 'RL'):
          key = f'{game} / {method} / {seed}'
          if key in record['runs']:
            continue
          record['runs'][key] = last = run(method, game, seed, cache, arguments.quick)
          record |= {'command': ' '.join(sys.argv), 'hardware': hardware()}
          record['flags'] = {f'{g} / {m}': flags(m, g) for g in GAMES for m in ('SFT', 'RL')}
          record['verdicts'] = verdicts(record['runs'], seeds)
          out.parent.mkdir(parents=True, exist_ok=True)
          out.write_text(json.dumps(record, indent=1) + '\n')
          print(
            f'{key}: {last["wall_s"]} s, sampled {last["sampled"][-1]:.3f}, greedy {last["greedy"][-1]:.3f}, '
            f'best possible {last["optimal"]:.3f}',
            flush=True,
          )
  for name, v in record['verdicts'].items():
    print(
      f'{name}: SFT {v["sft"][0]:.3f} ± {v["sft"][1]:.3f}, RL {v["rl"][0]:.3f} ± {v["rl"][1]:.3f}, difference '
      f'{v["difference"]:+.3f} ± {v["standard_error"]:.3f}: {v["sft_beats_rl"]}'
    )


if __name__ == '__main__':
  main()
