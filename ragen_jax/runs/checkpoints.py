"""Checkpoints of the training state.

<workdir>/checkpoints/<step>/           one Orbax checkpoint per step: the arrays, a JSON `meta`, and checksums of both
<workdir>/damaged_checkpoints/<step>/   checkpoints that did not match their checksums when a run was resumed
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import jax
import orbax.checkpoint as ocp

from ragen_jax.distributed import processes
from ragen_jax.runs import checksums
from ragen_jax.runs.checkpoint_leaves import (
  PyTree,
  describe_leaf,
  empty_array,
  first_difference,
  named_leaves,
  restore_target,
)
from ragen_jax.runs.staging import StagedWorkdir, move_directory
from ragen_jax.runs.store_retries import until_reached
from ragen_jax.runs.stores import StoreError
from ragen_jax.utils.errors import DiskError, StoreAway, UserError, describe_error

_log = logging.getLogger(__name__)

_MANIFEST = 'manifest.ocdbt'  # of Orbax, without which the arrays of a checkpoint cannot be read
_UNFINISHED = '*.orbax-checkpoint-tmp*'  # Orbax's names of checkpoints that are not finished


class Checkpointer:
  """Saves and restores a pytree of arrays, synchronously and atomically.

  All processes of a run call all methods in the same order, on one shared `workdir`. Opening a workdir writes nothing,
  so another process can evaluate a run while it trains. A save writes to a temporary directory and then renames it;
  older checkpoints are deleted after that. For workdirs in a bucket see staging.py.
  """

  def __init__(self, workdir: str | os.PathLike[str], keep: int, save_best: str | None = None):
    """Opens the checkpoints of `workdir`; the directory need not exist yet.

    The `keep` newest checkpoints are kept and, if `save_best` names a metric such as 'eval/success', the one with its
    highest value (the newest of equal ones). Those that were saved as `extra` count among the `keep` only where others
    are missing; the newest of all stays in any case. Raises UserError if `keep` is below 1, or the directory cannot be
    read.
    """
    if keep < 1:
      raise UserError(f'keep is {keep}; the number of checkpoints to keep must be 1 or more')
    self._staged = workdir if isinstance(workdir, StagedWorkdir) else None
    root = self._staged.orbax_directory if self._staged else os.path.join(os.path.abspath(workdir), 'checkpoints')
    self._shown = f'{workdir}/checkpoints' if self._staged else root  # for messages
    self._save_best = save_best
    self._prepared = False  # whether `_prepare` has run
    self._extra: set[int] = set()  # steps that were saved as extra
    options = ocp.CheckpointManagerOptions(
      create=False,
      enable_async_checkpointing=False,
      save_root_metadata=False,
      preservation_policy=_KeepLastAndBest(keep, self._extra, self.best_step),
    )
    try:
      self._manager = ocp.CheckpointManager(root, options=options)
    except OSError as e:
      raise UserError(f'checkpoints in {self._shown} cannot be read: {e.strerror or e}') from e
    self.directory = self._manager.directory
    self._verified: set[int] = set()  # steps whose checksums matched
    self._unread: set[int] = set()  # steps whose record could not be read, as a warning said
    self._scores: dict[int, float | None] = {}
    for step in self.steps():
      record = self._read_record(step)
      self._scores[step] = self._score(record.get('metrics', {}))
      if record.get('extra'):
        self._extra.add(step)

  def steps(self) -> list[int]:
    """The steps with a complete checkpoint, ascending."""
    return sorted(self._manager.all_steps())

  def latest_step(self) -> int | None:
    """The last step with a complete checkpoint; None if there is none."""
    return max(self.steps(), default=None)

  def best_step(self) -> int | None:
    """The step with the highest `save_best` metric, the last of equal ones; None if no checkpoint has the metric."""
    scored = [(score, step) for step, score in self._scores.items() if score is not None and step in self.steps()]
    return max(scored)[1] if scored else None

  def save(
    self,
    step: int,
    state: PyTree,
    meta: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    extra: bool = False,
  ) -> None:
    """Writes the checkpoint after `step` iterations, then deletes the checkpoints that are no longer kept.

    If `step` is the last saved step, its checkpoint is not changed.

    Args:
      state: pytree of `jax.Array` and `np.ndarray`, any dtype but typed PRNG keys (save `jax.random.key_data`).
      meta: values that are not arrays, as JSON.
      metrics: name -> value at this step; `save_best` names one of them.
      extra: whether the checkpoint is one that a run without interruptions does not have.

    Raises:
      DiskError: the disk is full or not writable. Earlier checkpoints stay intact, here and below.
      StoreAway: the bucket cannot be reached for some minutes.
      UserError: a later step is already saved, or the bucket refuses the request.
      TypeError: a leaf is not an array, or `meta` is not JSON.
    """
    latest = self.latest_step()
    if step == latest:
      _log.info('step %d is saved already in %s', step, self._shown)
      return
    if latest is not None and step < latest:
      raise UserError(
        f'checkpoint of step {step} was not saved: {self._shown} already has step {latest}; '
        'move the later checkpoints away or choose another --workdir'
      )
    leaves = named_leaves(state)
    record = {
      'meta': dict(meta or {}),
      'metrics': {name: float(value) for name, value in (metrics or {}).items()},
      'leaves': {name: describe_leaf(leaf) for name, leaf in leaves.items()},
      'extra': extra,
    }
    record = json.loads(json.dumps(record))  # raises TypeError before anything is written
    arguments = ocp.args.Composite(
      state=ocp.args.PyTreeSave({name: leaf for name, leaf in leaves.items() if leaf.size}),
      meta=ocp.args.JsonSave(record),
    )
    # The preservation policy reads both during the save.
    self._scores[step] = self._score(record['metrics'])
    if extra:
      self._extra.add(step)
    try:
      self._before_writing()
      flaw = self._write(step, arguments)
      self._publish(step)
    except (OSError, ValueError) as e:
      reason = self._reason(e)
      if reason is None:
        raise
      _remove_unfinished(self.directory)
      intact = f'step {latest} is intact' if latest is not None else 'there is no earlier checkpoint'
      raise self._failed(e, f'checkpoint of step {step} was not saved in {self._shown}: {reason}; {intact}') from e
    if flaw:
      _log.warning(
        'step %d is saved in %s, but without checksums or with older checkpoints left: %s', step, self._shown, flaw
      )

  def _write(self, step: int, arguments: ocp.args.Composite) -> str | None:
    """Writes a checkpoint and its checksums where Orbax writes, and deletes older ones.

    Returns what failed after the checkpoint was written; None if nothing failed. Raises OSError, ValueError or
    UserError if the checkpoint was not written.
    """
    try:
      with _without_orbax_tracebacks():
        self._prepare()
        self._manager.save(step, args=arguments, force=True)
      if jax.process_index() == 0:
        self._check_written(step)
        checksums.write(self.directory / str(step))
    except (OSError, ValueError) as e:
      reason = self._reason(e)
      if reason is None or step not in self.steps():
        raise
      return reason
    return None

  def _check_written(self, step: int) -> None:
    """Raises UserError, and removes the checkpoint, if Orbax has left it without what it reads it by."""
    directory = self.directory / str(step)
    if not (directory / 'state' / _MANIFEST).exists():
      directory.rmtree()
      self._manager.reload()
      raise UserError(f'checkpoint of step {step} was not saved in {self._shown}: Orbax wrote no {_MANIFEST}')

  def amend(self, meta: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Replaces `meta` and the metrics of the last checkpoint, whose arrays stay; arguments as for `save`.

    Raises DiskError and StoreAway as `save`, and UserError if the checkpoint cannot be read; it stays intact.
    """
    step = self._existing(None)
    directory, metrics = self.directory / str(step), {name: float(value) for name, value in metrics.items()}
    record = self._read_record(step)
    if 'leaves' not in record:
      raise UserError(self._unreadable(step, 'its list of arrays is missing'))
    if jax.process_index() == 0:
      try:
        self._before_writing()
        # A checkpoint without checksums is valid, one with checksums of other files is not.
        (directory / checksums.NAME).unlink(missing_ok=True)
        text = json.dumps(record | {'meta': dict(meta), 'metrics': metrics})
        checksums.replace_text(directory / 'meta' / 'metadata', text)
        checksums.write(directory)
        self._publish(step)
      except OSError as e:
        message = f'checkpoint of step {step} in {self._shown} was not changed: {e.strerror or e}'
        raise self._failed(e, message) from e
    self._scores[step] = self._score(metrics)

  def restore(
    self, state_like: PyTree, step: int | None = None, partial: bool = False
  ) -> tuple[PyTree, dict[str, Any]]:
    """Reads a checkpoint, by default the last one, bit for bit: the state and its saved `meta`.

    Args:
      state_like: pytree of the saved structure. Its leaves give shape, dtype and sharding: `jax.Array` or
        `jax.ShapeDtypeStruct` (without a sharding: the first local device), or `np.ndarray` to get NumPy arrays. The
        mesh may differ from that of the save.
      partial: read only the leaves of `state_like`, such as `{'params': ...}` without the optimiser's state.

    Raises:
      UserError: the checkpoint does not exist, is damaged or cannot be read, or a leaf differs in name, shape or dtype.
    """
    step = self._existing(step)
    self.verify(step)
    record = self._read_record(step)
    if 'leaves' not in record:
      raise UserError(self._unreadable(step, 'its list of arrays is missing'))
    leaves = named_leaves(state_like)
    difference = first_difference(record['leaves'], leaves, partial)
    if difference:
      raise UserError(f'checkpoint of step {step} in {self._shown} does not fit this model: {difference}')
    targets = {name: restore_target(leaf) for name, leaf in leaves.items()}
    wanted = {name: target for name, target in targets.items() if target.size}
    arguments = ocp.args.PyTreeRestore(
      item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
    )
    try:
      with _without_orbax_tracebacks():
        restored = self._manager.restore(step, args=ocp.args.Composite(state=arguments))['state'] if wanted else {}
    except (OSError, ValueError, KeyError) as e:
      raise UserError(self._unreadable(step, _disk_error(e) or str(e).partition('\n')[0])) from e
    restored |= {name: empty_array(target) for name, target in targets.items() if not target.size}
    state = jax.tree.unflatten(jax.tree.structure(state_like), [restored[name] for name in leaves])
    return state, record['meta']

  def meta(self, step: int | None = None) -> dict[str, Any]:
    """Reads the `meta` of a checkpoint (None: the last) without its arrays; raises UserError as `restore` does."""
    step = self._existing(step)
    record = self._read_record(step)
    if 'meta' not in record:
      damage = self._find_damage(step) if jax.process_index() == 0 else None
      raise UserError(self._unreadable(step, damage or 'its meta is missing'))
    return record['meta']

  def set_damaged_aside(self) -> None:
    """Moves the newest checkpoints away until one matches its checksums; logs a warning for each moved checkpoint.

    A resumed run calls this before `latest_step`. With several processes, the first process calls it, and the others
    call `reload` afterwards. Checkpoints without checksums (of older versions) are accepted. Raises UserError if no
    checkpoint is left, or one cannot be moved.
    """
    while (step := self.latest_step()) is not None:
      damage = self._find_damage(step)
      if damage is None:
        return
      shown = self._set_aside(step, damage)
      earlier = self.latest_step()
      if earlier is None:
        raise UserError(
          f'checkpoint of step {step} in {self._shown} is damaged: {damage}; there is no earlier checkpoint. It '
          f'was moved to {shown}. The same command starts from the beginning; another --workdir keeps the old files'
        )
      _log.warning(
        'checkpoint of step %d is damaged (%s) and was moved to %s; resuming from step %d', step, damage, shown, earlier
      )

  def intact_best_step(self) -> int | None:
    """The best step whose checkpoint matches its checksums; None if no such checkpoint has the `save_best` metric.

    All processes call it, and get the same step. Damaged checkpoints are moved away, with a warning for each, as in
    `set_damaged_aside`, and do not count as the best or the latest any more. All processes raise UserError if one
    cannot be moved, or a bucket cannot be read.
    """
    self._verified.clear()  # files may have changed since the run began
    with processes.same_errors():
      while processes.is_first() and (step := self.best_step()) is not None and (damage := self._find_damage(step)):
        shown, other = self._set_aside(step, damage), self.best_step()
        left = 'no other checkpoint has a score' if other is None else f'the best of the others is step {other}'
        _log.warning('checkpoint of step %d is damaged (%s) and was moved to %s; %s', step, damage, shown, left)
    self.reload()
    return processes.gather(self.best_step())[0]

  def _set_aside(self, step: int, damage: str) -> str:
    """Moves a damaged checkpoint away. Returns its new place, for messages; raises UserError."""
    shown = f'{os.path.dirname(self._shown)}/damaged_checkpoints/{step}'
    failed = f'checkpoint of step {step} in {self._shown} is damaged: {damage}; moving it to {shown} failed'
    try:
      if self._staged:
        until_reached(functools.partial(self._staged.set_checkpoint_aside, step), str(self._staged))
      else:
        directory = pathlib.Path(self.directory)
        move_directory(directory / str(step), directory.parent / 'damaged_checkpoints' / str(step))
    except OSError as e:
      raise self._failed(e, f'{failed}: {e.strerror or e}') from e
    self.reload()
    if step in self.steps():
      raise UserError(failed)
    return shown

  def verify(self, step: int) -> None:
    """Raises UserError if a checkpoint's files do not match their checksums.

    Only the first process reads the files, so callers must share its error (`processes.same_errors`).
    """
    if jax.process_index() == 0 and (damage := self._find_damage(step)):
      raise UserError(self._unreadable(step, damage))

  def reload(self) -> None:
    """Reads the list of steps again, after another process changed it."""
    self._manager.reload()

  def _find_damage(self, step: int) -> str | None:
    """A description of the damage of a checkpoint's files; None if they match their checksums or have none."""
    if step in self._verified:
      return None
    if self._staged:
      try:
        until_reached(functools.partial(self._staged.fetch_checkpoint, step), str(self._staged))
      except StoreError as e:
        raise e.as_user_error(self._unreadable(step, str(e))) from e
    directory = self.directory / str(step)
    if not checksums.exist(directory):
      _log.info('checkpoint of step %d in %s has no checksums; it is read without them', step, self._shown)
    damage = checksums.find_damage(directory)
    if damage is None:
      self._verified.add(step)
    return damage

  def close(self) -> None:
    """Closes Orbax's manager. Saves are synchronous, so none is pending."""
    self._manager.close()

  def __enter__(self) -> Checkpointer:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()

  def _score(self, metrics: Mapping[str, float]) -> float | None:
    value = metrics.get(self._save_best) if self._save_best else None
    return None if value is None or math.isnan(value) else value

  def _existing(self, step: int | None) -> int:
    steps = self.steps()
    if not steps:
      raise UserError(f'there is no checkpoint in {self._shown}')
    if step is not None and step not in steps:
      raise UserError(f'there is no checkpoint of step {step} in {self._shown}; it has {", ".join(map(str, steps))}')
    return steps[-1] if step is None else step

  def _read_record(self, step: int) -> dict[str, Any]:
    """The JSON record of a checkpoint; {} if it cannot be read (an interrupted deletion, a damaged disk)."""
    try:
      return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))['meta']
    except (OSError, ValueError, KeyError) as e:
      if step not in self._unread:
        self._unread.add(step)
        _log.warning('the meta of checkpoint %s/%d cannot be read: %s', self._shown, step, e)
      return {}

  def _unreadable(self, step: int, reason: str) -> str:
    others = [s for s in self.steps() if s != step]
    use = f'use step {others[-1]}' if others and others[-1] < step else 'go on without it'
    advice = f'; move {self._shown}/{step} away to {use}' if others else ''
    return f'checkpoint of step {step} in {self._shown} cannot be read: {reason}{advice}'

  def _before_writing(self) -> None:
    """Copies the files that belong to the next checkpoint to the bucket, if the workdir is in one."""
    if self._staged and jax.process_index() == 0:
      until_reached(self._staged.before_checkpoint, str(self._staged))

  def _publish(self, step: int) -> None:
    """Copies a checkpoint to the bucket, if the workdir is in one and Orbax does not write there itself."""
    if self._staged and jax.process_index() == 0:
      until_reached(functools.partial(self._staged.publish_checkpoint, step), str(self._staged))

  def _reason(self, error: Exception) -> str | None:
    """Why a write failed: the disk or a bucket; None for other errors of a workdir on disk."""
    if isinstance(error, StoreError):
      return str(error)
    return _disk_error(error) or (describe_error(error) if self._staged else None)

  def _failed(self, error: Exception, message: str) -> UserError:
    """The error of a write that failed, by the place that failed: the disk, or a bucket."""
    if isinstance(error, StoreError):
      return error.as_user_error(message)
    return StoreAway(message) if self._staged and _disk_error(error) is None else DiskError(message)

  def _prepare(self) -> None:
    """Creates the directory before the first save, and removes unfinished checkpoints of earlier processes."""
    if not self._prepared and jax.process_index() == 0:
      self.directory.mkdir(parents=True, exist_ok=True)
      _remove_unfinished(self.directory)
    self._prepared = True


