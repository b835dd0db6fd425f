"""Environments and endpoints that lie, hang, flood or answer late: each costs an episode, and never a run."""

from __future__ import annotations

import gzip
import json
import logging
import threading

import numpy as np
import pytest

from ragen_jax import envs as registry
from ragen_jax.agent import endpoint_client
from ragen_jax.agent.endpoint_client import EndpointClient, EndpointSettings, RequestError
from ragen_jax.agent.pools import make_pool
from ragen_jax.envs.base import Budget
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.sampling.sampler import Sampling
from tests.support.liars import LIES, ODD, drip, flood, http_answer, raw_server
from tests.support.serving import until

BUDGET = Budget(max_actions_per_turn=1, max_actions=10, max_turns=10)
LIAR = {'class_path': 'tests.support.liars:Liar', 'options': {'notes': []}}


def _pool(kind, options, rows):
  return make_pool(EnvSpec('Liar', registry.make(kind, options), BUDGET, 50, 1), rows, rows)


def _play(pool, actions):
  """Resets a pool and plays one action in each row; returns the rewards."""
  pool.reset(np.full((pool.rows,), 3), np.arange(pool.rows))
  return pool.step([[action] for action in actions])


def test_every_lie_costs_one_episode_and_nothing_else(caplog):
  actions = [*LIES, *ODD]
  pool = _pool('python', LIAR, len(actions))
  for _ in range(2):  # a row that failed plays again
    caplog.clear()
    with caplog.at_level(logging.WARNING):
      rewards, executed, *_ = _play(pool, actions)
    for row, action in enumerate(actions):
      fault = pool.faults.get(row)
      if action in LIES:
        assert fault is not None and fault.kind.startswith(LIES[action][1]), (action, fault)
        assert len(str(fault)) <= 300 and '\n' not in str(fault)
        assert (rewards[row], pool.done[row], pool.success[row]) == ((), True, False)
      else:
        assert fault is None, (action, fault)
        assert (rewards[row], pool.done[row], executed[row], pool.render()[row]) == ((0.0,), False, 1, '?')
    assert all('\n' not in record.getMessage() for record in caplog.records)
  # Each kind of fault is told once.
  assert not caplog.records


def test_a_game_cannot_change_the_options_of_the_others():
  pool = _pool('python', LIAR, 3)
  pool.reset(np.arange(3), np.arange(3))
  assert pool.render() == ['1 notes'] * 3
  assert LIAR['options'] == {'notes': []}


# -- environments behind HTTP ------------------------------------------------------------------------------------------

_GOOD = {'observation': 'go on', 'reward': 0.5, 'done': False, 'success': False}
_CHUNKED = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n'
_FAULT = _CHUNKED.replace(b'200 OK', b'500 Oops')
_MIB = 1 << 20
_HUGE = gzip.compress(b' ' * 100 * _MIB, compresslevel=1)
_CHUNK = b'10000\r\n' + b' ' * 65536 + b'\r\n'


def _episodes(**changes):
  """Answers to all episodes of a request, with changes to each."""
  return lambda body: [http_answer(json.dumps({'episodes': [_GOOD | changes for _ in body['episodes']]}).encode())]


def _body(raw, *headers, status='200 OK'):
  return lambda body: [http_answer(raw, *headers, status=status)]


# A lie -> the answer to a step, and a part of the fault.
CONTENT = {
  'wrong type': (_body(b'[]'), 'TypeError'),
  'no rows': (_body(b'{}'), 'KeyError'),
  'too few rows': (_body(b'{"episodes": []}'), 'another number came back'),
  'rows of another type': (lambda body: [http_answer(json.dumps({'episodes': [5] * len(body['episodes'])}).encode())],
                           'answered no object'),
  'no observation': (_episodes(observation=None), 'observation is not a string'),
  'a long observation': (_episodes(observation='x' * (_MIB + 1)), 'observation is longer than'),
  'no reward': (_episodes(reward=None), 'reward is not a number'),
  'a reward as text': (_episodes(reward='0.5'), 'reward is not a number'),
  'nan': (_episodes(reward=float('nan')), 'reward is not within'),
  'infinity': (_episodes(reward=float('inf')), 'reward is not within'),
  'a huge reward': (_episodes(reward=10**300), 'reward is not within'),
  'a bool as text': (_episodes(done='true'), 'done is not a bool'),
  'no success': (_episodes(done=True, success=None), 'success is not a bool'),
  'another episode': (_episodes(id='that of yesterday'), 'answered another episode'),
  'an error of another type': (_episodes(error={'why': ['x'] * 1000}), 'answered an error'),
  'an error for the terminal': (_episodes(error='\x1b]0;title\x07\x1b[2Jall is well\r'), '?]0;title??[2Jall is well'),
  'a status for the terminal': (_body(b'{}', status='403 \x1b[2JNo'), 'status 403 ?[2JNo'),
  'no JSON': (_body(b'<html>busy</html>'), 'JSONDecodeError'),
  'deep JSON': (_body(b'[' * 100_000), 'RecursionError'),
  'a number of many digits': (_body(b'{"episodes": ' + b'9' * 10_000 + b'}'), 'ValueError'),
  'other bytes than UTF-8': (_body(b'{"episodes": ["\xff\xfe"]}'), 'UnicodeDecodeError'),
  'compressed': (_body(_HUGE, 'Content-Encoding: gzip'), 'UnicodeDecodeError'),
  'nothing': (_body(b'', status='204 No Content'), 'JSONDecodeError'),
  'a fault of the server': (_body(b'{}', status='500 Oops'), 'status 500'),
  'too many requests': (_body(b'{}', 'Retry-After: 100000', status='429 Slow down'), 'status 429'),
  'a redirect to itself': (_body(b'', 'Location: /step', status='302 Round'), 'status 302'),
  'a connection reset': (lambda body: [http_answer(b' ' * 100)[:-50], None], 'got no answer'),
  'no HTTP': (lambda body: [b'SSH-2.0-OpenSSH_9.6\r\n'], 'BadStatusLine'),
  'nothing at all': (lambda body: [], 'RemoteDisconnected'),
  'a flood of a body': (lambda body: flood(_CHUNKED, _CHUNK), 'larger than 1 MiB'),
  'a flood of headers': (lambda body: flood(b'HTTP/1.1 200 OK\r\n', b'X: y\r\n'), 'got more than 100 headers'),
  'a header without an end': (lambda body: flood(b'HTTP/1.1 200 OK\r\nX: ', b'y' * 4096), 'more than 65536 bytes'),
}  # fmt: skip
# A lie -> the answer to a step, which the time limit ends.
LATE = {
  'a body by drops': lambda body: drip(_CHUNKED, b'1\r\n \r\n'),
  'headers by drops': lambda body: drip(b'HTTP/1.1 200 OK\r\nX: ', b'y'),
  'a status by drops': lambda body: drip(b'HTTP/1.1 2', b'0'),
  'promises': lambda body: drip(b'HTTP/1.1 100 Continue\r\n\r\n'),  # Python 3.14.10 takes at most 100
  'silence': lambda body: (part for part in [threading.Event().wait(20) and b'']),
}


