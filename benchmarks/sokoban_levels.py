"""Speed and statistics of two Sokoban level generators: reverse play in JAX, and depth-first reverse play.

  python -m benchmarks.sokoban_levels [--quick] [--output=benchmarks/results/sokoban_levels.json]

The second is the usual generator (gym-sokoban's, and so RAGEN's), reimplemented: a room by a random walk; then a
depth-first search over the moves of a player who pulls, which keeps the position with the highest displacement times
box swaps; then RAGEN's few steps of the player. `numpy` copies the board as an array for each move, as the usual
generator does; `python` is the same search on tuples and sets, about the fastest form without batches of levels. Both
give the same levels.

The levels are similar for RAGEN's tags. In the deep case of 8x8 cells and 2 boxes, levels of this package are easier:
the shortest solution has 9.9 moves on average, that of the usual generator 13.6.

The comparison is also printed as a Markdown table, and written next to the JSON file (`.md`).
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import pathlib
import platform
import time

import jax
import numpy as np

from ragen_jax.envs.base import Budget
from ragen_jax.envs.sokoban import Sokoban, State

BATCH = 1024
# RAGEN's three tags, and a deeper search.
CASES = {
  'SimpleSokoban: 6x6, 1 box': Sokoban(dim=(6, 6), num_boxes=1, search_depth=300),
  'SokobanDifferentGridVocab: 6x6, 1 box': Sokoban(dim=(6, 6), num_boxes=1, search_depth=30),
  'LargerSokoban: 8x8, 2 boxes': Sokoban(dim=(8, 8), num_boxes=2, search_depth=10),
  '8x8, 2 boxes, deep': Sokoban(dim=(8, 8), num_boxes=2, search_depth=300),
}
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
STAMPS = (
  ((0, -1), (0, 0), (0, 1)),
  ((-1, 0), (0, 0), (1, 0)),
  ((0, -1), (0, 0), (1, 0)),
  ((0, 0), (0, 1), (1, 0)),
  ((0, -1), (0, 0), (1, -1), (1, 0)),
)
MAX_EXPLORED = 300_000
WALL, FLOOR, BOX, PLAYER = range(4)


# -- the usual generator -----------------------------------------------------------------------------------------------


def usual_level(rng: np.random.Generator, dim, num_boxes: int, depth: int, search):
  """Walls, targets and boxes, bool[R, C], and the player's (row, column). Tries rooms until one gives a level."""
  while True:
    floor = usual_room(rng, dim)
    cells = np.argwhere(floor)
    if len(cells) <= num_boxes:
      continue
    *homes, player = (tuple(cell) for cell in rng.permutation(cells)[: num_boxes + 1].tolist())
    found = search(floor, homes, player, depth)
    if found is None:
      continue
    boxes, player = found
    player = stroll(rng, floor, homes, boxes, player)
    targets, at_boxes = np.zeros(dim, bool), np.zeros(dim, bool)
    targets[tuple(zip(*homes, strict=True))] = True
    at_boxes[tuple(zip(*boxes, strict=True))] = True
    return ~floor, targets, at_boxes, player


def usual_room(rng: np.random.Generator, dim) -> np.ndarray:
  floor = np.zeros(dim, bool)
  row, col = rng.integers(1, dim[0] - 1), rng.integers(1, dim[1] - 1)
  move = MOVES[rng.integers(4)]
  for _ in range(int(1.7 * sum(dim))):
    if rng.random() < 0.35:
      move = MOVES[rng.integers(4)]
    row = min(max(row + move[0], 1), dim[0] - 2)
    col = min(max(col + move[1], 1), dim[1] - 2)
    for down, right in STAMPS[rng.integers(len(STAMPS))]:
      floor[row + down, col + right] = True
  floor[[0, -1]] = floor[:, [0, -1]] = False
  return floor


def stroll(rng: np.random.Generator, floor, homes, boxes, player):
  if rng.random() >= (0.8 if displacement(homes, boxes) == 1 else 0.5):
    return player
  for i in range(3):
    if i and rng.random() < 0.5:
      break
    ways = [(player[0] + down, player[1] + right) for down, right in MOVES]
    ways = [way for way in ways if floor[way] and way not in boxes]
    if ways:
      player = ways[rng.integers(len(ways))]
  return player


def displacement(homes, boxes) -> int:
  return sum(abs(box[0] - home[0]) + abs(box[1] - home[1]) for home, box in zip(homes, boxes, strict=True))


