"""Grouped-query attention with the softmax in fp32: `causal` for rows without a cache, `attend` for any mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from ragen_jax.distributed.sharding import ROW_AXES
from ragen_jax.models import trees
from ragen_jax.models.attention_settings import EINSUM, HOLDING_SCORES, KEPT, AttentionSettings

# Score of a masked column.
_MASKED = -1e30

# Above this many scores on a device, attention runs over blocks of queries of about `_BLOCK_SCORES` scores each.
_MAX_SCORES = 2**28
_BLOCK_SCORES = 2**27
_MIN_BLOCK = 32
# Accelerators compute in tiles and pad other blocks: queries of a whole tile, and of the smallest part of one.
_TILE, _PART = 128, 8

# Queries per block in `attend_causal_by_row`.
_ROW_BLOCK = 64
# Scores that its blocks may hold, of one row or of several short ones: they stay in a processor's cache.
_ROW_SCORES = 2**18
# Longer rows go through a loop over blocks of so many queries and keys: one body is compiled, and pairs of blocks in
# which no query sees a key are left out.
_LOOP_FROM, _LOOP_QUERIES, _LOOP_KEYS = 512, 128, 256

# The operations of kernels that give what a backward pass may keep, see `attention_settings.KEPT`.
_FORWARD_KERNELS = {'cudnn': 'dot_product_attention_fwd_wrapper'}


def causal(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  seen_until: jax.Array | None,
  settings: AttentionSettings,
  window: int = 0,
) -> jax.Array:
  """Causal grouped-query attention of whole rows: queries [B, T, N, H], keys and values [B, T, K, H] -> [B, T, N, H].

  On a mesh, each device attends with its own rows and heads; `einsum` leaves that to the partitioner. In packed rows, a
  column attends to those before it that it sees by `seen_until` i32[B, T], see `models.trees`; None if each row is one
  sequence. With a `window` above 0, it attends to the last `window` columns of its sequence, itself included. Columns
  of padding on the right of a row have finite values.
  """
  window = window if window < q.shape[1] else 0
  if settings.implementation == 'einsum':
    mask = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))[None]
    if seen_until is not None:
      mask = mask & trees.still_seen(seen_until)
    if window:
      mask = mask & trees.near(trees.places(seen_until, q.shape[1]), window)
    return checkpoint_name(attend(q, k, v, mask, settings=settings), KEPT)
  attend_rows = _implementation(settings, window)
  if settings.mesh is None:
    return attend_rows(q, k, v, seen_until)
  rows, heads = PartitionSpec(ROW_AXES), PartitionSpec(ROW_AXES, None, 'tensor')
  return jax.shard_map(
    attend_rows, mesh=settings.mesh, in_specs=(heads, heads, heads, rows), out_specs=heads, check_vma=False
  )(q, k, v, seen_until)


def is_kept(primitive: Any, settings: AttentionSettings, **parameters: Any) -> bool:
  """Whether an operation of `causal`, with its parameters, gives what a backward pass should keep."""
  if primitive.name == 'name':  # of `checkpoint_name`
    return parameters['name'] == KEPT
  return primitive.name == _FORWARD_KERNELS.get(settings.implementation)


def _implementation(settings: AttentionSettings, window: int):
  if settings.implementation == 'blocks':
    return lambda *args: checkpoint_name(attend_causal_by_row(*args, window=window), KEPT)
  # Imported here, because the kernels' modules take a third of a second and a run on CPU needs none of them.
  from ragen_jax.models import attention_kernels

  kernel = functools.partial(getattr(attention_kernels, settings.implementation), window=window)
  return functools.partial(kernel, interpret=True) if settings.interpret else kernel


# Keys [B, S, K, H], values [B, S, K, H] and the mask bool[B or 1, T or 1, S] of some columns.
Columns = tuple[jax.Array, jax.Array, jax.Array]


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: jax.Array,
  kept: Columns | None = None,
  *,
  settings: AttentionSettings = EINSUM,
) -> jax.Array:
  """Grouped-query attention to the columns of a mask, such as those of a cache.

  With many scores, blocks of queries run one after the other and are recomputed in the backward pass, so memory holds
  the scores of one block instead of [B, N, T, S]. 'blocks' on one device runs row by row, as `attend_causal_by_row`
  does. Queries and the result are [B, T, N, H], keys and values [B, S, K, H].

  Args:
    mask: bool[B or 1, T, S], True where a query attends to a column. A query whose mask is all False returns an average
      of v.
    kept: more columns under the same softmax, in arrays of their own. A cache that is only read stays where it is, with
      no copy beside the new columns, if its mask is the same for all queries.
    settings: of the model. The kernels for TPUs take no such mask: JAX's `dot_product_attention` attends to prompts.
  """
  b, t, n, h = q.shape
  if settings.by_row and t > 1:
    return _attend_by_row(q, *_joined(k, v, mask, kept))
  attend_all = _attend_on_tpu if settings.for_tpu and t > 1 else _attend
  if t > 1 and (settings.for_tpu or (kept is not None and kept[2].shape[1] > 1)):
    (k, v, mask), kept = _joined(k, v, mask, kept), None
  per_query = -(-b * n * (k.shape[1] + (kept[0].shape[1] if kept else 0)) // settings.shards)
  if t * per_query <= _MAX_SCORES:
    return attend_all(q, k, v, mask, kept)
  block = min(_query_block(per_query, settings), t)
  pad = -t % block
  blocks = (
    jnp.moveaxis(jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(b, -1, block, n, h), 1, 0),
    jnp.moveaxis(jnp.pad(mask, ((0, 0), (0, pad), (0, 0))).reshape(mask.shape[0], -1, block, mask.shape[2]), 1, 0),
  )
  one = jax.checkpoint(lambda xs: attend_all(xs[0], k, v, xs[1], kept))
  out = jax.lax.map(one, blocks)  # [T/block, B, block, N, H]
  return jnp.moveaxis(out, 0, 1).reshape(b, -1, n, h)[:, :t]


def _query_block(per_query: int, settings: AttentionSettings) -> int:
  """Queries per block, from the scores per query of a device: about `_BLOCK_SCORES` scores, in tiles if possible."""
  block = _BLOCK_SCORES // per_query
  if settings.implementation in HOLDING_SCORES:
    return max(block, _MIN_BLOCK)
  if block < _TILE:
    return _TILE if _TILE * per_query <= _MAX_SCORES else max(block - block % _PART, _PART)
  return block - block % _TILE


def _attend_on_tpu(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, kept: None) -> jax.Array:
  """As `_attend`. The compiler of TPUs estimates half of its time for a prompt, and for one query with wide heads."""
  assert kept is None
  return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation='xla')


def _joined(k: jax.Array, v: jax.Array, mask: jax.Array, kept: Columns | None) -> Columns:
  """The columns of the cache and the new ones in one array each; a prompt reads them more than once."""
  if kept is None:
    return k, v, mask
  seen = jnp.broadcast_to(kept[2], (kept[2].shape[0], mask.shape[1], kept[2].shape[2]))
  mask = jnp.broadcast_to(mask, (len(seen), *mask.shape[1:]))
  return *(jnp.concatenate(parts, axis=1) for parts in ((kept[0], k), (kept[1], v))), jnp.concatenate(
    [seen, mask], axis=2
  )


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, kept: Columns | None) -> jax.Array:
  """All scores at once. The softmax is normalised after the product with v, which needs fewer divisions."""
  b, t, n, h = q.shape
  parts = [(k, v, mask)] if kept is None else [kept, (k, v, mask)]
  kv = k.shape[2]
  q = (q * jnp.asarray(h**-0.5, q.dtype)).reshape(b, t, kv, n // kv, h)
  scores = []
  for k, _, mask in parts:
    part = jnp.einsum('BTKGH,BSKH->BKGTS', q, k, preferred_element_type=jnp.float32)
    scores.append(jnp.where(mask[:, None, None, :, :], part, _MASKED))
  most = functools.reduce(jnp.maximum, [jnp.max(part, axis=-1, keepdims=True) for part in scores])
  weights = [jnp.exp(part - jax.lax.stop_gradient(most)) for part in scores]
  total = sum(jnp.sum(part, axis=-1) for part in weights)  # [B, K, G, T]
  out = sum(
    jnp.einsum('BKGTS,BSKH->BTKGH', part.astype(v.dtype), v, preferred_element_type=jnp.float32)
    for part, (_, v, _) in zip(weights, parts, strict=True)
  )
  out = out / jnp.moveaxis(total, 3, 1)[..., None]
  return out.reshape(b, t, n, h).astype(q.dtype)


def attend_to_heads(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, kept: Columns) -> jax.Array:
  """`attend` of one query of each row, to a cache that is laid out by heads.

  A CPU reads such a cache in the order of its memory, in half of the time. Queries and the result are [B, 1, N, H]. The
  C new columns have keys and values [B, C, K, H] and the mask bool[B or 1, 1, C]; the cache has keys [B, K, H, S],
  values [B, K, S, H] and the mask bool[B, 1, S].
  """
  b, t, n, h = q.shape
  chex.assert_equal(t, 1)
  kv = k.shape[2]
  q = (q * jnp.asarray(h**-0.5, q.dtype)).reshape(b, kv, n // kv, h)
  kept_k, kept_v, kept_mask = kept
  before = jnp.einsum('BKGH,BKHS->BKGS', q, kept_k, preferred_element_type=jnp.float32)
  new = jnp.einsum('BKGH,BSKH->BKGS', q, k, preferred_element_type=jnp.float32)
  before = jnp.where(kept_mask[:, None], before, _MASKED)
  new = jnp.where(mask[:, None], new, _MASKED)
  most = jnp.maximum(before.max(axis=-1, keepdims=True), new.max(axis=-1, keepdims=True))
  before, new = jnp.exp(before - most), jnp.exp(new - most)
  out = jnp.einsum('BKGS,BKSH->BKGH', before.astype(v.dtype), kept_v, preferred_element_type=jnp.float32)
  out += jnp.einsum('BKGS,BSKH->BKGH', new.astype(v.dtype), v, preferred_element_type=jnp.float32)
  out /= (before.sum(axis=-1) + new.sum(axis=-1))[..., None]
  return out.reshape(b, 1, n, h).astype(q.dtype)


def by_heads(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Keys and values [B, S, K, H] as `attend_to_heads` reads them: [B, K, H, S] and [B, K, S, H]."""
  return jnp.transpose(k, (0, 2, 3, 1)), jnp.transpose(v, (0, 2, 1, 3))


