"""Advantage estimators by name: from rewards on the timeline to an advantage for every sampled token.

There are two families. Recursive estimators (`gae.py`) run backwards over the sampled tokens of an episode. Scalar
estimators (`group_relative.py`) give all tokens of an episode one number, computed from its score and the scores of
other episodes. `compute_advantages` calls the estimator of a given name.
"""

from __future__ import annotations

import dataclasses

import chex
import jax
from flax import struct

from ragen_jax.algorithms import masks
from ragen_jax.algorithms.gae import bi_level_gae, discounted_returns, gae, over_turns, turn_wise_gae
from ragen_jax.algorithms.group_relative import arpo, brpo, episode_scores, gigpo, grpo, rloo, to_tokens
from ragen_jax.algorithms.masks import whiten


@struct.dataclass
class Advantages:
  """The result of an estimator.

  Attributes:
    advantages: f32[B, T], factors of the policy loss, 0 outside the mask.
    returns: f32[B, T], targets of the critic, computed before whitening. For estimators without a critic, the
      (discounted) return of the episode. 0 outside the mask.
    value_mask: bool[B, T], the tokens on which the critic is trained.
  """

  advantages: jax.Array
  returns: jax.Array
  value_mask: jax.Array


@dataclasses.dataclass(frozen=True)
class Estimator:
  """Requirements and properties of an estimator, for the trainer and for the checks of a config.

  Attributes:
    needs_critic: whether it reads `values`.
    needs_groups: whether it compares the episodes of a prompt, so that groups need at least two members.
    needs_anchors: whether it reads `anchors`.
    whitens: whether its advantages are whitened over the batch by default.
  """

  needs_critic: bool = False
  needs_groups: bool = False
  needs_anchors: bool = False
  whitens: bool = False


ESTIMATORS: dict[str, Estimator] = {
  'gae': Estimator(needs_critic=True, whitens=True),
  'turn_wise_gae': Estimator(needs_critic=True, whitens=True),
  'bi_level_gae': Estimator(needs_critic=True, whitens=True),
  'grpo': Estimator(needs_groups=True),
  'dr_grpo': Estimator(needs_groups=True),
  'rloo': Estimator(needs_groups=True),
  'brpo': Estimator(),
  'arpo': Estimator(),
  'reinforce_plus_plus': Estimator(whitens=True),
  'reinforce_plus_plus_baseline': Estimator(needs_groups=True, whitens=True),
  'gigpo': Estimator(needs_groups=True, needs_anchors=True),
}


