"""Causal attention by kernels of JAX that never hold the scores in memory: splash (TPU) and cuDNN (GPU).

Each function takes and returns what `attention.causal` does, for the rows and heads of one device. `interpret` runs the
kernels as ordinary operations, on any device. The kernels sum in another order than `attention.attend`, so results
differ by rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention

from ragen_jax.models import attention_tpu, trees
from ragen_jax.models.attention_settings import KEPT, MOST_FLASH_COLUMNS

# Block lengths of the kernels for TPUs, multiples of the 128 lanes. Large blocks are faster: every block has a fixed
# cost, and the backward pass reads all keys once for each block of queries.
_SPLASH_BLOCKS = (512, 384, 256)
_LANES = 128


def flash(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  seen_until: jax.Array | None = None,
  *,
  window: int = 0,
  interpret: bool = False,
) -> jax.Array:
  """The kernels of `attention_tpu`, and `splash` for windows and for rows whose keys do not fit on the chip."""
  b, t, _, h = q.shape
  if window or t * -(-h // _LANES) > MOST_FLASH_COLUMNS:
    return splash(q, k, v, seen_until, window=window, interpret=interpret)
  seen_until = jnp.full((b, t), trees.ALWAYS, jnp.int32) if seen_until is None else seen_until
  q, k, v, seen_until = _padded(q * jnp.asarray(h**-0.5, q.dtype), k, v, seen_until, attention_tpu.BLOCK)
  # The layouts that the compiler gives to the products before and after anyway.
  q, k, v = jnp.transpose(q, (0, 2, 3, 1)), jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
  return jnp.transpose(attention_tpu.attention(q, k, v, seen_until, KEPT, interpret), (0, 3, 1, 2))[:, :t]


def splash(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  seen_until: jax.Array | None = None,
  *,
  window: int = 0,
  interpret: bool = False,
) -> jax.Array:
  """Splash attention of JAX for TPUs, with separate backward kernels for queries and for keys and values.

  The trees of `seen_until` must be without branches (see `AttentionSettings.tree_columns`).
  """
  t, n, h = q.shape[1:]
  block = splash_block(t)
  q, k, v, seen_until = _padded(q * jnp.asarray(h**-0.5, q.dtype), k, v, seen_until, block)
  segments = None if seen_until is None else jnp.cumsum(trees.begins(seen_until), axis=1)
  kernel = _splash_kernel(n, q.shape[1], block, window, h < _LANES, interpret)

  def one_row(q, k, v, segments):
    ids = None if segments is None else splash_attention.SegmentIds(segments, segments)
    return kernel(q, k, v, ids)  # [N, T, H]

  heads_first = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
  return jnp.swapaxes(jax.vmap(one_row)(*heads_first, segments), 1, 2)[:, :t]


def splash_block(columns: int) -> int:
  """The block length for rows of `columns` columns: the whole row if it is short, else the one that pads least."""
  if columns <= _SPLASH_BLOCKS[0]:
    return -(-columns // _LANES) * _LANES
  return min(_SPLASH_BLOCKS, key=lambda block: -columns % block)


@functools.lru_cache(maxsize=64)
def _splash_kernel(
  heads: int, columns: int, block: int, window: int, columns_minor: bool, interpret: bool
) -> Callable[..., jax.Array]:
  # Heads narrower than the lanes would leave a part of each tile empty; columns fill it.
  layout = splash_attention.QKVLayout.SEQ_MINOR if columns_minor else splash_attention.QKVLayout.HEAD_DIM_MINOR
  shape = (columns, columns)
  mask = splash_attention.LocalMask(shape, (window - 1, 0), 0) if window else splash_attention.CausalMask(shape)
  mask = splash_attention.MultiHeadMask([mask] * heads)
  sizes = splash_attention.BlockSizes(
    block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block,
    q_layout=layout, k_layout=layout, v_layout=layout,
  )  # fmt: skip
  with jax.ensure_compile_time_eval():
    kernel = splash_attention.make_splash_mha(
      mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret, residual_checkpoint_name=KEPT
    )
  # On the host, the description of the blocks belongs to no device, trace or mesh.
  return jax.tree.map(np.asarray, kernel)


def cudnn(
  q: jax.Array, k: jax.Array, v: jax.Array, seen_until: jax.Array | None = None, *, window: int = 0
) -> jax.Array:
  """Flash attention of cuDNN. It can be traced only where there is an NVIDIA GPU.

  Queries, keys and values are bfloat16 or float16. `seen_until` and a `window` become a bias [B, 1, T, T] in memory.

  Raises:
    RuntimeError, NotImplementedError, ValueError: there is no cuDNN, or it does not support the type or a size.
  """
  t = q.shape[1]
  # With a bias, the backward kernel needs an even number of columns.
  q, k, v, seen_until = _padded(q, k, v, seen_until, 2)
  mask = None if seen_until is None else trees.still_seen(seen_until)[:, None]
  if window:
    near = jnp.broadcast_to(trees.near(trees.places(seen_until, q.shape[1]), window), (len(q), *[q.shape[1]] * 2))
    mask = near[:, None] if mask is None else mask & near[:, None]
  return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation='cudnn')[:, :t]


def _padded(
  q: jax.Array, k: jax.Array, v: jax.Array, seen_until: jax.Array | None, multiple: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
  """Adds columns on the right up to a multiple; being causal, the columns before do not attend to them."""
  more = -q.shape[1] % multiple
  q, k, v = (jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) for x in (q, k, v))
  if seen_until is not None:
    seen_until = jnp.pad(seen_until, ((0, 0), (0, more)), constant_values=trees.ALWAYS)
  return q, k, v, seen_until
