"""The chat format of a model: which texts stand around the messages of a conversation.

`template_probe` finds it from the chat template of a tokenizer. A conversation in it goes on token by token: what the
format writes behind a reply does not change what stands before.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Sequence

SYSTEM, USER, ASSISTANT, TOOL = 'system', 'user', 'assistant', 'tool'
THOUGHT, END_THOUGHT = '<think>', '</think>'
NO_THOUGHT = f'{THOUGHT}\n\n{END_THOUGHT}\n\n'  # an empty thought, as templates write it


@dataclasses.dataclass(frozen=True)
class Around:
  """The text before and after the content of a message."""

  before: str
  after: str


class Thoughts(enum.StrEnum):
  """What a template writes of a reply with a thought, `<think>…</think>`, once the conversation has gone on."""

  KEPT = 'kept'  # all of it
  CUT = 'cut'  # the text behind the thought
  CUT_LINES = 'cut_lines'  # the same without newlines at its beginning
  PAST = 'past'  # like `CUT_LINES`; replies that no question follows keep the thought
  ALWAYS = 'always'  # all of it; a reply without a thought gets an empty one


@dataclasses.dataclass(frozen=True)
class ChatFormat:
  """The texts of a chat template.

  Attributes:
    system: around a system message, with the beginning of the conversation.
    no_system: the beginning of a conversation without a system message, which may hold a default one.
    later_system: around a system message that is not the first message; None if the template has no place for it.
    user: around a message of the user.
    assistant: around a reply.
    end: the text of the token that ends a reply, the beginning of `assistant.after`.
    forced: the beginning of every reply that the template puts into the prompt, such as '<think>\\n'; mostly ''.
    quiet: the same for replies that shall not think; None if the template has another way to say so.
    thoughts: what becomes of thoughts.
    stripped: roles whose contents lose the white space at both ends.
    joins_system: whether a system message begins the turn of the first question, so that `system.before` stands in
      place of `user.before`.
  """

  system: Around
  no_system: str
  later_system: Around | None
  user: Around
  assistant: Around
  end: str
  forced: str
  quiet: str | None
  thoughts: Thoughts
  stripped: frozenset[str]
  joins_system: bool = False

  @property
  def separator(self) -> str:
    """The text between a reply's end and the next message."""
    return self.assistant.after.removeprefix(self.end)

  @property
  def default_system(self) -> str | None:
    """The content of the system message that stands where none is given; None if there is none, or an empty one."""
    before, after = self.system.before, self.system.after
    inside = self.no_system.startswith(before) and self.no_system.endswith(after)
    return self.no_system[len(before) : len(self.no_system) - len(after)] or None if inside else None

  @property
  def texts(self) -> tuple[str, ...]:
    """All fixed texts but those at the beginning of replies."""
    arounds = (self.system, self.user, self.assistant, *([self.later_system] if self.later_system else []))
    return (self.no_system, *(text for around in arounds for text in (around.before, around.after)))

  # -- writing ---------------------------------------------------------------------------------------------------------

  def content(self, role: str, text: str) -> str:
    """The content of a message as the template writes it, of an earlier reply with the thought that it keeps."""
    return ''.join(self.reply(text)) if role == ASSISTANT else self.strip(role, text)

  def reply(self, text: str) -> tuple[str, str]:
    """The thought that the template writes of an earlier reply, with its tags, and the rest."""
    thinks = END_THOUGHT in text
    if self.thoughts is Thoughts.ALWAYS:
      text = self.strip(ASSISTANT, text)
      return self.thought(text) or NO_THOUGHT, text.rpartition(END_THOUGHT)[2].lstrip('\n') if thinks else text
    if thinks and self.thoughts is not Thoughts.KEPT:
      text = text.rpartition(END_THOUGHT)[2]
      text = text if self.thoughts is Thoughts.CUT else text.lstrip('\n')
    return '', self.strip(ASSISTANT, text)

  def thought(self, text: str) -> str:
    """The thought of a reply as templates write it that show it, with its tags; '' if it has none."""
    if END_THOUGHT not in text:
      return ''
    inside = text.partition(END_THOUGHT)[0].rpartition(THOUGHT)[2]
    inside = inside.strip() if ASSISTANT in self.stripped else inside.strip('\n')
    return f'{THOUGHT}\n{inside}\n{END_THOUGHT}\n\n'

  def strip(self, role: str, text: str) -> str:
    """The content of a message without the white space that the template removes."""
    return text.strip() if role in self.stripped else text

  def around(self, role: str, *, behind_system: bool = False) -> Around:
    """The texts around a message of the user or the assistant, which may be the first behind a system message."""
    if behind_system and self.joins_system:
      return Around('', self.user.after)
    return self.user if role == USER else self.assistant

  def talk(self, messages: Sequence[tuple[str, str]], *, system: str | None = None, first: bool = False) -> str:
    """Messages (role, text) of user and assistant with the texts around them.

    If they are the `first`, the beginning of the conversation stands before them, with its system message.
    """
    written = self.beginning(system) if first else ''
    for i, (role, text) in enumerate(messages):
      around = self.around(role, behind_system=first and i == 0 and system is not None)
      written += around.before + self.content(role, text) + around.after
    return written

  def beginning(self, system: str | None) -> str:
    """The beginning of a conversation, up to the first message that is not the system's."""
    if system is None:
      return self.no_system
    return self.system.before + self.content(SYSTEM, system) + self.system.after

  @property
  def no_thought(self) -> str:
    """What the template forces where replies do not think by default, an empty thought; '' for all others."""
    return self.forced if self.forced.startswith(THOUGHT) and END_THOUGHT in self.forced else ''

  def reply_prefix(self, tags: str) -> str:
    """The text at the beginning of a reply that is not sampled: what the template forces, then the forced `tags`.

    If `tags` begin with the template's tag, the tag stands once, as the template writes it. Tags that begin a thought
    take the place of an empty one.
    """
    forced = f'{THOUGHT}\n' if self.no_thought and tags.startswith(THOUGHT) else self.forced
    if tags.startswith(forced):
      return tags
    return forced + tags.removeprefix(forced.strip())

  def spelled_prefix(self, tags: str) -> str:
    """`reply_prefix` without the white space that the template adds to tags, as whole replies are written.

    An empty thought that the template forces is no part of a reply.
    """
    tag = '' if self.no_thought else self.forced.strip()
    return tags if tags.startswith(tag) else tag + tags

  # -- reading ---------------------------------------------------------------------------------------------------------

  def messages(self, text: str) -> list[tuple[str, str]]:
    """The (role, content) of each message of a conversation; a reply that is not closed at its end is left out."""
    named = self._around_names()
    if named is not None:
      return _named_messages(text, *named, self.end)
    roles = {around.before: role for role, around in ((USER, self.user), (ASSISTANT, self.assistant)) if around.before}
    places = [(m.start(), m.end(), roles[m[0]]) for m in re.finditer('|'.join(map(re.escape, roles)), text)]
    ends = [start for start, _, _ in places[1:]] + [len(text)]
    start = places[0][0] if places else len(text)
    system = text[:start].removeprefix(self.system.before).removesuffix(self.system.after)
    system = self.default_system if text[:start] == self.no_system else system
    found = [(SYSTEM, system)] if system else []
    for (_, begin, role), end in zip(places, ends, strict=True):
      content = text[begin:end]
      if role == USER:
        found.append((role, content.removesuffix(self.user.after)))
      elif self.end in content:
        found.append((role, content[: content.rindex(self.end)]))
    return found

  def _around_names(self) -> tuple[str, str] | None:
    """The texts before and after a role's name, if all roles are written in one way; None otherwise."""
    if self.user.before.count(USER) != 1:
      return None
    before, _, after = self.user.before.partition(USER)
    others = ((SYSTEM, self.system), (USER, self.user), (ASSISTANT, self.assistant))
    same = all(a == Around(f'{before}{role}{after}', self.assistant.after) for role, a in others)
    return (before, after) if same and before and after else None


