"""Countdown: expressions against Python's own grammar and fractions, levels and solutions against brute force."""

from __future__ import annotations

import ast
import functools
import itertools
import operator
import re
from fractions import Fraction

import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ragen_jax.envs import base, countdown, countdown_expressions
from ragen_jax.envs.countdown import Countdown

BLOCK = 256  # States of one call: every call of a test has this many, so that a program is compiled once.
BUDGET = base.Budget(1, 1, 1)
OPERATIONS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
}


@functools.partial(jax.jit, static_argnums=0)
def reset(env, seeds):
  return jax.vmap(lambda seed: env.reset(jax.random.key(seed)))(seeds)


def make_levels(env, first=0):
  return jax.tree.map(np.asarray, reset(env, np.arange(first, first + BLOCK)))


@functools.partial(jax.jit, static_argnums=0)
def step(env, states, actions, seed):
  return jax.vmap(env.step)(states, actions, jax.random.split(jax.random.key(seed), len(actions)))


def play(env, states, actions, seed=0):
  """One action in each of `states` [BLOCK]; `actions` may be one for all."""
  actions = np.broadcast_to(np.asarray(actions, np.int32), (BLOCK, *env.action_shape))
  return jax.tree.map(np.asarray, step(env, states, actions, seed))


def one(states, i=0):
  return jax.tree.map(lambda leaf: leaf[i], states)


def batch(state):
  return jax.tree.map(lambda leaf: np.asarray(leaf)[None], state)


def level_of(env, given_numbers, target):
  return env.from_text(f'Numbers: {", ".join(map(str, given_numbers))}\nTarget: {target}')


def stack(states):
  """States [BLOCK] of a list of at most as many; the first fills up."""
  states = states + [states[0]] * (BLOCK - len(states))
  return jax.tree.map(lambda *leaves: np.stack(leaves), *states)


# -- expressions, by Python's own grammar ------------------------------------------------------------------------------


def read(text):
  """What Python takes a text for, as nested tuples (left, operator, right), or None where it has anything else."""
  try:
    tree = ast.parse(text.strip(), mode='eval')
  except (SyntaxError, MemoryError, RecursionError):
    return None

  def walk(node):
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
      return walk(node.left), OPERATIONS[type(node.op)], walk(node.right)
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= 999_999:
      return node.value
    raise ValueError(ast.dump(node))

  try:
    return walk(tree.body)
  except ValueError:
    return None


def leaves(tree):
  return leaves(tree[0]) + leaves(tree[2]) if isinstance(tree, tuple) else [tree]


def value_of(tree):
  """The exact value, or None where something is divided by zero."""
  if not isinstance(tree, tuple):
    return Fraction(tree)
  left, right = value_of(tree[0]), value_of(tree[2])
  if left is None or right is None or (tree[1] is operator.truediv and right == 0):
    return None
  return tree[1](left, right)


def reward_of(text, given_numbers, target, numbers_reward=0.1):
  """The published rule: all numbers once and the right value 1, all numbers once 0.1, else 0."""
  tree = read(text)
  if sorted(leaves(tree)) != sorted(given_numbers):
    return 0.0
  return 1.0 if value_of(tree) == target else numbers_reward


def joined(parts, draw):
  """The parts, in any order and grouping, as an expression with more parentheses and blanks than it needs."""
  parts = [str(p) for p in parts]
  while len(parts) > 1:
    left = parts.pop(draw(st.integers(0, len(parts) - 1)))
    right = parts.pop(draw(st.integers(0, len(parts) - 1)))
    blank = draw(st.sampled_from(['', ' ']))
    text = f'{left}{blank}{draw(st.sampled_from("+-*/"))}{blank}{right}'
    # The last one may stand bare, so that operators of its sides bind as they do.
    parts.append(text if draw(st.integers(0, 3)) == 0 else f'({text})')
  return parts[0]


@st.composite
def expressions(draw, most=8, largest=99):
  """Texts of expressions of 1 to `most` numbers."""
  return joined(draw(st.lists(st.integers(0, largest), min_size=1, max_size=most)), draw)


