"""Counts held-out boards of the configs of built-in models that occur in their demonstrations, or in training.

python benchmarks/shared_boards.py
python benchmarks/shared_boards.py --levels 2000 1024

The second form counts the boards of so many levels from this one on, such as those of an evaluation with
`eval.first_level=2000` and `eval.groups=1024`, that occur in the demonstrations.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from configs import sft_tiny, sft_tiny_hybrid, sft_tiny_vl  # noqa: E402
from ragen_jax import build  # noqa: E402
from ragen_jax.agent.env_manager import EnvStateManager  # noqa: E402
from ragen_jax.config.command_line import load_config  # noqa: E402
from ragen_jax.models import presets  # noqa: E402

TRAINING_LEVELS = 25_600  # 200 iterations of 128 groups, as in sokoban_ppo
MODELS = {'tiny': sft_tiny, 'tiny-hybrid': sft_tiny_hybrid, 'tiny-vl': sft_tiny_vl}


def held_out_boards(model: str) -> set[bytes]:
  """The boards of the evaluations of all shipped configs of built-in models that evaluate on a demonstrated game.

  The config that makes another built-in model than `model` is left out: it evaluates that model only.
  """
  config = sft_tiny.get_config()
  games = {config.envs[tag].type for tag in config.sft.tags}
  names = sorted(path.stem for path in (ROOT / 'configs').glob('*.py') if path.stem not in ('__init__', 'environments'))
  others = {module.__name__.rpartition('.')[2] for other, module in MODELS.items() if other != model}
  names = [name for name in names if name not in others]
  configs = [c for name in names if (c := load_config(name, flag='')).model.preset in presets.BUILT_IN]
  return set().union(*(build.held_out_levels(c) for c in configs if games & {c.envs[tag].type for tag in c.eval.tags}))


def demonstrated_boards(model: str, tag: str, count: int) -> set[bytes]:
  """The boards of a built-in model's demonstrations of an environment; held-out boards are replaced."""
  config = MODELS[model].get_config()
  others = (load_config(name, flag='') for name in config.sft.skip_held_out_of)
  skipped = build.held_out_levels(config).union(*map(build.held_out_levels, others))
  envs = EnvStateManager(build.env_specs(config, (tag,), (count,)), 1, held_out=frozenset(skipped))
  envs.reset(config.sft.first_level)
  return envs.levels()


def count_demonstrated(first: int, count: int) -> None:
  """Prints how many boards of `count` levels from `first` on were demonstrated to each model, by game."""
  for model, module in MODELS.items():
    config = module.get_config()
    for tag, levels in zip(config.sft.tags, config.sft.levels, strict=True):
      envs = EnvStateManager(build.env_specs(config, (tag,), (count,)), 1)
      envs.reset(first)
      boards = envs.levels()
      shared = len(boards & demonstrated_boards(model, tag, levels))
      print(f'{model}, {tag}: {shared} of the {len(boards)} boards of these {count} levels were demonstrated')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--levels', type=int, nargs=2, metavar=('FIRST', 'COUNT'))
  levels = parser.parse_args().levels
  if levels:
    count_demonstrated(*levels)
    return
  config = sft_tiny.get_config()
  for model, module in MODELS.items():
    sft, held_out = module.get_config().sft, held_out_boards(model)
    for tag, count in zip(sft.tags, sft.levels, strict=True):
      shown = demonstrated_boards(model, tag, count)
      told = f'{len(held_out & shown)} of {len(shown)} boards in {count} demonstrations are held-out ones'
      print(f'{model}, {tag}: {told}')
  for tag in config.sft.tags:
    envs = EnvStateManager(
      build.env_specs(config, (tag,), (TRAINING_LEVELS,)), 1, held_out=frozenset(build.held_out_levels(config))
    )
    envs.reset(config.train.first_level)
    shared = len(build.held_out_levels(config) & envs.levels())
    print(f'{tag}: {shared} held-out boards among {TRAINING_LEVELS} levels of training')


if __name__ == '__main__':
  main()
