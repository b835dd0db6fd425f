"""Qwen2, Qwen2.5 and Qwen3 (dense) decoders in Flax NNX.

Weights carry the names of Hugging Face checkpoints (`layers.0.self_attn.q_proj`, ...), with heads as axes of their own:
a projection's kernel is [D, N, H], not [D, N*H], so that a mesh axis can be laid on heads. Sources: the Qwen2 (arXiv
2407.10671) and Qwen3 (arXiv 2505.09388) reports; the layout of the weights is that of `transformers`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct

from ragen_jax.distributed.sharding import looked_up

# Below this width the q/k/v and gate/up products of one layer are run as one: small products are bound by their launch,
# large ones would only copy their weights.
_FUSE_BELOW_WIDTH = 512

_MASKED = -1e30

# More attention scores than this, over all devices, are not made at once, but for blocks of queries of about so many.
_MOST_SCORES = 2**28
_SCORES_OF_BLOCK = 2**27
_LEAST_BLOCK = 32

# Queries a block in `attend_causal_by_row`.
_ROW_BLOCK = 64


@dataclasses.dataclass(frozen=True)
class QwenConfig:
  """The shape of a model; the fields are those of a Hugging Face `config.json`.

  Attributes:
    architecture: 'qwen2' (bias on q/k/v) or 'qwen3' (RMS norm on every head's q and k, no bias).
    vocab_size: V, rows of the embedding (checkpoints pad it past the tokenizer's size).
    hidden_size: D.
    intermediate_size: F.
    num_layers: L.
    num_heads: N.
    num_kv_heads: K, divides N.
    head_dim: H, even.
    rope_theta: base of the rotary embedding's wavelengths.
    rms_norm_eps: added to the mean square in every norm.
    tie_word_embeddings: the output projection is the transposed embedding.
  """

  architecture: str = 'qwen2'
  vocab_size: int = 151936
  hidden_size: int = 896
  intermediate_size: int = 4864
  num_layers: int = 24
  num_heads: int = 14
  num_kv_heads: int = 2
  head_dim: int = 64
  rope_theta: float = 1e6
  rms_norm_eps: float = 1e-6
  tie_word_embeddings: bool = True

  @property
  def qkv_bias(self) -> bool:
    return self.architecture == 'qwen2'

  @property
  def qk_norm(self) -> bool:
    return self.architecture == 'qwen3'


@struct.dataclass
class LayerCache:
  """Keys and values of one layer, rotary embedding applied.

  Attributes:
    k: [B, S, K, H].
    v: [B, S, K, H].
  """

  k: jax.Array
  v: jax.Array


def fan_in_normal(key: jax.Array, shape: tuple[int, ...], fan_in: int, dtype: Any) -> jax.Array:
  """Gaussian init with standard deviation 1/sqrt(fan_in).

  A fixed 0.02, usual for wide models, leaves a model of width 64 blind: its layers hardly move the residual stream.
  """
  return (jax.random.normal(key, shape, jnp.float32) * fan_in**-0.5).astype(dtype)


class RMSNorm(nnx.Module):
  """x / rms(x) * weight over the last axis, in fp32."""

  def __init__(self, size: int, eps: float, param_dtype: Any):
    self.weight = nnx.Param(jnp.ones((size,), param_dtype))
    self.eps = eps

  def __call__(self, x: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
    return (x32 * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class Projection(nnx.Module):
  """A linear map whose input or output may be split over heads: kernel `inputs + outputs`, optional bias `outputs`."""

  def __init__(
    self, inputs: tuple[int, ...], outputs: tuple[int, ...], *, bias: bool, param_dtype: Any, rngs: nnx.Rngs
  ):
    fan_in = 1
    for n in inputs:
      fan_in *= n
    self.kernel = nnx.Param(fan_in_normal(rngs.params(), inputs + outputs, fan_in, param_dtype))
    self.bias = nnx.Param(jnp.zeros(outputs, param_dtype)) if bias else None
    self.inputs = inputs
    self.outputs = outputs
    self.adapter = None  # see lora.py, which puts one here

  def matrix(self, dtype: Any) -> jax.Array:
    """The kernel as [inputs, outputs], both flattened."""
    return self.kernel[...].astype(dtype).reshape(_size(self.inputs), _size(self.outputs))

  def vector(self, dtype: Any) -> jax.Array:
    """The bias, flattened; zeros where there is none."""
    if self.bias is None:
      return jnp.zeros((_size(self.outputs),), dtype)
    return self.bias[...].astype(dtype).reshape(-1)

  def __call__(self, x: jax.Array) -> jax.Array:
    """[..., *inputs] -> [..., *outputs]."""
    batch = x.shape[: x.ndim - len(self.inputs)]
    x = x.reshape(-1, _size(self.inputs))
    y = x @ self.matrix(x.dtype)
    if self.bias is not None:
      y = y + self.vector(x.dtype)
    if self.adapter is not None:
      y = y + self.adapter(x)
    return y.reshape(batch + self.outputs)


def _size(shape: tuple[int, ...]) -> int:
  n = 1
  for s in shape:
    n *= s
  return n


def fused_projection(x: jax.Array, projections: list[Projection]) -> list[jax.Array]:
  """Several projections of the same input as one product. x: [..., D]; returns one [..., *outputs] each."""
  kernel = jnp.concatenate([p.matrix(x.dtype) for p in projections], axis=1)
  batch, x = x.shape[:-1], x.reshape(-1, x.shape[-1])
  y = x @ kernel
  if any(p.bias is not None for p in projections):
    y = y + jnp.concatenate([p.vector(x.dtype) for p in projections])
  outs, start = [], 0
  for p in projections:
    width = _size(p.outputs)
    out = y[:, start : start + width]
    if p.adapter is not None:
      out = out + p.adapter(x)
    outs.append(out.reshape(batch + p.outputs))
    start += width
  return outs


def rotary(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
  """Rotary embedding (RoFormer, arXiv 2104.09864), halves convention. x: [B, T, heads, H], positions: [B, T]."""
  half = x.shape[-1] // 2
  # On the host, so that every program has the same constants.
  frequencies = (theta ** (-np.arange(half) / half)).astype(np.float32)  # [H/2]
  angles = positions[..., None].astype(jnp.float32) * frequencies  # [B, T, H/2]
  cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
  x1, x2 = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
  return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
  """Grouped-query attention, softmax in fp32, normalised after the value product (fewer divisions).

  Where there are many scores, blocks of queries are done one after the other and recomputed backwards, so that the
  scores of one block are held and no [B, N, T, S].

  Args:
    q: [B, T, N, H].
    k: [B, S, K, H].
    v: [B, S, K, H].
    mask: bool[B or 1, T, S], True where a query may look. A row with nothing to look at gives an average of v.

  Returns:
    [B, T, N, H].
  """
  b, t, n, h = q.shape
  a_query = b * n * k.shape[1]
  if t * a_query <= _MOST_SCORES:
    return _attend(q, k, v, mask)
  block = min(max(_SCORES_OF_BLOCK // a_query, _LEAST_BLOCK), t)
  pad = -t % block
  blocks = (
    jnp.moveaxis(jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(b, -1, block, n, h), 1, 0),
    jnp.moveaxis(jnp.pad(mask, ((0, 0), (0, pad), (0, 0))).reshape(mask.shape[0], -1, block, mask.shape[2]), 1, 0),
  )
  one = jax.checkpoint(lambda xs: _attend(xs[0], k, v, xs[1]))
  out = jax.lax.map(one, blocks)  # [T/block, B, block, N, H]
  return jnp.moveaxis(out, 0, 1).reshape(b, -1, n, h)[:, :t]


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
  b, t, n, h = q.shape
  kv = k.shape[2]
  q = (q * jnp.asarray(h**-0.5, q.dtype)).reshape(b, t, kv, n // kv, h)
  scores = jnp.einsum('BTKGH,BSKH->BKGTS', q, k, preferred_element_type=jnp.float32)
  scores = jnp.where(mask[:, None, None, :, :], scores, _MASKED)
  weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
  total = jnp.sum(weights, axis=-1)  # [B, K, G, T]
  out = jnp.einsum('BKGTS,BSKH->BTKGH', weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
  out = out / jnp.moveaxis(total, 3, 1)[..., None]
  return out.reshape(b, t, n, h).astype(q.dtype)


def attend_causal_by_row(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None = None) -> jax.Array:
  """Causal `attend` over one sequence a row, a row at a time and in blocks of queries, recomputed backwards.

  On a CPU the scores of a whole batch fall out of the cache; those of a block of one row do not, and a block does not
  visit the keys after it, which is what made it worth having. Rows are looped over, so they must not be
  sharded.

  Args:
    q: [B, T, N, H].
    k: [B, T, K, H].
    v: [B, T, K, H].
    segments: i32[B, T], where a row holds several sequences: a column sees those of its own number only.

  Returns:
    [B, T, N, H].
  """
  t, n, h = q.shape[1:]
  kv = k.shape[2]

  @jax.checkpoint
  def one_row(row):
    q, k, v, segments = row
    q = jnp.transpose((q * jnp.asarray(h**-0.5, q.dtype)).reshape(t, kv, n // kv, h), (1, 2, 0, 3))  # [K, G, T, H]
    k = jnp.transpose(k, (1, 2, 0))  # [K, H, T]
    # A column of ones makes the product return the softmax's denominator too.
    v = jnp.transpose(jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1), (1, 0, 2))  # [K, T, H+1]
    blocks = []
    for start in range(0, t, _ROW_BLOCK):
      end = min(start + _ROW_BLOCK, t)
      visible = jnp.arange(end)[None, :] <= jnp.arange(start, end)[:, None]
      if segments is not None:
        visible &= segments[None, :end] == segments[start:end, None]
      scores = jnp.matmul(
        q[:, :, start:end].reshape(kv, -1, h), k[:, :, :end], preferred_element_type=jnp.float32
      ).reshape(kv, n // kv, end - start, end)
      scores = jnp.where(visible, scores, _MASKED)
      weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
      out = jnp.matmul(weights.reshape(kv, -1, end).astype(v.dtype), v[:, :end], preferred_element_type=jnp.float32)
      blocks.append((out[..., :-1] / out[..., -1:]).reshape(kv, n // kv, end - start, h))
    return jnp.transpose(jnp.concatenate(blocks, axis=2), (2, 0, 1, 3)).reshape(t, n, h)

  return jax.lax.map(one_row, (q, k, v, segments)).astype(q.dtype)


class Attention(nnx.Module):
  """Self-attention of one layer."""

  def __init__(self, cfg: QwenConfig, *, by_row: bool, param_dtype: Any, rngs: nnx.Rngs):
    d, n, k, h = cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    self.cfg = cfg
    self.by_row = by_row
    self.q_proj = Projection((d,), (n, h), bias=cfg.qkv_bias, param_dtype=param_dtype, rngs=rngs)
    self.k_proj = Projection((d,), (k, h), bias=cfg.qkv_bias, param_dtype=param_dtype, rngs=rngs)
    self.v_proj = Projection((d,), (k, h), bias=cfg.qkv_bias, param_dtype=param_dtype, rngs=rngs)
    self.o_proj = Projection((n, h), (d,), bias=False, param_dtype=param_dtype, rngs=rngs)
    if cfg.qk_norm:
      self.q_norm = RMSNorm(h, cfg.rms_norm_eps, param_dtype)
      self.k_norm = RMSNorm(h, cfg.rms_norm_eps, param_dtype)

  def __call__(self, x, positions, mask, cache, column, segments=None):
    if self.cfg.hidden_size < _FUSE_BELOW_WIDTH:
      q, k, v = fused_projection(x, [self.q_proj, self.k_proj, self.v_proj])
    else:
      q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
    if self.cfg.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    q, k = rotary(q, positions, self.cfg.rope_theta), rotary(k, positions, self.cfg.rope_theta)
    if cache is not None:
      k = jax.lax.dynamic_update_slice_in_dim(cache.k, k.astype(cache.k.dtype), column, axis=1)
      v = jax.lax.dynamic_update_slice_in_dim(cache.v, v.astype(cache.v.dtype), column, axis=1)
      cache = LayerCache(k=k, v=v)
    if mask is None:
      if self.by_row:
        return self.o_proj(attend_causal_by_row(q, k, v, segments)), cache
      mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None]
      if segments is not None:
        mask = mask & (segments[:, None, :] == segments[:, :, None])
    return self.o_proj(attend(q, k, v, mask)), cache


class MLP(nnx.Module):
  """SwiGLU feed-forward of one layer."""

  def __init__(self, cfg: QwenConfig, *, param_dtype: Any, rngs: nnx.Rngs):
    d, f = cfg.hidden_size, cfg.intermediate_size
    self.fused = d < _FUSE_BELOW_WIDTH
    self.gate_proj = Projection((d,), (f,), bias=False, param_dtype=param_dtype, rngs=rngs)
    self.up_proj = Projection((d,), (f,), bias=False, param_dtype=param_dtype, rngs=rngs)
    self.down_proj = Projection((f,), (d,), bias=False, param_dtype=param_dtype, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    if self.fused:
      gate, up = fused_projection(x, [self.gate_proj, self.up_proj])
    else:
      gate, up = self.gate_proj(x), self.up_proj(x)
    return self.down_proj(jax.nn.silu(gate) * up)


class Layer(nnx.Module):
  """One pre-norm decoder layer."""

  def __init__(self, cfg: QwenConfig, *, by_row: bool, param_dtype: Any, rngs: nnx.Rngs):
    self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, param_dtype)
    self.self_attn = Attention(cfg, by_row=by_row, param_dtype=param_dtype, rngs=rngs)
    self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, param_dtype)
    self.mlp = MLP(cfg, param_dtype=param_dtype, rngs=rngs)

  def __call__(self, x, positions, mask, cache, column, segments=None):
    y, cache = self.self_attn(self.input_layernorm(x), positions, mask, cache, column, segments)
    x = x + y
    return x + self.mlp(self.post_attention_layernorm(x)), cache


class Qwen(nnx.Module):
  """A causal decoder. `embed` and the layers are apart, so that a column's embedding need not be a token's."""

  def __init__(
    self,
    cfg: QwenConfig,
    *,
    dtype: Any = jnp.float32,
    param_dtype: Any = jnp.float32,
    attend_by_row: bool = False,
    rngs: nnx.Rngs,
  ):
    """Builds the model with fresh weights.

    Args:
      cfg: the shape.
      dtype: of activations and of weights as they are used.
      param_dtype: of weights as they are kept.
      attend_by_row: use `attend_causal_by_row` where it applies; for one CPU device.
      rngs: the stream `params` is drawn from.
    """
    self.cfg = cfg
    self.dtype = dtype
    # Set on a mesh: how activations lie, rows divided. Left to itself, the compiler may lay them as the weights lie and
    # have every device work on all rows.
    self.activation_sharding: jax.sharding.NamedSharding | None = None
    self.embed_tokens = nnx.Param(
      fan_in_normal(rngs.params(), (cfg.vocab_size, cfg.hidden_size), cfg.hidden_size, param_dtype)
    )
    self.layers = nnx.List(
      [Layer(cfg, by_row=attend_by_row, param_dtype=param_dtype, rngs=rngs) for _ in range(cfg.num_layers)]
    )
    self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, param_dtype)
    if not cfg.tie_word_embeddings:
      self.lm_head = Projection((cfg.hidden_size,), (cfg.vocab_size,), bias=False, param_dtype=param_dtype, rngs=rngs)

  def embed(self, tokens: jax.Array) -> jax.Array:
    """i32[B, T] -> [B, T, D]."""
    x = jnp.take(self.embed_tokens[...], tokens, axis=0, mode='clip').astype(self.dtype)
    if self.activation_sharding is not None:
      x = jax.lax.with_sharding_constraint(x, looked_up(self.activation_sharding.mesh))
    return self._lay_out(x)

  def _lay_out(self, x: jax.Array) -> jax.Array:
    return x if self.activation_sharding is None else jax.lax.with_sharding_constraint(x, self.activation_sharding)

  def __call__(
    self,
    x: jax.Array,
    positions: jax.Array | None = None,
    *,
    mask: jax.Array | None = None,
    cache: tuple[LayerCache, ...] | None = None,
    column: jax.Array | int = 0,
    remat: bool = False,
    segments: jax.Array | None = None,
  ) -> tuple[jax.Array, tuple[LayerCache, ...] | None]:
    """Runs the layers.

    Args:
      x: [B, T, D], embedded columns.
      positions: i32[B, T], rotary positions; where not given 0..T-1, beginning again with each segment.
      mask: bool[B or 1, T, S] of what each column may look at. Without a cache S = T and the default is causal, which
        is all that rows padded on the right need. With a cache it must be given and S is the cache's length.
      cache: one `LayerCache` a layer; the T new columns are written to it at `column`.
      column: i32[], where in the cache.
      remat: recompute each layer's activations in the backward pass instead of keeping them.
      segments: i32[B, T], where rows hold several sequences one behind the other: the number of each column's. With
        neither a mask nor a cache, no sequence sees another.

    Returns:
      Hidden states [B, T, D] after the last norm, and the updated cache (None without one).
    """
    if positions is None:
      positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
      if segments is not None:
        begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
        positions = positions - jax.lax.cummax(jnp.where(begins, positions, 0), axis=1)
    caches = []
    for i, layer in enumerate(self.layers):
      layer_cache = None if cache is None else cache[i]
      if remat:
        x, layer_cache = nnx.remat(lambda m, *a: m(*a))(layer, x, positions, mask, layer_cache, column, segments)
      else:
        x, layer_cache = layer(x, positions, mask, layer_cache, column, segments)
      x = self._lay_out(x)
      caches.append(layer_cache)
    return self.norm(x), (None if cache is None else tuple(caches))

  def logits(self, hidden: jax.Array) -> jax.Array:
    """Hidden states [..., D] -> f32[..., V], with the product accumulated in fp32."""
    if self.cfg.tie_word_embeddings:
      head = self.embed_tokens[...].astype(hidden.dtype)  # [V, D]
      return jnp.einsum('...D,VD->...V', hidden, head, preferred_element_type=jnp.float32)
    head = self.lm_head.matrix(hidden.dtype)  # [D, V]
    return jnp.einsum('...D,DV->...V', hidden, head, preferred_element_type=jnp.float32)

  def init_cache(self, batch: int, size: int, dtype: Any | None = None) -> tuple[LayerCache, ...]:
    """An empty cache for `batch` rows of `size` columns."""
    shape = (batch, size, self.cfg.num_kv_heads, self.cfg.head_dim)
    dtype = dtype or self.dtype
    return tuple(LayerCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype)) for _ in range(self.cfg.num_layers))
