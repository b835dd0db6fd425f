"""Numbers in answers: real forms, what is refused, and numbers that are written and read again."""

from __future__ import annotations

import string
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_jax.envs.dataset.numbers_in_text import Number, boxed, is_equal, number_of, read_number
from tests.support.datasets import untimed


@pytest.mark.parametrize(
  ('text', 'value'),
  [
    (r'1\ 1/2', Fraction(3, 2)), (r'2\;1/2', Fraction(5, 2)), (r'18\ \text{km}', 18), (r'12\,345', 12345),
    ('18', 18), ('18.0', 18), (' 18. ', 18), ('$18', 18), ('18 dollars', 18), ('The answer is 18.', 18),
    ('x = 18', 18), ('**18**', 18), ('#### 18', 18), ('"18"', 18), ('(18)', 18), ('18 km/h', 18), ('18km', 18),
    ('18€', 18), ('18 m', 18), ('3rd', 3), ('5-year', 5), ('1,234', 1234), ('1,234,567.89', Fraction(123456789, 100)),
    ('-5', -5), ('\u22125', -5), ('- 5', -5), ('+5', 5), ('-$5', -5), ('$-5', -5), ('x=-3', -3), ('.5', Fraction(1, 2)),
    ('1e3', 1000), ('1.5E-2', Fraction(3, 200)), ('3/4', Fraction(3, 4)), ('-3 / 4', Fraction(-3, 4)),
    ('1 1/2', Fraction(3, 2)), ('-1 1/2', Fraction(-3, 2)), (r'\frac{1}{2}', Fraction(1, 2)),
    (r'-\dfrac{1}{2}', Fraction(-1, 2)), (r'3\frac{1}{2}', Fraction(7, 2)), (r'\frac12', Fraction(1, 2)),
    (r'\frac{-1}{2}', Fraction(-1, 2)), (r'$\frac{3}{4}$', Fraction(3, 4)), (r'\boxed{18}', 18),
    (r'Thus we have $\boxed{18}$.', 18), (r'\boxed{x = 18} apples', 18), (r'18^\circ', 18), (r'18^{\circ}', 18),
    (r'18\text{ apples}', 18), ('1{,}234', 1234), (r'1,\!000', 1000), (r'\(7\)', 7), (r'\$7', 7), ('7 A', 7),
    ('-(18)', -18), ('-{18}', -18), (r'-\left(18\right)', -18), (r'$-\boxed{18}$', -18), (r'-\boxed{18}', -18),
    (r'+\boxed{18}', 18),
    ('-((18))', -18), ('$-$18', -18), ('-(1/2)', Fraction(-1, 2)), (r'-\boxed{\frac{1}{2}}', Fraction(-1, 2)),
    (r'\boxed{-18}', -18), ('The well-known answer is (18)', 18), ('{18}', 18),
    ('18 km/h per car', 18), ('**-18**', -18), ('The grand total is 18', 18),
    ('$20/hour', 20), ('20/day', 20), ('5 m²', 5), ('12 cm^2', 12), ('12 square feet', 12), ('18 apples left over', 18),
    ('18 different shirts', 18), ('10 times', 10), ('He did it 10 times.', 10), (r'\boxed{1,000}', 1000),
  ],
)  # fmt: skip
def test_one_number_is_read(text, value):
  assert read_number(text) == Number(Fraction(value))


@pytest.mark.parametrize('text', ['36/2', '36.0/2', r'\frac{36}{2}', '-(36/2)', '0/5'])
def test_a_division_that_is_left_undone_is_no_answer_unless_it_is_the_gold(text):
  number = read_number(text)
  assert number is not None and number.undone and is_equal(number, number)
  assert not is_equal(number, number_of(str(number.value)))
  for done in ('2/4', '18', '18/1', '1 1/2', '0.5'):
    assert not read_number(done).undone and is_equal(read_number(done), read_number(done))


