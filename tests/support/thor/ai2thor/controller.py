"""The methods and values of the package's `Controller` that the worker processes use."""

from __future__ import annotations

import collections

from tests.support.thor.house import House

Event = collections.namedtuple('Event', 'metadata frame')


class Controller:
  def __init__(
    self, *, scene, width, height, fieldOfView, gridSize, visibilityDistance, platform, local_executable_path,
    server_timeout, server_start_timeout,
  ):  # fmt: skip
    assert (
      width == height and gridSize == 0.1 and visibilityDistance == 10 and platform is local_executable_path is None
    )
    assert server_timeout is None and server_start_timeout > 0
    self._house, self.stopped = House(width), False
    self._house.fov = fieldOfView
    self.reset(scene)

  def reset(self, scene):
    assert not self.stopped
    self._house.reset(scene)
    self.scene = f'{scene}_physics'
    return self._event()

  def step(self, action, **how):
    assert not self.stopped and how.pop('standing', True)
    self._house.act(action, **how)
    return self._event()

  def stop(self):
    self.stopped = True

  def _event(self):
    return Event(self._house.metadata(), self._house.frame())
