"""The second block of a decoder layer: an MLP, or a mixture of experts, of which each column uses a few."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from ragen_jax.distributed.sharding import SamplingLayout
from ragen_jax.models.attention_settings import KEPT
from ragen_jax.models.grouped_product import grouped_product
from ragen_jax.models.int8 import Int8
from ragen_jax.models.layers import FUSE_BELOW_WIDTH, Projection, fan_in_normal, project

# The activations of MLPs, by the names of Hugging Face.
ACTIVATIONS = {'silu': jax.nn.silu, 'gelu_pytorch_tanh': functools.partial(jax.nn.gelu, approximate=True)}

# The least sum of the shares of given experts; its inverse square is a float32.
_LEAST_SHARE = 1e-15


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
  """The shape of a mixture of experts; fields correspond to those of a Hugging Face `config.json`.

  Attributes:
    count: E, experts of a layer.
    chosen: experts that a column uses.
    width: F of an expert.
    normalised: whether the weights of a column's experts have the sum 1; otherwise they are shares of all experts.
    shared_width: F of the expert that all columns use; 0 for none.
  """

  count: int
  chosen: int
  width: int
  normalised: bool
  shared_width: int = 0

  @property
  def number_type(self) -> np.dtype:
    """The type of an expert's number where many are kept."""
    return np.min_scalar_type(self.count - 1)

  def matrices(self, hidden_size: int, used: int) -> int:
    """Numbers of the matrices of a layer, of `used` experts."""
    shared = 3 * self.shared_width + (self.shared_width > 0)
    return hidden_size * (self.count + 3 * self.width * used + shared)


class MLP(nnx.Module):
  """Gated feed-forward of one layer; `activation` is one of `ACTIVATIONS`."""

  def __init__(self, hidden_size: int, width: int, *, activation: str = 'silu', param_dtype: Any, rngs: nnx.Rngs):
    d, f = hidden_size, width
    self.activation = activation
    self.fused = d < FUSE_BELOW_WIDTH
    self.gate_proj = Projection((d,), (f,), bias=False, param_dtype=param_dtype, rngs=rngs)
    self.up_proj = Projection((d,), (f,), bias=False, param_dtype=param_dtype, rngs=rngs)
    self.down_proj = Projection((f,), (d,), bias=False, param_dtype=param_dtype, rngs=rngs)
    self.sampling: SamplingLayout | None = None  # see `Qwen.sample_on`

  def __call__(self, x: jax.Array, rows: NamedSharding | None = None) -> jax.Array:
    """[B, T, D] -> [B, T, D]. `rows` is the layout of x on a mesh, as for `MixtureOfExperts`."""
    del rows  # the partitioner finds it
    if self.sampling is not None:
      x = self.sampling.gathered(x)
    gate, up = project(x, [self.gate_proj, self.up_proj], fused=self.fused)
    y = self.down_proj(ACTIVATIONS[self.activation](gate) * up)
    return y if self.sampling is None else self.sampling.divided(y)


class ExpertProjection(nnx.Module):
  """A linear map of each expert, with a kernel [E, inputs, outputs] of all."""

  def __init__(self, count: int, inputs: int, outputs: int, *, param_dtype: Any, rngs: nnx.Rngs):
    self.kernel = nnx.Param(fan_in_normal(rngs.params(), (count, inputs, outputs), inputs, param_dtype))

  def computed(self, dtype: Any) -> jax.Array | Int8:
    """The kernel in the type of computations; an `Int8` as it is."""
    kernel = self.kernel.get_value()
    return kernel if isinstance(kernel, Int8) else kernel.astype(dtype)


class Experts(nnx.Module):
  """The weights of the experts of one layer."""

  def __init__(self, hidden_size: int, cfg: ExpertsConfig, *, param_dtype: Any, rngs: nnx.Rngs):
    d, f, options = hidden_size, cfg.width, dict(param_dtype=param_dtype, rngs=rngs)
    self.gate_proj = ExpertProjection(cfg.count, d, f, **options)
    self.up_proj = ExpertProjection(cfg.count, d, f, **options)
    self.down_proj = ExpertProjection(cfg.count, f, d, **options)


