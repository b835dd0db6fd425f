"""Small random policies that read images of boards."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import zlib
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import ContextManager, ContextSettings, ParsedReply
from ragen_jax.agent.language_model import LanguageModel
from ragen_jax.agent.templates import prompt_pieces
from ragen_jax.agent.world_model.formats import read_sections
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.models.checkpoint.vision_config import TRUNKS
from ragen_jax.models.linear_attention import LinearConfig
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import FULL, LINEAR, QwenConfig
from ragen_jax.models.vision.config import QWEN2_5_VL, QWEN3_5, QWEN3_VL, VisionConfig
from ragen_jax.sft import tiny_tokenizer
from tests.support.configs import small_config

VISION_TOKENS = ('<|vision_start|>', '<|image_pad|>', '<|vision_end|>', '<|video_pad|>', '<|box_start|>')
# A visual token has 8 x 8 pixels, so a board of 4 x 4 tiles has 16 tokens.
FACTOR = 8


def seeing_config(**fields) -> ConfigDict:
  """A config of seconds whose policy sees the board of FrozenLake as an image."""
  return small_config(
    {
      'envs.FrozenLake.observation': 'image',
      'agent.max_response_tokens': 6,
      'agent.max_context': 320,
      'length_step': 64,
      'eval.greedy_too': False,
    },
    **fields,
  )


def write_processor(directory: pathlib.Path, **changes) -> None:
  raw = {
    'patch_size': 4, 'temporal_patch_size': 2, 'merge_size': 2, 'min_pixels': 256, 'max_pixels': 65536,
    'image_mean': [0.5, 0.4, 0.3], 'image_std': [0.5, 0.6, 0.7],
  }  # fmt: skip
  (directory / 'preprocessor_config.json').write_text(json.dumps(raw | changes))


def checkpoint(config: ConfigDict, directory: pathlib.Path, family: str, *, seed: int = 0) -> str:
  """Writes a random checkpoint with a tokenizer for the prompts of `config.train.tags`; returns its directory."""
  specs = build.env_specs(config, tuple(config.train.tags), (1,) * len(config.train.tags))
  files = directory / 'tokenizer'
  files.mkdir(parents=True, exist_ok=True)
  pieces = prompt_pieces(
    [dataclasses.replace(s, tile=None) for s in specs] + specs, build.fill(ContextSettings, config.agent)
  )
  tokenizer = tiny_tokenizer.build(pieces, images=False)
  tokenizer.add_special_tokens(list(VISION_TOKENS))
  tiny_tokenizer.save(tokenizer, str(files))
  start, pad, end, video, _ = map(tokenizer.token_to_id, VISION_TOKENS)
  windows, hybrid = family == QWEN2_5_VL, family == QWEN3_5
  tower = VisionConfig(
    family=family, depth=2, hidden_size=16, intermediate_size=20, num_heads=2, out_hidden_size=32, patch_size=4,
    temporal_patch_size=2, merge_size=2, window_size=16 if windows else 0, full_blocks=(1,) if windows else (),
    num_positions=0 if windows else 16, deepstack_blocks=(0, 1) if family == QWEN3_VL else (), image_token_id=pad,
    video_token_id=video, vision_start_token_id=start, vision_end_token_id=end,
  )  # fmt: skip
  # A small `rms_norm_eps` multiplies rounding where a memory gives little, see `support.vision`.
  cfg = QwenConfig(
    architecture=TRUNKS[family], vocab_size=ChatTokenizer(files).size, hidden_size=32,
    intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, rope_theta=1e4,
    rope_sections=(2, 1, 1), rope_interleaved=not windows, vision=tower, rope_width=8 * hybrid,
    layer_kinds=(LINEAR, FULL) * hybrid, rms_norm_eps=1e-2 if hybrid else 1e-6,
    linear=LinearConfig(key_heads=2, value_heads=4, key_dim=4, value_dim=8, taps=3) if hybrid else None,
  )  # fmt: skip
  model = Qwen(cfg, rngs=nnx.Rngs(seed))
  # Larger weights than the initial ones, so that images matter.
  rng = np.random.default_rng(seed)
  for _, part in nnx.iter_modules(model.visual):
    for name, value in list(vars(part).items()):
      if isinstance(value, nnx.Param) and name == 'bias':
        value.set_value(jax.numpy.asarray(0.3 * rng.normal(size=value.shape), value.dtype))
  path = directory / 'model'
  save_model(str(path), model, cfg, 'float32', tokenizer_dir=str(files))
  write_processor(path)
  return str(path)


def seeing_policy(config: ConfigDict, directory: pathlib.Path, family: str) -> LanguageModel:
  """The policy of a random checkpoint, loaded as a run would, with a value head; sets `config.model.path`."""
  config.model.path = checkpoint(config, directory, family)
  policy = build.load_policy(config)
  kernel = policy.model.value_head.kernel
  kernel.set_value(jax.random.normal(jax.random.key(5), kernel.shape))
  return policy


def act_at_random(context: ContextManager, monkeypatch: pytest.MonkeyPatch) -> None:
  """Lets every reply name an action of FrozenLake, so that a random policy sees several boards in an episode."""

  def parse(env: int, text: str, ids: Sequence[int] = ()) -> ParsedReply:
    del env, ids
    action = zlib.crc32(text.encode()) % 4
    return ParsedReply((action,), (FrozenLake.action_names[action],), True, read_sections(text, 'free_think'))

  monkeypatch.setattr(context, 'parse', parse)
