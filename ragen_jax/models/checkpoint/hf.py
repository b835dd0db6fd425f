"""Hugging Face checkpoints: read a config, load weights onto devices, write a directory that `transformers` opens.

A checkpoint is a directory with `config.json`, `model.safetensors` (or shards and `model.safetensors.index.json`) and,
written by us, `value_head.safetensors` beside them. A critic with a trunk of its own is a checkpoint in the directory
`critic` of the policy's, without an output projection and with the value head beside it. Only JSON and safetensors are
read, so that no code of a checkpoint ever runs. The layouts are those of `Qwen2ForCausalLM` and `Qwen3ForCausalLM` in
`transformers`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from flax import nnx
from jax.experimental import multihost_utils
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ragen_jax.models import lora
from ragen_jax.models.qwen import Qwen, QwenConfig
from ragen_jax.models.value_head import ValueHead
from ragen_jax.utils.errors import UserError

CONFIG_FILE = 'config.json'
WEIGHTS_FILE = 'model.safetensors'
INDEX_FILE = 'model.safetensors.index.json'
VALUE_HEAD_FILE = 'value_head.safetensors'
# Of directories that hold adapters only (`adapter_files.py`).
ADAPTER_CONFIG_FILE = 'adapter_config.json'
CRITIC_DIRECTORY = 'critic'

# Where a parameter lives: its path in `nnx.state(Qwen)` -> its sharding, None for the default device.
ShardingFn = Callable[[tuple[str | int, ...]], jax.sharding.Sharding | None]

_ARCHITECTURES = {'Qwen2ForCausalLM': 'qwen2', 'Qwen3ForCausalLM': 'qwen3'}
_DTYPES = {'F32': 'float32', 'BF16': 'bfloat16', 'F16': 'float16'}

# The name mapping, both ways: our path, their name, their shape. A kernel is the transposed [out, in] of
# `torch.nn.Linear`, with heads as axes of their own. Rows that a model does not have (a bias, a norm, a head) drop out.
_TABLE = (
  ('embed_tokens', 'model.embed_tokens.weight', 'V D'),
  ('layers.*.input_layernorm.weight', 'model.layers.*.input_layernorm.weight', 'D'),
  ('layers.*.self_attn.q_proj.kernel', 'model.layers.*.self_attn.q_proj.weight', 'NH D'),
  ('layers.*.self_attn.q_proj.bias', 'model.layers.*.self_attn.q_proj.bias', 'NH'),
  ('layers.*.self_attn.k_proj.kernel', 'model.layers.*.self_attn.k_proj.weight', 'KH D'),
  ('layers.*.self_attn.k_proj.bias', 'model.layers.*.self_attn.k_proj.bias', 'KH'),
  ('layers.*.self_attn.v_proj.kernel', 'model.layers.*.self_attn.v_proj.weight', 'KH D'),
  ('layers.*.self_attn.v_proj.bias', 'model.layers.*.self_attn.v_proj.bias', 'KH'),
  ('layers.*.self_attn.q_norm.weight', 'model.layers.*.self_attn.q_norm.weight', 'H'),
  ('layers.*.self_attn.k_norm.weight', 'model.layers.*.self_attn.k_norm.weight', 'H'),
  ('layers.*.self_attn.o_proj.kernel', 'model.layers.*.self_attn.o_proj.weight', 'D NH'),
  ('layers.*.post_attention_layernorm.weight', 'model.layers.*.post_attention_layernorm.weight', 'D'),
  ('layers.*.mlp.gate_proj.kernel', 'model.layers.*.mlp.gate_proj.weight', 'F D'),
  ('layers.*.mlp.up_proj.kernel', 'model.layers.*.mlp.up_proj.weight', 'F D'),
  ('layers.*.mlp.down_proj.kernel', 'model.layers.*.mlp.down_proj.weight', 'D F'),
  ('norm.weight', 'model.norm.weight', 'D'),
  ('lm_head.kernel', 'lm_head.weight', 'V D'),
)

# Fields of a source's config.json that say nothing about the shape and go unchanged into an export.
_CARRIED_FIELDS = (
  'bos_token_id',
  'eos_token_id',
  'pad_token_id',
  'initializer_range',
  'attention_dropout',
  'max_position_embeddings',
)

_TOKENIZER_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
  'chat_template.jinja',
  'generation_config.json',
)

# How many names an error lists of each kind.
_MAX_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Weight:
  """One tensor, here and in a checkpoint.

  Attributes:
    path: in `nnx.state(Qwen)`.
    shape: there.
    name: in the checkpoint.
    hf_shape: there.
  """

  path: tuple[str | int, ...]
  shape: tuple[int, ...]
  name: str
  hf_shape: tuple[int, ...]

  @property
  def transposed(self) -> bool:
    return self.path[-1] == 'kernel'

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  def from_hf(self, tensor: np.ndarray) -> np.ndarray:
    """[hf_shape] -> [shape], a view."""
    return (tensor.T if self.transposed else tensor).reshape(self.shape)

  def to_hf(self, array: np.ndarray) -> np.ndarray:
    """[shape] -> [hf_shape], a view."""
    return array.reshape(self.hf_shape[::-1]).T if self.transposed else array.reshape(self.hf_shape)


@functools.lru_cache(maxsize=8)
def weights(cfg: QwenConfig) -> tuple[Weight, ...]:
  """Every tensor of a model of this shape."""
  shapes = {path: leaf.shape for path, leaf in nnx.to_flat_state(nnx.split(_abstract_model(cfg))[1])}
  n, k, h = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
  sizes = {'V': cfg.vocab_size, 'D': cfg.hidden_size, 'F': cfg.intermediate_size, 'H': h, 'NH': n * h, 'KH': k * h}
  found = []
  for ours, theirs, axes in _TABLE:
    for layer in range(cfg.num_layers) if '*' in ours else (None,):
      path = tuple(layer if part == '*' else part for part in ours.split('.'))
      if path in shapes:
        name = theirs.replace('*', str(layer))
        found.append(Weight(path, shapes[path], name, tuple(sizes[axis] for axis in axes.split())))
  unnamed = shapes.keys() - {w.path for w in found}
  if unnamed:
    raise ValueError(f'parameters that have no name in checkpoints: {sorted(unnamed)}')
  return tuple(found)


def _abstract_model(cfg: QwenConfig, **kwargs: Any) -> Qwen:
  return nnx.eval_shape(lambda: Qwen(cfg, rngs=nnx.Rngs(0), **kwargs))


# -- config.json -------------------------------------------------------------------------------------------------------


def read_config(directory: str) -> QwenConfig:
  """Reads `config.json`, with the defaults that `transformers` has for what is left out.

  Raises:
    UserError: the file is missing or is not JSON, or asks for what these models do not do: another architecture,
      scaled rotary embeddings, sliding windows, a bias where there is none, quantised weights, another activation.
  """
  where = os.path.join(directory, CONFIG_FILE)
  raw = read_json(where)

  def refuse(field: str, allowed: str) -> UserError:
    return UserError(f'{where}: {field}={raw.get(field)!r} is not supported; {allowed}')

  names = raw.get('architectures')
  if names is None and raw.get('model_type') in _ARCHITECTURES.values():
    architecture = raw['model_type']
  elif isinstance(names, list) and len(names) == 1 and names[0] in _ARCHITECTURES:
    architecture = _ARCHITECTURES[names[0]]
  else:
    raise refuse('architectures', f'supported are {", ".join(_ARCHITECTURES)}')
  if raw.get('model_type', architecture) != architecture:
    raise refuse('model_type', f'architectures={names!r} goes with {architecture!r}')
  if raw.get('hidden_act', 'silu') != 'silu':
    raise refuse('hidden_act', "only 'silu' is")
  if raw.get('quantization_config'):
    raise refuse('quantization_config', 'use the weights in float32, bfloat16 or float16')
  # Qwen2 has its biases whatever this field says; whether they are there is seen in the weights.
  if architecture == 'qwen3' and raw.get('attention_bias', False):
    raise refuse('attention_bias', 'Qwen3 models have no bias')

  def integer(field: str) -> int:
    value = raw.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
      raise UserError(f'{where}: {field}={value!r} must be a positive integer')
    return value

  num_heads, num_layers = integer('num_attention_heads'), integer('num_hidden_layers')
  hidden_size = integer('hidden_size')
  num_kv_heads = num_heads if raw.get('num_key_value_heads', 0) is None else integer('num_key_value_heads')
  if num_heads % num_kv_heads:
    raise UserError(f'{where}: num_key_value_heads={num_kv_heads} does not divide num_attention_heads={num_heads}')
  if raw.get('head_dim') is not None:
    head_dim = integer('head_dim')
  elif architecture == 'qwen3' and 'head_dim' not in raw:
    head_dim = 128
  else:
    head_dim = hidden_size // num_heads
  if head_dim % 2:
    raise UserError(f'{where}: head_dim={head_dim} must be even')
  if _slides(raw, num_layers):
    field = 'layer_types' if raw.get('layer_types') else 'use_sliding_window'
    raise refuse(field, 'every layer must attend to the whole context')
  return QwenConfig(
    architecture=architecture,
    vocab_size=integer('vocab_size'),
    hidden_size=hidden_size,
    intermediate_size=integer('intermediate_size'),
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    rope_theta=_rope_theta(raw, where),
    rms_norm_eps=float(raw.get('rms_norm_eps', 1e-6)),
    tie_word_embeddings=bool(raw.get('tie_word_embeddings', False)),
  )


def _slides(raw: dict[str, Any], num_layers: int) -> bool:
  """Whether any layer sees only a window, as the configs of `transformers` decide it."""
  if raw.get('layer_types'):
    return any(kind != 'full_attention' for kind in raw['layer_types'])
  window = raw.get('sliding_window', 4096) if raw.get('use_sliding_window', False) else None
  return window is not None and raw.get('max_window_layers', 28) < num_layers


def _rope_theta(raw: dict[str, Any], where: str) -> float:
  """The base, from `rope_theta` or, as transformers 5 writes it, from inside `rope_parameters`."""
  field = 'rope_scaling' if raw.get('rope_scaling') else 'rope_parameters'
  rope = raw.get(field) or {}
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind != 'default':
    raise UserError(f"{where}: {field}.rope_type={kind!r} is not supported; only 'default' (unscaled) is")
  if any(isinstance(value, dict) for value in rope.values()):
    raise UserError(f'{where}: {field}={rope!r} differs from layer to layer, which is not supported')
  theta = rope.get('rope_theta')
  if theta is None:
    theta = raw.get('rope_theta')
  return 10000.0 if theta is None else float(theta)


def read_json(path: str) -> dict[str, Any]:
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


# -- loading -----------------------------------------------------------------------------------------------------------


def load_model(
  directory: str,
  *,
  dtype: Any,
  param_dtype: Any,
  attend_by_row: bool = False,
  sharding_fn: ShardingFn | None = None,
  trunk_only: bool = False,
) -> Qwen:
  """Builds the model of a checkpoint without ever making fresh weights.

  Args:
    directory: a Hugging Face checkpoint.
    dtype: of activations and of weights as they are used.
    param_dtype: of weights as they are kept.
    attend_by_row: see `Qwen`.
    sharding_fn: see `load_params`.
    trunk_only: leave an output projection that is not the embedding where it is; see `trunk_config`.

  Raises:
    UserError: see `read_config` and `load_params`.
  """
  cfg = read_config(directory)
  trunk_only = trunk_only and not cfg.tie_word_embeddings
  cfg = trunk_config(cfg) if trunk_only else cfg
  graphdef, _ = nnx.split(_abstract_model(cfg, dtype=dtype, param_dtype=param_dtype, attend_by_row=attend_by_row))
  return nnx.merge(graphdef, load_params(directory, cfg, param_dtype, sharding_fn, ignore_head=trunk_only))


def trunk_config(cfg: QwenConfig) -> QwenConfig:
  """The shape of a model without an output projection of its own: that of one with tied embeddings."""
  return dataclasses.replace(cfg, tie_word_embeddings=True)


def critic_directory(directory: str) -> str:
  """Where the critic of a checkpoint is: in its `critic` directory, or else its trunk is the policy's."""
  own = os.path.join(directory, CRITIC_DIRECTORY)
  return own if _is_checkpoint(own) else directory