def _attend_by_row(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
  """`attend` to the columns of a mask [B or 1, T, S], one row at a time; rows must not be sharded."""
  t = q.shape[1]

  @jax.checkpoint
  def one_row(row):
    q, k, v, mask = row
    return _attend_in_blocks(q, k, v, lambda start, end: (mask[start:end], k.shape[0]))

  return jax.lax.map(one_row, (q, k, v, jnp.broadcast_to(mask, (len(q), t, k.shape[1])))).astype(q.dtype)


def attend_causal_by_row(
  q: jax.Array, k: jax.Array, v: jax.Array, seen_until: jax.Array | None = None, *, window: int = 0
) -> jax.Array:
  """`causal` attention, one row at a time and in blocks of queries, recomputed in the backward pass.

  On a CPU, the scores of a whole batch exceed the processor's cache and the scores of a block do not. A block also
  skips the keys that come after it, and in long rows all blocks of keys that it does not see. Rows must not be sharded,
  since the function loops over them.
  """
  places = trees.places(seen_until, q.shape[1]) + jnp.zeros((len(q), 1), jnp.int32) if window else None
  rows = (q, k, v, seen_until, places)
  if q.shape[1] > _LOOP_FROM:
    return jax.lax.map(functools.partial(_attend_to_seen_blocks, window=window), rows).astype(q.dtype)

  @jax.checkpoint
  def one_row(row):
    q, k, v, seen_until, places = row

    def visible(start, end):
      own = jnp.arange(end)[None, :] <= jnp.arange(start, end)[:, None]
      if seen_until is not None:
        own &= trees.still_seen(seen_until[:end], start, end)
      if places is not None:
        own &= trees.near(places[:end], window)[start:]
      return own, end

    return _attend_in_blocks(q, k, v, visible)

  return jax.lax.map(one_row, rows, batch_size=_rows_at_once(q)).astype(q.dtype)


def _rows_at_once(q: jax.Array) -> int:
  """Rows whose scores of a block of queries fit into `_ROW_SCORES`; their number divides that of all rows."""
  rows, t, n, _ = q.shape
  most = max(_ROW_SCORES // (n * min(t, _ROW_BLOCK) * t), 1)
  return max(k for k in range(1, min(most, rows) + 1) if rows % k == 0)


def row_scores(columns: int) -> int:
  """Scores of each head that `attend_causal_by_row` holds at once for rows of so many columns, in its gradient."""
  return columns**2 // 2 if columns <= _LOOP_FROM else 3 * _LOOP_QUERIES * columns


def _attend_in_blocks(
  q: jax.Array, k: jax.Array, v: jax.Array, visible: Callable[[int, int], tuple[jax.Array, int]]
) -> jax.Array:
  """Attention of one row, in blocks of queries: [T, N, H] from queries [T, N, H], keys and values [S, K, H].

  `visible` gives, for the queries from a first to before a last one, the mask bool[queries, S'] and S', the number of
  columns that they may attend to.
  """
  t, n, h = q.shape
  kv = k.shape[1]
  q = jnp.transpose((q * jnp.asarray(h**-0.5, q.dtype)).reshape(t, kv, n // kv, h), (1, 2, 0, 3))  # [K, G, T, H]
  k = jnp.transpose(k, (1, 2, 0))  # [K, H, S]
  # With a column of ones the product also returns the softmax's denominator.
  v = jnp.transpose(jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1), (1, 0, 2))  # [K, S, H+1]
  blocks = []
  for start in range(0, t, _ROW_BLOCK):
    end = min(start + _ROW_BLOCK, t)
    mask, size = visible(start, end)
    scores = jnp.matmul(
      q[:, :, start:end].reshape(kv, -1, h), k[:, :, :size], preferred_element_type=jnp.float32
    ).reshape(kv, n // kv, end - start, size)
    scores = jnp.where(mask, scores, _MASKED)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    out = jnp.matmul(weights.reshape(kv, -1, size).astype(v.dtype), v[:, :size], preferred_element_type=jnp.float32)
    blocks.append((out[..., :-1] / out[..., -1:]).reshape(kv, n // kv, end - start, h))
  return jnp.transpose(jnp.concatenate(blocks, axis=2), (2, 0, 1, 3)).reshape(t, n, h)


def _attend_to_seen_blocks(row: tuple[jax.Array | None, ...], window: int) -> jax.Array:
  """Causal attention of one row: [T, N, H] from queries [T, N, H], keys and values [T, K, H] and seen_until i32[T].

  With a `window`, `row` has i32[T] too, the places of the columns in their sequences.
  """
  q, k, v, seen_until, places = row
  (t, n, h), kv, block = q.shape, k.shape[1], _LOOP_QUERIES
  more = -t % block
  q, k, v = (jnp.pad(x, ((0, more), (0, 0), (0, 0))) for x in (q * jnp.asarray(h**-0.5, q.dtype), k, v))
  if seen_until is not None:
    seen_until = jnp.pad(seen_until, (0, more), constant_values=trees.ALWAYS)
  if places is not None:
    places = jnp.pad(places, (0, more), constant_values=trees.ALWAYS)
  q = jnp.transpose(q.reshape(-1, block, kv, n // kv, h), (0, 2, 3, 1, 4)).reshape(-1, kv, n // kv * block, h)
  k = jnp.transpose(k, (1, 2, 0))
  v = jnp.transpose(jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1), (1, 0, 2))
  parts = [slice(first, min(first + _LOOP_KEYS, t + more)) for first in range(0, t + more, _LOOP_KEYS)]
  keys, values = [k[:, :, part] for part in parts], [v[:, part] for part in parts]

  @jax.checkpoint
  def one_block(x):
    q, number = x
    queries = number * block + jnp.arange(block)[:, None]

    def visible(part):
      own = jnp.arange(part.start, part.stop) <= queries
      if places is not None:
        own &= places[queries] - places[part] < window
      return own if seen_until is None else own & (queries < seen_until[part])

    def score(k, mask):
      scores = jnp.matmul(q, k, preferred_element_type=jnp.float32)
      return jnp.where(jnp.tile(mask, (n // kv, 1)), scores, _MASKED)

    def weigh(v, scores):
      return jnp.matmul(jnp.exp(scores - most).astype(v.dtype), v, preferred_element_type=jnp.float32)

    masks = [visible(part) for part in parts]
    seen = [mask.any() for mask in masks]
    scores = [
      jax.lax.cond(
        any_, functools.partial(score, k, mask),
        functools.partial(jnp.full, (*q.shape[:2], mask.shape[1]), _MASKED, jnp.float32),
      )
      for any_, k, mask in zip(seen, keys, masks, strict=True)
    ]  # fmt: skip
    most = jax.lax.stop_gradient(functools.reduce(jnp.maximum, [x.max(axis=-1, keepdims=True) for x in scores]))
    out = sum(
      jax.lax.cond(any_, functools.partial(weigh, v, x), lambda: jnp.zeros((*q.shape[:2], h + 1), jnp.float32))
      for any_, v, x in zip(seen, values, scores, strict=True)
    )
    return out[..., :-1] / out[..., -1:]

  out = jax.lax.map(one_block, (q, jnp.arange(len(q)))).reshape(-1, kv, n // kv, block, h)
  return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(t + more, n, h)[:t]
