"""Saving a model as a Hugging Face checkpoint that `transformers` opens, in place of an older one or not at all."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx, traverse_util
from jax.experimental import multihost_utils
from safetensors import SafetensorError
from safetensors.numpy import save_file

from ragen_jax.models import lora
from ragen_jax.models.checkpoint.config import (
  ADAPTER_CONFIG_FILE,
  CONFIG_FILE,
  CRITIC_DIRECTORY,
  DTYPES,
  INDEX_FILE,
  VALUE_HEAD_FILE,
  WEIGHTS_FILE,
  hf_config,
  is_checkpoint,
  trunk_config,
  write_json,
)
from ragen_jax.models.checkpoint.names import Weight, list_names, weights
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.models.value_head import ValueHead
from ragen_jax.runs.stores import is_address
from ragen_jax.utils.errors import DiskError, UserError, one_line
from ragen_jax.utils.locks import has_owner, owned

_TOKENIZER_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
  'chat_template.jinja',
  'chat_template.json',
  'preprocessor_config.json',
  'video_preprocessor_config.json',
  'generation_config.json',
)

# The folder of a tokenizer's other chat templates, such as those for tools.
_TEMPLATES = 'additional_chat_templates'

# What a new checkpoint replaces in its target, besides *.safetensors; other files stay.
_REPLACED = (CONFIG_FILE, INDEX_FILE, ADAPTER_CONFIG_FILE, CRITIC_DIRECTORY, _TEMPLATES, *_TOKENIZER_FILES)

_log = logging.getLogger(__name__)


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

  The files are written to a new directory beside the target, which then takes the target's place: after a failure
  the target is unchanged. Files in the target that do not belong to a checkpoint are kept. Host memory holds the
  tensors of one shard at a time. In a run of several processes all must call; the first one writes.

  Args:
    directory: the target; created if missing. If it is not empty it must be a checkpoint, which is replaced.
    model: a `Qwen`, or the state or pure dict of one without adapters. The adapters of a `Qwen` are merged into the
      stored weights, one tensor at a time.
    dtype: float32, bfloat16 or float16, the type of the stored weights, but for those that files have in float32.
    tokenizer_dir: source of the files of tokenizer and image processor, token ids and context length; usually the
      checkpoint that training started from. Without it, these files in `directory` are kept.
    value_head: stored in float32, in the critic's directory if `critic` is given, else beside the weights.
    critic: the critic's own trunk, stored in the subdirectory `critic`; an older one there is removed in any case.
    critic_cfg: the shape of `critic`; default `trunk_config(cfg)`.
    max_shard_bytes: size above which the weights are split into several files.

  Raises:
    UserError: `directory` holds something else, `tokenizer_dir` does not exist or has a larger vocabulary, a weight is
      not finite in the type, or the disk is full or not writable.
    ValueError: the parameters are not those of a `Qwen` of this shape, or the dtype is not supported.
  """
  dtype = np.dtype(dtype)
  if dtype.name not in DTYPES.values():
    raise ValueError(f'dtype={dtype.name!r} is not one of {", ".join(DTYPES.values())}')
  if tokenizer_dir is not None and not os.path.isdir(tokenizer_dir):
    raise UserError(f'{tokenizer_dir}: is not a directory, so no tokenizer can be copied from it')
  models = {'': (model, cfg)}
  if critic is not None:
    models[CRITIC_DIRECTORY] = (critic, critic_cfg or trunk_config(cfg))
  parts = {}
  for where, (tree, shape) in models.items():
    fetch = _fetcher(tree, weights(shape))
    parts[where] = (fetch, weights(shape), hf_config(shape, dtype, tokenizer_dir))
  head = None if value_head is None else {'kernel': value_head.kernel[...], 'bias': value_head.bias[...]}
  if jax.process_index() == 0:
    with new_checkpoint(directory, tokenizer_dir) as new:
      for where, (fetch, plan, config) in parts.items():
        os.makedirs(os.path.join(new, where), exist_ok=True)
        write_json(os.path.join(new, where, CONFIG_FILE), config)
        _write_weights(os.path.join(new, where), fetch, plan, dtype, max_shard_bytes)
      if head is not None:
        write_value_head(os.path.join(new, list(parts)[-1]), head)
    _log.debug('Wrote %d tensors to %s', sum(len(plan) for _, plan, _ in parts.values()), directory)
  else:  # other processes only take part in the gathers, in the same order
    for fetch, plan, _ in parts.values():
      for w in plan:
        fetch(w)
    for array in (head or {}).values():
      _to_host(array)
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices('ragen_jax.save_model')


# -- tensors -----------------------------------------------------------------------------------------------------------


