"""Parts of answers that several endpoints share: rests, log-probabilities and usage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ragen_jax.serving.reply_reader import Reply
from ragen_jax.serving.types import Generated, Piece

# Clients read JSON, which has no infinity; OpenAI's interface writes this number for a token that cannot be drawn.
_LOWEST_LOGPROB = -9999.0


@dataclasses.dataclass(frozen=True)
class Head:
  """What all parts of an answer repeat.

  Attributes:
    id: id of the answer, such as 'chatcmpl-…'.
    created: seconds since 1970.
    model: the model that the request names.
  """

  id: str
  created: int
  model: str


@dataclasses.dataclass(frozen=True)
class Choice:
  """A complete reply of an answer.

  Attributes:
    index: its number in the answer.
    prompt: ids of its prompt.
    generated: the reply of the engine.
    reply: what was read from it; None for completions.
    prompt_text: the prompt that completions repeat; '' unless asked for.
  """

  index: int
  prompt: tuple[int, ...]
  generated: Generated
  reply: Reply | None
  prompt_text: str


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
  """The log-probabilities of a piece as chat completions and responses write them.

  Args:
    piece: the tokens.
    top_logprobs: number of alternatives.
    token_bytes: the bytes of a token, which may be a part of a character.
  """

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


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
  """The usage of chat completions and completions. Each prompt counts once, however many replies it has."""
  prompts = {choice.prompt: choice.generated for choice in reversed(choices)}
  prompt = sum(map(len, prompts))
  completion = sum(len(choice.generated.ids) for choice in choices)
  counted: dict[str, Any] = {
    'prompt_tokens': prompt,
    'completion_tokens': completion,
    'total_tokens': prompt + completion,
    'prompt_tokens_details': {'cached_tokens': sum(first.cached_tokens for first in prompts.values())},
  }
  thoughts = sum(choice.reply.thought_tokens for choice in choices if choice.reply)
  return counted | {'completion_tokens_details': {'reasoning_tokens': thoughts}}


def versions(choices: Sequence[Choice]) -> dict[str, Any]:
  """The policy versions that sampled the replies; empty if no token was sampled."""
  found = [int(v) for choice in choices for v in choice.generated.versions]
  if not found:
    return {}
  return {'policy_version': max(found), 'policy_versions': {'min': min(found), 'max': max(found)}}
