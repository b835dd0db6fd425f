"""Play: runners play attempts, with a Python function or with a program in any language.

Whatever an agent does becomes the outcome of its attempt; a runner raises nothing. An agent that does not end in time
is stopped, and abandoned if it does not stop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import numbers
import os
import reprlib
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ragen_jax.envs.outside.base import LARGEST_REWARD, read_reward
from ragen_jax.serving.client import AgentCall, Task
from ragen_jax.serving.types import AttemptState
from ragen_jax.utils.errors import UserError, one_line
from ragen_jax.utils.imports import import_function
from ragen_jax.utils.threads import Fault, attempt

_LONGEST_TAIL = 1500  # bytes of a program's output that an error shows
_LONGEST_VALUE = 200  # characters of a value that an error shows
_LONGEST_VARIABLE = 128_000  # bytes; Linux takes 131,072 for one variable of the environment
_POLL_MS = 200  # between two looks whether the program has ended
_LAST_READS = 32  # after the program's end; a pipe holds less
_LEAST_S = 1.0  # between two questions how much time is left
_KILLED_S = 10.0  # how long a killed program may take to end

# Values are written longer than they are shown: a text in them that is cut keeps so much of its beginning that the cut,
# which may leave a part of a key, is not shown.
_WRITER = reprlib.Repr()
_WRITER.maxlevel, _WRITER.maxstring, _WRITER.maxother, _WRITER.maxlong = 4, *[5 * _LONGEST_VALUE] * 3


class Ending(enum.Enum):
  """What came first."""

  ENDED = 'ended'
  CANCELLED = 'cancelled'
  LATE = 'late'


class RunWatch:
  """Waits for what comes first: the agent's end, its cancellation, or its time-out."""

  def __init__(self, timeout_s: float, time_left: Callable[[], float | None] = lambda: 0.0):
    """Starts the time of an agent.

    When `timeout_s` is over, `time_left` gives the seconds that the agent may still take, since its calls were held; 0
    for none. If it gives None, nothing is known, and it is called again.
    """
    self._deadline, self._time_left = time.monotonic() + timeout_s, time_left
    self._changed = threading.Condition()
    self._ending: Ending | None = None

  def end(self) -> None:
    """The agent has ended."""
    self._set(Ending.ENDED)

  def cancel(self) -> None:
    """The agent should end."""
    self._set(Ending.CANCELLED)

  def wait(self) -> Ending:
    """Blocks until one of the three has come; what comes later changes nothing."""
    while True:
      with self._changed:
        left = min(self._deadline - time.monotonic(), threading.TIMEOUT_MAX)
        if self._changed.wait_for(lambda: self._ending is not None, max(left, 0.0)):
          return self._ending
      more = self._time_left()
      if more is not None and more <= 0:
        self._set(Ending.LATE)
      else:
        self._deadline = time.monotonic() + max(more or 0.0, _LEAST_S)

  def _set(self, ending: Ending) -> None:
    with self._changed:
      self._ending = self._ending or ending
      self._changed.notify_all()


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a run ended.

  Attributes:
    state: 'succeeded', 'failed', 'timeout' or 'cancelled'.
    reward: the reward of the episode; None if the agent gave none to its runner.
    abandoned: a thread that did not stop; None if nothing was left behind.
  """

  state: AttemptState
  reward: float | None
  error: str
  abandoned: threading.Thread | None

  @classmethod
  def failed(cls, error: str) -> Outcome:
    return cls(AttemptState.FAILED, None, error, None)

  @classmethod
  def stopped(cls, ending: Ending, task: Task, detail: str = '') -> Outcome:
    if ending == Ending.LATE:
      return cls(AttemptState.TIMEOUT, None, f'took longer than timeout_s={task.timeout_s:g}{detail}', None)
    return cls(AttemptState.CANCELLED, None, f'was cancelled{detail}', None)

  def leaving(self, thread: threading.Thread) -> Outcome:
    """The same outcome with a thread that did not stop."""
    return dataclasses.replace(self, abandoned=thread)


class Runner(Protocol):
  """Plays one attempt; several threads may call `run`."""

  def run(self, task: Task, watch: RunWatch) -> Outcome:
    """Plays a task until it ends, or until `watch` says that it is cancelled or late. Raises nothing."""


def load_function(field: str, path: str) -> Callable[[Task], Any]:
  """An agent's function by its path 'package.module:function', the value of the config field `field`; UserError if the
  path has another form, cannot be imported, or names no function."""
  try:
    return import_function(field, path)
  except ValueError as e:
    raise UserError(str(e)) from e


class FunctionRunner:
  """Calls `async def agent(task) -> float | None`, or a function that is not async.

  Each attempt has a thread and an event loop of its own, so an agent that blocks does not hold up the others. The
  number that the function returns is the reward of the episode; None means that it has posted its rewards. An exception
  fails the attempt. The thread of a cancelled agent that does not end within `grace_s` is abandoned.
  """

  def __init__(self, function: Callable[[Task], Any], grace_s: float):
    self._function, self._grace_s = function, grace_s

  def run(self, task: Task, watch: RunWatch) -> Outcome:
    """Plays a task, see `Runner`."""
    call, found = AgentCall(self._function, task), []

    def play() -> None:
      outcome, fault = attempt(lambda: _value_outcome(call.run(), task), 'agent')
      found.append(faulty(fault, task) if fault else outcome)
      watch.end()

    thread = threading.Thread(target=play, daemon=True, name=f'ragen_jax-agent-{task.attempt_id}')
    thread.start()
    ending = watch.wait()
    if ending == Ending.ENDED:
      return found[0]
    if call.cancel(RuntimeError('the agent was stopped')):
      thread.join(self._grace_s)
    outcome = Outcome.stopped(ending, task)
    return outcome.leaving(thread) if thread.is_alive() else outcome


def faulty(fault: Fault, task: Task) -> Outcome:
  """A run that failed. The attempt's key is removed before the line is cut: the cut could leave a part of it."""
  kind, detail = _without_key(fault.kind, task), _without_key(fault.detail, task)
  return Outcome.failed(str(dataclasses.replace(fault, kind=kind, detail=detail)))