def _server_that(lie):
  """Answers resets well, and other requests with the lie."""

  def answer(body):
    resets = 'seed' in body['episodes'][0]
    return _episodes()(body) if resets else lie(body)

  return raw_server(answer)


def _play_over_http(url, **options):
  fields = {'url': url, 'task': 'Lie.', 'retries': 0, 'workers': 1, 'backoff_s': 0.01}
  pool = _pool('http', fields | options, 2)
  rewards, *_ = _play(pool, ['a', 'b'])
  assert rewards == [(), ()] and pool.done.all() and not pool.success.any()
  assert list(pool.faults) == [0, 1]
  assert all(len(str(fault)) <= 300 and str(fault).isprintable() for fault in pool.faults.values())
  return str(pool.faults[0])


@pytest.mark.parametrize('name', CONTENT)
def test_a_server_that_lies_costs_its_episodes(name, monkeypatch):
  monkeypatch.setattr('ragen_jax.envs.outside.timed_http._LARGEST_ANSWER_MIB', 1 if 'flood' in name else 64)
  lie, part = CONTENT[name]
  with _server_that(lie) as url:
    assert part in _play_over_http(url, timeout_s=60.0)


@pytest.mark.parametrize('name', LATE)
def test_a_server_that_is_late_is_left_and_no_thread_stays(name):
  with _server_that(LATE[name]) as url:
    assert 'no whole answer in 0.3 s' in _play_over_http(url, timeout_s=0.3)
    until(lambda: not any(thread.name == 'ragen_jax-step' for thread in threading.enumerate()))


# -- endpoints ---------------------------------------------------------------------------------------------------------


def _reply(content, **changes):
  return _body(json.dumps({'choices': [{'message': {'content': content}}]} | changes).encode())


REPLIES = {
  'no choices': (_body(b'{}'), 'no choices'),
  'a list': (_body(b'[]'), 'no choices'),
  'a number as content': (_reply(5), 'not text but int'),
  'no JSON': (_body(b'hello'), 'JSONDecodeError'),
  'deep JSON': (_body(b'[' * 100_000), 'RecursionError'),
  'other bytes than UTF-8': (_body(b'"\xff"'), 'UnicodeDecodeError'),
  'a long reply': (_reply('x' * _MIB), 'larger than 1 MiB'),
  'a flood': (lambda body: flood(_CHUNKED, _CHUNK), 'larger than 1 MiB'),
  'a flood of an error': (lambda body: flood(_FAULT, _CHUNK), 'larger than 1 MiB'),
  'an error by drops': (lambda body: drip(_FAULT, b'1\r\n \r\n'), 'no answer in 0.5 s'),
  'a reply by drops': (lambda body: drip(_CHUNKED, b'1\r\n \r\n'), 'no answer in 0.5 s'),
  'a small answer that is huge': (_body(_HUGE, 'Content-Encoding: gzip'), 'is compressed'),
  'a small error that is huge': (_body(_HUGE, 'Content-Encoding: gzip', status='500 Oops'),
                                 'is compressed'),
  'nothing': (_body(b'', status='204 No Content'), 'JSONDecodeError'),
  'a redirect': (_body(b'', 'Location: /v1/chat/completions', status='307 Round'), 'status 307'),
  'a connection reset': (lambda body: [http_answer(b' ' * 100)[:-50], None], 'Error'),
}  # fmt: skip


@pytest.mark.parametrize('name', REPLIES)
def test_an_endpoint_that_lies_costs_a_reply(name):
  lie, part = REPLIES[name]
  seconds = 0.5 if 'drops' in name else 60.0
  with raw_server(lie) as url:
    settings = EndpointSettings(url, 'm', 0, seconds, 1, 1)
    client = EndpointClient(settings, Sampling(temperature=1.0, top_p=1.0, top_k=0), 'sk-hidden', None, 'eval.endpoint')
    with pytest.raises(RequestError) as e:
      client.request([{'role': 'user', 'content': 'x'}])
  assert part in str(e.value) and len(str(e.value)) < 400 and 'sk-hidden' not in str(e.value)
  assert endpoint_client._LARGEST_ANSWER == _MIB
