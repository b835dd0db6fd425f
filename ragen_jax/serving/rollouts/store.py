"""Rollouts: the store, one SQLite file with rollouts, attempts, calls, rewards and batches of training.

What a method has written is on the disk when it returns: it survives the end of the process and a loss of power. Only
heartbeats may be lost. One process uses a store at a time; its threads share it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sqlite3
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from ragen_jax.serving.errors import Conflict, Gone, Invalid
from ragen_jax.serving.rollouts.codec import Damaged, encode_pixels
from ragen_jax.serving.rollouts.records import TRAINABLE, RolloutRecord
from ragen_jax.serving.rollouts.schema import connect, open_writer
from ragen_jax.serving.rollouts.tables import LONGEST_LIST, Tables
from ragen_jax.serving.types import AttemptState, Finish, StoredCall
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.locks import file_lock

_P, _T = ParamSpec('_P'), TypeVar('_T')


class Store:
  """Opens, or creates, the store at a path. Use it as a context manager or call `close`.

  All methods raise UserError if the file is damaged or cannot be read or written, NotFound for a rollout or an attempt
  that does not exist, and other `errors.RequestError` as stated. They block on the disk: an event loop calls them in a
  thread. `<path>.lock` is the lock of the file, and SQLite keeps `<path>-wal` and `<path>-shm` beside it.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Opens the store; UserError if another process uses it, it is damaged, or another program or version wrote it."""
    self.path = pathlib.Path(path)
    self._open = contextlib.ExitStack()
    self._write_lock, self._read_lock = threading.Lock(), threading.Lock()
    with contextlib.ExitStack() as stack:
      lock = self.path.with_name(f'{self.path.name}.lock')
      stack.enter_context(file_lock(lock, f'store {path}', 'wait for it or choose another --workdir'))
      self._writer = open_writer(self.path)
      stack.callback(self._writer.close)
      self._reader = connect(self.path)
      stack.callback(self._reader.close)
      self._reader.execute('PRAGMA query_only = ON')
      self._open = stack.pop_all()

  def __enter__(self) -> Store:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Closes the file and releases its lock, after the transactions that are under way."""
    with self._write_lock, self._read_lock:
      self._open.close()

  @contextlib.contextmanager
  def write(self, durable: bool = True) -> Iterator[Tables]:
    """One transaction that may write: all of it is stored at the end of the block, or nothing if the block raises.

    If not `durable`, it does not wait for the disk, for records whose loss does no harm. A later durable transaction
    writes them too.
    """
    with self._write_lock, self._as_user_error():
      self._writer.execute(f'PRAGMA synchronous = {"FULL" if durable else "NORMAL"}')
      self._writer.execute('BEGIN IMMEDIATE')
      try:
        yield Tables(self._writer)
        self._writer.execute('COMMIT')
      finally:
        if self._writer.in_transaction:
          self._writer.execute('ROLLBACK')

  @contextlib.contextmanager
  def read(self) -> Iterator[Tables]:
    """One transaction that reads what is stored at its beginning."""
    with self._read_lock, self._as_user_error():
      self._reader.execute('BEGIN')
      try:
        yield Tables(self._reader)
      finally:
        if self._reader.in_transaction:
          self._reader.execute('ROLLBACK')

  @contextlib.contextmanager
  def _as_user_error(self) -> Iterator[None]:
    try:
      yield
    except sqlite3.IntegrityError:
      raise  # a mistake of the program: an id that is taken
    except UnicodeEncodeError as e:
      raise Invalid('a text with a lone surrogate; allowed: Unicode') from e
    except (sqlite3.Error, Damaged) as e:
      what = f'{e} is damaged' if isinstance(e, Damaged) else str(e)
      raise UserError(f'store {self.path} cannot be used: {what}; restore it from a copy or free the disk') from e

  def ask(self, read: Callable[Concatenate[Tables, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """The answer of one method of `Tables` that reads, such as `store.ask(Tables.rollout, 'r')`."""
    with self.read() as tables:
      return read(tables, *args, **kwargs)

  def unclosed(self, mode: str) -> list[RolloutRecord]:
    """All rollouts of a mode that were neither taken nor closed, in order of creation."""
    found: list[RolloutRecord] = []
    while True:
      with self.read() as tables:
        page = tables.unclosed(mode, found[-1].seq if found else 0, LONGEST_LIST)
      found += page
      if len(page) < LONGEST_LIST:
        return found

  def add_calls(
    self, calls: Sequence[StoredCall], request_keys: Sequence[str], now: float,
    pixels: Mapping[bytes, np.ndarray] = types.MappingProxyType({}),
  ) -> None:  # fmt: skip
    """Stores the calls of one attempt that answer one request, all or none; counts as a sign of life of the attempt.

    `Tables.calls_of_request` finds them by `request_keys`, such as the digest of the body, when a client repeats the
    request. A later request with the same key replaces the earlier one. `now` is in seconds since 1970, as everywhere.
    `pixels` u8[H, W, 3] are those of the images of the calls, by digest.

    Raises:
      Gone: the attempt is over. Aborted calls are stored nevertheless, since they are never trained.
      ValueError: the calls belong to different attempts, or an array has a wrong type or length.
      sqlite3.IntegrityError: the id or the index of a call is taken.
    """
    attempt_ids = {call.attempt_id for call in calls}
    if len(attempt_ids) != 1:
      raise ValueError(f'calls of attempts {sorted(attempt_ids)}; allowed: calls of one attempt')
    aborted = all(call.generated.finish == Finish.ABORTED for call in calls)
    new = {image.digest for call in calls for image in call.images}
    pictures = {digest: encode_pixels(pixels[digest]) for digest in new}  # before other writers have to wait
    with self.write() as tables:
      attempt = tables.attempt(calls[0].attempt_id)
      running = attempt.state == AttemptState.RUNNING
      if not running and not aborted:
        raise Gone(f'attempt {attempt.attempt_id!r} is over ({attempt.state})')
      tables.insert_calls(calls)
      tables.insert_images(attempt.attempt_id, pictures)
      for key in request_keys:
        tables.record_request(attempt.attempt_id, key, [call.call_id for call in calls])
      if running:
        tables.touch(attempt.attempt_id, now)

  def take_batch(self, iteration: int, rollout_ids: Sequence[str], now: float) -> None:
    """Gives rollouts, at least one, to a training iteration, all or none; they take no more rewards.

    The same call again does nothing. A trainer calls this before it trains; after a crash it asks `Tables.batch` for
    the batch of the iteration that it resumes with, and trains the same rollouts.

    Raises:
      Conflict: the iteration took other rollouts, or a rollout is named twice, has mode 'val', is not over, was
        cancelled, closed or taken by another iteration.
    """
    ids = tuple(rollout_ids)
    if not ids or len(set(ids)) < len(ids):
      raise Conflict(f'iteration {iteration} takes {len(ids)} rollouts, {len(set(ids))} of them different')
    with self.write() as tables:
      if taken := tables.batch(iteration):
        if taken != ids:
          raise Conflict(f'iteration {iteration} took {len(taken)} other rollouts before')
        return
      for rollout_id in ids:
        record = tables.rollout(rollout_id)
        if record.mode != 'train':
          raise Conflict(
            f'rollout {rollout_id!r} has mode={record.mode!r}; a training iteration takes those with train'
          )
        if record.state not in TRAINABLE:
          raise Conflict(f'rollout {rollout_id!r} is {record.state}; a training iteration takes those that are over')
        if record.closed is not None:
          by = 'closed' if record.iteration is None else f'taken by iteration {record.iteration}'
          raise Conflict(f'rollout {rollout_id!r} was {by} before')
        tables.close_rollout(rollout_id, iteration, now)
      tables.insert_batch(iteration, ids)

  def return_batch(self, iteration: int) -> None:
    """Takes the rollouts of a training iteration back: it has not trained them, and they are open again."""
    with self.write() as tables:
      tables.delete_batch(iteration)

  def close_rollouts(self, rollout_ids: Sequence[str], now: float) -> None:
    """Closes rollouts that no iteration will train: they take no more rewards and `prune` may delete them.

    Rollouts that are closed already stay as they are. Conflict if a rollout is not over, or an iteration took it.
    """
    with self.write() as tables:
      for rollout_id in rollout_ids:
        record = tables.rollout(rollout_id)
        if record.completed is None or record.iteration is not None:
          what = record.state if record.completed is None else f'taken by iteration {record.iteration}'
          raise Conflict(f'rollout {rollout_id!r} is {what} and cannot be closed')
        if record.closed is None:
          tables.close_rollout(rollout_id, None, now)

  def discard(self, rollout_ids: Sequence[str], now: float) -> None:
    """Deletes rollouts that are over, with their attempts, calls and rewards; they may be created again. Conflict as in
    `close_rollouts`."""
    self.close_rollouts(rollout_ids, now)
    with self.write() as tables:
      for rollout_id in rollout_ids:
        tables.delete_rollout(rollout_id)

  def prune(self, before_iteration: int, before: float, limit: int) -> int:
    """Deletes old rollouts with their attempts, calls and rewards; later rollouts use their space in the file.

    The ids of trained rollouts are kept, so that none is created and trained again. Returns the number of deleted
    rollouts; `limit` if there may be more.

    Args:
      before_iteration: keep what this and later iterations took; a trainer may have to train them again until a
        checkpoint contains them.
      before: keep what was taken or closed at this time or later.
      limit: most rollouts to delete, so that other writers do not wait long.
    """
    with self.write() as tables:
      return tables.delete_closed(before_iteration, before, limit)
