"""Conversation: messages, tool calls and tools, read from requests and compared by content."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ragen_jax.agent.segments import ImageSegment, Segments, join
from ragen_jax.serving.errors import bad_request, wrong_value
from ragen_jax.utils.tool_calls import ToolCall, dump_json, encodable, parse_json

# Reads the image of a data URL, which is the value of the field that the second argument names.
ReadImage = Callable[[Any, str], ImageSegment]


class Role(enum.StrEnum):
  """Who speaks; a developer message is a system message."""

  SYSTEM = 'system'
  USER = 'user'
  ASSISTANT = 'assistant'
  TOOL = 'tool'


@dataclasses.dataclass(frozen=True)
class Message:
  """A message of a conversation.

  Attributes:
    text: the content, '' if it is null.
    call_id: the call whose result a tool message is; '' for others.
    reasoning: the thought of an assistant, if the client sent it apart from the content.
    images: of a user or a tool, in order, each with the number of characters before it.
  """

  role: Role
  text: str
  tool_calls: tuple[ToolCall, ...] = ()
  call_id: str = ''
  reasoning: str = ''
  images: tuple[tuple[int, ImageSegment], ...] = ()

  @property
  def content(self) -> Segments:
    """The texts and images in their order."""
    ends = [*(at for at, _ in self.images), len(self.text)]
    texts = [self.text[a:b] for a, b in itertools.pairwise([0, *ends])]
    return join(
      texts[0], *(x for (_, image), text in zip(self.images, texts[1:], strict=True) for x in ((image,), text))
    )


def images_of_messages(messages: Sequence[Message]) -> list[ImageSegment]:
  """The images of messages, in their order."""
  return [image for message in messages for _, image in message.images]


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


def canonical(message: Message) -> str:
  """A text that is equal for messages that say the same.

  Arguments of calls count as parsed JSON, because some clients write them anew. Ids and reasoning do not count, because
  some clients drop them. Images count by their pixels.
  """
  calls = [[call.name, _canonical_arguments(call.arguments)] for call in message.tool_calls]
  images = [[at, image.columns, image.digest.hex()] for at, image in message.images]
  told = [message.role, message.text, calls, *([images] if images else [])]
  return json.dumps(told, ensure_ascii=False, separators=(',', ':'))


def from_canonical(text: str, pixels: Mapping[bytes, np.ndarray]) -> Message:
  """The message of a text of `canonical`, without ids and reasoning; `pixels` are those of its images by digest."""
  role, content, calls, *images = json.loads(text)
  return Message(
    Role(role),
    content,
    tuple(ToolCall('', name, arguments) for name, arguments in calls),
    images=tuple(
      (at, ImageSegment(pixels[bytes.fromhex(digest)], columns)) for own in images for at, columns, digest in own
    ),
  )


def _canonical_arguments(text: str) -> str:
  try:
    value = parse_json(text or '{}')
    return encodable(json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(',', ':')))
  except (ValueError, RecursionError):
    return text


# -- chat completions --------------------------------------------------------------------------------------------------


def from_chat(items: Sequence[Any], read_image: ReadImage | None = None) -> tuple[Message, ...]:
  """The messages of a request to chat/completions; ApiError if there is none, or one is wrong.

  Without `read_image`, the policy reads no images.
  """
  if not items:
    raise wrong_value('messages', [], 'at least one message')
  return tuple(_chat_message(item, f'messages[{i}]', read_image) for i, item in enumerate(items))


def _chat_message(item: Any, at: str, read_image: ReadImage | None) -> Message:
  item = _object(item, at)
  message = _read_content(_role(item.get('role'), at), item.get('content'), f'{at}.content', read_image)
  if message.role is Role.TOOL:
    return dataclasses.replace(message, call_id=_string(item, 'tool_call_id', at))
  if message.role is not Role.ASSISTANT:
    return message
  if item.get('function_call') is not None:
    raise bad_request(f'{at}.function_call', f'{at}.function_call: use tool_calls')
  listed = item.get('tool_calls')
  if listed is not None and not isinstance(listed, list):
    raise wrong_value(f'{at}.tool_calls', listed, 'a list')
  calls = tuple(_chat_call(call, f'{at}.tool_calls[{i}]') for i, call in enumerate(listed or ()))
  reasoning = _string(item, 'reasoning_content', at) or _string(item, 'reasoning', at)
  return dataclasses.replace(message, tool_calls=calls, reasoning=reasoning)


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


def from_responses(value: Any, read_image: ReadImage | None = None) -> tuple[Message, ...]:
  """The messages of `input` in a request to responses; ApiError if there is none, or one is wrong.

  An assistant's message and the calls after it are one message. Without `read_image`, the policy reads no images.
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
      result = _read_content(Role.TOOL, item.get('output'), f'{at}.output', read_image)
      messages.append(dataclasses.replace(result, call_id=_string(item, 'call_id', at)))
    elif kind == 'message':
      messages.append(_read_content(_role(item.get('role'), at), item.get('content'), f'{at}.content', read_image))
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
_IMAGE_PARTS = ('image_url', 'input_image')
# Other values ask for fewer tokens than the model's processor makes, or for more.
_DETAILS = (None, 'auto', 'high')


def _read_content(role: Role, content: Any, at: str, read_image: ReadImage | None) -> Message:
  """A message with a content: a string, null, or a list of parts, texts and images, whose texts are joined.

  ApiError for anything else, and for images of others than users and tools.
  """
  if content is None or isinstance(content, str):
    return Message(role, content or '')
  if not isinstance(content, list):
    raise wrong_value(at, content, 'a text, null or a list of text parts')
  text, images = '', []
  for i, part in enumerate(content):
    here = f'{at}[{i}]'
    part = _object(part, here)
    kind = part.get('type')
    if kind in _TEXT_PARTS:
      if not isinstance(part.get('text'), str):
        raise wrong_value(f'{here}.text', part.get('text'), 'a text')
      text += part['text']
    elif kind in _IMAGE_PARTS and read_image is not None:
      if role not in (Role.USER, Role.TOOL):
        raise bad_request(here, f'{here}.type={kind!r}: images are in messages of the user and of tools only')
      images.append((len(text), _image(part, here, read_image)))
    elif kind != 'refusal':
      allowed = 'text; the policy reads no images, audio or files' if read_image is None else 'text or an image'
      raise bad_request(here, f'{here}.type={kind!r:.40}: must be {allowed}', 'unsupported_content')
  return Message(role, text, images=tuple(images))


def _image(part: dict[str, Any], at: str, read_image: ReadImage) -> ImageSegment:
  """The image of a part of chat/completions, {"image_url": {"url", "detail"}}, or of responses, {"image_url",
  "detail"}."""
  value, where = part.get('image_url'), f'{at}.image_url'
  if isinstance(value, dict):
    part, value, at, where = value, value.get('url'), where, f'{where}.url'
  if part.get('detail') not in _DETAILS:
    allowed = "'auto' or 'high': images have the size that the model's processor gives them"
    raise wrong_value(f'{at}.detail', part['detail'], allowed)
  return read_image(value, where)


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
