"""A request has several followers, and each gets all of it."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from ragen_jax.serving.errors import ApiError, internal
from ragen_jax.serving.http.running import Pending
from ragen_jax.serving.types import Piece


def _pending():
  return Pending(None, None, None, (), [(1, 2)])


def _piece(id_):
  return Piece((id_,), np.zeros(1), (), str(id_))


async def _read(pending):
  return [news async for news in pending.follow()]


def test_every_follower_gets_all_pieces_and_the_replies():
  async def play():
    pending = _pending()
    pending.add(0, _piece(1))
    early = asyncio.create_task(_read(pending))
    await asyncio.sleep(0)
    assert pending.followers == 1
    late = asyncio.create_task(_read(pending))
    pending.add(1, _piece(2))
    await asyncio.sleep(0)
    assert pending.followers == 2 and not pending.over
    pending.end(['replies'])
    found = [await early, await late, await _read(pending)]
    assert pending.over and await pending.choices() == ['replies'] and pending.followers == 0
    return found

  expected = [(0, _piece(1)), (1, _piece(2)), ['replies']]
  assert asyncio.run(play()) == [expected] * 3


def test_a_failure_is_raised_to_every_follower():
  async def play():
    pending = _pending()
    early = asyncio.create_task(_read(pending))
    await asyncio.sleep(0)
    pending.end(internal('it broke', retry=False))
    for reading in (early, _read(pending), pending.choices()):
      with pytest.raises(ApiError, match='it broke'):
        await reading

  asyncio.run(play())


def test_it_tells_when_a_follower_comes_or_leaves():
  async def play():
    now, pending = time.monotonic(), _pending()
    assert pending.last_follower > now + 1, 'the first follower has a moment to come'
    moved = pending.moved
    reading = asyncio.create_task(_read(pending))
    await moved.wait()
    assert pending.followers == 1
    moved = pending.moved
    reading.cancel()
    await moved.wait()
    assert pending.followers == 0 and pending.last_follower <= time.monotonic()

  asyncio.run(asyncio.wait_for(play(), 60))
