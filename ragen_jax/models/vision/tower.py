"""The vision towers of Qwen2.5-VL (arXiv 2502.13923) and Qwen3-VL (arXiv 2511.21631): features from patches.

That of Qwen3.5 is Qwen3-VL's without DeepStack. Parameters have the names of Hugging Face checkpoints with two
exceptions (`checkpoint.names`): the mergers of all families have the same names, and so do their norms. All images of
one call have the same size; images of several sizes need one call for each size.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct

from ragen_jax.models.attention import attend
from ragen_jax.models.attention_settings import AttentionSettings
from ragen_jax.models.layers import LayerNorm, Projection, RMSNorm, fan_in_normal, scan_layers
from ragen_jax.models.rotary import rotated
from ragen_jax.models.vision import grids
from ragen_jax.models.vision.config import QWEN2_5_VL, VisionConfig

_EPS = 1e-6

# From this depth on, one compiled body serves adjacent blocks of one kind.
_SCAN_FROM_BLOCKS = 8

# (number, patches) of groups of adjacent patches that attend to their own group only.
Runs = tuple[tuple[int, int], ...]


@struct.dataclass
class Features:
  """What the decoder reads instead of the embeddings of placeholders.

  Attributes:
    embeddings: [..., tokens, D], the tokens of an image row by row.
    deepstack: [..., n, tokens, D], added after the first n layers of the decoder; None in families without DeepStack.
  """

  embeddings: jax.Array
  deepstack: jax.Array | None


def _norm(cfg: VisionConfig, size: int, param_dtype: Any) -> nnx.Module:
  return (RMSNorm if cfg.family == QWEN2_5_VL else LayerNorm)(size, _EPS, param_dtype)


class VisionAttention(nnx.Module):
  """Attention of one block, in both directions."""

  def __init__(self, cfg: VisionConfig, *, attention: AttentionSettings, param_dtype: Any, rngs: nnx.Rngs):
    heads = (cfg.num_heads, cfg.head_dim)
    self.attention = attention
    self.qkv = Projection((cfg.hidden_size,), (3, *heads), bias=True, param_dtype=param_dtype, rngs=rngs)
    self.proj = Projection(heads, (cfg.hidden_size,), bias=True, param_dtype=param_dtype, rngs=rngs)

  def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, runs: Runs) -> jax.Array:
    """[I, P, V] -> [I, P, V], with the rotary embedding's f32[P, 1, H/2]."""
    q, k, v = jnp.moveaxis(self.qkv(x), 2, 0)  # [I, P, heads, H]
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    out, start = [], 0
    for count, size in runs:
      stop = start + count * size
      groups = [a[:, start:stop].reshape(-1, size, *a.shape[2:]) for a in (q, k, v)]
      attended = attend(*groups, jnp.ones((1, size, size), bool), settings=self.attention)
      out.append(attended.reshape(len(x), stop - start, *q.shape[2:]))
      start = stop
    return self.proj(out[0] if len(out) == 1 else jnp.concatenate(out, axis=1))


