"""Checkpoints of the training state, and the record of the config that a workdir belongs to.

<workdir>/checkpoints/<step>/   one Orbax checkpoint a step: the arrays and a JSON `meta`
<workdir>/config.json           the config of the run that lives here
<workdir>/.lock                 held by the run that writes here now
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging as python_logging
import math
import os
import pathlib
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from ragen_jax.utils.errors import UserError

PyTree = Any

_TEMPORARY = '*.orbax-checkpoint-tmp*'  # how Orbax names what it has not finished


class Checkpointer:
  """Saves and restores a pytree of arrays, synchronously and atomically.

  Every process of a run calls every method, in the same order, on one shared `workdir`. Opening a workdir changes
  nothing in it, so that a run can be evaluated from another process while it trains. A save writes beside what is there
  and takes its place by one rename; older checkpoints are deleted only after that.

  Attributes:
    directory: where the checkpoints are, `<workdir>/checkpoints`.
  """

  def __init__(self, workdir: str | os.PathLike[str], keep: int = 2, save_best: str | None = None):
    """Opens the checkpoints of `workdir`; the directory need not exist yet.

    Args:
      workdir: the run's directory.
      keep: how many of the last checkpoints stay on disk, 1 or more.
      save_best: name of a metric, higher is better, e.g. 'eval/success'. The checkpoint with the highest value (of
        equal ones the last) stays on disk in addition to the last `keep`. None: no best checkpoint is kept.

    Raises:
      UserError: `keep` is below 1, or the directory cannot be read.
    """
    if keep < 1:
      raise UserError(f'keep is {keep}; the number of checkpoints to keep must be 1 or more')
    root = str(workdir) if '://' in str(workdir) else os.path.abspath(workdir)  # a bucket's address is left as it is
    self._save_best = save_best
    self._prepared = False  # whether `_prepare` is behind us
    options = ocp.CheckpointManagerOptions(
      create=False,
      enable_async_checkpointing=False,
      save_root_metadata=False,
      preservation_policy=_KeepLastAndBest(keep, self.best_step),
    )
    try:
      self._manager = ocp.CheckpointManager(os.path.join(root, 'checkpoints'), options=options)
    except OSError as e:
      raise UserError(f'checkpoints in {root} cannot be read: {e.strerror or e}') from e
    self.directory = self._manager.directory
    self._scores: dict[int, float | None] = {}
    if save_best:
      self._scores = {step: self._score(self._read_record(step).get('metrics', {})) for step in self.steps()}

  def steps(self) -> list[int]:
    """The steps that have a complete checkpoint, ascending."""
    return sorted(self._manager.all_steps())

  def latest_step(self) -> int | None:
    """The last step that has a complete checkpoint; None when there is none."""
    return max(self.steps(), default=None)

  def best_step(self) -> int | None:
    """The step whose `save_best` metric is highest, of equal ones the last; None when no checkpoint has that metric."""
    scored = [(score, step) for step, score in self._scores.items() if score is not None and step in self.steps()]
    return max(scored)[1] if scored else None

  def save(
    self,
    step: int,
    state: PyTree,
    meta: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
  ) -> None:
    """Writes the checkpoint of `step`, then deletes the ones that are no longer kept.

    The last step saved may be saved again, and is left as it is.

    Args:
      step: how many iterations are behind this state.
      state: pytree of `jax.Array` and `np.ndarray`, any dtype but typed PRNG keys (keep `jax.random.key_data`).
      meta: what is not an array, as JSON.
      metrics: name -> value at this step; `save_best` is looked up here.

    Raises:
      UserError: the disk is full or not writable, or a later step is saved already. What was saved before is intact.
      TypeError: a leaf is no array, or `meta` is not JSON.
    """
    latest = self.latest_step()
    if step == latest:
      logging.info('step %d is saved already in %s', step, self.directory)
      return
    if latest is not None and step < latest:
      raise UserError(
        f'checkpoint of step {step} was not saved: {self.directory} already has step {latest}; '
        'move the later checkpoints away or choose another --workdir'
      )
    leaves = _named_leaves(state)
    record = {
      'meta': dict(meta or {}),
      'metrics': {name: float(value) for name, value in (metrics or {}).items()},
      'leaves': {name: _describe(leaf) for name, leaf in leaves.items()},
    }
    record = json.loads(json.dumps(record))  # a TypeError here, rather than in the middle of the save
    arguments = ocp.args.Composite(
      state=ocp.args.PyTreeSave({name: leaf for name, leaf in leaves.items() if leaf.size}),
      meta=ocp.args.JsonSave(record),
    )
    self._scores[step] = self._score(record['metrics'])  # read by the preservation policy during the save
    try:
      with _without_orbax_tracebacks():
        self._prepare()
        self._manager.save(step, args=arguments, force=True)
    except (OSError, ValueError) as e:
      reason = _disk_error(e)
      if reason is None:
        raise
      if step in self.steps():
        logging.warning('step %d is saved, but older checkpoints in %s stay: %s', step, self.directory, reason)
        return
      self._remove_unfinished()
      intact = f'step {latest} is intact' if latest is not None else 'there is no earlier checkpoint'
      raise UserError(f'checkpoint of step {step} was not saved in {self.directory}: {reason}; {intact}') from e

  def restore(
    self, state_like: PyTree, step: int | None = None, partial: bool = False
  ) -> tuple[PyTree, dict[str, Any]]:
    """Reads a checkpoint, bit for bit.

    Args:
      state_like: pytree of the saved structure, whose leaves say shape, dtype and sharding: `jax.Array` or
        `jax.ShapeDtypeStruct` (without a sharding: the first local device), or `np.ndarray` to get NumPy arrays back.
        The mesh may be another than the one that saved.
      step: which checkpoint; None means the last.
      partial: read only the leaves that `state_like` has, e.g. `{'params': ...}` without the optimiser's state.

    Returns:
      The state, and the `meta` that was saved with it.

    Raises:
      UserError: there is no such checkpoint, it cannot be read, or a leaf differs in name, shape or dtype.
    """
    step = self._existing(step)
    record = self._read_record(step)
    if 'leaves' not in record:
      raise UserError(self._unreadable(step, 'its list of arrays is missing'))
    leaves = _named_leaves(state_like)
    difference = _first_difference(record['leaves'], leaves, partial)
    if difference:
      raise UserError(f'checkpoint of step {step} in {self.directory} does not fit this model: {difference}')
    targets = {name: _target(leaf) for name, leaf in leaves.items()}
    wanted = {name: target for name, target in targets.items() if target.size}
    arguments = ocp.args.PyTreeRestore(
      item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
    )
    try:
      with _without_orbax_tracebacks():
        restored = self._manager.restore(step, args=ocp.args.Composite(state=arguments))['state'] if wanted else {}
    except (OSError, ValueError, KeyError) as e:
      raise UserError(self._unreadable(step, _disk_error(e) or str(e).partition('\n')[0])) from e
    restored |= {name: _empty(target) for name, target in targets.items() if not target.size}
    state = jax.tree.unflatten(jax.tree.structure(state_like), [restored[name] for name in leaves])
    return state, record['meta']

  def meta(self, step: int | None = None) -> dict[str, Any]:
    """The `meta` of a checkpoint (None: of the last) without its arrays; raises UserError as `restore` does."""
    step = self._existing(step)
    record = self._read_record(step)
    if 'meta' not in record:
      raise UserError(self._unreadable(step, 'its meta is missing'))
    return record['meta']

  def close(self) -> None:
    """Releases the manager; nothing is pending, because saves are synchronous."""
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
      raise UserError(f'there is no checkpoint in {self.directory}')
    if step is not None and step not in steps:
      raise UserError(f'there is no checkpoint of step {step} in {self.directory}; it has {", ".join(map(str, steps))}')
    return steps[-1] if step is None else step

  def _read_record(self, step: int) -> dict[str, Any]:
    """What `save` wrote beside the arrays; {} when it cannot be read (a deletion was cut short, a bad disk)."""
    try:
      return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))['meta']
    except (OSError, ValueError, KeyError) as e:
      logging.warning('the meta of checkpoint %s/%d cannot be read: %s', self.directory, step, e)
      return {}

  def _unreadable(self, step: int, reason: str) -> str:
    earlier = [s for s in self.steps() if s < step]
    advice = f'; move {self.directory / str(step)} away to go on from step {earlier[-1]}' if earlier else ''
    return f'checkpoint of step {step} in {self.directory} cannot be read: {reason}{advice}'

  def _prepare(self) -> None:
    """Before the first save: makes the directory, and removes what earlier processes left half-written."""
    if not self._prepared and jax.process_index() == 0:
      self.directory.mkdir(parents=True, exist_ok=True)
      self._remove_unfinished()
    self._prepared = True

  def _remove_unfinished(self) -> None:
    """Gives back the space of saves that were cut short."""
    if jax.process_index() == 0:
      try:
        for path in self.directory.glob(_TEMPORARY):
          path.rmtree()
      except OSError as e:
        logging.warning('unfinished checkpoints in %s could not be removed: %s', self.directory, e)


class _KeepLastAndBest:
  """Orbax's preservation policy: the last `keep` checkpoints, and the best one."""

  def __init__(self, keep: int, best_step: Callable[[], int | None]):
    self._keep = keep
    self._best_step = best_step

  def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
    del context
    steps = sorted(info.step for info in checkpoints)
    kept = {*steps[-self._keep :], self._best_step()}
    return [info.step in kept for info in checkpoints]