def load_params(
  directory: str,
  cfg: QwenConfig,
  param_dtype: Any,
  sharding_fn: ShardingFn | None = None,
  *,
  ignore_head: bool = False,
) -> nnx.State:
  """Loads the weights of a `Qwen`, tensor by tensor, straight to where they live.

  The host holds one tensor at a time as it is stored, and of it one device's part in our layout and type. With many
  processes each reads every tensor and keeps its own devices' parts.

  Args:
    directory: a Hugging Face checkpoint in float32, bfloat16 or float16, in one file or in shards.
    cfg: its shape.
    param_dtype: of the loaded weights.
    sharding_fn: path of a parameter -> its sharding, e.g. ('layers', 0, 'self_attn', 'q_proj', 'kernel') -> a
      `NamedSharding` of [D, N, H]. Without it, or where it gives None, weights go to the default device.
    ignore_head: with tied embeddings, whatever output projection there is in the files is not looked at.

  Returns:
    The state of `nnx.state(Qwen)`.

  Raises:
    UserError: a file cannot be read, or tensors are missing, unexpected, of another shape or of another type; all
      of them are found before any is loaded.
  """
  files = _weight_files(directory)
  wanted = {w.name: w for w in weights(cfg)}
  _check_tensors(directory, files, wanted, cfg, ignore_head)
  leaves = dict(nnx.to_flat_state(nnx.split(_abstract_model(cfg, param_dtype=param_dtype))[1]))
  for file in files:
    with _open(file) as tensors:
      for name in tensors.offset_keys():
        weight = wanted.get(name)
        if weight is not None:
          array = weight.from_hf(tensors.get_tensor(name))
          sharding = None if sharding_fn is None else sharding_fn(weight.path)
          leaves[weight.path] = leaves[weight.path].replace(_place(array, np.dtype(param_dtype), sharding))
          del array
  logging.info('Loaded %d tensors from %s', len(wanted), directory)
  return nnx.from_flat_state(leaves)