class _KeepLastAndBest:
  """Preservation policy for Orbax: the last one, the last `keep` that are not extra, and the best one.

  Orbax's own `BestN` reads metrics that Orbax saved. The metrics of this package are in `meta`, also in older
  checkpoints.
  """

  def __init__(self, keep: int, extra: Set[int], best_step: Callable[[], int | None]):
    self._keep = keep
    self._extra = extra  # grows
    self._best_step = best_step

  def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
    del context
    steps = [info.step for info in checkpoints]
    kept = {*sorted(steps, key=lambda step: (step not in self._extra, step))[-self._keep :]}
    kept |= {max(steps, default=None), self._best_step()}
    return [info.step in kept for info in checkpoints]


def _remove_unfinished(directory: Any) -> None:
  """Deletes the files of interrupted saves; only the first process of a run deletes."""
  if jax.process_index() == 0:
    try:
      for path in directory.glob(_UNFINISHED):
        path.rmtree()
    except OSError as e:
      _log.warning('unfinished checkpoints in %s could not be removed: %s', directory, e)


def _disk_error(error: BaseException | None) -> str | None:
  """The text of a file-system error, such as 'No space left on device', from Python or tensorstore; None for others."""
  while error is not None:
    if isinstance(error, OSError) and error.errno is not None:
      return os.strerror(error.errno)
    code = re.search(r"os_error_code='(\d+)'", str(error))  # tensorstore raises ValueError with the errno in its text
    if code:
      return os.strerror(int(code[1]))
    error = error.__cause__ or error.__context__
  return None


@contextlib.contextmanager
def _without_orbax_tracebacks() -> Iterator[None]:
  """Hides the tracebacks of Orbax's and TensorStore's threads for errors that `save` and `restore` raise as one line.

  After an error, those of TensorStore stay hidden: its threads complete operations at any time, and then print that the
  event loop, which Orbax closed when the first operation failed, is closed.
  """

  def keep(record: logging.LogRecord) -> bool:
    return 'orbax' not in pathlib.PurePath(record.pathname).parts

  logger, hook = logging.getLogger('absl'), sys.unraisablehook
  logger.addFilter(keep)
  if getattr(hook, 'func', None) is not _report_unless_loop_closed:
    sys.unraisablehook = functools.partial(_report_unless_loop_closed, hook)
  try:
    yield
    sys.unraisablehook = hook
  finally:
    logger.removeFilter(keep)


def _report_unless_loop_closed(report: Callable[[Any], None], unraisable: Any) -> None:
  """A `sys.unraisablehook`."""
  if not (isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == 'Event loop is closed'):
    report(unraisable)
