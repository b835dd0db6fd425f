"""The bodies that the client sends are those that the server reads; others are named."""

from __future__ import annotations

import json
import math
import time

import pytest

from ragen_jax.serving import client, rest
from ragen_jax.serving.lifecycle import Lifecycle
from ragen_jax.serving.pool import task_of
from ragen_jax.serving.records import Invalid, NewRollout
from ragen_jax.serving.store import Store
from ragen_jax.serving.types import AttemptState
from tests.support.endpoint_store import limits, make_call


def test_a_rollout_has_the_limits_that_its_body_leaves_out():
  parsed = rest.parse_rollout({'input': None}, limits(), (1, 2))
  assert parsed == NewRollout('', None, '', 'train', limits(), None, (1, 2))
  body = {
    'input': 1, 'rollout_id': 'a', 'group': 'g', 'mode': 'val', 'metadata': {'m': 1},
    'config': {'timeout_s': 5, 'retry_on': ['timeout']},
  }  # fmt: skip
  parsed = rest.parse_rollout(body, limits(), (1, 2))
  assert parsed.limits == limits(timeout_s=5, retry_on=(AttemptState.TIMEOUT,))
  assert (parsed.input, parsed.rollout_id, parsed.group, parsed.mode, parsed.metadata) == (1, 'a', 'g', 'val', {'m': 1})


@pytest.mark.parametrize(
  ('parse', 'body', 'message'),
  [
    ('rollout', [], r'^body=\[\]; allowed: an object with input, '),
    ('rollout', {}, r'^input is missing; allowed: any JSON value$'),
    ('rollout', {'input': 1, 'grp': 2}, r"^body has the field 'grp'; allowed: input, rollout_id, "),
    ('rollout', {'input': 1, 'config': 3}, r'^config=3; allowed: an object with timeout_s, '),
    ('rollout', {'input': 1, 'config': {'timeout': 3}}, r"^config has the field 'timeout'; allowed: timeout_s, "),
    ('rollout', {'input': 1, 'config': {'retry_on': 'timeout'}}, r"^retry_on='timeout'; allowed: a list$"),
    ('rollout', {'input': 1, 'config': {'retry_on': [[]]}}, r'^retry_on=\[\]; allowed: running, '),
    ('claim', {'wait_s': -1}, r'^wait_s=-1; allowed: seconds from 0$'),
    ('claim', {'wait_s': math.nan}, r'^wait_s=nan; '),
    ('claim', {'wait_s': '1'}, r"^wait_s='1'; "),
    ('reward', {'reward': 1}, r"^body has the field 'reward'; allowed: value, call, agent, name, id$"),
    ('finish', {'state': 'done'}, r"^state='done'; allowed: running, succeeded, "),
    ('finish', {'error': 'x'}, r'^state=None; '),
    ('finish', {'state': 'failed', 'error': 3}, r'^error=3; allowed: a text$'),
  ],
)
def test_bodies_that_are_not_allowed_are_named(parse, body, message):
  arguments = {'rollout': (limits(), (1, 2)), 'claim': (9.0,)}.get(parse, ())
  with pytest.raises(Invalid, match=message) as error:
    getattr(rest, f'parse_{parse}')(body, *arguments)
  assert '\n' not in str(error.value)


def test_a_long_poll_has_a_bound():
  assert rest.parse_claim({}, 9.0) == ('', 0.0)
  assert rest.parse_claim({'worker': 'w', 'wait_s': 1e300}, 9.0) == ('w', 9.0)


def test_client_and_store_understand_one_another(tmp_path, monkeypatch):
  """Every request of the client, handed to the rules as a server would."""
  with Store(tmp_path / 'store.sqlite') as store:
    lifecycle = Lifecycle(store, time.time)

    def answer(url, key, body, patience_s, answer_s):
      body = json.loads(json.dumps(body))
      what = url.rsplit('/', 1)[1]
      if what == 'claim':
        worker, _ = rest.parse_claim(body, 9.0)
        claim = lifecycle.claim(worker)
        return json.loads(json.dumps(rest.claim_json(task_of(claim, 'http://h')))) if claim else None
      attempt_id = lifecycle.authenticate(key, for_reward=what != 'heartbeat').attempt_id
      assert url == f'http://h/attempts/{attempt_id}/{what}'
      if what == 'rewards':
        lifecycle.post_reward(attempt_id, **rest.parse_reward(body))
      elif what == 'finish':
        lifecycle.finish(attempt_id, *rest.parse_finish(body))
      else:
        lifecycle.heartbeat(attempt_id)
      return {}

    monkeypatch.setattr(client, '_post', answer)
    queue = client.Queue('http://h', 'admin', 'w')
    assert queue.claim(0.0) is None
    lifecycle.create(rest.parse_rollout({'input': {'q': 1}, 'rollout_id': 'a'}, limits(), (1, 2)))
    task = queue.claim(0.0)
    assert task.input == {'q': 1} and store.attempt('a.1').worker == 'w'
    store.add_calls([make_call('a.1')], (), 0.0)
    queue.heartbeat(task)
    client.reward(0.5, call='last', name='style', of=task)
    queue.reward(task, 1.0)
    queue.finish(task, 'succeeded', '')
    client.reward(2.0, call=0, of=task)
    assert [(x.value, x.call_id != '', x.name) for x in store.rewards('a.1')] == [
      (0.5, True, 'style'), (1.0, False, ''), (2.0, True, ''),
    ]  # fmt: skip
    shown = json.loads(json.dumps(rest.rollout_json(store.rollout('a'))))
    assert (shown['state'], shown['input'], shown['attempts'], shown['completed']) == ('succeeded', {'q': 1}, 1, 1)
    assert shown['config']['retry_on'] == ['failed', 'timeout', 'unresponsive'] and 'key' not in shown
