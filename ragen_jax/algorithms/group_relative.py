"""Advantages from comparing episodes: all tokens of an episode get one number, computed from scores.

Statistics count an episode once, regardless of its number of rows, and ignore rows without a sampled token (padding).
Sets are found by sorting ids, so ids may be any integers, and the order of rows does not matter. Estimators take

    scores   f32[B], the score of each row's episode (`episode_scores`)
    group    i32[B], prompt group
    mask     bool[B, T], the tokens that get an advantage
    episode  i32[B], the episode of each row; None if every row is its own episode

and give advantages f32[B, T], 0 outside the mask.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ragen_jax.algorithms import gae, masks, rounding

EPSILON = 1e-6  # added to a standard deviation before it divides


def episode_scores(rewards: jax.Array, mask: jax.Array, episode: jax.Array | None = None) -> jax.Array:
  """The undiscounted return f32[B] of each row's episode, summed over all rows of the episode, in float32.

  `Rollout.scores` are the same sums without intermediate rounding. Rewards f32[B, T] are not read outside the mask of
  sampled tokens; rows without any have 0.
  """
  of_rows = jnp.sum(jnp.where(mask, rewards, 0.0), axis=-1)
  if episode is None:
    return of_rows
  return jnp.where(mask.any(-1), sum_over(episode, of_rows), 0.0)


def grpo(
  scores: jax.Array,
  group: jax.Array,
  mask: jax.Array,
  *,
  scale_by_std: bool,
  length_weight: bool,
  episode: jax.Array | None = None,
) -> jax.Array:
  """Group-relative advantages: (score - mean of the group) / (standard deviation of the group + 1e-6).

  The standard deviation is unbiased. A group with a single episode has mean 0 and deviation 1. A group whose scores are
  all equal gets exactly 0.

  Args:
    scale_by_std: divide by the deviation; False is Dr. GRPO, whose loss aggregation is `seq-mean-token-sum`.
    length_weight: divide by the number of tokens of the episode relative to the mean of the batch, so that a long
      failure does not weigh more than a short one.

  Source: Shao et al. 2024, arXiv 2402.03300, section 4.1.2; Dr. GRPO: Liu et al. 2025, arXiv 2503.20783, section 3.2;
  the weight is RAGEN's option `grpo_advantage_length_weight`.
  """
  mean, std, count = group_statistics(scores, group, episode_weights(mask, episode))
  single = count < 1.5
  advantages = scores - jnp.where(single, 0.0, mean)
  if scale_by_std:
    advantages = advantages / (jnp.where(single, 1.0, std) + EPSILON)
  if length_weight:
    weights = episode_weights(mask, episode)
    lengths = jnp.sum(mask, axis=-1).astype(scores.dtype)
    lengths = lengths if episode is None else sum_over(episode, lengths)
    mean_length = jnp.sum(weights * lengths) / jnp.maximum(jnp.sum(weights), 1.0)
    advantages = advantages * mean_length / jnp.maximum(lengths, 1.0)
  return to_tokens(advantages, mask)


def rloo(scores: jax.Array, group: jax.Array, mask: jax.Array, *, episode: jax.Array | None = None) -> jax.Array:
  """Leave-one-out: score - mean score of the *other* episodes of the group; a single episode keeps its score.

  Source: Ahmadian et al. 2024, arXiv 2402.14740.
  """
  mean, _, count = group_statistics(scores, group, episode_weights(mask, episode))
  others = count / jnp.maximum(count - 1.0, 1.0)
  return to_tokens(jnp.where(count < 1.5, scores, (scores - mean) * others), mask)


def brpo(scores: jax.Array, mask: jax.Array, *, episode: jax.Array | None = None) -> jax.Array:
  """The score normalised by mean and standard deviation (+ 1e-6) over the episodes of the batch: f32[B, T].

  A batch with a single episode has mean 0 and deviation 1. Source: BRPO, RAGEN's first release.
  """
  batch = jnp.zeros(scores.shape, jnp.int32)
  return grpo(scores, batch, mask, episode=episode, scale_by_std=True, length_weight=False)


def arpo(scores: jax.Array, mask: jax.Array) -> jax.Array:
  """The raw score on every token: f32[B, T]. Source: ARPO, RAGEN's first release."""
  return to_tokens(scores, mask)


