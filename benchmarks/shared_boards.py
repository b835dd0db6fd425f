"""Counts held-out boards of the configs of built-in models that occur in their demonstrations, or in training.

python benchmarks/shared_boards.py
"""

from __future__ import annotations

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from configs import sft_tiny, sft_tiny_hybrid, sft_tiny_vl  # noqa: E402
from ragen_jax import build  # noqa: E402
from ragen_jax.agent.env_manager import EnvStateManager  # noqa: E402
from ragen_jax.config.command_line import load_config  # noqa: E402
from ragen_jax.models import presets  # noqa: E402

TRAINING_LEVELS = 5120  # 40 iterations of 128 groups
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


def main() -> None:
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
