"""Loading the weights of a Hugging Face checkpoint, one tensor at a time, straight onto their devices."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from ragen_jax.models.attention_settings import EINSUM, AttentionSettings
from ragen_jax.models.checkpoint.config import (
  CONFIG_FILE,
  DTYPES,
  INDEX_FILE,
  VALUE_HEAD_FILE,
  WEIGHTS_FILE,
  read_config,
  read_json,
  trunk_config,
)
from ragen_jax.models.checkpoint.names import (
  Stored,
  Weight,
  abstract_model,
  is_left_out,
  list_names,
  stored,
  stored_name,
)
from ragen_jax.models.int8 import Int8, input_axes, quantised, scale_sharding
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.models.value_head import ValueHead
from ragen_jax.utils.errors import UserError

# Path of a parameter in `nnx.state(Qwen)` -> its sharding; None means the default device.
ShardingFn = Callable[[tuple[str | int, ...]], jax.sharding.Sharding | None]

_log = logging.getLogger(__name__)


def load_model(
  directory: str,
  *,
  dtype: Any,
  param_dtype: Any,
  attention: AttentionSettings = EINSUM,
  sharding_fn: ShardingFn | None = None,
  trunk_only: bool = False,
  in_int8: bool = False,
) -> Qwen:
  """Loads the model of a checkpoint. No weights are initialised on the way.

  `dtype` is that of activations, and of weights in computations. `trunk_only` skips an output projection that is not
  tied to the embedding; the model then has the shape `trunk_config`. `in_int8` and errors are those of `load_params`;
  errors also those of `read_config`.
  """
  cfg = read_config(directory)
  trunk_only = trunk_only and not cfg.tie_word_embeddings
  cfg = trunk_config(cfg) if trunk_only else cfg
  graphdef, _ = nnx.split(abstract_model(cfg, dtype=dtype, param_dtype=param_dtype, attention=attention))
  return nnx.merge(
    graphdef, load_params(directory, cfg, param_dtype, sharding_fn, ignore_head=trunk_only, in_int8=in_int8)
  )


def load_params(
  directory: str,
  cfg: QwenConfig,
  param_dtype: Any,
  sharding_fn: ShardingFn | None = None,
  *,
  ignore_head: bool = False,
  in_int8: bool = False,
) -> nnx.State:
  """Loads the weights of a `Qwen`, as its `nnx.state` has them, tensor by tensor, onto their devices.

  Host memory holds one tensor, or one expert's part of it, in its stored type, and one device's part of that in our
  layout and type. Devices hold the experts of a layer twice while they are put together. In a run of several processes,
  each process reads every tensor and keeps the parts of its own devices.

  Args:
    directory: a Hugging Face checkpoint in float32, bfloat16 or float16, in one file or in shards.
    param_dtype: type of the weights, but for those that a model has in float32 in any case.
    sharding_fn: sharding of a parameter by its path, e.g. ('layers', 0, 'self_attn', 'q_proj', 'kernel') -> a
      `NamedSharding` of [D, N, H]. Without it, or if it returns None, weights go to the default device.
    ignore_head: with tied embeddings, do not compare a stored output projection with the embedding.
    in_int8: whether kernels that can be `Int8` are; the host computes them.

  Raises:
    UserError: a file cannot be read, or tensors are missing, unexpected, or of an unexpected shape or type. All
      problems are found before any tensor is loaded.
  """
  files = _weight_files(directory)
  wanted = stored(cfg)
  _check_tensors(directory, files, wanted, cfg, ignore_head)
  leaves = dict(nnx.to_flat_state(nnx.split(abstract_model(cfg, param_dtype=param_dtype))[1]))
  experts: dict[tuple[str | int, ...], _Experts] = {}

  def placed(weight: Weight, array: np.ndarray, dtype: Any, sharding: Any, part: str = '') -> jax.Array | None:
    # None until all experts have come.
    if weight.expert is None:
      return place_tensor(array, dtype, sharding)
    path, shape = (*weight.path, part), (weight.experts, *array.shape)
    found = experts.setdefault(path, _Experts(shape, dtype, sharding))
    found.place(weight.expert, array)
    return experts.pop(path).together() if found.complete else None

  for file in files:
    with _open(file) as tensors:
      for name in tensors.offset_keys():
        tensor = wanted.get(stored_name(name, cfg))
        for weight, place in () if tensor is None else tensor.parts:
          array = weight.from_hf(tensors.get_slice(name)[place] if place else tensors.get_tensor(name))
          sharding = None if sharding_fn is None else sharding_fn(weight.path)
          leaf, path = leaves[weight.path], '/'.join(map(str, weight.path))
          axes = input_axes(path) if in_int8 else None
          if axes is None:
            new = placed(weight, array, np.dtype(leaf.dtype), sharding)
          else:
            own = quantised(array, axes)
            whole = own.scale.shape if weight.expert is None else (weight.experts, *own.scale.shape)
            of_scale = scale_sharding(path, whole, sharding)
            values = placed(weight, own.value, np.dtype(np.int8), sharding)
            scale = placed(weight, own.scale, np.dtype(np.float32), of_scale, 'scale')
            new = None if values is None else Int8(values, scale)
            del own
          if new is not None:
            leaves[weight.path] = leaf.replace(new)
          del array
  _log.debug('Loaded %d tensors from %s', len(wanted), directory)
  return nnx.from_flat_state(leaves)


def place_tensor(array: np.ndarray, dtype: np.dtype, sharding: jax.sharding.Sharding | None) -> jax.Array:
  """Puts a host array on devices as `dtype`. Besides the array, the host holds one device's part of it."""
  if sharding is None:
    return jax.block_until_ready(jax.device_put(np.asarray(array, dtype, order='C')))
  parts, part, last = [], None, None
  for device, index in sharding.addressable_devices_indices_map(array.shape).items():
    if index != last:  # devices with the same part are mostly adjacent
      part, last = np.asarray(array[index], dtype, order='C'), index
    # Waits for each transfer: pending transfers would keep several parts in host memory.
    parts.append(jax.block_until_ready(jax.device_put(part, device)))
  return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


