"""The rollout API over HTTP: rollouts are created, claimed, rewarded, finished and listed."""

from __future__ import annotations

import json
import math
import threading

import pytest

from ragen_jax.serving import client
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.serving.types import AttemptState, RolloutState
from tests.serving.http.test_app import call
from tests.support.scripted import ADMIN, ScriptedEngine, chat, serve
from tests.support.serving import PATIENCE, until


def ask(server, path, body=None, *, key=ADMIN, method=None):
  """Status and JSON of a request."""
  status, _, raw = call(server, path, body, key, method or ('GET' if body is None else 'POST'))
  return status, json.loads(raw)


def test_a_rollout_from_its_creation_to_its_rewards(server):
  new = {
    'rollout_id': 'r1', 'input': {'q': 'é'}, 'group': 'g', 'limits': {'timeout_s': 5, 'max_attempts': 2},
    'metadata': [1],
  }  # fmt: skip
  status, created = ask(server, '/rollouts', new)
  assert status == 200 and created['state'] == 'queued' and created['input'] == {'q': 'é'}
  assert ask(server, '/rollouts', new) == (200, created), 'the same request again'
  assert ask(server, '/rollouts', new | {'input': 2})[0] == 409
  queue = client.Queue(server.url, ADMIN, 'w')
  task = queue.claim(0.0)
  assert (task.rollout_id, task.input, task.group, task.timeout_s) == ('r1', {'q': 'é'}, 'g', 5)
  assert queue.claim(0.0) is None
  first, second = chat(server.client(task)), chat(server.client(task))
  client.reward(0.5, call=first.id, of=task)
  client.reward(0.25, call='last', name='late', of=task)
  client.finish(of=task)
  client.finish(of=task)  # again
  client.reward(1.0, of=task)  # late, for the whole episode
  got = [(r.value, r.call_id, r.name) for r in server.store.ask(Tables.rewards, task.attempt_id)]
  assert got == [(0.5, first.id, ''), (0.25, second.id, 'late'), (1.0, '', '')]
  status, told = ask(server, '/rollouts/r1')
  (attempt,) = told['attempts']
  assert told['state'] == 'succeeded' and attempt['worker'] == 'w' and len(attempt['calls']) == 2
  assert attempt['calls'][1]['text'] == 'answer 1' and attempt['rewards'][0]['call_id'] == first.id
  assert task.api_key not in str(told)
  assert server.service.sessions == 0, 'the session of a finished attempt is dropped'


def test_rollouts_get_the_prompt_of_the_server_unless_they_have_one(tmp_path, tok):
  given = {'a': None, 'b': {'x': 1}, 'c': {'prompt': 'own'}, 'd': {'prompt': ''}, 'e': [1]}
  with serve(tmp_path, ScriptedEngine(tok, lambda prompt, number: ''), prompt='Be brief.') as server:
    for name, metadata in given.items():
      for _ in range(2):  # the same request again is the same rollout
        status, told = ask(server, '/rollouts', {'input': 1, 'rollout_id': name, 'metadata': metadata})
        assert status == 200
    queue = client.Queue(server.url, ADMIN)
    tasks = {task.rollout_id: task.prompt for task in (queue.claim(0.0) for _ in given)}
    assert tasks == {'a': 'Be brief.', 'b': 'Be brief.', 'c': 'own', 'd': '', 'e': ''}
    assert server.store.ask(Tables.rollout, 'b').metadata == {'x': 1, 'prompt': 'Be brief.'} and told['metadata'] == [1]


def test_a_repeated_request_is_the_same_after_the_prompt_of_the_server_has_changed(tmp_path, tok):
  new = {'input': 1, 'rollout_id': 'a', 'metadata': {'x': 1}}
  for prompt in ('Be brief.', 'Be kind.', ''):
    with serve(tmp_path, ScriptedEngine(tok, lambda prompt, number: ''), prompt=prompt) as server:
      status, told = ask(server, '/rollouts', new)
      assert (status, told['metadata']) == (200, {'x': 1, 'prompt': 'Be brief.'})
      assert ask(server, '/rollouts', new | {'metadata': told['metadata']})[0] == 409


