"""The agents of docs/examples with their real clients: what was sampled is what is trained, in one row each.

The interpreter that has their packages is named by RAGEN_CLIENTS_PYTHON, and the folder whose node_modules has the npm
package `openai` by RAGEN_CLIENTS_NODE.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from docs.examples.lake import Lake
from ragen_jax.serving.client import Task
from ragen_jax.serving.play.episodes import EpisodeSettings, FinishedAttempt, TaskAttempts, build_rollout
from ragen_jax.serving.play.runners import ProgramRunner, RunWatch
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.serving.types import AttemptState
from tests.support.images import data_url
from tests.support.paths import ROOT
from tests.support.scripted import SAMPLING, ScriptedEngine, Server, serve
from tests.support.vision import image_of
from tests.support.wire import CALL_TAGS, IMAGES, limits, tokenizer

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / 'docs' / 'examples'
PYTHON, NODE = os.environ.get('RAGEN_CLIENTS_PYTHON', ''), os.environ.get('RAGEN_CLIENTS_NODE', '')
WAY = ('right', 'right', 'down', 'down')
SEED = next(seed for seed in range(100) if Lake(seed).hole == (1, 1))
# A call with white space that no client writes, so that a reply that is encoded again shows.
CALL = '<tool_call>\n{{"name":  "{}", "arguments": {{"{}":{}}}}}\n</tool_call>'


STREAMED = """
import asyncio


async def run():
  result = Runner.run_streamed(agent, game.show(), max_turns=10)
  async for _ in result.stream_events():
    pass
  return result

"""


@pytest.fixture
def tok(tmp_path):
  return tokenizer(tmp_path / 'tokenizer', CALL_TAGS)


def needs(package):
  """Skips a test whose client is not installed."""
  if not PYTHON:
    pytest.skip('RAGEN_CLIENTS_PYTHON names no interpreter with the packages of docs/examples/requirements.txt')
  probe = subprocess.run([PYTHON, '-c', f'import {package}'], capture_output=True, text=True)
  if probe.returncode:
    pytest.skip(f'{PYTHON} has no {package}')


def play(server: Server, argv, seed: int = SEED, cwd: str | None = None) -> Task:
  """Runs an example as an attempt, as a trainer's runner does, and ends it."""
  task = server.attempt(task={'seed': seed, 'member': 0}, timeout_s=200.0)
  kept = {name: os.environ[name] for name in ('PATH', 'HOME') if name in os.environ}
  environment = kept | {'PYTHONPATH': str(ROOT), 'LANGSMITH_TRACING': 'false'}
  outcome = ProgramRunner(argv, cwd, environment, 10.0).run(task, RunWatch(200.0))
  assert outcome.state == AttemptState.SUCCEEDED, outcome.error
  server.lifecycle.finish(task.attempt_id, outcome.state, '')
  return task


def check_rows(server: Server, task: Task, tok, *, causes):
  """Every sampled token is trained once, in the rows that the engine was fed."""
  calls, rewards = server.calls(task), server.store.ask(Tables.rewards, task.attempt_id)
  assert [call.new_row_cause for call in calls] == causes
  settings = EpisodeSettings(
    group_size=1, incomplete='drop', off_policy='error', temperature=SAMPLING.temperature, top_p=SAMPLING.top_p,
    top_k=SAMPLING.top_k, success_reward='', success_score=1.0, max_calls=9, stop_id=tok.stop_ids[0], pad_id=tok.pad_id,
  )  # fmt: skip
  pixels = server.store.ask(Tables.images, task.attempt_id)
  attempt = FinishedAttempt(task.attempt_id, AttemptState.SUCCEEDED, '', tuple(calls), tuple(rewards), pixels)
  rollout, metrics = build_rollout([TaskAttempts('Agent', 0, (attempt,))], settings, tok.decode)
  trained = rollout.trajectory
  sampled = sum(len(call.generated.ids) for call in calls)
  assert np.sum(trained.loss_mask) == sampled and metrics['serving/calls'] == len(calls) == len(server.engine.requests)
  assert len(trained.tokens) == 1 + sum(map(bool, causes))
  for request, call in zip(server.engine.requests, calls, strict=True):
    start, ids = len(request.prompt), call.generated.ids
    row = trained.tokens[call.row]
    assert tuple(row[:start].tolist()) == request.prompt
    assert tuple(row[start : start + len(ids)].tolist()) == ids
    assert np.all(trained.loss_mask[call.row, start : start + len(ids)])
  assert rollout.episode_scores.tolist() == [1.0]
  return rewards


