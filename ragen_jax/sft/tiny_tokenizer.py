"""The tokenizer and the fresh model of a warm start from scratch.

Byte-level tokens represent any text (in NFC, like Qwen's). Added tokens represent the fixed pieces of prompts and
replies, so a fixed sentence needs one token instead of about thirty word pieces. A board square is one token.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from flax import nnx
from jax.sharding import Mesh
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ragen_jax.distributed.sharding import place, row_sharding
from ragen_jax.models import lora
from ragen_jax.models.attention_choice import choose_attention
from ragen_jax.models.linear_attention import LinearConfig
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import FULL, LINEAR, QwenConfig
from ragen_jax.models.rotary import AXES
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.models.vision.config import VisionConfig
from ragen_jax.sft import tiny_vision
from ragen_jax.utils.sizes import round_up

# Columns that the convolution of linear attention reads, as in Qwen3.5.
_TAPS = 4

PAD, START, END = '<|endoftext|>', '<|im_start|>', '<|im_end|>'

_CHAT_TEMPLATE = (
  "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
  "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def build(pieces: Iterable[str], *, images: bool) -> Tokenizer:
  """A tokenizer with one token for each piece. If several pieces match, the longest is used.

  The pieces have no special tokens of the chat format. Ids are in the order special tokens, those for images if
  `images`, bytes, pieces.
  """
  specials = [PAD, START, END, *(tiny_vision.SPECIALS if images else ())]
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocab = {token: i for i, token in enumerate(specials + alphabet)}
  tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
  # As in Qwen's tokenizer; `transformers` adds this normalizer for every checkpoint of this architecture.
  tokenizer.normalizer = normalizers.NFC()
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
  # Pieces of one byte are base tokens already.
  wanted = [p for p in dict.fromkeys(pieces) if len(p.encode()) > 1]
  tokenizer.add_tokens([AddedToken(p, special=False, normalized=False) for p in wanted])
  return tokenizer


def save(tokenizer: Tokenizer, directory: str) -> None:
  """Writes tokenizer.json and tokenizer_config.json in the format of `transformers`."""
  tokenizer.save(os.path.join(directory, 'tokenizer.json'), pretty=False)
  config = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'model_max_length': 32768,
    'eos_token': END,
    'pad_token': PAD,
    'clean_up_tokenization_spaces': False,
    'chat_template': _CHAT_TEMPLATE,
  }
  with open(os.path.join(directory, 'tokenizer_config.json'), 'w', encoding='utf-8') as f:
    json.dump(config, f, indent=2, ensure_ascii=False)
    f.write('\n')


def _by_axis(head_dim: int) -> tuple[int, ...]:
  """The rotary frequencies of time, rows and columns."""
  by_side = head_dim // 2 // AXES
  return head_dim // 2 - 2 * by_side, by_side, by_side


def make_model(
  shape: Sequence[int],
  num_tokens: int,
  *,
  tower: VisionConfig | None,
  linear_layers: int,
  dtype: Any,
  attention: str,
  seed: int,
  mesh: Mesh,
) -> ActorCritic:
  """A policy with fresh weights and a value head, divided over the devices.

  It is a Qwen2; with a tower a Qwen3-VL; with `linear_layers` before each layer of full attention a Qwen3.5.

  `shape` is model width, layers, query heads, key/value heads, head width, MLP width; heads of linear attention are as
  many and as wide as the query heads. The embedding of `num_tokens` is padded to a multiple of 8. `attention` is
  `config.model.attention`.
  """
  width, layers, heads, kv_heads, head_dim, mlp = shape
  cfg = QwenConfig(
    vocab_size=round_up(num_tokens, 8),
    hidden_size=width,
    intermediate_size=mlp,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=head_dim,
    rope_theta=10_000.0 if tower is None else 1000.0,
  )
  if tower is not None:
    cfg = dataclasses.replace(
      cfg, architecture='qwen3', rope_sections=_by_axis(head_dim), rope_interleaved=True, vision=tower
    )
  elif linear_layers:
    cfg = dataclasses.replace(
      cfg, architecture='qwen3_5', rope_width=head_dim, rope_sections=_by_axis(head_dim), rope_interleaved=True,
      layer_kinds=((LINEAR,) * linear_layers + (FULL,)) * (layers // (linear_layers + 1)),
      linear=LinearConfig(heads, heads, head_dim, head_dim, taps=_TAPS),
    )  # fmt: skip
  settings = choose_attention(attention, cfg, dtype, mesh)
  model = ActorCritic(Qwen(cfg, dtype=dtype, attention=settings, rngs=nnx.Rngs(seed)))
  if tower is not None:
    tiny_vision.scale_fresh_weights(model.policy)
  if mesh.size > 1:
    model.policy.activation_sharding = row_sharding(mesh)
    params = nnx.split(model)[1]
    nnx.update(model, place(params, lora.shardings(params, mesh)))
  return model
