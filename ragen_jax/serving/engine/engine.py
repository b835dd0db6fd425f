"""Engine: replies for calls that come and go, sampled together on the rows of the device.

One thread owns the device. It samples a chunk of tokens for all rows, and between two chunks it takes what was sampled,
ends replies, admits calls that wait and feeds their prompts:

    cancelled calls leave -> calls get slots, prompts are fed -> a chunk is sampled -> replies grow or end -> ...

The draw of a token depends on the call's key and on the token's column in its row, as in a rollout. A reply therefore
depends neither on the calls beside it, nor on its slot, nor on which part of its prompt was fed before, except for the
rounding of programs of different shapes. Log-probabilities are those of the distribution that a token was drawn from,
as in `draw.draw_tokens`: divided by the temperature, after top-k and top-p; at temperature 0 those of the model.
"""

from __future__ import annotations

import collections
import concurrent.futures
import enum
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.sampling.sampler import Sampler
from ragen_jax.serving.engine.calls import Call, check_request
from ragen_jax.serving.engine.eyes import Eyes
from ragen_jax.serving.engine.scheduler import Scheduler
from ragen_jax.serving.engine.settings import EngineSettings, EngineStats
from ragen_jax.serving.errors import EngineStopped, QueueFull
from ragen_jax.serving.types import Finish, Generated, GenerateRequest, Piece
from ragen_jax.utils.errors import describe_error

_log = logging.getLogger(__name__)


class _Mode(enum.Enum):
  """What the thread may do."""

  RUN = enum.auto()
  DRAIN = enum.auto()  # replies go on, and no call gets a slot
  HOLD = enum.auto()


class Ticket:
  """A call that was submitted, see `Engine.submit`."""

  def __init__(self, call: Call, wake: Callable[[], None]):
    self._call = call
    self._wake = wake

  def cancel(self) -> None:
    """Ends the reply at the next chunk: `on_done` gets what was sampled, as aborted. Later calls change nothing."""
    self._call.cancelled = True
    self._wake()


