"""The server's thread: it serves at once, refuses an address that is taken, and stops."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest

from ragen_jax.serving.errors import internal
from ragen_jax.serving.http import timed_protocol
from ragen_jax.serving.http.server import HttpServer
from ragen_jax.utils.errors import UserError
from tests.support.paths import ROOT
from tests.support.processes import environment
from tests.support.serving import PATIENCE, until


async def hello(scope, receive, send):
  if scope['path'] in ('/broken', '/wrong'):
    await send({'type': 'http.response.start', 'status': 200, 'headers': []})
    raise internal('a break on purpose', retry=False) if scope['path'] == '/broken' else TypeError('a mistake')
  await send({'type': 'http.response.start', 'status': 200, 'headers': []})
  await send({'type': 'http.response.body', 'body': b'hello'})


def get(url):
  with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
    return answer.read(), dict(answer.headers)


def test_it_serves_until_it_is_closed():
  stopped = []
  with HttpServer(hello, lambda: stopped.append(threading.current_thread().name), '127.0.0.1', 0, 8) as server:
    body, headers = get(server.url)
    assert body == b'hello' and 'server' not in {name.lower() for name in headers}
    assert server.url.startswith('http://127.0.0.1:') and not stopped
  assert stopped == ['ragen_jax-http']
  with pytest.raises(urllib.error.URLError):
    get(server.url)
  server.close()  # again


def test_calls_of_other_threads_run_in_their_order_on_the_loop_and_not_after_its_end():
  told, done = [], threading.Event()
  with HttpServer(hello, lambda: None, '127.0.0.1', 0, 8) as server:
    for i in range(3):
      server.call_soon(lambda i=i: told.append((i, threading.current_thread().name)))
    server.call_soon(done.set)
    assert done.wait(PATIENCE)
  server.call_soon(lambda: told.append('late'))
  assert told == [(i, 'ragen_jax-http') for i in range(3)]


def test_answers_do_not_wait_for_acknowledgements():
  seen = []

  async def look(scope, receive, send):
    loop = asyncio.get_running_loop()
    # The server's connections are sockets of the loop's selector.
    for key in list(loop._selector.get_map().values()):
      sock = socket.socket(fileno=socket.dup(key.fd)) if key.fd else None
      with sock:
        if sock.family == socket.AF_INET and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
          seen.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    await hello(scope, receive, send)

  with HttpServer(look, lambda: None, '127.0.0.1', 0, 8) as server:
    get(server.url)
  assert seen and all(seen)


def test_an_address_that_is_taken_is_one_line():
  with socket.socket() as taken:
    taken.bind(('127.0.0.1', 0))
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(UserError, match=rf"serve\.host='127\.0\.0\.1', serve\.port={port}: cannot be bound"):
      HttpServer(hello, lambda: None, '127.0.0.1', port, 8)
  with pytest.raises(UserError, match='cannot be bound'):
    HttpServer(hello, lambda: None, 'no.such.host.invalid', 0, 8)


@pytest.mark.skipif(not socket.has_ipv6, reason='no IPv6')
def test_ipv6():
  try:
    server = HttpServer(hello, lambda: None, '::1', 0, 8)
  except UserError:
    pytest.skip('no IPv6')
  with server:
    assert server.url.startswith('http://[::1]:') and get(server.url)[0] == b'hello'


def test_too_many_connections_are_refused():
  entered, go = threading.Semaphore(0), threading.Event()

  async def slow(scope, receive, send):
    entered.release()
    await asyncio.to_thread(go.wait, PATIENCE)
    await hello(scope, receive, send)

  with HttpServer(slow, lambda: None, '127.0.0.1', 0, 2) as server:
    first = threading.Thread(target=get, args=(server.url,))
    first.start()
    assert entered.acquire(timeout=PATIENCE)
    with pytest.raises(urllib.error.HTTPError) as e:
      get(server.url)
    go.set()
    first.join(PATIENCE)
    assert e.value.code == 503


# A server in a process that may open few files. Its application needs thirty of them.
_FEW_FILES = """
import logging, resource, sys, tempfile
from ragen_jax.serving.http import server, timed_protocol

