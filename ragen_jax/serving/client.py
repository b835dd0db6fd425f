"""For agent programs: reward calls, finish an attempt, claim tasks. Needs only the standard library.

The file can be copied next to an agent that runs where this package is not installed. A program that a runner started
finds its task in the environment:

  from openai import OpenAI
  from ragen_jax.serving import client

  task = client.task()
  agent = OpenAI(base_url=task.base_url, api_key=task.api_key)
  reply = agent.chat.completions.create(model='policy', messages=[{'role': 'user', 'content': task.input['question']}])
  client.reward(1.0 if task.input['answer'] in reply.choices[0].message.content else 0.0, call=reply.id)

A worker on another machine claims tasks: `client.work(play, server_url, admin_key)`.

A runner sets these variables of the environment: RAGEN_BASE_URL, the server's address; RAGEN_KEY, the attempt's key;
RAGEN_TASK, the task as JSON; and for OpenAI's libraries OPENAI_BASE_URL and OPENAI_API_KEY, which are `task.base_url`
and `task.api_key`. The argument `of` of a function is the task; None for the one in the environment.

Requests are repeated while the server does not answer, for two minutes; a repeated reward counts once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import inspect
import json
import os
import random
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from typing import Any

_PATIENCE_S = 120.0  # how long a request is repeated while the server does not answer
_LONGEST_PAUSE_S = 8.0  # between two tries
_LEAST_S = 1.0  # between two questions how much time is left
_ANSWER_S = 60.0  # how long one try waits for the answer
_LARGEST_ANSWER = 256 << 20  # bytes
_REPEATED = frozenset({408, 429, 500, 502, 503, 504})


class ServerError(RuntimeError):
  """A request that the server refused, or did not answer; then `status`, the HTTP status, is 0."""

  def __init__(self, status: int, message: str):
    super().__init__(message)
    self.status = status


class Over(ServerError):
  """The attempt is over: it was cancelled, took too long, gave no sign of life, or was finished before."""


@dataclasses.dataclass(frozen=True)
class Task:
  """An attempt at a task that an agent plays; `number` is 1 for the rollout's first attempt.

  Attributes:
    mode: 'train' or 'val'.
    input: the task, a JSON value.
    timeout_s: longest time of the attempt.
    heartbeat_s: longest time between two signs of life; 0 asks for none.
    server_url: such as 'http://127.0.0.1:8000'.
    api_key: the attempt's key, for calls of the policy and for rewards.
    prompt: the prompt that the program is to use: that of the run's config, or one that --mode=optimize_prompt tries;
      '' for none.
  """

  rollout_id: str
  attempt_id: str
  number: int
  mode: str
  group: str
  input: Any
  timeout_s: float
  heartbeat_s: float
  server_url: str
  api_key: str = dataclasses.field(repr=False)
  prompt: str = ''

  @property
  def base_url(self) -> str:
    """Base URL for an OpenAI client; the calls that go there belong to this attempt."""
    return f'{self._url}/v1'

  @property
  def _url(self) -> str:
    return f'{self.server_url}/attempts/{urllib.parse.quote(self.attempt_id, safe="")}'

  def to_json(self) -> dict[str, Any]:
    """The fields that say what to do, as a JSON object: all but the address and the key."""
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name in _PUBLIC}

  @classmethod
  def from_json(cls, fields: dict[str, Any], server_url: str, api_key: str) -> Task:
    """The task with the fields of `to_json`; other fields are ignored."""
    # A server of an earlier version sends no prompt.
    known = {name: fields[name] for name in _PUBLIC if name != 'prompt'}
    return cls(**known, server_url=server_url.rstrip('/'), api_key=api_key, prompt=fields.get('prompt', ''))


_PUBLIC = frozenset(field.name for field in dataclasses.fields(Task)) - {'server_url', 'api_key'}


def task() -> Task:
  """The task for which a runner started this program; RuntimeError if a variable of the environment is missing."""
  names = ('RAGEN_BASE_URL', 'RAGEN_KEY', 'RAGEN_TASK')
  if missing := [name for name in names if not os.environ.get(name)]:
    raise RuntimeError(f'{", ".join(missing)} not set: this program was not started for a task')
  server_url, api_key, fields = (os.environ[name] for name in names)
  return Task.from_json(json.loads(fields), server_url, api_key)


def reward(
  value: float, call: str | int | None = None, agent: str = '', name: str = '', of: Task | None = None
) -> None:
  """Posts a reward, with a label for metrics (`name`). Rewards of a call add up.

  A reward may come after `finish`, until the trainer collects the rollouts of an iteration because all have ended.

  Args:
    value: a finite number; ValueError for NaN and infinity.
    call: the call that earned it: its id (`response.id`), its index in the attempt, or 'last'; None for the whole
      episode.
    agent: the agent that earned it, where several agents play; '' for the agent of the call, or for all.

  Raises:
    Over: the attempt gets no more rewards.
    ServerError: the server refused the reward, or does not answer.
  """
  body = {'value': value, 'call': call, 'agent': agent, 'name': name, 'id': uuid.uuid4().hex}
  _post_attempt(of, 'rewards', body, _PATIENCE_S)


def finish(state: str = 'succeeded', error: str = '', of: Task | None = None) -> None:
  """Ends the attempt. A runner does this itself when the program or function that it started has ended.

  The state is 'succeeded', or 'failed', after which the server may start another attempt.

  Raises:
    Over: the attempt ended otherwise.
    ServerError: the server refused the request, or does not answer.
  """
  _post_attempt(of, 'finish', {'state': state, 'error': error}, _PATIENCE_S)


@contextlib.contextmanager
def heartbeat(of: Task | None = None, on_over: Callable[[], None] = lambda: None) -> Iterator[threading.Event]:
  """Context manager: sends signs of life from a thread, three in `heartbeat_s`, or one in 10 s if that is 0.

  Yields an event. If the server says that the attempt is over, the thread sets the event and calls `on_over`, once.
  """
  this = of or task()
  pause = this.heartbeat_s / 3 if this.heartbeat_s else 10.0
  over, done = threading.Event(), threading.Event()

  def beat() -> None:
    while not done.wait(pause):
      try:
        _post_attempt(this, 'heartbeat', {}, 0.0)
      except ServerError as e:
        if not isinstance(e, Over) and e.status != 404:
          continue  # the next one may arrive
        over.set()
        on_over()
        return

  thread = threading.Thread(target=beat, daemon=True, name='ragen-heartbeat')
  thread.start()
  try:
    yield over
  finally:
    done.set()


class Queue:
  """The server's queue of rollouts, as a worker on any machine sees it."""

  def __init__(self, server_url: str, admin_key: str, worker: str = ''):
    """Connects to nothing. `worker` is the name in the store; '' for the machine's name and the process's number."""
    self._url, self._admin_key = server_url.rstrip('/'), admin_key
    self._worker = worker or f'{socket.gethostname()}-{os.getpid()}'

  def claim(self, wait_s: float) -> Task | None:
    """The oldest rollout that waits for a worker; None if there is none in `wait_s`. ServerError as for `reward`."""
    body = {'worker': self._worker, 'wait_s': wait_s}
    answer = _post(f'{self._url}/rollouts/claim', self._admin_key, body, _PATIENCE_S, wait_s + _ANSWER_S)
    return Task.from_json(answer, self._url, answer['api_key']) if answer else None

  def heartbeat(self, task: Task) -> None:
    """Sends one sign of life; raises Over if the attempt is over."""
    _post_attempt(task, 'heartbeat', {}, 0.0)

  def reward(self, task: Task, value: float) -> None:
    """Posts the reward of a whole episode."""
    reward(value, of=task)

  def finish(self, task: Task, state: str, error: str) -> None:
    finish(state, error, of=task)

  def release(self, task: Task, error: str) -> None:
    """Ends the attempt because the worker stops."""
    finish('failed', error, of=task)

  def time_left(self, task: Task) -> float | None:
    """Seconds that the attempt may still take, without updates in which calls wait; 0 if it is over, None if
    unknown."""
    try:
      return float(_post_attempt(task, 'heartbeat', {}, 0.0)['left_s'])
    except ServerError as e:
      return 0.0 if isinstance(e, Over) or e.status == 404 else None
    except (KeyError, TypeError, ValueError):
      return None


