"""Tests of programs: the forms in which data sets have them, and the comparison with what is expected.

The forms are those of DeepCoder-Preview (agentica-org; its parts primeintellect, taco, lcbv5, codeforces), of APPS and
LiveCodeBench, from which they come, of HumanEval (a function `check`), and of MBPP (a list of assertions).
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from ragen_jax.envs.dataset import inside
from ragen_jax.utils.errors import one_line, short

_NUMBER = re.compile(r'[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?', re.ASCII)
_FORMS = (
  'allowed: a list of {"input", "output"} or {"inputs": [], "outputs": []}, as JSON or values; Python code with '
  '`check`, which tests the function of the field entry_point; or a list of assertions'
)
# Names that programs for judging sites use without importing them, in annotations above all.
_USUAL_NAMES = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from typing import *
"""


@dataclasses.dataclass(frozen=True)
class InputOutput:
  """Texts for stdin, and what the program must print for each."""

  cases: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Calls:
  """Arguments of a function, and what it must return for each.

  Attributes:
    cases: (arguments, the values that are right).
    preamble: code that runs before the program.
  """

  function: str
  cases: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...]
  preamble: str = _USUAL_NAMES


@dataclasses.dataclass(frozen=True)
class Assertions:
  """Code that fails if a function of the program is wrong.

  Attributes:
    function: the function; '' if only the statements name it.
    preamble: code that runs before the program and before the statements, such as the imports of the question.
    setup: code that runs before the statements.
    statements: each is a test.
  """

  function: str
  preamble: str
  setup: str
  statements: tuple[str, ...]


ProgramTests = InputOutput | Calls | Assertions


# -- reading -----------------------------------------------------------------------------------------------------------


def read_tests(raw: Any, row: Mapping[str, Any], most: int) -> ProgramTests:
  """The tests of a row.

  Args:
    raw: the value of the answer's field.
    row: its other fields. `metadata.func_name`, `fn_name` and `entry_point` name the function; `prompt` begins programs
      of HumanEval, `test_setup_code` and `test_imports` those of MBPP.
    most: the number of tests to keep: those with the longest inputs, in their order; of assertions, the first.

  Raises:
    ValueError: the tests cannot be read.
  """
  if isinstance(raw, str):
    try:
      raw = json.loads(raw)
    except (ValueError, RecursionError):
      return _read_check(raw, row)
  if isinstance(raw, list | tuple) and raw and all(isinstance(x, str) for x in raw):
    setup = [row.get('test_setup_code') or '', *(row.get('test_imports') or ())]
    tests = _assertions('', '\n'.join(map(str, setup)), '', raw[:most])
    return dataclasses.replace(tests, function=_builtin_function(tests))
  if isinstance(raw, Mapping):
    raw = _zipped(raw)
  if not isinstance(raw, list | tuple) or not raw or not all(isinstance(x, Mapping) for x in raw):
    raise ValueError(f'tests={short(raw)}; {_FORMS}')
  if any('input' not in x or 'output' not in x for x in raw):
    raise ValueError(f'tests={short(raw)}: a test without "input" or "output"; {_FORMS}')
  function = _function_name(raw[0], row)
  kept = sorted(range(len(raw)), key=lambda i: -_length(raw[i]['input']))[:most]
  chosen = [raw[i] for i in sorted(kept)]
  if not function:
    return InputOutput(tuple((_text(x['input']), _text(x['output'])) for x in chosen))
  return Calls(function, tuple(_read_call(x) for x in chosen))


