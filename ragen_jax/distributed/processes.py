"""Many processes, one program: each plays its own rows, and the update sees those of all.

Rows are divided over the mesh's `data` and `fsdp` axes in order, so a process owns the rows of its devices, which are a
contiguous range. Where `tensor` reaches over several processes they own the same rows and play them alike. A rollout
talks to the other processes once a turn, to agree on shapes; its end gathers the rows, after which every process
computes the same advantages and feeds its devices their part of each micro-batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pickle
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from ragen_jax.distributed.sharding import row_sharding, row_shards
from ragen_jax.utils.errors import UserError

# Seconds after which a process that gives no sign of life counts as dead. A collective learns of a death by the closed
# connection, but a barrier (in a checkpoint), or one whose machine is gone, only by this.
_SILENCE = 60


@dataclasses.dataclass(frozen=True)
class RowShare:
  """Which shards of the rows this process owns.

  Attributes:
    shards: in how many parts the mesh divides rows.
    first: the first of its own.
    own: how many are its own.
  """

  shards: int = 1
  first: int = 0
  own: int = 1

  @property
  def parts(self) -> int:
    """How many such shares make the whole."""
    return self.shards // self.own

  @property
  def index(self) -> int:
    """Which of them this is."""
    return self.first // self.own


def row_share(mesh: Mesh | None) -> RowShare:
  """The share of this process.

  Raises:
    UserError: the mesh mixes the devices of processes, so that shares differ in size or are not contiguous.
  """
  if mesh is None:
    return RowShare()
  shares = shares_of(np.vectorize(lambda d: d.process_index)(mesh.devices).reshape(row_shards(mesh), -1))
  if shares is None:
    raise UserError(
      f'mesh={dict(mesh.shape)}: gives the {jax.process_count()} processes unlike shares of the rows; '
      'choose mesh.tensor so that it divides the devices of a process, or is a multiple of them'
    )
  return shares[jax.process_index()]


def shares_of(process: np.ndarray) -> dict[int, RowShare] | None:
  """The share of every process.

  Args:
    process: i32[shards, devices], the process of each device that holds a shard of the rows.

  Returns:
    By process; None where they differ in size, are not contiguous, or overlap in part.
  """
  shares = {}
  for p in np.unique(process).tolist():
    own = np.flatnonzero((process == p).any(axis=1))
    shares[p] = RowShare(len(process), int(own[0]), len(own))
    if own[-1] - own[0] + 1 != len(own) or len(process) % len(own) or own[0] % len(own):
      return None
  return shares if len({s.own for s in shares.values()}) == 1 else None


def connect(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
  """Joins the processes of a run; before anything else of JAX. All but the first then tell of warnings only.

  Args:
    coordinator: HOST:PORT of process 0, or 'auto' where JAX finds everything itself (TPU pods, Slurm, Open MPI); None
      for a run of one process, and then so are the others.
    num_processes: how many there are; None with 'auto'.
    process_id: which this is, from 0; None with 'auto'.

  Raises:
    UserError: the numbers do not fit, or the others are not found.
  """
  if not coordinator:
    if num_processes is not None or process_id is not None:
      raise UserError('--num_processes and --process_id need --coordinator=HOST:PORT')
    return
  if coordinator == 'auto':
    for flag, value in (('num_processes', num_processes), ('process_id', process_id)):
      if value is not None:
        raise UserError(f'--{flag}={value}: is found out with --coordinator=auto, and must not be given')
    arguments = {}
  else:
    if not re.fullmatch(r'.+:\d+', coordinator):
      raise UserError(f"--coordinator={coordinator}: must be the address of process 0 as HOST:PORT, or 'auto'")
    if num_processes is None or num_processes < 1:
      raise UserError(f'--num_processes={num_processes}: must say how many processes the run has')
    if process_id is None or not 0 <= process_id < num_processes:
      raise UserError(f'--process_id={process_id}: must say which process this is, from 0 to {num_processes - 1}')
    arguments = {'coordinator_address': coordinator, 'num_processes': num_processes, 'process_id': process_id}
  # It would catch SIGTERM, and nothing here asks it whether one came.
  jax.config.update('jax_enable_preemption_service', False)
  try:
    jax.distributed.initialize(**arguments, heartbeat_timeout_seconds=_SILENCE)
  except (RuntimeError, ValueError) as e:
    raise UserError(f'--coordinator={coordinator}: {" ".join(str(e).split())}') from e
  sys.excepthook = _on_error
  if not is_first():
    logging.getLogger('ragen_jax').setLevel(logging.WARNING)


def leave(status: int, together: bool = False) -> None:
  """Ends the process; one of several waits for the others only where all leave, as they may be waiting for it."""
  sys.stdout.flush()
  sys.stderr.flush()
  if jax.distributed.is_initialized():
    if together:
      jax.distributed.shutdown()
    else:
      os._exit(status)
  sys.exit(status)


def _on_error(kind, error, trace) -> None:
  """For an exception that nothing caught: the others must hear of it by this process's end."""
  reason = str(error).partition('\n')[0]
  # Of dispatch, JAX raises the same as a ValueError.
  if isinstance(error, jax.errors.JaxRuntimeError | ValueError) and re.search(
    'gloo|nccl|coordination|connection', reason, re.I
  ):
    sys.stderr.write(f'error: another process of this run has stopped or cannot be reached: {reason}\n')
  else:
    traceback.print_exception(kind, error, trace)
  leave(1)


