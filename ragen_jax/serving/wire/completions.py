"""Wire: POST /v1/completions, requests, answers and streams."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ragen_jax.agent.segments import ImageSegment
from ragen_jax.serving.errors import bad_request, wrong_value
from ragen_jax.serving.types import Piece
from ragen_jax.serving.wire.body import Body
from ragen_jax.serving.wire.results import (
  AnswerContext,
  Choice,
  ChunkStream,
  finish_reason,
  finite,
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
)


def read(body: Body, limits: RequestLimits) -> CallSpec:
  """Reads a request; ApiError if a field is wrong, or asks for what the server does not do."""
  common = read_common(body)
  prompts = _prompts(body.value('prompt'), limits)
  logprobs = body.integer('logprobs', 0, MOST_ALTERNATIVES)
  echo = body.boolean('echo', False)
  if echo and logprobs is not None:
    raise bad_request('echo', 'echo=True: must be false with logprobs, which the prompt has none of')
  options = body.mapping('stream_options')
  return CallSpec(
    kind=Kind.COMPLETIONS,
    **common,
    prompts=prompts,
    images=_images(body.items('images', limits.messages), prompts, limits),
    sampling=read_sampling(body, body.integer('max_tokens', 1, limits.context), read_stop(body)),
    n=read_n(body, limits, len(prompts)),
    include_usage=options.get('include_usage') is True,
    logprobs=logprobs is not None,
    top_logprobs=logprobs or 0,
    echo=echo,
  )


def _prompts(value: Any, limits: RequestLimits) -> tuple[str | tuple[int, ...], ...]:
  if isinstance(value, str) and value:
    return (value,)
  if not isinstance(value, list) or not value:
    raise wrong_value('prompt', value, 'a text, a list of texts, a list of ids or a list of lists of ids')
  if type(value[0]) is int:
    return (_ids(value, 'prompt', limits),)
  if len(value) > limits.messages:
    raise bad_request('prompt', f'prompt has {len(value)} items: must be at most {limits.messages}')
  return tuple(_prompt(item, f'prompt[{i}]', limits) for i, item in enumerate(value))


def _prompt(value: Any, at: str, limits: RequestLimits) -> str | tuple[int, ...]:
  if isinstance(value, list) and value:
    return _ids(value, at, limits)
  if not isinstance(value, str) or not value:
    raise wrong_value(at, value, 'a text or a list of ids that is not empty')
  return value


def _ids(value: list[Any], at: str, limits: RequestLimits) -> tuple[int, ...]:
  for i, id_ in enumerate(value):
    if type(id_) is not int or not 0 <= id_ < limits.vocabulary:
      raise wrong_value(f'{at}[{i}]', id_, f'an id from 0 to {limits.vocabulary - 1}')
  return tuple(value)


def _images(
  urls: Sequence[Any], prompts: Sequence[str | tuple[int, ...]], limits: RequestLimits
) -> tuple[ImageSegment, ...]:
  if not urls:
    return ()
  read_image = limits.image_reader()
  if read_image is None:
    raise bad_request('images', 'images: must be empty; the policy reads no images', 'unsupported_content')
  if len(prompts) > 1 or isinstance(prompts[0], str):
    raise bad_request('images', 'images: must be empty unless prompt is one list of ids')
  return tuple(read_image(url, f'images[{i}]') for i, url in enumerate(urls))


# -- answers -----------------------------------------------------------------------------------------------------------


def answer(context: AnswerContext, choices: Sequence[Choice]) -> dict[str, Any]:
  """The JSON answer with replies none of which was aborted."""
  head = context.head
  return {
    'id': head.id,
    'object': 'text_completion',
    'created': head.created,
    'model': head.model,
    'choices': [_choice(context, choice) for choice in choices],
    'usage': usage(choices, context.spec.n),
    **versions(choices),
  }


def _choice(context: AnswerContext, choice: Choice) -> dict[str, Any]:
  spec, generated = context.spec, choice.generated
  fields = {
    'index': choice.index,
    'text': (choice.prompt_text if spec.echo else '') + generated.text,
    'logprobs': (
      _logprobs(whole(generated), spec.top_logprobs, context.token_bytes, _Offsets()) if spec.logprobs else None
    ),
    'finish_reason': finish_reason(generated),
    'stop_reason': generated.stop_text or None,
  }
  if spec.return_token_ids:
    fields |= {'prompt_token_ids': list(choice.prompt), 'token_ids': list(generated.ids)}
  return fields


class _Offsets:
  """Where the tokens of a reply begin in its text; for a token within a character, where the character begins."""

  def __init__(self):
    self._next, self._decoder = 0, codecs.getincrementaldecoder('utf-8')('replace')

  def of(self, tokens: Iterable[bytes]) -> list[int]:
    """The offsets of the next tokens."""
    found = []
    for token in tokens:
      found.append(self._next)
      self._next += len(self._decoder.decode(token))
    return found


def _logprobs(
  piece: Piece, top_logprobs: int, token_bytes: Callable[[int], bytes], offsets: _Offsets
) -> dict[str, Any]:
  """Log-probabilities; `offsets` has seen the tokens before the piece."""

  def text(id_: int) -> str:
    return token_bytes(id_).decode('utf-8', 'replace')

  top = [{text(i): finite(x) for i, x in alternatives[:top_logprobs]} for alternatives in piece.top]
  return {
    'tokens': [text(i) for i in piece.ids],
    'token_logprobs': [finite(x) for x in piece.logprobs],
    'top_logprobs': top if top_logprobs else None,
    'text_offset': offsets.of(map(token_bytes, piece.ids)),
  }


class CompletionStream(ChunkStream):
  """See `ChunkStream`."""

  kind = 'text_completion'

  def __init__(self, context: AnswerContext):
    super().__init__(context)
    self._offsets: defaultdict[int, _Offsets] = defaultdict(_Offsets)

  def start(self, prompts: Sequence[tuple[int, ...]]) -> list[bytes]:
    """The first event of each reply, if the request asks for something of its prompt."""
    events = []
    for i, prompt in enumerate(prompts):
      ids = {'prompt_token_ids': list(prompt)} if self._spec.return_token_ids else {}
      text = self._context.decode(prompt) if self._spec.echo else ''
      events += [self._chunk(i, text, ids)] if ids or text else []
    return events

  def piece(self, index: int, piece: Piece) -> list[bytes]:
    self._rests[index].add(piece)
    known = self._known(index, piece)
    return [self._chunk(index, piece.text, known)] if piece.text or known else []

  def _finish(self, choice: Choice) -> list[bytes]:
    rest = self._rests[choice.index].of(choice.generated)
    stop = {'finish_reason': finish_reason(choice.generated), 'stop_reason': choice.generated.stop_text or None}
    return [self._chunk(choice.index, rest.text, self._known(choice.index, rest) | stop, **versions([choice]))]

  def _known(self, index: int, piece: Piece) -> dict[str, Any]:
    known: dict[str, Any] = {}
    if self._spec.logprobs and piece.ids:
      offsets = self._offsets[index]
      known['logprobs'] = _logprobs(piece, self._spec.top_logprobs, self._context.token_bytes, offsets)
    if self._spec.return_token_ids and piece.ids:
      known['token_ids'] = list(piece.ids)
    return known

  def _chunk(self, index: int, text: str, choice: dict[str, Any], **more: Any) -> bytes:
    fields = {'index': index, 'text': text, 'logprobs': None, 'finish_reason': None, **choice}
    return self._frame([fields], **more)