class MixtureOfExperts(nnx.Module):
  """The sum of the experts that a router chooses for each column, times their weights; no column is left out.

  On a mesh, a device has a part of the experts. It adds up what its own experts give for its rows, and the devices
  along `tensor` add up the sums.
  """

  def __init__(self, hidden_size: int, cfg: ExpertsConfig, *, param_dtype: Any, rngs: nnx.Rngs):
    d, options = hidden_size, dict(param_dtype=param_dtype, rngs=rngs)
    self.cfg = cfg
    self.gate = Projection((d,), (cfg.count,), bias=False, **options)
    self.experts = Experts(d, cfg, **options)
    if cfg.shared_width:
      self.shared_expert = MLP(d, cfg.shared_width, **options)
      self.shared_expert_gate = Projection((d,), (1,), bias=False, **options)
    self.sampling: SamplingLayout | None = None  # see `Qwen.sample_on`

  def __call__(self, x: jax.Array, rows: NamedSharding | None = None) -> jax.Array:
    """[B, T, D] -> [B, T, D]. `rows` is the layout of x on a mesh; None for one device."""
    return self.with_choices(x, rows)[0]

  def with_choices(
    self, x: jax.Array, rows: NamedSharding | None = None, given: jax.Array | None = None
  ) -> tuple[jax.Array, jax.Array]:
    """The result, and the router's choice of experts for each column, likeliest first: [B, T, k] of `number_type`.

    `given` [B, T, k] are used in place of this choice, with the weights that the router gives them.
    """
    shared = self.sampling is not None and self.sampling.shared
    if shared:
      x = self.sampling.gathered(x)
    own, chosen, weights = self._route(x, given)
    kernels = [p.computed(x.dtype) for p in (self.experts.gate_proj, self.experts.up_proj, self.experts.down_proj)]
    if rows is None:
      y = _of_experts(x, chosen, weights, *kernels)
    else:
      axes = ('tensor', 'fsdp') if shared else ('tensor',)
      by_row = PartitionSpec('data') if shared else rows.spec
      y = jax.shard_map(
        lambda x, chosen, weights, *own: jax.lax.psum(
          _of_experts(x, chosen, weights, *own, first=jax.lax.axis_index(axes) * _count(own[0])), axes
        ),
        mesh=rows.mesh, in_specs=(*[by_row] * 3, *[PartitionSpec(axes)] * 3), out_specs=by_row, check_vma=False,
      )(x, chosen, weights, *kernels)  # fmt: skip
    if self.cfg.shared_width:
      y = y + jax.nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
    own = own.astype(self.cfg.number_type)
    return (self.sampling.divided(y), self.sampling.divided(own)) if shared else (y, own)

  def _route(self, x: jax.Array, given: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The router's choice, the experts of each column and their weights: i32[B, T, k] twice, and [B, T, k]."""
    logits = jnp.einsum('BTD,DE->BTE', x, self.gate.matrix(x.dtype), preferred_element_type=jnp.float32)
    shares = jax.nn.softmax(logits)
    # Kept for the backward pass, which could choose otherwise where two are almost equal.
    own = checkpoint_name(jax.lax.top_k(jax.lax.stop_gradient(shares), self.cfg.chosen)[1], KEPT)
    chosen = own if given is None else given.astype(own.dtype)
    weights = jnp.take_along_axis(shares, chosen, axis=-1)
    if self.cfg.normalised:
      total = jnp.sum(weights, axis=-1, keepdims=True)
      # Columns of padding are given any experts, whose shares may all be 0.
      weights = weights / (total if given is None else jnp.maximum(total, _LEAST_SHARE))
    return own, chosen, weights.astype(x.dtype)


def _of_experts(
  x: jax.Array,
  chosen: jax.Array,
  weights: jax.Array,
  gate: jax.Array | Int8,
  up: jax.Array | Int8,
  down: jax.Array | Int8,
  first: jax.Array | int | None = None,
) -> jax.Array:
  """What some experts add to each column: [B, T, D] -> [B, T, D].

  `chosen` i32[B, T, k] are numbers of experts, and `first` is that of the first expert of the kernels [E, D, F],
  [E, D, F] and [E, F, D]; None if they are all experts.
  """
  shape, count, k = x.shape, _count(gate), chosen.shape[-1]
  x, expert = x.reshape(-1, shape[-1]), chosen.reshape(-1)
  if first is not None:
    expert = jnp.where((expert >= first) & (expert < first + count), expert - first, count)
  order = jnp.argsort(expert)
  sizes = jnp.bincount(expert, length=count).astype(jnp.int32)
  expert = jnp.take(expert, order, mode='clip')
  own = (expert < count)[:, None]

  def ours(rows):
    return rows if first is None else jnp.where(own, rows, 0)

  def product(rows, kernel):
    if not isinstance(kernel, Int8):
      return ours(grouped_product(rows, kernel, sizes))
    scale = jnp.take(kernel.scale[:, 0], expert, axis=0, mode='clip')
    return ours((grouped_product(rows, kernel.value, sizes) * scale).astype(rows.dtype))

  rows = ours(jnp.take(x, order // k, axis=0, mode='clip'))
  out = product(jax.nn.silu(product(rows, gate)) * product(rows, up), down)
  # Back in the order of the columns, so that each sum has the same order in any batch.
  out = jnp.take(out, jnp.argsort(order), axis=0, mode='clip').reshape(-1, k, shape[-1])
  y = jnp.einsum('MkD,Mk->MD', out, weights.reshape(-1, k), preferred_element_type=jnp.float32)
  return y.astype(x.dtype).reshape(shape)


def _count(kernel: jax.Array | Int8) -> int:
  return len(kernel.value if isinstance(kernel, Int8) else kernel)
