"""Times rollouts of this checkout and of another one, in turns.

  git worktree add ../before 'HEAD~1'
  python benchmarks/rollouts.py --against=../before --config=bandit_grpo:qwen2.5-0.5b-instruct --model=DIR \
    --groups=4 --group_size=8 --fields='model.dtype=float32'
  python benchmarks/rollouts.py --against=../before --config=frozenlake_ppo --groups=128 --group_size=4 --repeat=10

Each side has a process of its own, which loads the weights and plays one rollout that is not counted, because it
compiles. Then both play rollouts of the same levels with the same keys, one after the other: A B, B A, and so on. The
result is the median of each side, their ratio, and how many sampled tokens of the two differ. The computer must hold
the weights and caches of both sides.

  python benchmarks/rollouts.py --split --config=frozenlake_ppo --groups=32 --group_size=4

divides the CPU time of a rollout that one thread plays: the programs of the sampler, each waited for, and the work of
the host. `row_steps` and `fed_columns` are also given for a rollout in one program, in which all rows of a turn wait
for its longest reply and are fed the columns of its longest prompt.
"""

from __future__ import annotations

import argparse
import ast
import collections
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
_SIDE = 'ROLLOUTS_SIDE'  # the checkout that a process measures


def _arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--against', type=pathlib.Path, help='folder of the other checkout')
  parser.add_argument('--config', default='frozenlake_ppo', help='name of a shipped config')
  parser.add_argument('--model', default='', help='folder of the weights; default as in the config')
  parser.add_argument('--groups', type=int, default=8)
  parser.add_argument('--group_size', type=int, default=16)
  parser.add_argument('--fields', default='', help='other fields of the config: a=1,b=2')
  parser.add_argument('--repeat', type=int, default=3)
  parser.add_argument('--split', action='store_true', help='divide the CPU time of a rollout of one thread')
  parser.add_argument('--out', type=pathlib.Path, help='file for the result')
  return parser.parse_args()


def _fields(args: argparse.Namespace) -> dict[str, Any]:
  found: dict[str, Any] = {'train.groups': args.groups, 'train.group_size': args.group_size}
  if args.model:
    found['model.path'] = args.model
  for field in filter(None, args.fields.split(',')):
    name, value = field.split('=', 1)
    try:
      found[name] = ast.literal_eval(value)
    except (ValueError, SyntaxError):
      found[name] = value
  return found