class GatedMLP(nnx.Module):
  """Feed-forward of one block of Qwen2.5-VL."""

  def __init__(self, cfg: VisionConfig, *, param_dtype: Any, rngs: nnx.Rngs):
    v, f = (cfg.hidden_size,), (cfg.intermediate_size,)
    self.gate_proj = Projection(v, f, bias=True, param_dtype=param_dtype, rngs=rngs)
    self.up_proj = Projection(v, f, bias=True, param_dtype=param_dtype, rngs=rngs)
    self.down_proj = Projection(f, v, bias=True, param_dtype=param_dtype, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class MLP(nnx.Module):
  """Feed-forward of one block of Qwen3-VL and Qwen3.5."""

  def __init__(self, cfg: VisionConfig, *, param_dtype: Any, rngs: nnx.Rngs):
    v, f = (cfg.hidden_size,), (cfg.intermediate_size,)
    self.linear_fc1 = Projection(v, f, bias=True, param_dtype=param_dtype, rngs=rngs)
    self.linear_fc2 = Projection(f, v, bias=True, param_dtype=param_dtype, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.linear_fc2(jax.nn.gelu(self.linear_fc1(x), approximate=True))


class Block(nnx.Module):
  """One pre-norm block."""

  def __init__(self, cfg: VisionConfig, *, attention: AttentionSettings, param_dtype: Any, rngs: nnx.Rngs):
    self.norm1 = _norm(cfg, cfg.hidden_size, param_dtype)
    self.attn = VisionAttention(cfg, attention=attention, param_dtype=param_dtype, rngs=rngs)
    self.norm2 = _norm(cfg, cfg.hidden_size, param_dtype)
    self.mlp = (GatedMLP if cfg.family == QWEN2_5_VL else MLP)(cfg, param_dtype=param_dtype, rngs=rngs)

  def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, runs: Runs) -> jax.Array:
    x = x + self.attn(self.norm1(x), cos, sin, runs)
    return x + self.mlp(self.norm2(x))


class Merger(nnx.Module):
  """Joins the patches of each token, and maps them to the width of the decoder."""

  def __init__(self, cfg: VisionConfig, *, norm_after_joining: bool, param_dtype: Any, rngs: nnx.Rngs):
    joined = cfg.hidden_size * cfg.merge_size**2
    self.joined = joined
    self.norm_after_joining = norm_after_joining
    self.norm = _norm(cfg, joined if norm_after_joining else cfg.hidden_size, param_dtype)
    self.linear_fc1 = Projection((joined,), (joined,), bias=True, param_dtype=param_dtype, rngs=rngs)
    self.linear_fc2 = Projection((joined,), (cfg.out_hidden_size,), bias=True, param_dtype=param_dtype, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """[I, P, V] -> [I, tokens, D]."""
    shape = (len(x), -1, self.joined)
    x = self.norm(x.reshape(shape)) if self.norm_after_joining else self.norm(x).reshape(shape)
    return self.linear_fc2(jax.nn.gelu(self.linear_fc1(x), approximate=False))


class PatchEmbedding(nnx.Module):
  """A linear map of the pixels of a patch; checkpoints store it as a convolution without overlap."""

  def __init__(self, cfg: VisionConfig, *, param_dtype: Any, rngs: nnx.Rngs):
    self.proj = Projection(
      (cfg.patch_values,), (cfg.hidden_size,), bias=cfg.family != QWEN2_5_VL, param_dtype=param_dtype, rngs=rngs
    )

  def __call__(self, patches: jax.Array) -> jax.Array:
    return self.proj(patches)


class VisionTower(nnx.Module):
  """Patches of images to features of their tokens. Images do not influence one another."""

  def __init__(self, cfg: VisionConfig, *, dtype: Any, param_dtype: Any, attention: AttentionSettings, rngs: nnx.Rngs):
    """Creates the tower with random weights; arguments are those of `Qwen`."""
    make = functools.partial(dict, param_dtype=param_dtype, rngs=rngs)
    self.cfg = cfg
    self.dtype = dtype
    self.scan_blocks = cfg.depth >= _SCAN_FROM_BLOCKS
    self.patch_embed = PatchEmbedding(cfg, **make())
    if cfg.num_positions:
      shape = (cfg.num_positions, cfg.hidden_size)
      self.pos_embed = nnx.Param(fan_in_normal(rngs.params(), shape, cfg.hidden_size, param_dtype))
    self.blocks = nnx.List([Block(cfg, attention=attention, **make()) for _ in range(cfg.depth)])
    self.merger = Merger(cfg, norm_after_joining=False, **make())
    self.deepstack_mergers = nnx.List([Merger(cfg, norm_after_joining=True, **make()) for _ in cfg.deepstack_blocks])

  def __call__(self, patches: jax.Array, grid: tuple[int, int], *, remat: bool = False) -> Features:
    """The features of I images of one size: embeddings [I, tokens, D], and with DeepStack [I, n, tokens, D].

    `patches` are f32[I, P, values], and `grid` their rows and columns. `remat` computes each block again in the
    backward pass, which then keeps the input of each block only.

    Raises:
      ValueError: the patches are not those of the grid.
    """
    cfg = self.cfg
    expected = (grid[0] * grid[1], cfg.patch_values)
    if patches.shape[1:] != expected or any(side % cfg.merge_size for side in grid):
      raise ValueError(f'patches of shape {patches.shape[1:]} are not those of a grid {grid}, which are {expected}')
    x = self.patch_embed(patches.astype(self.dtype))
    if cfg.num_positions:
      x = x + self._positions(grid).astype(x.dtype)
    whole, split = ((1, expected[0]),), None
    angles = grids.angles(grid, cfg.merge_size, cfg.head_dim)
    if cfg.window_size:
      split = grids.windows(grid, cfg.merge_size, cfg.window_tokens)
      x, angles = x[:, split.order], angles[split.order]
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    taken = []
    for first, last in self._segments():
      runs = split.runs if split is not None and last - 1 not in cfg.full_blocks else whole
      x = self._run(list(self.blocks)[first:last], x, cos, sin, runs, remat)
      if last - 1 in cfg.deepstack_blocks:
        taken.append(self.deepstack_mergers[cfg.deepstack_blocks.index(last - 1)](x))
    x = self.merger(x)
    if split is not None:
      x = x[:, split.restored]
    return Features(x, jnp.stack(taken, axis=1) if taken else None)

  def _positions(self, grid: tuple[int, int]) -> jax.Array:
    """The learned positions of the patches of a grid, f32[P, V]."""
    side = round(self.cfg.num_positions**0.5)
    index, weight = grids.interpolation(grid, self.cfg.merge_size, side)
    taps = self.pos_embed[...].astype(jnp.float32)[index]  # [P, 4, V]
    return jnp.sum(taps * weight[:, :, None], axis=1)

  def _segments(self) -> list[tuple[int, int]]:
    """(first, one after the last) of adjacent blocks that attend alike and of which only the last may give features."""
    cfg = self.cfg
    ends = {*cfg.deepstack_blocks, cfg.depth - 1}
    if cfg.window_size:
      ends |= {b for full in cfg.full_blocks for b in (full - 1, full)}
    last = [b + 1 for b in sorted(ends) if b >= 0]
    return list(zip([0, *last[:-1]], last, strict=True))

  def _run(self, blocks: list[Block], x: jax.Array, cos, sin, runs: Runs, remat: bool) -> jax.Array:
    def run(block, x):
      return block(x, cos, sin, runs)

    if self.scan_blocks and len(blocks) > 1:
      again = functools.partial(jax.checkpoint, prevent_cse=False) if remat else None
      return scan_layers(blocks, x, lambda block, x, _: (run(block, x), None), mesh=None, checkpoint=again)[0]
    for block in blocks:
      x = nnx.remat(run)(block, x) if remat else run(block, x)
    return x
