"""What a request does to the attempt: retries, clients that go away, restarts, rows, and what is kept in memory."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import threading
import urllib.parse

import openai
import pytest
from openai import OpenAI

from ragen_jax.serving import service
from ragen_jax.serving.records import Conflict, Gone, Invalid, NotFound, Unauthorized
from ragen_jax.serving.types import AttemptState, Finish
from tests.support.scripted import ScriptedEngine, serve
from tests.support.serving import PATIENCE, until
from tests.support.wire import CALL_TAGS, TOOL, tokenizer

# The HTTP library of OpenAI's client, whose name depends on the client's version.
httpx = importlib.import_module(openai.DefaultHttpxClient.__base__.__module__.partition('.')[0])
ASK = [{'role': 'user', 'content': 'What is 1 + 1?'}]


@pytest.fixture(scope='module')
def tok(tmp_path_factory):
  return tokenizer(tmp_path_factory.mktemp('tokenizer'), CALL_TAGS)


@pytest.fixture
def engine(tok):
  return ScriptedEngine(tok, lambda prompt, number: f'answer {number}')


@pytest.fixture
def server(tmp_path, engine):
  with serve(tmp_path, engine) as opened:
    yield opened


def chat(client, **changes):
  return client.chat.completions.create(**dict(model='policy', messages=ASK) | changes)


def said(answer, then):
  return [{'role': 'assistant', 'content': answer.choices[0].message.content}, {'role': 'user', 'content': then}]


class Asking:
  """A request in a thread; `answer` waits for it."""

  def __init__(self, client, **changes):
    self._found = []
    self._thread = threading.Thread(target=self._ask, args=(client, changes), daemon=True)
    self._thread.start()

  def _ask(self, client, changes):
    try:
      self._found.append(chat(client, **changes))
    except openai.OpenAIError as e:
      self._found.append(e)

  def answer(self):
    self._thread.join(PATIENCE)
    return self._found[0]


# -- retries -----------------------------------------------------------------------------------------------------------


class GivesUp(httpx.HTTPTransport):
  """The time-out of a client's first try: not after some time but when the engine has the call."""

  def __init__(self, engine):
    super().__init__()
    self.engine, self.calls = engine, []

  def handle_request(self, request):
    if self.calls:
      return super().handle_request(request)
    url = request.url
    with contextlib.closing(http.client.HTTPConnection(url.host, url.port, timeout=PATIENCE)) as connection:
      connection.request('POST', url.path, request.read(), dict(request.headers))
      self.calls.append(self.engine.next_call())
    raise httpx.ReadTimeout('timed out', request=request)


def test_a_time_out_and_the_clients_retry_are_one_sample(server, engine):
  engine.held = True
  task, transport = server.attempt(), GivesUp(engine)
  asking = Asking(server.client(task, max_retries=1, http_client=httpx.Client(transport=transport)))
  until(lambda: server.service.counts['repeated'])  # the client gave up once, and asks again
  (sampled,) = transport.calls
  sampled.tell(3)
  sampled.end()
  answer = asking.answer()
  assert answer.choices[0].message.content == 'answer 0'
  assert len(engine.requests) == 1 and [c.call_id for c in server.calls(task)] == [answer.id]


def test_a_retry_of_a_reply_that_was_given_gets_it_again(server, tok):
  task = server.attempt()
  client = server.client(task)
  first = chat(client, n=2)
  marked = {'extra_headers': {'x-stainless-retry-count': '1'}}
  for stream in (False, True):
    again = chat(client, n=2, **marked) if not stream else None
    if stream:
      texts = ['', '']
      for chunk in chat(client, n=2, stream=True, **marked):
        for c in chunk.choices:
          texts[c.index] += c.delta.content or ''
      # Another body, so another sample.
      assert texts == ['answer 2', 'answer 3']
    else:
      assert again.id == first.id and again.choices == first.choices and again.usage == first.usage
  assert len(server.calls(task)) == 4


def test_a_streamed_reply_is_repeated_as_a_stream(server):
  task = server.attempt()
  client = server.client(task)
  first = list(chat(client, stream=True))
  again = list(chat(client, stream=True, extra_headers={'x-stainless-retry-count': '2'}))
  assert [c.choices[0].delta.content for c in first if c.choices[0].delta.content]
  assert ''.join(c.choices[0].delta.content or '' for c in again) == 'answer 0' and again[0].id == first[0].id
  assert len(server.calls(task)) == 1


