"""Rollouts: the life of rollouts and attempts, which state follows which, time-outs, retries, keys, rewards.

  rollout   queued ─► running ─► succeeded | failed      attempt   running ─► succeeded
               ▲          │                                                 | failed | timeout | unresponsive
               └──────────┘ a failed attempt is retried                     | cancelled
            queued | running ─► cancelled

The states and all times are in the store; a process that starts again goes on where the last one ended.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Callable, Collection, Sequence

from ragen_jax.serving.errors import Conflict, Gone, Invalid, NotFound, Unauthorized
from ragen_jax.serving.rollouts.changes import Changes
from ragen_jax.serving.rollouts.checks import check_name, check_new, check_reward_name, check_value
from ragen_jax.serving.rollouts.records import (
  OVER,
  AttemptRecord,
  Claim,
  NewRollout,
  RolloutRecord,
  with_default_prompt,
)
from ragen_jax.serving.rollouts.store import Store
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.serving.types import AttemptState, Finish, Reward, RolloutState
from ragen_jax.utils.errors import one_line

_LONGEST_ERROR = 2000  # characters
_MOST_REWARDS = 10_000  # of one attempt
_SWEEP = 1000  # attempts that one sweep ends at most
# States that an agent or its runner may report.
_REPORTED = frozenset({AttemptState.SUCCEEDED, AttemptState.FAILED, AttemptState.TIMEOUT})


class Lifecycle:
  """Changes the states of rollouts and attempts in a store. Several threads may use it.

  All methods raise what `Store` raises, Invalid for a value that is not allowed, and NotFound for a rollout, an attempt
  or a call that does not exist. `changes` announces every rollout that was queued or is over, and every attempt that
  ended, when this is stored.
  """

  def __init__(self, store: Store, clock: Callable[[], float]):
    self.store = store
    self.changes = Changes()
    self._clock = clock

  # -- rollouts

  def create(self, new: NewRollout, default_prompt: str | None = None) -> RolloutRecord:
    """Queues a rollout. A rollout that exists is returned as it is if it was created with the same values.

    `key` and `default_prompt` are not compared: those of the first call count. `default_prompt` is added to metadata
    without a prompt, see `records.with_default_prompt`. Conflict if the id belongs to a rollout with other values, or
    to one that was trained and deleted.
    """
    check_new(new)
    rollout_id = new.rollout_id or f'r-{secrets.token_hex(8)}'
    digest = _digest_of(new)
    with self.store.write() as tables:
      if (known := tables.find_rollout(rollout_id)) is not None:
        if tables.digest_of(rollout_id) != digest:
          raise Conflict(f'rollout {rollout_id!r} exists with another input, group, mode, config or metadata')
        return known
      if (iteration := tables.iteration_of(rollout_id)) is not None:
        raise Conflict(f'rollout {rollout_id!r} was trained by iteration {iteration} and deleted')
      metadata = with_default_prompt(new.metadata, default_prompt or '')
      named = dataclasses.replace(new, rollout_id=rollout_id, group=new.group or rollout_id, metadata=metadata)
      record = self._insert(tables, named, digest)
    self.changes.notify()
    return record

  def replace(self, old: Sequence[str], new: Sequence[NewRollout]) -> None:
    """Queues rollouts in place of others, which are cancelled unless they are over, and closed: all of it or nothing.

    Those of `new` have ids and groups. Conflict if an iteration took a rollout of `old`, or there is or was a rollout
    with an id of `new`.
    """
    for one in new:
      check_new(one)
    ended: list[str] = []
    with self.store.write() as tables:
      for rollout_id in old:
        record = tables.rollout(rollout_id)
        if record.iteration is not None:
          raise Conflict(f'rollout {rollout_id!r} was taken by iteration {record.iteration} and cannot be replaced')
        if record.state not in OVER:
          ended += self._cancel(tables, record)
        if record.closed is None:
          tables.close_rollout(rollout_id, None, self._clock())
      for one in new:
        if tables.find_rollout(one.rollout_id) is not None or tables.iteration_of(one.rollout_id) is not None:
          raise Conflict(f'rollout {one.rollout_id!r} exists, or was trained')
        self._insert(tables, one, _digest_of(one))
    self.changes.notify(ended)

  def claim(self, worker: str) -> Claim | None:
    """Starts an attempt of the oldest queued rollout, first of those that evaluate; None if no rollout is queued."""
    check_name('worker', worker)
    with self.store.write() as tables:
      record = tables.oldest_queued()
      return None if record is None else self._start(tables, record, worker)

  def start(self, rollout_id: str, worker: str) -> Claim:
    """Starts an attempt of a queued rollout out of turn; Conflict if the rollout runs, Gone if it is over."""
    check_name('worker', worker)
    with self.store.write() as tables:
      record = tables.rollout(rollout_id)
      if record.state != RolloutState.QUEUED:
        error = Gone if record.state in OVER else Conflict
        raise error(f'rollout {rollout_id!r} is {record.state}; allowed: queued')
      return self._start(tables, record, worker)

  def cancel(self, rollout_id: str) -> RolloutRecord:
    """Cancels a rollout with its running attempt; does nothing if it was cancelled before. Conflict if it succeeded or
    failed."""
    with self.store.write() as tables:
      record = tables.rollout(rollout_id)
      if record.state == RolloutState.CANCELLED:
        return record
      if record.state in OVER:
        raise Conflict(f'rollout {rollout_id!r} is {record.state} and cannot be cancelled')
      ended = self._cancel(tables, record)
      record = tables.rollout(rollout_id)
    self.changes.notify(ended)
    return record

  # -- attempts

  def authenticate(self, api_key: str, for_reward: bool) -> AttemptRecord:
    """The attempt that a key belongs to; `for_reward` also accepts one that succeeded, whose rewards may come late.

    Raises:
      Unauthorized: no attempt has this key.
      Gone: the attempt is over.
    """
    with self.store.read() as tables:
      attempt = tables.attempt_with_key(_hash(api_key))
    if attempt is None:
      raise Unauthorized('the API key belongs to no attempt')
    if attempt.state == AttemptState.RUNNING or (for_reward and attempt.state == AttemptState.SUCCEEDED):
      return attempt
    raise Gone(f'attempt {attempt.attempt_id!r} is over ({attempt.state}), and so is its API key')

  def heartbeat(self, attempt_id: str) -> float:
    """Records a sign of life of an attempt; Gone if it is over.

    Returns the seconds that the attempt may still take; time for which calls are held does not count.
    """
    with self.store.write(durable=False) as tables:
      _running(tables, attempt_id)
      tables.touch(attempt_id, self._clock())
      return tables.time_left(attempt_id, self._clock())

  def pause(self) -> None:
    """Calls of the policy wait from now on, also over a restart; no attempt is late before `resume`."""
    with self.store.write() as tables:
      tables.begin_hold(self._clock())

  def resume(self) -> None:
    """Calls wait no more. The time for which they waited does not count for the limits of attempts."""
    with self.store.write() as tables:
      tables.end_hold(self._clock())

  def finish(self, attempt_id: str, state: AttemptState, error: str) -> RolloutRecord:
    """Ends an attempt as its agent or runner reports; the same report again does nothing. Returns the rollout after it.

    The state is 'succeeded', 'failed' or 'timeout'. A failed attempt is retried if the rollout's limits say so. The
    error, for people, is written in one line and cut at 2,000 characters. Gone if the attempt ended in another state.
    """
    if state not in _REPORTED:
      raise Invalid(f"state='{state}'; allowed: {', '.join(sorted(_REPORTED))}")
    with self.store.write() as tables:
      attempt = tables.attempt(attempt_id)
      if attempt.state == state:
        return tables.rollout(attempt.rollout_id)
      self._end(tables, _running(tables, attempt_id), state, error, lost=False)
      record = tables.rollout(attempt.rollout_id)
    self.changes.notify([attempt_id])
    return record

  def release(self, attempt_id: str, error: str) -> None:
    """Ends an attempt whose worker stops, which is no try, and queues its rollout again; Gone if the attempt is
    over."""
    with self.store.write() as tables:
      self._end(tables, _running(tables, attempt_id), AttemptState.UNRESPONSIVE, error, lost=True)
    self.changes.notify([attempt_id])

  def recover(self, lost_workers: Collection[str]) -> int:
    """Puts the store in order after the process that used it has ended; called once at the start.

    Attempts of the workers in `lost_workers`, which ended with that process, are released; their number is returned.
    The other workers may still be alive: their attempts get a heartbeat, so that the time without a server is not held
    against them.
    """
    with self.store.write() as tables:
      released = []
      while lost := tables.running_of(lost_workers, _SWEEP):
        for attempt in lost:
          self._end(tables, attempt, AttemptState.UNRESPONSIVE, 'the server stopped', lost=True)
        released += [attempt.attempt_id for attempt in lost]
      tables.touch_running(self._clock())
    self.changes.notify(released)
    return len(released)

  def sweep(self) -> list[AttemptRecord]:
    """Ends the attempts that exceed their limits: those that took too long, and those that gave no sign of life.

    Returns the attempts that it ended, at most 1,000, the oldest first. Call it again while it returns some.
    """
    with self.store.read() as tables:
      if tables.held_since() is not None or not tables.overdue(self._clock(), 1):
        return []
    with self.store.write() as tables:
      overdue = tables.overdue(self._clock(), _SWEEP)
      for attempt, state in overdue:
        limits = tables.rollout(attempt.rollout_id).limits
        if state == AttemptState.TIMEOUT:
          error = f'took longer than timeout_s={limits.timeout_s:g}'
        else:
          error = f'gave no sign of life for heartbeat_s={limits.heartbeat_s:g}'
        self._end(tables, attempt, state, error, lost=False)
      ended = [tables.attempt(attempt.attempt_id) for attempt, _ in overdue]
    self.changes.notify([attempt.attempt_id for attempt in ended])
    return ended

  # -- rewards

  def post_reward(
    self, attempt_id: str, value: float, call: str | int | None, agent: str, name: str, reward_id: str
  ) -> Reward:
    """Stores a reward, and returns it with the id of its call. Rewards of a call add up.

    Args:
      call, agent, name: see `client.reward`; 'last' is the last call of `agent`, if it is given.
      reward_id: an id of the caller's choice; the same reward again does nothing, so that a request may be repeated. ''
        stores a new reward.

    Raises:
      Invalid: a value is not allowed, or the agent did not make the call.
      Conflict: `reward_id` is that of another reward, the call was aborted, or the attempt has 10,000 rewards.
      Gone: the attempt neither runs nor succeeded, or its rollout is taken or closed.
    """
    value = check_value(value)
    for field, text in (('agent', agent), ('name', name), ('id', reward_id)):
      check_name(field, text)
    check_reward_name(name)
    with self.store.write() as tables:
      attempt = tables.attempt(attempt_id)
      if reward_id and (known := tables.reward(attempt_id, reward_id)) is not None:
        # Other calls may have followed since the first request for the last one.
        of = known.call_id if call == 'last' and known.call_id else _resolve(tables, attempt_id, call, agent)
        if (known.call_id, known.value, known.agent, known.name) != (of, value, agent, name):
          raise Conflict(f'attempt {attempt_id!r} has another reward with id={reward_id!r}')
        return known
      if attempt.state not in (AttemptState.RUNNING, AttemptState.SUCCEEDED):
        raise Gone(f'attempt {attempt_id!r} is over ({attempt.state}) and gets no reward')
      if tables.rollout(attempt.rollout_id).closed is not None:
        raise Gone(f'rollout {attempt.rollout_id!r} is closed and gets no reward')
      if tables.count_rewards(attempt_id) >= _MOST_REWARDS:
        raise Conflict(f'attempt {attempt_id!r} has {_MOST_REWARDS} rewards; more are not allowed')
      reward = Reward(attempt_id, _resolve(tables, attempt_id, call, agent), agent, name, value)
      tables.insert_reward(reward, reward_id or secrets.token_hex(8), self._clock())
    return reward

  # -- inside a transaction

  def _insert(self, tables: Tables, new: NewRollout, digest: str) -> RolloutRecord:
    record = RolloutRecord(
      seq=0, rollout_id=new.rollout_id, input=new.input, group=new.group, ordinal=0, mode=new.mode,
      state=RolloutState.QUEUED, limits=new.limits, metadata=new.metadata, key=new.key, attempt_id='', attempts=0,
      error='', created=self._clock(), ended=None, completed=None, iteration=None, closed=None,
    )  # fmt: skip
    return tables.insert_rollout(record, digest)

  def _cancel(self, tables: Tables, record: RolloutRecord) -> list[str]:
    """Cancels a rollout that is not over; returns its attempt if one ended."""
    now, running = self._clock(), record.state == RolloutState.RUNNING
    if running:
      tables.end_attempt(record.attempt_id, AttemptState.CANCELLED, '', False, now)
    tables.end_rollout(record.rollout_id, RolloutState.CANCELLED, '', now)
    return [record.attempt_id] if running else []

  def _start(self, tables: Tables, record: RolloutRecord, worker: str) -> Claim:
    now, number = self._clock(), record.attempts + 1
    api_key = f'rk-{secrets.token_urlsafe(32)}'
    attempt = AttemptRecord(
      attempt_id=f'{record.rollout_id}.{number}', rollout_id=record.rollout_id, number=number,
      state=AttemptState.RUNNING, worker=worker, started=now, last_heartbeat=now, ended=None,
      key_digest=_hash(api_key), error='', lost=False,
    )  # fmt: skip
    tables.insert_attempt(attempt, record.limits)
    tables.start_rollout(record.rollout_id, attempt.attempt_id)
    return Claim(tables.rollout(record.rollout_id), attempt, api_key)

  def _end(self, tables: Tables, attempt: AttemptRecord, state: AttemptState, error: str, lost: bool) -> None:
    """Ends a running attempt, and its rollout unless another attempt follows."""
    now, error = self._clock(), one_line(error, str)[:_LONGEST_ERROR]
    error = error.encode('utf-8', 'replace').decode('utf-8')
    tables.end_attempt(attempt.attempt_id, state, error, lost, now)
    limits = tables.rollout(attempt.rollout_id).limits
    if state == AttemptState.SUCCEEDED:
      tables.end_rollout(attempt.rollout_id, RolloutState.SUCCEEDED, '', now)
    elif lost or (state in limits.retry_on and tables.tries(attempt.rollout_id) < limits.max_attempts):
      tables.requeue_rollout(attempt.rollout_id, error)
    else:
      tables.end_rollout(attempt.rollout_id, RolloutState.FAILED, error, now)


def _running(tables: Tables, attempt_id: str) -> AttemptRecord:
  attempt = tables.attempt(attempt_id)
  if attempt.state != AttemptState.RUNNING:
    raise Gone(f'attempt {attempt_id!r} is over ({attempt.state})')
  return attempt


def _resolve(tables: Tables, attempt_id: str, call: str | int | None, agent: str) -> str:
  """The id of the call that a reward names; '' for None."""
  if call is None:
    return ''
  if call == 'last':
    call_id = tables.last_call_id(attempt_id, agent)
  elif isinstance(call, str):
    check_name('call', call)
    call_id = call
  elif isinstance(call, int) and not isinstance(call, bool):
    call_id = tables.call_id_at(attempt_id, call)
  else:
    raise Invalid(f"call={one_line(call)[:100]}; allowed: the id of a call, its index, 'last', null")
  if call_id is None:
    raise NotFound(f'attempt {attempt_id!r} has no call {call!r}' + (f' of agent {agent!r}' if agent else ''))
  found = tables.call(attempt_id, call_id)
  if agent and found.agent != agent:
    raise Invalid(f'agent={agent!r}; allowed for call {call_id!r}: {found.agent!r}')
  if found.generated.finish == Finish.ABORTED:
    raise Conflict(f'call {call_id!r} was aborted and gets no reward')
  return call_id


def _hash(api_key: str) -> str:
  return hashlib.sha256(api_key.encode('utf-8', 'surrogatepass')).hexdigest()


def _digest_of(new: NewRollout) -> str:
  """Digest of what two requests for the same rollout must have in common."""
  fields = dataclasses.asdict(new)
  del fields['key']
  return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
