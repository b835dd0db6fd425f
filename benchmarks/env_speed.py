"""Environment steps a second, compared with gymnax and jumanji (JAX), Gymnasium and gym-sokoban (Python).

  python benchmarks/env_speed.py [--quick] [--output=benchmarks/results/env_speed.json]

Needs `pip install -r benchmarks/requirements.txt`, best in a virtual environment of its own. In JAX, a batch of 2048
plays random actions that are drawn inside one compiled program, a scan over steps. An episode that ends restarts at its
row's first state, so no package makes levels (benchmarks/sokoban_levels.py measures that). A step is a transition with
its reward and end. The JAX packages compute no observations, because nothing reads them. Compilation is not timed. The
packages of a comparison take turns in one process; the ratio is the median over these turns. Levels and rules are the
same:

- FrozenLake 4x4, slippery, Gymnasium's map, which is the only one of this size that gymnax has;
- Sokoban 10x10 with 4 boxes, the three levels that come with jumanji, 120 steps an episode. Both packages play the same
  actions and must earn the same rewards.

The Python packages step 2048 environments one after another, as RAGEN does. gym-sokoban draws a picture at each step:
the small one here, the large one in RAGEN. No other JAX package has the 6x6 Sokoban of the main config.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ragen_jax.envs.frozen_lake import FrozenLake  # noqa: E402
from ragen_jax.envs.sokoban import Sokoban, State  # noqa: E402

BATCH = 2048
SEED = 0
MAP = ('SFFF', 'FHFH', 'FFFH', 'HFFG')
MAX_STEPS = 120
# This package's numbers of Up, Right, Down, Left, which is jumanji's order.
CLOCKWISE = (0, 3, 1, 2)

# (states [B, ...], actions [B], keys [B]) -> states, reward f32[B], done bool[B]; rows that ended are restarted.
Step = Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array, jax.Array]]


def tiled(state: Any) -> Any:
  """Repeats a few rows cyclically to 2048 rows."""
  return jax.tree.map(lambda x: jnp.asarray(x)[jnp.arange(BATCH) % x.shape[0]], state)


def begin_again(start: Any, after: Any, done: jax.Array) -> Any:
  """`after`, with the rows that are done replaced by their first states."""
  return jax.tree.map(lambda a, b: jnp.where(done.reshape(-1, *[1] * (b.ndim - 1)), a, b), start, after)


class Program:
  """A compiled scan over random steps of one environment."""

  def __init__(self, step: Step, start: Any, steps: int):
    self.start, self.steps = start, steps

    def one(carry, key):
      states, reward, ends = carry
      key_actions, key_steps = jax.random.split(key)
      actions = jax.random.randint(key_actions, (BATCH,), 0, 4)
      states, rewards, done = step(states, actions, jax.random.split(key_steps, BATCH))
      return (states, reward + rewards, ends + done), None

    @jax.jit
    def run(states, key):
      nothing = jnp.zeros((BATCH,), jnp.float32), jnp.zeros((BATCH,), jnp.int32)
      return jax.lax.scan(one, (states, *nothing), jax.random.split(key, steps))[0]

    began = time.perf_counter()
    self._run = run.lower(start, jax.random.key(SEED)).compile()
    self.compilation = time.perf_counter() - began
    self.played(0)  # the first call does more than run the program

  def played(self, repeat: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Runs the scan: seconds, and each row's reward f32[B] and number of ends i32[B]."""
    key = jax.random.fold_in(jax.random.key(SEED), repeat)
    began = time.perf_counter()
    _, reward, ends = jax.block_until_ready(self._run(self.start, key))
    return time.perf_counter() - began, np.asarray(reward), np.asarray(ends)


# -- packages in JAX ---------------------------------------------------------------------------------------------------


def ours(env: FrozenLake | Sokoban, start: Any, order: tuple[int, ...] = (0, 1, 2, 3)) -> Step:
  """This package; `order[i]` is the action with the number i in the other package."""
  step = jax.vmap(env.step)

  def stepped(states, actions, keys):
    after, out = step(states, jnp.asarray(order)[actions], keys)
    return begin_again(start, after, after.done), out.reward, after.done

  return stepped


def gymnax_lake() -> tuple[Step, Any]:
  """gymnax's FrozenLake, which restarts its episodes itself, and its first states."""
  import gymnax

  env, parameters = gymnax.make('FrozenLake-misc')
  _, start = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(jax.random.key(SEED), BATCH), parameters)
  step = jax.vmap(env.step, in_axes=(0, 0, 0, None))

  def stepped(states, actions, keys):
    _, after, reward, terminated, truncated, _ = step(keys, states, actions, parameters)
    return after, reward, terminated | truncated

  return stepped, start


