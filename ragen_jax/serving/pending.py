"""A request that is being answered, and the clients that follow it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ragen_jax.serving.types import Piece, SamplingParams
from ragen_jax.serving.wire.results import Choice, Head
from ragen_jax.serving.wire.spec import CallSpec

_FIRST_FOLLOWER_S = 5.0  # the handler of a request follows it a moment later


class Pending:
  """A request that is being answered, or was. Several clients may follow it.

  Attributes:
    spec: the request.
    head: what all parts of its answer repeat.
    params: how the replies are sampled.
    prompts: ids of the prompt of each reply.
    changed: names of sampling parameters that are not as asked for.
    followers: number of clients that follow the request.
    last_follower: the time at which the last one left; a moment ahead before the first one comes.
    moved: set, and replaced, when a follower comes or leaves.
  """

  def __init__(
    self, spec: CallSpec, head: Head, params: SamplingParams, changed: tuple[str, ...], prompts: Sequence[Any]
  ):
    """Begins without pieces."""
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
    """A part of a reply."""
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
    """Whether `end` was called."""
    return self._choices is not None or self._error is not None

  def _wake(self) -> None:
    self._news.set()
    self._news = asyncio.Event()

  async def follow(self) -> AsyncIterator[tuple[int, Piece] | list[Choice]]:
    """The pieces from the first one on, then all replies.

    Raises:
      ApiError: the request failed.
    """
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
