"""Evaluation of weights on fixed held-out levels, compared with the best that any policy can reach on them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from ragen_jax.agent import finite
from ragen_jax.agent.episode import Episode
from ragen_jax.agent.language_model import LanguageModel
from ragen_jax.agent.metrics import episode_metrics
from ragen_jax.agent.player import Player
from ragen_jax.agent.rollout import Rollout
from ragen_jax.sampling.draw import GREEDY
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.viewer.records import Played, episode_records, first_rows


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
  """How levels are played in an evaluation. Fields of `config.eval`, and the following.

  Attributes:
    episodes: number of episodes of each environment that are recorded for the trajectory viewer.
  """

  first_level: int
  group_size: int
  temperature: float
  top_p: float
  top_k: int
  greedy_too: bool
  episodes: int

  @property
  def sampling(self) -> Sampling:
    return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


@dataclasses.dataclass
class Evaluation:
  """The result of an evaluation.

  Attributes:
    metrics: name -> value: `val-env/<tag>/...` of sampled episodes, `val-greedy/<tag>/...` of greedy episodes, and for
      environments with a solver `val-env/<tag>/optimal`, the best possible success, and
      `val-env/<tag>/fraction_of_optimal`, the sampled success divided by it.
    episodes: the sampled episodes.
    records: records of sampled and greedy episodes for the trajectory viewer; see `viewer.schema`.
    not_finite: text about log-probs, entropies and values of the policy that are not finite; '' if all are finite.
  """

  metrics: dict[str, float]
  episodes: list[Episode]
  records: list[dict[str, Any]]
  not_finite: str = ''


class Evaluator:
  """Plays the same levels with the same random numbers at each call, and tells the model's observer of them."""

  def __init__(self, settings: EvaluationSettings, player: Player, model: LanguageModel):
    """Plays nothing; the best possible success is computed at the first call."""
    self._settings, self._player, self._observer = settings, player, model.sampler.observer
    self._tokenizer, self._has_values = model.tokenizer, model.sampler.values
    self._recorded = first_rows(player.specs, settings.group_size, settings.episodes, one_a_level=True)
    self._optimal: dict[str, float] = {}

  def _play(self, params: Any, sampling: Sampling, step: int) -> Rollout:
    first = self._settings.first_level
    return self._player.play(
      params, jax.random.key(first), sampling, first, policy_version=step, pictured=self._recorded
    )

  def held_out(self) -> frozenset[bytes]:
    """The levels, for `EnvStateManager(held_out=...)`. All processes must call."""
    return self._player.levels(self._settings.first_level)

  def optimal(self) -> dict[str, float]:
    """Best possible success probability by tag, averaged over the levels; NaN if unknown."""
    if not self._optimal:
      self._optimal = self._player.optimal(self._settings.first_level)
    return self._optimal

  def _records(self, rollout: Rollout, step: int, split: str) -> list[dict[str, Any]]:
    return episode_records(
      Played(rollout, self._tokenizer, step, split, self._settings.group_size),
      self._recorded,
      reply_prefix=self._player.reply_prefix,
      values=rollout.trajectory.values if self._has_values else None,
    )

  def episodes(self, params: Any, step: int = 0) -> tuple[list[Episode], list[Episode], list[dict[str, Any]], str]:
    """Plays the levels; `step` is the number of iterations that led to the weights, for the records.

    Returns:
      The sampled episodes, the greedy episodes (none without `greedy_too`), the records of both, and a text about
      numbers of both that are not finite.
    """
    sampled = self._play(params, self._settings.sampling, step)
    self._observer.played(sampled, step)
    records, greedy = self._records(sampled, step, 'val'), []
    not_finite = [finite.describe(finite.of_rollout(sampled).values())]
    if self._settings.greedy_too:
      rollout = self._play(params, GREEDY, step)
      greedy = rollout.episodes
      records += self._records(rollout, step, 'val-greedy')
      if found := finite.of_rollout(rollout):
        not_finite.append(f'with greedy decoding {finite.describe(found.values())}')
    return sampled.episodes, greedy, records, ', '.join(text for text in not_finite if text)

  def __call__(self, params: Any, step: int = 0) -> Evaluation:
    """Evaluates weights; arguments as for `episodes`."""
    size = self._settings.group_size
    sampled, greedy, records, not_finite = self.episodes(params, step)
    metrics = episode_metrics(sampled, size, 'val-env')
    for tag, best in self.optimal().items():
      if not np.isnan(best):
        metrics[f'val-env/{tag}/optimal'] = best
        metrics[f'val-env/{tag}/fraction_of_optimal'] = metrics[f'val-env/{tag}/success'] / best if best else 0.0
    metrics |= episode_metrics(greedy, size, 'val-greedy')
    return Evaluation(metrics, sampled, records, not_finite)
