"""Advantage estimators by name: from rewards on the timeline to one advantage for every sampled token.

Two families. The recursive ones (`gae.py`) run backwards over the sampled tokens of an episode; the scalar ones
(`group_relative.py`) give every token of an episode the same number, made from its score and the scores of others.
`compute_advantages` is the dispatcher that the trainer uses.
"""

from __future__ import annotations

import dataclasses

import jax
from flax import struct

from ragen_jax.algorithms import masks
from ragen_jax.algorithms.gae import bi_level_gae, discounted_returns, gae, over_turns, turn_wise_gae
from ragen_jax.algorithms.group_relative import arpo, brpo, episode_scores, gigpo, grpo, rloo, spread
from ragen_jax.algorithms.masks import whiten


@struct.dataclass
class Advantages:
  """What an estimator gives.

  Attributes:
    advantages: f32[B, T], what the policy loss multiplies with, 0 off the mask.
    returns: f32[B, T], the critic's targets, made before any whitening; estimators without a critic put the
      (discounted) return of the episode there. 0 off the mask.
    value_mask: bool[B, T], the tokens on which the critic is trained.
  """

  advantages: jax.Array
  returns: jax.Array
  value_mask: jax.Array


@dataclasses.dataclass(frozen=True)
class Estimator:
  """What an estimator needs and does, for the trainer and for the checks of a config.

  Attributes:
    needs_critic: it reads `values`.
    needs_groups: it compares episodes of one prompt, so that groups of one member teach it nothing relative.
    needs_anchors: it reads `anchors`.
    whitens: its advantages are whitened over the batch, unless that is switched off.
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
  """Advantages by the name of their estimator. Under jit `name`, `length_weight`, `whitening`, `step_std` are static.

  Args:
    name: one of `ESTIMATORS`.
    rewards: f32[B, T], the turn's reward on the turn's last sampled token (and KL penalties on any).
    loss_mask: bool[B, T], the tokens that the policy sampled; rows without any are padding.
    turn: i32[B, T], turn index, -1 outside of turns.
    group: i32[B], prompt group, any integers.
    values: f32[B, T], the critic's estimates of the states from which tokens are emitted; where a critic is needed.
    bootstrap: f32[B], the value after the last sampled token of episodes that were cut off, 0 where they ended.
    episode: i32[B], the episode of each row; None if every row is its own episode.
    adv_mask: bool[B, T], M_adv of `masks.selective_masks`; None means `loss_mask`.
    anchors: i32[B, K], the turns' anchor states, for 'gigpo'.
    gamma: discount for each token: 'gae', 'bi_level_gae', 'reinforce_plus_plus'.
    lam: decay for each token; for each turn in 'turn_wise_gae'.
    high_level_gamma, high_level_lam: discount and decay for each turn: 'turn_wise_gae', 'bi_level_gae'. A None decay
      means `lam`.
    length_weight: 'grpo' and 'dr_grpo': divide by the episode's relative length.
    whitening: whiten the advantages of those estimators that do so (`Estimator.whitens`).
    step_gamma, step_weight, step_std: 'gigpo': discount for each turn, weight of the step part, division by deviations.

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
  whitening = whitening and estimator.whitens

  if estimator.needs_critic:
    value_mask = mask
    if name == 'gae':
      advantages, returns = gae(rewards, values, mask, gamma, lam, bootstrap, episode=episode, turn=turn)
    elif name == 'bi_level_gae':
      advantages, returns = bi_level_gae(
        rewards,
        values,
        mask,
        turn,
        gamma,
        lam,
        high_level_gamma,
        high_level_lam,
        bootstrap,
        loss_mask=loss_mask,
        episode=episode,
      )
    else:
      high_level_lam = lam if high_level_lam is None else high_level_lam
      advantages, returns = turn_wise_gae(
        rewards, values, loss_mask, turn, high_level_gamma, high_level_lam, bootstrap, episode=episode
      )
      value_mask = masks.turn_ends(loss_mask, turn)
      if whitening:  # the statistics are those of turns, not of tokens
        advantages, whitening = over_turns(whiten(advantages, value_mask), loss_mask, value_mask), False
    return Advantages(whiten(advantages, mask) if whitening else advantages, returns, value_mask)

  scores = episode_scores(rewards, loss_mask, episode)
  returns = spread(scores, mask)
  if name in ('grpo', 'dr_grpo'):
    advantages = grpo(scores, group, mask, episode=episode, scale_by_std=name == 'grpo', length_weight=length_weight)
  elif name == 'rloo':
    advantages = rloo(scores, group, mask, episode=episode)
  elif name == 'brpo':
    advantages = brpo(scores, mask, episode=episode)
  elif name == 'arpo':
    advantages = arpo(scores, mask)
  elif name == 'gigpo':
    advantages = gigpo(
      rewards,
      group,
      mask,
      turn,
      anchors,
      step_gamma=step_gamma,
      step_weight=step_weight,
      scale_by_std=step_std,
      loss_mask=loss_mask,
      episode=episode,
    )
  elif name == 'reinforce_plus_plus':
    advantages = returns = discounted_returns(rewards, mask, gamma, episode=episode, turn=turn)
  else:  # 'reinforce_plus_plus_baseline': the group's mean is the baseline, the batch gives the scale
    advantages = grpo(scores, group, mask, episode=episode, scale_by_std=False)
  return Advantages(whiten(advantages, mask) if whitening else advantages, returns, mask)
