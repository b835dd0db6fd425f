"""Episodes with tools of the environment type 'dataset': answers are calls, and only `finish` is graded."""

from __future__ import annotations

import json

import pytest

from configs import default
from ragen_jax import build
from ragen_jax import envs as registry
from ragen_jax.envs.base import Budget
from ragen_jax.envs.outside.base import read_step
from ragen_jax.utils.threads import Fault
from tests.support.datasets import reference_answers
from tests.support.environments import raises_one_line
from tests.support.user_tools import TOOLS

PEOPLE = {'Who wrote the first program?': 'Ada Lovelace', 'Who designed the engine?': 'Charles Babbage'}


@pytest.fixture
def path(tmp_path):
  """A file of two questions."""
  path = tmp_path / 'questions.jsonl'
  path.write_text('\n'.join(json.dumps({'question': q, 'answer': a}) for q, a in PEOPLE.items()), encoding='utf-8')
  return str(path)


def make(path, *tools, **options):
  names = tuple(name if name == 'search' else f'{TOOLS}:{name}' for name in tools)
  return registry.make('dataset', {'path': path, 'order': 'fixed', 'verifier': 'f1', 'tools': names} | options)


def play(env, answers, rows=(0, 1)):
  """A session after its reset, and the checked steps of the answers."""
  session = env.open(2)
  session.reset(rows, rows, [0] * len(rows))
  return session, [read_step(x) for x in session.step(rows, answers)]


def test_calls_go_on_and_finish_is_graded(path):
  env = make(path, 'shout')
  first, second = (env.item(seed).gold[0] for seed in (0, 1))
  session, (called, right) = play(env, ['shout[a]', f'finish[{second}]'])
  assert (called.observation, called.reward, called.done, called.effective) == ('shout: A', 0.0, False, True)
  assert (right.reward, right.done, right.success) == (1.0, True, True)
  (none, half) = (read_step(x) for x in session.step([0], ['Ada']) + session.step([0], [f'finish[{first} too]']))
  assert (none.reward, none.done, none.effective) == (0.0, False, False)
  assert none.observation == 'This is no call of a tool. Allowed: shout[text], finish[answer].'
  assert (half.reward, half.done, half.success) == (pytest.approx(0.8), True, False)


def test_metrics_of_calls_and_of_the_verifier_are_in_every_step(path):
  env = make(path, 'shout')
  session = env.open(2)
  session.reset([0, 1], [0, 1], [0, 0])
  told, final = (x[3]['metrics'] for x in session.step([0, 1], ['shout[a]', 'finish[Ada]']))
  assert told == {'invalid_calls': 0.0, 'shout_calls': 1.0}
  assert {'invalid_calls', 'shout_calls', 'f1', 'attempts'} <= set(final) and final['shout_calls'] == 0.0


def test_without_tools_the_answer_is_the_text(path):
  env = make(path)
  _, (step,) = play(env, [f'finish[{env.item(0).gold[0]}]'], rows=(0,))
  assert not step.success and step.done
  assert 'finish' not in env.rules() and reference_answers(env, [0]) == [[env.item(0).gold[0]]]


def test_the_expert_finishes_with_the_reference(path):
  env = make(path, 'shout')
  answers = [actions[0] for actions in reference_answers(env, [0, 1])]
  assert answers == [f'finish[{env.item(seed).gold[0]}]' for seed in (0, 1)]
  assert all(step.success for step in play(env, answers)[1])


def test_budgets_begin_anew_and_attempts_do_not_end_at_finish(path):
  env = make(path, 'shout', attempts=2, tool_options={'shout': {'budget': 1}})
  assert env.rules().splitlines()[-1] == 'finish[answer] gives your answer.'
  assert make(path, 'shout').rules().endswith('finish[answer] gives your answer and ends the episode.')
  session, (first, wrong) = play(env, ['shout[a]', 'finish[nobody]'])
  assert first.observation.endswith('Calls of shout left: 0.') and not wrong.done
  again, right = (read_step(x) for x in session.step([0, 1], ['shout[b]', f'finish[{env.item(1).gold[0]}]']))
  assert again.observation.startswith('No call of shout is left.') and right.success and right.reward == 0.5
  session.reset([0], [0], [0])
  assert read_step(session.step([0], ['shout[b]'])[0]).observation.startswith('shout: B')


def test_a_tool_that_fails_ends_its_episode_as_an_error(path):
  _, (fault, fine) = play(make(path, 'broken'), ['broken[raise]', 'broken[x]'])
  assert isinstance(fault, Fault) and fault.kind == 'broken raised KeyError' and fine.observation == 'broken: x'


def test_the_check_includes_the_tools(path):
  env = make(path, 'search', tool_options={'search': {'retriever': f'bm25:{path}.none'}})
  with raises_one_line(r'^tool_options.search: retriever=.*: cannot be read \(No such file or directory\)'):
    env.check()
  with raises_one_line("^tools: 'serach'"):
    registry.make('dataset', {'path': path, 'tools': ('serach',)})


def test_the_tags_have_ragens_budgets(path):
  config = default.get_config('qwen2.5-3b')
  tags = ('SearchQA', 'SearchQATest', 'SearchQAMock')
  for spec in build.env_specs(config, tags, (1, 1, 1)):
    assert (spec.budget.max_turns, spec.budget.max_actions, spec.budget.max_actions_per_turn) == (5, 10, 1)
    options = spec.env.tool_options['search']
    assert (options['top_k'], options['max_passage_chars'], options['max_chars']) == (5, 800, 4000)
    assert options['retriever'] == ('mock' if spec.tag == 'SearchQAMock' else 'http://127.0.0.1:8000')
    assert (
      spec.max_words == 300 and spec.env.verifier == 'f1' and not spec.env.tool_options['finish']['free_text_is_answer']
    )
  config.envs.SearchQA.tool_options.search.retriever = 'bm25:corpus.jsonl'  # a flag sets it for the test part, too
  assert config.envs.SearchQATest.tool_options.search.retriever == 'bm25:corpus.jsonl'


@pytest.mark.parametrize('budget', [Budget(1, 10, 1), Budget(10, 1, 1)])
def test_tools_need_a_turn_more_than_the_answer(path, budget):
  make(path).check_budget(Budget(1, 1, 1))
  make(path, 'shout').check_budget(Budget(2, 2, 1))
  with raises_one_line('max_turns=.*, max_actions=.*allowed: at least 2'):
    make(path, 'shout').check_budget(budget)
