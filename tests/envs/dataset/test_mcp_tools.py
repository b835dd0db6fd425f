"""MCP servers as tools: what is read of their lists and answers, repetitions, and servers of the official package."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from concurrent import futures

import pytest

from ragen_jax import envs as registry
from ragen_jax.envs.dataset import mcp_tools
from ragen_jax.envs.dataset.mcp_calls import McpCalls
from ragen_jax.envs.dataset.mcp_tools import McpServer, McpSettings, McpTool, select_tools
from ragen_jax.envs.dataset.tool_use import Told, make_toolbox
from ragen_jax.envs.dataset.tools import WrongArguments
from ragen_jax.envs.outside.base import read_step
from ragen_jax.utils.threads import Fault
from tests.support.environments import raises_one_line
from tests.support.paths import ROOT
from tests.support.user_tools import TOOLS

needs_mcp = pytest.mark.skipif(
  importlib.util.find_spec('mcp') is None, reason='mcp is not installed: requirements-data.txt'
)
SERVER = ROOT / 'tests' / 'support' / 'mcp_server.py'
RAW = ROOT / 'tests' / 'support' / 'mcp_raw_server.py'


class Scripted:
  """In place of the process of a client: gives what it is told to, for each list of calls, and notes what is asked."""

  def __init__(self, *answers):
    self.answers, self.asked, self.restarts = list(answers), [], 0
    self.process, self.last_end = 1, ''

  def call(self, method, *args, timeout_s):
    """The next answer; outcomes are given the numbers of the calls."""
    if method == 'exchange' and not args[0]:
      return [], None
    self.asked.append((method, *args, timeout_s))
    answer = self.answers.pop(0)
    if isinstance(answer, Fault):
      return None, answer
    if method == 'exchange' and isinstance(answer, list):
      numbers = [number for number, *_ in args[0]]
      return [(n, *outcome) for n, outcome in zip(numbers, answer, strict=True)], None
    return answer, None

  def restart(self, because):
    """Counts."""
    self.restarts += 1


def listed(name='look', description='Looks.', **properties):
  """A tool as a client gives it."""
  return {'name': name, 'description': description, 'schema': {'type': 'object', 'properties': properties}}


def server_of(*answers, **settings):
  """A server with these answers, without pauses, and its script."""
  script = Scripted(*answers)
  return McpServer('mcp:scripted', McpSettings(**({'backoff_s': 1e-9} | settings)), script), script


def tool_of(*answers, raw=None, timeout_s=5.0, **settings):
  """The only tool of a server, and the script."""
  server, script = server_of([raw or listed(q={'type': 'string'})], *answers, **settings)
  return McpTool(server=server, listed=server.tools[0], timeout_s=timeout_s), script


# -- lists of tools ----------------------------------------------------------------------------------------------------


def test_a_tool_is_described_by_what_the_server_says():
  schema = {
    'type': 'object',
    'properties': {
      'city': {'type': 'string', 'description': 'where, in English.'},
      'days': {'anyOf': [{'type': 'integer'}, {'type': 'null'}], 'default': None},
      'units': {'type': ['string', 'null'], 'enum': ['C', 'F']},
      'level': {'enum': [1, 2]},
      'tags': {'type': 'array', 'items': {'type': 'string'}},
      'filter': {'$ref': '#/$defs/F'},
      'deep': {'type': 'object'},
      'any': True,
    },
    'required': ['city', 'nothing'],
    '$defs': {'F': {'type': 'object'}},
  }
  tool, _ = tool_of(raw={'name': 'getWeather-v2', 'description': 'Tells\n the weather.\n\nLong.', 'schema': schema})
  assert (tool.name, tool.listed.sent) == ('get_weather_v2', 'getWeather-v2')
  assert tool.help == 'Tells the weather. (city: where, in English)'
  assert tool.usage == (
    'get_weather_v2[{"city": text, "days": whole number (optional), "units": "C" or "F" (optional), '
    '"level": 1 or 2 (optional), "tags": list (optional), "filter": value (optional), "deep": object (optional), '
    '"any": value (optional)}]'
  )
  good = {'city': 'Turin', 'days': 2, 'units': 'C', 'level': 1, 'tags': [3], 'filter': None, 'deep': {'a': 1}, 'any': 7}
  assert tool.read(json.dumps(good)) == good
  for field, wrong, told in (
    ('days', 2.5, 'whole number'), ('units', 'K', '"C" or "F"'), ('level', 3, '1 or 2'), ('tags', 'a', 'list'),
    ('deep', [], 'object'),
  ):  # fmt: skip
    with pytest.raises(WrongArguments, match=f'^"{field}" must be: {told}.$'):
      tool.read(json.dumps(good | {field: wrong}))


@pytest.mark.parametrize(
  'part', ['1e999', 'NaN', '"\\ud800"', '[' * 100 + ']' * 100], ids=['large', 'nan', 'half', 'deep']
)
def test_arguments_that_would_cost_the_connection_are_mistakes(part):
  tool, _ = tool_of(raw=listed(more={'type': 'array'}))
  with pytest.raises(WrongArguments, match=r'^The argument is not a JSON object; write '):
    tool.read(f'{{"more": [1, {part}]}}')
  assert tool_of()[0].read('a\ud800b') == {'q': 'a?b'}


def test_a_text_alone_is_the_argument_and_a_tool_may_need_none():
  tool, _ = tool_of()
  assert tool.usage == 'look[q]' and tool.read('two words') == {'q': 'two words'}
  assert tool_of(raw=listed())[0].read('') == {}
  assert tool_of(raw=listed(description=''))[0].help == 'calls look'
  assert McpTool(server=None, listed=tool.listed, help=' Of my\n own ').help == 'Of my own'
  assert len(tool_of(raw=listed(description='x' * 5000))[0].help) == 1000


@pytest.mark.parametrize(
  ('raw', 'message'),
  [
    (Fault('start raised OSError', 'gone'), r'does not list its tools \(start raised OSError: gone\); allowed: an MCP'),
    ([], r'lists no tool \(\[\]\); allowed: '),
    ('tools', "lists no tool .'tools'.; allowed: "),
    ([3], 'lists what is no tool: 3$'),
    ([{'name': 'a', 'description': 'b', 'schema': None}], 'lists what is no tool: '),
    ([listed(name='日本')], "lists the tool '日本'; allowed: names that begin with a letter, of at most 50"),
    ([listed(name='x' * 51)], "lists the tool 'xxx.*'; allowed: "),
    ([listed(name='MCP')], "lists the tool 'MCP'; allowed: .* and not 'mcp'"),
    ([listed(q=3)], 'the schema of look has no properties that can be read: '),
    ([listed(q={'enum': ['x' * 70000]})], 'the schema of look has 70.* characters; allowed: at most 65536'),
    ([listed(description='x' * (2 << 20))], 'the description of look: observation is longer than'),
  ],
)
def test_a_list_that_cannot_be_used_is_refused_in_one_line(raw, message):
  server, _ = server_of(raw)
  with raises_one_line(f"^tools='mcp:scripted': .*{message}"):
    server.tools  # noqa: B018


def test_tools_are_chosen_by_their_names():
  one, script = server_of([listed('a'), listed('b-b')])
  two, _ = server_of([listed('c')])
  assert [tool.name for _, tool in select_tools([one, two], ())] == ['a', 'b_b', 'c']
  assert [(server, tool.name) for server, tool in select_tools([one, two], ('c', 'a'))] == [(two, 'c'), (one, 'a')]
  assert len(script.asked) == 1
  with raises_one_line("^tool_options.mcp: names='b_c'; did you mean 'b_b'. allowed: a, b_b, c$"):
    select_tools([one, two], ('b_c',))
  many, _ = server_of([listed(f't{i}') for i in range(33)])
  with raises_one_line(r'^tool_options.mcp: names=\(\) leaves 33 tools; allowed: at most 32, chosen by their names'):
    select_tools([many], ())


# -- calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('outcome', 'meaning', 'restarts'),
  [
    (('text', 'found'), 'look: found', 0),
    (('text', ' '), 'look returned an empty text.', 0),
    (('unreadable', 'odd'), Fault('look returned no usable result', 'odd'), 0),
    (('late', ''), Fault('look took longer than 5 s', hung=True), 1),
  ],
)
def test_each_outcome_has_its_meaning(outcome, meaning, restarts):
  tool, script = tool_of([outcome])
  assert tool.call([{'q': 'a'}]) == [meaning]
  assert script.restarts == restarts and len(script.asked) == 2  # a call that is late is not repeated
  ((_, *call),) = script.asked[1][1]
  assert call == ['look', {'q': 'a'}, 5.0]


@pytest.mark.parametrize(
  ('told', 'read'), [('no such city', 'no such city'), ('', 'look answers that this call is wrong.')]
)
def test_a_mistake_is_told_to_the_policy(told, read):
  (mistake,) = tool_of([('mistake', told)])[0].call([{'q': 'a'}])
  assert isinstance(mistake, WrongArguments) and str(mistake) == read


def test_an_empty_batch_asks_nothing():
  tool, script = tool_of([('text', 'found')])
  asked = len(script.asked)
  assert tool.call([]) == [] and len(script.asked) == asked


def test_a_result_that_is_too_long_is_a_fault():
  assert tool_of([('text', 'x' * (2 << 20))])[0].call([{'q': 'a'}])[0].kind == 'look returned no usable text'


def test_a_call_whose_server_has_gone_is_repeated():
  tool, script = tool_of([('away', 'gone')], [('text', 'b')])
  assert tool.call([{'q': 'b'}]) == ['look: b']
  assert script.restarts == 1 and [ask[1][0][2] for ask in script.asked[1:]] == [{'q': 'b'}] * 2


@pytest.mark.parametrize(('retries', 'tries'), [(0, 1), (3, 4)])
def test_repetitions_have_an_end(retries, tries, monkeypatch):
  pauses = []
  monkeypatch.setattr(mcp_tools.time, 'sleep', pauses.append)
  answers = [[('away', 'gone')], *[Fault('start raised ConnectionError', 'refused')] * 3][:tries]
  tool, script = tool_of(*answers, retries=retries, backoff_s=0.5)
  (fault,) = tool.call([{'q': 'a'}])
  assert fault.kind == 'look got no answer'
  assert fault.detail == ('gone' if tries == 1 else 'start raised ConnectionError: refused')
  assert script.restarts == tries and not script.answers and pauses == [0.5, 1.0, 2.0][:retries]


@pytest.mark.parametrize('answer', [None, 'text', [('text', 3)], [('text', 'a', 'b')], [(b'text', 'a')]])
def test_what_is_no_answer_of_the_client_is_a_fault(answer):
  tool, _ = tool_of(answer)
  assert tool.call([{'q': 'a'}])[0].kind == 'look returned no usable result'


# -- calls at the same time --------------------------------------------------------------------------------------------


class Client:
  """In place of the process of a client: a call named 'now' ends at once, others when the test lets them.

  Attributes:
    begun: names of the calls that it was given since the last start.
  """

  def __init__(self):
    self.process, self.last_end, self.begun, self.restarts = 1, '', [], 0
    self._running, self._ends, self._changed, self._is_dead = {}, {}, threading.Condition(), False

  def call(self, method, begin, wait_s, *, timeout_s):
    """Ends calls as `end` has said."""
    with self._changed:
      if self._is_dead:  # another process takes its place
        self.process, self.last_end, self._running, self._is_dead = self.process + 1, 'exit status 9', {}, False
      self._running |= {number: name for number, name, *_ in begin}
      self.begun += [name for _, name, *_ in begin]
      self._changed.notify_all()
      self._changed.wait_for(lambda: self._ended(), 0.01)
      ended = self._ended()
      self._running = {n: name for n, name in self._running.items() if n not in ended}
      return [(n, *outcome) for n, outcome in ended.items()], None

  def _ended(self):
    ends = {'now': ('text', 'now')} | self._ends
    return {n: ends[name] for n, name in self._running.items() if name in ends}

  def end(self, **outcomes):
    """Lets calls end, by name."""
    with self._changed:
      self._ends |= outcomes
      self._changed.notify_all()

  def wait_for(self, *names):
    """Until these calls are begun."""
    with self._changed:
      assert self._changed.wait_for(lambda: {*names} <= {*self.begun}, 20), self.begun

  def die(self):
    """The process ends before the next call."""
    with self._changed:
      self._is_dead = True

  def restart(self, because):
    """Counts."""
    with self._changed:
      assert not self._running, 'calls that run are not given up'
      self.restarts, self.process, self.begun = self.restarts + 1, self.process + 1, []


@contextlib.contextmanager
def calls_of(most=3):
  """A client, and a function that begins a call in a thread of its own."""
  client = Client()
  calls = McpCalls(client, most)
  with futures.ThreadPoolExecutor(8) as threads:
    try:
      yield client, lambda name: threads.submit(calls.call, name, {}, 20.0)
    finally:
      client.end(a=('text', 'a'), b=('text', 'b'))


def test_calls_of_other_threads_go_on_while_one_waits():
  with calls_of() as (client, begin):
    slow = begin('a')
    client.wait_for('a')
    assert begin('now').result(20) == begin('now').result(20) == ('text', 'now')
    assert not slow.done()
    client.end(a=('mistake', 'm'))
    assert slow.result(20) == ('mistake', 'm') and client.restarts == 0


def test_no_more_calls_run_than_the_limit_says():
  with calls_of(most=2) as (client, begin):
    running = [begin('a'), begin('b')]
    client.wait_for('a', 'b')
    third = begin('now')
    assert not futures.wait([third], 0.2).done and client.begun == ['a', 'b']
    client.end(a=('text', 'x'))
    assert running[0].result(20) == ('text', 'x') and third.result(20) == ('text', 'now')


@pytest.mark.parametrize('kind', ['late', 'away'])
def test_a_server_is_started_again_when_the_calls_that_run_have_ended(kind):
  with calls_of() as (client, begin):
    hung, other = begin('a'), begin('b')
    client.wait_for('a', 'b')
    client.end(a=(kind, 'why'))
    assert hung.result(20) == (kind, 'why')
    third = begin('now')
    assert not futures.wait([third], 0.2).done and client.restarts == 0, 'it waits for the start'
    client.end(b=('text', 'b'))
    assert other.result(20) == ('text', 'b') and third.result(20) == ('text', 'now')
    assert client.restarts == 1 and client.begun == ['now']


def test_calls_of_a_process_that_has_ended_have_gone():
  with calls_of() as (client, begin):
    running = [begin('a'), begin('b')]
    client.wait_for('a', 'b')
    client.die()
    assert [call.result(20) for call in running] == [('away', 'exit status 9')] * 2
    assert client.restarts == 0 and begin('now').result(20) == ('text', 'now')


def test_a_call_of_which_the_client_says_nothing_is_late(monkeypatch):
  monkeypatch.setattr('ragen_jax.envs.dataset.mcp_calls._SLACK_S', -19.8)
  with calls_of() as (client, begin):
    call = begin('a')
    client.wait_for('a')
    monkeypatch.setattr(client, 'restart', lambda because: None)
    assert call.result(20) == ('late', '')


def test_the_start_of_a_process_is_not_part_of_the_time_of_a_call(monkeypatch):
  monkeypatch.setattr('ragen_jax.envs.dataset.mcp_calls._SLACK_S', -19.0)
  with calls_of() as (client, begin):
    exchange = client.call

    def start(*args, timeout_s):
      time.sleep(1.1)
      monkeypatch.setattr(client, 'call', exchange)
      found = exchange(*args, timeout_s=timeout_s)
      client.end(a=('text', 'a'))
      return found

    monkeypatch.setattr(client, 'call', start)
    assert begin('a').result(20) == ('text', 'a') and client.restarts == 0


def test_after_three_calls_of_a_batch_that_are_late_its_others_are_not_made():
  tool, script = tool_of(*[[('late', '')]] * 3, workers=1)
  *late, fourth = tool.call([{'q': 'a'}] * 4)
  assert late == [Fault('look took longer than 5 s', hung=True)] * 3
  assert fourth == Fault('look took longer than 5 s', 'not tried, because earlier calls took too long')
  assert script.restarts == 3 and not script.answers


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('names', 'options', 'message'),
  [
    (('mcp:',), {}, "tools='mcp:'; allowed: 'mcp:COMMAND' or 'mcp:http://HOST:PORT/mcp'"),
    (('mcp:a "b',), {}, "tools='mcp:a \"b' is no command .No closing quotation.; allowed: "),
    (('mcp:http://me:secret@host/mcp',), {}, 'tools: an MCP server has a user name or a password, .*; allowed: none'),
    (
      (),
      {'mcp': {'nmaes': ()}},
      "tool_options.mcp: nmaes is no option; did you mean 'names'. allowed: names, budget, ",
    ),
    ((), {'mcp': {'names': 'a'}}, "tool_options.mcp: names='a'; allowed: a tuple of names"),
    ((), {'mcp': {'environment': (3,)}}, r'tool_options.mcp: environment=\(3,\); allowed: a tuple of names'),
    ((), {'mcp': {'retries': -1}}, 'tool_options.mcp: retries=-1; allowed: whole numbers from 0'),
    ((), {'mcp': {'workers': 0}}, 'tool_options.mcp: workers=0; allowed: whole numbers from 1'),
    ((), {'mcp': {'backoff_s': 0}}, 'tool_options.mcp: backoff_s=0; allowed: seconds, above 0'),
    ((), {'mcp': {'start_timeout_s': 'x'}}, "tool_options.mcp: start_timeout_s='x'; allowed: seconds, above 0"),
    ((), {'mcp': {'memory_mib': 63}}, 'tool_options.mcp: memory_mib=63; allowed: integers from 64 to '),
    ((), {'mcp': {'timeout_s': 0}}, 'tool_options.mcp: timeout_s=0; allowed: seconds, above 0'),
    ((), {'mcp': {'max_chars': 99}}, 'tool_options.mcp: max_chars=99; allowed: whole numbers from 100'),
    ((), {'mcp': {'budget': -1}}, 'tool_options.mcp: budget=-1; allowed: whole numbers from 0'),
  ],
)
def test_wrong_options_are_named_before_anything_is_started(names, options, message):
  with raises_one_line(f'^{message}'):
    make_toolbox(names, options)


def test_what_is_missing_on_this_machine_is_named(monkeypatch):
  assert make_toolbox(('mcp:no-such-program --flag',), {}) is not None  # nothing is started yet
  monkeypatch.setattr(mcp_tools.importlib.util, 'find_spec', lambda name: None)
  with raises_one_line(
    "^tools='mcp:x' needs the package mcp, which is not installed: pip install -r requirements-data"
  ):
    make_toolbox(('mcp:x',), {}).check()
  monkeypatch.setattr(mcp_tools.importlib.util, 'find_spec', lambda name: name)
  with raises_one_line(
    "^tools='mcp:no-such-program --flag': there is no program 'no-such-program'; allowed: 'mcp:COMM"
  ):
    make_toolbox(('mcp:no-such-program --flag',), {}).check()
  with raises_one_line("^tool_options.mcp: environment='RAGEN_NO_KEY' is not set; allowed: variables of the run"):
    make_toolbox((f'mcp:{sys.executable}',), {'mcp': {'environment': ('RAGEN_NO_KEY',)}}).check()


def test_a_tool_may_have_the_name_of_a_built_in_one_whose_options_are_in_the_config(monkeypatch):
  server, _ = server_of([listed('search')])
  monkeypatch.setattr('ragen_jax.envs.dataset.tool_use.shared_server', lambda spec, settings: server)
  box = make_toolbox(('mcp:x',), {'mcp': {'budget': 3}, 'search': {'retriever': '', 'top_k': 3, 'budget': 9}})
  box.check()
  assert [(tool.name, tool.budget, type(tool)) for tool in box.tools.values()] == [('search', 3, McpTool)]


def test_tools_of_a_server_follow_others_and_have_options_of_their_own(monkeypatch):
  server, script = server_of([listed('a'), listed('b'), listed('shout')])
  monkeypatch.setattr('ragen_jax.envs.dataset.tool_use.shared_server', lambda spec, settings: server)
  options = {
    'mcp': {'names': ('b',), 'budget': 3, 'max_chars': 500}, 'b': {'budget': 1, 'help': 'Mine.'}, 'shout': {'budget': 2}
  }  # fmt: skip
  box = make_toolbox(('mcp:x', f'{TOOLS}:shout'), options)
  assert not script.asked
  assert [(t.name, t.budget, t.max_chars) for t in box.tools.values()] == [('shout', 2, 4000), ('b', 1, 500)]
  assert 'b[] Mine; once in an episode.' in box.rules()
  with raises_one_line("^tools: two have the name 'shout'; allowed: "):
    make_toolbox(('mcp:x', f'{TOOLS}:shout'), {}).check()
  with raises_one_line('^tool_options.c: there is no such tool; allowed: search, a, b, shout, mcp, finish'):
    make_toolbox(('mcp:x',), {'c': {}}).check()
  with raises_one_line('^tool_options.b: server is no option; allowed: '):
    make_toolbox(('mcp:x',), {'b': {'server': 1}}).check()


def test_environments_share_a_server_if_its_settings_are_equal():
  spec, settings = f'mcp:{sys.executable} shared.py', McpSettings(retries=1)
  server = mcp_tools.shared_server(spec, settings)
  assert mcp_tools.shared_server(spec, McpSettings(retries=1)) is server
  assert mcp_tools.shared_server(spec, McpSettings(retries=2)) is not server


# -- servers of the official package -----------------------------------------------------------------------------------


def close(box):
  """Ends the servers of a toolbox, which a run ends with itself."""
  mcp_tools.shared_server.cache_clear()
  for tool in box.tools.values():
    tool.server.close()


def told(box, *answers):
  """What the answers of as many rows come to."""
  return box.open(len(answers)).step(range(len(answers)), answers)


def pids_of(box, call='forecast[itself]'):
  """The process of the server and that of the client, its parent."""
  return [int(x) for x in told(box, call)[0].text.split()[1:]]


def has_ended(pid, patience=10.0):
  """Whether a process ends soon."""
  end = time.monotonic() + patience
  while pathlib.Path(f'/proc/{pid}').exists() and time.monotonic() < end:
    time.sleep(0.02)
  return not pathlib.Path(f'/proc/{pid}').exists()


@pytest.mark.slow
@needs_mcp
def test_an_episode_with_a_program(tmp_path):
  (tmp_path / 'questions.jsonl').write_text('{"question": "2 + 3?", "answer": "5"}\n', encoding='utf-8')
  env = registry.make('dataset', {
    'path': str(tmp_path / 'questions.jsonl'), 'split': 'all', 'tools': (f'mcp:{sys.executable} {SERVER}',),
    'tool_options': {'mcp': {'timeout_s': 20.0, 'names': ('add', 'pick_one', 'forecast')}, 'add': {'max_chars': 100}},
  })  # fmt: skip
  env.check()
  box = env._toolbox
  assert env.rules().splitlines()[2:] == [
    'add[{"a": whole number, "b": whole number (optional), "more": list (optional)}] Adds numbers. (a: the first '
    'number).',
    'pick_one[{"kind": "red" or "blue"}] Picks a colour.',
    'forecast[city] Tells the weather.',
    'finish[answer] gives your answer and ends the episode.',
  ]
  session = env.open(2)
  session.reset([0, 1], [0, 0], [0, 0])
  first, wrong = (read_step(x) for x in session.step([0, 1], ['add[{"a": 2, "b": 3}]', 'forecast[Atlantis]']))
  assert (first.observation, first.done, first.effective, first.metrics['add_calls']) == ('add: 5', False, True, 1.0)
  assert not wrong.effective and not wrong.done and 'forecast' in wrong.observation
  assert wrong.metrics['invalid_calls'] == wrong.metrics['forecast_calls'] == 1.0
  assert read_step(session.step([0], ['finish[5]'])[0]).success
  more, picked = told(box, 'add[{"a": 2, "more": [10, 20]}]', 'pick_one[{"kind": "red"}]')
  assert (more.text, picked.text) == ('add: 33', 'pick_one: RED')
  server, client = pids_of(box)
  assert pids_of(box) == [server, client] and os.getpgid(server) == client
  close(box)
  assert has_ended(server) and has_ended(client)


@needs_mcp
@pytest.mark.slow
def test_an_episode_with_an_address():
  with socket.socket() as taken:
    taken.bind(('127.0.0.1', 0))
    port = taken.getsockname()[1]
  process = subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL)
  try:
    end = time.monotonic() + 60
    while socket.socket().connect_ex(('127.0.0.1', port)) and time.monotonic() < end:
      time.sleep(0.05)
    box = make_toolbox(
      (f'mcp:http://127.0.0.1:{port}/mcp',), {'mcp': {'timeout_s': 20.0, 'retries': 1, 'backoff_s': 0.01}}
    )
    box.check()
    assert list(box.tools) == ['add', 'forecast', 'pick_one']
    good, wrong = told(box, 'forecast[Turin]', 'forecast[Atlantis]')
    assert good == Told('forecast: Sun in Turin.', True, good.metrics) and good.metrics['forecast_calls'] == 1.0
    assert not wrong.valid
    (gone,) = told(box, 'forecast[Pompeii]')
    assert isinstance(gone, Fault) and gone.kind == 'forecast got no answer' and 'ConnectError' in gone.detail
    close(box)
  finally:
    process.kill()
    process.wait()


@needs_mcp
@pytest.mark.slow
def test_a_program_that_dies_or_hangs_is_a_fault_and_serves_the_next_call():
  options = {'mcp': {'timeout_s': 20.0, 'backoff_s': 0.01, 'retries': 1}, 'do_it': {'timeout_s': 2.0}}
  box, itself = make_toolbox((f'mcp:{sys.executable} {RAW}',), options), 'do_it[{"how": "itself"}]'
  box.check()
  first = pids_of(box, itself)
  (died,) = told(box, 'do_it[{"how": "die"}]')
  assert died.kind == 'do_it got no answer' and 'I was told to die | exit status 3' in died.detail
  assert has_ended(first[0]) and has_ended(first[1])
  second = pids_of(box, itself)
  assert not set(first) & set(second)
  hung, fine = told(box, 'do_it[{"how": "hang"}]', 'do_it[{"how": "well"}]')
  assert hung == Fault('do_it took longer than 2 s', hung=True) and fine.text == 'do_it: well'
  assert has_ended(second[0]) and told(box, 'do_it[{"how": "again"}]')[0].text == 'do_it: again'
  close(box)


@needs_mcp
@pytest.mark.slow
def test_rows_in_threads_call_a_program_at_the_same_time():
  box = make_toolbox((f'mcp:{sys.executable} {RAW}',), {'mcp': {'timeout_s': 20.0}, 'do_it': {'timeout_s': 1.0}})
  box.check()
  session = box.open(2)
  with futures.ThreadPoolExecutor(2) as threads:
    hung = threads.submit(session.step, [0], ['do_it[{"how": "hang"}]'])
    time.sleep(0.3)
    (fine,) = session.step([1], ['do_it[{"how": "well"}]'])
    assert fine.text == 'do_it: well' and not hung.done()
    assert hung.result(30) == [Fault('do_it took longer than 1 s', hung=True)]
  assert told(box, 'do_it[{"how": "again"}]')[0].text == 'do_it: again'
  close(box)


@pytest.mark.slow
@needs_mcp
def test_a_server_that_says_nothing_is_one_line_and_leaves_no_process(tmp_path):
  box = make_toolbox((f'mcp:{sys.executable} {RAW} mute',), {'mcp': {'start_timeout_s': 3.0}})
  with raises_one_line("^tools='mcp:.*mute': the server does not list its tools .start took longer than 3 s"):
    box.check()
  mcp_tools.shared_server.cache_clear()


@needs_mcp
@pytest.mark.parametrize('how', ['ends', 'is killed'])
@pytest.mark.slow
@pytest.mark.exhaustive_cases('ends')
def test_a_program_and_its_children_end_with_the_run(how, tmp_path):
  code = (
    'import sys, os, signal; from ragen_jax.envs.dataset.tool_use import make_toolbox; '
    f'make_toolbox(("mcp:{sys.executable} {RAW} late {tmp_path}/pids",), {{}}).check(); '
    + ('os.kill(os.getpid(), signal.SIGKILL)' if how == 'is killed' else '')
  )
  subprocess.run([sys.executable, '-c', code], timeout=120, cwd=ROOT, env=os.environ | {'JAX_PLATFORMS': 'cpu'})
  for pid in map(int, (tmp_path / 'pids').read_text().split()):
    state = pathlib.Path(f'/proc/{pid}/stat')
    end = time.monotonic() + 10
    while state.exists() and state.read_text().rpartition(')')[2].split()[0] != 'Z' and time.monotonic() < end:
      time.sleep(0.02)
    assert not state.exists() or state.read_text().rpartition(')')[2].split()[0] == 'Z'
