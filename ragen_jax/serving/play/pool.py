"""Play: a pool claims tasks from a queue and plays several at a time with a runner."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ragen_jax.serving.client import Over, ServerError, Task
from ragen_jax.serving.errors import Gone, NotFound, RequestError
from ragen_jax.serving.play.runners import Outcome, Runner, RunWatch, faulty
from ragen_jax.serving.rollouts.lifecycle import Lifecycle
from ragen_jax.serving.rollouts.records import task_of
from ragen_jax.serving.types import AttemptState, Progress
from ragen_jax.utils.errors import UserError, describe_error
from ragen_jax.utils.threads import attempt

_log = logging.getLogger(__name__)

CLAIM_S = 1.0  # how long one claim waits; `RunnerPool.stop` waits for it
# Each abandoned thread gives its place back, until there are so many of them for each place.
ABANDONED_PER_PLACE = 8
_KINDS = 1000  # kinds of failures that are counted, see `_tell`
# What a queue may raise. Everything else is a mistake of the program and ends the thread.
_QUEUE_ERRORS = (UserError, RequestError, ServerError)


class LocalQueue:
  """The queue of a store in the same process; `client.Queue` is that of another machine."""

  def __init__(self, lifecycle: Lifecycle, worker: str, server_url: str):
    self._lifecycle, self._worker, self._server_url = lifecycle, worker, server_url

  def claim(self, wait_s: float) -> Task | None:
    """The oldest queued rollout; None if there is none within `wait_s` seconds."""
    deadline, changes = time.monotonic() + wait_s, self._lifecycle.changes
    seen = changes.count
    while (claimed := self._lifecycle.claim(self._worker)) is None:
      left = deadline - time.monotonic()
      if left <= 0:
        return None
      seen = changes.wait(seen, left)
    return task_of(claimed, self._server_url)

  def heartbeat(self, task: Task) -> None:
    """Sends a sign of life; raises client.Over if the attempt is over."""
    with _over():
      self._lifecycle.heartbeat(task.attempt_id)

  def reward(self, task: Task, value: float) -> None:
    with _over():
      self._lifecycle.post_reward(task.attempt_id, value, call=None, agent='', name='', reward_id='')

  def finish(self, task: Task, state: AttemptState, error: str) -> None:
    with _over():
      self._lifecycle.finish(task.attempt_id, state, error)

  def release(self, task: Task, error: str) -> None:
    """Ends the attempt without counting it as a try."""
    with _over():
      self._lifecycle.release(task.attempt_id, error)

  def time_left(self, task: Task) -> float | None:
    """See `client.Queue.time_left`; None if the store cannot be used."""
    try:
      return self._lifecycle.heartbeat(task.attempt_id)
    except (Gone, NotFound):
      return 0.0
    except _QUEUE_ERRORS:
      return None


@contextlib.contextmanager
def _over() -> Iterator[None]:
  try:
    yield
  except (Gone, NotFound) as e:
    raise Over(e.status, str(e)) from e


class RunnerPool:
  """Plays tasks of a queue until it is stopped. Use it as a context manager, or call `stop`.

  Abandoned threads take no place among the running attempts; while `ABANDONED_PER_PLACE` of them are left for each
  attempt that may run, no claim begins.
  """

  def __init__(
    self, queue: LocalQueue, runner: Runner, max_concurrency: int, heartbeat_s: float, stop_s: float,
    claim_s: float = CLAIM_S, pause_s: float = 1.0,
  ):  # fmt: skip
    """Starts the pool; at least one attempt may run at a time.

    Args:
      heartbeat_s: time between two signs of life of an attempt; an attempt that the server has ended is cancelled then.
      stop_s: how long `__exit__` waits for the attempts that it cancels.
      claim_s: how long one claim waits.
      pause_s: between a claim that failed and the next.
    """
    if max_concurrency < 1:
      raise UserError(f'max_concurrency={max_concurrency}; allowed: integers from 1')
    self._queue, self._runner = queue, runner
    self._max, self._heartbeat_s, self._stop_s = max_concurrency, heartbeat_s, stop_s
    self._claim_s, self._pause_s = claim_s, pause_s
    self._changed = threading.Condition()
    self._stopping = threading.Event()
    self._running: dict[str, tuple[Task, RunWatch]] = {}
    self._abandoned: list[threading.Thread] = []
    self._counts = dict.fromkeys(AttemptState, 0)
    self._error = self._fault = ''
    self._ends: collections.Counter[tuple[AttemptState, str]] = collections.Counter()
    self._threads = [
      threading.Thread(target=self._work, args=(work, name), daemon=True, name=f'ragen_jax-pool-{name}')
      for work, name in ((self._claim, 'claim'), (self._beat, 'heartbeat'))
    ]
    for thread in self._threads:
      thread.start()

  def __enter__(self) -> RunnerPool:
    return self

  def __exit__(self, *_: object) -> None:
    self.stop(self._stop_s)

  def progress(self) -> Progress:
    with self._changed:
      self._forget_ended()
      counts = self._counts
      return Progress(
        running=len(self._running), succeeded=counts[AttemptState.SUCCEEDED], failed=counts[AttemptState.FAILED],
        timed_out=counts[AttemptState.TIMEOUT], cancelled=counts[AttemptState.CANCELLED],
        abandoned=len(self._abandoned), error=self._error,
        oldest=self._abandoned[0].name if self._abandoned else '', full=not self._running and self._crowded(),
        fault=self._fault,
      )  # fmt: skip

  def cancel(self, attempt_id: str) -> None:
    """Stops an attempt that the server has ended; does nothing if it does not run here."""
    with self._changed:
      found = self._running.get(attempt_id)
    if found:
      found[1].cancel()

  def stop(self, timeout_s: float) -> bool:
    """Claims no more tasks, cancels and releases those that run, and waits for their ends.

    Returns whether all ended within `timeout_s` seconds, and no claim is left that may still bring a task.
    """
    deadline = time.monotonic() + timeout_s
    self._stopping.set()
    with self._changed:
      self._changed.notify_all()
    for thread in self._threads:
      thread.join(max(deadline - time.monotonic(), 0.0))
    with self._changed:
      for _, watch in self._running.values():
        watch.cancel()
      ended = self._changed.wait_for(lambda: not self._running, max(deadline - time.monotonic(), 0.0))
    return ended and not any(thread.is_alive() for thread in self._threads)

  # -- threads

  def _work(self, work: Callable[[], None], name: str) -> None:
    """Runs a loop of the pool. An error that it does not expect is a mistake of the program, and ends the pool."""
    try:
      work()
    except BaseException as e:
      with self._changed:
        self._fault = f'the {name} thread has ended: {describe_error(e)}'
      raise

  def _claim(self) -> None:
    """Claims tasks while places are free, and starts a thread for each."""
    while not self._stopping.is_set():
      with self._changed:
        self._forget_ended()
        if len(self._running) >= self._max or self._crowded():
          self._changed.wait(self._pause_s)
          continue
      try:
        task = self._queue.claim(self._claim_s)
        self._set_error('')
      except _QUEUE_ERRORS as e:
        self._set_error(f'no task can be claimed: {describe_error(e)}')
        self._stopping.wait(self._pause_s)
        continue
      if task is not None:
        watch = RunWatch(task.timeout_s, functools.partial(self._queue.time_left, task))
        with self._changed:
          self._running[task.attempt_id] = (task, watch)
          if self._stopping.is_set():
            watch.cancel()
        name = f'ragen_jax-play-{task.attempt_id}'
        thread = threading.Thread(target=self._play, args=(task, watch), daemon=True, name=name)
        try:
          thread.start()
        except RuntimeError as e:  # the system has no more threads
          self._end(task, Outcome.failed(describe_error(e)))
          self._stopping.wait(self._pause_s)

  def _beat(self) -> None:
    while not self._stopping.wait(self._heartbeat_s):
      with self._changed:
        running = list(self._running.values())
      for task, watch in running:
        try:
          self._queue.heartbeat(task)
        except Over:
          watch.cancel()
        except _QUEUE_ERRORS as e:
          self._set_error(f'no heartbeat of {task.attempt_id}: {describe_error(e)}')

  def _play(self, task: Task, watch: RunWatch) -> None:
    outcome, fault = attempt(lambda: self._runner.run(task, watch), 'runner')
    if fault:
      outcome = faulty(fault, task)
    self._end(task, dataclasses.replace(outcome, error=outcome.error.replace(task.api_key, '***')))

  def _end(self, task: Task, outcome: Outcome) -> None:
    """Reports how an attempt ended, and frees its place."""
    if outcome.state != AttemptState.SUCCEEDED:
      self._tell(task, outcome)
    try:
      self._report(task, outcome)
    except Over:
      pass  # the agent has ended the attempt itself, or the server did
    except _QUEUE_ERRORS as e:
      self._set_error(f'the end of {task.attempt_id} cannot be reported: {describe_error(e)}')
    finally:
      with self._changed:
        del self._running[task.attempt_id]
        self._counts[outcome.state] += 1
        if outcome.abandoned:
          self._abandoned.append(outcome.abandoned)
        self._changed.notify_all()

  def _tell(self, task: Task, outcome: Outcome) -> None:
    """Logs how an attempt failed; of those that failed in the same way the first, tenth, hundredth, and so on."""
    with self._changed:
      if len(self._ends) >= _KINDS:
        self._ends.clear()
      self._ends[outcome.state, outcome.error] += 1
      count = self._ends[outcome.state, outcome.error]
    if count == 10 ** (len(str(count)) - 1):
      so_far = f' (so did {count - 1} before it)' if count > 1 else ''
      _log.warning('attempt %s %s%s: %s', task.attempt_id, outcome.state, so_far, outcome.error)

  def _report(self, task: Task, outcome: Outcome) -> None:
    if outcome.state == AttemptState.CANCELLED:
      self._queue.release(task, 'the worker stopped')
      return
    if outcome.reward is not None:
      self._queue.reward(task, outcome.reward)
    self._queue.finish(task, outcome.state, outcome.error)

  def _crowded(self) -> bool:
    """Whether so many abandoned threads are left that no claim begins."""
    return len(self._abandoned) >= ABANDONED_PER_PLACE * self._max

  def _forget_ended(self) -> None:
    self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]

  def _set_error(self, error: str) -> None:
    with self._changed:
      new, self._error = error != self._error, error
    if error and new:
      _log.error('%s', error)


class RunnerStall:
  """Watches a runner while the trainer waits for tasks.

  The runner has stalled if its threads have ended, or if abandoned threads hold all its places for a whole time limit
  of an attempt while no outside worker plays.
  """

  def __init__(
    self, progress: Callable[[], Progress] | None, running: Callable[[], Sequence[Any]], runner: str, timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
  ):  # fmt: skip
    """Begins to watch. `progress` is None if outside workers play; `running` gives the attempts of these, too; `runner`
    is the runner's field and value, for errors."""
    self._progress, self._running, self._runner = progress, running, runner
    self._timeout_s, self._clock = timeout_s, clock
    self._since: float | None = None  # when the places were first seen to be held

  def check(self) -> None:
    """Looks at the runner; called at intervals. UserError if it has stalled."""
    if self._progress is None:
      return
    now = self._progress()
    if now.fault:
      raise UserError(f'{self._runner}: no task is played any more, {now.fault}')
    if not now.full or self._running():
      self._since = None
      return
    if self._since is None:
      self._since = self._clock()
    if self._clock() - self._since >= self._timeout_s:
      raise UserError(
        f'{self._runner}: no task is played any more, threads of {now.abandoned} stopped attempts have not ended '
        f'within another serve.timeout={self._timeout_s:g} s (the oldest: {now.oldest}); Python cannot stop a '
        'function: make it async, limit the time of its requests, or make it a command'
      )
