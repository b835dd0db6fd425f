"""The part of `config.json` that describes how a model reads images: `vision_config`, ids, and the rotary axes.

Published Qwen2.5-VL files have the decoder's fields beside `vision_config`; those of Qwen3-VL and Qwen3.5, and of
`transformers` 5, have them in `text_config`. Both are read.
"""

from __future__ import annotations

from typing import Any

from ragen_jax.models.checkpoint.fields import integer, unsupported
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.models.rotary import AXES
from ragen_jax.models.vision.config import CHANNELS, QWEN2_5_VL, QWEN3_5, QWEN3_VL, VisionConfig
from ragen_jax.utils.errors import UserError

# Family -> architecture of its decoder.
TRUNKS = {QWEN2_5_VL: 'qwen2', QWEN3_VL: 'qwen3', QWEN3_5: 'qwen3_5'}

# What `transformers` takes for fields that the decoder's part of a file lacks.
TRUNK_DEFAULTS = {
  QWEN2_5_VL: {'rope_theta': 1e6, 'rms_norm_eps': 1e-5},
  QWEN3_VL: {'rope_theta': 5e5, 'rms_norm_eps': 1e-6},
  QWEN3_5: {},
}

# Fields of a source's `vision_config` that do not describe the shape and are copied unchanged into an export.
_CARRIED_FIELDS = ('tokens_per_second', 'initializer_range')

_SECTIONS = {QWEN2_5_VL: [16, 24, 24], QWEN3_VL: [24, 20, 20]}
_ACTIVATIONS = {QWEN2_5_VL: 'silu', QWEN3_VL: 'gelu_pytorch_tanh', QWEN3_5: 'gelu_pytorch_tanh'}
_ID_FIELDS = ('image_token_id', 'video_token_id', 'vision_start_token_id', 'vision_end_token_id')
_QWEN3_IDS = (151655, 151656, 151652, 151653)
# Family -> the ids of a file that lacks them.
IDS = {
  family: dict(zip(_ID_FIELDS, ids, strict=True))
  for family, ids in (
    (QWEN2_5_VL, _QWEN3_IDS), (QWEN3_VL, _QWEN3_IDS), (QWEN3_5, (248056, 248057, 248053, 248054)),
  )
}  # fmt: skip


def read(raw: dict[str, Any], text: dict[str, Any], trunk: QwenConfig, family: str, where: str) -> dict[str, Any]:
  """The fields of a `QwenConfig` that text models do not have.

  `raw` is the whole file, `text` its part that describes the decoder, and `family` one of `TRUNKS`.

  Raises:
    UserError: there is no vision tower, or it does not fit the decoder or requires a feature that is not supported.
  """
  vision = raw.get('vision_config')
  if not isinstance(vision, dict) or not vision:
    raise UserError(f'{where}: vision_config={vision!r} must describe the vision tower of a {family} model')
  rope = {} if trunk.rope_sections else _rope(text, trunk, family, where)
  if family == QWEN2_5_VL and trunk.head_dim * trunk.num_heads != trunk.hidden_size:
    raise UserError(f'{where}: head_dim={trunk.head_dim} must be hidden_size / num_attention_heads in {family} models')
  tower = _tower(vision, family, {name: raw.get(name, default) for name, default in IDS[family].items()}, where)
  if tower.out_hidden_size != trunk.hidden_size:
    raise UserError(
      f'{where}: vision_config.out_hidden_size={tower.out_hidden_size} must be the hidden_size={trunk.hidden_size}'
    )
  if len(tower.deepstack_blocks) > trunk.num_layers:
    raise UserError(f'{where}: deepstack_visual_indexes names more blocks than there are num_hidden_layers')
  return rope | {'vision': tower}


def _rope(text: dict[str, Any], trunk: QwenConfig, family: str, where: str) -> dict[str, Any]:
  """The rotary axes of a decoder whose text models have none."""
  rope = text.get('rope_scaling') or text.get('rope_parameters') or {}
  sections = rope.get('mrope_section', _SECTIONS[family])
  whole = isinstance(sections, list) and all(type(n) is int and n >= 0 for n in sections)
  if not whole or len(sections) != AXES or sum(sections) != trunk.head_dim // 2:
    raise UserError(
      f'{where}: mrope_section={sections!r} must be {AXES} numbers with the sum {trunk.head_dim // 2}, half of head_dim'
    )
  return {'rope_sections': tuple(sections), 'rope_interleaved': family == QWEN3_VL}


