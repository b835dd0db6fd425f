"""Drawing tokens from logits: top-k and top-p filters, and inverse-CDF sampling with one uniform number per row.

At temperature 1 with top-p 1 and top-k off no filter runs, so tokens are sampled from exactly the distribution that the
loss scores.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

# Vocabularies larger than the first number are sampled in two steps: a block of so many tokens, then a token in the
# block. The first that divides the vocabulary is taken, so that it needs no padding.
_BLOCKS = (512, 256, 128)


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are drawn. Fields of `config.train` or `config.eval`; a temperature of 0 takes the most likely token."""

  temperature: float
  top_p: float
  top_k: int

  @property
  def compiled(self) -> Sampling:
    """What a program is compiled for: all temperatures share one, and one of 0 needs no filters."""
    return PLAIN if self.temperature == 0 else dataclasses.replace(self, temperature=1.0)


@struct.dataclass
class RowSampling:
  """`Sampling` for rows that differ: f32[B], and i32[B] for `top_k`. Numbers may change without a new program."""

  temperature: jax.Array
  top_p: jax.Array
  top_k: jax.Array


# The model's own distribution, and its most likely tokens.
PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=0)
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0)


def draw_tokens(
  logits: jax.Array, keys: jax.Array, positions: jax.Array, sampling: Sampling, greedy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Draws one token per row.

  A row's random number depends on its key and position only, so a reply depends neither on the other rows of the batch
  nor on how rows are laid out over devices. The logits f32[B, V] are already divided by the temperature, and -inf for
  tokens that must not be drawn. `keys` are PRNG keys [B], into which `positions` i32[B] are folded. Of `sampling`,
  `top_p` and `top_k` are read. With `greedy` bool[], the most likely tokens are taken.

  Returns:
    tokens i32[B], their log-probabilities f32[B] under the filtered distribution, and the entropies f32[B] of the
    distributions before the filters, in nats.
  """
  most = jnp.max(logits, axis=-1, keepdims=True)
  below = logits - most  # of the most likely token; at most 0
  total = jnp.sum(jnp.exp(below), axis=-1)
  entropies = jnp.log(total) - jnp.sum(jnp.exp(below) * jnp.maximum(below, -1e30), axis=-1) / total
  if sampling.top_k > 0 or sampling.top_p < 1.0:
    below = filter_logits(logits, sampling.top_k, sampling.top_p) - most
    total = jnp.sum(jnp.exp(below), axis=-1)
  # With such a factor only the most likely tokens have a probability, and 0 takes the first of them. An argmax would be
  # one more pass over the logits, and a branch would hold them in memory.
  sharpened = below * jnp.where(greedy, 1e30, 1.0)
  tokens = inverse_cdf(sharpened, jnp.where(greedy, 0.0, _uniforms(keys, positions)))
  return tokens, jnp.take_along_axis(below, tokens[:, None], axis=-1)[:, 0] - jnp.log(total), entropies


def draw_row_tokens(
  logits: jax.Array, keys: jax.Array, positions: jax.Array, sampling: RowSampling, alternatives: int
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
  """`draw_tokens` with numbers of its own for each row: a row gets the token that it gets there.

  The logits are not divided by the temperature. N `alternatives` are the likeliest tokens of the distribution that was
  drawn from.

  Returns:
    tokens, log-probabilities and entropies as of `draw_tokens`, and the alternatives i32[B, N] with their
    log-probabilities f32[B, N], -inf for tokens that cannot be drawn; None without alternatives.
  """
  greedy = sampling.temperature == 0
  logits = logits / jnp.where(greedy, 1.0, sampling.temperature)[:, None]
  logp = jax.nn.log_softmax(logits, axis=-1)
  entropies = -jnp.sum(jnp.exp(logp) * jnp.maximum(logp, -1e30), axis=-1)
  filtered = ~greedy & ((sampling.top_k > 0) | (sampling.top_p < 1.0))

  def filter_them() -> jax.Array:
    kept = jax.nn.log_softmax(filter_rows(logits, sampling.top_k, sampling.top_p), axis=-1)
    return jnp.where(filtered[:, None], kept, logp)

  logp = jax.lax.cond(jnp.any(filtered), filter_them, lambda: logp)  # the filters sort the vocabulary
  # As `draw_tokens` has them: relative to the most likely token, whose logit is 0.
  drawn = inverse_cdf(logp - jnp.max(logp, axis=-1, keepdims=True), _uniforms(keys, positions))
  tokens = jnp.where(greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), drawn)
  top = None
  if alternatives:
    top_logprobs, top_tokens = jax.lax.top_k(logp, alternatives)
    top = top_tokens, top_logprobs
  return tokens, jnp.take_along_axis(logp, tokens[:, None], axis=-1)[:, 0], entropies, top


def _uniforms(keys: jax.Array, positions: jax.Array) -> jax.Array:
  """A random number f32[B] in [0, 1) for each row."""
  return jax.vmap(lambda key, position: jax.random.uniform(jax.random.fold_in(key, position)))(keys, positions)


def filter_logits(logits: jax.Array, top_k: int, top_p: float) -> jax.Array:
  """Sets the logits f32[B, V] of tokens outside of top-k and top-p to -inf; top-p applies to what top-k keeps."""
  if top_k > 0:
    kth = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
    logits = jnp.where(logits < kth, -jnp.inf, logits)
  if top_p < 1.0:
    threshold = _nucleus_threshold(jnp.sort(logits, axis=-1, descending=True), top_p)
    logits = jnp.where(logits < threshold, -jnp.inf, logits)
  return logits


def filter_rows(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
  """`filter_logits` with `top_k` i32[B] and `top_p` f32[B], numbers of its own for each row."""
  size = logits.shape[-1]
  ordered = jnp.sort(logits, axis=-1, descending=True)
  k = jnp.where(top_k > 0, jnp.minimum(top_k, size), size)
  kth = jnp.take_along_axis(ordered, k[:, None] - 1, axis=-1)
  threshold = _nucleus_threshold(jnp.where(ordered < kth, -jnp.inf, ordered), top_p[:, None])
  threshold = jnp.where(top_p[:, None] < 1.0, jnp.maximum(threshold, kth), kth)
  return jnp.where(logits < threshold, -jnp.inf, logits)


def _nucleus_threshold(ordered: jax.Array, top_p: float | jax.Array) -> jax.Array:
  """The smallest logit f32[B, 1] that top-p keeps of logits in descending order."""
  probs = jax.nn.softmax(ordered, axis=-1)
  before = jnp.cumsum(probs, axis=-1) - probs  # probability of all likelier tokens; the likeliest is always kept
  last = jnp.sum(before < top_p, axis=-1, keepdims=True) - 1
  return jnp.take_along_axis(ordered, jnp.maximum(last, 0), axis=-1)


def inverse_cdf(logits: jax.Array, u: jax.Array) -> jax.Array:
  """Inverse-CDF sampling, which needs one uniform number per row, `u` f32[B] in [0, 1), instead of one per token.

  The logits f32[B, V] are logarithms of the probabilities, whose sum need not be 1, and at most about 0. Of a large
  vocabulary only the logits and sums of blocks are held in memory, and no probabilities. The result i32[B] never has a
  token of logit -inf.
  """
  b, v = logits.shape
  if v > _BLOCKS[0]:  # first the block, then the token in it
    size = next((n for n in _BLOCKS if v % n == 0), _BLOCKS[0])
    blocks = jnp.pad(logits, ((0, 0), (0, -v % size)), constant_values=-jnp.inf).reshape(b, -1, size)
    sums = jnp.sum(jnp.exp(blocks), axis=-1)  # [B, V/block]
    upto = jnp.cumsum(sums, axis=-1)
    target = _below(u * upto[:, -1], upto[:, -1])
    block = jnp.sum(upto <= target[:, None], axis=-1)
    start = jnp.take_along_axis(upto - sums, block[:, None], axis=1)[:, 0]
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # [B, block]
    cumulative = jnp.cumsum(jnp.exp(inside), axis=-1)
    rest = jnp.clip(target - start, 0.0, None)
    token = jnp.sum(cumulative <= _below(rest, cumulative[:, -1])[:, None], axis=-1)
    return (block * size + token).astype(jnp.int32)
  cumulative = jnp.cumsum(jnp.exp(logits), axis=-1)
  target = _below(u * cumulative[:, -1], cumulative[:, -1])
  return jnp.sum(cumulative <= target[:, None], axis=-1).astype(jnp.int32)


def _below(x: jax.Array, limit: jax.Array) -> jax.Array:
  """x, made strictly smaller than `limit` if rounding brought it there."""
  return jnp.minimum(x, jnp.nextafter(limit, jnp.zeros_like(limit)))
