"""Wire: POST /v1/chat/completions, requests, answers and streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ragen_jax.agent.reply_reader import CallDone, ContentDelta, Event, ReplyReader, ThoughtDelta
from ragen_jax.serving.conversation.messages import Message, Role, from_chat, tools_from_chat
from ragen_jax.serving.errors import bad_request
from ragen_jax.serving.types import Generated, Piece
from ragen_jax.serving.wire.body import Body
from ragen_jax.serving.wire.results import (
  AnswerContext,
  Choice,
  ChunkStream,
  finish_reason,
  token_logprobs,
  usage,
  versions,
  whole,
)
from ragen_jax.serving.wire.spec import (
  MOST_ALTERNATIVES,
  CallSpec,
  Kind,
  RequestLimits,
  read_common,
  read_n,
  read_sampling,
  read_stop,
  read_template,
  read_text_format,
  read_tool_choice,
)
from ragen_jax.utils.tool_calls import ToolCall


def read(body: Body, limits: RequestLimits) -> CallSpec:
  """Reads a request; ApiError if a field is wrong, or asks for what the server does not do."""
  common = read_common(body)
  messages = from_chat(body.items('messages', limits.messages), limits.image_reader())
  generation = body.value('add_generation_prompt')
  continues = body.boolean('continue_final_message', False)
  if continues and generation is True:
    raise bad_request('continue_final_message', 'continue_final_message=True: must be false with add_generation_prompt')
  messages, prefix = _split_prefix(messages) if continues else (messages, '')
  newer, older = (body.integer(name, 1, limits.context) for name in ('max_completion_tokens', 'max_tokens'))
  tools = tools_from_chat(body.items('tools', limits.tools))
  parse_calls, warnings = read_tool_choice(body, limits)
  response_format = read_text_format(body.value('response_format'), 'response_format', limits)
  logprobs, top = body.boolean('logprobs', False), body.integer('top_logprobs', 0, MOST_ALTERNATIVES) or 0
  if top and not logprobs:
    raise bad_request('top_logprobs', f'top_logprobs={top}: must be 0 without logprobs=true')
  options = body.mapping('stream_options')
  return CallSpec(
    kind=Kind.CHAT,
    **common,
    messages=messages,
    tools=tools,
    parse_calls=parse_calls and bool(tools),
    parallel_tool_calls=body.boolean('parallel_tool_calls', True),
    template=read_template(
      body,
      add_generation_prompt=continues or body.boolean('add_generation_prompt', True),
      reply_prefix=prefix,
    ),
    sampling=read_sampling(body, older if newer is None else newer, read_stop(body)),
    n=read_n(body, limits, prompts=1),
    include_usage=options.get('include_usage') is True,
    logprobs=logprobs,
    top_logprobs=top,
    warnings=warnings + response_format,
  )


def _split_prefix(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], str]:
  """The messages before the reply, and its forced beginning."""
  last = messages[-1]
  if last.role is not Role.ASSISTANT or last.tool_calls or last.reasoning:
    message = 'continue_final_message=True: must be false unless the last message is an assistant with content only'
    raise bad_request('continue_final_message', message)
  return messages[:-1], last.text


# -- answers -----------------------------------------------------------------------------------------------------------


def answer(context: AnswerContext, choices: Sequence[Choice]) -> dict[str, Any]:
  """The JSON answer with replies none of which was aborted."""
  spec, head = context.spec, context.head
  ids = {'prompt_token_ids': list(choices[0].prompt)} if spec.return_token_ids else {}
  return {
    'id': head.id,
    'object': 'chat.completion',
    'created': head.created,
    'model': head.model,
    'choices': [_choice(context, choice) for choice in choices],
    'usage': usage(choices, spec.n),
    **ids,
    **versions(choices),
  }


def _choice(context: AnswerContext, choice: Choice) -> dict[str, Any]:
  spec, generated, reply = context.spec, choice.generated, choice.reply
  message: dict[str, Any] = {'role': 'assistant', 'content': reply.content, 'refusal': None}
  if reply.thought:
    message['reasoning_content'] = reply.thought
  if reply.calls:
    message['content'] = reply.content or None
    message['tool_calls'] = [_call(call) for call in reply.calls]
  content = token_logprobs(whole(generated), spec.top_logprobs, context.token_bytes) if spec.logprobs else None
  fields = {
    'index': choice.index,
    'message': message,
    'logprobs': {'content': content, 'refusal': None} if spec.logprobs else None,
    'finish_reason': _finish_reason(generated, bool(reply.calls)),
    'stop_reason': generated.stop_text or None,
  }
  return fields | ({'token_ids': list(generated.ids)} if spec.return_token_ids else {})


def _call(call: ToolCall) -> dict[str, Any]:
  return {'id': call.id, 'type': 'function', 'function': {'name': call.name, 'arguments': call.arguments}}


def _finish_reason(generated: Generated, has_calls: bool) -> str:
  """Clients run tool calls only with the reason 'tool_calls'."""
  reason = finish_reason(generated)
  return 'tool_calls' if has_calls else reason


class ChatStream(ChunkStream):
  """See `ChunkStream`."""

  kind = 'chat.completion.chunk'

  def __init__(self, context: AnswerContext):
    super().__init__(context)
    self._readers: dict[int, ReplyReader] = {}
    self._calls: Counter[int] = Counter()

  def start(self, prompts: Sequence[tuple[int, ...]]) -> list[bytes]:
    """The first event of each reply."""
    ids = {'prompt_token_ids': list(prompts[0])} if self._spec.return_token_ids else {}
    delta = {'role': 'assistant', 'content': ''}
    return [self._chunk(i, delta, **(ids if i == 0 else {})) for i in range(len(prompts))]

  def piece(self, index: int, piece: Piece) -> list[bytes]:
    """The events of new tokens of a reply; there are none while their text is held back."""
    self._rests[index].add(piece)
    return self._deltas(index, piece, self._reader(index).feed(piece.ids, piece.text))

  def _finish(self, choice: Choice) -> list[bytes]:
    rest, reader = self._rests[choice.index].of(choice.generated), self._reader(choice.index)
    sent = self._deltas(choice.index, rest, reader.feed(rest.ids, rest.text) + reader.finish())
    reason = _finish_reason(choice.generated, bool(reader.reply().calls))
    stop = {'stop_reason': choice.generated.stop_text or None}
    return [*sent, self._chunk(choice.index, {}, reason, choice=stop, **versions([choice]))]

  def _reader(self, index: int) -> ReplyReader:
    if index not in self._readers:
      self._readers[index] = self._context.new_reader(index)
    return self._readers[index]

  def _deltas(self, index: int, piece: Piece, events: Sequence[Event]) -> list[bytes]:
    """A chunk for each event; the first has what is known of the tokens, which can be ahead of the text."""
    deltas = [self._delta(index, event) for event in events]
    known: dict[str, Any] = {}
    if self._spec.logprobs and piece.ids:
      content = token_logprobs(piece, self._spec.top_logprobs, self._context.token_bytes)
      known['logprobs'] = {'content': content, 'refusal': None}
    if self._spec.return_token_ids and piece.ids:
      known['token_ids'] = list(piece.ids)
    if known and not deltas:
      deltas = [{}]
    return [self._chunk(index, delta, choice=known if k == 0 else {}) for k, delta in enumerate(deltas)]

  def _delta(self, index: int, event: Event) -> dict[str, Any]:
    match event:
      case ContentDelta(text):
        return {'content': text}
      case ThoughtDelta(text):
        return {'reasoning_content': text}
      case CallDone(call):
        self._calls[index] += 1
        return {'tool_calls': [{'index': self._calls[index] - 1, **_call(call)}]}

  def _chunk(
    self,
    index: int,
    delta: dict[str, Any],
    reason: str | None = None,
    choice: dict[str, Any] | None = None,
    **more: Any,
  ) -> bytes:
    fields = {'index': index, 'delta': delta, 'logprobs': None, 'finish_reason': reason, **(choice or {})}
    return self._frame([fields], **more)
