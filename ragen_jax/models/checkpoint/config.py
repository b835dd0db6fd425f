"""The `config.json` of a Hugging Face checkpoint: reading it as a `QwenConfig`, and writing it.

A checkpoint is a directory with `config.json`, `model.safetensors` (or shards and `model.safetensors.index.json`) and,
if this project wrote it, `value_head.safetensors`. A critic with its own trunk is a checkpoint in the subdirectory
`critic` of the policy's checkpoint; it has no output projection, and the value head is stored in that subdirectory.
Only JSON and safetensors files are read, so code in a checkpoint never runs. The layouts are those of
`Qwen2ForCausalLM`, `Qwen3ForCausalLM`, `Qwen3MoeForCausalLM`, `Qwen3_5ForCausalLM`, `Qwen3_5MoeForCausalLM`,
`LlamaForCausalLM`, `Gemma3ForCausalLM` and, for models that read images, of `Qwen2_5_VLForConditionalGeneration`,
`Qwen3VLForConditionalGeneration`, `Qwen3_5ForConditionalGeneration` and `Qwen3_5MoeForConditionalGeneration` in
`transformers`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import numpy as np

from ragen_jax.models.checkpoint import experts_config, linear_config, rope_config, vision_config, window_config
from ragen_jax.models.checkpoint.fields import integer, number, unsupported
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.utils.errors import UserError

CONFIG_FILE = 'config.json'
WEIGHTS_FILE = 'model.safetensors'
INDEX_FILE = 'model.safetensors.index.json'
VALUE_HEAD_FILE = 'value_head.safetensors'
# In directories that hold adapters only (`peft.py`).
ADAPTER_CONFIG_FILE = 'adapter_config.json'
CRITIC_DIRECTORY = 'critic'

# Type names in safetensors headers -> NumPy type names; other stored types are refused.
DTYPES = {'F32': 'float32', 'BF16': 'bfloat16', 'F16': 'float16'}

# Class -> `model_type`.
_ARCHITECTURES = {
  'Qwen2ForCausalLM': 'qwen2',
  'Qwen3ForCausalLM': 'qwen3',
  'Qwen3MoeForCausalLM': 'qwen3_moe',
  'Qwen3_5ForCausalLM': 'qwen3_5_text',
  'Qwen3_5MoeForCausalLM': 'qwen3_5_moe_text',
  'LlamaForCausalLM': 'llama',
  'Gemma3ForCausalLM': 'gemma3_text',
  'Qwen2_5_VLForConditionalGeneration': 'qwen2_5_vl',
  'Qwen3VLForConditionalGeneration': 'qwen3_vl',
  'Qwen3_5ForConditionalGeneration': 'qwen3_5',
  'Qwen3_5MoeForConditionalGeneration': 'qwen3_5_moe',
}
# Follows the architecture in the `model_type` of models with experts.
_MOE = '_moe'
# Follows the architecture in the `model_type` of the text models of families that read images.
_TEXT = '_text'
# What `transformers` takes for a `head_dim` that a file lacks, if it is not hidden_size / num_attention_heads.
_HEAD_DIMS = {'qwen3': 128, 'qwen3_5': 256, 'qwen3_5_moe': 256, 'gemma3': 256}
_UNQUANTISED = 'use the weights in float32, bfloat16 or float16'

# Fields of a source's config.json that do not describe the shape and are copied unchanged into an export.
_CARRIED_FIELDS = (
  'bos_token_id',
  'eos_token_id',
  'pad_token_id',
  'initializer_range',
  'attention_dropout',
  'max_position_embeddings',
)


def read_json(path: str) -> dict[str, Any]:
  """Reads a JSON object from a file.

  Raises:
    UserError: the file cannot be read, is not JSON, or holds something other than an object.
  """
  try:
    with open(path, encoding='utf-8') as f:
      raw = json.load(f)
  except OSError as e:
    raise UserError(f'{path}: cannot be read ({e.strerror})') from e
  except ValueError as e:
    raise UserError(f'{path}: is not JSON ({e})') from e
  if not isinstance(raw, dict):
    raise UserError(f'{path}: must hold a JSON object, not {type(raw).__name__}')
  return raw


def write_json(path: str, value: dict[str, Any]) -> None:
  """Writes a JSON object to a file, indented by two spaces."""
  with open(path, 'w', encoding='utf-8') as f:
    json.dump(value, f, indent=2)
    f.write('\n')


def is_checkpoint(directory: str) -> bool:
  """Whether a directory holds a model or adapters. A run's workdir has a `config.json` too, without these fields."""
  if os.path.isfile(os.path.join(directory, ADAPTER_CONFIG_FILE)):
    return True
  config = os.path.join(directory, CONFIG_FILE)
  return os.path.isfile(config) and not read_json(config).keys().isdisjoint(('architectures', 'model_type'))


def critic_directory(directory: str) -> str:
  """The checkpoint of the critic's trunk: the subdirectory `critic` if it exists, else the policy's `directory`."""
  own = os.path.join(directory, CRITIC_DIRECTORY)
  return own if is_checkpoint(own) else directory


