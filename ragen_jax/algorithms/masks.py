"""Masks on the token timeline: ends of turns, next sampled tokens, selective masks, and statistics under a mask.

A mask marks the columns of a row that count, usually the tokens that the policy sampled. All functions skip the other
columns.

    loss_mask     0 0 1 1 1 0 0 1 1 0       two turns: prompt, reply, observation, reply, padding
    turn          0 0 0 0 0 1 1 1 1 -1
    turn_ends     0 0 0 0 1 0 0 0 1 0
    next_sampled  2 2 3 4 7 7 7 8 10 10     10 = T: nothing follows
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.algorithms import rounding


def next_sampled(mask: jax.Array) -> jax.Array:
  """The next column of the mask bool[B, T] strictly after each column: i32[B, T], T if there is none."""
  columns = mask.shape[-1]
  here = jnp.where(mask, jnp.arange(columns), columns)
  after = jax.lax.cummin(here, axis=here.ndim - 1, reverse=True)
  return jnp.concatenate([after[..., 1:], jnp.full_like(after[..., :1], columns)], axis=-1)


def last_sampled(mask: jax.Array) -> jax.Array:
  """The last token of each row in the mask: bool[B, T], all False for a row without any."""
  return mask & (next_sampled(mask) == mask.shape[-1])


def turn_ends(loss_mask: jax.Array, turn: jax.Array) -> jax.Array:
  """The last sampled token of each turn, which holds the turn's reward: bool[B, T].

  Follows from the turn indices i32[B, T] alone, which are -1 outside of turns, so a turn with reward 0 has an end too.
  """
  columns = loss_mask.shape[-1]
  following = next_sampled(loss_mask)
  next_turn = jnp.take_along_axis(turn, jnp.minimum(following, columns - 1), axis=-1)
  return loss_mask & ((following == columns) | (next_turn != turn))


def turn_sums(x: jax.Array, loss_mask: jax.Array, ends: jax.Array) -> jax.Array:
  """The sum of x f32[B, T] over the sampled tokens of each turn, on its last one (`turn_ends`); 0 elsewhere."""
  # Summed turn by turn: differences of a running sum would not be exact.
  of_turn = jnp.cumsum(ends, axis=-1, dtype=jnp.int32) - ends  # ends before each column
  masked = jnp.where(loss_mask, x, 0.0)
  total = jax.vmap(lambda row, sets: jax.ops.segment_sum(row, sets, num_segments=len(row)))(masked, of_turn)
  return jnp.where(ends, jnp.take_along_axis(total, of_turn, axis=-1), 0.0)


def selective_masks(
  loss_mask: np.ndarray, length: np.ndarray, *, mask_loss: bool, mask_advantages: bool
) -> tuple[np.ndarray, np.ndarray]:
  """The tokens in the policy loss (M_loss) and in the recursion of advantages (M_adv), by VAGEN's two switches.

  With both switches on, both are the sampled tokens. A switch that is off extends its mask to all tokens of the row but
  the first (column 0 has no log-prob), including prompts and observations. The trainer must then score those tokens,
  because the sampler records log-probs of sampled tokens only. This runs on the host: T is not padded, so on a device
  every rollout could need a program of its own.

  `length` i32[B] is the number of used columns of each row. Both masks are bool[B, T], all False for rows without a
  sampled token.

  Source: VAGEN, arXiv 2510.16907, selective token masking; AICO is both on without the bi-level credit.
  """
  columns = np.arange(loss_mask.shape[-1])
  every = (columns[None] < length[:, None]) & (columns[None] > 0) & loss_mask.any(-1, keepdims=True)
  return (loss_mask if mask_loss else every), (loss_mask if mask_advantages else every)


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Mean of x over the mask, f32[]; 0 for an empty mask."""
  return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


def masked_variance(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Unbiased variance (n - 1) of x over the mask, f32[]; 0 for fewer than two entries."""
  deviations = jnp.where(mask, x - masked_mean(x, mask), 0.0)
  return jnp.sum(deviations**2) / jnp.maximum(jnp.sum(mask) - 1, 1)


def whiten(x: jax.Array, mask: jax.Array) -> jax.Array:
  """(x - mean) / sqrt(variance + 1e-8), with mean and unbiased variance over the mask in the whole batch: f32[B, T].

  0 outside the mask, and 0 everywhere if all entries are equal up to rounding.
  """
  least, greatest = jnp.min(x, where=mask, initial=jnp.inf), jnp.max(x, where=mask, initial=-jnp.inf)
  varies = ~rounding.is_constant(*(jnp.where(jnp.isfinite(y), y, 0.0) for y in (least, greatest)))
  scale = jax.lax.rsqrt(masked_variance(x, mask) + 1e-8)
  return jnp.where(mask & varies, (x - masked_mean(x, mask)) * scale, 0.0)
