"""Wire: the three endpoints in one table: how each reads a request, answers it, and streams the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ragen_jax.serving.errors import ApiError
from ragen_jax.serving.types import Piece
from ragen_jax.serving.wire import chat, completions, responses
from ragen_jax.serving.wire.body import Body
from ragen_jax.serving.wire.fields import CHAT, COMPLETIONS, RESPONSES, Field
from ragen_jax.serving.wire.results import AnswerContext, Choice
from ragen_jax.serving.wire.spec import CallSpec, Kind, RequestLimits


class Stream(Protocol):
  """The events of a streamed answer, as bytes of the wire."""

  def start(self, prompts: Sequence[tuple[int, ...]]) -> list[bytes]:
    """The first events; `prompts` are the ids of the prompt of each reply."""

  def piece(self, index: int, piece: Piece) -> list[bytes]:
    """The events of new tokens of a reply."""

  def end(self, choices: Sequence[Choice]) -> list[bytes]:
    """The last events of all replies, which are complete and stored; ValueError if one was aborted."""

  def error(self, error: ApiError) -> list[bytes]:
    """The end of a stream that failed."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """How an endpoint reads and writes.

  `fields` say what happens to each field of a request; `prefix` is that of the ids of answers; `stream` begins the
  events of an answer.
  """

  prefix: str
  fields: tuple[Field, ...]
  read: Callable[[Body, RequestLimits], CallSpec]
  answer: Callable[[AnswerContext, Sequence[Choice]], dict[str, Any]]
  stream: Callable[[AnswerContext], Stream]

  def parse(self, body: dict[str, Any], limits: RequestLimits) -> CallSpec:
    """Reads a request; ApiError if a field is wrong, or asks for what the server does not do."""
    return self.read(Body(body, self.fields), limits)


ENDPOINTS = {
  Kind.CHAT: Endpoint('chatcmpl-', CHAT, chat.read, chat.answer, chat.ChatStream),
  Kind.COMPLETIONS: Endpoint('cmpl-', COMPLETIONS, completions.read, completions.answer, completions.CompletionStream),
  Kind.RESPONSES: Endpoint('resp_', RESPONSES, responses.read, responses.answer, responses.ResponseStream),
}
