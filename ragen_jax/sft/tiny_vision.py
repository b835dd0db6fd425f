"""The fresh vision tower of a warm start from scratch: a small one of Qwen3-VL, with a token for 8 x 8 pixels."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ragen_jax.models.checkpoint.config import write_json
from ragen_jax.models.vision.config import CHANNELS, QWEN3_VL, VisionConfig
from ragen_jax.models.vision.processor import PROCESSOR_FILE

# A token is a square of 2 x 2 patches of 4 x 4 pixels.
_PATCH, _MERGE, _FRAMES = 4, 2, 2
# Rows and columns of the learned table of positions: one for each patch of a board of 6 x 6 tiles.
_POSITIONS_SIDE = 12
# Most tokens of an image; larger images are reduced.
_MAX_TOKENS = 1024

START, END, IMAGE, VIDEO = '<|vision_start|>', '<|vision_end|>', '<|image_pad|>', '<|video_pad|>'
SPECIALS = (START, END, IMAGE, VIDEO)


def tower_config(shape: Sequence[int], out_width: int, ids: Mapping[str, int]) -> VisionConfig:
  """The shape of a fresh tower.

  Args:
    shape: width, blocks, heads, MLP width.
    out_width: width of the decoder.
    ids: the id of each of `SPECIALS`.
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


def save_processor(directory: str) -> None:
  """Writes the preprocessor_config.json of a fresh tower in the format of `transformers`."""
  token = (_PATCH * _MERGE) ** 2  # pixels
  config = {
    'image_processor_type': 'Qwen2VLImageProcessor',
    'do_resize': True,
    'do_rescale': True,
    'do_normalize': True,
    'do_convert_rgb': True,
    'image_mean': [0.5] * CHANNELS,
    'image_std': [0.5] * CHANNELS,
    'size': {'shortest_edge': token, 'longest_edge': _MAX_TOKENS * token},
    'patch_size': _PATCH,
    'temporal_patch_size': _FRAMES,
    'merge_size': _MERGE,
  }
  write_json(os.path.join(directory, PROCESSOR_FILE), config)
