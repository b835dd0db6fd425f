"""A request from its body to its stored calls: everything between HTTP and the engine.

A request of an attempt is planned by the attempt's session, sampled by the engine, stored, and only then answered. A
client that goes away may come back: its request goes on for a while, and a marked repetition joins it. If none comes,
the reply is stored as aborted and never trained.

The methods run on one event loop; disk access runs in threads.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.serving import keys
from ragen_jax.serving.answers import ID_PREFIX
from ragen_jax.serving.chat_format import QwenFormat
from ragen_jax.serving.engine import EngineStopped, QueueFull
from ragen_jax.serving.lifecycle import Lifecycle
from ragen_jax.serving.messages import Message, Role, from_canonical
from ragen_jax.serving.pending import Pending
from ragen_jax.serving.records import AttemptRecord, RequestError, RolloutRecord
from ragen_jax.serving.reply_reader import BadCalls, ReplyReader
from ragen_jax.serving.sessions import Plan, Session
from ragen_jax.serving.types import Finish, Generated, GenerateRequest, SamplingParams, StoredCall
from ragen_jax.serving.wire import errors
from ragen_jax.serving.wire.results import Choice, Head, Piece
from ragen_jax.serving.wire.spec import CallSpec, Kind, Limits

_log = logging.getLogger(__name__)

_MOST_SESSIONS = 1024  # in memory; others are rebuilt from the store when their attempt calls again


class Engine(Protocol):
  """What the service needs of `engine.Engine`."""

  def submit(
    self,
    request: GenerateRequest,
    on_piece: Callable[[Piece], None],
    on_done: Callable[[Generated | BaseException], None],
  ) -> Any:
    """Asks for a reply; the result has a method `cancel`."""


@dataclasses.dataclass(frozen=True)
class ServiceSettings:
  """How requests are answered.

  Attributes:
    model: the name of the policy in requests.
    limits: what a request may ask for.
    training: sampling of attempts that are trained; `max_tokens` is the most that a request gets.
    evaluation: the same for attempts that evaluate, and the defaults of calls outside of attempts.
    trained: the agents whose tokens are trained, as a regular expression that matches the whole name.
    bad_calls: what becomes of a tool call that cannot be read.
    max_calls: most requests of an attempt.
    grace_s: how long a request goes on after its client has gone away.
  """

  model: str
  limits: Limits
  training: SamplingParams
  evaluation: SamplingParams
  trained: str
  bad_calls: BadCalls
  max_calls: int
  grace_s: float


@dataclasses.dataclass(frozen=True)
class Access:
  """On whose behalf a request comes.

  Attributes:
    attempt: the attempt; None for a call outside of attempts, which is not stored.
    rollout: its rollout.
  """

  attempt: AttemptRecord | None
  rollout: RolloutRecord | None


OUTSIDE = Access(None, None)


@dataclasses.dataclass(frozen=True)
class _Reply:
  """A reply of a request that is being sampled."""

  plan: Plan | None
  prompt: tuple[int, ...]
  prompt_text: str
  key: tuple[int, int]


class _Open:
  """The session of an attempt that runs."""

  def __init__(self, session: Session):
    self.session = session
    self.lock = asyncio.Lock()  # of storing: calls are stored in the order of their indices
    self.running: dict[str, list[Pending]] = {}  # by request key
    self.count = 0  # requests that are being answered

  def unfollowed(self, digest: str) -> Pending | None:
    """The running request that a repetition joins: the first that nobody follows, else the last; None if none runs."""
    running = self.running.get(digest, [])
    return next((p for p in running if not p.followers), running[-1] if running else None)

  def add(self, digest: str, pending: Pending) -> None:
    """A request is being answered."""
    self.count += 1
    self.running.setdefault(digest, []).append(pending)

  def remove(self, digest: str, pending: Pending) -> None:
    """The request is answered."""
    self.count -= 1
    self.running[digest].remove(pending)
    if not self.running[digest]:
      del self.running[digest]


class Service:
  """Answers requests. All methods but `__init__` run on the event loop.

  Attributes:
    settings: see `ServiceSettings`.
    lifecycle: the rollouts.
    chat_format: writes prompts.
    counts: what happened so far, by name.
  """

  def __init__(
    self, settings: ServiceSettings, engine: Engine, lifecycle: Lifecycle, tokenizer: ChatTokenizer,
    chat_format: QwenFormat,
  ):  # fmt: skip
    """Answers nothing yet."""
    self.settings, self.lifecycle, self.chat_format = settings, lifecycle, chat_format
    self.counts: collections.Counter[str] = collections.Counter()
    self._engine, self._tokenizer = engine, tokenizer
    self._sampling = {'train': settings.training, 'val': settings.evaluation}
    self._trained = re.compile(settings.trained)
    self._open: collections.OrderedDict[str, _Open] = collections.OrderedDict()
    self._tasks: dict[asyncio.Task, Pending] = {}
    self._stopping = False

  def stop(self) -> None:
    """Ends all requests: their clients are told to try again, perhaps at another server with the same store."""
    self._stopping = True
    for task, pending in list(self._tasks.items()):
      if not pending.over:
        pending.end(_stops())
      task.cancel()

  # -- requests ------------------------------------------------------------------------------------------------------

  async def begin(self, access: Access, spec: CallSpec, digest: str, *, repeated: bool) -> Pending:
    """Begins to answer a request, or joins or repeats the answer of the same request.

    Args:
      access: on whose behalf.
      spec: the request.
      digest: digest of its body and path, or the client's own key.
      repeated: the client says that it repeats the request.

    Raises:
      ApiError: the request cannot be answered.
    """
    if self._stopping:
      raise _stops()
    self._check_model(spec)
    if access.attempt is None:
      return self._begin_outside(spec)
    open_ = await self._opened(access.attempt)
    if repeated:
      known = open_.unfollowed(digest) or await self._recorded(access, spec, digest)
      if known is None:  # while the store was read, the same request may have come again, or the session been dropped
        open_ = await self._opened(access.attempt)
        known = open_.unfollowed(digest)
      if known is not None:
        self.counts['repeated'] += 1
        return known
    if len(open_.session.calls) + open_.count >= self.settings.max_calls:
      limit = self.settings.max_calls
      raise errors.bad_request('', f'the attempt has made {limit} calls; no more are allowed', 'call_limit')
    return self._begin_in(access, open_, spec, digest)

  def _check_model(self, spec: CallSpec) -> None:
    if spec.model != self.settings.model:
      message = f'model={spec.model!r}: must be {self.settings.model!r}'
      raise errors.not_found(message, 'model_not_found')

  def _begin_outside(self, spec: CallSpec) -> Pending:
    """A request outside of attempts: sampled with the defaults of evaluations, and not stored."""
    seed = secrets.randbits(63) if spec.seed is None else spec.seed
    if spec.previous_response_id:
      raise _unknown_response(spec.previous_response_id)
    if spec.kind is Kind.COMPLETIONS:
      prompts = [self._prompt_ids(p) for p in spec.prompts]
    else:
      prompts = [self.chat_format.render(spec.messages, spec.tools, spec.template)]
    prompts = [p for p in prompts for _ in range(spec.n)]
    replies = [
      _Reply(None, p, self._tokenizer.decode(p) if spec.echo else '', keys.seed_key(seed, i))
      for i, p in enumerate(prompts)
    ]
    params, changed = spec.sampling_params(self.settings.evaluation, fixed=False)
    pending = Pending(spec, self._head(spec), params, changed, prompts)
    self._start(pending, replies, self._finish_outside)
    return pending

  def _begin_in(self, access: Access, open_: _Open, spec: CallSpec, digest: str) -> Pending:
    """A request of an attempt."""
    session, rollout, attempt = open_.session, access.rollout, access.attempt
    plans = self._plan(session, spec, digest)
    try:
      params, changed = spec.sampling_params(self._sampling[rollout.mode], fixed=True)
      seed = spec.seed
      if seed is not None and rollout.mode == 'train':  # the attempts of a group would get the same replies
        seed, changed = None, (*changed, 'seed')
      replies = []
      for plan in plans:
        if seed is None:
          key = keys.row_key(rollout.key, attempt=attempt.number, row=plan.row, aborted=plan.aborted)
        else:
          key = keys.seed_key(seed, plan.choice)
        text = self._tokenizer.decode(plan.prompt) if spec.echo else ''
        replies.append(_Reply(plan, plan.prompt, text, key))
      pending = Pending(spec, self._head(spec), params, changed, [p.prompt for p in plans])

      async def finish(pending: Pending, replies: list[_Reply], found: list[Generated], aborted: bool) -> list[Choice]:
        return await self._store(open_, attempt, pending, replies, found, digest, aborted)

      self._start(pending, replies, finish, open_, digest)
    except BaseException:
      for plan in plans:
        session.release(plan)
      raise
    return pending

  def _plan(self, session: Session, spec: CallSpec, digest: str) -> list[Plan]:
    if spec.kind is Kind.COMPLETIONS:
      prompts = [self._prompt_ids(p) for p in spec.prompts]
      return [p for ids in prompts for p in session.plan_ids(ids, agent=spec.agent, digest=digest, choices=spec.n)]
    return list(
      session.plan(
        self._conversation(session, spec), tools=spec.tools, options=spec.template, agent=spec.agent, digest=digest,
        choices=spec.n, previous=spec.previous_response_id,
      )
    )  # fmt: skip

  def _conversation(self, session: Session, spec: CallSpec) -> Sequence[Message]:
    """The messages of a request, behind those of the response that it continues.

    A system message of the request replaces the earlier one, which otherwise stays, unlike OpenAI's, so that the
    request extends its row.
    """
    previous = spec.previous_response_id
    if not previous:
      return spec.messages
    try:
      texts = session.conversation(previous)
    except KeyError:
      texts = ()
    if not texts:
      raise _unknown_response(previous)
    earlier = [from_canonical(text) for text in texts]
    if spec.messages[0].role is Role.SYSTEM and earlier[0].role is Role.SYSTEM:
      return [spec.messages[0], *earlier[1:], *spec.messages[1:]]
    return [*earlier, *spec.messages]

  def _prompt_ids(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    return self.chat_format.encode_untrusted(prompt) if isinstance(prompt, str) else prompt

  def _head(self, spec: CallSpec) -> Head:
    model = f'{spec.model}:{spec.agent}' if spec.agent else spec.model
    return Head(f'{ID_PREFIX[spec.kind]}{secrets.token_hex(12)}', int(time.time()), model)

  async def _recorded(self, access: Access, spec: CallSpec, digest: str) -> Pending | None:
    """The answer of an earlier request that was stored."""
    calls = await asyncio.to_thread(self.lifecycle.store.calls_of_request, access.attempt.attempt_id, digest)
    if not calls or any(call.generated.finish is Finish.ABORTED for call in calls):
      return None
    prompts = await asyncio.to_thread(self._stored_prompts, access.attempt.attempt_id, calls)
    head = dataclasses.replace(self._head(spec), id=calls[0].call_id)
    pending = Pending(spec, head, calls[0].params, (), prompts)
    texts = [self._tokenizer.decode(p) if spec.echo else '' for p in prompts]
    pending.end([self._choice(pending, i, c.generated, texts[i]) for i, c in enumerate(calls)])
    return pending

  def _stored_prompts(self, attempt_id: str, calls: Sequence[StoredCall]) -> list[tuple[int, ...]]:
    prompts: dict[str, tuple[int, ...]] = {}
    rows: dict[int, tuple[int, ...]] = {}
    for call in self.lifecycle.store.calls(attempt_id):
      prompts[call.call_id] = rows.get(call.row, ()) + call.context
      if call.generated.finish is not Finish.ABORTED:
        rows[call.row] = prompts[call.call_id] + call.generated.ids
    return [prompts[call.call_id] for call in calls]

  # -- sampling ------------------------------------------------------------------------------------------------------

  def _start(self, pending: Pending, replies: list[_Reply], finish: Any, open_: _Open | None = None, digest: str = ''):
    """Submits the replies to the engine, and finishes the request in a task."""
    loop, found, tickets = asyncio.get_running_loop(), [], []
    for i, reply in enumerate(replies):
      done = loop.create_future()
      found.append(done)

      def on_piece(piece: Piece, i: int = i) -> None:
        _on_loop(loop, lambda: pending.add(i, piece))

      def on_done(outcome: Generated | BaseException, done: asyncio.Future = done) -> None:
        _on_loop(loop, lambda: done.done() or done.set_result(outcome))

      try:
        self._check_length(reply.prompt)
        request = GenerateRequest(reply.prompt, reply.key, pending.params)
        tickets.append(self._engine.submit(request, on_piece, on_done))
      except (ValueError, QueueFull, EngineStopped, errors.ApiError) as e:
        for ticket in tickets:
          ticket.cancel()
        raise (errors.bad_request('', str(e)) if isinstance(e, ValueError) else api_error(e)) from e
    if open_ is not None:
      open_.add(digest, pending)
    self.counts['requests'] += 1

    async def run() -> None:
      try:
        aborted = await self._sampled(pending, found, tickets)
        outcomes = [f.result() for f in found]
        broken = next((x for x in outcomes if isinstance(x, BaseException)), None)
        if broken is not None:
          raise errors.internal(f'the engine has stopped: {broken}', retry=True) from broken
        aborted = aborted or any(x.finish is Finish.ABORTED for x in outcomes)
        pending.end(await finish(pending, replies, outcomes, aborted))
      except asyncio.CancelledError:
        for ticket in tickets:
          ticket.cancel()
        raise
      except Exception as e:  # noqa: BLE001, whoever follows the request must hear of it
        pending.end(api_error(e))
      finally:
        if open_ is not None:
          open_.remove(digest, pending)
          for reply in replies:
            open_.session.release(reply.plan)

    task = asyncio.create_task(run())
    self._tasks[task] = pending
    task.add_done_callback(self._tasks.pop)

  def _check_length(self, prompt: tuple[int, ...]) -> None:
    limit = self.settings.limits.context
    if not prompt:
      raise errors.bad_request('prompt', 'the prompt has no tokens')
    if len(prompt) >= limit:
      raise errors.too_long(len(prompt), limit)

  async def _sampled(self, pending: Pending, found: list[asyncio.Future], tickets: list[Any]) -> bool:
    """Waits for the replies, and for someone who wants them. Returns whether nobody does: they are aborted."""
    waiting = asyncio.gather(*found)
    while True:
      if waiting.done() and pending.followers:
        return False
      left = None
      if not pending.followers:
        left = pending.last_follower + self.settings.grace_s - time.monotonic()
        if left <= 0:
          for ticket in tickets:
            ticket.cancel()
          await waiting
          return True
      moved = asyncio.ensure_future(pending.moved.wait())
      try:
        await asyncio.wait(
          {moved} if waiting.done() else {moved, waiting}, timeout=left, return_when=asyncio.FIRST_COMPLETED
        )
      finally:
        moved.cancel()

  async def _finish_outside(
    self, pending: Pending, replies: list[_Reply], found: list[Generated], aborted: bool
  ) -> list[Choice]:
    if aborted:
      raise errors.internal('the reply was aborted', retry=False)
    return [self._choice(pending, i, g, replies[i].prompt_text) for i, g in enumerate(found)]

  # -- storing -------------------------------------------------------------------------------------------------------

  async def _store(
    self, open_: _Open, attempt: AttemptRecord, pending: Pending, replies: list[_Reply], found: list[Generated],
    digest: str, aborted: bool,
  ) -> list[Choice]:  # fmt: skip
    """Stores the calls of a request; afterwards they can be answered."""
    choices, calls = [], []
    if aborted:
      found = [dataclasses.replace(g, finish=Finish.ABORTED) for g in found]
      self.counts['aborted'] += len(found)
    trained = self._trained.fullmatch(pending.spec.agent) is not None
    async with open_.lock:
      for i, (reply, generated) in enumerate(zip(replies, found, strict=True)):
        said: tuple = ()
        if not aborted:
          choices.append(self._choice(pending, i, generated, reply.prompt_text))
          if choices[-1].reply is not None:
            said = choices[-1].reply.messages(pending.spec.template.reply_prefix)
        call_id = pending.head.id if i == 0 else f'{pending.head.id}-{i}'
        calls.append(
          open_.session.commit(
            reply.plan, generated, call_id=call_id, replies=said, params=pending.params, trained=trained
          )
        )
      try:
        await asyncio.to_thread(self.lifecycle.store.add_calls, calls, [digest], time.time())
      except BaseException:
        # The session holds calls that the store does not; the next request reads the store again.
        self._open.pop(attempt.attempt_id, None)
        raise
    if aborted:
      # A client that came back too late hears this, and asks again.
      raise errors.internal('the client has gone away; the reply is aborted', retry=True)
    self.counts['calls'] += len(calls)
    for call in calls:
      self.counts[f'new_row:{call.new_row_cause}' if call.new_row_cause else 'row'] += 1
    return choices

  def _choice(self, pending: Pending, index: int, generated: Generated, prompt_text: str) -> Choice:
    """A complete reply with what was read from it."""
    if pending.spec.kind is Kind.COMPLETIONS:
      return Choice(index, pending.prompts[index], generated, None, prompt_text)
    reader = self.reader(pending, index)
    reader.feed(generated.ids, generated.text)
    reader.finish()
    return Choice(index, pending.prompts[index], generated, reader.reply(), prompt_text)

  def reader(self, pending: Pending, index: int) -> ReplyReader:
    """A new reader of a reply. The ids of tool calls follow from the id of the answer."""
    stem = pending.head.id.rpartition('-')[2].rpartition('_')[2]
    return self.chat_format.reader(
      pending.prompts[index],
      parse_calls=pending.spec.parse_calls,
      bad_calls=self.settings.bad_calls,
      parallel=pending.spec.parallel_tool_calls,
      call_id=lambda k: f'call_{stem}_{index}_{k}',
    )

  # -- sessions ------------------------------------------------------------------------------------------------------

  def use_sampling(self, mode: str, sampling: Sampling) -> None:
    """Sets how the tokens of attempts with a mode, 'train' or 'val', are drawn from now on; from any thread."""
    drawn = dataclasses.asdict(sampling)
    self._sampling[mode] = dataclasses.replace(self._sampling[mode], **drawn)

  def decode(self, ids: Sequence[int]) -> str:
    """The text of ids."""
    return self._tokenizer.decode(ids)

  async def _opened(self, attempt: AttemptRecord) -> _Open:
    """The session of an attempt; after a restart of the server it is rebuilt from the store."""
    open_ = self._open.get(attempt.attempt_id)
    if open_ is None:
      calls = await asyncio.to_thread(self.lifecycle.store.calls, attempt.attempt_id)
      session = Session.from_calls(attempt.attempt_id, self.chat_format, calls)
      open_ = self._open.setdefault(attempt.attempt_id, _Open(session))
    self._open.move_to_end(attempt.attempt_id)
    idle = [key for key, known in self._open.items() if not known.count and known is not open_]
    for key in idle[: max(len(self._open) - _MOST_SESSIONS, 0)]:
      del self._open[key]
    return open_

  def forget(self, attempt_id: str) -> None:
    """Drops the session of an attempt that is over."""
    self._open.pop(attempt_id, None)

  @property
  def sessions(self) -> int:
    """Number of attempts with a session in memory."""
    return len(self._open)


def _stops() -> errors.ApiError:
  return errors.overloaded('the server stops', retry_after_s=1.0)


def _unknown_response(call_id: str) -> errors.ApiError:
  message = f'previous_response_id={call_id!r:.80}: the attempt has no such response'
  return errors.bad_request('previous_response_id', message, 'previous_response_not_found')


def request_digest(path: str, body: bytes, own_key: str) -> str:
  """The key by which a repeated request is known: the client's own, or a digest of path and body."""
  if own_key:
    return f'key:{hashlib.sha256(own_key.encode()).hexdigest()}'
  return hashlib.sha256(path.encode() + b'\0' + body).hexdigest()


def api_error(error: BaseException) -> errors.ApiError:
  """The error that a client sees."""
  match error:
    case errors.ApiError():
      return error
    case QueueFull():
      return errors.overloaded(str(error), retry_after_s=1.0)
    case RequestError():
      return request_error(error)
    case EngineStopped():
      return errors.internal(str(error), retry=True)
  _log.error('a request failed', exc_info=error)
  return errors.internal(f'{type(error).__name__}: {error}', retry=False)


def request_error(error: RequestError) -> errors.ApiError:
  """An error of the store as the wire's."""
  match error.status:
    case 401:
      return errors.unauthorized(str(error))
    case 404:
      return errors.not_found(str(error))
    case 410:
      return errors.over(str(error))
    case 409:
      return dataclasses.replace(errors.over(str(error)), status=409, type='conflict_error', code='conflict')
  return errors.bad_request('', str(error))


def _on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], Any]) -> None:
  """Calls something on the loop from another thread; does nothing if the loop has closed."""
  try:
    loop.call_soon_threadsafe(call)
  except RuntimeError:
    if not loop.is_closed():
      raise
