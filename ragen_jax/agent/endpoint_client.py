"""A model behind an OpenAI-compatible server as the policy: time-outs, rate limits and bad answers are contained.

A reply is asked for by POST {url}/chat/completions. One that never comes is a turn that is not valid; it is counted,
and the evaluation goes on. What no waiting mends, an address or a key that is wrong, is told at the first request.
"""

from __future__ import annotations

import collections
import email.utils
import functools
import http.client
import json
import logging
import math
import os
import random
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from ragen_jax.agent.episode import Chat, TextReply
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.threads import run_calls

_KEY = 'OPENAI_API_KEY'
_TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_RATE_LIMITS = (429, 503)
_LONGEST_BACKOFF_S = 30.0
# A server that asks for more patience than this is not waited for.
_LONGEST_RETRY_AFTER_S = 600.0
# Replies in a row that never came, after which the server counts as gone.
_GONE_AFTER = 32
_CHUNK, _LARGEST_ANSWER = 1 << 16, 1 << 20

_log = logging.getLogger(__name__)


class _Stay(urllib.request.HTTPRedirectHandler):
  """Follows no redirect, which would take the key elsewhere: its status is an error."""

  def redirect_request(self, *arguments: Any) -> None:
    return None


class _Refused(Exception):
  """The server cannot be reached, or says that the request is wrong; asking again is of no use."""


class _Failed(Exception):
  """No usable answer, this time."""

  def __init__(self, message: str, wait_s: float = 0.0, limited: bool = False):
    super().__init__(message)
    self.wait_s, self.limited = wait_s, limited


class EndpointPolicy:
  """Asks for the replies of a turn, several at a time.

  Attributes:
    lost: why replies never came -> how many.
    asked: replies that were asked for.
  """

  def __init__(
    self,
    url: str,
    model: str,
    sampling: Sampling,
    *,
    max_tokens: int,
    timeout_s: float,
    workers: int,
    tries: int,
    backoff_s: float = 1.0,
  ):
    """Sends nothing. The key is that of the environment variable OPENAI_API_KEY, if there is one.

    Args:
      url: base address, with the version: http://localhost:8000/v1.
      model: the server's name of it.
      sampling: how it draws tokens.
      max_tokens: of a reply; 0 leaves that to the server.
      timeout_s: seconds that one answer may take.
      workers: requests at a time.
      tries: requests for one reply.
      backoff_s: seconds before the second try, twice as long before each further one, at most 30; less by chance.

    Raises:
      UserError: the key cannot be sent.
    """
    self._url, self._timeout_s, self._workers, self._tries = url, timeout_s, workers, tries
    self._backoff_s = backoff_s
    self._body = {'model': model, 'temperature': sampling.temperature}
    self._body |= {'max_tokens': max_tokens} if max_tokens else {}
    self._body |= {'top_p': sampling.top_p} if sampling.top_p < 1 else {}
    self._body |= {'top_k': sampling.top_k} if sampling.top_k else {}
    self._key = os.environ.get(_KEY, '').strip()
    if not (self._key.isascii() and self._key.isprintable()) or ' ' in self._key:
      raise UserError(f'the environment variable {_KEY} has characters that no key has')
    self._opener = urllib.request.build_opener(_Stay)
    self._lock = threading.Lock()
    self._not_before = 0.0  # by the clock; what a rate limit asks for holds for all requests
    self._reached, self._lost_in_a_row, self._told = False, 0, False
    self.lost: collections.Counter[str] = collections.Counter()
    self.asked = 0

  def replies(self, chats: list[Chat]) -> list[TextReply]:
    """The replies to conversations, in their order.

    Raises:
      UserError: the server cannot be reached, or refuses the very first request.
    """
    first = []
    if not self._reached:
      try:
        first = [self._reply(chats[0])]
      except _Refused as e:
        raise UserError(f'eval.endpoint={self._url!r}: {e}') from e
      self._reached = True
    calls = [functools.partial(self._contained, chat) for chat in chats[len(first) :]]
    # Every request and every wait has a limit of its own; this one is for what keeps to none, such as a look-up.
    limit = self._tries * (2 * self._timeout_s + _LONGEST_RETRY_AFTER_S)
    answers = run_calls(calls, what='reply', workers=self._workers, timeout_s=limit)
    return [*first, *(said if fault is None else self._lose(str(fault)) for said, fault in answers)]

  def _contained(self, chat: Chat) -> TextReply:
    try:
      return self._reply(chat)
    except _Refused as e:
      return self._lose(str(e))

  def _reply(self, chat: Chat) -> TextReply:
    """One reply, or what stands for one that never came.

    Raises:
      _Refused: see there.
    """
    reason = ''
    for i in range(self._tries):
      with self._lock:
        gone, wait = self._lost_in_a_row >= max(_GONE_AFTER, 2 * self._workers), self._not_before - time.monotonic()
      if gone:
        return self._lose('not asked for any more')
      time.sleep(max(wait, 0.0))
      try:
        said = self._ask(chat)
      except _Failed as e:
        reason = str(e)
        self._tell_of_first(reason)
        if e.wait_s > _LONGEST_RETRY_AFTER_S:
          break
        wait = e.wait_s or min(self._backoff_s * 2**i, _LONGEST_BACKOFF_S) * random.uniform(0.5, 1)
        if e.limited:
          with self._lock:
            self._not_before = max(self._not_before, time.monotonic() + wait)
        elif i + 1 < self._tries:
          time.sleep(wait)
        continue
      with self._lock:
        self._lost_in_a_row = 0
        self.asked += 1
      return said
    return self._lose(reason)

  def _tell_of_first(self, reason: str) -> None:
    with self._lock:
      if not self._told:
        self._told = True
        _log.info('%s: %s; asking again, and for others like it without a word', self._url, reason)

  def _lose(self, reason: str) -> TextReply:
    """Counts a reply that never came."""
    with self._lock:
      self.asked += 1
      self._lost_in_a_row += 1
      if not self.lost:
        _log.warning('%s: a reply never came (%s); others like it are only counted', self._body['model'], reason)
      if self._lost_in_a_row == max(_GONE_AFTER, 2 * self._workers):
        _log.warning('%s: %d replies in a row never came, no more are asked for', self._url, self._lost_in_a_row)
      self.lost[reason] += 1
    return TextReply('', 0, answered=False)

  def _ask(self, chat: Chat) -> TextReply:
    """One request.

    Raises:
      _Refused, _Failed: see there.
    """
    headers = {'Content-Type': 'application/json', 'User-Agent': 'ragen-jax'}
    if self._key:
      headers['Authorization'] = f'Bearer {self._key}'
    url = f'{self._url.rstrip("/")}/chat/completions'
    data = json.dumps({**self._body, 'messages': chat}).encode()
    try:
      return _read(self._receive(urllib.request.Request(url, data, headers, method='POST')))
    except urllib.error.HTTPError as e:
      told = self._tell(f'status {e.code} {e.reason}', _message_of(e))
      if e.code in _TRY_AGAIN:
        raise _Failed(told, _retry_after(e.headers.get('Retry-After')), e.code in _RATE_LIMITS) from e
      raise _Refused(f'{url} answers {told}') from e
    except urllib.error.URLError as e:  # before anything was answered
      told = f'cannot be reached ({self._tell(_one_line(e.reason))})'
      raise (_Failed if self._reached else _Refused)(told) from e
    except TimeoutError as e:
      raise _Failed(f'no answer in {self._timeout_s:g} s') from e
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as e:
      raise _Failed(self._tell(type(e).__name__, _one_line(e))) from e

  def _tell(self, what: str, detail: str = '') -> str:
    """A reason in one line, without the key, which a server may repeat; cut only then, or a part of it would stay."""
    line = f'{what}: {detail}' if detail else what
    line = line.replace(self._key, '***') if self._key else line
    return line if len(line) <= 300 else line[:297] + '...'

  def _receive(self, request: urllib.request.Request) -> bytes:
    """The body of the answer.

    Raises:
      TimeoutError: it takes too long, all of it counted.
      ValueError: it is too large.
    """
    deadline = time.monotonic() + self._timeout_s
    with self._opener.open(request, timeout=self._timeout_s) as response:
      parts, size = [], 0
      while part := response.read1(_CHUNK):
        parts.append(part)
        size += len(part)
        if size > _LARGEST_ANSWER:
          raise ValueError(f'the answer is larger than {_LARGEST_ANSWER >> 20} MiB')
        if time.monotonic() > deadline:
          raise TimeoutError
      return b''.join(parts)


