"""A server that speaks OpenEnv's protocol without its package, and does whatever a test tells it to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.support.text_games import Climb

# What the server may do in place of an answer.
HANG, HANG_UP = object(), object()
ACTION = {
  'type': 'object',
  'additionalProperties': False,
  'required': ['move'],
  'properties': {
    'move': {'type': 'string', 'description': 'Up or Down'},
    'metadata': {'type': 'object'},
  },
}
OBSERVATION = {'type': 'object', 'properties': {'text': {'type': 'string'}, 'done': {}, 'reward': {}, 'metadata': {}}}


class Server:
  """`Climb`, with one game for each connection.

  Attributes:
    url: the base address.
    pages: path -> the object that a GET answers, or text.
    sessions: maximum number of connections.
    end_s: how long the server takes to end a session, in seconds.
    trouble: is asked for each message, with the number of its connection and the message; may return text to send in
      place of the answer, several of these, `HANG` or `HANG_UP`; None for the answer.
    messages: all that was asked, each with the number of its connection.
    most: the largest number of connections at a time.
  """

  def __init__(self):
    self.pages: dict[str, Any] = {
      '/health': {'status': 'healthy'},
      '/schema': {'action': ACTION, 'observation': OBSERVATION, 'state': {}},
      '/metadata': {'name': 'Climb', 'description': 'Climb to the top.'},
    }
    self.sessions, self.end_s = 64, 0.0
    self.trouble: Callable[[int, Mapping[str, Any]], Any] = lambda number, message: None
    self.messages: list[tuple[int, dict[str, Any]]] = []
    self.open: set[int] = set()
    self.opened = self.most = 0
    self.url = ''

  def answer(self, game: dict[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a message, by the game."""
    data = message.get('data', {})
    if message['type'] == 'state':
      return {'type': 'state', 'data': {'moves': game.get('moves', 0), 'name': 'climb'}}
    if message['type'] == 'reset':
      game['climb'] = Climb(data.get('rungs', 6))
      game['moves'] = 0
      text = game['climb'].reset(data['seed'], 0)
      return {'type': 'observation', 'data': {'observation': {'text': text}, 'reward': None, 'done': False}}
    game['moves'] += 1
    text, reward, done, info = game['climb'].step(data['move'])
    metadata = {'won': info.get('success', False), 'length': len(text)}
    told = {'observation': {'text': text, 'metadata': metadata}, 'reward': reward, 'done': done}
    return {'type': 'observation', 'data': told}

  async def play(self, socket: Any) -> None:
    """One connection."""
    import websockets.exceptions

    number, game = self.opened, {}
    self.opened += 1
    with contextlib.suppress(websockets.exceptions.ConnectionClosed):
      if len(self.open) >= self.sessions:
        told = {'code': 'CAPACITY_REACHED', 'message': f'{self.sessions} sessions'}
        await socket.send(json.dumps({'type': 'error', 'data': told}))
        return
      self.open.add(number)
      self.most = max(self.most, len(self.open))
      try:
        async for text in socket:
          message = json.loads(text)
          self.messages.append((number, message))
          if message['type'] == 'close':
            await asyncio.sleep(self.end_s)
            return
          other = self.trouble(number, message)
          if other is HANG:
            await asyncio.sleep(60)
          elif other is HANG_UP:
            socket.transport.abort()
            return
          elif other is None:
            await socket.send(json.dumps(self.answer(game, message)))
          else:
            for part in [other] if isinstance(other, str | bytes) else other:
              await socket.send(part)
      finally:
        self.open.discard(number)

  def page(self, connection: Any, request: Any) -> Any:
    """What a GET answers; None for a connection."""
    if request.path == '/ws':
      return None
    page = self.pages.get(request.path)
    if page is None:
      return connection.respond(404, 'nothing here\n')
    return connection.respond(200, page if isinstance(page, str) else json.dumps(page))


@contextlib.contextmanager
def running() -> Iterator[Server]:
  """A server on a free port of this machine."""
  from websockets.asyncio.server import serve

  server, started = Server(), threading.Event()
  loop, over = asyncio.new_event_loop(), asyncio.Event()

  async def main() -> None:
    async with serve(server.play, '127.0.0.1', 0, process_request=server.page, close_timeout=0.1) as listening:
      server.url = f'http://127.0.0.1:{listening.sockets[0].getsockname()[1]}'
      started.set()
      await over.wait()
      for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()

  thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
  thread.start()
  assert started.wait(30)
  try:
    yield server
  finally:
    loop.call_soon_threadsafe(over.set)
    thread.join(30)