def _named_leaves(tree: PyTree) -> dict[str, Any]:
  """{'params/layers/0/kernel': leaf, ...} in the tree's order; raises TypeError for a leaf that is no plain array."""
  leaves = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = jax.tree_util.keystr(path, simple=True, separator='/') or 'state'
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
      raise TypeError(f'leaf {name} of the state is a {type(leaf).__name__}, not an array; put it into meta')
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      raise TypeError(f'leaf {name} of the state is a typed PRNG key; save its jax.random.key_data')
    if name in leaves:
      raise TypeError(f'two leaves of the state are named {name}')
    leaves[name] = leaf
  return leaves


def _describe(leaf: Any) -> str:
  """float32[4,8]: what must be equal for a leaf to be restored."""
  return f'{np.dtype(leaf.dtype).name}[{",".join(map(str, leaf.shape))}]'


def _first_difference(saved: Mapping[str, str], wanted: Mapping[str, Any], partial: bool) -> str | None:
  for name, leaf in wanted.items():
    if name not in saved:
      return f'it has no {name}, which is {_describe(leaf)} here'
    if saved[name] != _describe(leaf):
      return f'{name} is {saved[name]} there and {_describe(leaf)} here'
  for name in saved:
    if name not in wanted and not partial:
      return f'{name}, which is {saved[name]} there, does not exist here'
  return None


