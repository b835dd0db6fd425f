"""The client of MCP servers, against a program that speaks the protocol in its own words and breaks it when asked."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import signal
import sys
import threading
import time

import pytest

from tests.support import mcp_raw_server

pytest.importorskip('mcp', reason='mcp is not installed: requirements-data.txt')

from ragen_jax.envs.dataset.mcp_client import (
  AWAY,
  LATE,
  MISTAKE,
  TEXT,
  UNREADABLE,
  McpClient,
)

_numbers = itertools.count()
RAW = [sys.executable, str(pathlib.Path(mcp_raw_server.__file__))]


@contextlib.contextmanager
def connect(*arguments, environment=()):
  """A client of the program."""
  client = McpClient([*RAW, *arguments], list(environment))
  try:
    yield client
  finally:
    client.close()


@pytest.fixture(scope='module')
def client():
  """A client whose server survives its tests."""
  with connect() as made:
    yield made


def call(client, *hows, timeout_s=20.0, **arguments):
  """The outcomes of calls that are made at once."""
  numbers = [next(_numbers) for _ in hows]
  begin = [(n, 'doIt', {'how': how, **arguments}, timeout_s) for n, how in zip(numbers, hows, strict=True)]
  ended = {}
  while len(ended) < len(hows):
    ended |= {number: (kind, text) for number, kind, text in client.exchange(begin, 0.05)}
    begin = []
  return [ended[number] for number in numbers]


def is_running(pid):
  """Whether there is such a process that is no zombie."""
  try:
    return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False


def test_all_pages_of_the_list_are_read(client):
  first, second = client.tools()
  about = mcp_raw_server.TOOLS[0]
  assert first == {'name': 'doIt', 'description': about['description'], 'schema': about['inputSchema']}
  assert second == {'name': 'other-tool', 'description': '', 'schema': {'type': 'object'}}


def test_a_list_without_an_end_is_refused():
  with connect('endless') as client, pytest.raises(ValueError, match='more than 50 pages'):
    client.tools()


@pytest.mark.parametrize(
  ('how', 'outcome'),
  [
    ('plain é', (TEXT, 'plain é')),
    ('two', (TEXT, 'first\nsecond')),
    ('image', (TEXT, '[image]\nafter')),
    ('resource', (TEXT, 'of a file')),
    ('structured', (TEXT, '{"a": [1, "é"]}')),
    ('nothing', (TEXT, '')),
    ('noise', (TEXT, 'noise')),
    ('error', (MISTAKE, 'no such city')),
    ('code -32602', (MISTAKE, 'words of the server')),
    ('code -32001', (UNREADABLE, 'error -32001, words of the server')),
    ('code -32600', (UNREADABLE, 'error -32600, words of the server')),
    ('code -32603', (AWAY, 'error -32603, words of the server')),
  ],
)
def test_an_answer_is_a_text_a_mistake_or_a_reason(client, how, outcome):
  assert call(client, how) == [outcome]


def test_a_result_that_is_not_of_the_protocol_is_unreadable(client):
  ((kind, reason),) = call(client, 'no result')
  assert kind == UNREADABLE and 'ValidationError' in reason


@pytest.mark.parametrize('method', ['sampling/createMessage', 'elicitation/create', 'roots/list'])
def test_requests_of_the_server_are_refused(client, method):
  ((kind, answer),) = call(client, f'ask {method}')
  told = json.loads(answer)
  assert kind == TEXT and told['id'] == 'mine' and told['error']['code'] < 0 and 'result' not in told


def test_the_program_gets_the_variables_that_are_named(monkeypatch):
  monkeypatch.setenv('RAGEN_KEY', 'x')
  monkeypatch.setenv('RAGEN_SECRET', 'y')
  with connect(environment=['RAGEN_KEY', 'RAGEN_NONE']) as client:
    assert call(client, 'variables') == [(TEXT, '{"RAGEN_KEY": "x"}')]


def test_a_program_that_dies_says_why_and_all_its_calls_have_gone():
  with connect() as client:
    assert call(client, 'plain') == [(TEXT, 'plain')]
    first, second = call(client, 'hang', 'die')
    assert first[0] == second[0] == AWAY
    assert 'I was told to die | exit status 3' in first[1]
    assert call(client, 'plain')[0][0] == AWAY


@pytest.mark.slow
def test_a_message_without_an_end_is_not_kept():
  with connect() as client:
    began = time.monotonic()
    assert call(client, 'endless', timeout_s=30.0)[0][0] == AWAY
    assert time.monotonic() - began < 20


def test_a_call_that_hangs_is_late_and_others_go_on(client):
  assert call(client, 'hang', 'plain', timeout_s=0.3) == [(LATE, ''), (TEXT, 'plain')]
  assert client.exchange([(-1, 'doIt', {'how': 'hang'}, 60.0)], 0.0) == []
  begun = time.monotonic()
  assert client.exchange([(-2, 'doIt', {'how': 'plain'}, 60.0)], 30.0) == [(-2, TEXT, 'plain')]
  assert time.monotonic() - begun < 20, 'it does not wait for the first'


def test_a_program_that_cannot_be_started_or_says_nothing_of_mcp_has_no_connection():
  with pytest.raises(ConnectionError, match=r'FileNotFoundError: .*no-such-program'):
    McpClient(['no-such-program'], [])
  with pytest.raises(ConnectionError, match=r'Connection closed; bad things \| exit status 7'):
    McpClient([sys.executable, '-c', 'import sys; print("bad things", file=sys.stderr); sys.exit(7)'], [])


def test_an_address_without_a_server_has_no_connection():
  with pytest.raises(ConnectionError, match='ConnectError'):
    McpClient('http://127.0.0.1:9/mcp', [])


def test_close_ends_the_program_and_leaves_no_zombie(tmp_path):
  with connect('late', str(tmp_path / 'pids')) as client:
    assert call(client, 'plain') == [(TEXT, 'plain')]
    pid, child = map(int, (tmp_path / 'pids').read_text().split())
    assert os.getpgid(pid) == os.getpgrp() and is_running(pid)
    threads = threading.active_count()
    os.kill(child, signal.SIGKILL)  # in a run, it ends with the process group of the client
  assert not pathlib.Path(f'/proc/{pid}').exists() and threading.active_count() < threads