def _fetcher(model: Qwen | Mapping[Any, Any], plan: tuple[Weight, ...]) -> Callable[[Weight], np.ndarray]:
  """A function that copies a weight to the host, with its adapter merged."""
  adapters = lora.adapters(model) if isinstance(model, nnx.Module) else {}
  if isinstance(model, nnx.Module):
    model = nnx.state(model, nnx.Param)
  params = traverse_util.flatten_dict(nnx.to_pure_dict(model) if isinstance(model, nnx.State) else dict(model))
  params = {path: x for path, x in params.items() if path[:-2] not in adapters or path[-2] != 'adapter'}
  _check_params(params, plan)

  def fetch(weight: Weight) -> np.ndarray:
    array = params[weight.path]
    array, adapter = _to_host(array if weight.expert is None else array[weight.expert]), adapters.get(weight.path[:-1])
    if adapter is None or not weight.transposed:
      return array
    return lora.merged(array, _to_host(adapter.lora_a[...]), _to_host(adapter.lora_b[...]), adapter.scale)

  return fetch


def _check_params(params: dict[tuple[Any, ...], Any], plan: tuple[Weight, ...]) -> None:
  """Raises ValueError if paths or shapes are not those of the plan."""
  expected = {w.path: w.whole_shape for w in plan}
  found = {path: tuple(array.shape) for path, array in params.items()}
  if found != expected:
    wrong = [path for path in expected.keys() | found.keys() if expected.get(path) != found.get(path)]
    names = sorted(f'{".".join(map(str, p))} {found.get(p)} instead of {expected.get(p)}' for p in wrong)
    raise ValueError(f'the parameters are not those of this config: {list_names(names)}')


def _to_host(array: jax.Array | np.ndarray) -> np.ndarray:
  """The whole array on this host; all processes must call if it is divided over several."""
  if isinstance(array, jax.Array) and not array.is_fully_addressable:
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
  return np.asarray(array)


def _write_weights(
  directory: str,
  fetch: Callable[[Weight], np.ndarray],
  plan: tuple[Weight, ...],
  dtype: np.dtype,
  max_shard_bytes: int,
) -> None:
  """Writes the tensors of one model in the order of `plan`, and an index if there are several files."""
  types = {w.name: np.dtype(np.float32) if w.always_float32 else dtype for w in plan}
  shards = _split(plan, {name: of.itemsize for name, of in types.items()}, max_shard_bytes)
  for file, shard in shards.items():
    tensors = {w.name: as_stored(w.name, w.to_hf(fetch(w)), types[w.name]) for w in shard}
    save_file(tensors, os.path.join(directory, file), metadata={'format': 'pt'})
    del tensors
  if len(shards) > 1:
    total = sum(w.size * types[w.name].itemsize for w in plan)
    names = {w.name: file for file, shard in shards.items() for w in shard}
    write_json(os.path.join(directory, INDEX_FILE), {'metadata': {'total_size': total}, 'weight_map': names})


