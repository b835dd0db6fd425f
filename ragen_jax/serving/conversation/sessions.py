"""Conversation: calls of an attempt become token rows; a reply that was sampled is never encoded again.

A call is matched to earlier calls by its messages and continued by ids. Its prompt is the ids of the longest earlier
conversation that the call's messages begin with and that ends with a sampled reply, followed by the ids of the new
messages. If the prompt begins with all ids of a row, the call extends the row; otherwise it begins a new row, and
`NEW_ROW_CAUSES` are the causes.

    row 0   prompt 1  reply 1  context 2  reply 2        calls 1 and 2
    row 1   prompt 1  reply 1  context 3  reply 3        call 3 continues reply 1 with other messages: a fork

A reply is sampled in one row and is trained there; rows that begin with the same ids hold it as context.

The ids of a call that is running are not known, so a plan reserves its row until `commit` or `release`. A call that
would extend a reserved row begins a new row. The methods of a session may not run at the same time: the caller holds a
lock, but not while the reply is sampled.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ragen_jax.agent.segments import ImageSpan
from ragen_jax.serving.conversation.chat_format import QwenFormat
from ragen_jax.serving.conversation.matching import NO_MESSAGES, Conversation, ReplyIndex, SampledReply
from ragen_jax.serving.conversation.messages import Message, images_of_messages
from ragen_jax.serving.types import Finish, Generated, PlacedImage, SamplingParams, StoredCall, marked

# Why a call begins a new row, in the order in which the causes are looked for.
NEW_ROW_CAUSES = (
  'repeated',  # the prompt is that of an earlier or a running call: another sample
  'parallel',  # a running call extends the row
  'thinking',  # the template shows an earlier reply without its thoughts
  'template',  # the template may write the earlier conversation in another way
  'tools_changed',  # a reply of the conversation was sampled with other tools
  'edited_history',  # earlier messages were changed or left out
  'fork',  # the row has gone on from the reply that the call continues
  'sub_agent',  # the first call of an agent, with a conversation of its own
  'conversation',  # a conversation that continues no reply
)

# The end of a thought, in the text of a reply.
_THOUGHT_END = '</think>'


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
  """A call that is about to run. Two plans are never equal.

  Attributes:
    row: ordinal of the row that the call extends or begins; reserved until `commit` or `release`.
    context: the ids that the row gains before the reply.
    parent: id of the call whose reply the conversation continues; '' for none.
    cause: one of `NEW_ROW_CAUSES`; '' if the call extends a row or is the attempt's first.
    digest: digest of the request's body.
    request: number of the request in the session.
    choice: number of the choice in the request, from 0; the request has `choices`.
    aborted: number of aborted calls with the same prompt. A caller that draws with a key of the row folds it in, so
      that a client that stops a reply and asks again does not get the same reply.
    shared: number of messages that the prompt shares with the parent's prompt.
    images: those of the prompt.
  """

  prompt: tuple[int, ...]
  row: int
  context: tuple[int, ...]
  parent: str
  cause: str
  agent: str
  digest: str
  request: int
  choice: int
  choices: int
  aborted: int
  shared: int
  conversation: Conversation
  images: tuple[ImageSpan, ...] = ()


class Session:
  """The rows of an attempt, and its committed `calls`, in order."""

  def __init__(self, attempt_id: str, chat_format: QwenFormat):
    self.attempt_id = attempt_id
    self.calls: list[StoredCall] = []
    self._format = chat_format
    self._rows: dict[int, bytes] = {}  # ordinal -> ids, see `types.marked`
    self._running: dict[Plan, None] = {}
    self._replies: dict[str, SampledReply] = {}  # by call id
    self._index = ReplyIndex()
    self._fed: set[bytes] = set()  # digests of prompts
    self._aborted: collections.Counter[bytes] = collections.Counter()  # of the same digests
    self._agents: set[str] = set()
    self._requests = 0

  @classmethod
  def from_calls(cls, attempt_id: str, chat_format: QwenFormat, calls: Iterable[StoredCall]) -> Session:
    """The session after stored calls, aborted ones too; none is running."""
    session = cls(attempt_id, chat_format)
    for call in sorted(calls, key=lambda c: c.index):
      session._record(call)
    return session

  # -- plans -----------------------------------------------------------------------------------------------------------

  def plan(
    self,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any],
    options: Any,
    agent: str,
    digest: str,
    choices: int,
    previous: str,
  ) -> tuple[Plan, ...]:
    """Plans a request with messages: finds the ids of its prompt and reserves a row for each choice, which gets a plan.

    Args:
      messages: the whole conversation, at least one message.
      digest: '' if the request cannot be retried.
      previous: id of the call that the client says it continues; '' if it names none. See `ReplyIndex.parent`.
    """
    conversation = Conversation.of(self._format, messages, tools, options)
    parent, count = self._index.parent(conversation, previous)
    following = None
    if parent is not None:
      following = self._format.following(messages[count:], tools, options, closed=parent.closed)
    if following is not None:
      prompt = self._ids(parent) + tuple(following)
    else:
      prompt = tuple(self._format.render(messages, tools, options))
    shown = images_of_messages(messages)
    images = self._format.images(prompt, shown) if shown else ()

    def cause() -> str:
      if parent is not None and following is None:
        return 'thinking' if parent.thinks else 'template'
      if self._index.sampled_otherwise(conversation, count):
        return 'tools_changed'
      if self._index.edited(conversation, count):
        return 'edited_history'
      return '' if parent is None else 'fork'

    request = self._request(agent, digest, choices, conversation)
    return self._reserve(prompt, parent, cause, request, images)

  def plan_ids(
    self, ids: Sequence[int], images: tuple[ImageSpan, ...] = (), *, agent: str, digest: str, choices: int
  ) -> tuple[Plan, ...]:
    """Plans a request whose prompt is given in ids, with its images; other arguments and result as in `plan`."""
    packed = _bytes(ids, map(PlacedImage.of, images))
    continued = [r for r in self._replies.values() if packed.startswith(self._rows[r.row][: _SIZE * r.end])]
    parent = max(continued, key=lambda r: (r.end, r.request, -r.choice), default=None)
    request = self._request(agent, digest, choices, NO_MESSAGES)
    return self._reserve(tuple(ids), parent, lambda: '' if parent is None else 'fork', request, images)

  def release(self, plan: Plan) -> None:
    """Gives back the row of a plan that will not be committed. Does nothing if it is not reserved."""
    self._running.pop(plan, None)

  # -- results ---------------------------------------------------------------------------------------------------------

  def commit(
    self,
    plan: Plan,
    generated: Generated,
    *,
    call_id: str,
    replies: Sequence[Message],
    params: SamplingParams,
    trained: bool,
  ) -> StoredCall:
    """Records a call and returns it for the store. The row of an aborted call stays as it was, for later calls.

    `replies` are the messages as which the client may send the reply back, such as with and without a forced prefix;
    the first is the one that it got. There are none for a prompt of ids. ValueError if the plan is not reserved: it is
    of another session, or was committed or released.
    """
    if plan not in self._running:
      raise ValueError(f'the plan of call {call_id} is not reserved in the session of attempt {self.attempt_id}')
    del self._running[plan]
    before = len(plan.prompt) - len(plan.context)  # columns of the row
    told = {
      'parent': plan.parent,
      'shared': plan.shared,
      'messages': plan.conversation.texts[plan.shared :],
      'tool_ids': plan.conversation.tool_ids[plan.shared :],
      'options': plan.conversation.options,
      'replies': self._format.canonical(replies),
      'reply_tool_ids': [call.id for call in replies[0].tool_calls] if replies else [],
      'request': plan.request,
      'choice': plan.choice,
      'choices': plan.choices,
    }
    call = StoredCall(
      call_id=call_id,
      attempt_id=self.attempt_id,
      index=len(self.calls),
      row=plan.row,
      agent=plan.agent,
      trained=trained,
      context=plan.context,
      generated=generated,
      params=params,
      request_digest=plan.digest,
      messages=json.dumps(told, ensure_ascii=False),
      new_row_cause=plan.cause,
      images=tuple(PlacedImage.of(span, before) for span in plan.images if span.start >= before),
    )
    self._record(call)
    return call

  def conversation(self, call_id: str) -> tuple[str, ...]:
    """The canonical texts of the messages of a call and of its reply; () for a prompt of ids. KeyError if no call with
    the id was committed, or it was aborted."""
    reply = self._replies[call_id]
    return (*reply.conversation.texts, *reply.texts[:1])

  # -- private ---------------------------------------------------------------------------------------------------------

  def _ids(self, reply: SampledReply) -> tuple[int, ...]:
    """The ids of a row up to the end of a reply."""
    packed = np.frombuffer(self._rows[reply.row], np.int64, reply.end)
    return tuple(self._format.placeholder if i < 0 else i for i in packed.tolist())

  def _request(self, agent: str, digest: str, choices: int, conversation: Conversation) -> dict[str, Any]:
    """Numbers a request. Returns the fields that its plans have in common."""
    number = self._requests
    self._requests += 1
    return {
      'agent': agent, 'digest': digest, 'request': number, 'choices': choices, 'conversation': conversation
    }  # fmt: skip

  def _reserve(
    self, prompt: tuple[int, ...], parent: SampledReply | None, cause: Callable[[], str], request: dict[str, Any],
    images: tuple[ImageSpan, ...] = (),
  ) -> tuple[Plan, ...]:  # fmt: skip
    """A plan for each choice of a request that continues `parent`; `cause` gives the cause of a new row as far as it
    follows from the messages, or ''."""
    packed, plans = _bytes(prompt, map(PlacedImage.of, images)), []
    fed = _digest(packed)
    for choice in range(request['choices']):
      reserved = {p.row for p in self._running}
      begun = [r for r, ids in self._rows.items() if packed.startswith(ids)]
      free = [r for r in begun if r not in reserved]
      if free:
        row = max(free, key=lambda r: (len(self._rows[r]), -r))
        start, why = len(self._rows[row]) // _SIZE, ''
      else:
        row = next(r for r in range(len(self._rows) + len(reserved) + 1) if r not in self._rows and r not in reserved)
        start, why = 0, ''
        if fed in self._fed or any(p.prompt == prompt and p.images == images for p in self._running):
          why = 'repeated'
        elif begun:
          why = 'parallel'
        elif self._rows or self._running:
          known = self._agents | {p.agent for p in self._running}
          why = cause() or ('conversation' if request['agent'] in known else 'sub_agent')
      plan = Plan(
        prompt=prompt,
        row=row,
        context=prompt[start:],
        parent='' if parent is None else parent.call_id,
        cause=why,
        choice=choice,
        aborted=self._aborted[fed],
        shared=0 if parent is None or not request['conversation'].texts else len(parent.conversation.texts),
        images=images,
        **request,
      )
      self._running[plan] = None
      plans.append(plan)
    return tuple(plans)

  def _record(self, call: StoredCall) -> None:
    """Adds a call that was just sampled, or that was stored."""
    told, generated = json.loads(call.messages), call.generated
    self.calls.append(call)
    self._requests = max(self._requests, told['request'] + 1)
    prompt = self._rows.get(call.row, b'') + _bytes(call.context, call.images)
    if generated.finish == Finish.ABORTED:
      self._aborted[_digest(prompt)] += 1
      return
    self._fed.add(_digest(prompt))
    self._agents.add(call.agent)
    self._rows[call.row] = row = prompt + _bytes(generated.ids, ())
    parent = self._replies.get(told['parent'])
    before = parent.conversation if told['shared'] else NO_MESSAGES
    reply = SampledReply(
      call_id=call.call_id,
      row=call.row,
      end=len(row) // _SIZE,
      request=told['request'],
      choice=told['choice'],
      closed=generated.ids[-1:] == (self._format.stop_id,),
      thinks=_THOUGHT_END in generated.text or (parent is not None and parent.thinks),
      conversation=Conversation(
        before.texts + tuple(told['messages']),
        before.tool_ids + tuple(tuple(ids) for ids in told['tool_ids']),
        told['options'],
      ),
      texts=tuple(told['replies']),
      tool_ids=tuple(told['reply_tool_ids']),
    )
    self._replies[call.call_id] = reply
    if reply.conversation.texts:
      self._index.add(reply)


_SIZE = 8  # bytes of an id


def _bytes(ids: Sequence[int], images: Iterable[PlacedImage]) -> bytes:
  return marked(ids, images).tobytes()


def _digest(packed: bytes) -> bytes:
  return hashlib.blake2b(packed, digest_size=16).digest()
