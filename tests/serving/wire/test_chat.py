"""Chat completions: what is read, and what the openai package reads of answers and streams."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ragen_jax.serving import errors
from ragen_jax.serving.conversation.chat_format import QwenFormat
from ragen_jax.serving.conversation.messages import Message, Role
from ragen_jax.serving.errors import ApiError
from ragen_jax.serving.types import Finish
from ragen_jax.serving.wire import chat, sse
from ragen_jax.serving.wire.answers import ENDPOINTS
from ragen_jax.serving.wire.results import Choice
from ragen_jax.serving.wire.spec import Kind
from tests.support.chat_server import server
from tests.support.wire import QWEN3_TAGS, TOOL, context, generated, limits, pieces, reader, tokenizer

USER = {'role': 'user', 'content': 'hi'}
CALLS = (
  '<think>\nhm\n</think>\n\nLook 🙂.\n<tool_call>\n{"name": "look", "arguments": {"x":1}}\n</tool_call>\n'
  '<tool_call>\n{"name": "look", "arguments": {"x": 2}}\n</tool_call>'
)


@pytest.fixture(scope='module')
def tok(tmp_path_factory):
  return tokenizer(tmp_path_factory.mktemp('tokenizer'), QWEN3_TAGS)


@pytest.fixture(scope='module')
def fmt(tok):
  return QwenFormat(tok, keep_thoughts=True)


def _parse(**changes):
  return ENDPOINTS[Kind.CHAT].parse({'model': 'policy', 'messages': [USER]} | changes, limits())


class Replies:
  """Answers requests with these replies, whole or streamed."""

  def __init__(self, tok, fmt, *replies, seed=0):
    self.tok, self.fmt, self.replies, self.seed = tok, fmt, replies, seed
    self.prompt = tok.encode('prompt')

  def choices(self, spec):
    for k, reply in enumerate(self.replies):
      one = reader(self.fmt, parse_calls=spec.parse_calls, parallel=spec.parallel_tool_calls)
      one.feed(reply.ids, reply.text)
      one.finish()
      yield Choice(k, self.prompt, reply, one.reply(), '')

  def answer(self, body):
    spec = ENDPOINTS[Kind.CHAT].parse(body, limits())
    choices = list(self.choices(spec))
    if not spec.stream:
      made = chat.answer(context(self.tok, self.fmt, spec, 'chatcmpl'), choices)
      return 200, {'content-type': 'application/json'}, sse.PADDING + sse.encode_json(made)
    return 200, {'content-type': sse.CONTENT_TYPE}, b''.join(self.events(spec, choices))

  def events(self, spec, choices):
    stream = chat.ChatStream(context(self.tok, self.fmt, spec, 'chatcmpl'))
    events = stream.start([self.prompt] * len(self.replies))
    left = [pieces(self.tok, reply, self.seed + k) for k, reply in enumerate(self.replies)]
    while any(left):  # the replies grow in turn
      for k, parts in enumerate(left):
        events += stream.piece(k, parts.pop(0)) if parts else []
        events.append(sse.KEEP_ALIVE)
    return events + stream.end(choices)


def _client(url):
  openai = pytest.importorskip('openai', reason='answers are read with the openai package')
  return openai.OpenAI(base_url=url, api_key='key', max_retries=0, timeout=60)


def _data(events):
  """The JSON of events, without the end."""
  raw = b''.join(events).replace(sse.KEEP_ALIVE, b'').decode()
  parts = [part.removeprefix('data: ') for part in raw.split('\n\n') if part]
  assert parts[-1] == '[DONE]'
  return [json.loads(part) for part in parts[:-1]]


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_last_message_can_begin_the_reply():
  messages = [USER, {'role': 'assistant', 'content': '<think>'}]
  spec = _parse(messages=messages, continue_final_message=True)
  assert spec.messages == (Message(Role.USER, 'hi'),)
  assert (spec.template.reply_prefix, spec.template.add_generation_prompt) == ('<think>', True)
  assert len(_parse(messages=messages).messages) == 2
  spec = _parse(messages=messages, continue_final_message=True, add_generation_prompt=False)
  assert (spec.template.reply_prefix, spec.template.add_generation_prompt) == ('<think>', True)


@pytest.mark.parametrize(
  'changes',
  [
    {'continue_final_message': True},
    {'continue_final_message': True, 'messages': [{'role': 'assistant', 'content': 'x', 'reasoning': 'y'}]},
    {
      'continue_final_message': True,
      'add_generation_prompt': True,
      'messages': [{'role': 'assistant', 'content': 'x'}],
    },
    {'top_logprobs': 2},
    {'messages': []},
  ],
)
def test_wrong_requests_are_refused(changes):
  with pytest.raises(ApiError) as e:
    _parse(**changes)
  assert e.value.status == 400
  assert e.value.param in changes


# -- answers -----------------------------------------------------------------------------------------------------------


def test_an_answer_has_only_what_was_asked_for(tok, fmt):
  replies = Replies(tok, fmt, generated(tok, 'ab'))
  plain = json.loads(replies.answer({'model': 'policy', 'messages': [USER]})[2])
  assert set(plain) == {
    'id', 'object', 'created', 'model', 'choices', 'usage', 'policy_version', 'policy_versions',
  }  # fmt: skip
  (choice,) = plain['choices']
  assert choice == {
    'index': 0,
    'message': {'role': 'assistant', 'content': 'ab', 'refusal': None},
    'logprobs': None,
    'finish_reason': 'stop',
    'stop_reason': None,
  }
  full = {'model': 'policy', 'messages': [USER], 'return_token_ids': True, 'logprobs': True, 'top_logprobs': 2}
  asked = json.loads(replies.answer(full)[2])
  assert asked['prompt_token_ids'] == list(replies.prompt)
  assert asked['choices'][0]['token_ids'] == list(replies.replies[0].ids)
  assert len(asked['choices'][0]['logprobs']['content']) == 3


def test_aborted_replies_have_no_answer(tok, fmt):
  aborted = generated(tok, 'ab', finish=Finish.ABORTED)
  with pytest.raises(ValueError):
    Replies(tok, fmt, aborted).answer({'model': 'policy', 'messages': [USER]})
  stream = chat.ChatStream(context(tok, fmt, _parse(), 'chatcmpl'))
  with pytest.raises(ValueError):
    stream.end([Choice(0, (), aborted, None, '')])


@pytest.mark.parametrize('seed', range(5))
def test_streams_say_what_whole_answers_say(tok, fmt, seed):
  """By adding their chunks up."""
  texts = ('hello', CALLS, '<tool_call>bad</tool_call>', '')
  all_replies = [generated(tok, text, finish=f) for text in texts for f in (Finish.STOP, Finish.LENGTH)]
  all_replies.append(generated(tok, 'hel', ids=tok.encode('hello'), stop_text='lo'))
  replies = Replies(tok, fmt, *all_replies, seed=seed)
  body = {'model': 'policy', 'messages': [USER], 'tools': [TOOL], 'logprobs': True, 'top_logprobs': 1}
  body |= {'return_token_ids': True, 'stream_options': {'include_usage': True}}
  spec = ENDPOINTS[Kind.CHAT].parse({**body, 'stream': True}, limits())
  whole = json.loads(replies.answer(body)[2])
  chunks = _data(replies.events(spec, list(replies.choices(spec))))
  assert len({(c['id'], c['object'], c['created'], c['model']) for c in chunks}) == 1
  assert chunks[-1]['choices'] == [] and chunks[-1]['usage'] == whole['usage']
  assert not any('usage' in c for c in chunks[:-1])
  assert [c.get('prompt_token_ids') for c in chunks[:2]] == [whole['prompt_token_ids'], None]
  for expected in whole['choices']:
    deltas = [c['choices'][0] for c in chunks[:-1] if c['choices'][0]['index'] == expected['index']]
    assert deltas[0]['delta'] == {'role': 'assistant', 'content': ''}
    assert deltas[-1]['delta'] == {} and deltas[-1]['finish_reason'] == expected['finish_reason']
    assert deltas[-1]['stop_reason'] == expected['stop_reason']
    assert not any(d['finish_reason'] for d in deltas[:-1])
    message = expected['message']
    assert ''.join(d['delta'].get('content', '') for d in deltas) == (message['content'] or '')
    assert ''.join(d['delta'].get('reasoning_content', '') for d in deltas) == message.get('reasoning_content', '')
    calls = [call for d in deltas for call in d['delta'].get('tool_calls', [])]
    assert [call.pop('index') for call in calls] == list(range(len(calls)))
    assert calls == message.get('tool_calls', [])
    assert [i for d in deltas for i in d.get('token_ids', [])] == expected['token_ids']
    logprobs = [entry for d in deltas for entry in (d['logprobs'] or {'content': []})['content']]
    assert logprobs == expected['logprobs']['content']


def test_tokens_are_told_once(tok, fmt):
  """Where they end a thought and several calls at a time, too."""
  spec = _parse(stream=True, tools=[TOOL], logprobs=True, return_token_ids=True)
  stream = chat.ChatStream(context(tok, fmt, spec, 'chatcmpl'))
  reply = generated(tok, CALLS)
  chunks = [c['choices'][0] for c in _data(stream.end([Choice(0, (), reply, None, '')]))]
  assert len(chunks) == 5  # thought, content, two calls, end
  assert [i for c in chunks for i in c.get('token_ids', [])] == list(reply.ids)
  assert sum(len(c['logprobs']['content']) for c in chunks if c['logprobs']) == len(reply.ids)


def test_openai_reads_answers(tok, fmt):
  replies = Replies(tok, fmt, generated(tok, CALLS), generated(tok, 'ok', finish=Finish.LENGTH))
  with server([replies.answer] * 2) as (url, asked):
    client = _client(url)
    made = client.chat.completions.create(
      model='policy', messages=[USER], tools=[TOOL], n=2, logprobs=True, top_logprobs=1,
      extra_body={'return_token_ids': True},
    )  # fmt: skip
    first = client.chat.completions.create(
      model='policy', messages=[USER], tools=[TOOL], n=2, parallel_tool_calls=False
    )
  assert len(asked) == 2
  type(made).model_validate(made.model_dump())
  called, cut = made.choices
  assert called.finish_reason == 'tool_calls' and cut.finish_reason == 'length'
  assert called.message.content == 'Look 🙂.' and called.message.reasoning_content == 'hm'
  assert [(c.id, c.function.name, c.function.arguments) for c in called.message.tool_calls] == [
    ('call_0', 'look', '{"x":1}'),
    ('call_1', 'look', '{"x": 2}'),
  ]
  assert called.token_ids == list(replies.replies[0].ids)
  assert [t.logprob for t in cut.logprobs.content] == [-0.125, -0.25]
  assert made.usage.completion_tokens == sum(len(reply.ids) for reply in replies.replies)
  assert made.usage.prompt_tokens_details.cached_tokens == 2
  assert made.usage.completion_tokens_details.reasoning_tokens == 6
  assert made.policy_version == 3
  assert [c.id for c in first.choices[0].message.tool_calls] == ['call_0']


def test_content_is_null_with_nothing_but_calls(tok, fmt):
  only = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
  body = {'model': 'policy', 'messages': [USER], 'tools': [TOOL]}
  message = json.loads(Replies(tok, fmt, generated(tok, only)).answer(body)[2])['choices'][0]['message']
  assert message['content'] is None
  message = json.loads(Replies(tok, fmt, generated(tok, '')).answer(body)[2])['choices'][0]['message']
  assert message['content'] == ''


@pytest.mark.parametrize('seed', range(3))
def test_openai_reads_streams(tok, fmt, seed):
  replies = Replies(tok, fmt, generated(tok, CALLS), generated(tok, 'ok'), seed=seed)
  with server([replies.answer] * 2) as (url, _):
    client = _client(url)
    options = {'model': 'policy', 'messages': [USER], 'tools': [TOOL], 'n': 2}
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={'include_usage': True}))
    with client.chat.completions.stream(**options) as stream:
      made = stream.get_final_completion()
  assert chunks[-1].usage.completion_tokens == sum(len(reply.ids) for reply in replies.replies)
  for chunk in chunks:
    type(chunk).model_validate(chunk.model_dump())
  called, other = made.choices
  assert called.message.content == 'Look 🙂.' and other.message.content == 'ok'
  assert [c.function.arguments for c in called.message.tool_calls] == ['{"x":1}', '{"x": 2}']
  assert (called.finish_reason, other.finish_reason) == ('tool_calls', 'stop')


def test_openai_raises_where_a_stream_breaks(tok, fmt):
  openai = pytest.importorskip('openai', reason='answers are read with the openai package')
  stream = chat.ChatStream(context(tok, fmt, _parse(), 'chatcmpl'))
  raw = b''.join(stream.start([()]) + stream.error(errors.internal('it broke', retry=False)))
  with server([(200, {'content-type': sse.CONTENT_TYPE}, raw)]) as (url, _):
    events = _client(url).chat.completions.create(model='policy', messages=[USER], stream=True)
    assert next(events).choices[0].delta.role == 'assistant'
    with pytest.raises(openai.APIError, match='it broke') as e:
      next(events)
  assert e.value.code == 'internal_error'


@pytest.mark.parametrize(
  ('error', 'name'),
  [
    (errors.bad_request('n', 'no'), 'BadRequestError'),
    (errors.unauthorized('no'), 'AuthenticationError'),
    (errors.not_found('no'), 'NotFoundError'),
    (errors.over('no'), 'APIStatusError'),
    (errors.internal('no', retry=False), 'InternalServerError'),
  ],
)
def test_openai_does_not_repeat_what_fails_for_good(error, name):
  openai = pytest.importorskip('openai', reason='answers are read with the openai package')
  with server([(error.status, error.headers(), json.dumps(error.body()))]) as (url, asked):
    client = _client(url).with_options(max_retries=2)
    with pytest.raises(getattr(openai, name), match='no') as e:
      client.chat.completions.create(model='policy', messages=[USER])
  assert len(asked) == 1
  assert e.value.param == error.param or not error.param


def test_openai_repeats_what_may_succeed_later():
  error = errors.internal('no', retry=True)
  # Clients wait at least for a part of a second unless they are told how long.
  answer = (error.status, error.headers() | {'retry-after-ms': '1'}, json.dumps(error.body()))
  with server([answer]) as (url, asked):
    made = _client(url).with_options(max_retries=1).chat.completions.create(model='policy', messages=[USER])
  assert len(asked) == 2 and made.choices[0].message.content == 'Up'


def test_versions_come_with_the_last_chunk_of_a_reply(tok, fmt):
  replies = Replies(tok, fmt, generated(tok, 'ab', versions=np.array([1, 2, 2], np.int32)))
  spec = _parse(stream=True)
  chunks = _data(replies.events(spec, list(replies.choices(spec))))
  assert chunks[-1]['policy_versions'] == {'min': 1, 'max': 2}
  assert chunks[-1]['choices'][0]['finish_reason'] == 'stop'
