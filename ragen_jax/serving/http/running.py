"""HTTP: requests that are being answered, and the clients that follow them, until nobody waits for their replies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from ragen_jax.agent.segments import ImageSpan
from ragen_jax.serving import errors
from ragen_jax.serving.conversation.sessions import Plan
from ragen_jax.serving.engine.engine import Engine
from ragen_jax.serving.errors import EngineStopped, QueueFull, api_error, stops
from ragen_jax.serving.types import Finish, Generated, GenerateRequest, Piece, SamplingParams
from ragen_jax.serving.wire.results import Choice, Head
from ragen_jax.serving.wire.spec import CallSpec

_FIRST_FOLLOWER_S = 5.0  # the handler of a request follows it a moment later


class Pending:
  """A request that is being answered, or was. Several clients may follow it.

  Attributes:
    prompts: ids of the prompt of each reply.
    changed: names of sampling parameters that are not as asked for.
    last_follower: the time at which the last one left; a moment ahead before the first one comes.
    moved: set, and replaced, when a follower comes or leaves.
  """

  def __init__(
    self, spec: CallSpec, head: Head, params: SamplingParams, changed: tuple[str, ...], prompts: Sequence[Any]
  ):
    self.spec, self.head, self.params, self.changed = spec, head, params, changed
    self.prompts = [tuple(p) for p in prompts]
    self._pieces: list[tuple[int, Piece]] = []
    self._choices: list[Choice] | None = None
    self._error: Exception | None = None
    self._news = asyncio.Event()
    self.followers = 0
    # The request's handler follows a moment later.
    self.last_follower = time.monotonic() + _FIRST_FOLLOWER_S
    self.moved = asyncio.Event()

  def add(self, index: int, piece: Piece) -> None:
    self._pieces.append((index, piece))
    self._wake()

  def end(self, outcome: list[Choice] | Exception) -> None:
    """All replies are complete and stored, or the request failed."""
    if isinstance(outcome, Exception):
      self._error = outcome
    else:
      self._choices = outcome
    self._wake()

  @property
  def over(self) -> bool:
    return self._choices is not None or self._error is not None

  def _wake(self) -> None:
    self._news.set()
    self._news = asyncio.Event()

  async def follow(self) -> AsyncIterator[tuple[int, Piece] | list[Choice]]:
    """The pieces from the first one on, then all replies; ApiError if the request failed."""
    self._move(1)
    try:
      at = 0
      while True:
        news = self._news
        while at < len(self._pieces):
          yield self._pieces[at]
          at += 1
        if self._error is not None:
          raise self._error
        if self._choices is not None:
          yield self._choices
          return
        await news.wait()
    finally:
      self.last_follower = time.monotonic()
      self._move(-1)

  def _move(self, by: int) -> None:
    self.followers += by
    self.moved.set()
    self.moved = asyncio.Event()

  async def choices(self) -> list[Choice]:
    """All replies, when they are complete and stored; raises ApiError if the request failed."""
    async with contextlib.aclosing(self.follow()) as following:
      async for news in following:
        if isinstance(news, list):
          return news
    raise AssertionError('follow ends with the replies')


@dataclasses.dataclass(frozen=True)
class PlannedReply:
  """A reply of a request that is being sampled.

  Attributes:
    plan: of the attempt's session; None outside of attempts.
    prompt_text: the prompt that completions repeat; '' unless asked for.
    key: u32[2], data of the PRNG key of its row.
    images: those of the prompt.
  """

  plan: Plan | None
  prompt: tuple[int, ...]
  prompt_text: str
  key: tuple[int, int]
  images: tuple[ImageSpan, ...] = ()


class RunningRequests:
  """Samples the replies of requests. A request goes on for `grace_s` after its client has gone away.

  The methods run on one event loop.
  """

  def __init__(self, grace_s: float):
    self._grace_s = grace_s
    self._tasks: dict[asyncio.Task, Pending] = {}

  def stop(self) -> None:
    """Ends all requests: their clients are told to try again."""
    for task, pending in list(self._tasks.items()):
      if not pending.over:
        pending.end(stops())
      task.cancel()

  def start(
    self,
    engine: Engine,
    pending: Pending,
    replies: Sequence[PlannedReply],
    finish: Callable[[list[Generated], bool], Awaitable[list[Choice]]],
    ended: Callable[[], None],
  ) -> None:
    """Submits the replies of a request to an engine, and goes on in a task. `pending` gets the pieces and the outcome.

    Args:
      finish: makes the answer from all replies, and from whether the request was aborted because nobody wants it.
      ended: called at the end of the task, however it ends.

    Raises:
      ApiError: the engine refuses a reply; `ended` is not called.
    """
    loop, found, tickets = asyncio.get_running_loop(), [], []
    for i, reply in enumerate(replies):
      done = loop.create_future()
      found.append(done)

      def on_piece(piece: Piece, i: int = i) -> None:
        _on_loop(loop, lambda: pending.add(i, piece))

      def on_done(outcome: Generated | BaseException, done: asyncio.Future = done) -> None:
        _on_loop(loop, lambda: done.done() or done.set_result(outcome))

      try:
        request = GenerateRequest(reply.prompt, reply.key, pending.params, reply.images)
        tickets.append(engine.submit(request, on_piece, on_done))
      except (ValueError, QueueFull, EngineStopped) as e:
        for ticket in tickets:
          ticket.cancel()
        raise (errors.bad_request('', str(e)) if isinstance(e, ValueError) else api_error(e)) from e

    async def run() -> None:
      try:
        aborted = await self._sampled(pending, found, tickets)
        outcomes = [f.result() for f in found]
        broken = next((x for x in outcomes if isinstance(x, BaseException)), None)
        if broken is not None:
          raise errors.internal(f'the engine has stopped: {broken}', retry=True) from broken
        aborted = aborted or any(x.finish is Finish.ABORTED for x in outcomes)
        pending.end(await finish(outcomes, aborted))
      except asyncio.CancelledError:
        for ticket in tickets:
          ticket.cancel()
        raise
      except Exception as e:  # noqa: BLE001, whoever follows the request must hear of it
        pending.end(api_error(e))
      finally:
        ended()

    task = asyncio.create_task(run())
    self._tasks[task] = pending
    task.add_done_callback(self._tasks.pop)

  async def _sampled(self, pending: Pending, found: list[asyncio.Future], tickets: list[Any]) -> bool:
    """Waits for the replies, and for someone who wants them. Returns whether nobody does: they are aborted."""
    waiting = asyncio.gather(*found)
    while True:
      if waiting.done() and pending.followers:
        return False
      left = None
      if not pending.followers:
        left = pending.last_follower + self._grace_s - time.monotonic()
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


def _on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], Any]) -> None:
  """Calls something on the loop from another thread; does nothing if the loop has closed."""
  try:
    loop.call_soon_threadsafe(call)
  except RuntimeError:
    if not loop.is_closed():
      raise