class Engine:
  """Continuous batching over the slots of a sampler. Use it as a context manager, or `close` it.

  All methods may be called from any thread. Those that wait for the engine's thread must not be called by listeners,
  which run on it; they raise EngineStopped if there is no engine any more.
  """

  def __init__(
    self, sampler: Sampler, tokenizer: ChatTokenizer, settings: EngineSettings, *, params: Any, version: int,
    eyes: Eyes | None = None,
  ):  # fmt: skip
    """Makes the cache and starts the thread.

    Args:
      params: weights of the `ActorCritic`, as they are trained. The engine may hold these very arrays until other
        weights are set: before an update that donates them, `pause`, and `set_weights` before `resume`.
      version: of the weights, recorded for each token.
      eyes: the vision tower; None for a model of text.

    Raises:
      UserError: the rows do not fit into the memory or the mesh, or there are several processes.
    """
    self.settings = settings
    self._sampler = sampler
    self._decode_text = tokenizer.decode
    self._vision = eyes and eyes.vision
    self._scheduler = Scheduler(sampler, settings, params, version, eyes)
    self._cancelled_in_queue = 0
    self._busy_seconds = 0.0
    # What other threads see, under the lock of `_changed`.
    self._changed = threading.Condition()
    self._queue: collections.deque[Call] = collections.deque()
    self._jobs: collections.deque[tuple[Callable[[], None], concurrent.futures.Future]] = collections.deque()
    self._mode = _Mode.RUN
    self._is_held = False
    self._woken = False
    self._closing = False
    self._over = False
    self._error: BaseException | None = None
    self._thread = threading.Thread(target=self._run, daemon=True, name='ragen_jax-engine')
    self._thread.start()

  def __enter__(self) -> Engine:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  # -- calls from other threads ---------------------------------------------------------------------------------------

  def submit(
    self,
    request: GenerateRequest,
    on_piece: Callable[[Piece], None],
    on_done: Callable[[Generated | BaseException], None],
  ) -> Ticket:
    """Asks for a reply. `on_piece` gets its parts, then `on_done` all of it, or the exception that stopped the engine.

    The listeners are called by the engine's thread, perhaps before this method returns, and must return quickly: all
    replies wait for them. A listener that raises ends its reply as aborted.

    Raises:
      ValueError: a number is out of its range, the prompt is too long, or it has images that nobody sees.
      QueueFull: `max_queue` calls wait already.
      EngineStopped: there is no engine any more.
    """
    context = self.settings.max_context
    check_request(request, max_context=context, vocab_limit=self._sampler.vocab_limit)
    if request.images and self._vision is None:
      raise ValueError('images: the agent plays with weights that read no images')
    budget = min(request.params.max_tokens, context - len(request.prompt))
    call = Call(request, budget, self._decode_text, on_piece, on_done, self._vision)
    with self._changed:
      self._check_alive()
      if len(self._queue) + len(self._scheduler.calls) >= self.settings.max_queue + self.settings.slots:
        raise QueueFull(f'max_queue={self.settings.max_queue}: so many calls wait already')
      self._queue.append(call)
      self._changed.notify_all()
    return Ticket(call, self._wake)

  def pause(self, *, drain: bool) -> None:
    """Holds calls, and returns when the device is idle. Calls may still be submitted, and wait.

    With `drain`, replies that have begun end first; otherwise they wait, too.
    """
    self._check_caller('pause')
    with self._changed:
      self._check_alive()
      self._mode, self._is_held = (_Mode.DRAIN if drain else _Mode.HOLD), False
      self._changed.notify_all()
      self._changed.wait_for(lambda: self._is_held or self._over or self._mode is _Mode.RUN)
      self._check_alive()

  def resume(self) -> None:
    with self._changed:
      self._mode, self._is_held = _Mode.RUN, False
      self._changed.notify_all()

  def set_weights(self, params: Any, *, version: int, keep_cache: bool) -> None:
    """Replaces the weights between two chunks, also while the engine is paused; returns when they are in place.

    With `keep_cache`, the keys and values that the old weights made are kept, for replies that have begun and for
    reuse. Otherwise replies that have begun go on after all of their tokens are fed again, so that the
    log-probabilities of later tokens are those of the new weights; nothing of the old weights is reused. ValueError if
    the new weights differ in structure, shape or type.
    """
    self._scheduler.rows.check_weights(params)
    swap = functools.partial(self._scheduler.set_weights, params, version, keep_cache=keep_cache)
    self._on_thread('set_weights', swap)

  def compile(self) -> None:
    """Compiles every program that serving needs, between two chunks."""
    self._on_thread('compile', self._scheduler.rows.compile)

  def stats(self) -> EngineStats:
    """What the engine holds and has done until now."""
    with self._changed:
      scheduler, counts = self._scheduler, self._scheduler.counts
      return EngineStats(
        alive=not (self._over or self._closing),
        slots=self.settings.slots,
        used=len(scheduler.calls),
        queued=len(self._queue),
        paused=self._mode is not _Mode.RUN,
        version=scheduler.version,
        prompt_tokens=counts['prompt_tokens'],
        cached_tokens=counts['cached_tokens'],
        fed_tokens=counts['fed_tokens'],
        fed_columns=scheduler.rows.fed_columns,
        sampled_tokens=counts['sampled_tokens'],
        row_steps=scheduler.rows.row_steps,
        copies=counts['copies'],
        chunks=counts['chunks'],
        finished=counts['finished'],
        aborted=counts['aborted'] + self._cancelled_in_queue,
        busy_seconds=self._busy_seconds,
      )

  def close(self) -> None:
    """Stops the thread after the present chunk. Calls that are open end as aborted; may be called again."""
    self._check_caller('close')
    with self._changed:
      self._closing = True
      self._changed.notify_all()
    self._thread.join()

  def _wake(self) -> None:
    with self._changed:
      self._woken = True
      self._changed.notify_all()

  def _check_alive(self) -> None:
    if self._error is not None:
      raise EngineStopped(f'the engine has stopped: {describe_error(self._error)}') from self._error
    if self._over or self._closing:
      raise EngineStopped('the engine is closed')

  def _check_caller(self, method: str) -> None:
    if threading.current_thread() is self._thread:
      raise RuntimeError(f'{method}: called by a listener, which the engine waits for')

  def _on_thread(self, method: str, job: Callable[[], None]) -> None:
    """Has the engine's thread do something between two chunks. An exception stops the engine and is raised here."""
    self._check_caller(method)
    done: concurrent.futures.Future = concurrent.futures.Future()
    with self._changed:
      self._check_alive()
      self._jobs.append((job, done))
      self._changed.notify_all()
    done.result()

  # -- the thread -----------------------------------------------------------------------------------------------------

  def _run(self) -> None:
    error = None
    try:
      while self._wait():
        self._work()
    except BaseException as e:  # noqa: BLE001, whoever waits must hear of it
      _log.exception('the engine has stopped')
      error = e
    with self._changed:
      self._over, self._error = True, error
      calls = dict.fromkeys([*self._scheduler.calls.values(), *self._queue])  # one may be in both
      jobs = list(self._jobs)
      self._scheduler.calls.clear()
      self._queue.clear()
      self._jobs.clear()
      self._changed.notify_all()
    for _, done in jobs:
      done.set_exception(error or EngineStopped('the engine is closed'))
    for call in calls:
      call.end(error or Finish.ABORTED)

  def _wait(self) -> bool:
    """Waits until there is something to do, and does the jobs. Returns False when the engine is closed."""
    while True:
      with self._changed:
        held = self._mode is _Mode.HOLD or (self._mode is _Mode.DRAIN and not self._scheduler.calls)
        if held and not self._is_held:
          self._is_held = True
          self._changed.notify_all()
        if self._closing:
          return False
        if not self._jobs:
          if self._woken or (self._scheduler.calls and not held) or (self._queue and self._mode is _Mode.RUN):
            self._woken = False
            return True
          self._changed.wait()
          continue
      self._do_job()

  def _do_job(self) -> None:
    """Does the first job. If it raises, `_run` tells who waits for it."""
    job, done = self._jobs[0]
    job()
    with self._changed:
      self._jobs.popleft()
    done.set_result(None)

  def _work(self) -> None:
    """Lets cancelled calls go and, unless calls are held, samples a chunk."""
    with self._changed:
      cancelled = [call for call in self._queue if call.cancelled]
      for call in cancelled:
        self._queue.remove(call)
      self._cancelled_in_queue += len(cancelled)
      mode, waiting = self._mode, list(self._queue)
    for call in cancelled:
      call.end(Finish.ABORTED)
    self._scheduler.drop_cancelled()
    if mode is _Mode.HOLD:
      return
    start = time.perf_counter()
    self._scheduler.prepare(waiting if mode is _Mode.RUN else [], self._leave_queue)
    self._scheduler.sample()
    self._busy_seconds += time.perf_counter() - start

  def _leave_queue(self, call: Call) -> None:
    with self._changed:
      self._queue.remove(call)
