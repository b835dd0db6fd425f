"""Rollouts: reads and writes records inside one transaction; `store.Store` begins and ends it."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ragen_jax.serving.errors import NotFound
from ragen_jax.serving.rollouts.codec import (
  CALL_COLUMNS,
  Damaged,
  decode_call,
  decode_pixels,
  encode_call,
  encode_text,
)
from ragen_jax.serving.rollouts.records import AttemptLimits, AttemptRecord, RolloutRecord
from ragen_jax.serving.types import AttemptState, Reward, RolloutState, StoredCall

_ROLLOUT = (
  'seq, rollout_id, input, group_id, ordinal, mode, state, limits, metadata, key0, key1, attempt_id, attempts, error, '
  'created, ended, completed, iteration, closed'
)
_ATTEMPT = 'attempt_id, rollout_id, number, state, worker, started, last_heartbeat, ended, key_digest, error, lost'
_CALL = ', '.join(CALL_COLUMNS)
LONGEST_LIST = 10_000  # records that one method returns at most
_REWARD = 'attempt_id, call_id, agent, name, value'


def to_json(value: Any) -> str:
  """JSON in ASCII with the keys in their order; ValueError or TypeError for NaN, infinity and what is no JSON."""
  return json.dumps(value, allow_nan=False)


class Tables:
  """The records, inside a transaction. Every list is ordered and has a bound."""

  def __init__(self, connection: sqlite3.Connection):
    self._sql = connection.execute
    self._many = connection.executemany

  # -- rollouts

  def find_rollout(self, rollout_id: str) -> RolloutRecord | None:
    return _first(self._rollouts('rollout_id = ?', rollout_id))

  def rollout(self, rollout_id: str) -> RolloutRecord:
    """The rollout; NotFound if there is none."""
    if (found := self.find_rollout(rollout_id)) is None:
      raise NotFound(f'rollout {rollout_id!r} does not exist')
    return found

  def digest_of(self, rollout_id: str) -> str:
    """The digest with which the rollout was created."""
    return self._sql('SELECT digest FROM rollouts WHERE rollout_id = ?', (rollout_id,)).fetchone()[0]

  def completed(self, after: int, limit: int) -> list[RolloutRecord]:
    """Rollouts that are over, in the order in which they were; at most 10,000.

    `after` is a cursor: the `completed` of the last rollout that the caller has seen; 0 at the beginning.
    """
    return self._rollouts('completed > ? ORDER BY completed LIMIT ?', after, _bound(limit))

  def recent(self, before: int, limit: int) -> list[RolloutRecord]:
    """Rollouts in any state, the latest first; at most 10,000.

    `before` is a cursor: the smallest `seq` that the caller has seen; a large number at the beginning.
    """
    return self._rollouts('seq < ? ORDER BY seq DESC LIMIT ?', before, _bound(limit))

  def group(self, group: str) -> list[RolloutRecord]:
    """The rollouts of a group in order of creation; at most 10,000."""
    return self._rollouts('group_id = ? ORDER BY ordinal LIMIT ?', group, LONGEST_LIST)

  def unclosed(self, mode: str, after: int, limit: int) -> list[RolloutRecord]:
    """Rollouts of a mode that are neither taken nor closed, created after the one with `seq` = `after`, in order."""
    return self._rollouts('closed IS NULL AND mode = ? AND seq > ? ORDER BY seq LIMIT ?', mode, after, limit)

  def last_completed(self) -> int:
    """The latest cursor of `completed`: the place of the rollout that was over last; 0 if none was."""
    return self._sql("SELECT value FROM counters WHERE name = 'completed'").fetchone()[0]

  def oldest_queued(self) -> RolloutRecord | None:
    """The first in the queue. A trainer waits for all of an evaluation, so its rollouts precede those of training."""
    return _first(self._rollouts("state = ? ORDER BY mode = 'train', seq LIMIT 1", str(RolloutState.QUEUED)))

  def counts(self) -> dict[RolloutState, int]:
    """Number of rollouts in each state."""
    found = dict(self._sql('SELECT state, count(*) FROM rollouts GROUP BY state').fetchall())
    return {state: found.get(state, 0) for state in RolloutState}

  def insert_rollout(self, record: RolloutRecord, digest: str) -> RolloutRecord:
    """Adds a rollout; returns it with its place in the store (`seq`) and in its group (`ordinal`)."""
    query = 'SELECT coalesce(max(ordinal), -1) + 1 FROM rollouts WHERE group_id = ?'
    ordinal = self._sql(query, (record.group,)).fetchone()[0]
    values = (record.rollout_id, digest, to_json(record.input), record.group, ordinal, record.mode, str(record.state))
    values += (_limits_to_json(record.limits), to_json(record.metadata), *map(int, record.key), record.attempt_id)
    values += (record.attempts, record.error, record.created)
    columns = 'rollout_id, digest, input, group_id, ordinal, mode, state, limits, metadata, key0, key1, attempt_id, '
    columns += 'attempts, error, created'
    marks = ', '.join('?' * len(values))
    seq = self._sql(f'INSERT INTO rollouts ({columns}) VALUES ({marks})', values).lastrowid
    return dataclasses.replace(record, seq=seq, ordinal=ordinal)

  def start_rollout(self, rollout_id: str, attempt_id: str) -> None:
    """The rollout runs its next attempt."""
    self._sql(
      'UPDATE rollouts SET state = ?, attempt_id = ?, attempts = attempts + 1 WHERE rollout_id = ?',
      (str(RolloutState.RUNNING), attempt_id, rollout_id),
    )

  def requeue_rollout(self, rollout_id: str, error: str) -> None:
    """The rollout waits for another attempt."""
    query = 'UPDATE rollouts SET state = ?, error = ? WHERE rollout_id = ?'
    self._sql(query, (str(RolloutState.QUEUED), error, rollout_id))

  def end_rollout(self, rollout_id: str, state: RolloutState, error: str, now: float) -> None:
    """The rollout is over and gets the next place in the order of completion."""
    self._sql("UPDATE counters SET value = value + 1 WHERE name = 'completed'")
    self._sql(
      'UPDATE rollouts SET state = ?, error = ?, ended = ?, '
      "completed = (SELECT value FROM counters WHERE name = 'completed') WHERE rollout_id = ?",
      (str(state), error, now, rollout_id),
    )

  def close_rollout(self, rollout_id: str, iteration: int | None, now: float) -> None:
    """No reward is taken any more; `iteration` trains the rollout, None for no iteration."""
    query = 'UPDATE rollouts SET iteration = ?, closed = ? WHERE rollout_id = ?'
    self._sql(query, (iteration, now, rollout_id))

  def delete_closed(self, before_iteration: int, before: float, limit: int) -> int:
    """Deletes rollouts with all that belongs to them; returns their number. See `Store.prune`."""
    query = (
      'DELETE FROM rollouts WHERE seq IN (SELECT seq FROM rollouts WHERE closed IS NOT NULL AND closed < ? '
      'AND (iteration IS NULL OR iteration < ?) ORDER BY closed LIMIT ?)'
    )
    return self._sql(query, (before, before_iteration, _bound(limit))).rowcount

  def delete_rollout(self, rollout_id: str) -> None:
    """Deletes a rollout with all that belongs to it."""
    self._sql('DELETE FROM rollouts WHERE rollout_id = ?', (rollout_id,))

  def _rollouts(self, condition: str, *values: Any) -> list[RolloutRecord]:
    rows = self._sql(f'SELECT {_ROLLOUT} FROM rollouts WHERE {condition}', values).fetchall()
    return [_rollout(*row) for row in rows]

  # -- attempts

  def attempt(self, attempt_id: str) -> AttemptRecord:
    """The attempt; NotFound if there is none."""
    if (found := _first(self._attempts('attempt_id = ?', attempt_id))) is None:
      raise NotFound(f'attempt {attempt_id!r} does not exist')
    return found

  def attempts(self, rollout_id: str) -> list[AttemptRecord]:
    """The attempts of a rollout in order; empty for an unknown rollout."""
    return self._attempts('rollout_id = ? ORDER BY number', rollout_id)

  def attempt_with_key(self, key_digest: str) -> AttemptRecord | None:
    return _first(self._attempts('key_digest = ?', key_digest))

  def running(self) -> list[AttemptRecord]:
    """The attempts that run, the oldest first; at most 10,000."""
    return self._attempts("state = 'running' ORDER BY started LIMIT ?", LONGEST_LIST)

  def running_of(self, workers: Collection[str], limit: int) -> list[AttemptRecord]:
    """Attempts of some workers that run, the oldest first."""
    names = json.dumps(list(workers))
    condition = "state = 'running' AND worker IN (SELECT value FROM json_each(?)) ORDER BY started LIMIT ?"
    return self._attempts(condition, names, limit)

  def touch_running(self, now: float) -> None:
    """Records a sign of life of every attempt that runs."""
    self._sql("UPDATE attempts SET last_heartbeat = ? WHERE state = 'running'", (now,))

  def overdue(self, now: float, limit: int) -> list[tuple[AttemptRecord, AttemptState]]:
    """Attempts that run and exceed a limit, with the state in which they should end."""
    late = "state = 'running' AND ? > started + timeout_s"
    silent = "state = 'running' AND heartbeat_s > 0 AND ? > last_heartbeat + heartbeat_s AND ? <= started + timeout_s"
    order = 'ORDER BY started LIMIT ?'
    found = [(a, AttemptState.TIMEOUT) for a in self._attempts(f'{late} {order}', now, limit)]
    left = limit - len(found)
    return found + [(a, AttemptState.UNRESPONSIVE) for a in self._attempts(f'{silent} {order}', now, now, left)]

  def time_left(self, attempt_id: str, now: float) -> float:
    """Seconds until an attempt has run as long as it may; 0 if it does not run."""
    query = "SELECT started, timeout_s FROM attempts WHERE attempt_id = ? AND state = 'running'"
    if (row := self._sql(query, (attempt_id,)).fetchone()) is None:
      return 0.0
    started, timeout_s = row
    since = self.held_since()
    return max(started + timeout_s - (now if since is None else max(since, started)), 0.0)

  def tries(self, rollout_id: str) -> int:
    """Number of the rollout's attempts that count as a try."""
    query = 'SELECT count(*) FROM attempts WHERE rollout_id = ? AND NOT lost'
    return self._sql(query, (rollout_id,)).fetchone()[0]

  def insert_attempt(self, record: AttemptRecord, limits: AttemptLimits) -> None:
    values = dataclasses.asdict(record) | {
      'timeout_s': float(limits.timeout_s),
      'heartbeat_s': float(limits.heartbeat_s),
    }
    values = {name: str(x) if isinstance(x, AttemptState) else x for name, x in values.items()}
    query = f'INSERT INTO attempts ({", ".join(values)}) VALUES ({", ".join("?" * len(values))})'
    self._sql(query, tuple(values.values()))

  def end_attempt(self, attempt_id: str, state: AttemptState, error: str, lost: bool, now: float) -> None:
    query = 'UPDATE attempts SET state = ?, error = ?, lost = ?, ended = ? WHERE attempt_id = ?'
    self._sql(query, (str(state), error, lost, now, attempt_id))

  def touch(self, attempt_id: str, now: float) -> None:
    """Records a sign of life."""
    self._sql('UPDATE attempts SET last_heartbeat = ? WHERE attempt_id = ?', (now, attempt_id))

  def _attempts(self, condition: str, *values: Any) -> list[AttemptRecord]:
    rows = self._sql(f'SELECT {_ATTEMPT} FROM attempts WHERE {condition}', values).fetchall()
    return [_attempt(*row) for row in rows]

  # -- calls and rewards

  def insert_calls(self, calls: Sequence[StoredCall]) -> None:
    """Adds calls; sqlite3.IntegrityError if an id or an index is taken."""
    marks = ', '.join('?' * len(CALL_COLUMNS))
    self._many(f'INSERT INTO calls ({_CALL}) VALUES ({marks})', [encode_call(call) for call in calls])

  def calls(self, attempt_id: str) -> list[StoredCall]:
    """All calls of an attempt by index, aborted ones included; codec.Damaged if one is not what was written."""
    rows = self._sql(f'SELECT {_CALL} FROM calls WHERE attempt_id = ? ORDER BY idx', (attempt_id,))
    return [decode_call(row) for row in rows]

  def insert_images(self, attempt_id: str, pictures: Mapping[bytes, bytes]) -> None:
    """Adds PNG files by the digests of their pixels, each once."""
    rows = [(attempt_id, digest, png) for digest, png in pictures.items()]
    self._many('INSERT OR IGNORE INTO images VALUES (?, ?, ?)', rows)

  def images(self, attempt_id: str) -> dict[bytes, np.ndarray]:
    """The images u8[H, W, 3] of an attempt by digest; codec.Damaged if one is not what was written."""
    rows = self._sql('SELECT digest, png FROM images WHERE attempt_id = ?', (attempt_id,))
    return {digest: decode_pixels(digest, png) for digest, png in rows}

  def call(self, attempt_id: str, call_id: str) -> StoredCall:
    """A call of an attempt; NotFound if it has none of this id."""
    query = f'SELECT {_CALL} FROM calls WHERE call_id = ? AND attempt_id = ?'
    if (row := self._sql(query, (call_id, attempt_id)).fetchone()) is None:
      raise NotFound(f'call {call_id!r} of attempt {attempt_id!r} does not exist')
    return decode_call(row)

  def last_call_id(self, attempt_id: str, agent: str) -> str | None:
    """The id of the last call that was not aborted: of an agent, or of any agent for ''."""
    query = "SELECT call_id FROM calls WHERE attempt_id = ? AND finish <> 'aborted'"
    values: tuple[Any, ...] = (attempt_id,)
    if agent:
      query, values = f'{query} AND agent = ?', (*values, encode_text(agent))
    row = self._sql(f'{query} ORDER BY idx DESC LIMIT 1', values).fetchone()
    return row[0] if row else None

  def call_id_at(self, attempt_id: str, index: int) -> str | None:
    """The id of the call with an index."""
    if not 0 <= index < 2**31:
      return None
    row = self._sql('SELECT call_id FROM calls WHERE attempt_id = ? AND idx = ?', (attempt_id, index)).fetchone()
    return row[0] if row else None

  def record_request(self, attempt_id: str, request_key: str, call_ids: Sequence[str]) -> None:
    """A repetition of the request gets these calls; the latest request with the key counts."""
    self._sql('INSERT OR REPLACE INTO requests VALUES (?, ?, ?)', (attempt_id, request_key, json.dumps(call_ids)))

  def calls_of_request(self, attempt_id: str, request_key: str) -> list[StoredCall]:
    """The calls that answered the latest request with a key, see `Store.add_calls`; empty if there was none."""
    query = 'SELECT call_ids FROM requests WHERE attempt_id = ? AND request_key = ?'
    row = self._sql(query, (attempt_id, request_key)).fetchone()
    return [self.call(attempt_id, call_id) for call_id in json.loads(row[0])] if row else []

  def insert_reward(self, reward: Reward, reward_id: str, now: float) -> None:
    values = (reward.attempt_id, reward_id, reward.call_id, reward.agent, reward.name, reward.value, now)
    marks = ', '.join('?' * len(values))
    columns = 'attempt_id, reward_id, call_id, agent, name, value, created'
    self._sql(f'INSERT INTO rewards ({columns}) VALUES ({marks})', values)

  def reward(self, attempt_id: str, reward_id: str) -> Reward | None:
    query = f'SELECT {_REWARD} FROM rewards WHERE attempt_id = ? AND reward_id = ?'
    row = self._sql(query, (attempt_id, reward_id)).fetchone()
    return Reward(*row) if row else None

  def count_rewards(self, attempt_id: str) -> int:
    return self._sql('SELECT count(*) FROM rewards WHERE attempt_id = ?', (attempt_id,)).fetchone()[0]

  def rewards(self, attempt_id: str) -> list[Reward]:
    """All rewards of an attempt in order of arrival."""
    rows = self._sql(f'SELECT {_REWARD} FROM rewards WHERE attempt_id = ? ORDER BY seq', (attempt_id,))
    return [Reward(*row) for row in rows]

  # -- batches

  def batch(self, iteration: int) -> tuple[str, ...]:
    """Ids of the rollouts that an iteration took, in its order; empty if it took none."""
    rows = self._sql('SELECT rollout_id FROM batches WHERE iteration = ? ORDER BY ordinal', (iteration,))
    return tuple(row[0] for row in rows)

  def last_batch(self) -> int:
    """The last iteration that took rollouts; -1 if none did."""
    return self._sql('SELECT coalesce(max(iteration), -1) FROM batches').fetchone()[0]

  def iteration_of(self, rollout_id: str) -> int | None:
    """The iteration that took a rollout; also known after the rollout was deleted."""
    row = self._sql('SELECT iteration FROM batches WHERE rollout_id = ?', (rollout_id,)).fetchone()
    return row[0] if row else None

  def insert_batch(self, iteration: int, rollout_ids: Sequence[str]) -> None:
    rows = [(iteration, i, rollout_id) for i, rollout_id in enumerate(rollout_ids)]
    self._many('INSERT INTO batches VALUES (?, ?, ?)', rows)

  def delete_batch(self, iteration: int) -> None:
    """The iteration took nothing; its rollouts are open."""
    self._sql('UPDATE rollouts SET iteration = NULL, closed = NULL WHERE iteration = ?', (iteration,))
    self._sql('DELETE FROM batches WHERE iteration = ?', (iteration,))

  # -- held calls

  def held_since(self) -> float | None:
    """Since when calls are held, in seconds since 1970; None if they are not."""
    row = self._sql("SELECT value FROM counters WHERE name = 'held_since_us'").fetchone()
    return row[0] / 1e6 if row else None

  def begin_hold(self, now: float) -> None:
    """Calls are held from now on; nothing changes if they are held already."""
    self._sql("INSERT OR IGNORE INTO counters VALUES ('held_since_us', ?)", (round(now * 1e6),))

  def end_hold(self, now: float) -> None:
    """Calls are held no more: the time for which they were held does not count for the limits of attempts that run."""
    since = self.held_since()
    if since is None:
      return
    self._sql("DELETE FROM counters WHERE name = 'held_since_us'")
    query = (
      'UPDATE attempts SET timeout_s = timeout_s + max(? - max(?, started), 0), '
      "last_heartbeat = last_heartbeat + max(? - max(?, last_heartbeat), 0) WHERE state = 'running'"
    )
    self._sql(query, (now, since, now, since))


