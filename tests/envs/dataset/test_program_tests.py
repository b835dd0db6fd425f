"""Forms of tests, and the comparison of results."""

import json
import math

import pytest

from ragen_jax.envs.dataset import inside
from ragen_jax.envs.dataset.program_tests import (
  Assertions,
  InputOutput,
  read_tests,
  same_output,
  same_value,
)

PAIRS = [{'input': '1\n2\n', 'output': '3'}, {'input': '4\n5\n', 'output': '9\n'}]


@pytest.mark.parametrize(
  'raw',
  [
    PAIRS,
    json.dumps(PAIRS),
    [{**pair, 'testtype': 'stdin_stdout'} for pair in PAIRS],
    [{**pair, 'testtype': 'stdin', 'metadata': {}} for pair in PAIRS],
    [{**pair, 'type': 'stdin_stdout'} for pair in PAIRS],
    {'inputs': ['1\n2\n', '4\n5\n'], 'outputs': ['3', '9\n']},
    json.dumps({'inputs': ['1\n2\n', ['4', '5', '']], 'outputs': ['3', ['9', '']]}),
  ],
)
def test_tests_of_stdin(raw):
  assert read_tests(raw, {}, 15) == InputOutput((('1\n2\n', '3'), ('4\n5\n', '9\n')))


@pytest.mark.parametrize(
  'raw, row',
  [
    ([{'input': '[1, 2]\n"a"', 'output': 'true', 'testtype': 'functional', 'metadata': {'func_name': 'f'}}], {}),
    ([{'input': '[1, 2]\n"a"\n', 'output': 'true', 'testtype': 'functional'}], {'metadata': '{"func_name": "f"}'}),
    ([{'input': '[1, 2]\n"a"', 'output': 'true', 'testtype': 'functional'}], {'metadata': {'func_name': 'f'}}),
    ([{'type': 'function_call', 'fn_name': 'f', 'input': [[1, 2], 'a'], 'output': True}], {}),
    ({'fn_name': 'f', 'inputs': [[[1, 2], 'a']], 'outputs': [True]}, {}),
    ([{'input': [[1, 2], 'a'], 'output': True}], {'fn_name': 'f'}),
  ],
)
def test_tests_of_functions(raw, row):
  for form in (raw, json.dumps(raw)):
    tests = read_tests(form, row, 15)
    assert (tests.function, tests.cases) == ('f', ((([1, 2], 'a'), (True,)),))


def test_a_result_alone_in_a_list_may_be_the_result():
  tests = read_tests({'fn_name': 'f', 'inputs': [[1], [2]], 'outputs': [[5], [5, 6]]}, {}, 15)
  assert [expected for _, expected in tests.cases] == [([5], 5), ([5, 6],)]
  # LiveCodeBench writes results as they are.
  case = {'input': '1', 'output': '[5]', 'testtype': 'functional'}
  assert read_tests([case], {'fn_name': 'f'}, 15).cases == (((1,), ([5],)),)


def test_assertions_of_both_kinds():
  check = 'def check(candidate):\n  assert candidate(1) == 2'
  tests = read_tests(check, {'entry_point': 'f', 'prompt': 'import math\n'}, 15)
  assert tests == Assertions('f', 'import math\n', check, ('check(f)',))
  row = {'test_setup_code': 'import math', 'test_imports': ['import re']}
  tests = read_tests(['assert f(1) == 2', 'assert f(2) == 3'], row, 15)
  assert tests == Assertions('', 'import math\nimport re', '', ('assert f(1) == 2', 'assert f(2) == 3'))
  assert read_tests('["assert f(1)"]', {}, 15).statements == ('assert f(1)',)


