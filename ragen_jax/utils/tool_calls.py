"""Calls of tools as JSON, {"name": ..., "arguments": {...}}, between the tags with which Qwen's templates write them.

<tool_call>
{"name": "search", "arguments": {"query": "Turin"}}
</tool_call>
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
from typing import Any

CALL, END_CALL = '<tool_call>', '</tool_call>'
_SPACE = re.compile(r'[ \t\n\r]*')


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """A call of a function. Its arguments are JSON text as the policy sampled it or the client gave it; other text if the
  policy made a mistake."""

  id: str
  name: str
  arguments: str


class Problem(enum.StrEnum):
  """Why a call cannot be read."""

  UNCLOSED_BLOCK = 'unclosed_block'  # the reply ends within it
  INVALID_JSON = 'invalid_json'  # it is no JSON object, or its arguments are none
  INVALID_PARAMETERS = 'invalid_parameters'  # it is no function with its parameters (`parameter_calls`)
  MISSING_NAME = 'missing_name'  # it names no function


def _refuse_constant(name: str) -> float:
  raise ValueError(f'{name} is no number of JSON')


def _finite(text: str) -> float:
  number = float(text)
  if math.isinf(number):
    raise ValueError(f'{text[:20]} is larger than any float')
  return number


_SURROGATE = re.compile('[\ud800-\udfff]')

# NaN, Infinity and numbers that become infinity, which Python reads, are errors.
JSON = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


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


def call_json(name: str, arguments: str) -> str:
  """The JSON of a call, as the chat templates of the Qwen family write it; `arguments` are JSON text."""
  return f'{{"name": {dump_json(name)}, "arguments": {arguments}}}'


def tagged(call: str) -> str:
  """A call between its tags."""
  return f'{CALL}\n{call}\n{END_CALL}'


def read_call(text: str) -> tuple[str, str, Problem | None]:
  """Reads a tool call, {"name": …, "arguments": {…}}: its name, the arguments as they are written, and the problem.

  With a problem, the name is '' if it cannot be read, and the arguments are the raw text from where reading fails.
  """
  name, arguments = '', '{}'
  at = _skip(text, 0)
  if text[at : at + 1] != '{':
    return '', text, Problem.INVALID_JSON
  at = _skip(text, at + 1)
  more = text[at : at + 1] != '}'
  while more:
    try:
      key, at = _value(text, at)
      at = _skip(text, at)
      if not isinstance(key, str) or text[at : at + 1] != ':':
        return name, arguments, Problem.INVALID_JSON
      start = _skip(text, at + 1)
    except ValueError:
      return name, arguments, Problem.INVALID_JSON
    try:
      value, at = _value(text, start)
    except ValueError:
      rest = text[start:].strip()
      return name, rest.removesuffix('}').rstrip() if key == 'arguments' else arguments, Problem.INVALID_JSON
    if key == 'name' and isinstance(value, str):
      name = encodable(value)
    elif key == 'arguments':
      arguments = encodable(value) if isinstance(value, str) else '{}' if value is None else text[start:at]
    at = _skip(text, at)
    more = text[at : at + 1] == ','
    at = _skip(text, at + 1) if more else at
  if text[at : at + 1] != '}' or _skip(text, at + 1) != len(text):
    return name, arguments, Problem.INVALID_JSON
  if not name:
    return '', text, Problem.MISSING_NAME
  return name, arguments, None if _is_object(arguments) else Problem.INVALID_JSON


def _skip(text: str, at: int) -> int:
  """The next position that is no white space."""
  return _SPACE.match(text, at).end()


def _value(text: str, at: int) -> tuple[object, int]:
  """A JSON value and the position after it; ValueError if there is none."""
  try:
    return JSON.raw_decode(text, at)
  except RecursionError as e:
    raise ValueError('nested too deeply') from e


def _is_object(text: str) -> bool:
  try:
    return isinstance(parse_json(text), dict)
  except ValueError:
    return False
