"""Masks on the token timeline: where a turn ends, what follows what, and which tokens take part in what.

Columns are the T slots of a row; `mask` is True where a token takes part (usually: where the policy sampled it). The
slots between are holes that everything here steps over.

    loss_mask     0 0 1 1 1 0 0 1 1 0       two turns: the prompt, a reply, an observation, a reply, padding
    turn          0 0 0 0 0 1 1 1 1 -1
    turn_ends     0 0 0 0 1 0 0 0 1 0
    next_sampled  2 2 3 4 7 7 7 8 10 10     10 = T: nothing follows
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def next_sampled(mask: jax.Array) -> jax.Array:
  """The column of the next masked-in token strictly after each slot.

  Args:
    mask: bool[B, T].

  Returns:
    i32[B, T], T where nothing follows.
  """
  columns = mask.shape[-1]
  here = jnp.where(mask, jnp.arange(columns), columns)
  after = jax.lax.cummin(here, axis=here.ndim - 1, reverse=True)
  return jnp.concatenate([after[..., 1:], jnp.full_like(after[..., :1], columns)], axis=-1)


def last_sampled(mask: jax.Array) -> jax.Array:
  """The last masked-in token of each row: bool[B, T], no True in a row that has none."""
  return mask & (next_sampled(mask) == mask.shape[-1])


def turn_ends(loss_mask: jax.Array, turn: jax.Array) -> jax.Array:
  """The last sampled token of each turn, where the turn's reward lies.

  Found from the turn indices and never from the rewards, so that a turn whose reward is zero still ends.

  Args:
    loss_mask: bool[B, T], the tokens that the policy sampled.
    turn: i32[B, T], turn index, -1 outside of turns.

  Returns:
    bool[B, T].
  """
  columns = loss_mask.shape[-1]
  following = next_sampled(loss_mask)
  next_turn = jnp.take_along_axis(turn, jnp.minimum(following, columns - 1), axis=-1)
  return loss_mask & ((following == columns) | (next_turn != turn))


def selective_masks(
  loss_mask: jax.Array, length: jax.Array, *, mask_loss: bool = True, mask_advantages: bool = True
) -> tuple[jax.Array, jax.Array]:
  """Which tokens are trained (M_loss) and through which tokens advantages run (M_adv): VAGEN's two switches.

  Both on is the meaning of this project: the tokens that the policy sampled. A switch that is off opens the mask to
  every token of the row that something precedes (column 0 has no log-prob), prompts and observations included; the
  trainer must then score those tokens itself, since the sampler has no log-prob for them.

  Args:
    loss_mask: bool[B, T], the tokens that the policy sampled.
    length: i32[B], used columns of each row.
    mask_loss: train sampled tokens only.
    mask_advantages: run advantage recursions over sampled tokens only.

  Returns:
    (M_loss, M_adv), each bool[B, T]. Rows without a sampled token stay empty.

  Source: VAGEN, arXiv 2510.16907, selective token masking; AICO is both on without the bi-level credit.
  """
  columns = jnp.arange(loss_mask.shape[-1])
  every = (columns[None] < length[:, None]) & (columns[None] > 0) & loss_mask.any(-1, keepdims=True)
  return (loss_mask if mask_loss else every), (loss_mask if mask_advantages else every)


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
  """The mean of x over the masked-in entries of the whole array: f32[], 0 where there are none."""
  return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


def masked_variance(x: jax.Array, mask: jax.Array) -> jax.Array:
  """The unbiased variance (n - 1) of x over the masked-in entries: f32[], 0 where there are fewer than two."""
  deviations = jnp.where(mask, x - masked_mean(x, mask), 0.0)
  return jnp.sum(deviations**2) / jnp.maximum(jnp.sum(mask) - 1, 1)


def whiten(x: jax.Array, mask: jax.Array) -> jax.Array:
  """(x - mean) / sqrt(variance + 1e-8) over the masked-in tokens of the whole batch.

  Args:
    x: f32[B, T].
    mask: bool[B, T].

  Returns:
    f32[B, T], 0 off the mask. The variance is the unbiased one.
  """
  scale = jax.lax.rsqrt(masked_variance(x, mask) + 1e-8)
  return jnp.where(mask, (x - masked_mean(x, mask)) * scale, 0.0)
