"""Packages of verifiers: their tasks and parts, their rollouts with a served model, and what goes wrong in them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
import time

import pytest

from ragen_jax import envs
from ragen_jax.build_agents import plays_agents
from ragen_jax.config.agent_checks import check_held_out
from ragen_jax.envs.dataset.selection import is_held_out
from ragen_jax.envs.outside import verifiers
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.serving.client import Task
from ragen_jax.serving.play.runners import RunWatch
from ragen_jax.serving.play.verifiers_runner import VerifiersRunner, metric_name
from ragen_jax.serving.types import AttemptState
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.threads import Fault
from tests.support.chat_server import server
from tests.support.configs import small_config

LONG = 200.0
PACKAGE = """
import asyncio, os, time
import verifiers.v1 as vf

class Data(vf.TaskData):
  answer: str

class Own(vf.Task[Data]):
  @vf.reward(weight=3.0)
  async def right(self, trace: vf.Trace) -> float:
    if 'crash' in trace.last_reply:
      os._exit(7)
    if 'hold' in trace.last_reply:
      time.sleep(3.0)
    if 'wait' in trace.last_reply:
      await asyncio.sleep(100)
    return float(trace.last_reply == self.data.answer)

  @vf.metric
  async def success(self, trace: vf.Trace) -> float:
    return trace.num_turns

class Config(vf.TasksetConfig):
  count: int = 10
  same: bool = False

class Tasks(vf.Taskset[Own, Config]):
  def load(self):
    for i in range(self.config.count):
      n = 0 if self.config.same else i
      yield Own(Data(prompt=f'{n}?', system_prompt='Count.', answer=str(n)), self.config.task)

