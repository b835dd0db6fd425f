"""Loads the frozen weights that agents of a run play with (`serve.frozen`).

An entry is 'AGENTS=MODEL'. AGENTS is a regular expression for the whole name of an agent. MODEL is one of

  base            the config's model with its initial adapters, as it is before training
  WORKDIR@STEP    a checkpoint of a run: the number of an iteration, 'best' or 'latest'
  a preset        such as 'qwen2.5-0.5b-instruct'
  DIR             a Hugging Face checkpoint
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re

from flax import nnx
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.language_model import LanguageModel, make_sampler, param_state
from ragen_jax.models import presets
from ragen_jax.models.checkpoint.export import choose_step, restore_params
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.config_fields import fields_of, flatten
from ragen_jax.runs.workdir import changed_fields
from ragen_jax.serving.engine.engines import FrozenWeights
from ragen_jax.serving.engine.eyes import Eyes
from ragen_jax.training.run_log import BEST
from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)

BASE = 'base'


@dataclasses.dataclass(frozen=True)
class FrozenModel:
  """Where frozen weights come from."""

  config: ConfigDict  # of the model: that of the run, with the fields replaced that define the model's weights
  workdir: str  # of the run that has the checkpoint; '' for the config's model as it is
  step: str  # the checkpoint: the number of an iteration, 'best' or 'latest'


def frozen_agents(config: ConfigDict) -> tuple[tuple[str, str], ...]:
  """The entries (AGENTS, MODEL) of `serve.frozen`. Raises UserError if an entry has another form."""
  found = []
  for entry in config.serve.frozen:
    agents, equals, name = entry.partition('=') if isinstance(entry, str) else ('', '', '')
    if not equals or not name:
      raise UserError(f"serve.frozen={config.serve.frozen!r}: entries must be 'AGENTS=MODEL', such as 'critic=base'")
    try:
      re.compile(agents)
    except re.error as e:
      raise UserError(f'serve.frozen={entry!r}: {agents!r} must be a regular expression ({e})') from e
    found.append((agents, name))
  return tuple(found)


def frozen_models(config: ConfigDict) -> dict[str, FrozenModel]:
  """The models of `serve.frozen` by their names; nothing is loaded. Raises UserError if a name is no model."""
  return {name: _model(config, name) for _, name in frozen_agents(config)}


def _model(config: ConfigDict, name: str) -> FrozenModel:
  own = config.copy_and_resolve_references()
  own.model.separate_critic = False  # frozen weights need no values
  if name == BASE:
    return FrozenModel(own, '', '')
  workdir, at, step = name.rpartition('@')
  if at and not os.path.isdir(name):
    try:
      run = flatten(changed_fields(workdir, config.to_dict())[0])
    except UserError as e:
      raise UserError(f'serve.frozen: {name!r}: {e}') from e
    if run.get('sft.from_scratch'):
      raise UserError(
        f'serve.frozen: {name!r}: a model from scratch has its own tokenizer; name the written model, '
        f'{run["sft.output"]}'
      )
    named = (*fields_of('weights'), 'model.param_dtype', 'model.weights')
    weights = {field: run[field] for field in named if field in run}
    own.update_from_flattened_dict(weights)
    return FrozenModel(own, workdir, step)
  preset = name in presets.names()
  if not preset and not os.path.isdir(name):
    raise UserError(
      f"serve.frozen: {name!r}: must be 'base', WORKDIR@STEP, a directory that exists, or one of the presets "
      f'{", ".join(presets.names())}'
    )
  own.update_from_flattened_dict(
    {'model.preset': name if preset else config.model.preset, 'model.path': '' if preset else name, 'lora.rank': 0,
     'lora.path': ''}
  )  # fmt: skip
  return FrozenModel(own, '', '')


def load_frozen(config: ConfigDict, policy: LanguageModel) -> dict[str, FrozenWeights]:
  """Loads the weights of `serve.frozen`, by the names of their models, in the types that the sampler computes with.

  A model of the structure of the trained `policy` is sampled with the policy's programs. Raises UserError if a model
  cannot be loaded, or has another tokenizer than the policy.
  """
  found = {}
  for name, of in frozen_models(config).items():
    try:
      found[name] = _load(of, policy)
    except UserError as e:
      raise UserError(f'serve.frozen: {name!r}: {_without_field(str(e))}') from e
    agents = ', '.join(repr(expression) for expression, model in frozen_agents(config) if model == name)
    _log.info('agents %s play with the frozen weights of %s, version %d', agents, name, found[name].version)
  return found


def _without_field(error: str) -> str:
  """An error about the policy's model without the fields that name it, which are not those of a frozen model."""
  error = re.sub(r"^model\.(path|preset)=('[^']*'|\S+?):? ", '', error)
  return error.replace('give --config.model.path=DIR', 'name this directory instead')


def _load(of: FrozenModel, policy: LanguageModel) -> FrozenWeights:
  model, version = build.load_policy(of.config), 0
  if not model.tokenizer.same_tokens(policy.tokenizer):
    raise UserError('has another tokenizer than the policy; all agents of a run share its tokens')
  params = param_state(model.model)
  if of.workdir:
    with Checkpointer(of.workdir, keep=of.config.checkpoint.keep, save_best=BEST) as checkpointer:
      version = choose_step(checkpointer, of.step, 'the step')
      params = restore_params(checkpointer, model.model, model.mesh, version)
  actor = ActorCritic(model.model.policy)
  actor.value_head = model.model.value_head
  shards = model.sampler.decode_shards
  sampler = make_sampler(actor, model.tokenizer, model.mesh, values=False, decode_shards=shards)
  if sampler.graphdef == policy.sampler.graphdef and sampler.stop_ids == policy.sampler.stop_ids:
    sampler = policy.sampler
  params = sampler.decode_weights(nnx.State({name: part for name, part in params.items() if name != 'critic'}))
  nnx.update(actor, params)  # nothing holds the weights as they were loaded
  own, same = model.model.policy.cfg.vision, model.processor == policy.processor
  eyes = Eyes(model.encoders['policy'], own) if own is not None and same else None
  return FrozenWeights(sampler, params, version, eyes)
