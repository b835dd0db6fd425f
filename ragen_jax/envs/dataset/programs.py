"""The verifier 'code': runs the program in an answer on the tests of its item, in a sandbox.

What is expected never enters the sandbox of the program. It prints or returns something, and this process compares; or,
where tests are assertions, these run in a second sandbox, and calls and results travel through this process as plain
values. A program can therefore only pass by giving the right results. docs/programs.md describes limits and verdicts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

from ragen_jax.envs.dataset import inside
from ragen_jax.envs.dataset.confined import Confined, Limits, SandboxError
from ragen_jax.envs.dataset.item import Item
from ragen_jax.envs.dataset.program_tests import (
  Assertions,
  Calls,
  InputOutput,
  ProgramTests,
  read_tests,
  same_output,
  same_value,
)
from ragen_jax.envs.dataset.sandbox import Sandbox
from ragen_jax.envs.dataset.verifiers import Verdict, Verifier, VerifierSettings, read_options
from ragen_jax.envs.options import check_choice, check_integer, check_seconds, check_text, is_number
from ragen_jax.utils.errors import one_line
from ragen_jax.utils.threads import Fault, attempt

# How a program can fail. The first that happens is the verdict of the program.
FAILURES = ('wrong', 'timeout', 'memory', 'output', 'crash', 'forged', 'no_verdict', 'no_program')
# After these the remaining tests are not run: each would take as long.
_COSTLY = ('timeout', 'memory', 'output')
_PYTHON = ('python', 'python3', 'py', 'py3')
_FENCE = re.compile(r'(\s*)(`{3,}|~{3,})\s*([^\s`]*)[^`]*')
# docs/programs.md describes them.
_OPTIONS: Mapping[str, Any] = {
  'score': 'all',
  'max_tests': 15,
  'tolerance': 0.0,
  'cpu_s': 6,
  'wall_s': 30.0,
  'memory_mib': 1024,
  'disk_mib': 32,
  'processes': 8,
  'output_mib': 4,
  'python': '',
  'packages': (),
}


def find_program(answer: str) -> str:
  """The program in an answer; '' for none.

  It is the last fenced block that is marked as Python; without such a block the last one without a language, then the
  last one in another language, then the whole text. A block that is not closed ends with the answer.
  """
  blocks: list[tuple[str, list[str]]] = []
  fence, indent = '', 0
  for line in answer.splitlines():
    match = _FENCE.fullmatch(line)
    if fence and match and match[2].startswith(fence) and not match[3]:
      fence = ''
    elif fence:
      # As in Markdown: lines lose what the fence is indented by, as far as they have it.
      blocks[-1][1].append(line[min(indent, len(line) - len(line.lstrip())) :])
    elif match:
      indent, fence = len(match[1]), match[2]
      blocks.append((match[3].lower(), []))
  found = ([lines for language, lines in blocks if language in names] for names in (_PYTHON, ('',)))
  chosen = next(filter(None, found), [lines for _, lines in blocks])
  program = '\n'.join(chosen[-1]) if chosen else answer
  return f'{program}\n' if program.strip() else ''


@dataclasses.dataclass
class _Tally:
  """The tests of a program: their number, those that passed, and the first failure."""

  total: int
  passed: int = 0
  failure: str = ''

  def add(self, verdict: str) -> None:
    """Counts a test."""
    self.passed += verdict == 'right'
    if verdict != 'right':
      self.failure = self.failure or verdict


class ProgramVerifier(Verifier):
  """The answer is a Python program, or a text with one in a fenced block."""

  answer_help = 'Your answer is a Python program, alone or in a fenced block.'
  needs_extra = False

  def __init__(self, settings: VerifierSettings):
    """Reads the options; nothing is run.

    Raises:
      ValueError: an option is not allowed.
    """
    options = read_options(settings, _OPTIONS)
    where = 'dataset: verifier_options'
    check_choice(where, 'score', options['score'], ('all', 'share'))
    for name, low, high in _RANGES:
      check_integer(where, name, options[name], low, high)
    check_seconds(where, 'wall_s', options['wall_s'])
    if not is_number(options['tolerance']) or not 0 <= options['tolerance'] < 1:
      raise ValueError(f'{where}: tolerance={one_line(options["tolerance"])}; allowed: numbers from 0 to below 1')
    if settings.timeout_s < options['wall_s']:
      raise ValueError(
        f'dataset: timeout_s={settings.timeout_s:g}, the time of all tests of a program; allowed: at least '
        f'verifier_options.wall_s={options["wall_s"]:g}, that of one test'
      )
    check_text(where, 'python', options['python'])
    if isinstance(options['packages'], str) or not all(isinstance(p, str) for p in options['packages']):
      raise ValueError(f'{where}: packages={one_line(options["packages"])}; allowed: a tuple of folders')
    self._options = options
    self._program_s = settings.timeout_s
    self._jobs = settings.workers or len(os.sched_getaffinity(0))
    names = ('memory_mib', 'cpu_s', 'wall_s', 'processes', 'disk_mib')
    given = {name: options[name] for name in names}
    self._limits = Limits(**given, file_mib=options['disk_mib'], output_bytes=options['output_mib'] << 20)

  @functools.cached_property
  def _sandbox(self) -> Sandbox:
    return Sandbox(self._options['python'], self._options['packages'])

  def check(self) -> None:
    """Raises ValueError if programs cannot be confined here."""
    self._sandbox.check()

  def read_gold(self, raw: Any, row: Mapping[str, Any]) -> ProgramTests:
    """See `read_tests`."""
    return read_tests(raw, row, self._options['max_tests'])

  def score(self, answers: Sequence[str], items: Sequence[Item]) -> list[Verdict | Fault]:
    """See `Verifier`. A few programs run at a time."""

    def grade(answer: str, item: Item) -> Verdict | Fault:
      verdict, fault = attempt(functools.partial(self._grade, find_program(answer), item.gold), 'grading')
      return fault or verdict

    with futures.ThreadPoolExecutor(self._jobs, thread_name_prefix='ragen_jax-grading') as pool:
      return list(pool.map(grade, answers, items))

  def _grade(self, program: str, tests: ProgramTests) -> Verdict | Fault:
    if isinstance(tests, Assertions):
      tally, play = _Tally(len(tests.statements)), self._play_assertions
    else:
      tally, play = _Tally(len(tests.cases)), self._play_calls if isinstance(tests, Calls) else self._play_texts
    try:
      # Text that is not Unicode is a syntax error for Python, as it should be.
      code = program.encode('utf-8', 'surrogatepass')
      for verdict in play(code, tests) if program else ['no_program']:
        tally.add(verdict)
        if verdict in _COSTLY:
          break
    except (SandboxError, OSError) as e:
      return Fault('a program could not be run', one_line(e, str))
    share = tally.passed / tally.total
    score = share if self._options['score'] == 'share' else float(share == 1)
    # A program of which nothing is known has no right to be right.
    failure = tally.failure or ('' if share == 1 else 'no_verdict')
    metrics = {'tests_passed': share, **{f'program_{name}': float(failure == name) for name in FAILURES}}
    return Verdict(score, metrics, failure or 'right')

  # -- the three kinds of tests: the verdict of one after another ------------------------------------------------------
  # A test may take wall_s, and no longer than what is left for all. Either end is a failure of the program: a fault has
  # no score, so a program that is wrong could choose it by sleeping.

  def _play_texts(self, program: bytes, tests: InputOutput) -> Iterator[str]:
    """Each test runs in a sandbox of its own."""
    end = time.monotonic() + self._program_s
    for given, expected in tests.cases:
      limits = self._limits_for(len(expected))
      limits = dataclasses.replace(limits, wall_s=self._seconds(end))
      stdin = given.encode('utf-8', 'surrogatepass')
      outcome = self._sandbox.run({'program.py': program}, ['/program/program.py'], stdin, limits)
      if outcome.verdict != 'ok':
        yield outcome.verdict
      else:
        printed = outcome.stdout.decode('utf-8', 'replace')
        yield 'right' if same_output(printed, expected, self._options['tolerance']) else 'wrong'

  def _play_calls(self, program: bytes, tests: Calls) -> Iterator[str]:
    """One process of the program answers all calls."""
    end = time.monotonic() + self._program_s
    expected_bytes = sum(len(json.dumps(expected)) for _, expected in tests.cases)
    with self._serve(program, tests.preamble, self._limits_for(expected_bytes, len(tests.cases))) as player:
      for arguments, expected in tests.cases:
        bounds = self._seconds(end), player.cpu_seconds() + self._limits.cpu_s
        reply = self._ask(player, tests.function, inside.encode(list(arguments)), {'dict': []}, bounds)
        if isinstance(reply, str):
          yield reply
          return
        right = 'value' in reply and any(same_value(reply['value'], e, self._options['tolerance']) for e in expected)
        yield 'right' if right else _verdict_of(reply)

  def _play_assertions(self, program: bytes, tests: Assertions) -> Iterator[str]:
    """The assertions run in a sandbox of their own, and ask for the calls."""
    end = time.monotonic() + self._program_s
    files = {'inside.py': _INSIDE, 'assertions.json': json.dumps(dataclasses.asdict(tests)).encode()}
    limits = self._limits_for(0, len(tests.statements))
    with (
      self._sandbox.start(files, ['/program/inside.py', 'judge'], limits) as judge,
      self._serve(program, tests.preamble, limits) as player,
    ):
      failure = ''  # of the last call
      for _ in tests.statements:
        # Of the calls of a statement together.
        cpu_end, judge_end = (side.cpu_seconds() + self._limits.cpu_s for side in (player, judge))
        while True:
          message = _read(judge.read_line(self._seconds(end), judge_end))
          if message is None:
            # The code of the data set ended, as the results of the program made it or by itself.
            verdict = judge.finish().verdict
            yield verdict if verdict in _COSTLY else 'no_verdict'
            return
          if 'name' not in message:
            break
          reply = self._ask(player, message['name'], message['args'], message['kwargs'], (self._seconds(end), cpu_end))
          if isinstance(reply, str):
            yield reply
            return
          failure = _verdict_of(reply)
          judge.send(json.dumps(reply).encode() + b'\n')
        yield 'right' if message.get('passed') is True else failure or 'wrong'
        failure = ''

  # -- talking with the program ----------------------------------------------------------------------------------------

  def _serve(self, program: bytes, preamble: str, limits: Limits) -> Confined:
    files = {'inside.py': _INSIDE, 'preamble.py': preamble.encode(), 'program.py': program}
    return self._sandbox.start(files, ['/program/inside.py', 'serve'], limits)

  def _ask(
    self, player: Confined, name: str, arguments: Any, keywords: Any, bounds: tuple[float, float]
  ) -> dict[str, Any] | str:
    """The reply to a call, or the verdict if there is none; `bounds` are those of `Confined.read_line`."""
    number = secrets.token_hex(16)
    request = {'id': number, 'name': name, 'args': arguments, 'kwargs': keywords}
    player.send(json.dumps(request).encode() + b'\n')
    line = player.read_line(*bounds)
    if line is None:
      verdict = player.finish().verdict
      return 'crash' if verdict == 'ok' else verdict
    reply = _read(line)
    # A line that does not name the call was written by the program itself.
    if reply is None or reply.get('id') != number or not {'value', 'raised', 'unreadable'} & reply.keys():
      return 'forged'
    return reply

  def _seconds(self, end: float) -> float:
    """What a test may take if all tests must end at `end`."""
    return min(self._limits.wall_s, end - time.monotonic())

  def _limits_for(self, expected: int, tests: int = 0) -> Limits:
    """The limits of a process: of one test, or of `tests` tests, whose times `Confined.read_line` limits one by one.

    Args:
      expected: bytes of what is expected.
    """
    limits = self._limits
    limits = dataclasses.replace(limits, output_bytes=max(limits.output_bytes, 2 * expected + (1 << 16)))
    if not tests:
      return limits
    return dataclasses.replace(limits, cpu_s=limits.cpu_s * tests, wall_s=self._program_s + limits.wall_s)


# The options that are whole numbers, with their ranges.
_RANGES = (
  ('max_tests', 1, 10**6),
  ('cpu_s', 1, 3600),
  ('memory_mib', 64, 1 << 20),
  ('disk_mib', 1, 1 << 16),
  ('processes', 1, 1024),
  ('output_mib', 1, 1024),
)
_INSIDE = pathlib.Path(inside.__file__).read_bytes()


def _read(line: bytes | None) -> dict[str, Any] | None:
  """A line as a mapping; None if there is none, or if it is something else."""
  try:
    message = json.loads(line) if line is not None else None
  except (ValueError, RecursionError):
    return None
  return message if isinstance(message, dict) else None


def _verdict_of(reply: Mapping[str, Any]) -> str:
  """Why a test fails, of which the program's reply is known."""
  if 'raised' in reply:
    return 'memory' if reply['raised'] == 'MemoryError' else 'crash'
  return 'wrong'