@pytest.mark.parametrize('text', ['50%', '50 %', r'50\%', '50 percent', '50 Per Cent', '50\uff05', 'It is 50%.'])
def test_a_sign_for_percent_is_read(text):
  assert read_number(text) == Number(Fraction(50), True)


@pytest.mark.parametrize(
  'text',
  [
    r'17\ 18', '17~18', r'5\quad6', r'5\;6', r'$x=3,\ 500$', '5 fourths', '7 twelfths', 'neg 5',
    '', 'abc', 'seventeen', '17 18', '17, 18', '17 or eighteen', 'not 18', 'It isn\u2019t 18', '3 + 15 = 18', '3+15',
    '3*4', '2x', '2 x', 'x2', 'x 3', 'x -3', 'x - 3', 'x-3', '2^3', r'3\pi', '3π', r'\sqrt{3}', '3!', '|3|', 'f(3)',
    '2(x)', '18/x', '1/0', '1/2/3', '12,34', '12,34,567', '1,2345', '1 234', '3:30', '2024-05-06', '18k', '2 million',
    'minus 5', 'negative 5', '3 squared', 'half of 3', '3 tenths', '5 hundredths', '5 eighths',
    'the square of 5', 'the cube of 5', '2 to the fifth power', '0.3 repeating',
    '<18', '≥ 18', '±3', '~ 3 \\approx 4', 'x²', '²', '½', '1½',
    '٣', '3 ٣', '--5', '- -5', '18 -', 'COVID-19', '1.2.3', '1e9999', '0x12', r'\boxed{1} \boxed{2}', '2_3', '5 i',
    '1' * 1001, ' ' * 1000 + '1', r'\frac{1}{0}', '10 3/4 5', 'log 3',
    '(-)18', '- "18"', '-"18"', '-[18]', '-=18', '-#18', '-(-18)', '{-}18', '-x = 18', '-\n18', '-: 18', '-$ $18',
    r'{-}\boxed{18}', r'-"\boxed{18}"', r'--\boxed{18}', r'\boxed{-}18',
    r'not \boxed{18}', r'2\boxed{18}', r'\boxed{18} or 17', r'\boxed{18}2', r'\boxed{18}k', r'\boxed{18}!',
    r'(5,\,100)', r'(5,\ 100)', r'\left( 5,\ 100 \right)', '(5{,}100)',
    '(5,100)', '[0,100]', '(0, 500]', r'\left(2,125\right)', '(1,200,300)', '0,500', r'\boxed{(5,100)}', '20/x',
    '10 times 3', '10 times the price', '3 x²', '18 different from 17', '18 is different',
    r'1/\boxed{18}', r'f\boxed{18}', r'Since 17 + 1 = 18, we have $\boxed{18}$.', r'17, \boxed{18}', r'x\boxed{18}',
    r'\boxed{18}^2', r'\boxed{18}/x', 'x/18', '(18)/x', '(18)x', '18-x', '18 - x', '1 (1/2)', '"18"k', '"18" k',
    "doesn't equal 18", 'doesn\u2019t equal 18', 'doesn`t equal 18', 'doesnt equal 18',
    'not equal to 18', 'anything but 18', 'all except 18', 'other than 18', 'cannot be 18', "It can't be 18",
    '18 is wrong', 'twice 9', 'double 9', '9 doubled', 'triple 6', 'half 36', 'the opposite of 18', 'far from 18',
    '18 bn', '18bn', '18 mn', '$18 m', '$18m', '18 k', '$18 K', '18 grand', '18 dozen', '18 hundred',
    '18 thousand', '18 thousands', '18 billion', '18 mio', '18-hundred', '36 halved', 'at least 18',
  ],
)  # fmt: skip
def test_anything_else_is_no_number(text):
  assert read_number(text) is None


numbers = st.builds(Fraction, st.integers(-(10**12), 10**12), st.integers(1, 999))


