"""From what the environment paid to what the estimators read: penalties, credit, normalisation, KL.

The order in the trainer is: `format_penalty` on the turns' rewards, then `shape_rewards` (credit and normalisation),
then, where it is wanted, `kl_in_reward`. Raw scores and shaped rewards are different arrays throughout: filters and
metrics read the raw ones, whatever the normalisation does to the others.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.algorithms import masks
from ragen_jax.algorithms.group_relative import EPSILON, episode_scores, episode_weights, group_statistics

CREDITS = ('trajectory', 'turn')
GROUPINGS = ('state', 'inductive', 'batch')
METHODS = ('identity', 'mean', 'mean_std', 'asym_clip')
ASYM_CLIP = (-1.0, 3.0)


@struct.dataclass
class ShapedRewards:
  """Rewards for the estimators, and the scores they came from.

  Attributes:
    rewards: f32[B, T], with credit placed and normalised.
    raw_scores: f32[B], the return of each row's episode as it was earned, penalties included; what filters read.
    scores: f32[B], the same after normalisation.
  """

  rewards: jax.Array
  raw_scores: jax.Array
  scores: jax.Array


def format_penalty(
  rewards: jax.Array, invalid: jax.Array, loss_mask: jax.Array, turn: jax.Array, penalty: float = -0.1
) -> jax.Array:
  """Adds the penalty, once, to each turn whose reply was not as asked.

  Args:
    rewards: f32[B, T].
    invalid: bool[B, K], turn k of the row was malformed, named an unknown action, or had no valid one.
    loss_mask: bool[B, T], the tokens that the policy sampled.
    turn: i32[B, T], turn index, -1 outside turns.
    penalty: what is added, in units of reward; usually negative.

  Returns:
    f32[B, T]; the penalty lies where the turn's reward does, on its last sampled token.

  Source: RAGEN's `format_penalty`.
  """
  turns = invalid.shape[-1]
  index = jnp.clip(turn, 0, turns - 1)
  bad = jnp.take_along_axis(invalid, index, axis=-1) & (turn >= 0) & (turn < turns)
  return rewards + jnp.where(bad & masks.turn_ends(loss_mask, turn), penalty, 0.0)


def trajectory_credit(
  rewards: jax.Array, loss_mask: jax.Array, turn: jax.Array, episode: jax.Array | None = None
) -> jax.Array:
  """Moves all of an episode's reward to its last sampled token.

  Args:
    rewards: f32[B, T]; what lies off the mask is not read.
    loss_mask: bool[B, T].
    turn: i32[B, T], turn index, -1 outside turns.
    episode: i32[B], the rows that belong together; None where each row is an episode of its own. The last row of an
      episode is the one with its latest turn (of several such rows, the last).

  Returns:
    f32[B, T].
  """
  return _place(episode_scores(rewards, loss_mask, episode), loss_mask, turn, episode)


def _place(scores: jax.Array, loss_mask: jax.Array, turn: jax.Array, episode: jax.Array | None) -> jax.Array:
  """The episode's score on its last sampled token, 0 elsewhere: f32[B, T]."""
  at = masks.last_sampled(loss_mask)
  if episode is not None:
    rows = jnp.arange(turn.shape[0])
    final = jnp.max(jnp.where(loss_mask, turn, -1), axis=-1)  # [B]
    valid = loss_mask.any(-1)
    later = (final[None, :] > final[:, None]) | ((final[None, :] == final[:, None]) & (rows[None, :] > rows[:, None]))
    followed = jnp.any((episode[None, :] == episode[:, None]) & valid[None, :] & later, axis=-1)
    at = at & ~followed[:, None]
  return jnp.where(at, scores[:, None], 0.0)