def moves(tool: bool):
  """A script that goes to the goal, and then says that it is done."""

  def script(prompt: str, number: int) -> str:
    if number >= len(WAY):
      return 'I am there.'
    return CALL.format('move', 'direction', f'"{WAY[number]}"') if tool else f'I go {WAY[number]}.'

  return script


@pytest.mark.parametrize(
  ('name', 'package', 'tool', 'calls', 'rewarded'),
  [
    ('openai_agent', 'openai', False, 4, 3),
    ('langgraph_agent', 'langgraph', True, 5, 4),
    ('openai_agents_agent', 'agents', True, 5, 4),
    ('autogen_agent', 'autogen_agentchat', True, 5, 4),
  ],
)
def test_python(tmp_path, tok, name, package, tool, calls, rewarded):
  needs(package)
  engine = ScriptedEngine(tok, moves(tool))
  with serve(tmp_path, engine, limits=limits(context=20_000, vocabulary=1000)) as server:
    task = play(server, [PYTHON, str(EXAMPLES / f'{name}.py')])
    (reward,) = check_rows(server, task, tok, causes=[''] * calls)
    assert reward.call_id == server.calls(task)[rewarded].call_id


def test_a_reply_that_is_cut_off_is_learnt_from_with_the_agents_sdk(tmp_path, tok):
  needs('agents')
  engine = ScriptedEngine(tok, lambda prompt, number: moves(True)(prompt, 0) if number == 0 else 'and on ' * 99)
  with serve(tmp_path, engine, limits=limits(context=20_000, vocabulary=1000)) as server:
    task = play(server, [PYTHON, str(EXAMPLES / 'openai_agents_agent.py')])
    (reward,) = server.store.ask(Tables.rewards, task.attempt_id)
    assert reward.value == 0 and reward.call_id == server.calls(task)[-1].call_id


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('api', ['responses', 'chat_completions'])
@pytest.mark.exhaustive_cases('responses-True', 'chat_completions-False', 'chat_completions-True')
def test_both_interfaces_of_the_agents_sdk(tmp_path, tok, api, stream):
  needs('agents')
  source = (EXAMPLES / 'openai_agents_agent.py').read_text()
  source = source.replace('import Agent,', 'import Agent, set_default_openai_api,').replace(
    'set_tracing_disabled(True)', f'set_default_openai_api({api!r}); set_tracing_disabled(True)', 1
  )
  if stream:
    source = source.replace('\ntry:\n', f'{STREAMED}\ntry:\n')
    source = source.replace('Runner.run_sync(agent, game.show(), max_turns=10)', 'asyncio.run(run())')
  if api == 'chat_completions':  # the SDK does not tell the ids of these answers
    source = source.replace('.raw_responses[-1].response_id', ".raw_responses and 'last'")
  program = tmp_path / 'agent.py'
  program.write_text(f'import sys\nsys.path.append({str(EXAMPLES)!r})\n{source}')
  engine = ScriptedEngine(tok, moves(True))
  with serve(tmp_path, engine, limits=limits(context=20_000, vocabulary=1000)) as server:
    task = play(server, [PYTHON, str(program)])
    check_rows(server, task, tok, causes=[''] * 5)
    prefix = 'resp_' if api == 'responses' else 'chatcmpl-'
    assert all(call.call_id.startswith(prefix) for call in server.calls(task))


PICTURES = """
from agents import Agent, Runner, ToolOutputImage, function_tool, set_tracing_disabled

from ragen_jax.serving import client

set_tracing_disabled(True)


@function_tool
def look() -> ToolOutputImage:
  return ToolOutputImage(image_url=URLS[1])


content = [{'type': 'input_text', 'text': 'Look: '}, {'type': 'input_image', 'image_url': URLS[0], 'detail': 'auto'}]
agent = Agent(name='walker', model='policy', tools=[look])
answers = Runner.run_sync(agent, [{'role': 'user', 'content': content}], max_turns=3).raw_responses
client.reward(1.0, call=answers[-1].response_id)
"""


