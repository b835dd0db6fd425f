"""Sessions in memory: idle ones leave, and come back from the store."""

from __future__ import annotations

from ragen_jax.serving.http import open_sessions
from ragen_jax.serving.types import AttemptState
from tests.support.scripted import ASK, Asking, chat, said


def test_idle_sessions_leave_memory_and_come_back(server, monkeypatch):
  monkeypatch.setattr(open_sessions, '_MOST', 2)
  tasks = [server.attempt() for _ in range(4)]
  firsts = [chat(server.client(task)) for task in tasks]
  assert server.service.sessions == 2
  for task, first in zip(tasks, firsts, strict=True):
    chat(server.client(task), messages=[*ASK, *said(first, 'And 2 + 2?')])
    assert [(c.index, c.row) for c in server.calls(task)] == [(0, 0), (1, 0)]


def test_a_session_with_a_running_request_stays(server, engine, monkeypatch):
  monkeypatch.setattr(open_sessions, '_MOST', 1)
  engine.held = True
  task = server.attempt()
  asking = Asking(server.client(task))
  sampled = engine.next_call()
  engine.held = False
  for _ in range(3):
    chat(server.client(server.attempt()))
  assert server.service.sessions == 2
  sampled.end()
  assert asking.answer().id == server.calls(task)[0].call_id


def test_a_finished_attempt_is_forgotten(server):
  task = server.attempt()
  chat(server.client(task))
  assert server.service.sessions == 1
  server.service.forget(task.attempt_id)
  server.lifecycle.finish(task.attempt_id, AttemptState.SUCCEEDED, '')
  assert server.service.sessions == 0
