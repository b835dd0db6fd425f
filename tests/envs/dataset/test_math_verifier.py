"""The verifier 'math': which answers it decides itself, which go to math-verify, and the package itself."""

from __future__ import annotations

import sys
import types

import pytest

from ragen_jax.envs.dataset.item import Item
from ragen_jax.envs.dataset.math_verifier import Math
from ragen_jax.envs.dataset.verifiers import VerifierSettings
from ragen_jax.utils import math_checker
from ragen_jax.utils.imports import import_object
from ragen_jax.utils.threads import Fault
from tests.support.datasets import make, write_lines
from tests.support.environments import raises_one_line
from tests.support.expressions import Broken, Sums

SETTINGS = VerifierSettings({}, 1.0, 2, '', {})


def judge(pairs, processes=None):
  math = Math(SETTINGS, processes or Sums())
  items = [Item('?', math.read_gold(gold, {})) for gold, _ in pairs]
  return math.score([answer for _, answer in pairs], items)


def test_a_gold_that_is_a_number_is_decided_without_the_package():
  processes = Sums()
  pairs = [('18', '18.0'), (18, r'\boxed{18}'), ('1,234', '1234'), (r'\frac{1}{2}', '0.5'), ('$18$', '$18')]
  assert [v.score for v in judge(pairs, processes)] == [1.0] * len(pairs)
  pairs = [('18', '17 18'), ('18', '3 + 15'), ('18', 'a+b'), ('5', '-5'), ('18', r'\sqrt{324}')]
  assert [v.score for v in judge(pairs, processes)] == [0.0] * len(pairs)
  assert processes.asked == []


def test_equal_texts_are_decided_without_the_package():
  processes = Sums()
  assert [v.score for v in judge([('A', 'a'), ('(2,3)', '(2, 3)'), ('(x+1)^2', '(x + 1)^2')], processes)] == [1.0] * 3
  assert processes.asked == []


def test_other_expressions_go_to_the_package_in_one_call():
  processes = Sums()
  pairs = [('a+b', 'b+a'), ('7', '7'), ('a+b', 'a+c'), ('$a+b$', 'It is $b+a$.'), ('a+b', r'\boxed{b+a}')]
  pairs += [(r'so \boxed{a+b}', r'\(b+a\)'), ('a+b', r'\[b+a\]'), ('a+b', '$$b+a$$'), ('a+b', ' b+a. ')]
  assert [v.score for v in judge(pairs, processes)] == [1, 1, 0, 1, 1, 1, 1, 1, 1]
  assert processes.asked[:2] == [('is_equal', 'a+b', 'b+a', 1.0), ('is_equal', 'a+b', 'a+c', 1.0)]
  assert len(processes.asked) == 8


@pytest.mark.parametrize(
  'answer',
  ['$a+b$ or $a+c$', 'a $ b', r'\boxed{a+b} \boxed{a+c}', '', '$ $', 'a' * 2001, 'a' * 10**5, r'\(a+b\), \(b\)'],
)
def test_answers_without_just_one_expression_are_unreadable(answer):
  processes = Sums()
  (verdict,) = judge([('a+b', answer)], processes)
  assert (verdict.score, verdict.verdict, processes.asked) == (0.0, 'unreadable', [])


@pytest.mark.parametrize(
  ('gold', 'answer'),
  [
    (r'\sqrt{2}', r'\sqrt{3}=\sqrt{2}'), ('a+b', 'a+c=a+b'), ('a+b', 'x=a+c=b+a'), ('a+b', r'\pi = b+a'),
    ('y=a+b', 'y=a+c=b+a'), ('a+b', r'a+c \Rightarrow b+a'), ('a+b', 'a+c ≠ b+a'), ('a+b', r'a+c \neq b+a'),
    ('a+b', r'not \boxed{b+a}'), ('a+b', r'-\boxed{b+a}'), ('a+b', r'2\boxed{b+a}'), ('a+b', r'\boxed{b+a} or 3'),
    ('a+b', 'It is not $b+a$'), ('a+b', '-$b+a$'), ('a+b', "It isn't $b+a$"), ('a+b', r'\sqrt\boxed{b+a}'),
  ],
)  # fmt: skip
def test_chains_and_changed_expressions_are_unreadable(gold, answer):
  processes = Sums()
  (verdict,) = judge([(gold, answer)], processes)
  assert (verdict.score, verdict.verdict, processes.asked) == (0.0, 'unreadable', [])