def trunk_config(cfg: QwenConfig) -> QwenConfig:
  """The shape of a model without an output projection, which is the shape with tied embeddings."""
  return dataclasses.replace(cfg, tie_word_embeddings=True)


# -- reading -----------------------------------------------------------------------------------------------------------


def read_config(directory: str) -> QwenConfig:
  """Reads `config.json`; missing fields take the defaults of `transformers`.

  Raises:
    UserError: the file is missing or not JSON, or requires a feature that is not supported: another architecture,
      rotary embeddings that are scaled in another way than Llama 3's, sliding windows, biases in Qwen3 or Llama,
      quantised weights, another activation, another kind of experts.
  """
  where = os.path.join(directory, CONFIG_FILE)
  raw = read_json(where)
  family = _family(raw, where)
  of_images = family.removesuffix(_MOE)
  if of_images not in vision_config.TRUNKS:
    return _read_trunk(raw, family.removesuffix(_TEXT), where)
  text = raw.get('text_config') or raw
  if not isinstance(text, dict):
    raise UserError(f'{where}: text_config={text!r} must be an object')
  text = vision_config.TRUNK_DEFAULTS[of_images] | {k: v for k, v in text.items() if v is not None}
  if raw.get('quantization_config'):
    raise unsupported(raw, 'quantization_config', _UNQUANTISED, where)
  of_root, of_text = raw.get('tie_word_embeddings'), text.get('tie_word_embeddings')
  decides = of_images == vision_config.QWEN3_5 and of_root is not None
  text['tie_word_embeddings'] = bool(of_root if decides else of_root or of_text)
  trunk = _read_trunk(text, vision_config.TRUNKS[of_images] + family.removeprefix(of_images), where)
  return dataclasses.replace(trunk, **vision_config.read(raw, text, trunk, of_images, where))


def _read_trunk(raw: dict[str, Any], family: str, where: str) -> QwenConfig:
  architecture = family.removesuffix(_MOE)
  _check_features(raw, architecture, where)
  num_heads, num_layers = integer(raw, 'num_attention_heads', where), integer(raw, 'num_hidden_layers', where)
  hidden_size = integer(raw, 'hidden_size', where)
  num_kv_heads = num_heads if raw.get('num_key_value_heads', 0) is None else integer(raw, 'num_key_value_heads', where)
  if num_heads % num_kv_heads:
    raise UserError(f'{where}: num_key_value_heads={num_kv_heads} does not divide num_attention_heads={num_heads}')
  if raw.get('head_dim') is not None:
    head_dim = integer(raw, 'head_dim', where)
  elif family in _HEAD_DIMS and 'head_dim' not in raw:
    head_dim = _HEAD_DIMS[family]
  else:
    head_dim = hidden_size // num_heads
  if head_dim % 2:
    raise UserError(f'{where}: head_dim={head_dim} must be even')
  if architecture == 'gemma3':
    fields = window_config.read(raw, num_layers, head_dim, where)
  else:
    fields = linear_config.read(raw, num_layers, head_dim, where) if architecture == 'qwen3_5' else {}
    if not fields and _has_sliding_window(raw, num_layers):
      field = 'layer_types' if raw.get('layer_types') else 'use_sliding_window'
      raise unsupported(raw, field, 'every layer must attend to the whole context', where)
    theta, scaling = rope_config.read(raw, architecture, where)
    fields |= {'rope_theta': theta, 'rope_scaling': scaling}
  mixture = {} if family == architecture else experts_config.read(raw, architecture, num_layers, where)
  if mixture and not mixture['mlp_layers']:  # files of such models may lack what no layer has
    raw = {'intermediate_size': mixture['experts'].width} | raw
  return QwenConfig(
    architecture=architecture,
    vocab_size=integer(raw, 'vocab_size', where),
    hidden_size=hidden_size,
    intermediate_size=integer(raw, 'intermediate_size', where),
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    rms_norm_eps=number(raw, 'rms_norm_eps', 1e-6, where),
    tie_word_embeddings=bool(raw.get('tie_word_embeddings', architecture == 'gemma3')),
    **fields,
    **mixture,
  )


def _family(raw: dict[str, Any], where: str) -> str:
  """One of the values of `_ARCHITECTURES`."""
  names = raw.get('architectures')
  if names is None and raw.get('model_type') in _ARCHITECTURES.values():
    family = raw['model_type']
  elif isinstance(names, list) and len(names) == 1 and str(names[0]) in _ARCHITECTURES:
    family = _ARCHITECTURES[names[0]]
  else:
    raise unsupported(raw, 'architectures', f'supported are {", ".join(_ARCHITECTURES)}', where)
  if raw.get('model_type', family) != family:
    raise unsupported(raw, 'model_type', f'architectures={names!r} goes with {family!r}', where)
  return family