class _Experts:
  """A weight [E, ...] of experts that come one by one, in any order."""

  def __init__(self, shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding | None):
    self._shape, self._dtype, self._sharding = shape, dtype, sharding
    everything = tuple(slice(None) for _ in shape)
    places = {None: everything} if sharding is None else sharding.addressable_devices_indices_map(shape)
    self._places = {device: (range(shape[0])[index[0]], index[1:]) for device, index in places.items()}
    self._parts: dict[Any, dict[int, jax.Array]] = {device: {} for device in places}
    self._missing = set(range(shape[0]))

  @property
  def complete(self) -> bool:
    return not self._missing

  def place(self, expert: int, array: np.ndarray) -> None:
    """Puts the part of an expert on its devices."""
    self._missing.remove(expert)
    for device, (experts, index) in self._places.items():
      if expert in experts:
        part = np.asarray(array[index], self._dtype, order='C')
        self._parts[device][expert] = jax.block_until_ready(jax.device_put(part, device))

  def together(self) -> jax.Array:
    """The weight; its parts are let go."""
    arrays = []
    for device, (experts, _) in self._places.items():
      parts = self._parts.pop(device)
      arrays.append(jax.block_until_ready(jnp.stack([parts[e] for e in experts])))
    if self._sharding is None:
      return arrays[0]
    return jax.make_array_from_single_device_arrays(self._shape, self._sharding, arrays)


# -- files -------------------------------------------------------------------------------------------------------------


def _weight_files(directory: str) -> list[str]:
  """The paths of the safetensors files that hold the model's weights."""
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
    raise UserError(f'{index}: names files outside its directory: {list_names(outside)}')
  absent = [name for name in names if not os.path.isfile(os.path.join(directory, name))]
  if absent:
    raise UserError(f'{directory}: lacks {len(absent)} of the {len(names)} files of {INDEX_FILE}: {list_names(absent)}')
  return [os.path.join(directory, name) for name in names]