@pytest.mark.parametrize('field', ['id', 'name', 'agent'])
def test_texts_of_rewards_are_texts(server, field):
  task = server.attempt()
  for value in (0, False, [], {}):  # a 0 must not count as no id: the reward would count again when it is repeated
    body = {'value': 1.0, field: value}
    assert ask(server, f'/attempts/{task.attempt_id}/rewards', body, key=task.api_key)[0] == 400
  assert not server.store.ask(Tables.rewards, task.attempt_id)


def test_a_closed_rollout_takes_no_reward(server):
  task = server.attempt(rollout_id='r')
  server.lifecycle.finish(task.attempt_id, AttemptState.SUCCEEDED, '')
  server.store.close_rollouts(['r'], 1.0)
  with pytest.raises(client.Over):
    client.reward(1.0, of=task)


def test_a_worker_waits_for_a_rollout_without_a_thread_of_the_server(server):
  queue, found = client.Queue(server.url, ADMIN, 'w'), []
  task = server.attempt()  # before anybody else could claim it
  waiting = [threading.Thread(target=lambda: found.append(queue.claim(60.0))) for _ in range(12)]
  for thread in waiting:
    thread.start()
  until(lambda: len(server.lifecycle.changes.listeners) == len(waiting))
  # More workers wait than the server has threads, and calls go on.
  assert chat(server.client(task)).id
  for k in range(12):
    ask(server, '/rollouts', {'input': k})
  for thread in waiting:
    thread.join(PATIENCE)
  assert sorted(t.input for t in found) == list(range(12)) and not server.lifecycle.changes.listeners


def test_workers_that_wait_are_let_go_when_the_server_stops(tmp_path, tok, caplog):
  found = []
  with serve(tmp_path, ScriptedEngine(tok, lambda prompt, number: '')) as server:
    queue = client.Queue(server.url, ADMIN, 'w')
    thread = threading.Thread(target=lambda: found.append(queue.claim(50.0)))
    thread.start()
    until(lambda: server.lifecycle.changes.listeners)
  thread.join(PATIENCE)
  assert found == [None] and not caplog.records


def test_a_worker_plays_what_it_claims(server):
  for k in (2, 3):
    ask(server, '/rollouts', {'input': k, 'rollout_id': f'r{k}'})
  assert client.work(lambda task: task.input / 2, server.url, ADMIN, wait_s=0.0, max_tasks=2) == 2
  assert [server.store.ask(Tables.rewards, f'r{k}.1')[0].value for k in (2, 3)] == [1.0, 1.5]
  assert {r.state for r in server.store.ask(Tables.completed, 0, 9)} == {RolloutState.SUCCEEDED}


def test_failures_are_retried_and_cancelled_rollouts_are_over(server):
  limits = {'max_attempts': 2, 'retry_on': ['failed']}
  ask(server, '/rollouts', {'input': 1, 'rollout_id': 'r', 'limits': limits})
  queue = client.Queue(server.url, ADMIN)
  task = queue.claim(0.0)
  client.finish('failed', 'it broke', of=task)
  again = queue.claim(0.0)
  assert again.number == 2 and again.api_key != task.api_key
  with pytest.raises(client.Over):
    client.reward(1.0, of=task)
  assert ask(server, '/rollouts/r/cancel', {})[1]['state'] == 'cancelled'
  with pytest.raises(client.Over):
    queue.heartbeat(again)
  assert ask(server, '/rollouts/r')[1]['attempts'][1]['state'] == 'cancelled'


def test_heartbeats(server):
  task = server.attempt()
  before = server.store.ask(Tables.attempt, task.attempt_id).last_heartbeat
  queue = client.Queue(server.url, ADMIN)
  queue.heartbeat(task)
  assert 0 < queue.time_left(task) <= task.timeout_s
  assert server.store.ask(Tables.attempt, task.attempt_id).last_heartbeat > before


def test_lists_by_creation_and_by_their_end(server):
  for k in range(5):
    ask(server, '/rollouts', {'input': k, 'rollout_id': f'r{k}'})
  _, page = ask(server, '/rollouts?limit=2')
  assert [r['rollout_id'] for r in page['rollouts']] == ['r4', 'r3'] and page['counts']['queued'] == 5 == sum(
    page['counts'].values()
  )
  _, page = ask(server, f'/rollouts?limit=2&before={page["before"]}')
  assert [r['rollout_id'] for r in page['rollouts']] == ['r2', 'r1']
  for _ in range(3):
    client.finish(of=client.Queue(server.url, ADMIN).claim(0.0))
  _, page = ask(server, '/rollouts?after=0&limit=2')
  assert [r['rollout_id'] for r in page['rollouts']] == ['r0', 'r1']
  _, page = ask(server, f'/rollouts?after={page["after"]}')
  assert [r['rollout_id'] for r in page['rollouts']] == ['r2']
  assert ask(server, f'/rollouts?after={page["after"]}')[1]['rollouts'] == []


