"""The five forms of replies (VAGEN, arXiv 2510.16907, section 3): their tags, request and reader.

A reply is of a form if it has exactly the tags of the form, each once and in order, and nothing but blanks outside the
innermost tags. Reading takes one pass over the text and never raises.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping

# The form's name -> what is between <think> tags: the sections in their order, () for the thought itself, None for no
# thought.
FORMATS: dict[str, tuple[str, ...] | None] = {
  'no_think': None,
  'free_think': (),
  'state_estimation': ('observation', 'reasoning'),
  'transition_modeling': ('reasoning', 'prediction'),
  'world_modeling': ('observation', 'reasoning', 'prediction'),
}
# Sections that describe a board: before the actions of the turn, and after them.
OBSERVATION, PREDICTION = 'observation', 'prediction'

_CONTENTS = {
  'think': 'your thoughts',
  'observation': 'the {shown_as} as you see it',
  'reasoning': 'your plan',
  'prediction': 'the {shown_as} after your actions',
  'answer': 'your actions',
}
# Texts of an example: short, and true of every board.
_EXAMPLES = {
  'think': 'I look at the state and choose the next step.',
  'observation': 'what stands where, seen from me',
  'reasoning': 'I look at the state and choose the next step.',
  'prediction': 'what will stand where',
}
_TAG = re.compile(rf'<(/?)({"|".join(_CONTENTS)})>')
_THOUGHT_END = re.compile(r'</think>\s*<answer>')


@dataclasses.dataclass(frozen=True)
class Sections:
  """A reply by its tags.

  Attributes:
    correct: whether the reply is of its form.
    texts: name of an innermost tag -> its text; empty if the reply is not of its form.
  """

  correct: bool
  texts: dict[str, str]


def has_thought(form: str) -> bool:
  """Whether a form has text between <think> tags."""
  return FORMATS[form] is not None


def described_sections(form: str) -> tuple[str, ...]:
  """The sections of a form that describe a board: of `OBSERVATION` and `PREDICTION` those that it has."""
  return tuple(name for name in (OBSERVATION, PREDICTION) if name in innermost_tags(form))


def opening_tags(form: str) -> str:
  """The tags before the first text of a reply."""
  return f'<think><{innermost_tags(form)[0]}>' if FORMATS[form] else f'<{innermost_tags(form)[0]}>'


def innermost_tags(form: str) -> tuple[str, ...]:
  """The tags of a form that contain text, in order."""
  sections = FORMATS[form]
  return (*(() if sections is None else sections or ('think',)), 'answer')


def read_sections(reply: str, form: str) -> Sections:
  """Reads a reply of a form, a key of `FORMATS`, with its forced prefix and without its stop token."""
  names = innermost_tags(form)
  wrapped = bool(FORMATS[form])
  inner = [(slash, name) for name in names for slash in ('', '/')]
  expected = [('', 'think'), *inner[:-2], ('/', 'think'), *inner[-2:]] if wrapped else inner
  texts, end, opened = {}, 0, ''
  number = 0
  for tag in _TAG.finditer(reply):
    if number == len(expected) or tag.groups() != expected[number]:
      return Sections(False, {})
    slash, name = tag.groups()
    between = reply[end : tag.start()]
    if slash and opened == name:
      texts[name] = between
    elif between.strip():
      return Sections(False, {})
    opened = '' if slash or (wrapped and name == 'think') else name
    end, number = tag.end(), number + 1
  if number < len(expected) or reply[end:].strip():
    return Sections(False, {})
  return Sections(True, texts)


def read_answer(reply: str, form: str) -> str | None:
  """The text of a reply's answer, also if the reply is not of its form; None if no answer can be read.

  Without sections, the reply must begin in its form. With sections, the first answer behind the thought counts.
  """
  if FORMATS[form]:
    _, opened, rest = reply.rpartition('</think>')[2].partition('<answer>')
  elif FORMATS[form] is None:
    before, opened, rest = reply.partition('<answer>')
    opened = opened and not before.strip()
  else:
    opened = _THOUGHT_END.search(reply) if reply.lstrip().startswith('<think>') else None
    rest = reply[opened.end() :] if opened else ''
  answer, closed, _ = rest.partition('</answer>')
  return answer if opened and closed else None


def write_reply(form: str, texts: Mapping[str, str]) -> str:
  """A reply of a form with texts by tag, for the tags of `innermost_tags`; the inverse of `read_sections`."""
  written = [f'<{name}>{texts[name]}</{name}>' for name in innermost_tags(form)]
  thought = ''.join(written[:-1])
  return (f'<think>{thought}</think>' if FORMATS[form] else thought) + written[-1]


@functools.lru_cache(maxsize=256)
def describe_form(form: str, answer: str = _CONTENTS['answer'], shown_as: str = 'board') -> str:
  """A form with descriptions in place of its texts: '<think>your thoughts</think><answer>your actions</answer>'.

  `shown_as` names what the game shows (`Game.shown_as`).
  """
  texts = {tag: text.format(shown_as=shown_as) for tag, text in _CONTENTS.items()}
  return write_reply(form, texts | {'answer': answer})


@functools.lru_cache(maxsize=256)
def example_of(form: str, answer: str) -> str:
  """A whole reply of a form with short texts and an answer."""
  return write_reply(form, _EXAMPLES | {'answer': answer})
