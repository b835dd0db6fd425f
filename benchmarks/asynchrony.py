"""What asynchronous training gains with an environment whose steps take 50 ms to 2 s.

  python benchmarks/asynchrony.py --out=asynchrony.json       # a few minutes on two cores
  python benchmarks/asynchrony.py --iterations=2 --groups=2 --group_size=2 --slowest=0.3     # to see that it runs

The same game is trained in four ways, on equal tasks with equal delays: `loop` is the rollout loop of other
environments, in which a turn takes as long as its slowest step; `threads` is that loop with a thread for each row
(agent.env_threads), in which rows go on while others wait; `synchronous` plays the game over the endpoint
(envs.Agent.runner='env:Slow') and waits for the slowest episode of each iteration; `staleness k` goes on playing while
the trainer learns (serve.max_staleness=k). As many episodes play at a time in all: those of an iteration. The
first iterations compile and are not timed. The delay of a step depends on the seed, the task, the episode and the turn.
Learning rates are 0, so that all ways sample from the same policy.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import pathlib
import random
import sys
import tempfile
import time
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning_curves import hardware  # noqa: E402
from configs import default  # noqa: E402
from ragen_jax import build, build_agents  # noqa: E402
from ragen_jax.config.checks import check_config  # noqa: E402
from ragen_jax.runs.compilation_cache import use_compilation_cache  # noqa: E402

_WARM_UP = 2  # iterations


class SlowGame:
  """A lamp that any text switches; a step takes from `fastest` to `slowest` seconds, log-uniformly."""

  rules = 'Switch the lamp.'

  def __init__(self, turns: int, fastest: float, slowest: float, seed: int):
    """Takes the length of an episode in turns, and the bounds of a step in seconds."""
    self._turns, self._bounds, self._seed = turns, (math.log(fastest), math.log(slowest)), seed

  def reset(self, seed: int, member: int) -> str:
    """Begins an episode."""
    self._turn, self._rng = 0, random.Random(f'{self._seed} {seed} {member}')
    return 'off'

  def step(self, action: str) -> tuple[str, float, bool, bool]:
    """Waits, and rewards some actions."""
    time.sleep(math.exp(self._rng.uniform(*self._bounds)))
    self._turn += 1
    over = self._turn == self._turns
    return ('on' if self._turn % 2 else 'off'), float(len(action) % 2), over, over


def make_config(arguments: argparse.Namespace, staleness: int | None, threads: bool = False) -> Any:
  """The config of a way to train; `staleness` is None for the rollout loop, perhaps with threads."""
  config, rows = default.get_config(), arguments.groups * arguments.group_size
  with config.unlocked():
    config.envs.Slow = {
      'type': 'python', 'class_path': f'{ROOT}/benchmarks/asynchrony.py:SlowGame',
      'options': {name: getattr(arguments, name) for name in ('turns', 'fastest', 'slowest', 'seed')},
      'workers': rows if staleness is None else 1, 'step_timeout_s': 60.0, 'max_turns': 2 * arguments.turns,
      'max_actions': arguments.turns, 'max_actions_per_turn': 1, 'max_words': 25,
    }  # fmt: skip
  config.seed = arguments.seed
  config.num_iterations = 10_000  # none of the timed iterations is near the end
  config.train.groups, config.train.group_size = arguments.groups, arguments.group_size
  config.eval.groups = config.eval.group_size = 1
  config.optimizer.mini_batch_size = config.optimizer.micro_batch_size = rows
  config.optimizer.actor_lr = config.optimizer.critic_lr = 0.0
  config.agent.max_context, config.length_step = 768, 256
  config.algorithm.old_logprobs, config.algorithm.tis_cap = 'trainer', 2.0
  config.train.tags = config.eval.tags = ('Slow',)
  if threads:
    config.agent.schedule, config.agent.env_threads = 'continuous', rows
  if staleness is not None:
    config.train.tags = config.eval.tags = ('Agent',)
    config.envs.Agent.runner = 'env:Slow'
    config.serve.port = 0
    config.serve.slots = config.serve.max_concurrency = rows
    config.serve.max_staleness = staleness
  return config


def measure(arguments: argparse.Namespace, *way: Any) -> dict[str, float]:
  """Means over the timed iterations, in seconds where not stated otherwise; `way` as for `make_config`."""
  config = make_config(arguments, *way)
  check_config(config)
  model = build.load_policy(config)
  found: dict[str, list[float]] = {}
  with (
    tempfile.TemporaryDirectory() as directory,
    build_agents.open_players(config, model, directory) as players,
  ):
    trainer = build.make_trainer(config, model, player=players['train'])
    state = trainer.init()
    for i in range(_WARM_UP + arguments.iterations):
      start = time.perf_counter()
      rollout, selection = trainer.collect(state)
      played = time.perf_counter()
      batch, _ = trainer.estimate(state, selection)
      state, metrics = trainer.update(state, batch, selection)
      end = time.perf_counter()
      if i < _WARM_UP:
        continue
      numbers = {
        'iteration_s': end - start,
        'rollout_s': played - start,
        'learning_s': end - played,
        'replies': sum(len(e.turns) for e in rollout.episodes),
        'columns': float(rollout.trajectory.length.max()),
        'policy_lag_updates': metrics['rollout/policy_lag_mean'],
        'stale_groups': trainer.player.metrics.get('serving/groups_stale', 0.0),
      }
      for name, x in numbers.items():
        found.setdefault(name, []).append(float(x))
  means = {name: float(np.mean(x)) for name, x in found.items()}
  return means | {'iteration_s_std': float(np.std(found['iteration_s']))}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--staleness', type=int, nargs='+', default=[1, 2])
  parser.add_argument('--iterations', type=int, default=8)
  parser.add_argument('--groups', type=int, default=8)
  parser.add_argument('--group_size', type=int, default=4)
  parser.add_argument('--turns', type=int, default=4)
  parser.add_argument('--fastest', type=float, default=0.05)
  parser.add_argument('--slowest', type=float, default=2.0)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--out', type=pathlib.Path)
  arguments = parser.parse_args()
  ways = {'loop': (None,), 'threads': (None, True), 'synchronous': (0,)}
  ways |= {f'staleness {k}': (k,) for k in arguments.staleness}
  print(f'{hardware()}; {vars(arguments)}')
  found = {}
  with tempfile.TemporaryDirectory() as cache:
    use_compilation_cache('auto', cache)  # the ways share most programs
    for name, way in ways.items():
      found[name] = {k: round(x, 4) for k, x in measure(arguments, *way).items()}
      print(f'{name:>12}  ' + '  '.join(f'{k} {x:.2f}' for k, x in found[name].items()), flush=True)
  times = {name: numbers['iteration_s'] for name, numbers in found.items()}
  ratios = {name: round(times['synchronous'] / x, 3) for name, x in times.items()}
  print(f'iteration time of synchronous training divided by that of each: {ratios}')
  if arguments.out:
    record = {
      'hardware': hardware(),
      'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
      'arguments': {k: x for k, x in vars(arguments).items() if k != 'out'},
      'found': found,
      'speedup_over_synchronous': ratios,
    }
    arguments.out.write_text(json.dumps(record, indent=2) + '\n')


if __name__ == '__main__':
  main()
