"""What a request does to the attempt: retries, restarts, rows, and what is stored."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import threading

import openai
import pytest
from openai import OpenAI

from ragen_jax.serving.http import service
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.utils.errors import UserError
from tests.support.scripted import ASK, Asking, ScriptedEngine, chat, said, serve
from tests.support.serving import PATIENCE, until
from tests.support.wire import TOOL

# The HTTP library of OpenAI's client, whose name depends on the client's version.
httpx = importlib.import_module(openai.DefaultHttpxClient.__base__.__module__.partition('.')[0])


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
  # A key that comes with another request belongs to a new one, such as a header that a client always sends.
  other = chat(client, messages=[{'role': 'user', 'content': 'other'}], extra_headers={'Idempotency-Key': 'a'})
  assert other.id not in {a.id for a in answers} and len(server.calls(task)) == 3


def test_a_key_that_comes_twice_at_a_time_is_one_sample(server, engine, monkeypatch):
  together, ask = threading.Barrier(2), server.store.ask

  def ask_both(read, *arguments):
    if read is Tables.calls_of_request:
      together.wait(PATIENCE)  # neither has begun when the store is asked for the other's answer
    return ask(read, *arguments)

  monkeypatch.setattr(server.store, 'ask', ask_both)
  engine.held = True
  task = server.attempt()
  asking = [Asking(server.client(task), extra_headers={'Idempotency-Key': 'a'}) for _ in range(2)]
  sampled = engine.next_call()
  until(lambda: server.service.counts['repeated'])
  sampled.end()
  assert asking[0].answer().id == asking[1].answer().id and len(server.calls(task)) == len(engine.requests) == 1


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


def test_a_full_disk_costs_tries_and_no_call(server, engine, monkeypatch):
  """Of two calls at a time the first cannot be stored: neither is answered, and both are repeated."""
  task, add, failed = server.attempt(), server.store.add_calls, []

  def fail_once(*arguments):
    if not failed:
      failed.append(1)
      raise UserError('store x cannot be used: database or disk is full')
    return add(*arguments)

  monkeypatch.setattr(server.store, 'add_calls', fail_once)
  engine.held = True
  asked = [Asking(server.client(task, max_retries=1), messages=[{'role': 'user', 'content': text}]) for text in 'ab']
  first, second = engine.next_call(), engine.next_call()
  engine.held = False
  first.end()
  until(lambda: failed)
  second.end()
  answers = [a.answer() for a in asked]
  calls = server.calls(task)
  assert [c.index for c in calls] == [0, 1] and sorted(c.call_id for c in calls) == sorted(a.id for a in answers)
  assert len(engine.requests) == 4 and len({c.row for c in calls}) == 2
  chat(server.client(task))
  assert [c.index for c in server.calls(task)] == [0, 1, 2]


# Requests with one key, and the same with another key.
OTHERS = (('chat', b'b', 'k'), ('completions', b'a', 'k'), ('chat', b'a', 'l'))


def test_a_digest_tells_requests_apart():
  digests = {
    service.request_digest('chat', b'a', ''), service.request_digest('chat', b'b', ''),
    service.request_digest('completions', b'a', ''), service.request_digest('chat', b'a', 'k'),
  }  # fmt: skip
  digests |= {service.request_digest(kind, body, key) for kind, body, key in OTHERS}
  assert len(digests) == 4 + len(OTHERS)


# -- agents with frozen weights ----------------------------------------------------------------------------------------


@pytest.fixture
def frozen(tok):
  return ScriptedEngine(tok, lambda prompt, number: f'frozen {number}')


def test_agents_are_routed_to_their_weights(tmp_path, engine, frozen):
  frozen.version = 0
  with serve(tmp_path, engine, trained='a', frozen={'base': frozen}, agents=(('b.*', 'base'),)) as server:
    task = server.attempt()
    answers = [chat(server.client(task), model=f'policy:{agent}') for agent in ('a', 'bob', 'a', 'c')]
    assert [a.choices[0].message.content for a in answers] == ['answer 0', 'frozen 0', 'answer 1', 'answer 2']
    assert [a.policy_version for a in answers] == [3, 0, 3, 3]
    assert [c.trained for c in server.calls(task)] == [True, False, True, False]
    # Calls outside of attempts, too.
    assert chat(server.client(), model='policy:bob').choices[0].message.content == 'frozen 1'
    assert chat(server.client()).choices[0].message.content == 'answer 3'


def test_an_agent_that_is_frozen_and_trained_is_refused(tmp_path, engine, frozen):
  with serve(tmp_path, engine, trained='b+', frozen={'base': frozen}, agents=(('b.*', 'base'),)) as server:
    task = server.attempt()
    with pytest.raises(openai.BadRequestError, match=r"the agent 'bb' matches serve\.trained and serve\.frozen"):
      chat(server.client(task), model='policy:bb')
    assert chat(server.client(task), model='policy:bob').choices[0].message.content == 'frozen 0'
    assert not engine.requests and len(server.calls(task)) == 1


def test_a_conversation_of_two_agents_is_one_row(tmp_path, engine, frozen):
  with serve(tmp_path, engine, trained='a', frozen={'base': frozen}, agents=(('b', 'base'),)) as server:
    task = server.attempt()
    first = chat(server.client(task), model='policy:a')
    chat(server.client(task), model='policy:b', messages=[*ASK, *said(first, 'And you?')])
    calls = server.calls(task)
    assert [(c.agent, c.row, c.new_row_cause, c.trained) for c in calls] == [('a', 0, '', True), ('b', 0, '', False)]
    assert frozen.requests[0].prompt[: len(engine.requests[0].prompt)] == engine.requests[0].prompt
