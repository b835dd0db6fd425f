"""The part of `config.json` that describes mixtures of experts."""

from __future__ import annotations

from typing import Any

from ragen_jax.models.checkpoint.fields import integer, unsupported
from ragen_jax.models.feed_forward import ExpertsConfig
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.utils.errors import UserError

# The classes whose layers all have experts, one of them shared, and whose weights of experts are always normalised.
_SHARED = 'qwen3_5'

# Fields of experts that are read, and those of a loss that training for a task does without.
_READ = (
  'num_experts', 'num_local_experts', 'num_experts_per_tok', 'moe_intermediate_size', 'norm_topk_prob',
  'decoder_sparse_step', 'mlp_only_layers', 'shared_expert_intermediate_size',
)  # fmt: skip
_OF_TRAINING = ('output_router_logits', 'router_aux_loss_coef', 'experts_implementation', '_experts_implementation')
# Words in the names of fields of experts.
_WORDS = ('expert', 'router', 'moe', 'topk', 'scoring', 'n_group', 'routed')


def read(raw: dict[str, Any], architecture: str, num_layers: int, where: str) -> dict[str, Any]:
  """The fields of a `QwenConfig` that models without experts do not have.

  Raises:
    UserError: a number does not fit, no layer has experts, or a field is of another kind of mixture.
  """
  for field in raw:
    if any(word in field for word in _WORDS) and field not in (*_READ, *_OF_TRAINING) and raw[field] is not None:
      raise unsupported(raw, field, f'fields of experts that are: {", ".join(_READ)}', where)
  shared = architecture == _SHARED
  count = integer(raw, 'num_local_experts' if 'num_experts' not in raw else 'num_experts', where)
  chosen = integer(raw, 'num_experts_per_tok', where)
  if chosen > count:
    raise UserError(f'{where}: num_experts_per_tok={chosen} must be at most num_experts={count}')
  normalised = raw.get('norm_topk_prob', shared)
  if not isinstance(normalised, bool) or (shared and not normalised):
    raise unsupported(raw, 'norm_topk_prob', 'only true is' if shared else 'only true and false are', where)
  if not shared and raw.get('shared_expert_intermediate_size'):
    raise unsupported(raw, 'shared_expert_intermediate_size', 'Qwen3 models have no shared expert', where)
  experts = ExpertsConfig(
    count=count,
    chosen=chosen,
    width=integer(raw, 'moe_intermediate_size', where),
    normalised=normalised,
    shared_width=integer(raw, 'shared_expert_intermediate_size', where) if shared else 0,
  )
  mlp_layers = _mlp_layers(raw, num_layers, where)
  if shared and mlp_layers:
    field = 'mlp_only_layers' if raw.get('mlp_only_layers') else 'decoder_sparse_step'
    raise unsupported(raw, field, 'all layers of Qwen3.5 have experts', where)
  return {'experts': experts, 'mlp_layers': mlp_layers}


def _mlp_layers(raw: dict[str, Any], num_layers: int, where: str) -> tuple[int, ...]:
  only, step = raw.get('mlp_only_layers') or [], integer({'decoder_sparse_step': 1} | raw, 'decoder_sparse_step', where)
  if not isinstance(only, list) or not all(type(i) is int and 0 <= i < num_layers for i in only):
    raise UserError(f'{where}: mlp_only_layers={only!r} must be a list of layers from 0 to {num_layers - 1}')
  found = tuple(i for i in range(num_layers) if i in only or (i + 1) % step)
  if len(found) == num_layers:
    raise UserError(
      f'{where}: mlp_only_layers={only!r} and decoder_sparse_step={step} leave none of the {num_layers} layers experts'
    )
  return found


def write(cfg: QwenConfig) -> dict[str, Any]:
  """The fields of a `config.json` that models without experts do not have."""
  c = cfg.experts
  fields = {'num_experts': c.count, 'num_experts_per_tok': c.chosen, 'moe_intermediate_size': c.width}
  if cfg.architecture == _SHARED:
    return fields | {'shared_expert_intermediate_size': c.shared_width}
  return fields | {
    'norm_topk_prob': c.normalised,
    'decoder_sparse_step': 1,
    'mlp_only_layers': list(cfg.mlp_layers),
    'output_router_logits': False,
  }
