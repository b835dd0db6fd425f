"""Small models that read images: random checkpoints written by `transformers`, and conversations with images."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import numpy as np

from ragen_jax.agent.segments import ImageSegment, ImageSpan
from ragen_jax.models.vision.config import QWEN2_5_VL, QWEN3_5, QWEN3_VL

# Ids of the small vocabulary.
VOCAB = 100
IMAGE, VIDEO, START, END = 97, 98, 95, 96

_TEXT = {
  'vocab_size': VOCAB, 'hidden_size': 64, 'intermediate_size': 48, 'num_hidden_layers': 3, 'num_attention_heads': 4,
  'num_key_value_heads': 2, 'rms_norm_eps': 1e-6, 'bos_token_id': None, 'eos_token_id': None, 'pad_token_id': 0,
}  # fmt: skip
_VISION = {
  'depth': 3, 'hidden_size': 32, 'num_heads': 2, 'intermediate_size': 40, 'out_hidden_size': 64,
  'temporal_patch_size': 2, 'spatial_merge_size': 2,
}  # fmt: skip
_IDS = {
  'image_token_id': IMAGE,
  'video_token_id': VIDEO,
  'vision_start_token_id': START,
  'vision_end_token_id': END,
}
# With the usual `rms_norm_eps`, the norm of what is read from a memory multiplies rounding in columns that read little:
# transformers' own logits differ by 5e-4 between float32 and float64.
_HYBRID = {
  'rms_norm_eps': 1e-3, 'num_hidden_layers': 4,
  'layer_types': ['linear_attention', 'linear_attention', 'full_attention', 'linear_attention'],
  'linear_num_key_heads': 2, 'linear_num_value_heads': 4, 'linear_key_head_dim': 8, 'linear_value_head_dim': 12,
}  # fmt: skip
_WITH_EXPERTS = {
  'num_experts': 4, 'num_experts_per_tok': 2, 'moe_intermediate_size': 24, 'shared_expert_intermediate_size': 16,
}  # fmt: skip
# preprocessor_config.json of the hub, with less pixels at least.
PROCESSORS = {
  QWEN2_5_VL: {
    'image_mean': [0.48145466, 0.4578275, 0.40821073],
    'image_std': [0.26862954, 0.26130258, 0.27577711],
    'min_pixels': 3136,
    'max_pixels': 200704,
    'patch_size': 14,
  },
  QWEN3_VL: {
    'image_mean': [0.5, 0.5, 0.5],
    'image_std': [0.5, 0.5, 0.5],
    'size': {'shortest_edge': 4096, 'longest_edge': 200704},
    'patch_size': 16,
  },
}
# Behind the name of a family whose decoder has experts.
EXPERTS = '_moe'
PROCESSORS |= dict.fromkeys((QWEN3_5, QWEN3_5 + EXPERTS), PROCESSORS[QWEN3_VL])


def hf_config(transformers, family: str, **text):
  """A small config whose every part matters."""
  if family == QWEN2_5_VL:
    rope = {'rope_type': 'default', 'rope_theta': 1e4, 'mrope_section': [2, 3, 3]}
    vision = _VISION | {'patch_size': 14, 'window_size': 112, 'fullatt_block_indexes': [1]}
    text = {'num_hidden_layers': 2} | text
    make = transformers.Qwen2_5_VLConfig
  elif family.startswith(QWEN3_5):
    # Two thirds of a head are rotated.
    rope = {'rope_type': 'default', 'rope_theta': 1e4, 'partial_rotary_factor': 2 / 3, 'mrope_section': [3, 3, 2]}
    vision = _VISION | {'patch_size': 16, 'num_position_embeddings': 64}
    rope |= {'mrope_interleaved': True}
    text = _HYBRID | {'head_dim': 24} | (_WITH_EXPERTS if family.endswith(EXPERTS) else {}) | text
    make = transformers.Qwen3_5MoeConfig if family.endswith(EXPERTS) else transformers.Qwen3_5Config
  else:
    rope = {'rope_type': 'default', 'rope_theta': 1e4, 'mrope_section': [3, 3, 2], 'mrope_interleaved': True}
    vision = _VISION | {'patch_size': 16, 'num_position_embeddings': 64, 'deepstack_visual_indexes': [0, 2]}
    text = {'head_dim': 16} | text
    make = transformers.Qwen3VLConfig
  tied = family == QWEN2_5_VL
  return make(
    text_config=_TEXT | {'rope_parameters': rope} | text, vision_config=vision, tie_word_embeddings=tied, **_IDS
  )


def hf_model(transformers, family: str, directory: pathlib.Path):
  """A random model of `transformers`, and its checkpoint with a processor in `directory`."""
  import torch

  model_class = {
    QWEN2_5_VL: transformers.Qwen2_5_VLForConditionalGeneration,
    QWEN3_VL: transformers.Qwen3VLForConditionalGeneration,
    QWEN3_5: transformers.Qwen3_5ForConditionalGeneration,
    QWEN3_5 + EXPERTS: transformers.Qwen3_5MoeForConditionalGeneration,
  }[family]
  theirs = model_class(hf_config(transformers, family)).eval()
  rng = torch.Generator().manual_seed(len(family))
  with torch.no_grad():
    for name, weight in theirs.named_parameters():
      noise = torch.randn(weight.shape, generator=rng)
      if ('norm' in name and name.endswith('weight')) or 'ln_q' in name:
        # Those of Qwen3.5's decoder are differences from 1, but for the norm of the linear attention.
        from_one = family.startswith(QWEN3_5) and 'language_model' in name and 'linear_attn' not in name
        weight.copy_((not from_one) + 0.3 * noise)
      elif name.endswith('bias'):
        weight.copy_(0.2 * noise)
      else:
        weight.copy_(noise * (0.3 if weight.ndim < 2 else weight[0].numel() ** -0.5))
  theirs.save_pretrained(directory)
  write_processor(directory, family)
  return theirs


def write_processor(directory: pathlib.Path, family: str, **changes) -> None:
  raw = PROCESSORS[family] | {'temporal_patch_size': 2, 'merge_size': 2, 'do_resize': True} | changes
  (pathlib.Path(directory) / 'preprocessor_config.json').write_text(json.dumps(raw))


def image_of(height: int, width: int, seed: int = 0) -> np.ndarray:
  """Random blocks with noise: u8[H, W, 3]."""
  rng = np.random.default_rng(seed)
  blocks = rng.integers(0, 256, (-(-height // 7), -(-width // 5), 3)).repeat(7, axis=0).repeat(5, axis=1)
  noise = rng.integers(-20, 20, (height, width, 3))
  return np.clip(blocks[:height, :width] + noise, 0, 255).astype(np.uint8)


@dataclasses.dataclass(frozen=True)
class Conversation:
  """A row with images.

  Attributes:
    tokens: i64[T].
    grids: (rows, columns) of patches of each image.
    patches: of each image, f32[P, values].
  """

  tokens: np.ndarray
  grids: tuple[tuple[int, int], ...]
  patches: tuple[np.ndarray, ...]


def conversation(grids, values: int, text: tuple[int, ...], seed: int = 0) -> Conversation:
  """Text, image, text, image, ...: `text[i]` random tokens before each image, and the last number behind all."""
  rng = np.random.default_rng(seed)
  tokens: list[int] = []
  for count, grid in zip(text, (*grids, None), strict=True):
    tokens += rng.integers(1, START, count).tolist()
    if grid is not None:
      tokens += [START, *[IMAGE] * (grid[0] * grid[1] // 4), END]
  patches = tuple(rng.normal(size=(h * w, values)).astype(np.float32) for h, w in grids)
  return Conversation(np.array(tokens), tuple(grids), patches)


def columns_of(parts: Sequence[int | ImageSegment], pad: int) -> tuple[list[int], list[ImageSpan]]:
  """The ids of columns and the places of images, from token ids and images in their order."""
  ids, spans = [], []
  for part in parts:
    if isinstance(part, ImageSegment):
      spans.append(ImageSpan(part, len(ids), len(ids) + part.columns))
      ids += [pad] * part.columns
    else:
      ids.append(part)
  return ids, spans
