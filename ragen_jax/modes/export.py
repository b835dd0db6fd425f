"""`--mode=export`: writes a checkpoint of a run as a Hugging Face directory for transformers, PEFT or another run."""

from __future__ import annotations

import logging
import os
import shlex

import jax
from flax import nnx
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.language_model import FLOAT
from ragen_jax.algorithms.advantages import ESTIMATORS
from ragen_jax.config.checks import check_config
from ragen_jax.models import presets
from ragen_jax.models.checkpoint.export import check_output, choose_step, restore_params, write_policy
from ragen_jax.models.checkpoint.load import has_value_head
from ragen_jax.modes import hub
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.config_fields import free_in_export
from ragen_jax.runs.staging import StagedWorkdir, address
from ragen_jax.runs.stores import is_address
from ragen_jax.runs.workdir import compare_config, open_workdir
from ragen_jax.training.run_log import BEST
from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)


def export(config: ConfigDict, workdir: str) -> str:
  """Writes the checkpoint that `config.export` selects, and returns the directory, or its address in a bucket.

  The fields that `free_in_export` lists may differ from the run's. Raises UserError if the workdir holds no run or a
  run of another config, there is no such checkpoint, or the output must not be overwritten.
  """
  if jax.process_count() > 1:
    raise UserError(f'--mode=export runs in one process, there are {jax.process_count()}')
  check_config(config, played=())
  with open_workdir(workdir, write=False) as place:
    return _export(config, place)


def _export(config: ConfigDict, workdir: str | StagedWorkdir) -> str:
  output = config.export.output or os.path.join(workdir, 'export')
  if config.export.lora == 'adapter' and not config.lora.rank:
    raise UserError("export.lora='adapter': needs a run with LoRA (lora.rank above 0)")
  compare_config(workdir, config.to_dict(), free_in_export(config.to_dict()))
  for source in filter(None, (presets.resolve(config.model.preset, config.model.path), config.lora.path)):
    check_output(output, 'export.output', source)
  with Checkpointer(workdir, keep=config.checkpoint.keep, save_best=BEST) as checkpointer:
    step = choose_step(checkpointer, config.export.step)
    if config.sft.from_scratch and 'data' in checkpointer.meta(step):
      raise UserError(
        f'--workdir={workdir}: a warm start from scratch has its own tokenizer; its model is in '
        f'sft.output={config.sft.output!r}'
      )
    exact = config.copy_and_resolve_references()
    exact.model.weights = FLOAT  # what is written belongs to the published base
    policy = build.load_policy(exact)
    params = restore_params(checkpointer, policy.model, policy.mesh, step)
  nnx.update(policy.model, params)
  has_head = any(has_value_head(directory) for directory in (policy.directory, config.lora.path))
  needs_head = ESTIMATORS[config.algorithm.adv_estimator].needs_critic
  settings = build.export_settings(config, policy)
  write_policy(output, policy.model, settings, with_value_head=needs_head or has_head)
  shown = address(os.path.abspath(output), workdir)
  _log.info('iteration %d of %s written to %s (%s)', step, workdir, shown, config.export.dtype)
  copied = ', after copying it to a disk' if is_address(shown) else ''
  _log.info('to start a run from it%s: %s', copied, _next_flags(config, shown))
  if config.export.push:
    _log.info('uploaded: %s', hub.push_model(config, workdir, output, step))
  if config.export.push_episodes:
    _log.info('uploaded: %s', hub.push_episodes(config, workdir))
  return shown if copied else output


def _next_flags(config: ConfigDict, output: str) -> str:
  """The flags of a run that starts from the exported model."""
  critic = ' --config.model.separate_critic=True' if config.model.separate_critic else ''
  if config.export.lora == 'merged':
    return f'--config.model.path={shlex.quote(output)}{critic}'
  fields = {name: config.lora[name] for name in ('rank', 'alpha', 'targets')} | {'path': shlex.quote(output)}
  flags = [f'--config.lora.{name}={value}' for name, value in fields.items()]
  if config.model.path:
    flags.append(f'--config.model.path={shlex.quote(config.model.path)}')
  return ' '.join(flags)