@untimed
@given(numbers, st.sampled_from(['{}', '${}', 'The answer is {}.', r'\boxed{{{}}}', '**{}**', 'x = {}', '{} apples']))
def test_a_written_fraction_is_read_again(value, frame):
  assert read_number(frame.format(value)) == Number(value)


@untimed
@given(st.integers(-(10**15), 10**15), st.integers(0, 6))
def test_decimals_and_thousands_commas_are_read_again(number, places):
  value = Fraction(number, 10**places)
  sign, (whole, rest) = '-' * (value < 0), divmod(abs(number), 10**places)
  assert read_number(f'{sign}{whole:,}.{rest:0{places}d}' if places else f'{number:,}') == Number(value)


@untimed
@given(numbers, numbers, st.sampled_from([' ', ', ', ' and ', ' = ', '\n', ' + ', ';']))
def test_two_numbers_are_never_one(a, b, between):
  if a.denominator == 1 and between in ' \n' and b.denominator - 1 > 0 and b > 0:
    return  # '1 1/2' is one
  assert read_number(f'{a}{between}{b}') is None


@untimed
@given(st.text(alphabet=string.printable + 'π½²−√∞', max_size=40))
def test_any_text_is_read_without_an_exception_and_holds_the_digits_of_its_number(text):
  number = read_number(text)
  if number is not None:
    assert any(c in string.digits for c in text)


@pytest.mark.parametrize(
  ('value', 'expected'),
  [(18, 18), (0.1, Fraction(1, 10)), (-1e300, -(10**300)), ('1/3', Fraction(1, 3)), (True, None), (None, None),
   ([1], None), (float('nan'), None), (float('inf'), None), ('a', None),
   (r'Since 17 + 1 = 18, we have $\boxed{18}$.', 18), (r'17 + 1 = \boxed{18}', 18), (r'17 + 1 = -\boxed{18}', None),
   (r'17, 2\boxed{18}', None), (r'17 \boxed{1} \boxed{2}', None)],
)  # fmt: skip
def test_a_gold_is_a_number_of_json_or_text_with_one(value, expected):
  assert number_of(value) == (None if expected is None else Number(Fraction(expected)))


@pytest.mark.parametrize(
  ('answer', 'gold', 'equal'),
  [
    ('50%', '50', True), ('50%', '0.5', True), ('0.5', '50%', True), ('50', '50%', True), ('50%', '50%', True),
    ('0.5%', '0.5%', True), ('50%', '0.5%', False), ('0.5%', '50%', False), ('50%', '5000', False),
    ('5000%', '50', True), ('1/3', '0.333', False), ('-5', '5', False), ('1.5', '15', False),
  ],
)  # fmt: skip
def test_equal_numbers(answer, gold, equal):
  assert is_equal(read_number(answer), read_number(gold)) == equal


def test_a_tolerance_is_a_share_of_the_gold():
  for answer, gold, tolerance, equal in [
    ('99', '100', 0.01, True), ('98.9', '100', 0.01, False), ('-99', '-100', 0.01, True), ('99', '-100', 0.01, False),
    ('0.001', '0', 0.5, False), ('0', '0', 0.5, True), ('100', '99', 0.01, False),
  ]:  # fmt: skip
    assert is_equal(read_number(answer), read_number(gold), tolerance) == equal, (answer, gold)


def test_contents_of_boxes():
  assert boxed(r'\boxed{\frac{1}{2}} and \boxed{3}') == [r'\frac{1}{2}', '3']
  assert boxed(r'\fbox{\boxed{a} b}') == [r'\boxed{a} b', 'a'] and boxed(r'\boxed{1') == [] and boxed('none') == []


@pytest.mark.parametrize('text', [r'\box{' * 10**5, r'\box{}' * 10**5, '{' * 10**6, r'\box' + ' ' * 10**6])
def test_boxes_are_found_in_linear_time(text):
  began = time.process_time()
  assert len(boxed(text)) == text.count('}')
  assert time.process_time() - began < 5
