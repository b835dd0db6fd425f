"""Finds how a chat template writes tools, as `template_probe` finds the chat format.

The template writes conversations with tools whose names and texts are unmistakable marks. What stands between the marks
is the format of tools. Then it writes other conversations, and the format must write the same.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ragen_jax.agent.chat_template import (
  ASSISTANT,
  END_THOUGHT,
  NO_THOUGHT,
  SYSTEM,
  THOUGHT,
  TOOL,
  USER,
  Around,
  ChatFormat,
  Thoughts,
)
from ragen_jax.agent.template_program import TemplateError, TemplateProgram, first_difference
from ragen_jax.agent.tool_format import CallForm, FormatText, Part, Place, ToolFormat, qwen_tools
from ragen_jax.utils.tool_calls import CALL

_SYSTEM, _USER, _REPLY, _RESULTS = 'qzSq', 'qzUq', 'qzAq', ('qzRq', 'qzQq')

_Message = Mapping[str, Any]


def find_tools(tokenizer: Any, form: ChatFormat) -> tuple[ToolFormat, str]:
  """The format of tools of a tokenizer of `transformers` with this chat format, and ''.

  If its template has none that can be followed, the first is that of Qwen2.5, and the second says what the template
  does instead, to be read behind "its chat template".
  """
  if not tokenizer.chat_template:
    return qwen_tools(form), 'is missing'
  try:
    program = TemplateProgram(tokenizer, with_tools=True)
    tools = _find(program, form)
    _verify(program, form, tools)
  except TemplateError as e:
    return qwen_tools(form), f'cannot be followed: {e}'
  return tools, ''


def _tool(name: str, **more: Any) -> dict[str, Any]:
  return {'type': 'function', 'function': {'name': name, **more}}


def _dump(value: Any) -> str:
  return json.dumps(value, ensure_ascii=False)


# -- finding -----------------------------------------------------------------------------------------------------------


def _find(program: TemplateProgram, form: ChatFormat) -> ToolFormat:
  """The format, if the template has one; `_verify` shows that it has."""
  parameters = {'type': 'object', 'properties': {'qzPq': {'type': 'string'}}}
  tools = [_tool(name, description='qzDq', parameters=parameters) for name in ('qzMq', 'qzNq')]
  system, user = {'role': SYSTEM, 'content': _SYSTEM}, {'role': USER, 'content': _USER}
  text = program.render([system, user], opens=False, tools=tools)
  if 'qzMq' not in text or 'qzNq' not in text:
    raise TemplateError('it does not write tools')
  function_only = _dump(tools[0]) not in text
  first, second = (_dump(tool['function'] if function_only else tool) for tool in tools)
  if text.count(first) != 1 or text.count(second) != 1:
    raise TemplateError('it does not write tools as their JSON')
  between = text.partition(first)[2].partition(second)[0]
  marks = {first + between + second: Place.TOOLS}
  alone, behind_empty = (
    program.render([*system, user], opens=False, tools=tools) for system in ([], [{'role': SYSTEM, 'content': ''}])
  )
  return ToolFormat(
    with_system=_beginning(text, form, marks | {_SYSTEM: Place.SYSTEM}),
    without_system=_beginning(alone, form, marks),
    between_tools=between,
    function_only=function_only,
    skips_empty_system=behind_empty == alone,
    **_calls_and_results(program, form, tools),
  )


def _beginning(text: str, form: ChatFormat, marks: Mapping[str, Place]) -> tuple[str | Place, ...]:
  """The texts and places of a conversation's beginning, which one question follows."""
  around = form.around(USER, behind_system=True)
  begin, _, _ = text.partition(around.before + _USER)
  if text != begin + around.before + _USER + around.after:
    raise TemplateError('with tools it writes a question in another way')
  pieces = re.split(f'({"|".join(map(re.escape, marks))})', begin)
  if sorted(piece for piece in pieces if piece in marks) != sorted(marks):
    raise TemplateError('it drops or repeats tools or the system message')
  return tuple(marks.get(piece, piece) for piece in pieces if piece)


def _calls_and_results(program: TemplateProgram, form: ChatFormat, tools: Sequence[_Message]) -> dict[str, Any]:
  """The fields of the format about the calls of a reply and about their results."""
  calls = [('qzMq', {'qzPq': 'qzWq', 'qzOq': True}), ('qzNq', {})]
  asked = {'role': USER, 'content': _USER}
  found = [{'role': TOOL, 'content': text, 'tool_call_id': f'call_{k}'} for k, text in enumerate(_RESULTS)]
  messages = [asked, _reply(_REPLY, calls), *found, {'role': ASSISTANT, 'content': _REPLY}, asked]
  text = program.render(messages, opens=False, tools=tools).partition(_USER + form.user.after)[2]
  begun = form.assistant.before + form.content(ASSISTANT, _REPLY)
  before_calls = text.removeprefix(begun).partition(CALL)[0] if text.startswith(begun) else ''
  forms = [ToolFormat((), (), '', False, Around('', ''), '', call_form=x, before_calls=before_calls) for x in CallForm]
  written = [begun + _text(x.call_parts(_sent(calls), after_text=True)) + form.assistant.after for x in forms]
  tried = next((k for k, called in enumerate(written) if text.startswith(called)), None)
  if tried is None:
    theirs, ours = first_difference(text, written['<function=' in text])
    raise TemplateError(f'of the calls of a reply it writes {theirs} instead of {ours}')
  before, first, rest = text.removeprefix(written[tried]).partition(_RESULTS[0])
  between, second, rest = rest.partition(_RESULTS[1])
  after, reply, _ = rest.partition(begun + form.assistant.after)
  if not (first and second and reply):
    raise TemplateError('it drops or moves the results of calls')
  spaced = [message | {'content': f' {message["content"]}\n'} for message in found]
  recent = [asked, _reply('', calls), *spaced]
  strips = [message['content'] for message in found]
  last = program.render(recent, opens=False, tools=tools).partition(_USER + form.user.after)[2]
  return {
    'results': Around(before, after),
    'between_results': between,
    'strips_results': before + between.join(strips) + after in last,
    'call_form': forms[tried].call_form,
    'before_calls': before_calls,
    'empty_thoughts': form.thoughts is Thoughts.PAST and last.startswith(form.assistant.before + NO_THOUGHT),
  }


