"""The requests that are being answered: their replies are sampled until they end or no client waits for them."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from ragen_jax.serving.engine import EngineStopped, QueueFull
from ragen_jax.serving.failures import api_error, stops
from ragen_jax.serving.pending import Pending
from ragen_jax.serving.sessions import Plan
from ragen_jax.serving.types import Finish, Generated, GenerateRequest, Piece
from ragen_jax.serving.wire import errors
from ragen_jax.serving.wire.results import Choice


class Engine(Protocol):
  """What answering needs of `engine.Engine`."""

  def submit(
    self,
    request: GenerateRequest,
    on_piece: Callable[[Piece], None],
    on_done: Callable[[Generated | BaseException], None],
  ) -> Any:
    """Asks for a reply; the result has a method `cancel`."""


@dataclasses.dataclass(frozen=True)
class PlannedReply:
  """A reply of a request that is being sampled.

  Attributes:
    plan: of the attempt's session; None outside of attempts.
    prompt: ids of its prompt.
    prompt_text: the prompt that completions repeat; '' unless asked for.
    key: u32[2], data of the PRNG key of its row.
  """

  plan: Plan | None
  prompt: tuple[int, ...]
  prompt_text: str
  key: tuple[int, int]


class RunningRequests:
  """Samples the replies of requests. The methods run on one event loop."""

  def __init__(self, grace_s: float):
    """No request runs.

    Args:
      grace_s: how long a request goes on after its client has gone away.
    """
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
    """Submits the replies of a request to an engine, and goes on in a task.

    Args:
      engine: samples the replies.
      pending: the request; it gets the pieces and the outcome.
      replies: what is sampled.
      finish: makes the answer of all replies, and whether the request was aborted because nobody wants it.
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
        tickets.append(engine.submit(GenerateRequest(reply.prompt, reply.key, pending.params), on_piece, on_done))
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
