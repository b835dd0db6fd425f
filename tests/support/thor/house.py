"""Scenes that a stand-in for AI2-THOR's program plays: square rooms with an obstacle and some objects."""

from __future__ import annotations

import math
import time

import numpy as np

SIDE = 5.0
# Moves into it are blocked: least and largest x and z.
OBSTACLE = (2.0, 3.0, 2.0, 3.0)
OBJECTS = {
  'Bread|1': ('Bread', 1.0, 4.0),
  'Bread|2': ('Bread', 4.5, 0.5),
  'CoffeeMachine|1': ('CoffeeMachine', 4.0, 4.0),
  'Bread|3': ('Bread', 5.9, 0.6),
}
CRASHES, HANGS, SMALL = 'FloorPlan28', 'FloorPlan29', 'FloorPlan30'
SCENES = [f'FloorPlan{number}' for number in range(1, 31)]
_MOVES = {'MoveAhead': 0, 'MoveRight': 90, 'MoveBack': 180, 'MoveLeft': 270}


class House:
  """The camera in a scene."""

  def __init__(self, size: int):
    self.size, self.scene, self.fov = size, SCENES[0], 90.0
    self.pose = 0.0, 0.0, 0.0, 0.0
    self.moved = True

  def reset(self, scene: str) -> None:
    self.scene, self.pose, self.moved = scene.removesuffix('_physics'), (0.0, 0.0, 0.0, 0.0), True

  def act(self, action: str, **how) -> None:
    """Executes an action; `moved` says whether it succeeded."""
    x, z, rotation, horizon = self.pose
    if action == 'Teleport':
      new = how['position']['x'], how['position']['z'], how['rotation']['y'] % 360, how['horizon']
    elif action in _MOVES:
      if self.scene == CRASHES:
        raise RuntimeError('the program ended')
      if self.scene == HANGS:
        time.sleep(3600)
      way = math.radians(rotation + _MOVES[action])
      new = x + how['moveMagnitude'] * math.sin(way), z + how['moveMagnitude'] * math.cos(way), rotation, horizon
    elif action in ('RotateRight', 'RotateLeft'):
      new = x, z, (rotation + how['degrees'] * (1 if action == 'RotateRight' else -1)) % 360, horizon
    elif action in ('LookUp', 'LookDown'):
      new = x, z, rotation, horizon + how['degrees'] * (1 if action == 'LookDown' else -1)
    else:
      raise ValueError(action)
    low_x, high_x, low_z, high_z = OBSTACLE
    free = 0 <= new[0] <= SIDE and 0 <= new[1] <= SIDE and not (low_x <= new[0] <= high_x and low_z <= new[1] <= high_z)
    self.moved = free and -30 <= new[3] <= 60
    self.pose = new if self.moved else self.pose

  def sees(self, x: float, z: float) -> bool:
    """Whether a place is in the horizontal field of view."""
    angle = math.degrees(math.atan2(x - self.pose[0], z - self.pose[1])) - self.pose[2]
    return abs((angle + 180) % 360 - 180) <= self.fov / 2

  def metadata(self) -> dict:
    x, z, rotation, horizon = self.pose
    return {
      'lastActionSuccess': self.moved,
      'errorMessage': '' if self.moved else 'blocked',
      'agent': {
        'position': {'x': x, 'y': 0.9, 'z': z},
        'rotation': {'x': 0.0, 'y': rotation, 'z': 0.0},
        'cameraHorizon': horizon,
      },
      'objects': [
        {
          'objectId': name, 'objectType': kind, 'visible': self.sees(a, b), 'position': {'x': a, 'y': 1.0, 'z': b},
          'distance': math.hypot(a - x, b - z),
        }
        for name, (kind, a, b) in OBJECTS.items()
      ],
    }  # fmt: skip

  def frame(self) -> np.ndarray:
    """u8[size, size, 3]: the pose as a colour, and a white row at the top."""
    x, z, rotation, _ = self.pose
    size = self.size // 2 if self.scene == SMALL else self.size
    frame = np.full((size, size, 3), (round(10 * x), round(10 * z), round(rotation / 2)), np.uint8)
    frame[0] = 255
    return frame