def _place(array: np.ndarray, dtype: np.dtype, sharding: jax.sharding.Sharding | None) -> jax.Array:
  """A host array in its stored type -> devices, in `dtype`; the host holds one device's part beside it."""
  if sharding is None:
    return jax.block_until_ready(jax.device_put(np.asarray(array, dtype, order='C')))
  parts, part, last = [], None, None
  for device, index in sharding.addressable_devices_indices_map(array.shape).items():
    if index != last:  # copies of a part mostly follow one another
      part, last = np.asarray(array[index], dtype, order='C'), index
    # Transfers that were still under way would keep several parts on the host.
    parts.append(jax.block_until_ready(jax.device_put(part, device)))
  return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def _weight_files(directory: str) -> list[str]:
  single = os.path.join(directory, WEIGHTS_FILE)
  if os.path.isfile(single):
    return [single]
  index = os.path.join(directory, INDEX_FILE)
  if not os.path.isfile(index):
    raise UserError(f'{directory}: holds neither {WEIGHTS_FILE} nor {INDEX_FILE}; other formats are not read')
  weight_map = read_json(index).get('weight_map')
  if not isinstance(weight_map, dict) or not weight_map:
    raise UserError(f'{index}: has no weight_map')
  names = sorted({str(name) for name in weight_map.values()})
  outside = [name for name in names if os.path.basename(name) != name]
  if outside:
    raise UserError(f'{index}: names files outside its directory: {_some(outside)}')
  absent = [name for name in names if not os.path.isfile(os.path.join(directory, name))]
  if absent:
    raise UserError(f'{directory}: lacks {len(absent)} of the {len(names)} files of {INDEX_FILE}: {_some(absent)}')
  return [os.path.join(directory, name) for name in names]


