"""The pages of agent programs and docs/metrics.md agree with the endpoint: tables, and programs that run as printed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.server
import json
import re
import threading
import types
from collections.abc import Iterator

import pytest

from ragen_jax.config import checks, command_line
from ragen_jax.serving import errors
from ragen_jax.serving.client import Task
from ragen_jax.serving.conversation.sessions import NEW_ROW_CAUSES
from ragen_jax.serving.engine.settings import EngineStats
from ragen_jax.serving.http import prometheus
from ragen_jax.serving.play.agent_player import make_runner
from ragen_jax.serving.play.async_player import METRICS
from ragen_jax.serving.play.env_program import PENALTY, REWARD, SUCCESS
from ragen_jax.serving.play.episodes import EpisodeSettings, build_rollout
from ragen_jax.serving.play.runners import RunWatch, load_function
from ragen_jax.serving.types import AttemptState
from ragen_jax.serving.wire.fields import CHAT, COMPLETIONS, RESPONSES, Treatment
from tests.support.paths import ROOT

PAGES = ('agents', 'agents_reference', 'agent_training', 'agent_server', 'prompt_optimisation')
PAGE = '\n'.join((ROOT / 'docs' / f'{name}.md').read_text(encoding='utf-8') for name in PAGES)


def _section(heading: str, page: str = PAGE) -> str:
  """The text under a heading, up to the next heading of the same or a higher level."""
  level = len(heading) - len(heading.lstrip('#'))
  page = re.sub(r'^```.*?^```', '', page, flags=re.DOTALL | re.MULTILINE)  # comments there are no headings
  (found,) = re.findall(rf'^{re.escape(heading)}\n(.*?)(?=^#{{1,{level}}} |\Z)', page, re.DOTALL | re.MULTILINE)
  return found


def _tables(text: str) -> list[list[tuple[str, ...]]]:
  """The rows of each table without its two head lines; cells without the marks of code."""
  found = []
  for block in re.findall(r'(?:^\|.*\n)+', text, re.MULTILINE):
    lines = [[cell.strip() for cell in line.strip().strip('|').split('|')] for line in block.splitlines()]
    found.append([tuple(cell.replace('`', '') for cell in cells) for cells in lines[2:]])
  return found


def _source() -> str:
  return '\n'.join(p.read_text(encoding='utf-8') for p in sorted((ROOT / 'ragen_jax' / 'serving').rglob('*.py')))


def test_the_tables_of_request_fields_are_those_of_the_code():
  wanted: dict[Treatment, dict[tuple[str, str], list[str]]] = {treatment: {} for treatment in Treatment}
  for endpoint, fields in (('chat', CHAT), ('completions', COMPLETIONS), ('responses', RESPONSES)):
    for field in fields:
      note = f'{field.allowed()}: {field.note}' if field.treatment is Treatment.REFUSE else field.note
      wanted[field.treatment].setdefault((field.name, note), []).append(endpoint)
  told = _tables(_section('### Request fields'))
  assert told == [[(name, ', '.join(at), note) for (name, note), at in rows.items()] for rows in wanted.values()]


def test_the_table_of_causes_is_that_of_the_code():
  (told,) = _tables(_section('## How calls become rows'))
  assert [cause for cause, _ in told] == list(NEW_ROW_CAUSES)


def test_the_table_of_endpoints_is_that_of_the_application():
  pytest.importorskip('starlette')
  from ragen_jax.serving.http.app import App

  service = types.SimpleNamespace(lifecycle=None, forget=None, settings=None)
  app = App(service, 'key', lambda: None).asgi
  routes = {(m, re.sub(r'\{(\w+)(?::path)?\}', r'<\1>', r.path)) for r in app.routes for m in r.methods - {'HEAD'}}
  endpoints = _tables(_section('## The wire'))[0]
  assert len({(method, path) for method, path, _, _ in endpoints}) == len(endpoints)
  assert {(method, path) for method, path, _, _ in endpoints} == routes
  requests = [row[0] for row in _tables(_section('## The rollout API'))[0]]
  admin = {'rollouts', 'rewards', 'finish', 'heartbeat'}
  assert sorted(requests) == sorted(f'{m} {p}' for m, p in routes if admin & set(p.split('/')))


def test_the_table_of_errors_has_every_error():
  told = {(int(status), code) for status, code, _ in _tables(_section('### Errors'))[0]}
  made = [
    errors.bad_request('field', ''), errors.too_long(2, 1), errors.too_large(1), errors.unauthorized(''),
    errors.not_found(''), errors.over(''), errors.overloaded('', 1.0), errors.internal('', retry=False),
  ]  # fmt: skip
  assert {(e.status, e.code) for e in made} <= told
  others = told - {(e.status, e.code) for e in made}
  assert [code for _, code in others if f"'{code}'" not in _source()] == []
  named = set(re.findall(r"(?:code=|bad_request\([^\n]*, |not_found\([^\n]*, )'(\w+)'\)", _source()))
  assert named <= {code for _, code in told}
  assert {'call_limit', 'model_not_found', 'conflict'} <= named


def test_the_table_of_prometheus_metrics_is_what_the_server_tells():
  stats = EngineStats(**{field.name: 0 for field in dataclasses.fields(EngineStats)})
  text = prometheus.render({'': stats}, {}, {}, {}, 0)
  types_ = dict(re.findall(r'^# TYPE (\S+) (.*)$', text, re.MULTILINE))
  wanted = [(name, types_[name], about) for name, about in re.findall(r'^# HELP (\S+) (.*)$', text, re.MULTILINE)]
  assert _tables(_section('## The page and metrics')) == [wanted]


def test_the_metrics_page_explains_every_metric_of_a_rollout():
  settings = EpisodeSettings(
    group_size=1, incomplete='drop', off_policy='exclude', temperature=1.0, top_p=1.0, top_k=0, success_reward='',
    success_score=1.0, max_calls=9, stop_id=0, pad_id=0,
  )  # fmt: skip
  _, metrics = build_rollout([], settings, str)
  page = (ROOT / 'docs' / 'metrics.md').read_text(encoding='utf-8')
  told = []
  for cell, _ in _tables(_section('### Agent programs', page))[0]:
    for name in cell.split(', '):
      stem, _, rest = name.partition('{')
      told += [stem + x for x in rest.rstrip('}').split(',')] if rest else [stem]
  assert sorted(told) == sorted([*metrics, 'serving/reward/NAME'])


def test_the_metrics_page_explains_asynchronous_training():
  page = (ROOT / 'docs' / 'metrics.md').read_text(encoding='utf-8')
  assert [name for name, _ in _tables(_section('### Agent programs', page))[1]] == list(METRICS)


def test_the_page_names_the_variables_of_a_program():
  told = {name: about for name, about in _tables(_section('## A command'))[0]}
  task = _task('http://127.0.0.1:1')
  assert told['RAGEN_TASK'] == 'the task as JSON: ' + ', '.join(task.to_json())
  assert set(told) == {'RAGEN_TASK', 'RAGEN_BASE_URL', 'RAGEN_KEY', 'OPENAI_BASE_URL', 'OPENAI_API_KEY'}


def test_the_guide_fits_on_two_printed_pages():
  lines = (ROOT / 'docs' / 'agents.md').read_text(encoding='utf-8').splitlines()
  assert len(lines) <= 135
  assert max(map(len, lines)) <= 120


# -- The programs of the page, against a server that answers the same to everybody. ------------------------------------


def _task(server_url: str) -> Task:
  return Task(
    rollout_id='r', attempt_id='r.1', number=1, mode='train', group='g', input={'question': '2 + 2', 'answer': '4'},
    timeout_s=60.0, heartbeat_s=0.0, server_url=server_url, api_key='rk-key',
  )  # fmt: skip


@contextlib.contextmanager
def _stub() -> Iterator[tuple[str, list[tuple[str, str, dict]]]]:
  """The address of a server whose policy always says 4, and the requests that it got: (path, key, body)."""
  got: list[tuple[str, str, dict]] = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      body = json.loads(self.rfile.read(int(self.headers['content-length'])))
      got.append((self.path, self.headers['authorization'], body))
      message = {'role': 'assistant', 'content': 'It is 4.'}
      answer = {
        'id': f'chatcmpl-{len(got)}', 'object': 'chat.completion', 'created': 0, 'model': 'policy',
        'choices': [{'index': 0, 'message': message, 'finish_reason': 'stop'}],
      }  # fmt: skip
      content = json.dumps(answer).encode()
      self.send_response(200)
      self.send_header('content-type', 'application/json')
      self.send_header('content-length', str(len(content)))
      self.end_headers()
      self.wfile.write(content)

    def log_message(self, *_):
      pass

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  try:
    yield f'http://127.0.0.1:{server.server_port}', got
  finally:
    server.shutdown()
    thread.join(30)
    server.server_close()


@pytest.fixture
def programs(tmp_path):
  """A folder with the files of the page's Python blocks, which begin with their names."""
  for block in re.findall(r'^```python\n(.*?)^```', PAGE, re.DOTALL | re.MULTILINE):
    (tmp_path / block.splitlines()[0].removeprefix('# ')).write_text(block, encoding='utf-8')
  (tasks,) = re.findall(r'^```\n(\{"question".*?)^```', PAGE, re.DOTALL | re.MULTILINE)
  for name in ('train.jsonl', 'val.jsonl'):
    (tmp_path / name).write_text(tasks, encoding='utf-8')
  return tmp_path


