"""Conversation: messages, tool calls and tools, read from requests and compared by content."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Sequence
from typing import Any

from ragen_jax.serving.errors import bad_request, wrong_value


class Role(enum.StrEnum):
  """Who speaks; a developer message is a system message."""

  SYSTEM = 'system'
  USER = 'user'
  ASSISTANT = 'assistant'
  TOOL = 'tool'


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """A call of a function. Its arguments are JSON text as the policy sampled it or the client gave it; other text if the
  policy made a mistake."""

  id: str
  name: str
  arguments: str


@dataclasses.dataclass(frozen=True)
class Message:
  """A message of a conversation.

  Attributes:
    text: the content, '' if it is null.
    call_id: the call whose result a tool message is; '' for others.
    reasoning: the thought of an assistant, if the client sent it apart from the content.
  """

  role: Role
  text: str
  tool_calls: tuple[ToolCall, ...] = ()
  call_id: str = ''
  reasoning: str = ''


@dataclasses.dataclass(frozen=True)
class Tool:
  """A function that the policy may call, with its schema as the prompt has it: JSON text {"type": "function",
  "function": {…}}, with the request's order of keys."""

  name: str
  schema: str


@dataclasses.dataclass(frozen=True)
class TemplateOptions:
  """How a prompt opens the reply. Without `add_generation_prompt`, it does not; without `enable_thinking`, the reply
  begins with an empty thought; `reply_prefix` is its forced beginning."""

  enable_thinking: bool
  add_generation_prompt: bool
  reply_prefix: str


def _refuse_constant(name: str) -> float:
  raise ValueError(f'{name} is no number of JSON')


_SURROGATE = re.compile('[\ud800-\udfff]')

# NaN and Infinity, which Python writes and reads, are errors.
JSON = json.JSONDecoder(parse_constant=_refuse_constant)


def parse_json(text: str) -> Any:
  """A JSON value; ValueError if the text is no JSON, or is nested too deeply."""
  try:
    return JSON.decode(text)
  except RecursionError as e:
    raise ValueError('nested too deeply') from e


def encodable(text: str) -> str:
  """The text with U+FFFD for each lone surrogate, which JSON can spell and UTF-8 cannot encode."""
  return _SURROGATE.sub('\ufffd', text)


def dump_json(value: Any) -> str:
  """JSON as the chat templates of the Qwen family write it."""
  return encodable(json.dumps(value, ensure_ascii=False))


def canonical(message: Message) -> str:
  """A text that is equal for messages that say the same.

  Arguments of calls count as parsed JSON, because some clients write them anew. Ids and reasoning do not count, because
  some clients drop them.
  """
  calls = [[call.name, _canonical_arguments(call.arguments)] for call in message.tool_calls]
  return json.dumps([message.role, message.text, calls], ensure_ascii=False, separators=(',', ':'))


def from_canonical(text: str) -> Message:
  """The message of a text of `canonical`, without ids and reasoning."""
  role, content, calls = json.loads(text)
  return Message(Role(role), content, tuple(ToolCall('', name, arguments) for name, arguments in calls))


def _canonical_arguments(text: str) -> str:
  try:
    value = parse_json(text or '{}')
    return encodable(json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(',', ':')))
  except (ValueError, RecursionError):
    return text


# -- chat completions --------------------------------------------------------------------------------------------------


def from_chat(items: Sequence[Any]) -> tuple[Message, ...]:
  """The messages of a request to chat/completions; ApiError if there is none, or one is wrong."""
  if not items:
    raise wrong_value('messages', [], 'at least one message')
  return tuple(_chat_message(item, f'messages[{i}]') for i, item in enumerate(items))


def _chat_message(item: Any, at: str) -> Message:
  item = _object(item, at)
  role = _role(item.get('role'), at)
  text = read_text(item.get('content'), f'{at}.content')
  if role is Role.TOOL:
    return Message(role, text, call_id=_string(item, 'tool_call_id', at))
  if role is not Role.ASSISTANT:
    return Message(role, text)
  if item.get('function_call') is not None:
    raise bad_request(f'{at}.function_call', f'{at}.function_call: use tool_calls')
  listed = item.get('tool_calls')
  if listed is not None and not isinstance(listed, list):
    raise wrong_value(f'{at}.tool_calls', listed, 'a list')
  calls = tuple(_chat_call(call, f'{at}.tool_calls[{i}]') for i, call in enumerate(listed or ()))
  reasoning = _string(item, 'reasoning_content', at) or _string(item, 'reasoning', at)
  return Message(role, text, calls, reasoning=reasoning)


def _chat_call(item: Any, at: str) -> ToolCall:
  item = _object(item, at)
  if item.get('type', 'function') != 'function':
    raise wrong_value(f'{at}.type', item['type'], "'function'")
  function = _object(item.get('function'), f'{at}.function')
  return ToolCall(_string(item, 'id', at), _name(function, f'{at}.function'), _arguments(function, f'{at}.function'))