__all__ = ['Tasks']
"""


def reply(text='', **message):
  choice = {'index': 0, 'finish_reason': 'stop', 'message': {'role': 'assistant', 'content': text} | message}
  usage = {'prompt_tokens': 1, 'completion_tokens': 1, 'total_tokens': 2}
  answer = {'id': 'x', 'object': 'chat.completion', 'created': 1, 'model': 'm', 'choices': [choice], 'usage': usage}
  return 200, {'Content-Type': 'application/json'}, json.dumps(answer)


@pytest.fixture(scope='module')
def package(tmp_path_factory):
  """The name of a package that Python finds."""
  pytest.importorskip('verifiers', reason='pip install -r requirements-verifiers.txt')
  folder = tmp_path_factory.mktemp('package')
  (folder / 'own_tasks.py').write_text(PACKAGE, encoding='utf-8')
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(folder)
    patch.setenv('PYTHONPATH', os.pathsep.join([str(folder), *filter(None, [os.environ.get('PYTHONPATH')])]))
    patch.setenv('HOME', str(folder))  # where rollouts have their folders
    yield 'own-tasks'


@pytest.fixture(scope='module')
def played(package):
  """A package whose process is shared by the tests that leave it alive."""
  made = make(package).connection
  yield made
  made.close()


def make(name='own-tasks', **options):
  return envs.make('verifiers', {'package': name} | options)


def play(made, answers, index=4, turns=3):
  """The outcome of a rollout, and what the model was asked."""
  with server(answers) as (url, asked):
    return made.play(index, f'{url}', 'rk-secret', 'policy', turns).result(LONG), asked


# -- options, which need no package ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'package': ' '}, r"verifiers: package=' '; allowed: text that is not blank"),
    ({'options': {'id': 'x'}}, r'verifiers: options has id, which is package; allowed'),
    ({'environment': {'taskset': {}}}, r'verifiers: environment has taskset, which is options; allowed'),
    ({'options': {'x': float('nan')}}, r'verifiers: options=.*; allowed: what JSON can say'),
    ({'split': 'val'}, r"verifiers: split='val'; allowed: all, train, test"),
    ({'test_share': 1.0}, r'verifiers: test_share=1\.0; allowed'),
    ({'limit': -1}, r'verifiers: limit=-1; allowed'),
    ({'processes': 0}, r'verifiers: processes=0; allowed'),
    ({'allow_commands': 1}, r'verifiers: allow_commands=1; allowed'),
    ({'tool_timeout_s': 0}, r'verifiers: tool_timeout_s=0; allowed: seconds, above 0'),
    ({'python': 'no-such-python'}, r"verifiers: python='no-such-python'; allowed"),
    ({'pakage': 'x'}, r"pakage is not an option of verifiers; did you mean 'package'\?"),
  ],
)
def test_options_that_are_not_allowed_are_refused_in_one_line(options, message):
  with pytest.raises(ValueError, match=message) as e:
    make(**options).check()
  assert '\n' not in str(e.value)


class _Listed(verifiers.VerifiersTasks):
  """Tasks without a package."""

  identities = tuple('abcdefgha')

  @property
  def connection(self):
    return self


_Listed.tasks = _Listed.identities


def test_parts_have_no_task_in_common_and_seeds_play_all_of_a_part():
  train, test = (_Listed(package='p', split=split, test_share=0.4) for split in ('train', 'test'))
  assert set(train.part) | set(test.part) == set('abcdefgh') and not set(train.part) & set(test.part)
  assert all(is_held_out(identity, 0.4) for identity in test.part)
  everything = _Listed(package='p')
  assert everything.part['a'] == 0, 'of equal tasks the first'
  drawn = [everything.task(seed, member=0)['index'] for seed in range(5, 13)]
  assert sorted(drawn) == list(range(8)) and drawn != sorted(drawn)
  assert everything.task(5, 0) == everything.task(5, 1) == everything.task(13, 0)
  other = _Listed(package='p', options={'x': 1})
  assert other.key != everything.key == _Listed(package='p', processes=3, split='test').key


def test_a_part_without_tasks_is_refused():
  with pytest.raises(ValueError, match=r"split='test' with test_share=1e-09: none of the 9 tasks is in this part"):
    _ = _Listed(package='p', split='test', test_share=1e-9).part


def test_tasks_that_training_and_evaluation_share_are_refused():
  config = small_config(train__tags=('A',), eval__tags=('B',))

  def check(**options):
    sides = {'A': {'split': 'train'}, 'B': {'split': 'test'} | options}
    specs = [envs_spec(tag, _Listed(package='p', test_share=0.4, **own)) for tag, own in sides.items()]
    check_held_out(config, specs)

  check()
  with pytest.raises(UserError, match=r'^envs\.B: (\d) of its 8 tasks are among those of envs\.A, such as its task'):
    check(split='all')


def envs_spec(tag, env):
  return EnvSpec(tag, env, envs.Budget(1, 1, 1), 9, 1)


def test_the_type_is_played_by_programs_and_mixes_with_none():
  config = small_config(train__tags=('Verifiers',), eval__tags=('VerifiersTest',))
  assert plays_agents(config)
  config.eval.tags = ('FrozenLake',)
  with pytest.raises(UserError, match="'verifiers' cannot be mixed with FrozenLake"):
    plays_agents(config)


def test_names_of_metrics_are_those_that_a_run_takes():
  names = ['right', 'Num Turns', 'success', '2nd', 'a/b', '']
  assert [metric_name(name) for name in names] == ['right', 'own_num_turns', 'own_success', 'own_2nd', 'a_b', 'own_']


class _Package:
  """Ends its rollouts as a test wants."""

  def __init__(self, outcome=None):
    self.outcome, self.asked = outcome, []

  def play(self, *order):
    self.asked.append(order)
    self.future = verifiers.concurrent.futures.Future()
    if self.outcome is not None:
      self.future.set_result(self.outcome)
    return self.future


def run(package, url='http://127.0.0.1:1', watch=None):
  task = Task('a', 'a.1', 1, 'train', 'g', {'settings': 'k', 'index': 4}, 5.0, 0.0, url, 'rk-secret')
  return VerifiersRunner({'k': package}, 'policy', 7).run(task, watch or RunWatch(LONG))


def test_the_runner_posts_rewards_and_measurements_by_name():
  package = _Package({'rewards': {'right': 3.0, 'short': -0.5}, 'metrics': {'success': 1.0}})
  with server([(200, {}, '{}')] * 3) as (url, asked):
    outcome = run(package, url)
  assert (outcome.state, outcome.reward) == (AttemptState.SUCCEEDED, None)
  assert package.asked == [(4, f'{url}/attempts/a.1/v1', 'rk-secret', 'policy', 7)]
  posted = [(body['name'], body['value']) for _, _, body in asked]
  assert posted == [('right', 3.0), ('short', -0.5), ('metrics/own_success', 1.0)]


def test_the_runner_reports_faults_without_the_key_and_cancels_what_is_late():
  outcome = run(_Package(Fault('the rollout of the package failed', 'rk-secret is wrong')))
  assert (outcome.state, outcome.error) == (AttemptState.FAILED, 'the rollout of the package failed: *** is wrong')
  late = _Package()
  assert run(late, watch=RunWatch(0.01)).state == AttemptState.TIMEOUT and late.future.cancelled()


# -- the package -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rollout_asks_the_model_with_its_key_and_gives_rewards_and_metrics(played):
  assert len(set(played.tasks)) == 10
  outcome, asked = play(played, [reply('4')])
  assert outcome == {'rewards': {'right': 3.0}, 'metrics': {'success': 1.0}}
  path, headers, body = asked[0]
  assert path.endswith('/chat/completions') and headers['Authorization'] == 'Bearer rk-secret'
  assert body['model'] == 'policy' and not body.get('stream')
  assert [(m['role'], m['content']) for m in body['messages']] == [('system', 'Count.'), ('user', '4?')]
  assert play(played, [reply('5')])[0]['rewards'] == {'right': 0.0}


@pytest.mark.slow
def test_wrong_calls_are_answered_and_turns_are_limited(played):
  calls = [{'id': str(i), 'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}} for i in range(2)]
  outcome, asked = play(played, [reply(None, tool_calls=calls[:1])] * 9, turns=3)
  assert len(asked) == 3 and outcome['metrics'] == {'success': 3.0}
  told = asked[1][2]['messages'][-1]
  assert (told['role'], told['tool_call_id'], told['content']) == ('tool', '0', 'error: there is no tool f')


@pytest.mark.slow
def test_a_full_context_ends_a_conversation_and_another_refusal_is_a_fault(played):
  def refused(code):
    return 400, {'Content-Type': 'application/json'}, json.dumps({'error': {'message': 'no', 'code': code}})

  calls = [{'id': '0', 'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}]
  outcome, _ = play(played, [reply(None, tool_calls=calls), refused('context_length_exceeded')])
  assert outcome['metrics'] == {'success': 1.0}
  outcome, _ = play(played, [refused('invalid_value')])
  assert isinstance(outcome, Fault) and 'invalid_value' in outcome.detail


@pytest.mark.slow
def test_a_rollout_is_cancelled_and_others_go_on(played):
  with server([reply('wait'), reply('4')]) as (url, asked):
    waiting = played.play(3, url, 'k', 'policy', 3)
    while not asked:
      time.sleep(0.01)
    assert played.play(4, url, 'k', 'policy', 3).result(LONG)['rewards'] == {'right': 3.0}
    waiting.cancel()
    assert play(played, [reply('4')])[0]['rewards'] == {'right': 3.0}


@pytest.mark.parametrize('scheme, port', [('http', 80), ('https', 443)])
def test_a_server_whose_address_has_no_port_is_asked_where_its_scheme_says(scheme, port, monkeypatch):
  pytest.importorskip('verifiers', reason='pip install -r requirements-verifiers.txt')
  from ragen_jax.envs.outside import verifiers_worker

  async def connect(host, asked):
    assert (host, asked) == ('tools.example', port)
    raise ConnectionRefusedError

  monkeypatch.setattr(asyncio, 'open_connection', connect)
  assert asyncio.run(verifiers_worker._has_ended([f'{scheme}://tools.example/mcp']))


@pytest.mark.slow
def test_a_package_that_ends_its_process_or_holds_it_is_started_again(package, monkeypatch):
  with contextlib.closing(make(package, limit=5, python=sys.executable).connection) as made:
    assert len(made.tasks) == 5
    outcome, _ = play(made, [reply('crash')])
    assert isinstance(outcome, Fault) and 'exit status 7' in outcome.detail
    assert play(made, [reply('4')])[0]['rewards'] == {'right': 3.0}
    with monkeypatch.context() as brief:  # a process that starts may take longer
      brief.setattr(verifiers, '_LONGEST_HOLD_S', 0.7)
      outcome, _ = play(made, [reply('hold')])
    assert isinstance(outcome, Fault) and outcome.kind.startswith('code of the package held its process for')
    assert play(made, [reply('4')])[0]['rewards'] == {'right': 3.0}


TOOLS = """
import asyncio, os
import verifiers.v1 as vf

