"""The page of rollouts: it asks the API for what it shows, and never reads a text as HTML."""

from __future__ import annotations

import json
import re

import pytest

from ragen_jax.serving import client
from ragen_jax.serving.http.rollout_api import described
from tests.serving.http.test_app import call
from tests.support.endpoint_store import new_rollout
from tests.support.paths import ROOT
from tests.support.scripted import ADMIN, ScriptedEngine, chat, serve
from tests.support.wire import CALL_TAGS, tokenizer

PAGE = (ROOT / 'ragen_jax' / 'serving' / 'http' / 'page.html').read_text(encoding='utf-8')


@pytest.fixture
def server(tmp_path):
  tok = tokenizer(tmp_path / 'tokenizer', CALL_TAGS)
  with serve(tmp_path, ScriptedEngine(tok, lambda prompt, number: '<img src=x onerror=alert(1)>')) as opened:
    yield opened


def test_the_page_needs_no_key_and_holds_no_data(server):
  server.attempt(task='secret task')
  status, headers, raw = call(server, '/', method='GET')
  assert status == 200 and headers['content-type'].startswith('text/html') and raw.decode() == PAGE
  assert 'secret' not in PAGE and ADMIN not in PAGE


def test_no_text_becomes_html():
  assert not re.search('innerHTML|outerHTML|insertAdjacentHTML|document.write|eval', PAGE)
  assert "default-src 'none'" in PAGE and 'http://' not in PAGE and 'https://' not in PAGE


def test_every_field_that_the_page_reads_is_in_the_answers_of_the_api(server):
  task = server.attempt()
  answer = chat(server.client(task), model='policy:writer')
  client.reward(1.0, call=answer.id, of=task)
  listed = json.loads(call(server, '/rollouts?limit=50', key=ADMIN, method='GET')[2])
  one = json.loads(call(server, f'/rollouts/{task.rollout_id}', key=ADMIN, method='GET')[2])
  (attempt,) = one['attempts']
  known = {
    'page': listed, 'r': {**listed['rollouts'][0], **one}, 'a': attempt, 'c': attempt['calls'][0],
    'x': attempt['rewards'][0],
  }  # fmt: skip
  read = re.findall(r'\b(page|r|a|c|x)\.([a-z_]+)\b(?!\()', PAGE)
  assert len(read) > 20
  for name, field in read:
    assert field in known[name], f'{name}.{field}'


def test_a_rollout_is_described_without_its_keys(server):
  record = server.lifecycle.create(new_rollout(key=(987654321, 123456789)))
  text = json.dumps(described(record))
  assert '987654321' not in text and '123456789' not in text
