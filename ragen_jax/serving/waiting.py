"""Waits until queued rollouts are over, and reads how their attempts ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from ragen_jax.serving.agent_server import ADMIN_KEY, AgentServer
from ragen_jax.serving.episodes import FinishedAttempt
from ragen_jax.serving.records import OVER, RolloutRecord
from ragen_jax.serving.store import Store
from ragen_jax.serving.types import AttemptState, RolloutState

_log = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks for attempts that are late
_REPORT_S = 60.0  # between two lines about rollouts that are not over


def wait_until_over(server: AgentServer, rollout_ids: Collection[str], *, own_runner: bool) -> dict[str, RolloutRecord]:
  """Waits until rollouts are over, and ends attempts that are late.

  Args:
    server: the server.
    rollout_ids: the rollouts.
    own_runner: whether this process plays them; otherwise workers have to claim them.

  Returns:
    The rollouts by id.
  """
  lifecycle, changes = server.lifecycle, server.lifecycle.changes
  over: dict[str, RolloutRecord] = {}
  told = time.monotonic()
  while True:
    seen = changes.count
    for rollout_id in rollout_ids:
      if rollout_id not in over:
        record = lifecycle.store.rollout(rollout_id)
        if record.state in OVER:
          over[rollout_id] = record
    if len(over) == len(rollout_ids):
      return over
    server.sweep()
    if time.monotonic() - told > _REPORT_S:
      told = time.monotonic()
      running = len(lifecycle.store.running())
      _log.info('%d of %d tasks are over, %d are being played', len(over), len(rollout_ids), running)
      if not running and not own_runner:
        _log.info('workers claim tasks at %s with the key of %s', server.url, ADMIN_KEY)
    changes.wait(seen, _LOOK_S)


def finished_attempt(store: Store, record: RolloutRecord) -> FinishedAttempt:
  """The attempt of a rollout that counts: the last one. The rollout is over."""
  state = {
    RolloutState.SUCCEEDED: AttemptState.SUCCEEDED, RolloutState.CANCELLED: AttemptState.CANCELLED,
  }.get(record.state, AttemptState.FAILED)  # fmt: skip
  if not record.attempt_id:
    return FinishedAttempt(record.rollout_id, state, record.error, (), ())
  calls, rewards = store.calls(record.attempt_id), store.rewards(record.attempt_id)
  return FinishedAttempt(record.attempt_id, state, record.error, tuple(calls), tuple(rewards))
