"""Engine: a call, what is asked for, the reply so far, and whom to tell."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np

from ragen_jax.models.vision.config import VisionConfig
from ragen_jax.sampling.decode import Reply
from ragen_jax.serving.engine.eyes import RowImages
from ragen_jax.serving.engine.text import ReplyText
from ragen_jax.serving.types import Finish, Generated, GenerateRequest, Piece, PlacedImage, marked

_log = logging.getLogger(__name__)

# The most alternatives that a call may ask for; programs record so many or none.
TOP_LOGPROBS = 20
# Temperatures between 0 and this one would divide logits to infinity.
_SMALLEST_TEMPERATURE = 1e-3


class Call:
  """A call from its submission to its end.

  Attributes:
    prompt: i64[n], see `types.marked`.
    images: of the prompt; None for text.
    budget: the most tokens of the reply, by the request and by the context.
    ids: the ids of the reply so far.
    cached: tokens of the prompt that were not fed.
    cancelled: nobody waits for the reply any more.
  """

  def __init__(
    self,
    request: GenerateRequest,
    budget: int,
    decode: Callable[[Sequence[int]], str],
    on_piece: Callable[[Piece], None],
    on_done: Callable[[Generated | BaseException], None],
    vision: VisionConfig | None = None,
  ):
    """A call that has no slot yet; see `Engine.submit`. A request with images needs `vision`."""
    self.request = request
    self.prompt = marked(request.prompt, map(PlacedImage.of, request.images))
    self.images = RowImages(request.prompt, request.images, vision) if request.images else None
    self.budget = budget
    self.ids: list[int] = []
    self.cached = 0
    self.cancelled = False
    self._text = ReplyText(decode, request.params.stop)
    self._records: dict[str, list] = {'logprobs': [], 'values': [], 'entropies': [], 'versions': []}
    self._top: list[tuple[tuple[int, float], ...]] = []
    self._on_piece = on_piece
    self._on_done = on_done

  def take(self, reply: Reply, row: int, version: int, stop_ids: tuple[int, ...]) -> Finish | None:
    """Takes the tokens that were sampled for a row, and tells the listener. Tokens behind a stop string are dropped.

    Returns why the reply is over; None if it goes on. `reply` is on the host, and `version` that of the policy.
    """
    ids = reply.tokens[row, : reply.count[row]].tolist()
    stopped = ids[-1] in stop_ids
    n = self._text.add(ids[:-1] if stopped else ids)
    if stopped and not self._text.stop:
      n += 1
    self.ids += ids[:n]
    for name in ('logprobs', 'values', 'entropies'):
      self._records[name] += getattr(reply, name)[row, :n].tolist()
    self._records['versions'] += [version] * n
    top = self._alternatives(reply, row, n)
    self._top += top
    finish = None
    if stopped or self._text.stop:
      finish = Finish.STOP
    elif not reply.open[row]:
      finish = Finish.LENGTH
    if finish:
      self._text.finish()
    text = self._text.release(final=finish is not None)
    logprobs = np.asarray(reply.logprobs[row, :n], np.float32)
    self._tell(self._on_piece, Piece(tuple(ids[:n]), logprobs, tuple(top), text))
    return finish

  def _alternatives(self, reply: Reply, row: int, n: int) -> list[tuple[tuple[int, float], ...]]:
    wanted = self.request.params.top_logprobs
    if not wanted:
      return []
    tokens, logprobs = reply.top_tokens[row, :n, :wanted].tolist(), reply.top_logprobs[row, :n, :wanted].tolist()
    return [
      tuple((i, x) for i, x in zip(*pair, strict=True) if x > -math.inf) for pair in zip(tokens, logprobs, strict=True)
    ]

  def end(self, outcome: Finish | BaseException) -> None:
    """Tells the listener that nothing will follow: with the reply so far, or with an exception."""
    self._tell(self._on_done, outcome if isinstance(outcome, BaseException) else self._generated(outcome))

  def _generated(self, finish: Finish) -> Generated:
    return Generated(
      ids=tuple(self.ids),
      logprobs=np.asarray(self._records['logprobs'], np.float32),
      values=np.asarray(self._records['values'], np.float32),
      entropies=np.asarray(self._records['entropies'], np.float32),
      versions=np.asarray(self._records['versions'], np.int32),
      top=tuple(self._top),
      text=self._text.finish(),
      finish=finish,
      cached_tokens=self.cached,
      stop_text=self._text.stop,
    )

  def _tell(self, listener: Callable, value: object) -> None:
    """Calls a listener. One that raises gets no further pieces, and its reply is aborted; other calls go on."""
    try:
      listener(value)
    except Exception:  # noqa: BLE001, foreign code must not end the other calls
      _log.exception('the listener of a call raised; its reply is aborted')
      self.cancelled = True


def check_request(request: GenerateRequest, *, max_context: int, vocab_limit: int) -> None:
  """Checks what would break the rows of the device; `wire.spec` and the config check the rest of a request.

  ValueError, one line with the name, the value and what is allowed, for a number that is out of its range.
  """
  p, prompt = request.params, np.asarray(request.prompt)
  if not len(prompt):
    raise ValueError('prompt: has no tokens; needs at least 1')
  if len(prompt) >= max_context:
    raise ValueError(f'prompt: has {len(prompt)} tokens; at most {max_context - 1} fit into a context of {max_context}')
  if prompt.min() < 0 or prompt.max() >= vocab_limit:
    wrong = next(i for i in request.prompt if not 0 <= i < vocab_limit)
    raise ValueError(f'prompt: has the id {wrong}; ids are from 0 to {vocab_limit - 1}')
  if not (p.temperature == 0 or _SMALLEST_TEMPERATURE <= p.temperature < math.inf):
    raise ValueError(f'temperature={p.temperature}: must be 0 or at least {_SMALLEST_TEMPERATURE}')
  if p.max_tokens < 1:
    raise ValueError(f'max_tokens={p.max_tokens}: must be at least 1')