@contextlib.contextmanager
def _open(file: str) -> Iterator[Any]:
  """A safetensors file, read with `pread`: mapped pages would count as this process's memory until it is closed."""
  try:
    with safe_open(file, framework='np', backend='pread') as tensors:
      yield tensors
  except (SafetensorError, OSError) as e:
    raise UserError(f'{file}: cannot be read as safetensors ({e})') from e


def _check_tensors(
  directory: str, files: list[str], wanted: dict[str, Weight], cfg: QwenConfig, ignore_head: bool
) -> None:
  """Compares the headers of the files with what the model needs. Raises a `UserError` that names all differences."""
  missing, extra, misshapen, mistyped = dict.fromkeys(wanted), [], [], []
  tied_head = None
  for file in files:
    with _open(file) as tensors:
      for name in tensors.keys():  # noqa: SIM118 (not a mapping: it cannot be iterated)
        header = tensors.get_slice(name)
        shape, dtype = tuple(header.get_shape()), header.get_dtype()
        if name == 'lm_head.weight' and cfg.tie_word_embeddings:
          tied_head = None if ignore_head else file
        elif name not in wanted:
          # Old checkpoints hold the rotary frequencies, which follow from the config.
          if not name.endswith('.rotary_emb.inv_freq'):
            extra.append(name)
        else:
          missing.pop(name, None)
          if shape != wanted[name].hf_shape:
            misshapen.append(f'{name} {list(shape)} instead of {list(wanted[name].hf_shape)}')
          if dtype not in _DTYPES:
            mistyped.append(f'{name} {dtype}')
  found = {
    'missing': list(missing),
    'unexpected': extra,
    'of another shape': misshapen,
    f'of a type other than {"/".join(_DTYPES)}': mistyped,
  }
  problems = [f'{len(names)} {kind}: {_some(names)}' for kind, names in found.items() if names]
  if problems:
    raise UserError(f'{directory}: the weights do not fit {CONFIG_FILE}; {"; ".join(problems)}')
  if tied_head is not None:
    _check_tied(directory, files, tied_head)


