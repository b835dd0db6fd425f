"""The verifier 'math': numbers exactly, other expressions by the package math-verify in worker processes."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from ragen_jax.envs.dataset.item import Item
from ragen_jax.envs.dataset.numbers_in_text import Number as ReadNumber
from ragen_jax.envs.dataset.numbers_in_text import boxed, is_changed_by, is_equal, number_of, read_number
from ragen_jax.envs.dataset.text_verifiers import UNREADABLE, squeezed
from ragen_jax.envs.dataset.verifiers import INSTALL, RIGHT, WRONG, Verdict, Verifier, VerifierSettings, read_options
from ragen_jax.utils import math_checker
from ragen_jax.utils.errors import one_line, short
from ragen_jax.utils.threads import Fault

_MEMORY_MIB = 2048  # of one process; sympy needs about 150
# An answer that takes the package too long, such as 9^{9^9}. No fault, which a policy would choose to escape a verdict.
_SLOW = Verdict(0.0, {'unreadable': 1.0}, 'timeout')
_LONGEST = 2000  # characters of an answer that is parsed


# A sign of equality, and other relations.
_EQUAL = re.compile(r'(?<![<>!:])=')
_RELATION = re.compile(
  r'[≠≈≡⇒→]|!=|\\(?:ne|neq|approx|equiv|sim|simeq|to|implies|(?:[Ll]ong)?[Rr]ightarrow)(?![A-Za-z])'
)
_LETTERS = re.compile('[A-Z]{3,}')
# A numeral with its base, of which math-verify reads the digits alone.
_IN_BASE = re.compile(r'[+-]?[0-9A-Z]+_(?:\{([0-9]+)\}|([0-9]+))', re.ASCII)
# What belongs to the expression in a box of a worked solution.
_BEFORE_BOX = re.compile(r'[-+*/\d][\s$({]*\\f?box')
# What an answer may be equal to: an unknown or a function, as in 'x=', 'a_1=' and 'f(x)='.
_UNKNOWN = re.compile(
  r"\s*(?!(?:\\pi|\\infty|pi|e|i)\b)\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?'*\s*(?:\(\s*[A-Za-z, ]+\))?\s*"
)


def _is_chain(answer: str, gold: str) -> bool:
  """Whether an answer equates expressions that the gold does not equate; math-verify would take the last of them."""
  if _RELATION.search(answer) and not _RELATION.search(gold):
    return True
  sides, equal = _EQUAL.split(answer), len(_EQUAL.findall(gold))
  return len(sides) - 1 > max(equal, 1) or (len(sides) == 2 and not equal and not _UNKNOWN.fullmatch(sides[0]))


def _base_of(expression: str) -> str:
  """The base that a numeral such as '1011_2' names; '' for an expression that is none."""
  found = _IN_BASE.fullmatch(''.join(expression.split()))
  return found[1] or found[2] if found else ''


def _expression_of(text: str, *, is_gold: bool = False) -> str | None:
  """The one expression of a text, in a box or between dollars, or the whole text; None if there is not just one.

  Around the expression of an answer stands nothing that denies it or computes with it.
  """
  if len(text) > 4 * _LONGEST:
    return None
  boxes = boxed(text)
  if len(boxes) > 1:
    return None
  found = math_checker.expression_of(boxes[0] if boxes else text)
  if found is None or len(found[0]) > _LONGEST:
    return None
  expression, around = found
  if boxes:
    around = ' '.join([around, *text.split(boxes[0], 1)])
  changed = _BEFORE_BOX.search(text) if is_gold else is_changed_by(around)
  return None if changed else expression


class Processes(Protocol):
  """What this verifier uses of `utils.workers.Workers`."""

  def map(self, method: str, arguments: Sequence[tuple], *, timeout_s: float) -> list[tuple[Any, Fault | None]]:
    """The results of a method, in order."""

  def close(self) -> None:
    """Ends the processes."""


class Math(Verifier):
  """Decides in three steps.

  1. A gold that is one number is compared exactly, as the verifier 'number' does. math-verify would take the last of
     several numbers, and would accept '3 + 15' for 18, which a policy learns to copy from the question.
  2. Equal texts, without letter case and white space, are right.
  3. Other expressions are equal if math-verify says so. An answer with several expressions between dollars is refused,
     and so is one that equates expressions, such as 'a=b', or has words or signs around its box that change it. A
     numeral in another base than the gold's is wrong; one that names no base is taken for one in the gold's.

  The limits of time and memory hold for each answer of step 3. An answer beyond them is not right if another answer
  to the same gold is compared within them; otherwise it is a fault.
  """

  answer_help = 'Your answer is a number or an expression, in LaTeX where it needs it, and nothing else.'
  has_reference: ClassVar[bool] = True
  needs_extra: ClassVar[bool] = False

  def __init__(self, settings: VerifierSettings, processes: Processes | None = None):
    """Starts nothing.

    Args:
      processes: in place of `Workers` with `math_checker.MathChecker`.
    """
    read_options(settings, {})
    self._given, self._timeout_s, self._count = processes, settings.timeout_s, settings.workers

  @functools.cached_property
  def _processes(self) -> Processes:
    if self._given is not None:
      return self._given
    from ragen_jax.utils.workers import Workers

    factory = f'{math_checker.__name__}:{math_checker.make_checker.__name__}'
    return Workers(factory, (), count=self._count, memory_mib=_MEMORY_MIB, name=math_checker.PACKAGE)

  def check(self) -> None:
    """Raises ValueError if math-verify is missing."""
    if self._given is None and not math_checker.is_installed():
      raise ValueError(f"dataset: verifier='math' needs the package math-verify, which is missing: {INSTALL}")

  def read_gold(self, raw: Any, row: Mapping[str, Any]) -> tuple[ReadNumber | None, str]:
    """The number, if the gold is one, and the text without a box and dollars."""
    del row
    value = raw[0] if isinstance(raw, list) and len(raw) == 1 else raw
    number = number_of(value)
    if number is not None:
      return number, str(value).strip()
    expression = _expression_of(value, is_gold=True) if isinstance(value, str) else None
    if expression is None or read_number(expression) is not None:  # a number whose text around it changes it
      raise ValueError(f'allowed: one number, or text with one expression of at most {_LONGEST} characters')
    return None, expression

  def check_golds(self, golds: Sequence[Any]) -> dict[int, str]:
    """Those in which math-verify finds no expression."""
    wanted = [i for i, (number, _) in enumerate(golds) if number is None]
    if not wanted:
      return {}
    results = self._processes.map('can_read', [(golds[i][1],) for i in wanted], timeout_s=self._timeout_s)
    reasons = {}
    for i, (is_read, fault) in zip(wanted, results, strict=True):
      if fault is not None or not is_read:
        reasons[i] = str(fault) if fault is not None else 'allowed: one number, or one expression of LaTeX'
    return reasons

  def score(self, answers: Sequence[str], items: Sequence[Item]) -> list[Verdict | Fault]:
    found: list[Verdict | Fault | None] = [None] * len(answers)
    asked: dict[int, tuple[str, str]] = {}
    for i, (answer, item) in enumerate(zip(answers, items, strict=True)):
      found[i] = self._without_process(answer, item)
      if found[i] is None:
        expression = _expression_of(answer)
        if expression is None or _is_chain(expression, item.gold[1]):
          found[i] = UNREADABLE
        elif _LETTERS.fullmatch(item.gold[1]) and _LETTERS.fullmatch(''.join(expression.split())):
          # Of letters, such as an order of runners, math-verify would compare the product.
          found[i] = RIGHT if squeezed(expression) == squeezed(item.gold[1]) else WRONG
        elif _base_of(item.gold[1]) and _base_of(expression) not in ('', _base_of(item.gold[1])):
          found[i] = WRONG
        else:
          asked[i] = item.gold[1], expression
    if asked:
      try:
        results = self._processes.map('is_equal', list(asked.values()), timeout_s=self._timeout_s)
      except Exception as e:  # noqa: BLE001, the processes cannot be started
        results = [(None, Fault(f'verifier raised {type(e).__name__}', one_line(e, str)))] * len(asked)
      for i, (equal, fault) in zip(asked, results, strict=True):
        found[i] = fault or self._verdict(equal, asked[i][0])
      late = [i for i in asked if isinstance(found[i], Fault) and found[i].kind.startswith('is_equal ')]
      if late:  # the answer's doing, or the machine's?
        golds = self._processes.map('is_equal', [(asked[i][0], '1') for i in late], timeout_s=self._timeout_s)
        for i, (equal, fault) in zip(late, golds, strict=True):
          found[i] = _SLOW if equal is not None and fault is None else found[i]
    return found

  def _without_process(self, answer: str, item: Item) -> Verdict | None:
    """The verdict of the first two steps; None if they do not decide."""
    number, text = item.gold
    if number is not None:
      given = read_number(answer)
      if given is None:
        return UNREADABLE
      return RIGHT if is_equal(given, number) else WRONG
    return RIGHT if squeezed(answer) == squeezed(text) else None

  def _verdict(self, equal: Any, gold: str) -> Verdict | Fault:
    if equal is None:
      return Fault('verifier cannot read the gold', short(gold))
    return RIGHT if equal is True else WRONG

  def reference(self, item: Item) -> str:
    """The gold as it is written."""
    return item.gold[1]

  def close(self) -> None:
    """Ends the processes."""
    if '_processes' in vars(self):
      self._processes.close()
