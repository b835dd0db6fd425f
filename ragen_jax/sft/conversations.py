"""Files of conversations, one JSON object a line: `{"messages": [{"role": "user", "content": "..."}, ...]}`.

OpenAI's fine-tuning and TRL read this format. `"weight": 0` excludes a message of the assistant from the loss.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import numpy as np

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.trajectory import Timeline, Trajectory
from ragen_jax.utils.errors import UserError, one_line, short
from ragen_jax.utils.files import replace_file

ROLES = ('system', 'user', 'assistant')


@dataclasses.dataclass(frozen=True)
class Message:
  """A message of one of `ROLES`; `trained`: whether it is in the loss, as only messages of the assistant can be."""

  role: str
  content: str
  trained: bool


@dataclasses.dataclass(frozen=True)
class Conversation:
  """Line `line` of a file, from 1. At least one of its messages is trained; the last message is the assistant's."""

  line: int
  messages: tuple[Message, ...]


def read(path: str, field: str = 'sft.data') -> list[Conversation]:
  """Reads the conversations of a file. Empty lines and messages after the last trained message are dropped.

  `field` is the config's field with this path, for errors.

  Raises:
    UserError: the file cannot be read, or a line is not a conversation; the message names the line.
  """
  try:
    with open(path, encoding='utf-8-sig') as file:
      lines = file.read().split('\n')
  except (OSError, UnicodeDecodeError) as e:
    reason = f'is not UTF-8 ({e.reason})' if isinstance(e, UnicodeDecodeError) else e.strerror or e
    raise UserError(f'{field}={path!r}: cannot be read: {reason}') from e
  found = []
  for number, line in enumerate(lines, start=1):
    if line.strip():
      try:
        found.append(Conversation(number, _messages(line)))
      except ValueError as e:
        raise UserError(f'{field}={path!r}: line {number}: {e}') from e
  if not found:
    raise UserError(f'{field}={path!r}: holds no conversation')
  return found


def _messages(line: str) -> tuple[Message, ...]:
  """The messages of a line; raises ValueError if the line is not a conversation."""
  try:
    raw = json.loads(line)
  except RecursionError as e:
    raise ValueError('is nested too deeply') from e
  except ValueError as e:
    raise ValueError(f'is not JSON ({e})') from e
  raw = raw.get('messages') if isinstance(raw, dict) else None
  if not isinstance(raw, list) or not raw:
    raise ValueError('must be an object with a list "messages" that is not empty')
  messages = []
  for i, item in enumerate(raw):
    where = f'messages[{i}]'
    if not isinstance(item, dict):
      raise ValueError(f'{where} must be an object with "role" and "content"')
    role, content, weight = item.get('role'), item.get('content'), item.get('weight', 1)
    if role not in ROLES:
      raise ValueError(f'{where}.role is {short(role)}; allowed: {", ".join(ROLES)}')
    if not isinstance(content, str):
      raise ValueError(f'{where}.content is {_shown(content)}; it must be text')
    if surrogate := re.search('[\ud800-\udfff]', content):
      raise ValueError(f'{where}.content has half a character, {surrogate[0]!r}, which UTF-8 cannot encode')
    calls = [name for name in ('tool_calls', 'function_call') if item.get(name)]
    if calls:
      raise ValueError(f'{where} has {calls[0]}, which cannot be learnt from')
    if role == 'system' and i:
      raise ValueError(f'{where}.role is "system", which may only be the first message')
    if weight not in (0, 1):
      raise ValueError(f'{where}.weight is {_shown(weight)}; allowed: 0, 1')
    messages.append(Message(role, content, role == 'assistant' and bool(weight)))
  last = max((i for i, m in enumerate(messages) if m.trained), default=None)
  if last is None:
    raise ValueError('has no message of the assistant to learn from')
  return tuple(messages[: last + 1])


def _shown(value: Any) -> str:
  """The beginning of a JSON value."""
  return one_line(value, json.dumps)[:80]


def tokenize(
  conversations: list[Conversation],
  tokenizer: ChatTokenizer,
  reply_prefix: str,
  max_context: int,
  source: str,
) -> tuple[Trajectory, int]:
  """Tokenizes conversations into rows like those of a rollout: a segment for each reply, and a segment before it.

  If a reply begins with `reply_prefix`, the prefix is part of the segment before the reply and has no loss, because the
  sampler receives it as input. Other replies are in the loss as a whole.

  `source` is the field and its file, for errors. The rows are each a separate group, with `loss_mask` on the trained
  replies and their stop tokens. The result also has the number of skipped conversations, which are longer than
  `max_context`.

  Raises:
    UserError: a text contains a special token of the chat format, or no conversation is short enough.
  """
  rows, longest = [], 0
  for conversation in conversations:
    ids, trained = _encode(conversation, tokenizer, reply_prefix, source)
    if len(ids) <= max_context:
      rows.append((ids, trained))
    longest = max(longest, len(ids))
  if not rows:
    raise UserError(
      f'{source}: all conversations are longer than agent.max_context={max_context}, up to {longest} tokens'
    )
  timeline = Timeline(len(rows), max(len(ids) for ids, _ in rows))
  for row, (ids, trained) in enumerate(rows):
    timeline.append_context(row, tuple(ids), 0)
    timeline.loss_mask[row, : len(ids)] = trained
  one_each = np.arange(len(rows))
  trajectory = timeline.trajectory(
    group=one_each,
    episode=one_each,
    env=np.zeros_like(one_each),
    status=np.zeros_like(one_each),
    policy_version=0,
    pad_id=tokenizer.pad_id,
  )
  return trajectory, len(conversations) - len(rows)


def _encode(
  conversation: Conversation, tokenizer: ChatTokenizer, reply_prefix: str, source: str
) -> tuple[list[int], list[bool]]:
  """The token ids, and whether each is trained."""
  ids: list[int] = []
  trained: list[bool] = []
  between: list[tuple[str, str]] = []
  for i, message in enumerate(conversation.messages):
    for special in tokenizer.specials:
      if special in message.content:
        raise UserError(
          f'{source}: line {conversation.line}: messages[{i}].content holds {special}, a special token of the tokenizer'
        )
    if message.role != 'assistant':
      between.append((message.role, message.content))
      continue
    content = tokenizer.format.strip(message.role, message.content)
    prefix = reply_prefix if content.startswith(reply_prefix) else ''
    before = tokenizer.encode(tokenizer.before_reply(between, prefix, first=not ids))
    reply = (*tokenizer.encode(content[len(prefix) :]), tokenizer.stop_ids[0])
    ids += (*before, *reply)
    trained += [False] * len(before) + [message.trained] * len(reply)
    between = []
  return ids, trained


def write(path: str, trajectories: list[Trajectory], tokenizer: ChatTokenizer, field: str = 'sft.save_data') -> int:
  """Writes rows to a file in the format of `read`; gives the number of conversations written.

  The directory of the file is created. Rows have a whole conversation each; rows without a reply are skipped. `field`
  is the config's field with this path, for the error.

  Raises:
    UserError: the disk is full or not writable.
  """
  lines = []
  for trajectory in trajectories:
    spoken = np.flatnonzero(trajectory.loss_mask.any(axis=1))
    rows = [trajectory.tokens[row, : trajectory.length[row]].tolist() for row in spoken]
    for text in tokenizer.decode_batch(rows):
      messages = [{'role': role, 'content': content} for role, content in tokenizer.messages(text)]
      lines.append(json.dumps({'messages': messages}, ensure_ascii=False) + '\n')
  replace_file(path, ''.join(lines), f'{field}={path!r}: cannot be written')
  return len(lines)