_WRONG = [
  ('/rollouts', {'inputs': 1}, "'inputs': there is no such field"),
  ('/rollouts', {'limits': 3}, 'limits: must be an object'),
  ('/rollouts', {'limits': {'timeout': 1}}, "'timeout': there is no such field"),
  ('/rollouts', {'limits': {'timeout_s': 'x'}}, "timeout_s='x'"),
  ('/rollouts', {'limits': {'retry_on': 'failed'}}, 'limits.retry_on: must be a list'),
  ('/rollouts', {'limits': {'retry_on': [[]]}}, 'retry_on='),
  ('/rollouts', {'mode': 'play'}, "mode='play'"),
  ('/rollouts', {'rollout_id': 5}, 'rollout_id=5'),
  ('/rollouts', {'rollout_id': 'a/b'}, "rollout_id='a/b'"),
  ('/rollouts', {'rollout_id': []}, 'rollout_id='),
  ('/rollouts', {'group': 5}, 'group=5'),
  ('/rollouts/claim', {'wait_s': -1}, 'wait_s=-1'),
  ('/rollouts/claim', {'wait_s': 'x'}, "wait_s='x'"),
  ('/rollouts/claim', {'worker': 5}, 'worker=5'),
  ('/rollouts/claim', {'wait': 5}, "'wait': there is no such field; allowed: wait_s, worker"),
  ('/rollouts/none/cancel', {'reason': ''}, "'reason': there is no such field; allowed: none"),
  ('/attempts/{a}/heartbeat', {'left_s': 1}, "'left_s': there is no such field; allowed: none"),
  ('/attempts/{a}/rewards', {}, 'value is missing'),
  ('/attempts/{a}/rewards', {'value': '1'}, "value='1'"),
  ('/attempts/{a}/rewards', {'value': 1, 'call': {}}, 'call='),
  ('/attempts/{a}/rewards', {'value': 1, 'points': 2}, "'points': there is no such field"),
  ('/attempts/{a}/rewards', {'value': 1, 'name': 5}, 'name=5'),
  ('/attempts/{a}/finish', {'state': 'won'}, "state='won'"),
  ('/attempts/{a}/finish', {'state': []}, 'state='),
  ('/attempts/{a}/finish', {'state': 'cancelled'}, "state='cancelled'"),
]


def test_wrong_values_are_named(server):
  attempt = server.attempt().attempt_id
  for path, body, message in _WRONG:
    status, told = ask(server, path.replace('{a}', attempt), body)
    assert status == 400 and message in told['error']['message'], (path, body, told)
    assert '\n' not in told['error']['message'], told


def test_what_does_not_exist(server):
  assert ask(server, '/rollouts/none')[0] == 404
  assert ask(server, '/attempts/none.1/rewards', {'value': 1})[0] == 404
  task = server.attempt()
  assert ask(server, f'/attempts/{task.attempt_id}/rewards', {'value': 1, 'call': 'chatcmpl-none'})[0] == 404
  assert ask(server, f'/attempts/{task.attempt_id}/rewards', {'value': 1, 'call': 0})[0] == 404
  for query in ('limit=x', 'limit=-1', 'after=%C2%B2', 'before=' + '9' * 30, 'after=' + '9' * 19):
    assert ask(server, f'/rollouts?{query}')[0] == 400


def test_keys(server):
  task, other = server.attempt(), server.attempt()
  assert ask(server, '/rollouts', key=task.api_key)[0] == 401
  assert ask(server, '/rollouts/claim', {}, key='')[0] == 401
  for what, body in (('rewards', {'value': 1}), ('finish', {}), ('heartbeat', {})):
    path = f'/attempts/{task.attempt_id}/{what}'
    assert ask(server, path, body, key=other.api_key)[0] == 401
    assert ask(server, path, body, key='')[0] == 401
  assert ask(server, f'/attempts/{task.attempt_id}/rewards', {'value': 1}, key=ADMIN)[0] == 200
  assert math.isclose(server.store.ask(Tables.rewards, task.attempt_id)[0].value, 1.0)