def work(
  agent: Callable[[Task], Any],
  server_url: str,
  admin_key: str,
  worker: str = '',
  wait_s: float = 20.0,
  stop: threading.Event | None = None,
  max_tasks: int | None = None,
) -> int:
  """Claims tasks and plays them, one after another, and returns their number. Several processes play several at a time.

  The number that `agent` returns is the reward of the episode; it returns None if it has posted its rewards. If it
  raises, the attempt has failed. An async function is cancelled when the attempt is over or took too long; another
  function is not interrupted.

  Args:
    wait_s: how long one request waits for a task.
    stop: set it to end the loop after the present task.

  Raises:
    ServerError: the server refuses the key, or does not answer.
  """
  queue, played, stop = Queue(server_url, admin_key, worker), 0, stop or threading.Event()
  while not stop.is_set() and (max_tasks is None or played < max_tasks):
    if (claimed := queue.claim(wait_s)) is not None:
      _play(agent, claimed, queue)
      played += 1
  return played


class _TookTooLong(Exception):
  """An agent that was cancelled because of its time-out."""


def _play(agent: Callable[[Task], Any], task: Task, queue: Queue) -> None:
  with contextlib.suppress(Over):
    try:
      value = _call(agent, task, queue)
      if value is not None:
        queue.reward(task, float(value))
    except Over:
      raise
    except _TookTooLong:
      queue.finish(task, 'timeout', f'took longer than timeout_s={task.timeout_s:g}')
    except KeyboardInterrupt:
      queue.finish(task, 'failed', 'the worker was interrupted')
      raise
    except (Exception, SystemExit) as e:  # noqa: BLE001, an agent's exception is the end of an attempt
      queue.finish(task, 'failed', f'{type(e).__name__}: {e}'.replace(task.api_key, '***'))
    else:
      queue.finish(task, 'succeeded', '')