@pytest.mark.parametrize(
  ('gold', 'answer'),
  [('a+b', 'x=b+a'), ('a+b', 'f(x) = b+a'), ('a+b', r'\theta_{1} = b+a'), ('y=a+b', 'b+a=y'), ('x=a, y=b', 'y=b, x=a')],
)
def test_an_answer_may_name_its_unknown_and_repeat_the_relations_of_the_gold(gold, answer):
  processes = Sums()
  judge([(gold, answer)], processes)
  assert [(method, asked) for method, _, asked, _ in processes.asked] == [('is_equal', answer)]


def test_the_number_in_the_box_of_a_worked_gold_is_compared_as_a_number():
  processes = Sums()
  worked = r'Since 17 + 1 = 18, we have $\boxed{18}$.'
  assert [v.score for v in judge([(worked, '18'), (worked, '17, 18'), (worked, '3+15')], processes)] == [1, 0, 0]
  assert processes.asked == []
  for gold in (r'17 + 1 = -\boxed{18}', r'2\boxed{a+b}', 'so $18$ of 20'):
    with raises_one_line('allowed: one number, or text with one expression'):
      Math(SETTINGS, Sums()).read_gold(gold, {})


def test_pairs_whose_second_number_has_three_digits_are_no_numbers():
  processes = Sums()
  for gold, wrong in (('(5,100)', '5100'), ('[0,100]', '100'), (r'\left(2,125\right)', '2125')):
    math = Math(SETTINGS, processes)
    assert math.read_gold(gold, {}) == (None, gold)
    assert judge([(gold, wrong), (gold, gold)], processes)[1].score == 1
    assert judge([(gold, wrong)], processes)[0].score == 0


def test_letters_are_compared_as_text():
  processes = Sums()
  assert [v.score for v in judge([('BCA', 'ABC'), ('BCA', 'BCA'), ('BCA', ' bca ')], processes)] == [0, 1, 1]
  pairs = [('BCA', x) for x in (r'\boxed{ABC}', '$ABC$', 'A B C', 'ABC.', r'\boxed{B C A}', 'The answer is $BCA$.')]
  assert [v.score for v in judge(pairs, processes)] == [0, 0, 0, 0, 1, 1]
  assert processes.asked == []


def test_numerals_in_other_bases_differ():
  """math-verify reads their digits alone, so all of these would be equal for it."""
  processes = Sums()
  pairs = [('1011_2', '1011_3'), ('1011_2', '$1011_{3}$'), ('12_{5}', r'\boxed{12_{7}}'), ('1F_{16}', '1F_{17}')]
  assert [v.verdict for v in judge(pairs, processes)] == ['wrong'] * 4 and processes.asked == []
  judge([('1011_2', '1011'), ('1011_2', '1011_{2}'), ('x_1', 'x_2')], processes)
  assert len(processes.asked) == 3


def test_an_answer_that_takes_too_long_is_not_right_if_its_gold_does_not():
  late, right, gold = judge([('a+b', 'hang'), ('a+b', 'b+a'), ('hang', 'a')])
  assert (late.score, late.metrics, late.verdict) == (0.0, {'unreadable': 1.0}, 'timeout') and right.score == 1
  assert isinstance(gold, Fault) and gold.hung  # the machine may be slow, or the gold is to blame


def test_what_goes_wrong_in_the_package_is_a_fault_of_that_answer_only():
  right, gold = judge([('a+b', 'b+a'), ('unreadable+a', 'a')])
  assert right.score == 1
  assert gold.kind == 'verifier cannot read the gold' and 'unreadable+a' in gold.detail
  fault, number = judge([('a+b', 'b+a'), ('7', '7')], Broken())
  assert str(fault) == 'verifier raised OSError: no more processes' and number.score == 1


@pytest.mark.parametrize(
  'gold', ['', '$$', 'a$b', '$a$ or $b$', ['1', '2'], True, {'a': 1}, 'x' * 2001, r'\boxed{a} \boxed{b}']
)
def test_golds_without_just_one_expression_are_refused(gold):
  with raises_one_line('allowed: one number, or text with one expression'):
    Math(SETTINGS, Sums()).read_gold(gold, {})


def test_golds_that_the_package_cannot_read_are_named():
  processes = Sums()
  math = Math(SETTINGS, processes)
  golds = [math.read_gold(gold, {}) for gold in ('7', 'a', 'unreadable', 'hang')]
  reasons = math.check_golds(golds)
  assert list(reasons) == [2, 3] and 'one expression of LaTeX' in reasons[2] and 'longer than' in reasons[3]
  assert math.check_golds(golds[:1]) == {} and len(processes.asked) == 3


