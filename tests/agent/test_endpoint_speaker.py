"""The endpoint speaker against a server on this machine that answers well, badly, late, or not at all."""

from __future__ import annotations

import email.utils
import json
import socket
import sys
import time

import openai
import pytest

from ragen_jax.agent.endpoint_client import EndpointSettings
from ragen_jax.agent.endpoint_speaker import EndpointSpeaker
from ragen_jax.agent.episode import TextReply
from ragen_jax.sampling.draw import Sampling
from ragen_jax.utils.errors import UserError
from tests.support.chat_server import good, server
from tests.support.serving import until
from tests.support.stopped_clock import stop_clock

KEY = 'sk-secret-0123'


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
  monkeypatch.setenv('NO_PROXY', '*')
  monkeypatch.setenv('OPENAI_API_KEY', KEY)


def _settings(url, *, max_tokens=64, timeout=60.0, workers=4, tries=3):
  return EndpointSettings(
    endpoint=url, endpoint_model='some-model', endpoint_max_tokens=max_tokens, endpoint_timeout=timeout,
    endpoint_workers=workers, endpoint_tries=tries,
  )  # fmt: skip


def _policy(url, backoff_s=0.01, **changes):
  return EndpointSpeaker(_settings(url, **changes), Sampling(temperature=0.5, top_p=1.0, top_k=0), backoff_s)


def _chats(count):
  return [[{'role': 'system', 'content': 'Play.'}, {'role': 'user', 'content': f'board {i}'}] for i in range(count)]


def _speak(policy, count):
  return policy.replies(_chats(count))


def test_requests_are_chat_completions_and_replies_come_in_order():
  with server([]) as (url, asked):
    policy = _policy(url + '/')
    assert _speak(policy, 9) == [TextReply('Up', 3)] * 9
  assert sorted(body['messages'][1]['content'] for _, _, body in asked) == [f'board {i}' for i in range(9)]
  path, headers, body = asked[0]
  assert path == '/v1/chat/completions' and headers['Authorization'] == f'Bearer {KEY}'
  assert body == {'model': 'some-model', 'messages': _chats(1)[0], 'temperature': 0.5, 'max_tokens': 64}
  assert (policy.asked, policy.lost.total()) == (9, 0)


def test_every_reply_goes_to_the_one_who_asked():
  with server([lambda body: good(body['messages'][1]['content'].upper())] * 20) as (url, _):
    assert [said.text for said in _speak(_policy(url), 20)] == [f'BOARD {i}' for i in range(20)]


def test_without_a_key_and_with_other_settings(monkeypatch):
  monkeypatch.delenv('OPENAI_API_KEY')
  with server([]) as (url, asked):
    sampling = Sampling(temperature=1.0, top_p=0.9, top_k=20)
    _speak(EndpointSpeaker(_settings(url, max_tokens=0, workers=1, tries=1), sampling), 1)
  _, headers, body = asked[0]
  assert 'Authorization' not in headers
  assert {k: v for k, v in body.items() if k != 'messages'} == {
    'model': 'some-model', 'temperature': 1.0, 'top_p': 0.9, 'top_k': 20
  }  # fmt: skip


def test_a_rate_limit_is_waited_for_by_all():
  begun, limited = [], (429, {'Retry-After': '1'}, '{"error": {"message": "slow down"}}')

  def timed(answer):
    return lambda _: (begun.append(time.monotonic()), answer)[1]

  def on_its_way(_):
    begun.append(time.monotonic())
    until(lambda: policy._not_before)  # the other worker has read the limit, however slowly
    return good()

  with server([timed(good()), timed(limited), *[on_its_way] * 19]) as (url, asked):
    policy = _policy(url, workers=2)
    assert _speak(policy, 20) == [TextReply('Up', 3)] * 20
  # But for the one that was on its way, also the other worker's come a second later.
  assert sum(t > begun[1] + 0.9 for t in begun) >= 18
  assert len(asked) == 21 and not policy.lost


def test_retry_after_may_be_a_date_and_more_than_ten_minutes_is_not_waited_for():
  moment = int(time.time() + 1.5)  # to the second
  date = email.utils.formatdate(moment, usegmt=True)
  with server([(503, {'Retry-After': date}, ''), (429, {'Retry-After': '3600'}, '')]) as (url, asked):
    policy = _policy(url, backoff_s=0.0)
    assert _speak(policy, 1)[0].answered is False  # the first try waits for the date, the second has no patience
  assert moment - 0.01 <= time.time() < moment + 60
  assert len(asked) == 2 and 'status 429' in next(iter(policy.lost))


@pytest.mark.parametrize(
  'bad',
  [
    (500, {}, 'oops'), (529, {}, ''), (200, {}, '<html>'), (200, {}, '{}'), (200, {}, '[]'), (200, {}, '[' * 100_000),
    (200, {}, '{"choices": []}'), (200, {}, '{"choices": [{"message": {"content": 5}}]}'), (200, {}, b'\xff\xfe'),
    (200, {'Content-Length': '9999'}, '{'), (200, {}, '{"error": {"message": "busy"}}'), (200, {}, ' ' * (2 << 20)),
    None,
  ],
  ids=str,
)  # fmt: skip
def test_a_bad_answer_is_asked_for_again(bad):
  with server([bad]) as (url, asked):
    policy = _policy(url)
    assert _speak(policy, 1) == [TextReply('Up', 3)]
  assert len(asked) == 2 and not policy.lost


