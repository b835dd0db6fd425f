"""Runs of several processes: each process plays its own rows, and the update uses the rows of all.

Rows are divided over the mesh axes `data` and `fsdp` in order, so a process owns the rows of its devices, a contiguous
range. If the axis `tensor` spans several processes, they own the same rows and play identical episodes. During a
rollout, processes agree on shapes before each part of the replies is sampled. At its end, rows are gathered: every
process computes the same advantages and feeds its devices their part of each micro-batch.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import math
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from ragen_jax.distributed.sharding import row_sharding, row_shards
from ragen_jax.distributed.watchdog import Watchdog
from ragen_jax.utils import foreign, messages
from ragen_jax.utils.background import still_compiling
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.sizes import next_power

# Seconds without a heartbeat after which JAX ends all processes, without naming one. The watchdog is faster.
_JAX_SILENCE = 120

# The longest --connect_timeout, and seconds after it until JAX would give up by itself.
_LONGEST_CONNECT, _SPARE = 86_400, 60

_log = logging.getLogger(__name__)

_watchdog: Watchdog | None = None  # of this process, as JAX has one client of its key-value store


@dataclasses.dataclass(frozen=True)
class RowShare:
  """The shards of rows that a process owns."""

  shards: int = 1  # number of parts that the mesh divides rows into
  first: int = 0  # index of the first own shard
  own: int = 1  # number of own shards

  @property
  def parts(self) -> int:
    """Number of shares that all rows consist of."""
    return self.shards // self.own

  @property
  def index(self) -> int:
    """Index of this share."""
    return self.first // self.own


def row_share(mesh: Mesh | None) -> RowShare:
  """The share of this process; without a mesh, all rows.

  Raises UserError if the shares of processes would differ in size or would not be contiguous.
  """
  if mesh is None:
    return RowShare()
  shares = shares_of(np.vectorize(lambda d: d.process_index)(mesh.devices).reshape(row_shards(mesh), -1))
  if shares is None:
    raise UserError(
      f'mesh={dict(mesh.shape)}: gives the {jax.process_count()} processes unequal shares of the rows; '
      'choose mesh.tensor so that it divides the devices of a process, or is a multiple of them'
    )
  return shares[jax.process_index()]


def shares_of(process: np.ndarray) -> dict[int, RowShare] | None:
  """Shares by process; None if they differ in size, are not contiguous, or overlap partially.

  `process` is i32[shards, devices], the process of each device, by the shard of rows that the device holds.
  """
  shares = {}
  for p in np.unique(process).tolist():
    own = np.flatnonzero((process == p).any(axis=1))
    shares[p] = RowShare(len(process), int(own[0]), len(own))
    if own[-1] - own[0] + 1 != len(own) or len(process) % len(own) or own[0] % len(own):
      return None
  return shares if len({s.own for s in shares.values()}) == 1 else None


def connect(
  coordinator: str | None, num_processes: int | None, process_id: int | None, patience: float,
  connect_timeout: float = 300.0,
) -> None:  # fmt: skip
  """Joins this process to the run. Call before any other JAX call. Only process 0 then logs below WARNING.

  Args:
    coordinator: HOST:PORT of process 0, or 'auto' if JAX detects everything itself (TPU pods, Slurm, Open MPI); None
      for a run of one process.
    num_processes, process_id: None with 'auto' and without a coordinator.
    patience: seconds that processes wait for one that makes no progress; 0 for any time.
    connect_timeout: seconds until all processes must be connected. Later, this process ends with one line.

  Raises:
    UserError: the arguments are not consistent, or JAX does not accept them.
  """
  if not 0 <= patience < math.inf:
    raise UserError(f'--patience={patience}: must be a number of seconds, or 0 to wait for any time')
  if not 1 <= connect_timeout <= _LONGEST_CONNECT:
    raise UserError(f'--connect_timeout={connect_timeout}: must be from 1 to {_LONGEST_CONNECT} seconds')
  if not coordinator:
    if num_processes is not None or process_id is not None:
      raise UserError('--num_processes and --process_id need --coordinator=HOST:PORT')
    return
  if coordinator == 'auto':
    for flag, value in (('num_processes', num_processes), ('process_id', process_id)):
      if value is not None:
        raise UserError(f'--{flag}={value}: is detected with --coordinator=auto, and must not be given')
    arguments = {}
  else:
    if not re.fullmatch(r'.+:\d+', coordinator):
      raise UserError(f"--coordinator={coordinator}: must be the address of process 0 as HOST:PORT, or 'auto'")
    if num_processes is None or num_processes < 1:
      raise UserError(f'--num_processes={num_processes}: must be the number of processes of the run')
    if process_id is None or not 0 <= process_id < num_processes:
      raise UserError(f'--process_id={process_id}: must be the index of this process, from 0 to {num_processes - 1}')
    arguments = {'coordinator_address': coordinator, 'num_processes': num_processes, 'process_id': process_id}
  # The preemption service would catch SIGTERM, and this project does not query it.
  jax.config.update('jax_enable_preemption_service', False)
  timeout = int(connect_timeout) + _SPARE
  try:
    with _connecting(coordinator, connect_timeout):
      jax.distributed.initialize(**arguments, initialization_timeout=timeout, heartbeat_timeout_seconds=_JAX_SILENCE)
  except (RuntimeError, ValueError) as e:
    raise UserError(f'--coordinator={coordinator}: {" ".join(str(e).split())}') from e
  sys.excepthook = _on_error
  _watch(patience)
  if not is_first():
    logging.getLogger('ragen_jax').setLevel(logging.WARNING)


@contextlib.contextmanager
def _connecting(coordinator: str, limit: float) -> Iterator[None]:
  """Context manager: says what is waited for, and ends the process if the block takes longer than `limit` seconds.

  At its own time limit JAX would abort the process, with stack traces and without the address.
  """
  done = threading.Event()

  def watch() -> None:
    deadline = time.monotonic() + limit
    address = _address(coordinator)
    while address is None and not done.wait(0.1) and time.monotonic() < deadline:
      address = _address(coordinator)  # JAX detects it
    if done.is_set():
      return
    _log.info('waiting until all processes are connected at %s, %g s at most', address or 'auto', limit)
    if done.wait(deadline - time.monotonic()):
      return
    problem = _problem(address)
    with contextlib.suppress(OSError):
      os.write(2, f'error: --coordinator={coordinator}: {problem}; waited {limit:g} s (--connect_timeout)\n'.encode())
    os._exit(1)

  watcher = threading.Thread(target=watch, daemon=True, name='ragen_jax-connecting')
  watcher.start()
  try:
    yield
  finally:
    done.set()
    watcher.join()


def _address(coordinator: str) -> str | None:
  """HOST:PORT of process 0; None while JAX detects it, and if this JAX does not tell."""
  if coordinator != 'auto':
    return coordinator
  # JAX has no public name for the address that it has detected; without it, only the message says less.
  with contextlib.suppress(ImportError, AttributeError):
    from jax._src import distributed

    return distributed.global_state.coordinator_address
  return None


def _problem(address: str | None) -> str:
  """The reason why the processes are not connected."""
  if address is None:
    return 'the address of process 0 is not known'
  host, _, port = address.rpartition(':')
  try:
    socket.create_connection((host.strip('[]'), int(port)), timeout=10).close()
  except (OSError, ValueError) as e:  # ValueError: the name or the port cannot be one
    return f'process 0 cannot be reached at {address} ({getattr(e, "strerror", None) or e})'
  return f'process 0 answers at {address}, but not all processes have connected there'


class _Store:
  """JAX's key-value store. JAX has no public name for it, and Orbax has one."""

  _PREFIX = 'ragen_jax/watchdog/'

  def __init__(self):
    from orbax.checkpoint import multihost  # takes a second to import, and a run of one process has no store

    self._client = multihost.get_jax_distributed_client()

  def set(self, key: str, text: str) -> None:
    self._client.key_value_set(self._PREFIX + key, text, allow_overwrite=True)

  def all(self) -> dict[str, str]:
    return {key.removeprefix(self._PREFIX): text for key, text in self._client.key_value_dir_get(self._PREFIX)}


