"""Refuses a run whose update does not fit into the memory of one CPU, before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.language_model import LanguageModel
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.models import presets
from ragen_jax.models.attention_choice import choose_attention
from ragen_jax.planning.abstract import abstract_policy
from ragen_jax.training import batch_sizes, memory
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.sizes import GIB

# The fields of the `-lora` variant of a config that affect memory.
ADAPTERS = {'lora.rank': 64, 'model.param_dtype': 'bfloat16'}
# Changes of these change the model.
_OF_THE_MODEL = {'model.separate_critic', *ADAPTERS}


def check_host_memory(config: ConfigDict) -> None:
  """Raises UserError if the update runs on one CPU and does not fit; accelerators report themselves what does not fit.

  The message names a change of the config with which it would fit.
  """
  if jax.default_backend() != 'cpu':
    return
  limit, model = memory.usable(), as_it_runs(config)
  if model is None or (need := _needed(config, model, limit)) <= limit:
    return
  o, m = config.optimizer, config.model
  raise UserError(
    f'optimizer.micro_batch_size={o.micro_batch_size}, model.remat={m.remat}, model.logits_chunk={m.logits_chunk}: '
    f'the update needs about {need / GIB:.1f} GiB, and {limit / GIB:.1f} GiB of this machine may be filled; '
    f'{_advice(config, model, limit)}'
  )


def as_it_runs(config: ConfigDict) -> LanguageModel | None:
  """The abstract model as it will be on one CPU; None if its programs are of another kind."""
  mesh, dtype = make_mesh(**config.mesh), build.compute_dtype(config)
  shape = presets.shape(config.model.preset, config.model.path)
  attention = choose_attention(config.model.attention, shape, dtype, mesh)
  if not attention.by_row:
    return None
  model = abstract_policy(config, dtype)
  for trunk in filter(None, (model.model.policy, model.model.critic)):
    trunk.attention = attention
  return model


def _needed(config: ConfigDict, model: LanguageModel, limit: float) -> int:
  """Bytes of the update with the sizes that a run would choose for a limit."""
  sizes, found = build.size_settings(config, model), build.update_memory(config, model)
  chosen = batch_sizes.batching(sizes, lambda: found, lambda: limit)
  remat = batch_sizes.remat_settings(config.model.remat, model.model.policy, lambda: found, lambda: limit)
  return batch_sizes.needed(sizes, chosen, remat, found)


def _advice(config: ConfigDict, model: LanguageModel, limit: float) -> str:
  """The change that would make the update fit, in words: one field if one is enough, else several."""
  together: dict[str, Any] = {}
  for change in _changes(config):
    together |= change
    for tried in (change, together):
      other = config.copy_and_resolve_references()
      with other.ignore_type():  # model.remat may be True or the name of a choice
        other.update_from_flattened_dict(tried)
      need = _needed(other, as_it_runs(other) if tried.keys() & _OF_THE_MODEL else model, limit)
      if need <= limit:
        flags = ' '.join(f'--config.{name}={value}' for name, value in tried.items())
        same = " (the preset's name with -lora)" if 'lora.rank' in tried else ''
        return f'it would fit with {flags}{same}, which needs about {need / GIB:.1f} GiB'
  return f'even {need / GIB:.1f} GiB are too much, with adapters alone: take a smaller model or a larger machine'


def _changes(config: ConfigDict) -> Iterator[dict[str, Any]]:
  """Changes that reduce the memory of the update; the last two change what is learnt."""
  o, m = config.optimizer, config.model
  for size in range(o.micro_batch_size - 1, 0, -1):
    if o.mini_batch_size % size == 0:
      yield {'optimizer.micro_batch_size': size}
  if m.logits_chunk == 0:
    yield {'model.logits_chunk': batch_sizes.HOST_LOGITS}
  if batch_sizes.REMAT_OF.get(m.remat, 'layers') != 'layers':
    yield {'model.remat': True}
  if m.separate_critic:
    yield {'model.separate_critic': False}
  if not config.lora.rank:
    yield dict(ADAPTERS)