def test_two_equal_requests_are_two_samples(server):
  task = server.attempt()
  client = server.client(task)
  answers = [chat(client), chat(client)]
  assert [a.choices[0].message.content for a in answers] == ['answer 0', 'answer 1']
  stored = server.calls(task)
  assert [(c.row, c.new_row_cause) for c in stored] == [(0, ''), (1, 'repeated')]
  assert server.engine.requests[0].key != server.engine.requests[1].key


def test_two_equal_requests_at_a_time_and_a_retry_of_one(server, engine):
  engine.held = True
  task = server.attempt()
  client = server.client(task)
  one, other = Asking(client), Asking(client)
  calls = [engine.next_call(), engine.next_call()]
  retry = Asking(client, extra_headers={'x-stainless-retry-count': '1'})
  until(lambda: server.service.counts['repeated'])
  for sampled in calls:
    sampled.end()
  ids = {one.answer().id, other.answer().id}
  assert len(ids) == 2 and retry.answer().id in ids and len(server.calls(task)) == 2


def test_an_idempotency_key_of_a_client_without_a_mark(server):
  task = server.attempt()
  client = server.client(task)
  answers = [chat(client, extra_headers={'Idempotency-Key': k}) for k in ('a', 'a', 'b')]
  assert answers[0].id == answers[1].id != answers[2].id
  assert len(server.calls(task)) == 2


def test_a_key_that_comes_twice_at_a_time_is_one_sample(server, engine, monkeypatch):
  together, find = threading.Barrier(2), server.store.calls_of_request

  def find_both(*arguments):
    together.wait(PATIENCE)  # neither has begun when the store is asked for the other's answer
    return find(*arguments)

  monkeypatch.setattr(server.store, 'calls_of_request', find_both)
  engine.held = True
  task = server.attempt()
  asking = [Asking(server.client(task), extra_headers={'Idempotency-Key': 'a'}) for _ in range(2)]
  sampled = engine.next_call()
  until(lambda: server.service.counts['repeated'])
  sampled.end()
  assert asking[0].answer().id == asking[1].answer().id and len(server.calls(task)) == len(engine.requests) == 1


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
  monkeypatch.setattr('ragen_jax.serving.pending._FIRST_FOLLOWER_S', PATIENCE)
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


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_after_a_restart_the_next_call_extends_the_row(tmp_path, engine, tok):
  texts = ['<tool_call>\n{"name":"look","arguments":{ }}\n</tool_call>', 'done', 'more']
  engine.script = lambda prompt, number: texts[number]
  with serve(tmp_path, engine) as server:
    task = server.attempt()
    first = chat(server.client(task), tools=[TOOL])
  with serve(tmp_path, engine) as server:
    asked = first.choices[0].message
    result = {'role': 'tool', 'tool_call_id': asked.tool_calls[0].id, 'content': 'ice'}
    messages = [*ASK, asked.model_dump(exclude_none=True), result]
    client = OpenAI(base_url=f'{server.url}/v1', api_key=task.api_key, max_retries=0)
    second = chat(client, messages=messages, tools=[TOOL])
    # A retry of what was answered before the restart.
    again = chat(client, tools=[TOOL], extra_headers={'x-stainless-retry-count': '1'})
    assert again.id == first.id and again.choices[0].message.tool_calls == asked.tool_calls
    stored = server.calls(task)
    assert [(c.row, c.new_row_cause, c.index) for c in stored] == [(0, '', 0), (0, '', 1)]
    assert second.choices[0].message.content == 'done' and texts[0] in tok.decode(server.rows(task)[0])


def test_responses_go_on_after_a_restart(tmp_path, engine):
  with serve(tmp_path, engine) as server:
    task = server.attempt()
    first = server.client(task).responses.create(model='policy', input='One?', tools=[_flat()])
  with serve(tmp_path, engine) as server:
    client = OpenAI(base_url=f'{server.url}/v1', api_key=task.api_key, max_retries=0)
    client.responses.create(model='policy', input='Two?', tools=[_flat()], previous_response_id=first.id)
    assert [c.row for c in server.calls(task)] == [0, 0]


def _flat():
  return {'type': 'function', **TOOL['function'], 'strict': False}


# -- rows --------------------------------------------------------------------------------------------------------------


