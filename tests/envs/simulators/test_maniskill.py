"""ManiSkill: the game around a simulator that obeys the rules of Manipulation, and the real one if it is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import sys

import jax
import numpy as np
import pytest

from ragen_jax import envs as registry
from ragen_jax.envs import manipulation_tasks as rules
from ragen_jax.envs.drawing.tiles import IMAGE_MARK
from ragen_jax.envs.manipulation_tasks import SKILLS, Table
from ragen_jax.envs.outside.base import read_observation, read_step
from ragen_jax.envs.simulators.base import SimulatorSession
from ragen_jax.utils.threads import Fault
from tests.support.environments import raises_one_line

SIZE = 40
each = pytest.mark.parametrize('task', ['align', 'place', 'stack'])
execute = jax.jit(rules.execute, static_argnums=0)


class Arm:
  """A session of worker processes in which skills are the rules, and heights are off by some millimetres."""

  def __init__(self, env):
    self._task, self._images = env.world.task_of_levels, env.image_form is not None
    self.tables, self.off, self.sent = {}, 0, []

  def reset(self, rows, starts, members):
    for row, places in zip(rows, starts, strict=True):
      self.tables[row] = Table(np.array(places, np.int32), np.int32(-1), np.int32(0))
    return [self._observation(row) for row in rows]

  def step(self, rows, skills):
    self.sent += skills
    for row, (name, *numbers) in zip(rows, skills, strict=True):
      action = np.array([SKILLS.index(name), *numbers, *[0] * (6 - len(numbers))])
      self.tables[row] = jax.device_get(execute(self._task, self.tables[row], action))
    return [(self._observation(row), 0.0, False, False) for row in rows]

  def _observation(self, row):
    table = self.tables[row]
    places = np.array(table.places)
    places[np.arange(len(places)) != table.held, 2] += self.off
    text = json.dumps({'places': places.tolist(), 'held': int(table.held)})
    return {'text': text, 'images': [np.full((SIZE, SIZE, 3), 7, np.uint8)]} if self._images else text


def make(task='place', simulator=(), **options):
  own = {'size': SIZE, 'processes': 1, **dict(simulator)}
  return registry.make('maniskill', {'task': task, **options, 'simulator': own})


def session_of(env):
  arm = Arm(env)
  return arm, SimulatorSession(env, lambda: arm)


@pytest.mark.parametrize(
  'task, observation',
  [('stack', 'image'), *(pytest.param(task, 'text', marks=pytest.mark.slow) for task in ('align', 'place'))],
)
def test_play_is_that_of_manipulation_if_skills_are(task, observation):
  env = make(task, observation=observation, positions='list', split='train')
  world = env.world
  assert registry.make('manipulation', {'task': task, 'positions': 'list', 'split': 'train', 'simulator': {}}) == world
  (arm, session), rng = session_of(env), np.random.default_rng(3)
  reset, play = jax.jit(world.reset), jax.jit(world.step)
  session.reset([0, 1], [5, 5], [0, 1])
  for seed in range(3):
    arm.off = int(rng.integers(-3, 4))  # a cube at rest is not exactly where the rules have it
    raw = session.reset([1], [seed], [0])[0]
    state = jax.device_get(reset(jax.random.key(seed)))
    check_seen(env, read_observation(raw, env.image_form), state)
    for turn in range(8):
      batch = jax.tree.map(lambda leaf: np.asarray(leaf)[None], state)
      legal = [world.format_action(action) for action in world.legal_actions(batch)[0]]
      assert session.legal_actions([1]) == [legal] and session.scenes([1]) == world.scenes(batch)
      plan = session.expert([1])[0]
      assert session.rationale([1]) == world.rationale(batch)
      action = plan[0] if turn % 3 or seed % 2 else legal[rng.integers(len(legal))]
      step = read_step(session.step([1], [env.parse_action(action)])[0], env.image_form)
      before = state
      state, out = jax.device_get(play(state, np.array(world.parse_action(action)), jax.random.key(0)))
      moved = np.abs(state.table.places - before.table.places).max() > 5 or state.table.held != before.table.held
      assert step.reward == pytest.approx(float(out.reward), abs=1e-6) and step.effective == moved
      assert (step.done, step.success) == (bool(state.done), bool(state.success))
      check_seen(env, step.observation, state.replace(blocked=np.bool_(not moved)))
      if step.done:
        break
    assert step.success or not seed % 2
  assert {name for name, *_ in arm.sent} <= set(SKILLS) and all(len(x) == 4 or x[0] == 'push' for x in arm.sent)


def check_seen(env, seen, state):
  text = env.world.render(jax.tree.map(lambda leaf: np.asarray(leaf)[None], state))[0]
  if env.image_form is None:
    assert seen == text
  else:
    assert seen.text == f'{text}\n{IMAGE_MARK}' and (seen.images[0] == 7).all()


def test_levels_of_parts_are_those_of_manipulation_and_have_identities():
  env, other = make('stack', split='train'), make('stack', split='test')
  ids = [{x.level_id(seed) for seed in range(40)} for x in (env, other)]
  assert [len(x) for x in ids] == [40, 40] and not ids[0] & ids[1]
  assert make('stack', split='train', positions='none').level_id(3) == env.level_id(3)


def test_things_outside_the_workspace_and_odd_heights_are_told():
  env = make('place', observation='text')
  arm, session = session_of(env)
  session.reset([0], [0], [0])
  arm.tables[0] = Table(np.array([[900, -900, 20], [0, 0, 31]], np.int32), np.int32(-1), np.int32(0))
  step = read_step(session.step([0], [env.parse_action('pick(100, 0, 20)')])[0])
  assert 'red cube (900, -900, 20), green cube (0, 0, 31)' in step.observation and not step.success
  state = env._table({'places': [[1, 2, 178], [0, 0, 22]], 'held': 0})
  assert state.places.tolist() == [[1, 2, 178], [0, 0, 20]]  # a held cube is at no height of rest
  (scene,) = session.scenes([0])
  first, second = scene.words.first, scene.words.second
  told = {name: (first[a], second[b]) for name, ((a, b),) in scene.things.items()}
  assert told == {'red cube': ('at x 160 y -200', 'on the table'), 'green cube': ('at x 0 y 0', 'on a cube')}


def test_a_state_that_cannot_be_read_and_a_fault_are_faults_of_the_row():
  env = make('place', observation='text')
  arm, session = session_of(env)
  arm._observation = lambda row: 'no JSON'
  assert session.reset([0], [0], [0])[0].kind.startswith('reading a state')
  arm.reset = lambda rows, starts, members: [Fault('it ended')]
  assert session.reset([0], [0], [0]) == [Fault('it ended')]


def test_a_rollout_that_ends_gives_its_simulators_to_others():
  env = make('place')
  session = SimulatorSession(env, lambda: Arm(env))
  before = session._inner
  session.reset([0], [0], [0])
  session.end()
  assert session._inner is not before and not isinstance(session.reset([0], [1], [0])[0], Fault)


def test_prompts_are_those_of_manipulation():
  env, world = make('stack', positions='none'), registry.make('manipulation', {'task': 'stack', 'positions': 'none'})
  assert env.rules() == world.rules() and env.action_help == world.action_help
  assert env.example_actions('') == world.example_actions('') and env.scene_words == world.scene_words
  assert env.parse_action(' PICK(1,2.6 , 30)') == 'pick(1, 3, 30)' and env.parse_action('pick(999, 0, 20)') is None


@pytest.mark.parametrize(
  'change, told',
  [
    ({'task': 'drawer'}, "task='drawer'; allowed: align, place, stack, since the apple and the cabinet"),
    ({'cameras': 2}, "cameras=2; allowed: 1, with type='maniskill'"),
    ({'observation': 'grid'}, "observation='grid'; allowed: image, text, with type='maniskill'"),
    ({'simulator': {'render': 'vulkan'}}, "simulator.render='vulkan'; allowed: gpu, cpu"),
    ({'simulator': {'memory_mib': -1}}, 'memory_mib=-1'),
    ({'positions': 'x'}, "positions='x'"),
  ],
)
def test_bad_options_give_one_line(change, told):
  with raises_one_line(re.escape(told)):
    make(**change)


@pytest.mark.skipif(importlib.util.find_spec('mani_skill') is not None, reason='the package is installed')
def test_a_missing_package_gives_one_line():
  with raises_one_line('needs the package mani_skill, .*pip install -r requirements-maniskill.txt'):
    make().check()


def test_processes_have_the_interpreter_of_the_option(tmp_path):
  marker, python = tmp_path / 'started', tmp_path / 'python'
  python.write_text(f'#!/bin/sh\ntouch {marker}\nexec {sys.executable} "$@"\n')
  python.chmod(0o755)
  env = make(simulator={'python': str(python)})
  assert make()._processes is not env._processes is make(simulator={'python': str(python)})._processes
  with contextlib.suppress(ValueError):  # without the package
    env.check()
  assert marker.is_file()
  marker.unlink()
  env.open(1).reset([0], [0], [0])
  assert marker.is_file()


# -- the real package --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@each
def test_the_planner_wins_with_the_real_arm(task, python_with):
  env = make(task, {'python': python_with('mani_skill.envs'), 'render': 'cpu'}, observation='text', split='test')
  env.check()
  session = env.open(1)
  for seed in range(2):
    (start,), told = session.reset([0], [seed], [0]), None
    assert start == env.world.render(jax.tree.map(lambda leaf: np.asarray(leaf)[None], env.level(seed)))[0]
    for _ in range(6):
      if told is None or not told.done:
        told = read_step(session.step([0], session.expert([0])[0][:1])[0])
    assert told.success


@pytest.mark.slow
def test_the_real_arm_is_drawn_with_cubes_of_their_colours(python_with):
  env = make('place', {'python': python_with('mani_skill.envs'), 'render': 'cpu', 'size': 252}, observation='image')
  seen = read_observation(env.open(1).reset([0], [0], [0])[0], env.image_form)
  red, green, blue = np.moveaxis(seen.images[0].astype(int), 2, 0)
  assert ((red > 100) & (green < 60) & (blue < 60)).sum() > 30 and ((green > 80) & (red < 60) & (blue < 60)).sum() > 30
