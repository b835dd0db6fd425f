"""What worker processes do with ManiSkill: a table with cubes, and skills of a robot arm.

A worker process loads this file by its path, and not as a part of its package, because `ragen_jax.envs` loads JAX. Of
this package it may import `ragen_jax.utils` only. The process may have an interpreter of its own.

A skill is a sequence of straight moves of the hand, each a loop of the controller 'pd_ee_delta_pose'.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from typing import Any

from ragen_jax.utils.errors import describe_error

INSTALL = 'pip install -r requirements-maniskill.txt'
_NAME = 'RagenTable-v1'
# Lengths are in metres, as in ManiSkill. How far the hand rises between moves, and how near it must come to the end of
# a move.
_LIFT, _NEAR = 0.1, 0.004
# An action of size 1 is this much, in a control step.
_REACH = 0.1
# Control steps of a move at most, and of opening or closing the hand.
_MOST_STEPS, _GRIP_STEPS = 60, 6
# The largest action of a push, since a fast cube slides on, and millimetres that the hand goes back before it rises.
_SLOW, _BACK = 0.25, 40
# Control steps in which things come to rest.
_SETTLE_STEPS = 4
OPEN, CLOSED = 1.0, -1.0
# VAGEN's camera.
_EYE, _AIM, _FOV = (1.0, 0.0, 0.6), (-0.2, 0.0, 0.2), 1.0
_COLOURS = {'red': (0.9, 0.1, 0.1, 1), 'green': (0.1, 0.7, 0.1, 1), 'purple': (0.5, 0.1, 0.7, 1)}


@functools.cache
def _register() -> None:
  """Registers the table with ManiSkill."""
  import mani_skill.envs  # noqa: F401, registers the robots and scenes
  import sapien
  from mani_skill.envs.sapien_env import BaseEnv
  from mani_skill.sensors.camera import CameraConfig
  from mani_skill.utils import sapien_utils
  from mani_skill.utils.building import actors
  from mani_skill.utils.registration import register_env
  from mani_skill.utils.scene_builder.table import TableSceneBuilder

  @register_env(_NAME)
  class Table(BaseEnv):
    """A Panda at a table with cubes, which are put where the options of a reset say."""

    SUPPORTED_ROBOTS = ('panda',)

    def __init__(self, *args: Any, cubes: Sequence[str], targets: Sequence[tuple[float, float]], size: int, **kwargs):
      self._names, self._targets, self._size = tuple(cubes), tuple(targets), size
      super().__init__(*args, robot_uids='panda', **kwargs)

    @property
    def _default_sensor_configs(self):
      return []

    @property
    def _default_human_render_camera_configs(self):
      pose = sapien_utils.look_at(_EYE, _AIM)
      return CameraConfig('render_camera', pose, self._size, self._size, _FOV, 0.01, 100)

    def _load_agent(self, options: dict):
      super()._load_agent(options, sapien.Pose(p=[-0.615, 0, 0]))

    def _load_scene(self, options: dict):
      self.table = TableSceneBuilder(env=self, robot_init_qpos_noise=0)
      self.table.build()
      self.cubes = [
        actors.build_cube(
          self.scene, half_size=0.02, color=_COLOURS[name.split()[0]], name=name,
          initial_pose=sapien.Pose(p=[i, 0, 0.1]),
        )
        for i, name in enumerate(self._names)
      ]  # fmt: skip
      for name, (x, y) in zip(self._names, self._targets, strict=False):
        actors.build_cylinder(
          self.scene, radius=0.05, half_length=0.001, color=_COLOURS[name.split()[0]], name=f'target of the {name}',
          body_type='kinematic', add_collision=False,
          initial_pose=sapien.Pose(p=[x, y, 0.0005], q=[2**-0.5, 0, 2**-0.5, 0]),
        )  # fmt: skip

    def _initialize_episode(self, env_idx: Any, options: dict):
      self.table.initialize(env_idx)
      for cube, place in zip(self.cubes, options.get('places', ()), strict=False):
        cube.set_pose(sapien.Pose(p=list(place)))

    def evaluate(self) -> dict:
      return {}


class ManiSkillGames:
  """Makes the games of rows.

  Attributes:
    cubes, targets: names of the cubes, and x, y of the target of each, in millimetres; () without targets.
    home: x, y, z of the hand between skills, in millimetres.
    size: sides of the pictures in pixels; 0 for none.
  """

  def __init__(
    self, *, cubes: Sequence[str], targets: Sequence[Sequence[int]], home: Sequence[int], size: int, render: str
  ):
    """Raises ValueError with one line if the package cannot be loaded. `render` is ManiSkill's `render_backend`."""
    self.cubes, self.targets, self.home, self.size, self._render = cubes, targets, home, size, render
    try:
      _register()
    except Exception as e:  # a package that is missing, or one of its libraries that cannot be loaded
      raise ValueError(
        f"type='maniskill' needs the package mani_skill, which cannot be loaded ({describe_error(e)}): {INSTALL}"
      ) from e

  def describe(self) -> dict[str, Any]:
    """Nothing that the environment does not know, but a table was made and, with pictures, drawn."""
    try:
      game = self.make()
    except Exception as e:
      raise ValueError(
        f'maniskill: simulator.render={self._render!r}: a table cannot be made ({describe_error(e)}); without a GPU it '
        'needs Mesa 25 or newer with lavapipe, see docs/simulators.md'
      ) from e
    game.reset([[0, 100 * i, 20] for i in range(len(self.cubes))], 0)
    game.close()
    return {}

  def make(self) -> ManiSkillGame:
    """A game of a row."""
    return ManiSkillGame(self)

  def new(self) -> Any:
    """An environment of the package."""
    import gymnasium

    return gymnasium.make(
      _NAME, num_envs=1, obs_mode='none', reward_mode='none', control_mode='pd_ee_delta_pose', render_mode='rgb_array',
      sim_backend='physx_cpu', render_backend=self._render, cubes=self.cubes,
      targets=[(x / 1000, y / 1000) for x, y in self.targets], size=max(self.size, 16),
    )  # fmt: skip