def gigpo(
  rewards: jax.Array,
  group: jax.Array,
  mask: jax.Array,
  turn: jax.Array,
  anchors: jax.Array,
  *,
  step_gamma: float,
  step_weight: float,
  scale_by_std: bool,
  scores: jax.Array | None = None,
  loss_mask: jax.Array | None = None,
  episode: jax.Array | None = None,
) -> jax.Array:
  """Group-in-group advantages: compares episodes within a group, and steps of the group from the same state.

  A = A_episode + step_weight * A_step. A_episode is the total return normalised within the group. A_step is the return
  from the step on, discounted per turn, minus the mean over all steps of the group that start from an identical
  observation (its *anchor*), in any episode. A step with a unique anchor gets 0.

  Args:
    rewards: f32[B, T], not read outside the mask.
    turn: i32[B, T], turn index, -1 outside of turns.
    anchors: i32[B, K], id of the observation at each turn of the row's episode, equal for equal observations, negative
      for turns that were not played. All rows of an episode have the same ids.
    scale_by_std: also divide both parts by the standard deviation of their set + 1e-6 ("mean_std_norm").
    scores: None means the sum of `rewards`.
    loss_mask: bool[B, T], sampled tokens, which determine the ends of turns; None means `mask`.

  Source: Feng et al. 2025, arXiv 2505.10978, section 4.
  """
  loss_mask = mask if loss_mask is None else loss_mask
  scores = episode_scores(rewards, loss_mask, episode) if scores is None else scores
  of_episode = grpo(scores, group, mask, episode=episode, scale_by_std=scale_by_std, length_weight=False)
  ends = masks.turn_ends(loss_mask, turn)
  of_turns = masks.turn_sums(rewards, loss_mask, ends)
  returns = gae.discounted_returns(of_turns, ends, step_gamma, episode=episode, turn=turn)

  count = anchors.shape[-1]
  slots = jnp.where(ends & (turn < count), turn, count)  # one end per turn; other columns go to a slot that is dropped
  steps = jnp.zeros((anchors.shape[0], count + 1), returns.dtype)
  rows = jnp.arange(anchors.shape[0])[:, None]
  present = steps.at[rows, slots].set(1.0)[:, :count] * (anchors >= 0)  # [B, K]
  steps = steps.at[rows, slots].set(returns)[:, :count]

  groups = jnp.broadcast_to(group[:, None], anchors.shape)
  mean, std, _ = group_statistics(steps.ravel(), (groups.ravel(), anchors.ravel()), present.ravel())
  of_step = (steps.ravel() - mean) / ((std + EPSILON) if scale_by_std else 1.0)  # exactly 0 for a unique anchor
  of_step = jnp.where(present.ravel() > 0, of_step, 0.0).reshape(anchors.shape)
  at_tokens = jnp.take_along_axis(of_step, jnp.clip(turn, 0, count - 1), axis=-1)
  at_tokens = jnp.where((turn >= 0) & (turn < count), at_tokens, 0.0)
  return jnp.where(mask, of_episode + step_weight * at_tokens, 0.0)


def to_tokens(of_rows: jax.Array, mask: jax.Array) -> jax.Array:
  """Copies a number per row to the row's tokens in the mask: f32[B] -> f32[B, T]."""
  return jnp.where(mask, of_rows[:, None], 0.0)


def _sets(keys: jax.Array | tuple[jax.Array, ...]) -> jax.Array:
  """i32[N]: a set number from 0 to N-1 for each entry; entries with equal keys get equal numbers.

  Keys are sorted instead of compared in pairs, because N can be 200,000.
  """
  keys = tuple(jnp.asarray(key) for key in (keys if isinstance(keys, tuple) else (keys,)))
  order = jnp.lexsort(keys)
  new = jnp.zeros(keys[0].shape, bool)
  for key in keys:
    new |= jnp.diff(key[order], prepend=key[order][:1]) != 0
  return jnp.zeros(keys[0].shape, jnp.int32).at[order].set(jnp.cumsum(new, dtype=jnp.int32))


def sum_over(keys: jax.Array | tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
  """For each entry, the sum of x over all entries with the same key: f32[N]."""
  return _sum_over(_sets(keys), x)


def _sum_over(sets: jax.Array, x: jax.Array) -> jax.Array:
  return jax.ops.segment_sum(x, sets, num_segments=len(x))[sets]


def episode_weights(mask: jax.Array, episode: jax.Array | None) -> jax.Array:
  """f32[B]: 1 / (number of rows of the row's episode), 0 for padding rows. Sums to the number of episodes."""
  valid = mask.any(-1).astype(jnp.float32)
  if episode is None:
    return valid
  return valid / jnp.maximum(sum_over(episode, valid), 1.0)


def group_statistics(
  x: jax.Array, keys: jax.Array | tuple[jax.Array, ...], weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """For each entry the weighted mean, unbiased standard deviation and count of the entries with the same key: f32[N].

  In a set whose entries are equal up to rounding (`rounding.is_constant`), the mean of an entry is the entry itself and
  the deviation is 0, so that no rounding error is divided by 1e-6. In other sets the smallest entry is subtracted
  first, which keeps the sums small.
  """
  sets = _sets(keys)
  count = _sum_over(sets, weights)
  least = jax.ops.segment_min(jnp.where(weights > 0, x, jnp.inf), sets, num_segments=len(x))[sets]
  greatest = jax.ops.segment_max(jnp.where(weights > 0, x, -jnp.inf), sets, num_segments=len(x))[sets]
  least, greatest = (jnp.where(jnp.isfinite(y), y, 0.0) for y in (least, greatest))
  constant = rounding.is_constant(least, greatest)
  shifted = jnp.where(weights > 0, x - least, 0.0)
  mean = _sum_over(sets, weights * shifted) / jnp.maximum(count, 1.0)
  deviations = jnp.where((weights > 0) & ~constant, shifted - mean, 0.0)
  variance = _sum_over(sets, weights * deviations**2) / jnp.maximum(count - 1.0, 1.0)
  return jnp.where(constant & (weights > 0), x, mean + least), jnp.sqrt(variance), count
