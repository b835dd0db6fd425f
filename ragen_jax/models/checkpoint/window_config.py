"""The part of `config.json` that describes the layers of Gemma 3: their kinds, windows and rotary embeddings."""

from __future__ import annotations

from typing import Any

from ragen_jax.models.checkpoint import rope_config
from ragen_jax.models.checkpoint.fields import integer, unsupported
from ragen_jax.models.qwen_config import FULL, WINDOWED, QwenConfig
from ragen_jax.utils.errors import UserError

# What `transformers` takes where a file has no such field.
_INTERVAL, _SCALAR, _THETA, _WINDOW_THETA = 6, 256, 1e6, 1e4
# Fields of models that differ in more than their shape.
_NONE = ('attn_logit_softcapping', 'final_logit_softcapping', 'use_bidirectional_attention')


def read(raw: dict[str, Any], num_layers: int, head_dim: int, where: str) -> dict[str, Any]:
  """The fields of a `QwenConfig` that models without windows do not have, and those of the rotary embedding.

  Raises:
    UserError: a layer is of another kind, a number does not fit, or scores or logits are capped.
  """
  for field in _NONE:
    if raw.get(field):
      raise unsupported(raw, field, 'Gemma 3 models must have none', where)
  scalar = {'query_pre_attn_scalar': _SCALAR} | raw
  kinds, scalar = _kinds(raw, num_layers, where), integer(scalar, 'query_pre_attn_scalar', where)
  rope = raw.get('rope_parameters') or {}
  if not isinstance(rope, dict) or {*rope} - {FULL, WINDOWED} or not all(isinstance(x, dict) for x in rope.values()):
    raise UserError(f'{where}: rope_parameters={rope!r} must have the objects {FULL!r} and {WINDOWED!r}')
  # Older files have those of full attention where other models have theirs.
  older = raw.get('rope_scaling') or {}
  if not isinstance(older, dict):
    raise UserError(f'{where}: rope_scaling={older!r} must be an object')
  full = {'rope_theta': raw.get('rope_theta') or _THETA} | older | rope.get(FULL, {})
  own = {'rope_theta': raw.get('rope_local_base_freq') or _WINDOW_THETA} | rope.get(WINDOWED, {})
  theta, scaling = rope_config.read({'rope_parameters': full}, 'gemma3', where)
  return {
    'layer_kinds': kinds,
    'window': integer(raw, 'sliding_window', where) if WINDOWED in kinds else 0,
    'window_rope_theta': rope_config.read({'rope_parameters': own}, '', where)[0],
    'query_scalar': 0 if scalar == head_dim else scalar,
    'rope_theta': theta,
    'rope_scaling': scaling,
  }


def _kinds(raw: dict[str, Any], num_layers: int, where: str) -> tuple[str, ...]:
  if (kinds := raw.get('layer_types')) is None:
    field = next((name for name in ('sliding_window_pattern', '_sliding_window_pattern') if name in raw), '')
    interval = integer(raw, field, where) if field else _INTERVAL
    kinds = [WINDOWED if (i + 1) % interval else FULL for i in range(num_layers)]
  if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (FULL, WINDOWED) for kind in kinds):
    other = [kind for kind in kinds if kind not in (FULL, WINDOWED)] if isinstance(kinds, list) else kinds
    raise UserError(
      f'{where}: layer_types={(other or kinds)!r} is not supported; each of the {num_layers} layers must be {FULL!r} '
      f'or {WINDOWED!r}'
    )
  return tuple(kinds)


def write(cfg: QwenConfig) -> dict[str, Any]:
  """The fields of a `config.json` that models without windows do not have."""
  return {
    'layer_types': list(cfg.kinds),
    'sliding_window': cfg.window or None,
    'rope_local_base_freq': cfg.window_rope_theta,
    'query_pre_attn_scalar': cfg.query_scalar or cfg.head_dim,
    'hidden_activation': cfg.activation,
    'attention_bias': False,
  }
