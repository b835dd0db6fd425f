"""The environment and its session: options, prompts, attempts, rewards, metrics, faults and reference answers."""

from __future__ import annotations

import dataclasses

import pytest
from ml_collections import ConfigDict

from ragen_jax import envs as registry
from ragen_jax.envs.base import Budget
from ragen_jax.envs.outside.base import TextStep, read_observation, read_step
from ragen_jax.utils.threads import Fault
from tests.support.datasets import FUNCTIONS, make, reference_answers, write_lines
from tests.support.environments import raises_one_line

ROWS = [{'question': f'{i} + 1?', 'answer': i + 1, 'solution': f'add: {i + 1}', 'group': i // 2} for i in range(10)]


@pytest.fixture
def path(tmp_path):
  return write_lines(tmp_path / 'q.jsonl', ROWS)


def steps(session, row, *answers):
  return [session.step([row], [answer])[0] for answer in answers]


def test_a_right_answer_pays_and_ends_the_episode(path):
  session = make(path=path, verifier='number', order='fixed').open(2)
  assert session.reset([0, 1], [3, 14], [0, 0]) == ['3 + 1?', '4 + 1?']
  right, wrong = session.step([0, 1], ['4', '4'])
  assert read_step(right) == TextStep('The answer is right.', 1.0, True, True, True, {'attempts': 1.0})
  assert read_step(wrong) == TextStep('The answer is wrong.', 0.0, True, False, True, {'attempts': 1.0})


@pytest.mark.parametrize(
  ('decay', 'rewards'), [(0.5, [1.0, 0.5, 0.25]), (1.0, [1.0, 1.0, 1.0]), (0.0, [1.0, 0.0, 0.0])]
)
def test_the_kth_attempt_pays_its_decay(path, decay, rewards):
  for k, reward in enumerate(rewards):
    session = make(path=path, verifier='number', order='fixed', attempts=3, decay=decay).open(1)
    session.reset([0], [0], [0])
    *wrong, last = steps(session, 0, *['7'] * k, '1')
    assert [(x[1], x[2], x[3]['success']) for x in wrong] == [(0.0, False, False)] * k
    assert (last[1], last[2], last[3]['success']) == (reward, True, True)


def test_wrong_answers_are_asked_again_until_the_attempts_are_used(path):
  session = make(path=path, verifier='number', order='fixed', attempts=3, show_verdict=True).open(1)
  session.reset([0], [0], [0])
  texts = [(text, done) for text, _, done, _ in steps(session, 0, '7', '7 8', '9')]
  assert texts == [
    ('The answer is wrong. Find out why, and give another one; 2 left.', False),
    ('The answer is wrong (unreadable). Find out why, and give another one; 1 left.', False),
    ('The answer is wrong.', True),
  ]
  assert session.reset([0], [1], [0]) == ['1 + 1?']
  assert steps(session, 0, '2')[0][1] == 1.0, 'a new episode has all its attempts'


def test_partly_right_answers_are_paid_once(tmp_path):
  path = write_lines(tmp_path / 'q.jsonl', [{'question': 'Who?', 'answer': 'Niels Henrik Bohr'}])
  session = make(path=path, verifier='f1', attempts=5, decay=0.9).open(1)
  session.reset([0], [0], [0])
  found = steps(session, 0, 'Bohr', 'Bohr', 'Niels Bohr', 'x', 'Niels Henrik Bohr')
  assert sum(x[1] for x in found) == pytest.approx(max(0.5, 0.9 * 0.5, 0.81 * 0.8, 0.9**4))
  assert [x[1] for x in found[:4]] == pytest.approx([0.5, 0.0, 0.81 * 0.8 - 0.5, 0.0])
  assert [x[3]['success'] for x in found] == [False] * 4 + [True]
  totals = {name: sum(x[3]['metrics'][name] for x in found) for name in found[0][3]['metrics']}
  assert totals == pytest.approx({'attempts': 5, 'f1': 1.0, 'exact_match': 1.0}), 'those of the last answer'


def test_metrics_of_an_answer_that_has_none_fall_back_to_zero(path):
  session = make(path=path, verifier='number', order='fixed', attempts=2).open(1)
  session.reset([0], [0], [0])
  found = steps(session, 0, '1 2', '7')
  assert [x[3]['metrics'].get('unreadable') for x in found] == [1.0, -1.0]


def test_a_fault_of_a_verifier_is_a_fault_of_its_row_only(path):
  session = make(path=path, verifier=f'{FUNCTIONS}:broken').open(3)
  session.reset([0, 1, 2], [0, 1, 2], [0] * 3)
  raised, right, wrong = session.step([0, 1, 2], ['raise', 'yes', 'none'])
  assert isinstance(raised, Fault) and raised.kind == 'verifier raised KeyError'
  assert right[1:3] == (1.0, True) and isinstance(wrong, Fault)
  assert session.reset([0], [5], [0]) == [make(path=path).item(5).text]


def test_seeds_select_all_items_and_level_ids_are_those_of_groups(path):
  env = make(path=path, fields={'group': 'group'})
  session = env.open(10)
  seen = session.reset(range(10), range(100, 110), [0] * 10)
  assert sorted(seen) == [row['question'] for row in ROWS] != seen
  assert all(isinstance(read_observation(x), str) for x in seen)
  assert session.reset([3], [104], [7]) == [seen[4]]
  ids = [env.level_id(seed) for seed in range(100, 110)]
  assert len(set(ids)) == 5
  other = make(path=path, fields={'group': 'group'}, split='test', test_share=0.5, verifier='number')
  assert {other.level_id(seed) for seed in range(20)} < set(ids)


def test_choices_are_part_of_the_question(tmp_path):
  rows = [{'question': 'Where?', 'answer': 'B', 'choices': ['Rome', 'Paris']}]
  env = make(path=write_lines(tmp_path / 'q.jsonl', rows), verifier='choice', fields={'choices': 'choices'})
  session = env.open(1)
  assert session.reset([0], [0], [0]) == ['Where?\nA. Rome\nB. Paris']
  assert env.rules() == 'Choose the right answer.' and env.action_help == 'Your answer is the letter of a choice.'
  assert steps(session, 0, 'Paris')[0][1] == 1.0 and reference_answers(env, [0]) == [['B']]


def test_the_words_of_the_prompt_follow_the_options(path):
  env = make(path=path)
  assert env.rules() == 'Answer the question.' and env.name == 'dataset'
  assert (env.state_label, env.counts_turns, env.whole_answer) == ('Question', False, True) and env.system
  assert 'try again, 3 times in all' in make(path=path, attempts=3).rules()
  assert make(path=path, instruction='Be brief.', attempts=3).rules() == 'Be brief.'
  helps = {make(path=path, verifier=name).action_help for name in ('exact', 'number', 'choice', 'f1', 'math')}
  assert len(helps) == 5
  assert env.parse_action(' a || b\nc ') == ' a || b\nc ' and env.parse_action(' \n') is None and not env.action_words


def test_reference_answers_are_right(path):
  for name, fields in (('number', {}), ('exact', {}), ('f1', {}), ('math', {}), ('number', {'solution': 'solution'})):
    env = make(path=path, verifier=name, fields=fields, order='fixed')
    assert env.has_expert
    if name != 'math':
      assert reference_answers(env, [3, 12]) == [['4'], ['3']]
  env = make(path=path, verifier=f'{FUNCTIONS}:is_in')
  assert not env.has_expert and reference_answers(env, [0]) == [[]]
  env = make(path=path, verifier=f'{FUNCTIONS}:is_in', fields={'solution': 'solution'}, order='fixed')
  assert env.has_expert and reference_answers(env, [3]) == [['add: 4']]


def test_no_data_are_read_before_they_are_needed(tmp_path):
  env = make(path=str(tmp_path / 'nowhere.jsonl'))
  assert env.rules() and env.action_help
  env.check_budget(Budget(1, 1, 1))
  session = env.open(1)
  for call in (
    env.check,
    lambda: env.level_id(0),
    lambda: session.reset([0], [0], [0]),
    lambda: reference_answers(env, [0]),
  ):
    with raises_one_line(r"path='.*nowhere\.jsonl': cannot be read \(No such file"):
      call()


def test_without_a_source_the_error_says_how_to_name_one():
  with raises_one_line(r"dataset: path=''; allowed: a file of questions, such as mine\.jsonl"):
    make().check()


def test_several_files_are_separated_by_commas_or_a_tuple(tmp_path, path):
  more = write_lines(tmp_path / 'more.jsonl', [{'question': 'b?', 'answer': 'x'}])
  assert len(make(path=f'{path}, {more}').items) == len(make(path=(path, more)).items) == 11


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'path': 5}, 'path=5; allowed: a file, or several separated by commas'),
    ({'path': 'a.jsonl,a.jsonl'}, "path='a.jsonl,a.jsonl'; allowed: files that differ"),
    ({'path': 'a.jsonl', 'hub': 'b'}, r"path=\('a\.jsonl',\), hub='b'; allowed: one of them, the others ''"),
    ({'hub': 'b', 'generator': 'reasoning_gym:gcd'}, "generator='reasoning_gym:gcd', hub='b'; allowed: one"),
    ({'hub': 5}, 'hub=5; allowed: text'),
    ({'generator': 'gcd'}, "generator='gcd'; allowed: 'reasoning_gym:NAME'"),
    ({'generator_options': {'size': 3}}, r"generator_options={'size': 3}; allowed: none without generator"),
    ({'hub_options': {'split': 'x'}}, r"hub_options={'split': 'x'}; allowed: none without hub"),
    ({'hub': 'a', 'hub_options': {'trust_remote_code': True}}, r'hub_options\.trust_remote_code=True; allow'),
    ({'hub_options': 5}, 'hub_options=5; allowed: a section of options'),
    ({'verifier_options': {'a': {1, 2}}}, r'verifier_options=.*; allowed: what JSON can say'),
    ({'verifier_options': {'a': float('nan')}}, r'verifier_options=.*; allowed: what JSON can say'),
    ({'fields': {'quest': 'q'}}, r"fields\.quest='q'; allowed: question, answer, choices, solution, group"),
    ({'fields': {'question': ''}}, r"fields\.question=''; allowed: the name of a field"),
    ({'fields': {'group': 1}}, r'fields\.group=1; allowed: the name of a field'),
    ({'answer_pattern': '(a'}, r"answer_pattern='\(a'; allowed: a regular expression \("),
    ({'answer_pattern': 'a'}, "answer_pattern='a' has 0 groups; allowed: one"),
    ({'answer_pattern': '(a)(b)'}, 'has 2 groups; allowed: one'),
    ({'split': 'val'}, "split='val'; allowed: all, train, test"),
    ({'order': 'random'}, "order='random'; allowed: shuffled, fixed"),
    ({'bad_rows': 'skip'}, "bad_rows='skip'; allowed: refuse, drop"),
    ({'test_share': 0}, 'test_share=0; allowed: numbers between 0 and 1'),
    ({'test_share': 1.0}, r'test_share=1\.0; allowed: numbers between'),
    ({'test_share': True}, 'test_share=True; allowed: numbers'),
    ({'limit': -1}, 'limit=-1; allowed: whole numbers from 0'),
    ({'max_question_chars': 1.5}, r'max_question_chars=1\.5; allowed: whole numbers from 0'),
    ({'attempts': 0}, 'attempts=0; allowed: whole numbers from 1'),
    ({'workers': 0}, 'workers=0; allowed: whole numbers from 1'),
    ({'workers': 257}, 'workers=257; allowed: at most 256'),
    ({'decay': 1.1}, r'decay=1\.1; allowed: numbers from 0 to 1'),
    ({'decay': float('nan')}, 'decay=nan; allowed: numbers from 0 to 1'),
    ({'show_verdict': 1}, 'show_verdict=1; allowed: True, False'),
    ({'instruction': None}, 'instruction=None; allowed: text'),
    ({'timeout_s': 0}, 'timeout_s=0; allowed: seconds, above 0'),
    ({'verifier': 'numbers'}, "verifier='numbers'; did you mean 'number'"),
    ({'verifier': 'no_such:f'}, "verifier='no_such:f' cannot be imported"),
    ({'verifier': 'f1', 'verifier_options': {'threshold': 2}}, r'verifier_options\.threshold=2; allowed'),
    ({'verifier': 'reasoning_gym', 'path': 'a.jsonl'}, "verifier='reasoning_gym'; allowed: with generator='reas"),
    ({'nonsense': 1}, 'nonsense is not an option of dataset; allowed: path'),
  ],
)  # fmt: skip
def test_wrong_options_are_one_line_before_data_are_read(options, message):
  with raises_one_line(message):
    make(**options)


@pytest.mark.parametrize('budget', [Budget(2, 5, 1), Budget(5, 2, 1)])
def test_a_budget_that_cuts_attempts_is_refused(path, budget):
  env = make(path=path, attempts=3)
  env.check_budget(Budget(3, 3, 1))
  with raises_one_line('attempts=3; allowed: at most 2, the smaller of max_turns and max_actions'):
    env.check_budget(budget)


def test_sections_of_a_config_are_options(path):
  fields = ConfigDict({'question': 'question', 'answer': 'solution', 'choices': '', 'solution': '', 'group': ''})
  env = registry.make('dataset', {'path': path, 'fields': fields, 'verifier_options': ConfigDict({})})
  assert env.items[0].gold == ('add: 1',) and type(env.fields) is dict
  assert len({env, dataclasses.replace(env)}) == 2, 'environments are compared by identity'