def _check_tied(directory: str, files: list[str], tied_head: str) -> None:
  """An output projection stored beside tied embeddings must be the embedding, or the model would be another one."""
  name, rows = 'model.embed_tokens.weight', 4096
  for file in files:
    with _open(file) as tensors, _open(tied_head) as others:
      if name not in tensors.keys():  # noqa: SIM118
        continue
      embedding, head = tensors.get_slice(name), others.get_slice('lm_head.weight')
      shape = embedding.get_shape()
      blocks = [slice(i, min(i + rows, shape[0])) for i in range(0, shape[0], rows)]
      same = head.get_shape() == shape and all(np.array_equal(embedding[b], head[b]) for b in blocks)
      if not same:
        raise UserError(
          f'{directory}: tie_word_embeddings is true in {CONFIG_FILE}, yet lm_head.weight differs from {name}; '
          'set tie_word_embeddings to false there'
        )


def _some(names: list[str]) -> str:
  more = len(names) - _MAX_NAMED
  return ', '.join(names[:_MAX_NAMED]) + (f' and {more} more' if more > 0 else '')


def has_value_head(directory: str) -> bool:
  """Whether a checkpoint brings a value head; '' is none."""
  return bool(directory) and os.path.isfile(os.path.join(directory, VALUE_HEAD_FILE))


def load_value_head(directory: str, head: ValueHead) -> bool:
  """Fills `head` from the `value_head.safetensors` of a checkpoint, if it has one; its sharding stays.

  Returns:
    Whether there was one.

  Raises:
    UserError: the file does not hold this head.
  """
  file = os.path.join(directory, VALUE_HEAD_FILE)
  if not has_value_head(directory):
    return False
  params = {'kernel': head.kernel, 'bias': head.bias}
  with _open(file) as tensors:
    found = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    expected = {name: param.shape for name, param in params.items()}
    if found != expected:
      raise UserError(f'{file}: holds {found}, and the value head of this model is {expected}')
    for name, param in params.items():
      sharding = param[...].sharding if getattr(param[...], 'committed', False) else None
      param.set_value(_place(tensors.get_tensor(name), np.dtype(param.dtype), sharding))
  return True


# -- export ------------------------------------------------------------------------------------------------------------


