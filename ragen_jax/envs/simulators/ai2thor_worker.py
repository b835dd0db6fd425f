"""What worker processes do with AI2-THOR: walks through its scenes.

A worker process loads this file by its path, and not as a part of its package, because `ragen_jax.envs` loads JAX. Of
this package it may import `ragen_jax.utils` only. The process may have an interpreter of its own. Each row has a
program of Unity, which is kept for other rows when its rollout is over, because a start takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ragen_jax.utils.errors import describe_error

INSTALL = 'pip install -r requirements-ai2thor.txt'
# As in VAGEN: metres of the grid that poses snap to, and metres up to which an object is visible.
_GRID, _VISIBLE = 0.1, 10.0
_ANGLES = {'RotateRight': 90, 'RotateLeft': 90, 'LookUp': 30, 'LookDown': 30}


class ThorGames:
  """Makes the games of rows.

  Attributes:
    first: where an episode may begin, see `ThorGame.reset`.
    size, fov, stride: sides of a frame in pixels, field of view in degrees, and metres of a step.
  """

  def __init__(
    self, *, first: Mapping[str, Any], executable: str, platform: str, size: int, fov: float, stride: float,
    timeout_s: float,
  ):  # fmt: skip
    """Raises ValueError with one line if the package cannot be loaded. See `ThorEnvironment` for the options."""
    self.first, self.size, self.stride = first, size, stride
    try:
      from ai2thor.controller import Controller
    except Exception as e:  # a package that is missing, or one of its libraries that cannot be loaded
      raise ValueError(
        f"type='ai2thor' needs the package ai2thor, which cannot be loaded ({describe_error(e)}): {INSTALL}"
      ) from e
    self._class = Controller
    self._kwargs = {
      'width': size, 'height': size, 'fieldOfView': fov, 'gridSize': _GRID, 'visibilityDistance': _VISIBLE,
      'platform': platform or None, 'local_executable_path': executable or None,
      # Without a limit the package notices at once that the program has ended. One that hangs ends with this process.
      'server_timeout': None, 'server_start_timeout': timeout_s,
    }  # fmt: skip
    self._idle: list[Any] = []

  def describe(self) -> dict[str, Any]:
    """Nothing that the environment does not know, but a scene was loaded and drawn."""
    game = self.make()
    try:
      image = game.reset(self.first, 0)['images'][0]
      if image.shape != (self.size, self.size, 3):
        raise TypeError(f'a frame is {image.shape}')
    except Exception as e:
      raise ValueError(
        f'ai2thor: scene {self.first["scene"]} cannot be played ({describe_error(e)}); the platform CloudRendering '
        'needs Vulkan, others and an executable need a display (DISPLAY)'
      ) from e
    finally:
      game.close()
      self.close()
    return {}

  def make(self) -> ThorGame:
    """A game of a row."""
    return ThorGame(self)

  def controller(self, scene: str) -> Any:
    """A controller that no row uses, in a scene."""
    if not self._idle:
      return self._class(scene=scene, **self._kwargs)
    return self._idle.pop(next((i for i, own in enumerate(self._idle) if own.scene.startswith(scene)), -1))

  def give_back(self, controller: Any) -> None:
    self._idle.append(controller)

  def close(self) -> None:
    """Ends the programs that no row uses."""
    while self._idle:
      self._idle.pop().stop()


class ThorGame:
  """The episodes of a row, one after another. An observation is the state as JSON, and the frame."""

  def __init__(self, games: ThorGames):
    self._games, self._controller = games, None

  def reset(self, start: Mapping[str, Any], member: int) -> dict[str, Any]:
    """Begins an episode in a scene, with the camera at a position x, y, z, a rotation and a horizon in degrees."""
    del member
    scene = start['scene']
    controller, self._controller = self._controller or self._games.controller(scene), None
    try:
      if controller.scene not in (scene, f'{scene}_physics'):
        controller.reset(scene)
      event = controller.step(
        action='Teleport', position=start['position'], rotation={'x': 0, 'y': start['rotation'], 'z': 0},
        horizon=start['horizon'], standing=True,
      )  # fmt: skip
      if not event.metadata['lastActionSuccess']:
        raise RuntimeError(f'scene {scene} has no such start ({event.metadata.get("errorMessage", "")})')
      seen = _observation(event)
    except BaseException:
      controller.stop()
      raise
    self._controller = controller
    return seen

  def step(self, action: str) -> tuple[dict[str, Any], float, bool, bool]:
    """Executes an action of the package, such as 'MoveAhead'."""
    how = {'degrees': _ANGLES[action]} if action in _ANGLES else {'moveMagnitude': self._games.stride}
    controller, self._controller = self._controller, None
    try:
      seen = _observation(controller.step(action=action, **how))
    except BaseException:
      controller.stop()
      raise
    self._controller = controller
    return seen, 0.0, False, False

  def close(self) -> None:
    """Gives the controller back, if it works."""
    controller, self._controller = self._controller, None
    if controller is not None:
      self._games.give_back(controller)


def _observation(event: Any) -> dict[str, Any]:
  metadata = event.metadata
  agent = metadata['agent']
  state = {
    'moved': bool(metadata['lastActionSuccess']),
    'place': [agent['position']['x'], agent['position']['z']],
    'rotation': agent['rotation']['y'],
    'objects': [
      [thing['objectId'], thing['objectType'], thing['position']['x'], thing['position']['z']]
      for thing in metadata['objects']
      if thing['visible']
    ],
  }
  return {'text': json.dumps(state), 'images': [event.frame]}