def numpy_search(floor, homes, player, depth):
  """Depth-first search that copies the board for each move."""
  board = np.where(floor, FLOOR, WALL).astype(np.int8)
  targets = np.zeros(floor.shape, bool)
  targets[tuple(zip(*homes, strict=True))] = True
  board[targets] = BOX
  board[player] = PLAYER
  explored, best = set(), (0, None)

  def explore(board, boxes, last, swaps, left):
    nonlocal best
    key = board.tobytes()
    if left < 0 or len(explored) > MAX_EXPLORED or key in explored:
      return
    explored.add(key)
    at = tuple(int(i[0]) for i in np.where(board == PLAYER))
    if np.all(board[targets] == FLOOR):
      score = swaps * displacement(homes, boxes)
      if score > best[0]:
        best = score, (boxes, at)
    for down, right in MOVES:
      ahead, behind = (at[0] + down, at[1] + right), (at[0] - down, at[1] - right)
      if board[ahead] != FLOOR:
        continue
      after = board.copy()
      after[ahead], after[at] = PLAYER, FLOOR
      if board[behind] == BOX:
        after[at], after[behind] = BOX, FLOOR
        which = boxes.index(behind)
        moved = [*boxes[:which], at, *boxes[which + 1 :]]
        explore(after, moved, which, swaps + (which != last), left - 1)
      else:
        explore(after, boxes, last, swaps, left - 1)

  explore(board, list(homes), -1, 0, depth)
  return best[1]


def python_search(floor, homes, player, depth):
  """`numpy_search` on tuples."""
  explored, best = set(), (0, None)
  open_cells, targets = {tuple(cell) for cell in np.argwhere(floor).tolist()}, set(homes)

  def explore(boxes, at, last, swaps, left):
    nonlocal best
    key = (frozenset(boxes), at)
    if left < 0 or len(explored) > MAX_EXPLORED or key in explored:
      return
    explored.add(key)
    if at not in targets and targets.isdisjoint(boxes):
      score = swaps * displacement(homes, boxes)
      if score > best[0]:
        best = score, (boxes, at)
    for down, right in MOVES:
      ahead, behind = (at[0] + down, at[1] + right), (at[0] - down, at[1] - right)
      if ahead not in open_cells or ahead in boxes:
        continue
      if behind in boxes:
        which = boxes.index(behind)
        explore([*boxes[:which], at, *boxes[which + 1 :]], ahead, which, swaps + (which != last), left - 1)
      else:
        explore(boxes, ahead, last, swaps, left - 1)

  explore(list(homes), player, -1, 0, depth)
  return best[1]


# -- measurement -------------------------------------------------------------------------------------------------------


def make_usual(env: Sokoban, search, count: int) -> tuple[State, float]:
  """`count` levels of the usual generator, and its levels a second."""
  rng = np.random.default_rng(0)
  start = time.perf_counter()
  levels = [usual_level(rng, env.dim, env.num_boxes, env.search_depth, search) for _ in range(count)]
  rate = count / (time.perf_counter() - start)
  walls, targets, boxes, player = (np.array(leaf) for leaf in zip(*levels, strict=True))
  no = np.zeros(count, bool)
  return State(no, no, walls, targets, boxes, player.astype(np.int32), np.zeros(count, np.int32)), rate


def make_ours(env: Sokoban, batches: int) -> tuple[State, float, float]:
  """Batches of 1024 levels from different keys, the levels a second (median), and the seconds of compilation."""
  keys = jax.random.split(jax.random.key(0), (batches + 1, BATCH))
  reset = jax.jit(jax.vmap(env.reset))
  start = time.perf_counter()
  jax.block_until_ready(reset(keys[0]))
  compilation = time.perf_counter() - start
  made, seconds = [], []
  for batch in keys[1:]:
    start = time.perf_counter()
    made.append(jax.block_until_ready(reset(batch)))
    seconds.append(time.perf_counter() - start)
  states = jax.tree.map(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *made)
  return states, BATCH / float(np.median(seconds)), compilation


def describe(env: Sokoban, states: State) -> dict:
  """Statistics of levels: means, and the share of each value from 0 up."""
  start = time.perf_counter()
  solution = env.solve(states, Budget(max_turns=5, max_actions=10, max_actions_per_turn=5))
  seconds = time.perf_counter() - start
  count = len(states.done)
  cells = np.argwhere(states.boxes)[:, 1:].reshape(count, env.num_boxes, 2)
  distance = np.abs(cells - states.player[:, None]).sum(-1).min(-1)
  displaced = (states.boxes & ~states.targets).sum((1, 2))
  apart = box_displacement(states)
  return {
    'levels': count,
    'different': len(set(env.render(states))) / count,
    'solvable': float((solution.length > 0).mean()),
    'solved within 10 actions': float(solution.success.mean()),
    'floor cells': float((~states.walls).sum((1, 2)).mean()),
    'solution length': shares(solution.length),
    'displaced boxes': shares(displaced),
    'boxes to targets': shares(apart),
    'player to nearest box': shares(distance),
    'solver ms a level': 1e3 * seconds / count,
  }


def box_displacement(states: State) -> np.ndarray:
  """i64[N], steps between boxes and targets, summed over the pairing with the smallest sum."""
  count = len(states.done)
  boxes, targets = (np.argwhere(board)[:, 1:].reshape(count, -1, 2) for board in (states.boxes, states.targets))
  pairings = itertools.permutations(range(targets.shape[1]))
  return np.min([np.abs(boxes - targets[:, list(order)]).sum((1, 2)) for order in pairings], axis=0)


