"""Messages: from both forms of requests, and their canonical texts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ragen_jax.agent.segments import ImageSegment, join
from ragen_jax.serving.conversation.messages import (
  Message,
  Role,
  canonical,
  from_canonical,
  from_chat,
  from_responses,
  tools_from_chat,
  tools_from_responses,
)
from ragen_jax.serving.errors import ApiError
from ragen_jax.utils.tool_calls import ToolCall, dump_json, parse_json

CALL = {'id': 'c1', 'type': 'function', 'function': {'name': 'f', 'arguments': '{"a":1,"b":"\\u00fc"}'}}


def test_chat_messages_of_every_role():
  read = from_chat([
    {'role': 'developer', 'content': 'rules'},
    {'role': 'system', 'content': [{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}]},
    {'role': 'user', 'content': 'hi', 'name': 'ann'},
    {'role': 'assistant', 'content': None, 'tool_calls': [CALL], 'refusal': None, 'annotations': []},
    {'role': 'tool', 'content': 'done', 'tool_call_id': 'c1'},
    {'role': 'assistant', 'content': [{'type': 'refusal', 'refusal': 'no'}], 'reasoning_content': 'hm'},
  ])  # fmt: skip
  assert read == (
    Message(Role.SYSTEM, 'rules'),
    Message(Role.SYSTEM, 'ab'),
    Message(Role.USER, 'hi'),
    Message(Role.ASSISTANT, '', (ToolCall('c1', 'f', '{"a":1,"b":"\\u00fc"}'),)),
    Message(Role.TOOL, 'done', call_id='c1'),
    Message(Role.ASSISTANT, '', reasoning='hm'),
  )


@pytest.mark.parametrize(
  ('message', 'param'),
  [
    ('hi', 'messages[0]'),
    ({'content': 'a'}, 'messages[0].role'),
    ({'role': 'function', 'content': 'a'}, 'messages[0].role'),
    ({'role': 'user', 'content': 3}, 'messages[0].content'),
    ({'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'x'}}]}, 'messages[0].content[0]'),
    ({'role': 'user', 'content': [{'type': 'text', 'text': 1}]}, 'messages[0].content[0].text'),
    ({'role': 'assistant', 'content': '', 'tool_calls': {}}, 'messages[0].tool_calls'),
    ({'role': 'assistant', 'tool_calls': [{**CALL, 'type': 'custom'}]}, 'messages[0].tool_calls[0].type'),
    ({'role': 'assistant', 'tool_calls': [{'function': {'name': ''}}]}, 'messages[0].tool_calls[0].function.name'),
    ({'role': 'assistant', 'function_call': {}}, 'messages[0].function_call'),
  ],
)
def test_wrong_messages_name_their_place(message, param):
  with pytest.raises(ApiError) as e:
    from_chat([message])
  assert (e.value.status, e.value.param) == (400, param)
  assert '\n' not in e.value.message


def test_there_must_be_a_message():
  for read, nothing in ((from_chat, []), (from_responses, []), (from_responses, None)):
    with pytest.raises(ApiError):
      read(nothing)
  with pytest.raises(ApiError, match='at least one message'):
    from_responses([{'type': 'reasoning', 'summary': []}])


def test_response_items_become_turns():
  call = {'type': 'function_call', 'name': 'f', 'arguments': '{}'}
  read = from_responses([
    {'role': 'user', 'content': [{'type': 'input_text', 'text': 'hi'}]},
    {'type': 'reasoning', 'id': 'rs', 'summary': []},
    {'type': 'message', 'role': 'assistant', 'content': [{'type': 'output_text', 'text': 'so', 'annotations': []}]},
    {**call, 'call_id': 'a'},
    {**call, 'call_id': 'b'},
    {'type': 'function_call_output', 'call_id': 'a', 'output': '1'},
    {'type': 'function_call_output', 'call_id': 'b', 'output': [{'type': 'input_text', 'text': '2'}]},
    {**call, 'call_id': 'c'},
    {'role': 'developer', 'content': 'x'},
  ])  # fmt: skip
  assert read == (
    Message(Role.USER, 'hi'),
    Message(Role.ASSISTANT, 'so', (ToolCall('a', 'f', '{}'), ToolCall('b', 'f', '{}'))),
    Message(Role.TOOL, '1', call_id='a'),
    Message(Role.TOOL, '2', call_id='b'),
    Message(Role.ASSISTANT, '', (ToolCall('c', 'f', '{}'),)),
    Message(Role.SYSTEM, 'x'),
  )
  assert from_responses('hi') == (Message(Role.USER, 'hi'),)


@pytest.mark.parametrize('item', [{'type': 'item_reference', 'id': 'x'}, {'type': 'message'}, 7])
def test_wrong_response_items_are_refused(item):
  with pytest.raises(ApiError) as e:
    from_responses([item])
  assert e.value.param.startswith('input[0]')


def test_tools_keep_the_order_of_keys_and_lose_strict():
  function = {'parameters': {'z': 1, 'a': 'ü<'}, 'name': 'f', 'strict': True, 'description': 'd'}
  (tool,) = tools_from_chat([{'type': 'function', 'function': function}])
  assert tool.name == 'f'
  shown = '{"parameters": {"z": 1, "a": "ü<"}, "name": "f", "description": "d"}'
  assert tool.schema == f'{{"type": "function", "function": {shown}}}'
  (flat,) = tools_from_responses([{'type': 'function', **function}])
  assert json.loads(flat.schema) == json.loads(tool.schema)
  for read in (tools_from_chat, tools_from_responses):
    for wrong in ({'type': 'web_search'}, {'type': 'function', 'function': {}}, None):
      with pytest.raises(ApiError, match=r'tools\[0\]'):
        read([wrong])


def _assistant(text, arguments, **fields):
  return Message(Role.ASSISTANT, text, (ToolCall('id', 'f', arguments),), **fields)


def test_canonical_texts_ignore_what_clients_change():
  message = _assistant('a', '{"a":1,"b":"\\u00fc"}', reasoning='thought')
  assert canonical(message) == canonical(_assistant('a', json.dumps({'b': 'ü', 'a': 1}, ensure_ascii=False)))
  assert canonical(_assistant('a', '')) == canonical(_assistant('a', '{}'))
  assert canonical(Message(Role.TOOL, 'x', call_id='1')) == canonical(Message(Role.TOOL, 'x', call_id='2'))
  different = [
    _assistant('b', '{"a":1,"b":"ü"}'),
    _assistant('a', '{"a":1,"b":"u"}'),
    _assistant('a', '{"a":1,"b":"ü"'),
    _assistant('a', '{"a": 1.5,"b":"ü"}'),
    Message(Role.ASSISTANT, 'a'),
    Message(Role.USER, 'a'),
  ]
  assert len({canonical(m) for m in (message, *different)}) == 7


@pytest.mark.parametrize('text', ['NaN', '{"a": Infinity}', '[' * 100_000, '1' * 5000, '', '{"a": 1} x'])
def test_text_that_is_no_json_is_an_error(text):
  with pytest.raises(ValueError):
    parse_json(text)
  assert canonical(_assistant('', text)) == canonical(_assistant('', text))


def test_a_canonical_text_is_read_as_a_message_that_says_the_same():
  calls = (ToolCall('c1', 'f', '{"b": 1, "a": "ü"}'), ToolCall('c2', 'g', 'no JSON'))
  for message in (
    Message(Role.USER, 'a\n"b"'), Message(Role.ASSISTANT, '', calls, reasoning='hm'),
    Message(Role.TOOL, '3', call_id='c1'),
  ):  # fmt: skip
    read = from_canonical(canonical(message), {})
    assert canonical(read) == canonical(message) and (read.role, read.text) == (message.role, message.text)


def test_half_a_character_in_arguments_can_be_encoded():
  call = ToolCall('c', 'f', '{"a": "\\ud800"}')
  assert '\ufffd' in canonical(Message(Role.ASSISTANT, '', (call,))).encode().decode()
  assert dump_json({'a': '\udfff'}).encode() == '{"a": "\ufffd"}'.encode()


# -- images ------------------------------------------------------------------------------------------------------------


def _image(number: int) -> ImageSegment:
  return ImageSegment(np.full((8, 8, 3), number, np.uint8), 1)


def _read_image(url, at):
  """Stands for the reader of data URLs."""
  assert at.startswith(('messages[', 'input[')) and 'image_url' in at
  return _image(int(url))


def test_images_of_users_and_tools_keep_their_place():
  parts = [
    {'type': 'text', 'text': 'a'}, {'type': 'image_url', 'image_url': {'url': '1', 'detail': 'high'}},
    {'type': 'text', 'text': 'b'}, {'type': 'image_url', 'image_url': {'url': '2'}},
  ]  # fmt: skip
  chat = from_chat(
    [{'role': 'user', 'content': parts}, {'role': 'tool', 'content': parts[1:2], 'tool_call_id': 'c'}], _read_image
  )
  flat = [
    {'type': 'input_text', 'text': 'a'}, {'type': 'input_image', 'image_url': '1', 'detail': 'auto'},
    {'type': 'input_text', 'text': 'b'}, {'type': 'input_image', 'image_url': '2'},
  ]  # fmt: skip
  response = from_responses(
    [{'role': 'user', 'content': flat}, {'type': 'function_call_output', 'call_id': 'c', 'output': flat[1:2]}],
    _read_image,
  )
  user, tool = chat
  assert user == Message(Role.USER, 'ab', images=((1, _image(1)), (2, _image(2)))) and response == chat
  assert tool == Message(Role.TOOL, '', call_id='c', images=((0, _image(1)),))
  assert user.content == join('a', (_image(1),), 'b', (_image(2),)) and tool.content == (_image(1),)
  assert Message(Role.USER, 'a').content == join('a')


def _chat_image(role='user', **fields):
  return {'role': role, 'content': [{'type': 'image_url', 'image_url': {'url': '1'}, **fields}]}


@pytest.mark.parametrize(
  ('message', 'reads', 'param', 'code'),
  [
    (_chat_image(), None, 'messages[0].content[0]', 'unsupported_content'),
    (_chat_image('assistant'), _read_image, 'messages[0].content[0]', 'invalid_value'),
    (_chat_image('system'), _read_image, 'messages[0].content[0]', 'invalid_value'),
    (
      _chat_image(image_url={'url': '1', 'detail': 'low'}),
      _read_image,
      'messages[0].content[0].image_url.detail',
      'invalid_value',
    ),
    (_chat_image(detail='original', image_url='1'), _read_image, 'messages[0].content[0].detail', 'invalid_value'),
    (_chat_image(type='input_audio'), _read_image, 'messages[0].content[0]', 'unsupported_content'),
    (_chat_image(type=['image_url']), _read_image, 'messages[0].content[0]', 'unsupported_content'),
  ],
)
def test_images_that_are_refused_name_their_place(message, reads, param, code):
  with pytest.raises(ApiError) as e:
    from_chat([message], reads)
  assert (e.value.status, e.value.param, e.value.code) == (400, param, code) and '\n' not in e.value.message


def test_canonical_texts_tell_images_apart_and_are_read_back():
  def message(*images):
    return Message(Role.USER, 'ab', images=tuple((at, _image(number)) for at, number in images))

  same, other, moved, none = (canonical(message(*x)) for x in ([(1, 1)], [(1, 2)], [(2, 1)], []))
  assert canonical(message((1, 1))) == same and len({same, other, moved, none}) == 4
  assert none == '["user","ab",[]]', 'as before there were images'
  pixels = {_image(number).digest: _image(number).image for number in (1, 2)}
  both = message((0, 2), (2, 1))
  assert from_canonical(canonical(both), pixels) == both
