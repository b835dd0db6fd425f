"""POST /v1/completions: requests, answers and streams."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ragen_jax.serving.messages import TemplateOptions
from ragen_jax.serving.types import Finish, Generated, Piece
from ragen_jax.serving.wire import sse
from ragen_jax.serving.wire.body import Body
from ragen_jax.serving.wire.errors import ApiError, bad_request, wrong_value
from ragen_jax.serving.wire.fields import COMPLETIONS
from ragen_jax.serving.wire.results import Choice, Head, Rest, finite, usage, versions, whole
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
)


def parse(body: dict[str, Any], limits: Limits) -> CallSpec:
  """Reads a request.

  Raises:
    ApiError: a field is wrong, or asks for what the server does not do.
  """
  return read(Body(body, COMPLETIONS), limits)


def read(body: Body, limits: Limits) -> CallSpec:
  """`parse` for fields that are already checked against the table."""
  model, agent = read_model(body)
  prompts = _prompts(body.value('prompt'), limits)
  logprobs = body.integer('logprobs', 0, MOST_ALTERNATIVES)
  echo = body.boolean('echo', False)
  if echo and logprobs is not None:
    raise bad_request('echo', 'echo=True: must be false with logprobs, which the prompt has none of')
  options = body.mapping('stream_options')
  return CallSpec(
    kind=Kind.COMPLETIONS,
    model=model,
    agent=agent,
    messages=(),
    prompts=prompts,
    tools=(),
    parse_calls=False,
    parallel_tool_calls=True,
    template=TemplateOptions(enable_thinking=True, add_generation_prompt=False, reply_prefix=''),
    sampling=read_sampling(body, body.integer('max_tokens', 1, limits.context), read_stop(body)),
    n=read_n(body, limits, len(prompts)),
    seed=read_seed(body),
    stream=body.boolean('stream', False),
    include_usage=options.get('include_usage') is True,
    logprobs=logprobs is not None,
    top_logprobs=logprobs or 0,
    return_token_ids=body.boolean('return_token_ids', False),
    echo=echo,
    previous_response_id='',
    user=body.string('user'),
    metadata=body.mapping('metadata'),
    warnings=(),
    echoed={},
  )


def _prompts(value: Any, limits: Limits) -> tuple[str | tuple[int, ...], ...]:
  if isinstance(value, str) and value:
    return (value,)
  if not isinstance(value, list) or not value:
    raise wrong_value('prompt', value, 'a text, a list of texts, a list of ids or a list of lists of ids')
  if type(value[0]) is int:
    return (_ids(value, 'prompt', limits),)
  if len(value) > limits.messages:
    raise bad_request('prompt', f'prompt has {len(value)} items: must be at most {limits.messages}')
  return tuple(_prompt(item, f'prompt[{i}]', limits) for i, item in enumerate(value))


def _prompt(value: Any, at: str, limits: Limits) -> str | tuple[int, ...]:
  if isinstance(value, list) and value:
    return _ids(value, at, limits)
  if not isinstance(value, str) or not value:
    raise wrong_value(at, value, 'a text or a list of ids that is not empty')
  return value


def _ids(value: list[Any], at: str, limits: Limits) -> tuple[int, ...]:
  for i, id_ in enumerate(value):
    if type(id_) is not int or not 0 <= id_ < limits.vocabulary:
      raise wrong_value(f'{at}[{i}]', id_, f'an id from 0 to {limits.vocabulary - 1}')
  return tuple(value)


# -- answers -----------------------------------------------------------------------------------------------------------


def answer(
  spec: CallSpec, head: Head, choices: Sequence[Choice], token_bytes: Callable[[int], bytes]
) -> dict[str, Any]:
  """The JSON answer; the arguments are those of `chat.answer`."""
  return {
    'id': head.id,
    'object': 'text_completion',
    'created': head.created,
    'model': head.model,
    'choices': [_choice(spec, choice, token_bytes) for choice in choices],
    'usage': usage(choices),
    **versions(choices),
  }


def _choice(spec: CallSpec, choice: Choice, token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
  generated = choice.generated
  fields = {
    'index': choice.index,
    'text': (choice.prompt_text if spec.echo else '') + generated.text,
    'logprobs': _logprobs(whole(generated), spec.top_logprobs, token_bytes, 0) if spec.logprobs else None,
    'finish_reason': _finish_reason(generated),
    'stop_reason': generated.stop_text or None,
  }
  if spec.return_token_ids:
    fields |= {'prompt_token_ids': list(choice.prompt), 'token_ids': list(generated.ids)}
  return fields


def _logprobs(piece: Piece, top_logprobs: int, token_bytes: Callable[[int], bytes], offset: int) -> dict[str, Any]:
  """Log-probabilities; `offset` is the number of characters before the piece."""

  def text(id_: int) -> str:
    return token_bytes(id_).decode('utf-8', 'replace')

  tokens = [text(i) for i in piece.ids]
  offsets = list(itertools.accumulate(map(len, tokens), initial=offset))[:-1]
  top = [{text(i): finite(x) for i, x in alternatives[:top_logprobs]} for alternatives in piece.top]
  return {
    'tokens': tokens,
    'token_logprobs': [finite(x) for x in piece.logprobs],
    'top_logprobs': top if top_logprobs else None,
    'text_offset': offsets,
  }


def _finish_reason(generated: Generated) -> str:
  if generated.finish is Finish.ABORTED:
    raise ValueError('an aborted reply has no answer')
  return str(generated.finish)


class CompletionStream:
  """The events of a streamed answer. The pieces of several replies may come in any order."""

  def __init__(self, spec: CallSpec, head: Head, replies: int, token_bytes: Callable[[int], bytes]):
    """Begins a stream.

    Args:
      spec: the request.
      head: its id, time and model.
      replies: number of replies, over all prompts.
      token_bytes: the bytes of a token.
    """
    self._spec, self._head, self._token_bytes = spec, head, token_bytes
    self._rests = [Rest() for _ in range(replies)]
    self._offsets = [0] * replies  # characters of the tokens so far

  def start(self, index: int, prompt: Sequence[int], prompt_text: str) -> list[bytes]:
    """The first event of a reply, if the request asks for something of its prompt."""
    ids = {'prompt_token_ids': list(prompt)} if self._spec.return_token_ids else {}
    text = prompt_text if self._spec.echo else ''
    return [self._chunk(index, text, ids)] if ids or text else []

  def piece(self, index: int, piece: Piece) -> list[bytes]:
    """The events of new tokens of a reply."""
    self._rests[index].add(piece)
    known = self._known(index, piece)
    return [self._chunk(index, piece.text, known)] if piece.text or known else []

  def finish(self, index: int, generated: Generated) -> list[bytes]:
    """The last event of a complete reply, with what the pieces left out."""
    rest = self._rests[index].of(generated)
    stop = {'finish_reason': _finish_reason(generated), 'stop_reason': generated.stop_text or None}
    found = versions([Choice(index, (), generated, None, '')])
    return [self._chunk(index, rest.text, self._known(index, rest) | stop, **found)]

  def end(self, choices: Sequence[Choice]) -> list[bytes]:
    """The end of the stream, after all replies: the usage if it was asked for, and the mark of the end."""
    counted = [sse.event(self._frame([], usage=usage(choices)))] if self._spec.include_usage else []
    return [*counted, sse.DONE]

  @staticmethod
  def error(error: ApiError) -> list[bytes]:
    """The end of a stream that failed."""
    return [sse.event(error.body())]

  def _known(self, index: int, piece: Piece) -> dict[str, Any]:
    known: dict[str, Any] = {}
    if self._spec.logprobs and piece.ids:
      offset = self._offsets[index]
      known['logprobs'] = _logprobs(piece, self._spec.top_logprobs, self._token_bytes, offset)
      last = known['logprobs']
      self._offsets[index] = last['text_offset'][-1] + len(last['tokens'][-1])
    if self._spec.return_token_ids and piece.ids:
      known['token_ids'] = list(piece.ids)
    return known

  def _chunk(self, index: int, text: str, choice: dict[str, Any], **more: Any) -> bytes:
    fields = {'index': index, 'text': text, 'logprobs': None, 'finish_reason': None, **choice}
    return sse.event(self._frame([fields], **more))

  def _frame(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    head = self._head
    frame = {'id': head.id, 'object': 'text_completion', 'created': head.created, 'model': head.model}
    return {**frame, 'choices': choices, **more}
