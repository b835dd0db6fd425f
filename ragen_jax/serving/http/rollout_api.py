"""HTTP: the JSON of the rollout API: create, claim, list, cancel; reward, finish and keep alive attempts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from starlette.requests import Request

from ragen_jax.serving.errors import Conflict, Invalid
from ragen_jax.serving.http.service import ServerSettings
from ragen_jax.serving.rollouts.lifecycle import Lifecycle
from ragen_jax.serving.rollouts.records import AttemptLimits, NewRollout, RolloutRecord, task_of
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.serving.types import AttemptState, Reward

_LONGEST_WAIT_S = 60.0
_LOOK_S = 1.0  # between two looks whether a worker that waits is still there
_MOST_LISTED = 500


class RolloutApi:
  """Handlers of routes: a body in, JSON out."""

  def __init__(self, lifecycle: Lifecycle, ended: Callable[[str], None], settings: ServerSettings):
    """Takes the rollouts; `ended` is called with the id of an attempt that is over."""
    self._lifecycle, self._ended, self._settings, self._stopping = lifecycle, ended, settings, False

  def stop(self) -> None:
    """Workers that wait for a rollout get none."""
    self._stopping = True
    self._lifecycle.changes.notify()

  async def create(self, http: Request, body: dict[str, Any]) -> dict[str, Any]:
    """POST /rollouts: queues a rollout; `limits` may leave fields out."""
    del http
    if not self._settings.creates:
      raise Conflict('the trainer creates the rollouts of a run; others are created with --mode=serve')
    _known(body, {'rollout_id', 'input', 'group', 'mode', 'limits', 'metadata'})
    limits = body.get('limits') or {}
    if not isinstance(limits, dict):
      raise Invalid('limits: must be an object')
    default = dataclasses.asdict(self._settings.rollout_limits)
    _known(limits, set(default))
    limits = default | limits
    if not isinstance(limits['retry_on'], list | tuple):
      raise Invalid('limits.retry_on: must be a list')
    limits['retry_on'] = tuple(limits['retry_on'])
    words = int.from_bytes(os.urandom(4)), int.from_bytes(os.urandom(4))
    new = NewRollout(
      rollout_id=_or(body.get('rollout_id'), ''), input=body.get('input'), group=_or(body.get('group'), ''),
      mode=_or(body.get('mode'), 'train'), limits=AttemptLimits(**limits), metadata=body.get('metadata'),
      key=words,
    )  # fmt: skip
    return described(await asyncio.to_thread(self._lifecycle.create, new, self._settings.prompt))

  async def claim(self, http: Request, body: dict[str, Any]) -> dict[str, Any] | None:
    """POST /rollouts/claim: the oldest queued rollout, as soon as there is one within `wait_s` seconds."""
    _known(body, {'worker', 'wait_s'})
    worker, wait_s = body.get('worker', ''), body.get('wait_s', 0.0)
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s < math.inf:
      raise Invalid(f'wait_s={wait_s!r:.40}; allowed: seconds from 0')
    deadline = time.monotonic() + min(wait_s, _LONGEST_WAIT_S)
    with self._news() as news:
      while True:
        news.clear()
        claimed = await asyncio.to_thread(self._lifecycle.claim, worker)
        if claimed is not None:
          task = task_of(claimed, str(http.base_url).rstrip('/'))
          return task.to_json() | {'api_key': task.api_key, 'base_url': task.base_url}
        left = deadline - time.monotonic()
        if left <= 0 or self._stopping or await http.is_disconnected():
          return None
        with contextlib.suppress(TimeoutError):
          await asyncio.wait_for(news.wait(), min(left, _LOOK_S))

  @contextlib.contextmanager
  def _news(self) -> Iterator[asyncio.Event]:
    """An event of this loop that every change of the rollouts sets. Waiting for it takes no thread."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: tuple[str, ...]) -> None:
      with contextlib.suppress(RuntimeError):  # the loop has closed
        loop.call_soon_threadsafe(news.set)

    unsubscribe = self._lifecycle.changes.subscribe(tell)
    try:
      yield news
    finally:
      unsubscribe()

  async def list(self, http: Request, body: dict[str, Any]) -> dict[str, Any]:
    """GET /rollouts: those that are over, in their order, after a cursor, or the latest before a cursor."""
    del body
    query = http.query_params
    limit = min(_whole(query.get('limit', '100'), 'limit'), _MOST_LISTED)
    ask = functools.partial(asyncio.to_thread, self._lifecycle.store.ask)
    if 'after' in query:
      after = _whole(query['after'], 'after')
      found = await ask(Tables.completed, after, limit)
      cursor = {'after': found[-1].completed if found else after}
    else:
      before = _whole(query.get('before', str(2**62)), 'before')
      found = await ask(Tables.recent, before, limit)
      cursor = {'before': found[-1].seq if found else 0}
    counts = await ask(Tables.counts)
    return {'rollouts': [described(r) for r in found], 'counts': {str(k): v for k, v in counts.items()}} | cursor

  async def get(self, http: Request, body: dict[str, Any]) -> dict[str, Any]:
    """GET /rollouts/<id>: a rollout with its attempts, their calls and rewards."""
    del body

    def read(tables: Tables) -> dict[str, Any]:
      record = tables.rollout(http.path_params['rollout'])
      attempts = []
      for a in tables.attempts(record.rollout_id):
        calls = [
          {
            'call_id': c.call_id, 'agent': c.agent, 'row': c.row, 'trained': c.trained, 'text': c.generated.text,
            'prompt_tokens_new': len(c.context), 'tokens': len(c.generated.ids), 'finish': str(c.generated.finish),
            'new_row_cause': c.new_row_cause,
          }
          for c in tables.calls(a.attempt_id)
        ]  # fmt: skip
        rewards = [_reward(r) for r in tables.rewards(a.attempt_id)]
        attempts.append(
          {
            'attempt_id': a.attempt_id, 'state': str(a.state), 'worker': a.worker, 'started': a.started,
            'ended': a.ended, 'error': a.error, 'calls': calls, 'rewards': rewards,
          }
        )  # fmt: skip
      return described(record) | {'attempts': attempts}

    return await asyncio.to_thread(self._lifecycle.store.ask, read)

  async def cancel(self, http: Request, body: dict[str, Any]) -> dict[str, Any]:
    """POST /rollouts/<id>/cancel."""
    _known(body, set())
    record = await asyncio.to_thread(self._lifecycle.cancel, http.path_params['rollout'])
    self._ended(record.attempt_id)
    return described(record)

  async def reward(self, attempt_id: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST /attempts/<id>/rewards."""
    _known(body, {'value', 'call', 'agent', 'name', 'id'})
    if 'value' not in body:
      raise Invalid('value is missing: must be a finite number')
    stored = await asyncio.to_thread(
      self._lifecycle.post_reward, attempt_id, body['value'], body.get('call'), _or(body.get('agent'), ''),
      _or(body.get('name'), ''), _or(body.get('id'), ''),
    )  # fmt: skip
    return _reward(stored)

  async def finish(self, attempt_id: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST /attempts/<id>/finish."""
    _known(body, {'state', 'error'})
    state, error = body.get('state', 'succeeded'), body.get('error') or ''
    if state not in list(AttemptState):
      raise Invalid(f"state={state!r:.40}; allowed: 'succeeded', 'failed', 'timeout'")
    record = await asyncio.to_thread(self._lifecycle.finish, attempt_id, AttemptState(state), str(error))
    self._ended(attempt_id)
    return described(record)

  async def heartbeat(self, attempt_id: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST /attempts/<id>/heartbeat."""
    _known(body, set())
    return {'left_s': await asyncio.to_thread(self._lifecycle.heartbeat, attempt_id)}


def described(record: RolloutRecord) -> dict[str, Any]:
  """A rollout as JSON, without its keys."""
  return {
    'rollout_id': record.rollout_id, 'group': record.group, 'mode': record.mode, 'state': str(record.state),
    'input': record.input, 'metadata': record.metadata, 'attempts': record.attempts, 'attempt_id': record.attempt_id,
    'error': record.error, 'created': record.created, 'ended': record.ended,
    'closed': record.closed,
  }  # fmt: skip


def _reward(reward: Reward) -> dict[str, Any]:
  return {'value': reward.value, 'call_id': reward.call_id, 'agent': reward.agent, 'name': reward.name}


def _known(body: dict[str, Any], allowed: set[str]) -> None:
  unknown = sorted(set(body) - allowed)
  if unknown:
    raise Invalid(f'{unknown[0]!r:.60}: there is no such field; allowed: {", ".join(sorted(allowed)) or "none"}')


def _or(value: Any, default: Any) -> Any:
  return default if value is None else value


def _whole(text: str, name: str) -> int:
  if not text.isdecimal() or len(text) > 19 or (number := int(text)) >= 2**63:
    raise Invalid(f'{name}={text!r:.40}; allowed: whole numbers from 0 to 2**63 - 1')
  return number