def test_every_sampled_token_is_in_one_row_as_a_sample(server, tok):
  task = server.attempt()
  client = server.client(task)
  first = chat(client)
  longer = [*ASK, *said(first, 'And 2 + 2?')]
  second = chat(client, messages=longer)
  other = chat(client, messages=[*ASK, *said(first, 'And 3 + 3?')])  # a fork
  edited = chat(client, messages=[{'role': 'user', 'content': 'What is 0 + 1?'}, *longer[1:]])
  sub = chat(client, model='policy:sub', messages=[{'role': 'user', 'content': 'Help.'}])
  causes = [(c.row, c.new_row_cause) for c in server.calls(task)]
  assert causes == [(0, ''), (0, ''), (1, 'fork'), (2, 'edited_history'), (3, 'sub_agent')]
  sampled = sum(len(c.generated.ids) for c in server.calls(task))
  assert sampled == sum(a.usage.completion_tokens for a in (first, second, other, edited, sub))
  metrics = server.service.counts
  assert metrics['row'] == 2 and metrics['new_row:fork'] == metrics['new_row:edited_history'] == 1
  # The prompts that the engine got are the rows up to their replies.
  rows = server.rows(task)
  for asked, call in zip(server.engine.requests, server.calls(task), strict=True):
    assert rows[call.row][: len(asked.prompt)] == asked.prompt


def test_agents_that_are_not_trained_are_stored_as_such(tmp_path, engine):
  with serve(tmp_path, engine, trained='a.*|') as server:
    task = server.attempt()
    for model in ('policy', 'policy:abc', 'policy:b'):
      chat(server.client(task), model=model)
    assert [c.trained for c in server.calls(task)] == [True, True, False]


def test_evaluations_are_sampled_with_their_own_settings(server):
  task = server.attempt(mode='val')
  chat(server.client(task), temperature=1.5)
  assert server.engine.requests[0].params.temperature == 0.5


def test_a_request_of_which_one_reply_is_refused_leaves_nothing(server, engine):
  task, submit, count = server.attempt(), engine.submit, []

  def second_fails(*arguments):
    count.append(1)
    if len(count) == 2:
      raise ValueError('prompt: has the id 5000')
    return submit(*arguments)

  engine.held, engine.submit = True, second_fails
  with pytest.raises(openai.BadRequestError, match='5000'):
    chat(server.client(task), n=2)
  assert engine.next_call().cancelled.is_set() and server.calls(task) == []
  engine.held, engine.submit = False, submit
  chat(server.client(task))
  assert [c.row for c in server.calls(task)] == [0]


# -- memory ------------------------------------------------------------------------------------------------------------


def test_idle_sessions_leave_memory_and_come_back(server, monkeypatch):
  monkeypatch.setattr(service, '_MOST_SESSIONS', 2)
  tasks = [server.attempt() for _ in range(4)]
  firsts = [chat(server.client(task)) for task in tasks]
  assert server.service.sessions == 2
  for task, first in zip(tasks, firsts, strict=True):
    chat(server.client(task), messages=[*ASK, *said(first, 'And 2 + 2?')])
    assert [(c.index, c.row) for c in server.calls(task)] == [(0, 0), (1, 0)]


def test_a_session_with_a_running_request_stays(server, engine, monkeypatch):
  monkeypatch.setattr(service, '_MOST_SESSIONS', 1)
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


def test_a_call_that_cannot_be_stored_is_not_answered_and_the_session_is_read_again(server, monkeypatch):
  task = server.attempt()
  first = chat(server.client(task))
  add = server.store.add_calls
  monkeypatch.setattr(server.store, 'add_calls', lambda *a: 1 / 0)
  with pytest.raises(openai.InternalServerError):
    chat(server.client(task), messages=[*ASK, *said(first, 'lost')])
  monkeypatch.setattr(server.store, 'add_calls', add)
  chat(server.client(task), messages=[*ASK, *said(first, 'kept')])
  assert [(c.index, c.row, c.new_row_cause) for c in server.calls(task)] == [(0, 0, ''), (1, 0, '')]


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('error', 'status', 'code'),
  [
    (Invalid('a'), 400, 'invalid_value'), (Unauthorized('a'), 401, 'invalid_api_key'),
    (NotFound('a'), 404, 'not_found'), (Conflict('a'), 409, 'conflict'), (Gone('a'), 410, 'rollout_over'),
  ],
)  # fmt: skip
def test_errors_of_the_store(error, status, code):
  told = service.api_error(error)
  assert (told.status, told.code, told.message, told.retry) == (status, code, 'a', False)


def test_a_digest_tells_requests_apart():
  digests = {
    service.request_digest('chat', b'a', ''), service.request_digest('chat', b'b', ''),
    service.request_digest('completions', b'a', ''), service.request_digest('chat', b'a', 'k'),
  }  # fmt: skip
  assert len(digests) == 4 and service.request_digest('chat', b'b', 'k') in digests


def test_a_finished_attempt_is_forgotten(server):
  task = server.attempt()
  chat(server.client(task))
  assert server.service.sessions == 1
  server.service.forget(task.attempt_id)
  server.lifecycle.finish(task.attempt_id, AttemptState.SUCCEEDED, '')
  assert server.service.sessions == 0
