"""References for Countdown: Python's own grammar and fractions, brute force, and states to test with."""

from __future__ import annotations

import ast
import functools
import itertools
import operator
from fractions import Fraction

import jax
import numpy as np
from hypothesis import strategies as st

from ragen_jax.envs.base import Budget
from ragen_jax.envs.countdown import Countdown
from tests.support import environments

# States of one call: every call of a test has this many, so that a program is compiled once.
BLOCK = 256
BUDGET = Budget(1, 1, 1)
OPERATIONS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
}
ENV = Countdown()
WIDE = Countdown(min_numbers=2, max_numbers=5, largest_number=42, level_operators='+-*')


def play(env, states, actions, seed=0):
  """One action in each of `states` [BLOCK]; `actions` may be one for all."""
  actions = np.broadcast_to(np.asarray(actions, np.int32), (BLOCK, *env.action_shape))
  return environments.step(env, states, actions, seed)


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