class Both(vf.Toolset[vf.ToolsetConfig]):
  @vf.tool
  async def act(self, what: str) -> str:
    if what == 'die':
      os._exit(3)
    await asyncio.sleep(99.0 if what == 'sleep' else 0.0)
    return what

class Tasks(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):
  def load(self):
    yield vf.Task(vf.TaskData(prompt='Act.'), self.config.task)

  @classmethod
  def toolsets(cls, config):
    return [Both(vf.ToolsetConfig())]

__all__ = ['Tasks']

if __name__ == '__main__':
  Both.run()
"""


@pytest.mark.slow
def test_a_tool_that_hangs_is_a_fault_at_its_time_limit_and_a_dead_one_at_once_and_is_started_again(
  package, tmp_path, monkeypatch
):
  (tmp_path / 'dying_tools.py').write_text(TOOLS, encoding='utf-8')
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setenv('PYTHONPATH', os.pathsep.join([str(tmp_path), os.environ['PYTHONPATH']]))

  def call(argument):
    function = {'name': 'both_act', 'arguments': json.dumps({'what': argument})}
    return reply(None, tool_calls=[{'id': '0', 'type': 'function', 'function': function}])

  with contextlib.closing(make('dying-tools', tool_timeout_s=12.0).connection) as made:
    outcome, asked = play(made, [call('well'), reply('done')], index=0)
    assert not isinstance(outcome, Fault), outcome
    assert asked[1][2]['messages'][-1]['content'] == 'well'
    outcome, asked = play(made, [call('sleep')], index=0)
    assert isinstance(outcome, Fault) and 'the tool both_act took longer than 12 s' in outcome.detail, outcome
    assert len(asked) == 1
    with server([call('sleep'), reply('done')]) as (url, asked):  # a call that runs while the server dies
      other = made.play(0, url, 'k', 'policy', 3)
      while not asked:
        time.sleep(0.01)
      outcome, asked = play(made, [call('die')], index=0)
      for ended in (outcome, other.result(LONG)):
        assert isinstance(ended, Fault) and 'the tool both_act: its server has ended' in ended.detail, ended
    assert len(asked) == 1
    outcome, asked = play(made, [call('again'), reply('done')], index=0)
    assert not isinstance(outcome, Fault), outcome
    assert asked[1][2]['messages'][-1]['content'] == 'again', 'a server that has ended is started again'


@pytest.mark.slow
@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'package': 'no-such-package'}, "package='no-such-package' cannot be used .*ModuleNotFoundError"),
    ({'options': {'cuont': 3}}, r'taskset\.cuont: Extra inputs are not permitted'),
    ({'options': {'count': 0}}, 'the package has no task'),
    ({'environment': {'agent': {'harness': {'id': 'bash'}}}}, "the harness 'bash' executes what the policy writes"),
    ({'environment': {'id': 'user-sim'}}, 'the environment has the agents .*; allowed: environments with one agent'),
  ],
)
def test_packages_that_cannot_be_used_are_refused_in_one_line(package, options, message):
  env = make(**{'package': package} | options)
  with contextlib.closing(env.connection), pytest.raises(ValueError, match=message) as e:
    env.check()
  assert '\n' not in str(e.value)


@pytest.mark.skipif(importlib.util.find_spec('verifiers') is not None, reason='the library is installed')
def test_an_interpreter_without_the_library_is_named():
  env = make('gsm8k-v1', python=sys.executable)
  told = r"^verifiers: python='.*' has no library verifiers; allowed: .*requirements-verifiers\.txt\)$"
  with contextlib.closing(env.connection), pytest.raises(ValueError, match=told):
    env.check()


@pytest.mark.slow
def test_equal_tasks_are_one_whatever_their_place(package):
  env = make(package, options={'same': True})
  with contextlib.closing(env.connection):
    assert len(env.connection.tasks) == 10 and len(env.part) == 1
