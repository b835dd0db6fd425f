"""The gated delta rule (arXiv 2412.06464), a linear attention whose memory has one size however long a row is.

A head's memory S is a matrix [E, W] that answers a key with a value. A column with key k, value v, decay g <= 0 and
rate beta in 0..1 replaces a part of what S answers k by v, and its query q reads the result:

    S = exp(g) S
    S = S + k (beta (v - S^T k))^T
    o = S^T q

Keys and queries have the length 1. `one_column` is this rule. `chunked` computes whole rows in chunks (arXiv
2406.06484): within a chunk by products of matrices, all chunks at once; only the memory goes from chunk to chunk. Both
compute in float32. A column with g = 0 and beta = 0 leaves the memory as it is, to the bit.

Letters beside those of `ragen_jax`: J key heads of width E, each with G value heads of width W; C columns of a chunk.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ragen_jax.utils.sizes import next_power

# Most columns of a chunk: the products within it grow with its width, and the steps from chunk to chunk become fewer.
_CHUNK = 64
# The inverse of a chunk's triangle begins with blocks of so many columns.
_BLOCK = 8

# Products of float32 numbers; accelerators would round them to fewer bits.
_EXACT = jax.lax.Precision.HIGHEST


def chunk_columns(key_width: int) -> int:
  """C, a power of two. Chunks wider than the keys cost more in their own matrices than they save in memories."""
  return min(_CHUNK, max(_BLOCK, next_power(key_width)))


def one_column(
  q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, memory: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The rule for one column of each row: what is read, f32[B, J, G, W], and the memory after.

  Queries and keys are f32[B, J, E], values f32[B, J, G, W], `g` and `beta` f32[B, J, G], and the memory is
  f32[B, J, G, E, W].
  """
  memory = jnp.exp(g)[..., None, None] * memory
  known = jnp.einsum('BJGEW,BJE->BJGW', memory, k, precision=_EXACT)
  change = beta[..., None] * (v - known)
  memory = memory + k[:, :, None, :, None] * change[..., None, :]
  return jnp.einsum('BJGEW,BJE->BJGW', memory, q, precision=_EXACT), memory


