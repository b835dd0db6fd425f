"""Requests that do not arrive in time, and answers that are not read, close their connections; others stay open."""

from __future__ import annotations

import asyncio
import types

import pytest

pytest.importorskip('uvicorn')

import uvicorn
from uvicorn.server import ServerState

from ragen_jax.serving.http.timed_protocol import ANSWERED_S, BYTES_PER_S, REQUEST_S, UNREAD_S, TimedProtocol

GET = b'GET / HTTP/1.1\r\nHost: x\r\n\r\n'
KEPT_S = 75.0


class Clock:
  """A loop whose time the test moves; tasks run on the real one."""

  def __init__(self):
    self.now, self.timers = 0.0, []
    self.create_task = asyncio.get_running_loop().create_task

  def time(self):
    return self.now

  def call_later(self, seconds, call):
    timer = types.SimpleNamespace(at=self.now + seconds, call=call, cancelled=False)
    timer.cancel = lambda: setattr(timer, 'cancelled', True)
    self.timers.append(timer)
    return timer

  def pass_to(self, now):
    """Moves the time, and calls what is due."""
    while due := [t for t in self.timers if not t.cancelled and t.at <= now]:
      first = min(due, key=lambda t: t.at)
      self.timers.remove(first)
      self.now = first.at
      first.call()
    self.now = now


class Transport:
  """Keeps what is written.

  Attributes:
    unread: bytes that the client has not read; the test says how many.
  """

  def __init__(self):
    self.written, self.closed, self.unread = b'', False, 0

  def write(self, data):
    self.written += data

  def get_write_buffer_size(self):
    return self.unread

  def close(self):
    self.closed = self.closed or not self.unread

  def abort(self):
    self.closed = True

  def is_closing(self):
    return self.closed

  def get_extra_info(self, name, default=None):
    return default

  def pause_reading(self):
    pass

  resume_reading = pause_reading


class Connection:
  """A client's connection to an application that reads the request, and ends its answer when the test says."""

  def __init__(self, *, reads=True, **options):
    self.clock, self.transport, self.go_on = Clock(), Transport(), asyncio.Event()
    self._reads = reads
    config = uvicorn.Config(
      self._app, interface='asgi3', log_config=None, lifespan='off', access_log=False, timeout_keep_alive=KEPT_S
    )
    self.protocol = TimedProtocol(config, ServerState(), {}, self.clock, **options)
    self.protocol.connection_made(self.transport)

  async def _app(self, scope, receive, send):
    while self._reads and (await receive())['more_body']:
      pass
    headers = [(b'content-length', b'4')]
    await send({'type': 'http.response.start', 'status': 200, 'headers': headers})
    await send({'type': 'http.response.body', 'body': b'ha', 'more_body': True})
    await self.go_on.wait()
    await send({'type': 'http.response.body', 'body': b'lf'})

  async def sends(self, data):
    self.protocol.data_received(data)
    for _ in range(10):  # turns of the loop in which the application goes on
      await asyncio.sleep(0)

  async def answers(self):
    self.go_on.set()
    for _ in range(10):
      await asyncio.sleep(0)
    self.go_on.clear()

  def has_unread(self, size):
    """The client has left so many bytes unread; the transport tells the protocol, as that of asyncio."""
    before, self.transport.unread = self.transport.unread, size
    if size <= 16 * 1024 < before:
      self.protocol.resume_writing()
    elif before <= 64 * 1024 < size:
      self.protocol.pause_writing()

  def open_at(self, now):
    self.clock.pass_to(now)
    return not self.transport.closed


def connected(steps):
  """A test with a connection, on an event loop."""

  def run():
    asyncio.run(steps())

  run.__name__ = steps.__name__
  return run


@connected
async def test_a_connection_that_sends_nothing_is_closed():
  c = Connection()
  assert c.open_at(REQUEST_S - 0.1) and not c.open_at(REQUEST_S)


@connected
async def test_headers_that_drip_are_closed_in_the_same_time():
  c = Connection()
  for second in range(int(REQUEST_S)):
    assert c.open_at(float(second))
    await c.sends(GET[second : second + 1] if second < 20 else b'a')
  assert not c.open_at(REQUEST_S + 0.1)


@connected
async def test_a_body_that_drips_is_closed_and_a_long_one_that_comes_fast_enough_is_not():
  slow, fast = Connection(), Connection()
  length = BYTES_PER_S * 100
  for c in (slow, fast):
    await c.sends(b'POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n' % length)
  await slow.sends(b'x')
  assert not slow.open_at(REQUEST_S + 0.1)
  for second in range(1, 100):
    assert fast.open_at(float(second))
    await fast.sends(b'x' * BYTES_PER_S)
  assert fast.open_at(REQUEST_S + 98.0)
  await fast.sends(b'x' * BYTES_PER_S)
  await fast.answers()
  assert fast.transport.written.endswith(b'half')


@connected
async def test_a_long_answer_is_not_cut():
  c = Connection()
  await c.sends(GET)
  assert c.transport.written.endswith(b'ha') and c.open_at(1e6)
  await c.answers()
  assert c.transport.written.endswith(b'half') and c.open_at(1e6 + KEPT_S - 0.1)