def shares(values: np.ndarray) -> dict:
  return {'mean': float(values.mean()), 'shares': (np.bincount(values) / len(values)).round(4).tolist()}


def difference(one: list[float], other: list[float]) -> float:
  """Total variation: the share of levels that would have to change for one distribution to become the other."""
  return 0.5 * sum(abs(a - b) for a, b in itertools.zip_longest(one, other, fillvalue=0.0))


def markdown(results: dict) -> str:
  """The comparison as a Markdown table, one row for each case and property."""
  lines = [
    '# Sokoban levels: reverse play in JAX and the usual generator',
    '',
    'Made by `python -m benchmarks.sokoban_levels`, whose docstring describes the comparison. Apart: the total',
    'variation distance of the two distributions. Solution length: moves of the shortest solution.',
    '',
    '| Case | Property | JAX: mean, quartiles | usual: mean, quartiles | apart |',
    '|---|---|---|---|---|',
  ]
  for title, case in results['cases'].items():
    ours, usual = case['jax'], case['usual']
    name = f'{title} ({ours["levels"]:,} and {usual["levels"]:,} levels) '
    for key in ('solution length', 'displaced boxes', 'boxes to targets', 'player to nearest box'):
      apart = difference(ours[key]['shares'], usual[key]['shares'])
      lines.append(f'| {name}| {key} | {told(ours[key])} | {told(usual[key])} | {apart:.3f} |')
      name = ''
    for key in ('solvable', 'solved within 10 actions'):
      lines.append(f'| | {key} | {ours[key]:.2%} | {usual[key]:.2%} | |')
    lines.append(f'| | floor cells | {ours["floor cells"]:.2f} | {usual["floor cells"]:.2f} | |')
    speed = case['levels a second']
    lines.append(f'| | levels a second | {speed["jax"]:,.0f} | {speed["numpy"]:,.0f} (NumPy) | |')
  machine = results['hardware']
  lines += ['', f'{results["date"]}, {machine["cores"]} cores of {machine["cpu"]}, JAX {machine["jax"]}.', '']
  return '\n'.join(lines)


def told(distribution: dict) -> str:
  """Mean and quartiles: '3.69 (2, 4, 5)'."""
  below = np.cumsum(distribution['shares'])
  quartiles = (int(np.argmax(below >= quantile - 1e-3)) for quantile in (0.25, 0.5, 0.75))
  return f'{distribution["mean"]:.2f} ({", ".join(map(str, quartiles))})'


def rounded(value):
  """Floats to five significant digits, at any depth."""
  if isinstance(value, dict):
    return {key: rounded(part) for key, part in value.items()}
  if isinstance(value, list):
    return [rounded(part) for part in value]
  return float(f'{value:.5g}') if isinstance(value, float) else value


def hardware() -> dict:
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
  models = [line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')]
  return {
    'cpu': models[0] if models else platform.processor(),
    'cores': len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
    'load': os.getloadavg()[0],
    'device': jax.devices()[0].device_kind,
    'python': platform.python_version(),
    'jax': jax.__version__,
    'numpy': np.__version__,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--quick', action='store_true', help='fewer levels; writes nothing unless --output is given')
  parser.add_argument('--output', type=pathlib.Path, help='the JSON file')
  arguments = parser.parse_args()
  output = arguments.output
  if output is None and not arguments.quick:
    output = pathlib.Path(__file__).parent / 'results' / 'sokoban_levels.json'

  results = {'date': datetime.date.today().isoformat(), 'quick': arguments.quick, 'hardware': hardware(), 'cases': {}}
  for title, env in CASES.items():
    # One after the other, so that no generator runs while the other is timed.
    from_numpy, numpy_rate = make_usual(env, numpy_search, 100 if arguments.quick else 500)
    usual, python_rate = make_usual(env, python_search, 500 if arguments.quick else 8 * BATCH)
    ours, rate, compilation = make_ours(env, 2 if arguments.quick else 8)
    same = env.render(from_numpy) == env.render(usual)[: len(from_numpy.done)]
    case = {
      'levels a second': {'jax': rate, 'numpy': numpy_rate, 'python': python_rate},
      'times numpy': rate / numpy_rate,
      'times python': rate / python_rate,
      'seconds to compile': compilation,
      'numpy and python give the same levels': same,
      'jax': describe(env, ours),
      'usual': describe(env, usual),
    }
    results['cases'][title] = case
    print(f'{title}, search depth {env.search_depth}')
    print(f'  levels a second: JAX {rate:,.0f} (batch {BATCH}), NumPy {numpy_rate:,.0f}, Python {python_rate:,.0f}')
    for side in ('jax', 'usual'):
      for key, value in case[side].items():
        shown = f'{value["mean"]:.2f}  {value["shares"]}' if isinstance(value, dict) else f'{value:.4g}'
        print(f'  {side:6}{key:26}{shown}')
  table = markdown(results)
  print(table)
  if output is not None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(rounded(results), indent=2, ensure_ascii=False) + '\n')
    output.with_suffix('.md').write_text(table)


if __name__ == '__main__':
  main()
