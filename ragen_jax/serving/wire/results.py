"""Wire: parts of answers that several endpoints share: rests, log-probabilities and usage."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ragen_jax.agent.reply_reader import ParsedReply, ReplyReader
from ragen_jax.serving.errors import ApiError
from ragen_jax.serving.types import Finish, Generated, Piece, SamplingParams
from ragen_jax.serving.wire import sse
from ragen_jax.serving.wire.spec import CallSpec

# Clients read JSON, which has no infinity; OpenAI's interface writes this number for a token that cannot be drawn.
_LOWEST_LOGPROB = -9999.0


@dataclasses.dataclass(frozen=True)
class Head:
  """What all parts of an answer repeat: an id such as 'chatcmpl-…', seconds since 1970, and the request's model."""

  id: str
  created: int
  model: str


@dataclasses.dataclass(frozen=True)
class Choice:
  """A complete reply of an answer.

  Attributes:
    index: its number in the answer.
    prompt: ids of its prompt.
    reply: what was read from it; None for completions.
    prompt_text: the prompt that completions repeat; '' unless asked for.
  """

  index: int
  prompt: tuple[int, ...]
  generated: Generated
  reply: ParsedReply | None
  prompt_text: str


@dataclasses.dataclass(frozen=True)
class AnswerContext:
  """What an answer is written with. `new_reader` makes a new reader of a reply, by its index; `token_bytes` are the
  bytes of a token, which may be a part of a character."""

  spec: CallSpec
  head: Head
  params: SamplingParams
  new_reader: Callable[[int], ReplyReader]
  decode: Callable[[Sequence[int]], str]
  token_bytes: Callable[[int], bytes]


class Rest:
  """Follows the pieces of a reply and makes a last piece of what they left out."""

  def __init__(self):
    self._ids, self._text = 0, 0

  def add(self, piece: Piece) -> None:
    """Counts a piece that was sent."""
    self._ids += len(piece.ids)
    self._text += len(piece.text)

  def of(self, generated: Generated) -> Piece:
    """The tokens and the text of a complete reply that no piece had."""
    return Piece(
      ids=tuple(generated.ids[self._ids :]),
      logprobs=generated.logprobs[self._ids :],
      top=generated.top[self._ids :],
      text=generated.text[self._text :],
    )


def whole(generated: Generated) -> Piece:
  """A complete reply as one piece."""
  return Rest().of(generated)


def token_logprobs(piece: Piece, top_logprobs: int, token_bytes: Callable[[int], bytes]) -> list[dict[str, Any]]:
  """The log-probabilities of a piece as chat completions and responses write them."""

  def entry(id_: int, logprob: float) -> dict[str, Any]:
    raw = token_bytes(id_)
    return {'token': raw.decode('utf-8', 'replace'), 'logprob': finite(logprob), 'bytes': list(raw)}

  entries = []
  for k, (id_, logprob) in enumerate(zip(piece.ids, piece.logprobs, strict=True)):
    top = piece.top[k][:top_logprobs] if top_logprobs else ()
    entries.append({**entry(id_, logprob), 'top_logprobs': [entry(*alternative) for alternative in top]})
  return entries


def finite(logprob: float) -> float:
  """A log-probability that JSON can hold; NaN becomes the lowest one, and the engine logs it."""
  return float(logprob) if logprob > _LOWEST_LOGPROB else _LOWEST_LOGPROB


def usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
  """The usage of chat completions and completions. A prompt counts once; `n` choices, one behind the other, have it."""
  prompts = {choice.index // n: choice for choice in reversed(choices)}
  prompt = sum(len(choice.prompt) for choice in prompts.values())
  completion = sum(len(choice.generated.ids) for choice in choices)
  counted: dict[str, Any] = {
    'prompt_tokens': prompt,
    'completion_tokens': completion,
    'total_tokens': prompt + completion,
    'prompt_tokens_details': {'cached_tokens': sum(first.generated.cached_tokens for first in prompts.values())},
  }
  thoughts = sum(choice.reply.thought_tokens for choice in choices if choice.reply)
  return counted | {'completion_tokens_details': {'reasoning_tokens': thoughts}}


def versions(choices: Sequence[Choice]) -> dict[str, Any]:
  """The policy versions that sampled the replies; empty if no token was sampled."""
  found = [int(v) for choice in choices for v in choice.generated.versions]
  if not found:
    return {}
  return {'policy_version': max(found), 'policy_versions': {'min': min(found), 'max': max(found)}}


def finish_reason(generated: Generated) -> str:
  """Why a reply ended, as clients are told."""
  if generated.finish is Finish.ABORTED:
    raise ValueError('an aborted reply has no answer')
  return str(generated.finish)


class ChunkStream:
  """The events of a streamed answer of chat completions or completions. Pieces of several replies come in any order."""

  kind: ClassVar[str]  # the `object` of a chunk

  def __init__(self, context: AnswerContext):
    self._context, self._spec = context, context.spec
    self._rests: defaultdict[int, Rest] = defaultdict(Rest)

  def end(self, choices: Sequence[Choice]) -> list[bytes]:
    """The last events of the replies, the usage if it was asked for, and the mark of the end."""
    last = [event for choice in choices for event in self._finish(choice)]
    counted = [self._frame([], usage=usage(choices, self._spec.n))] if self._spec.include_usage else []
    return [*last, *counted, sse.DONE]

  def error(self, error: ApiError) -> list[bytes]:
    """The end of a stream that failed. Without it, clients would take what they have for a whole reply."""
    return [sse.event(error.body())]

  def _finish(self, choice: Choice) -> list[bytes]:
    """The last events of a complete reply, with what the pieces left out."""
    raise NotImplementedError

  def _frame(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
    head = self._context.head
    frame = {'id': head.id, 'object': self.kind, 'created': head.created, 'model': head.model}
    return sse.event({**frame, 'choices': choices, **more})