class AgentCall:
  """One call of an agent's function, async or not."""

  def __init__(self, agent: Callable[[Task], Any], task: Task):
    self._agent, self._task = agent, task
    self._lock = threading.Lock()
    self._stop: Callable[[], Any] | None = None  # of an async function that has begun
    self._error: Exception | None = None

  def cancel(self, error: Exception) -> bool:
    """Cancels an async function, so that `run` raises the error; False for another function, which Python cannot stop.
    Another thread calls this."""
    with self._lock:
      self._error = self._error or error
      if self._stop is None:
        return False
      with contextlib.suppress(RuntimeError):  # its event loop has closed
        self._stop()
      return True

  def run(self) -> Any:
    """The function's value, or what it raises."""
    value = self._agent(self._task)
    return asyncio.run(self._await(value)) if inspect.isawaitable(value) else value

  async def _await(self, value: Any) -> Any:
    loop, job = asyncio.get_running_loop(), asyncio.ensure_future(value)
    with self._lock:
      self._stop = lambda: loop.call_soon_threadsafe(job.cancel)
      if self._error:
        job.cancel()
    try:
      result = await job
    except asyncio.CancelledError:
      if self._error is None:
        raise
    if self._error is not None:
      raise self._error
    return result


def _call(agent: Callable[[Task], Any], task: Task, queue: Queue) -> Any:
  """The value of an agent's function, with heartbeats and a time limit while it runs."""
  call, done = AgentCall(agent, task), threading.Event()

  def limit() -> None:
    left = task.timeout_s
    while not done.wait(min(left, threading.TIMEOUT_MAX)):
      more = queue.time_left(task)
      if more is not None and more <= 0:
        call.cancel(_TookTooLong())
        return
      left = max(more or 0.0, _LEAST_S)

  threading.Thread(target=limit, daemon=True, name='ragen-time-limit').start()
  try:
    with heartbeat(task, lambda: call.cancel(Over(410, 'the attempt is over'))):
      return call.run()
  except asyncio.CancelledError as e:
    raise RuntimeError('the agent was cancelled') from e
  finally:
    done.set()


# -- requests


class _NoRedirect(urllib.request.HTTPRedirectHandler):
  """Redirects are errors: the key would go to another server."""

  def redirect_request(self, *_: Any) -> None:
    return None


def _post_attempt(of: Task | None, what: str, body: dict[str, Any], patience_s: float) -> dict[str, Any] | None:
  this = of or task()
  return _post(f'{this._url}/{what}', this.api_key, body, patience_s, _ANSWER_S)


def _post(url: str, key: str, body: dict[str, Any], patience_s: float, answer_s: float) -> dict[str, Any] | None:
  """Posts JSON, again while there is no answer, and returns the answer's JSON; None for an answer without content."""
  give_up, pause = time.monotonic() + patience_s, 0.25
  while True:
    wait = None
    try:
      return _post_once(url, key, body, answer_s)
    except urllib.error.HTTPError as e:
      with e:
        error = (Over if e.code == 410 else ServerError)(e.code, _message(e))
        wait = e.headers.get('Retry-After')
      if e.code not in _REPEATED:
        raise error from None
    except (OSError, http.client.HTTPException) as e:
      error = ServerError(0, f'{url} does not answer ({type(e).__name__}: {e})')
    pause = min(2 * pause, _LONGEST_PAUSE_S)
    wait_s = _seconds(wait, pause * random.uniform(0.5, 1.0))
    if time.monotonic() + wait_s > give_up:
      raise error
    time.sleep(wait_s)


def _post_once(url: str, key: str, body: dict[str, Any], answer_s: float) -> dict[str, Any] | None:
  host = urllib.parse.urlsplit(url).hostname or ''
  loopback = host in ('localhost', '::1') or host.startswith('127.')
  proxies = urllib.request.ProxyHandler({} if loopback else None)
  headers = {'Authorization': f'Bearer {key}', 'Content-Type': 'application/json'}
  request = urllib.request.Request(url, json.dumps(body, allow_nan=False).encode(), headers, method='POST')
  with urllib.request.build_opener(proxies, _NoRedirect).open(request, timeout=answer_s) as answer:
    content = answer.read(_LARGEST_ANSWER + 1)
  if len(content) > _LARGEST_ANSWER:
    raise ServerError(answer.status, f'{url} answers with more than {_LARGEST_ANSWER} bytes')
  try:
    return json.loads(content) if content.strip() else None
  except ValueError as e:
    raise ServerError(answer.status, f'{url} answers with something else than JSON') from e


def _message(error: urllib.error.HTTPError) -> str:
  """The message of the server's error body; the status where there is none."""
  try:
    return str(json.loads(error.read(1 << 20))['error']['message'])
  except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
    return f'{error.url} answers with status {error.code}'


def _seconds(text: str | None, otherwise: float) -> float:
  """The server's wish for a pause, if it is a sensible one."""
  try:
    return max(0.0, min(float(text or ''), 60.0))
  except ValueError:
    return otherwise
