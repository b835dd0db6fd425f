"""The checkpoint of --mode=eval, serve and optimize_prompt: `eval.step` in the workdir, or the config's model.

Only the fields of the config that define a checkpoint's weights must be those of its run. If the user named the workdir
(`given`), a workdir without checkpoints is an error, because its name may be misspelt.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.language_model import LanguageModel, param_state
from ragen_jax.config.checks import check_config
from ragen_jax.models.checkpoint.export import choose_step, restore_params
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.config_fields import fields_of
from ragen_jax.runs.workdir import changed_fields, open_workdir
from ragen_jax.training.run_log import BEST
from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)


def find_step(config: ConfigDict, workdir: str, checkpointer: Checkpointer, given: bool) -> int | None:
  """The step that `eval.step` names; None for the config's model. Raises UserError if there is no such checkpoint."""
  if config.eval.step in ('base', 'none'):
    return None
  if checkpointer.steps():
    return choose_step(checkpointer, config.eval.step, 'eval.step', others=('base', 'none'))
  is_run = os.path.exists(os.path.join(workdir, 'config.json'))
  named = config.model.path or config.lora.path
  if config.eval.step != 'latest' or is_run or (given and not named):
    raise UserError(
      f'--workdir={workdir}: there is no checkpoint in it; --config.eval.step=base evaluates the model '
      f'{model_name(config)} as it is'
    )
  _log.info('there is no checkpoint in %s; the model is %s', workdir, model_name(config))
  return None


def compare_with_run(config: ConfigDict, workdir: str, *, warm_start: bool = False) -> list[str]:
  """The tags that the run or the warm start trains on. Raises UserError if its checkpoints are of another model."""
  run, changed = changed_fields(workdir, config.to_dict())
  weights = fields_of('weights')
  others = [f'{name} was {was} and is {now}' for name, (was, now) in changed.items() if name in weights]
  if others:
    raise UserError(
      f'workdir {workdir} has checkpoints of another model: {"; ".join(others)}; set these fields back, '
      'or evaluate the model as it is with --config.eval.step=base'
    )
  tags = tuple(f'envs.{tag}.' for tag in config.eval.tags)
  for name, (was, now) in changed.items():
    if name.startswith(('agent.', *tags)) and was != 'absent':
      _log.info('different from training: %s was %s and is %s', name, was, now)
  if not warm_start:
    return list(run['train']['tags'])
  if run['sft']['from_scratch']:
    raise UserError(
      f'--workdir={workdir}: a model from scratch has its own tokenizer; evaluate the written model with '
      f'--config.model.path={run["sft"]["output"]} --config.eval.step=base'
    )
  return [] if run['sft']['data'] else list(run['sft']['tags'])


def model_name(config: ConfigDict) -> str:
  """The config's model, with its initial adapters."""
  model = config.model.path or config.model.preset
  return f'{model} with {config.lora.path}' if config.lora.path else model


def load_weights(config: ConfigDict, checkpointer: Checkpointer, step: int | None) -> tuple[LanguageModel, Any]:
  """The config's model, and its weights at a step of a run; None for its own weights."""
  policy = build.load_policy(config)
  return policy, param_state(policy.model) if step is None else restore_params(
    checkpointer, policy.model, policy.mesh, step
  )


def load_checkpoint(config: ConfigDict, workdir: str, step: str = 'latest') -> tuple[LanguageModel, Any]:
  """Loads the language model of a run, and its weights at a checkpoint, which an `Evaluator` takes.

  Args:
    config: that of the run; only `model` and `lora` must be equal.
    workdir: the run's directory.
    step: 'latest', 'best' by held-out success, or the number of an iteration.

  Raises:
    UserError: the config cannot be run, there is no such checkpoint, or it is of another model.
  """
  check_config(config)
  with (
    open_workdir(workdir, write=False) as place,
    Checkpointer(place, keep=config.checkpoint.keep, save_best=BEST) as checkpointer,
  ):
    number = choose_step(checkpointer, str(step), 'step')
    compare_with_run(config, place, warm_start='data' in checkpointer.meta(number))
    return load_weights(config, checkpointer, number)
