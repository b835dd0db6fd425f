"""Lines of a file of conversations with tools: what is read, and what is refused."""

from __future__ import annotations

import copy
import json

import pytest

from ragen_jax.serving.conversation.messages import Role
from ragen_jax.sft import conversations
from ragen_jax.sft.messages import read_line
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.tool_calls import ToolCall

TOOL = {'type': 'function', 'function': {'name': 'look', 'parameters': {'type': 'object', 'properties': {}}}}
LINE = {
  'messages': [
    {'role': 'user', 'content': 'q'},
    {
      'role': 'assistant',
      'content': None,
      'tool_calls': [
        {'id': 'a', 'type': 'function', 'function': {'name': 'look', 'arguments': '{"x":1}'}},
        {'id': 'b', 'function': {'name': 'add', 'arguments': {}}},
      ],
    },
    {'role': 'tool', 'tool_call_id': 'b', 'content': 'rb'},
    {'role': 'tool', 'tool_call_id': 'a', 'content': 'ra'},
    {'role': 'assistant', 'content': 'A', 'weight': 0},
    {'role': 'user', 'content': 'r'},
    {'role': 'assistant', 'content': 'B', 'tool_calls': []},
    {'role': 'user', 'content': 'behind the last reply'},
  ],
  'tools': [TOOL, {'type': 'function', 'function': {'name': 'add', 'description': 'Adds.', 'strict': True}}],
}


def changed(change):
  line = copy.deepcopy(LINE)
  change(line)
  return line


def put(value, *path):
  """A change of a line: the value at a path of keys; `...` removes it."""

  def change(line):
    at = line
    for key in path[:-1]:
      at = at[key]
    if value is ...:
      del at[path[-1]]
    else:
      at[path[-1]] = value

  return change


def test_messages_tools_and_calls_are_read():
  found = read_line(7, json.dumps(LINE))
  assert found.line == 7
  assert [m.role for m in found.messages] == [
    Role.USER, Role.ASSISTANT, Role.TOOL, Role.TOOL, Role.ASSISTANT, Role.USER, Role.ASSISTANT
  ]  # fmt: skip
  assert found.trained == (False, True, False, False, False, False, True)
  assert found.messages[1].text == ''
  assert found.messages[1].tool_calls == (ToolCall('a', 'look', '{"x": 1}'), ToolCall('b', 'add', '{}'))
  assert [m.call_id for m in found.messages] == ['', '', 'b', 'a', '', '', '']
  assert [tool.name for tool in found.tools] == ['look', 'add']
  assert json.loads(found.tools[0].schema) == TOOL


def test_a_conversation_may_end_with_a_call():
  line = changed(lambda line: line.update(messages=line['messages'][:2]))
  assert len(read_line(1, json.dumps(line)).messages) == 2
  # Results behind the last trained call are checked, and dropped.
  line = changed(lambda line: line.update(messages=line['messages'][:5]))
  assert len(read_line(1, json.dumps(line)).messages) == 2


def test_thoughts_are_read_in_conversations_with_tools_only():
  thinks = changed(put('hm', 'messages', 1, 'reasoning_content'))
  assert read_line(1, json.dumps(thinks)).messages[1].reasoning == 'hm'
  plain = {'messages': [{'role': 'assistant', 'content': 'A', 'reasoning_content': 'hm'}]}
  assert read_line(1, json.dumps(plain)).messages[0].reasoning == ''


