"""Responses: what is read, and what the openai package reads of answers and streams."""

from __future__ import annotations

import json

import pytest

from ragen_jax.serving import errors
from ragen_jax.serving.conversation.chat_format import QwenFormat
from ragen_jax.serving.conversation.messages import Message, Role
from ragen_jax.serving.errors import ApiError
from ragen_jax.serving.types import Finish
from ragen_jax.serving.wire import responses, sse
from ragen_jax.serving.wire.answers import ENDPOINTS
from ragen_jax.serving.wire.results import Choice
from ragen_jax.serving.wire.spec import Kind
from tests.support.chat_server import server
from tests.support.wire import QWEN3_TAGS, context, generated, limits, pieces, tokenizer

TOOL = {'type': 'function', 'name': 'look', 'parameters': {'type': 'object', 'properties': {}}, 'strict': True}
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
  return ENDPOINTS[Kind.RESPONSES].parse({'model': 'policy', 'input': 'hi'} | changes, limits())


def _stream(tok, fmt, spec):
  return responses.ResponseStream(context(tok, fmt, spec, 'resp'))


def _events(tok, fmt, spec, reply, seed):
  stream = _stream(tok, fmt, spec)
  events = stream.start([(1, 2, 3)])
  for piece in pieces(tok, reply, seed):
    events += stream.piece(0, piece)
  return events + stream.end([Choice(0, (1, 2, 3), reply, None, '')])


def _answer(tok, fmt, reply, seed=0):
  def answer(body):
    spec = ENDPOINTS[Kind.RESPONSES].parse(body, limits())
    if spec.stream:
      raw = sse.KEEP_ALIVE.join(_events(tok, fmt, spec, reply, seed))
      return 200, {'content-type': sse.CONTENT_TYPE}, raw
    made = responses.answer(context(tok, fmt, spec, 'resp'), [Choice(0, (1, 2, 3), reply, None, '')])
    return 200, {'content-type': 'application/json'}, sse.encode_json(made)

  return answer


def _client(url):
  openai = pytest.importorskip('openai', reason='answers are read with the openai package')
  return openai.OpenAI(base_url=url, api_key='key', max_retries=0, timeout=60)


def _data(events):
  """The JSON of events, whose names are their types."""
  data = []
  for raw in events:
    name, line, *_ = raw.decode().split('\n')
    data.append(json.loads(line.removeprefix('data: ')))
    assert name == f'event: {data[-1]["type"]}'
  return data


# -- requests ----------------------------------------------------------------------------------------------------------


def test_instructions_are_the_system_message():
  spec = _parse(instructions='Be brief.', previous_response_id='resp_7', tools=[TOOL], max_output_tokens=5)
  assert spec.messages == (Message(Role.SYSTEM, 'Be brief.'), Message(Role.USER, 'hi'))
  assert spec.previous_response_id == 'resp_7'
  assert (spec.tools[0].name, spec.parse_calls, spec.sampling.max_tokens) == ('look', True, 5)


@pytest.mark.parametrize(
  ('changes', 'param'),
  [
    ({'input': None}, 'input'),
    ({'input': []}, 'input'),
    ({'input': [{'role': 'user', 'content': 'a'}] * 51}, 'input'),
    ({'tools': [{'type': 'web_search'}]}, 'tools[0].type'),
    ({'text': {'format': {'type': 'grammar'}}}, 'text.format'),
    ({'conversation': 'conv_1'}, 'conversation'),
    ({'background': True}, 'background'),
    ({'previous_response_id': 3}, 'previous_response_id'),
  ],
)
def test_wrong_requests_are_refused(changes, param):
  with pytest.raises(ApiError) as e:
    _parse(**changes)
  assert (e.value.status, e.value.param) == (400, param)


# -- answers -----------------------------------------------------------------------------------------------------------

_TEXTS = ('hello', CALLS, '<think>hm', '', f'{CALLS}\nafter', '<tool_call>bad</tool_call>')


@pytest.mark.parametrize('text', _TEXTS)
@pytest.mark.parametrize('finish', [Finish.STOP, Finish.LENGTH])
@pytest.mark.parametrize('seed', range(3))
def test_a_stream_adds_up_to_the_answer(tok, fmt, text, finish, seed):
  reply = generated(tok, text, finish=finish)
  body = {'model': 'policy', 'input': 'hi', 'tools': [TOOL], 'return_token_ids': True}
  whole = json.loads(_answer(tok, fmt, reply)(body)[2])
  events = _data(_events(tok, fmt, ENDPOINTS[Kind.RESPONSES].parse(body | {'stream': True}, limits()), reply, seed))
  assert [e['sequence_number'] for e in events] == list(range(len(events)))
  assert [e['type'] for e in events[:2]] == ['response.created', 'response.in_progress']
  status = 'completed' if finish is Finish.STOP else 'incomplete'
  assert events[-1]['type'] == f'response.{status}'
  assert events[-1]['response'] == whole
  assert whole['status'] == status
  assert whole['incomplete_details'] == (None if finish is Finish.STOP else {'reason': 'max_output_tokens'})
  assert (whole['prompt_token_ids'], whole['token_ids']) == ([1, 2, 3], list(reply.ids))
  items, text_of = {}, {}
  for event in events[2:-1]:
    kind, at = event['type'].removeprefix('response.'), event.get('output_index')
    if kind == 'output_item.added':
      assert at == len(items)
      items[at], text_of[at] = event['item'], ''
    elif kind.endswith('.delta'):
      text_of[at] += event['delta']
      assert event['item_id'] == items[at]['id']
    elif kind in ('output_text.done', 'reasoning_text.done'):
      assert event['text'] == text_of[at]
    elif kind == 'function_call_arguments.done':
      assert event['arguments'] == text_of[at]
    elif kind == 'output_item.done':
      assert event['item'] == whole['output'][at]
      assert event['item']['id'] == items[at]['id']
  assert len(items) == len(whole['output']) == len({item['id'] for item in whole['output']})
  for at, item in enumerate(whole['output']):
    assert text_of[at] == (item['arguments'] if item['type'] == 'function_call' else item['content'][0]['text'])


