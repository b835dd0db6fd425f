"""The part of `config.json` that describes the rotary embedding, where any version of `transformers` puts it."""

from __future__ import annotations

import dataclasses
from typing import Any

from ragen_jax.models.checkpoint.fields import number
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.models.rotary import LinearScaling, Llama3Scaling
from ragen_jax.utils.errors import UserError

# Architecture -> the type of scaling that it may have.
_SCALED = {'llama': ('llama3', Llama3Scaling), 'gemma3': ('linear', LinearScaling)}


def read(raw: dict[str, Any], architecture: str, where: str) -> tuple[float, Llama3Scaling | LinearScaling | None]:
  """The base of the wavelengths and their scaling, from `rope_theta`, `rope_scaling` or `rope_parameters`.

  `raw` are the fields of the decoder. Only Llama and Gemma 3 models can be scaled.

  Raises:
    UserError: the rotary embedding is of another type, or differs from layer to layer.
  """
  field = 'rope_scaling' if raw.get('rope_scaling') else 'rope_parameters'
  rope = raw.get(field) or {}
  if not isinstance(rope, dict):
    raise UserError(f'{where}: {field}={rope!r} must be an object')
  kind = rope.get('rope_type', rope.get('type', 'default'))
  known, scaling = _SCALED.get(architecture, (None, None))
  scaled = known is not None and kind == known
  # Older files of models that read images have another name for unscaled rotary embeddings of several axes.
  if kind != 'default' and not scaled and not (kind == 'mrope' and 'mrope_section' in rope):
    allowed = f"only 'default' (unscaled) and {known!r} are" if known else "only 'default' (unscaled) is"
    raise UserError(f'{where}: {field}.rope_type={kind!r} is not supported; {allowed}')
  if any(isinstance(value, dict) for value in rope.values()):
    raise UserError(f'{where}: {field}={rope!r} differs from layer to layer, which is not supported')
  for owner, value in ((f'{field}.', rope.get('partial_rotary_factor')), ('', raw.get('partial_rotary_factor'))):
    if value not in (None, 1) and architecture != 'qwen3_5':  # see `linear_config`
      raise UserError(f'{where}: {owner}partial_rotary_factor={value!r} is not supported; only 1.0 is')
  given = next(({'rope_theta': x['rope_theta']} for x in (rope, raw) if x.get('rope_theta') is not None), {})
  theta = number(given, 'rope_theta', 10000.0, where)
  return theta, _scaling(rope, scaling, f'{where}: {field}') if scaled else None


def _scaling(rope: dict[str, Any], kind: type, where: str) -> Llama3Scaling | LinearScaling:
  found = {}
  for field in dataclasses.fields(kind):
    value = rope.get(field.name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
      raise UserError(f'{where}.{field.name}={value!r} must be a positive number')
    found[field.name] = value
  scaling = kind(**found)
  if kind is Llama3Scaling and scaling.high_freq_factor <= scaling.low_freq_factor:
    raise UserError(
      f'{where}.high_freq_factor={scaling.high_freq_factor!r} must be larger than '
      f'low_freq_factor={scaling.low_freq_factor!r}'
    )
  return scaling


def write(cfg: QwenConfig) -> dict[str, Any]:
  """The fields of a model's rotary embedding of one axis."""
  if cfg.rope_scaling is None:
    return {'rope_theta': cfg.rope_theta}
  return {
    'rope_theta': cfg.rope_theta,
    'rope_scaling': {'rope_type': _SCALED[cfg.architecture][0], **dataclasses.asdict(cfg.rope_scaling)},
  }
