"""A small chat format, messages, and replies that were never sampled, for tests of the endpoint's rows."""

from __future__ import annotations

import dataclasses
import json

import numpy as np

from ragen_jax.serving.conversation.sessions import Plan, Session
from ragen_jax.serving.types import Finish, Generated, SamplingParams, StoredCall

# A character of a prompt is its code point; a sampled one may also be the code point + SAMPLED, so that a reply that is
# encoded again shows.
SAMPLED = 1000
STOP = 1
PARAMS = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=64, stop=(), top_logprobs=0)


@dataclasses.dataclass(frozen=True)
class Call:
  """A tool call."""

  id: str
  name: str = 'look'


@dataclasses.dataclass(frozen=True)
class Message:
  """A message of a conversation."""

  role: str
  text: str
  tool_calls: tuple[Call, ...] = ()
  images: tuple = ()


def system(text: str) -> Message:
  return Message('system', text)


def user(text: str) -> Message:
  return Message('user', text)


def assistant(text: str, *tool_ids: str) -> Message:
  return Message('assistant', text, tuple(Call(i) for i in tool_ids))


class CharacterFormat:
  """A character is a token. With the option 'forgets' the template drops thoughts before a message of the user."""

  stop_id = STOP

  def render(self, messages, tools, options):
    return encode(''.join(f'{{{tool}}}' for tool in tools) + self._written(messages))

  def following(self, messages, tools, options, *, closed):
    if options == 'forgets' and any(m.role == 'user' for m in messages):
      return None
    return encode(('' if closed else chr(STOP)) + '\n' + self._written(messages))

  def canonical(self, messages):
    return tuple(json.dumps([m.role, m.text, [call.name for call in m.tool_calls]]) for m in messages)

  def options_key(self, tools, options):
    return json.dumps([list(tools), options])

  @staticmethod
  def _written(messages):
    return (
      ''.join(f'[{m.role}]{m.text}{"".join(call.name for call in m.tool_calls)}{chr(STOP)}\n' for m in messages)
      + '[assistant]'
    )


def encode(text: str) -> tuple[int, ...]:
  return tuple(map(ord, text))


def decode(ids) -> str:
  return ''.join(chr(i % SAMPLED) for i in ids)


def generated(text: str, *, split=0, finish=Finish.STOP, behind='', version=0, value=0.0) -> Generated:
  """A reply of the policy.

  Args:
    text: what the client gets.
    split: bits; the token of character i is the other one if bit i is set.
    finish: STOP adds the stop token, unless there is text behind a stop string.
    behind: text that was sampled up to the end of a stop string, and cut.
    version: of all tokens.
    value: of all tokens.
  """
  ids = tuple(ord(c) + SAMPLED * (split >> (i % 31) & 1) for i, c in enumerate(text + behind))
  ids += (STOP,) if finish == Finish.STOP and not behind else ()
  n = len(ids)
  return Generated(
    ids=ids,
    logprobs=-np.linspace(0.1, 0.9, n, dtype=np.float32),
    values=np.full(n, value, np.float32),
    entropies=np.linspace(0.5, 0.7, n, dtype=np.float32),
    versions=np.full(n, version, np.int32),
    top=(),
    text=text,
    finish=finish,
    cached_tokens=0,
    stop_text=behind,
  )


class Agent:
  """Makes calls in a session; the ids of its calls are 'call 1', 'call 2', ...

  Attributes:
    session: the session.
  """

  def __init__(self, session: Session | None = None):
    """Goes on in a session, or in a new one."""
    self.session = session or Session('attempt', CharacterFormat())

  def plan(self, *messages, tools=(), options=None, agent='', digest='', choices=1, previous='') -> tuple[Plan, ...]:
    """See `Session.plan`."""
    return self.session.plan(
      messages, tools=tools, options=options, agent=agent, digest=digest, choices=choices, previous=previous
    )

  def commit(self, plan, reply: Generated, *forms, params=PARAMS, trained=True) -> StoredCall:
    """See `Session.commit`. Without `forms` the client gets the reply's text."""
    call_id = f'call {len(self.session.calls) + 1}'
    forms = forms or (assistant(reply.text),)
    return self.session.commit(plan, reply, call_id=call_id, replies=forms, params=params, trained=trained)

  def call(self, *messages, reply='ok', forms=(), params=PARAMS, trained=True, **request) -> tuple[Plan, StoredCall]:
    """Plans and commits a call of one choice; `reply` may be a text."""
    (plan,) = self.plan(*messages, **request)
    reply = generated(reply) if isinstance(reply, str) else reply
    return plan, self.commit(plan, reply, *forms, params=params, trained=trained)
