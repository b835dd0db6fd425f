"""POST /v1/chat/completions: requests, answers and streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ragen_jax.serving.messages import Message, Role, ToolCall, from_chat, tools_from_chat
from ragen_jax.serving.reply_reader import CallDone, ContentDelta, Event, ReplyReader, ThoughtDelta
from ragen_jax.serving.types import Finish, Generated, Piece
from ragen_jax.serving.wire import sse
from ragen_jax.serving.wire.body import Body
from ragen_jax.serving.wire.errors import ApiError, bad_request
from ragen_jax.serving.wire.fields import CHAT
from ragen_jax.serving.wire.results import Choice, Head, Rest, token_logprobs, usage, versions, whole
from ragen_jax.serving.wire.spec import (
  MOST_ALTERNATIVES,
  CallSpec,
  Kind,
  Limits,
  read_model,
  read_n,
  read_sampling,
  read_seed,
  read_stop,
  read_template,
  read_text_format,
  read_tool_choice,
)


def parse(body: dict[str, Any], limits: Limits) -> CallSpec:
  """Reads a request.

  Raises:
    ApiError: a field is wrong, or asks for what the server does not do.
  """
  return read(Body(body, CHAT), limits)


def read(body: Body, limits: Limits) -> CallSpec:
  """`parse` for fields that are already checked against the table."""
  model, agent = read_model(body)
  messages = from_chat(body.items('messages', limits.messages))
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
    model=model,
    agent=agent,
    messages=messages,
    prompts=(),
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
    seed=read_seed(body),
    stream=body.boolean('stream', False),
    include_usage=options.get('include_usage') is True,
    logprobs=logprobs,
    top_logprobs=top,
    return_token_ids=body.boolean('return_token_ids', False),
    echo=False,
    previous_response_id='',
    user=body.string('user'),
    metadata=body.mapping('metadata'),
    warnings=warnings + response_format,
    echoed={},
  )


def _split_prefix(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], str]:
  """The messages before the reply, and its forced beginning."""
  last = messages[-1]
  if last.role is not Role.ASSISTANT or last.tool_calls or last.reasoning:
    message = 'continue_final_message=True: must be false unless the last message is an assistant with content only'
    raise bad_request('continue_final_message', message)
  return messages[:-1], last.text


# -- answers -----------------------------------------------------------------------------------------------------------


def answer(
  spec: CallSpec, head: Head, choices: Sequence[Choice], token_bytes: Callable[[int], bytes]
) -> dict[str, Any]:
  """The JSON answer.

  Args:
    spec: the request.
    head: its id, time and model.
    choices: the replies, none of which was aborted.
    token_bytes: the bytes of a token.
  """
  ids = {'prompt_token_ids': list(choices[0].prompt)} if spec.return_token_ids else {}
  return {
    'id': head.id,
    'object': 'chat.completion',
    'created': head.created,
    'model': head.model,
    'choices': [_choice(spec, choice, token_bytes) for choice in choices],
    'usage': usage(choices),
    **ids,
    **versions(choices),
  }


def _choice(spec: CallSpec, choice: Choice, token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
  generated, reply = choice.generated, choice.reply
  message: dict[str, Any] = {'role': 'assistant', 'content': reply.content, 'refusal': None}
  if reply.thought:
    message['reasoning_content'] = reply.thought
  if reply.calls:
    message['content'] = reply.content or None
    message['tool_calls'] = [_call(call) for call in reply.calls]
  content = token_logprobs(whole(generated), spec.top_logprobs, token_bytes) if spec.logprobs else None
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
  if generated.finish is Finish.ABORTED:
    raise ValueError('an aborted reply has no answer')
  return 'tool_calls' if has_calls else str(generated.finish)


class ChatStream:
  """The events of a streamed answer. The pieces of several replies may come in any order."""

  def __init__(self, spec: CallSpec, head: Head, readers: Sequence[ReplyReader], token_bytes: Callable[[int], bytes]):
    """Begins a stream.

    Args:
      spec: the request.
      head: its id, time and model.
      readers: a new reader for each reply.
      token_bytes: the bytes of a token.
    """
    self._spec, self._head, self._readers, self._token_bytes = spec, head, readers, token_bytes
    self._rests = [Rest() for _ in readers]
    self._calls = [0] * len(readers)

  def start(self, prompt: Sequence[int]) -> list[bytes]:
    """The first event of each reply."""
    ids = {'prompt_token_ids': list(prompt)} if self._spec.return_token_ids else {}
    delta = {'role': 'assistant', 'content': ''}
    return [self._chunk(i, delta, **(ids if i == 0 else {})) for i in range(len(self._readers))]

  def piece(self, index: int, piece: Piece) -> list[bytes]:
    """The events of new tokens of a reply; there are none while their text is held back."""
    self._rests[index].add(piece)
    return self._deltas(index, piece, self._readers[index].feed(piece.ids, piece.text))

  def finish(self, index: int, generated: Generated) -> list[bytes]:
    """The last events of a complete reply, with what the pieces left out."""
    rest, reader = self._rests[index].of(generated), self._readers[index]
    events = reader.feed(rest.ids, rest.text) + reader.finish()
    sent = self._deltas(index, rest, events)
    reply = reader.reply()
    reason = _finish_reason(generated, bool(reply.calls))
    whole_choice = Choice(index, (), generated, reply, '')
    stop = {'stop_reason': generated.stop_text or None}
    return [*sent, self._chunk(index, {}, reason, choice=stop, **versions([whole_choice]))]

  def end(self, choices: Sequence[Choice]) -> list[bytes]:
    """The end of the stream, after all replies: the usage if it was asked for, and the mark of the end."""
    counted = [sse.event(self._frame([], usage=usage(choices)))] if self._spec.include_usage else []
    return [*counted, sse.DONE]

  @staticmethod
  def error(error: ApiError) -> list[bytes]:
    """The end of a stream that failed. Without it, clients would take what they have for a whole reply."""
    return [sse.event(error.body())]

  def _deltas(self, index: int, piece: Piece, events: Sequence[Event]) -> list[bytes]:
    """A chunk for each event; the first has what is known of the tokens, which can be ahead of the text."""
    deltas = [self._delta(index, event) for event in events]
    known: dict[str, Any] = {}
    if self._spec.logprobs and piece.ids:
      content = token_logprobs(piece, self._spec.top_logprobs, self._token_bytes)
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
    return sse.event(self._frame([fields], **more))

  def _frame(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    head = self._head
    frame = {'id': head.id, 'object': 'chat.completion.chunk', 'created': head.created, 'model': head.model}
    return {**frame, 'choices': choices, **more}
