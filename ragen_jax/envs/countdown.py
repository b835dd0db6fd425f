"""Countdown: one arithmetic expression that uses every given number exactly once and equals the target.

An action is an expression, written as a row of tokens; see countdown_expressions.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base
from ragen_jax.envs.countdown_expressions import (
  LARGEST_LITERAL,
  MINUS,
  OPERATORS,
  OVER,
  PLUS,
  TIMES,
  Tokens,
  chain,
  evaluate,
  infix,
  parse_expression,
  steps_of,
  unpadded,
  value_of,
)
from ragen_jax.envs.drawing.font import small_digits
from ragen_jax.envs.options import check_choice, check_integer, is_number
from ragen_jax.envs.solvers.countdown import Level, find_expressions
from ragen_jax.envs.solvers.one_action import OneActionSolution

_LEVEL_OPERATORS = ('+-', '+-*', '+-*/')

# The picture: digits of 3 x 5 dots, with 4 pixels a dot, in cells of 4 x 7 dots.
_DOT = 4
_CELL = (7, 4)
_PAPER_RGB = (30, 34, 46)
_NUMBER_RGB = (230, 230, 230)
_OPEN_RGB, _WRONG_RGB, _NEAR_RGB, _RIGHT_RGB = (120, 170, 240), (210, 80, 70), (240, 190, 70), (90, 190, 110)


@struct.dataclass
class State(base.State):
  """A level and the answer to it, of T = 4 * max_numbers - 1 tokens.

  Attributes:
    numbers: i32[max_numbers], the given numbers, padded with 0.
    target: i32[].
    answer: i32[T], the expression that was played; zeros before.
    points: f32[], the reward of the answer; 0 before.
  """

  numbers: jax.Array
  target: jax.Array
  answer: jax.Array
  points: jax.Array


@dataclasses.dataclass(frozen=True)
class Countdown(base.Environment):
  """Make the target from the given numbers with one expression, which ends the game.

  The reward is 1 if the expression uses every number exactly once and equals the target (success), `numbers_reward` if
  it uses every number exactly once and has another value or none (division by zero), else 0.

  Arithmetic is exact. A fraction of n numbers of at most M has a numerator and a denominator of at most
  2**(n - 1) * M**n: a sum at most doubles the product of its parts' numerators and denominators, products and
  quotients do not. The options keep this within an i32, so no expression with the right numbers overflows; the values
  of other expressions are not used.

  Actions are rows of tokens, see countdown_expressions.py. An expression may have up to 2 * max_numbers numbers, so
  that one with too many numbers is a wrong answer rather than no action.

  Attributes:
    min_numbers: minimum count of given numbers, at least 2.
    max_numbers: maximum count of given numbers, at most 5.
    largest_number: largest given number; at most 999, 812, 127 or 42 for max_numbers 2, 3, 4 or 5.
    largest_target: largest target.
    level_operators: operators from which levels are generated: '+-', '+-*' or '+-*/'. Answers may use all four.
    numbers_reward: reward of the right numbers with a wrong value, from 0 to below 1.
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
    check_integer('countdown', 'max_numbers', self.max_numbers, 2, 5)
    check_integer('countdown', 'min_numbers', self.min_numbers, 2, self.max_numbers)
    check_integer('countdown', 'largest_number', self.largest_number, 2, _largest_number(self.max_numbers))
    check_integer('countdown', 'largest_target', self.largest_target, 1, LARGEST_LITERAL)
    check_choice('countdown', 'level_operators', self.level_operators, _LEVEL_OPERATORS)
    reward = self.numbers_reward
    if not is_number(reward) or not 0 <= reward < 1:
      raise ValueError(f'countdown: numbers_reward={reward!r}; allowed: numbers from 0 to below 1')

  def reset(self, key: jax.Array) -> State:
    """A level from a key: random numbers, joined in random order by random operators until one value is left.

    All intermediate values are positive integers. The last value is the target; levels are drawn again until it is at
    most `largest_target`.
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
    """i32[], the last value after random pairs of the first `count` numbers have been joined one after another."""
    in_use = np.array([sign in self.level_operators for sign in OPERATORS])

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
    numerator, denominator, well_formed = evaluate(action)
    divisor = jnp.where(denominator == 0, 1, denominator)
    # Division, since a product of the target and the denominator could overflow.
    on_target = (denominator != 0) & (numerator % divisor == 0) & (numerator // divisor == state.target)
    right_numbers &= well_formed
    success = right_numbers & on_target
    points = jnp.where(success, 1.0, jnp.where(right_numbers, self.numbers_reward, 0.0)).astype(jnp.float32)
    state = state.replace(done=jnp.bool_(True), success=success, answer=action.astype(jnp.int32), points=points)
    return state, base.StepOutput(reward=points, effective=jnp.bool_(True))

  @property
  def action_shape(self) -> tuple[int]:
    """(T,): the tokens of 2 * max_numbers numbers and the operators between them."""
    return (4 * self.max_numbers - 1,)

  def rules(self) -> str:
    near = f', another value made of the right numbers {self.numbers_reward:g}' if self.numbers_reward else ''
    return (
      'You see some numbers and a target. Write an expression that uses every number exactly once and is equal to the '
      'target. It may have + - * / and parentheses; a division may leave a fraction. '
      f'The target earns 1 point{near}, anything else 0. You have one try.'
    )

  def parse_action(self, text: str) -> Tokens | None:
    """The tokens of an expression, i32 of `action_shape`; None if the text is not one, see `parse_expression`."""
    tokens = parse_expression(text)
    return None if tokens is None or len(tokens) > self.action_shape[0] else self._padded(tokens)

  def example_actions(self, observation: str) -> tuple[str, ...]:
    """Expressions of other numbers than the level's are wrong answers, so copying them is not paid."""
    del observation
    return '(1 + 2) * 3', '8 / 4 - 1', '5 * 3 + 2', '9 - (2 + 4)'

  def format_action(self, action: np.ndarray | Tokens) -> str:
    """Without needless parentheses; ValueError if the tokens are not an expression."""
    return infix(unpadded(action))

  def render(self, states: State) -> list[str]:
    """The numbers and the target; after the answer also its value and points. For states [N]."""
    leaves = (states.numbers, states.target, states.answer, states.points)
    return [self._text(*row) for row in zip(*(np.asarray(leaf).tolist() for leaf in leaves), strict=True)]

  def identities(self, states: State) -> list[bytes]:
    """The text, since the arrays of equal levels have other lengths in a tag with another `max_numbers`."""
    return [text.encode() for text in self.render(states)]

  def _text(self, given: list[int], target: int, answer: list[int], points: float) -> str:
    text = f'Numbers: {", ".join(str(v) for v in given if v)}\nTarget: {target}'
    tokens = unpadded(answer)
    if not tokens:
      return text
    value = value_of(tokens)
    return f'{text}\nAnswer: {infix(tokens)} = {"undefined" if value is None else value}\nPoints: {points:.6g}'

  def from_text(self, text: str) -> State:
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
    """The numbers above the target, in digits, u8[height, width, 3]; the size depends on the options alone.

    The target is blue before the answer; then green for success, yellow if only the numbers were right, else red.
    """
    widest = [str(self.largest_number)] * self.max_numbers, [str(self.largest_target)]
    columns = max(len(' '.join(words)) for words in widest)
    dots = np.zeros((2 * _CELL[0] + 1, columns * _CELL[1] + 1, 3), np.uint8)
    dots[:] = _PAPER_RGB
    colour, digits = _OPEN_RGB, small_digits()
    if state.done:
      colour = _RIGHT_RGB if state.success else _NEAR_RGB if _uses_each_number(state) else _WRONG_RGB
    given = ' '.join(str(v) for v in np.asarray(state.numbers).tolist() if v)
    for i, (line, rgb) in enumerate(((given, _NUMBER_RGB), (str(int(state.target)), colour))):
      for j, digit in enumerate(line):
        if digit != ' ':
          row, column = i * _CELL[0] + 2, j * _CELL[1] + 1
          dots[row : row + 5, column : column + 3][digits[int(digit)]] = rgb
    return dots.repeat(_DOT, axis=0).repeat(_DOT, axis=1)

  def legal_actions(self, states: State) -> list[list[Tokens]]:
    """The given numbers in order, joined from left to right by every choice of operators."""
    return [
      [
        self._padded(chain(given, *signs))
        for signs in itertools.product((PLUS, MINUS, TIMES, OVER), repeat=len(given) - 1)
      ]
      for given, _ in _levels(states)
    ]

  def _padded(self, tokens: Sequence[int]) -> Tokens:
    (length,) = self.action_shape
    return (*tokens, *[0] * (length - len(tokens)))

  def solve(self, states: State, budget: base.Budget, discount: float = 1.0) -> OneActionSolution:
    """Exhaustive search; the best action is an expression for the target, or the numbers' sum if there is none."""
    del budget, discount
    levels = _levels(states)
    found = find_expressions(levels)
    solved = np.array([found[level] is not None for level in levels], bool)
    return OneActionSolution(
      success=np.where(states.done, states.success, solved).astype(np.float32),
      actions=[self._padded(found[level] or chain(level[0], PLUS)) for level in levels],
    )

  def rationale(self, states: State) -> list[str]:
    """The operations of a solution, such as 'I need 9: 1 + 2 = 3, 3 * 3 = 9.'"""
    levels = _levels(states)
    found = find_expressions(levels)
    return [_thought(level[1], found[level]) for level in levels]


def _levels(states: State) -> list[Level]:
  given, target = np.asarray(states.numbers).tolist(), np.asarray(states.target).tolist()
  return [(tuple(v for v in row if v), goal) for row, goal in zip(given, target, strict=True)]


def _thought(target: int, tokens: Tokens | None) -> str:
  if tokens is None:
    return f'I need {target}, and there is no way to make it.'
  steps = [f'{left} {OPERATORS[~token]} {right} = {result}' for left, token, right, result in steps_of(tokens)]
  return f'I need {target}: {", ".join(steps)}.'


def _uses_each_number(state: State) -> bool:
  used = sorted(token - 1 for token in np.asarray(state.answer).tolist() if token > 0)
  return used == sorted(v for v in np.asarray(state.numbers).tolist() if v)


def _choice(draw: jax.Array, count: jax.Array) -> jax.Array:
  """i32[], one of 0 .. count - 1 from a number in [0, 1)."""
  return jnp.floor(draw * count).astype(jnp.int32)


def _largest_number(count: int) -> int:
  """The largest M of at most 999 that keeps 2**(count - 1) * M**count below 2**31, so that no fraction overflows."""
  return max(m for m in range(1, 1000) if 2 ** (count - 1) * m**count < 2**31)