@contextlib.contextmanager
def _open(file: str) -> Iterator[Any]:
  """A safetensors file, read with `pread`: memory-mapped pages would count as this process's memory."""
  try:
    with safe_open(file, framework='np', backend='pread') as tensors:
      yield tensors
  except (SafetensorError, OSError) as e:
    raise UserError(f'{file}: cannot be read as safetensors ({e})') from e


def _check_tensors(
  directory: str, files: list[str], wanted: dict[str, Stored], cfg: QwenConfig, ignore_head: bool
) -> None:
  """Compares the headers of the files with the model. Raises a `UserError` that lists all differences."""
  named = {w.name: w for tensor in wanted.values() for w, _ in tensor.parts}
  missing, extra, twice, misshapen, mistyped = dict.fromkeys(named), [], [], [], []
  seen, again = set(), []
  tied_head = None
  for file in files:
    with _open(file) as tensors:
      for found_name in tensors.keys():  # noqa: SIM118 (not a mapping: it cannot be iterated)
        header, name = tensors.get_slice(found_name), stored_name(found_name, cfg)
        again += [name] if name in seen else []
        seen.add(name)
        shape, dtype = tuple(header.get_shape()), header.get_dtype()
        if name == 'lm_head.weight' and cfg.tie_word_embeddings:
          tied_head = None if ignore_head else file
        elif name not in wanted:
          # Old checkpoints store the rotary frequencies, which follow from the config.
          if not name.endswith('.rotary_emb.inv_freq') and not is_left_out(found_name, cfg):
            extra.append(name)
        else:
          of_experts = [w.name for w, _ in wanted[name].parts if w.expert is not None]
          twice += [] if missing.keys() >= set(of_experts) else [name]
          for weight, _ in wanted[name].parts:
            missing.pop(weight.name, None)
          if shape != wanted[name].shape:
            misshapen.append(f'{name} {list(shape)} instead of {list(wanted[name].shape)}')
          if dtype not in DTYPES:
            mistyped.append(f'{name} {dtype}')
  found = {
    'missing': list(missing),
    'unexpected': extra,
    'of experts that other tensors have too': twice,
    'in several files or under several names': again,
    'of another shape': misshapen,
    f'of a type other than {"/".join(DTYPES)}': mistyped,
  }
  tower = [name for name, w in named.items() if w.path[0] == 'visual']
  if tower and missing.keys() >= set(tower):
    raise UserError(
      f'{directory}: has no vision tower, which {CONFIG_FILE} describes: {list_names(tower[:1])} is missing'
    )
  problems = [f'{len(names)} {kind}: {list_names(names)}' for kind, names in found.items() if names]
  if problems:
    raise UserError(f'{directory}: the weights do not fit {CONFIG_FILE}; {"; ".join(problems)}')
  if tied_head is not None:
    embedding = next(name for name, w in named.items() if w.path == ('embed_tokens',))
    _check_tied(directory, files, tied_head, embedding, cfg)


def _check_tied(directory: str, files: list[str], tied_head: str, stored: str, cfg: QwenConfig) -> None:
  """Raises UserError if an output projection is stored beside tied embeddings and differs from the embedding."""
  rows = 4096
  for file in files:
    with _open(file) as tensors, _open(tied_head) as others:
      name = next((n for n in tensors.keys() if stored_name(n, cfg) == stored), None)  # noqa: SIM118
      if name is None:
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


# -- value head --------------------------------------------------------------------------------------------------------


def has_value_head(directory: str) -> bool:
  """Whether a checkpoint has a value head; False for the directory ''."""
  return bool(directory) and os.path.isfile(os.path.join(directory, VALUE_HEAD_FILE))


def load_value_head(directory: str, head: ValueHead) -> bool:
  """Fills `head` from the `value_head.safetensors` of a checkpoint; its sharding is kept. False if there is none.

  Raises:
    UserError: the names or shapes in the file are not those of `head`.
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
      param.set_value(place_tensor(tensors.get_tensor(name), np.dtype(param.dtype), sharding))
  return True
