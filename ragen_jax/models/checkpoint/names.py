"""The name mapping between the parameters of a `Qwen` and the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx

from ragen_jax.models.qwen import Qwen, QwenConfig

# Parameter path, tensor name, tensor shape. A kernel is the transposed [out, in] of `torch.nn.Linear`, with heads as
# separate axes. Rows for parameters that a model lacks (a bias, a norm, an output projection) are skipped.
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

# Names that an error lists of each kind.
_MAX_LISTED = 8


@dataclasses.dataclass(frozen=True)
class Weight:
  """One parameter and its tensor in a checkpoint.

  Attributes:
    path: path of the parameter in `nnx.state(Qwen)`.
    shape: shape of the parameter.
    name: name of the tensor.
    hf_shape: shape of the tensor.
  """

  path: tuple[str | int, ...]
  shape: tuple[int, ...]
  name: str
  hf_shape: tuple[int, ...]

  @property
  def transposed(self) -> bool:
    """Whether the parameter is a kernel, stored as [out, in]."""
    return self.path[-1] == 'kernel'

  @property
  def size(self) -> int:
    """Number of entries."""
    return math.prod(self.shape)

  def from_hf(self, tensor: np.ndarray) -> np.ndarray:
    """[hf_shape] -> [shape], a view."""
    return (tensor.T if self.transposed else tensor).reshape(self.shape)

  def to_hf(self, array: np.ndarray) -> np.ndarray:
    """[shape] -> [hf_shape], a view."""
    return array.reshape(self.hf_shape[::-1]).T if self.transposed else array.reshape(self.hf_shape)


@functools.lru_cache(maxsize=8)
def weights(cfg: QwenConfig) -> tuple[Weight, ...]:
  """All parameters of a model of this shape, in the order of the layers."""
  shapes = {path: leaf.shape for path, leaf in nnx.to_flat_state(nnx.split(abstract_model(cfg))[1])}
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


def abstract_model(cfg: QwenConfig, **kwargs: Any) -> Qwen:
  """A `Qwen` whose parameters are shapes and types only; `kwargs` are those of `Qwen`."""
  return nnx.eval_shape(lambda: Qwen(cfg, rngs=nnx.Rngs(0), **kwargs))


def list_names(names: Sequence[str]) -> str:
  """Names for an error message, comma-separated, and how many were left out."""
  more = len(names) - _MAX_LISTED
  return ', '.join(names[:_MAX_LISTED]) + (f' and {more} more' if more > 0 else '')
