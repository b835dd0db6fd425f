"""Environments on a server, against the same game played by plain loops, and everything that a server can do wrong."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import logging
import threading
import time
import types

import pytest
from ml_collections import ConfigDict

from ragen_jax import envs as registry
from ragen_jax.envs.outside.base import TextStep, read_observation, read_step
from ragen_jax.utils.threads import Fault
from tests.support.environments import raises_one_line
from tests.support.serving import until
from tests.support.stopped_clock import stop_clock
from tests.support.text_games import Climb, by_hand, by_session

SERVER = {'url': 'http://localhost:1', 'task': 'Climb.'}


class Server(http.server.ThreadingHTTPServer):
  """Climb behind the protocol. `trouble` is asked before and after each request and may do something else."""

  daemon_threads = True

  def __init__(self):
    super().__init__(('127.0.0.1', 0), Handler)
    self.games, self.requests, self.executed, self.closed = {}, [], [], []
    self.trouble = lambda when, path, number: None
    self.lock = threading.Lock()
    self.url = f'http://127.0.0.1:{self.server_address[1]}/games'

  def handle_error(self, request, client_address):
    """Broken connections are what some tests are about."""

  def answer(self, path, body):
    episodes = []
    for item in body['episodes']:
      if path == '/games/reset':
        game = self.games[item['id']] = [Climb(**body['options']), {}]
        episodes.append({'observation': game[0].reset(item['seed'], item['member'])})
      elif path == '/games/step':
        game, told = self.games[item['id']]
        if item['step'] not in told:
          self.executed.append((item['id'], item['step']))
          observation, reward, done, info = game.step(item['action'])
          told[item['step']] = {'observation': observation, 'reward': reward, 'done': done, **info}
        episodes.append(told[item['step']])
      else:
        self.closed.append(item['id'])
        del self.games[item['id']]
    return {'episodes': episodes}


class Handler(http.server.BaseHTTPRequestHandler):
  def log_message(self, *arguments):
    """Quiet."""

  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
    server = self.server
    with server.lock:
      server.requests.append((self.path, len(body['episodes'])))
      number = len(server.requests)
    if server.trouble('before', self.path, number) is not None:
      return self.reply(*server.trouble('before', self.path, number))
    with server.lock:
      answer = json.dumps(server.answer(self.path, body)).encode()
    other = server.trouble('after', self.path, number)
    return self.reply(200, answer) if other is None else self.reply(*other)

  def reply(self, status, data):
    if status == 0:  # hangs up
      self.close_connection = True
      return
    self.send_response(status)
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    self.wfile.write(data)


@pytest.fixture
def server():
  with Server() as server:
    thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


def connect(server, **options):
  fields = {'url': server.url, 'task': 'Climb.', 'action_names': ['Up', 'Down'], 'options': ConfigDict({'rungs': 6})}
  return registry.make('http', fields | {'timeout_s': 60.0, 'backoff_s': 0.01} | options)


SEEDS, MEMBERS = [3, 3, 4, 4], [0, 1, 0, 1]


@pytest.mark.parametrize(('batch_size', 'requests'), [(64, 1), (3, 2), (1, 4)])
def test_a_server_plays_as_its_game_does_by_hand(server, batch_size, requests):
  env = connect(server, batch_size=batch_size, workers=2)
  session = env.open(4)
  assert by_session(session, SEEDS, MEMBERS) == by_hand(6, SEEDS, MEMBERS)
  assert [path for path, _ in server.requests].count('/games/reset') == requests
  assert sum(n for path, n in server.requests if path == '/games/reset') == 4
  assert len(server.games) == 4
  session.end()
  assert not server.games and len(server.closed) == 4
  session.end()  # there is nothing left to close
  assert len(server.closed) == 4
  # A reset closes what was left open.
  session.reset(range(4), SEEDS, MEMBERS)
  session.reset(range(4), SEEDS, MEMBERS)
  assert len(server.games) == 4 and len(server.closed) == 8


# -- what can go wrong -------------------------------------------------------------------------------------------------


TROUBLES = {
  'the server is busy': ('before', lambda: (503, b'busy')),
  'too many requests': ('before', lambda: (429, b'')),
  'it has an error of its own': ('before', lambda: (500, b'oops')),
  'it hangs up': ('before', lambda: (0, b'')),
  'the answer is lost': ('after', lambda: (0, b'')),
  'the answer is no JSON': ('after', lambda: (200, b'<html>')),
  'the answer is no object': ('after', lambda: (200, b'[1]')),
  'the answer is too short': ('after', lambda: (200, b'{"episodes": []}')),
}


@pytest.mark.parametrize('name', TROUBLES)
def test_a_request_is_tried_again_and_no_action_is_carried_out_twice(server, name):
  when, trouble = TROUBLES[name]
  # Of two requests the first goes wrong, in each pair.
  server.trouble = lambda now, path, number: trouble() if now == when and number % 2 else None
  _check_that_every_action_takes_two_requests(server, connect(server, retries=1).open(4))


def test_an_answer_that_is_too_late_is_asked_for_again_and_no_action_is_carried_out_twice(server):
  def late(now, path, number):
    if now == 'after' and number % 2:
      until(lambda: len(server.requests) > number)

  server.trouble = late
  session, tries = connect(server, retries=1).open(4), itertools.count(1)
  opener = session._requests._opener

  def open_(request, timeout):
    assert timeout == 60.0
    return opener.open(request, timeout=0.1 if next(tries) % 2 else timeout)  # the first of two requests expires

  vars(session._requests)['_opener'] = types.SimpleNamespace(open=open_)
  _check_that_every_action_takes_two_requests(server, session)


def _check_that_every_action_takes_two_requests(server, session):
  assert by_session(session, SEEDS, MEMBERS) == by_hand(6, SEEDS, MEMBERS)
  expected = sum(len(row) - 1 for row in by_hand(6, SEEDS, MEMBERS))
  assert len(server.executed) == len(set(server.executed)) == expected
  assert len(server.requests) >= 2 * (1 + max(len(row) for row in by_hand(6, SEEDS, MEMBERS)) - 1)


def test_tries_are_counted_and_what_is_refused_is_not_tried_again(server):
  server.trouble = lambda now, path, number: (503, b'') if now == 'before' else None
  faults = connect(server, retries=2).open(3).reset(range(3), [1, 2, 3], [0] * 3)
  assert len(server.requests) == 3 and len(set(faults)) == 1
  assert str(faults[0]) == f'reset got no answer: {server.url}/reset: status 503 Service Unavailable, 3 tries'
  server.trouble = lambda now, path, number: (404, b'') if now == 'before' else None
  faults = connect(server, retries=2).open(3).reset(range(3), [1, 2, 3], [0] * 3)
  assert len(server.requests) == 4
  assert str(faults[0]) == f'reset got no answer: {server.url}/reset: status 404 Not Found'


def test_the_waits_between_tries_double(server, monkeypatch):
  waits = []
  stop_clock(monkeypatch, 'ragen_jax.envs.outside.timed_http', sleep=waits.append)
  server.trouble = lambda now, path, number: (503, b'') if now == 'before' else None
  connect(server, retries=8, backoff_s=0.5).open(1).reset([0], [1], [0])
  assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_dead_server_costs_its_tries_once_and_one_that_is_back_is_used(server):
  session = connect(server, batch_size=1, workers=1, retries=1).open(4)
  dead = True
  server.trouble = lambda now, path, number: (0, b'') if now == 'before' and dead else None
  faults = session.reset(range(4), SEEDS, MEMBERS)
  assert len(server.requests) == 2 and {f.kind for f in faults} == {'reset got no answer'}
  dead = False
  assert by_session(session, SEEDS, MEMBERS) == by_hand(6, SEEDS, MEMBERS)
  assert not server.closed  # those that never began need no end


def test_three_requests_that_fail_end_a_batch_as_with_other_servers(server):
  session = connect(server, batch_size=1, workers=1, retries=0).open(5)
  server.trouble = lambda now, path, number: (404, b'') if now == 'before' and number != 2 else None
  outcomes = session.reset(range(5), [1, 2, 3, 4, 5], [0] * 5)
  assert [isinstance(outcome, Fault) for outcome in outcomes] == [True, False, True, True, True]
  assert len(server.requests) == 4


def test_a_server_that_trickles_is_cut_off(server, monkeypatch):
  clock, sent = stop_clock(monkeypatch, 'ragen_jax.envs.outside.timed_http'), []

  def trickle(now, path, number):
    return (200, SlowBytes()) if now == 'after' else None

  class SlowBytes(bytes):
    def __len__(self):
      return 6000

  server.trouble = trickle
  original = Handler.reply

  def reply(handler, status, data):
    if not isinstance(data, SlowBytes):
      return original(handler, status, data)
    handler.send_response(200)
    handler.send_header('Content-Length', '6000')
    handler.end_headers()
    with contextlib.suppress(OSError):
      for _ in range(6000):  # a minute of them
        handler.wfile.write(b' ')
        handler.wfile.flush()
        clock.now += 0.0 if sent else 61.0
        sent.append(1)
        time.sleep(0.01)

  Handler.reply = reply
  try:
    fault = connect(server, retries=0, timeout_s=60.0).open(1).reset([0], [1], [0])[0]
    assert 'no whole answer in 60 s' in str(fault) and len(sent) < 6000
  finally:
    Handler.reply = original


def test_an_answer_that_is_too_large_is_not_read_to_its_end(server, monkeypatch):
  monkeypatch.setattr('ragen_jax.envs.outside.timed_http._LARGEST_ANSWER_MIB', 1)
  server.trouble = lambda now, path, number: (200, b' ' * (1 << 21)) if now == 'after' else None
  fault = connect(server, retries=3).open(1).reset([0], [1], [0])[0]
  assert str(fault).endswith('/reset: the answer is larger than 1 MiB') and len(server.requests) == 1


def test_episodes_that_cannot_be_closed_are_logged_once(server, caplog):
  server.trouble = lambda now, path, number: (404, b'') if now == 'before' and path.endswith('close') else None
  session = connect(server).open(2)
  with caplog.at_level(logging.WARNING):
    for _ in range(3):
      session.reset([0, 1], [3, 3], [0, 1])
  (message,) = [r.getMessage() for r in caplog.records]
  assert message.startswith('http: 2 episodes may stay open on the server (logged once): close got no answer: ')


def test_one_episode_s_error_is_its_own(server):
  def answer(path, body):
    good = {'observation': 'x', 'reward': 1.0, 'done': False}
    return {'episodes': [{'error': 'no\nmap'}, 7, good, good | {'reward': float('nan')}, good | {'observation': None}]}

  server.answer = answer
  session = connect(server).open(5)
  texts = [read_observation(t) for t in session.reset(range(5), [1] * 5, [0] * 5)]
  assert [str(t) for t in texts] == [
    'reset answered an error: no map', 'reset answered no object: 7', 'x', 'x', 'observation is not a string: None',
  ]  # fmt: skip
  steps = [read_step(r) for r in session.step(range(5), ['Up'] * 5)]
  assert [str(s) for s in steps[:2]] == ['step answered an error: no map', 'step answered no object: 7']
  assert steps[2] == TextStep('x', 1.0, False, False)
  assert [s.kind for s in steps[3:]] == ['reward is not within 1e+15', 'observation is not a string']


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'task': 'x'}, r"url=''; allowed: 'http://"),
    (SERVER | {'url': 'file:///etc'}, r"url='file:///etc'; allowed: 'http://"),
    (
      SERVER | {'url': 'http://me:word@host/'},
      '^http: url has a user name or a password, .*; allowed: none$',
    ),
    (SERVER | {'task': ''}, r"task=''; allowed: text"),
    (SERVER | {'retries': -1}, r'retries=-1; allowed: whole numbers from 0'),
    (SERVER | {'batch_size': 0}, r'batch_size=0; allowed: whole numbers from 1'),
    (SERVER | {'timeout_s': float('inf')}, r'timeout_s=inf; allowed: seconds'),
    (SERVER | {'options': {'x': float('nan')}}, r'options=.*; allowed: what JSON can say'),
    (SERVER | {'symbols': {'#': 3}}, r'symbols=.*; allowed: texts by symbol'),
  ],
)
def test_wrong_options_are_named_in_one_line(options, message):
  with raises_one_line(message):
    registry.make('http', options)


def test_an_answer_may_have_metrics(server, monkeypatch):
  monkeypatch.setattr(Climb, 'step', lambda self, action: ('x', 0.5, False, {'metrics': {'f1': 0.25, 'hits': 2}}))
  session = connect(server).open(2)
  session.reset([0, 1], [3, 3], [0, 1])
  steps = [read_step(raw) for raw in session.step([0, 1], ['Up', 'Down'])]
  assert [step.metrics for step in steps] == [{'f1': 0.25, 'hits': 2.0}] * 2