def _target(leaf: Any) -> Any:
  if isinstance(leaf, np.ndarray):
    return leaf
  sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _empty(target: Any) -> Any:
  """An array without elements, which Orbax does not store."""
  if isinstance(target, np.ndarray):
    return np.zeros(target.shape, target.dtype)
  return jax.make_array_from_callback(
    target.shape, target.sharding, lambda index: np.zeros(target.shape, target.dtype)[index]
  )


def _disk_error(error: BaseException | None) -> str | None:
  """'No space left on device' for an error of the file system, from Python or from tensorstore; None for others."""
  while error is not None:
    if isinstance(error, OSError) and error.errno is not None:
      return os.strerror(error.errno)
    code = re.search(r"os_error_code='(\d+)'", str(error))  # tensorstore: a ValueError with the errno in its text
    if code:
      return os.strerror(int(code[1]))
    error = error.__cause__ or error.__context__
  return None


@contextlib.contextmanager
def _without_orbax_tracebacks() -> Iterator[None]:
  """Orbax's threads log the traceback of an error that `save` and `restore` raise anyway, as one line."""

  def keep(record: python_logging.LogRecord) -> bool:
    return 'orbax' not in pathlib.PurePath(record.pathname).parts

  logger = logging.get_absl_logger()
  logger.addFilter(keep)
  try:
    yield
  finally:
    logger.removeFilter(keep)


