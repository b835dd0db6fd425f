"""Environments and servers that lie: in one process as objects, and over HTTP as raw bytes."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from tests.support.text_games import Nameless, OddMapping, Unreal


class Unspeakable(BaseException):
  """Cannot even be described."""

  def __str__(self):
    raise Nameless

  __repr__ = __str__


class _Silent:
  def __repr__(self):
    raise Unspeakable


class _Endless(list):
  """Has four entries, it says, and never stops."""

  def __iter__(self):
    while True:
      yield 'x'

  def __len__(self):
    return 4


def _raise(error: BaseException):
  raise error


def _start() -> None:
  """Starts a thread that nobody joins."""
  threading.Thread(target=threading.Event().wait, args=(5.0,), daemon=True).start()


# What a step may answer or do, and the kind of the fault that it becomes.
LIES = {
  'nothing': (lambda: None, 'step did not return'),
  'a number': (lambda: 5, 'step did not return'),
  'five values': (lambda: ('x', 0.0, False, False, {}), 'step did not return'),
  'a generator': (lambda: (part for part in ('x', 0.0, False, False)), 'step did not return'),
  'an endless list': (lambda: _Endless(), 'reading a step raised ValueError'),
  'something silent': (lambda: _Silent(), 'step did not return'),
  'a silent observation': (lambda: (_Silent(), 0.0, False, False), 'observation is not a string'),
  'bytes': (lambda: (b'x' * (1 << 22), 0.0, False, False), 'observation is not a string'),
  'a long observation': (lambda: ('x' * (1 << 22), 0.0, False, False), 'observation is longer than'),
  'a number as text': (lambda: ('x', '1.0', False, False), 'reward is not a number'),
  'no reward': (lambda: ('x', None, False, False), 'reward is not a number'),
  'two rewards': (lambda: ('x', np.ones(2), False, False), 'reward is not a number'),
  'a complex reward': (lambda: ('x', 1j, False, False), 'reward is not a number'),
  'nan': (lambda: ('x', float('nan'), False, False), 'reward is not within'),
  'infinity': (lambda: ('x', np.float16('-inf'), False, False), 'reward is not within'),
  'a huge reward': (lambda: ('x', 1e16, False, False), 'reward is not within'),
  'a reward of 400 digits': (lambda: ('x', 10**400, False, False), 'reward is not within'),
  'an unreal reward': (lambda: ('x', Unreal(1.0), False, False), 'reading a step raised Nameless'),
  'a bool as text': (lambda: ('x', 0.0, 'False', False), 'done is not a bool'),
  'a bool as a number': (lambda: ('x', 0.0, 0, False), 'done is not a bool'),
  'a success as text': (lambda: ('x', 0.0, True, {'success': 'no'}), 'success is not a bool'),
  'no success': (lambda: ('x', 0.0, True, {}), 'success is not a bool'),
  'an effect as text': (lambda: ('x', 0.0, False, {'effective': 'yes'}), 'effective is not a bool'),
  'an odd mapping': (lambda: ('x', 0.0, True, OddMapping()), 'reading a step raised Nameless'),
  'an exit': (lambda: _raise(SystemExit(0)), 'step raised SystemExit'),
  'an interrupt': (lambda: _raise(KeyboardInterrupt()), 'step raised KeyboardInterrupt'),
  'the end of a generator': (lambda: _raise(GeneratorExit()), 'step raised GeneratorExit'),
  'no more items': (lambda: _raise(StopIteration()), 'step raised StopIteration'),
  'recursion': (lambda: LIES['recursion'][0](), 'step raised RecursionError'),
  'something unspeakable': (lambda: _raise(Unspeakable()), 'step raised Unspeakable'),
}  # fmt: skip

# What is odd and does no harm.
ODD = {
  'half a character': lambda: ('\ud800', 0.0, False, False),
  'more than was asked for': lambda: ('?', np.float32(0), np.bool_(False), {'success': False, 'more': [_Silent()]}),
  'a flood': lambda: print('flood ' * 100_000) or ('?', False, False, False),
  'a thread': lambda: _start() or ('?', 0, False, False),
}


class Liar:
  """Does what an action says, of `LIES` and `ODD`; changes whatever it was given."""

  rules = 'Lie.'

  def __init__(self, notes: list[str]):
    notes.append('changed')
    self.notes = notes

  def reset(self, seed):
    return f'{len(self.notes)} notes'

  def step(self, action):
    return LIES[action][0]() if action in LIES else ODD[action]()


# -- servers -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def raw_server(answer: Callable[[dict], Iterable[bytes]]) -> Iterator[str]:
  """A server that answers each request with raw bytes, as long as the client listens.

  Args:
    answer: the body of a request -> parts of the bytes to send, perhaps without an end; they end with the test.
  """
  over = threading.Event()
  listener = socket.create_server(('127.0.0.1', 0))

  def serve(connection: socket.socket) -> None:
    with contextlib.suppress(OSError, ValueError), connection:
      stream = connection.makefile('rb')
      length = 0
      while (line := stream.readline().strip()) != b'':
        name, _, value = line.partition(b':')
        length = int(value) if name.lower() == b'content-length' else length
      for part in answer(json.loads(stream.read(length))):
        if over.is_set():
          return
        if part is None:  # the connection is reset
          connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b'\x01\x00\x00\x00\x00\x00\x00\x00')
          return
        connection.sendall(part)

  def accept() -> None:
    with contextlib.suppress(OSError):
      while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()

  thread = threading.Thread(target=accept, daemon=True)
  thread.start()
  try:
    yield f'http://127.0.0.1:{listener.getsockname()[1]}'
  finally:
    over.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(60)


def drip(*parts: bytes) -> Iterator[bytes]:
  """The first parts at once, and then the last one again and again, not too fast."""
  yield from parts[:-1]
  pause = threading.Event()
  while True:
    yield parts[-1]
    pause.wait(0.02)


def flood(*parts: bytes) -> Iterator[bytes]:
  """The first parts, and then the last one again and again, as fast as it is read."""
  yield from parts[:-1]
  while True:
    yield parts[-1]


def http_answer(body: bytes, *headers: str, status: str = '200 OK') -> bytes:
  """An answer with its length."""
  lines = [f'HTTP/1.1 {status}', f'Content-Length: {len(body)}', 'Connection: close', *headers, '', '']
  return '\r\n'.join(lines).encode() + body
