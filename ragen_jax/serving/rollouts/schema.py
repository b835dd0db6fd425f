"""Rollouts: the SQLite file of the store, its tables, and the checks with which it is opened."""

from __future__ import annotations

import os
import pathlib
import sqlite3

from ragen_jax.serving.rollouts.codec import CALL_COLUMNS
from ragen_jax.utils.errors import UserError

VERSION = 3  # raise it with every change of the tables
_APPLICATION = 0x5241474A  # 'RAGJ', written to the file's header
_MAGIC = b'SQLite format 3\x00'
_WAIT_S = 10.0  # for a lock that another process holds, such as a program that shows the file
_LARGEST_LOG = 64 << 20  # bytes to which the write-ahead log is cut

_CALLS = ',\n  '.join(f'{name} {kind} NOT NULL' for name, kind in CALL_COLUMNS.items())
_TABLES = f"""
CREATE TABLE rollouts (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  rollout_id TEXT NOT NULL UNIQUE,
  digest TEXT NOT NULL,
  input TEXT NOT NULL,
  group_id TEXT NOT NULL,
  ordinal INTEGER NOT NULL,
  mode TEXT NOT NULL,
  state TEXT NOT NULL,
  limits TEXT NOT NULL,
  metadata TEXT NOT NULL,
  key0 INTEGER NOT NULL,
  key1 INTEGER NOT NULL,
  attempt_id TEXT NOT NULL,
  attempts INTEGER NOT NULL,
  error TEXT NOT NULL,
  created REAL NOT NULL,
  ended REAL,
  completed INTEGER UNIQUE,
  iteration INTEGER,
  closed REAL,
  UNIQUE (group_id, ordinal)
);
CREATE INDEX rollouts_by_state ON rollouts (state, seq);
CREATE INDEX rollouts_by_closed ON rollouts (closed) WHERE closed IS NOT NULL;
CREATE TABLE attempts (
  attempt_id TEXT PRIMARY KEY,
  rollout_id TEXT NOT NULL REFERENCES rollouts (rollout_id) ON DELETE CASCADE,
  number INTEGER NOT NULL,
  state TEXT NOT NULL,
  worker TEXT NOT NULL,
  started REAL NOT NULL,
  last_heartbeat REAL NOT NULL,
  ended REAL,
  timeout_s REAL NOT NULL,
  heartbeat_s REAL NOT NULL,
  key_digest TEXT NOT NULL UNIQUE,
  error TEXT NOT NULL,
  lost INTEGER NOT NULL,
  UNIQUE (rollout_id, number)
);
CREATE INDEX attempts_running ON attempts (started) WHERE state = 'running';
CREATE TABLE calls (
  {_CALLS},
  PRIMARY KEY (attempt_id, idx),
  UNIQUE (call_id),
  FOREIGN KEY (attempt_id) REFERENCES attempts (attempt_id) ON DELETE CASCADE
);
CREATE TABLE images (
  attempt_id TEXT NOT NULL REFERENCES attempts (attempt_id) ON DELETE CASCADE,
  digest BLOB NOT NULL,
  png BLOB NOT NULL,
  PRIMARY KEY (attempt_id, digest)
);
CREATE TABLE requests (
  attempt_id TEXT NOT NULL REFERENCES attempts (attempt_id) ON DELETE CASCADE,
  request_key TEXT NOT NULL,
  call_ids TEXT NOT NULL,
  PRIMARY KEY (attempt_id, request_key)
);
CREATE TABLE rewards (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  attempt_id TEXT NOT NULL REFERENCES attempts (attempt_id) ON DELETE CASCADE,
  reward_id TEXT NOT NULL,
  call_id TEXT NOT NULL,
  agent TEXT NOT NULL,
  name TEXT NOT NULL,
  value REAL NOT NULL,
  created REAL NOT NULL,
  UNIQUE (attempt_id, reward_id)
);
CREATE TABLE batches (
  iteration INTEGER NOT NULL,
  ordinal INTEGER NOT NULL,
  rollout_id TEXT NOT NULL UNIQUE,
  PRIMARY KEY (iteration, ordinal)
);
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT INTO counters VALUES ('completed', 0);
"""


def open_writer(path: pathlib.Path) -> sqlite3.Connection:
  """Opens the file for writing; makes it and its tables if it does not exist or is empty.

  A commit returns when its data are on the disk, so that they survive a loss of power too (`synchronous = FULL`).
  UserError if the file is damaged, was written by another program or version, or cannot be written.
  """
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or path.stat().st_size == 0
    if not new:
      with path.open('rb') as file:
        if file.read(len(_MAGIC)) != _MAGIC:
          raise UserError(f'store {path} is not an SQLite file; move it away or choose another --workdir')
  except OSError as e:
    raise UserError(f'store {path} cannot be used: {e.strerror or e}') from e
  connection = None
  try:
    connection = connect(path)
    if not new:
      _check(path, connection)
    connection.execute('PRAGMA journal_mode = WAL')
    connection.execute('PRAGMA synchronous = FULL')
    connection.execute(f'PRAGMA journal_size_limit = {_LARGEST_LOG}')
    if not _number(connection, 'user_version'):
      script = (
        f'BEGIN IMMEDIATE;{_TABLES}PRAGMA application_id = {_APPLICATION};PRAGMA user_version = {VERSION};COMMIT;'
      )
      connection.executescript(script)
  except sqlite3.Error as e:
    _close(connection)
    raise UserError(f'store {path} cannot be used ({e}); restore it from a copy or choose another --workdir') from e
  except UserError:
    _close(connection)
    raise
  return connection


def connect(path: str | os.PathLike[str]) -> sqlite3.Connection:
  """A connection without transactions of its own, which any thread may use under a lock."""
  connection = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
  connection.execute('PRAGMA foreign_keys = ON')
  return connection


def _check(path: pathlib.Path, connection: sqlite3.Connection) -> None:
  """Raises UserError, or sqlite3.Error, for a file that is not a sound store of this version."""
  version, application = _number(connection, 'user_version'), _number(connection, 'application_id')
  tables = connection.execute('SELECT count(*) FROM sqlite_master').fetchone()[0]
  if not (version or application or tables):
    return  # its process was killed before it made the tables
  if application != _APPLICATION:
    raise UserError(f'store {path} was written by another program; move it away or choose another --workdir')
  if version != VERSION:
    raise UserError(f'store {path} has version {version}; allowed: {VERSION}; move it away or choose another --workdir')
  found = connection.execute('PRAGMA quick_check(1)').fetchone()[0]
  if found != 'ok':
    raise UserError(f'store {path} is damaged ({" ".join(found.split())}); restore it from a copy')


def _number(connection: sqlite3.Connection, pragma: str) -> int:
  return connection.execute(f'PRAGMA {pragma}').fetchone()[0]


def _close(connection: sqlite3.Connection | None) -> None:
  if connection is not None:
    connection.close()
