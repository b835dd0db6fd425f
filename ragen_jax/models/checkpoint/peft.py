"""Adapters without their model, in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ragen_jax.models import lora
from ragen_jax.models.checkpoint.config import ADAPTER_CONFIG_FILE, read_json, write_json
from ragen_jax.models.checkpoint.names import Order, channel_order
from ragen_jax.models.checkpoint.save import as_stored, new_checkpoint, write_value_head
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.value_head import ValueHead
from ragen_jax.utils.errors import UserError

WEIGHTS_FILE = 'adapter_model.safetensors'

# Fields that must be absent, null, or have one of these values; with other values the adapters are not plain LoRA.
_PLAIN = {
  'target_parameters': ([],),  # such as weights of experts
  'bias': ('none',),
  'use_rslora': (False,),
  'use_dora': (False,),
  'use_qalora': (False,),
  'use_bdlora': (False,),
  'lora_bias': (False,),
  'fan_in_fan_out': (False,),
  'modules_to_save': ([],),
  'exclude_modules': ([], ''),
  'layers_to_transform': ([],),
  'layer_replication': ([],),
  'rank_pattern': ({},),
  'alpha_pattern': ({},),
  'trainable_token_indices': ([], {}),
  'alora_invocation_tokens': ([],),
  # Others change the base weights at the start, so the adapters belong to a base that the checkpoint does not have.
  'init_lora_weights': (True, False, 'gaussian', 'orthogonal', 'eva'),
  'kasa_config': (),
  'lora_ga_config': (),
}


def read_config(directory: str, known: tuple[str, ...] = lora.TARGETS) -> lora.LoraConfig:
  """Reads `adapter_config.json`; `known` are the `lora.targets` of the model.

  Raises:
    UserError: the file cannot be read, or describes something other than plain LoRA on some of `known`.
  """
  where = os.path.join(directory, ADAPTER_CONFIG_FILE)
  if not os.path.isfile(where):
    raise UserError(f'lora.path={directory!r}: has no {ADAPTER_CONFIG_FILE}, so it is no directory of adapters')
  raw = read_json(where)
  if raw.get('peft_type') != 'LORA':
    raise UserError(f"{where}: peft_type={raw.get('peft_type')!r} is not supported; only 'LORA' is")
  for field, allowed in _PLAIN.items():
    if raw.get(field) is not None and raw[field] not in allowed:
      raise UserError(f'{where}: {field}={raw[field]!r} is not supported; only {allowed[0] if allowed else None!r} is')
  rank, alpha, targets = raw.get('r'), raw.get('lora_alpha'), raw.get('target_modules')
  for field, value in (('r', rank), ('lora_alpha', alpha)):
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
      raise UserError(f'{where}: {field}={value!r} must be a positive number')
  # PEFT lists full paths, such as model.layers.0.mlp.up_proj, when a suffix would also match modules without adapters.
  # We keep the suffix; `load` reports the layers that have no adapter.
  try:
    names = [str(t).rpartition('.')[2] for t in targets] if isinstance(targets, list) else [str(targets)]
    names = lora.parse_targets(','.join(names), known)
  except ValueError as e:
    raise UserError(f'{where}: target_modules={targets!r} is not supported; {e}') from e
  return lora.LoraConfig(int(rank), alpha, names)


def load(directory: str, model: Qwen) -> None:
  """Loads adapters from a directory into a model that has adapters of the same rank and targets.

  Raises:
    UserError: the file cannot be read, or tensors are missing, unexpected or of an unexpected shape.
  """
  file = os.path.join(directory, WEIGHTS_FILE)
  try:
    found = load_file(file)
  except (SafetensorError, OSError) as e:
    raise UserError(f'{file}: cannot be read as safetensors ({e})') from e
  wanted = {weight.name: weight.to_peft() for weight in _named(model)}
  problems = [f'{name} is missing' for name in sorted(wanted.keys() - found.keys())]
  problems += [f'{name} is unexpected' for name in sorted(found.keys() - wanted.keys())]
  problems += [
    f'{name} is {list(found[name].shape)} instead of {list(wanted[name].shape)}'
    for name in sorted(wanted.keys() & found.keys())
    if found[name].shape != wanted[name].shape
  ]
  if problems:
    more = f' and {len(problems) - 4} more' if len(problems) > 4 else ''
    raise UserError(f'{file}: does not fit the model; {"; ".join(problems[:4])}{more}')
  for weight in _named(model):
    weight.set_from_peft(found[weight.name])


def save(
  directory: str,
  model: Qwen,
  config: lora.LoraConfig,
  dtype: Any,
  *,
  base: str,
  tokenizer_dir: str,
  value_head: ValueHead | None = None,
) -> None:
  """Writes the adapters of a model as a directory that `peft.PeftModel.from_pretrained` opens. Single process only.

  The files are written to a new directory that then takes the target's place, as in `save_model`, which describes
  `directory` and `dtype`. `base` is the base model that `adapter_config.json` names: a directory, or a repository on
  the hub. The value head is stored beside the adapters, in float32.

  Raises:
    UserError: `directory` holds something other than a checkpoint, or a weight is not finite in this type.
  """
  described = {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': base,
    'r': config.rank,
    'lora_alpha': config.alpha,
    'target_modules': _target_modules(model, config),
    'lora_dropout': 0.0,
    'bias': 'none',
    'inference_mode': True,
  }
  with new_checkpoint(directory, tokenizer_dir) as new:
    tensors = {w.name: as_stored(w.name, w.to_peft(), np.dtype(dtype)) for w in _named(model)}
    save_file(tensors, os.path.join(new, WEIGHTS_FILE), metadata={'format': 'pt'})
    if value_head is not None:
      write_value_head(new, {'kernel': value_head.kernel[...], 'bias': value_head.bias[...]})
    write_json(os.path.join(new, ADAPTER_CONFIG_FILE), described)


def _target_modules(model: Qwen, config: lora.LoraConfig) -> list[str]:
  """The modules that PEFT adapts: all with a target's name, or those of the decoder beside a vision tower."""
  if model.visual is None:
    return list(config.targets)
  return ['.'.join(map(str, path)) for path in lora.adapters(model)]


