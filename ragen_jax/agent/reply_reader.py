"""Replies as they are sampled, thought, content and tool calls.

    <think> thought </think> content <tool_call> call </tool_call>

A tag counts where the policy sampled its token; a spelling of the tag in other tokens is text. In a model without such
a token, the spelling is the tag. Text that may begin a tag is held back until that is decided, so the parts of a
streamed reply are those of the whole reply. The time is linear in the length of the reply.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ragen_jax.agent.chat_template import END_THOUGHT, THOUGHT
from ragen_jax.utils.tool_calls import CALL, END_CALL, Problem, ToolCall


class BadCalls(enum.StrEnum):
  """What becomes of a call that cannot be read."""

  CONTENT = 'content'  # its text is content
  ARGUMENTS = 'arguments'  # a call whose arguments are the raw text, if its name can be read; otherwise content


@dataclasses.dataclass(frozen=True)
class ContentDelta:
  """The content goes on."""

  text: str


@dataclasses.dataclass(frozen=True)
class ThoughtDelta:
  """The thought goes on."""

  text: str


@dataclasses.dataclass(frozen=True)
class CallDone:
  """A tool call is complete."""

  call: ToolCall


Event = ContentDelta | ThoughtDelta | CallDone


@dataclasses.dataclass(frozen=True)
class ParsedReply:
  """A reply that was read: what is outside of thoughts and calls is content; `problems` are those of calls that cannot
  be read."""

  content: str
  thought: str
  calls: tuple[ToolCall, ...]
  problems: tuple[Problem, ...]
  thought_tokens: int


class _State(enum.Enum):
  THOUGHT = enum.auto()
  CONTENT = enum.auto()
  CALL = enum.auto()


class ReplyReader:
  """Reads one reply, piece by piece."""

  def __init__(
    self,
    tags: Sequence[str],
    ids: Mapping[int, str],
    decode: Callable[[Sequence[int]], str],
    *,
    in_thought: bool,
    bad_calls: BadCalls,
    parallel: bool,
    call_id: Callable[[int], str],
    read_call: Callable[[str], tuple[str, str, Problem | None]],
    before_calls: str,
  ):
    """Begins a reply, within a thought if `in_thought`; for the arguments after it, see `QwenFormat.reader`.

    `ids` are the tags that have tokens, by id. Unless all of `tags` are among them, tags are found by their spelling.
    """
    self._tags: _TagsByText | _TagsById = _TagsById(ids, decode) if ids and len(ids) == len(tags) else _TagsByText(tags)
    self._bad_calls, self._parallel, self._call_id = bad_calls, parallel, call_id
    self._read_call, self._before_calls = read_call, before_calls
    self._calls_are_read = CALL in tags
    self._state = _State.THOUGHT if in_thought else _State.CONTENT
    self._begun = False  # the present thought or content has text
    self._held: list[str] = []  # white space that a tag may follow
    self._block: list[str] = []  # the text of the present call
    self._after_thought = False
    self._content: list[str] = []
    self._thought: list[str] = []
    self._calls: list[ToolCall] = []
    self._problems: list[Problem] = []
    self._in_thought, self._thinks = in_thought, False  # whether the reply begins in a thought, or opens one
    self._ids = ids
    self._sampled: list[int] = []

  def feed(self, ids: Sequence[int], text: str) -> list[Event]:
    """The events of newly sampled ids and of the text that became known with them."""
    self._sampled += ids
    return _merge(event for text, tag in self._tags.feed(ids, text) for event in self._advance(text, tag))

  def finish(self) -> list[Event]:
    """The events of the end of the reply."""
    events = [event for text, tag in self._tags.finish() for event in self._advance(text, tag)]
    if self._state is _State.CALL:
      events += self._end_call(closed=False)
    if self._state is _State.CONTENT and (self._begun or not self._calls):
      events += self._release()
    self._held.clear()
    return _merge(events)

  def reply(self) -> ParsedReply:
    """The reply, as far as it was read."""
    content, thought = ''.join(self._content), ''.join(self._thought)
    return ParsedReply(content, thought, tuple(self._calls), tuple(self._problems), self._thought_tokens())

  def _thought_tokens(self) -> int:
    """Number of ids of the thought, its tags included."""
    tags = [self._ids.get(i, '') for i in self._sampled]
    opened = self._thinks and THOUGHT in tags  # a spelled tag has no token, so its thought is not counted
    start = 0 if self._in_thought else tags.index(THOUGHT) if opened else len(tags)
    end = tags.index(END_THOUGHT, start) + 1 if END_THOUGHT in tags[start:] else len(tags)
    return end - start

  def _advance(self, text: str, tag: str) -> Iterator[Event]:
    """Events of a text and of the tag after it; the tag is '' where the text goes on."""
    if self._state is _State.CALL:
      if tag != END_CALL:
        self._block.append(text + tag)
        return
      self._block.append(text)
      yield from self._end_call(closed=True)
    elif self._state is _State.THOUGHT:
      ends = tag == END_THOUGHT
      yield from self._add(text if ends else text + tag)
      if ends:
        self._state, self._begun, self._after_thought = _State.CONTENT, False, True
        self._held.clear()
    elif tag == THOUGHT and not (self._begun or self._calls or self._after_thought or text.strip()):
      self._state, self._thinks = _State.THOUGHT, True
      self._held.clear()
    elif tag == CALL:
      yield from self._add(text)
      self._state = _State.CALL
    else:
      yield from self._add(text + tag)

  def _add(self, text: str) -> Iterator[Event]:
    """Adds text to the thought or the content; the white space at its end, and at the beginning of all, is held."""
    if not text:
      return
    if not self._begun and not text.strip():
      self._held.append(text)
      return
    if not self._begun:
      text = ''.join(self._held) + text
      self._held.clear()
      if self._state is _State.THOUGHT or self._after_thought:
        text = text.lstrip('\n')
      elif self._calls:
        text = text.removeprefix('\n')
      self._begun = True
    holds = self._state is _State.THOUGHT or self._calls_are_read
    end = len(text.rstrip('\n')) if holds else len(text)
    if end:
      yield from self._release()
      yield self._emit(text[:end])
    if end < len(text):
      self._held.append(text[end:])

  def _release(self) -> Iterator[Event]:
    """Emits the white space that is held: no tag follows it."""
    text = ''.join(self._held)
    self._held.clear()
    text = text.lstrip('\n') if self._after_thought and not self._begun else text
    if text:
      yield self._emit(text)

  def _emit(self, text: str) -> Event:
    if self._state is _State.THOUGHT:
      self._thought.append(text)
      return ThoughtDelta(text)
    self._content.append(text)
    return ContentDelta(text)

  def _end_call(self, *, closed: bool) -> list[Event]:
    """The events of a call whose text is complete."""
    text = ''.join(self._block)
    self._block.clear()
    self._state = _State.CONTENT
    name, arguments, problem = self._read_call(text)
    problem = problem if closed else Problem.UNCLOSED_BLOCK
    if problem is not None:
      self._problems.append(problem)
      if not name or self._bad_calls is BadCalls.CONTENT:
        return list(self._add(f'{CALL}{text}{END_CALL if closed else ""}'))
    # What stands before the calls belongs to their form; white space alone is no content.
    held = ''.join(self._held).removesuffix(self._before_calls) if self._begun else ''
    self._held = [held] if held else []
    events = list(self._release())
    self._begun = False
    if self._parallel or not self._calls:
      self._calls.append(ToolCall(self._call_id(len(self._calls)), name, arguments))
      events.append(CallDone(self._calls[-1]))
    return events


def _merge(events: Iterable[Event]) -> list[Event]:
  """Joins neighbours of content and of thought."""
  merged: list[Event] = []
  for kind, run in itertools.groupby(events, type):
    found = list(run)
    merged += found if kind is CallDone else [kind(''.join(event.text for event in found))]
  return merged


class _TagsByText:
  """Cuts a growing text at tags by their spelling."""

  def __init__(self, tags: Sequence[str]):
    self._found = re.compile('|'.join(map(re.escape, tags))) if tags else None
    # A beginning of a tag at the end of the text, longest first.
    starts = sorted({re.escape(tag[:n]) for tag in tags for n in range(1, len(tag))}, key=len, reverse=True)
    self._start = re.compile(rf'(?:{"|".join(starts)})\Z')
    self._longest = max(map(len, tags), default=1) - 1
    self._held = ''

  def feed(self, ids: Sequence[int], text: str) -> Iterator[tuple[str, str]]:
    """Pairs of a text and the tag after it, '' for none."""
    del ids
    if self._found is None:
      yield text, ''
      return
    text, at = self._held + text, 0
    for match in self._found.finditer(text):
      yield text[at : match.start()], match.group()
      at = match.end()
    begun = self._start.search(text, max(at, len(text) - self._longest))
    end = begun.start() if begun else len(text)
    self._held = text[end:]
    yield text[at:end], ''

  def finish(self) -> Iterator[tuple[str, str]]:
    yield self._held, ''


class _TagsById:
  """Cuts a growing text at tags by their ids.

  The text can lag behind the ids, and can end before them if a stop text ended the reply.
  """

  def __init__(self, ids: Mapping[int, str], decode: Callable[[Sequence[int]], str]):
    self._ids, self._decode = ids, decode
    self._since: list[int] = []  # ids since the last tag
    self._end = 0  # position in the text after the last tag
    self._tags: collections.deque[tuple[int, str]] = collections.deque()  # position and spelling of tags to come
    self._at = 0  # position of `_held` in the text
    self._held = ''

  def feed(self, ids: Sequence[int], text: str) -> Iterator[tuple[str, str]]:
    for i in ids:
      if i in self._ids:
        start = self._end + len(self._decode(self._since)) if self._since else self._end
        self._tags.append((start, self._ids[i]))
        self._end = start + len(self._ids[i])
        self._since.clear()
      else:
        self._since.append(i)
    text, at = self._held + text, 0
    while self._tags and self._tags[0][0] + len(self._tags[0][1]) <= self._at + len(text):
      position, tag = self._tags.popleft()
      start = position - self._at
      if start >= at and text.startswith(tag, start):
        yield text[at:start], tag
        at = start + len(tag)
    end = max(at, min(len(text), self._tags[0][0] - self._at)) if self._tags else len(text)
    self._held, self._at = text[end:], self._at + end
    yield text[at:end], ''

  def finish(self) -> Iterator[tuple[str, str]]:
    """The text that was held back: a stop text cut a tag."""
    yield self._held, ''
