"""Tasks of packages of the library `verifiers`, whose rollouts call the served policy; docs/verifiers.md.

The package runs in worker processes (verifiers_worker.py): it loads the tasks, holds the conversations with the policy,
calls its tools and computes the rewards.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import pathlib
import shutil
import sys
import threading
from collections.abc import Mapping
from typing import Any, ClassVar

from ragen_jax.envs.dataset.selection import SPLITS, is_held_out, select
from ragen_jax.envs.options import (
  check_choice,
  check_flag,
  check_integer,
  check_json,
  check_processes,
  check_seconds,
  check_share,
  check_text,
  check_whole_number,
)
from ragen_jax.envs.outside.base import Session, TextEnvironment
from ragen_jax.utils.errors import short
from ragen_jax.utils.threads import Fault
from ragen_jax.utils.workers import MOST_WORKERS, Worker

_log = logging.getLogger(__name__)

INSTALL = 'pip install -r requirements-verifiers.txt'
RUNNER = 'verifiers'  # what plays the tasks, see `AgentTasks.runner`
_FACTORY = f'{pathlib.Path(__file__).with_name("verifiers_worker.py")}:VerifiersWorker'
_GLANCE_S = 0.05  # how long a worker waits for a rollout to end before it takes new ones
_ANSWER_S = 60.0  # for the worker's main thread to answer
_LONGEST_HOLD_S = 30.0  # for which code of a package may hold up its other rollouts
_FIELDS = ('rewards', 'metrics')


@dataclasses.dataclass(frozen=True)
class PackageSettings:
  """What the worker processes of a package are started with; texts are JSON."""

  package: str
  options: str
  environment: str
  limit: int
  allow_commands: bool
  tool_timeout_s: float
  python: str
  processes: int
  memory_mib: int
  start_timeout_s: float


@dataclasses.dataclass(frozen=True, eq=False)
class VerifiersTasks(TextEnvironment):
  """The tasks of a package of `verifiers`, each of which is played by its own rollout.

  Its options are those of the tag `Verifiers` in configs/environments.py, which says what they mean.
  """

  name: ClassVar[str] = 'verifiers'
  played_by_programs: ClassVar[bool] = True
  runner: ClassVar[str] = RUNNER

  package: str = ''
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  limit: int = 0
  split: str = 'all'
  test_share: float = 0.1
  allow_commands: bool = False
  tool_timeout_s: float = 30.0
  processes: int = 1
  memory_mib: int = 0
  start_timeout_s: float = 600.0
  python: str = ''

  def __post_init__(self):
    check_text('verifiers', 'package', self.package)
    check_text('verifiers', 'python', self.python)
    check_choice('verifiers', 'split', self.split, SPLITS)
    check_share('verifiers', 'test_share', self.test_share)
    check_whole_number('verifiers', 'limit', self.limit, 0)
    check_flag('verifiers', 'allow_commands', self.allow_commands)
    check_integer('verifiers', 'processes', self.processes, 1, MOST_WORKERS)
    check_processes('verifiers', self.processes, self.memory_mib, 1)
    for field in ('tool_timeout_s', 'start_timeout_s'):
      check_seconds('verifiers', field, getattr(self, field))
    for field in ('options', 'environment'):
      object.__setattr__(self, field, check_json('verifiers', field, getattr(self, field)))
    for field, taken, where in (('options', 'id', 'package'), ('environment', 'taskset', 'options')):
      if taken in getattr(self, field):
        raise ValueError(f'verifiers: {field} has {taken}, which is {where}; allowed: other fields')

  @property
  def settings(self) -> PackageSettings:
    """Those of its processes, which tags with equal ones share."""
    own = {field.name: getattr(self, field.name) for field in dataclasses.fields(PackageSettings)}
    return PackageSettings(**own | {name: json.dumps(own[name], sort_keys=True) for name in ('options', 'environment')})

  def check(self) -> None:
    """Starts the package and loads its tasks."""
    check_text('verifiers', 'package', self.package, blank=False)
    if self.python and shutil.which(self.python) is None:
      raise ValueError(f"verifiers: python={self.python!r}; allowed: a program, or '' for {sys.executable}")
    part = self.part
    _log.info('%s: %d tasks of %s, split=%s', self.package, len(part), len(self.connection.tasks), self.split)

  @property
  def connection(self) -> Package:
    """The processes of the package."""
    return shared_package(self.settings)

  @functools.cached_property
  def part(self) -> dict[str, int]:
    """Identity -> index of the tasks of this split; of equal tasks, the first. ValueError if there are none."""
    found: dict[str, int] = {}
    for index, identity in enumerate(self.connection.tasks):
      if self.split == 'all' or (self.split == 'test') == is_held_out(identity, self.test_share):
        found.setdefault(identity, index)
    if not found:
      raise ValueError(
        f'verifiers: split={self.split!r} with test_share={self.test_share}: none of the {len(self.connection.tasks)} '
        'tasks is in this part; allowed: a share that leaves some'
      )
    return found

  def task(self, seed: int, member: int) -> dict[str, Any]:
    """The task of an episode: consecutive seeds select all tasks of the part before one comes again."""
    del member
    index = self._indices[select(seed, len(self._indices), 'shuffled')]
    return {'package': self.package, 'settings': self.key, 'index': index}

  @functools.cached_property
  def _indices(self) -> tuple[int, ...]:
    return tuple(self.part.values())

  @property
  def key(self) -> str:
    """What the list of all tasks, and so an index, depends on."""
    s = self.settings
    return hashlib.sha256(repr((s.package, s.options, s.environment, s.limit)).encode()).hexdigest()[:12]

  def rules(self) -> str:
    return 'The package writes the prompts.'

  def open(self, rows: int) -> Session:
    """Raises TypeError: there are no turns to play."""
    raise TypeError('the tasks of packages are not played turn by turn')


@functools.lru_cache(maxsize=16)
def shared_package(settings: PackageSettings) -> Package:
  """The processes of a package for all tags whose settings are the same."""
  return Package(settings)


class Package:
  """The worker processes of a package, which are started when they are needed, and again after they have ended."""

  def __init__(self, settings: PackageSettings):
    """Starts nothing."""
    s = settings
    self._settings = s
    options, environment = json.loads(s.options), json.loads(s.environment)
    arguments = (s.package, options, environment, s.limit, s.allow_commands, s.tool_timeout_s)
    limits = {'memory_mib': s.memory_mib, 'start_timeout_s': s.start_timeout_s, 'python': s.python}
    self._hosts = [
      _Host(Worker(_FACTORY, arguments, name=f'verifiers: {s.package} {i}', **limits)) for i in range(s.processes)
    ]
    self._next = itertools.cycle(self._hosts)

  @functools.cached_property
  def tasks(self) -> tuple[str, ...]:
    """The identity of each task, in the package's order; ValueError of one line if the package cannot be used."""
    raw, fault = self._hosts[0].worker.call('tasks', timeout_s=self._settings.start_timeout_s)
    where = f'verifiers: package={self._settings.package!r}'
    if fault is not None:
      if "No module named 'verifiers'" in fault.detail:
        raise ValueError(
          f'verifiers: python={self._settings.python!r} has no library verifiers; allowed: an interpreter whose '
          f'environment has it ({INSTALL})'
        )
      raise ValueError(f'{where} cannot be used ({fault})')
    if not isinstance(raw, list) or not all(type(identity) is str for identity in raw):
      raise ValueError(f'{where}: the keys of its tasks are no texts ({short(raw)})')
    return tuple(raw)

  def play(
    self, index: int, base_url: str, api_key: str, model: str, max_turns: int
  ) -> concurrent.futures.Future[dict[str, dict[str, float]] | Fault]:
    """Begins a rollout of a task, which calls the policy `model` at an address with a key.

    Returns:
      What will be {'rewards': ..., 'metrics': ...}, numbers by name, or a fault. `cancel` ends the rollout.
    """
    return next(self._next).play(index, base_url, api_key, model, max_turns)

  def close(self) -> None:
    """Ends the processes."""
    for host in self._hosts:
      host.worker.close()


