"""What an update costs if episodes share their beginnings, beside an update that computes every row by itself.

  python benchmarks/shared_update.py --model=qwen2.5-0.5b-instruct=DIR --case=bandit
  python benchmarks/shared_update.py --model=smollm2-135m=DIR --case=frozenlake --case=long_prompt
  python benchmarks/shared_update.py --model=smollm2-135m=DIR --case=frozenlake --remat=attention,elementwise
  python benchmarks/shared_update.py --quick      the built-in model, small cases
  python benchmarks/shared_update.py --model=qwen2.5-0.5b-instruct=DIR --no-lora --topology=v5e:2x4

DIR is the folder of a Hugging Face checkpoint; 'NAME=DIR' uses the settings of the preset NAME. The cases, of random
tokens with the lengths that the games have:

  bandit        4 groups of 8 episodes: 204 tokens of prompt, 40 of them its group's; a reply of up to 60
  frozenlake    8 groups of 16 episodes of up to 5 turns: 280 tokens of first prompt, 60 of them its group's; then
                replies of up to 40 and observations of 60, and half of the group plays the same first turn
  long_prompt   1 group of 16 episodes: 1,000 tokens of prompt, a reply of 200

An update is one optimiser step of GRPO on all rows, with the packing of the config. Each side has a process of its
own, for its peak memory. Each takes a step that is not counted, because it compiles; then both take steps in turns, A B
A B. The ratio is that of the CPU time of all threads, which other programs of the machine hardly change. The first
steps of the two have the same weights, so their losses are compared. With --control, the first side does not share
either, and has narrower bins: the differences are then those of rounding. With --remat=NAME,NAME both sides share, and
differ in `model.remat`; the ratio is the second one's time to the first one's.

With --topology, nothing is run: the compiler of these chips estimates the device time of the gradients of both sides,
in bfloat16, with sizes chosen for the memory of the chips. It needs requirements-aot.txt, and no weights in DIR.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time
from typing import Any
from unittest import mock

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from ml_collections import ConfigDict  # noqa: E402

import ragen_jax  # noqa: E402
from benchmarks.learning_curves import hardware  # noqa: E402
from ragen_jax import build  # noqa: E402
from ragen_jax.agent.episode import Status  # noqa: E402
from ragen_jax.agent.rollout import Rollout  # noqa: E402
from ragen_jax.agent.trajectory import Trajectory  # noqa: E402
from ragen_jax.config.checks import check_config  # noqa: E402
from ragen_jax.planning import abstract, memory, programs, topologies  # noqa: E402
from ragen_jax.planning import estimate as compiler  # noqa: E402
from ragen_jax.planning.lowering import lower_gradient  # noqa: E402
from ragen_jax.training import packing  # noqa: E402
from ragen_jax.training.selection import Selection  # noqa: E402

SIDES = ('shared', 'by itself')
CONTROL = ('narrow bins', 'by itself')
_SIDE = 'SHARED_UPDATE_SIDE'


@dataclasses.dataclass(frozen=True)
class Case:
  """Lengths in tokens: of all prompts, of a group's own part of it, of replies, and of later observations."""

  groups: int
  group_size: int
  rules: int
  level: int
  reply: tuple[int, int]
  turns: int = 1
  observation: int = 0

  def rows(self, rng: np.random.Generator, vocabulary: int) -> list[list[tuple[bool, np.ndarray]]]:
    """For each episode its stretches of tokens: whether they are sampled, and their ids."""

    def draw(n: int) -> np.ndarray:
      return rng.integers(100, vocabulary, n).astype(np.int32)

    def turn() -> list[tuple[bool, np.ndarray]]:
      return [(True, draw(rng.integers(self.reply[0], self.reply[1] + 1))), (False, draw(self.observation))]

    rules, episodes = draw(self.rules), []
    for _ in range(self.groups):
      level, same = draw(self.level), turn()
      for member in range(self.group_size):
        turns = [turn() for _ in range(int(rng.integers(1, self.turns + 1)))]
        if self.turns > 1 and member < self.group_size // 2:
          turns[0] = same
        stretches = [(False, np.concatenate([rules, level]))] + [part for own in turns for part in own]
        episodes.append(stretches[:-1])  # nothing follows the last reply
    return episodes