def _named_messages(text: str, before: str, after: str, end: str) -> list[tuple[str, str]]:
  opening = re.compile(rf'{re.escape(before)}(\w+){re.escape(after)}')
  found: list[tuple[str, str]] = []
  for part in text.split(end)[:-1]:
    match = opening.search(part)
    if match is not None:
      found.append((match[1], part[match.end() :]))
  return found


def write(form: ChatFormat, messages: Sequence[tuple[str, str]], *, opens: bool) -> str:
  """A conversation of (role, content) as the template writes it, and with `opens` the opening of a reply.

  A system message is the first, and a reply is not the last.
  """
  first = [text for role, text in messages[:1] if role == SYSTEM]
  written = form.talk(messages[len(first) :], system=first[0] if first else None, first=True)
  return written + (form.assistant.before + form.forced if opens else '')


CHATML = ChatFormat(
  system=Around('<|im_start|>system\n', '<|im_end|>\n'),
  no_system='',
  later_system=Around('<|im_start|>system\n', '<|im_end|>\n'),
  user=Around('<|im_start|>user\n', '<|im_end|>\n'),
  assistant=Around('<|im_start|>assistant\n', '<|im_end|>\n'),
  end='<|im_end|>',
  forced='',
  quiet='',
  thoughts=Thoughts.KEPT,
  stripped=frozenset(),
)
"""The format of tokenizers that have its tokens and no template of their own."""