def _without_key(text: str, task: Task) -> str:
  return text.replace(task.api_key, '***') if task.api_key else text


def _value_outcome(value: Any, task: Task) -> Outcome:
  if value is None:
    return Outcome(AttemptState.SUCCEEDED, None, '', None)
  reward = read_reward(value) if isinstance(value, numbers.Real) else None
  if isinstance(reward, float):
    return Outcome(AttemptState.SUCCEEDED, reward, '', None)
  if isinstance(value, bytes | bytearray):
    value = value[: 5 * _LONGEST_VALUE]
  shown = _without_key(one_line(value, _WRITER.repr), task)[:_LONGEST_VALUE]
  return Outcome.failed(f'agent returned {shown}; allowed: a number within {LARGEST_REWARD:g}, None')


class ProgramRunner:
  """Starts a program in a process group of its own; the attempt succeeds if the program ends with status 0.

  The environment holds what `client` describes. Every process of the group is killed when the program has ended, or is
  cancelled or late: first SIGTERM, then, after `grace_s`, SIGKILL. An error shows the end of what the program wrote.
  """

  def __init__(self, argv: Sequence[str], cwd: str | None, environment: Mapping[str, str], grace_s: float):
    """In the arguments of the program, {rollout_id}, {attempt_id}, {mode} and {base_url} are replaced. To
    `environment`, the variables of the task are added; leave secrets of the server out."""
    self._argv, self._cwd, self._environment, self._grace_s = tuple(argv), cwd, dict(environment), grace_s

  def run(self, task: Task, watch: RunWatch) -> Outcome:
    """Plays a task, see `Runner`."""
    fields = json.dumps(task.to_json())
    if len(fields) > _LONGEST_VARIABLE:
      return Outcome.failed(f'the task has {len(fields)} bytes of JSON; allowed for a program: {_LONGEST_VARIABLE}')
    variables = {
      'RAGEN_BASE_URL': task.server_url, 'RAGEN_KEY': task.api_key, 'RAGEN_TASK': fields,
      'OPENAI_BASE_URL': task.base_url, 'OPENAI_API_KEY': task.api_key,
    }  # fmt: skip
    argv = [_fill(argument, task) for argument in self._argv]
    try:
      process = subprocess.Popen(
        argv, cwd=self._cwd, env=self._environment | variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
      )  # fmt: skip
    except (OSError, ValueError, subprocess.SubprocessError) as e:
      return Outcome.failed(f'{argv[0]!r} cannot be started: {one_line(e, str)}')
    with _tail_of(process, _LONGEST_TAIL + len(task.api_key)) as tail:
      ending = self._wait(process, watch)
    written = f': {text}' if (text := one_line(_shown_tail(tail, task), str)) else ''
    if ending != Ending.ENDED:
      return Outcome.stopped(ending, task, written)
    status = process.returncode
    if status == 0:
      return Outcome(AttemptState.SUCCEEDED, None, '', None)
    how = f'was killed by {_signal_name(-status)}' if status < 0 else f'ended with status {status}'
    return Outcome.failed(f'{argv[0]!r} {how}{written}')

  def _wait(self, process: subprocess.Popen, watch: RunWatch) -> Ending:
    """Waits for the program, and leaves no process of its group."""

    def wait() -> None:
      process.wait()
      watch.end()

    waiter = threading.Thread(target=wait, daemon=True, name=f'ragen_jax-wait-{process.pid}')
    waiter.start()
    ending = watch.wait()
    if ending != Ending.ENDED:
      _kill(process, signal.SIGTERM)
      waiter.join(self._grace_s)
    _kill(process, signal.SIGKILL)
    waiter.join(_KILLED_S)
    return ending


