"""A runner turns whatever an agent does into an outcome, and leaves no process behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import sys
import threading
import time

import numpy as np
import pytest

from ragen_jax.serving.client import Task
from ragen_jax.serving.play.runners import FunctionRunner, ProgramRunner, RunWatch, load_function
from ragen_jax.serving.types import AttemptState
from ragen_jax.utils.errors import UserError

_LONG = 60.0  # seconds; more than any of these agents needs


def _task(**changes):
  fields = {
    'rollout_id': 'a', 'attempt_id': 'a.1', 'number': 1, 'mode': 'train', 'group': 'g', 'input': {'x': 1},
    'timeout_s': _LONG, 'heartbeat_s': 0.0, 'server_url': 'http://127.0.0.1:1', 'api_key': 'secret',
  }  # fmt: skip
  return Task(**fields | changes)


def _play(agent, task=None, watch=None, grace_s=_LONG):
  return FunctionRunner(agent, grace_s).run(task or _task(), watch or RunWatch(_LONG))


# -- functions


@pytest.mark.parametrize(
  ('value', 'reward'), [(None, None), (0.5, 0.5), (1, 1.0), (True, 1.0), (np.float32(0.25), 0.25)]
)
def test_a_function_returns_the_reward_or_none(value, reward):
  seen = []

  async def agent(task):
    await asyncio.sleep(0)
    seen.append(task)
    return value

  for function in (agent, lambda task: seen.append(task) or value):
    outcome = _play(function)
    assert (outcome.state, outcome.reward, outcome.error) == (AttemptState.SUCCEEDED, reward, '')
    assert type(outcome.reward) is type(reward)
  assert seen == [_task()] * 2


@pytest.mark.parametrize('value', ['1', float('nan'), float('inf'), [1.0], 1j, -2e15, pytest.param(10**400, id='huge')])
def test_another_value_fails_the_attempt(value):
  outcome = _play(lambda task: value)
  assert (outcome.state, outcome.reward) == (AttemptState.FAILED, None)
  assert outcome.error.startswith(f'agent returned {value!r}'[:100])
  assert outcome.error.endswith('; allowed: a number within 1e+15, None')


@pytest.mark.parametrize('error', [KeyError('x'), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_an_exception_fails_the_attempt(error):
  async def agent(task):
    raise error

  outcome = _play(agent)
  assert outcome.state == AttemptState.FAILED and outcome.abandoned is None
  assert outcome.error.startswith(f'agent raised {type(error).__name__}') and '\n' not in outcome.error


KEY = 'rk-' + '0123456789abcdef' * 2


def shows_the_key(text):
  """Whether a text holds four characters of the key in a row."""
  return any(KEY[i : i + 4] in text for i in range(len(KEY) - 3))


@pytest.mark.parametrize('before', [*range(180, 300, 7)])
def test_no_part_of_the_key_is_left_where_the_error_is_cut(before):
  text = '.' * before + KEY + '.' * 300

  async def raises(task):
    raise RuntimeError(text)

  async def returns(task):
    return [text, text.encode()]

  for agent in (raises, returns, lambda task: text, lambda task: text.encode(), lambda task: {'a': text}):
    outcome = _play(agent, _task(api_key=KEY))
    assert outcome.state == AttemptState.FAILED and len(outcome.error) <= 300
    assert not shows_the_key(outcome.error), outcome.error


def test_a_cancelled_agent_cleans_up():
  watch, ends = RunWatch(_LONG), []

  async def agent(task):
    watch.cancel()
    try:
      await asyncio.Event().wait()
    finally:
      ends.append('cleaned up')

  outcome = _play(agent, watch=watch)
  assert (outcome.state, outcome.error, outcome.abandoned) == (AttemptState.CANCELLED, 'was cancelled', None)
  assert ends == ['cleaned up']


def test_an_agent_is_cancelled_before_it_has_begun_to_wait():
  watch = RunWatch(_LONG)
  watch.cancel()

  async def agent(task):
    await asyncio.Event().wait()

  assert _play(agent, watch=watch).state == AttemptState.CANCELLED


def test_a_late_agent_is_cancelled():
  async def agent(task):
    await asyncio.Event().wait()

  outcome = _play(agent, _task(timeout_s=0.05), RunWatch(0.05))
  assert outcome.state == AttemptState.TIMEOUT and outcome.error == 'took longer than timeout_s=0.05'


def test_an_agent_that_cannot_be_stopped_is_abandoned():
  go_on = threading.Event()
  outcome = _play(lambda task: go_on.wait(_LONG), watch=RunWatch(0.05), grace_s=0.01)
  assert outcome.state == AttemptState.TIMEOUT and outcome.abandoned.is_alive()
  go_on.set()
  outcome.abandoned.join(_LONG)
  assert not outcome.abandoned.is_alive()


def test_agents_that_block_do_not_hold_one_another_up():
  together, outcomes = threading.Barrier(3), []

  async def agent(task):
    together.wait(_LONG)  # blocks its event loop until all three are here

  threads = [threading.Thread(target=lambda: outcomes.append(_play(agent))) for _ in range(3)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(_LONG)
  assert [x.state for x in outcomes] == [AttemptState.SUCCEEDED] * 3


def test_functions_are_found_by_their_path():
  assert load_function('runner', 'json:dumps') is json.dumps
  for path, message in (
    ('json.dumps', r"^runner='json.dumps'; allowed: 'package.module:name' or 'file.py:name'$"),
    ('json:none', r"^runner='json:none' cannot be imported \(AttributeError: .*\); allowed: what Python can import$"),
    ('no_such_module:f', r"^runner='no_such_module:f' cannot be imported \(ModuleNotFoundError"),
    ('json:__name__', r"^runner='json:__name__' is str; allowed: a function$"),
  ):
    with pytest.raises(UserError, match=message):
      load_function('runner', path)


# -- programs


def _start(*argv, task=None, watch=None, cwd=None, grace_s=0.05, **environment):
  runner = ProgramRunner(argv, cwd and str(cwd), {'PATH': os.environ['PATH'], **environment}, grace_s)
  return runner.run(task or _task(), watch or RunWatch(_LONG))


def _shell(script, **options):
  return _start('sh', '-c', script, **options)


def _is_alive(pid):
  """Whether a process runs; one that ended and that nobody waits for does not."""
  try:
    return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
  except OSError:
    return False


def _ends(pid):
  deadline = time.monotonic() + _LONG
  while _is_alive(pid) and time.monotonic() < deadline:
    time.sleep(0.01)
  return not _is_alive(pid)


def test_a_program_finds_its_task_in_the_environment(tmp_path):
  code = 'import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:], os.getcwd()]), file=open("out", "w"))'
  arguments = ('{rollout_id}/{attempt_id}', '{mode} {base_url}', '{other} {"a": 1}')
  task = _task(input={'q': 'Größe\n"{}"'})
  outcome = _start(sys.executable, '-c', code, *arguments, task=task, cwd=tmp_path, OWN='own', OPENAI_API_KEY='wrong')
  assert (outcome.state, outcome.reward, outcome.error) == (AttemptState.SUCCEEDED, None, '')
  variables, arguments, cwd = json.loads((tmp_path / 'out').read_text())
  assert arguments == ['a/a.1', 'train http://127.0.0.1:1/attempts/a.1/v1', '{other} {"a": 1}'] and cwd == str(tmp_path)
  assert variables['OWN'] == 'own'
  assert variables['OPENAI_BASE_URL'] == task.base_url and variables['OPENAI_API_KEY'] == 'secret'
  found = Task.from_json(json.loads(variables['RAGEN_TASK']), variables['RAGEN_BASE_URL'], variables['RAGEN_KEY'])
  assert found == task
  assert 'secret' not in variables['RAGEN_TASK']


def test_the_error_of_a_program_shows_the_end_of_its_output():
  outcome = _shell('echo begin; echo first >&2; echo last; exit 3')
  assert outcome.state == AttemptState.FAILED
  assert outcome.error == "'sh' ended with status 3: begin first last"
  outcome = _shell('yes 0123456789 | head -c 3000000; echo; echo last; exit 1')
  assert outcome.error.endswith(' last') and 1000 < len(outcome.error) < 1600
  assert _shell('kill -KILL $$').error == "'sh' was killed by SIGKILL"
  assert _shell(r"printf '\377'; exit 1").error == "'sh' ended with status 1: \N{REPLACEMENT CHARACTER}"


def test_no_part_of_the_key_is_left_where_the_output_of_a_program_is_cut():
  for rest in (0, 100, 1450, *range(1462, 1504, 5), 1540):
    outcome = _shell(f'printf "%2000s$OPENAI_API_KEY%{rest}s" | tr " " .; exit 1', task=_task(api_key=KEY))
    assert outcome.state == AttemptState.FAILED and not shows_the_key(outcome.error), rest
    assert 1400 < len(outcome.error) < 1600
    assert rest > 1450 or '***' in outcome.error
  outcome = _shell('printf "x%s$OPENAI_API_KEY"; exit 1', task=_task(api_key=KEY))
  assert outcome.error == "'sh' ended with status 1: x***"


@pytest.mark.parametrize('length', [1499, 1500, 1501, 1500 + len(KEY) - 1, 1500 + len(KEY), 3000])
def test_an_error_shows_as_much_of_an_output_as_it_may_although_a_key_could_begin_it(length):
  outcome = _shell(f'printf "%{length}s" | tr " " .; exit 1', task=_task(api_key=KEY))
  assert outcome.error == f"'sh' ended with status 1: {'.' * min(length, 1500)}"


def test_a_program_that_cannot_start_fails_the_attempt(tmp_path):
  assert _start('no-such-program').error.startswith("'no-such-program' cannot be started: ")
  assert 'cannot be started' in _start('sh', cwd=tmp_path / 'none').error
  assert 'cannot be started' in _start('a\x00b').error
  error = _shell('true', task=_task(input='x' * 200_000)).error
  assert error.startswith('the task has 200') and error.endswith('bytes of JSON; allowed for a program: 128000')
  assert _shell('true', task=_task(input='x' * 120_000)).state == AttemptState.SUCCEEDED


@pytest.mark.parametrize('script', ["trap '' TERM; ", 'trap "exit 0" TERM; ', ''])
def test_a_late_program_is_killed_with_its_children(tmp_path, script):
  # Only the shell itself writes: the end of another program in the foreground would be one more line of output.
  script += 'sleep 120 & echo $! $$ > pids; echo waiting; : > ready; '
  script += 'n=0; while [ $n -lt 100000 ]; do wait; n=$((n + 1)); done'  # ends by itself if the test is killed
  watch = RunWatch(_LONG)
  late = threading.Thread(target=lambda: _until_exists(tmp_path / 'ready') and watch.cancel())
  late.start()
  outcome = _shell(script, cwd=tmp_path, watch=watch)
  late.join()
  assert outcome.state == AttemptState.CANCELLED and outcome.error == 'was cancelled: waiting'
  for pid in (tmp_path / 'pids').read_text().split():
    assert _ends(pid)


def test_a_program_may_clean_up(tmp_path):
  script = 'trap "echo gone > cleaned; exit" TERM; : > ready; sleep 120 & wait'
  watch = RunWatch(_LONG)
  late = threading.Thread(target=lambda: _until_exists(tmp_path / 'ready') and watch.cancel())
  late.start()
  assert _shell(script, cwd=tmp_path, watch=watch, grace_s=_LONG).state == AttemptState.CANCELLED
  late.join()
  assert (tmp_path / 'cleaned').read_text() == 'gone\n'


def _until_exists(path):
  deadline = time.monotonic() + _LONG
  while not path.exists() and time.monotonic() < deadline:
    time.sleep(0.01)
  return path.exists()


def test_a_program_takes_too_long():
  outcome = _shell('sleep 1000', task=_task(timeout_s=0.05), watch=RunWatch(0.05))
  assert outcome.state == AttemptState.TIMEOUT and outcome.error == 'took longer than timeout_s=0.05'


def test_children_that_a_program_leaves_are_killed(tmp_path):
  assert _shell('sleep 120 & echo $! > pid', cwd=tmp_path).state == AttemptState.SUCCEEDED
  assert _ends((tmp_path / 'pid').read_text().strip())


_LEAVES = """
import subprocess, sys
left = subprocess.Popen(sys.argv[1:], start_new_session=True)
print(left.pid, file=open('pid', 'w'))
"""


@pytest.mark.parametrize('command', [('sleep', '1000'), ('yes',)])
def test_a_process_that_left_the_group_holds_nothing_up(tmp_path, command):
  outcome = _start(sys.executable, '-c', _LEAVES, *command, cwd=tmp_path)
  pid = int((tmp_path / 'pid').read_text())
  try:
    assert outcome.state == AttemptState.SUCCEEDED
    assert _is_alive(pid) or command == ('yes',)  # whose pipe is closed
    assert not [thread for thread in threading.enumerate() if thread.name.startswith('ragen_jax-read')]
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, signal.SIGKILL)
