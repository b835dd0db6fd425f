"""A server whose replies are written by the test, under its control; everything but the engine is the real one."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import openai
from openai import OpenAI

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.reply_reader import BadCalls
from ragen_jax.serving.client import Task
from ragen_jax.serving.conversation.chat_format import QwenFormat
from ragen_jax.serving.engine.engines import Engines
from ragen_jax.serving.engine.settings import EngineStats
from ragen_jax.serving.errors import QueueFull
from ragen_jax.serving.http.app import SILENCE_S, App
from ragen_jax.serving.http.server import HttpServer
from ragen_jax.serving.http.service import ServerSettings, Service
from ragen_jax.serving.rollouts.lifecycle import Lifecycle
from ragen_jax.serving.rollouts.records import AttemptLimits, task_of
from ragen_jax.serving.rollouts.store import Store
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.serving.types import Finish, Generated, GenerateRequest, Piece, SamplingParams, StoredCall
from tests.support.endpoint_store import new_rollout
from tests.support.serving import PATIENCE
from tests.support.wire import limits

ADMIN = 'admin-key-of-the-tests'
ASK = [{'role': 'user', 'content': 'What is 1 + 1?'}]


class ScriptedCall:
  """A call that the engine got. The test may let it go on with `tell` and `end`; times do not matter.

  Attributes:
    request: what is asked for.
    cancelled: set when nobody wants the reply any more.
  """

  def __init__(self, request: GenerateRequest, text: str, engine: ScriptedEngine, on_piece, on_done):
    """Prepares the reply to a text, cut as the request asks."""
    self.request, self.cancelled = request, threading.Event()
    self._engine, self._on_piece, self._on_done = engine, on_piece, on_done
    tok, params = engine.tokenizer, request.params
    ids = [*tok.encode(text), tok.stop_ids[0]]
    finish, stop_text = Finish.STOP, ''
    for n in range(1, len(ids)):
      known = tok.decode(ids[:n])
      found = min((known.find(s), s) for s in params.stop if s in known) if any(s in known for s in params.stop) else ()
      if found:
        ids, text, stop_text = ids[:n], known[: found[0]], found[1]
        break
    if len(ids) > params.max_tokens:
      ids, finish, stop_text = ids[: params.max_tokens], Finish.LENGTH, ''
      text = tok.decode(ids)
    self._ids, self._text, self._finish, self._stop = tuple(ids), text, finish, stop_text
    self._versions, self._told, self._shown = [], 0, 0

  def tell(self, tokens: int) -> None:
    """The next tokens are sampled, with the engine's present version."""
    ids = self._ids[self._told : self._told + tokens]
    self._versions += [self._engine.version] * len(ids)
    start, self._told = self._told, self._told + len(ids)
    text = self._engine.tokenizer.decode(self._ids[: self._told])
    ready = len(self._text) if self._told == len(self._ids) else min(len(text.rstrip('\ufffd')), len(self._text))
    shown, self._shown = self._shown, max(ready, self._shown)
    piece = Piece(ids, self._logprobs()[start : self._told], self._top()[start : self._told], self._text[shown:ready])
    self._on_piece(piece)

  def end(self, error: BaseException | None = None) -> None:
    """The rest is sampled, and the reply is over; with an error the engine has stopped."""
    if error is not None:
      self._on_done(error)
      return
    if self._told < len(self._ids):
      self.tell(len(self._ids))
    self._on_done(self._generated(self._finish))

  def cancel(self) -> None:
    """See `engine.Ticket`."""
    if not self.cancelled.is_set():
      self.cancelled.set()
      self._on_done(self._generated(Finish.ABORTED))

  def _logprobs(self) -> np.ndarray:
    return -np.arange(1, len(self._ids) + 1, dtype=np.float32) / 8

  def _top(self):
    wanted = self.request.params.top_logprobs
    return tuple(tuple((id_ + k, -0.5 - k) for k in range(wanted)) for id_ in self._ids) if wanted else ()

  def _generated(self, finish: Finish) -> Generated:
    n = self._told
    return Generated(
      ids=self._ids[:n], logprobs=self._logprobs()[:n], values=np.zeros(n, np.float32),
      entropies=np.zeros(n, np.float32), versions=np.asarray(self._versions, np.int32), top=self._top()[:n],
      text=self._text, finish=finish, cached_tokens=0, stop_text=self._stop,
    )  # fmt: skip