def save_model(
  directory: str,
  model: Qwen | Mapping[Any, Any],
  cfg: QwenConfig,
  dtype: Any,
  *,
  tokenizer_dir: str | None = None,
  value_head: ValueHead | None = None,
  critic: Qwen | Mapping[Any, Any] | None = None,
  critic_cfg: QwenConfig | None = None,
  max_shard_bytes: int = 2 << 30,
) -> None:
  """Writes a checkpoint that `transformers.AutoModelForCausalLM` opens.

  Everything is written to a new directory beside the target, which then takes its place: whatever fails, the target
  is either as it was or complete. Files of the target that are no part of a checkpoint stay. The host holds the
  tensors of one shard at a time. With many processes all must call; the first one writes.

  Args:
    directory: is made; where it is not empty it must be a checkpoint, which is replaced.
    model: a `Qwen`, or the state or pure dict of one without adapters. Adapters of a model are merged into the stored
      weights, one tensor at a time.
    cfg: its shape.
    dtype: float32, bfloat16 or float16, of the stored weights.
    tokenizer_dir: where tokenizer files are copied from, and token ids and the context length are read; usually the
      checkpoint that training began with. Without it, tokenizer files that lie in `directory` stay.
    value_head: stored beside the weights, in float32; beside the critic's, where there is one.
    critic: a trunk of the critic's own, stored in the directory `critic`; one that is there already goes in any case.
    critic_cfg: its shape; `trunk_config(cfg)` where not given.
    max_shard_bytes: size past which the weights go to several files.

  Raises:
    UserError: `directory` holds something else, or `tokenizer_dir` does not exist or is of a larger vocabulary.
    ValueError: the parameters are not those of a `Qwen` of this shape, or the dtype is none of the above.
  """
  dtype = np.dtype(dtype)
  if dtype.name not in _DTYPES.values():
    raise ValueError(f'dtype={dtype.name!r} is not one of {", ".join(_DTYPES.values())}')
  if tokenizer_dir is not None and not os.path.isdir(tokenizer_dir):
    raise UserError(f'{tokenizer_dir}: is not a directory, so no tokenizer can be copied from it')
  models = {'': (model, cfg)}
  if critic is not None:
    models[CRITIC_DIRECTORY] = (critic, critic_cfg or trunk_config(cfg))
  parts = {}
  for where, (tree, shape) in models.items():
    fetch = _fetch(tree, weights(shape))
    parts[where] = (fetch, weights(shape), _hf_config(shape, dtype, tokenizer_dir))
  head = None if value_head is None else {'kernel': value_head.kernel[...], 'bias': value_head.bias[...]}
  if jax.process_index() == 0:
    with new_checkpoint(directory, tokenizer_dir) as new:
      for where, (fetch, plan, config) in parts.items():
        os.makedirs(os.path.join(new, where), exist_ok=True)
        write_json(os.path.join(new, where, CONFIG_FILE), config)
        _write_weights(os.path.join(new, where), fetch, plan, dtype, max_shard_bytes)
      if head is not None:
        write_value_head(os.path.join(new, list(parts)[-1]), head)
    logging.info('Wrote %d tensors to %s', sum(len(plan) for _, plan, _ in parts.values()), directory)
  else:  # the others only take part in gathering what they hold, in the same order
    for fetch, plan, _ in parts.values():
      for w in plan:
        fetch(w)
    for array in (head or {}).values():
      _to_host(array)
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices('ragen_jax.save_model')


def _fetch(model: Qwen | Mapping[Any, Any], plan: tuple[Weight, ...]) -> Callable[[Weight], np.ndarray]:
  """A function that brings a weight to the host, its adapter merged."""
  params = _flatten(nnx.state(model, nnx.Param) if isinstance(model, nnx.Module) else model)
  adapters = lora.adapters(model) if isinstance(model, nnx.Module) else {}
  params = {path: x for path, x in params.items() if path[:-2] not in adapters or path[-2] != 'adapter'}
  _check_params(params, plan)

  def fetch(weight: Weight) -> np.ndarray:
    array, adapter = _to_host(params[weight.path]), adapters.get(weight.path[:-1])
    if adapter is None or not weight.transposed:
      return array
    return lora.merged(array, _to_host(adapter.lora_a[...]), _to_host(adapter.lora_b[...]), adapter.scale)

  return fetch


