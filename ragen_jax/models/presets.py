"""Models by name: the built-in checkpoints, and checkpoints of the Hugging Face hub that are known to work."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from typing import Any

from ragen_jax.models.checkpoint.config import CONFIG_FILE, VALUE_HEAD_FILE, read_config
from ragen_jax.models.checkpoint.vision_config import IDS
from ragen_jax.models.feed_forward import ExpertsConfig
from ragen_jax.models.linear_attention import LinearConfig
from ragen_jax.models.qwen_config import FULL, LINEAR, WINDOWED, QwenConfig
from ragen_jax.models.rotary import Llama3Scaling
from ragen_jax.models.vision.config import QWEN2_5_VL, QWEN3_5, QWEN3_VL, VisionConfig
from ragen_jax.models.vision.processor import ProcessorConfig, read_processor
from ragen_jax.utils.errors import UserError, did_you_mean

TINY, TINY_VL, TINY_HYBRID = 'tiny', 'tiny-vl', 'tiny-hybrid'
# Name -> folder beside this module. `TINY_VL` reads images; `TINY_HYBRID` has linear attention.
BUILT_IN = {TINY: 'tiny', TINY_VL: 'tiny_vl', TINY_HYBRID: 'tiny_hybrid'}

# Shapes as in their config.json. Embeddings are padded beyond the tokenizer's 151,665 or 151,669 tokens.
_QWEN2_0_5B = QwenConfig()
_QWEN2_1_5B = QwenConfig(hidden_size=1536, intermediate_size=8960, num_layers=28, num_heads=12, head_dim=128)
_QWEN2_3B = QwenConfig(hidden_size=2048, intermediate_size=11008, num_layers=36, num_heads=16, head_dim=128)
_QWEN2_7B = QwenConfig(
  vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28, num_kv_heads=4,
  head_dim=128, tie_word_embeddings=False,
)  # fmt: skip
_QWEN3 = QwenConfig(architecture='qwen3', num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128)
# Embeddings are padded beyond 248,077 tokens. All sizes read images, with towers of three sizes, which are below.
_QWEN3_5_0_8B = QwenConfig(
  architecture='qwen3_5', vocab_size=248320, hidden_size=1024, intermediate_size=3584, num_layers=24, num_heads=8,
  num_kv_heads=2, head_dim=256, rope_theta=1e7, rope_width=64, rope_sections=(11, 11, 10), rope_interleaved=True,
  layer_kinds=(LINEAR, LINEAR, LINEAR, FULL) * 6,
  linear=LinearConfig(key_heads=16, value_heads=16, key_dim=128, value_dim=128, taps=4),
)  # fmt: skip
_QWEN3_5_4B = dataclasses.replace(
  _QWEN3_5_0_8B, hidden_size=2560, intermediate_size=9216, num_layers=32, num_heads=16, num_kv_heads=4,
  layer_kinds=(LINEAR, LINEAR, LINEAR, FULL) * 8, linear=dataclasses.replace(_QWEN3_5_0_8B.linear, value_heads=32),
)  # fmt: skip
_QWEN3_5_27B = dataclasses.replace(
  _QWEN3_5_4B, hidden_size=5120, intermediate_size=17408, num_layers=64, num_heads=24, tie_word_embeddings=False,
  layer_kinds=(LINEAR, LINEAR, LINEAR, FULL) * 16, linear=dataclasses.replace(_QWEN3_5_4B.linear, value_heads=48),
)  # fmt: skip
_QWEN3_30B_A3B = dataclasses.replace(
  _QWEN3, hidden_size=2048, intermediate_size=6144, num_layers=48, num_heads=32, num_kv_heads=4,
  tie_word_embeddings=False, experts=ExpertsConfig(count=128, chosen=8, width=768, normalised=True),
)  # fmt: skip
_QWEN3_5_35B_A3B = dataclasses.replace(
  _QWEN3_5_4B, hidden_size=2048, intermediate_size=512, num_layers=40, num_kv_heads=2, tie_word_embeddings=False,
  layer_kinds=(LINEAR, LINEAR, LINEAR, FULL) * 10,
  experts=ExpertsConfig(count=256, chosen=8, width=512, normalised=True, shared_width=512),
)  # fmt: skip
_LLAMA3_2_1B = QwenConfig(
  architecture='llama', vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32,
  num_kv_heads=8, rope_theta=5e5, rms_norm_eps=1e-5,
  rope_scaling=Llama3Scaling(
    factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
  ),
)  # fmt: skip
_LLAMA3_2_3B = dataclasses.replace(_LLAMA3_2_1B, hidden_size=3072, num_layers=28, num_heads=24, head_dim=128)
_SMOLLM2_135M = QwenConfig(
  architecture='llama', vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
  num_kv_heads=3, rope_theta=1e5, rms_norm_eps=1e-5,
)  # fmt: skip
_GEMMA3_KINDS = (WINDOWED, WINDOWED, WINDOWED, WINDOWED, WINDOWED, FULL)
_GEMMA3_270M = QwenConfig(
  architecture='gemma3', vocab_size=262144, hidden_size=640, intermediate_size=2048, num_layers=18, num_heads=4,
  num_kv_heads=1, head_dim=256, window=512, layer_kinds=_GEMMA3_KINDS * 3,
)  # fmt: skip
# Models that read images: the decoder of a text model, rotary positions on three axes, and a tower.
_TOWER2_5 = VisionConfig(
  family=QWEN2_5_VL, depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=2048,
  patch_size=14, temporal_patch_size=2, merge_size=2, window_size=112, full_blocks=(7, 15, 23, 31), num_positions=0,
  deepstack_blocks=(), **IDS[QWEN2_5_VL],
)  # fmt: skip
_TOWER3 = VisionConfig(
  family=QWEN3_VL, depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16, out_hidden_size=2048,
  patch_size=16, temporal_patch_size=2, merge_size=2, window_size=0, full_blocks=(), num_positions=2304,
  deepstack_blocks=(5, 11, 17), **IDS[QWEN3_VL],
)  # fmt: skip
_LARGE_TOWER3 = dict(depth=27, hidden_size=1152, intermediate_size=4304)
_TOWER3_5 = dataclasses.replace(_TOWER3, family=QWEN3_5, deepstack_blocks=(), **IDS[QWEN3_5])


def _with_tower(decoder: QwenConfig, tower: VisionConfig, **changes: Any) -> QwenConfig:
  windows = tower.family == QWEN2_5_VL
  tower = dataclasses.replace(tower, out_hidden_size=decoder.hidden_size, **changes)
  if decoder.rope_sections:
    return dataclasses.replace(decoder, vision=tower)
  return dataclasses.replace(
    decoder, rope_theta=decoder.rope_theta if windows else 5e6, rope_interleaved=not windows,
    rope_sections=(16, 24, 24) if windows else (24, 20, 20), vision=tower,
  )  # fmt: skip


_QWEN3_1_7B = dataclasses.replace(_QWEN3, hidden_size=2048, intermediate_size=6144)
_QWEN3_4B = dataclasses.replace(_QWEN3, hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32)
_QWEN3_8B = dataclasses.replace(
  _QWEN3, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, tie_word_embeddings=False
)
# Name -> repository on the hub, and shape.
_MODELS: dict[str, tuple[str, QwenConfig]] = {
  'qwen2.5-0.5b': ('Qwen/Qwen2.5-0.5B', _QWEN2_0_5B),
  'qwen2.5-0.5b-instruct': ('Qwen/Qwen2.5-0.5B-Instruct', _QWEN2_0_5B),
  'qwen2.5-1.5b': ('Qwen/Qwen2.5-1.5B', _QWEN2_1_5B),
  'qwen2.5-1.5b-instruct': ('Qwen/Qwen2.5-1.5B-Instruct', _QWEN2_1_5B),
  'qwen2.5-3b': ('Qwen/Qwen2.5-3B', _QWEN2_3B),
  'qwen2.5-3b-instruct': ('Qwen/Qwen2.5-3B-Instruct', _QWEN2_3B),
  'qwen2.5-7b': ('Qwen/Qwen2.5-7B', _QWEN2_7B),
  'qwen2.5-7b-instruct': ('Qwen/Qwen2.5-7B-Instruct', _QWEN2_7B),
  'r1-distill-qwen-1.5b': (
    'deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B',
    dataclasses.replace(_QWEN2_1_5B, rope_theta=1e4, tie_word_embeddings=False),
  ),
  'qwen3-0.6b': ('Qwen/Qwen3-0.6B', dataclasses.replace(_QWEN3, hidden_size=1024, intermediate_size=3072)),
  'qwen3-1.7b': ('Qwen/Qwen3-1.7B', _QWEN3_1_7B),
  'qwen3-4b': ('Qwen/Qwen3-4B', _QWEN3_4B),
  'qwen3-8b': ('Qwen/Qwen3-8B', _QWEN3_8B),
  'qwen3-30b-a3b': ('Qwen/Qwen3-30B-A3B', _QWEN3_30B_A3B),
  'qwen3.5-0.8b': (
    'Qwen/Qwen3.5-0.8B',
    _with_tower(_QWEN3_5_0_8B, _TOWER3_5, depth=12, hidden_size=768, intermediate_size=3072, num_heads=12),
  ),
  'qwen3.5-2b': (
    'Qwen/Qwen3.5-2B',
    _with_tower(dataclasses.replace(_QWEN3_5_0_8B, hidden_size=2048, intermediate_size=6144), _TOWER3_5),
  ),
  'qwen3.5-4b': ('Qwen/Qwen3.5-4B', _with_tower(_QWEN3_5_4B, _TOWER3_5)),
  'qwen3.5-9b': (
    'Qwen/Qwen3.5-9B',
    _with_tower(
      dataclasses.replace(_QWEN3_5_4B, hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False),
      _TOWER3_5,
      **_LARGE_TOWER3,
    ),
  ),
  'qwen3.5-27b': ('Qwen/Qwen3.5-27B', _with_tower(_QWEN3_5_27B, _TOWER3_5, **_LARGE_TOWER3)),
  'qwen3.5-35b-a3b': ('Qwen/Qwen3.5-35B-A3B', _with_tower(_QWEN3_5_35B_A3B, _TOWER3_5, **_LARGE_TOWER3)),
  'llama3.2-1b': ('meta-llama/Llama-3.2-1B', _LLAMA3_2_1B),
  'llama3.2-1b-instruct': ('meta-llama/Llama-3.2-1B-Instruct', _LLAMA3_2_1B),
  'llama3.2-3b': ('meta-llama/Llama-3.2-3B', _LLAMA3_2_3B),
  'llama3.2-3b-instruct': ('meta-llama/Llama-3.2-3B-Instruct', _LLAMA3_2_3B),
  'smollm2-135m': ('HuggingFaceTB/SmolLM2-135M-Instruct', _SMOLLM2_135M),
  'smollm2-360m': (
    'HuggingFaceTB/SmolLM2-360M-Instruct',
    dataclasses.replace(
      _SMOLLM2_135M, hidden_size=960, intermediate_size=2560, num_layers=32, num_heads=15, num_kv_heads=5
    ),
  ),
  'smollm2-1.7b': (
    'HuggingFaceTB/SmolLM2-1.7B-Instruct',
    dataclasses.replace(
      _SMOLLM2_135M,
      hidden_size=2048,
      intermediate_size=8192,
      num_layers=24,
      num_heads=32,
      num_kv_heads=32,
      rope_theta=1.3e5,
    ),
  ),
  'gemma3-270m': ('google/gemma-3-270m-it', _GEMMA3_270M),
  'gemma3-1b': (
    'google/gemma-3-1b-it',
    dataclasses.replace(
      _GEMMA3_270M, hidden_size=1152, intermediate_size=6912, num_layers=26, layer_kinds=(_GEMMA3_KINDS * 5)[:26]
    ),
  ),
  'qwen2.5-vl-3b': ('Qwen/Qwen2.5-VL-3B-Instruct', _with_tower(_QWEN2_3B, _TOWER2_5)),
  'qwen2.5-vl-7b': ('Qwen/Qwen2.5-VL-7B-Instruct', _with_tower(_QWEN2_7B, _TOWER2_5)),
  'qwen3-vl-2b': ('Qwen/Qwen3-VL-2B-Instruct', _with_tower(_QWEN3_1_7B, _TOWER3)),
  'qwen3-vl-4b': ('Qwen/Qwen3-VL-4B-Instruct', _with_tower(_QWEN3_4B, _TOWER3)),
  'qwen3-vl-8b': (
    'Qwen/Qwen3-VL-8B-Instruct',
    _with_tower(_QWEN3_8B, _TOWER3, **_LARGE_TOWER3, deepstack_blocks=(8, 16, 24)),
  ),
}
PRESETS = {name: repository for name, (repository, _) in _MODELS.items()}

# Family -> least and most pixels of an image, mean and deviation of the channels, as in its preprocessor_config.json.
_PROCESSORS = {
  QWEN2_5_VL: (
    3136, 12_845_056, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711),
  ),
  **dict.fromkeys((QWEN3_VL, QWEN3_5), (65_536, 16_777_216, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))),
}  # fmt: skip

# Patterns of files to download: weights, configs, tokenizers and chat templates, no code; and other copies of weights.
_DOWNLOADED = ('*.json', '*.safetensors', '*.txt', '*.jinja')
_NOT_DOWNLOADED = ('original/*', 'onnx/*', 'runs/*')


def names() -> tuple[str, ...]:
  """The names of all presets, the built-in checkpoints first."""
  return (*BUILT_IN, *PRESETS)


def shape(preset: str, path: str) -> QwenConfig:
  """The shape of a model. Needs neither its weights nor a download.

  `path` is a directory with a config.json, or '' for the preset, which is one of `names()` and otherwise ignored.

  Raises:
    UserError: the preset is unknown, or `path` has no config.json of a supported model.
  """
  if path:
    return read_config(path)
  if preset in BUILT_IN:
    return read_config(resolve(preset, ''))
  if preset not in _MODELS:
    raise UserError(_unknown(preset))
  return _MODELS[preset][1]


def check_name(preset: str) -> None:
  """Refuses a name of no preset: even with a path, it would choose settings (a misspelt '-lora': no LoRA)."""
  if preset not in names():
    raise UserError(_unknown(preset))


def _unknown(preset: str) -> str:
  hint = did_you_mean(preset, names())
  return f'model.preset={preset!r}: there is no such model; {hint}allowed: {", ".join(names())}; each also with -lora'


def processor(preset: str, path: str) -> ProcessorConfig | None:
  """How a model's images become patches; None if it reads text only. Arguments and errors are those of `shape`.

  Raises:
    UserError: the directory has no processor for its model.
  """
  vision = shape(preset, path).vision
  if vision is None:
    return None
  if path or preset in BUILT_IN:
    return read_processor(path or resolve(preset, ''), vision)
  return ProcessorConfig(vision.patch_size, vision.temporal_patch_size, vision.merge_size, *_PROCESSORS[vision.family])


def resolve(preset: str, path: str) -> str:
  """The local directory of a model's checkpoint. A model of the hub is downloaded on first use.

  `path` is a local checkpoint directory, or '' for the preset, which is one of `names()` and otherwise ignored.

  Raises:
    UserError: the preset is unknown, `path` is no checkpoint, or the model is neither cached nor can be downloaded.
  """
  if path:
    _check_checkpoint(path, f'model.path={path!r}')
    return path
  if preset in BUILT_IN:
    directory = os.path.join(os.path.dirname(os.path.abspath(__file__)), BUILT_IN[preset])
    _check_checkpoint(directory, f'model.preset={preset!r}: {directory}')
    return directory
  if preset not in PRESETS:
    raise UserError(_unknown(preset))
  return _download(preset, PRESETS[preset])


def _check_checkpoint(directory: str, what: str) -> None:
  names = os.listdir(directory) if os.path.isdir(directory) else []
  weights = any(name.endswith('.safetensors') and name != VALUE_HEAD_FILE for name in names)
  if not os.path.exists(directory):
    problem = 'does not exist'
  elif not os.path.isdir(directory):
    problem = 'is not a directory'
  elif not weights and os.path.isdir(os.path.join(directory, 'checkpoints')):
    problem = (
      f'is the workdir of a run and no model; --mode=export with the flags of the run and --workdir={directory} '
      "writes its model, and a warm start's is in sft.output"
    )
  elif not os.path.isfile(os.path.join(directory, CONFIG_FILE)):
    problem = f'has no {CONFIG_FILE}, so it is no Hugging Face checkpoint'
  elif not weights:
    problem = 'has no *.safetensors, and weights in other formats are not read'
  else:
    return
  raise UserError(f'{what} {problem}')


def _download(preset: str, repository: str) -> str:
  # Imported here because it is slow to import and only these presets need it.
  from huggingface_hub import snapshot_download

  try:
    return snapshot_download(repository, allow_patterns=list(_DOWNLOADED), ignore_patterns=list(_NOT_DOWNLOADED))
  except Exception as e:  # the exceptions of the transport differ between versions
    reason = textwrap.shorten(f'{type(e).__name__}: {e}', 200, placeholder=' ...')
    raise UserError(
      f'model.preset={preset!r}: {repository} cannot be downloaded ({reason}); with the weights in a directory, '
      'give --config.model.path=DIR'
    ) from e