def is_first() -> bool:
  """Whether this process is the one that writes and talks."""
  return jax.process_index() == 0


def largest(numbers: Sequence[int]) -> list[int]:
  """Of each number the largest that any process has. All processes must call."""
  if jax.process_count() == 1:
    return list(numbers)
  return multihost_utils.process_allgather(np.asarray(numbers, np.int32)).max(axis=0).tolist()


@contextlib.contextmanager
def same_errors() -> Iterator[None]:
  """A `UserError` of any process becomes one of all, so that none waits for the others. All must get here."""
  if jax.process_count() == 1:
    yield
    return
  error = None
  try:
    yield
  except UserError as e:
    error = str(e)
  errors = [e for e in gather(error) if e is not None]
  if errors:
    raise UserError(errors[0], everywhere=True)


def gather(value: Any) -> list[Any]:
  """What each process passes, in the order of the processes. All must call; values are pickled."""
  if jax.process_count() == 1:
    return [value]
  data = np.frombuffer(pickle.dumps(value), np.uint8)
  lengths = multihost_utils.process_allgather(np.asarray([len(data)], np.int64)).ravel()
  # Powers of two, as every size is a program.
  padded = np.pad(data, (0, (1 << (int(lengths.max()) - 1).bit_length()) - len(data)))
  parts = multihost_utils.process_allgather(padded).reshape(len(lengths), -1)
  return [pickle.loads(part[:n].tobytes()) for part, n in zip(parts, lengths, strict=True)]


def gather_shares(value: Any, share: RowShare) -> list[Any]:
  """What the owners of the shares pass, in the order of the rows; of several owners of one share, the first counts."""
  shares = {}
  for index, part in gather((share.index, value)):
    shares.setdefault(index, part)
  return [shares[i] for i in range(share.parts)]


def place_own_rows(tree: Any, mesh: Mesh, share: RowShare) -> Any:
  """Puts host arrays of this process's rows [b, ...] on the mesh, as arrays of all rows."""
  if jax.process_count() == 1:
    return jax.device_put(tree, row_sharding(mesh))

  def place(x):
    x = np.asarray(x)
    total, offset = len(x) * share.parts, len(x) * share.index

    def part(index):
      start, stop, _ = index[0].indices(total)
      return x[start - offset : stop - offset]

    return jax.make_array_from_callback((total, *x.shape[1:]), row_sharding(mesh), part)

  return jax.tree.map(place, tree)


def own_rows(tree: Any) -> Any:
  """The rows of this process, as host arrays, from arrays whose rows are divided over the mesh."""

  def fetch(x):
    if x.is_fully_addressable:
      return jax.device_get(x)
    parts = {s.index[0].indices(x.shape[0])[0]: s.data for s in x.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])

  return jax.tree.map(fetch, tree)


def all_rows(tree: Any) -> Any:
  """All rows, as host arrays, on every process. All must call."""
  if jax.process_count() == 1:
    return jax.device_get(tree)
  return multihost_utils.process_allgather(tree, tiled=True)
