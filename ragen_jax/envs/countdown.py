"""Countdown: one arithmetic expression that uses every given number exactly once and is equal to the target.

An expression becomes an action in reverse Polish notation, a row of i32 tokens: 0 is padding at the end, 1 + v is the
number v, and -1, -2, -3, -4 are + - * /. For instance (1 + 2) * 3 is 2, 3, -1, 4, -3, 0, ...
"""

from __future__ import annotations

import dataclasses
import itertools
import numbers
import operator
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base

Tokens = tuple[int, ...]
# The given numbers, and the target.
Level = tuple[tuple[int, ...], int]

_OPERATORS = '+-*/'
PLUS, MINUS, TIMES, OVER = -1, -2, -3, -4
_FUNCTIONS = {PLUS: operator.add, MINUS: operator.sub, TIMES: operator.mul, OVER: operator.truediv}
_PRECEDENCE = {PLUS: 1, MINUS: 1, TIMES: 2, OVER: 2}
_LEVEL_OPERATORS = ('+-', '+-*', '+-*/')

# What the parser reads at most: characters, parentheses within one another, digits of a number.
_TEXT = 200
_DEPTH = 16
_LARGEST_LITERAL = 999_999
_SYMBOL = re.compile(r'\s*(0|[1-9][0-9]{0,5}|[-+*/()])')
# Other ways to write the operators.
_ALIASES = str.maketrans({'×': '*', '·': '*', '÷': '/', '−': '-'})

# The picture: digits of 3 x 5 dots, row by row, drawn 4 pixels a dot in cells of 4 x 7 dots.
_DIGITS = (
  '111101101101111',
  '010110010010111',
  '111001111100111',
  '111001111001111',
  '101101111001001',
  '111100111001111',
  '111100111101111',
  '111001010010010',
  '111101111101111',
  '111101111001111',
)
_DOT = 4
_CELL = (7, 4)
_PAPER_RGB = (30, 34, 46)
_NUMBER_RGB = (230, 230, 230)
_OPEN_RGB, _WRONG_RGB, _NEAR_RGB, _RIGHT_RGB = (120, 170, 240), (210, 80, 70), (240, 190, 70), (90, 190, 110)


@struct.dataclass
class State(base.State):
  """A level, and what was answered; T = 4 * max_numbers - 1 tokens.

  Attributes:
    numbers: i32[max_numbers], the given numbers, 0 where the level has fewer.
    target: i32[].
    answer: i32[T], the expression that was played; zeros before.
    points: f32[], its reward, 0 before.
  """

  numbers: jax.Array
  target: jax.Array
  answer: jax.Array
  points: jax.Array