@pytest.mark.parametrize('api', ['responses', 'chat_completions'])
@pytest.mark.exhaustive_cases('chat_completions')
def test_the_agents_sdk_sends_images_of_users_and_tools(tmp_path, api):
  needs('agents')
  seeing = tokenizer(tmp_path / 'seeing', CALL_TAGS, images=True)
  pictures = [image_of(16, 24, seed) for seed in range(2)]
  program = tmp_path / 'agent.py'
  source = f'URLS = {[data_url(x) for x in pictures]!r}\n{PICTURES}'
  if api == 'chat_completions':  # the SDK does not tell the ids of these answers
    source = source.replace('import Agent,', 'import Agent, set_default_openai_api,')
    source = source.replace(
      'set_tracing_disabled(True)', f'set_default_openai_api({api!r})\nset_tracing_disabled(True)'
    )
    source = source.replace('call=answers[-1].response_id', "call='last'")
  program.write_text(source)
  engine = ScriptedEngine(
    seeing, lambda prompt, number: 'Done.' if number else '<tool_call>\n{"name": "look"}\n</tool_call>'
  )
  with serve(tmp_path, engine, limits=limits(context=20_000, vocabulary=1000, images=IMAGES)) as server:
    task = play(server, [PYTHON, str(program)])
    check_rows(server, task, seeing, causes=['', ''])
  shown = [[span.segment.image for span in request.images] for request in engine.requests]
  np.testing.assert_array_equal(shown[0], pictures[:1])
  # In chat completions, the SDK leaves images out of the results of tools.
  np.testing.assert_array_equal(shown[1], pictures if api == 'responses' else pictures[:1])


def test_the_reflection_of_autogen_drops_the_tools_and_begins_a_row(tmp_path, tok):
  needs('autogen_agentchat')
  source = (EXAMPLES / 'autogen_agent.py').read_text()
  assert 'max_tool_iterations=8' in source
  program = tmp_path / 'agent.py'
  changed = source.replace('max_tool_iterations=8', 'reflect_on_tool_use=True, max_tool_iterations=4')
  program.write_text(f'import sys\nsys.path.append({str(EXAMPLES)!r})\n{changed}')
  engine = ScriptedEngine(tok, moves(True))
  with serve(tmp_path, engine, limits=limits(context=20_000, vocabulary=1000)) as server:
    task = play(server, [PYTHON, str(program)])
    check_rows(server, task, tok, causes=['', '', '', '', 'tools_changed'])


def test_typescript(tmp_path, tok):
  node = shutil.which('node')
  if not node or not NODE:
    pytest.skip('there is no node, or RAGEN_CLIENTS_NODE names no folder with node_modules/openai')
  shutil.copy(EXAMPLES / 'typescript_agent.mjs', tmp_path)
  (tmp_path / 'node_modules').symlink_to(pathlib.Path(NODE).resolve() / 'node_modules')
  guesses = (5, 8, 7)
  engine = ScriptedEngine(tok, lambda prompt, number: CALL.format('guess', 'number', guesses[number]))
  with serve(tmp_path, engine, limits=limits(context=20_000, vocabulary=1000)) as server:
    task = play(server, [node, str(tmp_path / 'typescript_agent.mjs')], seed=37)
    (reward,) = check_rows(server, task, tok, causes=['', '', ''])
    assert reward.call_id == server.calls(task)[-1].call_id


def test_plain_http(tmp_path, tok):
  program = tmp_path / 'agent.py'
  program.write_text(
    'import json, os, urllib.request\n'
    'def post(url, body):\n'
    "  headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'}\n"
    '  return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))\n'
    "base = os.environ['OPENAI_BASE_URL']\n"
    "said = [{'role': 'user', 'content': 'Go!'}]\n"
    'for _ in range(3):\n'
    "  answer = post(base + '/chat/completions', {'model': 'policy', 'messages': said})\n"
    "  said += [answer['choices'][0]['message'], {'role': 'user', 'content': 'On!'}]\n"
    "post(base.removesuffix('/v1') + '/rewards', {'value': 1, 'call': 'last'})\n"
  )
  with serve(tmp_path, ScriptedEngine(tok, moves(False))) as server:
    task = play(server, [sys.executable, str(program)])
    check_rows(server, task, tok, causes=[''] * 3)


def test_the_examples_are_short_and_their_packages_are_listed():
  listed = {re.split(r'[>=\[]', line)[0] for line in (EXAMPLES / 'requirements.txt').read_text().splitlines()}
  assert {'openai', 'openai-agents', 'langgraph', 'langchain-openai', 'autogen-ext'} <= listed
  for file in (*EXAMPLES.glob('*_agent.py'), *EXAMPLES.glob('*.mjs')):
    assert len(file.read_text().splitlines()) < 40, file.name


def test_the_game():
  for seed in range(20):
    lake = Lake(seed)
    shown = lake.show()
    assert sorted(shown.replace('\n', '')) == sorted('PHG______') and shown[0] == 'P' and shown[-1] == 'G'
  lake = Lake(SEED)
  assert 'none of' in lake.move('jump') and lake.move('up') == lake.show() and lake.at == (0, 0)
  for direction in WAY:
    assert not lake.over
    lake.move(direction)
  assert lake.over and lake.reward == 1.0 and lake.move('up') == 'The game is over.'
  lake = Lake(SEED)
  lake.move('right')
  assert lake.move('down').endswith('The game is over.') and lake.reward == 0.0
