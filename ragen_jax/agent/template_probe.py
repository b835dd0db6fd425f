"""Finds the chat format of a model from its tokenizer's chat template.

The template (`template_program`) writes conversations whose contents are unmistakable marks. What stands between the
marks is the format. Then it writes other conversations, and the format must write the same, so that a template which
moves, joins or rewrites messages is refused instead of followed wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragen_jax.agent.chat_template import (
  ASSISTANT,
  CHATML,
  END_THOUGHT,
  NO_THOUGHT,
  SYSTEM,
  THOUGHT,
  USER,
  Around,
  ChatFormat,
  Thoughts,
  write,
)
from ragen_jax.agent.template_program import TemplateError, TemplateProgram, first_difference, quoted
from ragen_jax.utils.errors import UserError

# The contents of the conversations that are compared.
_MARKS = {SYSTEM: 'qzSq', USER: 'qzUq', ASSISTANT: 'qzAq'}
_NEXT_SYSTEM, _NEXT_USER, _THOUGHT = 'qzTq', 'qzVq', 'qzHq'
_SPACE = ' \n'

_Messages = Sequence[tuple[str, str]]


def find_format(tokenizer: Any, where: str) -> ChatFormat:
  """The chat format of a tokenizer of `transformers`; plain ChatML if it has the tokens of ChatML and no template.

  Raises UserError, which says `where` the tokenizer comes from, if there is no template and no ChatML, or no
  conversation of the template can go on token by token.
  """
  if not tokenizer.chat_template:
    lacks = [text for text in ('<|im_start|>', '<|im_end|>') if tokenizer.backend_tokenizer.token_to_id(text) is None]
    if lacks:
      raise UserError(f'{where}: the tokenizer has no chat template and lacks {" and ".join(lacks)} of ChatML')
    return CHATML
  probe = _Probe(tokenizer, where)
  form = probe.find()
  _verify(probe, form)
  return form


class _Probe:
  """A template whose output is taken apart."""

  def __init__(self, tokenizer: Any, where: str):
    self._where = where
    self._added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    try:
      self._template = TemplateProgram(tokenizer, with_tools=False)
    except TemplateError as e:
      raise self.refused(str(e)) from e

  def refused(self, what: str) -> UserError:
    return UserError(f'{self._where}: its chat template cannot be continued token by token: {what}')

  def render(self, messages: _Messages, *, opens: bool, **options: Any) -> str:
    """The template's text of (role, content), with or without the opening of a reply."""
    sent = [{'role': role, 'content': content} for role, content in messages]
    try:
      return self._template.render(sent, opens=opens, **options)
    except TemplateError as e:
      raise self.refused(str(e)) from e

  def cut(self, messages: _Messages, marks: Sequence[str], *, opens: bool) -> list[str]:
    """The texts before, between and behind the marks; UserError if these are not there once each, in their order."""
    text = self.render(messages, opens=opens)
    pieces = []
    for mark in marks:
      before, found, text = text.partition(mark)
      pieces.append(before)
      if not found or mark in text:
        roles = ', '.join(role for role, _ in messages)
        raise self.refused(f'it drops, repeats or moves the content of a message of {roles}')
    return [*pieces, text]

  def find(self) -> ChatFormat:
    """The format, if the template has one; `_verify` shows that it has."""
    s, u, a = ((role, _MARKS[role]) for role in (SYSTEM, USER, ASSISTANT))
    v = (USER, _NEXT_USER)
    begin, s_u, u_a, a_v, last = self.cut([s, u, a, v], [x[1] for x in (s, u, a, v)], opens=True)
    user_after = self.cut([s, u], [s[1], u[1]], opens=False)[-1]
    assistant_after = self.cut([s, u, a], [s[1], u[1], a[1]], opens=False)[-1]
    user = Around(self._without(a_v, assistant_after, 'the text between a reply and a question'), user_after)
    before = self._without(u_a, user_after, 'the text between a question and a reply')
    assistant = Around(before.removesuffix(NO_THOUGHT), assistant_after)
    opening = 'the opening of a reply'
    forced = self._without(self._without(last, user_after, opening), assistant.before, opening)
    joins = not s_u.endswith(user.before) and begin.endswith(user.before)
    where = 'the text between system message and question'
    system = Around(begin, s_u if joins else self._before(s_u, user.before, where))
    no_system = self.cut([u], [u[1]], opens=False)[0]
    return ChatFormat(
      system=system,
      no_system=self._before(no_system, user.before, 'the beginning without a system message'),
      later_system=self._later_system(user, assistant),
      user=user,
      assistant=assistant,
      end=self._end(assistant_after),
      forced=forced,
      quiet=self._quiet([s, u], assistant),
      thoughts=self._thoughts(user, assistant, always=before.endswith(NO_THOUGHT)),
      stripped=self._stripped(),
      joins_system=joins,
    )

  def _without(self, text: str, prefix: str, what: str) -> str:
    if not text.startswith(prefix):
      raise self.refused(f'{what} is {quoted(text)} and should begin with {quoted(prefix)}')
    return text.removeprefix(prefix)

  def _before(self, text: str, suffix: str, what: str) -> str:
    if not text.endswith(suffix):
      raise self.refused(f'{what} is {quoted(text)} and should end with {quoted(suffix)}')
    return text.removesuffix(suffix)

  def _end(self, after: str) -> str:
    """The token that ends a reply."""
    found = [token.content for token in self._added if token.content and after.startswith(token.content)]
    if not found:
      raise self.refused(f'the text after a reply is {quoted(after)}, which begins with no token of the format')
    return max(found, key=len)

  def _quiet(self, messages: _Messages, assistant: Around) -> str | None:
    """The beginning of replies that shall not think; None if the template tells it before the reply."""
    text = self.render(messages, opens=True, enable_thinking=False)
    until_reply = self.render(messages, opens=False) + assistant.before
    return text.removeprefix(until_reply) if text.startswith(until_reply) else None

  def _later_system(self, user: Around, assistant: Around) -> Around | None:
    messages = [*_MARKS.items(), (SYSTEM, _NEXT_SYSTEM), (USER, _NEXT_USER)]
    try:
      *_, before, after, _ = self.cut(messages, [content for _, content in messages], opens=True)
      where = 'a later system message'
      return Around(self._without(before, assistant.after, where), self._before(after, user.before, where))
    except UserError:
      return None

  def _thoughts(self, user: Around, assistant: Around, *, always: bool) -> Thoughts:
    """What becomes of the thought of a reply, when the conversation goes on and when it does not.

    `always` tells whether a reply without a thought gets an empty one.
    """
    before, after = f'{THOUGHT}\n{_THOUGHT}\n{END_THOUGHT}', '\n\n'
    reply = (ASSISTANT, f'{before}{after}{_MARKS[ASSISTANT]}')
    question = (USER, _MARKS[USER])
    messages = [question, reply, (USER, _NEXT_USER)]
    shown = self.cut(messages, [_MARKS[USER], _MARKS[ASSISTANT], _NEXT_USER], opens=True)[1]
    shown = self._without(shown, user.after + assistant.before, 'the text between a question and a reply')
    if _THOUGHT in self.render([question, reply], opens=False) and shown == '':
      return Thoughts.PAST
    kinds = {before + after: Thoughts.ALWAYS if always else Thoughts.KEPT}
    kinds |= {} if always else {after: Thoughts.CUT, '': Thoughts.CUT_LINES}
    if shown not in kinds:
      raise self.refused(f'it writes {quoted(shown)} of the thought of an earlier reply')
    return kinds[shown]

  def _stripped(self) -> frozenset[str]:
    """The roles whose contents are stripped."""
    found = set()
    marks = [*_MARKS.values(), _NEXT_USER]
    messages = [*_MARKS.items(), (USER, _NEXT_USER)]
    plain = self.cut(messages, marks, opens=True)
    for i, (role, mark) in enumerate(_MARKS.items()):
      spaced = [*messages[:i], (role, _SPACE + mark + _SPACE), *messages[i + 1 :]]
      pieces = self.cut(spaced, marks, opens=True)[i : i + 2]
      if pieces == plain[i : i + 2]:
        found.add(role)
      elif pieces != [plain[i] + _SPACE, _SPACE + plain[i + 1]]:
        raise self.refused(f"it changes white space in the {role}'s messages, and not only at both ends")
    return frozenset(found)