def _watch(patience: float) -> None:
  """Starts the watchdog of this process."""
  global _watchdog
  if jax.process_count() > 1:
    _watchdog = Watchdog(_Store(), jax.process_index(), jax.process_count(), patience=patience, end=_end)
    _watchdog.start()
    atexit.register(_watchdog.close)  # before JAX closes the store


def _end(message: str) -> None:
  """Ends this process although its main thread waits."""
  with contextlib.suppress(OSError):
    os.write(2, _last_words(message).encode())
  os._exit(1)


def _last_words(message: str) -> str:
  return f'error: {message}; the same command resumes from the last checkpoint, if there is one\n'


def mark_progress(phase: str = '') -> None:
  """Says that this process passes a point that all processes pass in the same order, see `Watchdog.passed`."""
  if _watchdog is not None:
    _watchdog.passed(phase)


def exit_process(status: int, together: bool = False, reason: str = '') -> None:
  """Ends the process with an exit status, and with the error `reason`, which the other processes name when they end.

  With `together`, all processes of the run leave now, so this one waits for the others. Without it, the process ends at
  once, since the others may be waiting for it. It also ends at once if a program is still being compiled in the
  background: compilers cannot be stopped, and the interpreter's own end would abort the process.
  """
  foreign.end_children()
  with contextlib.suppress(OSError, UserError):  # the error that ends the process is the one to show
    sys.stdout.flush()
  sys.stderr.flush()
  if jax.distributed.is_initialized():
    if _watchdog is not None:
      if reason and not together:
        _watchdog.fail(reason)
      _watchdog.close()
    if together:
      jax.distributed.shutdown()
    else:
      os._exit(status)
  if still_compiling():
    os._exit(status)
  sys.exit(status)