@connected
async def test_a_kept_connection_waits_for_its_next_request_and_not_for_half_of_one():
  c = Connection()
  await c.sends(GET)
  await c.answers()
  assert c.open_at(KEPT_S - 1.0)
  await c.sends(GET)
  await c.answers()
  assert c.open_at(2 * KEPT_S - 3.0)
  await c.sends(GET[:9])
  now = c.clock.now
  assert c.open_at(now + REQUEST_S - 0.1) and not c.open_at(now + REQUEST_S)


@connected
async def test_half_a_request_that_came_with_the_one_before_is_closed():
  c = Connection()
  await c.sends(GET + GET[:9])
  assert c.open_at(100.0)
  await c.answers()
  assert c.open_at(100.0 + REQUEST_S - 0.1) and not c.open_at(100.0 + REQUEST_S)


@connected
async def test_a_body_that_goes_on_after_the_answer_is_closed():
  """As that of a request without a key, however fast it comes."""
  c = Connection(reads=False)
  await c.sends(b'POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000000\r\n\r\n')
  for second in range(1, 4):
    assert c.open_at(float(second))
    await c.sends(b'x' * 4 * BYTES_PER_S)
  await c.answers()
  assert c.transport.written.endswith(b'half')
  for second in range(4, int(3 + ANSWERED_S)):
    assert c.open_at(float(second))
    await c.sends(b'x' * 4 * BYTES_PER_S)
  assert not c.open_at(3 + ANSWERED_S)


@connected
async def test_a_connection_whose_body_ends_after_the_answer_is_kept_but_not_for_ever():
  c = Connection(reads=False)
  await c.sends(b'POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n')
  await c.answers()
  assert c.open_at(2.0)
  await c.sends(b'body')
  assert c.open_at(ANSWERED_S + 1)
  await c.sends(GET)
  await c.answers()
  assert c.transport.written.count(b'half') == 2
  await c.sends(b'POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n')
  await c.answers()
  await c.sends(b'body')
  now = c.clock.now
  assert c.open_at(now + REQUEST_S - 0.1) and not c.open_at(now + REQUEST_S)


@connected
async def test_a_body_buys_no_more_time_than_the_largest_that_is_accepted():
  c, seconds = Connection(largest_body=20 * BYTES_PER_S), int(REQUEST_S) + 20
  await c.sends(b'POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000000\r\n\r\n')
  for second in range(1, seconds):
    assert c.open_at(float(second))
    await c.sends(b'x' * 4 * BYTES_PER_S)
  assert not c.open_at(float(seconds))


@connected
async def test_a_connection_that_is_lost_leaves_no_timer():
  c = Connection()
  await c.sends(GET[:9])
  c.protocol.connection_lost(None)
  assert all(timer.cancelled for timer in c.clock.timers)


@connected
async def test_a_client_that_reads_no_answers_is_closed():
  client = Connection()
  await client.sends(GET)
  client.has_unread(100_000)
  assert client.open_at(UNREAD_S - 1)
  client.has_unread(0)
  assert client.open_at(3 * UNREAD_S)
  client.has_unread(100_000)
  assert client.open_at(4 * UNREAD_S - 1) and not client.open_at(4 * UNREAD_S)


@connected
async def test_a_client_that_reads_slowly_is_not_closed_while_it_takes_enough():
  client, unread = Connection(), 1000 * BYTES_PER_S
  await client.sends(GET)
  client.has_unread(unread)
  second = 0
  while unread:  # in parts, as the buffers of the sockets take them; a little faster than it has to
    second += 40
    assert client.open_at(float(second))
    unread = max(unread - 42 * BYTES_PER_S, 0)
    client.has_unread(unread)
  assert second > 10 * UNREAD_S and client.open_at(second + 10 * UNREAD_S)
  client.has_unread(1000 * BYTES_PER_S)
  now = client.clock.now
  assert client.open_at(now + UNREAD_S - 1)
  client.has_unread(1)  # what was read fast buys no more than the usual time
  assert client.open_at(now + 2 * UNREAD_S - 1) and not client.open_at(now + 2 * UNREAD_S)


@connected
async def test_a_client_that_takes_a_few_bytes_now_and_then_is_closed():
  client = Connection()
  await client.sends(GET)
  for second in range(int(UNREAD_S)):
    client.has_unread(4_000_000 - second)
    assert client.open_at(float(second))
  assert not client.open_at(UNREAD_S + 1)


@connected
async def test_an_answer_that_goes_on_counts_as_read_though_the_buffer_is_full_again():
  client = Connection()
  await client.sends(GET)
  client.has_unread(70_000)
  for second in range(1, int(3 * UNREAD_S)):
    assert client.open_at(float(second))
    client.has_unread(10_000)
    client.protocol.transport.write(b'x' * 60_000)
    client.has_unread(70_000)


@connected
async def test_the_rest_of_an_answer_that_nobody_reads_keeps_no_connection_open():
  """It is less than the transport calls a full buffer."""
  kept, ended = Connection(), Connection()
  await kept.sends(GET)
  await ended.sends(GET.replace(b'\r\n\r\n', b'\r\nConnection: close\r\n\r\n'))
  for c in (kept, ended):
    c.transport.unread = 1000
    await c.answers()
    assert c.open_at(UNREAD_S - 1) and not c.open_at(UNREAD_S)


@connected
async def test_a_lost_connection_leaves_no_timer():
  client = Connection()
  await client.sends(GET)
  client.has_unread(100_000)
  client.protocol.connection_lost(None)
  assert not [timer for timer in client.clock.timers if not timer.cancelled]
