"""The fresh vision tower of a warm start from scratch: a small one of Qwen3-VL, with a token for 8 x 8 pixels."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ragen_jax.models.checkpoint.config import write_json
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.vision.config import CHANNELS, QWEN3_VL, VisionConfig
from ragen_jax.models.vision.processor import PROCESSOR_FILE

# A token is a patch of 8 x 8 pixels, the smallest tile of a board; there are no videos, so a patch has one frame.
_PATCH, _MERGE, _FRAMES = 8, 1, 1
# Rows and columns of the learned table of positions: one for each tile of a board of 6 x 6.
_POSITIONS_SIDE = 6
# Most tokens of an image; larger images are reduced.
_MAX_TOKENS = 1024
# About the mean and the deviation of the tiles' pixels, which are bright. With those of photographs, the tiles of a
# board would be nearly equal vectors.
_MEAN, _STD = 0.75, 0.25
# Factors on the initial positions and on the initial norm of the decoder's queries. Positions are then as large as what
# a tile shows, and attention is sharp enough to single one out; without both, a model needs several times as many steps
# until it finds a tile.
_POSITIONS_FACTOR, _QUERIES_FACTOR = 4.0, 2.0

START, END, IMAGE, VIDEO = '<|vision_start|>', '<|vision_end|>', '<|image_pad|>', '<|video_pad|>'
SPECIALS = (START, END, IMAGE, VIDEO)


def tower_config(shape: Sequence[int], out_width: int, ids: Mapping[str, int]) -> VisionConfig:
  """The shape of a fresh tower for a decoder of `out_width`; `ids` are those of `SPECIALS`.

  `shape` is width, blocks, heads, MLP width.
  """
  width, depth, heads, mlp = shape
  return VisionConfig(
    family=QWEN3_VL,
    depth=depth,
    hidden_size=width,
    intermediate_size=mlp,
    num_heads=heads,
    out_hidden_size=out_width,
    patch_size=_PATCH,
    temporal_patch_size=_FRAMES,
    merge_size=_MERGE,
    window_size=0,
    full_blocks=(),
    num_positions=_POSITIONS_SIDE**2,
    deepstack_blocks=(),
    image_token_id=ids[IMAGE],
    video_token_id=ids[VIDEO],
    vision_start_token_id=ids[START],
    vision_end_token_id=ids[END],
  )


def scale_fresh_weights(model: Qwen) -> None:
  """Scales weights of a fresh model with a tower so that it learns sooner where things are."""
  positions = model.visual.pos_embed
  positions.set_value(_POSITIONS_FACTOR * positions[...])
  for layer in model.layers:
    weight = layer.self_attn.q_norm.weight
    weight.set_value(_QUERIES_FACTOR * weight[...])


def save_processor(directory: str) -> None:
  """Writes the preprocessor_config.json of a fresh tower in the format of `transformers`."""
  token = (_PATCH * _MERGE) ** 2  # pixels
  config = {
    'image_processor_type': 'Qwen2VLImageProcessor',
    'do_resize': True,
    'do_rescale': True,
    'do_normalize': True,
    'do_convert_rgb': True,
    'image_mean': [_MEAN] * CHANNELS,
    'image_std': [_STD] * CHANNELS,
    'size': {'shortest_edge': token, 'longest_edge': _MAX_TOKENS * token},
    'patch_size': _PATCH,
    'temporal_patch_size': _FRAMES,
    'merge_size': _MERGE,
  }
  write_json(os.path.join(directory, PROCESSOR_FILE), config)
