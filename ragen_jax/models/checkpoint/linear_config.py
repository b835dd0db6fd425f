"""The part of `config.json` that describes the layers of Qwen3.5: their kinds, and their linear attention."""

from __future__ import annotations

from typing import Any

from ragen_jax.models.checkpoint.fields import integer, unsupported
from ragen_jax.models.linear_attention import LinearConfig
from ragen_jax.models.qwen_config import FULL, LINEAR, QwenConfig
from ragen_jax.models.rotary import AXES
from ragen_jax.utils.errors import UserError

# What `transformers` takes where a file has no such field.
_INTERVAL, _ROTATED = 4, 0.25
_DEFAULTS = {
  'linear_num_key_heads': 16, 'linear_num_value_heads': 32, 'linear_key_head_dim': 128, 'linear_value_head_dim': 128,
  'linear_conv_kernel_dim': 4,
}  # fmt: skip

# Fields of later files that say what every model of these classes does.
_SAME = {'attn_output_gate': (True,), 'output_gate_type': ('silu', 'swish')}


def read(raw: dict[str, Any], num_layers: int, head_dim: int, where: str) -> dict[str, Any]:
  """The fields of a `QwenConfig` that models without linear attention do not have.

  Raises:
    UserError: a layer is of another kind, or a number does not fit.
  """
  for field, allowed in _SAME.items():
    if raw.get(field) is not None and raw[field] not in allowed:
      raise unsupported(raw, field, f'only {allowed[0]!r} is', where)
  shape = {field: integer(_DEFAULTS | raw, field, where) for field in _DEFAULTS}
  linear = LinearConfig(*shape.values())
  if linear.value_heads % linear.key_heads:
    raise UserError(
      f'{where}: linear_num_value_heads={linear.value_heads} must be a multiple of '
      f'linear_num_key_heads={linear.key_heads}'
    )
  if linear.taps < 2:
    raise UserError(f'{where}: linear_conv_kernel_dim={linear.taps} must be at least 2')
  kinds = _kinds(raw, num_layers, where)
  if not isinstance(_rope(raw), dict):
    raise UserError(f'{where}: rope_parameters={_rope(raw)!r} must be an object')
  if type(rotated(raw)) not in (int, float) or not 0 < rotated(raw) <= 1:
    raise UserError(f'{where}: partial_rotary_factor={rotated(raw)!r} must be a number above 0, at most 1')
  if _rope(raw).get('mrope_interleaved') not in (None, True):
    raise unsupported(_rope(raw), 'mrope_interleaved', 'only True is', where)
  width = round(rotated(raw) * head_dim)
  if abs(width - rotated(raw) * head_dim) > 1e-6 or width % 2 or not 0 < width <= head_dim:
    raise UserError(
      f'{where}: partial_rotary_factor={rotated(raw)!r} must make an even number of the head_dim={head_dim}'
    )
  half = width // 2
  sections = _rope(raw).get('mrope_section') or [half - half // 3 - (half + 1) // 3, (half + 1) // 3, half // 3]
  whole = isinstance(sections, list) and all(type(n) is int and n >= 0 for n in sections)
  if not whole or len(sections) != AXES or sum(sections) != half:
    raise UserError(f'{where}: mrope_section={sections!r} must be {AXES} whole numbers with the sum {half}')
  return {
    'layer_kinds': kinds,
    'linear': linear,
    'rope_width': width,
    'rope_sections': tuple(sections),
    'rope_interleaved': True,
  }


def _kinds(raw: dict[str, Any], num_layers: int, where: str) -> tuple[str, ...]:
  if raw.get('layer_types') is None:
    interval = integer({'full_attention_interval': _INTERVAL} | raw, 'full_attention_interval', where)
    kinds = [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)]
  else:
    kinds = raw['layer_types']
  if not isinstance(kinds, list) or len(kinds) != num_layers or {*map(str, kinds)} != {FULL, LINEAR}:
    other = [kind for kind in kinds if kind not in (FULL, LINEAR)] if isinstance(kinds, list) else kinds
    raise UserError(
      f'{where}: layer_types={(other or kinds)!r} is not supported; each of the {num_layers} layers must be {FULL!r} '
      f'or {LINEAR!r}, and both must occur'
    )
  return tuple(kinds)


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
  return raw.get('rope_parameters') or raw.get('rope_scaling') or {}


def rotated(raw: dict[str, Any]) -> float:
  """The share of a head that the rotary embedding rotates."""
  found = [fields.get('partial_rotary_factor') for fields in (_rope(raw), raw) if isinstance(fields, dict)]
  return next((x for x in found if x is not None), _ROTATED)


def write(cfg: QwenConfig) -> dict[str, Any]:
  """The fields of a text model's `config.json` that models without linear attention do not have."""
  c = cfg.linear
  values = (c.key_heads, c.value_heads, c.key_dim, c.value_dim, c.taps)
  return {
    'layer_types': list(cfg.kinds),
    **dict(zip(_DEFAULTS, values, strict=True)),
    'rope_parameters': {
      'rope_type': 'default',
      'rope_theta': cfg.rope_theta,
      'partial_rotary_factor': cfg.rope_width / cfg.head_dim,
      'mrope_section': list(cfg.rope_sections),
      'mrope_interleaved': True,
    },
  }
