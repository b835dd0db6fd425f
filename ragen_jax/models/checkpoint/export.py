"""From the checkpoint of a run to a Hugging Face directory: which step, its weights, and the form that is written."""

from __future__ import annotations

import dataclasses
import logging
import os

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from ragen_jax.distributed.sharding import place
from ragen_jax.models import identity, lora
from ragen_jax.models.checkpoint import peft
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ExportSettings:
  """How a policy is written. Fields of `config.export`, and the following.

  Attributes:
    adapters: the adapters of the policy; None without LoRA.
    base: the base model that an adapter directory refers to: a directory, or a repository on the hub.
    tokenizer_dir: source of tokenizer files.
  """

  lora: str
  dtype: str
  adapters: lora.LoraConfig | None
  base: str
  tokenizer_dir: str


def choose_step(checkpointer: Checkpointer, step: str, field: str = 'export.step', others: tuple[str, ...] = ()) -> int:
  """The step of the checkpoint that 'latest', 'best' or a number in digits selects.

  For the error, `field` is the config field that `step` comes from, and `others` is what else it may be.

  Raises:
    UserError: there is no such checkpoint.
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
    allowed = ('latest', 'best', *others)
    raise UserError(f'{field}={step!r}: must be {", ".join(allowed)} or one of {", ".join(map(str, steps))}')
  return int(step)


def restore_params(checkpointer: Checkpointer, model: ActorCritic, mesh: Mesh, step: int) -> nnx.State:
  """Restores the weights of a checkpoint onto a mesh: all weights, trained and frozen.

  Frozen weights (with LoRA, and of vision towers) are those of `model`. Its trained weights are deleted first, because
  both copies together may not fit into memory. Raises UserError if the frozen weights are not those of the run.
  """
  params = nnx.split(model)[1]
  params = place(params, lora.shardings(params, mesh))
  trained, frozen = lora.partition(params)
  where = f'checkpoint of step {step} in {checkpointer.directory}'
  identity.check_unsaved(checkpointer.meta(step), {'frozen': identity.digest_of(frozen)}, where)
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trained)
  jax.tree.map(lambda x: x.delete(), trained)
  return lora.join(checkpointer.restore({'params': like}, step=step, partial=True)[0]['params'], frozen)


def check_output(output: str, field: str, source: str) -> None:
  """Raises UserError if `output`, the value of `field`, is the directory `source` that the model is loaded from."""
  if os.path.realpath(output) == os.path.realpath(source):
    raise UserError(f'{field}={output!r}: is where the model comes from; choose another directory')


def write_policy(output: str, model: ActorCritic, settings: ExportSettings, *, with_value_head: bool) -> None:
  """Writes a policy as `save_model` does: a complete model with its adapters merged, or the adapters only.

  `with_value_head` also writes the value head, and the critic's trunk if it has its own.
  """
  head = model.value_head if with_value_head else None
  critic = model.critic if with_value_head else None
  dtype = jnp.dtype(settings.dtype)
  if settings.adapters is not None and settings.lora == 'adapter':
    if critic is not None:
      _log.info("the critic is left out: beside adapters there is no place for it (export.lora='merged' writes it)")
      head = None
    peft.save(
      output, model.policy, settings.adapters, dtype, base=settings.base, tokenizer_dir=settings.tokenizer_dir,
      value_head=head,
    )  # fmt: skip
    return
  save_model(
    output,
    model.policy,
    model.policy.cfg,
    dtype,
    tokenizer_dir=settings.tokenizer_dir,
    value_head=head,
    critic=critic,
    critic_cfg=critic and critic.cfg,
  )