def normalize_scores(
  scores: jax.Array,
  loss_mask: jax.Array,
  group: jax.Array,
  env: jax.Array,
  *,
  grouping: str = 'state',
  method: str = 'identity',
  episode: jax.Array | None = None,
) -> jax.Array:
  """Normalises episode scores among their like.

  'mean' subtracts the mean of the set; 'mean_std' also divides by its unbiased standard deviation + 1e-6, and gives 0
  where that is below 1e-6; 'asym_clip' clamps the latter to [-1, 3]. A set of one episode gives 0 by all three.

  Args:
    scores: f32[B], the score of each row's episode.
    loss_mask: bool[B, T]; rows without a sampled token do not count.
    group: i32[B], prompt group, the sets of grouping 'state'.
    env: i32[B], environment index, the sets of grouping 'inductive'; 'batch' is one set.
    grouping: one of `GROUPINGS`.
    method: one of `METHODS`.
    episode: i32[B], None where each row is an episode of its own.

  Returns:
    f32[B], 0 for rows without a sampled token. `scores` is left as it is.

  Raises:
    ValueError: grouping or method is unknown.

  Source: RAGEN's `agent_proxy.reward_normalization`.
  """
  if grouping not in GROUPINGS:
    raise ValueError(f'reward.grouping is {grouping!r}; it may be one of {", ".join(GROUPINGS)}')
  if method not in METHODS:
    raise ValueError(f'reward.method is {method!r}; it may be one of {", ".join(METHODS)}')
  valid = loss_mask.any(-1)
  if method == 'identity':
    return jnp.where(valid, scores, 0.0)
  keys = {'state': group, 'inductive': env, 'batch': jnp.zeros_like(group)}[grouping]
  mean, std, _ = group_statistics(scores, keys, episode_weights(loss_mask, episode))
  normalized = scores - mean
  if method != 'mean':
    normalized = jnp.where(std < EPSILON, 0.0, normalized / (std + EPSILON))
  if method == 'asym_clip':
    normalized = jnp.clip(normalized, *ASYM_CLIP)
  return jnp.where(valid, normalized, 0.0)


def shape_rewards(
  rewards: jax.Array,
  loss_mask: jax.Array,
  turn: jax.Array,
  group: jax.Array,
  env: jax.Array,
  *,
  credit: str = 'trajectory',
  grouping: str = 'state',
  method: str = 'identity',
  episode: jax.Array | None = None,
) -> ShapedRewards:
  """Places credit and normalises, keeping the raw scores apart.

  Args:
    rewards: f32[B, T], each turn's reward, penalties included, on its last sampled token.
    loss_mask: bool[B, T].
    turn: i32[B, T].
    group, env, grouping, method, episode: as in `normalize_scores`.
    credit: 'trajectory', the normalised score of the episode on its last sampled token; 'turn', each turn's reward
      where it is, which only the method 'identity' goes with.

  Returns:
    `ShapedRewards`.

  Raises:
    ValueError: an option is unknown, or 'turn' credit is to be normalised.
  """
  if credit not in CREDITS:
    raise ValueError(f'reward.credit is {credit!r}; it may be one of {", ".join(CREDITS)}')
  if credit == 'turn' and method != 'identity':
    raise ValueError(f"reward.method is {method!r}; with reward.credit 'turn' it may be identity only")
  raw = episode_scores(rewards, loss_mask, episode)
  scores = normalize_scores(raw, loss_mask, group, env, grouping=grouping, method=method, episode=episode)
  if credit == 'turn':
    placed = jnp.where(loss_mask, rewards, 0.0)
  else:
    placed = _place(scores, loss_mask, turn, episode)
  return ShapedRewards(rewards=placed, raw_scores=raw, scores=scores)


def kl_in_reward(rewards: jax.Array, kl: jax.Array, loss_mask: jax.Array, coef: float) -> jax.Array:
  """rewards - coef * kl on every sampled token: f32[B, T].

  Args:
    rewards: f32[B, T].
    kl: f32[B, T], an estimate for each token (`losses.kl_penalty`); what lies off the mask is not read.
    loss_mask: bool[B, T].
    coef: strength, in reward for each nat.

  Source: Ouyang et al. 2022, arXiv 2203.02155, eq. 2; Ziegler et al. 2019, arXiv 1909.08593.
  """
  return rewards - coef * jnp.where(loss_mask, kl, 0.0)