def test_assertions_about_a_function_with_the_name_of_a_builtin():
  # MBPP has such a task: the sum of common divisors.
  statements = ['assert sum(10, 15) == 6', 'assert max([sum(4, 6)]) == 3']
  assert read_tests(statements, {}, 15) == Assertions('sum', '', '', tuple(statements))
  assert read_tests(['assert set(f(1)) == set((2,))'], {}, 15).function == ''
  assert read_tests(['assert sorted(f(1)) == [2]', 'assert f(2) == [3]'], {}, 15).function == ''


def test_the_tests_with_the_longest_inputs_are_kept_in_their_order():
  pairs = [{'input': 'x' * n, 'output': str(n)} for n in (3, 9, 1, 7, 5)]
  assert [out for _, out in read_tests(pairs, {}, 3).cases] == ['9', '7', '5']
  assert len(read_tests(pairs, {}, 5).cases) == 5
  calls = {'fn_name': 'f', 'inputs': [[[1] * n] for n in (3, 9, 1)], 'outputs': [3, 9, 1]}
  assert [expected for _, expected in read_tests(calls, {}, 2).cases] == [(3,), (9,)]


@pytest.mark.parametrize(
  'raw, row, message',
  [
    ('', {}, 'no JSON'),
    ('[', {}, 'no JSON'),
    ('[]', {}, r'tests=\[\]; allowed: a list'),
    ([], {}, 'allowed: a list'),
    (5, {}, 'tests=5'),
    ([1], {}, r'tests=\[1\]'),
    ([{'input': 'x'}], {}, 'without "input" or "output"'),
    ({'inputs': ['x'], 'outputs': []}, {}, 'not lists of one length'),
    ({'inputs': 'x', 'outputs': 'y'}, {}, 'not lists of one length'),
    ([{'input': {}, 'output': 'x'}], {}, r'input or output \{\}'),
    ([{'input': 'x', 'output': 'y', 'testtype': 'visual'}], {}, "testtype='visual'; allowed: stdin"),
    ([{'input': '1', 'output': '1', 'testtype': 'functional'}], {}, 'without fn_name'),
    ([{'input': '1', 'output': '1', 'testtype': 'functional'}], {'metadata': 'no json'}, 'without fn_name'),
    ([{'input': 'one', 'output': '1'}], {'fn_name': 'f'}, 'is not JSON'),
    ([{'input': '1', 'output': 'one'}], {'fn_name': 'f'}, 'is not JSON'),
    ([{'input': {'a': 1}, 'output': 1}], {'fn_name': 'f'}, 'not a list of arguments'),
    ([{'input': [1], 'output': 1}], {'fn_name': 'f()'}, r"function='f\(\)'; allowed: a name"),
    (['assert True'], {}, 'call no function of a program'),
    (['assert max(1, 2) == min(2, 3)'], {}, 'call no function of a program'),
    (['assert f(1) == 2'], {'test_setup_code': 'def f(x): return 2'}, 'call no function of a program'),
    ('def check(c): pass', {}, 'no field entry_point'),
    ('def check(c): pass', {'entry_point': 'f('}, 'allowed: a name'),
    ('def test(c): pass', {'entry_point': 'f'}, 'without a function `check`'),
    ('def check(c: pass', {'entry_point': 'f'}, 'neither JSON nor Python'),
    (['assert f(', 'assert f(1)'], {}, 'neither JSON nor Python'),
  ],
)
def test_tests_that_cannot_be_read_are_an_error_in_one_line(raw, row, message):
  with pytest.raises(ValueError, match=message) as error:
    read_tests(raw, row, 15)
  assert '\n' not in str(error.value)


# -- comparing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'printed, expected, same',
  [
    ('3\n', '3', True),
    ('  3  \r\n\n', '3\n', True),
    ('1 2\n3', '1 2\n3\n', True),
    ('1  2', '1 2', True),
    ('1.50', '1.5', True),
    ('1e2 x', '100 x', True),
    ('a  b', 'a b', True),
    ('A', 'a', False),
    ('1 2', '1\n2', False),
    ('1\n\n2', '1\n2', False),
    ('', '', True),
    ('', '0', False),
    ('0', '-0', True),
    ('1 2 3', '1 2', False),
    ('0.1', '0.10001', False),
    ('nan', '1', False),
    ('1_0', '10', False),
    ('\u0661', '1', False),
    ('1e999999999999999999999', '1', False),
    ('1e999999999', '1', False),
    ('yes', 'no', False),
  ],
)
def test_printed_lines(printed, expected, same):
  assert same_output(printed, expected, 0.0) is same