@dataclasses.dataclass(frozen=True)
class Countdown(base.Environment):
  """Make the target from the given numbers; one expression, and the game is over.

  The reward is 1 if the expression uses every number exactly once and is equal to the target (success),
  `numbers_reward` if the numbers are right and the value is not (a division by zero has no value), else 0.

  Arithmetic is exact. A fraction over n numbers of at most M has a numerator and a denominator of at most
  2**(n - 1) * M**n: sums at most double the product of what they are made of, products and quotients do not. The
  options keep this within an i32, so no expression with the right numbers can overflow; the value of others is not
  looked at.

  Actions are rows of tokens, see the top of this file. An expression may have up to 2 * max_numbers numbers, so that
  one with too many is an answer, though a wrong one.

  Attributes:
    min_numbers: fewest given numbers, at least 2.
    max_numbers: most given numbers, at most 5.
    largest_number: given numbers are drawn from 1 to this; at most 999, 812, 127 or 42 where max_numbers is 2, 3, 4, 5.
    largest_target: targets are 1 to this.
    level_operators: what levels are made with, '+-', '+-*' or '+-*/'; answers may use all four.
    numbers_reward: for the right numbers with a wrong value, from 0 to below 1.
  """

  name: ClassVar[str] = 'countdown'
  action_help: ClassVar[str] = (
    'An action is an expression such as (1 + 2) * 3, without an equals sign and without a leading minus: '
    'a minus only subtracts.'
  )

  min_numbers: int = 3
  max_numbers: int = 4
  largest_number: int = 99
  largest_target: int = 99
  level_operators: str = '+-*/'
  numbers_reward: float = 0.1

  def __post_init__(self):
    _check_integer('max_numbers', self.max_numbers, 2, 5)
    _check_integer('min_numbers', self.min_numbers, 2, self.max_numbers)
    _check_integer('largest_number', self.largest_number, 2, _largest_number(self.max_numbers))
    _check_integer('largest_target', self.largest_target, 1, _LARGEST_LITERAL)
    if self.level_operators not in _LEVEL_OPERATORS:
      allowed = ', '.join(_LEVEL_OPERATORS)
      raise ValueError(f'countdown: level_operators={self.level_operators!r}; allowed: {allowed}')
    reward = self.numbers_reward
    if not isinstance(reward, numbers.Real) or isinstance(reward, bool) or not 0 <= reward < 1:
      raise ValueError(f'countdown: numbers_reward={reward!r}; allowed: numbers from 0 to below 1')

  # -- traced, one instance ------------------------------------------------------------------------------------------

  def reset(self, key: jax.Array) -> State:
    """A level from a key: random numbers, joined in random order by random operators until one value is left.

    All values on the way are positive integers. The last one is the target; levels are drawn again until it is at most
    `largest_target`.
    """

    def draw(carry):
      key, _, _ = carry
      key, key_count, key_numbers, key_joins = jax.random.split(key, 4)
      count = jax.random.randint(key_count, (), self.min_numbers, self.max_numbers + 1, jnp.int32)
      given = jax.random.randint(key_numbers, (self.max_numbers,), 1, self.largest_number + 1, jnp.int32)
      given = jnp.where(jnp.arange(self.max_numbers) < count, given, 0)
      return key, given, self._join(given, count, key_joins)

    carry = key, jnp.zeros((self.max_numbers,), jnp.int32), jnp.int32(self.largest_target + 1)
    _, given, target = jax.lax.while_loop(lambda carry: carry[-1] > self.largest_target, draw, carry)
    no = jnp.bool_(False)
    return State(
      done=no,
      success=no,
      numbers=given,
      target=target,
      answer=jnp.zeros(self.action_shape, jnp.int32),
      points=jnp.float32(0),
    )

  def _join(self, given: jax.Array, count: jax.Array, key: jax.Array) -> jax.Array:
    """i32[], what is left of the first `count` numbers when random pairs of them have become one value each."""
    in_use = np.array([sign in self.level_operators for sign in _OPERATORS])

    def join(carry, draws):
      values, left = carry
      i = _choice(draws[0], left)
      j = (i + 1 + _choice(draws[1], left - 1)) % left
      high, low = jnp.maximum(values[i], values[j]), jnp.minimum(values[i], values[j])
      divisor = jnp.maximum(low, 1)
      results = jnp.stack([high + low, high - low, high * low, high // divisor])
      possible = jnp.stack([low > 0, high > low, low > 0, high % divisor == 0]) & in_use
      chosen = jnp.argmax(jnp.cumsum(possible) > _choice(draws[2], possible.sum()))
      # The value goes to the first of the two places, the last value to the second.
      joined = values.at[jnp.maximum(i, j)].set(values[left - 1]).at[jnp.minimum(i, j)].set(results[chosen])
      more = left > 1
      return (jnp.where(more, joined, values), jnp.where(more, left - 1, left)), None

    draws = jax.random.uniform(key, (self.max_numbers - 1, 3))
    (values, _), _ = jax.lax.scan(join, (given, count), draws)
    return values[0]

  def _step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, base.StepOutput]:
    del key
    given = jnp.where(state.numbers > 0, state.numbers + 1, 0)
    given = jnp.pad(given, (0, action.shape[0] - self.max_numbers))
    right_numbers = (jnp.sort(jnp.maximum(action, 0)) == jnp.sort(given)).all()
    numerator, denominator, well_formed = _evaluate(action)
    divisor = jnp.where(denominator == 0, 1, denominator)
    # Not by multiplying the target with the denominator: that could overflow.
    on_target = (denominator != 0) & (numerator % divisor == 0) & (numerator // divisor == state.target)
    right_numbers &= well_formed
    success = right_numbers & on_target
    points = jnp.where(success, 1.0, jnp.where(right_numbers, self.numbers_reward, 0.0)).astype(jnp.float32)
    state = state.replace(done=jnp.bool_(True), success=success, answer=action.astype(jnp.int32), points=points)
    return state, base.StepOutput(reward=points, effective=jnp.bool_(True))

  # -- text ----------------------------------------------------------------------------------------------------------

  @property
  def action_shape(self) -> tuple[int]:
    """The tokens of 2 * max_numbers numbers and the operators between them."""
    return (4 * self.max_numbers - 1,)

  def rules(self) -> str:
    """The game in a few sentences."""
    near = f', another value made of the right numbers {self.numbers_reward:g}' if self.numbers_reward else ''
    return (
      'You see some numbers and a target. Write an expression that uses every number exactly once and is equal to the '
      'target. It may have + - * / and parentheses; a division may leave a fraction. '
      f'The target earns 1 point{near}, anything else 0. You have one try.'
    )

  def parse_action(self, text: str) -> Tokens | None:
    """The tokens of an expression, i32 of `action_shape`; None if the text is not one, or too long.

    An expression has unsigned integers of at most 6 digits, + - * / (also written × · ÷ −) and parentheses. The four
    operators bind as usual and from left to right; there is no minus sign in front of a number.
    """
    if len(text) > _TEXT:
      return None
    symbols = _symbols(text.translate(_ALIASES).strip())
    if symbols is None:
      return None
    try:
      tokens = _Parser(symbols).expression()
    except _NoExpressionError:
      return None
    return self._padded(tokens) if len(tokens) <= self.action_shape[0] else None

  def format_action(self, action: np.ndarray | Tokens) -> str:
    """The expression with the parentheses that it needs, `parse_action` of which is the action.

    Raises:
      ValueError: the tokens are no expression.
    """
    return _infix(_unpadded(action))

  # -- host, batched ---------------------------------------------------------------------------------------------------

  def render(self, states: State) -> list[str]:
    """The numbers and the target, and after the answer what it came to, for states [N]."""
    leaves = (states.numbers, states.target, states.answer, states.points)
    return [self._text(*row) for row in zip(*(np.asarray(leaf).tolist() for leaf in leaves), strict=True)]

  def _text(self, given: list[int], target: int, answer: list[int], points: float) -> str:
    text = f'Numbers: {", ".join(str(v) for v in given if v)}\nTarget: {target}'
    tokens = _unpadded(answer)
    if not tokens:
      return text
    value = _value(tokens)
    return f'{text}\nAnswer: {_infix(tokens)} = {"undefined" if value is None else value}\nPoints: {points:.6g}'

  def from_text(self, text: str) -> State:
    """One state (no batch axis) from an observation.

    Raises:
      ValueError: the text is not what `render` draws of any state.
    """
    lines = [line.strip() for line in text.strip().splitlines()]
    patterns = (r'Numbers: (\d+(?:, \d+)*)', r'Target: (\d+)', r'Answer: (.*) = .*', r'Points: .*')
    if len(lines) not in (2, 4):
      raise ValueError(f'countdown: the text has {len(lines)} lines, must be 2, or 4 with an answer')
    matches = [re.fullmatch(pattern, line) for pattern, line in zip(patterns, lines, strict=False)]
    for i, (line, match) in enumerate(zip(lines, matches, strict=True), 1):
      if match is None:
        raise ValueError(f'countdown: line {i} is {line!r}, must begin with {patterns[i - 1].split(" ")[0]!r}')
    given = [int(v) for v in matches[0][1].split(', ')]
    if not self.min_numbers <= len(given) <= self.max_numbers or not all(1 <= v <= self.largest_number for v in given):
      raise ValueError(
        f'countdown: line 1 is {lines[0]!r}, must be {self.min_numbers} to {self.max_numbers} numbers '
        f'from 1 to {self.largest_number}'
      )
    target = int(matches[1][1])
    if not 1 <= target <= self.largest_target:
      raise ValueError(f'countdown: line 2 is {lines[1]!r}, must be a target from 1 to {self.largest_target}')
    state = State(
      done=np.asarray(False),
      success=np.asarray(False),
      numbers=np.array(given + [0] * (self.max_numbers - len(given)), np.int32),
      target=np.asarray(target, np.int32),
      answer=np.zeros(self.action_shape, np.int32),
      points=np.zeros((), np.float32),
    )
    if len(lines) == 2:
      return state
    answer = self.parse_action(matches[2][1])
    if answer is None:
      raise ValueError(f'countdown: line 3 is {lines[2]!r}, must be an expression and its value')
    after, _ = self.step(jax.tree.map(jnp.asarray, state), jnp.array(answer, jnp.int32), jax.random.key(0))
    after = jax.tree.map(np.asarray, after)
    drawn = self.render(jax.tree.map(lambda leaf: leaf[None], after))[0].splitlines()
    for i in (2, 3):
      if lines[i] != drawn[i]:
        raise ValueError(f'countdown: line {i + 1} is {lines[i]!r}, must be {drawn[i]!r} by the other lines')
    return after

  def render_rgb(self, state: State) -> np.ndarray:
    """The numbers above the target in digits, u8[height, width, 3]; the size depends on the options alone.

    The target is blue before the answer; then green where it was reached, yellow where only the numbers were right,
    else red.
    """
    widest = [str(self.largest_number)] * self.max_numbers, [str(self.largest_target)]
    columns = max(len(' '.join(words)) for words in widest)
    dots = np.zeros((2 * _CELL[0] + 1, columns * _CELL[1] + 1, 3), np.uint8)
    dots[:] = _PAPER_RGB
    colour = _OPEN_RGB
    if state.done:
      colour = _RIGHT_RGB if state.success else _NEAR_RGB if _uses_each_number(state) else _WRONG_RGB
    given = ' '.join(str(v) for v in np.asarray(state.numbers).tolist() if v)
    for i, (line, rgb) in enumerate(((given, _NUMBER_RGB), (str(int(state.target)), colour))):
      for j, digit in enumerate(line):
        if digit != ' ':
          glyph = np.array([dot == '1' for dot in _DIGITS[int(digit)]]).reshape(5, 3)
          row, column = i * _CELL[0] + 2, j * _CELL[1] + 1
          dots[row : row + 5, column : column + 3][glyph] = rgb
    return dots.repeat(_DOT, axis=0).repeat(_DOT, axis=1)

  def legal_actions(self, states: State) -> list[list[Tokens]]:
    """The given numbers in their order, joined from left to right by every choice of operators."""
    return [
      [self._padded(_chain(given, *signs)) for signs in itertools.product(_FUNCTIONS, repeat=len(given) - 1)]
      for given, _ in _levels(states)
    ]

  def _padded(self, tokens: Sequence[int]) -> Tokens:
    (length,) = self.action_shape
    return (*tokens, *[0] * (length - len(tokens)))

  # -- solver ----------------------------------------------------------------------------------------------------------

  def solve(self, states: State, budget: base.Budget, discount: float = 1.0) -> Solution:
    """An exhaustive search of each level; any budget allows the one action that there is.

    Args:
      states: levels [N].
      budget: changes nothing.
      discount: changes nothing, since there is one action.
    """
    del budget, discount
    levels = _levels(states)
    found = _find_all(levels)
    solved = np.array([found[level] is not None for level in levels], bool)
    return Solution(
      success=np.where(states.done, states.success, solved).astype(np.float32),
      expressions=[self._padded(found[level] or _chain(level[0], PLUS)) for level in levels],
      points=np.where(solved, 1.0, self.numbers_reward).astype(np.float32),
    )

  def rationale(self, states: State) -> list[str]:
    """The steps of a solution, such as 'I need 9: 1 + 2 = 3, 3 * 3 = 9.'"""
    levels = _levels(states)
    found = _find_all(levels)
    return [_thought(level[1], found[level]) for level in levels]


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
  """The best play on N levels.

  Attributes:
    success: f32[N], 1 where there is an expression for the target, as there is on every level of `reset`.
    expressions: N actions: that expression, or else the numbers' sum.
    points: f32[N], what it earns.
  """

  success: np.ndarray
  expressions: list[Tokens]
  points: np.ndarray

  def plan(self, states: State, turns_left: np.ndarray, actions_left: np.ndarray) -> list[list[Tokens]]:
    """The expression, or nothing where the episode is over."""
    over = _over(states, turns_left, actions_left)
    return [[] if stop else [action] for action, stop in zip(self.expressions, over.tolist(), strict=True)]

  def value(self, states: State, turns_left: np.ndarray, actions_left: np.ndarray) -> np.ndarray:
    """f32[N], what the expression earns, or nothing where the episode is over."""
    return np.where(_over(states, turns_left, actions_left), 0.0, self.points).astype(np.float32)


def find_expression(given: tuple[int, ...], target: int) -> Tokens | None:
  """An expression, without padding, that uses each number exactly once and is equal to the target; None if none is.

  Expressions whose values are positive integers all the way are tried first, then those with any fractions.
  """
  for whole in (True, False):
    tokens = _search(given, target, whole)
    if tokens is not None:
      return tokens
  return None


def _search(given: tuple[int, ...], target: int, whole: bool) -> Tokens | None:
  """Dynamic programming over sets of numbers (bits of an integer): the values of a set from those of its two parts."""
  full = 2 ** len(given) - 1
  values: list[dict[int | Fraction, Tokens]] = [{} for _ in range(full + 1)]
  for i, v in enumerate(given):
    values[1 << i][v if whole else Fraction(v)] = (v + 1,)
  for members in range(1, full + 1):
    known = values[members]
    part = (members - 1) & members
    while part > members ^ part:  # Each split once; the larger integer leads.
      for (a, left), (b, right) in itertools.product(values[part].items(), values[members ^ part].items()):
        for value, sign, swapped in _results(a, b, whole):
          if members == full:
            if value == target:
              return (*right, *left, sign) if swapped else (*left, *right, sign)
          elif value not in known:
            known[value] = (*right, *left, sign) if swapped else (*left, *right, sign)
      part = (part - 1) & members
  return None


def _results(a: int | Fraction, b: int | Fraction, whole: bool) -> Iterator[tuple[int | Fraction, int, bool]]:
  """What two values can become: the value, the operator, and whether b stands to the left of a."""
  yield a + b, PLUS, False
  yield a * b, TIMES, False
  if whole:
    swapped = b > a
    high, low = (b, a) if swapped else (a, b)
    if high > low:
      yield high - low, MINUS, swapped
    if high % low == 0:
      yield high // low, OVER, swapped
    return
  yield a - b, MINUS, False
  yield b - a, MINUS, True
  if b:
    yield a / b, OVER, False
  if a:
    yield b / a, OVER, True


def _levels(states: State) -> list[Level]:
  given, target = np.asarray(states.numbers).tolist(), np.asarray(states.target).tolist()
  return [(tuple(v for v in row if v), goal) for row, goal in zip(given, target, strict=True)]


def _find_all(levels: list[Level]) -> dict[Level, Tokens | None]:
  """An expression for each level; the members of a group share one search."""
  return {level: find_expression(*level) for level in dict.fromkeys(levels)}


def _chain(given: Sequence[int], *signs: int) -> Tokens:
  """The numbers from left to right with these operators between them; a single one serves everywhere."""
  first, *others = (v + 1 for v in given)
  return (first, *itertools.chain(*zip(others, itertools.cycle(signs), strict=False)))


def _thought(target: int, tokens: Tokens | None) -> str:
  if tokens is None:
    return f'I need {target}, and there is no way to make it.'
  steps = [f'{left} {_OPERATORS[~token]} {right} = {result}' for left, token, right, result in _steps(tokens)]
  return f'I need {target}: {", ".join(steps)}.'


def _over(states: State, turns_left: np.ndarray, actions_left: np.ndarray) -> np.ndarray:
  return np.asarray(states.done) | (np.asarray(turns_left) < 1) | (np.asarray(actions_left) < 1)


# -- expressions -------------------------------------------------------------------------------------------------------


class _NoExpressionError(ValueError):
  """The symbols do not follow the grammar."""


class _Parser:
  """Recursive descent: a sum of terms, a term of factors, a factor a number or a sum in parentheses."""

  def __init__(self, symbols: list[str]):
    self._symbols = [*symbols, '']
    self._at = 0
    self._depth = 0
    self._tokens: list[int] = []

  def expression(self) -> list[int]:
    """All symbols in reverse Polish notation.

    Raises:
      _NoExpressionError: they are no expression, or parentheses go too deep.
    """
    self._sum()
    if self._symbols[self._at]:
      raise _NoExpressionError
    return self._tokens

  def _next(self, *wanted: str) -> str:
    """The next symbol, taken if it is a wanted one, else ''."""
    symbol = self._symbols[self._at]
    if symbol not in wanted:
      return ''
    self._at += 1
    return symbol

  def _sum(self) -> None:
    self._term()
    while sign := self._next('+', '-'):
      self._term()
      self._tokens.append(~_OPERATORS.index(sign))

  def _term(self) -> None:
    self._factor()
    while sign := self._next('*', '/'):
      self._factor()
      self._tokens.append(~_OPERATORS.index(sign))

  def _factor(self) -> None:
    if self._next('('):
      self._depth += 1
      if self._depth > _DEPTH:
        raise _NoExpressionError
      self._sum()
      if not self._next(')'):
        raise _NoExpressionError
      self._depth -= 1
      return
    symbol = self._symbols[self._at]
    if not symbol.isdigit():
      raise _NoExpressionError
    self._at += 1
    self._tokens.append(1 + int(symbol))


def _symbols(text: str) -> list[str] | None:
  """Numbers, operators and parentheses, or None where there is anything else."""
  found, at = [], 0
  while at < len(text):
    match = _SYMBOL.match(text, at)
    if match is None:
      return None
    found.append(match[1])
    at = match.end()
  return found


def _uses_each_number(state: State) -> bool:
  used = sorted(token - 1 for token in np.asarray(state.answer).tolist() if token > 0)
  return used == sorted(v for v in np.asarray(state.numbers).tolist() if v)


def _unpadded(action: np.ndarray | Tokens) -> list[int]:
  return [token for token in np.asarray(action).tolist() if token]


def _infix(tokens: list[int]) -> str:
  """The expression with blanks around operators, and parentheses only where they are needed.

  Raises:
    ValueError: the tokens are no expression.
  """
  stack: list[tuple[str, int]] = []  # Texts, and how strongly their last operator binds.
  for token in tokens:
    if token > 0:
      stack.append((str(token - 1), 3))
      continue
    if token not in _PRECEDENCE or len(stack) < 2:
      raise ValueError(f'countdown: the tokens {tokens} are no expression in reverse Polish notation')
    here = _PRECEDENCE[token]
    (right, right_binds), (left, left_binds) = stack.pop(), stack.pop()
    left = f'({left})' if left_binds < here else left
    right = f'({right})' if right_binds <= here else right
    stack.append((f'{left} {_OPERATORS[~token]} {right}', here))
  if len(stack) != 1:
    raise ValueError(f'countdown: the tokens {tokens} are no expression in reverse Polish notation')
  return stack[0][0]


def _steps(tokens: list[int] | Tokens) -> list[tuple[Fraction, int, Fraction, Fraction]] | None:
  """Left value, operator, right value and result of each operator in turn; None where one divides by zero."""
  stack: list[Fraction] = []
  steps = []
  for token in tokens:
    if token > 0:
      stack.append(Fraction(token - 1))
      continue
    right, left = stack.pop(), stack.pop()
    if token == OVER and right == 0:
      return None
    stack.append(_FUNCTIONS[token](left, right))
    steps.append((left, token, right, stack[-1]))
  return steps


def _value(tokens: list[int]) -> Fraction | None:
  """What an expression is equal to, None where it divides by zero."""
  if len(tokens) == 1:
    return Fraction(tokens[0] - 1)
  steps = _steps(tokens)
  return None if steps is None else steps[-1][-1]


def _evaluate(action: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Traced exact value of a row of tokens.

  Args:
    action: i32[T].

  Returns:
    Numerator and denominator, i32[], in any common multiple; the denominator is 0 where something is divided by zero.
    And bool[], whether the tokens are an expression. Overflow wraps around, see `Countdown`.
  """
  places = (action.shape[0] + 1) // 2

  def take(carry, token):
    numerators, denominators, depth, well_formed = carry  # i32[places] twice
    is_number, is_operator = token > 0, token < 0
    first, second = jnp.maximum(depth - 2, 0), jnp.maximum(depth - 1, 0)
    a, b = numerators[first], denominators[first]
    c, d = numerators[second], denominators[second]
    # a/b joined with c/d. A quotient by a value that does not exist does not exist either.
    sign = jnp.clip(~token, 0, 3)
    numerator = jnp.stack([a * d + c * b, a * d - c * b, a * c, a * d])[sign]
    denominator = jnp.stack([b * d, b * d, b * d, jnp.where(d == 0, 0, b * c)])[sign]
    place = jnp.where(is_number, depth, first)
    changes = is_number | is_operator
    numerator = jnp.where(is_number, token - 1, numerator)
    denominator = jnp.where(is_number, 1, denominator)
    numerators = jnp.where(changes, numerators.at[place].set(numerator), numerators)
    denominators = jnp.where(changes, denominators.at[place].set(denominator), denominators)
    well_formed &= ~is_operator | ((depth >= 2) & (token >= OVER))
    return (numerators, denominators, depth + is_number - is_operator, well_formed), None

  empty = jnp.zeros((places,), jnp.int32)
  carry = empty, empty, jnp.int32(0), jnp.bool_(True)
  (numerators, denominators, depth, well_formed), _ = jax.lax.scan(take, carry, action.astype(jnp.int32))
  return numerators[0], denominators[0], well_formed & (depth == 1)


def _choice(draw: jax.Array, count: jax.Array) -> jax.Array:
  """i32[], one of 0 .. count - 1 from a number in [0, 1)."""
  return jnp.floor(draw * count).astype(jnp.int32)


def _largest_number(count: int) -> int:
  """The largest M of at most 999 that keeps 2**(count - 1) * M**count below 2**31, so that no fraction overflows."""
  return max(m for m in range(1, 1000) if 2 ** (count - 1) * m**count < 2**31)


def _check_integer(field: str, value: object, low: int, high: int) -> None:
  if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not low <= value <= high:
    raise ValueError(f'countdown: {field}={value!r}; allowed: integers from {low} to {high}')