def _on_error(kind, error, trace) -> None:
  """Hook for uncaught exceptions: ends the process, which is how the other processes notice the error."""
  reason = str(error).partition('\n')[0]
  # JAX raises this error as a ValueError if it occurs during dispatch.
  if isinstance(error, jax.errors.JaxRuntimeError | ValueError) and re.search(
    'gloo|nccl|coordination|connection', reason, re.I
  ):
    missing = _watchdog.blame() if _watchdog is not None else ''
    sys.stderr.write(_last_words(missing or f'another process of this run has stopped or cannot be reached: {reason}'))
    exit_process(1)
  else:
    traceback.print_exception(kind, error, trace)
    exit_process(1, reason=f'{kind.__name__}: {reason}')


def is_first() -> bool:
  """Whether this is process 0, which writes files and logs."""
  return jax.process_index() == 0


def largest(numbers: Sequence[int]) -> list[int]:
  """The maximum of each number over all processes. All processes must call."""
  if jax.process_count() == 1:
    return list(numbers)
  mark_progress()
  return multihost_utils.process_allgather(np.asarray(numbers, np.int32)).max(axis=0).tolist()


@contextlib.contextmanager
def same_errors() -> Iterator[None]:
  """Context manager: raises a `UserError` of any process in all processes, so that none waits. All must enter it."""
  if jax.process_count() == 1:
    yield
    return
  error = None
  try:
    yield
  except UserError as e:
    error = (str(e), e.status)
  errors = [e for e in gather(error) if e is not None]
  if errors:
    message, status = errors[0]
    kind = next(kind for kind in (UserError, *UserError.__subclasses__()) if kind.status == status)
    shared = kind(message)
    shared.everywhere = True
    raise shared


def raised_by_all(error: UserError) -> bool:
  """Whether all processes of the run raise this error at the same place, so that they can still act together."""
  return jax.process_count() == 1 or error.everywhere


def gather(value: Any, types: Sequence[type] = ()) -> list[Any]:
  """The values that the processes pass, in the order of processes; all must call. Arguments as for `messages.pack`."""
  if jax.process_count() == 1:
    return [value]
  mark_progress()
  data = np.frombuffer(messages.pack(value, types), np.uint8)
  lengths = multihost_utils.process_allgather(np.asarray([len(data)], np.int64)).ravel()
  # Padded to powers of two, because every size is a program of its own.
  padded = np.pad(data, (0, next_power(int(lengths.max())) - len(data)))
  parts = multihost_utils.process_allgather(padded).reshape(len(lengths), -1)
  return [messages.unpack(part[:n].tobytes(), types) for part, n in zip(parts, lengths, strict=True)]


def gather_shares(value: Any, share: RowShare, types: Sequence[type] = ()) -> list[Any]:
  """The values of all shares, in the order of rows; otherwise as `gather`.

  If several processes own a share, the first one's value is used.
  """
  shares = {}
  for index, part in gather((share.index, value), types):
    shares.setdefault(index, part)
  return [shares[i] for i in range(share.parts)]


def place_own_rows(tree: Any, mesh: Mesh, share: RowShare, axis: int = 0) -> Any:
  """Puts host arrays of the rows of this process, along `axis`, on the mesh, as parts of arrays of all rows."""
  sharding = row_sharding(mesh, axis)
  if jax.process_count() == 1:
    return jax.device_put(tree, sharding)

  def place(x):
    x = np.asarray(x)
    own = x.shape[axis]
    total, offset = own * share.parts, own * share.index

    def part(index):
      start, stop, _ = index[axis].indices(total)
      return x[(*index[:axis], slice(start - offset, stop - offset))]

    return jax.make_array_from_callback((*x.shape[:axis], total, *x.shape[axis + 1 :]), sharding, part)

  return jax.tree.map(place, tree)


def own_rows(tree: Any) -> Any:
  """Copies the rows of this process to the host, from arrays whose rows are divided over the mesh. All must call."""
  mark_progress()

  def fetch(x):
    if x.is_fully_addressable:
      return jax.device_get(x)
    parts = {s.index[0].indices(x.shape[0])[0]: s.data for s in x.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])

  return jax.tree.map(fetch, tree)


def all_rows(tree: Any) -> Any:
  """Copies all rows to the host of every process. All must call."""
  if jax.process_count() == 1:
    return jax.device_get(tree)
  mark_progress()
  return multihost_utils.process_allgather(tree, tiled=True)