async def app(scope, receive, send):
  files = [tempfile.TemporaryFile() for _ in range(30)]
  await send({'type': 'http.response.start', 'status': 200, 'headers': []})
  await send({'type': 'http.response.body', 'body': b'hello'})
  del files

logging.basicConfig(level=logging.WARNING, format='%(message)s')
timed_protocol.REQUEST_S = 0.5
resource.setrlimit(resource.RLIMIT_NOFILE, (100, int(sys.argv[1])))
with server.HttpServer(app, lambda: None, '127.0.0.1', 0, int(sys.argv[2])) as opened:
  print(opened.url, resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
  sys.stdin.read()
"""


@pytest.mark.parametrize(('hard', 'most', 'warns'), [(300, 4096, True), (4096, 100, False)])
def test_connections_leave_room_for_other_files_and_silent_ones_lock_nobody_out(hard, most, warns):
  pipes = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.PIPE)
  command = [sys.executable, '-c', _FEW_FILES, str(hard), str(most)]
  with (
    subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, **pipes) as server,
    contextlib.ExitStack() as stack,
  ):
    url, limit = server.stdout.readline().split()
    assert int(limit) == 300 if warns else 1024 < int(limit) < 1400
    address = urllib.parse.urlsplit(url)
    for _ in range(400):
      with contextlib.suppress(ConnectionResetError):
        stack.enter_context(socket.create_connection((address.hostname, address.port), PATIENCE))
    end = time.monotonic() + PATIENCE
    while True:
      try:
        assert get(url)[0] == b'hello'
        break
      except OSError:  # refused while the silent ones are open
        assert time.monotonic() < end
        time.sleep(0.1)
    errors = server.communicate(timeout=PATIENCE)[1].splitlines()
  told = [line for line in errors if f'serve.max_connections={most}: ' in line]
  assert len(told) == warns and not [line for line in errors if 'Too many open files' in line], errors


def test_connections_that_send_no_whole_request_lock_nobody_out(monkeypatch):
  monkeypatch.setattr(timed_protocol, 'REQUEST_S', 0.05)
  with HttpServer(hello, lambda: None, '127.0.0.1', 0, 3) as server, contextlib.ExitStack() as stack:
    address = urllib.parse.urlsplit(server.url)
    silent = [
      stack.enter_context(socket.create_connection((address.hostname, address.port), PATIENCE)) for _ in range(3)
    ]
    silent[1].sendall(b'GET / HTTP/1.1\r\nHos')
    silent[2].sendall(b'POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf')
    for connection in silent:
      with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 16):
          pass
    until(lambda: not server._server.server_state.connections)
    assert get(server.url)[0] == b'hello'


def test_a_body_without_an_end_that_was_answered_locks_nobody_out(monkeypatch):
  """The answer comes before the body, as that to a request without a key."""
  monkeypatch.setattr(timed_protocol, 'ANSWERED_S', 0.05)
  with HttpServer(hello, lambda: None, '127.0.0.1', 0, 2, max_body=1 << 40) as server:
    address = urllib.parse.urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), PATIENCE) as holder:
      holder.sendall(b'POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000000\r\n\r\n')
      assert holder.recv(1 << 16).startswith(b'HTTP/1.1 200')
      end = time.monotonic() + PATIENCE
      with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while time.monotonic() < end:
          holder.sendall(b'x' * 65536)
      assert time.monotonic() < end, 'the connection stays open'
    until(lambda: not server._server.server_state.connections)
    assert get(server.url)[0] == b'hello'


def test_an_answer_that_is_broken_on_purpose_is_not_logged(caplog):
  with HttpServer(hello, lambda: None, '127.0.0.1', 0, 8) as server:
    with pytest.raises(http.client.IncompleteRead):
      get(f'{server.url}/broken')
    get(server.url)
    assert not caplog.records
    with pytest.raises(http.client.IncompleteRead):
      get(f'{server.url}/wrong')
    until(lambda: caplog.records)
  assert 'a mistake' in str(caplog.records[0].exc_info[1])
