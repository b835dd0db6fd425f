"""How a model's chat template writes tools, the calls of a reply, and their results; `tool_probe` finds it.

Calls stand between tags, because replies are read by these tags: as JSON, or with a tag for each argument. What stands
around tools and results is the template's. A part that is written is text of any origin, or text of the template, whose
tags are tokens if the tokenizer has them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ragen_jax.agent.chat_template import Around, ChatFormat
from ragen_jax.utils.parameter_calls import read_parameters, write_parameters
from ragen_jax.utils.tool_calls import CALL, END_CALL, Problem, call_json, read_call

_RESULT, _END_RESULT = '<tool_response>\n', '\n</tool_response>'
_HEAD = (
  '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n'
  'You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n'
)
_TAIL = (
  '\n</tools>\n\nFor each function call, return a json object with function name and arguments within '
  f'{CALL}{END_CALL} XML tags:\n{CALL}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{END_CALL}'
)


@dataclasses.dataclass(frozen=True)
class FormatText:
  """Text of the template."""

  text: str


Part = str | FormatText
Result = TypeVar('Result')


class Place(enum.Enum):
  """What a conversation with tools begins with, besides texts of the template."""

  SYSTEM = enum.auto()
  TOOLS = enum.auto()


class CallForm(enum.Enum):
  """How a template writes a call between its tags."""

  JSON = enum.auto()
  PARAMETERS = enum.auto()  # a tag for each argument (`parameter_calls`); True, False and None as Python writes them
  JSON_PARAMETERS = enum.auto()  # the same with true, false and null


# Reads the text of a call between its tags: name, arguments as JSON, and why it cannot be read.
ReadCall = Callable[[str], tuple[str, str, Problem | None]]


@dataclasses.dataclass(frozen=True)
class ToolFormat:
  """The texts of a template around tools and results.

  Attributes:
    with_system: the beginning of a conversation, up to the first message that is not the system's.
    without_system: the same where no system message is given.
    between_tools: the text between two tools.
    function_only: whether a tool is written as its field "function", without its type.
    results: around the results of the calls of one reply.
    between_results: the text between two results.
    strips_results: whether results lose the white space at both ends.
    skips_empty_system: whether an empty system message counts as none.
    call_form: how calls are written.
    before_calls: the text between a reply's content and its first call.
    empty_thoughts: whether a reply without a thought, which no question follows, gets an empty one.
  """

  with_system: tuple[str | Place, ...]
  without_system: tuple[str | Place, ...]
  between_tools: str
  function_only: bool
  results: Around
  between_results: str
  strips_results: bool = False
  skips_empty_system: bool = False
  call_form: CallForm = CallForm.JSON
  before_calls: str = '\n'
  empty_thoughts: bool = False

  def beginning(self, system: str | None, schemas: Sequence[str]) -> list[Part]:
    """The beginning of a conversation with a system message, or None, and tools as JSON texts."""
    if self.function_only:
      schemas = [json.dumps(json.loads(schema)['function'], ensure_ascii=False) for schema in schemas]
    filled: dict[Place, list[Part]] = {
      Place.SYSTEM: [system or ''],
      Place.TOOLS: _separated(schemas, self.between_tools),
    }
    skipped = system is None or (not system and self.skips_empty_system)
    pieces = self.without_system if skipped else self.with_system
    return [part for x in pieces for part in ([FormatText(x)] if isinstance(x, str) else filled[x])]

  def result_turn(self, results: Sequence[Result]) -> list[Result | FormatText]:
    """The results of the calls of one reply, texts or whatever stands for one."""
    inside = _separated(results, self.between_results)
    return [FormatText(self.results.before), *inside, FormatText(self.results.after)]

  def call_text(self, name: str, arguments: str) -> str:
    """A call between its tags; `arguments` are JSON text."""
    if self.call_form is CallForm.JSON:
      return call_json(name, arguments)
    return write_parameters(name, arguments, as_json=self.call_form is CallForm.JSON_PARAMETERS)

  def call_parts(self, calls: Sequence[tuple[str, str]], *, after_text: bool) -> list[Part]:
    """The calls of a reply, name and arguments; `after_text`: whether the reply has text before them."""
    parts: list[Part] = []
    for k, call in enumerate(calls):
      parts += ['\n'] if k else [self.before_calls] if after_text else []
      parts += [FormatText(CALL), f'\n{self.call_text(*call)}\n', FormatText(END_CALL)]
    return parts

  def read_call(self, schemas: Sequence[str]) -> ReadCall:
    """The reader of calls of tools, which are given as JSON texts."""
    if self.call_form is CallForm.JSON:
      return read_call
    functions = [json.loads(schema)['function'] for schema in schemas]
    known = {x['name']: _mapping(_mapping(x.get('parameters')).get('properties')) for x in functions}
    return functools.partial(read_parameters, schemas=known)


def _mapping(value: Any) -> Mapping[str, Any]:
  """The value if it is a JSON object, otherwise an empty one: tools of requests may be anything."""
  return value if isinstance(value, dict) else {}


def _separated(texts: Sequence[Result], separator: str) -> list[Result | FormatText]:
  return [part for k, text in enumerate(texts) for part in ([FormatText(separator), text] if k else [text])]


def qwen_tools(form: ChatFormat) -> ToolFormat:
  """Tools and results in the words of Qwen2.5's and Qwen3's templates, in any chat format."""
  before, after, default = form.system.before, form.system.after, form.default_system
  return ToolFormat(
    with_system=(before, Place.SYSTEM, f'\n\n{_HEAD}', Place.TOOLS, _TAIL + after),
    without_system=(f'{before}{default}\n\n{_HEAD}' if default else before + _HEAD, Place.TOOLS, _TAIL + after),
    between_tools='\n',
    function_only=False,
    results=Around(form.user.before + _RESULT, _END_RESULT + form.user.after),
    between_results=f'{_END_RESULT}\n{_RESULT}',
  )
