"""Programs get the prompt with their task, and their attempts become scores; nothing is played twice."""

from __future__ import annotations

import json
import time
import types

import pytest

from ragen_jax.envs import AgentTasks
from ragen_jax.envs.base import Budget
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.prompt_search.player import PromptPlayer
from ragen_jax.serving.play.agent_player import AgentSettings
from ragen_jax.serving.play.episodes import EpisodeSettings
from ragen_jax.serving.play.pool import LocalQueue, RunnerPool
from ragen_jax.serving.play.runners import FunctionRunner
from ragen_jax.serving.rollouts.lifecycle import Lifecycle
from ragen_jax.serving.rollouts.store import Store
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.utils.errors import UserError
from tests.support.endpoint_store import limits, make_call
from tests.support.prompt_search import ranges

_EPISODES = EpisodeSettings(
  group_size=2, incomplete='keep', off_policy='exclude', temperature=0.7, top_p=1.0, top_k=0, success_reward='',
  success_score=1.0, max_calls=9, stop_id=0, pad_id=0,
)  # fmt: skip
_SETTINGS = AgentSettings('val', limits(max_attempts=1), _EPISODES, 5, 1.0, ahead=False, prompt='')


@pytest.fixture
def lifecycle(tmp_path):
  with Store(tmp_path / 'store.sqlite') as store:
    yield Lifecycle(store, time.time)


def _player(lifecycle, seed=3):
  server = types.SimpleNamespace(lifecycle=lifecycle, sweep=lambda: None, url='http://127.0.0.1:1', progress=None)
  spec = EnvSpec('Val', AgentTasks(), Budget(1, 1, 1), 1, 1)
  tokenizer = types.SimpleNamespace(decode=lambda ids: f'{len(ids)} ids')
  return PromptPlayer(_SETTINGS, server, [spec], tokenizer, seed, failed_score=-0.5)


def _play(lifecycle, trials, agent, **options):
  queue = LocalQueue(lifecycle, 'pool', 'http://127.0.0.1:1')
  with RunnerPool(queue, FunctionRunner(agent, 60.0), 3, 60.0, stop_s=60.0, claim_s=0.05):
    return _player(lifecycle, **options).try_prompts(trials)


@pytest.fixture
def agent(lifecycle):
  """Calls once; the score depends on the prompt and the task; on 'crash' it fails, on 'mute' it gets no reward."""
  seen = []

  def play(task):
    seen.append(task)
    if task.prompt != 'silent':
      call = make_call(
        task.attempt_id, seed=task.input['seed'], call_id=task.attempt_id, text=f'I follow {task.prompt}'
      )
      lifecycle.store.add_calls([call], ['d'], time.time())
    if task.prompt == 'crash':
      raise RuntimeError('no such field')
    return None if task.prompt in ('mute', 'silent') else len(task.prompt) + task.input['member'] / 2

  play.seen = seen
  return play


def test_prompts_are_played_and_scored(lifecycle, agent):
  tasks = ranges().for_scores()[:2]
  one, two = _play(lifecycle, [('', tasks), ('go', tasks[:1])], agent)
  assert [[a.score for a in own] for own in one] == [[0.0, 0.5]] * 2
  assert [[a.score for a in own] for own in two] == [[2.0, 2.5]]
  assert [a.success for own in (*one, *two) for a in own] == [False] * 4 + [True] * 2
  assert not any(a.failed for own in one for a in own)
  shown = two[0][1].shown
  assert json.loads(shown.task) == {'seed': 10, 'member': 1} and shown.error == ''
  assert shown.turns == (('4 ids', 'I follow go'),)
  assert {(t.mode, t.prompt) for t in agent.seen} == {('val', ''), ('val', 'go')} and len(agent.seen) == 6


@pytest.mark.parametrize(
  ('prompt', 'error', 'turns'),
  [('crash', 'RuntimeError: no such field', 1), ('mute', 'no reward', 1), ('silent', 'without a call', 0)],
)
def test_attempts_without_a_score(lifecycle, agent, prompt, error, turns):
  ((attempts,),) = _play(lifecycle, [(prompt, ranges().for_scores()[:1])], agent)
  assert [(a.score, a.failed, a.success) for a in attempts] == [(-0.5, True, False)] * 2
  assert error in attempts[0].shown.error and len(attempts[0].shown.turns) == turns
  assert attempts[0].shown.score == -0.5


def test_what_the_store_holds_is_not_played_again(lifecycle, agent):
  trial = ('go', ranges().for_scores()[:2])
  first = _play(lifecycle, [trial], agent)
  assert _play(lifecycle, [trial, trial], agent) == first * 2 and len(agent.seen) == 4
  _play(lifecycle, [('gone', trial[1])], agent)
  assert len(agent.seen) == 8


def test_all_prompts_have_the_same_draws(lifecycle, agent):
  tasks = ranges().for_scores()[:2]
  _play(lifecycle, [('a', tasks), ('b', tasks)], agent)
  keys = {}
  for record in lifecycle.store.ask(Tables.recent, 2**60, 100):
    place = (record.input['seed'], record.input['member'])
    keys.setdefault(place, set()).add(record.key)
  assert len(keys) == 4 and all(len(own) == 1 for own in keys.values())
  assert len(set.union(*keys.values())) == 4
  other = _player(lifecycle, seed=4)._create('c', tasks[0])
  assert {r.key for r in other}.isdisjoint(set.union(*keys.values()))


def test_tasks_that_cannot_be_played_are_told(lifecycle):
  lifecycle.store.close()
  with pytest.raises(UserError, match='cannot be used'):
    _player(lifecycle).try_prompts([('a', ranges().for_scores())])
