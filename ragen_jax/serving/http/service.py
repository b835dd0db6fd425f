"""HTTP: a call of the policy from its request to its stored answer.

A request of an attempt is planned by the attempt's session, sampled by the engine, stored, and only then answered. A
client that goes away may come back: its request goes on for a while, and a marked repetition joins it. If none comes,
the reply is stored as aborted and never trained.

The methods run on one event loop; disk access runs in threads.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import hashlib
import re
import secrets
import time
from collections.abc import Mapping, Sequence

import numpy as np

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.reply_reader import BadCalls, ReplyReader
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.serving import errors
from ragen_jax.serving.conversation.chat_format import QwenFormat
from ragen_jax.serving.conversation.matching import said_again
from ragen_jax.serving.engine import keys
from ragen_jax.serving.engine.engines import Engines
from ragen_jax.serving.engine.settings import EngineSettings
from ragen_jax.serving.errors import stops
from ragen_jax.serving.http import prompts
from ragen_jax.serving.http.open_sessions import OpenSession, OpenSessions
from ragen_jax.serving.http.running import Pending, PlannedReply, RunningRequests
from ragen_jax.serving.rollouts.lifecycle import Lifecycle
from ragen_jax.serving.rollouts.records import AttemptLimits, AttemptRecord, RolloutRecord
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.serving.types import Finish, Generated, SamplingParams, StoredCall
from ragen_jax.serving.wire.answers import ENDPOINTS
from ragen_jax.serving.wire.results import AnswerContext, Choice, Head
from ragen_jax.serving.wire.spec import CallSpec, Kind, RequestLimits


@dataclasses.dataclass(frozen=True)
class ServerSettings:
  """A server: fields of `config.serve`, and these.

  Attributes:
    open_access: calls outside of attempts need no key; otherwise they need the admin key.
    creates: whether rollouts may be created over HTTP.
    prompt: of rollouts whose creator gives none; '' for none.
    rollout_limits: of rollouts whose creator says nothing about them.
    frozen: agents with frozen weights, see `Engines`.
    training: sampling of attempts that are trained; `max_tokens` is the most that a request gets.
    evaluation: the same for attempts that evaluate, and the defaults of calls outside of attempts.
    max_calls: most requests of an attempt.
    grace_s: see `RunningRequests`.
  """

  host: str
  port: int
  max_connections: int
  max_body: int
  keep_thoughts: bool
  model: str
  trained: str
  bad_calls: BadCalls
  open_access: bool
  creates: bool
  prompt: str
  rollout_limits: AttemptLimits
  frozen: tuple[tuple[str, str], ...]
  engine: EngineSettings
  limits: RequestLimits
  training: SamplingParams
  evaluation: SamplingParams
  max_calls: int
  grace_s: float


@dataclasses.dataclass(frozen=True)
class Access:
  """The attempt and the rollout that a request comes from; None outside of attempts, where nothing is stored."""

  attempt: AttemptRecord | None
  rollout: RolloutRecord | None


OUTSIDE = Access(None, None)


class Service:
  """Answers requests. All methods but `__init__` and `use_sampling` run on the event loop. `counts` says what happened
  so far, by name."""

  def __init__(
    self, settings: ServerSettings, engines: Engines, lifecycle: Lifecycle, tokenizer: ChatTokenizer,
    chat_format: QwenFormat,
  ):  # fmt: skip
    self.settings, self.lifecycle, self.chat_format = settings, lifecycle, chat_format
    self.counts: collections.Counter[str] = collections.Counter()
    self._engines, self._tokenizer = engines, tokenizer
    self._sampling = {'train': settings.training, 'val': settings.evaluation}
    self._trained = re.compile(settings.trained)
    self._sessions = OpenSessions(lifecycle.store, chat_format)
    self._running = RunningRequests(settings.grace_s)
    self._stopping = False

  def stop(self) -> None:
    """Ends all requests: their clients are told to try again, perhaps at another server with the same store."""
    self._stopping = True
    self._running.stop()

  # -- requests ------------------------------------------------------------------------------------------------------

  async def begin(self, access: Access, spec: CallSpec, digest: str, *, repeated: bool) -> Pending:
    """Begins to answer a request, or joins or repeats the answer of the same one; ApiError if it cannot be answered.

    `digest` is the `request_digest`; with `repeated`, the client says that it repeats the request.
    """
    if self._stopping:
      raise stops()
    self._check_names(spec)
    if access.attempt is None:
      return self._begin_outside(spec)
    if access.rollout.limits.heartbeat_s:  # the reply, which is one too, may come after the limit
      await asyncio.to_thread(self.lifecycle.heartbeat, access.attempt.attempt_id)
    open_ = await self._sessions.open(access.attempt)
    pixels: Mapping[bytes, np.ndarray] = {}
    if spec.previous_response_id and self.settings.limits.images is not None:
      async with open_.lock:  # a call that is being stored is in the session already, but its pictures are not
        pixels = await asyncio.to_thread(self.lifecycle.store.ask, Tables.images, access.attempt.attempt_id)
      open_ = await self._sessions.open(access.attempt)  # it may have been dropped while the store was read
    if repeated:
      known = open_.unfollowed(digest) or await self._recorded(access, spec, digest)
      if known is None:  # while the store was read, the same request may have come again, or the session been dropped
        open_ = await self._sessions.open(access.attempt)
        known = open_.unfollowed(digest)
      if known is not None:
        self.counts['repeated'] += 1
        return known
    if len(open_.session.calls) + open_.count >= self.settings.max_calls:
      limit = self.settings.max_calls
      raise errors.bad_request('', f'the attempt has made {limit} calls; no more are allowed', 'call_limit')
    return self._begin_in(access, open_, spec, digest, pixels)

  def _check_names(self, spec: CallSpec) -> None:
    if spec.model != self.settings.model:
      message = f'model={spec.model!r}: must be {self.settings.model!r}'
      raise errors.not_found(message, 'model_not_found')
    if self._engines.is_frozen(spec.agent) and self._is_trained(spec.agent):
      message = f'the agent {spec.agent!r:.80} matches serve.trained and serve.frozen; it may be one of them only'
      raise errors.bad_request('model', message)

  def _is_trained(self, agent: str) -> bool:
    return self._trained.fullmatch(agent) is not None

  def _begin_outside(self, spec: CallSpec) -> Pending:
    """A request outside of attempts: sampled with the defaults of evaluations, and not stored."""
    encoded = prompts.outside(self.chat_format, spec)
    found = [prompt.ids for prompt in encoded]
    self._check_lengths(found)
    seed = secrets.randbits(63) if spec.seed is None else spec.seed
    replies = [
      PlannedReply(None, p.ids, self._repeated_text(spec, p.ids), keys.seed_key(seed, i), p.images)
      for i, p in enumerate(encoded)
    ]
    params, changed = spec.sampling_params(self.settings.evaluation, fixed=False)
    pending = Pending(spec, self._head(spec), params, changed, found)
    answer = functools.partial(self._answer_outside, pending, replies)
    self._running.start(self._engines.of(spec.agent), pending, replies, answer, lambda: None)
    self.counts['requests'] += 1
    return pending

  def _begin_in(
    self, access: Access, open_: OpenSession, spec: CallSpec, digest: str, pixels: Mapping[bytes, np.ndarray]
  ) -> Pending:
    session, rollout, attempt = open_.session, access.rollout, access.attempt
    plans = prompts.plan(self.chat_format, session, spec, digest, pixels)
    try:
      self._check_lengths([p.prompt for p in plans])
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
        replies.append(PlannedReply(plan, plan.prompt, self._repeated_text(spec, plan.prompt), key, plan.images))
      pending = Pending(spec, self._head(spec), params, changed, [p.prompt for p in plans])

      def ended() -> None:
        open_.remove(digest, pending)
        for plan in plans:
          session.release(plan)

      store = functools.partial(self._store, open_, attempt, pending, replies, digest)
      self._running.start(self._engines.of(spec.agent), pending, replies, store, ended)
    except BaseException:
      for plan in plans:
        session.release(plan)
      raise
    open_.add(digest, pending)
    self.counts['requests'] += 1
    return pending

  def _check_lengths(self, found: Sequence[tuple[int, ...]]) -> None:
    limit = self.settings.limits.context
    for prompt in found:
      if not prompt:
        raise errors.bad_request('prompt', 'the prompt has no tokens')
      if len(prompt) >= limit:
        raise errors.too_long(len(prompt), limit)

  def _repeated_text(self, spec: CallSpec, prompt: Sequence[int]) -> str:
    """The prompt as completions repeat it."""
    return self._tokenizer.decode(prompt) if spec.echo else ''

  def _head(self, spec: CallSpec) -> Head:
    model = f'{spec.model}:{spec.agent}' if spec.agent else spec.model
    return Head(f'{ENDPOINTS[spec.kind].prefix}{secrets.token_hex(12)}', int(time.time()), model)

  async def _recorded(self, access: Access, spec: CallSpec, digest: str) -> Pending | None:
    """The answer of an earlier request that was stored."""
    ask = functools.partial(asyncio.to_thread, self.lifecycle.store.ask)
    calls = await ask(Tables.calls_of_request, access.attempt.attempt_id, digest)
    if not calls or any(call.generated.finish is Finish.ABORTED for call in calls):
      return None
    found = _prompts_of(calls, await ask(Tables.calls, access.attempt.attempt_id))
    head = dataclasses.replace(self._head(spec), id=calls[0].call_id)
    pending = Pending(spec, head, calls[0].params, (), found)
    texts = [self._repeated_text(spec, p) for p in found]
    pending.end([self._choice(pending, i, c.generated, texts[i]) for i, c in enumerate(calls)])
    return pending

  # -- answers -------------------------------------------------------------------------------------------------------

  async def _answer_outside(
    self, pending: Pending, replies: Sequence[PlannedReply], found: list[Generated], aborted: bool
  ) -> list[Choice]:
    if aborted:
      raise errors.internal('the reply was aborted', retry=False)
    return [self._choice(pending, i, g, replies[i].prompt_text) for i, g in enumerate(found)]

  async def _store(
    self, open_: OpenSession, attempt: AttemptRecord, pending: Pending, replies: Sequence[PlannedReply], digest: str,
    found: list[Generated], aborted: bool,
  ) -> list[Choice]:  # fmt: skip
    """Stores the calls of a request; afterwards they can be answered."""
    choices, calls = [], []
    if aborted:
      found = [dataclasses.replace(g, finish=Finish.ABORTED) for g in found]
      self.counts['aborted'] += len(found)
    trained = self._is_trained(pending.spec.agent)
    async with open_.lock:
      if open_.broken:
        raise errors.internal('another call of the attempt could not be stored', retry=True)
      for i, (reply, generated) in enumerate(zip(replies, found, strict=True)):
        said: tuple = ()
        if not aborted:
          choices.append(self._choice(pending, i, generated, reply.prompt_text))
          if choices[-1].reply is not None:
            said = said_again(choices[-1].reply, pending.spec.template.reply_prefix)
        call_id = pending.head.id if i == 0 else f'{pending.head.id}-{i}'
        calls.append(
          open_.session.commit(
            reply.plan, generated, call_id=call_id, replies=said, params=pending.params, trained=trained
          )
        )
      try:
        pixels = {x.segment.digest: x.segment.image for reply in replies for x in reply.images}
        await asyncio.to_thread(self.lifecycle.store.add_calls, calls, [digest], time.time(), pixels)
      except BaseException:
        # The session holds calls that the store does not; the next request reads the store again.
        open_.broken = True
        self._sessions.forget(attempt.attempt_id)
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
    reader = self._reader(pending, index)
    reader.feed(generated.ids, generated.text)
    reader.finish()
    return Choice(index, pending.prompts[index], generated, reader.reply(), prompt_text)

  def context(self, pending: Pending) -> AnswerContext:
    """What the answer of a request is written with."""
    tokenizer, new_reader = self._tokenizer, functools.partial(self._reader, pending)
    return AnswerContext(
      pending.spec, pending.head, pending.params, new_reader, tokenizer.decode, tokenizer.token_bytes
    )

  def _reader(self, pending: Pending, index: int) -> ReplyReader:
    """A new reader of a reply. The ids of tool calls follow from the id of the answer."""
    stem = pending.head.id.rpartition('-')[2].rpartition('_')[2]
    return self.chat_format.reader(
      pending.prompts[index],
      parse_calls=pending.spec.parse_calls,
      tools=pending.spec.tools,
      bad_calls=self.settings.bad_calls,
      parallel=pending.spec.parallel_tool_calls,
      call_id=lambda k: f'call_{stem}_{index}_{k}',
    )

  # -- sessions ------------------------------------------------------------------------------------------------------

  def use_sampling(self, mode: str, sampling: Sampling) -> None:
    """Sets how the tokens of attempts with a mode, 'train' or 'val', are drawn from now on; from any thread."""
    drawn = dataclasses.asdict(sampling)
    self._sampling[mode] = dataclasses.replace(self._sampling[mode], **drawn)

  def forget(self, attempt_id: str) -> None:
    """Drops the session of an attempt that is over."""
    self._sessions.forget(attempt_id)

  @property
  def sessions(self) -> int:
    """Number of attempts with a session in memory."""
    return len(self._sessions)


def request_digest(path: str, body: bytes, own_key: str) -> str:
  """The key by which a repeated request is known: a digest of the client's own key, if it sends one, path and body."""
  digest = hashlib.sha256(path.encode() + b'\0' + body).hexdigest()
  return f'key:{hashlib.sha256(f"{digest} {own_key}".encode()).hexdigest()}' if own_key else digest


def _prompts_of(calls: Sequence[StoredCall], stored: Sequence[StoredCall]) -> list[tuple[int, ...]]:
  """The prompts of calls, among all calls that an attempt has stored."""
  found: dict[str, tuple[int, ...]] = {}
  rows: dict[int, tuple[int, ...]] = {}
  for call in stored:
    found[call.call_id] = rows.get(call.row, ()) + call.context
    if call.generated.finish is not Finish.ABORTED:
      rows[call.row] = found[call.call_id] + call.generated.ids
  return [found[call.call_id] for call in calls]
