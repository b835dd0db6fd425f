"""Expressions of Countdown against Python's own grammar and fractions."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.envs import countdown_expressions
from tests.support.environments import raises_one_line
from tests.support.games.countdown import ENV, WIDE, expressions, joined, leaves, read, value_of


@settings(max_examples=100, deadline=None)
@given(text=expressions())
def test_expressions_round_trip(text):
  action = ENV.parse_action(text)
  assert np.shape(action) == ENV.action_shape
  written = ENV.format_action(np.array(action, np.int32))
  assert read(written) == read(text)  # The same tree: nothing was regrouped.
  assert ENV.parse_action(written) == action
  assert '|' not in written
  # No pair of parentheses can be left out without a change.
  for i, j in itertools.combinations(range(len(written)), 2):
    if written[i] == '(' and written[j] == ')':
      assert read(written[:i] + written[i + 1 : j] + written[j + 1 :]) != read(text)


@settings(max_examples=100, deadline=None)
@given(text=st.text('012 +-*/()', max_size=14) | st.text(max_size=30) | expressions(most=10, largest=1_500_000))
def test_anything_else_is_refused(text):
  """The parser takes what Python takes, but for signs in front of a number, long numbers and too many of them."""
  tree = read(text)
  action = ENV.parse_action(text)
  if re.search(r'\b0[0-9]', text):
    assert action is None
  elif tree is None or len(leaves(tree)) > 2 * ENV.max_numbers:
    # Python refuses other spellings of the operators.
    assert action is None or set(text) & set('×·÷−')
  else:
    assert read(ENV.format_action(action)) == tree


NO_EXPRESSIONS = (
  *(
    '',
    ' ',
    '()',
    '(',
    '1 +',
    '+ 1',
    '-1',
    '1 - -1',
    '1 2',
    '(1)(2)',
    '2(3)',
    '1 + 2 = 3',
    '1.5',
    '1e3',
    '1_0',
    '2**3',
  ),
  *('7//2', '1234567', '007', '\u0661', '\u00b2', 'x', '1 || 2', '__import__("os")', '((1)', '(1))'),
  *('(' * 17 + '1' + ')' * 17, '(' * 10_000, '1+' * 10_000 + '1', '1+1' + ' ' * 200 + '+1', '+'.join('1' * 9)),
)


@pytest.mark.parametrize('text', NO_EXPRESSIONS, ids=range(len(NO_EXPRESSIONS)))
def test_no_expressions(text):
  assert ENV.parse_action(text) is None


def test_spellings():
  same = ['(1+2)*3', ' ( 1 + 2 )*3\n', '((1 + 2) * (3))', '(1 + 2) × 3', '(1 + 2) · 3']
  assert {ENV.parse_action(text) for text in same} == {(2, 3, -1, 4, -3, *[0] * 10)}
  assert ENV.parse_action('6 ÷ 3 − 1') == ENV.parse_action('6 / 3 - 1') == (7, 4, -4, 2, -2, *[0] * 10)
  assert ENV.format_action(ENV.parse_action('1-(2-3)-(4*5)')) == '1 - (2 - 3) - 4 * 5'
  assert ENV.parse_action('(' * 16 + '1' + ')' * 16) == (2, *[0] * 14)
  for tokens in ([], [-1], [2, 3], [2, -1, 3], [2, 3, -5]):
    with raises_one_line('not an expression'):
      ENV.format_action(np.array(tokens + [0] * (15 - len(tokens))))


@jax.jit
def evaluate(actions):
  return jax.vmap(countdown_expressions.evaluate)(actions)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_values_are_those_of_fractions(data):
  """Traced values of expressions over 2 to 4 numbers of at most 127, or 5 of at most 42: no overflow, by the bound."""
  texts = []
  for largest, most in ((127, 4), (42, 5), (812, 3)) * 4:
    numbers = data.draw(st.lists(st.integers(0, largest) | st.just(largest), min_size=1, max_size=most))
    texts.append(joined(numbers, data.draw))
  actions = np.zeros((16, *WIDE.action_shape), np.int32)
  actions[: len(texts)] = [WIDE.parse_action(text) for text in texts]
  numerators, denominators, well_formed = jax.tree.map(np.asarray, evaluate(actions))
  for text, numerator, denominator in zip(texts, numerators.tolist(), denominators.tolist(), strict=False):
    got = Fraction(numerator, denominator) if denominator else None
    assert (
      got
      == value_of(read(text))
      == countdown_expressions.value_of(countdown_expressions.unpadded(WIDE.parse_action(text)))
    )
  assert well_formed[: len(texts)].all()


def test_values_at_the_edge():
  """The largest fractions that there can be, and zeros in every place of a division."""
  big = '(127 / 126 + 127 / 125)', '(42/41 + 42/41) + (42/41 + 42)', '127 * 127 * 127 * 127', '42 * 42 * 42 * 42 * 42'
  zero = (
    '1 / 0',
    '0 / 0',
    '1 / (1 / 0)',
    '(1 / 0) / 2',
    '2 / (1 / 0)',
    '1 / 0 - 1 / 0',
    '0 * (3 / 0)',
    '0 / 5',
    '1/(2-2)',
  )
  actions = np.zeros((16, *WIDE.action_shape), np.int32)
  actions[: len(big + zero)] = [WIDE.parse_action(text) for text in big + zero]
  actions[13:, :3] = [[2, -1, 3], [2, 3, 0], [2, 3, -7]]
  numerators, denominators, well_formed = jax.tree.map(np.asarray, evaluate(actions))
  for i, text in enumerate(big + zero):
    want = value_of(read(text))
    assert (Fraction(int(numerators[i]), int(denominators[i])) if denominators[i] else None) == want
  assert well_formed[: len(big + zero)].all() and not well_formed[13:].any()
