"""Metrics of episodes, with RAGEN's names. This module is their only definition.

A metric is a ratio of two sums over episodes. Training and evaluation divide the sums; the intervals of
`evaluation.intervals` resample the same rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from ragen_jax.agent.episode import TRUNCATED, Episode, Status
from ragen_jax.agent.world_model.formats import OBSERVATION, PREDICTION
from ragen_jax.envs.base import OF


def _always(episode: Episode) -> bool:
  del episode
  return True


@dataclasses.dataclass(frozen=True)
class EpisodeMetric:
  """A metric: the sum of `numerator` over all episodes, divided by the sum of `denominator`.

  Attributes:
    is_share: whether the metric lies between 0 and 1.
    applies: whether episodes like this one have the metric.
  """

  numerator: Callable[[Episode], float]
  denominator: Callable[[Episode], float]
  is_share: bool = False
  applies: Callable[[Episode], bool] = _always


def _one(episode: Episode) -> int:
  del episode
  return 1


def _num_turns(episode: Episode) -> int:
  return len(episode.turns)


def _num_actions(episode: Episode) -> int:
  return sum(len(turn.actions) for turn in episode.turns)


def _score_of(section: str) -> EpisodeMetric:
  """Mean score of the descriptions in the replies that are of their form and have valid actions."""
  return EpisodeMetric(
    lambda e: sum(t.reply_reward.scores.get(section, 0.0) for t in e.turns),
    lambda e: sum(section in t.reply_reward.scores for t in e.turns),
    is_share=True,
    applies=lambda e: section in e.graded,
  )


METRICS = {
  'success': EpisodeMetric(lambda e: e.success, _one, is_share=True),
  'score': EpisodeMetric(lambda e: e.score, _one),
  'episodic_return': EpisodeMetric(lambda e: e.env_return, _one),
  'num_actions': EpisodeMetric(_num_actions, _one),
  'num_turns': EpisodeMetric(_num_turns, _one),
  'action_is_valid': EpisodeMetric(lambda e: sum(t.valid for t in e.turns), _num_turns, is_share=True),
  'action_is_effective': EpisodeMetric(lambda e: sum(t.effective for t in e.turns), _num_actions, is_share=True),
  'format_correct': EpisodeMetric(
    lambda e: sum(bool(t.sections) for t in e.turns), _num_turns, is_share=True, applies=lambda e: bool(e.form)
  ),
  'observation_score': _score_of(OBSERVATION),
  'prediction_score': _score_of(PREDICTION),
  'state_reward': EpisodeMetric(
    lambda e: sum(t.reply_reward.state_reward for t in e.turns), _one, applies=lambda e: bool(e.graded)
  ),
  'truncated': EpisodeMetric(lambda e: e.status in TRUNCATED, _one, is_share=True),
  'env_errors': EpisodeMetric(lambda e: e.status == Status.ENV_ERROR, _one, is_share=True),
  # Metrics of evaluations only.
  'no_reply': EpisodeMetric(lambda e: sum(not t.answered for t in e.turns), _num_turns, is_share=True),
  'response_length': EpisodeMetric(lambda e: sum(t.tokens for t in e.turns), _one),
}
# Names of the metrics of a tag, which those that its environment reports cannot have.
NAMES = frozenset({*METRICS, 'optimal', 'fraction_of_optimal'})
# Metrics of the form of replies and of the descriptions in them.
OF_REPLIES = ('format_correct', 'observation_score', 'prediction_score', 'state_reward')
_EVALUATION_ONLY = ('no_reply', 'response_length')


def pass_at_k(successes: np.ndarray, n: int, k: int) -> np.ndarray:
  """f64[levels], unbiased estimates of the probability that at least one of k episodes of a level succeeds.

  1 - C(n - c, k) / C(n, k), equation 1 of Chen et al. 2021 (arXiv 2107.03374), with n >= k episodes of each level, of
  which c, i32[levels], are successes.
  """
  return np.asarray([1 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)])[successes]


def k_values(group_size: int) -> list[int]:
  """The k of pass@k: 1, 2, 4, ... and the group size."""
  return sorted({2**i for i in range(group_size.bit_length())} | {group_size})


def _reported(name: str, is_ratio: bool) -> EpisodeMetric:
  """A metric that an environment reports: of an episode, the sum over its actions, 0 if it reports nothing."""

  def total(name: str) -> Callable[[Episode], float]:
    return lambda e: math.fsum(t.metrics.get(name, 0.0) for t in e.turns)

  return EpisodeMetric(total(name), total(name + OF) if is_ratio else _one)


def is_reported(name: str) -> bool:
  """Whether a metric of `metric_rows` or of `evaluation.intervals` is one that an environment reports."""
  return name not in NAMES and not name.startswith('pass@')


def metric_rows(episodes: Sequence[Episode], group_size: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Numerators and denominators of every metric.

  The episodes are those of one environment, with contiguous groups; a group's episodes play one level.

  Returns:
    Name -> (numerators, denominators), f64[levels, G] each; f64[levels, 1] for `pass@k`, which is a property of a
    level. `env_errors` is included for environments outside JAX, and if an environment failed. Metrics that the
    environment reports are included if it did so in one of the episodes, in the order of their names.
  """
  rows = {}
  names = {name for e in episodes for turn in e.turns for name in turn.metrics}
  reported = {name: _reported(name, name + OF in names) for name in sorted(names) if not name.endswith(OF)}
  for name, metric in (METRICS | reported).items():
    if not metric.applies(episodes[0]):
      continue
    parts = ([part(e) for e in episodes] for part in (metric.numerator, metric.denominator))
    rows[name] = tuple(np.asarray(part, np.float64).reshape(-1, group_size) for part in parts)
  wins = rows['success'][0].sum(axis=1)
  for k in k_values(group_size):
    rows[f'pass@{k}'] = (pass_at_k(wins.astype(int), group_size, k)[:, None], np.ones((len(wins), 1)))
  if not (episodes[0].outside or rows['env_errors'][0].any()):
    del rows['env_errors']
  return rows


