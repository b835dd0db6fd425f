"""An environment of Gymnasium for worker processes, which load this module, and functions for it."""

from __future__ import annotations

import time

import gymnasium
import numpy as np


class Push(gymnasium.Env):
  """Two numbers are added to a sum; chance is added too. It draws its sum."""

  action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
  observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
  metadata = {'render_modes': ['rgb_array']}  # noqa: RUF012, Gymnasium's own form

  def __init__(self, render_mode=None):
    self.render_mode = render_mode

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    self.sum = np.full(1, self.np_random.integers(3), np.float32)
    return self.sum, {}

  def step(self, action):
    self.sum = self.sum + action.sum() + self.np_random.integers(2)
    return self.sum, float(self.sum[0]), bool(self.sum > 4), False, {'is_success': bool(self.sum > 5)}

  def render(self):
    return np.full((4, 6, 3), int(self.sum[0]), np.uint8)


gymnasium.register('LightPush-v0', Push, order_enforce=False)


def parse(text):
  if text == 'sleep':
    time.sleep(600)
  if text == 'crash':
    raise IndexError('no such thing')
  first, second = text.split(',')
  return np.array([float(first), float(second)], np.float32)


def describe(observation):
  return f'sum {observation[0]:.2f}'


def is_won(observation, reward, terminated, truncated, info):
  return reward > 4.5
