"""Conversations in a file, one JSON object a line: `{"messages": [{"role": "user", "content": "..."}, ...]}`.

The format is the one that OpenAI's fine-tuning and TRL read. An assistant's message may have `"weight": 0`, which takes
it out of the loss.
"""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.trajectory import Timeline, Trajectory
from ragen_jax.utils.errors import UserError

ROLES = ('system', 'user', 'assistant')


@dataclasses.dataclass(frozen=True)
class Message:
  """What one side says.

  Attributes:
    role: one of `ROLES`.
    content: the text.
    trained: it is the assistant's, and has a share in the loss.
  """

  role: str
  content: str
  trained: bool


@dataclasses.dataclass(frozen=True)
class Conversation:
  """A line of a file.

  Attributes:
    line: its number, from 1.
    messages: at least one of them is trained; the last is the assistant's.
  """

  line: int
  messages: tuple[Message, ...]


def read(path: str, field: str = 'sft.data') -> list[Conversation]:
  """The conversations of a file; empty lines are skipped, and so is what comes after the assistant's last word.

  Args:
    path: of the file, in UTF-8.
    field: where it comes from, for the errors.

  Raises:
    UserError: the file cannot be read, or a line is no conversation; it names the line and what is wrong.
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
  """Raises ValueError with what is wrong."""
  try:
    raw = json.loads(line)
  except ValueError as e:
    raise ValueError(f'is no JSON ({e})') from e
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
      raise ValueError(f'{where}.role is {role!r}; allowed: {", ".join(ROLES)}')
    if not isinstance(content, str):
      raise ValueError(f'{where}.content is {json.dumps(content)}; it must be text')
    calls = [name for name in ('tool_calls', 'function_call') if item.get(name)]
    if calls:
      raise ValueError(f'{where} has {calls[0]}, which cannot be learnt from')
    if role == 'system' and i:
      raise ValueError(f'{where}.role is "system", which may only be the first message')
    if weight not in (0, 1):
      raise ValueError(f'{where}.weight is {json.dumps(weight)}; allowed: 0, 1')
    messages.append(Message(role, content, role == 'assistant' and bool(weight)))
  last = max((i for i, m in enumerate(messages) if m.trained), default=None)
  if last is None:
    raise ValueError('has no message of the assistant to learn from')
  return tuple(messages[: last + 1])


def tokenize(
  conversations: list[Conversation],
  tokenizer: ChatTokenizer,
  reply_prefix: str,
  max_context: int,
  source: str,
) -> tuple[Trajectory, int]:
  """Conversations as rows, as a rollout would have made them: one segment a reply, and one before it.

  A reply that begins with `reply_prefix` has it in the segment before, without loss, as the sampler is given it; other
  replies are learnt whole.

  Args:
    conversations: from `read`.
    tokenizer: with its chat format.
    reply_prefix: what is put there for the policy; may be ''.
    max_context: tokens that a row may have.
    source: the field and file, for the errors.

  Returns:
    The rows, `loss_mask` on the replies that are trained and their stop tokens, each row a group of its own; and how
    many conversations were longer than `max_context`, which are left out.

  Raises:
    UserError: a text holds a special token of the chat format, or no conversation is short enough.
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
  """The ids, and which of them are trained."""
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
    prefix = reply_prefix if message.content.startswith(reply_prefix) else ''
    before = tokenizer.encode(tokenizer.before_reply(between, prefix, first=not ids))
    reply = (*tokenizer.encode(message.content[len(prefix) :]), tokenizer.stop_ids[0])
    ids += (*before, *reply)
    trained += [False] * len(before) + [message.trained] * len(reply)
    between = []
  return ids, trained


def write(path: str, trajectories: list[Trajectory], tokenizer: ChatTokenizer, field: str = 'sft.save_data') -> int:
  """Writes rows as a file that `read` reads; it takes its place when it is whole.

  Args:
    path: of the file; its directory is made.
    trajectories: rows that hold a whole conversation each; those without a reply are left out.
    tokenizer: that they were made with.
    field: where the path comes from, for the error.

  Returns:
    How many conversations were written.

  Raises:
    UserError: the disk is full or not writable.
  """
  temporary, count = f'{path}.tmp', 0
  try:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(temporary, 'w', encoding='utf-8') as file:
      for trajectory in trajectories:
        spoken = np.flatnonzero(trajectory.loss_mask.any(axis=1))
        rows = [trajectory.tokens[row, : trajectory.length[row]].tolist() for row in spoken]
        for text in tokenizer.decode_batch(rows):
          messages = [{'role': role, 'content': content} for role, content in tokenizer.messages(text)]
          file.write(json.dumps({'messages': messages}, ensure_ascii=False) + '\n')
          count += 1
    os.replace(temporary, path)
  except OSError as e:
    raise UserError(f'{field}={path!r}: cannot be written: {e.strerror or e}') from e
  return count
