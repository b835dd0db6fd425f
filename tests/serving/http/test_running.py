"""Requests that are being answered: clients that go away, and the end of the server."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import urllib.parse

import openai
import pytest

from ragen_jax.serving.types import Finish
from tests.support.scripted import ASK, Asking, chat, serve
from tests.support.serving import PATIENCE, until

# -- clients that go away ----------------------------------------------------------------------------------------------


def go_away(task, engine, *, stream):
  """Sends a request, and closes the connection when the engine has it."""
  url = urllib.parse.urlsplit(task.base_url)
  connection = http.client.HTTPConnection(url.hostname, url.port, timeout=PATIENCE)
  body = json.dumps({'model': 'policy', 'messages': ASK, 'stream': stream})
  connection.request('POST', f'{url.path}/chat/completions', body, {'Authorization': f'Bearer {task.api_key}'})
  sampled = engine.next_call()
  sampled.tell(2)
  if stream:
    connection.getresponse().read1(10)
  connection.sock.close() if connection.sock else None
  connection.close()
  return sampled


def come_back(task):
  """Repeats the request of `go_away`: status, headers and body of the answer."""
  url = urllib.parse.urlsplit(task.base_url)
  connection = http.client.HTTPConnection(url.hostname, url.port, timeout=PATIENCE)
  body = json.dumps({'model': 'policy', 'messages': ASK, 'stream': False})
  headers = {'Authorization': f'Bearer {task.api_key}', 'x-stainless-retry-count': '1'}
  with contextlib.closing(connection):
    connection.request('POST', f'{url.path}/chat/completions', body, headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, json.loads(answer.read())


@pytest.mark.parametrize('stream', [False, True])
def test_a_client_that_goes_away_frees_the_slot_and_trains_nothing(tmp_path, engine, stream):
  engine.held = True
  with serve(tmp_path, engine, grace_s=0.0) as server:
    task = server.attempt()
    sampled = go_away(task, engine, stream=stream)
    assert sampled.cancelled.wait(PATIENCE)
    until(lambda: server.calls(task))
    (stored,) = server.calls(task)
    assert stored.generated.finish == Finish.ABORTED and len(stored.generated.ids) == 2
    # The next call takes the row, and draws with another key.
    engine.held = False
    chat(server.client(task))
    assert server.calls(task)[1].row == 0 and server.calls(task)[1].new_row_cause == ''
    assert engine.requests[1].key != engine.requests[0].key
    assert server.service.counts['aborted'] == 1


def test_a_client_that_comes_back_too_late_asks_again(tmp_path, engine, monkeypatch):
  engine.held = True
  with serve(tmp_path, engine, grace_s=0.0) as server:
    task, go_on, store = server.attempt(), threading.Event(), server.store.add_calls
    monkeypatch.setattr(server.store, 'add_calls', lambda *a: (go_on.wait(PATIENCE), store(*a)))
    assert go_away(task, engine, stream=False).cancelled.wait(PATIENCE)
    engine.held = False
    found = []
    late = threading.Thread(target=lambda: found.append(come_back(task)), daemon=True)
    late.start()
    until(lambda: server.service.counts['repeated'])  # it follows the request that is being aborted
    go_on.set()
    late.join(PATIENCE)
    status, headers, _ = found[0]
    assert status == 500 and headers['x-should-retry'] == 'true'
    status, _, answer = come_back(task)
    aborted, sampled = server.calls(task)
    assert status == 200 and answer['id'] == sampled.call_id != aborted.call_id
    assert (aborted.generated.finish, sampled.generated.finish) == (Finish.ABORTED, Finish.STOP)


@pytest.mark.parametrize('stream', [False, True])
def test_without_grace_a_client_that_stays_is_answered(tmp_path, engine, monkeypatch, stream):
  monkeypatch.setattr('ragen_jax.serving.http.running._FIRST_FOLLOWER_S', PATIENCE)
  engine.held = True
  with serve(tmp_path, engine, grace_s=0.0) as server:
    asking = Asking(server.client(server.attempt()), stream=stream)
    sampled = engine.next_call()
    assert not sampled.cancelled.wait(0.3), 'it waits for as long as its client does'
    sampled.end()
    answer = asking.answer()
    texts = [c.choices[0].delta.content for c in answer] if stream else [answer.choices[0].message.content]
    assert ''.join(t or '' for t in texts) == 'answer 0'


def test_a_client_that_comes_back_within_the_grace_gets_the_reply(server, engine):
  engine.held = True
  task = server.attempt()
  sampled = go_away(task, engine, stream=False)
  sampled.end()
  assert not sampled.cancelled.is_set()
  _, _, answer = come_back(task)
  (stored,) = server.calls(task)
  assert stored.call_id == answer['id'] and stored.generated.finish == Finish.STOP and len(engine.requests) == 1


# -- the end of the server ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize('stream', [False, True])
def test_a_server_that_stops_tells_its_clients_to_try_again(tmp_path, engine, stream, caplog):
  engine.held = True
  with serve(tmp_path, engine) as server:
    task = server.attempt()
    asking = Asking(server.client(task), stream=stream)
    sampled = engine.next_call()
    if stream:
      sampled.tell(2)
      stream = asking.answer()
  assert sampled.cancelled.wait(PATIENCE)
  if stream:
    with pytest.raises(openai.APIError, match='the server stops'):
      list(stream)
  else:
    error = asking.answer()
    assert isinstance(error, openai.InternalServerError) and error.status_code == 503
    assert error.response.headers['x-should-retry'] == 'true'
  assert not caplog.records
  with serve(tmp_path, engine) as server:
    assert server.calls(task) == []