def compute_advantages(
  name: str,
  *,
  rewards: jax.Array,
  loss_mask: jax.Array,
  turn: jax.Array,
  group: jax.Array,
  scores: jax.Array | None = None,
  values: jax.Array | None = None,
  bootstrap: jax.Array | None = None,
  episode: jax.Array | None = None,
  adv_mask: jax.Array | None = None,
  anchors: jax.Array | None = None,
  gamma: float = 1.0,
  lam: float = 1.0,
  high_level_gamma: float = 0.95,
  high_level_lam: float | None = None,
  length_weight: bool = False,
  whitening: bool = True,
  step_gamma: float = 0.95,
  step_weight: float = 1.0,
  step_std: bool = False,
) -> Advantages:
  """Computes advantages with the estimator of a name.

  Under jit, `name`, `length_weight`, `whitening` and `step_std` must be static.

  Args:
    name: one of `ESTIMATORS`.
    rewards: f32[B, T], reward of each turn on its last sampled token, and KL penalties on any sampled token.
    loss_mask: bool[B, T], sampled tokens; rows without any are padding.
    turn: i32[B, T], turn index, -1 outside of turns.
    group: i32[B], prompt group, any integers.
    scores: f32[B], score of each row's episode, for estimators that compare episodes. None means the sum of `rewards`;
      its rounding can differ between episodes that earned the same rewards in different turns.
    values: f32[B, T], the critic's values of the states from which tokens are sampled; for estimators with a critic.
    bootstrap: f32[B], value after the last sampled token of truncated episodes, 0 for those that terminated.
    episode: i32[B], the episode of each row; None if every row is its own episode.
    adv_mask: bool[B, T], M_adv of `masks.selective_masks`; None means `loss_mask`.
    anchors: i32[B, K], observations of the turns, for 'gigpo'; see `gigpo`.
    gamma: discount per token, for 'gae', 'bi_level_gae' and 'reinforce_plus_plus'.
    lam: decay per token; per turn for 'turn_wise_gae'.
    high_level_gamma, high_level_lam: discount and decay per turn, for 'turn_wise_gae' and 'bi_level_gae'. A decay of
      None means `lam`.
    length_weight: divide by the relative length of the episode, for 'grpo' and 'dr_grpo'.
    whitening: False switches whitening off for estimators that whiten (`Estimator.whitens`).
    step_gamma, step_weight, step_std: discount per turn, weight of the step part and division by standard deviations,
      for 'gigpo'.

  Returns:
    `Advantages`.

  Raises:
    ValueError: the name is unknown, or an array that the estimator needs is missing.
  """
  if name not in ESTIMATORS:
    raise ValueError(f'algorithm.adv_estimator is {name!r}; it may be one of {", ".join(ESTIMATORS)}')
  estimator = ESTIMATORS[name]
  if estimator.needs_critic and values is None:
    raise ValueError(f'algorithm.adv_estimator {name!r} needs values of a critic')
  if estimator.needs_anchors and anchors is None:
    raise ValueError(f'algorithm.adv_estimator {name!r} needs anchor states of the turns')
  mask = loss_mask if adv_mask is None else adv_mask
  chex.assert_rank(rewards, 2)
  chex.assert_equal_shape((rewards, loss_mask, turn, mask))
  chex.assert_shape(group, rewards.shape[:1])
  whitening = whitening and estimator.whitens

  if name == 'turn_wise_gae':  # mean and deviation over turns, not over tokens
    high_level_lam = lam if high_level_lam is None else high_level_lam
    advantages, returns = turn_wise_gae(
      rewards, values, loss_mask, turn, high_level_gamma, high_level_lam, bootstrap, episode=episode
    )
    ends = masks.turn_ends(loss_mask, turn)
    if whitening:
      advantages = over_turns(whiten(advantages, ends), loss_mask, ends)
    return Advantages(advantages, returns, ends)

  if name == 'gae':
    advantages, returns = gae(rewards, values, mask, gamma, lam, bootstrap, episode=episode, turn=turn)
  elif name == 'bi_level_gae':
    levels = (gamma, lam, high_level_gamma, high_level_lam)
    advantages, returns = bi_level_gae(
      rewards, values, mask, turn, *levels, bootstrap, loss_mask=loss_mask, episode=episode
    )
  elif name == 'reinforce_plus_plus':
    advantages = returns = discounted_returns(rewards, mask, gamma, episode=episode, turn=turn)
  else:
    if scores is None:
      scores = episode_scores(rewards, loss_mask, episode)
    returns = to_tokens(scores, mask)
    if name == 'gigpo':
      steps = {'step_gamma': step_gamma, 'step_weight': step_weight, 'scale_by_std': step_std}
      rows = {'scores': scores, 'loss_mask': loss_mask, 'episode': episode}
      advantages = gigpo(rewards, group, mask, turn, anchors, **steps, **rows)
    else:
      advantages = _from_scores(name, scores, group, mask, episode, length_weight)
  return Advantages(whiten(advantages, mask) if whitening else advantages, returns, mask)


def _from_scores(
  name: str, scores: jax.Array, group: jax.Array, mask: jax.Array, episode: jax.Array | None, length_weight: bool
) -> jax.Array:
  """The advantages, f32[B, T], of the estimators that use only the scores of episodes."""
  if name == 'rloo':
    return rloo(scores, group, mask, episode=episode)
  if name == 'brpo':
    return brpo(scores, mask, episode=episode)
  if name == 'arpo':
    return arpo(scores, mask)
  if name == 'reinforce_plus_plus_baseline':  # the group's mean is the baseline; whitening gives the scale
    return grpo(scores, group, mask, episode=episode, scale_by_std=False)
  if name in ('grpo', 'dr_grpo'):
    return grpo(scores, group, mask, episode=episode, scale_by_std=name == 'grpo', length_weight=length_weight)
  raise ValueError(f'algorithm.adv_estimator {name!r} has a row in ESTIMATORS and no function here')
