"""The state of a run from its last checkpoint that is not damaged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ragen_jax.distributed import processes
from ragen_jax.models import identity
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.config_fields import free_in_training
from ragen_jax.runs.file_digests import check_data
from ragen_jax.runs.workdir import check_recorded
from ragen_jax.training.curriculum import Curriculum
from ragen_jax.training.monitor import Monitor, Verdict
from ragen_jax.training.replay import ReplayBuffer
from ragen_jax.training.state import TrainState
from ragen_jax.utils.errors import UserError


def restore(
  checkpointer: Checkpointer, workdir: str, config: Mapping[str, Any], files: Mapping[str, str], state: TrainState,
  replay: ReplayBuffer, monitor: Monitor, curriculum: Curriculum | None = None,
  unsaved: Mapping[str, str] | None = None,
) -> tuple[TrainState, str, Verdict | None]:  # fmt: skip
  """Restores the last checkpoint that is not damaged, if there is one.

  It fills `replay`, `monitor` and `curriculum`, too. `config` is the whole config, nested, and `files` are the digests
  of its data. The arrays of the initial `state` are deleted if there is a checkpoint. `unsaved` is `state.unsaved()`; a
  checkpoint that was made with other weights, or of other data, is refused.

  Returns:
    The state; the reason why the run was stopped, '' if it was not stopped; and the verdict of the iteration if its
    evaluation was cut off, None if it was not.
  """
  with processes.same_errors():
    if processes.is_first():
      checkpointer.set_damaged_aside()
  checkpointer.reload()
  steps = processes.gather(checkpointer.latest_step())
  if len(set(steps)) > 1:
    raise UserError(f'--workdir={workdir}: the processes see different checkpoints, {steps}; they must share a disk')
  if checkpointer.latest_step() is None:
    return state, '', None
  recorded = checkpointer.meta()
  described = recorded.get('replay')
  if described is None:
    raise UserError(f'--workdir={workdir}: its checkpoints belong to a warm start; choose another --workdir')
  if 'config' in recorded:  # checkpoints of earlier versions have none
    where = f'checkpoint of step {checkpointer.latest_step()} in {checkpointer.directory}'
    check_recorded(where, recorded['config'], config, *free_in_training(config))
  check_data(recorded.get('files', {}), files, f'--workdir={workdir}')
  identity.check_unsaved(recorded, unsaved or {}, f'--workdir={workdir}')
  like, kept = state.saved(), {'replay': replay.empty_state(described)}
  if curriculum is not None:
    where = f'checkpoint of step {checkpointer.latest_step()} in {checkpointer.directory}'
    curriculum.check_described(recorded.get('curriculum', {}), where)
    kept['curriculum'] = curriculum.state()[0]
  arrays, meta = checkpointer.restore(like | kept)
  # Otherwise the devices would hold the initial arrays in addition to the restored arrays.
  jax.tree.map(lambda x: x.delete(), like)
  replay.load_state(arrays['replay'], described)
  if curriculum is not None:
    curriculum.load_state(arrays['curriculum'])
  monitor.load_state_dict(meta['monitor'])
  state = state.with_saved(arrays, iteration=meta['iteration'], lr_scale=meta['monitor']['lr_scale'])
  verdict = meta.get('unevaluated')
  return state, meta['stopped'], Verdict(**verdict) if verdict else None