class ScriptedEngine:
  """Replies as a script says, at once, or, while it is held, when the test says.

  Attributes:
    tokenizer: makes ids of the replies.
    script: from the text of a prompt and its number to a reply.
    held: calls wait for the test; see `next_call`.
    full: calls are refused.
    version: of the weights.
    requests: all that were submitted.
  """

  def __init__(self, tokenizer: ChatTokenizer, script: Callable[[str, int], str], *, held: bool = False):
    self.tokenizer, self.script, self.held = tokenizer, script, held
    self.full, self.alive, self.version = False, True, 3
    self.requests: list[GenerateRequest] = []
    self._waiting: list[ScriptedCall] = []
    self._news = threading.Condition()

  def submit(self, request: GenerateRequest, on_piece, on_done) -> ScriptedCall:
    """See `engine.Engine`."""
    if self.full:
      raise QueueFull('max_queue=0: so many calls wait already')
    number = len(self.requests)
    self.requests.append(request)
    call = ScriptedCall(request, self.script(self.tokenizer.decode(request.prompt), number), self, on_piece, on_done)
    if self.held:
      with self._news:
        self._waiting.append(call)
        self._news.notify_all()
    else:
      call.tell(2)
      call.end()
    return call

  def next_call(self) -> ScriptedCall:
    """The first call that was submitted while the engine is held and that the test has not got."""
    with self._news:
      assert self._news.wait_for(lambda: self._waiting, PATIENCE), 'no call came'
      return self._waiting.pop(0)

  @property
  def waiting(self) -> int:
    """Number of calls that `next_call` would give."""
    return len(self._waiting)

  def stats(self) -> EngineStats:
    """What the engine does not count is 0."""
    counted = dict.fromkeys((f.name for f in dataclasses.fields(EngineStats)), 0)
    return EngineStats(**counted | dict(alive=self.alive, slots=4, paused=self.held, version=self.version))


SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=200, stop=(), top_logprobs=0)


def server_settings(**changes) -> ServerSettings:
  """Settings in which no time limit is reached by itself."""
  given = dict(
    host='127.0.0.1', port=0, max_connections=64, max_body=1 << 20, keep_thoughts=True, open_access=True, creates=True,
    prompt='', frozen=(), engine=None,
    rollout_limits=AttemptLimits(timeout_s=600.0, heartbeat_s=0.0, max_attempts=1, retry_on=()),
    model='policy', limits=limits(context=4000, vocabulary=1000), training=SAMPLING,
    evaluation=dataclasses.replace(SAMPLING, temperature=0.5), trained='.*', bad_calls=BadCalls.CONTENT, max_calls=50,
    grace_s=PATIENCE,
  )  # fmt: skip
  return ServerSettings(**given | changes)


class Server:
  """An open server.

  Attributes:
    engine, service, lifecycle, store, url: its parts.
  """

  def __init__(self, engine, service: Service, lifecycle: Lifecycle, url: str):
    self.engine, self.service, self.lifecycle, self.store, self.url = engine, service, lifecycle, lifecycle.store, url

  def attempt(self, **rollout) -> Task:
    """Begins an attempt of a new rollout."""
    self.lifecycle.create(new_rollout(**rollout))
    return task_of(self.lifecycle.claim('test'), self.url)

  def client(self, task: Task | None = None, **options) -> OpenAI:
    """A client of an attempt, or of nobody; without retries unless `max_retries` says so."""
    base, key = (task.base_url, task.api_key) if task else (f'{self.url}/v1', 'sk-nobody')
    return OpenAI(**dict(base_url=base, api_key=key, max_retries=0, timeout=PATIENCE) | options)

  def calls(self, task: Task) -> list[StoredCall]:
    """The stored calls of an attempt."""
    return self.store.ask(Tables.calls, task.attempt_id)

  def rows(self, task: Task) -> dict[int, tuple[int, ...]]:
    """The ids of each row of an attempt, without aborted replies."""
    rows: dict[int, tuple[int, ...]] = {}
    for call in self.calls(task):
      if call.generated.finish != Finish.ABORTED:
        rows[call.row] = rows.get(call.row, ()) + call.context + call.generated.ids
    return rows


@contextlib.contextmanager
def serve(
  directory: pathlib.Path,
  engine: ScriptedEngine,
  *,
  frozen: Mapping[str, ScriptedEngine] = types.MappingProxyType({}),
  agents: Sequence[tuple[str, str]] = (),
  silence_s: float = SILENCE_S,
  **changes,
) -> Iterator[Server]:
  """A server with a store in a directory; the same directory again is the same server after a restart."""
  with Store(directory / 'agents.sqlite') as store:
    lifecycle = Lifecycle(store, time.time)
    chat_format = QwenFormat(engine.tokenizer, keep_thoughts=True)
    engines = Engines(engine, frozen, agents)
    service = Service(server_settings(**changes), engines, lifecycle, engine.tokenizer, chat_format)
    app = App(service, ADMIN, engines.stats, silence_s)
    with HttpServer(app.asgi, app.stop, '127.0.0.1', 0, 64) as http:
      yield Server(engine, service, lifecycle, http.url)


def chat(client, **changes):
  """Asks for a chat completion."""
  return client.chat.completions.create(**dict(model='policy', messages=ASK) | changes)


def said(answer, then):
  """The messages with which a conversation goes on."""
  return [{'role': 'assistant', 'content': answer.choices[0].message.content}, {'role': 'user', 'content': then}]


class Asking:
  """A request in a thread; `answer` waits for it."""

  def __init__(self, client, **changes):
    self._found = []
    self._thread = threading.Thread(target=self._ask, args=(client, changes), daemon=True)
    self._thread.start()

  def _ask(self, client, changes):
    try:
      self._found.append(chat(client, **changes))
    except openai.OpenAIError as e:
      self._found.append(e)

  def answer(self):
    self._thread.join(PATIENCE)
    return self._found[0]
