"""Tokens a second of the warm start, with and without packing, on demonstrations of different lengths.

  python benchmarks/packing.py

The built-in model trains on the same batches in both ways. Tokens are those of the conversations, without padding.
Compilation is not timed: all steps run once before the measurement.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning_curves import hardware  # noqa: E402
from configs import sft_frozenlake  # noqa: E402
from ragen_jax import build  # noqa: E402
from ragen_jax.modes import sft  # noqa: E402
from ragen_jax.sft.data import DemonstrationSettings, collect_demonstrations, join  # noqa: E402
from ragen_jax.sft.demonstrations import DemonstrationStyle  # noqa: E402
from ragen_jax.sft.packing import batches  # noqa: E402

TAGS, LEVELS = ('FrozenLake', 'SimpleSokoban', 'Bandit'), (512, 512, 512)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--steps', type=int, default=20)
  arguments = parser.parse_args()
  config = sft_frozenlake.get_config()
  config.sft.tags, config.sft.levels = TAGS, LEVELS
  policy = build.load_policy(config)
  settings = build.fill(DemonstrationSettings, config.sft, seed=config.seed)
  style = build.fill(DemonstrationStyle, config.sft)
  lessons = sft.lessons(config, policy.tokenizer)
  data = join(collect_demonstrations(lessons, style, settings, frozenset(), None), None, None)
  rng = np.random.default_rng(0)
  size = config.sft.batch_size
  steps = [rng.choice(len(data.length), size=size, replace=False) for _ in range(arguments.steps)]
  tokens = sum(int(data.length[rows].sum()) for rows in steps)
  quantiles = np.quantile(data.length, (0, 0.25, 0.5, 0.75, 1)).astype(int).tolist()
  print(f'{hardware()}\n{len(data.length)} conversations, quartiles of their tokens {quantiles}')
  ways = {'padded': None, 'packed': sft.packing(config, policy)}
  # Each way has its own copy of the weights, because a step donates them.
  trainers = {name: sft.make_trainer(config, build.load_policy(config)) for name in ways}
  cut = {
    name: [
      list(batches(data, rows, batch_size=size, length_step=config.length_step, packing=packing, mesh=None))
      for rows in steps
    ]
    for name, packing in ways.items()
  }
  for _ in range(2):  # the first round compiles
    seconds = {name: [] for name in ways}
    for i in range(len(steps)):  # alternating, so that other load on the machine affects both equally
      for name, trainer in trainers.items():
        start = time.monotonic()
        jax.block_until_ready((trainer.step(cut[name][i]), trainer.state.trained))
        seconds[name].append(time.monotonic() - start)
  for name in ways:
    columns = sum(batch.tokens.size for step in cut[name] for batch in step)
    speed = tokens / len(steps) / float(np.median(seconds[name]))
    print(f'{name}: {speed:.0f} tokens/s (median of {len(steps)} steps), {columns / tokens:.2f} columns a token')


if __name__ == '__main__':
  main()
