"""A runner that plays no task any more ends the wait for the tasks, and one that may still play does not."""

from __future__ import annotations

import dataclasses

import pytest

from ragen_jax.serving.play.pool import RunnerStall
from ragen_jax.serving.types import Progress
from ragen_jax.utils.errors import UserError

IDLE = Progress(
  running=0, succeeded=0, failed=0, timed_out=0, cancelled=0, abandoned=0, error='', oldest='', full=False, fault=''
)
FULL = dataclasses.replace(IDLE, abandoned=16, oldest='ragen_jax-agent-a.1', full=True)
RUNNER = "envs.Agent.runner='my_agent.py:play'"


class Watched:
  """A stall with a clock and a runner that the test moves."""

  def __init__(self, progress):
    self.now, self.progress, self.outside = 100.0, progress, []
    self.stall = RunnerStall(lambda: self.progress, lambda: self.outside, RUNNER, 30.0, lambda: self.now)

  def after(self, seconds, progress=None):
    self.now += seconds
    self.progress = progress or self.progress
    self.stall.check()


def test_places_that_are_held_for_a_time_limit_are_one_line_with_the_runner_and_a_remedy():
  watched = Watched(FULL)
  watched.after(0.0)
  watched.after(29.9)
  message = (
    r"^envs\.Agent\.runner='my_agent\.py:play': no task is played any more, threads of 16 stopped attempts "
    r'.* serve\.timeout=30 s \(the oldest: ragen_jax-agent-a\.1\); .* make it async, .*$'
  )
  with pytest.raises(UserError, match=message) as e:
    watched.after(0.1)
  assert '\n' not in str(e.value)


def test_the_time_begins_again_when_a_place_was_free_or_another_worker_played():
  watched = Watched(FULL)
  watched.after(0.0)
  watched.after(20.0, IDLE)
  watched.after(20.0, FULL)
  watched.after(20.0)
  watched.outside = ['an attempt']
  watched.after(20.0)
  watched.outside = []
  watched.after(20.0)
  watched.after(29.0)
  with pytest.raises(UserError):
    watched.after(1.0)


def test_a_runner_whose_thread_has_ended_is_told_at_once():
  watched = Watched(dataclasses.replace(IDLE, running=3, fault='the claim thread has ended: KeyError: 3'))
  with pytest.raises(UserError, match=r"play': .* the claim thread has ended: KeyError: 3$"):
    watched.after(0.0)


def test_an_idle_runner_and_outside_workers_have_no_limit():
  watched = Watched(IDLE)
  for _ in range(3):
    watched.after(1e6)
  RunnerStall(None, list, RUNNER, 30.0).check()