def is_share(name: str) -> bool:
  """Whether a metric of `metric_rows` lies between 0 and 1."""
  return name.startswith('pass@') or (name in METRICS and METRICS[name].is_share)


def episode_metrics(episodes: list[Episode], group_size: int, prefix: str) -> dict[str, float]:
  """Means over episodes, for each environment tag; the groups are contiguous. A ratio with the denominator 0 is 0.

  Returns:
    `<prefix>/<tag>/success`, `.../pass@G`, `.../score` (with penalties), `.../episodic_return` (without),
    `.../num_actions`, `.../num_turns`, `.../action_is_valid` (share of turns) and `.../action_is_effective` (share of
    actions), `.../truncated` (share of episodes that ran out of turns, actions or context), and, for environments
    outside JAX or if an environment failed, `.../env_errors` (share of episodes whose environment failed).
    `.../format_correct` (share of replies that are of their form), if replies have one; if they describe states,
    `.../observation_score`, `.../prediction_score` and `.../state_reward` (mean over episodes). `.../NAME` for each
    metric that the environment reports (mean over episodes of the sum over an episode's actions; of a ratio, the sum of
    the numerators divided by that of the denominators).
  """
  metrics = {}
  left_out = {*_EVALUATION_ONLY, *(f'pass@{k}' for k in k_values(group_size)[:-1])}
  for tag in dict.fromkeys(e.tag for e in episodes):
    for name, parts in metric_rows([e for e in episodes if e.tag == tag], group_size).items():
      if name not in left_out:
        top, bottom = (float(part.ravel().sum()) for part in parts)
        metrics[f'{prefix}/{tag}/{name}'] = top / bottom if bottom else 0.0
  return metrics
