"""AI2-THOR: play against a second writing of its rules, with stand-ins for the package and for its program."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from ragen_jax import envs as registry
from ragen_jax.envs.drawing.tiles import IMAGE_MARK
from ragen_jax.envs.outside.base import read_observation, read_step
from ragen_jax.envs.simulators.ai2thor import read_tasks
from ragen_jax.utils.threads import Fault
from tests.support.environments import raises_one_line
from tests.support.paths import ROOT
from tests.support.thor import house
from tests.support.thor.house import OBJECTS, House

STAND_IN = ROOT / 'tests' / 'support' / 'thor'
STARTS = ((0.0, 0.0, 0), (1.0, 1.0, 90), (4.0, 3.5, 180), (0.5, 4.5, 270))
LONG = 100.0
SIZE = 40


def task(scene, start=0, target='Bread|1', **more):
  kind, x, z = OBJECTS[target]
  a, b, rotation = STARTS[start]
  pose = {'position': {'x': a, 'y': 0.9, 'z': b}, 'rotation': rotation, 'horizon': 0}
  return {
    'scene': scene, 'agentPose': pose, 'targetObjectType': kind, 'targetObjectIds': target,
    'target_position': {'x': x, 'y': 1.0, 'z': z}, 'instruction': f'navigate to the {kind}', **more,
  }  # fmt: skip


@pytest.fixture
def make(tmp_path, monkeypatch):
  """Makes environments with the stand-in for the package, from tasks."""
  monkeypatch.syspath_prepend(str(STAND_IN))

  def make(tasks, simulator=(), **options):
    file = tmp_path / 'tasks.json'
    file.write_text(json.dumps(tasks))
    own = {'tasks': str(file), 'size': SIZE, 'processes': 2, 'step_timeout_s': LONG, **dict(simulator)}
    return registry.make('ai2thor', {'split': 'all', 'must_see': False, **options, 'simulator': own})

  return make


def many():
  targets = list(OBJECTS)
  return [task(f'FloorPlan{1 + i % 5}', i % 4, targets[i % 3]) for i in range(12)]


class SecondWriting:
  """An episode by the rules in docs/navigation.md."""

  def __init__(self, env, played):
    pose = played['agentPose']
    self.env, self.task, self.steps = env, played, 0
    self.house = House(SIZE)
    self.house.fov = env.world.fov
    self.house.reset(played['scene'])
    self.house.act('Teleport', position=pose['position'], rotation={'y': pose['rotation']}, horizon=pose['horizon'])

  def step(self, name):
    words = ('ahead', 'forward'), ('back',), ('moveright', 'move_right'), ('moveleft', 'move_left')
    moves = dict(zip(words, ('MoveAhead', 'MoveBack', 'MoveRight', 'MoveLeft'), strict=True))
    move = next((action for parts, action in moves.items() if any(part in name for part in parts)), None)
    if move:
      self.house.act(move, moveMagnitude=self.env.world.stride)
    elif 'look' in name:
      self.house.act('LookUp' if 'up' in name else 'LookDown', degrees=30)
    else:
      self.house.act('RotateRight' if 'right' in name else 'RotateLeft', degrees=90)
    self.steps += 1
    x, z = self.task['target_position']['x'], self.task['target_position']['z']
    near = math.hypot(self.house.pose[0] - x, self.house.pose[1] - z) <= self.env.world.radius + 1e-4
    won = near and (not self.env.world.must_see or self.house.sees(x, z))
    done = won or self.steps >= self.env.world.max_steps
    return self.observation(), self.env.world.success_reward * won, done, won, self.house.moved

  def observation(self):
    stuck = '' if self.house.moved else ' The last action was blocked.'
    return f'{self.task["instruction"]}{stuck}\n{IMAGE_MARK}', self.house.frame()


def play(env, tasks, episodes, rows=4):
  """Plays episodes with random actions beside the second writing; returns how many are won."""
  session, rng, won = env.open(rows), np.random.default_rng(0), 0
  index = {played.id: i for i, played in enumerate(read_tasks(env.tasks))}
  for first in range(0, episodes, rows):
    seeds = list(range(first, first + rows))
    raws = session.reset(range(rows), seeds, [0] * rows)
    games = [SecondWriting(env, tasks[index[env.level_id(seed)]]) for seed in seeds]
    live = list(range(rows))
    for row in live:
      check_observation(read_observation(raws[row], env.image_form), games[row].observation())
    while live:
      chosen = [env.action_names[rng.choice(8, p=(0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05))] for _ in live]
      steps = session.step(live, [env.parse_action(name.upper()) for name in chosen])
      for row, name, raw in list(zip(live, chosen, steps, strict=True)):
        step, (seen, reward, done, success, moved) = read_step(raw, env.image_form), games[row].step(name)
        assert (step.reward, step.done, step.success, step.effective) == (reward, done, success, moved)
        check_observation(step.observation, seen)
        if done:
          live.remove(row)
          won += success
    session.end()
  return won


def check_observation(seen, expected):
  assert seen.text == expected[0]
  np.testing.assert_array_equal(seen.images[0], expected[1])


@pytest.mark.parametrize(
  'options', [{}, {'must_see': True, 'names': 'words', 'stride': 0.3, 'radius': 1.0, 'max_steps': 25, 'fov': 60.0}]
)
def test_random_play_is_that_of_the_rules(make, options):
  env = make(many(), **options)
  env.check()
  assert 0 < play(env, many(), 24) < 24


def test_prompts_are_those_of_the_rooms_with_the_same_options(make):
  options = {'stride': 0.3, 'radius': 1.0, 'names': 'words', 'success_reward': 1.0}
  env = make(many(), **options)
  rooms = registry.make('navigation', {'must_see': False, **options, 'simulator': {'tasks': 'nothing'}})
  assert env.rules() == rooms.rules() and env.action_names == rooms.action_names and not env.action_help
  assert env.parse_action(' Turn_Left') == 'turn_left' and env.parse_action('rotateleft') is None
  assert env.shown_as == rooms.shown_as and env.example_actions('') == rooms.example_actions('')


def test_parts_have_no_scene_in_common_and_equal_tasks_one_identity(make):
  tasks = [task(scene, start) for scene in house.SCENES for start in range(2)]
  scenes = {}
  for split in ('train', 'validation', 'test', 'all'):
    env = make(tasks, split=split)
    scenes[split] = {env.level(seed).start['scene'] for seed in range(60)}
  assert set.union(*(scenes[x] for x in ('train', 'validation', 'test'))) == scenes['all'] == set(house.SCENES)
  assert sum(map(len, scenes.values())) == 2 * len(house.SCENES) and len(scenes['train']) > 15
  env = make([task('FloorPlan1', instruction='Go'), task('FloorPlan1'), task('FloorPlan1', 1)])
  assert len({env.level_id(seed) for seed in range(3)}) == 2


def test_descriptions_tell_sectors_and_distances(make):
  env = make([task('FloorPlan1', 0, 'CoffeeMachine|1'), task('FloorPlan1', 0, 'Bread|2')])
  session = env.open(1)
  seed = next(seed for seed in range(2) if env.level(seed).kind == 'CoffeeMachine')
  session.reset([0], [seed], [0])

  def told():
    (scene,) = session.scenes([0])
    words = scene.words
    assert words.kinds == ('bread', 'coffee machine') and scene.weight('coffee machine') == 1
    relations = {name: scene.relation(places[0]) for name, places in scene.things.items()}
    return {name: (words.first[a], words.second[b]) for name, (a, b) in relations.items()}

  assert told() == {'coffee machine': ('ahead to the right', 'far'), 'bread': ('ahead', 'far')}
  session.step([0], ['rotateleft'])
  assert told() == {'coffee machine': ('behind to the right', 'far')}  # the target, though it is not in view
  session.step([0], ['rotateleft'])
  session.step([0], ['rotateleft'])
  assert told() == {'coffee machine': ('ahead to the left', 'far'), 'bread': ('ahead', 'far')}  # now the other bread
  for _ in range(5):
    session.step([0], ['moveahead'])
  assert told()['bread'] == ('ahead', 'midway')  # of two the nearer one


def test_failures_cost_their_row_only_and_a_new_start(make):
  env = make([task('FloorPlan1'), task(house.CRASHES), task(house.SMALL)], {'processes': 1})
  seeds = {env.level(seed).start['scene']: seed for seed in range(3)}
  session = env.open(2)
  good, bad = seeds['FloorPlan1'], seeds[house.CRASHES]
  session.reset([0, 1], [good, bad], [0, 0])
  results = session.step([0, 1], ['moveahead'] * 2)
  assert read_step(results[0], env.image_form).effective and 'RuntimeError' in str(results[1])
  again = session.reset([1], [good], [0])
  assert not isinstance(read_observation(again[0], env.image_form), Fault)
  small = read_observation(session.reset([1], [seeds[house.SMALL]], [0])[0], env.image_form)
  assert small.kind == 'image has another size'


def test_a_program_that_hangs_is_ended(make):
  env = make([task('FloorPlan1'), task(house.HANGS)], {'processes': 1, 'step_timeout_s': 1.0})
  seeds = {env.level(seed).start['scene']: seed for seed in range(2)}
  session = env.open(1)
  session.reset([0], [seeds[house.HANGS]], [0])
  (fault,) = session.step([0], ['moveahead'])
  assert isinstance(fault, Fault) and 'took longer' in str(fault)
  assert 'text' in session.reset([0], [seeds['FloorPlan1']], [0])[0]


def test_programs_are_kept_for_the_next_rollout(monkeypatch):
  monkeypatch.syspath_prepend(str(STAND_IN))
  from ragen_jax.envs.simulators.ai2thor_worker import ThorGames

  start = {'scene': 'FloorPlan1', 'position': {'x': 0.0, 'y': 0.9, 'z': 0.0}, 'rotation': 0.0, 'horizon': 0.0}
  games = ThorGames(first=start, executable='', platform='', size=SIZE, fov=100.0, stride=0.5, timeout_s=9)
  one, two = games.make(), games.make()
  one.reset(start, 0), two.reset({**start, 'scene': 'FloorPlan2'}, 0)
  first, second = one._controller, two._controller
  one.close(), two.close()
  three = games.make()
  three.reset(start, 0)
  assert three._controller is first  # of the two, the one that is in the scene
  with pytest.raises(RuntimeError, match='no such start'):
    three.reset({**start, 'position': {'x': 2.5, 'y': 0.9, 'z': 2.5}}, 0)
  three.close()
  assert first.stopped
  games.close()
  assert second.stopped


@pytest.mark.parametrize(
  'change, told',
  [
    ({'simulator': {'tasks': ''}}, "simulator.tasks=''; allowed: a JSON file of tasks"),
    ({'simulator': {'tasks': 'nowhere.json'}}, 'cannot be read (No such file'),
    ({'simulator': {'executable': 'nowhere'}}, "simulator.executable='nowhere'"),
    ({'simulator': {'platform': 'X'}}, "simulator.platform='X'; allowed: , CloudRendering"),
    ({'simulator': {'python': 'nopython'}}, "simulator.python='nopython'"),
    ({'simulator': {'processes': 0}}, 'processes=0'),
    ({'simulator': {'size': 16}}, 'simulator.size=16; allowed: integers from 32 to 1024'),
    ({'simulator': {'step_timeout_s': 0}}, 'simulator.step_timeout_s=0'),
    ({'observation': 'text'}, "observation='text'; allowed: image, with type='ai2thor'"),
    ({'radius': 0.1}, 'radius=0.1'),
    ({'nothing': 1}, 'nothing is not an option of navigation'),
    ({'simulator': {'scene': 1}}, 'scene is not an option of ai2thor'),
  ],
)
def test_bad_options_give_one_line(make, change, told):
  with raises_one_line(re.escape(told)):
    make(many(), **change)


@pytest.mark.parametrize(
  'tasks, told',
  [
    ([], 'has no tasks'),
    ({'tasks': 3}, 'has no tasks'),
    ([{'scene': 'FloorPlan1'}], 'task 0 cannot be read (KeyError'),
    ([task('FloorPlan1'), task('FloorPlan1', target_position={'x': math.inf, 'z': 0})], 'task 1 cannot be read'),
    ([task(7)], '7 is no name'),
  ],
)
def test_bad_tasks_give_one_line(make, tasks, told):
  with raises_one_line(re.escape(told)):
    make(tasks)


def test_a_part_without_tasks_gives_one_line(make):
  with raises_one_line('none of 1 tasks is in a scene of the part'):
    [make([task('FloorPlan1')], split=split) for split in ('train', 'test')]


def test_a_scene_that_cannot_be_drawn_and_a_missing_package_give_one_line(make, monkeypatch):
  with raises_one_line('scene FloorPlan30 cannot be played .*needs Vulkan'):
    make([task(house.SMALL)]).check()
  monkeypatch.setattr('sys.path', [entry for entry in sys.path if entry != str(STAND_IN)])
  with raises_one_line('pip install -r requirements-ai2thor.txt'):
    make([task('FloorPlan1')]).check()


# -- the real package --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_real_package_plays_the_rules_and_leaves_no_program_behind(make, tmp_path, monkeypatch, python_with):
  python = python_with('ai2thor.controller')
  monkeypatch.setenv('DISPLAY', ':0')  # the package wants one, the stand-in does not
  program = tmp_path / 'unity.sh'
  program.write_text(f'#!/bin/sh\nexec {python} {STAND_IN / "program.py"} "$@"\n')
  program.chmod(0o755)
  env = make(many(), {'python': python, 'executable': str(program)}, must_see=True)
  env.check()
  assert play(env, many(), 52) > 5
  env = make([task(house.HANGS)], {'python': python, 'executable': str(program), 'step_timeout_s': 5.0})
  session = env.open(1)
  assert 'text' in session.reset([0], [0], [0])[0]
  assert isinstance(session.step([0], ['moveahead'])[0], Fault)
  env = make([task(house.CRASHES)], {'python': python, 'executable': str(program)})
  session = env.open(1)
  session.reset([0], [0], [0])
  assert isinstance(session.step([0], ['moveahead'])[0], Fault)
  del env, session
  deadline = time.monotonic() + 20
  while _running() and time.monotonic() < deadline:
    time.sleep(0.2)
  assert not _running()


def _running() -> list[str]:
  """The command lines of the stand-in's processes."""
  listed = subprocess.run(['ps', '-eo', 'args'], capture_output=True, text=True, check=True).stdout
  return [line for line in listed.splitlines() if str(STAND_IN / 'program.py') in line]
