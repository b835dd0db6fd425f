"""One form for the answers of the three endpoints: whole, or as a stream of events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ragen_jax.serving.reply_reader import ReplyReader
from ragen_jax.serving.types import Piece, SamplingParams
from ragen_jax.serving.wire import chat, completions, responses
from ragen_jax.serving.wire.errors import ApiError
from ragen_jax.serving.wire.results import Choice, Head
from ragen_jax.serving.wire.spec import CallSpec, Kind

PARSERS = {Kind.CHAT: chat.parse, Kind.COMPLETIONS: completions.parse, Kind.RESPONSES: responses.parse}
# Prefixes of the ids of answers.
ID_PREFIX = {Kind.CHAT: 'chatcmpl-', Kind.COMPLETIONS: 'cmpl-', Kind.RESPONSES: 'resp_'}


class Stream(Protocol):
  """The events of a streamed answer, as bytes of the wire."""

  def start(self) -> list[bytes]:
    """The first events."""

  def piece(self, index: int, piece: Piece) -> list[bytes]:
    """The events of new tokens of a reply."""

  def end(self, choices: Sequence[Choice]) -> list[bytes]:
    """The last events of all replies, which are complete and stored."""

  def error(self, error: ApiError) -> list[bytes]:
    """The end of a stream that failed."""


def open_stream(
  spec: CallSpec,
  head: Head,
  params: SamplingParams,
  prompts: Sequence[tuple[int, ...]],
  new_reader: Callable[[int], ReplyReader],
  decode: Callable[[Sequence[int]], str],
  token_bytes: Callable[[int], bytes],
) -> Stream:
  """The stream of an answer.

  Args:
    spec: the request.
    head: what all parts of the answer repeat.
    params: how the replies are sampled.
    prompts: ids of the prompt of each reply.
    new_reader: makes a new reader for a reply, by its index.
    decode: the text of ids.
    token_bytes: the bytes of a token.
  """
  if spec.kind is Kind.CHAT:
    readers = [new_reader(i) for i in range(len(prompts))]
    return _ChatStream(chat.ChatStream(spec, head, readers, token_bytes), prompts)
  if spec.kind is Kind.COMPLETIONS:
    return _CompletionStream(completions.CompletionStream(spec, head, len(prompts), token_bytes), prompts, decode)
  return _ResponseStream(responses.ResponseStream(spec, head, params, new_reader(0)), prompts[0])


def whole_answer(
  spec: CallSpec,
  head: Head,
  params: SamplingParams,
  choices: Sequence[Choice],
  new_reader: Callable[[int], ReplyReader],
  token_bytes: Callable[[int], bytes],
) -> dict[str, Any]:
  """The answer of a request that asks for no stream, as JSON; for the arguments see `open_stream`."""
  if spec.kind is Kind.CHAT:
    return chat.answer(spec, head, choices, token_bytes)
  if spec.kind is Kind.COMPLETIONS:
    return completions.answer(spec, head, choices, token_bytes)
  (choice,) = choices
  return responses.answer(spec, head, params, new_reader(0), choice.prompt, choice.generated)


class _ChatStream:
  def __init__(self, stream: chat.ChatStream, prompts: Sequence[tuple[int, ...]]):
    self._stream, self._prompts = stream, prompts

  def start(self) -> list[bytes]:
    return self._stream.start(self._prompts[0])

  def piece(self, index: int, piece: Piece) -> list[bytes]:
    return self._stream.piece(index, piece)

  def end(self, choices: Sequence[Choice]) -> list[bytes]:
    last = [event for c in choices for event in self._stream.finish(c.index, c.generated)]
    return last + self._stream.end(choices)

  def error(self, error: ApiError) -> list[bytes]:
    return self._stream.error(error)


class _CompletionStream:
  def __init__(
    self,
    stream: completions.CompletionStream,
    prompts: Sequence[tuple[int, ...]],
    decode: Callable[[Sequence[int]], str],
  ):
    self._stream, self._prompts, self._decode = stream, prompts, decode

  def start(self) -> list[bytes]:
    return [e for i, p in enumerate(self._prompts) for e in self._stream.start(i, p, self._decode(p))]

  def piece(self, index: int, piece: Piece) -> list[bytes]:
    return self._stream.piece(index, piece)

  def end(self, choices: Sequence[Choice]) -> list[bytes]:
    last = [event for c in choices for event in self._stream.finish(c.index, c.generated)]
    return last + self._stream.end(choices)

  def error(self, error: ApiError) -> list[bytes]:
    return self._stream.error(error)


class _ResponseStream:
  def __init__(self, stream: responses.ResponseStream, prompt: tuple[int, ...]):
    self._stream, self._prompt = stream, prompt

  def start(self) -> list[bytes]:
    return self._stream.start()

  def piece(self, index: int, piece: Piece) -> list[bytes]:
    del index
    return self._stream.piece(piece)

  def end(self, choices: Sequence[Choice]) -> list[bytes]:
    (choice,) = choices
    return self._stream.finish(self._prompt, choice.generated)

  def error(self, error: ApiError) -> list[bytes]:
    return self._stream.error(error)