@dataclasses.dataclass(frozen=True)
class _Weight:
  """A weight of an adapter: PEFT's name, the parameter, and its shape as a matrix [inputs, r] or [r, outputs].

  `order` is that of the outputs in checkpoints; None if it is the same here.
  """

  name: str
  param: nnx.Param
  matrix: tuple[int, int]
  order: Order | None = None

  def to_peft(self) -> np.ndarray:
    """The weight of a `torch.nn.Linear`: [r, inputs] or [outputs, r]."""
    tensor = np.asarray(self.param[...]).reshape(self.matrix).T
    return tensor if self.order is None else tensor[self.order.theirs]

  def set_from_peft(self, tensor: np.ndarray) -> None:
    """The inverse of `to_peft`."""
    tensor = tensor if self.order is None else tensor[self.order.ours]
    self.param.set_value(jnp.asarray(tensor.astype(np.float32).T.reshape(self.param.shape)))


def _named(model: Qwen) -> list[_Weight]:
  """The weights of all adapters."""
  named = []
  decoder = '' if model.visual is None else 'language_model.'
  for path, adapter in lora.adapters(model).items():
    module = f'base_model.model.model.{decoder}' + '.'.join(map(str, path))
    rank = adapter.lora_b.shape[0]
    order = channel_order(model.cfg.linear) if path[-1] == 'in_proj_qkv' else None
    named.append(_Weight(f'{module}.lora_A.weight', adapter.lora_a, (-1, rank)))
    named.append(_Weight(f'{module}.lora_B.weight', adapter.lora_b, (rank, -1), order))
  return named
