"""Gated DeltaNet (arXiv 2412.06464), the linear attention of Qwen3.5: a short convolution and a memory of one size.

Letters are those of `delta_rule`: J key heads of width E, each with G value heads of width W. A query, its key and the
values of its heads stand together, in 2 E + G W channels, so that heads can be divided over a mesh axis; files have
all queries, then all keys, then all values (`channel_order`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax.ad_checkpoint import checkpoint_name

from ragen_jax.distributed.sharding import SamplingLayout
from ragen_jax.models import delta_rule, trees
from ragen_jax.models.attention_settings import KEPT
from ragen_jax.models.layers import Projection, RMSNorm, fan_in_normal, project

# Added to the squared length of queries and keys, of any model.
_LENGTH_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class LinearConfig:
  """The shape of the linear attention; fields correspond to those of a Hugging Face `config.json`.

  Attributes:
    key_heads: J, heads of queries and keys.
    value_heads: J G, a multiple of `key_heads`.
    key_dim: E.
    value_dim: W.
    taps: columns that the convolution reads, the present one included.
  """

  key_heads: int
  value_heads: int
  key_dim: int
  value_dim: int
  taps: int

  @property
  def groups(self) -> int:
    """G, value heads of a key head."""
    return self.value_heads // self.key_heads

  @property
  def channels(self) -> int:
    """Channels of the convolution that belong to a key head."""
    return 2 * self.key_dim + self.groups * self.value_dim

  @property
  def memory_values(self) -> int:
    """Numbers of a row's memory."""
    return self.value_heads * self.key_dim * self.value_dim

  @property
  def chunk_values(self) -> int:
    """Numbers in float32 for each column that `delta_rule.chunked` holds at most: matrices of chunks, and memories."""
    width, c = self.key_dim + self.value_dim, delta_rule.chunk_columns(self.key_dim)
    of_head = 5 * (c + width) + self.key_dim * self.value_dim // c
    return 3 * self.key_heads * self.channels + self.value_heads * of_head

  def channel_order(self) -> np.ndarray:
    """i64[J (2 E + G W)]: where our channels stand in checkpoints."""
    queries = np.arange(self.key_heads * self.key_dim).reshape(self.key_heads, -1)
    values = 2 * queries.size + np.arange(self.value_heads * self.value_dim).reshape(self.key_heads, -1)
    return np.concatenate([queries, queries.size + queries, values], axis=1).reshape(-1)


@struct.dataclass
class RecurrentState:
  """What a row's columns have left in one layer. It has no column axis, and nothing of it can be taken back.

  Attributes:
    conv: [B, taps - 1, J, 2 E + G W], the last inputs of the convolution; zeros before the first column.
    memory: f32[B, J, G, E, W], the memory of the heads.
  """

  conv: jax.Array
  memory: jax.Array


def empty_state(cfg: LinearConfig, rows: int, dtype: Any) -> RecurrentState:
  """The state of rows without columns; `dtype` is that of activations."""
  return RecurrentState(
    conv=jnp.zeros((rows, cfg.taps - 1, cfg.key_heads, cfg.channels), dtype),
    memory=jnp.zeros((rows, cfg.key_heads, cfg.groups, cfg.key_dim, cfg.value_dim), jnp.float32),
  )