def jumanji_sokoban() -> tuple[Step, Any]:
  """jumanji's Sokoban on the levels that come with it, and its first states."""
  from jumanji.environments import Sokoban as JumanjiSokoban
  from jumanji.environments.routing.sokoban.generator import SimpleSolveGenerator, ToyGenerator

  keys = jax.random.split(jax.random.key(SEED), BATCH)
  env, simple = (JumanjiSokoban(generator=g(), time_limit=MAX_STEPS) for g in (ToyGenerator, SimpleSolveGenerator))
  (start, _), (easy, _) = jax.jit(jax.vmap(env.reset))(keys), jax.jit(jax.vmap(simple.reset))(keys)
  # Random play never solves the two toy levels, but sometimes the easy one.
  start = begin_again(easy, start, jnp.arange(BATCH) % 4 == 0)
  step = jax.vmap(env.step)

  def stepped(states, actions, keys):
    del keys  # the game is deterministic
    after, timestep = step(states, actions)
    return begin_again(start, after, timestep.last()), timestep.reward, timestep.last()

  return stepped, start


def same_levels(start: Any) -> State:
  """jumanji's first states as states of this package."""
  from jumanji.environments.routing.sokoban import constants

  no = jnp.zeros((BATCH,), bool)
  return State(
    done=no,
    success=no,
    walls=start.fixed_grid == constants.WALL,
    targets=start.fixed_grid == constants.TARGET,
    boxes=start.variable_grid == constants.BOX,
    player=start.agent_location.astype(jnp.int32),
    steps=jnp.zeros((BATCH,), jnp.int32),
  )


# -- packages in Python ------------------------------------------------------------------------------------------------


def gymnasium_lake(steps: int) -> float:
  """Steps a second of Gymnasium's FrozenLake, one environment after another."""
  from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

  envs = [FrozenLakeEnv(desc=list(MAP), is_slippery=True) for _ in range(BATCH)]
  for number, env in enumerate(envs):
    env.reset(seed=SEED + number)
  actions = np.random.default_rng(SEED).integers(4, size=(steps, BATCH)).tolist()
  began = time.perf_counter()
  for turn in actions:
    for env, action in zip(envs, turn, strict=True):
      if env.step(action)[2]:
        env.reset()
  return BATCH * steps / (time.perf_counter() - began)


def gym_sokoban(levels: State, steps: int) -> float:
  """Steps a second of gym-sokoban on these levels [2048, ...], one environment after another."""
  from gym_sokoban.envs.sokoban_env import SokobanEnv

  levels = jax.tree.map(np.asarray, levels)
  fixed = np.where(levels.walls, 0, np.where(levels.targets, 2, 1))
  board = np.where(levels.boxes, np.where(levels.targets, 3, 4), fixed)
  board[(np.arange(BATCH), *levels.player.T)] = 5
  size, boxes = levels.walls.shape[1:], int(levels.boxes[0].sum())
  envs = [SokobanEnv(dim_room=size, num_boxes=boxes, max_steps=MAX_STEPS, reset=False) for _ in range(BATCH)]

  def begin(row):
    # Its own reset would make a new level, which takes longer than playing it.
    env = envs[row]
    env.room_fixed, env.room_state, env.player_position = fixed[row], board[row].copy(), levels.player[row].copy()
    env.num_env_steps = env.boxes_on_target = env.reward_last = 0

  for row in range(BATCH):
    begin(row)
  actions = np.random.default_rng(SEED).integers(1, 5, size=(steps, BATCH)).tolist()
  began = time.perf_counter()
  for turn in actions:
    for row, action in enumerate(turn):
      if envs[row].step(action, observation_mode='tiny_rgb_array')[2]:
        begin(row)
  return BATCH * steps / (time.perf_counter() - began)


# -- measurement -------------------------------------------------------------------------------------------------------


def compare(sides: dict[str, Program], repeats: int) -> dict[str, dict[str, float]]:
  """Steps a second of each side, and the ratio of the first side's speed to it; the sides take turns."""
  seconds: dict[str, list[float]] = {name: [] for name in sides}
  totals = {name: np.zeros(2) for name in sides}
  for repeat in range(repeats):
    # Each side goes first equally often.
    names = list(sides)
    for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
      taken, reward, ends = sides[name].played(repeat)
      seconds[name].append(taken)
      totals[name] += reward.sum(dtype=np.float64), ends.sum()
  first = np.array(seconds[next(iter(sides))])
  results = {}
  for name, side in sides.items():
    count = BATCH * side.steps
    ratio = np.array(seconds[name]) / first
    results[name] = {
      'steps a second': count / float(np.median(seconds[name])),
      'spread': [count / float(x) for x in np.percentile(seconds[name], [90, 10])],
      'reward a step': totals[name][0] / (count * repeats),
      'ends a step': totals[name][1] / (count * repeats),
      'seconds to compile': side.compilation,
    }
    if len(sides) > 1 and name != next(iter(sides)):
      results[name]['ours times this'] = float(np.median(ratio))
      results[name]['ours times this, quartiles'] = np.percentile(ratio, [25, 75]).tolist()
  return results


