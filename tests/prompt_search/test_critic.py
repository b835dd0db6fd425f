"""The critic is asked over HTTP: refused and lost requests cost a reply, a wrong address or key is an error."""

from __future__ import annotations

import pytest

from ragen_jax.agent.endpoint_client import EndpointSettings
from ragen_jax.agent.endpoint_speaker import EndpointSpeaker
from ragen_jax.prompt_search.critic import Critic
from ragen_jax.sampling.draw import Sampling
from ragen_jax.utils.errors import UserError
from tests.support.chat_server import good, server

TOO_LONG = (400, {}, '{"error": {"message": "the prompt is too long"}}')


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
  monkeypatch.setenv('NO_PROXY', '*')
  monkeypatch.setenv('OPENAI_API_KEY', 'sk-of-the-environment')


def _critic(url, *, key='sk-own', seed=7):
  settings = EndpointSettings(url, 'writer', 99, 60.0, 2, 1)
  speaker = EndpointSpeaker(settings, Sampling(0.5, 1.0, 0), 0.0, key=key, seed=seed, field='prompt.critic')
  return Critic(speaker, 2)


def _chats(*texts):
  return [[{'role': 'user', 'content': text}] for text in texts]


def _echo(body):
  return good(body['messages'][-1]['content'].upper())


def test_replies_come_in_order_with_the_key_and_the_seed():
  with server([_echo] * 3) as (url, asked):
    assert _critic(url).replies(_chats('a', 'b', 'c')) == ['A', 'B', 'C']
  _, headers, body = asked[0]
  assert headers['Authorization'] == 'Bearer sk-own'
  assert {k: v for k, v in body.items() if k != 'messages'} == {
    'model': 'writer', 'temperature': 0.5, 'max_tokens': 99, 'seed': 7
  }  # fmt: skip


def test_a_server_on_this_machine_is_asked_without_a_proxy(monkeypatch):
  for name in ('NO_PROXY', 'no_proxy'):
    monkeypatch.delenv(name, raising=False)
  for name in ('HTTP_PROXY', 'http_proxy', 'ALL_PROXY'):
    monkeypatch.setenv(name, 'http://127.0.0.1:9')
  with server([_echo]) as (url, asked):
    assert _critic(url).replies(_chats('a')) == ['A']
  assert len(asked) == 1


def test_without_key_and_seed_none_is_sent():
  with server([]) as (url, asked):
    _critic(url, key='', seed=None).replies(_chats('a'))
  assert 'Authorization' not in asked[0][1] and 'seed' not in asked[0][2]


@pytest.mark.parametrize('status', [400, 413, 422])
def test_a_refused_request_costs_one_reply_also_if_it_is_the_first(status):
  refused = (status, *TOO_LONG[1:])
  with server([refused, refused, _echo, _echo]) as (url, asked):
    assert _critic(url).replies(_chats('a', 'b', 'c', 'd')) == [None, None, 'C', 'D']
  assert len(asked) == 4

  def picky(body):
    return refused if body['messages'][-1]['content'] == 'b' else _echo(body)

  with server([picky] * 3) as (url, asked):
    assert _critic(url).replies(_chats('a', 'b', 'c')) == ['A', None, 'C']
  assert len(asked) == 3


def test_a_lost_reply_is_none():
  with server([_echo, (500, {}, 'oops')]) as (url, _):
    critic = _critic(url)
    assert critic.replies(_chats('a')) == ['A'] and critic.replies(_chats('b')) == [None]


@pytest.mark.parametrize('status', [401, 403, 404])
def test_a_wrong_key_or_address_is_an_error(status):
  with server([(status, {}, '{"error": {"message": "no"}}')]) as (url, _), pytest.raises(UserError) as e:
    _critic(url).replies(_chats('a', 'b'))
  assert str(e.value).startswith(f'prompt.critic={url!r}: ') and f'status {status}' in str(e.value)
  with pytest.raises(UserError, match=r"^prompt\.critic='http://127\.0\.0\.1:9/v1': cannot be reached"):
    _critic('http://127.0.0.1:9/v1').replies(_chats('a'))