class GatedDeltaNet(nnx.Module):
  """Linear attention of one layer."""

  def __init__(self, hidden_size: int, cfg: LinearConfig, eps: float, *, fused: bool, param_dtype: Any, rngs: nnx.Rngs):
    """`fused` runs the projections of the input as one product."""
    d, heads = hidden_size, (cfg.value_heads,)
    self.cfg = cfg
    self.fused = fused

    def projection(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Projection:
      return Projection(inputs, outputs, bias=False, param_dtype=param_dtype, rngs=rngs)

    self.in_proj_qkv = projection((d,), (cfg.key_heads, cfg.channels))
    self.in_proj_z = projection((d,), (*heads, cfg.value_dim))
    self.in_proj_b = projection((d,), heads)
    self.in_proj_a = projection((d,), heads)
    self.out_proj = projection((*heads, cfg.value_dim), (d,))
    self.conv1d = nnx.Param(
      fan_in_normal(rngs.params(), (cfg.key_heads, cfg.channels, cfg.taps), cfg.taps, param_dtype)
    )
    # Float32 in any case: the memory multiplies what they say hundreds of times. Decays are from hardly any to fast.
    decays = jax.random.uniform(rngs.params(), heads, jnp.float32, 0.01, 16.0)
    self.A_log = nnx.Param(jnp.log(decays))
    self.dt_bias = nnx.Param(jnp.ones(heads, jnp.float32))
    self.norm = RMSNorm(cfg.value_dim, eps, jnp.float32)
    self.sampling: SamplingLayout | None = None  # see `Qwen.sample_on`

  def __call__(
    self, x: jax.Array, state: RecurrentState | None, fed: jax.Array | None, seen_until: jax.Array | None = None
  ) -> tuple[jax.Array, RecurrentState | None]:
    """Columns [B, T, D] -> [B, T, D], and the state after them; None without a state.

    Args:
      state: of the columns before. Without it, rows begin; columns of padding on their right change nothing before.
      fed: i32[B], with a state: how many of the T columns are the row's. The state does not see the others.
      seen_until: i32[B, T], see `models.trees`, if rows are packed; trees without branches. Not with a state.
    """
    mixed, z, b, a = project(x, [self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a], fused=self.fused)
    rows = len(x)
    if state is not None:
      rows = len(fed)
      if self.sampling is not None:
        mixed, z, b, a = (self.sampling.without_padding(part, rows) for part in (mixed, z, b, a))
    beta = jax.nn.sigmoid(b.astype(jnp.float32))
    g = -jnp.exp(self.A_log[...]) * jax.nn.softplus(a.astype(jnp.float32) + self.dt_bias[...])
    if state is None:
      out, after = self._whole_rows(mixed, g, beta, seen_until), None
    else:
      out, after = self._behind(state, mixed, g, beta, fed)
    out = self._gated(out.astype(z.dtype), z)
    if self.sampling is not None and len(x) > rows:
      out = self.sampling.padded(out)
    return self.out_proj(out), after

  def _whole_rows(self, mixed: jax.Array, g: jax.Array, beta: jax.Array, seen_until: jax.Array | None) -> jax.Array:
    """What the columns of rows without a state read: [B, T, J G, W]."""
    taps, begins, place = self.cfg.taps, None, None
    if seen_until is not None:
      begins, place = trees.begins(seen_until), trees.depths(seen_until)
    before = jnp.zeros((len(mixed), taps - 1, *mixed.shape[2:]), mixed.dtype)
    parts = self._heads(self._convolve(jnp.concatenate([before, mixed], axis=1), place))

    @jax.checkpoint  # the chunks' matrices take several times the memory of what they are made from
    def read(q, k, v, g, beta):
      return delta_rule.chunked(q, k, v, g, beta, begins=begins)[0]

    out = read(*parts, self._grouped(g), self._grouped(beta))
    return checkpoint_name(out.reshape(*out.shape[:2], -1, out.shape[-1]).astype(mixed.dtype), KEPT)

  def _behind(
    self, state: RecurrentState, mixed: jax.Array, g: jax.Array, beta: jax.Array, fed: jax.Array
  ) -> tuple[jax.Array, RecurrentState]:
    """What columns behind a state read, f32[B, T, J G, W], and the state after those that are fed."""
    b, t = mixed.shape[:2]
    own = (jnp.arange(t) < fed[:, None])[..., None]  # [B, T, 1]
    g, beta = (self._grouped(jnp.where(own, part, 0)) for part in (g, beta))
    inputs = jnp.concatenate([state.conv, mixed.astype(state.conv.dtype)], axis=1)
    q, k, v = self._heads(self._convolve(inputs))
    kept = self.cfg.taps - 1
    if t == 1:
      out, memory = delta_rule.one_column(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state.memory)
      conv = jnp.where(own[..., None], inputs[:, 1:], inputs[:, :-1])
    else:
      out, memory = delta_rule.chunked(q, k, v, g, beta, state.memory)
      conv = jax.vmap(lambda x, n: jax.lax.dynamic_slice_in_dim(x, n, kept))(inputs, fed)
    return out.reshape(b, t, -1, self.cfg.value_dim), RecurrentState(conv, memory)

  def _convolve(self, inputs: jax.Array, place: jax.Array | None = None) -> jax.Array:
    """The convolution of each channel and SiLU: [B, taps - 1 + T, J, channels] -> [B, T, J, channels].

    `place` i32[B, T] is the place of each column in its sequence; it reads no column before the sequence. None if the
    first taps - 1 columns are what is before all others.
    """
    taps = self.cfg.taps
    t = inputs.shape[1] - taps + 1
    # In the type of computations first, as the sampler's copy of the weights is.
    kernel, total = self.conv1d[...].astype(inputs.dtype).astype(jnp.float32), 0
    for i in range(taps):
      read = inputs[:, i : i + t].astype(jnp.float32)
      if place is not None:
        read = jnp.where((place >= taps - 1 - i)[..., None, None], read, 0)
      total = total + read * kernel[..., i]
    return jax.nn.silu(total).astype(inputs.dtype)

  def _heads(self, channels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries and keys f32[B, T, J, E] of length E^-0.5 and 1, and values f32[B, T, J, G, W]."""
    c, x = self.cfg, channels.astype(jnp.float32)
    q, k, v = x[..., : c.key_dim], x[..., c.key_dim : 2 * c.key_dim], x[..., 2 * c.key_dim :]
    q, k = (part * jax.lax.rsqrt(jnp.sum(jnp.square(part), -1, keepdims=True) + _LENGTH_EPS) for part in (q, k))
    return q * c.key_dim**-0.5, k, v.reshape(*v.shape[:-1], c.groups, c.value_dim)

  def _grouped(self, x: jax.Array) -> jax.Array:
    """Numbers of value heads by key heads: [B, T, J G] -> [B, T, J, G]."""
    return x.reshape(*x.shape[:-1], self.cfg.key_heads, self.cfg.groups)

  def _gated(self, out: jax.Array, z: jax.Array) -> jax.Array:
    """The norm of each head, times SiLU of the gate z: [B, T, J G, W] -> [B, T, J G, W]."""
    return (self.norm(out) * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)
