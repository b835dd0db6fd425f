"""The whole server with a small model: OpenAI's client samples the policy, through pauses, new weights and restarts."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import threading
import urllib.parse

import numpy as np
import pytest
from openai import AsyncOpenAI, OpenAI

from ragen_jax import build, build_agents
from ragen_jax.agent.language_model import param_state
from ragen_jax.serving.agent_server import ADMIN_KEY, LOCAL_WORKER
from ragen_jax.serving.open_server import open_server, read_admin_key
from ragen_jax.serving.rollouts.records import task_of
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.serving.types import AttemptState, Finish, RolloutState
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config
from tests.support.endpoint_store import new_rollout
from tests.support.serving import PATIENCE, until

ASK = [{'role': 'user', 'content': 'What now?'}]


def _config(**changes):
  given = dict(
    model__preset='tiny', serve__port=0, serve__slots=4, serve__grace=0.0, agent__max_context=256,
    agent__max_response_tokens=32, agent__decode_chunk=4, train__temperature=1.0, eval__temperature=1.0,
  )  # fmt: skip
  return small_config(**given | changes)


@pytest.fixture(scope='module')
def policy():
  return build.load_policy(_config())


@pytest.fixture(scope='module')
def server(policy, tmp_path_factory):
  settings = build_agents.server_settings(_config(), policy, trains=False)
  with open_server(settings, policy, param_state(policy.model), 2, str(tmp_path_factory.mktemp('run'))) as opened:
    yield opened


def begin(server, worker='w', **rollout):
  server.lifecycle.create(new_rollout(**rollout))
  return task_of(server.lifecycle.claim(worker), server.url)


def client_of(task):
  return OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0, timeout=PATIENCE)


def chat(client, **changes):
  return client.chat.completions.create(**dict(model='policy', messages=ASK) | changes)


@pytest.mark.slow
def test_one_seed_gives_one_reply_however_it_is_asked_for(server, policy):
  task = begin(server, mode='val')
  options = dict(seed=11, extra_body={'return_token_ids': True}, logprobs=True, top_logprobs=3)
  whole = chat(client_of(task), **options)

  async def ask():
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
      return await client.chat.completions.create(model='policy', messages=ASK, **options)

  other = asyncio.run(ask())
  chunks = list(chat(client_of(task), stream=True, stream_options={'include_usage': True}, **options))
  told = [c.choices[0] for c in chunks if c.choices]
  assert whole.choices[0].message.content == other.choices[0].message.content
  assert ''.join(c.delta.content or '' for c in told) == whole.choices[0].message.content
  ids = whole.choices[0].token_ids
  assert ids == other.choices[0].token_ids == [i for c in told for i in getattr(c, 'token_ids', None) or ()]
  assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == len(ids)
  logprobs = [[x.logprob for x in a.choices[0].logprobs.content] for a in (whole, other)]
  np.testing.assert_allclose(logprobs[0], logprobs[1], atol=1e-4)
  assert chat(client_of(task), seed=12, extra_body={'return_token_ids': True}).choices[0].token_ids != ids
  stored = server.lifecycle.store.ask(Tables.calls, task.attempt_id)
  assert [list(c.generated.ids) for c in stored[:3]] == [ids] * 3
  assert policy.tokenizer.decode(stored[0].context).endswith('<|im_start|>assistant\n')


@pytest.mark.slow
def test_three_replies_differ_and_share_their_prompt(server):
  task = begin(server)
  before = server.engine.stats()
  answer = chat(client_of(task), n=3)
  after = server.engine.stats()
  stored = server.lifecycle.store.ask(Tables.calls, task.attempt_id)
  assert len({c.generated.ids for c in stored}) == 3 == len(answer.choices)
  prompt = answer.usage.prompt_tokens
  assert after.fed_tokens - before.fed_tokens < 2 * prompt < after.prompt_tokens - before.prompt_tokens


@pytest.mark.slow
def test_a_conversation_feeds_only_what_is_new(server):
  task = begin(server)
  client = client_of(task)
  first = chat(client, max_tokens=6)
  said = [*ASK, {'role': 'assistant', 'content': first.choices[0].message.content}, {'role': 'user', 'content': 'And?'}]
  second = chat(client, messages=said, max_tokens=6)
  calls = server.lifecycle.store.ask(Tables.calls, task.attempt_id)
  assert [c.row for c in calls] == [0, 0]
  expected = first.usage.prompt_tokens + first.usage.completion_tokens - 1
  assert second.usage.prompt_tokens_details.cached_tokens >= expected - 1


@pytest.mark.slow
def test_requests_are_held_during_an_update_and_get_the_new_weights(server, policy):
  server.engine.pause(drain=True)
  task, found = begin(server), []
  thread = threading.Thread(target=lambda: found.append(chat(client_of(task))))
  thread.start()
  until(lambda: server.engine.stats().queued)
  server.engine.set_weights(param_state(policy.model), version=5, keep_cache=False)
  server.engine.resume()
  thread.join(PATIENCE)
  assert found[0].policy_version == 5
  assert set(server.lifecycle.store.ask(Tables.calls, task.attempt_id)[0].generated.versions.tolist()) == {5}


@pytest.mark.slow
def test_a_client_that_goes_away_frees_its_place(server):
  server.engine.pause(drain=True)
  try:
    task = begin(server)
    url = urllib.parse.urlsplit(task.base_url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=PATIENCE)
    headers = {'Authorization': f'Bearer {task.api_key}'}
    connection.request(
      'POST', f'{url.path}/chat/completions', json.dumps({'model': 'policy', 'messages': ASK}), headers
    )
    until(lambda: server.engine.stats().queued)
    connection.close()
    until(lambda: not server.engine.stats().queued)
    until(lambda: server.lifecycle.store.ask(Tables.calls, task.attempt_id))
  finally:
    server.engine.resume()
  (stored,) = server.lifecycle.store.ask(Tables.calls, task.attempt_id)
  assert stored.generated.finish == Finish.ABORTED and stored.generated.ids == ()


@pytest.mark.slow
def test_a_session_is_dropped_on_the_event_loop_whichever_thread_ends_its_attempt(server, monkeypatch):
  threads, drop = [], server.service.forget

  def forget(attempt_id):
    drop(attempt_id)
    threads.append((attempt_id, threading.current_thread().name))

  monkeypatch.setattr(server.service, 'forget', forget)
  tasks = [begin(server), begin(server)]
  for task in tasks:
    chat(client_of(task), max_tokens=2)
  known = server.service.sessions
  for task in tasks:
    server.lifecycle.finish(task.attempt_id, AttemptState.SUCCEEDED, '')
  until(lambda: len(threads) == 2)
  assert threads == [(task.attempt_id, 'ragen_jax-http') for task in tasks]
  assert server.service.sessions == known - 2


@pytest.mark.slow
def test_after_a_restart_local_attempts_are_played_again_and_others_go_on(policy, tmp_path):
  settings = build_agents.server_settings(_config(), policy, trains=False)
  params = param_state(policy.model)
  with open_server(settings, policy, params, 0, str(tmp_path)) as server:
    local, remote = begin(server, LOCAL_WORKER), begin(server, 'elsewhere')
    first = chat(client_of(remote), max_tokens=5)
  with open_server(settings, policy, params, 0, str(tmp_path)) as server:
    store = server.lifecycle.store
    assert store.ask(Tables.rollout, local.rollout_id).state == RolloutState.QUEUED
    client = OpenAI(base_url=f'{server.url}/v1', api_key=remote.api_key, max_retries=0)
    text = first.choices[0].message.content
    chat(client, messages=[*ASK, {'role': 'assistant', 'content': text}, {'role': 'user', 'content': 'a'}])
    assert [c.row for c in store.ask(Tables.calls, remote.attempt_id)] == [0, 0]


@pytest.mark.parametrize('key', ['short', 'has a space in its middle', 'not ASCII: é, but long'])
def test_admin_keys_that_are_refused(monkeypatch, key):
  monkeypatch.setenv(ADMIN_KEY, key)
  with pytest.raises(UserError, match=f'{ADMIN_KEY} must have at least 16 printable ASCII characters') as e:
    read_admin_key('127.0.0.1')
  assert key not in str(e.value)


def test_the_admin_key(monkeypatch):
  monkeypatch.delenv(ADMIN_KEY, raising=False)
  assert len(read_admin_key('127.0.0.1')) >= 32 and read_admin_key('::1') != read_admin_key('::1')
  with pytest.raises(UserError, match=r"serve\.host='0\.0\.0\.0': other machines can reach it, so RAGEN_ADMIN_KEY"):
    read_admin_key('0.0.0.0')
  monkeypatch.setenv(ADMIN_KEY, ' a-key-of-16-chars\n')
  assert read_admin_key('0.0.0.0') == 'a-key-of-16-chars'


def test_open_access_is_for_this_machine_only(policy, tmp_path, monkeypatch):
  monkeypatch.setenv(ADMIN_KEY, 'a-key-of-16-chars')
  settings = dataclasses.replace(build_agents.server_settings(_config(), policy, trains=False), host='0.0.0.0')
  opened = open_server(settings, policy, param_state(policy.model), 0, str(tmp_path))
  with pytest.raises(UserError, match=r'calls without a key are allowed on 127\.0\.0\.1 only'), opened:
    pass