CASES = {
  'bandit': Case(4, 8, 164, 40, (10, 60)),
  'frozenlake': Case(8, 16, 220, 60, (10, 40), turns=5, observation=60),
  'long_prompt': Case(1, 16, 0, 1000, (200, 200)),
}
QUICK = Case(2, 4, 40, 10, (5, 10), turns=2, observation=10)


def shape_of(case: str, args: argparse.Namespace) -> Case:
  shape = QUICK if args.quick else CASES[case]
  return dataclasses.replace(shape, groups=args.groups or shape.groups)


def rollout_of(case: Case, vocabulary: int, pad: int, seed: int) -> Rollout:
  """The episodes of a case with random rewards."""
  rng = np.random.default_rng(seed)
  episodes = case.rows(rng, vocabulary)
  length = np.asarray([sum(len(ids) for _, ids in own) for own in episodes], np.int32)
  rows, shape = len(episodes), (len(episodes), int(length.max()))
  tokens, mask, turn = np.full(shape, pad, np.int32), np.zeros(shape, bool), np.full(shape, -1, np.int32)
  for row, own in enumerate(episodes):
    at = 0
    for i, (sampled, ids) in enumerate(own):
      tokens[row, at : at + len(ids)], mask[row, at : at + len(ids)] = ids, sampled
      turn[row, at : at + len(ids)] = (i + 1) // 2 if not sampled else i // 2
      at += len(ids)
  scores = rng.normal(size=rows).astype(np.float32)
  rewards = np.zeros(shape, np.float32)
  rewards[np.arange(rows), length - 1] = scores
  zeros, number = np.zeros(shape, np.float32), np.arange(rows, dtype=np.int32)
  trajectory = Trajectory(
    tokens=tokens, loss_mask=mask, logprobs=np.where(mask, -np.log(vocabulary), 0).astype(np.float32), values=zeros,
    entropies=zeros, rewards=rewards, reply_rewards=zeros, turn=turn, length=length, group=number // case.group_size,
    episode=number, env=np.zeros(rows, np.int32), status=np.full(rows, Status.FAILURE, np.int32),
    versions=np.zeros(shape, np.int32),
  )  # fmt: skip
  anchors = np.full((rows, case.turns), -1, np.int32)
  return Rollout(trajectory, [], anchors, scores, int(mask.sum()), pad)


def config_of(model: str, shape: Case, args: argparse.Namespace, more: dict[str, Any]) -> ConfigDict:
  """The run whose update is measured."""
  preset, _, path = model.partition('=')
  lora = args.lora and bool(path)
  fields = {
    'train.groups': shape.groups, 'train.group_size': shape.group_size,
    'optimizer.mini_batch_size': shape.groups * shape.group_size, 'optimizer.packing': True,
    'algorithm.old_logprobs': 'trainer', 'seed': args.seed, **more,
  }  # fmt: skip
  if path:
    fields['model.path'] = path
  return ragen_jax.load_config(f'bandit_grpo:{preset}{"-lora" if lora else ""}', fields)


