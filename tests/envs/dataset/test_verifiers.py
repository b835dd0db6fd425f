"""The registry of verifiers, and functions of the user: what they may return, and what becomes a fault."""

from __future__ import annotations

import pytest

from ragen_jax.envs.dataset.item import Item
from ragen_jax.envs.dataset.verifiers import VERIFIERS, Verdict, Verifier, check_verifier
from ragen_jax.utils.imports import import_object
from ragen_jax.utils.threads import Fault
from tests.support.datasets import FUNCTIONS, judge, verifier
from tests.support.environments import raises_one_line


@pytest.mark.parametrize('name', VERIFIERS)
def test_every_name_is_a_verifier_that_tells_how_an_answer_is_written(name):
  cls = import_object('verifier', VERIFIERS[name])
  assert issubclass(cls, Verifier) and not cls.__abstractmethods__
  assert cls.answer_help.endswith('.') and '\n' not in cls.answer_help


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('numbr', "verifier='numbr'; did you mean 'number'\\? allowed: exact, number, .*'package.module:function'"),
    (None, 'verifier=None; allowed: exact'),
    ('', "verifier=''; allowed: exact"),
  ],
)
def test_unknown_names_are_refused(name, message):
  with raises_one_line(message):
    check_verifier(name)


@pytest.mark.parametrize(
  ('name', 'options', 'message'),
  [
    ('no_such_module:f', {}, "verifier='no_such_module:f' cannot be imported"),
    ('json:no_such', {}, "verifier='json:no_such' cannot be imported"),
    ('json:decoder', {}, "verifier='json:decoder' is module; allowed: a function"),
    (f'{FUNCTIONS}:starts', {'heavy': 1}, "does not take .* with verifier_options={'heavy': 1}"),
    ('os:getcwd', {}, r"verifier='os:getcwd' does not take \(gold, answer"),
  ],
)
def test_functions_that_cannot_be_called_are_refused(name, options, message):
  with raises_one_line(message):
    verifier(name, options)


def test_a_function_gives_scores_and_metrics_and_gets_the_options():
  verdicts = judge(f'{FUNCTIONS}:starts', [('ab', 'abc'), ('ab', 'ba')])
  assert verdicts == [Verdict(1.0, {'length': 3.0}, 'right'), Verdict(0.0, {'length': 2.0}, 'wrong')]
  assert judge(f'{FUNCTIONS}:starts', [('ab', 'abc')], {'weight': 0.5})[0].score == 0.5
  assert judge(f'{FUNCTIONS}:is_in', [({'any': ['a', 'b']}, 'b')])[0].score == 1, 'the gold may be any JSON'


def test_a_function_in_a_file(tmp_path):
  file = tmp_path / 'mine.py'
  file.write_text('def score(gold, answer):\n  return len(answer) / gold\n')
  assert judge(f'{file}:score', [(4, 'ab'), (2, 'ab')]) == [Verdict(0.5, {}, 'wrong'), Verdict(1.0, {}, 'right')]


def test_what_is_no_score_is_a_fault_and_the_others_are_scored():
  answers = ['none', 'text', 'two', 'less', 'nan', 'three', 'raise', 'exit', 'number', 'yes']
  found = judge(f'{FUNCTIONS}:broken', [('', answer) for answer in answers])
  kinds = [x.kind if isinstance(x, Fault) else x.score for x in found]
  assert kinds == ['verifier returned no score from 0 to 1'] * 6 + [
    'verifier raised KeyError', 'verifier raised SystemExit', 0.5, 1.0,
  ]  # fmt: skip
  assert found[8].metrics == {'good': 1.0}
  assert all('\n' not in str(x) for x in found)


@pytest.mark.parametrize('answer', ['list', 'name', 'value'])
def test_metrics_that_are_no_finite_numbers_by_snake_case_are_a_fault(answer):
  (fault,) = judge(f'{FUNCTIONS}:broken', [('', answer)])
  assert isinstance(fault, Fault) and 'metric' in fault.kind


def test_a_call_over_the_time_limit_is_a_fault_and_does_not_hold_up_the_others():
  judging = verifier(f'{FUNCTIONS}:broken', timeout_s=0.5)
  hung, right = judging.score(['hang', 'yes'], [Item('?', '')] * 2)
  assert hung.hung and 'longer than 0.5 s' in hung.kind and right.score == 1


def test_the_reference_of_a_function_is_the_solution_or_a_gold_of_text():
  judging = verifier(f'{FUNCTIONS}:is_in')
  references = [
    judging.reference(item) for item in (Item('?', 'a', solution='b'), Item('?', 'a'), Item('?', {'any': []}))
  ]
  assert references == ['b', 'a', '']
