"""Connections to servers of OpenEnv, and the thread in which they live; openenv.py has the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from ragen_jax.utils.errors import describe_error, one_line, short
from ragen_jax.utils.threads import Fault

_INSTALL = 'pip install -r requirements-openenv.txt'
_CLOSE_S = 5.0
_LARGEST_MESSAGE = 64 << 20
FULL = 'CAPACITY_REACHED'


def websockets_client() -> Any:
  """The module of the package's client; raises ValueError if the package is missing."""
  try:
    return importlib.import_module('websockets.asyncio.client')
  except ImportError as e:
    raise ValueError(f"type='openenv' needs the package websockets, which is missing: {_INSTALL}") from e


class Failed(Exception):
  """A message has no usable answer."""

  def __init__(self, fault: Fault, again: bool = False):
    super().__init__(str(fault))
    self.fault, self.again = fault, again  # again: whether a reset may be tried again


class Loop:
  """A thread with an event loop, until `stop`."""

  def __init__(self):
    self.loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._run, daemon=True, name='ragen_jax-openenv')
    self._thread.start()

  def _run(self) -> None:
    asyncio.set_event_loop(self.loop)
    self.loop.run_forever()
    left = asyncio.all_tasks(self.loop)
    for task in left:
      task.cancel()
    self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    self.loop.close()

  def results(self, jobs: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of coroutines, which run side by side. An exception becomes a fault."""

    async def gather() -> list[Any]:
      return await asyncio.gather(*jobs, return_exceptions=True)

    found = asyncio.run_coroutine_threadsafe(gather(), self.loop).result()
    return [
      Fault(f'client raised {type(x).__name__}', one_line(x, str)) if isinstance(x, BaseException) else x for x in found
    ]

  def stop(self) -> None:
    """Ends the thread; connections that are still open are cut."""
    self.loop.call_soon_threadsafe(self.loop.stop)
    if threading.current_thread() is not self._thread:  # a finalizer may run in any thread
      self._thread.join(_CLOSE_S)


class Link:
  """A connection to the server. Its methods run in the event loop, one at a time."""

  def __init__(self, socket: Any):
    self.told: dict[str, float] = {}  # metric of the state -> its last value
    self._socket = socket
    self._waiting: asyncio.Future[str | bytes] | None = None
    self._unasked: str | bytes | None = None
    self._end = ''
    self._reader = asyncio.create_task(self._read())

  @classmethod
  async def open(cls, url: str) -> Link:
    """A new connection to the server at this base address; raises `Failed`."""
    client = websockets_client()
    address = 'ws' + url.removeprefix('http').rstrip('/') + '/ws'  # https becomes wss
    limits = {'open_timeout': None, 'close_timeout': _CLOSE_S, 'ping_interval': None, 'max_size': _LARGEST_MESSAGE}
    try:
      return cls(await _no_redirects(client.connect)(address, proxy=None, compression=None, **limits))
    except (OSError, EOFError, importlib.import_module('websockets.exceptions').WebSocketException) as e:
      raise Failed(Fault('server cannot be reached', f'{address}: {describe_error(e)}'), again=True) from e

  async def _read(self) -> None:
    """Takes what the server sends, until the connection ends or a message comes that nobody waits for."""
    try:
      while True:
        message = await self._socket.recv()
        if self._waiting is None or self._waiting.done():
          self._unasked = message
          return
        self._waiting.set_result(message)
    except Exception as e:  # noqa: BLE001, damaged frames too end the connection
      self._end = describe_error(e)
    finally:
      if self._waiting is not None and not self._waiting.done():
        self._waiting.set_exception(Failed(Fault('server closed the connection', self._end), again=True))

  async def ask(self, kind: str, data: Any = None, errors: Sequence[str] | None = None) -> Any:
    """The data of the answer to a message.

    Args:
      errors: codes of errors that matter; others count as an answer without data. None for all.

    Raises:
      Failed: there is no answer, or it is an error.
    """
    if self._unasked is None:
      if self._reader.done():
        raise Failed(Fault('server closed the connection', self._end), again=True)
      self._waiting = asyncio.get_running_loop().create_future()
      message = {'type': kind} if data is None else {'type': kind, 'data': data}
      # If the connection is closed, the reader tells why: the last message may be a refusal.
      with contextlib.suppress(importlib.import_module('websockets.exceptions').ConnectionClosed):
        await self._socket.send(json.dumps(message))
      raw, asked = await self._waiting, True
    else:
      raw, asked = self._unasked, False
    try:
      answer = json.loads(raw)
    except (ValueError, RecursionError) as e:
      raise Failed(Fault(f'{kind} answered no JSON', describe_error(e))) from e
    if not isinstance(answer, Mapping):
      raise Failed(Fault(f'{kind} answered no object', short(answer)))
    data = answer.get('data')
    if answer.get('type') == 'error':
      data = data if isinstance(data, Mapping) else {}
      code, told = one_line(data.get('code'), str), one_line(data.get('message'), str)
      if errors is not None and code not in errors:
        return {}
      raise Failed(Fault(f'{kind} answered an error', f'{code}: {told}'[:300]), again=code == FULL)
    if not asked:
      raise Failed(Fault('server sent a message that nobody asked for', short(answer)))
    if answer.get('type') != ('state' if kind == 'state' else 'observation'):
      raise Failed(Fault(f'{kind} answered another message', short(answer)))
    return data

  async def close(self) -> None:
    """Asks the server to end the session, and waits a little until it has."""
    with contextlib.suppress(Exception):
      async with asyncio.timeout(_CLOSE_S):
        await self._socket.send('{"type": "close"}')
        await self._reader
    self.drop()
    await asyncio.sleep(0)

  def drop(self) -> None:
    """Cuts the connection."""
    self._reader.cancel()
    self._socket.transport.abort()


@functools.cache
def _no_redirects(connect: type) -> type:
  """A kind of `websockets.asyncio.client.connect` that goes to no other address."""
  return type('connect', (connect,), {'process_redirect': lambda self, exception: exception})
