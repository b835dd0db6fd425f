"""The name mapping between the parameters of a `Qwen` and the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx

from ragen_jax.models.linear_attention import LinearConfig
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.models.vision.config import CHANNELS, QWEN2_5_VL, QWEN3_5, QWEN3_VL

# Parameter path, tensor name, tensor shape. A kernel is the transposed [out, in] of `torch.nn.Linear`, or of a
# convolution [out, ...] without overlap, with heads as separate axes. Rows for parameters that a model lacks (a bias, a
# norm, an output projection) are skipped. J, G, W are those of `linear_attention`, and Q are the channels of all heads.
# A parameter [E, ...] of experts has a tensor for each, with its number in place of '#'; I and A are the widths of an
# expert and of the shared one.
_TABLE = (
  ('embed_tokens', 'model.embed_tokens.weight', 'V D'),
  ('layers.*.input_layernorm.weight', 'model.layers.*.input_layernorm.weight', 'D'),
  ('layers.*.self_attn.q_proj.kernel', 'model.layers.*.self_attn.q_proj.weight', 'NQ D'),
  ('layers.*.self_attn.q_proj.bias', 'model.layers.*.self_attn.q_proj.bias', 'NH'),
  ('layers.*.self_attn.k_proj.kernel', 'model.layers.*.self_attn.k_proj.weight', 'KH D'),
  ('layers.*.self_attn.k_proj.bias', 'model.layers.*.self_attn.k_proj.bias', 'KH'),
  ('layers.*.self_attn.v_proj.kernel', 'model.layers.*.self_attn.v_proj.weight', 'KH D'),
  ('layers.*.self_attn.v_proj.bias', 'model.layers.*.self_attn.v_proj.bias', 'KH'),
  ('layers.*.self_attn.q_norm.weight', 'model.layers.*.self_attn.q_norm.weight', 'H'),
  ('layers.*.self_attn.k_norm.weight', 'model.layers.*.self_attn.k_norm.weight', 'H'),
  ('layers.*.self_attn.o_proj.kernel', 'model.layers.*.self_attn.o_proj.weight', 'D NH'),
  ('layers.*.linear_attn.in_proj_qkv.kernel', 'model.layers.*.linear_attn.in_proj_qkv.weight', 'Q D'),
  ('layers.*.linear_attn.in_proj_z.kernel', 'model.layers.*.linear_attn.in_proj_z.weight', 'JGW D'),
  ('layers.*.linear_attn.in_proj_b.kernel', 'model.layers.*.linear_attn.in_proj_b.weight', 'JG D'),
  ('layers.*.linear_attn.in_proj_a.kernel', 'model.layers.*.linear_attn.in_proj_a.weight', 'JG D'),
  ('layers.*.linear_attn.conv1d', 'model.layers.*.linear_attn.conv1d.weight', 'Q 1 taps'),
  ('layers.*.linear_attn.dt_bias', 'model.layers.*.linear_attn.dt_bias', 'JG'),
  ('layers.*.linear_attn.A_log', 'model.layers.*.linear_attn.A_log', 'JG'),
  ('layers.*.linear_attn.norm.weight', 'model.layers.*.linear_attn.norm.weight', 'W'),
  ('layers.*.linear_attn.out_proj.kernel', 'model.layers.*.linear_attn.out_proj.weight', 'D JGW'),
  ('layers.*.post_attention_layernorm.weight', 'model.layers.*.post_attention_layernorm.weight', 'D'),
  ('layers.*.pre_feedforward_layernorm.weight', 'model.layers.*.pre_feedforward_layernorm.weight', 'D'),
  ('layers.*.post_feedforward_layernorm.weight', 'model.layers.*.post_feedforward_layernorm.weight', 'D'),
  ('layers.*.mlp.gate_proj.kernel', 'model.layers.*.mlp.gate_proj.weight', 'F D'),
  ('layers.*.mlp.up_proj.kernel', 'model.layers.*.mlp.up_proj.weight', 'F D'),
  ('layers.*.mlp.down_proj.kernel', 'model.layers.*.mlp.down_proj.weight', 'D F'),
  ('layers.*.mlp.gate.kernel', 'model.layers.*.mlp.gate.weight', 'E D'),
  ('layers.*.mlp.experts.gate_proj.kernel', 'model.layers.*.mlp.experts.#.gate_proj.weight', 'I D'),
  ('layers.*.mlp.experts.up_proj.kernel', 'model.layers.*.mlp.experts.#.up_proj.weight', 'I D'),
  ('layers.*.mlp.experts.down_proj.kernel', 'model.layers.*.mlp.experts.#.down_proj.weight', 'D I'),
  ('layers.*.mlp.shared_expert.gate_proj.kernel', 'model.layers.*.mlp.shared_expert.gate_proj.weight', 'A D'),
  ('layers.*.mlp.shared_expert.up_proj.kernel', 'model.layers.*.mlp.shared_expert.up_proj.weight', 'A D'),
  ('layers.*.mlp.shared_expert.down_proj.kernel', 'model.layers.*.mlp.shared_expert.down_proj.weight', 'D A'),
  ('layers.*.mlp.shared_expert_gate.kernel', 'model.layers.*.mlp.shared_expert_gate.weight', '1 D'),
  ('norm.weight', 'model.norm.weight', 'D'),
  ('lm_head.kernel', 'lm_head.weight', 'V D'),
)

# The same for vision towers. U, Y: widths of blocks and of their MLP; M: width of a token's patches; P: positions.
_ATTENTION = (
  ('visual.blocks.*.attn.qkv.kernel', 'visual.blocks.*.attn.qkv.weight', '3U U'),
  ('visual.blocks.*.attn.qkv.bias', 'visual.blocks.*.attn.qkv.bias', '3U'),
  ('visual.blocks.*.attn.proj.kernel', 'visual.blocks.*.attn.proj.weight', 'U U'),
  ('visual.blocks.*.attn.proj.bias', 'visual.blocks.*.attn.proj.bias', 'U'),
  ('visual.patch_embed.proj.kernel', 'visual.patch_embed.proj.weight', 'U C t p p'),
  ('visual.patch_embed.proj.bias', 'visual.patch_embed.proj.bias', 'U'),
  ('visual.pos_embed', 'visual.pos_embed.weight', 'P U'),
)


def _linear(ours: str, theirs: str, axes: str) -> tuple[tuple[str, str, str], ...]:
  """The rows of a linear map or norm with a bias."""
  kind = 'weight' if ' ' not in axes else 'kernel'
  return (f'{ours}.{kind}', f'{theirs}.weight', axes), (f'{ours}.bias', f'{theirs}.bias', axes.split()[0])


_VISION_TABLES = {
  QWEN2_5_VL: (
    *_ATTENTION,
    *_linear('visual.blocks.*.norm1', 'visual.blocks.*.norm1', 'U'),
    *_linear('visual.blocks.*.norm2', 'visual.blocks.*.norm2', 'U'),
    *_linear('visual.blocks.*.mlp.gate_proj', 'visual.blocks.*.mlp.gate_proj', 'Y U'),
    *_linear('visual.blocks.*.mlp.up_proj', 'visual.blocks.*.mlp.up_proj', 'Y U'),
    *_linear('visual.blocks.*.mlp.down_proj', 'visual.blocks.*.mlp.down_proj', 'U Y'),
    *_linear('visual.merger.norm', 'visual.merger.ln_q', 'U'),
    *_linear('visual.merger.linear_fc1', 'visual.merger.mlp.0', 'M M'),
    *_linear('visual.merger.linear_fc2', 'visual.merger.mlp.2', 'D M'),
  ),
  QWEN3_VL: (
    *_ATTENTION,
    *_linear('visual.blocks.*.norm1', 'visual.blocks.*.norm1', 'U'),
    *_linear('visual.blocks.*.norm2', 'visual.blocks.*.norm2', 'U'),
    *_linear('visual.blocks.*.mlp.linear_fc1', 'visual.blocks.*.mlp.linear_fc1', 'Y U'),
    *_linear('visual.blocks.*.mlp.linear_fc2', 'visual.blocks.*.mlp.linear_fc2', 'U Y'),
    *_linear('visual.merger.norm', 'visual.merger.norm', 'U'),
    *_linear('visual.merger.linear_fc1', 'visual.merger.linear_fc1', 'M M'),
    *_linear('visual.merger.linear_fc2', 'visual.merger.linear_fc2', 'D M'),
    *_linear('visual.deepstack_mergers.*.norm', 'visual.deepstack_merger_list.*.norm', 'M'),
    *_linear('visual.deepstack_mergers.*.linear_fc1', 'visual.deepstack_merger_list.*.linear_fc1', 'M M'),
    *_linear('visual.deepstack_mergers.*.linear_fc2', 'visual.deepstack_merger_list.*.linear_fc2', 'D M'),
  ),
}
_VISION_TABLES[QWEN3_5] = _VISION_TABLES[QWEN3_VL]

# Beginnings of names in checkpoints of models that read images, and those in the tables. The published Qwen2.5-VL files
# have the names of the tables, those of Qwen3-VL and Qwen3.5 the others; `transformers` reads and writes both, and so
# do we. The first pair that fits counts.
_NESTED = (('model.visual.', 'visual.'), ('model.language_model.', 'model.'))
_WRITTEN_NESTED = (QWEN3_VL, QWEN3_5)

# The same for text models that are published with a vision tower, and what is left out of their files: a head that
# predicts several tokens, and the tower if config.json describes none.
_TEXT_OF_NESTED = ('qwen3_5',)
_LEFT_OUT = ('mtp.', 'model.visual.')

# Tensors that files have in float32, whatever the type of the others.
_ALWAYS_FLOAT32 = ('linear_attn.A_log', 'linear_attn.norm.weight')
# Tensors with one row for each channel of the linear attention, in an order of their own.
_BY_CHANNEL = ('linear_attn.in_proj_qkv.weight', 'linear_attn.conv1d.weight')

# Names that an error lists of each kind.
_MAX_LISTED = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Order:
  """Where our rows of a tensor stand in checkpoints, `ours`, and theirs in our order, `theirs`."""

  ours: np.ndarray
  theirs: np.ndarray

  @classmethod
  def of(cls, ours: np.ndarray) -> Order:
    return cls(ours, np.argsort(ours))


@dataclasses.dataclass(frozen=True)
class Weight:
  """Path and shape of a parameter in `nnx.state(Qwen)`, and name and shape of its tensor in a checkpoint.

  Attributes:
    order: that of the tensor's rows; None if it is the same here.
    expert: of a parameter [E, *shape], whose part the tensor is; None if the tensor is all of the parameter.
    experts: E; 0 if `expert` is None.
  """

  path: tuple[str | int, ...]
  shape: tuple[int, ...]
  name: str
  hf_shape: tuple[int, ...]
  order: Order | None = None
  expert: int | None = None
  experts: int = 0

  @property
  def whole_shape(self) -> tuple[int, ...]:
    return self.shape if self.expert is None else (self.experts, *self.shape)

  @property
  def always_float32(self) -> bool:
    """Whether files have the tensor in float32, whatever the type of the others."""
    return self.name.endswith(_ALWAYS_FLOAT32)

  @property
  def transposed(self) -> bool:
    """Whether the parameter is a kernel, stored as [out, in]."""
    return self.path[-1] == 'kernel'

  @property
  def size(self) -> int:
    """Number of entries of the tensor."""
    return math.prod(self.shape)

  def from_hf(self, tensor: np.ndarray) -> np.ndarray:
    """[hf_shape] -> [shape]: a view, unless rows have another order."""
    if self.order is not None:
      tensor = tensor[self.order.ours]
    return (tensor.reshape(len(tensor), -1).T if self.transposed else tensor).reshape(self.shape)

  def to_hf(self, array: np.ndarray) -> np.ndarray:
    """[shape] -> [hf_shape]: a view, unless rows have another order."""
    if self.transposed:
      array = array.reshape(-1, self.hf_shape[0]).T
    tensor = array if array.shape == self.hf_shape else array.reshape(self.hf_shape)
    return tensor if self.order is None else tensor[self.order.theirs]


@dataclasses.dataclass(frozen=True)
class Stored:
  """A tensor that a checkpoint may have: its shape, and the weights that it holds with their places in it."""

  shape: tuple[int, ...]
  parts: tuple[tuple[Weight, tuple[int | slice, ...]], ...]


def stored(cfg: QwenConfig) -> dict[str, Stored]:
  """By name, the tensors that a checkpoint of this shape may have.

  Experts may have a tensor each, or those of a layer together: gates above `up_proj` [E, 2 I, D], and [E, D, I].
  """
  found = {w.name: Stored(w.hf_shape, ((w, ()),)) for w in weights(cfg)}
  together: dict[str, list] = {}
  for w in weights(cfg):
    if w.expert is not None:
      layer, kind, rows = w.name.partition('.experts.')[0], w.path[-2], w.hf_shape[0]
      if kind == 'down_proj':
        together.setdefault(f'{layer}.experts.down_proj', []).append((w, (w.expert,)))
      else:
        half = slice(0, rows) if kind == 'gate_proj' else slice(rows, 2 * rows)
        together.setdefault(f'{layer}.experts.gate_up_proj', []).append((w, (w.expert, half)))
  for name, parts in together.items():
    rows, columns = parts[0][0].hf_shape
    found[name] = Stored((parts[0][0].experts, rows * len(parts) // parts[0][0].experts, columns), tuple(parts))
  return found


def stored_name(name: str, cfg: QwenConfig) -> str:
  """The name under which a model of this shape is stored, of a tensor with one of the names that it may have."""
  if cfg.vision is None and cfg.architecture in _TEXT_OF_NESTED:
    return name.replace('model.language_model.', 'model.', 1) if name.startswith('model.language_model.') else name
  if cfg.vision is None:
    return name
  for nested, plain in _NESTED:
    if name.startswith((nested, plain)):
      rest = name.removeprefix(nested).removeprefix(plain)
      return (nested if cfg.vision.family in _WRITTEN_NESTED else plain) + rest
  return name


def is_left_out(name: str, cfg: QwenConfig) -> bool:
  """Whether a model of this shape has no use for a tensor that its checkpoints may have."""
  return cfg.architecture in _TEXT_OF_NESTED and name.startswith(_LEFT_OUT if cfg.vision is None else _LEFT_OUT[:1])


@functools.lru_cache(maxsize=8)
def channel_order(cfg: LinearConfig) -> Order:
  """The order of the channels of the linear attention."""
  return Order.of(cfg.channel_order())


@functools.lru_cache(maxsize=8)
def weights(cfg: QwenConfig) -> tuple[Weight, ...]:
  """All parameters of a model of this shape, in the order of the layers."""
  shapes = {path: leaf.shape for path, leaf in nnx.to_flat_state(nnx.split(abstract_model(cfg))[1])}
  n, k, h, v = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.vision
  sizes = {'V': cfg.vocab_size, 'D': cfg.hidden_size, 'F': cfg.intermediate_size, 'H': h, 'NH': n * h, 'KH': k * h}
  sizes['NQ'] = 2 * n * h if cfg.output_gate else n * h
  repeated = {'layers': cfg.num_layers}
  table = _TABLE
  if cfg.linear is not None:
    c = cfg.linear
    sizes |= {'Q': c.key_heads * c.channels, 'JGW': c.value_heads * c.value_dim, 'JG': c.value_heads}
    sizes |= {'W': c.value_dim, 'taps': c.taps, '1': 1}
  if cfg.experts is not None:
    sizes |= {'E': cfg.experts.count, 'I': cfg.experts.width, 'A': cfg.experts.shared_width, '1': 1}
  if v is not None:
    sizes |= {'U': v.hidden_size, '3U': 3 * v.hidden_size, 'Y': v.intermediate_size, 'P': v.num_positions}
    sizes |= {'M': v.hidden_size * v.merge_size**2, 'C': CHANNELS, 't': v.temporal_patch_size, 'p': v.patch_size}
    repeated |= {'blocks': v.depth, 'deepstack_mergers': len(v.deepstack_blocks)}
    table += _VISION_TABLES[v.family]
  found = []
  for ours, theirs, axes in table:
    of_many = ours.partition('.*')[0].rpartition('.')[2]
    for i in range(repeated[of_many]) if '*' in ours else (None,):
      path = tuple(i if part == '*' else part for part in ours.split('.'))
      if path in shapes:
        name = stored_name(theirs.replace('*', str(i)), cfg)
        order = channel_order(cfg.linear) if theirs.endswith(_BY_CHANNEL) else None
        hf_shape = tuple(sizes[axis] for axis in axes.split())
        if '#' not in name:
          found.append(Weight(path, shapes[path], name, hf_shape, order))
          continue
        count, *shape = shapes[path]
        for e in range(count):
          found.append(Weight(path, tuple(shape), name.replace('#', str(e)), hf_shape, None, e, count))
  unnamed = shapes.keys() - {w.path for w in found}
  if unnamed:
    raise ValueError(f'parameters that have no name in checkpoints: {sorted(unnamed)}')
  return tuple(found)


@functools.lru_cache(maxsize=8)  # a model of many layers takes a second
def abstract_model(cfg: QwenConfig, **kwargs: Any) -> Qwen:
  """A `Qwen` whose parameters are shapes and types only; `kwargs` are those of `Qwen`. Callers do not change it."""
  return nnx.eval_shape(lambda: Qwen(cfg, rngs=nnx.Rngs(0), **kwargs))


def list_names(names: Sequence[str]) -> str:
  """Names for an error message, comma-separated, and how many were left out."""
  more = len(names) - _MAX_LISTED
  return ', '.join(names[:_MAX_LISTED]) + (f' and {more} more' if more > 0 else '')