class ManiSkillGame:
  """The episodes of a row, one after another. An observation is the state as JSON, and the picture."""

  def __init__(self, games: ManiSkillGames):
    self._games, self._env = games, games.new()
    self._table = self._env.unwrapped
    self._grip = OPEN

  def reset(self, places: Sequence[Sequence[int]], member: int) -> dict[str, Any]:
    """Begins an episode with the cubes at these places, in millimetres."""
    del member
    self._env.reset(seed=0, options={'places': [_metres(place) for place in places]})
    self._grip = OPEN
    self._move(self._games.home)
    return self._observation()

  def step(self, skill: Sequence[int]) -> tuple[dict[str, Any], float, bool, bool]:
    """Executes a skill: its name, and its numbers in millimetres.

    A place with an empty hand, and other skills with a full one, do nothing.
    """
    name, *numbers = skill
    if (name == 'place') == (self._held() >= 0):
      {'pick': self._pick, 'place': self._place, 'push': self._push}[name](*numbers)
      self._rise()
      self._move(self._games.home)
      self._hold(_SETTLE_STEPS)
    return self._observation(), 0.0, False, False

  def close(self) -> None:
    self._env.close()

  # -- skills ----------------------------------------------------------------------------------------------------------

  def _pick(self, x: int, y: int, z: int) -> None:
    self._come_down(x, y, z)
    self._turn_grip(CLOSED)
    self._rise()
    if self._held() < 0:
      self._turn_grip(OPEN)

  def _place(self, x: int, y: int, z: int) -> None:
    self._come_down(x, y, z)
    self._turn_grip(OPEN)

  def _push(self, x: int, y: int, z: int, to_x: int, to_y: int, to_z: int) -> None:
    self._turn_grip(CLOSED)
    self._come_down(x, y, z)
    self._move((to_x, to_y, to_z), _SLOW)
    # The hand swings as it rises, and would go on pushing.
    way = to_x - x, to_y - y
    back = _BACK / max(math.hypot(*way), _BACK)
    self._move((to_x - back * way[0], to_y - back * way[1], to_z))
    self._rise()
    self._turn_grip(OPEN)

  def _come_down(self, x: int, y: int, z: int) -> None:
    self._move((x, y, z + 1000 * _LIFT))
    self._move((x, y, z))

  def _rise(self) -> None:
    x, y, z = (1000 * length for length in self._hand())
    self._move((x, y, max(z, self._games.home[2])))

  def _turn_grip(self, grip: float) -> None:
    self._grip = grip
    self._hold(_GRIP_STEPS)

  # -- the package -----------------------------------------------------------------------------------------------------

  def _hand(self) -> Any:
    """x, y, z between the fingers, in metres."""
    import numpy as np

    return np.asarray(self._table.agent.tcp.pose.p)[0]

  def _move(self, place: Sequence[float], fastest: float = 1.0) -> None:
    """Moves the hand straight to a place in millimetres, or until it does not come nearer.

    Args:
      fastest: the largest action, along each axis.
    """
    import numpy as np

    goal, before = np.array(_metres(place)), np.inf
    for _ in range(_MOST_STEPS):
      way = goal - self._hand()
      left = float(np.abs(way).max())
      if left < _NEAR or before - left < 1e-4:
        return
      before = left
      self._act(way, fastest)

  def _hold(self, steps: int) -> None:
    for _ in range(steps):
      self._act((0, 0, 0))

  def _act(self, way: Sequence[float], fastest: float = 1.0) -> None:
    import numpy as np

    moved = (np.array(way, np.float32) / _REACH).clip(-fastest, fastest)
    self._env.step(np.array([*moved, 0, 0, 0, self._grip], np.float32))

  def _held(self) -> int:
    """The cube in the hand; -1 for none."""
    held = (i for i, cube in enumerate(self._table.cubes) if bool(self._table.agent.is_grasping(cube)[0]))
    return next(held, -1)

  def _observation(self) -> dict[str, Any]:
    import numpy as np

    places = [[round(1000 * float(x)) for x in np.asarray(cube.pose.p)[0]] for cube in self._table.cubes]
    text = json.dumps({'places': places, 'held': self._held()})
    if not self._games.size:
      return text
    return {'text': text, 'images': [np.asarray(self._env.render())[0]]}


def _metres(place: Sequence[float]) -> list[float]:
  return [length / 1000 for length in place]