def write_value_head(directory: str, head: Mapping[str, Any]) -> None:
  """Writes {'kernel': [D], 'bias': []}, in float32, to where `load_value_head` finds it."""
  tensors = {name: np.asarray(_to_host(array), dtype=np.float32) for name, array in head.items()}
  save_file(tensors, os.path.join(directory, VALUE_HEAD_FILE), metadata={'format': 'pt'})


def _write_weights(
  directory: str,
  fetch: Callable[[Weight], np.ndarray],
  plan: tuple[Weight, ...],
  dtype: np.dtype,
  max_shard_bytes: int,
) -> None:
  """The tensors of one model, in the order of `plan`, and the index where they are in several files."""
  shards = _split(plan, dtype.itemsize, max_shard_bytes)
  for file, shard in shards.items():
    tensors = {w.name: np.ascontiguousarray(w.to_hf(fetch(w)), dtype=dtype) for w in shard}
    save_file(tensors, os.path.join(directory, file), metadata={'format': 'pt'})
    del tensors
  if len(shards) > 1:
    total = sum(w.size for w in plan) * dtype.itemsize
    names = {w.name: file for file, shard in shards.items() for w in shard}
    write_json(os.path.join(directory, INDEX_FILE), {'metadata': {'total_size': total}, 'weight_map': names})