class _Host:
  """A worker process with several rollouts at a time. A thread gives it orders while it has some."""

  def __init__(self, worker: Worker):
    self.worker = worker
    self._lock = threading.Lock()
    self._numbers = itertools.count(1)
    self._orders: list[tuple] = []
    self._running: dict[int, concurrent.futures.Future] = {}  # with those that are not begun yet
    self._serving = False

  def play(self, *order: Any) -> concurrent.futures.Future:
    future: concurrent.futures.Future = concurrent.futures.Future()
    with self._lock:
      number = next(self._numbers)
      self._orders.append((number, *order))
      self._running[number] = future
      starts, self._serving = not self._serving, True
    if starts:
      threading.Thread(target=self._serve, daemon=True, name='ragen_jax-verifiers').start()
    return future

  def _serve(self) -> None:
    process, cancelled = 0, set()
    while True:
      with self._lock:
        if not self._running:
          self._serving = False
          return
        orders, self._orders = self._orders, []
        stopped = [n for n, future in self._running.items() if future.cancelled() and n not in cancelled]
        begun = [n for n in self._running if n not in {order[0] for order in orders}]
      cancelled.update(stopped)
      answer, fault = self.worker.call('exchange', orders, stopped, _GLANCE_S, timeout_s=_ANSWER_S)
      ended: dict[int, Any] = {}
      if fault is None:
        ended, held_s = dict(answer[0]), answer[1]
        if process and self.worker.process != process:  # the process before had ended
          fault = Fault('the process of the package ended', self.worker.last_end)
          ended |= dict.fromkeys(begun, fault)
        elif held_s > _LONGEST_HOLD_S:
          fault = Fault(f'code of the package held its process for {held_s:.0f} s', 'all its rollouts were ended')
          self.worker.restart(str(fault))
          ended = dict.fromkeys(self._running, fault) | ended
      else:
        ended = dict.fromkeys([*begun, *(order[0] for order in orders)], fault)
      process = self.worker.process
      for number, outcome in ended.items():
        with self._lock:
          future = self._running.pop(number, None)
        cancelled.discard(number)
        if future is not None and future.set_running_or_notify_cancel():
          future.set_result(_read_outcome(outcome))


def _read_outcome(raw: Any) -> dict[str, dict[str, float]] | Fault:
  """The checked outcome of a rollout."""
  if isinstance(raw, Fault):
    return raw
  if isinstance(raw, dict) and type(raw.get('error')) is str:
    return Fault('the rollout of the package failed', raw['error'])
  found = {name: raw.get(name) for name in _FIELDS} if isinstance(raw, dict) else {}
  for values in found.values():
    if not isinstance(values, dict) or not all(type(n) is str and type(x) is float for n, x in values.items()):
      return Fault('the package gave no numbers by name', short(raw))
  return found or Fault('the package gave no outcome', short(raw))