def _zipped(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Tests as a list of mappings, from {'inputs': [...], 'outputs': [...], 'fn_name': ...}."""
  inputs, outputs = raw.get('inputs'), raw.get('outputs')
  if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple) or len(inputs) != len(outputs):
    raise ValueError(f'tests={short(raw)}: "inputs" and "outputs" are not lists of one length; {_FORMS}')
  name = {'fn_name': raw['fn_name']} if raw.get('fn_name') else {}
  return [{'input': i, 'output': o, **name} for i, o in zip(inputs, outputs, strict=True)]


def _function_name(test: Mapping[str, Any], row: Mapping[str, Any]) -> str:
  """The function that a test calls; '' if the program reads stdin."""
  kind = test.get('testtype') or test.get('type')
  if kind in ('stdin', 'stdin_stdout'):
    return ''
  if kind not in (None, 'functional', 'function_call'):
    raise ValueError(f'testtype={one_line(kind)}; allowed: stdin, stdin_stdout, functional, function_call')
  for place in (test, test.get('metadata'), row.get('metadata'), row):
    if isinstance(place, str):
      try:
        place = json.loads(place)
      except ValueError:
        continue
    if isinstance(place, Mapping):
      name = place.get('fn_name') or place.get('func_name')
      if name:
        return _identifier(name)
  if kind is not None:
    raise ValueError(f'tests of testtype={one_line(kind)} without fn_name, and without func_name in metadata')
  return ''


def _identifier(name: Any) -> str:
  if not isinstance(name, str) or not name.isidentifier():
    raise ValueError(f'function={one_line(name)}; allowed: a name of Python')
  return name


def _length(value: Any) -> int:
  return len(value) if isinstance(value, str) else len(json.dumps(value, default=str))


def _text(value: Any) -> str:
  """Input or output as text; some data sets have a list of lines."""
  if isinstance(value, list | tuple):
    return '\n'.join(map(str, value))
  if not isinstance(value, str | int | float):
    raise ValueError(f'input or output {short(value)}; allowed: text or a list of lines')
  return str(value)


def _read_call(test: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
  """The arguments and the right values of a call.

  LiveCodeBench writes an argument a line, each in JSON, and the result in JSON. APPS, TACO and PrimeIntellect have a
  list of arguments, and the result either as it is or alone in a list.
  """
  arguments, expected = test['input'], test['output']
  try:
    if isinstance(arguments, str):
      return tuple(json.loads(x) for x in arguments.split('\n') if x.strip()), (json.loads(expected),)
    if not isinstance(arguments, list | tuple):
      raise ValueError('the input is not a list of arguments')
    json.dumps([arguments, expected])  # both must be values of JSON
  except (TypeError, ValueError, RecursionError) as e:
    raise ValueError(f'a test of a function is not JSON ({one_line(e, str)}): {short(dict(test))}') from e
  alone = isinstance(expected, list | tuple) and len(expected) == 1
  return tuple(arguments), (expected, expected[0]) if alone else (expected,)


def _read_check(code: str, row: Mapping[str, Any]) -> Assertions:
  function = row.get('entry_point')
  if not function:
    raise ValueError(f'tests={short(code)}, which is no JSON, and no field entry_point; {_FORMS}')
  function = _identifier(function)
  tests = _assertions(function, str(row.get('prompt') or ''), code, (f'check({function})',))
  if not any(isinstance(n, ast.FunctionDef) and n.name == 'check' for n in ast.parse(code).body):
    raise ValueError(f'tests={short(code)}, Python code without a function `check`; {_FORMS}')
  return tests


def _assertions(function: str, preamble: str, setup: str, statements: Sequence[str]) -> Assertions:
  for code in (preamble, setup, *statements):
    try:
      ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
      raise ValueError(f'tests={short(code)} is neither JSON nor Python ({one_line(e, str)}); {_FORMS}') from e
  return Assertions(function, preamble, setup, tuple(statements))


def _builtin_function(tests: Assertions) -> str:
  """The function of the program if it has the name of a builtin; '' if the statements name another one.

  It is then the only function that all of them call. Raises ValueError if there is none.
  """
  code = {**dataclasses.asdict(tests), 'setup': tests.preamble}
  if inside.missing(code, {}):
    return ''
  calls = [
    {n.func.id for n in ast.walk(ast.parse(x)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    for x in tests.statements
  ]
  names = set.intersection(*calls) & set(dir(builtins))
  if len(names) != 1:
    raise ValueError(f'tests={short(tests.statements)} call no function of a program; {_FORMS}')
  return names.pop()


# -- comparing ---------------------------------------------------------------------------------------------------------


def same_output(printed: str, expected: str, tolerance: float) -> bool:
  """Whether a program printed what is expected.

  Blank lines around the whole and the width of blank space are ignored. Words are equal as text, or as numbers.

  Args:
    tolerance: largest relative or absolute difference of two numbers; 0 for equal values, such as 1.50 and 1.5.
  """
  ours, theirs = (text.strip().split('\n') for text in (printed, expected))
  return len(ours) == len(theirs) and all(
    a == b or _same_numbers(a.split(), b.split(), tolerance) for a, b in zip(ours, theirs, strict=True)
  )


def _same_numbers(ours: Sequence[str], theirs: Sequence[str], tolerance: float) -> bool:
  return len(ours) == len(theirs) and all(
    a == b or (_NUMBER.fullmatch(a) and _NUMBER.fullmatch(b) and _close(a, b, tolerance))
    for a, b in zip(ours, theirs, strict=True)
  )


def _close(a: str, b: str, tolerance: float) -> bool:
  if tolerance > 0:
    return math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=tolerance)
  try:
    return Decimal(a) == Decimal(b)  # quick, however large the exponents
  except ArithmeticError:  # an exponent of twenty digits
    return False


def same_value(ours: Any, expected: Any, tolerance: float) -> bool:
  """Whether a result, in the form of `inside.encode`, is an expected value of JSON. Tuples are lists.

  Keys of mappings are compared as text, because JSON has no others.
  """
  try:
    return _same(ours, expected, tolerance)
  except (ValueError, TypeError, ArithmeticError, RecursionError):  # what a program wrote itself instead of a result
    return False


def _same(ours: Any, expected: Any, tolerance: float) -> bool:
  if isinstance(ours, Mapping):
    ((kind, inner),) = ours.items()
    if kind == 'int':
      return int(inner, 16) == expected
    if kind == 'dict':
      pairs = {_key(k): v for k, v in inner}
      return (
        isinstance(expected, Mapping)
        and pairs.keys() == {str(k) for k in expected}
        and all(_same(pairs[str(k)], v, tolerance) for k, v in expected.items())
      )
    if kind != 'tuple':
      return False
    ours = inner
  if isinstance(ours, list):
    return (
      isinstance(expected, list | tuple)
      and len(ours) == len(expected)
      and all(_same(a, b, tolerance) for a, b in zip(ours, expected, strict=True))
    )
  if tolerance > 0 and isinstance(ours, int | float) and isinstance(expected, int | float):
    return ours == expected or math.isclose(ours, expected, rel_tol=tolerance, abs_tol=tolerance)
  return ours == expected


def _key(key: Any) -> str:
  """A key of a result as text."""
  if isinstance(key, Mapping) and [*key] == ['int']:
    return str(int(key['int'], 16))
  if not isinstance(key, str | int | float):
    raise ValueError('a key that JSON does not have')
  return str(key)