def _check_features(raw: dict[str, Any], architecture: str, where: str) -> None:
  """Raises UserError for a field that requires something other than a plain model of its architecture."""
  field, only = ('hidden_activation', 'gelu_pytorch_tanh') if architecture == 'gemma3' else ('hidden_act', 'silu')
  if raw.get(field, only) != only:
    raise unsupported(raw, field, f'only {only!r} is', where)
  if raw.get('quantization_config'):
    raise unsupported(raw, 'quantization_config', _UNQUANTISED, where)
  # Qwen2 ignores this field: it always has biases, and loading checks that they are in the weights.
  if architecture in ('qwen3', 'qwen3_5', 'gemma3') and raw.get('attention_bias', False):
    raise unsupported(raw, 'attention_bias', 'Qwen3, Qwen3.5 and Gemma 3 models have no bias', where)
  if architecture == 'llama':
    for field in ('attention_bias', 'mlp_bias'):
      if raw.get(field):
        raise unsupported(raw, field, 'Llama models must have no bias (false)', where)


def _has_sliding_window(raw: dict[str, Any], num_layers: int) -> bool:
  """Whether any layer attends to a window only, by the rules of the config classes of `transformers`."""
  if raw.get('layer_types'):
    kinds = raw['layer_types']
    return not isinstance(kinds, list) or any(kind != 'full_attention' for kind in kinds)
  window = raw.get('sliding_window', 4096) if raw.get('use_sliding_window', False) else None
  return window is not None and raw.get('max_window_layers', 28) < num_layers


# -- writing -----------------------------------------------------------------------------------------------------------


def hf_config(cfg: QwenConfig, dtype: np.dtype, tokenizer_dir: str | None) -> dict[str, Any]:
  """The content of `config.json`, with field names that transformers 4 and 5 both read.

  Ids of special tokens, and the fields that an export carries over, come from `tokenizer_dir`; None for neither.

  Raises:
    UserError: a special token's id is outside of the vocabulary.
  """
  names = {kind: name for name, kind in _ARCHITECTURES.items()}
  family = (cfg.architecture if cfg.vision is None else cfg.vision.family) + _MOE * (cfg.experts is not None)
  family += _TEXT * (cfg.vision is None and family + _TEXT in names)
  config = {
    'architectures': [names[family]],
    'model_type': family,
    'vocab_size': cfg.vocab_size,
    'hidden_size': cfg.hidden_size,
    'intermediate_size': cfg.intermediate_size,
    'num_hidden_layers': cfg.num_layers,
    'num_attention_heads': cfg.num_heads,
    'num_key_value_heads': cfg.num_kv_heads,
    'head_dim': cfg.head_dim,
    'hidden_act': 'silu',
    'max_position_embeddings': 32768,
    'rms_norm_eps': cfg.rms_norm_eps,
    'tie_word_embeddings': cfg.tie_word_embeddings,
    'use_sliding_window': False,
    'attention_dropout': 0.0,
    'initializer_range': 0.02,
    'use_cache': True,
    'torch_dtype': dtype.name,
  }
  if cfg.architecture in ('qwen3', 'qwen3_5'):
    config['attention_bias'] = False
  if cfg.architecture == 'llama':
    del config['use_sliding_window']
    config |= {'attention_bias': False, 'mlp_bias': False}
  config |= rope_config.write(cfg)
  if cfg.linear is not None:
    del config['use_sliding_window']
    config |= linear_config.write(cfg)
  if cfg.architecture == 'gemma3':
    del config['use_sliding_window'], config['hidden_act']
    config |= window_config.write(cfg)
  if cfg.experts is not None:
    config |= experts_config.write(cfg)
  raw = {}
  if tokenizer_dir is not None:
    config |= _token_ids(tokenizer_dir)
    source = os.path.join(tokenizer_dir, CONFIG_FILE)
    raw = read_json(source) if os.path.isfile(source) else {}
    described = (raw.get('text_config') or {}) | raw
    config |= {field: described[field] for field in _CARRIED_FIELDS if described.get(field) is not None}
    for field in ('bos_token_id', 'eos_token_id', 'pad_token_id'):
      found = config.get(field)
      if any(isinstance(i, int) and i >= cfg.vocab_size for i in (found if isinstance(found, list) else [found])):
        raise UserError(f'{tokenizer_dir}: {field}={found} is outside of vocab_size={cfg.vocab_size}')
  return config if cfg.vision is None else vision_config.write(config, cfg, raw)


def _token_ids(tokenizer_dir: str) -> dict[str, int]:
  """Ids of a tokenizer's special tokens, by the names of the fields in config.json."""
  settings, vocabulary = (os.path.join(tokenizer_dir, name) for name in ('tokenizer_config.json', 'tokenizer.json'))
  if not (os.path.isfile(settings) and os.path.isfile(vocabulary)):
    return {}
  ids = {token['content']: token['id'] for token in read_json(vocabulary).get('added_tokens', [])}
  found = {}
  raw = read_json(settings)
  for name in ('bos', 'eos', 'pad'):
    token = raw.get(f'{name}_token')
    token = token.get('content') if isinstance(token, dict) else token
    if token in ids:
      found[f'{name}_token_id'] = ids[token]
  return found
