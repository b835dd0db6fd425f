"""Arithmetic expressions as actions of Countdown: parsing, writing, and exact values on the host and traced.

An expression is a row of i32 tokens in reverse Polish notation: 0 is padding at the end, 1 + v is the number v, and
-1, -2, -3, -4 are + - * /. For instance (1 + 2) * 3 is 2, 3, -1, 4, -3, 0, ...
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

Tokens = tuple[int, ...]

OPERATORS = '+-*/'
PLUS, MINUS, TIMES, OVER = -1, -2, -3, -4
_FUNCTIONS = {PLUS: operator.add, MINUS: operator.sub, TIMES: operator.mul, OVER: operator.truediv}
_PRECEDENCE = {PLUS: 1, MINUS: 1, TIMES: 2, OVER: 2}

# Limits of the parser: characters of a text, nested parentheses, and the largest number.
_LONGEST_TEXT = 200
_DEEPEST = 16
LARGEST_LITERAL = 999_999
_SYMBOL = re.compile(r'\s*(0|[1-9][0-9]{0,5}|[-+*/()])')
# Other ways to write the operators.
_ALIASES = str.maketrans({'×': '*', '·': '*', '÷': '/', '−': '-'})


def parse_expression(text: str) -> list[int] | None:
  """The tokens of an expression, without padding, or None if the text is not an expression or too long.

  An expression has unsigned integers of at most 6 digits, + - * / (also written × · ÷ −) and parentheses. The four
  operators have their usual precedence and associate to the left; there is no minus sign in front of a number.
  """
  if len(text) > _LONGEST_TEXT:
    return None
  symbols = _symbols(text.translate(_ALIASES).strip())
  if symbols is None:
    return None
  try:
    return _Parser(symbols).expression()
  except _SyntaxError:
    return None


class _SyntaxError(ValueError):
  """The symbols do not follow the grammar of expressions."""


class _Parser:
  """Recursive descent. A sum has terms, a term has factors, and a factor is a number or a sum in parentheses."""

  def __init__(self, symbols: list[str]):
    self._symbols = [*symbols, '']
    self._at = 0
    self._depth = 0
    self._tokens: list[int] = []

  def expression(self) -> list[int]:
    """The tokens of all symbols; _SyntaxError if they are no expression, or parentheses are nested too deeply."""
    self._sum()
    if self._symbols[self._at]:
      raise _SyntaxError
    return self._tokens

  def _next(self, *wanted: str) -> str:
    """Consumes and returns the next symbol if it is a wanted one; else returns ''."""
    symbol = self._symbols[self._at]
    if symbol not in wanted:
      return ''
    self._at += 1
    return symbol

  def _sum(self) -> None:
    self._term()
    while sign := self._next('+', '-'):
      self._term()
      self._tokens.append(~OPERATORS.index(sign))

  def _term(self) -> None:
    self._factor()
    while sign := self._next('*', '/'):
      self._factor()
      self._tokens.append(~OPERATORS.index(sign))

  def _factor(self) -> None:
    if self._next('('):
      self._depth += 1
      if self._depth > _DEEPEST:
        raise _SyntaxError
      self._sum()
      if not self._next(')'):
        raise _SyntaxError
      self._depth -= 1
      return
    symbol = self._symbols[self._at]
    if not symbol.isdigit():
      raise _SyntaxError
    self._at += 1
    self._tokens.append(1 + int(symbol))


def _symbols(text: str) -> list[str] | None:
  """The numbers, operators and parentheses of a text, or None if it has anything else."""
  found, at = [], 0
  while at < len(text):
    match = _SYMBOL.match(text, at)
    if match is None:
      return None
    found.append(match[1])
    at = match.end()
  return found


def unpadded(action: np.ndarray | Tokens) -> list[int]:
  """The tokens of an action without its padding."""
  return [token for token in np.asarray(action).tolist() if token]


def infix(tokens: list[int]) -> str:
  """The text of an expression, with blanks around operators and no needless parentheses.

  Raises ValueError if the tokens are not an expression.
  """
  stack: list[tuple[str, int]] = []  # texts, and the precedence of their last operators
  for token in tokens:
    if token > 0:
      stack.append((str(token - 1), 3))
      continue
    if token not in _PRECEDENCE or len(stack) < 2:
      raise ValueError(f'countdown: the tokens {tokens} are not an expression in reverse Polish notation')
    here = _PRECEDENCE[token]
    (right, right_binds), (left, left_binds) = stack.pop(), stack.pop()
    left = f'({left})' if left_binds < here else left
    right = f'({right})' if right_binds <= here else right
    stack.append((f'{left} {OPERATORS[~token]} {right}', here))
  if len(stack) != 1:
    raise ValueError(f'countdown: the tokens {tokens} are not an expression in reverse Polish notation')
  return stack[0][0]


def steps_of(tokens: list[int] | Tokens) -> list[tuple[Fraction, int, Fraction, Fraction]] | None:
  """Left value, operator, right value and result of each operation in order; None if one divides by zero."""
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


def value_of(tokens: list[int]) -> Fraction | None:
  """The value of an expression, or None if it divides by zero."""
  if len(tokens) == 1:
    return Fraction(tokens[0] - 1)
  steps = steps_of(tokens)
  return None if steps is None else steps[-1][-1]


def evaluate(action: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The exact value of a row of tokens i32[T], traced. Overflow wraps around, see `Countdown`.

  Returns:
    Numerator and denominator, i32[], not reduced; the denominator is 0 if the expression divides by zero. And bool[],
    whether the tokens are an expression.
  """
  places = (action.shape[0] + 1) // 2

  def take(carry, token):
    numerators, denominators, depth, well_formed = carry  # i32[places] twice
    is_number, is_operator = token > 0, token < 0
    first, second = jnp.maximum(depth - 2, 0), jnp.maximum(depth - 1, 0)
    a, b = numerators[first], denominators[first]
    c, d = numerators[second], denominators[second]
    # a/b joined with c/d. A value with denominator 0 stays undefined in all further operations.
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


def chain(given: Sequence[int], *signs: int) -> Tokens:
  """The tokens of the numbers joined from left to right by the operators, which are repeated as needed."""
  first, *others = (v + 1 for v in given)
  return (first, *itertools.chain(*zip(others, itertools.cycle(signs), strict=False)))
