"""Changes of a config with which a run fits into the memory of its devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from ragen_jax import build_agents
from ragen_jax.config.checks import check_config
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import row_shards
from ragen_jax.planning import memory
from ragen_jax.planning.memory import MemoryPlan
from ragen_jax.utils.errors import UserError

# Upper limit for the number of accepted changes in `fit`.
_MAX_CHANGES = 24
# Chunks of logits to try, each after the one before was not enough.
_LOGITS_CHUNKS = (1024, 256)


def fit(config: ConfigDict, found: MemoryPlan, compiled: Any) -> tuple[dict[str, Any], ConfigDict, MemoryPlan]:
  """Changes one field at a time, each time for the phase with the largest total, until the run fits.

  Returns the changed fields, the config with them, and its plan, which does not fit if no candidate was left. For
  `compiled` see `estimate`.
  """
  changes: dict[str, Any] = {}
  for _ in range(_MAX_CHANGES):
    if found.fits:
      break
    for change in candidates(
      config, found.worst, found.cache_rows.get(found.worst, 0) * row_shards(make_mesh(**config.mesh))
    ):
      tried = config.copy_and_resolve_references()
      tried.update_from_flattened_dict(change)
      try:
        check_config(tried, weights=False, played=())
        after = memory.estimate(tried, compiled)
      except UserError:
        continue
      # Activations count only if they were also compiled for the plan before the change.
      uncounted = 0 if 'activations' in found.phases[found.worst] else after.phases[found.worst].get('activations', 0)
      if after.total(found.worst) - uncounted < found.total(found.worst):
        config, changes, found = tried, changes | change, after
        break
    else:
      break
  return changes, config, found


def candidates(config: ConfigDict, phase: str, rows: int) -> Iterator[dict[str, Any]]:
  """Changes of fields that reduce a phase's memory; changes that affect learning come last.

  The phase is 'update', or 'rollout' or 'evaluation' with so many rows of the devices.
  """
  o, mesh = config.optimizer, make_mesh(**config.mesh)
  if build_agents.plays_agents(config):
    if phase != 'update' and config.serve.slots % (2 * row_shards(mesh)) == 0:
      yield {'serve.slots': config.serve.slots // 2}
  elif phase != 'update' and rows and rows % (2 * row_shards(mesh)) == 0:
    yield {'agent.rows_in_flight': rows // 2}
  if phase == 'update':
    if config.model.remat is False:
      yield {'model.remat': True}
    chunk = next((n for n in _LOGITS_CHUNKS if not 0 < config.model.logits_chunk <= n), 0)
    if chunk:
      yield {'model.logits_chunk': chunk}
    if o.micro_batch_size and o.micro_batch_size % 2 == 0:
      yield {'optimizer.micro_batch_size': o.micro_batch_size // 2}
  elif phase == 'evaluation':
    if config.eval.groups % 2 == 0 and not config.eval.tag_groups:
      yield {'eval.groups': config.eval.groups // 2}
    if config.eval.group_size % 2 == 0:
      yield {'eval.group_size': config.eval.group_size // 2}
  if mesh.shape['data'] % 2 == 0:
    yield {'mesh.data': mesh.shape['data'] // 2, 'mesh.fsdp': mesh.shape['fsdp'] * 2}
  if phase == 'rollout' and config.train.groups % 2 == 0 and not config.train.tag_groups:
    yield {'train.groups': config.train.groups // 2}
