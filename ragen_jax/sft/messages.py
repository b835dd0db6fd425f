"""A line of a file of conversations, in the format of OpenAI's fine-tuning: its messages, tools and calls.

    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}

`"weight": 0` excludes a message of the assistant from the loss. Every mistake is a ValueError of one line with the
field, its value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterable
from typing import Any

from ragen_jax.serving.conversation.messages import Message, Role, Tool, tools_from_chat
from ragen_jax.serving.errors import ApiError
from ragen_jax.utils.errors import one_line, short
from ragen_jax.utils.tool_calls import ToolCall, dump_json, parse_json

_HALF = re.compile('[\ud800-\udfff]')


@dataclasses.dataclass(frozen=True)
class Conversation:
  """Line `line` of a file, from 1; its last message is the assistant's.

  Attributes:
    trained: whether each message is in the loss, as only messages of the assistant can be; at least one is.
    tools: what the assistant may call; no message has calls or results without them.
  """

  line: int
  messages: tuple[Message, ...]
  trained: tuple[bool, ...]
  tools: tuple[Tool, ...]


def read_line(number: int, line: str) -> Conversation:
  """Reads a line. Messages after the last trained message are dropped; ValueError if the line is not a conversation."""
  try:
    raw = json.loads(line)
  except RecursionError as e:
    raise ValueError('is nested too deeply') from e
  except ValueError as e:
    raise ValueError(f'is not JSON ({e})') from e
  items = raw.get('messages') if isinstance(raw, dict) else None
  if not isinstance(items, list) or not items:
    raise ValueError('must be an object with a list "messages" that is not empty')
  tools = _tools(raw.get('tools'))
  names = [tool.name for tool in tools]
  messages: list[Message] = []
  weights: list[bool] = []
  waiting: list[str] = []  # ids of calls without a result so far
  for i, item in enumerate(items):
    where = f'messages[{i}]'
    message = _message(item, where, names)
    if message.role is Role.SYSTEM and i:
      raise ValueError(f'{where}.role is "system", which may only be the first message')
    if message.role is Role.TOOL:
      _check_result(message, where, waiting, follows_calls=bool(messages) and _calls_or_result(messages[-1]))
      waiting.remove(message.call_id)
    elif waiting:
      raise ValueError(
        f'{where}.role is "{message.role}"; allowed: tool, because the calls {_listed(waiting)} have no result yet'
      )
    else:
      waiting = [call.id for call in message.tool_calls]
    messages.append(message)
    weights.append(_weight(item, where))
  last = max((i for i, m in enumerate(messages) if m.role is Role.ASSISTANT and weights[i]), default=None)
  if last is None:
    raise ValueError('has no message of the assistant to learn from')
  trained = tuple(m.role is Role.ASSISTANT and w for m, w in zip(messages, weights, strict=True))
  return Conversation(number, tuple(messages[: last + 1]), trained[: last + 1], tools)


def _message(item: Any, where: str, names: Collection[str]) -> Message:
  """A message, whose calls are of tools of these names."""
  if not isinstance(item, dict):
    raise ValueError(f'{where} must be an object with "role" and "content"')
  role = item.get('role')
  if not isinstance(role, str) or role not in list(Role):
    raise ValueError(f'{where}.role is {short(role)}; allowed: {", ".join(Role)}')
  role = Role(role)
  if item.get('function_call'):
    raise ValueError(f'{where}.function_call is {_shown(item["function_call"])}; it must be absent: use tool_calls')
  if item.get('tool_calls') and role is not Role.ASSISTANT:
    raise ValueError(f'{where}.tool_calls is {_shown(item["tool_calls"])}; only messages of the assistant have calls')
  calls = _calls(item.get('tool_calls'), f'{where}.tool_calls', names)
  content = item.get('content')
  if content is None and calls:
    content = ''
  reasoning = (item.get('reasoning_content') or '') if names and role is Role.ASSISTANT else ''
  call_id = item.get('tool_call_id') if role is Role.TOOL else ''
  for field, text in (('content', content), ('reasoning_content', reasoning), ('tool_call_id', call_id)):
    if not isinstance(text, str):
      raise ValueError(f'{where}.{field} is {_shown(text)}; it must be text')
    _check_characters(text, f'{where}.{field}')
  return Message(role, content, calls, call_id, reasoning)


def _weight(item: dict[str, Any], where: str) -> bool:
  weight = item.get('weight', 1)
  if weight not in (0, 1):
    raise ValueError(f'{where}.weight is {_shown(weight)}; allowed: 0, 1')
  return bool(weight)


def _calls_or_result(message: Message) -> bool:
  return bool(message.tool_calls) or message.role is Role.TOOL


def _check_result(message: Message, where: str, waiting: Collection[str], *, follows_calls: bool) -> None:
  """Raises ValueError unless a result is that of a call that waits for one."""
  if not follows_calls:
    raise ValueError(f'{where}.role is "tool"; allowed: tool behind a message of the assistant with tool_calls only')
  if message.call_id not in waiting:
    allowed = _listed(waiting) or 'no more, because all calls before it have their results'
    raise ValueError(f'{where}.tool_call_id is {_shown(message.call_id)}; allowed: {allowed}')


# -- tools and calls ---------------------------------------------------------------------------------------------------


def _tools(items: Any) -> tuple[Tool, ...]:
  if items is None:
    return ()
  if not isinstance(items, list):
    raise ValueError(f'tools is {_shown(items)}; it must be a list of functions')
  try:
    tools = tools_from_chat(items)
  except ApiError as e:
    raise ValueError(str(e)) from e
  for k, (item, tool) in enumerate(zip(items, tools, strict=True)):
    where = f'tools[{k}]'
    _dump(item, where)
    function = item['function']
    if dump_json(tool.name) != f'"{tool.name}"':  # templates write names as they are
      raise ValueError(f'{where}.function.name is {_shown(tool.name)}; it must have no quote, backslash or line end')
    if tool.name in [other.name for other in tools[:k]]:
      raise ValueError(f'{where}.function.name is {_shown(tool.name)}; an earlier tool has this name')
    if not isinstance(function.get('description', ''), str):
      raise ValueError(f'{where}.function.description is {_shown(function["description"])}; it must be text')
    if not isinstance(function.get('parameters', {}), dict):
      raise ValueError(f'{where}.function.parameters is {_shown(function["parameters"])}; it must be a JSON schema')
  return tools


def _calls(items: Any, where: str, names: Collection[str]) -> tuple[ToolCall, ...]:
  """The calls of a message; their arguments are written anew, as templates do."""
  if items is None:
    return ()
  if not isinstance(items, list):
    raise ValueError(f'{where} is {_shown(items)}; it must be a list of calls')
  calls: list[ToolCall] = []
  for k, item in enumerate(items):
    at = f'{where}[{k}]'
    if not isinstance(item, dict):
      raise ValueError(f'{at} is {_shown(item)}; it must be an object with "id", "type" and "function"')
    if item.get('type', 'function') != 'function':
      raise ValueError(f'{at}.type is {_shown(item["type"])}; allowed: function')
    id_, function = item.get('id'), item.get('function')
    if not isinstance(id_, str) or not id_ or id_ in [call.id for call in calls]:
      raise ValueError(f'{at}.id is {_shown(id_)}; it must be a text that no other call of the message has')
    if not isinstance(function, dict):
      raise ValueError(f'{at}.function is {_shown(function)}; it must be an object with "name" and "arguments"')
    name = function.get('name')
    if not isinstance(name, str) or name not in names:
      allowed = _listed(names) or 'none, because the line has no "tools"'
      raise ValueError(f'{at}.function.name is {_shown(name)}; allowed: {allowed}')
    calls.append(ToolCall(id_, name, _arguments(function, f'{at}.function.arguments')))
  return tuple(calls)


def _arguments(function: dict[str, Any], where: str) -> str:
  """The arguments of a call as JSON text, given as an object or as its JSON."""
  if 'arguments' not in function:
    raise ValueError(f'{where} is missing; it must be an object, or its JSON as text')
  given = value = function['arguments']
  if isinstance(given, str):
    try:
      value = parse_json(given)
    except ValueError as e:
      raise ValueError(f'{where} is {_shown(given)}; it must be an object, or its JSON as text ({e})') from e
  if not isinstance(value, dict):
    raise ValueError(f'{where} is {_shown(given)}; it must be an object, or its JSON as text')
  return _dump(value, where)


# -- values ------------------------------------------------------------------------------------------------------------


def _dump(value: Any, where: str) -> str:
  """The JSON of a value, as templates write it; ValueError if there is none."""
  try:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
  except (ValueError, RecursionError) as e:
    reason = 'is nested too deeply' if isinstance(e, RecursionError) else 'has a number that is none of JSON'
    raise ValueError(f'{where} {reason}: {_shown(value)}') from e
  _check_characters(text, where)
  return text


def _check_characters(text: str, where: str) -> None:
  if half := _HALF.search(text):
    raise ValueError(f'{where} has half a character, {half[0]!r}, which UTF-8 cannot encode')


def _listed(names: Iterable[str]) -> str:
  return ', '.join(_shown(name) for name in names)


def _shown(value: Any) -> str:
  """The beginning of a JSON value."""
  return one_line(value, json.dumps)[:80]
