"""The verifiers exact, number, choice and f1, against tables of answers and a second implementation of F1."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_jax.envs.dataset.item import Item
from ragen_jax.envs.dataset.text_verifiers import f1_score, read_choice, squad_words
from tests.support.datasets import judge, untimed, verifier
from tests.support.environments import raises_one_line


def scores(name, pairs, options=None, choices=()):
  return [verdict.score for verdict in judge(name, pairs, options, choices)]


def test_exact_is_ragens_rule():
  right = [('18', ' 18 '), ('New York', 'newyork'), ('(2,3)', '(2, 3)'), ('caf\u00e9', 'cafe\u0301'), (18, '18')]
  right += [(['a', 'b'], 'B'), (0.5, '0.5'), (True, 'true')]
  wrong = [('18', '18.0'), ('1000', '1,000'), ('18', '18.'), ('1/2', '0.5'), ('x\u00b2', 'x2'), (['a', 'b'], 'ab')]
  assert scores('exact', right) == [1.0] * len(right)
  assert scores('exact', wrong) == [0.0] * len(wrong)
  verdicts = judge('exact', [('a', 'a'), ('a', 'b')])
  assert [v.verdict for v in verdicts] == ['right', 'wrong']


def test_whole_numbers_of_tables_are_floats():
  for gold in (18.0, [18.0, 'x']):
    for name in ('exact', 'f1'):
      assert scores(name, [(gold, '18'), (gold, '180')]) == [1.0, 0.0], name  # SQuAD drops the point of '18.0'


def test_number_refuses_what_ragens_numeric_rule_accepts():
  """RAGEN's compares the first number without its sign; so '17 18' is 17, -3 is 3 and 1,234 is 1."""
  right = [('18', '18.0'), ('1,234', '1234'), (18, '$18'), ('-3', 'The result is -3.'), ('0.5', r'\frac{1}{2}')]
  wrong = [('17', '17 18'), ('18', '17 18'), ('3', '-3'), ('1', '1,234'), ('15', '1.5'), ('18', '3 + 15')]
  assert scores('number', right) == [1.0] * len(right)
  assert scores('number', wrong) == [0.0] * len(wrong)
  verdicts = judge('number', [('18', '17 18'), ('18', '17')])
  assert [(v.verdict, v.metrics) for v in verdicts] == [('unreadable', {'unreadable': 1.0}), ('wrong', {})]


def test_the_tolerance_of_number():
  pairs = [('100', '101'), ('100', '102')]
  assert scores('number', pairs, {'tolerance': 0.01}) == [1.0, 0.0] and scores('number', pairs) == [0.0, 0.0]


CITIES = ('Rome', 'New York', 'Paris', 'York')


@pytest.mark.parametrize(
  ('answer', 'index'),
  [
    ('C', 2), ('c', 2), ('(C)', 2), ('C.', 2), ('[c]', 2), ('C)', 2), ('**C**', 2), (r'\boxed{C}', 2),
    ('The answer is C', 2), ('The answer is C.', 2), ('the correct answer is: (C)', 2), ('Answer: C', 2),
    ('option c', 2), ('I think it is C', 2), ('A good answer is C', 2), ('C. Paris', 2), ('(C) Paris', 2),
    ('C: paris.', 2), ('C - Paris', 2), ('C, Paris', 2), ('The answer is C, Paris.', 2), ('Paris', 2), ('"paris."', 2),
    ('It is Paris', 2), ('A', 0), ('a', 0), ('The answer is A', 0), ('New York', 1), ('york', 3),
    ('It is New York.', 1),     ('D', 3), ('A city named Paris', 2),
    ('', None), ('E', None), ('C or D', None), ('A and C', None), ('C. Rome', None), ('The answer is C, Rome.', None),
    ('not C', None), ('It is not Paris', None), ('Paris or Rome', None), ('Paris and York', None), ('London', None),
    ('None of them', None), ('C, because D is wrong', None), ('C' * 4001, None), ("It isn't C", None),
    ('A is right', 0), ('C. Paris or Rome', None), ('CD', None), ('Parisian', None),
    ('A, b', None), ('A, or b', None), ('A or b', None), ('A (b)', None), ('C or a', None), ('C. a city', 2),
    ("I'd say C", 2), ('C, e.g. Paris', 2), (r'The answer is \boxed{C}.', 2), (r'not \boxed{C}', None),
    (r'\boxed{C} or D', None), (r'Rome or \boxed{C}', None), ("It doesn't lie in C", None), ('anything but C', None),
  ],
)  # fmt: skip
def test_a_choice_is_read(answer, index):
  assert read_choice(answer, CITIES) == index


