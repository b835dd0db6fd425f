"""The open parts of a server."""

from __future__ import annotations

import types

import jax.numpy as jnp
import pytest

from ragen_jax.serving.agent_server import AgentServer
from ragen_jax.serving.rollouts.lifecycle import Lifecycle
from ragen_jax.serving.rollouts.store import Store
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.serving.types import AttemptState
from ragen_jax.utils.errors import UserError
from tests.support.endpoint_store import Clock, new_rollout


def test_a_sweep_ends_every_attempt_that_is_late(tmp_path, monkeypatch):
  monkeypatch.setattr('ragen_jax.serving.rollouts.lifecycle._SWEEP', 2)
  clock = Clock()
  with Store(tmp_path / 'store') as store:
    lifecycle = Lifecycle(store, clock)
    for _ in range(5):
      lifecycle.create(new_rollout(timeout_s=10.0, heartbeat_s=0.0))
    attempts = [lifecycle.claim('w').attempt.attempt_id for _ in range(5)]
    server = AgentServer(None, lifecycle, None, 'http://127.0.0.1:1', 'key')
    server.sweep()
    assert len(store.ask(Tables.running)) == 5
    clock.now += 11
    server.sweep()
    assert {store.ask(Tables.attempt, a).state for a in attempts} == {AttemptState.TIMEOUT} and not store.ask(
      Tables.running
    )


def test_equal_weights_are_not_set_twice():
  calls = []
  engine = types.SimpleNamespace(set_weights=lambda params, **fields: calls.append((params, fields)))
  server = AgentServer(types.SimpleNamespace(policy=engine), None, None, 'http://127.0.0.1:1', 'key')
  first, other = ({'w': jnp.ones(2), 'b': jnp.zeros(1)} for _ in range(2))
  for params, version in ((first, 1), (dict(first), 1), (first, 2), (other, 2), (first | {'w': other['w']}, 2)):
    server.use_weights(params, version)
  assert [fields['version'] for _, fields in calls] == [1, 2, 2, 2]
  assert calls[0] == (first, {'version': 1, 'keep_cache': False})


def test_a_pause_holds_after_the_engines_and_keeps_the_exception_that_it_follows(caplog):
  did = []

  def hold():
    did.append('hold')
    raise UserError('the disk is full')

  engines = types.SimpleNamespace(pause=lambda drain: did.append('pause'))
  server = AgentServer(engines, types.SimpleNamespace(pause=hold), None, 'http://127.0.0.1:1', 'key')
  with pytest.raises(UserError, match='the disk is full'):
    server.pause(drain=False)
  assert did == ['pause', 'hold'] and not caplog.records
  with pytest.raises(ZeroDivisionError):
    try:
      1 / 0  # noqa: B018
    finally:
      server.pause(drain=False)
  assert did == ['pause', 'hold'] * 2 and 'the disk is full' in caplog.text


def test_a_pause_stops_the_time_of_attempts(tmp_path):
  clock, did = Clock(), []
  engines = types.SimpleNamespace(pause=lambda drain: did.append(drain), resume=lambda: did.append('resume'))
  with Store(tmp_path / 'store') as store:
    lifecycle = Lifecycle(store, clock)
    lifecycle.create(new_rollout(timeout_s=10.0, heartbeat_s=0.0))
    attempt_id = lifecycle.claim('w').attempt.attempt_id
    server = AgentServer(engines, lifecycle, None, 'http://127.0.0.1:1', 'key')
    for drain in (True, False):
      server.pause(drain=drain)
      clock.now += 100
      server.resume()
    server.sweep()
    assert lifecycle.heartbeat(attempt_id) == 10.0
    clock.now += 11
    server.sweep()
    assert store.ask(Tables.attempt, attempt_id).state == AttemptState.TIMEOUT
  assert did == [True, 'resume', False, 'resume']