ENV = Countdown()
WIDE = Countdown(min_numbers=2, max_numbers=5, largest_number=42, level_operators='+-*')


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=400, deadline=None)
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
    with pytest.raises(ValueError, match='no expression'):
      ENV.format_action(np.array(tokens + [0] * (15 - len(tokens))))


@jax.jit
def evaluate(actions):
  return jax.vmap(countdown_expressions.evaluate)(actions)


@settings(max_examples=60, deadline=None)
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


# -- rewards -----------------------------------------------------------------------------------------------------------


# Not shrunk: an example is a dozen levels, and smaller ones would say no more.
@settings(max_examples=15, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_rewards(data):
  """Random expressions over the level's numbers, or nearly, are paid by the published rule."""
  states, texts = [], []
  for _ in range(12):
    numbers = data.draw(st.lists(st.integers(1, 12), min_size=3, max_size=4))
    used = data.draw(st.permutations(numbers))
    if data.draw(st.integers(0, 3)) == 0:
      first, second, *rest = used
      nearly = [*used, 1], used[1:], [first + 1, *used[1:]], [first + 1, second - 1, *rest], [*used, *used[:2], 3]
      used = nearly[data.draw(st.integers(0, len(nearly) - 1))]
    text = joined(used, data.draw)
    value = value_of(read(text))
    target = data.draw(st.integers(1, 99))
    if data.draw(st.booleans()) and value is not None and 1 <= value <= 99:
      target = int(value)  # The value, or just below it.
    states.append(level_of(ENV, numbers, target))
    texts.append(text)
  levels = stack(states)
  actions = np.stack([ENV.parse_action(text) for text in texts + [texts[0]] * (BLOCK - len(texts))])
  after, out = play(ENV, levels, actions)
  for i, text in enumerate(texts):
    level = one(levels, i)
    want = reward_of(text, [v for v in level.numbers.tolist() if v], int(level.target))
    assert out.reward[i] == np.float32(want)
    assert after.success[i] == (want == 1)
  assert after.done.all() and out.effective.all()
  np.testing.assert_array_equal(after.points, out.reward)
  np.testing.assert_array_equal(after.answer, actions)


@pytest.mark.parametrize(
  ('text', 'want'),
  [
    ('8 / (3 - 8 / 3)', 1),  # Needs a fraction on the way.
    ('3 + 3 + 8 + 8', 0.1),
    ('8 / (8 - 8) + 3', 0),
    ('(8 + 8) / (3 - 3)', 0.1),  # No value, but the right numbers.
    ('3 * 8', 0),
    ('24', 0),
    ('3 * 8 + 3 - 3', 0),
    ('8 * 3 + 3 / 8', 0.1),  # Three eighths too much.
    ('(4 - 2) * 8 + 8', 0),  # Four numbers with the same sum.
    ('(8 - 3) * 8 / 3', 0.1),
    ('999999 * 999999 * 999999', 0),  # Overflows, where it does not matter.
  ],
)
def test_known_rewards(text, want):
  levels = stack([level_of(ENV, (3, 3, 8, 8), 24)])
  after, out = play(ENV, levels, ENV.parse_action(text))
  np.testing.assert_array_equal(out.reward, np.float32(want))
  assert (after.success == (want == 1)).all() and after.done.all()


def test_a_division_by_zero_is_never_on_target():
  levels = stack([level_of(ENV, (24, 1, 1), 24)])
  after, out = play(ENV, levels, ENV.parse_action('24 / (1 - 1)'))
  assert (out.reward == np.float32(0.1)).all() and not after.success.any()


def test_tokens_that_are_no_expression_earn_nothing():
  levels = stack([level_of(ENV, (24, 1, 1), 24)])
  actions = np.zeros((BLOCK, *ENV.action_shape), np.int32)
  actions[0::2, :3] = [25, 2, 2]
  actions[1::2, :5] = [25, -3, 2, 2, -3]
  after, out = play(ENV, levels, actions)
  assert not out.reward.any() and not after.success.any() and after.done.all()


def test_numbers_reward():
  env = Countdown(numbers_reward=0.5)
  level = level_of(env, (1, 2, 3), 50)
  _, out = jax.jit(env.step)(level, np.array(env.parse_action('1 + 2 + 3'), np.int32), jax.random.key(0))
  assert out.reward == 0.5
  assert env.solve(batch(level), BUDGET).rewards == 0.5
  assert 'right numbers 0.5' in env.rules() and 'right numbers' not in Countdown(numbers_reward=0.0).rules()


def test_one_answer_ends_the_game():
  levels = make_levels(ENV)
  actions = np.array([chains[0] for chains in ENV.legal_actions(levels)])
  after, _ = play(ENV, levels, actions)
  again, out = play(ENV, after, ENV.parse_action('1 + 1'), seed=1)
  jax.tree.map(np.testing.assert_array_equal, again, after)
  assert after.done.all() and not out.reward.any() and not out.effective.any()


def test_jit_and_vmap_change_nothing():
  levels = make_levels(ENV)
  actions = np.array([chains[-1] for chains in ENV.legal_actions(levels)], np.int32)
  after, out = play(ENV, levels, actions)
  alone = ENV.reset(jax.random.key(250))
  jax.tree.map(np.testing.assert_array_equal, alone, one(levels, 250))
  got = ENV.step(alone, jax.numpy.asarray(actions[250]), jax.random.key(0))
  jax.tree.map(np.testing.assert_array_equal, got, (one(after, 250), one(out, 250)))


# -- levels ------------------------------------------------------------------------------------------------------------


@functools.cache
def reachable(numbers, signs='+-*/'):
  """Every value of every expression over a sorted tuple of numbers: two of them become one, in all ways."""
  if len(numbers) == 1:
    return frozenset([Fraction(numbers[0])])
  values = set()
  for i, j in itertools.permutations(range(len(numbers)), 2):
    rest = [v for k, v in enumerate(numbers) if k not in (i, j)]
    a, b = numbers[i], numbers[j]
    joins = {'+': a + b, '-': a - b, '*': a * b, '/': Fraction(a) / b if b else None}
    for value in (joins[sign] for sign in signs):
      if value is not None:
        values |= reachable(tuple(sorted([*rest, value])), signs)
  return frozenset(values)


LEVELS = (
  Countdown(largest_number=9, largest_target=30),
  Countdown(min_numbers=2, max_numbers=3, largest_number=20, largest_target=40, level_operators='+-'),
)


@pytest.mark.parametrize('env', LEVELS)
def test_levels_can_be_won(env):
  levels = make_levels(env)
  counts = (levels.numbers > 0).sum(1)
  assert set(counts) == set(range(env.min_numbers, env.max_numbers + 1))
  assert levels.numbers.max() == env.largest_number and levels.target.min() >= 1
  assert levels.target.max() <= env.largest_target
  for numbers, target in list(zip(levels.numbers.tolist(), levels.target.tolist(), strict=True))[:60]:
    assert target in reachable(tuple(sorted(v for v in numbers if v)), env.level_operators)
  assert (env.optimal(levels, BUDGET) == 1).all()
  assert not levels.done.any() and not levels.success.any() and not levels.answer.any()


def test_the_level_operators_matter():
  """Levels of signs alone are won by signs alone; not all of the others are."""
  levels = make_levels(LEVELS[0])
  by_signs = [
    target in reachable(tuple(sorted(v for v in numbers if v)), '+-')
    for numbers, target in zip(levels.numbers.tolist(), levels.target.tolist(), strict=True)
  ]
  assert 0.2 < np.mean(by_signs) < 0.95


def test_targets_are_distributed_as_a_plain_rejection_sampler_draws_them():
  env, n, rng = LEVELS[0], 12 * BLOCK, np.random.default_rng(0)
  blocks = [make_levels(env, first) for first in range(0, n, BLOCK)]
  ours = np.array([[*numbers, target] for b in blocks for numbers, target in zip(b.numbers, b.target, strict=True)])

  def draw():
    values = rng.integers(1, 10, size=rng.integers(3, 5)).tolist()
    shown = values + [0] * (4 - len(values))
    while len(values) > 1:
      i, j = sorted(rng.choice(len(values), 2, replace=False))
      b, a = sorted([values.pop(j), values.pop(i)])
      possible = [a + b, a * b] + [a - b] * (a > b) + [a // b] * (a % b == 0)
      values.append(possible[rng.integers(len(possible))])
    return [*shown, values[0]]

  reference = []
  while len(reference) < n:
    level = draw()
    if level[-1] <= env.largest_target:
      reference.append(level)
  reference = np.array(reference)
  # The targets' whole distribution, and the numbers that were kept with them.
  for ours_hit, reference_hit in (
    (ours[:, 4:] == np.arange(1, 31), reference[:, 4:] == np.arange(1, 31)),
    (ours[:, 0:1] == np.arange(1, 10), reference[:, 0:1] == np.arange(1, 10)),
    (ours[:, 3:4] == np.arange(10), reference[:, 3:4] == np.arange(10)),
  ):
    error = np.sqrt((ours_hit.var(0) + reference_hit.var(0)) / n)
    assert (np.abs(ours_hit.mean(0) - reference_hit.mean(0)) < 4.5 * error).all()


def test_same_key_same_level():
  levels, again, others = make_levels(ENV), make_levels(ENV), make_levels(ENV, first=BLOCK)
  jax.tree.map(np.testing.assert_array_equal, levels, again)
  assert len(set(ENV.render(levels) + ENV.render(others))) > 500


# -- solver ------------------------------------------------------------------------------------------------------------


def test_solutions_are_what_brute_force_finds():
  """Random numbers with targets that can and cannot be reached."""
  rng, states, want = np.random.default_rng(1), [], []
  for _ in range(40):
    numbers = rng.integers(1, 14, size=rng.integers(3, 5)).tolist()
    values = reachable(tuple(sorted(numbers)))
    targets = rng.permutation(99)[:4] + 1
    states += [level_of(ENV, numbers, target) for target in targets]
    want += [target in values for target in targets]
  for numbers, target in (((3, 3, 8, 8), 24), ((1, 5, 5, 5), 24), ((1, 3, 4, 6), 24), ((1, 1, 1), 9)):
    states.append(level_of(ENV, numbers, target))
    want.append(target in reachable(numbers))
  assert want[-4:] == [True, True, True, False] and 0.2 < np.mean(want) < 0.8
  want += [want[0]] * (BLOCK - len(want))
  levels = stack(states)
  solution = ENV.solve(levels, BUDGET)
  np.testing.assert_array_equal(solution.success, np.float32(want))

  ones = np.ones(BLOCK, np.int32)
  plans = solution.plan(levels, ones, ones)
  after, out = play(ENV, levels, [plan[0] for plan in plans])
  np.testing.assert_array_equal(after.success, want)
  # Whole value: 1 or the reward for the numbers.
  np.testing.assert_array_equal(solution.value(levels, ones, ones), out.reward)
  np.testing.assert_array_equal(out.reward, np.where(want, np.float32(1), np.float32(0.1)))
  # The thoughts are true, and know when there is nothing to be found.
  for thought, possible, target in zip(ENV.rationale(levels), want, levels.target.tolist(), strict=True):
    assert thought.startswith(f'I need {target}')
    steps = re.findall(r'([-\d/]+) ([-+*/]) ([-\d/]+) = ([-\d/]+)', thought)
    assert bool(steps) == possible and ('no way' in thought) != possible
    signs = dict(zip('+-*/', OPERATIONS.values(), strict=True))
    assert all(signs[sign](Fraction(a), Fraction(b)) == Fraction(c) for a, sign, b, c in steps)
    assert not steps or Fraction(steps[-1][-1]) == target

  assert solution.plan(after, ones, ones) == [[]] * BLOCK and not solution.value(after, ones, ones).any()
  for turns, actions in ((0, 1), (1, 0)):
    assert solution.plan(levels, turns * ones, actions * ones) == [[]] * BLOCK
    assert not solution.value(levels, turns * ones, actions * ones).any()
  np.testing.assert_array_equal(ENV.optimal(after, BUDGET), after.success)


def test_largest_levels():
  levels = make_levels(WIDE)
  assert set((levels.numbers > 0).sum(1)) == {2, 3, 4, 5}
  solution = WIDE.solve(levels, BUDGET)
  after, out = play(WIDE, levels, solution.actions)
  assert after.success.all() and (out.reward == 1).all() and (solution.success == 1).all()
  # What a level is made of is a solution in positive integers, and such are found first.
  assert not any(re.search(r'\d/\d|-\d', thought) for thought in WIDE.rationale(levels))
  few = [level for level in countdown._levels(levels) if len(level[0]) < 4]
  assert all(target in reachable(tuple(sorted(numbers)), '+-*') for numbers, target in few) and len(few) > 50


def test_random_answers_are_worse():
  rng, levels = np.random.default_rng(0), make_levels(ENV)
  legal = ENV.legal_actions(levels)
  assert {len(chains) for chains in legal} == {16, 64} and all(len(set(chains)) == len(chains) for chains in legal)
  after, out = play(ENV, levels, [chains[rng.integers(len(chains))] for chains in legal])
  assert (out.reward >= np.float32(0.1)).all() and after.success.mean() < 0.5
  assert ENV.format_action(legal[0][1]).count('+') == len(levels.numbers[0].nonzero()[0]) - 2


# -- text and pictures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('answer', 'result'),
  [
    ('3*(8-1)', '3 * (8 - 1) = 21\nPoints: 0.1'),
    ('3*8*1', '3 * 8 * 1 = 24\nPoints: 1'),
    ('8/3-1', '8 / 3 - 1 = 5/3\nPoints: 0.1'),
    ('3/(1-1)', '3 / (1 - 1) = undefined\nPoints: 0'),
    ('24', '24 = 24\nPoints: 0'),
  ],
)
def test_text(answer, result):
  level = level_of(ENV, (3, 8, 1), 24)
  assert ENV.render(batch(level)) == ['Numbers: 3, 8, 1\nTarget: 24']
  after, _ = play(ENV, stack([level]), ENV.parse_action(answer))
  text = f'Numbers: 3, 8, 1\nTarget: 24\nAnswer: {result}'
  assert ENV.render(after)[0] == text
  assert ENV.render(batch(ENV.from_text(text))) == [text]


def test_text_round_trip():
  levels, rng = make_levels(ENV), np.random.default_rng(0)
  after, _ = play(ENV, levels, [chains[rng.integers(len(chains))] for chains in ENV.legal_actions(levels)])
  for states, count in ((levels, BLOCK), (after, 3)):
    for i, text in enumerate(ENV.render(states)[:count]):
      got = ENV.from_text(text)
      jax.tree.map(np.testing.assert_array_equal, got, one(states, i))
      assert jax.tree.map(lambda a: a.dtype, got) == jax.tree.map(lambda a: a.dtype, states)


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('Numbers: 1, 2, 3', '1 lines, must be 2'),
    ('Numbers: 1, 2\nTarget: 3', 'must be 3 to 4 numbers from 1 to 99'),
    ('Numbers: 1, 2, 100\nTarget: 3', 'must be 3 to 4 numbers from 1 to 99'),
    ('Numbers: 1, 0, 2\nTarget: 3', 'must be 3 to 4 numbers from 1 to 99'),
    ('Numbers: 1, 2, x\nTarget: 3', "line 1 is .* must begin with 'Numbers:'"),
    ('Numbers: 1, 2, 3\nTarget: 100', 'must be a target from 1 to 99'),
    ('Numbers: 1, 2, 3\nGoal: 6', "line 2 is 'Goal: 6', must begin with 'Target:'"),
    ('Numbers: 1, 2, 3\nTarget: 6\nAnswer: 1 + = 1\nPoints: 0', 'line 3 is .* must be an expression'),
    ('Numbers: 1, 2, 3\nTarget: 6\nAnswer: 1 + 2 + 3 = 7\nPoints: 1', "line 3 is .* must be 'Answer: 1 .* = 6'"),
    ('Numbers: 1, 2, 3\nTarget: 6\nAnswer: 1 + 2 + 3 = 6\nPoints: 2', "line 4 is 'Points: 2', must be 'Points: 1'"),
  ],
)
def test_bad_text(text, message):
  with pytest.raises(ValueError, match=message):
    ENV.from_text(text)


