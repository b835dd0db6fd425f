"""Environments outside JAX are played at the same time, unless one of them needs the main thread."""

from __future__ import annotations

import threading

import pytest

from configs import default
from ragen_jax import build
from ragen_jax import envs as registry
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.envs.base import Budget
from ragen_jax.envs.spec import EnvSpec

# Two steps, or two resets, that are on the way at once; alone, each would break it.
MEETING = threading.Barrier(2)


class Meets:
  """Waits for another one in each call."""

  rules = 'x'

  def __init__(self, name: str = '', wait: bool = True, breaks: bool = False):
    self.name, self.wait, self.breaks = name, wait, breaks

  def meet(self):
    self.main = threading.current_thread() is threading.main_thread()
    if self.wait:
      MEETING.wait(30.0)

  def reset(self, seed):
    self.meet()
    return f'{self.name} {seed} {self.main}'

  def step(self, action):
    self.meet()
    if self.breaks:
      raise OSError('broken')
    return f'{self.name} {action} {self.main}', float(len(action)), False, False


def _spec(tag, workers=1, **options) -> EnvSpec:
  options = {'name': tag} | options
  env = registry.make('python', {'class_path': f'{__name__}:Meets', 'options': options, 'workers': workers})
  return EnvSpec(tag, env, Budget(3, 9, 1), 30, 1)


def test_two_environments_are_in_their_calls_at_once_and_results_have_their_order():
  (lake,) = build.env_specs(default.get_config(), ('FrozenLake',), (1,))
  envs = EnvStateManager([_spec('A'), lake, _spec('B'), _spec('C', wait=False)], 1)
  texts = envs.reset(5)
  assert [texts[i] for i in (0, 2, 3)] == ['A 5 False', 'B 7 False', 'C 8 False']
  result = envs.step([['x'], [0], ['yy'], ['zzz']])
  assert not envs.faults and [result.reward[i] for i in (0, 2, 3)] == [1.0, 2.0, 3.0]
  assert [envs.render()[i] for i in (0, 2, 3)] == ['A x False', 'B yy False', 'C zzz False']


def test_a_fault_of_one_leaves_the_other_alone():
  envs = EnvStateManager([_spec('A', breaks=True), _spec('B')], 1)
  envs.reset(0)
  result = envs.step([['x'], ['y']])
  assert list(envs.faults) == [0] and result.reward.tolist() == [0.0, 1.0] and result.done.tolist() == [True, False]


@pytest.mark.parametrize('workers', [(0, 0), (0, 1), (1, 0)])
def test_what_needs_the_main_thread_is_played_there(workers):
  specs = [_spec(tag, workers=n, wait=False) for tag, n in zip('AB', workers, strict=True)]
  envs = EnvStateManager(specs, 1)
  assert envs.reset(3) == [f'{tag} {3 + i} {workers[i] == 0}' for i, tag in enumerate('AB')]


def test_who_may_play_in_any_thread():
  assert not _spec('A', workers=0).env.any_thread and _spec('A').env.any_thread
  assert registry.make('http', {'url': 'http://127.0.0.1:9', 'task': 'x'}).any_thread
  assert not registry.make('frozen_lake', {}).any_thread