def serve_steps(model: str, case: str, side: str, args: argparse.Namespace) -> None:
  """One side: takes a step for each line of the input, and answers with its seconds, loss and peak memory."""
  shape = shape_of(case, args)
  remat = {'model.remat': side} if args.remat else {}
  config = config_of(model, shape, args, {'model.dtype': 'float32', 'model.param_dtype': 'float32', **remat})
  policy = build.load_policy(config)
  trainer = build.make_trainer(config, policy)
  state = trainer.init()
  rollout = rollout_of(shape, policy.tokenizer.size, policy.tokenizer.pad_id, args.seed)
  rows = len(rollout.trajectory.length)
  chosen = Selection(rollout, np.ones(rows, bool), np.ones(rows, np.float32), shape.groups, rows, {})
  print(json.dumps({'tokens': int(rollout.trajectory.length.sum())}), flush=True)
  # Rows that may not share are packed as they were before beginnings were shared.
  share = packing.tokens_to_share if side == SIDES[0] or args.remat else (lambda trajectory: None)
  pack = functools.partial(_pack_narrow, packing.pack_batches) if side == CONTROL[0] else packing.pack_batches
  with mock.patch.object(packing, 'tokens_to_share', share), mock.patch.object(packing, 'pack_batches', pack):
    for _ in sys.stdin:
      batch, _ = trainer.estimate(state, chosen)
      start, start_cpu = time.perf_counter(), time.process_time()
      state, metrics = trainer.update(state, batch, chosen)
      jax.block_until_ready(state.trained)
      answer = {
        'seconds': time.perf_counter() - start, 'cpu_seconds': time.process_time() - start_cpu,
        'loss': float(metrics['actor/pg_loss']),
        'grad_norm': float(metrics['actor/grad_norm']), 'shared_tokens': float(metrics.get('perf/shared_tokens', 0)),
        'peak_gib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
      }  # fmt: skip
      print(json.dumps(answer), flush=True)


def _pack_narrow(pack: Any, groups: Any, length: Any, scored: Any, settings: Any, tokens: Any = None) -> Any:
  """Packs into single bins that are no wider than the longest row."""
  return pack(groups, length, scored, dataclasses.replace(settings, columns=1, width=settings.step), tokens)


def estimate(model: str, case: str, args: argparse.Namespace) -> dict[str, Any]:
  """Device time of the gradients of an optimiser step of both sides, by the compiler of `args.topology`."""
  topology, shape = topologies.parse(args.topology, '--topology'), shape_of(case, args)
  config = config_of(model, shape, args, {'plan.topology': topology.name})
  check_config(config, weights=False)
  run = programs.make_run(config, topologies.devices(topology))
  trajectory = rollout_of(shape, run.cfg.vocab_size, 0, args.seed).trajectory
  every, scored = [np.arange(len(trajectory.length))], trajectory.loss_mask.sum(axis=1)
  found: dict[str, Any] = {}
  for side, tokens in zip(SIDES, (trajectory.tokens, None), strict=True):
    (calls,) = packing.plan_batches(every, trajectory.length, scored, run.batching, tokens)
    batch = abstract.abstract_batch(config, run.trainer, abstract.shape_of(calls[0]))
    lower = functools.partial(lower_gradient, run.trainer.learner, run.state, batch)
    program = programs.Program('gradient', 'gradient', 'update', '', lower, len(calls), 0)
    result = compiler.measure(program, topology)
    if result.cost is None:
      raise SystemExit(f'error: --topology={topology.name}: the compiler refuses a program: {result.failure}')
    seconds = len(calls) * (result.cost.work.seconds + result.cost.work.link_seconds(topology.chip))
    found[side] = {
      'calls': len(calls), 'shape': abstract.shape_of(calls[0]), 'seconds': round(seconds, 4),
      'temporary_gib': round(result.cost.hbm / 2**30, 2),
    }  # fmt: skip
  return {
    'model': model.partition('=')[0], 'case': case, 'groups': shape.groups,
    'lora': args.lora and '=' in model, 'topology': topology.name,
    'tokens': int(trajectory.length.sum()), **found,
    'ratio': round(found[SIDES[1]]['seconds'] / found[SIDES[0]]['seconds'], 2), 'date': time.strftime('%Y-%m-%d'),
    'jax': jax.__version__, 'seed': args.seed,
  }  # fmt: skip