# -- verifying ---------------------------------------------------------------------------------------------------------

_ARGUMENTS = {'a "b"': [1, 2.5, None, True, {'é': '<b>&\n\\'}], 'c': {}, 'd': None, 'e': -2.5, 'f': ' x\n', 'g': True}
_TALK = (
  {'role': USER, 'content': 'one\n\n {{ x }}'},
  ('', [('look', _ARGUMENTS)]),
  {'role': TOOL, 'content': 'r é'},
  ('A  b.', []),
  {'role': USER, 'content': 'two'},
  ('So\n', [('look', {}), ('f.g-h', {'x': 'y'})]),
  {'role': TOOL, 'content': '<a>\n'},
  {'role': TOOL, 'content': ''},
  ('', [('look', {}), ('look', {'z': ['a']})]),
  {'role': TOOL, 'content': '{"x": 1}'},
  (f'{THOUGHT}\n\n hm\n\nno \n\n{END_THOUGHT}\n\nC', [('look', {})]),
  {'role': TOOL, 'content': 'r'},
  {'role': USER, 'content': 'three'},
)


def _verify(program: TemplateProgram, form: ChatFormat, tools: ToolFormat) -> None:
  """Raises TemplateError if the template writes one of other conversations in another way than the format."""
  schemas = [
    _tool('look', description='Looks "é" \\ <up>.', parameters={'type': 'object', 'properties': {}, 'required': []}),
    _tool('f.g-h'),
  ]
  talk = [_reply(*message) if isinstance(message, tuple) else message for message in _TALK]
  ends = [i for i, message in enumerate(talk, start=1) if message['role'] != ASSISTANT]
  systems = ([], *([{'role': SYSTEM, 'content': text}] for text in ('Be brief.\n', '', ' \n')))
  for system, listed in itertools.product(systems, (schemas, schemas[1:])):
    for end, opens in itertools.product(ends, (True, False)):
      messages = [*system, *talk[:end]]
      theirs, ours = program.render(messages, opens=opens, tools=listed), _write(form, tools, messages, listed, opens)
      if theirs != ours:
        theirs, ours = first_difference(theirs, ours)
        roles = ', '.join(message['role'] for message in messages)
        raise TemplateError(f'of {roles} it writes {theirs} where {ours} is expected')


def _write(
  form: ChatFormat, tools: ToolFormat, messages: Sequence[_Message], listed: Sequence[Any], opens: bool
) -> str:
  """A conversation as the format writes it; no reply is the last message."""
  system = messages[0]['content'] if messages[0]['role'] == SYSTEM else None
  parts = tools.beginning(None if system is None else form.strip(SYSTEM, system), list(map(_dump, listed)))
  rest = messages[system is not None :]
  asked = max(k for k, message in enumerate(rest) if message['role'] == USER)
  for k, (role, run) in enumerate(itertools.groupby(rest, key=lambda m: m['role'])):
    texts = list(run)
    if role == TOOL:
      results = [message['content'] for message in texts]
      parts += tools.result_turn([text.strip() if tools.strips_results else text for text in results])
    elif role == USER:
      around = form.around(USER, behind_system=k == 0)
      parts += [around.before + form.content(USER, message['content']) + around.after for message in texts]
    else:
      (message,) = texts
      calls = [(call['function']['name'], call['function']['arguments']) for call in message.get('tool_calls', ())]
      thought, text = form.reply(message['content'])
      if form.thoughts is Thoughts.PAST and any(message is x for x in rest[asked + 1 :]):
        thought = form.thought(message['content']) or (NO_THOUGHT if tools.empty_thoughts else '')
      written = tools.call_parts(_sent(calls), after_text=bool(text))
      parts += [form.assistant.before, thought + text, *written, form.assistant.after]
  return _text(parts) + (form.assistant.before + form.forced if opens else '')


def _reply(text: str, calls: Sequence[tuple[str, Any]]) -> dict[str, Any]:
  listed = [
    {'id': f'call_{k}', 'type': 'function', 'function': {'name': name, 'arguments': arguments}}
    for k, (name, arguments) in enumerate(calls)
  ]
  return {'role': ASSISTANT, 'content': text} | ({'tool_calls': listed} if listed else {})


def _sent(calls: Sequence[tuple[str, Any]]) -> list[tuple[str, str]]:
  """Calls with their arguments as JSON."""
  return [(name, _dump(arguments)) for name, arguments in calls]


def _text(parts: Sequence[Part]) -> str:
  return ''.join(part.text if isinstance(part, FormatText) else part for part in parts)
