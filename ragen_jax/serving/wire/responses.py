"""Wire: POST /v1/responses, requests, answers and streams, as far as the OpenAI Agents SDK uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragen_jax.agent.reply_reader import CallDone, ContentDelta, Event, ThoughtDelta
from ragen_jax.serving.conversation.messages import Message, Role, from_responses, tools_from_responses
from ragen_jax.serving.errors import ApiError, wrong_value
from ragen_jax.serving.types import Finish, Piece
from ragen_jax.serving.wire import sse
from ragen_jax.serving.wire.body import Body
from ragen_jax.serving.wire.results import AnswerContext, Choice, Rest, finish_reason, versions
from ragen_jax.serving.wire.spec import (
  CallSpec,
  Kind,
  RequestLimits,
  read_common,
  read_sampling,
  read_template,
  read_text_format,
  read_tool_choice,
)


def read(body: Body, limits: RequestLimits) -> CallSpec:
  """Reads a request; ApiError if a field is wrong, or asks for what the server does not do."""
  common = read_common(body)
  value = body.value('input')
  if isinstance(value, list) and len(value) > limits.messages:
    raise wrong_value('input', f'{len(value)} items', f'at most {limits.messages} items')
  messages = from_responses(value, limits.image_reader())
  instructions = body.string('instructions')
  if instructions:
    messages = (Message(Role.SYSTEM, instructions), *messages)
  tools_as_sent = body.items('tools', limits.tools)
  tools = tools_from_responses(tools_as_sent)
  parse_calls, warnings = read_tool_choice(body, limits)
  text_format = read_text_format(body.mapping('text').get('format'), 'text.format', limits)
  parallel = body.boolean('parallel_tool_calls', True)
  max_tokens = body.integer('max_output_tokens', 1, limits.context)
  previous = body.string('previous_response_id')
  return CallSpec(
    kind=Kind.RESPONSES,
    **common,
    messages=messages,
    tools=tools,
    parse_calls=parse_calls and bool(tools),
    parallel_tool_calls=parallel,
    template=read_template(body, add_generation_prompt=True, reply_prefix=''),
    sampling=read_sampling(body, max_tokens, stop=()),
    include_usage=True,
    previous_response_id=previous,
    warnings=warnings + text_format,
    echoed={
      'instructions': instructions or None,
      'tools': [{'description': None, 'parameters': None, 'strict': None} | tool for tool in tools_as_sent],
      'tool_choice': body.value('tool_choice') or 'auto',
      'parallel_tool_calls': parallel,
      'max_output_tokens': max_tokens,
      'previous_response_id': previous or None,
      'metadata': common['metadata'],
      'text': body.value('text') or {'format': {'type': 'text'}},
    },
  )


# -- answers -----------------------------------------------------------------------------------------------------------


def answer(context: AnswerContext, choices: Sequence[Choice]) -> dict[str, Any]:
  """The JSON answer with the only reply, which was not aborted: the object that ends a stream of it."""
  stream = ResponseStream(context)
  stream.end(choices)
  return stream.response


class ResponseStream:
  """The events of a streamed answer; `response` is the answer, as far as it is known."""

  def __init__(self, context: AnswerContext):
    spec, head, params = context.spec, context.head, context.params
    self._spec, self._head, self._reader = spec, head, context.new_reader(0)
    self._rest = Rest()
    self._number = 0  # of the next event
    self._text: list[str] = []  # of the open item
    self._open: dict[str, Any] | None = None  # the item that grows: a message or a thought
    self.response: dict[str, Any] = {
      'id': head.id,
      'object': 'response',
      'created_at': head.created,
      'status': 'in_progress',
      'error': None,
      'incomplete_details': None,
      'model': head.model,
      'output': [],
      'temperature': params.temperature,
      'top_p': params.top_p,
      'truncation': 'disabled',
      'usage': None,
      'user': spec.user or None,
      **spec.echoed,
    }

  def start(self, prompts: Sequence[tuple[int, ...]]) -> list[bytes]:
    del prompts
    events = [self._event(f'response.{kind}', response=self.response) for kind in ('created', 'in_progress')]
    return list(map(sse.named_event, events))

  def piece(self, index: int, piece: Piece) -> list[bytes]:
    """The events of new tokens; there are none while their text is held back."""
    del index
    self._rest.add(piece)
    return self._encode(self._reader.feed(piece.ids, piece.text))

  def end(self, choices: Sequence[Choice]) -> list[bytes]:
    """The last events of the complete reply, with what the pieces left out."""
    (choice,) = choices
    generated, incomplete = choice.generated, finish_reason(choice.generated) == Finish.LENGTH
    rest = self._rest.of(generated)
    encoded = self._encode(self._reader.feed(rest.ids, rest.text) + self._reader.finish())
    if not self.response['output'] and self._open is None:
      encoded += map(sse.named_event, self._begin_text('message'))  # clients expect an item
    status = 'incomplete' if incomplete else 'completed'
    encoded += map(sse.named_event, self._close(status))
    thought = self._reader.reply().thought_tokens
    self.response |= {'status': status, 'usage': _usage(choice, thought), **versions([choice])}
    if incomplete:
      self.response['incomplete_details'] = {'reason': 'max_output_tokens'}
    if self._spec.return_token_ids:
      self.response |= {'prompt_token_ids': list(choice.prompt), 'token_ids': list(generated.ids)}
    return [*encoded, sse.named_event(self._event(f'response.{status}', response=self.response))]

  def error(self, error: ApiError) -> list[bytes]:
    """The end of a stream that failed: an answer with the status 'failed', and an event that raises in clients."""
    told = {'code': error.code or error.type, 'message': error.message}
    self.response |= {'status': 'failed', 'error': {'code': 'server_error', 'message': error.message}}
    failed = self._event('response.failed', response=self.response)
    return [
      sse.named_event(failed),
      sse.named_event(self._event('error', param=error.param or None, **told) | error.body()),
    ]

  # -- items -----------------------------------------------------------------------------------------------------------

  def _encode(self, events: Sequence[Event]) -> list[bytes]:
    return [sse.named_event(e) for event in events for e in self._advance(event)]

  def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
    self._number += 1
    return {'type': kind, 'sequence_number': self._number - 1, **fields}

  def _advance(self, event: Event) -> list[dict[str, Any]]:
    match event:
      case ContentDelta(text):
        return self._grow('message', text)
      case ThoughtDelta(text):
        return self._grow('reasoning', text)
      case CallDone(call):
        item = {
          'type': 'function_call',
          'id': self._item_id('fc'),
          'call_id': call.id,
          'name': call.name,
          'arguments': call.arguments,
          'status': 'completed',
        }
        return self._close('completed') + self._call(item)

  def _call(self, item: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a whole call."""
    index = len(self.response['output'])
    empty = {**item, 'arguments': '', 'status': 'in_progress'}
    at = {'item_id': item['id'], 'output_index': index}
    self.response['output'].append(item)
    return [
      self._event('response.output_item.added', output_index=index, item=empty),
      self._event('response.function_call_arguments.delta', **at, delta=item['arguments']),
      self._event('response.function_call_arguments.done', **at, name=item['name'], arguments=item['arguments']),
      self._event('response.output_item.done', output_index=index, item=item),
    ]

  def _grow(self, kind: str, text: str) -> list[dict[str, Any]]:
    """The events of more text of a message or a thought."""
    events = []
    if self._open is None or self._open['type'] != kind:
      events = self._close('completed') + self._begin_text(kind)
    self._text.append(text)
    name = 'output_text' if kind == 'message' else 'reasoning_text'
    known = {'logprobs': []} if kind == 'message' else {}
    return [*events, self._event(f'response.{name}.delta', **self._at(), delta=text, **known)]

  def _at(self) -> dict[str, Any]:
    """The place of the open item's only part."""
    return {'item_id': self._open['id'], 'output_index': len(self.response['output']), 'content_index': 0}

  def _item_id(self, prefix: str) -> str:
    return f'{prefix}_{self._head.id.removeprefix("resp_")}_{len(self.response["output"])}'

  def _begin_text(self, kind: str) -> list[dict[str, Any]]:
    """Opens a message or a thought."""
    if kind == 'message':
      fields = {'id': self._item_id('msg'), 'role': 'assistant', 'status': 'in_progress', 'content': []}
    else:
      fields = {'id': self._item_id('rs'), 'status': 'in_progress', 'summary': [], 'content': []}
    self._open = {'type': kind, **fields}
    index = len(self.response['output'])
    added = self._event('response.output_item.added', output_index=index, item=self._open)
    return [added, self._event('response.content_part.added', **self._at(), part=self._part(''))]

  def _part(self, text: str) -> dict[str, Any]:
    if self._open['type'] == 'reasoning':
      return {'type': 'reasoning_text', 'text': text}
    return {'type': 'output_text', 'text': text, 'annotations': [], 'logprobs': []}

  def _close(self, status: str) -> list[dict[str, Any]]:
    """Completes the open item, if there is one."""
    if self._open is None:
      return []
    text = ''.join(self._text)
    self._text.clear()
    if self._open['type'] == 'message':
      done = self._event('response.output_text.done', **self._at(), text=text, logprobs=[])
    else:
      done = self._event('response.reasoning_text.done', **self._at(), text=text)
    part = self._part(text)
    events = [done, self._event('response.content_part.done', **self._at(), part=part)]
    item = {**self._open, 'status': status, 'content': [part]}
    events.append(self._event('response.output_item.done', output_index=len(self.response['output']), item=item))
    self.response['output'].append(item)
    self._open = None
    return events


def _usage(choice: Choice, thought_tokens: int) -> dict[str, Any]:
  prompt, sampled, cached = len(choice.prompt), len(choice.generated.ids), choice.generated.cached_tokens
  return {
    'input_tokens': prompt,
    'input_tokens_details': {'cached_tokens': cached, 'cache_write_tokens': prompt - cached},
    'output_tokens': sampled,
    'output_tokens_details': {'reasoning_tokens': thought_tokens},
    'total_tokens': prompt + sampled,
  }
