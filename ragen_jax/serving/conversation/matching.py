"""Conversation: finds the earlier reply that a conversation continues, by the meaning of its messages.

Each message has a canonical text. A conversation is a chain of digests, one for each message, of the message and all
messages before it. A sampled reply is found under the digest of the conversation that it ends.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from ragen_jax.agent.chat_template import END_THOUGHT, THOUGHT
from ragen_jax.agent.reply_reader import ParsedReply
from ragen_jax.serving.conversation.chat_format import QwenFormat
from ragen_jax.serving.conversation.messages import Message, Role


@dataclasses.dataclass(frozen=True)
class Conversation:
  """The messages of a prompt, as they are matched; a prompt of ids has none.

  Attributes:
    texts: the canonical text of each message.
    tool_ids: the ids of the tool calls of each message.
    options: `QwenFormat.options_key` of the call.
  """

  texts: tuple[str, ...]
  tool_ids: tuple[tuple[str, ...], ...]
  options: str

  @classmethod
  def of(cls, chat_format: QwenFormat, messages: Sequence[Message], tools: Sequence[Any], options: Any) -> Conversation:
    tool_ids = tuple(tuple(call.id for call in message.tool_calls) for message in messages)
    return cls(chat_format.canonical(messages), tool_ids, chat_format.options_key(tools, options))


# The conversation of a prompt that is given in ids.
NO_MESSAGES = Conversation((), (), '')


def said_again(reply: ParsedReply, prefix: str) -> tuple[Message, ...]:
  """The messages that a client may send back for a reply; the first is the one that it got.

  Some clients put the forced beginning of the reply, `prefix`, or the thought before the content.
  """
  texts = [reply.content, prefix + reply.content]
  if reply.thought:
    spellings = (f'{THOUGHT}\n{reply.thought}\n{END_THOUGHT}\n\n', f'{THOUGHT}{reply.thought}{END_THOUGHT}')
    texts += [spelling + reply.content for spelling in spellings]
  return tuple(Message(Role.ASSISTANT, t, reply.calls, reasoning=reply.thought) for t in dict.fromkeys(texts))


@dataclasses.dataclass(frozen=True)
class SampledReply:
  """A sampled reply that later calls can continue.

  Attributes:
    end: number of the row's ids up to the reply's end.
    request, choice: numbers of the request, and of the choice in it.
    closed: whether it ended with the stop token.
    thinks: whether it, or a reply that it continues, has a thought.
    conversation: the messages of its prompt.
    texts: canonical texts of the messages as which the client may send the reply back; the first is what it got.
  """

  call_id: str
  row: int
  end: int
  request: int
  choice: int
  closed: bool
  thinks: bool
  conversation: Conversation
  texts: tuple[str, ...]
  tool_ids: tuple[str, ...]


class ReplyIndex:
  """The sampled replies of a session, by the conversations that they end."""

  def __init__(self):
    self._replies: dict[bytes, list[SampledReply]] = {}
    self._first: dict[bytes, bytes] = {}  # link of a reply in any of its texts -> link in its first text
    self._links: set[bytes] = set()  # of all messages of prompts, and of replies
    self._prompts: set[bytes] = set()  # links of the last messages of prompts
    self._texts: set[str] = set()  # of replies

  def chain(self, texts: Iterable[str]) -> list[bytes]:
    """A digest for each message, of the message and all messages before it. The texts of one reply are told as one."""
    chain, link = [], b''
    for text in texts:
      link = _digest(link + text.encode())
      link = self._first.get(link, link)
      chain.append(link)
    return chain

  def add(self, reply: SampledReply) -> None:
    """Adds a reply to a conversation of at least one message."""
    chain = self.chain(reply.conversation.texts)
    links = [_digest(chain[-1] + text.encode()) for text in reply.texts]
    first = next((self._first[link] for link in links if link in self._first), links[0])
    for link in links:
      self._first.setdefault(link, first)
    self._replies.setdefault(first, []).append(reply)
    self._links.update(chain, [first])
    self._prompts.add(chain[-1])
    self._texts.update(reply.texts)

  def parent(self, conversation: Conversation, previous: str) -> tuple[SampledReply | None, int]:
    """The sampled reply that ends the longest beginning of a conversation, and the number of messages up to it.

    The reply's conversation has the same `options`, so the same tools. Of several such replies, the one whose tool
    calls have the ids of the conversation's is preferred, then that of the call `previous`, which the client says it
    continues ('' for none), then the latest. (None, 0) if there is no such reply.
    """
    chain = self.chain(conversation.texts)

    def preference(reply: SampledReply) -> tuple:
      own = (*reply.conversation.tool_ids, reply.tool_ids)
      agreeing = [a == b for a, b in zip(own, conversation.tool_ids, strict=False)]
      return agreeing[-1], sum(agreeing), reply.call_id == previous, reply.request, -reply.choice

    for count in range(len(chain), 0, -1):
      replies = self._replies.get(chain[count - 1], ())
      alike = [r for r in replies if r.conversation.options == conversation.options]
      if alike:
        return max(alike, key=preference), count
    return None, 0

  def sampled_otherwise(self, conversation: Conversation, count: int) -> bool:
    """Whether a reply behind the first `count` messages was sampled here, with other `options`, so other tools."""
    return any(link in self._replies for link in self.chain(conversation.texts)[count:])

  def edited(self, conversation: Conversation, count: int) -> bool:
    """Whether behind the first `count` messages there is a reply from elsewhere in the session, or something else where
    a reply was sampled."""
    if any(text in self._texts for text in conversation.texts[count:]):
      return True
    chain = self.chain(conversation.texts)
    known = next((i for i, link in enumerate(chain) if link not in self._links), len(chain))
    return 0 < known < len(chain) and chain[known - 1] in self._prompts


def _digest(content: bytes) -> bytes:
  return hashlib.blake2b(content, digest_size=16).digest()