_CALLS = ('messages', 1, 'tool_calls')
_FUNCTION = (*_CALLS, 0, 'function')
_DEEP = '[' * 100_000


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (put('function', 'messages', 0, 'role'), "messages[0].role is 'function'; allowed: system, user, assistant, tool"),
    (put(['user'], 'messages', 0, 'role'), "messages[0].role is ['user']; allowed: system, user, assistant, tool"),
    (put('tool', 'messages', 0, 'role'), 'messages[0].tool_call_id is null; it must be text'),
    (
      put({'role': 'tool', 'content': 'r', 'tool_call_id': 'a'}, 'messages', 0),
      'messages[0].role is "tool"; allowed: tool behind a message of the assistant with tool_calls only',
    ),
    (
      put({'role': 'tool', 'content': 'r', 'tool_call_id': 'a'}, 'messages', 5),
      'messages[5].role is "tool"; allowed: tool behind a message of the assistant with tool_calls only',
    ),
    (put('z', 'messages', 2, 'tool_call_id'), 'messages[2].tool_call_id is "z"; allowed: "a", "b"'),
    (put('b', 'messages', 3, 'tool_call_id'), 'messages[3].tool_call_id is "b"; allowed: "a"'),
    (
      put({'role': 'tool', 'content': 'r', 'tool_call_id': 'a'}, 'messages', 4),
      'messages[4].tool_call_id is "a"; allowed: no more, because all calls before it have their results',
    ),
    (put(..., 'messages', 2, 'tool_call_id'), 'messages[2].tool_call_id is null; it must be text'),
    (
      put(..., 'messages', 3),
      'messages[3].role is "assistant"; allowed: tool, because the calls "a" have no result yet',
    ),
    (
      put({'role': 'user', 'content': 'q'}, 'messages', 2),
      'messages[2].role is "user"; allowed: tool, because the calls "a", "b" have no result yet',
    ),
    (put(None, 'messages', 2, 'content'), 'messages[2].content is null; it must be text'),
    (put([{'type': 'text'}], 'messages', 2, 'content'), 'messages[2].content is [{"type": "text"}]; it must be text'),
    (put(None, 'messages', 4, 'content'), 'messages[4].content is null; it must be text'),
    (put('\ud800', 'messages', 2, 'content'), "messages[2].content has half a character, '\\ud800'"),
    (put(1, 'messages', 1, 'reasoning_content'), 'messages[1].reasoning_content is 1; it must be text'),
    (
      put({'name': 'f'}, 'messages', 1, 'function_call'),
      'messages[1].function_call is {"name": "f"}; it must be absent',
    ),
    (
      put([{}], 'messages', 0, 'tool_calls'),
      'messages[0].tool_calls is [{}]; only messages of the assistant have calls',
    ),
    (put({'a': 1}, *_CALLS), 'messages[1].tool_calls is {"a": 1}; it must be a list of calls'),
    (put(3, *_CALLS, 0), 'messages[1].tool_calls[0] is 3; it must be an object with "id", "type" and "function"'),
    (put('custom', *_CALLS, 0, 'type'), 'messages[1].tool_calls[0].type is "custom"; allowed: function'),
    (put(..., *_CALLS, 0, 'id'), 'messages[1].tool_calls[0].id is null; it must be a text that no other call'),
    (put('', *_CALLS, 0, 'id'), 'messages[1].tool_calls[0].id is ""; it must be a text that no other call'),
    (put('a', *_CALLS, 1, 'id'), 'messages[1].tool_calls[1].id is "a"; it must be a text that no other call'),
    (put(..., *_FUNCTION), 'messages[1].tool_calls[0].function is null; it must be an object with "name" and'),
    (put('f', *_FUNCTION, 'name'), 'messages[1].tool_calls[0].function.name is "f"; allowed: "look", "add"'),
    (put(..., *_FUNCTION, 'name'), 'messages[1].tool_calls[0].function.name is null; allowed: "look", "add"'),
    (put(..., 'tools'), 'messages[1].tool_calls[0].function.name is "look"; allowed: none, because the line has no'),
    (
      put(..., *_FUNCTION, 'arguments'),
      'messages[1].tool_calls[0].function.arguments is missing; it must be an object',
    ),
    (put(None, *_FUNCTION, 'arguments'), 'messages[1].tool_calls[0].function.arguments is null; it must be an object'),
    (put([1], *_FUNCTION, 'arguments'), 'messages[1].tool_calls[0].function.arguments is [1]; it must be an object'),
    (put('', *_FUNCTION, 'arguments'), 'messages[1].tool_calls[0].function.arguments is ""; it must be an object, or'),
    (
      put('{x}', *_FUNCTION, 'arguments'),
      'messages[1].tool_calls[0].function.arguments is "{x}"; it must be an object,',
    ),
    (
      put('[1]', *_FUNCTION, 'arguments'),
      'messages[1].tool_calls[0].function.arguments is "[1]"; it must be an object',
    ),
    (put(_DEEP, *_FUNCTION, 'arguments'), f'messages[1].tool_calls[0].function.arguments is "{"[" * 79}; it must be'),
    (
      put('{"x": NaN}', *_FUNCTION, 'arguments'),
      'messages[1].tool_calls[0].function.arguments is "{\\"x\\": NaN}"; it must be an object, or its JSON as text (',
    ),
    (
      put('{"x": 1e999}', *_FUNCTION, 'arguments'),
      'messages[1].tool_calls[0].function.arguments is "{\\"x\\": 1e999}"; it must be an object, or its JSON as text (',
    ),
    (
      put({'x': float('nan')}, *_FUNCTION, 'arguments'),
      'messages[1].tool_calls[0].function.arguments has a number that is none of JSON: {"x": NaN}',
    ),
    (
      put('{"x": "\\ud800"}', *_FUNCTION, 'arguments'),
      "messages[1].tool_calls[0].function.arguments has half a character, '\\ud800'",
    ),
    (put('look', 'tools'), 'tools is "look"; it must be a list of functions'),
    (put(3, 'tools', 0), 'tools[0]=3: must be an object'),
    (put('web', 'tools', 0, 'type'), "tools[0].type='web': must be 'function'"),
    (put(..., 'tools', 0, 'function', 'name'), 'tools[0].function.name=None: must be a text that is not empty'),
    (put('a"b', 'tools', 0, 'function', 'name'), 'tools[0].function.name is "a\\"b"; it must have no quote, backslash'),
    (put('add', 'tools', 0, 'function', 'name'), 'tools[1].function.name is "add"; an earlier tool has this name'),
    (put(1, 'tools', 1, 'function', 'description'), 'tools[1].function.description is 1; it must be text'),
    (put([], 'tools', 0, 'function', 'parameters'), 'tools[0].function.parameters is []; it must be a JSON schema'),
    (put(float('inf'), 'tools', 0, 'x'), 'tools[0] has a number that is none of JSON: '),
    (put('\udfff', 'tools', 0, 'x'), "tools[0] has half a character, '\\udfff'"),
  ],
)
def test_mistakes_are_refused_in_one_line_with_their_place(tmp_path, change, message):
  path = tmp_path / 'a.jsonl'
  path.write_text('\n'.join(map(json.dumps, [LINE, changed(change)])))
  with pytest.raises(UserError) as e:
    conversations.read(str(path))
  assert str(e.value).startswith(f'sft.data={str(path)!r}: line 2: {message}')
  assert '\n' not in str(e.value) and len(str(e.value)) < 500
