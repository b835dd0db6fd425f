"""How many held-out boards other seeds give too, of training (which draws them again) and of demonstrations.

python benchmarks/shared_boards.py
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from configs import sft_tiny
from ragen_jax import build
from ragen_jax.agent.env_manager import EnvStateManager

TRAINING_LEVELS = 5120  # 40 iterations of 128 groups


def main() -> None:
  config = sft_tiny.get_config()

  def boards(tag: str, count: int, first_seed: int) -> set[bytes]:
    return EnvStateManager(build.env_groups(config, (tag,), (count,)), 1).levels_from(first_seed)

  for tag, shown in zip(config.sft.tags, config.sft.levels, strict=True):
    held_out = boards(tag, 256, config.eval.first_level)
    for what, count, first in (
      ('training', TRAINING_LEVELS, config.train.first_level),
      ('demonstrations', shown, config.sft.first_level),
    ):
      known = boards(tag, count, first)
      print(f'{tag}: {len(held_out & known)} of {len(held_out)} held-out boards among {count} levels of {what}')


if __name__ == '__main__':
  main()