def check_same_rewards(one: Program, other: Program) -> None:
  """Exits with an error if two sides that play the same actions earn different rewards in a row."""
  for repeat in range(8):  # enough for random play to win
    (_, reward, ends), (_, other_reward, other_ends) = one.played(repeat), other.played(repeat)
    # Sums of tenths in float32, added in different orders; different rewards differ by at least a tenth.
    np.testing.assert_allclose(reward, other_reward, rtol=0, atol=1e-2)
    np.testing.assert_array_equal(ends, other_ends)


def measure(quick: bool) -> dict[str, dict]:
  """All comparisons, by name."""
  steps, repeats = (20, 3) if quick else (500, 31)
  python_steps = 1 if quick else 10
  results = {}

  lake = FrozenLake(size=4)
  lake_start = tiled(jax.tree.map(lambda x: np.asarray(x)[None], lake.from_desc(list(MAP))))
  peer_step, peer_start = gymnax_lake()
  sides = {
    'ragen-jax': Program(ours(lake, lake_start), lake_start, steps),
    'gymnax': Program(peer_step, peer_start, steps),
  }
  results['FrozenLake 4x4, slippery'] = compare(sides, repeats)
  results['FrozenLake 4x4, slippery']['gymnasium'] = {'steps a second': gymnasium_lake(python_steps)}

  large = Sokoban(dim=(10, 10), num_boxes=4, max_steps=MAX_STEPS)
  peer_step, peer_start = jumanji_sokoban()
  large_start = same_levels(peer_start)
  sides = {
    'ragen-jax': Program(ours(large, large_start, CLOCKWISE), large_start, steps),
    'jumanji': Program(peer_step, peer_start, steps),
  }
  check_same_rewards(*sides.values())
  results['Sokoban 10x10, 4 boxes'] = compare(sides, repeats)
  results['Sokoban 10x10, 4 boxes']['gym-sokoban'] = {'steps a second': gym_sokoban(large_start, python_steps)}

  small = Sokoban(dim=(6, 6), num_boxes=1, max_steps=MAX_STEPS)
  small_start = jax.jit(jax.vmap(small.reset))(jax.random.split(jax.random.key(SEED), BATCH))
  sides = {'ragen-jax': Program(ours(small, small_start), small_start, steps)}
  results['Sokoban 6x6, 1 box'] = compare(sides, repeats)
  results['Sokoban 6x6, 1 box']['gym-sokoban'] = {'steps a second': gym_sokoban(small_start, python_steps)}
  return {'batch': BATCH, 'scanned steps': steps, 'repeats': repeats, 'seed': SEED, 'cases': results}


def hardware() -> dict[str, Any]:
  """The machine of the measurement, and the versions of the packages."""
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
  models = [line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')]
  packages = ('jax', 'jaxlib', 'numpy', 'gymnax', 'jumanji', 'gymnasium', 'gym-sokoban')
  return {
    'cpu': models[0] if models else platform.processor(),
    'cores': len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
    'load': os.getloadavg()[0],
    'device': jax.devices()[0].device_kind,
    'python': platform.python_version(),
    'versions': {name: importlib.metadata.version(name) for name in packages},
  }


def rounded(value: Any) -> Any:
  """Floats to four significant digits, at any depth."""
  if isinstance(value, dict):
    return {key: rounded(part) for key, part in value.items()}
  if isinstance(value, list):
    return [rounded(part) for part in value]
  return float(f'{value:.4g}') if isinstance(value, float) else value


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true', help='few steps; writes nothing unless --output is given')
  parser.add_argument('--output', type=pathlib.Path, help='the JSON file')
  arguments = parser.parse_args()
  missing = [n for n in ('gymnax', 'jumanji', 'gymnasium', 'gym_sokoban') if importlib.util.find_spec(n) is None]
  if missing:
    sys.exit(f'error: {", ".join(missing)} missing; pip install -r benchmarks/requirements.txt')
  output = arguments.output
  if output is None and not arguments.quick:
    output = ROOT / 'benchmarks' / 'results' / 'env_speed.json'

  found = {'date': datetime.date.today().isoformat(), 'quick': arguments.quick, 'hardware': hardware()}
  found |= measure(arguments.quick)
  for case, sides in found['cases'].items():
    print(case)
    for name, side in sides.items():
      ratio = f'   ours is {side["ours times this"]:.2f} times that' if 'ours times this' in side else ''
      print(f'  {name:12}{side["steps a second"]:16,.0f} steps/s{ratio}')
  if output is not None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(rounded(found), indent=2) + '\n')


if __name__ == '__main__':
  main()
