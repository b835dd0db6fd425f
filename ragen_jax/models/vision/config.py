"""The shape of a vision tower."""

from __future__ import annotations

import dataclasses

# Families of models that read images, by the `model_type` of their config.json, which says behind it whether the
# decoder has experts.
QWEN2_5_VL = 'qwen2_5_vl'
QWEN3_VL = 'qwen3_vl'
QWEN3_5 = 'qwen3_5'
FAMILIES = (QWEN2_5_VL, QWEN3_VL, QWEN3_5)

CHANNELS = 3


@dataclasses.dataclass(frozen=True)
class VisionConfig:
  """The shape of a vision tower, and the ids of image tokens; fields correspond to those of `vision_config`.

  A patch is a square of pixels; a token is a square of patches, whose features a merger joins.

  Attributes:
    family: one of `FAMILIES`.
    num_heads: attention heads, whose width is divisible by 4.
    out_hidden_size: width of the features, that of the decoder.
    patch_size: pixels of a side of a patch.
    temporal_patch_size: frames of a patch; a still image is repeated.
    merge_size: patches of a side of a token.
    window_size: pixels of a side of an attention window; 0 if every block attends to the whole image.
    full_blocks: blocks that attend to the whole image although there are windows.
    num_positions: rows of the learned table of positions, a square number; 0 without a table.
    deepstack_blocks: blocks after which features are taken for the first layers of the decoder (DeepStack).
    image_token_id: id of the placeholder, one for each token of an image.
    video_token_id: id of the placeholder of videos, which are not supported.
  """

  family: str
  depth: int
  hidden_size: int
  intermediate_size: int
  num_heads: int
  out_hidden_size: int
  patch_size: int
  temporal_patch_size: int
  merge_size: int
  window_size: int
  full_blocks: tuple[int, ...]
  num_positions: int
  deepstack_blocks: tuple[int, ...]
  image_token_id: int
  video_token_id: int
  vision_start_token_id: int
  vision_end_token_id: int

  @property
  def head_dim(self) -> int:
    """Width of an attention head."""
    return self.hidden_size // self.num_heads

  @property
  def patch_values(self) -> int:
    """Numbers of a patch: channels, frames and pixels."""
    return CHANNELS * self.temporal_patch_size * self.patch_size**2

  @property
  def window_tokens(self) -> int:
    """Tokens of a side of an attention window; 0 without windows."""
    return self.window_size // self.merge_size // self.patch_size