def _rollout(*row: Any) -> RolloutRecord:
  seq, rollout_id, task, group, ordinal, mode, state, limits, metadata, key0, key1, *rest = row
  try:
    given = (json.loads(task), group, ordinal, mode, RolloutState(state), _limits_from_json(limits))
    return RolloutRecord(seq, rollout_id, *given, json.loads(metadata), (key0, key1), *rest)
  except (ValueError, KeyError, TypeError, AttributeError) as e:
    raise Damaged(f'rollout {rollout_id!r}') from e


def _attempt(*row: Any) -> AttemptRecord:
  attempt_id, rollout_id, number, state, *rest, lost = row
  try:
    return AttemptRecord(attempt_id, rollout_id, number, AttemptState(state), *rest, bool(lost))
  except ValueError as e:
    raise Damaged(f'attempt {attempt_id!r}') from e


def _bound(limit: int) -> int:
  return max(1, min(limit, LONGEST_LIST))


def _first(records: list[Any]) -> Any:
  return records[0] if records else None


def _limits_to_json(limits: AttemptLimits) -> str:
  return json.dumps(dataclasses.asdict(limits))


def _limits_from_json(text: str) -> AttemptLimits:
  fields = json.loads(text)
  return AttemptLimits(**{**fields, 'retry_on': tuple(AttemptState(x) for x in fields['retry_on'])})
