"""From a run's checkpoint to a Hugging Face directory that transformers, PEFT or another run begins with."""

from __future__ import annotations

import logging
import os
import shlex

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.algorithms.advantages import ESTIMATORS
from ragen_jax.config.checks import check_config
from ragen_jax.distributed.sharding import place, tree_shardings
from ragen_jax.models import lora, presets
from ragen_jax.models.checkpoint import hf
from ragen_jax.models.checkpoint import peft as adapter_files
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.config_fields import free_in_export
from ragen_jax.runs.workdir import compare_config
from ragen_jax.train import BEST
from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)


def export(config: ConfigDict, workdir: str) -> str:
  """Writes the checkpoint that `config.export` names.

  Args:
    config: the run's; `export`, `mesh`, `sft` and what may change when a run goes on need not be.
    workdir: the run's.

  Returns:
    The directory that was written.

  Raises:
    UserError: the workdir holds no run or another config's, there is no such checkpoint, or the output may not be
      written over.
  """
  if jax.process_count() > 1:
    raise UserError(f'--mode=export runs in one process, there are {jax.process_count()}')
  check_config(config)
  output = config.export.output or os.path.join(workdir, 'export')
  if config.export.lora == 'adapter' and not config.lora.rank:
    raise UserError("export.lora='adapter': needs a run with LoRA (lora.rank above 0)")
  compare_config(workdir, config.to_dict(), free_in_export(config.to_dict()))
  for source in filter(None, (presets.resolve(config.model.preset, config.model.path), config.lora.path)):
    check_output(output, 'export.output', source)
  with Checkpointer(workdir, save_best=BEST) as checkpointer:
    step = choose_step(checkpointer, config.export.step)
    if config.sft.from_scratch and 'data' in checkpointer.meta(step):
      raise UserError(
        f'--workdir={workdir}: a warm start from scratch, with a tokenizer of its own; its model is in '
        f'sft.output={config.sft.output!r}'
      )
    policy = build.load_policy(config)
    params = restore_params(checkpointer, policy, step)
  nnx.update(policy.model, params)
  has_head = any(hf.has_value_head(directory) for directory in (policy.directory, config.lora.path))
  needs_head = ESTIMATORS[config.algorithm.adv_estimator].needs_critic
  write_policy(output, config, policy, with_value_head=needs_head or has_head)
  _log.info('iteration %d of %s is written to %s (%s)', step, workdir, os.path.abspath(output), config.export.dtype)
  _log.info('to begin a run with it: %s', _next_flags(config, os.path.abspath(output)))
  return output


def choose_step(checkpointer: Checkpointer, step: str, field: str = 'export.step') -> int:
  """The checkpoint that 'latest', 'best' or a number means; `field` is where that stands, for the error.

  Raises:
    UserError: there is none.
  """
  steps = checkpointer.steps()
  if not steps:
    raise UserError(f'there is no checkpoint in {checkpointer.directory}')
  if step == 'latest':
    return steps[-1]
  if step == 'best':
    best = checkpointer.best_step()
    if best is None:
      raise UserError(f"{field}='best': no checkpoint in {checkpointer.directory} was saved after an evaluation")
    return best
  if step not in map(str, steps):
    raise UserError(f'{field}={step!r}: must be latest, best or one of {", ".join(map(str, steps))}')
  return int(step)


def restore_params(checkpointer: Checkpointer, policy: build.Policy, step: int) -> nnx.State:
  """All weights at a checkpoint, on the policy's mesh; with LoRA the frozen ones are those of the policy.

  The policy's other weights are gone: they would take as much memory again.
  """
  params = build.param_state(policy.model)
  params = place(params, tree_shardings(params, policy.mesh))
  trained, frozen = lora.partition(params)
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trained)
  jax.tree.map(lambda x: x.delete(), trained)
  return lora.join(checkpointer.restore({'params': like}, step=step, partial=True)[0]['params'], frozen)


def check_output(output: str, field: str, source: str) -> None:
  """Raises UserError where `output`, given in `field`, would replace `source`, the model that a run begins with."""
  if os.path.realpath(output) == os.path.realpath(source):
    raise UserError(f'{field}={output!r}: is where the model comes from; choose another directory')


def write_policy(output: str, config: ConfigDict, policy: build.Policy, *, with_value_head: bool) -> None:
  """Writes a policy as `config.export` says: a model, its adapters merged, or the adapters alone."""
  adapters, head = build.lora_config(config), policy.model.value_head if with_value_head else None
  qwen, critic, dtype = (
    policy.model.policy,
    policy.model.critic if with_value_head else None,
    jnp.dtype(config.export.dtype),
  )
  if adapters is not None and config.export.lora == 'adapter':
    if critic is not None:
      _log.info("the critic is left out: beside adapters there is no place for it (export.lora='merged' writes it)")
      head = None
    base = presets.PRESETS.get(config.model.preset) if not config.model.path else None
    adapter_files.save(
      output, qwen, adapters, dtype, base=base or os.path.abspath(policy.directory), tokenizer_dir=policy.directory,
      value_head=head,
    )  # fmt: skip
  else:
    hf.save_model(
      output,
      qwen,
      qwen.cfg,
      dtype,
      tokenizer_dir=policy.directory,
      value_head=head,
      critic=critic,
      critic_cfg=critic and critic.cfg,
    )


def _next_flags(config: ConfigDict, output: str) -> str:
  """The flags of a run that begins with what was written."""
  critic = ' --config.model.separate_critic=True' if config.model.separate_critic else ''
  if config.export.lora == 'merged':
    return f'--config.model.path={shlex.quote(output)}{critic}'
  fields = {name: config.lora[name] for name in ('rank', 'alpha', 'targets')} | {'path': shlex.quote(output)}
  flags = [f'--config.lora.{name}={value}' for name, value in fields.items()]
  if config.model.path:
    flags.append(f'--config.model.path={shlex.quote(config.model.path)}')
  return ' '.join(flags)