def test_numbers_within_the_tolerance():
  assert same_output('0.33333 x', '0.333333 x', 1e-4)
  assert not same_output('0.33333', '0.333333', 1e-7)
  assert same_output('1000001', '1000000', 1e-5)
  assert same_output('0.000001', '0', 1e-5)
  assert not same_output('y', 'x', 0.5)
  assert same_value(inside.encode([0.30000000000000004]), [0.3], 1e-9)
  assert not same_value(inside.encode([0.30000000000000004]), [0.3], 0.0)
  assert not same_value(inside.encode(10**400), 1.5, 1e-3)


@pytest.mark.parametrize(
  'result, expected, same',
  [
    (True, True, True),
    ([1, 2], [1, 2], True),
    ((1, (2,)), [1, [2]], True),
    ([(1, 'a')], [[1, 'a']], True),
    ({1: 'a', 'b': (2,)}, {'1': 'a', 'b': [2]}, True),
    ({1: 'a'}, {'1': 'b'}, False),
    ({1: 'a'}, {'1': 'a', '2': 'b'}, False),
    ({10**30: 1}, {str(10**30): 1}, True),
    (None, None, True),
    (None, [], False),
    (10**30, 10**30, True),
    (1, 1.0, True),
    ('1', 1, False),
    ([1], [1, 2], False),
    ([1, 3], [1, 2], False),
    ({1, 2}, [1, 2], False),
    (b'a', 'a', False),
    ({(1, 2): 3}, {'[1, 2]': 3}, False),
    (math.nan, 1.0, False),
    ('[1]', [1], False),
    ([1], '[1]', False),
    ({}, {}, True),
  ],
)
def test_results_of_functions(result, expected, same):
  assert same_value(json.loads(json.dumps(inside.encode(result))), expected, 0.0) is same


@pytest.mark.parametrize(
  'written',
  [
    {},
    {'int': 'zz'},
    {'int': 5},
    {'dict': 3},
    {'dict': [[1]]},
    {'dict': [[None, 1]]},
    {'a': 1, 'b': 2},
    {'tuple': 7},
    {'set': [6]},
    {'dict': [[{}, 1]]},
  ],
)
def test_what_is_no_result_is_not_the_same(written):
  assert not same_value(written, 6, 0.0)
  assert not same_value(written, {'None': 1}, 0.0)


@pytest.mark.parametrize(
  'value',
  [
    None,
    True,
    -(10**30),
    2**62 - 1,
    2**62,
    1.5,
    -0.0,
    'text \ud800 \x00',
    b'\x00\xff',
    1 + 2j,
    [1, (2, [3]), {4}, frozenset({5}), {(6, 7): {'a': None}}],
    (10**5000,),
  ],
)
def test_plain_values_survive_the_way(value):
  back = inside.decode(json.loads(json.dumps(inside.encode(value))))
  assert back == value and type(back) is type(value)


def test_other_objects_do_not_travel():
  class Liar(int):
    def __eq__(self, other):
      return True

    __hash__ = int.__hash__

  assert inside.encode(Liar(3)) == 3 and type(inside.encode(Liar(3))) is int
  for value in (object(), [1, object()], {1: len}, iter([1]), range(3)):
    with pytest.raises(TypeError, match='is not plain'):
      inside.encode(value)
  for written in ({'object': 1}, {}, {'eval': '1'}, {'int': '0x1', 'x': 1}):
    with pytest.raises(ValueError, match='not an encoded value'):
      inside.decode(written)
