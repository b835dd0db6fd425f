"""The memory per device that the server of agent programs holds besides the trained weights."""

from __future__ import annotations

from flax import nnx
from ml_collections import ConfigDict

from ragen_jax import build_agents, build_frozen
from ragen_jax.agent.language_model import LanguageModel, param_state
from ragen_jax.models import lora
from ragen_jax.planning import abstract
from ragen_jax.planning.lowering import abstract_rows
from ragen_jax.sampling.capacity import bytes_per_device

# The kind of the rows of the policy.
SERVER_CACHE = 'server: key/value cache'


def server_memory(config: ConfigDict, policy: LanguageModel) -> dict[str, int]:
  """Bytes a device from the opening of the server to its end, by kind; empty if no programs play.

  The abstract policy computes in the type of the planned machine.
  """
  if not build_agents.plays_agents(config):
    return {}
  engine = build_agents.server_settings(config, policy, trains=True).engine

  def cache(model: LanguageModel) -> int:
    return bytes_per_device(abstract_rows(model.sampler, engine.slots, engine.columns).cache)

  found = {SERVER_CACHE: cache(policy)}
  frozen = {
    name: abstract.abstract_policy(of.config, abstract.compute_dtype(config), list(policy.mesh.devices.flat))
    for name, of in build_frozen.frozen_models(config).items()
  }
  if frozen:
    found['frozen agents: weights'] = sum(_weights(config, model) for model in frozen.values())
    found['frozen agents: caches'] = sum(map(cache, frozen.values()))
  return found


def _weights(config: ConfigDict, model: LanguageModel) -> int:
  """Bytes a device of the weights that a sampler computes with, gathered if `Sampler.decode_weights` would do so."""
  params = param_state(model.model)
  params = nnx.State({name: part for name, part in params.items() if name != 'critic'})
  laid_out = abstract.laid_out(params, lora.shardings(params, model.mesh))
  gathered = bytes_per_device(model.sampler.abstract_weights(laid_out))
  if model.mesh.shape['fsdp'] == 1 or 2 * gathered <= abstract.usable_bytes(config):
    return gathered
  return bytes_per_device(model.sampler.abstract_weights(laid_out, False))
