"""How often a plan wins on FrozenLake without slipping if it does not depend on the board.

  python benchmarks/blind_plans.py

All plans of five moves are played on 4,000 random boards of 3x3. The numbers are equal on every machine.
"""

from __future__ import annotations

import itertools
import pathlib
import sys

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ragen_jax import make_env  # noqa: E402

SIZE, MOVES, BOARDS, SEED = 3, 5, 4000, 0


def main() -> None:
  env = make_env('frozen_lake', size=SIZE, is_slippery=False)
  start = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(SEED), BOARDS))
  step = jax.jit(jax.vmap(env.step, in_axes=(0, None, 0)))
  keys = jax.random.split(jax.random.key(SEED), BOARDS)  # nothing is random without slipping
  states, success = {(): start}, {}
  for plan in itertools.product(range(len(env.action_names)), repeat=MOVES):
    for i in range(1, MOVES + 1):
      if plan[:i] not in states:
        states[plan[:i]] = step(states[plan[: i - 1]], plan[i - 1], keys)[0]
    success[plan] = float(np.mean(states[plan].success))
  best = max(success, key=success.get)
  right = (env.action_names.index('Right'),) * MOVES
  print(f'best plan: {" ".join(env.action_names[a] for a in best)}: {success[best]:.3f}')
  print(f'mean over all plans: {np.mean(list(success.values())):.3f}')
  print(f'{MOVES} times Right: {success[right]:.3f}')


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')
  main()