DENYING = ('It changes', 'It does not change', 'No', 'Neither of these', 'Yes')


@pytest.mark.parametrize(
  ('answer', 'index'),
  [
    ('C. No', 2), ('(C) No', 2), ('No', 2), ('No.', 2), ('The answer is No', 2), ('The answer is: no.', 2),
    ('The answer is C, No', 2), ('B. It does not change', 1), ('B) it does not change.', 1), ('D. Neither of these', 3),
    ('The answer is neither of these', 3), (r'\boxed{C. No}', 2), ('E. Yes', 4), ('E. No', None), ('C. not No', None),
    ('C. No or B', None), ('C. Yes', None), ('not No', None), ('B. It changes', None), ('A. It does not change', None),
  ],
)  # fmt: skip
def test_choices_that_deny_are_read(answer, index):
  assert read_choice(answer, DENYING) == index


def test_a_choice_of_numbers_and_of_letters():
  assert read_choice('C. 12', ('5', '7', '12')) == 2 and read_choice('C. 5', ('5', '7', '12')) is None
  assert read_choice('7', ('5', '7', '12')) == 1 and read_choice('17', ('5', '7', '12')) is None
  for answer in ('C or 5 or 7', r'5 or 7 or \boxed{C}', 'B: 5, 7 or 12'):  # hedged
    assert read_choice(answer, ('5', '7', '12')) is None
  assert read_choice('B) 5 million', ('5', '7')) is None and read_choice('B: -5', ('5', '7')) is None
  for answer in ('Rome/Paris', 'It is Rome/Paris', 'B: Rome/Paris', 'Rome * Paris'):
    assert read_choice(answer, ('Rome', 'Paris')) is None
  assert read_choice('It is *Rome*.', ('Rome', 'Paris')) == 0
  assert read_choice('It is 50%', ('50', '5')) == 0 and read_choice('It is $5/hour', ('$5', '$6')) == 0
  assert read_choice('It was in 1945 that World War 2 ended', ('1945', '1939')) == 0
  assert read_choice('It is 2, because 1+1=2', ('2', '3')) == 0
  assert read_choice('It is $5.', ('$5', '$6')) == 0 and read_choice('The answer is 7 km', ('5 km', '7 km')) == 1
  for answer in ('It is -2', 'It is 2.5', 'It is 0.2', 'It is 1/2', 'It is 2 million', 'It is 3 - 2'):
    assert read_choice(answer, ('2', '3')) is None
  assert read_choice('It is 1,200', ('200', '300')) is None and read_choice('So -$5', ('$5', '$6')) is None
  assert read_choice('It is x^2', ('x', 'y')) is None and read_choice('It is x.', ('x', 'y')) == 0
  assert read_choice('anything other than Rome', ('Rome', 'Paris')) is None
  assert read_choice('It is 1 1/2', ('1/2', '1/4')) is None and read_choice('It is 1/2.', ('1/2', '1/4')) == 0
  assert read_choice('B', ('B', 'A')) == 1, 'a letter is a letter'
  assert read_choice('Same', ('same', 'Same ', 'x')) is None, 'two choices of one text'


FORMULAS = ('x^2', '2x', r'\sqrt{2}', r'\pi')


@pytest.mark.parametrize(
  ('answer', 'index'),
  [
    ('It is x^2', 0), ('So x^2.', 0), ('It is x^2 - the square', 0), ('We get 2x', 1), (r'It is \sqrt{2}.', 2),
    (r'Clearly \pi, a number', 3), (r'f = \pi', 3), ('It is -x^2', None), ('It is x^2+1', None),
    ('It is x^2 + 1', None), ('It is x^2/2', None), ('It is x^2 - 1', None), ('It is 3 * 2x', None),
    ('It is 2x - y', None), (r'It is -\sqrt{2}', None), (r'It is \sqrt{2}/2', None), (r'It is \pi/2', None),
    (r'It is \pi^2', None), (r'It is 2 \pi', None), (r'It is 2\pi', None),
  ],
)  # fmt: skip
def test_a_choice_is_no_part_of_another_formula(answer, index):
  assert read_choice(answer, FORMULAS) == index