def test_a_late_answer_is_asked_for_again(monkeypatch):
  tries = []

  class Hurried(openai.DefaultHttpxClient):
    def send(self, request, **options):
      limits = request.extensions['timeout']
      tries.append(limits['read'])
      limits['read'] = 0.1 if len(tries) == 1 else limits['read']  # the first request expires
      return super().send(request, **options)

  def late(_):
    until(lambda: len(asked) > 1)
    return good('late')

  monkeypatch.setattr(openai, 'DefaultHttpxClient', Hurried)
  with server([late]) as (url, asked):
    policy = _policy(url)
    assert [said.answered for said in _speak(policy, 1)] == [True]
  assert len(asked) == 2 and not policy.lost and tries == [60.0, 60.0]


def test_a_reply_that_never_comes_is_lost_and_counted(caplog):
  with server([good(), *[(500, {}, 'oops')] * 3]) as (url, asked), caplog.at_level('INFO', 'ragen_jax'):
    policy = _policy(url, workers=1)
    said = _speak(policy, 3)
  assert said == [TextReply('Up', 3), TextReply('', 0, answered=False), TextReply('Up', 3)]
  assert len(asked) == 5 and policy.lost == {'status 500 Internal Server Error: oops': 1} and policy.asked == 3
  assert 'a reply was lost (status 500' in caplog.text


def test_a_request_that_is_wrong_later_on_is_not_repeated():
  with server([good(), (400, {}, '{"error": {"message": "too long"}}')]) as (url, asked):
    policy = _policy(url, workers=1)
    assert [said.answered for said in _speak(policy, 3)] == [True, False, True]
  assert len(asked) == 3 and 'too long' in next(iter(policy.lost))


def test_a_server_that_dies_costs_its_tries_a_few_times_only():
  with server([]) as (url, _):
    policy = _policy(url, tries=2, backoff_s=0.001)
    assert _speak(policy, 2) == [TextReply('Up', 3)] * 2
  said = _speak(policy, 200)
  assert not any(s.answered for s in said) and policy.lost.total() == 200
  assert policy.lost['no longer requested'] >= 200 - 32 - 4


@pytest.mark.parametrize('status', [400, 401, 403, 404, 302])
def test_what_no_waiting_mends_is_told_at_the_first_request(status, caplog):
  said = json.dumps({'error': {'message': f'no,\nnot with {KEY}'}})
  with (
    server([]) as (other, elsewhere),
    server([(status, {'Location': other}, said)]) as (url, asked),
    pytest.raises(UserError) as e,
    caplog.at_level('INFO', 'ragen_jax'),
  ):
    _speak(_policy(url), 5)
  assert str(e.value).startswith(f"eval.endpoint='{url}': {url}/chat/completions answers status {status} ")
  assert str(e.value).endswith(': no, not with ***')
  assert len(asked) == 1 and not elsewhere
  assert KEY not in str(e.value) + caplog.text


@pytest.mark.parametrize('before', [180, 190, 230, 240])
def test_no_part_of_the_key_is_told_where_a_message_is_cut(before, caplog):
  said = json.dumps({'error': {'message': 'x' * before + f' {KEY} is wrong'}})
  with server([good(), (400, {}, said)]) as (url, _), caplog.at_level('INFO', 'ragen_jax'):
    policy = _policy(url, workers=1)
    _speak(policy, 2)
  (reason,) = policy.lost
  assert KEY[:4] not in reason + caplog.text


def test_a_server_that_is_not_there_is_told_in_one_line():
  with socket.socket() as silent:
    silent.bind(('127.0.0.1', 0))  # it does not listen, and nobody else can
    url = f'http://127.0.0.1:{silent.getsockname()[1]}/v1'
    for address in (url, 'http://no-such-host.invalid/v1'):
      with pytest.raises(UserError, match=r'cannot be reached \(.+\)') as e:
        _speak(_policy(address), 2)
      assert '\n' not in str(e.value) and address in str(e.value)


def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(monkeypatch):
  monkeypatch.setenv('OPENAI_API_KEY', 'sk-a\nsk-b')
  with pytest.raises(UserError, match='OPENAI_API_KEY') as e:
    _policy('http://127.0.0.1:1/v1')
  assert 'sk-a' not in str(e.value)


def test_an_answer_that_trickles_in_has_one_limit_for_all_of_it(monkeypatch):
  clock = stop_clock(monkeypatch, 'ragen_jax.agent.endpoint_client')

  def parts():
    yield b' '
    clock.now += 61.0
    yield from [b' '] * 40

  with server([lambda _: (200, {}, parts())]) as (url, asked):
    policy = _policy(url)
    assert _speak(policy, 1) == [TextReply('Up', 3)]
  assert len(asked) == 2


def test_nothing_but_the_key_is_sent_of_what_the_environment_holds(monkeypatch):
  for name in ('OPENAI_ORG_ID', 'OPENAI_PROJECT_ID', 'OPENAI_ADMIN_KEY', 'OPENAI_WEBHOOK_SECRET'):
    monkeypatch.setenv(name, 'of-another-server')
  for key in (KEY, ''):
    monkeypatch.setenv('OPENAI_API_KEY', key)
    with server([]) as (url, asked):
      _speak(_policy(url), 1)
    assert not [value for value in asked[0][1].values() if 'another-server' in value]


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'openai', None)
  install = 'pip install -r requirements-endpoint.txt'
  with pytest.raises(UserError, match=rf"^eval\.endpoint needs the openai package; install it with '{install}'$"):
    _policy('http://127.0.0.1:1/v1')
