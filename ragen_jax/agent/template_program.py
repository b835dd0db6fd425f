"""A chat template as a program: messages to text, in the sandbox of `transformers`, without a clock."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ragen_jax.utils.errors import one_line

# Templates that tell the date get this one every day, the one that Llama 3.2's has without a clock: a run that goes on
# tomorrow must see the prompts of today. `transformers` passes no function to a template, so it is a macro.
_DATE = {'%d': '26', '%b': 'Jul', '%B': 'July', '%m': '07', '%Y': '2024', '%y': '24', '%A': 'Friday', '%a': 'Fri',
         '%H': '00', '%M': '00', '%S': '00', '%-d': '26', '%e': '26', '%-m': '7', '%F': '2024-07-26', '%T': '00:00:00',
         '%I': '12', '%p': 'AM'}  # fmt: skip
_CLOCK = 'strftime_now'
_STOPPED_CLOCK = (
  f'{{% macro {_CLOCK}(format) %}}{{{{ format'
  + ''.join(f'|replace({name!r}, {value!r})' for name, value in _DATE.items())
  + " }}{% endmacro %}{{ '' }}"
)
_SHOWN = 40


class TemplateError(ValueError):
  """What a template does that cannot be followed; the message goes on behind "the template"."""


class TemplateProgram:
  """The chat template of a tokenizer of `transformers`; that for conversations with tools, if there are several."""

  def __init__(self, tokenizer: Any, *, with_tools: bool):
    """Raises TemplateError if there are several templates, and none is for such conversations."""
    self._tokenizer = tokenizer
    try:
      template = tokenizer.get_chat_template(tools=[] if with_tools else None)
    except ValueError as e:
      raise TemplateError('there are several, and none of them is the default') from e
    self._template = _STOPPED_CLOCK + template if _CLOCK in template else template

  def render(self, messages: Sequence[Mapping[str, Any]], *, opens: bool, **options: Any) -> str:
    """The template's text of messages, with or without the opening of a reply. Raises TemplateError if it fails."""
    try:
      return self._tokenizer.apply_chat_template(
        list(messages), chat_template=self._template, tokenize=False, add_generation_prompt=opens, **options
      )
    except Exception as e:  # a template may raise anything
      roles = ', '.join(str(message['role']) for message in messages)
      reason = one_line(e, str)[:160]
      raise TemplateError(f'it fails for a conversation of {roles} ({type(e).__name__}: {reason})') from e


def quoted(text: str) -> str:
  """The beginning of a text in quotes, on one line."""
  return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + '…')


def first_difference(a: str, b: str) -> tuple[str, str]:
  """What stands in each of two texts from their first difference on, `quoted`."""
  shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
  at = len(list(shared))
  return quoted(a[at:]), quoted(b[at:])
