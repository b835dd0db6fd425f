"""The policy is a model on an OpenAI-compatible server. Time-outs, rate limits and bad answers do not end a run.

A lost reply counts as a turn that is not valid, and the evaluation continues. A wrong address or key is an error at the
first request, because retries cannot help.

This module repeats requests itself. The `openai` package can also repeat them, but not if an answer contains no reply;
after a rate limit, it delays only the rejected request, and for at most two minutes.
"""

from __future__ import annotations

import collections
import functools
import logging
import random
import threading
import time
from collections.abc import Sequence

from ragen_jax.agent.endpoint_client import KEY_VARIABLE, EndpointClient, EndpointSettings, RequestError
from ragen_jax.agent.episode import Chat, TextReply
from ragen_jax.agent.episode_log import EpisodeLog
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.keys import read_key
from ragen_jax.utils.retry import pause_s
from ragen_jax.utils.threads import run_calls

_LONGEST_BACKOFF_S = 30.0
# A reply is lost if the server asks for a longer wait than this.
_LONGEST_RETRY_AFTER_S = 600.0
# Circuit breaker: after this many consecutive lost replies (at least twice the workers), no more are requested.
_GONE_AFTER = 32

_log = logging.getLogger(__name__)


class EndpointSpeaker:
  """Requests the replies of a turn, several at the same time. One object can speak in many rollouts.

  Attributes:
    lost: reason -> number of lost replies.
    asked: number of requested replies.
  """

  writes_tokens = False

  def __init__(
    self, settings: EndpointSettings, sampling: Sampling, backoff_s: float = 1.0, *, key: str | None = None,
    seed: int | None = None, field: str = 'eval.endpoint',
  ):  # fmt: skip
    """Sends no request. Raises UserError if the openai package is missing, or the key cannot be sent.

    Args:
      backoff_s: seconds before the second try, doubled for each further try up to 30, times a random factor.
      key: the API key, '' for none; None reads it from the environment variable OPENAI_API_KEY.
      seed, field: see `EndpointClient`.
    """
    self._settings, self._backoff_s, self._field = settings, backoff_s, field
    self._client = EndpointClient(settings, sampling, read_key(KEY_VARIABLE) if key is None else key, seed, field)
    self._gone_after = max(_GONE_AFTER, 2 * settings.endpoint_workers)
    self._lock = threading.Lock()
    self._not_before = 0.0  # time.monotonic() until which a rate limit holds all requests back
    self._reached, self._lost_in_a_row, self._warned = False, 0, False
    self.lost: collections.Counter[str] = collections.Counter()
    self.asked = 0

  def reply(self, log: EpisodeLog) -> dict[int, TextReply] | None:
    """See `Speaker`; errors are those of `replies`."""
    rows = log.live
    if not rows:
      return None
    tags = ', '.join(spec.tag for spec in log.envs.specs)
    _log.info('%s: turn %d of %s, %d replies', self._settings.endpoint_model, log.turn + 1, tags, len(rows))
    most = [log.envs.pool_of(row).spec.max_response_tokens for row in rows]
    return dict(zip(rows, self.replies([log.chat(row) for row in rows], most), strict=True))

  def replies(self, chats: list[Chat], most: Sequence[int] = ()) -> list[TextReply]:
    """The replies to conversations, in their order.

    Args:
      most: maximum tokens of each reply, in addition to `eval.endpoint_max_tokens`; 0 for no other, () for none.

    Raises UserError if the server cannot be reached, or rejects the very first request.
    """
    s = self._settings
    # Requests and waits have their own limits; this limit covers all other calls, such as a name look-up, and headers
    # that trickle in.
    limit = s.endpoint_tries * (2 * s.endpoint_timeout + _LONGEST_RETRY_AFTER_S)
    first, asked = [], list(zip(chats, most or [0] * len(chats), strict=True))
    if not self._reached:
      ((reply, fault),) = run_calls(
        [functools.partial(self._first_reply, *asked[0])], what='reply', workers=1, timeout_s=limit
      )
      if isinstance(reply, RequestError):
        raise UserError(f'{self._field}={s.endpoint!r}: {reply}') from reply
      if fault is not None:
        raise UserError(f'{self._field}={s.endpoint!r}: {fault}')
      first, self._reached = [reply], True
    calls = [functools.partial(self._reply_or_loss, *one) for one in asked[len(first) :]]
    answers = run_calls(calls, what='reply', workers=s.endpoint_workers, timeout_s=limit)
    return [*first, *(said if fault is None else self._lose(str(fault)) for said, fault in answers)]

  def warn_of_losses(self) -> None:
    """Logs the number of lost replies and the most frequent reasons; logs nothing if no reply was lost."""
    if self.lost:
      reasons = ', '.join(f'{count} x {reason}' for reason, count in self.lost.most_common(3))
      url = self._settings.endpoint
      _log.warning('%d of the %d replies of %s were lost: %s', self.lost.total(), self.asked, url, reasons)

  def _first_reply(self, chat: Chat, most: int) -> TextReply | RequestError:
    try:
      return self._reply(chat, most)
    except RequestError as e:
      return e

  def _reply_or_loss(self, chat: Chat, most: int) -> TextReply:
    try:
      return self._reply(chat, most)
    except RequestError as e:
      return self._lose(str(e))

  def _reply(self, chat: Chat, most: int) -> TextReply:
    """One reply, with retries, or the substitute for a lost reply; RequestError if further tries cannot succeed."""
    tries, reason = self._settings.endpoint_tries, ''
    for i in range(tries):
      with self._lock:
        gone, wait = self._lost_in_a_row >= self._gone_after, self._not_before - time.monotonic()
      if gone:
        return self._lose('no longer requested')
      time.sleep(max(wait, 0.0))
      try:
        said = self._client.request(chat, most)
      except RequestError as e:
        if not e.retry or (e.unreachable and not self._reached):
          raise
        reason = str(e)
        self._log_first_failure(reason)
        if e.wait_s > _LONGEST_RETRY_AFTER_S:
          break
        self._back_off(e, i, last=i + 1 == tries)
        continue
      with self._lock:
        self._lost_in_a_row = 0
        self.asked += 1
      return said
    return self._lose(reason)

  def _back_off(self, error: RequestError, tried: int, *, last: bool) -> None:
    """Waits before the next try; after a rate limit, all requests wait."""
    wait = error.wait_s or pause_s(tried + 1, self._backoff_s, _LONGEST_BACKOFF_S) * random.uniform(0.5, 1)
    if error.rate_limit:
      with self._lock:
        self._not_before = max(self._not_before, time.monotonic() + wait)
    elif not last:
      time.sleep(wait)

  def _log_first_failure(self, reason: str) -> None:
    with self._lock:
      first, self._warned = not self._warned, True
    if first:
      url = self._settings.endpoint
      _log.info('%s: %s; the request is repeated; later repetitions are not logged', url, reason)

  def _lose(self, reason: str) -> TextReply:
    model, url = self._settings.endpoint_model, self._settings.endpoint
    with self._lock:
      self.asked += 1
      self._lost_in_a_row += 1
      if not self.lost:
        _log.warning('%s: a reply was lost (%s); further lost replies are only counted', model, reason)
      if self._lost_in_a_row == self._gone_after:
        _log.warning('%s: %d consecutive replies were lost; no more are requested', url, self._lost_in_a_row)
      self.lost[reason] += 1
    return TextReply('', 0, answered=False)