def test_rules():
  assert '+ - * /' in ENV.rules() and '0.1' in ENV.rules() and 'expression' in ENV.action_help
  assert ENV.parse_action(re.search(r'\(.*\d', ENV.action_help)[0]) is not None
  # A leading minus is no action, and the player is told.
  assert 'without a leading minus' in ENV.action_help
  assert [ENV.parse_action(text) for text in ('-1 + 2', '3 * (-1 + 2)', '2 * -3')] == [None] * 3
  assert ENV.legend() == {} and ENV.action_words == ()


def test_picture():
  level = level_of(ENV, (3, 10, 7), 24)
  picture = ENV.render_rgb(level)
  assert picture.shape == (60, 180, 3) and picture.dtype == np.uint8
  paper = tuple(picture[0, 0])
  ink = (picture != paper).any(-1)[::4, ::4]
  # A 3 above, a 2 and a 4 below, dot by dot.
  assert [''.join('.#'[int(dot)] for dot in row) for row in ink[2:7, 1:4]] == ['###', '..#', '###', '..#', '###']
  below = [''.join('.#'[int(dot)] for dot in row) for row in ink[9:14, 1:8]]
  assert below == ['###.#.#', '..#.#.#', '###.###', '#.....#', '###...#']
  assert not ink[7:9].any()
  # The target's colour tells how it went.
  colours = set()
  for answer in (None, '10 + 7 * 3', '3 + 10 + 7', '(10 - 7) * 8'):
    state = level
    if answer:
      state = one(play(ENV, stack([level_of(ENV, (3, 10, 7), 31)]), ENV.parse_action(answer))[0])
    shown = ENV.render_rgb(state)
    np.testing.assert_array_equal(shown[:32], picture[:32])
    colours.add(tuple(shown[9 * 4, 4]))
  assert len(colours) == 4 and paper not in colours
  shapes = {ENV.render_rgb(one(make_levels(ENV), i)).shape for i in range(20)}
  assert shapes == {picture.shape}


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'max_numbers': 6}, 'max_numbers=6; allowed: integers from 2 to 5'),
    ({'min_numbers': 5}, 'min_numbers=5; allowed: integers from 2 to 4'),
    ({'min_numbers': 1}, 'min_numbers=1; allowed: integers from 2 to 4'),
    ({'largest_number': 128}, 'largest_number=128; allowed: integers from 2 to 127'),
    ({'max_numbers': 5}, 'largest_number=99; allowed: integers from 2 to 42'),
    ({'max_numbers': 3, 'largest_number': 813}, 'integers from 2 to 812'),
    ({'min_numbers': 2, 'max_numbers': 2, 'largest_number': 1000}, 'integers from 2 to 999'),
    ({'largest_target': 0}, 'largest_target=0; allowed: integers from 1 to 999999'),
    ({'largest_target': 10.0}, 'largest_target=10.0; allowed: integers'),
    ({'min_numbers': True}, 'min_numbers=True; allowed: integers'),
    ({'level_operators': '*/'}, r"level_operators='\*/'; allowed: "),
    ({'numbers_reward': 1.0}, 'numbers_reward=1.0; allowed: numbers from 0 to below 1'),
    ({'numbers_reward': float('nan')}, 'numbers_reward=nan; allowed: '),
  ],
)
def test_bad_options_are_named(options, message):
  with pytest.raises(ValueError, match=message) as error:
    Countdown(**options)
  assert str(error.value).startswith('countdown: ') and '\n' not in str(error.value)