@pytest.mark.parametrize(
  ('answer', 'index'),
  [
    ('It is linear', 0), ('It is non-linear', None), ('A linear-like map', None), ('There is no change.', 1),
    ('There is no big change', None), ('It is not that there is no change', None), ('It is not linear', None),
  ],
)  # fmt: skip
def test_words_with_a_hyphen_and_choices_that_deny(answer, index):
  assert read_choice(answer, ('linear', 'no change')) == index


@untimed
@given(st.integers(0, 3), st.sampled_from(['{}', '({})', '{}.', 'The answer is {}.', '**{}**', 'Final answer: {}']))
def test_letter_and_text_of_a_choice_are_read_in_every_frame(index, frame):
  assert read_choice(frame.format('ABCD'[index]), CITIES) == index
  assert read_choice(frame.format(CITIES[index]), CITIES) == index


@pytest.mark.parametrize(
  ('gold', 'index'), [('C', 2), ('c', 2), (2, 2), ('Paris', 2), ('paris', 2), (0, 0), ('York', 3), (' B ', 1)]
)
def test_golds_of_choices(gold, index):
  choice = verifier('choice')
  read = choice.read_gold(gold, {'choices': CITIES, 'choice_labels': tuple('ABCD')})
  assert read == index
  item = Item('?', read, CITIES)
  assert choice.score([choice.reference(item)], [item])[0].score == 1


def test_golds_of_labelled_choices():
  row = {'choices': ('x', 'y', 'z'), 'choice_labels': ('1', '2', '3')}
  assert [verifier('choice').read_gold(gold, row) for gold in ('1', '3', 3, 'y', 'C')] == [0, 2, 2, 1, 2]
  numbers = {'choices': ('8', '2', '24'), 'choice_labels': tuple('ABC')}
  for way, indices in (('index', [2, 2]), ('text', [1, 1])):
    reading = verifier('choice', {'gold': way})
    assert [reading.read_gold(gold, numbers) for gold in (2, '2')] == indices
  assert verifier('choice').read_gold('2', numbers) == 1 and verifier('choice').read_gold(24, numbers) == 2
  assert (
    verifier('choice', {'gold': 'letter'}).read_gold('B', {'choices': ('B', 'A'), 'choice_labels': ('A', 'B')}) == 1
  )


@pytest.mark.parametrize(
  ('gold', 'row', 'message'),
  [
    ('C', {}, 'fields.choices must name the field'),
    ('C', {'choices': CITIES}, 'fields.choices must name the field'),  # of the data
    ('E', {'choices': CITIES, 'choice_labels': tuple('ABCD')}, 'a letter from A to D, an index from 0, or the text'),
    (4, {'choices': CITIES, 'choice_labels': tuple('ABCD')}, 'allowed: a letter from A to D'),
    (-1, {'choices': CITIES, 'choice_labels': tuple('ABCD')}, 'allowed: a letter from A to D'),
    (2, {'choices': ('8', '2', '24'), 'choice_labels': tuple('ABC')}, 'several choices, B, C; allowed: one, or ver'),
    (1, {'choices': 'xyz', 'choice_labels': ('1', '2', '3')}, 'names several choices, A, B'),
    (True, {'choices': CITIES, 'choice_labels': tuple('ABCD')}, 'allowed: a letter from A to D'),
    ('A', {'choices': ('B', 'A'), 'choice_labels': ('A', 'B')}, 'names several choices, A, B'),
    (1, {'choices': ('1', '2', '3'), 'choice_labels': tuple('ABC')}, 'names several choices, A, B'),
  ],
)
def test_golds_that_name_no_choice_are_refused(gold, row, message):
  with raises_one_line(message):
    verifier('choice').read_gold(gold, row)


def _f1(answer, gold):
  """As HotpotQA's evaluation counts, by taking the words away one by one; articles and signs alone are words."""

  def words(text):
    plain = ''.join(c for c in text.lower() if c not in '!"#$%&\'()*+,-./:;<=>?@[\\]^_`{|}~')
    left = [w for w in re.split(r'\s+', re.sub(r'\b(a|an|the)\b', ' ', plain)) if w]
    return left or [w for w in re.split(r'\s+', plain) if w] or [w for w in re.split(r'\s+', text.lower()) if w]

  a, g = words(answer), words(gold)
  if (a in (['yes'], ['no'], ['noanswer']) or g in (['yes'], ['no'], ['noanswer'])) and a != g:
    return 0.0
  rest, common = list(g), 0
  for word in a:
    if word in rest:
      rest.remove(word)
      common += 1
  if not common:
    return 0.0
  precision, recall = common / len(a), common / len(g)
  return 2 * precision * recall / (precision + recall)


