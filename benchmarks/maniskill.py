"""The rules of Manipulation beside ManiSkill: the same levels, played by the same skills in both. Writes a JSON file.

  python benchmarks/maniskill.py [--levels=40] [--python=PYTHON] [--render=cpu] \\
    [--output=benchmarks/results/maniskill.json]

PYTHON is an interpreter with the package mani_skill. Levels are of the test part of each task. `same outcome` is the
share of levels that the plan of the rules, played blindly, wins in both or in neither; `same places` the share of
cubes that are at most 10 mm apart, along each axis, after the skill place, and `after pushes` after push. `expert`
is the success of the planner if it sees the state after each skill. Seconds are those of the wall clock.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ragen_jax import envs as registry  # noqa: E402
from ragen_jax.envs.manipulation_tasks import PICK, PUSH  # noqa: E402
from ragen_jax.envs.outside.base import TextStep, read_step  # noqa: E402
from ragen_jax.envs.simulators.maniskill import TASKS, ManiSkillEnvironment  # noqa: E402
from ragen_jax.envs.solvers import manipulation as solver  # noqa: E402

_NEAR, _SKILLS = 10, 6


def make(task: str, python: str, render: str, observation: str = 'text') -> ManiSkillEnvironment:
  """The environment of a task, in one worker process."""
  simulator = {'python': python, 'render': render, 'processes': 1}
  return registry.make('maniskill', {'task': task, 'split': 'test', 'observation': observation, 'simulator': simulator})


def measure(env: ManiSkillEnvironment, levels: int) -> dict[str, Any]:
  """What both worlds have in common on so many levels."""
  session, step = env.open(1), jax.jit(env.world.step)
  same, after_places, after_pushes, won, expert, seconds = [], [], [], [], [], []
  for seed in range(levels):
    rules = env.level(seed)
    (plan,), _, _ = solver.play(
      env.world, jax.tree.map(lambda leaf: np.asarray(leaf)[None], rules), np.array([_SKILLS])
    )
    session.reset([0], [seed], [0])
    for skill in plan:
      rules = jax.device_get(step(rules, np.array(skill), jax.random.key(0))[0])
      begun = time.perf_counter()
      told = _step(env, session, env.world.format_action(skill))
      seconds.append(time.perf_counter() - begun)
      if skill[0] != PICK:
        apart = np.abs(rules.table.places - session.plays[0].table.places).max(1)
        (after_pushes if skill[0] == PUSH else after_places).extend(apart <= _NEAR)
      if told.done:
        break
    same.append(bool(rules.success) == told.success)
    won.append(told.success)
    session.reset([0], [seed], [0])
    told = None
    for _ in range(_SKILLS):
      advice = session.expert([0])[0]
      if not advice or (told is not None and told.done):
        break
      told = _step(env, session, advice[0])
    expert.append(told is not None and told.success)
  found = {
    'same outcome': same, 'same places': after_places, 'after pushes': after_pushes, 'plan wins': won, 'expert': expert
  }  # fmt: skip
  return {name: round(float(np.mean(own)), 3) if own else None for name, own in found.items()} | {
    'seconds of a skill': round(float(np.mean(seconds)), 2)
  }


def _step(env: ManiSkillEnvironment, session: Any, action: str) -> TextStep:
  told = read_step(session.step([0], [action])[0], env.image_form)
  if not isinstance(told, TextStep):
    raise RuntimeError(told)
  return told


def seconds_with_picture(env: ManiSkillEnvironment, levels: int) -> float:
  """Seconds of a skill with a picture; the first, which compiles the programs of the driver, does not count."""
  session, seconds = env.open(1), []
  for seed in range(levels):
    session.reset([0], [seed], [0])
    begun = time.perf_counter()
    _step(env, session, session.expert([0])[0][0])
    seconds.append(time.perf_counter() - begun)
  return round(float(np.mean(seconds[1:])), 2)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--levels', type=int, default=40, help='levels of each task')
  parser.add_argument('--python', default='', help='an interpreter with mani_skill')
  parser.add_argument('--render', default='cpu', help="'gpu' or 'cpu'")
  parser.add_argument('--output', type=pathlib.Path, default=ROOT / 'benchmarks' / 'results' / 'maniskill.json')
  arguments = parser.parse_args()
  found: dict[str, Any] = {'levels': arguments.levels, 'cases': {}}
  for task in TASKS:
    found['cases'][task] = measure(make(task, arguments.python, arguments.render), arguments.levels)
    print(task, found['cases'][task], flush=True)
  pictures = make('stack', arguments.python, arguments.render, 'image')
  found['seconds of a skill with a picture of 252 x 252'] = seconds_with_picture(pictures, 20)
  arguments.output.write_text(json.dumps(found, indent=2) + '\n')


if __name__ == '__main__':
  main()
