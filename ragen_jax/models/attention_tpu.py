"""Causal attention for TPUs, in Pallas: a kernel for the forward pass and one for all gradients.

The kernels are made for the rows of an update: some thousands of columns, several queries for each key, and several
sequences in a row, which may share their beginnings. Of a row and a key/value head, all keys and values lie on the
chip. A step takes a block of queries of all heads of the group, and goes over the blocks of keys from the beginning of
the first query's tree to its own: what a causal mask or another tree hides is not computed. Scores are transposed,
[keys, queries], so that the numbers of a query (its maximum, its sum) lie beside one another. The algorithm is that of
FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ragen_jax.models import trees

# Queries and keys of a block: the lanes of a TPU.
BLOCK = 128
# Blocks of keys at once: a power of 2. With more, operations overlap better, and the program of a kernel is longer.
_AT_ONCE = 2

# Score of a masked key, and the maximum before the first score. Their difference is large too.
_MASKED, _LOWEST = -1e30, -1e38

_CONTRACT_LANES = (((1,), (1,)), ((), ()))
_CONTRACT_ROWS = (((0,), (0,)), ((), ()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attention(q: jax.Array, k: jax.Array, v: jax.Array, seen_until: jax.Array, name: str, interpret: bool) -> jax.Array:
  """Causal grouped-query attention within the token trees of each row.

  Queries, already divided by sqrt(H), and the result are [B, N, H, T], keys and values [B, K, T, H]; T is a multiple of
  `BLOCK`. `seen_until` is i32[B, T], see `models.trees`. A backward pass may keep results of this `name`, see
  `jax.ad_checkpoint.checkpoint_name`.
  """
  return _forward(q, k, v, seen_until, name, interpret)[0]


def _dot(a: jax.Array, b: jax.Array, dimensions: Any = (((1,), (0,)), ((), ()))) -> jax.Array:
  return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _bias(seen_ref: Any, i: jax.Array, j: jax.Array, blocks: int) -> jax.Array:
  """f32[keys, queries] of some blocks of keys from j on and of block i: 0 where a query attends to a key."""
  keys = blocks * BLOCK
  until = jnp.transpose(jnp.broadcast_to(seen_ref[0, :, pl.ds(j * BLOCK, keys)], (BLOCK, keys)))
  key = jax.lax.broadcasted_iota(jnp.int32, (keys, BLOCK), 0) + j * BLOCK
  query = jax.lax.broadcasted_iota(jnp.int32, (keys, BLOCK), 1) + i * BLOCK
  return jnp.where((key <= query) & (query < until), 0.0, _MASKED)


def _over_keys(run: Callable[[jax.Array, int], None], first: jax.Array, end: jax.Array, blocks: int) -> None:
  """Calls `run(j, n)`, for n blocks of keys from j on, until all of first .. end - 1 have had their turn.

  n is `_AT_ONCE`, and at the end less. A row has `blocks` blocks.
  """
  at_once = _AT_ONCE if blocks >= _AT_ONCE else 1
  while at_once:
    calls = jax.lax.div(end - first, at_once)
    jax.lax.fori_loop(0, calls, functools.partial(_run_one, run, first, at_once), None)
    first, at_once = first + calls * at_once, at_once // 2


def _run_one(run: Callable[[jax.Array, int], None], first: jax.Array, blocks: int, call: jax.Array, _: None) -> None:
  run(first + call * blocks, blocks)


def _beside(ref: Any) -> jax.Array:
  """[1, heads, n, queries] -> [n, heads * queries]."""
  return jnp.concatenate([ref[0, g] for g in range(ref.shape[1])], axis=1)


def _apart(ref: Any, x: jax.Array) -> None:
  """[n, heads * queries] into [1, heads, n, queries]."""
  for g in range(ref.shape[1]):
    ref[0, g] = x[:, g * BLOCK : (g + 1) * BLOCK].astype(ref.dtype)


def _forward_kernel(
  first_ref, q_ref, k_ref, v_ref, seen_ref, out_ref, lse_ref, heads_ref, most_ref, total_ref, sum_ref
):
  row, i = pl.program_id(0), pl.program_id(2)
  heads = q_ref.shape[1]
  heads_ref[...] = _beside(q_ref)
  most_ref[...] = jnp.full_like(most_ref, _LOWEST)
  total_ref[...] = jnp.zeros_like(total_ref)
  sum_ref[...] = jnp.zeros_like(sum_ref)

  def run(j, blocks):
    columns = pl.ds(j * BLOCK, blocks * BLOCK)
    k, v, bias = k_ref[0, 0, columns], v_ref[0, 0, columns], _bias(seen_ref, i, j, blocks)
    scores = _dot(k, heads_ref[...]) + jnp.concatenate([bias] * heads, axis=1)  # [keys, heads * queries]
    before = most_ref[...]  # [1, heads * queries]
    most = jnp.maximum(before, jnp.max(scores, axis=0, keepdims=True))
    weights, scale = jnp.exp(scores - most), jnp.exp(before - most)
    most_ref[...] = most
    total_ref[...] = total_ref[...] * scale + jnp.sum(weights, axis=0, keepdims=True)
    sum_ref[...] = sum_ref[...] * scale + _dot(v, weights.astype(v.dtype), _CONTRACT_ROWS)  # [H, heads * queries]

  _over_keys(run, first_ref[row, i], i + 1, k_ref.shape[2] // BLOCK)
  total = total_ref[...]
  _apart(out_ref, sum_ref[...] / total)
  _apart(lse_ref, most_ref[...] + jnp.log(total))


def _backward_kernel(
  first_ref, q_ref, k_ref, v_ref, seen_ref, out_ref, lse_ref, of_out_ref,
  of_q_ref, of_k_ref, of_v_ref, heads_ref, of_heads_ref, sums_ref, means_ref, of_q_sum, of_k_sum, of_v_sum,
):  # fmt: skip
  row, i = pl.program_id(0), pl.program_id(2)
  heads = q_ref.shape[1]

  @pl.when(i == 0)
  def _():
    of_k_sum[...] = jnp.zeros_like(of_k_sum)
    of_v_sum[...] = jnp.zeros_like(of_v_sum)

  heads_ref[...], of_heads_ref[...], sums_ref[...] = _beside(q_ref), _beside(of_out_ref), _beside(lse_ref)
  # [1, heads * queries], the mean gradient of a query's weights.
  means_ref[...] = jnp.sum(
    _beside(out_ref).astype(jnp.float32) * of_heads_ref[...].astype(jnp.float32), axis=0, keepdims=True
  )
  of_q_sum[...] = jnp.zeros_like(of_q_sum)

  def run(j, blocks):
    columns = pl.ds(j * BLOCK, blocks * BLOCK)
    k, v, bias = k_ref[0, 0, columns], v_ref[0, 0, columns], _bias(seen_ref, i, j, blocks)
    q, of_out = heads_ref[...], of_heads_ref[...]  # [H, heads * queries]
    weights = jnp.exp(_dot(k, q) + jnp.concatenate([bias] * heads, axis=1) - sums_ref[...])  # [keys, heads * queries]
    of_scores = (weights * (_dot(v, of_out) - means_ref[...])).astype(k.dtype)
    of_v_sum[columns] += _dot(weights.astype(v.dtype), of_out, _CONTRACT_LANES)  # [keys, H]
    of_k_sum[columns] += _dot(of_scores, q, _CONTRACT_LANES)
    of_q_sum[...] += _dot(k, of_scores, _CONTRACT_ROWS)

  _over_keys(run, first_ref[row, i], i + 1, k_ref.shape[2] // BLOCK)
  _apart(of_q_ref, of_q_sum[...])

  @pl.when(i == pl.num_programs(2) - 1)
  def _():
    of_k_ref[0, 0] = of_k_sum[...].astype(of_k_ref.dtype)
    of_v_ref[0, 0] = of_v_sum[...].astype(of_v_ref.dtype)


def _first_blocks(seen_until: jax.Array) -> jax.Array:
  """i32[B, T / BLOCK]: the first block of keys that a block of queries attends to."""
  columns = jnp.arange(seen_until.shape[1])
  start = jax.lax.cummax(jnp.where(trees.begins(seen_until), columns, 0), axis=1)
  return (start[:, ::BLOCK] // BLOCK).astype(jnp.int32)


def _specs(q: jax.Array, k: jax.Array) -> tuple[tuple[int, int, int], dict[str, pl.BlockSpec]]:
  """The grid (rows, key/value heads, blocks of queries), and what a step sees of each array."""
  b, n, h, t = q.shape
  kv = k.shape[1]
  group = n // kv

  def of_group(size):
    return pl.BlockSpec((1, group, size, BLOCK), lambda row, head, i, _: (row, head, 0, i))

  return (b, kv, t // BLOCK), {
    'queries': of_group(h),
    'sums': of_group(1),
    'keys': pl.BlockSpec((1, 1, t, h), lambda row, head, i, _: (row, head, 0, 0)),
    'seen': pl.BlockSpec((1, 1, t), lambda row, head, i, _: (row, 0, 0)),
  }


def _call(kernel: Any, grid: tuple[int, int, int], inputs: Any, outputs: Any, shapes: Any, scratch: Any, **settings):
  return pl.pallas_call(
    kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1, grid=grid, in_specs=inputs, out_specs=outputs, scratch_shapes=scratch
    ),
    out_shape=shapes,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel', 'arbitrary'), vmem_limit_bytes=64 * 2**20
    ),
    **settings,
  )


def _forward(q, k, v, seen_until, name, interpret):
  (grid, specs), (b, n, h, t) = _specs(q, k), q.shape
  group = n // k.shape[1]
  lines = [pltpu.VMEM((1, group * BLOCK), jnp.float32)] * 2
  out, lse = _call(
    _forward_kernel, grid,
    [specs['queries'], specs['keys'], specs['keys'], specs['seen']],
    [specs['queries'], specs['sums']],
    [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((b, n, 1, t), jnp.float32)],
    [pltpu.VMEM((h, group * BLOCK), q.dtype), *lines, pltpu.VMEM((h, group * BLOCK), jnp.float32)],
    name='attention_forward', interpret=interpret,
  )(_first_blocks(seen_until), q, k, v, seen_until[:, None])  # fmt: skip
  out, lse = checkpoint_name(out, name), checkpoint_name(lse, name)
  return out, (q, k, v, seen_until, out, lse)


def _backward(name, interpret, kept, of_out):
  q, k, v, seen_until, out, lse = kept
  (grid, specs), (_, n, h, t) = _specs(q, k), q.shape
  group = n // k.shape[1]
  heads = [pltpu.VMEM((h, group * BLOCK), q.dtype)] * 2
  lines = [pltpu.VMEM((1, group * BLOCK), jnp.float32)] * 2
  sums = [pltpu.VMEM((t, h), jnp.float32)] * 2
  of_q, of_k, of_v = _call(
    _backward_kernel, grid,
    [specs['queries'], specs['keys'], specs['keys'], specs['seen'], specs['queries'], specs['sums'],
     specs['queries']],
    [specs['queries'], specs['keys'], specs['keys']],
    [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)],
    [*heads, *lines, pltpu.VMEM((h, group * BLOCK), jnp.float32), *sums],
    name='attention_backward', interpret=interpret,
  )(_first_blocks(seen_until), q, k, v, seen_until[:, None], out, lse, of_out)  # fmt: skip
  return of_q, of_k, of_v, None


attention.defvjp(_forward, _backward)