def record_config(
  workdir: str | os.PathLike[str],
  config: Mapping[str, Any],
  free_fields: Set[str] = frozenset(),
  reasons: Mapping[str, str] | None = None,
) -> None:
  """Ties `workdir` to a config: written to `<workdir>/config.json`, and compared from the first checkpoint on.

  Before that there is nothing that another config could spoil. Free fields may change from one start to the next (a
  longer run); config.json then shows their present value. Every process may call this: they all write the same.

  Args:
    workdir: the run's directory, made when it does not exist.
    config: nested dict of JSON values, e.g. `config.to_dict()`.
    free_fields: dotted names of fields that may differ, e.g. {'num_iterations'}.
    reasons: dotted name of a field -> why it may not differ, for the error.

  Raises:
    UserError: a field that is not free differs, the record cannot be read, or the directory is not writable.
  """
  path = pathlib.Path(workdir) / 'config.json'
  text = json.dumps(config, indent=2) + '\n'
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = any(p.name.isdigit() for p in (path.parent / 'checkpoints').glob('*'))
    old_text = path.read_text() if begun and path.exists() else None
  except OSError as e:
    raise UserError(f'workdir {workdir} cannot be used: {e.strerror or e}') from e
  if old_text is not None:
    _compare_config(workdir, old_text, text, free_fields, reasons or {})
  if text != old_text:
    temporary = path.with_name(f'config.json.{socket.gethostname()}.{os.getpid()}.tmp')
    try:
      temporary.write_text(text)
      os.replace(temporary, path)
    except OSError as e:
      raise UserError(f'{path} was not written: {e.strerror or e}') from e


def compare_config(
  workdir: str | os.PathLike[str], config: Mapping[str, Any], free_fields: Set[str] = frozenset()
) -> None:
  """As `record_config`, but for who only reads `workdir`: nothing is written.

  Raises:
    UserError: no run has been recorded there, or a field that is not free differs.
  """
  path = pathlib.Path(workdir) / 'config.json'
  try:
    old_text = path.read_text()
  except OSError as e:
    raise UserError(f'workdir {workdir} holds no run: {path} cannot be read ({e.strerror})') from e
  _compare_config(workdir, old_text, json.dumps(config), free_fields, {})


def changed_fields(
  workdir: str | os.PathLike[str], config: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
  """The config of the run in `workdir`, and what differs in another one, for who decides itself what may.

  Returns:
    The run's config, and by dotted name of a field (what it was, what it is now), as JSON text or 'absent'.

  Raises:
    UserError: no run has been recorded there.
  """
  path = pathlib.Path(workdir) / 'config.json'
  try:
    old_text = path.read_text()
  except OSError as e:
    raise UserError(f'workdir {workdir} holds no run: {path} cannot be read ({e.strerror})') from e
  changed = _changed(workdir, old_text, json.dumps(config))
  return json.loads(old_text), changed


def _compare_config(
  workdir: str | os.PathLike[str], old_text: str, new_text: str, free_fields: Set[str], reasons: Mapping[str, str]
) -> None:
  changed = [
    f'{name} was {was} and is {now}' + (f' ({reasons[name]})' if name in reasons else '')
    for name, (was, now) in _changed(workdir, old_text, new_text).items()
    if name not in free_fields
  ]
  if changed:
    raise UserError(
      f'workdir {workdir} belongs to another config: {"; ".join(changed)}; '
      'choose another --workdir or set these fields back'
    )


def _changed(workdir: str | os.PathLike[str], old_text: str, new_text: str) -> dict[str, tuple[str, str]]:
  """By name of a field that differs: (what it was, what it is)."""
  try:
    old = _flatten(json.loads(old_text))
  except ValueError as e:
    path = pathlib.Path(workdir) / 'config.json'
    raise UserError(f'{path} is not a config that this program wrote ({e}); choose another --workdir') from e
  new = _flatten(json.loads(new_text))
  names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
  return {name: (old.get(name, 'absent'), new.get(name, 'absent')) for name in names}


def _flatten(tree: Any, prefix: str = '') -> dict[str, str]:
  """{'train.lr': '0.001', ...}: values as JSON text, so that NaN equals NaN and True is not 1."""
  if not isinstance(tree, dict) or (prefix and not tree):
    return {prefix: json.dumps(tree)}
  flat = {}
  for key, value in tree.items():
    flat |= _flatten(value, f'{prefix}.{key}' if prefix else key)
  return flat


@contextlib.contextmanager
def workdir_lock(workdir: str | os.PathLike[str]) -> Iterator[None]:
  """Holds `<workdir>/.lock` while a run writes there; for one process of the run.

  The lock ends with its process, however that dies.

  Raises:
    UserError: another process holds it, or the directory is not writable.
  """
  path = pathlib.Path(workdir) / '.lock'
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open('a')
  except OSError as e:
    raise UserError(f'workdir {workdir} cannot be used: {e.strerror or e}') from e
  with file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
      raise UserError(f'workdir {workdir} is in use by another run; wait for it or choose another --workdir') from e
    except OSError as e:  # some network file systems have no locks
      logging.warning('workdir %s is not locked: %s', workdir, e.strerror or e)
    yield