def _read(answer: bytes) -> TextReply:
  """The reply in an answer.

  A thought that the server has taken out of the text is put back, so that the reply is what the model said.

  Raises:
    ValueError: there is none in it.
  """
  try:
    whole = json.loads(answer)
    message = whole['choices'][0]['message']
    text = message['content']
    thought = message.get('reasoning_content') or message.get('reasoning')
  except (KeyError, IndexError, TypeError, AttributeError) as e:
    raise ValueError('the answer has no choices[0].message.content') from e
  if text is None:  # all of it was thought, or it was refused
    text = ''
  if not isinstance(text, str):
    raise ValueError(f'choices[0].message.content is no text but {type(text).__name__}')
  if isinstance(thought, str) and '<think>' not in text:
    text = f'<think>{thought}</think>{text}'
  usage = whole.get('usage')
  tokens = usage.get('completion_tokens') if isinstance(usage, dict) else None
  counted = isinstance(tokens, int) and not isinstance(tokens, bool) and 0 <= tokens < 1 << 31
  return TextReply(text.encode('utf-8', 'replace').decode(), tokens if counted else None)


def _message_of(error: urllib.error.HTTPError) -> str:
  """What the server says of an error: the message of its JSON, else how its text begins."""
  with error:
    try:
      body = error.read(_CHUNK).decode('utf-8', 'replace')
    except (OSError, http.client.HTTPException):
      return ''
  try:
    told = json.loads(body)['error']
    return _one_line(told['message'] if isinstance(told, dict) else told)
  except (ValueError, KeyError, TypeError, RecursionError):
    return _one_line(body)


def _retry_after(value: str | None) -> float:
  """Seconds that a Retry-After header asks for, RFC 9110 section 10.2.3: a number or a date; 0 without."""
  if not value:
    return 0.0
  try:
    seconds = float(value)
  except ValueError:
    try:
      seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, TypeError):
      return 0.0
  return max(seconds, 0.0) if math.isfinite(seconds) else 0.0


def _one_line(value: Any) -> str:
  return ' '.join(str(value).split())