def _fill(argument: str, task: Task) -> str:
  for name in ('rollout_id', 'attempt_id', 'mode', 'base_url'):
    argument = argument.replace(f'{{{name}}}', getattr(task, name))
  return argument


def _kill(process: subprocess.Popen, number: signal.Signals) -> None:
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(process.pid, number)


def _signal_name(number: int) -> str:
  try:
    return signal.Signals(number).name
  except ValueError:
    return f'signal {number}'


def _shown_tail(tail: bytes, task: Task) -> str:
  """The end of a program's output, without the attempt's key.

  Of `tail`, as many bytes as the key has are not shown: the first bytes may be a part of a key that was cut.
  """
  longest = _LONGEST_TAIL + len(task.api_key)
  text = _without_key(tail.decode('utf-8', 'replace'), task)
  if len(tail) >= longest:
    text = text[len(task.api_key) :]
  return text[-_LONGEST_TAIL:]


@contextlib.contextmanager
def _tail_of(process: subprocess.Popen, longest: int) -> Iterator[bytearray]:
  """Reads a program's output in a thread, so that the program never waits for it; yields its last `longest` bytes.

  They are complete after the block, though a process that left the group may hold the pipe.
  """
  tail, done, pipe = bytearray(), threading.Event(), process.stdout

  def read() -> None:
    poll, left = select.poll(), _LAST_READS
    poll.register(pipe, select.POLLIN)
    with pipe:
      while left:
        ended = done.is_set()
        left -= ended
        if poll.poll(0 if ended else _POLL_MS):
          if not (data := os.read(pipe.fileno(), 1 << 16)):
            return
          tail.extend(data)
          del tail[:-longest]
        elif ended:
          return

  reader = threading.Thread(target=read, daemon=True, name=f'ragen_jax-read-{process.pid}')
  reader.start()
  try:
    yield tail
  finally:
    done.set()
    reader.join(_KILLED_S)
