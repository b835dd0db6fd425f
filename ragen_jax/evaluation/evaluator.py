"""Evaluation on fixed held-out levels, against the best that any policy can reach on them."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.agent_proxy import Rollout
from ragen_jax.agent.language_model import LanguageModel
from ragen_jax.agent.metrics import episode_metrics
from ragen_jax.agent.trajectory import Episode
from ragen_jax.distributed import processes
from ragen_jax.envs import TextEnvironment
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.viewer.records import episode_records, first_rows

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Evaluation:
  """What an evaluation gives.

  Attributes:
    metrics: by name; `val-env/<tag>/...` sampled, `val-greedy/<tag>/...` with the likeliest token everywhere,
      `val-env/<tag>/optimal` the best possible success and `.../fraction_of_optimal` how much of it was reached, where
      the environment has a solver.
    episodes: those that were sampled.
    records: what the trajectory viewer keeps of them and of the greedy ones, see `agent.record`.
  """

  metrics: dict[str, float]
  episodes: list[Episode]
  records: list[dict[str, Any]]


class Evaluator:
  """Plays the same levels with the same luck each time."""

  def __init__(self, config: ConfigDict, policy: LanguageModel):
    """Builds the environments; the optimum is solved for at the first call."""
    self._config = config
    tags = tuple(config.eval.tags)
    specs = build.env_groups(config, tags, build.group_counts(config.eval, 'eval'))
    self._proxy = build.agent_proxy(config, policy.tokenizer, policy.sampler, specs, config.eval.group_size)
    self._share = policy.sampler.share
    self._tokenizer = policy.tokenizer
    self._shown = first_rows(specs, config.eval.group_size, config.logging.episodes, one_a_level=True)
    self._has_values = policy.sampler.values
    self._optimal: dict[str, float] = {}

  def _play(self, params: Any, sampling: Sampling) -> Rollout:
    key = jax.random.key(self._config.eval.first_level)
    return self._proxy.rollout(params, self._config.eval.first_level, key, sampling, pictured=self._shown)

  def held_out(self) -> frozenset[bytes]:
    """The levels, for `EnvStateManager(held_out=...)`; all processes must call."""
    levels = self._proxy.envs.levels_from(self._config.eval.first_level)
    return frozenset().union(*processes.gather_shares(levels, self._share))

  def optimal(self) -> dict[str, float]:
    """Mean best success on the levels, by tag; NaN where it is not known."""
    if not self._optimal:
      envs = self._proxy.envs
      envs.reset(self._config.eval.first_level)
      parts = processes.gather_shares((self._best(), envs.row_env), self._share)
      best, env = (np.concatenate(x) for x in zip(*parts, strict=True))
      self._optimal = {s.tag: float(np.mean(best[env == i])) for i, s in enumerate(envs.specs)}
    return self._optimal

  def _best(self) -> np.ndarray:
    """f32[B], the best success on the fresh level of each row of this share; NaN where it is not known."""
    envs = self._proxy.envs
    best = np.full((envs.rows,), np.nan, np.float32)
    for i in np.unique(envs.row_env).tolist():
      spec = envs.specs[i]
      if isinstance(spec.env, TextEnvironment):
        continue
      one_a_group = jax.tree.map(lambda x: np.asarray(x)[:: envs.group_size], envs.pool_states(i))
      try:
        solved = spec.env.optimal(one_a_group, spec.budget)
      except ValueError as e:  # the solver cannot do a game or a budget of this size
        _log.warning('envs.%s: the best possible success is not known (%s)', spec.tag, e)
        continue
      best[envs.row_env == i] = np.repeat(np.asarray(solved, np.float32), envs.group_size)
    return best

  def _records(self, rollout: Rollout, step: int, split: str) -> list[dict[str, Any]]:
    return episode_records(
      rollout,
      self._shown,
      self._tokenizer,
      step=step,
      split=split,
      group_size=self._config.eval.group_size,
      reply_prefix=self._proxy.context.reply_prefix,
      values=rollout.trajectory.values if self._has_values else None,
    )

  def episodes(self, params: Any, step: int = 0) -> tuple[list[Episode], list[Episode], list[dict[str, Any]]]:
    """Plays the levels.

    Args:
      params: the weights.
      step: the number of iterations behind them, for the records.

    Returns:
      The sampled episodes, the greedy ones (none without `eval.greedy_too`), and the records of both.
    """
    sampled = self._play(params, build.sampling(self._config.eval))
    records, greedy = self._records(sampled, step, 'val'), []
    if self._config.eval.greedy_too:
      rollout = self._play(params, Sampling(temperature=0.0))
      greedy = rollout.episodes
      records += self._records(rollout, step, 'val-greedy')
    return sampled.episodes, greedy, records

  def __call__(self, params: Any, step: int = 0) -> Evaluation:
    """Evaluates weights; arguments as for `episodes`."""
    size = self._config.eval.group_size
    sampled, greedy, records = self.episodes(params, step)
    metrics = episode_metrics(sampled, size, 'val-env')
    for tag, best in self.optimal().items():
      if not np.isnan(best):
        metrics[f'val-env/{tag}/optimal'] = best
        metrics[f'val-env/{tag}/fraction_of_optimal'] = metrics[f'val-env/{tag}/success'] / best if best else 0.0
    return Evaluation(metrics | episode_metrics(greedy, size, 'val-greedy'), sampled, records)


def success_by_tag(metrics: dict[str, float], tags: tuple[str, ...]) -> dict[str, float]:
  """Sampled success of each tag."""
  return {tag: metrics[f'val-env/{tag}/success'] for tag in tags}


def mean_success(metrics: dict[str, float], tags: tuple[str, ...]) -> float:
  """Sampled success averaged over tags."""
  return float(np.mean(list(success_by_tag(metrics, tags).values())))
