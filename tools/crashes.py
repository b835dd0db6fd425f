"""Ends training at random moments, restarts it, and compares the result with that of a run that was never ended.

  python tools/crashes.py                       # 30 ends with one process, 30 with two; 20 minutes
  python tools/crashes.py --quick               # 3 ends with one process; some minutes
  python tools/crashes.py --kills=8 --processes=2 --seed=1

A run plays a few small iterations on the CPU, with an evaluation every 3 and a checkpoint every 2. An end is one of

  SIGKILL      to one process
  SIGTERM      to one process; the run saves, if it can, and stops
  full         files can neither be made nor grow: new files fail with ENOSPC, and the kernel refuses all further bytes
  read_only    nothing in the workdir can be changed: EROFS, and the kernel refuses all further bytes

and comes at one of these moments, of which one is drawn

  save         at a change of a file of a checkpoint, or up to 20 ms after it
  evaluation   between two parts of the replies of an evaluation
  metrics      in the middle of a line of metrics.jsonl
  any          at any time since the start of the process

The same command is repeated until the run is complete. After each end the statuses of all processes are checked, and
that nothing but an error of one line was written. At the end the weights and the optimiser's state are compared bit for
bit, and so are all lines of metrics.jsonl but for times and memory, and the episodes. The product knows nothing of this
file: the processes of a run are forks of this one, in which functions of the package are wrapped. Disk errors come from
an audit hook and from RLIMIT_FSIZE, so no special rights are needed.

The result is benchmarks/results/crashes.json. The exit status is 1 if a result differs or an end has a wrong outcome.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import datetime
import errno
import importlib
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

os.environ |= {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}  # before JAX is imported

_FORK = multiprocessing.get_context('fork')  # imports take half of the time of a short run
RESULT = ROOT / 'benchmarks' / 'results' / 'crashes.json'
KINDS = ('SIGKILL', 'SIGTERM', 'full', 'read_only')
MOMENTS = ('save', 'evaluation', 'metrics', 'any')
LIMIT = 600  # seconds for a process; one that takes longer is ended, which counts as a wrong outcome
OTHERS = 180  # seconds in which all processes must end after one was ended
ENDS_OF_A_RUN = 4  # then it is left alone, so that it is complete one day
FLAGS = (
  '--config=configs/bandit_ppo.py', "--config.eval.tags=('Bandit',)", '--config.num_iterations=6',
  '--config.checkpoint.every=2', '--config.eval.every=3', '--config.train.groups=4', '--config.train.group_size=2',
  '--config.eval.groups=4', '--config.eval.group_size=2', '--config.eval.greedy_too=False',
  '--config.optimizer.mini_batch_size=8', '--config.optimizer.micro_batch_size=4', '--config.length_step=256',
  '--config.replay.groups=2', '--config.algorithm.tis_cap=2.0', '--config.algorithm.old_logprobs=trainer',
  '--config.compilation_cache=',
)  # fmt: skip
# What a process may write when it is ended in order; the line of JAX if the first process is gone.
_ERROR = re.compile(r'^error: |^interrupted|another task died', re.M)


@dataclasses.dataclass(frozen=True)
class End:
  """An end of a run.

  Attributes:
    kind: one of `KINDS`.
    moment: one of `MOMENTS`.
    count: the events of the moment up to the end, from 1; 0 for 'any'.
    delay: seconds between the event, or the start of the process, and the end.
    victim: the process that is ended; a disk is that of all processes.
  """

  kind: str
  moment: str
  count: int
  delay: float
  victim: int


def break_disk(fault: pathlib.Path, kind: str) -> None:
  """Makes the file that says so; in one step, because who sees it cannot write any more."""
  temporary = fault.with_suffix(f'.{os.getpid()}')
  temporary.write_text(kind)
  temporary.replace(fault)


# -- In a process of a run. --------------------------------------------------------------------------------------------


class Worker:
  """Counts the events of each moment in a process, and ends it at one of them."""

  def __init__(self, workdir: str, end: End | None, fault: str, counts: str):
    """Takes the end of this process, the file whose existence means a broken disk, and the file for the counts."""
    self._workdir, self._end, self._fault, self._counts_file = os.path.abspath(workdir), end, fault, counts
    self._counts = dict.fromkeys(MOMENTS, 0)
    self._evaluating, self._broken, self._lock = False, '', threading.Lock()

  def install(self) -> None:
    """Wraps the functions of the package."""
    from ragen_jax.agent.sampler_speaker import SamplerSpeaker
    from ragen_jax.evaluation.evaluator import Evaluator
    from ragen_jax.runs.metrics import MetricWriter

    evaluate, reply, write_line = Evaluator.__call__, SamplerSpeaker.reply, MetricWriter._write_line

    def evaluate_counted(evaluator, *args, **kwargs):
      self._evaluating = True
      try:
        return evaluate(evaluator, *args, **kwargs)
      finally:
        self._evaluating = False

    def reply_counted(speaker, *args, **kwargs):
      if self._evaluating:
        self.event('evaluation')
      return reply(speaker, *args, **kwargs)

    def write_line_counted(writer):
      if writer._changed:
        self.event('metrics', lambda: self._half_a_line(writer, write_line))
      write_line(writer)

    Evaluator.__call__, SamplerSpeaker.reply = evaluate_counted, reply_counted
    MetricWriter._write_line = write_line_counted
    sys.addaudithook(self.audit)

  def event(self, moment: str, before: Callable[[], None] = lambda: None) -> None:
    """Counts an event; `before` runs before the end if this is the one."""
    with self._lock:
      self._counts[moment] += 1
      hit = self._end is not None and moment == self._end.moment and self._counts[moment] == self._end.count
    if self._counts_file:
      pathlib.Path(self._counts_file).write_text(json.dumps(self._counts))
    if hit:
      before()
      if self._end.delay:
        threading.Timer(self._end.delay, self.strike).start()
      else:
        self.strike()

  def strike(self) -> None:
    """Ends the process, or breaks the disk."""
    if self._end.kind.startswith('SIG'):
      os.kill(os.getpid(), getattr(signal, self._end.kind))
    else:
      break_disk(pathlib.Path(self._fault), self._end.kind)
      self._see_broken_disk()

  def audit(self, event: str, args: tuple[Any, ...]) -> None:
    """Hook of the interpreter for each operation: counts changes of checkpoints, and fails on a broken disk."""
    path = self._changed_path(event, args)
    if path is None:
      return
    if '/checkpoints/' in path:
      self.event('save')
    self._see_broken_disk()
    if self._broken == 'read_only':
      raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
    if self._broken == 'full' and (event == 'os.mkdir' or (event == 'open' and not os.path.exists(path))):
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

  def _changed_path(self, event: str, args: tuple[Any, ...]) -> str | None:
    """The path in the workdir that an operation changes; None if it changes none."""
    if event == 'open':
      writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
      if not isinstance(args[0], str | bytes | os.PathLike) or not isinstance(args[2], int) or not args[2] & writes:
        return None
    elif event not in ('os.mkdir', 'os.rename', 'os.remove', 'os.rmdir', 'os.truncate', 'os.link', 'os.symlink'):
      return None
    path = os.path.abspath(os.fsdecode(args[0]))
    return path if path.startswith(self._workdir + os.sep) or path == self._workdir else None

  def _see_broken_disk(self) -> None:
    if not self._broken and os.path.exists(self._fault):
      self._broken = pathlib.Path(self._fault).read_text()
      resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # Python ignores SIGXFSZ, so that writes fail with EFBIG

  def _half_a_line(self, writer: Any, write_line: Callable[[Any], None]) -> None:
    if self._end.kind == 'SIGKILL':
      writer._file = _TornFile(writer._file, self.strike)
      write_line(writer)


class _TornFile:
  """A file of which a write stops half-way."""

  def __init__(self, file: Any, strike: Callable[[], None]):
    self._file, self._strike = file, strike

  def __getattr__(self, name: str) -> Any:
    return getattr(self._file, name)

  def write(self, content: bytes) -> None:
    self._file.write(content[: len(content) // 2])
    self._file.flush()
    self._strike()


def work(plan: dict[str, Any], arguments: list[str], output: int) -> None:
  """A process of a run: `main.py`, with an end; what it writes goes to a file descriptor. Never returns."""
  import jax

  from ragen_jax.__main__ import run

  os.dup2(output, 1)
  os.dup2(output, 2)
  status = 1
  try:
    jax.config.update('jax_compilation_cache_dir', plan['cache'])
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    end = End(**plan['end']) if plan['end'] else None
    Worker(plan['workdir'], end, plan['fault'], plan['counts']).install()
    sys.argv = ['main.py', *arguments]
    run()
    status = 0
  except SystemExit as e:
    status = e.code if isinstance(e.code, int) else int(e.code is not None)
  except BaseException:  # noqa: BLE001, as the interpreter does
    sys.excepthook(*sys.exc_info())
  atexit._run_exitfuncs()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def load_modules() -> None:
  """Imports what a run needs, once for all processes, which are forked. No backend of JAX is started."""
  importlib.import_module('transformers').AutoTokenizer  # noqa: B018, its attributes are imported when they are read
  for name in ('ragen_jax.__main__', 'ragen_jax.train', 'orbax.checkpoint'):
    importlib.import_module(name)


# -- The harness. ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Attempt:
  """What became of the processes of a run.

  Attributes:
    statuses: of the processes, negative numbers for signals; None for one that was still there after the limit.
    output: of each process.
    seconds: from the start to the last end.
  """

  statuses: list[int | None]
  output: list[str]
  seconds: float

  @property
  def complete(self) -> bool:
    """Whether all processes ended by themselves and without an error."""
    return all(status == 0 for status in self.statuses)


class Runs:
  """The runs of one number of processes."""

  def __init__(self, directory: pathlib.Path, processes: int, rng: random.Random):
    """Trains to the end once, for the numbers to compare with; raises RuntimeError if that fails."""
    self._directory, self._processes, self._rng = directory, processes, rng
    self._cache = directory / 'programs'
    directory.mkdir(parents=True, exist_ok=True)
    self.workdir = directory / 'never_ended'
    for again in (False, True):  # the first run compiles, the second is timed
      self.workdir = directory / f'never_ended_{int(again)}'
      attempt = self.attempt(None)
      if not attempt.complete:
        raise RuntimeError(f'a run that nobody ends fails with {attempt.statuses}: {attempt.output}')
    self.seconds = attempt.seconds
    self.expected = self.numbers()
    self.workdir = directory / 'never_ended_0'
    self.differences = differences(self.expected, self.numbers())
    self._counts = [json.loads((directory / f'counts{i}').read_text()) for i in range(processes)]

  def draw(self, kind: str, moment: str) -> End:
    """An end of this kind at a random event."""
    victim = 0 if moment == 'metrics' else self._rng.randrange(self._processes)  # only the first one writes metrics
    if moment == 'any':
      return End(kind, moment, 0, self._rng.uniform(0, self.seconds), victim)
    delay = self._rng.choice((0.0, self._rng.uniform(0, 0.02))) if moment == 'save' else 0.0
    return End(kind, moment, self._rng.randint(1, self._counts[victim][moment]), delay, victim)

  def attempt(self, end: End | None) -> Attempt:
    """Starts the run in `workdir`, ends it, and waits for all processes."""
    fault = self._directory / 'fault'
    fault.unlink(missing_ok=True)
    start, address = time.monotonic(), f'127.0.0.1:{_free_port()}'
    children, outputs, readers = [], [[] for _ in range(self._processes)], []
    for i in range(self._processes):
      own = end if end is not None and end.victim == i and end.moment != 'any' else None
      plan = {
        'workdir': str(self.workdir), 'cache': str(self._cache), 'fault': str(fault),
        'end': dataclasses.asdict(own) if own else None, 'counts': '' if end else str(self._directory / f'counts{i}'),
      }  # fmt: skip
      flags = [*FLAGS, f'--workdir={self.workdir}']
      if self._processes > 1:
        flags += [f'--coordinator={address}', f'--num_processes={self._processes}', f'--process_id={i}']
      read, write = os.pipe()
      child = _FORK.Process(target=work, args=(plan, flags, write))
      child.start()
      os.close(write)
      pipe = os.fdopen(read, errors='replace')
      reader = threading.Thread(target=lambda f=pipe, o=outputs[i]: o.extend(f), daemon=True)
      children.append(child)
      readers.append((reader, pipe))
    for reader, _ in readers:  # no thread may run while a process is forked
      reader.start()
    try:
      if end is not None and end.moment == 'any':
        children[end.victim].join(end.delay)
        self._strike(end, children, fault)
      limit, first = start + LIMIT, None
      while any(c.exitcode is None for c in children) and time.monotonic() < limit:
        if first is None and any(c.exitcode for c in children):
          first = time.monotonic()
          limit = min(limit, first + OTHERS)
        time.sleep(0.05)
      statuses = [c.exitcode for c in children]
    finally:
      for child in children:
        child.kill()
        child.join()
    for reader, pipe in readers:
      reader.join(10)
      pipe.close()
    return Attempt(statuses, [''.join(o) for o in outputs], time.monotonic() - start)

  @staticmethod
  def _strike(end: End, children: list[multiprocessing.process.BaseProcess], fault: pathlib.Path) -> None:
    """Ends the processes from outside."""
    if end.kind.startswith('SIG'):
      if children[end.victim].exitcode is None:
        os.kill(children[end.victim].pid, getattr(signal, end.kind))
      return
    break_disk(fault, end.kind)
    for child in children:
      with contextlib.suppress(ProcessLookupError):
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (0, 0))

  def numbers(self) -> dict[str, Any]:
    """See `numbers`, of the run in `workdir`; in a process of its own, because it starts a backend."""
    found = in_fork(lambda: numbers(self.workdir), self._directory / 'numbers.json')
    return {'numbers': 'cannot be read'} if found is None else found

  def begin(self, number: int) -> None:
    """Chooses a new workdir."""
    self.workdir = self._directory / f'run{number}'


def in_fork(function: Callable[[], Any], file: pathlib.Path) -> Any:
  """The JSON value of a function that starts a backend of JAX, which a process that forks must not do.

  The value passes through `file`; None if the function fails.
  """
  file.unlink(missing_ok=True)
  file.parent.mkdir(parents=True, exist_ok=True)
  child = _FORK.Process(target=lambda: file.write_text(json.dumps(function())))
  child.start()
  child.join(LIMIT)
  child.kill()
  child.join()
  return json.loads(file.read_text()) if file.exists() else None


def _free_port() -> int:
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


def mistake(end: End | None, attempt: Attempt) -> str:
  """What is wrong with the outcome of an attempt; '' if nothing is."""
  if None in attempt.statuses:
    return f'processes hang: {attempt.statuses}'
  if any('Traceback' in output for output in attempt.output):
    return 'a traceback was written'
  if end is None:
    return f'a run that nobody ends fails with {attempt.statuses}' if any(attempt.statuses) else ''
  if not any(attempt.statuses):  # it was complete before the end, or the end came after the last write
    return ''
  own = attempt.statuses[end.victim]
  allowed = {
    'SIGKILL': (-signal.SIGKILL,), 'SIGTERM': (143, -signal.SIGTERM), 'full': (2, 74), 'read_only': (2, 74),
  }[end.kind]  # fmt: skip
  if not (own in allowed or (len(attempt.statuses) > 1 and end.kind in ('full', 'read_only') and own != 0)):
    return f'process {end.victim} ended with {own}, and not with {" or ".join(map(str, allowed))}'
  for i, (status, output) in enumerate(zip(attempt.statuses, attempt.output, strict=True)):
    if status == 0:
      return f'process {i} ended with 0, although the run was not complete'
    if status in (1, 2, 74, 130, 143, -signal.SIGABRT) and not any(map(_ERROR.search, attempt.output)):
      return f'process {i} ended with {status} and no word: {output[-300:]}'
  return ''


def numbers(workdir: pathlib.Path) -> dict[str, Any]:
  """All that must be equal: digests of the arrays of the last checkpoint and of the episodes, and the metrics."""
  import numpy as np
  from benchmarks.same_numbers import digest, digests

  from ragen_jax.runs.checkpoints import Checkpointer
  from ragen_jax.runs.metrics import read_metrics
  from ragen_jax.runs.timing import MEASURED

  found: dict[str, Any] = {'steps': [line['step'] for line in read_metrics(workdir)]}
  for line in read_metrics(workdir):
    values = {name: repr(x) for name, x in line.items() if not name.startswith(MEASURED)}
    found |= {f'step {line["step"]}: {name}': x for name, x in values.items()}
  with Checkpointer(workdir, keep=1) as checkpointer:
    step = checkpointer.latest_step()
    record = json.loads((pathlib.Path(str(checkpointer.directory)) / str(step) / 'meta' / 'metadata').read_text())
    shapes = {name: re.fullmatch(r'(\w+)\[([\d,]*)\]', text).groups() for name, text in record['leaves'].items()}
    like = {
      name: np.zeros([int(n) for n in shape.split(',') if n], np.dtype(kind)) for name, (kind, shape) in shapes.items()
    }
    arrays, meta = checkpointer.restore(like)
  found |= {f'checkpoint {step}: {name}': digest(x.tobytes()) for name, x in arrays.items()}
  return found | {'meta': json.dumps(meta, sort_keys=True)} | digests(workdir / 'episodes')


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
  """One line for each number that differs."""
  names = [name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
  return [f'{name} is {found.get(name, "missing")} and not {expected.get(name, "missing")}' for name in names]


def harass(
  directory: pathlib.Path, processes: int, kills: int, rng: random.Random, write: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
  """Ends runs of some processes `kills` times; what happened, which `write` gets after each end too."""
  runs = Runs(directory, processes, rng)
  print(f'{processes} process(es): a run takes {runs.seconds:.0f} s', flush=True)
  pairs = [*itertools.product(KINDS, MOMENTS)]
  rng.shuffle(pairs)
  wanted = list(itertools.islice(itertools.cycle(pairs), kills))
  ends, mistakes, unequal, missed, number, of_run, compared = [], [], list(runs.differences), 0, 0, 0, 0
  found: dict[str, Any] = {}
  runs.begin(number)
  while wanted or of_run:
    end = runs.draw(*wanted[0]) if wanted and of_run < ENDS_OF_A_RUN else None
    attempt = runs.attempt(end)
    wrong = mistake(end, attempt)
    complete = attempt.complete
    if end is not None and not complete:
      wanted.pop(0)
      of_run += 1
      ends.append(dataclasses.asdict(end) | {'statuses': attempt.statuses, 'seconds': round(attempt.seconds, 1)})
    missed += end is not None and complete
    named = f'{end.kind} at {end.moment} {end.count or ""}, process {end.victim}' if end else 'left alone'
    print(f'run {number}, {named}: {attempt.statuses}, {attempt.seconds:.0f} s {wrong}', flush=True)
    if wrong:
      print(*attempt.output, sep='\n', flush=True)
      mistakes.append({'end': named, 'mistake': wrong, 'output': [output[-2000:] for output in attempt.output]})
    if complete:
      lines = [f'run {number}: {line}' for line in differences(runs.expected, runs.numbers())]
      unequal, compared = unequal + lines, compared + 1
      print(f'run {number}: {len(lines)} differences', *lines[:5], sep='\n  ', flush=True)
    if complete or (end is None and wrong) or missed > 2 * kills:
      number, of_run = number + 1, 0
      runs.begin(number)
    if missed > 2 * kills or len(mistakes) > kills:
      mistakes.append({'mistake': f'given up: {missed} ends came too late, {len(mistakes)} had a wrong outcome'})
      wanted, of_run = [], 0
    found = {
      'processes': processes, 'seconds_of_a_run': round(runs.seconds, 1), 'kills': len(ends), 'wanted': kills,
      'came_too_late': missed, 'runs_compared': compared, 'differences': unequal[:50], 'mistakes': mistakes,
      'ends': ends,
    }  # fmt: skip
    write(found)
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--kills', type=int, default=30, help='ends for each number of processes')
  parser.add_argument('--processes', default='1,2', help='numbers of processes of a run')
  parser.add_argument('--seed', type=int, default=0, help='of the ends')
  parser.add_argument('--quick', action='store_true', help='3 ends with one process')
  parser.add_argument('--out', default=str(RESULT), help='file of the result')
  parser.add_argument('--directory', help='keep the runs in this new directory; by default they are deleted')
  args = parser.parse_args()
  if args.quick:
    args.kills, args.processes = 3, '1'

  from benchmarks.learning_curves import hardware

  load_modules()
  start, machine, out, bad = time.monotonic(), None, pathlib.Path(args.out), 0

  def write(found: dict[str, Any]) -> None:
    """Replaces the entry of this number of processes in the file of results."""
    about = {
      'date': datetime.datetime.now(datetime.UTC).strftime('%Y-%m-%d'), 'seed': args.seed, 'hardware': machine,
      'minutes': round((time.monotonic() - start) / 60, 1), 'flags': FLAGS,
    }  # fmt: skip
    before = json.loads(out.read_text())['runs'] if out.exists() else []
    others = [entry for entry in before if entry['processes'] != found['processes']]
    runs = sorted([*others, about | found], key=lambda entry: entry['processes'])
    out.write_text(json.dumps({'command': 'python tools/crashes.py', 'runs': runs}, indent=1) + '\n')

  # Not TemporaryDirectory: the forked processes run its finalizer when they end.
  temporary = None if args.directory else tempfile.mkdtemp()
  try:
    directory = pathlib.Path(args.directory or temporary).resolve()
    machine = in_fork(hardware, directory / 'hardware.json')
    for processes in map(int, args.processes.split(',')):
      rng = random.Random(f'{args.seed} {processes}')
      found = harass(directory / f'processes{processes}', processes, args.kills, rng, write)
      bad += len(found['differences']) + len(found['mistakes'])
      print(f'{processes} process(es): {found["kills"]} ends; {bad} differences or wrong outcomes so far')
  finally:
    if temporary:
      shutil.rmtree(temporary, ignore_errors=True)
  sys.exit(bool(bad))


if __name__ == '__main__':
  main()