def measure(model: str, case: str, args: argparse.Namespace) -> dict[str, Any]:
  """Both sides of a case, in turns."""
  names = args.remat or (CONTROL if args.control else SIDES)
  sides, tokens, found = {}, {}, {side: [] for side in names}
  try:
    for side in names:
      command = [sys.executable, *sys.argv, f'--model={model}', f'--case={case}']
      environment = os.environ | {_SIDE: side}
      sides[side] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
      tokens[side] = json.loads(sides[side].stdout.readline() or '{}').get('tokens')
    for _ in range(args.repeat + 1):
      for side, process in sides.items():
        process.stdin.write('\n')
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
          raise SystemExit(f'error: the process of {side!r} ended with status {process.wait()}')
        found[side].append(json.loads(line))
  finally:
    for process in sides.values():
      process.kill()
      process.wait()

  def times(of: str) -> dict[str, list[float]]:
    return {side: [round(x[of], 2) for x in own[1:]] for side, own in found.items()}

  medians = {side: statistics.median(own) for side, own in times('cpu_seconds').items() if own}
  first = {side: own[0] for side, own in found.items()}
  return {
    'model': model.partition('=')[0], 'case': case, 'groups': shape_of(case, args).groups,
    'lora': args.lora and '=' in model, 'tokens': tokens[names[0]],
    'shared_tokens': round(first[names[0]]['shared_tokens'], 4), 'seconds': times('seconds'),
    'cpu_seconds': times('cpu_seconds'), 'ratio': round(medians[names[1]] / medians[names[0]], 2) if medians else None,
    'peak_gib': {side: round(own[-1]['peak_gib'], 2) for side, own in found.items()},
    'loss': {side: own['loss'] for side, own in first.items()},
    'grad_norm': {side: own['grad_norm'] for side, own in first.items()},
    'hardware': hardware(), 'date': time.strftime('%Y-%m-%d'), 'seed': args.seed,
  }  # fmt: skip


def _two_remats(text: str) -> tuple[str, ...]:
  names = tuple(text.split(','))
  if len(set(names)) != 2 or len(names) != 2 or not set(names) <= {'elementwise', 'attention', 'auto'}:
    raise argparse.ArgumentTypeError(f"{text!r}; allowed: two different ones of 'elementwise', 'attention' and 'auto'")
  return names


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--model', action='append', help="NAME=DIR; 'tiny' for the built-in model")
  parser.add_argument('--case', action='append', choices=CASES, help='default: all')
  parser.add_argument('--groups', type=int, help='take this many groups of each case, for a slow machine')
  parser.add_argument('--repeat', type=int, default=2)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--control', action='store_true', help='two packings without sharing')
  parser.add_argument('--remat', type=_two_remats, help="two of 'elementwise', 'attention' and 'auto'")
  parser.add_argument('--no-lora', dest='lora', action='store_false', help='train all weights')
  parser.add_argument('--topology', default='', help='estimate the time of these chips, such as v5e:2x4 or h100:1')
  parser.add_argument('--quick', action='store_true', help='the built-in model, a few episodes')
  parser.add_argument('--output', type=pathlib.Path, default=ROOT / 'benchmarks' / 'results' / 'shared_update.json')
  args = parser.parse_args()
  if args.quick:
    args.model, args.case, args.repeat = args.model or ['tiny'], args.case or ['frozenlake'], 1
    args.output = ROOT / 'runs/quick/shared_update.json'
  if args.remat and (args.control or args.topology):
    parser.error('--remat is not for --control and --topology')
  if side := os.environ.get(_SIDE):
    serve_steps(args.model[-1], args.case[-1], side, args)
    return
  if not args.model:
    parser.error('--model=NAME=DIR is needed, or --quick')
  if args.topology:
    topologies.prepare(topologies.parse(args.topology, '--topology'))
    memory.use_cpu_devices(1)
  for model in args.model:
    for case in args.case or CASES:
      row = (estimate if args.topology else measure)(model, case, args)
      rows = json.loads(args.output.read_text()) if args.output.exists() else []
      args.output.parent.mkdir(parents=True, exist_ok=True)
      args.output.write_text(json.dumps([*rows, row], indent=1) + '\n')
      print(json.dumps(row, indent=1))


if __name__ == '__main__':
  main()
