"""Environments behind OpenEnv's protocol: against the same game by hand, everything that a server can do wrong, and a
server of the package."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from ml_collections import ConfigDict

from ragen_jax import envs as registry
from ragen_jax.build_environments import check_needs
from ragen_jax.envs import Budget
from ragen_jax.envs.outside.base import TextStep, read_observation, read_step
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.utils.errors import UserError
from tests.support import openenv_server
from tests.support.environments import raises_one_line
from tests.support.openenv_server import ACTION, HANG, HANG_UP
from tests.support.text_games import by_hand, by_session

SEEDS, MEMBERS = [3, 3, 4, 4], [0, 0, 0, 0]


@pytest.fixture
def server():
  pytest.importorskip('websockets', reason='pip install -r requirements-openenv.txt')
  with openenv_server.running() as server:
    yield server


def connect(server, **options):
  fields = {'url': server.url, 'observation_field': 'text', 'success': 'metadata.won', 'backoff_s': 0.01}
  return registry.make('openenv', fields | {'timeout_s': 30.0} | options)


def threads():
  return [t for t in threading.enumerate() if t.name == 'ragen_jax-openenv']


def until_closed(server):
  end = time.monotonic() + 10
  while server.open and time.monotonic() < end:
    time.sleep(0.005)
  assert not server.open


# -- play --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('workers', [64, 1])
def test_a_server_plays_as_its_game_does_by_hand(server, workers):
  server.end_s, others = 0.1, threads()
  session = connect(server, workers=workers, options=ConfigDict({'rungs': 5})).open(4)
  assert by_session(session, SEEDS, MEMBERS) == by_hand(5, SEEDS, MEMBERS)
  assert server.opened == len(server.open) == 4
  resets = [message for _, message in server.messages if message['type'] == 'reset']
  assert sorted(m['data']['seed'] for m in resets) == SEEDS and all(m['data']['rungs'] == 5 for m in resets)
  session.end()
  assert not server.open and threads() == others  # the server has ended the sessions when `end` returns
  assert [m['type'] for _, m in server.messages].count('close') == 4
  # Further episodes have sessions of their own, and a reset ends what was left open.
  session.reset(range(4), SEEDS, MEMBERS)
  assert by_session(session, SEEDS, MEMBERS) == by_hand(6 - 1, SEEDS, MEMBERS)
  assert server.opened == 12 and server.most == 4
  session.end()


def test_a_session_that_is_forgotten_ends_its_thread(server):
  others = len(threads())
  session = connect(server).open(2)
  session.reset([0, 1], [1, 2], [0, 0])
  assert len(threads()) == others + 1
  del session
  gc.collect()
  until_closed(server)


def test_no_more_messages_at_a_time_than_workers(server):
  session = connect(server, workers=2, timeout_s=0.3).open(6)
  server.trouble = lambda number, message: HANG
  session.reset(range(6), [1] * 6, [0] * 6)
  assert server.opened == 4  # two, then two more; the others were given up


def test_metrics_are_those_that_the_config_names(server):
  env = connect(server, metrics=('metadata.length', 'metadata.none'), state_metrics=['moves', 'nothing'])
  session = env.open(1)
  session.reset([0], [3], [0])
  steps = [read_step(session.step([0], ['Up'])[0]) for _ in range(2)]
  assert steps[1].metrics == {'length': float(len(steps[1].observation)), 'moves': 1.0}
  assert sum(step.metrics['moves'] for step in steps) == 2.0
  # What is there but no number is a fault.
  session = connect(server, state_metrics=('name',)).open(1)
  session.reset([0], [3], [0])
  assert str(read_step(session.step([0], ['Up'])[0])) == "metric name is not a number: 'climb'"


def test_rewards_that_are_missing_are_0_and_the_last_reward_decides_without_a_path_to_success(server):
  told = {'observation': {'text': 'x', 'n': [1, {'deep': 'y'}]}, 'done': True}
  session = connect(server, success='', observation_field='').open(1)
  for reward, expected in ((None, (0.0, False)), (0.5, (0.5, True)), (-1, (-1.0, False)), (0, (0.0, False))):
    session.reset([0], [3], [0])
    answer = json.dumps({'type': 'observation', 'data': told | {'reward': reward}})
    server.trouble = lambda number, message, answer=answer: answer if message['type'] == 'step' else None
    step = read_step(session.step([0], ['Up'])[0])
    assert (step.reward, step.success, step.done) == (*expected, True)
    assert json.loads(step.observation) == told['observation']
  session = connect(server, observation_field='n.-1.deep', success='').open(1)
  assert str(session.reset([0], [3], [0])[0]).startswith('observation has no n.-1.deep: ')
  server.trouble = lambda number, message: answer.replace('"done": true', '"done": false')
  assert read_observation(session.reset([0], [3], [0])[0]) == 'y'


# -- actions -----------------------------------------------------------------------------------------------------------


MOVES = {
  '$defs': {'Way': {'enum': ['left', 'right'], 'type': 'string'}},
  'type': 'object',
  'additionalProperties': False,
  'required': ['way', 'steps'],
  'properties': {
    'way': {'$ref': '#/$defs/Way'},
    'steps': {'type': 'integer', 'minimum': 1, 'description': 'how far'},
    'note': {'anyOf': [{'type': 'string'}, {'type': 'null'}]},
    'metadata': {'type': 'object'},
  },
}


def test_the_form_of_an_action_comes_from_the_schema(server):
  env = connect(server)
  assert env.rules() == 'Climb to the top.\nAn action is free text (Up or Down).' and env.whole_answer
  assert env.parse_action('  anything || at all ') == '  anything || at all ' and env.parse_action(' ') is None
  whole = connect(server, action_field='*')
  assert whole.parse_action('{"move": "Up", "metadata": {"x": 1e9}}') is not None
  assert whole.parse_action('{"move": "Up", "metadata": {"x": NaN}}') is None
  assert connect(server, action_help='Say it.').rules() == 'Climb to the top.'
  assert connect(server, action_names=('Up', 'Down'), task='Go.').rules() == 'Go.'
  assert connect(server, action_names=('Up', 'Down')).parse_action(' up') == 'Up'
  server.pages['/schema'] = server.pages['/schema'] | {'action': MOVES}
  env = connect(server)
  told = '{"way": "left" or "right", "steps": whole number (how far), "note": text or null (optional)}'
  assert env.rules() == f'Climb to the top.\nAn action is a JSON object, {told}.'
  good = '{"way": "left", "steps": 2}'
  assert env.parse_action(good) == good
  for bad in ('left', '[1]', '{"way": "up", "steps": 2}', '{"way": "left", "steps": 0}', '{"way": "left"}', '{' * 5000,
              '{"way": "left", "steps": 2, "more": 1}', '{"way": "left", "steps": true}',
              '{"way": "left", "steps": NaN}', '{"way": "left", "steps": 2, "note": 3}'):  # fmt: skip
    assert env.parse_action(bad) is None, bad
  way, steps = (connect(server, action_field=field) for field in ('way', 'steps'))
  assert way.rules().endswith('\nAn action is one of: left, right.')
  assert (way.parse_action('left'), way.parse_action('up')) == ('left', None)
  assert steps.rules().endswith('\nAn action is one value: whole number (how far).')
  assert (steps.parse_action('3'), steps.parse_action('three'), steps.parse_action('0')) == ('3', None, None)
  assert connect(server, action_field='note').parse_action('x') == 'x'
  assert connect(server, action_field='*').parse_action('3') is None
  server.pages['/schema'] = server.pages['/schema'] | {'action': {'required': ['any'], 'properties': {'any': {}}}}
  assert connect(server).parse_action('{"any": [1e9]}') and connect(server).parse_action('{"any": [1e999]}') is None


@pytest.mark.parametrize(
  ('options', 'text', 'sent'),
  [
    ({'action_field': '*'}, '{"way": "left", "steps": 2}', {'way': 'left', 'steps': 2}),
    ({'action_field': 'steps'}, '3', {'steps': 3}),
    ({'action_field': 'way'}, 'right', {'way': 'right'}),
  ],
)
def test_the_server_gets_the_action_that_the_text_writes(server, options, text, sent):
  server.pages['/schema'] = server.pages['/schema'] | {'action': MOVES}
  session = connect(server, **options).open(1)
  session.reset([0], [3], [0])
  server.trouble = lambda number, message: HANG_UP
  session.step([0], [text])
  assert server.messages[-1] == (0, {'type': 'step', 'data': sent})


# -- what can go wrong -------------------------------------------------------------------------------------------------


def _answer(**data):
  return json.dumps({'type': 'observation', 'data': {'observation': {'text': 'x'}, 'reward': 1, 'done': False} | data})


_FINE = _answer()
LIES = {
  'it hangs up': (HANG_UP, 'server closed the connection'),
  'no JSON': ('<html>', 'step answered no JSON'),
  'deep JSON': ('[' * 200_000, 'step answered no JSON'),
  'bytes that are no text': (b'\xff\xfe', 'step answered no JSON'),
  'no object': ('[1]', 'step answered no object'),
  'an error': ('{"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "no"}}', 'step answered an error'),
  'an error without data': ('{"type": "error"}', 'step answered an error'),
  'another kind': ('{"type": "state", "data": {}}', 'step answered another message'),
  'no data': ('{"type": "observation"}', 'server answered no observation'),
  'no observation': (_answer(observation=None), 'server answered no observation'),
  'no text': (_answer(observation={}), 'observation has no text'),
  'null for text': (_answer(observation={'text': None}), 'observation has no text'),
  'a long text': (_answer(observation={'text': 'x' * (1 << 21)}), 'observation is longer than'),
  'a reward that is text': (_answer(reward='1'), 'reward is not a number'),
  'a reward that is not finite': (_FINE.replace('"reward": 1', '"reward": 1e999'), 'reward is not within'),
  'a huge reward': (_FINE.replace('"reward": 1', '"reward": ' + '9' * 400), 'reward is not within'),
  'done that is a number': (_answer(done=1), 'done is not a bool'),
  'done that is missing': (_FINE.replace(', "done": false', ''), 'done is not a bool'),
  'success that is missing': (_answer(done=True), 'success is not a bool'),
  'success that is a number': (_answer(done=True, observation={'text': 'x', 'metadata': {'won': 1}}), 'success is not'),
}


@pytest.mark.parametrize('name', LIES)
@pytest.mark.slow_cases(
  'no object', 'no data', 'an error without data', 'null for text', 'done that is missing', 'success that is missing',
  'a reward that is text', 'bytes that are no text',
)  # fmt: skip
def test_a_lie_is_a_fault_of_its_row_and_others_go_on(server, name):
  lie, kind = LIES[name]
  session = connect(server).open(3)
  session.reset(range(3), [3, 3, 3], [0] * 3)
  liar = next(number for number, message in server.messages if message['type'] == 'reset')
  server.trouble = lambda number, message: lie if number == liar else None
  # Which row has the connection is not known: rows open theirs side by side.
  results = [read_step(raw) for raw in session.step(range(3), ['Up'] * 3)]
  faults = [x for x in results if not isinstance(x, TextStep)]
  assert len(faults) == 1 and faults[0].kind.startswith(kind)
  server.trouble = lambda number, message: None
  assert by_session(connect(server).open(4), SEEDS, MEMBERS) == by_hand(6, SEEDS, MEMBERS)
  assert all(isinstance(read_observation(x), str) for x in session.reset(range(3), [3] * 3, [0] * 3))
  session.end()


def test_a_message_that_nobody_asked_for_is_not_taken_for_an_answer(server):
  session = connect(server).open(1)
  session.reset([0], [3], [0])
  server.trouble = lambda number, message: [_FINE, _answer(observation={'text': 'forged'})]
  assert isinstance(read_step(session.step([0], ['Up'])[0]), TextStep)
  time.sleep(0.1)
  fault = read_step(session.step([0], ['Up'])[0])
  assert fault.kind == 'server sent a message that nobody asked for' and 'forged' in fault.detail


def test_a_hung_step_is_given_up_and_costs_one_limit(server):
  session = connect(server, timeout_s=0.4, workers=1).open(8)
  session.reset(range(8), [3] * 8, [0] * 8)
  server.trouble = lambda number, message: HANG if message['type'] == 'step' else None
  began = time.monotonic()
  faults = session.step(range(8), ['Up'] * 8)
  assert time.monotonic() - began < 3 * 0.4 + 1.5
  assert [str(fault) for fault in faults] == ['step took longer than 0.4 s'] * 3 + [
    'step took longer than 0.4 s: not tried, because earlier messages took too long'
  ] * 5
  assert str(session.step([0], ['Up'])[0]) == 'step has no session: it was lost'
  session.end()
  server.trouble = lambda number, message: None
  assert by_session(connect(server).open(4), SEEDS, MEMBERS) == by_hand(6, SEEDS, MEMBERS)


def test_a_server_that_comes_back_is_used_and_one_that_does_not_is_a_fault(server):
  lost = iter([HANG_UP, HANG_UP])
  server.trouble = lambda number, message: next(lost, None)
  env = connect(server, retries=2)
  assert read_observation(env.open(1).reset([0], [3], [0])[0]) == by_hand(6, SEEDS, MEMBERS)[0][0]
  assert server.opened == 3
  server.trouble = lambda number, message: HANG_UP
  fault = env.open(1).reset([0], [3], [0])[0]
  assert fault.kind == 'server closed the connection' and server.opened == 6
  # A step is never repeated, as the server may have executed it.
  server.trouble = lambda number, message: HANG_UP if message['type'] == 'step' else None
  session = env.open(1)
  session.reset([0], [3], [0])
  assert session.step([0], ['Up'])[0].kind == 'server closed the connection' and server.opened == 7


def test_a_reset_that_the_server_answers_with_an_error_is_not_tried_again(server):
  server.trouble = lambda number, message: '{"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "no"}}'
  fault = connect(server, retries=2).open(1).reset([0], [3], [0])[0]
  assert str(fault) == 'reset answered an error: EXECUTION_ERROR: no' and server.opened == 1


def test_a_reset_that_finds_no_session_free_is_tried_again(server):
  server.sessions = 1
  session = connect(server, retries=0, workers=1).open(2)
  results = session.reset([0, 1], [3, 3], [0, 0])
  assert str(results[1]) == 'reset answered an error: CAPACITY_REACHED: 1 sessions'
  session.end()
  other = connect(server, retries=0).open(1)
  other.reset([0], [3], [0])
  threading.Timer(0.2, other.end).start()
  assert isinstance(read_observation(connect(server, retries=9).open(1).reset([0], [3], [0])[0]), str)


def test_an_episode_that_begins_over_is_a_fault(server):
  server.trouble = lambda number, message: _answer(done=True)
  assert str(connect(server).open(1).reset([0], [3], [0])[0]) == 'reset began an episode that is over'


def test_a_redirect_is_not_followed(server):
  with socket.create_server(('127.0.0.1', 0)) as listening:

    def redirect():
      connection, _ = listening.accept()
      with connection:
        connection.recv(4096)
        connection.sendall(
          b'HTTP/1.1 302 Found\r\nLocation: ' + server.url.replace('http', 'ws').encode() + b'/ws\r\n\r\n'
        )

    threading.Thread(target=redirect, daemon=True).start()
    env = connect(server, url=f'http://127.0.0.1:{listening.getsockname()[1]}', retries=0)
    fault = env.open(1).reset([0], [3], [0])[0]
  assert fault.kind == 'server cannot be reached' and server.opened == 0


# -- checks before a run -----------------------------------------------------------------------------------------------


def check(env, episodes=1):
  check_needs([EnvSpec('Far', env, Budget(), 9, 1)], {'Far': episodes})


def test_a_check_asks_for_health_schema_and_as_many_sessions_as_episodes(server):
  env = connect(server, action_names=('Up', 'Down'))
  check(env, 5)
  assert server.most == server.opened == 5 and not server.open
  assert {message['type'] for _, message in server.messages} == {'state', 'close'}
  server.sessions = 3
  told = (
    'the server has 3 sessions free, and 5 episodes are played at a time; allowed: a server with max_concurrent_envs=5'
  )
  with pytest.raises(UserError, match=rf"^envs\.Far: url='{server.url}': {told} or more, or fewer groups \("):
    check(env, 5)
  assert not server.open
  # Errors of the environment itself are no reason: some have no state before their first reset.
  server.sessions = 9
  server.trouble = lambda number, message: '{"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "no"}}'
  check(env, 5)
  server.trouble = lambda number, message: '{"type": "error", "data": {"code": "FACTORY_ERROR", "message": "no"}}'
  with pytest.raises(
    UserError, match=r'5 of 5 sessions cannot be opened \(state answered an error: FACTORY_ERROR: no\)$'
  ):
    check(env, 5)


@pytest.mark.parametrize(
  ('page', 'content', 'options', 'told'),
  [
    ('/health', None, {}, 'no server of OpenEnv answers at http.*/health .HTTPError: .*404'),
    ('/health', {'status': 'degraded'}, {}, "the server is not healthy, its status is 'degraded'"),
    ('/health', '[1]', {}, 'no server of OpenEnv answers .*no JSON object'),
    ('/schema', {}, {}, '/schema has no action; allowed: servers of OpenEnv'),
    ('/schema', '{"a": "' + 'x' * (1 << 20) + '"}', {}, 'more than 1 MiB'),
    ('/schema', {'action': {'properties': 5, 'required': 7}, 'observation': {}}, {'action_names': ('Up',)},
     "action_names: 'Up' does not fit|check failed"),
    ('/schema', {'action': ACTION, 'observation': {}}, {'action_field': 'x'}, "'x'; allowed: . or a field .*, move$"),
    ('/schema', None, {'observation_field': 'txt.0'}, "'txt.0'; allowed: fields of the observation, text$"),
    ('/schema', None, {'metrics': ('reward',)}, "metrics='reward'; allowed: .*, text, metadata$"),
    ('/schema', None, {'success': 'solved'}, "success='solved'; allowed: fields of the observation, text, metadata$"),
    ('/schema', None, {'metrics': ('metadata.x', 'gold.0')}, "metrics='gold.0'; allowed: .*, text, metadata$"),
    ('/schema', {'action': MOVES, 'observation': {}}, {'action_field': 'way', 'action_names': ('left', 'up')},
     "action_names: 'up' does not fit the schema of the server, An action is one of: left, right"),
    ('/metadata', {'description': None}, {}, "task=''; allowed: text, as the server has no description"),
  ],
)  # fmt: skip
def test_what_does_not_fit_the_server_is_told_in_one_line(server, page, content, options, told):
  if content is not None or page == '/health':
    server.pages[page] = content
  with pytest.raises(UserError, match=f'^envs.Far: .*({told})') as error:
    check(connect(server, **options))
  assert '\n' not in str(error.value)


def test_a_server_that_is_not_there_is_told_in_one_line(server):
  with pytest.raises(UserError, match=r'^envs\.Far: .*no server of OpenEnv answers at http://127.0.0.1:9/health'):
    check(connect(server, url='http://127.0.0.1:9', task='x'))


@pytest.mark.parametrize(
  ('options', 'told'),
  [
    ({'url': ''}, "^openenv: url=''; allowed: 'http://"),
    ({'url': 'ws://x'}, "^openenv: url='ws://x'; allowed: 'http://"),
    ({'url': 'http://a:b@c'}, '^openenv: url has a user name or a password'),
    ({'task': 5}, '^openenv: task=5; allowed: text'),
    ({'action_names': ('a', 'A')}, '^openenv: action_names='),
    ({'timeout_s': 0}, '^openenv: timeout_s=0; allowed: seconds'),
    ({'retries': -1}, '^openenv: retries=-1; allowed: whole numbers from 0'),
    ({'workers': 0}, '^openenv: workers=0; allowed: whole numbers from 1'),
    ({'metrics': 'score'}, "^openenv: metrics='score'; allowed: names of fields"),
    ({'metrics': ('a.x',), 'state_metrics': ('x',)}, '; allowed: paths whose last names differ$'),
    ({'options': {'seed': 3}}, '^openenv: options has seed, '),
    ({'options': {'x': {1}}}, '^openenv: options=.*; allowed: what JSON can say'),
    ({'whole_answer': 1}, '^openenv: whole_answer=1; allowed: True, False'),
  ],
)
def test_bad_options_are_told_in_one_line(options, told):
  with raises_one_line(told):
    registry.make('openenv', {'url': 'http://127.0.0.1:9'} | options)


def test_without_the_package_one_line_names_the_command(monkeypatch):
  monkeypatch.setitem(sys.modules, 'websockets.asyncio.client', None)
  with raises_one_line("^type='openenv' needs .*websockets, .*: pip install -r requirements-openenv.txt$"):
    registry.make('openenv', {'url': 'http://127.0.0.1:9'})


# -- a server of the package -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_of_the_package_plays_its_own_game(tmp_path):
  for package in ('websockets', 'openenv'):
    if importlib.util.find_spec(package) is None:
      pytest.skip(f'{package} is not installed')
  from tests.whole.test_openenv_page import server_file

  (tmp_path / 'server.py').write_text(server_file())
  with socket.create_server(('127.0.0.1', 0)) as free:
    port = free.getsockname()[1]
  command = [sys.executable, 'server.py', str(port), '4']
  with subprocess.Popen(command, cwd=tmp_path, env=os.environ, stdout=subprocess.DEVNULL) as process:
    try:
      url = f'http://127.0.0.1:{port}'
      _wait_for(url, process)
      _check_the_package(url, process)
    finally:
      process.kill()


def _wait_for(url, process):
  for _ in range(1200):
    try:
      urllib.request.urlopen(f'{url}/health', timeout=5).close()
      return
    except OSError:
      assert process.poll() is None, 'the server ended'
      time.sleep(0.1)
  raise AssertionError('no server after two minutes')


def _check_the_package(url, process):
  options = {'url': url, 'task': 'Guess.', 'observation_field': 'hint', 'metrics': ('metadata.distance',),
             'state_metrics': ('step_count',), 'options': {'largest': 8}, 'retries': 1, 'backoff_s': 0.1}  # fmt: skip
  env = registry.make('openenv', options)
  check(env, 4)
  with pytest.raises(UserError, match='the server has 4 sessions free, and 6 episodes are played at a time'):
    check(env, 6)
  assert env.rules() == 'Guess.\nAn action is a JSON object, {"number": whole number (the guess)}.'
  session = env.open(4)
  for _ in range(2):  # the second episodes find their sessions free
    first = [read_observation(x) for x in session.reset(range(4), [1, 1, 2, 3], [0, 1, 0, 0])]
    assert first == ['A number from 1 to 8.'] * 4
    live, won = list(range(4)), {}
    for number in range(1, 9):
      played = zip(live, session.step(live, [json.dumps({'number': number})] * len(live)), strict=True)
      steps = {row: read_step(raw) for row, raw in played}
      assert all(step.metrics['step_count'] == 1.0 for step in steps.values())
      won |= {row: number for row, step in steps.items() if step.success}
      live = [row for row, step in steps.items() if not step.done]
    assert not live and won[0] == won[1]  # equal seeds
    session.end()
  session.reset(range(4), [1, 1, 2, 3], [0] * 4)
  results = [read_step(x) for x in session.step(range(4), ['{"number": 0}', *['{"number": 1}'] * 3])]
  assert 'EXECUTION_ERROR' in results[0].detail and all(isinstance(x, TextStep) for x in results[1:])
  process.kill()
  process.wait()
  assert session.step([1], ['{"number": 1}'])[0].kind == 'server closed the connection'
  assert session.reset([1], [1], [0])[0].kind == 'server cannot be reached'
  session.end()
