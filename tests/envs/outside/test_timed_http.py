"""Requests whose whole exchange has one time limit, wherever a server takes its time."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from ragen_jax.envs.outside.timed_http import make_opener
from tests.support.liars import drip, http_answer, raw_server
from tests.support.stopped_clock import stop_clock


def _request(url, timeout):
  request = urllib.request.Request(url, b'{}', method='POST')
  with make_opener().open(request, timeout=timeout) as response:
    return response.read()


def test_an_answer_in_time_is_read_whole_and_the_socket_is_closed():
  with raw_server(lambda body: [http_answer(b'hello')]) as url:
    request = urllib.request.Request(url, b'{}', method='POST')
    with make_opener().open(request, timeout=60.0) as response:
      stream = response.fp
      assert (response.status, response.read()) == (200, b'hello')
    assert stream.closed and stream.raw._sock.fileno() == -1


@pytest.mark.parametrize('parts', [(drip, b'HTTP/1.1 200 OK\r\nX: ', b'y'), (drip, b'HTTP/1.1 100 Continue\r\n\r\n')])
@pytest.mark.slow_cases('parts1')
def test_the_limit_is_that_of_the_whole_exchange(parts, monkeypatch):
  clock = stop_clock(monkeypatch, 'ragen_jax.envs.outside.timed_http')
  write, *rest = parts

  def answer(body):
    for part in write(*rest):
      yield part
      clock.now += 1.0  # each part comes well within the limit

  with raw_server(answer) as url, pytest.raises(TimeoutError, match='the time of the request is over'):
    _request(url, 60.0)


def test_a_redirect_is_an_error_and_no_second_request():
  asked = []

  def answer(body):
    asked.append(body)
    return [http_answer(b'', 'Location: /other', status='302 Elsewhere')]

  with raw_server(answer) as url, pytest.raises(urllib.error.HTTPError, match='302'):
    _request(url, 60.0)
  assert asked == [{}]