words = st.lists(st.sampled_from(['the', 'a', 'Paris', 'paris.', 'yes', 'no', 'of', 'city', '"city"', '-']), max_size=6)


@untimed
@given(words.map(' '.join), words.map(' '.join))
def test_f1_against_a_second_implementation(answer, gold):
  assert f1_score(answer, gold) == pytest.approx(_f1(answer, gold))
  if squad_words(gold):
    assert f1_score(gold, gold) == 1.0


def test_f1_counts_from_its_threshold_and_only_all_words_are_right():
  pairs = [
    ('the Eiffel Tower', 'Eiffel tower!'), ('Niels Bohr', 'Bohr'), ('Niels Bohr', 'the man Bohr of great fame'),
    ('yes', 'yes it is'), (['Rome', 'Niels Bohr'], 'niels bohr'), ('Niels Bohr', ''), ('Niels Bohr', 'Bohr, Niels'),
  ]  # fmt: skip
  verdicts = judge('f1', pairs)
  assert [v.score for v in verdicts] == pytest.approx([1.0, 2 / 3, 0.0, 0.0, 1.0, 0.0, 1.0])
  assert [v.metrics['f1'] for v in verdicts] == pytest.approx([1.0, 2 / 3, 2 / 7, 0.0, 1.0, 0.0, 1.0])
  assert [v.metrics['exact_match'] for v in verdicts] == [1, 0, 0, 0, 1, 0, 0]
  assert [v.verdict for v in verdicts] == ['right', 'wrong', 'wrong', 'wrong', 'right', 'wrong', 'right']
  assert scores('f1', pairs[1:3], {'threshold': 0.0}) == pytest.approx([2 / 3, 2 / 7])
  assert scores('f1', pairs[:2], {'threshold': 1.0}) == [1.0, 0.0]


def test_f1_reads_golds_of_which_its_normalisation_would_leave_nothing():
  golds = [('A', 'a'), ('A', 'A.'), ('The The', 'the the'), ('A', 'an'), ('A', ''), ('+', '+'), ('+', '-'), ('+', 'A')]
  assert scores('f1', golds) == [1, 1, 1, 0, 0, 1, 0, 0]
  assert scores('f1', [('A', 'a dog'), ('A dog', 'dog')]) == [0.0, 1.0], 'otherwise articles do not count'


@pytest.mark.parametrize(
  ('name', 'gold', 'message'),
  [
    ('exact', ' ', 'text that is not blank'),
    ('exact', [], 'text that is not blank'),
    ('exact', ['a', None], 'text that is not blank'),
    ('exact', {'a': 1}, 'text that is not blank'),
    ('number', 'eighteen', 'a number, or text with exactly one number'),
    ('number', '17 18', 'exactly one number'),
    ('number', ['18'], 'exactly one number'),
    ('f1', ' ', 'text that is not blank'),
    ('f1', None, 'text that is not blank'),
  ],
)
def test_golds_that_cannot_be_read_are_refused(name, gold, message):
  with raises_one_line(message):
    verifier(name).read_gold(gold, {})


@pytest.mark.parametrize(
  ('name', 'options', 'message'),
  [
    ('exact', {'case': True}, r'verifier_options\.case=True; allowed: none'),
    ('choice', {'x': 1}, r'verifier_options\.x=1; allowed: gold'),
    ('choice', {'gold': 'number'}, r"verifier_options\.gold='number'; allowed: any, letter, index, text"),
    ('number', {'tolerance': -0.1}, r'verifier_options\.tolerance=-0\.1; allowed: numbers from 0 to 1'),
    ('number', {'tolerance': True}, r'tolerance=True; allowed: numbers'),
    ('f1', {'threshold': 'high'}, r"threshold='high'; allowed: numbers from 0 to 1"),
    ('f1', {'treshold': 0.5}, r'treshold=0\.5; allowed: threshold'),
  ],
)
def test_options_that_a_verifier_does_not_have_are_refused(name, options, message):
  with raises_one_line(message):
    verifier(name, options)


@pytest.mark.parametrize(
  ('name', 'gold'), [('exact', ['b', 'a']), ('number', '1,234'), ('number', 7), ('f1', ['x y', 'z'])]
)
def test_the_reference_answer_is_right(name, gold):
  judging = verifier(name)
  item = Item('?', judging.read_gold(gold, {}))
  assert judging.has_reference and judging.score([judging.reference(item)], [item])[0].score == 1
