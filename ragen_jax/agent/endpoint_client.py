"""Requests to an OpenAI-compatible server, through the `openai` package.

The package builds and sends requests and classifies errors. This module also limits the time and the size of a whole
answer, follows no redirects, and keeps the key out of all messages.
"""

from __future__ import annotations

import dataclasses
import email.utils
import importlib
import json
import math
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

from ragen_jax.agent.episode import Chat, TextReply
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.utils.errors import UserError, one_line

# The environment variable that holds the key of the evaluated server.
KEY_VARIABLE = 'OPENAI_API_KEY'
_RETRIED_STATUS = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_RATE_LIMIT_STATUS = (429, 503)
# Names of the HTTP library's errors before a connection; the library's module differs between versions of openai.
_NO_CONNECTION = ('ConnectError', 'ConnectTimeout', 'ProxyError', 'UnsupportedProtocol')
_LARGEST_ANSWER = 1 << 20
_DEADLINE = 'ragen_jax_deadline'  # key of a request's extensions


@dataclasses.dataclass(frozen=True)
class EndpointSettings:
  """Fields of `config.eval`."""

  endpoint: str
  endpoint_model: str
  endpoint_max_tokens: int
  endpoint_timeout: float
  endpoint_workers: int
  endpoint_tries: int


class RequestError(Exception):
  """A request gave no reply.

  Attributes:
    retry: whether another try may succeed.
    wait_s: seconds to wait before the next try, from the server's Retry-After header; 0 without the header.
    rate_limit: the server asks for fewer requests.
    unreachable: there was no connection.
    status: the HTTP status; 0 without one.
  """

  def __init__(
    self, message: str, *, retry: bool, wait_s: float = 0.0, rate_limit: bool = False, unreachable: bool = False,
    status: int = 0,
  ):  # fmt: skip
    super().__init__(message)
    self.retry, self.wait_s, self.rate_limit, self.unreachable = retry, wait_s, rate_limit, unreachable
    self.status = status


class EndpointClient:
  """Requests one reply in each call; thread-safe."""

  def __init__(self, settings: EndpointSettings, sampling: Sampling, key: str, seed: int | None, field: str):
    """Sends no request. Raises UserError if the openai package is missing.

    Args:
      key: the API key; '' sends none.
      seed: seed of the draws, for servers that accept one; None sends none.
      field: the config's field with the address, for errors.
    """
    self._url, self._timeout_s = settings.endpoint, settings.endpoint_timeout
    self._body: dict[str, Any] = {'model': settings.endpoint_model, 'temperature': sampling.temperature}
    self._body |= {'max_tokens': settings.endpoint_max_tokens} if settings.endpoint_max_tokens else {}
    self._body |= {'top_p': sampling.top_p} if sampling.top_p < 1 else {}
    self._body |= {'extra_body': {'top_k': sampling.top_k}} if sampling.top_k else {}
    self._body |= {} if seed is None else {'seed': seed}
    self._key = key
    try:
      import openai
    except ImportError as e:
      raise UserError(
        f"{field} needs the openai package; install it with 'pip install -r requirements-endpoint.txt'"
      ) from e
    self._openai, omit = openai, openai.Omit()
    # Set explicitly: otherwise the package would send the values of other environment variables.
    self._headers = {'Authorization': f'Bearer {self._key}' if self._key else omit}
    # Compressed answers are refused, because a small one can become a huge one.
    self._headers |= {'Accept-Encoding': 'identity'}
    self._headers |= {'OpenAI-Organization': omit, 'OpenAI-Project': omit, 'User-Agent': 'ragen-jax'}
    self._client = openai.OpenAI(
      base_url=self._url,
      api_key=self._key or 'none',
      admin_api_key='',
      timeout=self._timeout_s,
      max_retries=0,  # see EndpointSpeaker
      # A redirect would send the key to another server. The proxies of the environment do not reach this machine.
      http_client=openai.DefaultHttpxClient(
        follow_redirects=False,
        timeout=self._timeout_s,
        trust_env=not _is_here(self._url),
        event_hooks={'request': [self._begin], 'response': [self._limit]},
      ),
    )

  def request(self, chat: Chat, max_tokens: int = 0) -> TextReply:
    """The reply to a conversation, of at most `max_tokens` tokens unless 0; RequestError if there is none."""
    openai = self._openai
    try:
      return read_reply(self._receive(chat, max_tokens))
    except openai.APIStatusError as e:
      code, retry = e.status_code, e.status_code in _RETRIED_STATUS
      detail = e.body.get('message', e.body) if isinstance(e.body, dict) else e.body or ''
      reason = self._reason(f'status {code} {e.response.reason_phrase}'.rstrip(), detail)
      wait_s = retry_after(e.response.headers.get('retry-after'))
      where = '' if retry else f'{self._url.rstrip("/")}/chat/completions answers '
      limited = code in _RATE_LIMIT_STATUS
      raise RequestError(where + reason, retry=retry, wait_s=wait_s, rate_limit=limited, status=code) from e
    except (openai.APIConnectionError, TimeoutError) as e:
      cause = e.__cause__
      if type(cause).__name__ in _NO_CONNECTION:
        reason = f'cannot be reached ({self._reason(str(cause) or type(cause).__name__)})'
        raise RequestError(reason, retry=True, unreachable=True) from e
      late = isinstance(e, (openai.APITimeoutError, TimeoutError))
      reason = f'no answer in {self._timeout_s:g} s' if late else self._reason(type(cause).__name__, cause)
      raise RequestError(reason, retry=True) from e
    except Exception as e:  # what the HTTP library raises while the answer is read, and answers without a reply
      raise RequestError(self._reason(type(e).__name__, e), retry=True) from e

  def _receive(self, chat: Chat, max_tokens: int) -> bytes:
    least = min((n for n in (max_tokens, self._body.get('max_tokens', 0)) if n), default=0)
    body = self._body | ({'max_tokens': least} if least else {})
    completions = self._client.chat.completions.with_streaming_response
    with completions.create(messages=chat, extra_headers=self._headers, **body) as response:
      return response.read()

  def _begin(self, request: Any) -> None:
    request.extensions[_DEADLINE] = time.monotonic() + self._timeout_s

  def _limit(self, response: Any) -> None:
    """Called before the body of an answer is read, also that of an error: limits its size and the time of the whole.

    The HTTP library only limits the time of each part of an answer. Raises ValueError if the body is compressed.
    """
    encoding = response.headers.get('content-encoding', 'identity')
    if encoding.strip().lower() != 'identity':
      raise ValueError(f'the answer is compressed ({encoding}), which the request does not allow')
    response.stream = _limited(response.stream, response.request.extensions[_DEADLINE])

  def _reason(self, what: str, detail: Any = '') -> str:
    """A reason in one line of at most 300 characters, without the key, which a server may repeat.

    The key is removed before the line is cut, because the cut could leave a part of it.
    """
    line = one_line(f'{what}: {detail}'.removesuffix(': '), str)
    line = line.replace(self._key, '***') if self._key else line
    return line if len(line) <= 300 else line[:297] + '...'