def test_the_function_of_the_page_plays(programs):
  pytest.importorskip('openai')
  play = load_function('runner', f'{programs}/my_agent.py:play')
  with _stub() as (url, got):
    assert asyncio.run(play(_task(url))) == 1.0
  assert [(path, key) for path, key, _ in got] == [('/attempts/r.1/v1/chat/completions', 'Bearer rk-key')] * 2
  assert [m['role'] for m in got[1][2]['messages']] == ['user', 'assistant', 'user']


def test_the_function_with_a_prompt_of_the_page_plays(programs):
  pytest.importorskip('openai')
  play = load_function('runner', f'{programs}/prompted_agent.py:play')
  with _stub() as (url, got):
    assert asyncio.run(play(dataclasses.replace(_task(url), prompt='Answer.'))) == 1.0
  assert got[0][2]['messages'] == [{'role': 'system', 'content': 'Answer.'}, {'role': 'user', 'content': '2 + 2'}]


@pytest.mark.slow
def test_the_program_of_the_page_plays(programs, monkeypatch):
  pytest.importorskip('openai')
  monkeypatch.chdir(programs)
  monkeypatch.setenv('PYTHONPATH', str(ROOT))
  command = re.search(r"runner = '(python my_program\.py)'", PAGE).group(1)
  with _stub() as (url, got):
    outcome = make_runner('runner', command, ()).run(_task(url), RunWatch(120.0))
  assert (outcome.state, outcome.error) == (AttemptState.SUCCEEDED, '')
  (_, _, reward) = got[1]
  assert [path for path, _, _ in got] == ['/attempts/r.1/v1/chat/completions', '/attempts/r.1/rewards']
  assert (reward['value'], reward['call']) == (1.0, 'chatcmpl-1')


def test_the_environment_of_the_page_can_be_played(programs, monkeypatch):
  monkeypatch.chdir(programs)
  monkeypatch.syspath_prepend(str(ROOT))
  config = command_line.load_config('my_environment.py')
  checks.check_config(config)
  assert config.envs.Agent.runner == 'env:FrozenLake'
  (names,) = {re.findall(r'names? `(\w+)` and `(\w+)`', _section('## An environment of this project'))[0]}
  assert (*names, config.serve.success_reward) == (REWARD, PENALTY, SUCCESS)


def test_the_config_of_the_page_can_run(programs, monkeypatch):
  monkeypatch.chdir(programs)
  monkeypatch.syspath_prepend(str(ROOT))
  config = command_line.load_config('my_config.py')
  checks.check_config(config)
  assert (config.train.tags, config.eval.tags) == (('Agent',), ('HeldOut',))
