"""Reward shaping: credit assignment, normalisation and a KL penalty.

The inputs are the rewards of turns and the scores of episodes, including format penalties, as the rollout records them.
`shape_rewards` assigns credit and normalises; `kl_in_reward` is applied after it if a KL penalty is configured. Both
return the rewards of tokens, for recursive estimators, and the scores of episodes, for estimators that compare
episodes. Filters and metrics read the raw scores, never the shaped rewards.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ragen_jax.algorithms import masks
from ragen_jax.algorithms.group_relative import EPSILON, episode_scores, episode_weights, group_statistics

CREDITS = ('trajectory', 'turn')
GROUPINGS = ('state', 'inductive', 'batch')
METHODS = ('identity', 'mean', 'mean_std', 'asym_clip')
ASYM_CLIP = (-1.0, 3.0)


def _place(scores: jax.Array, loss_mask: jax.Array, turn: jax.Array, episode: jax.Array | None) -> jax.Array:
  """Puts the score of each episode on its last sampled token: f32[B, T], 0 elsewhere.

  With several rows per episode, the last row is the one with the latest turn, and of several such rows the last one.
  """
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
  grouping: str,
  method: str,
  episode: jax.Array | None = None,
) -> jax.Array:
  """Normalises the scores of episodes within sets of episodes: f32[B], 0 for padding rows.

  'mean' subtracts the mean of the set. 'mean_std' also divides by the unbiased standard deviation + 1e-6, and returns 0
  if the deviation is below 1e-6. 'asym_clip' clips the result of 'mean_std' to [-1, 3]. All three return 0 for a set of
  one episode. `scores` and `episode` are those of `group_relative`.

  Args:
    loss_mask: bool[B, T], sampled tokens; rows without any are padding.
    group: i32[B], prompt group. The sets of grouping 'state'.
    env: i32[B], environment index. The sets of grouping 'inductive'; 'batch' is a single set.

  Raises:
    ValueError: grouping or method is unknown.

  Source: RAGEN's `agent_proxy.reward_normalization`.
  """
  _check_options(grouping, method)
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


def _check_options(grouping: str, method: str) -> None:
  if grouping not in GROUPINGS:
    raise ValueError(f'reward.grouping is {grouping!r}; it may be one of {", ".join(GROUPINGS)}')
  if method not in METHODS:
    raise ValueError(f'reward.method is {method!r}; it may be one of {", ".join(METHODS)}')


def shape_rewards(
  rewards: jax.Array,
  loss_mask: jax.Array,
  turn: jax.Array,
  group: jax.Array,
  env: jax.Array,
  *,
  credit: str,
  grouping: str,
  method: str,
  episode: jax.Array | None = None,
  scores: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Assigns credit and normalises; other arguments than the following are those of `normalize_scores`.

  Args:
    rewards: f32[B, T], rewards of turns on sampled tokens: each on the last token of its turn, except those that belong
      inside a turn (`reward.state_place`). Not read outside the mask.
    turn: i32[B, T], turn index, -1 outside of turns.
    credit: 'trajectory' puts the normalised score of the episode on its last sampled token; 'turn' keeps each turn's
      reward in its place and requires the method 'identity'.
    scores: f32[B], score of each row's episode, not summed in float32. None means the sum of `rewards`.

  Returns:
    f32[B, T], the rewards, 0 outside the mask; f32[B], the normalised score of each row's episode, 0 for padding rows.

  Raises:
    ValueError: an option is unknown, or credit 'turn' is combined with a normalisation.
  """
  _check_options(grouping, method)
  if credit not in CREDITS:
    raise ValueError(f'reward.credit is {credit!r}; it may be one of {", ".join(CREDITS)}')
  if credit == 'turn' and method != 'identity':
    raise ValueError(f"reward.method is {method!r}; with reward.credit 'turn' it may be identity only")
  if scores is None:
    scores = episode_scores(rewards, loss_mask, episode)
  scores = normalize_scores(scores, loss_mask, group, env, grouping=grouping, method=method, episode=episode)
  if credit == 'turn':
    return jnp.where(loss_mask, rewards, 0.0), scores
  return _place(scores, loss_mask, turn, episode), scores


def kl_in_reward(
  rewards: jax.Array,
  scores: jax.Array,
  kl: jax.Array,
  loss_mask: jax.Array,
  coef: float,
  *,
  episode: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Subtracts coef * kl from the rewards f32[B, T] of sampled tokens, and from the scores f32[B] of their episodes.

  `kl` f32[B, T] is in nats (`losses.kl_penalty`), and not read outside the mask; `coef` is in units of reward per nat.

  Source: Ouyang et al. 2022, arXiv 2203.02155, eq. 2; Ziegler et al. 2019, arXiv 1909.08593.
  """
  penalty = coef * jnp.where(loss_mask, kl, 0.0)
  return rewards - penalty, scores - episode_scores(penalty, loss_mask, episode)