def _verify(probe: _Probe, form: ChatFormat) -> None:
  """Raises UserError if the template writes one of other conversations in another way than the format."""
  # Where the text behind a thought stays in the conversation with it, blanks there and in the thought count too.
  hm, c = (' hm\n\nno ', ' C\n') if form.thoughts is Thoughts.ALWAYS else ('hm', 'C\n')
  talk = [
    (USER, 'one\n\n two {{ x }}'), (ASSISTANT, 'A  b.'), (USER, ' \n'), (ASSISTANT, '<a>\nb</a> '),
    (USER, f'{THOUGHT}hm{END_THOUGHT} é'), (ASSISTANT, f'{THOUGHT}{hm}{END_THOUGHT}\n\n{c}'), (USER, 'three\n'),
    (ASSISTANT, '\nD\n\n'), (USER, '\n\nfour'),
  ]  # fmt: skip
  for system in ([], [(SYSTEM, '\nBe brief.\n')]):
    for count in (1, 3, 5, 7, 9):
      messages = [*system, *talk[:count]]
      for opens in (True, False):
        theirs, ours = probe.render(messages, opens=opens), write(form, messages, opens=opens)
        if theirs != ours:
          theirs, ours = first_difference(theirs, ours)
          roles = ', '.join(role for role, _ in messages)
          raise probe.refused(f'of {roles} it writes {theirs} where {ours} stands in a shorter conversation')
