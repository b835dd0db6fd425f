"""Conversation: a model's chat format with tools and thoughts, messages to token ids.

Text of a client never becomes a special token, so no message can end its turn or call a tool. What stands around
messages, tools and results is that of the model's chat template (`agent.chat_template`, `agent.tool_format`), and so is
the form of calls. Their tags are tokens if the tokenizer has them, otherwise text.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import re
from collections.abc import Callable, Iterator, Sequence

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.chat_template import END_THOUGHT, THOUGHT, Around, Thoughts
from ragen_jax.agent.reply_reader import BadCalls, ReplyReader
from ragen_jax.agent.segments import ImageSegment, ImageSpan, TextSegment, stripped
from ragen_jax.agent.tool_format import FormatText, Part
from ragen_jax.serving.conversation.messages import (
  Message,
  Role,
  TemplateOptions,
  Tool,
  canonical,
)
from ragen_jax.serving.errors import bad_request
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.tool_calls import CALL, END_CALL, ToolCall, dump_json, parse_json

_RESULT, _END_RESULT = '<tool_response>', '</tool_response>'


@dataclasses.dataclass(frozen=True)
class _Fixed:
  """Text of the format without its tokens."""

  text: str


# A part of a prompt: text of any origin, text of the format, the id of a token of the format, or an image.
_Item = str | _Fixed | int | ImageSegment


class Family(enum.StrEnum):
  """What a model tells apart by tokens."""

  QWEN3 = 'qwen3'  # thoughts, and mostly tool calls
  QWEN25 = 'qwen2.5'  # tool calls
  PLAIN = 'plain'  # neither


class QwenFormat:
  """Writes conversations as token ids, and makes the readers of replies; `stop_id` ends a message."""

  def __init__(self, tokenizer: ChatTokenizer, *, keep_thoughts: bool):
    """Finds the family from the tokenizer and its template.

    If not `keep_thoughts`, thoughts are left out where the model's template does so, in Qwen3's before the last message
    of the user. UserError for a special token of one character, which text cannot avoid.
    """
    self._tokenizer, self._keep_thoughts, self._form = tokenizer, keep_thoughts, tokenizer.format
    added = tokenizer.added
    self.stop_id = tokenizer.stop_ids[0]
    calls = (CALL, END_CALL) if CALL in added and END_CALL in added else ()
    thinks = self._form.thoughts is not Thoughts.KEPT and THOUGHT in added and END_THOUGHT in added
    marks = (*calls, *((THOUGHT, END_THOUGHT) if thinks else ()))
    self.family = Family.QWEN3 if thinks else Family.QWEN25 if calls else Family.PLAIN
    forbidden = tuple(added) if marks else tuple(text for text in tokenizer.specials if text in added)
    short = [text for text in forbidden if len(text) < 2]
    if short:
      raise UserError(f'the tokenizer has the special token {short[0]!r} of one character; text could become it')
    self._marks = {text: added[text] for text in marks}
    self._forbidden_ids = frozenset(added[text] for text in forbidden)
    self._forbidden = re.compile('|'.join(map(re.escape, forbidden)))
    self._spelled = re.compile('|'.join(map(re.escape, tokenizer.marks))) if tokenizer.marks else None
    self._tokens = re.compile(f'({"|".join(map(re.escape, sorted(forbidden, key=len, reverse=True)))})')
    opening = [item for item in self._fixed(self._form.assistant.before) if isinstance(item, int)]
    self._turn_ids = frozenset((*opening, self.stop_id))

  # -- prompts ---------------------------------------------------------------------------------------------------------

  def render(self, messages: Sequence[Message], tools: Sequence[Tool], options: TemplateOptions) -> tuple[int, ...]:
    """The ids of a whole prompt, up to the opening of the reply."""
    return self._encode(self._begun(messages, tools) + self._opening(options))

  def following(
    self, messages: Sequence[Message], tools: Sequence[Tool], options: TemplateOptions, *, closed: bool
  ) -> tuple[int, ...] | None:
    """The ids between a reply and the next one; None if the template leaves out thoughts of replies before `messages`.

    The system message lists the tools already. A reply that is `closed` ended with `stop_id`; otherwise this is added.
    """
    del tools
    if not self._keep_thoughts and self._drops_thoughts_before(messages):
      return None
    end = self._fixed(self._form.separator if closed else self._form.assistant.after)
    return self._encode(end + self._messages(messages) + self._opening(options))

  def turns(
    self, messages: Sequence[Message], tools: Sequence[Tool]
  ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The ids before each reply, and those of the reply with its stop token, as if the replies had been sampled.

    What the template forces at the beginning of a reply stands before it. Messages behind the last reply are left out.
    """
    start = 0
    for i, message in enumerate(messages):
      if message.role is not Role.ASSISTANT:
        continue
      between = messages[start:i]
      before = self._fixed(self._form.separator) + self._messages(between) if start else self._begun(between, tools)
      forced, reply = self._forced(self._reply(message, recent=False, last=False))
      yield (
        self._encode(before + self._fixed(self._form.assistant.before) + forced),
        (*self._encode(reply), self.stop_id),
      )
      start = i + 1

  def _forced(self, reply: Sequence[_Item]) -> tuple[list[_Item], list[_Item]]:
    """What the template forces of a reply, and the rest; nothing if the reply begins in another way.

    Where replies do not think by default, the template forces an empty thought, which is no part of a reply.
    """
    rest = list(reply)
    forced = self._fixed(self._form.forced)
    if self._form.no_thought and rest[:1] != [self._marks.get(THOUGHT)]:
      return forced, rest
    for item in forced:
      if rest[:1] == [item]:
        rest.pop(0)
      elif isinstance(item, _Fixed) and rest and isinstance(rest[0], str) and rest[0].startswith(item.text):
        rest[:1] = [rest[0].removeprefix(item.text)] if rest[0] != item.text else []
      else:
        return [], list(reply)
    return forced, rest

  def encode_untrusted(self, text: str) -> tuple[int, ...]:
    """The ids of a text, none of which is a special token; with tool tokens, none is an added token at all.

    A spelling of such a token is cut after its first character, and the parts are encoded one by one.
    """
    return self._without_tokens(self._without_marks(text))

  def _without_marks(self, text: str) -> str:
    """The text with a space in each mark of the format that has no token."""
    if self._spelled is None:
      return text
    return self._spelled.sub(lambda found: f'{found[0][:1]} {found[0][1:]}', text)

  def _without_tokens(self, text: str) -> tuple[int, ...]:
    cuts = [match.start() + 1 for match in self._forbidden.finditer(text)]
    ids = self._join(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))
    if self._forbidden_ids.isdisjoint(ids):
      return ids
    return self._join(text)  # spellings that overlap, or that Unicode normalisation made: character by character

  def _join(self, parts) -> tuple[int, ...]:
    return tuple(i for part in parts if part for i in self._tokenizer.encode_once(part))

  def _encode(self, items: Sequence[_Item]) -> tuple[int, ...]:
    """Ids of items; adjacent texts are encoded as one text, as the template does."""
    ids: list[int] = []
    texts: list[str] = []
    for item in (*items, None):
      if isinstance(item, str | _Fixed):
        texts.append(item.text if isinstance(item, _Fixed) else self._without_marks(item))
        continue
      ids += self._without_tokens(''.join(texts))
      texts.clear()
      if item is not None:
        ids += self._tokenizer.image_ids(item.columns) if isinstance(item, ImageSegment) else (item,)
    return tuple(ids)

  def images(self, ids: Sequence[int], images: Sequence[ImageSegment]) -> tuple[ImageSpan, ...]:
    """Where images are in the ids of their prompt, whose placeholders are theirs; texts and replies have none."""
    found, start = [], 0
    for image in images:
      start = ids.index(self.placeholder, start)
      found.append(ImageSpan(image, start, start + image.columns))
      start += image.columns
    return tuple(found)

  @property
  def placeholder(self) -> int | None:
    """The id that stands for each token of an image; None for a model that reads text only."""
    return self._tokenizer.placeholder

  def _fixed(self, text: str) -> list[_Item]:
    """A text of the format, with its tokens."""
    added, parts = self._tokenizer.added, self._tokens.split(text)
    return [added[part] if i % 2 else _Fixed(part) for i, part in enumerate(parts) if part]

  def _items(self, parts: Sequence[Part]) -> list[_Item]:
    return [x for part in parts for x in (self._fixed(part.text) if isinstance(part, FormatText) else [part])]

  def _turn(self, around: Around, *items: _Item) -> list[_Item]:
    return [*self._fixed(around.before), *items, *self._fixed(around.after)]

  def _system(self, text: str | None, tools: Sequence[Tool]) -> list[_Item]:
    """The beginning of a conversation, with its system message if there is one."""
    if not tools and text is None:
      return self._fixed(self._form.no_system)
    text = text if text is None else self._form.strip(Role.SYSTEM, text)
    if not tools:
      return self._turn(self._form.system, text)
    return self._items(self._tokenizer.tools.beginning(text, [tool.schema for tool in tools]))

  def _begun(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[_Item]:
    """A conversation from its beginning."""
    has_system = bool(messages) and messages[0].role is Role.SYSTEM
    rest, joins = messages[has_system:], self._form.joins_system and (has_system or bool(tools))
    if joins and not (rest and rest[0].role is Role.USER):
      raise bad_request('messages', "messages: in the model's chat format a question must follow the system message")
    return self._system(messages[0].text if has_system else None, tools) + self._messages(rest, begun=joins)

  def _later_system(self, text: str) -> list[_Item]:
    if self._form.later_system is None:
      raise bad_request('messages', "messages: the model's chat format has a system message at the beginning only")
    return self._turn(self._form.later_system, self._form.strip(Role.SYSTEM, text))

  def _drops_thoughts_before(self, messages: Sequence[Message]) -> bool:
    """Whether the template writes a reply without its thought as soon as these messages follow."""
    if self._form.thoughts is Thoughts.PAST:
      return any(map(self._is_query, messages))
    return self._form.thoughts not in (Thoughts.KEPT, Thoughts.ALWAYS)

  def _is_query(self, message: Message) -> bool:
    """Whether a message asks something, so that thoughts before it are over; a tool's result does not."""
    text = self._form.strip(Role.USER, message.text)
    return message.role is Role.USER and not (text.startswith(_RESULT) and text.endswith(_END_RESULT))

  def _messages(self, messages: Sequence[Message], *, begun: bool = False) -> list[_Item]:
    """Messages with what stands around them; `begun`: the system message has begun the first one's turn."""
    queries = [i for i, message in enumerate(messages) if self._is_query(message)]
    # Without a query, the template shows no thought.
    last_query = queries[-1] if queries else len(messages) - 1
    items: list[_Item] = []
    for is_tool, run in itertools.groupby(enumerate(messages), key=lambda pair: pair[1].role is Role.TOOL):
      if is_tool:
        turn = self._tokenizer.tools.result_turn([message for _, message in run])
        items += [
          x for part in turn for x in (self._content(part) if isinstance(part, Message) else self._items([part]))
        ]
        continue
      for i, message in run:
        if message.role is Role.ASSISTANT:
          reply = self._reply(message, recent=i > last_query, last=i == len(messages) - 1)
          items += self._turn(self._form.assistant, *reply)
        elif message.role is Role.SYSTEM:
          items += self._later_system(message.text)
        else:
          around = self._form.around(Role.USER, behind_system=begun and i == 0)
          items += self._turn(around, *self._content(message))
    return items

  def _content(self, message: Message) -> list[_Item]:
    """The texts and images of a user or a tool, without the white space that the template removes."""
    content = stripped(message.content) if message.role in self._form.stripped else message.content
    return [segment.text if isinstance(segment, TextSegment) else segment for segment in content]

  def _reply(self, message: Message, *, recent: bool, last: bool) -> list[_Item]:
    """A reply without what stands around it. `recent`: no query follows it; `last`: nothing follows it."""
    thought, text = self._split_thought(message)
    shown = bool(thought)
    if not self._keep_thoughts:
      empty = last or self._tokenizer.tools.empty_thoughts
      shown = self._form.thoughts is Thoughts.PAST and recent and (empty or shown)
    items: list[_Item] = []
    if (shown or self._form.thoughts is Thoughts.ALWAYS) and self.family is Family.QWEN3:
      items += [*self._thought(thought), text.lstrip('\n')]
    else:
      items.append(text)
    calls = [(call.name, _arguments(call)) for call in message.tool_calls]
    return items + self._items(self._tokenizer.tools.call_parts(calls, after_text=bool(text)))

  def _split_thought(self, message: Message) -> tuple[str, str]:
    """The thought and the text of an assistant, as far as the family tells them apart."""
    text = self._form.strip(Role.ASSISTANT, message.text)
    if self.family is not Family.QWEN3:
      kept = self._keep_thoughts and self._form.thoughts is not Thoughts.ALWAYS
      return '', text if kept else self._form.content(Role.ASSISTANT, text)
    white = None if Role.ASSISTANT in self._form.stripped else '\n'
    if message.reasoning or END_THOUGHT not in text:
      return message.reasoning.strip(white), text
    if self._form.thoughts not in (Thoughts.PAST, Thoughts.ALWAYS) and not self._keep_thoughts:
      return '', self._form.content(Role.ASSISTANT, text)
    before, _, _ = text.partition(END_THOUGHT)
    return before.rpartition(THOUGHT)[2].strip(white), text.rpartition(END_THOUGHT)[2].lstrip('\n')

  def _thought(self, text: str) -> list[_Item]:
    return [self._marks[THOUGHT], f'\n{text}\n', self._marks[END_THOUGHT], '\n\n']

  def _opening(self, options: TemplateOptions) -> list[_Item]:
    """The opening of a reply. A forced beginning may open a thought, and close it, by the tags of the format."""
    if not options.add_generation_prompt:
      return []
    if not options.enable_thinking and self._form.quiet is None:
      raise bad_request(
        'chat_template_kwargs', "enable_thinking=false: the model's chat format cannot say so in a reply"
      )
    items, prefix = self._fixed(self._form.assistant.before), options.reply_prefix
    # Some templates force the beginning of a thought, or an empty one, as they are asked.
    asked = options.enable_thinking or self._form.quiet == self._form.forced
    if (self._form.forced and asked) or prefix.startswith(THOUGHT):
      prefix = self._form.reply_prefix(prefix)
    else:
      items += [] if options.enable_thinking else self._fixed(self._form.quiet)
    if self.family is not Family.QWEN3 or not prefix.startswith(THOUGHT):
      return [*items, prefix]
    thought, end, text = prefix.removeprefix(THOUGHT).partition(END_THOUGHT)
    return [*items, self._marks[THOUGHT], thought, *([self._marks[END_THOUGHT], text] if end else [])]

  # -- conversations and replies ---------------------------------------------------------------------------------------

  def canonical(self, messages: Sequence[Message]) -> tuple[str, ...]:
    """A text for each message, equal for messages that say the same."""
    return tuple(map(canonical, messages))

  def options_key(self, tools: Sequence[Tool], options: TemplateOptions) -> str:
    """A text that is equal for calls whose earlier messages are written in the same way.

    Options change the opening of the reply only, so it depends on the tools.
    """
    del options
    return '\n'.join(tool.schema for tool in tools)

  def in_thought(self, prompt: Sequence[int]) -> bool:
    """Whether a prompt ends within a thought, so that the reply begins in it."""
    if self.family is not Family.QWEN3:
      return False
    opens, ends = self._marks[THOUGHT], {self._marks[END_THOUGHT], *self._turn_ids}
    found = next((i for i in reversed(prompt) if i == opens or i in ends), None)
    return found == opens

  def reader(
    self,
    prompt: Sequence[int],
    *,
    parse_calls: bool,
    tools: Sequence[Tool],
    bad_calls: BadCalls,
    parallel: bool,
    call_id: Callable[[int], str],
  ) -> ReplyReader:
    """A reader of the reply to a prompt of ids.

    Args:
      parse_calls: whether tool calls are looked for; otherwise they are content.
      tools: the functions that may be called; some forms of calls leave the types of arguments to them.
      parallel: whether calls after the first are kept.
      call_id: the id of a call, by its number in the reply; unique in a session, because clients send it back.
    """
    tags = [CALL, END_CALL] if parse_calls else []
    tags += [THOUGHT, END_THOUGHT] if self.family is Family.QWEN3 else []
    return ReplyReader(
      tags,
      {id_: text for text, id_ in self._marks.items() if text in tags},
      self._tokenizer.decode,
      in_thought=self.in_thought(prompt),
      bad_calls=bad_calls,
      parallel=parallel,
      call_id=call_id,
      read_call=self._tokenizer.tools.read_call([tool.schema for tool in tools]),
      before_calls=self._tokenizer.tools.before_calls,
    )


def _arguments(call: ToolCall) -> str:
  """The arguments of a call as the templates write JSON. Those that are no JSON stay as they are."""
  try:
    return dump_json(parse_json(call.arguments or '{}'))
  except (ValueError, RecursionError):
    return call.arguments