def chunked(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  g: jax.Array,
  beta: jax.Array,
  memory: jax.Array | None = None,
  begins: jax.Array | None = None,
  *,
  chunk: int = 0,
) -> tuple[jax.Array, jax.Array]:
  """The rule for whole rows: what their columns read, f32[B, T, J, G, W], and the memory after them.

  Args:
    q, k: f32[B, T, J, E].
    v: f32[B, T, J, G, W].
    g, beta: f32[B, T, J, G].
    memory: f32[B, J, G, E, W] before the first column; None for an empty one.
    begins: bool[B, T], columns that begin a sequence of their own, with an empty memory; None if none does.
    chunk: C, a power of two; 0 for that of `chunk_columns`.
  """
  b, t, j, e = q.shape
  groups, w = v.shape[3:]
  chunk = chunk or chunk_columns(e)
  while chunk > _BLOCK and chunk // 2 >= t:
    chunk //= 2
  n = -(-t // chunk)

  def split(x: jax.Array) -> jax.Array:
    """[B, T, heads.., width] -> [chunks, B, heads.., C, width], with zeros behind the last column."""
    x = jnp.pad(x, ((0, 0), (0, n * chunk - t), *((0, 0),) * (x.ndim - 2)))
    return jnp.moveaxis(jnp.moveaxis(x.reshape(b, n, chunk, *x.shape[2:]), 1, 0), 2, -2)

  q, k, v = split(q), split(k), split(v)  # [n, B, J, C, E], [n, B, J, G, C, W]
  g, beta = (split(x[..., None])[..., 0] for x in (g, beta))  # [n, B, J, G, C]

  # How much of what column j writes is left at column i >= j: exp of the sum of g behind j. Differences of sums from
  # the chunk's beginning would lose bits where g is large.
  row, column = jnp.arange(chunk)[:, None], jnp.arange(chunk)[None, :]
  left = jnp.exp(jnp.cumsum(jnp.where(row > column, g[..., :, None], 0), axis=-2))  # [n, B, J, G, C, C]
  before = jnp.exp(jnp.cumsum(g, axis=-1))  # the same for what the memory holds at the chunk's beginning
  seen = row >= column
  if begins is not None:
    begun = jnp.cumsum(split(begins[:, :, None].astype(jnp.int32))[..., 0], axis=-1)[:, :, None, None]  # sequences
    seen = seen & (begun[..., :, None] == begun[..., None, :])
    before = jnp.where(begun == 0, before, 0)
  left = jnp.where(seen, left, 0)

  # Each column corrects what the columns before it in the chunk, and the memory, answer to its key.
  keys = jnp.einsum('nBJCE,nBJSE->nBJCS', k, k, precision=_EXACT)[:, :, :, None]
  inverse = _inverse(jnp.where(row > column, beta[..., :, None] * keys * left, 0))
  new = jnp.einsum('nBJGCS,nBJGSW->nBJGCW', inverse, beta[..., None] * v, precision=_EXACT)
  asked = (beta * before)[..., None] * k[:, :, :, None]
  asked = jnp.einsum('nBJGCS,nBJGSE->nBJGCE', inverse, asked, precision=_EXACT)
  kept = left[..., -1, :, None] * k[:, :, :, None]  # what each column leaves at the chunk's end

  def step(memory, of_chunk):
    new, asked, kept, last = of_chunk
    change = new - jnp.einsum('BJGCE,BJGEW->BJGCW', asked, memory, precision=_EXACT)
    after = last[..., None, None] * memory + jnp.einsum('BJGCE,BJGCW->BJGEW', kept, change, precision=_EXACT)
    return after, (memory, change)

  if memory is None:
    memory = jnp.zeros((b, j, groups, e, w), jnp.float32)
  memory, (memories, change) = jax.lax.scan(step, memory, (new, asked, kept, before[..., -1]))
  scores = jnp.einsum('nBJCE,nBJSE->nBJCS', q, k, precision=_EXACT)[:, :, :, None] * left
  out = jnp.einsum('nBJGCS,nBJGSW->nBJGCW', scores, change, precision=_EXACT)
  read = before[..., None] * q[:, :, :, None]
  out += jnp.einsum('nBJGCE,nBJGEW->nBJGCW', read, memories, precision=_EXACT)
  out = jnp.moveaxis(jnp.moveaxis(out, -2, 2), 0, 1)  # [B, n, C, J, G, W]
  return out.reshape(b, n * chunk, j, groups, w)[:, :t], memory


@jax.custom_vjp
def _inverse(a: jax.Array) -> jax.Array:
  """(1 + a)^-1 of strictly lower triangular matrices [N, ..., C, C]; C is a power of two.

  By halves: the inverse of ((x, 0), (y, z)) has -z^-1 y x^-1 below x^-1 and z^-1. Unlike a sum of powers of `a` this
  loses no bits where equal keys make the powers large, and unlike a substitution it consists of products.
  """
  size = a.shape[-1]
  if size <= _BLOCK:
    rows = [jnp.broadcast_to(jnp.eye(size, dtype=a.dtype)[0], (*a.shape[:-2], size))]
    for i in range(1, size):
      known = jnp.stack(rows, axis=-2)  # [..., i, C]
      rows.append(jnp.eye(size, dtype=a.dtype)[i] - jnp.sum(a[..., i, :i, None] * known, axis=-2))
    return jnp.stack(rows, axis=-2)
  half = size // 2
  # One behind the other along the first axis, which no mesh divides: each axis more would be one of the products too,
  # and XLA's CPU (jaxlib 0.10.2) crashes in products with many of them.
  first, second = jnp.split(_inverse(jnp.concatenate([a[..., :half, :half], a[..., half:, half:]])), 2)
  below = -jnp.matmul(second, jnp.matmul(a[..., half:, :half], first, precision=_EXACT), precision=_EXACT)
  above = jnp.zeros_like(below)
  return jnp.concatenate([jnp.concatenate([first, above], axis=-1), jnp.concatenate([below, second], axis=-1)], axis=-2)


def _inverse_forward(a: jax.Array) -> tuple[jax.Array, jax.Array]:
  inverse = _inverse(a)
  return inverse, inverse


def _inverse_backward(inverse: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
  turned = jnp.swapaxes(inverse, -1, -2)
  return (-jnp.matmul(turned, jnp.matmul(gradient, turned, precision=_EXACT), precision=_EXACT),)


_inverse.defvjp(_inverse_forward, _inverse_backward)