def as_stored(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """A tensor in the type of a file.

  Raises:
    UserError: a number is NaN or infinite, or is in this type: float16 ends at 65504.
  """
  with np.errstate(over='ignore'):
    stored = np.ascontiguousarray(array, dtype=dtype)
  if bad := int(np.sum(~np.isfinite(stored))):
    raise UserError(f'{name}: {bad} of {stored.size} weights are not finite as {dtype.name}, so nothing is written')
  return stored


def _split(plan: tuple[Weight, ...], itemsize: Mapping[str, int], max_bytes: int) -> dict[str, list[Weight]]:
  """File name -> its tensors; a tensor larger than a shard gets its own file."""
  shards, used = [[]], 0
  for weight in plan:
    size = weight.size * itemsize[weight.name]
    if shards[-1] and used + size > max_bytes:
      shards.append([])
      used = 0
    shards[-1].append(weight)
    used += size
  if len(shards) == 1:
    return {WEIGHTS_FILE: shards[0]}
  return {f'model-{i:05d}-of-{len(shards):05d}.safetensors': shard for i, shard in enumerate(shards, 1)}


def write_value_head(directory: str, head: Mapping[str, Any]) -> None:
  """Writes {'kernel': [D], 'bias': []} in float32 to the file that `load_value_head` reads."""
  tensors = {name: np.asarray(_to_host(array), dtype=np.float32) for name, array in head.items()}
  save_file(tensors, os.path.join(directory, VALUE_HEAD_FILE), metadata={'format': 'pt'})


# -- replacing a directory ---------------------------------------------------------------------------------------------


def check_target(directory: str) -> None:
  """Checks that a checkpoint can be written to `directory`, and cleans up what a killed process left beside it.

  Raises:
    UserError: the checkpoint would replace something other than a checkpoint, or the disk is not writable.
  """
  if is_address(directory):
    raise UserError(f'{directory}: must be a directory on disk, where checkpoints in Hugging Face format are written')
  _recover(directory)
  if os.path.lexists(directory) and not os.path.isdir(directory):
    raise UserError(f'{directory}: is not a directory, so no checkpoint can be written there')
  if os.path.isdir(directory) and os.listdir(directory) and not is_checkpoint(directory):
    raise UserError(
      f'{directory}: is not empty and is no checkpoint (no {CONFIG_FILE} of a model); choose another directory'
    )


@contextlib.contextmanager
def new_checkpoint(directory: str, tokenizer_dir: str | None) -> Iterator[str]:
  """Context manager: a new directory that replaces `directory` when the block ends without an exception.

  Tokenizer files come from `tokenizer_dir`; None keeps those of the target.

  Raises:
    UserError: `directory` holds something other than a checkpoint, or the disk is full or not writable.
  """
  check_target(directory)
  source = directory if tokenizer_dir is None else tokenizer_dir
  with _disk_errors(directory), _replacing(directory) as new:
    for name in _TOKENIZER_FILES:
      if os.path.isfile(os.path.join(source, name)):
        shutil.copyfile(os.path.join(source, name), os.path.join(new, name))
    if os.path.isdir(os.path.join(source, _TEMPLATES)):
      shutil.copytree(os.path.join(source, _TEMPLATES), os.path.join(new, _TEMPLATES))
    yield new
    written = CONFIG_FILE if os.path.isfile(os.path.join(new, CONFIG_FILE)) else ADAPTER_CONFIG_FILE
    for where, _, names in os.walk(new):
      for name in names:  # safetensors creates files that only their owner may read
        shutil.copymode(os.path.join(new, written), os.path.join(where, name))


@contextlib.contextmanager
def _disk_errors(directory: str) -> Iterator[None]:
  """Turns errors of the disk into a `DiskError`. Those of safetensors are no `OSError`."""
  try:
    yield
  except (OSError, SafetensorError) as e:
    reason = getattr(e, 'strerror', None) or one_line(e, str)
    raise DiskError(f'{directory}: the model was not written: {reason}; what was there before is unchanged') from e


@contextlib.contextmanager
def _replacing(directory: str) -> Iterator[str]:
  """A new directory that takes the place of `directory` if the block ends well, and is removed if it does not.

  A killed process leaves `.NAME.<random>`, which is not complete; or this and the old directory as
  `.NAME.<random>.old`, but no target; or the new target and `.old`. See `_recover`.
  """
  target = os.path.realpath(directory)
  os.makedirs(os.path.dirname(target), exist_ok=True)
  new = os.path.join(os.path.dirname(target), f'.{os.path.basename(target)}.{uuid.uuid4().hex[:8]}')
  old = f'{new}.old'
  os.mkdir(new)
  with owned(new):
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
      _keep_other_files(old, target)


def _keep_other_files(old: str, target: str) -> None:
  """Moves the files that do not belong to a checkpoint from `old` to `target`, and removes `old`."""
  for name in os.listdir(old):
    other = name not in _REPLACED and not name.endswith('.safetensors')
    if other and not os.path.lexists(os.path.join(target, name)):
      os.rename(os.path.join(old, name), os.path.join(target, name))
  shutil.rmtree(old)


def _recover(directory: str) -> None:
  """Ends what killed processes began: the target is then the old or the new checkpoint, and nothing is beside it.

  Directories of processes that live are left alone. Where the disk has no locks that tell it (NFS), an old checkpoint
  is put back, and nothing is removed.

  Raises:
    UserError: the disk is not writable.
  """
  target = os.path.realpath(directory)
  parent, name = os.path.split(target)
  if not os.path.isdir(parent):
    return
  left = re.compile(rf'\.{re.escape(name)}\.[0-9a-f]{{8}}(\.old)?')
  try:
    found = sorted(os.path.join(parent, entry) for entry in os.listdir(parent) if left.fullmatch(entry))
    olds = [path for path in found if path.endswith('.old')]
    if not os.path.lexists(target):
      if len(olds) == 1 and not has_owner(olds[0].removesuffix('.old')):
        os.rename(olds[0], target)
        _log.warning('%s: replacing it was interrupted; the checkpoint from before is back', directory)
    elif olds and has_owner(target) is False:
      for old in olds:
        _keep_other_files(old, target)
    for path in found:
      if path not in olds and has_owner(path) is False:
        shutil.rmtree(path)
  except OSError as e:
    raise DiskError(f'{directory}: what an interrupted export left cannot be cleaned up: {e.strerror or e}') from e
