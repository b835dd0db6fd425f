"""The client of agent programs, against a server that answers as a test wants."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import http.server
import json
import signal
import sys
import threading

import pytest

from ragen_jax.serving import client
from tests.support.paths import ROOT
from tests.support.processes import run_python

_LONG = 60.0
_FIELDS = {
  'rollout_id': 'a', 'attempt_id': 'a.1', 'number': 2, 'mode': 'train', 'group': 'g', 'input': {'x': 'ü'},
  'timeout_s': 60.0, 'heartbeat_s': 0.0,
}  # fmt: skip


class _Server:
  """A server on a free port.

  Attributes:
    url: its address.
    asked: list of (path, key, body) in the order in which requests came.
    answers: path -> list of answers; each is (status, JSON or bytes), a function that returns one, or None to hang up.
      The last stays; without one the answer is (200, {}).
  """

  def __init__(self):
    self.asked, self.answers = [], {}
    outer, lock = self, threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
      def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        with lock:
          outer.asked.append((self.path, self.headers['Authorization'], body))
          waiting = outer.answers.get(self.path, [(200, {})])
          answer = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        answer = answer() if callable(answer) else answer
        if answer is None:
          return
        status, content = answer
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        with contextlib.suppress(OSError):
          self.send_response(status)
          self.send_header('Content-Length', str(len(content)))
          self.send_header('Location', f'{outer.url}/elsewhere')
          self.send_header('Retry-After', '0.01')
          self.end_headers()
          self.wfile.write(content)

      def log_message(self, *_):
        pass

    self.httpd = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    self.url = f'http://127.0.0.1:{self.httpd.server_port}'
    threading.Thread(target=self.httpd.serve_forever, kwargs={'poll_interval': 0.02}, daemon=True).start()

  def bodies(self, path):
    return [body for asked, _, body in self.asked if asked == path]

  def task(self, **changes):
    return client.Task.from_json(_FIELDS | changes, self.url + '/', 'key')


@pytest.fixture
def server(monkeypatch):
  # A proxy that is not there: requests to this machine must not use it.
  monkeypatch.setenv('http_proxy', 'http://127.0.0.1:9')
  started = _Server()
  yield started
  started.httpd.shutdown()
  started.httpd.server_close()


def test_the_client_needs_the_standard_library_only():
  tree = ast.parse((ROOT / 'ragen_jax/serving/client.py').read_text())
  imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
  imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
  assert {name.split('.')[0] for name in imported} <= sys.stdlib_module_names
  code = "import sys, ragen_jax.serving.client; print(sorted({'jax', 'numpy', 'flax'} & set(sys.modules)))"
  assert run_python(code, check=True).stdout == '[]\n'


def test_a_task_is_read_from_the_environment(monkeypatch):
  for name in ('RAGEN_BASE_URL', 'RAGEN_KEY', 'RAGEN_TASK'):
    monkeypatch.delenv(name, raising=False)
  with pytest.raises(RuntimeError, match=r'^RAGEN_BASE_URL, RAGEN_KEY, RAGEN_TASK not set'):
    client.task()
  monkeypatch.setenv('RAGEN_BASE_URL', 'http://host:1/')
  monkeypatch.setenv('RAGEN_KEY', 'secret')
  monkeypatch.setenv('RAGEN_TASK', json.dumps({**_FIELDS, 'new': 'field'}))
  task = client.task()
  assert task.input == {'x': 'ü'} and task.number == 2 and task.api_key == 'secret'
  assert task.base_url == 'http://host:1/attempts/a.1/v1'
  assert 'secret' not in repr(task) and 'secret' not in json.dumps(task.to_json())
  assert client.Task.from_json(task.to_json(), task.server_url, 'secret') == task
  assert task.prompt == '', 'a server of an earlier version sends none'
  prompted = client.Task.from_json(_FIELDS | {'prompt': 'Go.'}, 'http://127.0.0.1:1', 'secret')
  assert prompted.prompt == 'Go.' and prompted.to_json()['prompt'] == 'Go.'


def test_requests_of_an_attempt(server, monkeypatch):
  client.reward(0.5, of=server.task())
  client.reward(-1, call='last', agent='writer', name='style', of=server.task())
  client.reward(1.0, call=3, of=server.task())
  client.finish(of=server.task())
  client.finish('failed', 'no idea', of=server.task())
  assert {key for _, key, _ in server.asked} == {'Bearer key'}
  rewards = server.bodies('/attempts/a.1/rewards')
  assert len({body.pop('id') for body in rewards}) == 3
  assert rewards == [
    {'value': 0.5, 'call': None, 'agent': '', 'name': ''},
    {'value': -1, 'call': 'last', 'agent': 'writer', 'name': 'style'},
    {'value': 1.0, 'call': 3, 'agent': '', 'name': ''},
  ]
  assert server.bodies('/attempts/a.1/finish') == [
    {'state': 'succeeded', 'error': ''}, {'state': 'failed', 'error': 'no idea'},
  ]  # fmt: skip
  with pytest.raises(ValueError, match='not JSON compliant'):
    client.reward(float('nan'), of=server.task())
  monkeypatch.setenv('RAGEN_BASE_URL', server.url)
  monkeypatch.setenv('RAGEN_KEY', 'other')
  monkeypatch.setenv('RAGEN_TASK', json.dumps(_FIELDS | {'attempt_id': 'b/1'}))
  client.finish()
  assert server.asked[-1][:2] == ('/attempts/b%2F1/finish', 'Bearer other')


def test_requests_are_repeated_while_there_is_no_answer(server):
  path = '/attempts/a.1/rewards'
  server.answers[path] = [None, (503, {}), (429, b''), (500, b'x'), (200, {})]
  client.reward(1.0, of=server.task())
  bodies = server.bodies(path)
  assert len(bodies) == 5 and all(body == bodies[0] for body in bodies)  # one id: it counts once


def test_the_client_gives_up(server, monkeypatch):
  monkeypatch.setattr(client, '_PATIENCE_S', 0.0)
  path = '/attempts/a.1/finish'
  server.answers[path] = [(503, {'error': {'message': 'the queue is full'}})]
  with pytest.raises(client.ServerError, match=r'^the queue is full$') as error:
    client.finish(of=server.task())
  assert error.value.status == 503
  server.answers[path] = [None]
  with pytest.raises(client.ServerError, match='does not answer') as error:
    client.finish(of=server.task())
  assert error.value.status == 0 and len(server.bodies(path)) == 2


@pytest.mark.parametrize(
  ('answer', 'kind', 'message'),
  [
    ((410, {'error': {'message': 'attempt a.1 is over (timeout)'}}), client.Over, r'^attempt a.1 is over \(timeout\)$'),
    ((400, {'error': {'message': 'value=x'}}), client.ServerError, r'^value=x$'),
    ((409, {'detail': 'x'}), client.ServerError, r'^http://.*/rewards answers with status 409$'),
    ((401, b'<html>'), client.ServerError, r'answers with status 401$'),
    ((302, b''), client.ServerError, r'answers with status 302$'),
    ((200, b'<html>'), client.ServerError, r'answers with something else than JSON$'),
  ],
)
def test_refusals_are_not_repeated(server, answer, kind, message):
  server.answers['/attempts/a.1/rewards'] = [answer]
  with pytest.raises(client.ServerError, match=message) as error:
    client.reward(1.0, of=server.task())
  assert type(error.value) is kind and len(server.asked) == 1


def test_heartbeats_tell_that_the_attempt_is_over(server):
  path, told = '/attempts/a.1/heartbeat', []
  server.answers[path] = [(200, {}), (503, {}), None, (200, {}), (410, {})]
  with client.heartbeat(server.task(heartbeat_s=0.03), lambda: told.append(1)) as over:
    assert over.wait(_LONG)
  assert len(server.bodies(path)) == 5
  before = threading.enumerate()
  with client.heartbeat(server.task(heartbeat_s=3 * _LONG)) as over:
    (thread,) = [t for t in threading.enumerate() if t.name == 'ragen-heartbeat' and t not in before]
  thread.join(_LONG)  # it ends with the block, long before its next sign of life
  assert not thread.is_alive() and not over.is_set() and len(server.bodies(path)) == 5


# -- workers


def _claims(server, *changes):
  """Makes the server hand out tasks, and then none."""
  claims = [(200, {**_FIELDS, **change, 'api_key': f'key{i}'}) for i, change in enumerate(changes)]
  server.answers['/rollouts/claim'] = [*claims, (204, b'')]


def _work(server, agent, tasks):
  return client.work(agent, server.url, 'admin', worker='w', wait_s=0.0, max_tasks=tasks)


def test_a_worker_plays_what_it_claims(server):
  _claims(server, {'rollout_id': 'a'}, {'rollout_id': 'b', 'attempt_id': 'b.1'})
  seen = []

  async def agent(task):
    await asyncio.sleep(0)
    seen.append(task)
    return 0.25

  assert _work(server, agent, 2) == 2
  assert [task.rollout_id for task in seen] == ['a', 'b'] and seen[1].api_key == 'key1'
  assert server.asked[0] == ('/rollouts/claim', 'Bearer admin', {'worker': 'w', 'wait_s': 0.0})
  assert [(path, key) for path, key, _ in server.asked if 'b.1' in path] == [
    ('/attempts/b.1/rewards', 'Bearer key1'),
    ('/attempts/b.1/finish', 'Bearer key1'),
  ]
  assert server.bodies('/attempts/b.1/rewards')[0]['value'] == 0.25
  assert server.bodies('/attempts/b.1/finish') == [{'state': 'succeeded', 'error': ''}]


@pytest.mark.parametrize('is_async', [True, False])
def test_the_ends_of_an_agent_are_reported(server, is_async):
  def play(task):
    if task.input == 'raises':
      raise KeyError(f'key {task.api_key}')
    if task.input == 'exits':
      raise SystemExit(3)
    return {'none': None, 'nan': float('nan'), 'text': 'x'}[task.input]

  async def play_async(task):
    return play(task)

  inputs = ('raises', 'exits', 'none', 'nan', 'text')
  _claims(server, *({'input': x, 'attempt_id': x} for x in inputs))
  assert _work(server, play_async if is_async else play, 5) == 5
  ends = {x: server.bodies(f'/attempts/{x}/finish') for x in inputs}
  assert ends['none'] == [{'state': 'succeeded', 'error': ''}]
  assert ends['raises'] == [{'state': 'failed', 'error': "KeyError: 'key ***'"}]
  for name in ('exits', 'nan', 'text'):
    (body,) = ends[name]
    assert body['state'] == 'failed' and body['error']
  assert not [path for path, _, _ in server.asked if path.endswith('rewards')]


def test_an_async_agent_is_cancelled_when_it_is_late_or_its_attempt_is_over(server):
  ends = []

  async def agent(task):
    try:
      await asyncio.Event().wait()
    finally:
      ends.append(task.attempt_id)

  _claims(server, {'attempt_id': 'late', 'timeout_s': 0.05}, {'attempt_id': 'over', 'heartbeat_s': 0.03})
  server.answers['/attempts/late/heartbeat'] = [(200, {'left_s': 0.0})]
  server.answers['/attempts/over/heartbeat'] = [(410, {})]
  assert _work(server, agent, 2) == 2
  assert ends == ['late', 'over']
  assert server.bodies('/attempts/late/finish') == [{'state': 'timeout', 'error': 'took longer than timeout_s=0.05'}]
  assert server.bodies('/attempts/over/finish') == []


@pytest.mark.parametrize(
  ('answer', 'left'),
  [((200, {'left_s': 3}), 3.0), ((410, {}), 0.0), ((404, {}), 0.0), ((500, {}), None), ((200, {}), None)],
)
def test_the_time_left_is_unknown_if_the_server_does_not_say(server, answer, left):
  _claims(server, {})
  queue = client.Queue(server.url, 'admin')
  task = queue.claim(0.0)
  server.answers['/attempts/a.1/heartbeat'] = [answer]
  assert queue.time_left(task) == left


def test_a_late_agent_goes_on_while_the_server_does_not_say_how_much_time_is_left(server, monkeypatch):
  monkeypatch.setattr(client, '_LEAST_S', 0.01)
  go_on = threading.Event()

  async def agent(task):
    await asyncio.to_thread(go_on.wait, _LONG)
    return 1.0

  _claims(server, {'timeout_s': 0.05})
  server.answers['/attempts/a.1/heartbeat'] = [(500, {}), lambda: (go_on.set(), (500, {}))[1]]
  assert _work(server, agent, 1) == 1
  assert server.bodies('/attempts/a.1/finish') == [{'state': 'succeeded', 'error': ''}]


def test_a_late_agent_goes_on_if_the_server_has_held_its_calls(server):
  go_on = threading.Event()

  async def agent(task):
    await asyncio.to_thread(go_on.wait, _LONG)
    return 1.0

  _claims(server, {'timeout_s': 0.05})
  server.answers['/attempts/a.1/heartbeat'] = [lambda: (go_on.set(), (200, {'left_s': 60.0}))[1]]
  assert _work(server, agent, 1) == 1
  assert server.bodies('/attempts/a.1/finish') == [{'state': 'succeeded', 'error': ''}]


def test_a_heartbeat_that_is_answered_after_the_agents_end_changes_nothing(server, monkeypatch):
  asked, go_on, raised, threads = threading.Event(), threading.Event(), [], []
  monkeypatch.setattr(threading, 'excepthook', raised.append)

  async def agent(task):
    threads.extend(t for t in threading.enumerate() if t.name == 'ragen-heartbeat' and t not in before)
    await asyncio.to_thread(asked.wait, _LONG)

  _claims(server, {'heartbeat_s': 0.03})
  server.answers['/attempts/a.1/heartbeat'] = [lambda: (asked.set(), go_on.wait(_LONG), (410, {}))[-1]]
  before = threading.enumerate()
  assert _work(server, agent, 1) == 1
  go_on.set()  # the agent's event loop has closed
  for thread in threads:
    thread.join(_LONG)
  assert len(threads) == 1 and not raised
  assert server.bodies('/attempts/a.1/finish') == [{'state': 'succeeded', 'error': ''}]


def test_an_attempt_that_is_over_does_not_end_the_worker(server):
  _claims(server, {'attempt_id': 'a.1'}, {'attempt_id': 'b.1'})
  server.answers['/attempts/a.1/rewards'] = [(410, {'error': {'message': 'over'}})]
  assert _work(server, lambda task: 1.0, 2) == 2
  assert server.bodies('/attempts/a.1/finish') == [] and len(server.bodies('/attempts/b.1/finish')) == 1


def test_a_worker_stops_when_it_is_told_or_refused(server):
  stop = threading.Event()
  server.answers['/rollouts/claim'] = [(204, b''), lambda: stop.set() or (204, b'')]
  assert client.work(lambda task: None, server.url, 'admin', wait_s=0.0, stop=stop) == 0
  assert len(server.asked) == 2 and server.asked[0][2]['worker']
  server.answers['/rollouts/claim'] = [(401, {'error': {'message': 'the key is not the admin key'}})]
  with pytest.raises(client.ServerError, match=r'^the key is not the admin key$'):
    _work(server, lambda task: None, 1)


@pytest.mark.parametrize('is_async', [True, False])
def test_a_worker_that_is_interrupted_says_so(server, is_async):
  _claims(server, {})
  before = signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored from the start, too

  def agent(task):
    raise KeyboardInterrupt

  async def interrupted(task):
    signal.raise_signal(signal.SIGINT)
    await asyncio.sleep(_LONG)

  try:
    with pytest.raises(KeyboardInterrupt):
      _work(server, interrupted if is_async else agent, 1)
  finally:
    signal.signal(signal.SIGINT, before)
  assert server.bodies('/attempts/a.1/finish') == [{'state': 'failed', 'error': 'the worker was interrupted'}]