def _tower(vision: dict[str, Any], family: str, ids: dict[str, int], where: str) -> VisionConfig:
  where = f'{where}: vision_config'
  if vision.get('hidden_act', _ACTIVATIONS[family]) != _ACTIVATIONS[family]:
    raise unsupported(vision, 'hidden_act', f'only {_ACTIVATIONS[family]!r} is', where)
  # Older files have another name for it.
  if vision.get('in_channels', vision.get('in_chans', CHANNELS)) != CHANNELS:
    raise unsupported(vision, 'in_channels', f'only {CHANNELS} is', where)
  windows = family == QWEN2_5_VL
  cfg = VisionConfig(
    family=family,
    depth=integer(vision, 'depth', where),
    hidden_size=integer(vision, 'hidden_size', where),
    intermediate_size=integer(vision, 'intermediate_size', where),
    num_heads=integer(vision, 'num_heads', where),
    out_hidden_size=integer(vision, 'out_hidden_size', where),
    patch_size=integer({'patch_size': vision.get('patch_size', vision.get('spatial_patch_size'))}, 'patch_size', where),
    temporal_patch_size=integer({'temporal_patch_size': 2} | vision, 'temporal_patch_size', where),
    merge_size=integer({'spatial_merge_size': 2} | vision, 'spatial_merge_size', where),
    window_size=integer(vision, 'window_size', where) if windows else 0,
    full_blocks=_blocks(vision, 'fullatt_block_indexes', where) if windows else (),
    num_positions=0 if windows else integer(vision, 'num_position_embeddings', where),
    deepstack_blocks=_blocks(vision, 'deepstack_visual_indexes', where) if family == QWEN3_VL else (),
    **ids,
  )
  if cfg.hidden_size % (4 * cfg.num_heads):
    raise UserError(f'{where}.hidden_size={cfg.hidden_size} must be a multiple of 4 num_heads={4 * cfg.num_heads}')
  if windows and cfg.window_tokens < 1:
    raise UserError(f'{where}.window_size={cfg.window_size} is less than the pixels of a token')
  if round(cfg.num_positions**0.5) ** 2 != cfg.num_positions:
    raise UserError(f'{where}.num_position_embeddings={cfg.num_positions} must be a square number')
  return cfg


def _blocks(vision: dict[str, Any], field: str, where: str) -> tuple[int, ...]:
  """Indices of blocks, ascending."""
  value, depth = vision.get(field), integer(vision, 'depth', where)
  if not isinstance(value, list) or value != [i for i in range(depth) if i in value]:
    raise UserError(f'{where}.{field}={value!r} must be ascending indices of the {depth} blocks')
  return tuple(value)


def write(config: dict[str, Any], cfg: QwenConfig, source: dict[str, Any]) -> dict[str, Any]:
  """The `config.json` of a model that reads images, in the layout of the published files of its family.

  `config` are the fields of a text model of the same decoder, `source` the file that the model comes from, {} for none.
  """
  v = cfg.vision
  vision = {
    'model_type': config['model_type'],
    'depth': v.depth,
    'hidden_size': v.hidden_size,
    'hidden_act': _ACTIVATIONS[v.family],
    'intermediate_size': v.intermediate_size,
    'num_heads': v.num_heads,
    'in_channels': CHANNELS,
    'out_hidden_size': v.out_hidden_size,
    'patch_size': v.patch_size,
    'temporal_patch_size': v.temporal_patch_size,
    'spatial_merge_size': v.merge_size,
  }
  described = source.get('vision_config') or {}
  vision |= {field: described[field] for field in _CARRIED_FIELDS if field in described}
  sections = list(cfg.rope_sections)
  own = {name: getattr(v, name) for name in _ID_FIELDS}
  if v.family == QWEN2_5_VL:
    vision |= {'window_size': v.window_size, 'fullatt_block_indexes': list(v.full_blocks)}
    config = {name: x for name, x in config.items() if name != 'head_dim'}
    return config | own | {'rope_scaling': {'type': 'mrope', 'mrope_section': sections}, 'vision_config': vision}
  vision |= {
    'num_position_embeddings': v.num_positions,
    'deepstack_visual_indexes': list(v.deepstack_blocks),
  }
  root = ('architectures', 'model_type', 'tie_word_embeddings', 'torch_dtype')
  text = {name: x for name, x in config.items() if name not in ('architectures', 'use_sliding_window')}
  text['model_type'] = f'{config["model_type"]}_text'
  if v.family == QWEN3_VL:
    text['rope_scaling'] = {'rope_type': 'default', 'mrope_section': sections, 'mrope_interleaved': True}
  return {name: config[name] for name in root} | own | {'text_config': text, 'vision_config': vision}