def test_closing_ends_processes_that_were_used():
  used, unused = Sums(), Sums()
  for processes in (used, unused):
    math = Math(SETTINGS, processes)
    if processes is used:
      math.check_golds([math.read_gold('a', {})])
    math.close()
  assert used.closed and not unused.closed


def test_the_reference_is_the_gold():
  math = Math(SETTINGS, Sums())
  for gold, reference in (('$a+b$', 'a+b'), (' 1,234 ', '1,234'), (0.5, '0.5'), (['7'], '7')):
    item = Item('?', math.read_gold(gold, {}))
    assert math.reference(item) == reference and math.score([reference], [item])[0].score == 1


def test_options_are_refused():
  with raises_one_line(r'verifier_options\.strict=True; allowed: none'):
    Math(VerifierSettings({'strict': True}, 1.0, 2, '', {}))


def test_golds_are_read_by_the_package_at_load(tmp_path, monkeypatch, caplog):
  made = []

  def make_workers(factory, args, *, count, memory_mib, name):
    made.append((factory, args, count, name))
    assert memory_mib > 500
    return Sums()

  monkeypatch.setitem(sys.modules, 'ragen_jax.utils.workers', types.SimpleNamespace(Workers=make_workers))
  monkeypatch.setattr(math_checker, 'is_installed', lambda: True)
  rows = [{'question': 'a?', 'answer': '7'}, {'question': 'b?', 'answer': 'unreadable'}]
  path = write_lines(tmp_path / 'q.jsonl', rows)
  with raises_one_line(
    "line 2: answer='unreadable' is no gold for verifier='math'; allowed: one number, or one expression"
  ):
    make(path=path, verifier='math').check()
  env = make(path=path, verifier='math', bad_rows='drop')
  env.check()
  assert [item.question for item in env.items] == ['a?']
  assert '1 rows that cannot be read are left out' in caplog.text
  factory = 'ragen_jax.utils.math_checker:make_checker'
  assert made == [(factory, (), 2, 'math_verify')] * 2
  assert import_object('factory', factory) is math_checker.make_checker


def test_a_missing_package_is_named_before_data_are_read(monkeypatch):
  monkeypatch.setattr(math_checker, 'is_installed', lambda: False)
  with raises_one_line(
    "verifier='math' needs the package math-verify, which is missing: pip install -r requirements-data"
  ):
    make(path='nowhere.jsonl', verifier='math').check()


# -- the package -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def checker():
  pytest.importorskip('math_verify', reason='needs math-verify, requirements-data.txt')
  return math_checker.make_checker()


@pytest.mark.parametrize(
  ('gold', 'answer', 'equal'),
  [
    (r'\frac{x}{2}', 'x/2', True), ('(x+1)^2', 'x^2+2x+1', True), (r'3\sqrt{2}', r'\sqrt{18}', True),
    (r'\frac{\pi}{2}', r'\pi/2', True), ('3, 5', '5, 3', True), ('[0,1)', '[0, 1)', True), ('2+3i', '3i+2', True),
    (r'\begin{pmatrix}1\\2\end{pmatrix}', r'\begin{pmatrix} 1 \\ 2 \end{pmatrix}', True),
    (r'\infty', r'\infty', True), ('y=2x+1', 'y = 1+2x', True),
    (r'\frac{x}{2}', 'x/3', False), ('x+1', 'x+2, x+1', False), ('x+1', 'x+2 x+1', False), (r'\sqrt{2}', '2', False),
    ('[0,1)', '(0,1)', False), ('(2,3)', '(3,2)', False), ('x+1', '', False),
  ],
)  # fmt: skip
def test_the_package_compares_expressions(checker, gold, answer, equal):
  assert checker.can_read(gold)
  assert checker.is_equal(gold, answer) is equal


def test_the_package_finds_nothing_in_an_empty_gold(checker):
  assert not checker.can_read('')
  assert checker.is_equal('', 'x') is None


def test_processes_decide_with_the_package(tmp_path):
  pytest.importorskip('math_verify', reason='needs math-verify, requirements-data.txt')
  pytest.importorskip('ragen_jax.utils.workers', reason='needs the worker processes')
  math = Math(VerifierSettings({}, 60.0, 1, '', {}))
  math.check()
  try:
    items = [Item('?', math.read_gold(gold, {})) for gold in (r'\frac{x}{2}', 'x+1', '7')]
    assert math.check_golds([item.gold for item in items]) == {}
    assert [v.score for v in math.score(['x/2', 'x+2', '7.0'], items)] == [1.0, 0.0, 1.0]
  finally:
    math.close()