def _limited(stream: Any, deadline: float) -> Any:
  """A stream of the HTTP library that raises TimeoutError after the deadline, and ValueError if it is too long."""
  library = importlib.import_module(type(stream).__module__.partition('.')[0])  # differs between versions of openai

  class Limited(library.SyncByteStream):
    def __iter__(self) -> Iterator[bytes]:
      size = 0
      for part in stream:
        size += len(part)
        if size > _LARGEST_ANSWER:
          raise ValueError(f'the answer is larger than {_LARGEST_ANSWER >> 20} MiB')
        if time.monotonic() > deadline:
          raise TimeoutError
        yield part

    def close(self) -> None:
      stream.close()

  return Limited()


def _is_here(url: str) -> bool:
  """Whether an address is one of this machine, without encryption."""
  parts = urllib.parse.urlsplit(url)
  host = parts.hostname or ''
  return parts.scheme == 'http' and (host in ('localhost', '::1') or host.startswith('127.'))


def read_reply(answer: bytes) -> TextReply:
  """The reply in an answer; ValueError if it has none. A separate thought is put back in front of the text."""
  try:
    whole = json.loads(answer)
    message = whole['choices'][0]['message']
    text = message['content']
    thought = message.get('reasoning_content') or message.get('reasoning')
  except (KeyError, IndexError, TypeError, AttributeError) as e:
    raise ValueError('the answer has no choices[0].message.content') from e
  if text is None:  # the reply is only a thought, or the model refused
    text = ''
  if not isinstance(text, str):
    raise ValueError(f'choices[0].message.content is not text but {type(text).__name__}')
  if isinstance(thought, str) and '<think>' not in text:
    text = f'<think>{thought}</think>{text}'
  usage = whole.get('usage')
  tokens = usage.get('completion_tokens') if isinstance(usage, dict) else None
  counted = isinstance(tokens, int) and not isinstance(tokens, bool) and 0 <= tokens < 1 << 31
  return TextReply(text.encode('utf-8', 'replace').decode(), tokens if counted else None)


def retry_after(value: str | None) -> float:
  """Seconds to wait by a Retry-After header (a number or a date; RFC 9110, section 10.2.3); 0 without a header."""
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
