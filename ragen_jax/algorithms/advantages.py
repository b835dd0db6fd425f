"""Advantage estimators by name: from rewards on the timeline to an advantage for every sampled token.

Recursive estimators (`gae.py`) run backwards over the sampled tokens of an episode. Scalar estimators
(`group_relative.py`) give all tokens of an episode one number, computed from its score and the scores of other
episodes.
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


@dataclasses.dataclass(frozen=True)
class AdvantageSettings:
  """An estimator and its options. Fields of `config.algorithm`.

  A `high_level_lam` of None means `lam`; a `critic_lam` of None means `lam` and `high_level_lam`.
  """

  adv_estimator: str
  gamma: float
  lam: float
  high_level_gamma: float
  high_level_lam: float | None
  critic_lam: float | None
  length_weight: bool
  whiten_advantages: bool
  step_gamma: float
  step_weight: float
  step_std: bool


@struct.dataclass
class AdvantageInputs:
  """The arrays that estimators read, of B rows with T columns each.

  Attributes:
    rewards: f32[B, T], reward of each turn on its last sampled token, and KL penalties on any sampled token.
    loss_mask: bool[B, T], sampled tokens; rows without any are padding.
    turn: i32[B, T], turn index, -1 outside of turns.
    group: i32[B], prompt group, any integers.
    scores: f32[B], score of each row's episode, for estimators that compare episodes. None means the sum of `rewards`;
      its rounding can differ between episodes that earned the same rewards in different turns.
    values: f32[B, T], the critic's values of the states from which tokens are sampled; for estimators with a critic.
    bootstrap: f32[B], value after the last sampled token of truncated episodes, 0 for those that terminated; None
      means 0.
    episode: i32[B], the episode of each row; None if every row is its own episode.
    adv_mask: bool[B, T], M_adv of `masks.selective_masks`; None means `loss_mask`.
    anchors: i32[B, K], observations of the turns, for 'gigpo'; see `gigpo`.
  """

  rewards: jax.Array
  loss_mask: jax.Array
  turn: jax.Array
  group: jax.Array
  scores: jax.Array | None = None
  values: jax.Array | None = None
  bootstrap: jax.Array | None = None
  episode: jax.Array | None = None
  adv_mask: jax.Array | None = None
  anchors: jax.Array | None = None


def compute_advantages(settings: AdvantageSettings, inputs: AdvantageInputs) -> Advantages:
  """Computes advantages with the estimator of a name; `settings` are static under jit.

  Raises:
    ValueError: the name is unknown, or an array that the estimator needs is missing.
  """
  s, x, name = settings, inputs, settings.adv_estimator
  if name not in ESTIMATORS:
    raise ValueError(f'algorithm.adv_estimator is {name!r}; it may be one of {", ".join(ESTIMATORS)}')
  estimator = ESTIMATORS[name]
  if estimator.needs_critic and x.values is None:
    raise ValueError(f'algorithm.adv_estimator {name!r} needs values of a critic')
  if estimator.needs_anchors and x.anchors is None:
    raise ValueError(f'algorithm.adv_estimator {name!r} needs anchor states of the turns')
  mask = x.loss_mask if x.adv_mask is None else x.adv_mask
  chex.assert_rank(x.rewards, 2)
  chex.assert_equal_shape((x.rewards, x.loss_mask, x.turn, mask))
  chex.assert_shape(x.group, x.rewards.shape[:1])
  whitens = s.whiten_advantages and estimator.whitens
  along = {'episode': x.episode, 'turn': x.turn}

  if estimator.needs_critic:
    advantages, returns = _recursive(s, x, mask, s.lam, s.high_level_lam)
    if s.critic_lam is not None:
      _, returns = _recursive(s, x, mask, s.critic_lam, s.critic_lam)
    if name == 'turn_wise_gae':  # the mean and deviation are those of turns, not of tokens
      ends = masks.turn_ends(x.loss_mask, x.turn)
      if whitens:
        advantages = over_turns(whiten(advantages, ends), x.loss_mask, ends)
      return Advantages(advantages, returns, ends)
  elif name == 'reinforce_plus_plus':
    advantages = returns = discounted_returns(x.rewards, mask, s.gamma, **along)
  else:
    scores = episode_scores(x.rewards, x.loss_mask, x.episode) if x.scores is None else x.scores
    returns = to_tokens(scores, mask)
    advantages = _from_scores(s, x, scores, mask)
  return Advantages(whiten(advantages, mask) if whitens else advantages, returns, mask)


def _recursive(
  s: AdvantageSettings, x: AdvantageInputs, mask: jax.Array, lam: float, high_level_lam: float | None
) -> tuple[jax.Array, jax.Array]:
  """Advantages and returns f32[B, T] of the estimators with a critic."""
  if s.adv_estimator == 'gae':
    return gae(x.rewards, x.values, mask, s.gamma, lam, x.bootstrap, episode=x.episode, turn=x.turn)
  if s.adv_estimator == 'turn_wise_gae':
    high_level_lam = lam if high_level_lam is None else high_level_lam
    return turn_wise_gae(
      x.rewards, x.values, x.loss_mask, x.turn, s.high_level_gamma, high_level_lam, x.bootstrap, episode=x.episode
    )
  if s.adv_estimator == 'bi_level_gae':
    levels = (s.gamma, lam, s.high_level_gamma, high_level_lam)
    return bi_level_gae(
      x.rewards, x.values, mask, x.turn, *levels, x.bootstrap, loss_mask=x.loss_mask, episode=x.episode
    )
  raise ValueError(f'algorithm.adv_estimator {s.adv_estimator!r} has a row in ESTIMATORS and no function here')


def _from_scores(s: AdvantageSettings, x: AdvantageInputs, scores: jax.Array, mask: jax.Array) -> jax.Array:
  """Advantages f32[B, T] of the estimators that compare the scores of episodes."""
  name, group, episode = s.adv_estimator, x.group, x.episode
  if name == 'rloo':
    return rloo(scores, group, mask, episode=episode)
  if name == 'brpo':
    return brpo(scores, mask, episode=episode)
  if name == 'arpo':
    return arpo(scores, mask)
  if name == 'reinforce_plus_plus_baseline':  # the group's mean is the baseline; whitening gives the scale
    return grpo(scores, group, mask, episode=episode, scale_by_std=False, length_weight=False)
  if name in ('grpo', 'dr_grpo'):
    scale = name == 'grpo'
    return grpo(scores, group, mask, episode=episode, scale_by_std=scale, length_weight=s.length_weight)
  if name == 'gigpo':
    steps = {'step_gamma': s.step_gamma, 'step_weight': s.step_weight, 'scale_by_std': s.step_std}
    rows = {'scores': scores, 'loss_mask': x.loss_mask, 'episode': episode}
    return gigpo(x.rewards, group, mask, x.turn, x.anchors, **steps, **rows)
  raise ValueError(f'algorithm.adv_estimator {name!r} has a row in ESTIMATORS and no function here')
