"""Qwen2, Qwen2.5, Qwen3 and Qwen3.5, with MLPs or mixtures of experts, Llama and Gemma 3 decoders in Flax NNX.

Parameters have the names of Hugging Face checkpoints (`layers.0.self_attn.q_proj`, ...), with heads as separate axes:
a projection's kernel is [D, N, H] instead of [D, N*H], so that heads can be divided over a mesh axis. Sources: the
reports of Qwen2 (arXiv 2407.10671), Qwen3 (arXiv 2505.09388), Llama 3 (arXiv 2407.21783) and Gemma 3 (arXiv
2503.19786); the layout of the weights follows `transformers`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ragen_jax.distributed.sharding import SamplingLayout, look_up, row_sharding
from ragen_jax.models import trees
from ragen_jax.models.attention import attend, attend_to_heads, by_heads, causal, is_kept
from ragen_jax.models.attention_settings import EINSUM, AttentionSettings
from ragen_jax.models.feed_forward import MLP, MixtureOfExperts
from ragen_jax.models.grouped_product import GROUPED
from ragen_jax.models.layer_cache import Cache, CacheMask, HeadsCache, LayerCache, empty_cache
from ragen_jax.models.layers import FUSE_BELOW_WIDTH, Projection, RMSNorm, fan_in_normal, project, scan_layers
from ragen_jax.models.linear_attention import GatedDeltaNet, RecurrentState
from ragen_jax.models.qwen_config import LINEAR, WINDOWED, QwenConfig
from ragen_jax.models.rotary import rotary
from ragen_jax.models.vision import features as image_features
from ragen_jax.models.vision.tower import Features, VisionTower
from ragen_jax.utils.errors import UserError

# From this many layers on, one compiled body serves all layers where no cache is given. A program with a copy of the
# body for each layer takes minutes to compile for an accelerator; few layers are faster without the copy of the weights
# that the loop needs.
_SCAN_FROM_LAYERS = 8


# What the backward pass computes again: nothing; all but products with weights and attention, whose results are kept;
# all of a layer but attention; or all of a layer, of which only the input is kept.
REMAT = ('none', 'elementwise', 'attention', 'layers')


def _is_costly(primitive: Any, *_: Any, attention: AttentionSettings, with_products: bool, **parameters: Any) -> bool:
  """Whether a result is kept where the rest of a layer is computed again."""
  if with_products and primitive is jax.lax.dot_general_p:
    _, (batch, _) = parameters['dimension_numbers']
    return not batch  # a product with weights
  if with_products and primitive.name == 'name' and parameters['name'] == GROUPED:
    return True  # the same of experts
  return is_kept(primitive, attention, **parameters)


class Attention(nnx.Module):
  """Self-attention of one layer."""

  def __init__(self, cfg: QwenConfig, kind: str, *, attention: AttentionSettings, param_dtype: Any, rngs: nnx.Rngs):
    d, n, k, h = cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    self.cfg = cfg
    self.attention = attention
    self.window = cfg.window if kind == WINDOWED else 0
    self.q_proj = Projection(
      (d,), (n, 2 * h if cfg.output_gate else h), bias=cfg.qkv_bias, param_dtype=param_dtype, rngs=rngs
    )
    self.k_proj = Projection((d,), (k, h), bias=cfg.qkv_bias, param_dtype=param_dtype, rngs=rngs)
    self.v_proj = Projection((d,), (k, h), bias=cfg.qkv_bias, param_dtype=param_dtype, rngs=rngs)
    self.o_proj = Projection((n, h), (d,), bias=False, param_dtype=param_dtype, rngs=rngs)
    if cfg.qk_norm:
      self.q_norm = RMSNorm(h, cfg.rms_norm_eps, param_dtype, cfg.norm_offset)
      self.k_norm = RMSNorm(h, cfg.rms_norm_eps, param_dtype, cfg.norm_offset)
    self.sampling: SamplingLayout | None = None  # see `Qwen.sample_on`

  def __call__(self, x, positions, mask, cache, window, column, seen_until=None):
    q, k, v = project(x, [self.q_proj, self.k_proj, self.v_proj], fused=self.cfg.hidden_size < FUSE_BELOW_WIDTH)
    if self.sampling is not None:
      q, k, v = (self.sampling.without_padding(part, len(positions)) for part in (q, k, v))
    gate = None
    if self.cfg.output_gate:
      q, gate = jnp.split(q, 2, axis=-1)
    if self.cfg.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    rope = (self.cfg.rope_theta, self.cfg.rope_axes, self.cfg.rope_scaling, self.cfg.rope_width)
    if self.window:
      rope = (self.cfg.window_rope_theta,)
    q, k = (rotary(x, positions, *rope) for x in (q, k))
    if self.cfg.query_scalar:  # what attends divides by the root of the width
      q = (q * np.float32((self.cfg.head_dim / self.cfg.query_scalar) ** 0.5)).astype(q.dtype)
    if self.window and mask is not None:
      if window is not None:
        mask = mask.near(self.window, positions, column)
      else:
        mask = mask & trees.near(positions, self.window)
    if window is not None:
      window = LayerCache(
        k=jax.lax.dynamic_update_slice_in_dim(window.k, k.astype(window.k.dtype), column, axis=1),
        v=jax.lax.dynamic_update_slice_in_dim(window.v, v.astype(window.v.dtype), column, axis=1),
      )
      kept = None if cache is None else (cache.k, cache.v, mask.kept)
      if isinstance(cache, HeadsCache):
        out = attend_to_heads(q, window.k, window.v, mask.new, kept)
      else:
        out = attend(q, window.k, window.v, mask.new, kept, settings=self.attention)
      out = _gated(out, gate)
      if self.sampling is not None and len(x) > len(out):
        out = self.sampling.padded(out)
      return self.o_proj(out), window
    if mask is None:
      out = causal(q, k, v, seen_until, self.attention, self.window)
    else:
      out = attend(q, k, v, mask, settings=self.attention)
    return self.o_proj(_gated(out, gate)), None


def _gated(out: jax.Array, gate: jax.Array | None) -> jax.Array:
  return out if gate is None else out * jax.nn.sigmoid(gate)


class Layer(nnx.Module):
  """One pre-norm decoder layer, of one of the kinds of layers."""

  def __init__(self, cfg: QwenConfig, number: int, *, attention: AttentionSettings, param_dtype: Any, rngs: nnx.Rngs):
    d, norm = cfg.hidden_size, (cfg.rms_norm_eps, param_dtype, cfg.norm_offset)
    kind, with_experts = cfg.structures[number]
    self.input_layernorm = RMSNorm(d, *norm)
    if kind == LINEAR:
      fused = d < FUSE_BELOW_WIDTH
      self.linear_attn = GatedDeltaNet(d, cfg.linear, cfg.rms_norm_eps, fused=fused, param_dtype=param_dtype, rngs=rngs)
    else:
      self.self_attn = Attention(cfg, kind, attention=attention, param_dtype=param_dtype, rngs=rngs)
    self.kind = kind
    self.post_attention_layernorm = RMSNorm(d, *norm)
    self.output_norms = cfg.output_norms
    if cfg.output_norms:
      self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(d, *norm), RMSNorm(d, *norm)
    if with_experts:
      self.mlp = MixtureOfExperts(d, cfg.experts, param_dtype=param_dtype, rngs=rngs)
    else:
      self.mlp = MLP(d, cfg.intermediate_size, activation=cfg.activation, param_dtype=param_dtype, rngs=rngs)

  def __call__(self, x, positions, mask, cache, window, column, seen_until=None, experts=None, *, rows=None):
    y = self.input_layernorm(x)
    if self.kind == LINEAR:
      y, window = self.linear_attn(y, window, None if window is None else mask.fed, seen_until)
    else:
      y, window = self.self_attn(y, positions, mask, cache, window, column, seen_until)
    x = x + (self.post_attention_layernorm(y) if self.output_norms else y)
    y, chosen = (self.pre_feedforward_layernorm if self.output_norms else self.post_attention_layernorm)(x), None
    if isinstance(self.mlp, MixtureOfExperts):
      y, chosen = self.mlp.with_choices(y, rows, experts)
    else:
      y = self.mlp(y, rows)
    return x + (self.post_feedforward_layernorm(y) if self.output_norms else y), window, chosen


class Qwen(nnx.Module):
  """A causal decoder. It takes embedded columns, so that a column may hold something other than a token's embedding."""

  def __init__(
    self,
    cfg: QwenConfig,
    *,
    dtype: Any = jnp.float32,
    param_dtype: Any = jnp.float32,
    attention: AttentionSettings = EINSUM,
    rngs: nnx.Rngs,
  ):
    """Random weights, from the stream `params`. `dtype` is that of activations, and of weights in computations."""
    self.cfg = cfg
    self.dtype = dtype
    self.attention = attention
    self.scan_layers = cfg.num_layers >= _SCAN_FROM_LAYERS and cfg.period < cfg.num_layers
    # Set on a mesh: the layout of activations, rows divided. Without it the compiler may choose the layout of the
    # weights, and every device would compute all rows.
    self.activation_sharding: jax.sharding.NamedSharding | None = None
    self.sampling: SamplingLayout | None = None  # see `sample_on`
    self.int8 = False  # whether tokens are sampled with matrices in 8 bits, see `models.int8`
    self.embed_tokens = nnx.Param(
      fan_in_normal(rngs.params(), (cfg.vocab_size, cfg.hidden_size), cfg.hidden_size, param_dtype)
    )
    self.layers = nnx.List(
      [Layer(cfg, i, attention=attention, param_dtype=param_dtype, rngs=rngs) for i in range(cfg.num_layers)]
    )
    self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, param_dtype, cfg.norm_offset)
    if not cfg.tie_word_embeddings:
      self.lm_head = Projection((cfg.hidden_size,), (cfg.vocab_size,), bias=False, param_dtype=param_dtype, rngs=rngs)
    if cfg.vision is None:
      self.visual = None
    else:
      self.visual = VisionTower(cfg.vision, dtype=dtype, param_dtype=param_dtype, attention=attention, rngs=rngs)

  @property
  def tree_columns(self) -> int:
    """Columns of the widest rows that may be trees with branches, see `models.trees`; 0 for none.

    A memory would have to go on from where a branch begins. The kernels for TPUs know windows of columns only, not of
    a branch.
    """
    if self.cfg.linear is not None:
      return 0
    columns = self.attention.tree_columns(self.cfg.head_dim)
    return min(columns, self.cfg.window) if self.cfg.window and self.attention.for_tpu else columns

  @property
  def looped(self) -> int:
    """How many layers are one loop where no cache is given: the first ones, in whole periods."""
    return self.cfg.num_layers // self.cfg.period * self.cfg.period if self.scan_layers else 0

  def sample_on(self, layout: SamplingLayout) -> None:
    """Lays computations out for the sampling of tokens."""
    if layout.shared:
      self.activation_sharding = row_sharding(layout.mesh)
    self.sampling = layout
    for layer in self.layers:
      mixer = layer.linear_attn if layer.kind == LINEAR else layer.self_attn
      mixer.sampling = layer.mlp.sampling = layout

  def embed(self, tokens: jax.Array) -> jax.Array:
    """Token ids i32[B, T] -> embeddings [B, T, D]."""
    shared = self.sampling is not None and self.sampling.shared
    if shared:
      tokens = self.sampling.gathered(tokens)
    if not shared and self.activation_sharding is not None:
      x = look_up(self.embed_tokens[...], tokens, self.dtype, self.activation_sharding.mesh)
    else:
      x = jnp.take(self.embed_tokens[...], tokens, axis=0, mode='clip').astype(self.dtype)
    if self.cfg.embedding_scale != 1:
      x = x * jnp.asarray(self.cfg.embedding_scale, x.dtype)
    return self._lay_out(x)

  def embed_columns(
    self, tokens: jax.Array, images: image_features.ImageColumns | None
  ) -> tuple[jax.Array, jax.Array | None]:
    """Embedded columns [B, T, D] of text and images, and the argument `deepstack` of `__call__`.

    `tokens` i32[B, T] have placeholders in the columns of images.
    """
    x = self.embed(tokens)
    if images is None:
      return x, None
    x, deepstack = image_features.insert(x, images.features, images.index)
    return self._lay_out(x), deepstack

  def see(self, patches: jax.Array, grid: tuple[int, int], *, remat: bool = False) -> Features:
    """The features of images of one size, which `vision.features.insert` puts into columns; see `VisionTower`.

    `patches` f32[I, P, values] are those of I images, see `vision.processor`. `grid`, the rows and columns of patches
    of each image, is compiled in. With `remat`, the backward pass computes the tower's blocks again.

    Raises:
      UserError: the model reads text only.
    """
    if self.visual is None:
      raise UserError('the model reads text only, and there are images')
    return self.visual(patches, grid, remat=remat)

  def cache_to_read(self, cache: Cache) -> tuple[LayerCache | HeadsCache | RecurrentState, ...]:
    """A cache as calls with one new column of each row read it fastest; on CPUs it is a copy, so make it for many."""
    if not self.attention.by_row:
      return cache
    return tuple(HeadsCache(*by_heads(layer.k, layer.v)) if isinstance(layer, LayerCache) else layer for layer in cache)

  def _lay_out(self, x: jax.Array) -> jax.Array:
    return x if self.activation_sharding is None else jax.lax.with_sharding_constraint(x, self.activation_sharding)

  def __call__(
    self, x: jax.Array, positions: jax.Array | None = None, **options: Any
  ) -> tuple[jax.Array, Cache | None]:
    """The hidden states and the window of `run`."""
    return self.run(x, positions, **options)[:2]

  def run(
    self,
    x: jax.Array,
    positions: jax.Array | None = None,
    *,
    mask: jax.Array | CacheMask | None = None,
    cache: tuple[LayerCache | HeadsCache | RecurrentState, ...] | None = None,
    window: Cache | None = None,
    column: jax.Array | int = 0,
    remat: str = 'none',
    seen_until: jax.Array | None = None,
    deepstack: jax.Array | None = None,
    experts: jax.Array | None = None,
    with_choices: bool = False,
  ) -> tuple[jax.Array, Cache | None, jax.Array | None]:
    """Runs the layers.

    Args:
      x: [B, T, D], embedded columns: `embed(tokens)`, or other embeddings in some columns.
      positions: i32[B, T], rotary positions, or i32[B, T, 3] on the axes of images; default 0..T-1 on all axes,
        or each column's depth in its tree (`seen_until`).
      mask: bool[B or 1, T, T], the columns that each column attends to. Without a window the default is causal, which
        is sufficient for rows that are padded on the right; linear attention knows no other. With a window it is a
        `CacheMask`, and required.
      cache: one `LayerCache` of S columns per layer, which is only read; it needs a window. A `HeadsCache` needs T = 1.
        Layers with linear attention do not read it.
      window: one `LayerCache` of C columns per layer; the T new columns are written at `column`. In layers with linear
        attention it is the `RecurrentState` before the new columns, and after them in the result.
      column: i32[], the first column of the window to write.
      remat: what the backward pass computes again, one of `REMAT`.
      seen_until: i32[B, T], see `models.trees`, if rows are packed. Without a mask and a window, columns attend to
        those of their own sequence only. For linear attention the trees are without branches.
      deepstack: [B, n, T, D], added to the hidden states after each of the first n layers (DeepStack, arXiv
        2406.04334): features of images in their columns, zero in others.
      experts: [B, T, L, k], numbers of the experts to use in place of those that the routers choose.
      with_choices: whether to return what the routers choose.

    Returns:
      Hidden states [B, T, D] after the last norm; the updated window, None if there was none; and the experts that the
        routers chose, integers [B, T, L, k], 0 in layers without experts. None unless asked for.
    """
    if positions is None:
      positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
      if seen_until is not None:
        positions = trees.depths(seen_until)
    added = 0 if deepstack is None else deepstack.shape[1]
    layers = list(self.layers)
    scanned = self.looped if window is None else 0
    rows, written, chosen = len(x), [], []
    if experts is not None:
      experts = jnp.moveaxis(experts, 2, 0)
    pads = self.sampling is not None and window is not None and deepstack is None and x.shape[1] == 1
    if pads:
      x = self._lay_out(self.sampling.padded(x))
    for start, end in ((0, min(added, scanned)), (added, scanned)):
      if start < end:
        inputs = (
          jnp.moveaxis(deepstack, 1, 0) if start < added else None,
          None if experts is None else experts[start:end],
        )
        x, own = self._scan(layers[start:end], x, positions, mask, remat, seen_until, inputs, with_choices)
        chosen.append(own)
    for i, layer in enumerate(layers[scanned:], scanned):
      *of_layer, given = (None if parts is None else parts[i] for parts in (cache, window, experts))
      if remat != 'none':
        again = nnx.remat(lambda m, *a: m(*a, rows=self.activation_sharding), policy=self._kept(remat))
        x, new, own = again(layer, x, positions, mask, *of_layer, column, seen_until, given)
      else:
        x, new, own = layer(x, positions, mask, *of_layer, column, seen_until, given, rows=self.activation_sharding)
      if i < added:
        x = x + deepstack[:, i].astype(x.dtype)
      x = self._lay_out(x)
      written.append(new)
      if with_choices:
        chosen.append(self._choice(own, x)[None])
    x = self.norm(x)
    found = jnp.moveaxis(jnp.concatenate(chosen), 0, 2) if with_choices else None
    if pads:
      x, found = (None if part is None else self.sampling.without_padding(part, rows) for part in (x, found))
    return x, (None if window is None else tuple(written)), found

  def _choice(self, chosen: jax.Array | None, x: jax.Array) -> jax.Array:
    """What the router of a layer chose for x [B, T, D]; zeros if the layer has none."""
    shape, kind = (*x.shape[:2], self.cfg.experts.chosen), self.cfg.experts.number_type
    return jnp.zeros(shape, kind) if chosen is None else chosen

  def _kept(self, remat: str) -> Any:
    """The policy of `jax.checkpoint` for all of `REMAT` but 'none'; None keeps nothing."""
    if remat == 'layers':
      return None
    return functools.partial(_is_costly, attention=self.attention, with_products=remat == 'elementwise')

  def _scan(self, layers, x, positions, mask, remat, seen_until, inputs, with_choices) -> tuple[jax.Array, Any]:
    """Some layers as one loop over their weights: [B, T, D] -> [B, T, D] and, if asked for, [layers, B, T, k].

    `inputs` are `deepstack` and `experts` of `run` with the layers in front.
    """

    def run(layer, x, of_layer):
      added, given = of_layer
      x, _, own = layer(x, positions, mask, None, None, 0, seen_until, given, rows=self.activation_sharding)
      x = self._lay_out(x if added is None else x + added.astype(x.dtype))
      return x, self._choice(own, x) if with_choices else None

    # A loop's iterations cannot be merged by common-subexpression elimination, so it needs no barrier against that.
    again = functools.partial(jax.checkpoint, prevent_cse=len(self.cfg.runs) > 1, policy=self._kept(remat))
    mesh = None if self.activation_sharding is None else self.activation_sharding.mesh
    return scan_layers(
      layers, x, run, mesh=mesh, checkpoint=None if remat == 'none' else again, inputs=inputs, runs=self.cfg.runs
    )

  def logits(self, hidden: jax.Array) -> jax.Array:
    """Hidden states [..., D] -> logits f32[..., V], accumulated in fp32."""
    rows = len(hidden)
    if self.sampling is not None:
      hidden = self.sampling.gathered(self.sampling.padded(hidden))
    if self.cfg.tie_word_embeddings:
      head = self.embed_tokens[...].astype(hidden.dtype)  # [V, D]
      logits = jnp.einsum('...D,VD->...V', hidden, head, preferred_element_type=jnp.float32)
    else:
      head = self.lm_head.matrix(hidden.dtype)  # [D, V]
      logits = jnp.einsum('...D,DV->...V', hidden, head, preferred_element_type=jnp.float32)
    return logits if self.sampling is None else self.sampling.without_padding(logits, rows)

  def init_cache(self, batch: int, size: int, dtype: Any | None = None) -> Cache:
    """An empty cache for `batch` rows of `size` columns; the default type of keys and values is that of activations."""
    return empty_cache(self.cfg, dtype or self.dtype, batch, size, self.dtype)

  def begin_window(self, cache: Cache, columns: int, count: jax.Array) -> Cache:
    """A window of `columns` columns behind rows of `count` i32[B] columns: empty, but for the states of the rows.

    A row without columns has an empty state, whatever the cache holds.
    """
    window = self.init_cache(len(count), columns)

    def state(kept: RecurrentState, empty: RecurrentState) -> RecurrentState:
      return jax.tree.map(
        lambda x, zeros: jnp.where(count.reshape(-1, *(1,) * (x.ndim - 1)) > 0, x, zeros), kept, empty
      )

    pairs = zip(cache, window, strict=True)
    return tuple(new if isinstance(new, LayerCache) else state(kept, new) for kept, new in pairs)