def test_items_of_an_answer(tok, fmt):
  reply = generated(tok, CALLS)
  body = {'model': 'policy', 'input': 'hi', 'tools': [TOOL], 'metadata': {'a': 'b'}, 'temperature': 0.5}
  whole = json.loads(_answer(tok, fmt, reply)(body)[2])
  assert [item['type'] for item in whole['output']] == ['reasoning', 'message', 'function_call', 'function_call']
  call = whole['output'][2]
  assert (call['call_id'], call['name'], call['arguments']) == ('call_0', 'look', '{"x":1}')
  assert whole['usage'] == {
    'input_tokens': 3,
    'input_tokens_details': {'cached_tokens': 2, 'cache_write_tokens': 1},
    'output_tokens': len(reply.ids),
    'output_tokens_details': {'reasoning_tokens': 6},
    'total_tokens': 3 + len(reply.ids),
  }
  assert (whole['metadata'], whole['tool_choice'], whole['policy_version']) == ({'a': 'b'}, 'auto', 3)
  assert whole['temperature'] == 1.0  # as sampled, not as asked for
  assert 'token_ids' not in whole
  first = json.loads(_answer(tok, fmt, reply)(body | {'parallel_tool_calls': False})[2])
  assert [item['type'] for item in first['output']] == ['reasoning', 'message', 'function_call']


def test_aborted_replies_have_no_answer(tok, fmt):
  with pytest.raises(ValueError):
    _answer(tok, fmt, generated(tok, 'a', finish=Finish.ABORTED))({'model': 'policy', 'input': 'hi'})


def test_openai_reads_answers(tok, fmt):
  with server([_answer(tok, fmt, generated(tok, CALLS)), _answer(tok, fmt, generated(tok, 'hi'))]) as (url, asked):
    client = _client(url)
    made = client.responses.create(model='policy', input='hi', tools=[TOOL], instructions='Be brief.')
    # What a client sends back is read as one assistant turn.
    output = {'type': 'function_call_output', 'call_id': 'call_0', 'output': 'r'}
    client.responses.create(model='policy', input=[{'role': 'user', 'content': 'hi'}, *made.output, output])
  type(made).model_validate(made.model_dump())
  assert made.output_text == 'Look 🙂.'
  assert made.usage.output_tokens_details.reasoning_tokens == 6
  user, assistant, result = ENDPOINTS[Kind.RESPONSES].parse(asked[1][2], limits()).messages
  assert (user.text, assistant.text, result.call_id) == ('hi', 'Look 🙂.', 'call_0')
  assert [call.arguments for call in assistant.tool_calls] == ['{"x":1}', '{"x": 2}']


@pytest.mark.parametrize('text', _TEXTS)
def test_openai_reads_streams(tok, fmt, text):
  with server([_answer(tok, fmt, generated(tok, text))] * 2) as (url, _):
    client = _client(url)
    events = list(client.responses.create(model='policy', input='hi', tools=[TOOL], stream=True))
    with client.responses.stream(model='policy', input='hi', tools=[TOOL]) as stream:
      made = stream.get_final_response()
  for event in events:
    type(event).model_validate(event.model_dump())
  assert events[-1].type == 'response.completed'
  assert made.output_text == events[-1].response.output_text
  assert [item.type for item in made.output] == [item.type for item in events[-1].response.output]


def test_openai_raises_where_a_stream_breaks(tok, fmt):
  openai = pytest.importorskip('openai', reason='answers are read with the openai package')
  stream = _stream(tok, fmt, _parse(stream=True))
  raw = b''.join(stream.start([]) + stream.error(errors.internal('it broke', retry=False)))
  with server([(200, {'content-type': sse.CONTENT_TYPE}, raw)]) as (url, _):
    seen = []
    with pytest.raises(openai.APIError, match='it broke'):
      for event in _client(url).responses.create(model='policy', input='hi', stream=True):
        seen.append(event)
  assert seen[-1].type == 'response.failed' and seen[-1].response.status == 'failed'
  assert seen[-1].response.error.message == 'it broke'
