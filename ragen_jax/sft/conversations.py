"""Files of conversations, one JSON object a line: `{"messages": [{"role": "user", "content": "..."}, ...]}`.

OpenAI's fine-tuning and TRL read this format; `messages` reads a line of it. Conversations without tools are tokenized
as those of a game, and conversations with tools as those of an agent program.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.chat_template import THOUGHT, ChatFormat, Thoughts
from ragen_jax.agent.reply_reader import BadCalls
from ragen_jax.agent.trajectory import Timeline, Trajectory
from ragen_jax.serving.conversation.chat_format import QwenFormat
from ragen_jax.serving.conversation.messages import Message, Role, Tool
from ragen_jax.sft.messages import Conversation, read_line
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.files import replace_file
from ragen_jax.utils.tool_calls import CALL, END_CALL

# Pairs of ids: those before a reply, and those of the reply with its stop token.
_Turns = Iterator[tuple[tuple[int, ...], tuple[int, ...]]]


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
        found.append(read_line(number, line))
      except ValueError as e:
        raise UserError(f'{field}={path!r}: line {number}: {e}') from e
  if not found:
    raise UserError(f'{field}={path!r}: holds no conversation')
  return found


def tokenize(
  conversations: list[Conversation],
  tokenizer: ChatTokenizer,
  reply_prefix: str,
  max_context: int,
  source: str,
) -> tuple[Trajectory, int]:
  """Tokenizes conversations into rows like those of a rollout: a segment for each reply, and a segment before it.

  If a reply begins with `reply_prefix`, the prefix is part of the segment before the reply and has no loss, because the
  sampler receives it as input. An empty thought that the template forces stands before each reply without a thought.
  Other replies are in the loss as a whole, and all replies of a conversation with tools: agent programs get replies
  with no other prefix than the template's.

  `source` is the field and its file, for errors. The rows are each a separate group, with `loss_mask` on the trained
  replies and their stop tokens. The result also has the number of skipped conversations, which are longer than
  `max_context`.

  Raises:
    UserError: a text contains a special token of the chat format, the chat template has no tools, the server would read
      another reply than the file has, or no conversation is short enough.
  """
  rows, longest = [], 0
  agents = QwenFormat(tokenizer, keep_thoughts=True) if any(c.tools for c in conversations) else None
  for conversation in conversations:
    where = f'{source}: line {conversation.line}'
    _check_specials(conversation, tokenizer, where)
    if conversation.tools:
      turns = _agent_turns(conversation, tokenizer, agents, where)
    else:
      turns = _game_turns(conversation, tokenizer, reply_prefix)
    ids, trained = _joined(conversation, turns)
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


def _joined(conversation: Conversation, turns: _Turns) -> tuple[list[int], list[bool]]:
  """The token ids, and whether each is trained."""
  ids: list[int] = []
  trained: list[bool] = []
  weights = [w for m, w in zip(conversation.messages, conversation.trained, strict=True) if m.role is Role.ASSISTANT]
  for (before, reply), weight in zip(turns, weights, strict=True):
    ids += (*before, *reply)
    trained += [False] * len(before) + [weight] * len(reply)
  return ids, trained


def _check_specials(conversation: Conversation, tokenizer: ChatTokenizer, where: str) -> None:
  """Raises UserError for a special token in a text; results of tools, which come from anywhere, may spell it."""
  for i, message in enumerate(conversation.messages):
    for field, text in (('content', message.text), ('reasoning_content', message.reasoning)):
      special = next((s for s in tokenizer.specials if s in text), None)
      if special and message.role is not Role.TOOL:
        raise UserError(f'{where}: messages[{i}].{field} holds {special}, a special token of the tokenizer')


def _game_turns(conversation: Conversation, tokenizer: ChatTokenizer, reply_prefix: str) -> _Turns:
  """The replies as the policy speaks in games."""
  between: list[tuple[str, str]] = []
  first = True
  for message in conversation.messages:
    if message.role is not Role.ASSISTANT:
      between.append((message.role, message.text))
      continue
    form = tokenizer.format
    written = form.content if form.thoughts is Thoughts.ALWAYS else form.strip
    content = written(message.role, message.text)
    prefix, said = _forced(reply_prefix, content, form)
    before = tokenizer.encode(tokenizer.before_reply(between, prefix, first=first))
    yield before, (*tokenizer.encode(content[len(said) :]), tokenizer.stop_ids[0])
    between, first = [], False


def _forced(reply_prefix: str, content: str, form: ChatFormat) -> tuple[str, str]:
  """The prefix that is forced before a reply, and the beginning of the reply that it stands for; '' for none.

  A reply does not have the empty thought that the template forces where replies do not think by default.
  """
  said = reply_prefix.removeprefix(form.no_thought)
  if content.startswith(reply_prefix):
    return reply_prefix, reply_prefix
  if said != reply_prefix and content.startswith(said) and not content.startswith(THOUGHT):
    return reply_prefix, said
  return '', ''


def _agent_turns(conversation: Conversation, tokenizer: ChatTokenizer, agents: QwenFormat, where: str) -> _Turns:
  """The replies as the policy gives them to agent programs. Each is read back as the server reads it."""
  names = ', '.join(tool.name for tool in conversation.tools)
  tokenizer.check_tools(f'{where}: tools are {names}; allowed: none with this model')
  prompt: list[int] = []
  replies = [(i, m) for i, m in enumerate(conversation.messages) if m.role is Role.ASSISTANT]
  turns = agents.turns(conversation.messages, conversation.tools)
  for (i, message), (before, reply) in zip(replies, turns, strict=True):
    prompt += before
    problem = _misread(message, conversation.tools, agents, tokenizer, prompt, reply[:-1])
    if problem:
      raise UserError(f'{where}: messages[{i}]: {problem}')
    yield before, reply
    prompt += reply


def _misread(
  message: Message,
  tools: Sequence[Tool],
  agents: QwenFormat,
  tokenizer: ChatTokenizer,
  prompt: list[int],
  reply: tuple[int, ...],
) -> str:
  """Which other calls the server would read from a reply; '' if they are those of the message."""
  reader = agents.reader(prompt, parse_calls=True, tools=tools, bad_calls=BadCalls.CONTENT, parallel=True, call_id=str)
  reader.feed(reply, tokenizer.decode(reply))
  reader.finish()
  read, meant = reader.reply(), message.tool_calls
  written = [[tokenizer.tools.call_text(call.name, call.arguments) for call in calls] for calls in (read.calls, meant)]
  same = len(read.calls) == len(meant) and all(
    a in (b, tokenizer.decode(tokenizer.encode_once(b))) for a, b in zip(*written, strict=True)
  )  # some tokenizers compose characters (NFC)
  if same and not read.problems:
    return ''
  ours, theirs = (', '.join(call.name for call in calls) or 'none' for calls in (meant, read.calls))
  broken = f' ({", ".join(read.problems)})' if read.problems else ''
  return (
    f'the calls of the reply are {ours} and would be read back as {theirs}{broken}, because a text in it holds a tag '
    f'of the chat format; allowed: texts without {CALL} and {END_CALL}'
  )


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