def _flatten(tree: Mapping[Any, Any], path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
  """State or nested dict -> arrays by path."""
  flat = {}
  for key, value in tree.items():
    if isinstance(value, Mapping):
      flat.update(_flatten(value, (*path, key)))
    else:
      flat[(*path, key)] = value[...] if isinstance(value, nnx.Variable) else value
  return flat


def _check_params(params: dict[tuple[Any, ...], Any], plan: tuple[Weight, ...]) -> None:
  expected = {w.path: w.shape for w in plan}
  found = {path: tuple(array.shape) for path, array in params.items()}
  if found != expected:
    wrong = [path for path in expected.keys() | found.keys() if expected.get(path) != found.get(path)]
    names = sorted(f'{".".join(map(str, p))} {found.get(p)} instead of {expected.get(p)}' for p in wrong)
    raise ValueError(f'the parameters are not those of this config: {_some(names)}')


def _split(plan: tuple[Weight, ...], itemsize: int, max_bytes: int) -> dict[str, list[Weight]]:
  """File name -> what it holds; a tensor larger than a shard gets a file of its own."""
  shards, used = [[]], 0
  for weight in plan:
    size = weight.size * itemsize
    if shards[-1] and used + size > max_bytes:
      shards.append([])
      used = 0
    shards[-1].append(weight)
    used += size
  if len(shards) == 1:
    return {WEIGHTS_FILE: shards[0]}
  return {f'model-{i:05d}-of-{len(shards):05d}.safetensors': shard for i, shard in enumerate(shards, 1)}


def _to_host(array: jax.Array | np.ndarray) -> np.ndarray:
  if isinstance(array, jax.Array) and not array.is_fully_addressable:
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
  return np.asarray(array)


def _hf_config(cfg: QwenConfig, dtype: np.dtype, tokenizer_dir: str | None) -> dict[str, Any]:
  """What config.json says, in the names that transformers 4 and 5 both read."""
  architecture = {kind: name for name, kind in _ARCHITECTURES.items()}[cfg.architecture]
  config = {
    'architectures': [architecture],
    'model_type': cfg.architecture,
    'vocab_size': cfg.vocab_size,
    'hidden_size': cfg.hidden_size,
    'intermediate_size': cfg.intermediate_size,
    'num_hidden_layers': cfg.num_layers,
    'num_attention_heads': cfg.num_heads,
    'num_key_value_heads': cfg.num_kv_heads,
    'head_dim': cfg.head_dim,
    'hidden_act': 'silu',
    'max_position_embeddings': 32768,
    'rope_theta': cfg.rope_theta,
    'rms_norm_eps': cfg.rms_norm_eps,
    'tie_word_embeddings': cfg.tie_word_embeddings,
    'use_sliding_window': False,
    'attention_dropout': 0.0,
    'initializer_range': 0.02,
    'use_cache': True,
    'torch_dtype': dtype.name,
  }
  if cfg.architecture == 'qwen3':
    config['attention_bias'] = False
  if tokenizer_dir is not None:
    config |= _token_ids(tokenizer_dir)
    source = os.path.join(tokenizer_dir, CONFIG_FILE)
    if os.path.isfile(source):
      raw = read_json(source)
      config |= {field: raw[field] for field in _CARRIED_FIELDS if raw.get(field) is not None}
    for field in ('bos_token_id', 'eos_token_id', 'pad_token_id'):
      if isinstance(config.get(field), int) and config[field] >= cfg.vocab_size:
        raise UserError(f'{tokenizer_dir}: {field}={config[field]} is outside of vocab_size={cfg.vocab_size}')
  return config


def _token_ids(tokenizer_dir: str) -> dict[str, int]:
  """The ids of a tokenizer's special tokens, under the names that config.json has for them."""
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


def write_json(path: str, value: dict[str, Any]) -> None:
  with open(path, 'w', encoding='utf-8') as f:
    json.dump(value, f, indent=2)
    f.write('\n')


def check_target(directory: str) -> None:
  """Raises UserError where a checkpoint at `directory` would replace something else."""
  if os.path.lexists(directory) and not os.path.isdir(directory):
    raise UserError(f'{directory}: is not a directory, so no checkpoint can be written there')
  if os.path.isdir(directory) and os.listdir(directory) and not _is_checkpoint(directory):
    raise UserError(
      f'{directory}: is not empty and is no checkpoint (no {CONFIG_FILE} of a model); choose another directory'
    )


def _is_checkpoint(directory: str) -> bool:
  if os.path.isfile(os.path.join(directory, ADAPTER_CONFIG_FILE)):
    return True
  config = os.path.join(directory, CONFIG_FILE)  # the directory of a run has one as well, of another kind
  return os.path.isfile(config) and not read_json(config).keys().isdisjoint(('architectures', 'model_type'))


@contextlib.contextmanager
def new_checkpoint(directory: str, tokenizer_dir: str | None) -> Iterator[str]:
  """A new directory that becomes the checkpoint `directory` if the block ends well; see `save_model`.

  Args:
    directory: the target.
    tokenizer_dir: where tokenizer files are copied from; without it those of the target stay.

  Raises:
    UserError: `directory` holds something else.
  """
  check_target(directory)
  with _replacing(directory, with_tokenizer=tokenizer_dir is not None) as new:
    for name in _TOKENIZER_FILES if tokenizer_dir is not None else ():
      if os.path.isfile(os.path.join(tokenizer_dir, name)):
        shutil.copyfile(os.path.join(tokenizer_dir, name), os.path.join(new, name))
    yield new
    written = CONFIG_FILE if os.path.isfile(os.path.join(new, CONFIG_FILE)) else ADAPTER_CONFIG_FILE
    for where, _, names in os.walk(new):
      for name in names:  # safetensors makes files that only their owner may read
        shutil.copymode(os.path.join(new, written), os.path.join(where, name))


@contextlib.contextmanager
def _replacing(directory: str, *, with_tokenizer: bool) -> Iterator[str]:
  """A new directory that takes the place of `directory` if the block ends well, and is removed if it does not."""
  target = os.path.realpath(directory)
  os.makedirs(os.path.dirname(target), exist_ok=True)
  new = os.path.join(os.path.dirname(target), f'.{os.path.basename(target)}.{uuid.uuid4().hex[:8]}')
  old = f'{new}.old'
  os.mkdir(new)
  try:
    yield new
    if os.path.isdir(target):
      os.rename(target, old)
    try:
      os.rename(new, target)
    except OSError:
      if os.path.isdir(old):
        os.rename(old, target)
      raise
  except BaseException:
    shutil.rmtree(new, ignore_errors=True)
    raise
  if os.path.isdir(old):
    replaced = (
      CONFIG_FILE,
      INDEX_FILE,
      ADAPTER_CONFIG_FILE,
      CRITIC_DIRECTORY,
      *(_TOKENIZER_FILES if with_tokenizer else ()),
    )
    for name in os.listdir(old):
      if name not in replaced and not name.endswith('.safetensors'):
        os.rename(os.path.join(old, name), os.path.join(target, name))
    shutil.rmtree(old)
