"""The reward of a described state, computed exactly from the environment's state, without a judge.

A description is compared with the truth for each kind of thing. Claims and things are paired so that the credit is
largest: 1 for a pair that agrees in both parts of the relation, 1/2 for one part. With c claims and t things the score
of the kind is F1 = 2 credit / (c + t). Kinds that neither the text nor the board has are left out; the others are
averaged with weights. `above_floor` subtracts what a description that does not look at the board reaches.

Source: VAGEN's world-model reward (arXiv 2510.16907), with the `exact` scorer of its later code.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping

import numpy as np

from ragen_jax.agent.world_model.descriptions import read_claims, true_relations
from ragen_jax.agent.world_model.formats import OBSERVATION, PREDICTION, Sections
from ragen_jax.envs.scenes import Scene

# Where the reward of a section is paid.
PLACES = ('turn', 'section')


@dataclasses.dataclass(frozen=True)
class ReplyRewardSettings:
  """Fields of `config.reward`."""

  format_reward: float
  state_reward: float
  state_floor: float
  state_place: str


@dataclasses.dataclass(frozen=True)
class ReplyReward:
  """The rewards of a reply, besides those of its actions.

  Attributes:
    scores: described section -> score, 0 to 1, before the floor is subtracted; empty without the form or valid actions.
    rewards: described section -> reward.
  """

  format_reward: float
  scores: Mapping[str, float]
  rewards: Mapping[str, float]

  @property
  def state_reward(self) -> float:
    """Sum of the rewards of the sections."""
    return math.fsum(self.rewards.values())


NO_REWARD = ReplyReward(0.0, {}, {})


def score_turn(
  sections: Sections,
  actions_valid: bool,
  before: Scene | None,
  after: Scene | None,
  settings: ReplyRewardSettings,
) -> ReplyReward:
  """The rewards of a reply: its observation is compared with the state before it, its prediction with the state after.

  The states before and after all actions of the turn are None for a game without scenes. `actions_valid` tells whether
  the reply has at least one action and all its actions exist.
  """
  if not (sections.correct and actions_valid):
    return NO_REWARD
  scores = {
    name: score_description(sections.texts[name], scene)
    for name, scene in ((OBSERVATION, before), (PREDICTION, after))
    if scene is not None and name in sections.texts
  }
  rewards = {name: settings.state_reward * above_floor(score, settings.state_floor) for name, score in scores.items()}
  return ReplyReward(settings.format_reward, scores, rewards)


def above_floor(score: float, floor: float) -> float:
  """The part of a score above the floor, stretched to 0..1."""
  return max(0.0, (score - floor) / (1 - floor))


def score_description(text: str, scene: Scene) -> float:
  """How well a text describes a scene, 0 to 1; 1 exactly if its claims are the true ones, in any order."""
  claims, truth = read_claims(text, scene.words), true_relations(scene)
  nothing = np.zeros(scene.words.shape, np.int64)
  total = weight = 0.0
  for kind in scene.words.kinds:
    claimed, true = claims[kind], truth.get(kind, nothing)
    if claimed.sum() + true.sum():
      own = scene.weight(kind)
      total += own * f1(claimed, true)
      weight += own
  return total / weight if weight else 0.0


def f1(claimed: np.ndarray, true: np.ndarray) -> float:
  """The score of one kind, from i64[R, C] numbers of claims and of things by relation, of which one is not empty."""
  # Pairs that agree in both parts come first: exchanging partners for one never lowers the credit.
  full = np.minimum(claimed, true)
  half = _most_pairs(claimed - full, true - full)
  return float((2 * full.sum() + half) / (claimed.sum() + true.sum()))


def _most_pairs(claimed: np.ndarray, true: np.ndarray) -> int:
  """The most pairs that share a row or a column of the relations, each used at most as often as counted, i64[R, C].

  By max-flow min-cut it is the smallest cut: claims outside a set of relations, and things that share a part with it.
  The smallest cut has a set of all relations in some rows and some columns. For a set of columns, each row is chosen by
  itself, so there are 2^C sets to compare.
  """
  columns = _subsets(claimed.shape[1])  # [C, 2^C]
  within = claimed @ ~columns + true.sum(1, keepdims=True)  # [R, 2^C]
  without = claimed.sum(1, keepdims=True) + true @ columns
  return int(np.minimum(within, without).sum(0).min())


@functools.cache
def _subsets(count: int) -> np.ndarray:
  """bool[count, 2^count], all sets of so many things."""
  return np.array(list(itertools.product((False, True), repeat=count))).T