def tools_from_chat(items: Sequence[Any]) -> tuple[Tool, ...]:
  """The tools of a request to chat/completions, without `strict`; ApiError if one is no function, or has no name."""
  return tuple(_chat_tool(item, f'tools[{i}]') for i, item in enumerate(items))


def _chat_tool(item: Any, at: str) -> Tool:
  item = _object(item, at)
  if item.get('type') != 'function':
    raise wrong_value(f'{at}.type', item.get('type'), "'function'")
  function = _object(item.get('function'), f'{at}.function')
  shown = {key: value for key, value in function.items() if key != 'strict'}
  return Tool(_name(function, f'{at}.function'), dump_json({**item, 'function': shown}))


# -- responses ---------------------------------------------------------------------------------------------------------


def from_responses(value: Any) -> tuple[Message, ...]:
  """The messages of `input` in a request to responses; ApiError if there is none, or one is wrong.

  An assistant's message and the calls after it are one message.
  """
  if isinstance(value, str):
    return (Message(Role.USER, value),)
  if not isinstance(value, list) or not value:
    raise wrong_value('input', value, 'a text, or a list of at least one item')
  messages: list[Message] = []
  open_turn = False  # whether the last message is an assistant's to which a call can be added
  for i, item in enumerate(value):
    at = f'input[{i}]'
    item = _object(item, at)
    kind = item.get('type', 'message')
    if kind == 'reasoning':
      continue
    if kind == 'function_call':
      call = ToolCall(_string(item, 'call_id', at), _name(item, at), _arguments(item, at))
      turn = messages.pop() if open_turn else Message(Role.ASSISTANT, '')
      messages.append(dataclasses.replace(turn, tool_calls=(*turn.tool_calls, call)))
    elif kind == 'function_call_output':
      text = read_text(item.get('output'), f'{at}.output')
      messages.append(Message(Role.TOOL, text, call_id=_string(item, 'call_id', at)))
    elif kind == 'message':
      messages.append(Message(_role(item.get('role'), at), read_text(item.get('content'), f'{at}.content')))
    else:
      raise wrong_value(f'{at}.type', kind, 'message, function_call, function_call_output or reasoning')
    open_turn = messages[-1].role is Role.ASSISTANT
  if not messages:
    raise wrong_value('input', value, 'at least one message')
  return tuple(messages)


def tools_from_responses(items: Sequence[Any]) -> tuple[Tool, ...]:
  """The tools of a request to responses, as in chat/completions; ApiError if one is no function, or has no name."""
  return tuple(_responses_tool(item, f'tools[{i}]') for i, item in enumerate(items))


def _responses_tool(item: Any, at: str) -> Tool:
  item = _object(item, at)
  if item.get('type') != 'function':
    raise wrong_value(f'{at}.type', item.get('type'), "'function'")
  keys = ('name', 'description', 'parameters')
  function = {key: item[key] for key in keys if item.get(key) is not None}
  return Tool(_name(item, at), dump_json({'type': 'function', 'function': function}))


# -- parts -------------------------------------------------------------------------------------------------------------

_TEXT_PARTS = ('text', 'input_text', 'output_text')


def read_text(content: Any, at: str) -> str:
  """The text of a content: a string, null, or a list of text parts, which are joined; ApiError for anything else, such
  as an image."""
  if content is None:
    return ''
  if isinstance(content, str):
    return content
  if not isinstance(content, list):
    raise wrong_value(at, content, 'a text, null or a list of text parts')
  return ''.join(_part_text(part, f'{at}[{i}]') for i, part in enumerate(content))


def _part_text(part: Any, at: str) -> str:
  part = _object(part, at)
  kind = part.get('type')
  if kind == 'refusal':
    return ''
  if kind not in _TEXT_PARTS:
    raise bad_request(
      at, f'{at}.type={kind!r:.40}: must be text; the policy reads no images, audio or files', 'unsupported_content'
    )
  if not isinstance(part.get('text'), str):
    raise wrong_value(f'{at}.text', part.get('text'), 'a text')
  return part['text']


_ROLES = {**{str(role): role for role in Role}, 'developer': Role.SYSTEM}


def _role(value: Any, at: str) -> Role:
  if not isinstance(value, str) or value not in _ROLES:
    raise wrong_value(f'{at}.role', value, ', '.join(_ROLES))
  return _ROLES[value]


def _object(value: Any, at: str) -> dict[str, Any]:
  if not isinstance(value, dict):
    raise wrong_value(at, value, 'an object')
  return value


def _string(item: dict[str, Any], key: str, at: str) -> str:
  value = item.get(key)
  if value is not None and not isinstance(value, str):
    raise wrong_value(f'{at}.{key}', value, 'a text')
  return value or ''


def _name(item: dict[str, Any], at: str) -> str:
  name = _string(item, 'name', at)
  if not name:
    raise wrong_value(f'{at}.name', item.get('name'), 'a text that is not empty')
  return name


def _arguments(item: dict[str, Any], at: str) -> str:
  """The arguments as JSON text; some clients send the object."""
  value = item.get('arguments')
  return dump_json(value) if isinstance(value, dict) else _string(item, 'arguments', at)