class Split:
  """CPU seconds of the parts of rollouts, since `begin`."""

  def __init__(self, player: Any, programs: dict[str, Callable[..., Any]]):
    """Measures the calls of a player that plays in one thread, and of a sampler's programs."""
    self._spent: collections.Counter[str] = collections.Counter()
    for name, program in programs.items():
      programs[name] = self._waiting(name, program)
    for owner, name, part in (
      (player.proxy.context, 'prompt', 'prompts'),
      (player.proxy.context, 'parse', 'replies'),
      (player.proxy.context, 'reply_texts', 'replies'),
      (player.proxy.envs, 'reset', 'environments'),
      (player.proxy.envs, 'step', 'environments'),
      (player.proxy.envs, 'render', 'environments'),
    ):
      setattr(owner, name, self._timed(part, getattr(owner, name)))

  def _waiting(self, name: str, program: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    @functools.wraps(program)
    def call(*args: Any, **kwargs: Any) -> Any:
      jax.block_until_ready((args, kwargs))
      begin, own = time.process_time(), time.thread_time()
      result = program(*args, **kwargs)
      self._spent['dispatch'] += time.thread_time() - own
      jax.block_until_ready(result)
      self._spent[name] += time.process_time() - begin
      self._spent['calls'] += 1
      return result

    return call

  def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
      begin = time.process_time()
      result = function(*args, **kwargs)
      self._spent[part] += time.process_time() - begin
      return result

    return call

  def begin(self) -> None:
    self._spent.clear()

  def parts(self, cpu_seconds: float, rollout: Any, groups: int) -> dict[str, float]:
    """Of a rollout that took so long: seconds by part; 'dispatch' is contained in those of programs."""
    found = dict(self._spent)
    own = sum(seconds for name, seconds in found.items() if name not in ('dispatch', 'calls'))
    t, turns = rollout.trajectory, range(int(rollout.trajectory.turn.max()) + 1)
    replies, prompts = (
      [int(((t.turn == turn) & (t.loss_mask == sampled)).sum(axis=1).max()) for turn in turns]
      for sampled in (True, False)
    )
    rows = len(t.length)
    return found | {
      'rest': cpu_seconds - own,
      'row_steps': rollout.row_steps,
      'row_steps_in_one_program': rows * sum(replies),
      'fed_columns_in_one_program': groups * prompts[0] + rows * sum(prompts[1:]),
    }


def _side(args: argparse.Namespace) -> None:
  """Plays the rollout of each seed that comes in a line, and writes what it took."""
  import jax

  from ragen_jax import api, build
  from ragen_jax.agent.language_model import param_state

  config = api.load_config(args.config, _fields(args))
  policy = build.load_policy(config)
  specs = build.env_specs(config, tuple(config.train.tags), build.group_counts(config.train, 'train'))
  player = build.environment_player(config, policy, specs, config.train.group_size)
  params, fed = param_state(policy.model), []
  split = Split(player, policy.sampler.programs) if args.split else None

  class Listener:
    def runs(self, name: str, shape: tuple[int, ...], weights: Any) -> None:
      if name == 'extend':
        fed.append(shape[1] * shape[3])

    def played(self, rollout: Any, iteration: int) -> None:
      pass

  for line in sys.stdin:
    fed.clear()
    if split is not None:
      split.begin()
    key, begin, cpu = jax.random.key(int(line)), time.perf_counter(), time.process_time()
    with policy.sampler.observer.told_to(Listener()):
      rollout = player.play(params, key, build.sampling(config.train), 10_000 + int(line))
    t = rollout.trajectory
    told = {
      'seconds': time.perf_counter() - begin, 'cpu_seconds': time.process_time() - cpu,
      'tokens': [row[:n].tolist() for row, n in zip(t.tokens, t.length, strict=True)],
      'sampled': int(t.loss_mask.sum()), 'fed_columns': sum(fed), 'extend_calls': len(fed),
      'traces': dict(policy.sampler.traces),
    }  # fmt: skip
    if split is not None:
      told['split'] = split.parts(told['cpu_seconds'], rollout, args.groups)
    print(json.dumps(told), flush=True)


def _start(root: pathlib.Path) -> subprocess.Popen:
  """A process that measures a checkout."""
  environment = os.environ | {_SIDE: '1', 'PYTHONPATH': str(root.resolve())}
  command = [sys.executable, str(pathlib.Path(__file__).resolve()), *sys.argv[1:]]
  return subprocess.Popen(command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _play(side: subprocess.Popen, seed: int) -> dict[str, Any]:
  side.stdin.write(f'{seed}\n')
  side.stdin.flush()
  return json.loads(side.stdout.readline())


def _measure(args: argparse.Namespace) -> dict[str, Any]:
  roots = {'this': ROOT} | ({'against': args.against} if args.against else {})
  sides = {name: _start(root) for name, root in roots.items()}
  try:
    first = {name: _play(side, 0) for name, side in sides.items()}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for i in range(args.repeat):
      for name in list(sides)[:: 1 if i % 2 else -1]:
        found[name].append(_play(sides[name], 0))
        print(f'{name}: {found[name][-1]["seconds"]:.2f} s', flush=True)
  finally:
    for side in sides.values():
      side.stdin.close()
      side.wait()
  result: dict[str, Any] = {
    name: {
      'seconds': [round(x['seconds'], 3) for x in of_side],
      'median': round(statistics.median(x['seconds'] for x in of_side), 3),
      'cpu_median': round(statistics.median(x['cpu_seconds'] for x in of_side), 3),
      'first': round(first[name]['seconds'], 3),
      **{key: of_side[0][key] for key in ('sampled', 'fed_columns', 'extend_calls', 'traces')},
    }
    for name, of_side in found.items()
  }
  if args.split:
    for name, of_side in found.items():
      parts = of_side[0]['split']
      result[name]['split'] = {part: round(statistics.median(x['split'][part] for x in of_side), 4) for part in parts}
  if args.against:
    this, other = (found[name][0]['tokens'] for name in ('this', 'against'))
    result['ratio'] = round(result['against']['median'] / result['this']['median'], 3)
    result['rows_that_differ'] = sum(a != b for a, b in zip(this, other, strict=True))
  return result


def main() -> None:
  args = _arguments()
  if os.environ.get(_SIDE):
    _side(args)
    return
  sys.path.insert(0, str(ROOT))
  from benchmarks.learning_curves import hardware

  asked = {key: str(value) for key, value in vars(args).items() if key not in ('out', 'against', 'model')}
  result = {'rollout': asked, **_measure(args), 'hardware': hardware()}
  print(json.dumps(result, indent=1))
  if args.out:
    args.out.write_text(json.dumps(result, indent=1) + '\n')


if __name__ == '__main__':
  main()
