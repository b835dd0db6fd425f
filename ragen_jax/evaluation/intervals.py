"""Episode metrics with 95 % intervals over levels. Episodes of a level are correlated, so a level is one sample."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from ragen_jax.agent.episode import Episode
from ragen_jax.agent.metrics import is_share, metric_rows

_DRAWS = 2000
_SEED = 0
_TAIL = 0.025
# Maximum size of a weight matrix of the bootstrap, in numbers.
_WEIGHTS_AT_ONCE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Interval:
  """A mean and its 95 % interval; NaN if unknown."""

  mean: float
  low: float
  high: float


def bootstrap(numerators: np.ndarray, denominators: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """95 % intervals of sum(numerators) / sum(denominators), f64[levels, metrics] each, by a bootstrap over levels.

  Levels are drawn with replacement and a fixed seed, so the same numbers give the same interval. Plain percentiles are
  too narrow for few levels. They are therefore expanded by the ratio of Student's t to the normal distribution
  ("expanded percentile" interval, Hesterberg 2015, arXiv 1411.5279).

  Draws in which the denominator is 0, such as those without any level of a rare kind, are left out.

  Returns (low, high), f64[metrics] each; NaN for a single level or a denominator of 0.
  """
  levels, metrics = numerators.shape
  if levels < 2:
    return np.full((metrics,), np.nan), np.full((metrics,), np.nan)
  rng, ratios = np.random.default_rng(_SEED), []
  step = max(_WEIGHTS_AT_ONCE // levels, 1)
  for start in range(0, _DRAWS, step):
    draws = min(step, _DRAWS - start)
    chosen = rng.integers(levels, size=(draws, levels)) + levels * np.arange(draws)[:, None]
    # The number of times that each level was drawn: [draws, levels].
    weights = np.bincount(chosen.ravel(), minlength=draws * levels).reshape(draws, levels).astype(np.float64)
    with np.errstate(invalid='ignore', divide='ignore'):
      ratios.append((weights @ numerators) / (weights @ denominators))
  tail = stats.norm.cdf(math.sqrt(levels / (levels - 1)) * stats.t.ppf(_TAIL, levels - 1))
  return tuple(np.stack([_quantiles(drawn, tail) for drawn in np.concatenate(ratios).T], axis=1))


def _quantiles(drawn: np.ndarray, tail: float) -> np.ndarray:
  """f64[2], the quantiles at both tails of the ratios that are known; NaN if none is."""
  known = drawn[~np.isnan(drawn)]
  return np.quantile(known, [tail, 1 - tail]) if known.size else np.full((2,), np.nan)


def _bound_without_successes(levels: int) -> float:
  """Upper 97.5 % Clopper-Pearson bound for a proportion with 0 successes in `levels` trials."""
  return stats.binomtest(0, levels).proportion_ci(1 - 2 * _TAIL, method='exact').high


def level_intervals(
  episodes: Sequence[Episode], group_size: int, best: np.ndarray | None = None, *, network: bool = False
) -> dict[str, Interval]:
  """Metrics of one environment's episodes, with contiguous groups, under the names of `agent.metrics`.

  A share that is 0 (or 1) on every level has a bootstrap interval without width. Its other end is then the
  Clopper-Pearson bound for the share of levels on which it is not 0 (or 1).

  Args:
    best: f32[levels], the best possible success probability on each level; None or NaN if unknown.
    network: whether the policy answers over a network, so that replies can be lost.

  Returns:
    Name -> interval, for the metrics of `episode_metrics` and for `response_length` (tokens of all replies of an
    episode), `pass@k` for k = 1, 2, 4, ... and G, `optimal` and `fraction_of_optimal` if the best is known, and
    `no_reply` (share of turns without a reply) with `network`.
  """
  rows = metric_rows(episodes, group_size)
  if not network:
    del rows['no_reply']
  by_level = {name: tuple(part.sum(axis=1) for part in parts) for name, parts in rows.items()}
  shares = [name for name in by_level if is_share(name)]
  if best is not None and not np.isnan(best).any():
    best = np.asarray(best, np.float64)
    by_level['optimal'] = (best, np.ones(len(best)))
    by_level['fraction_of_optimal'] = (by_level['success'][0] / group_size, best)
  numerators, denominators = (np.stack([parts[i] for parts in by_level.values()], axis=1) for i in (0, 1))
  lows, highs = bootstrap(numerators, denominators)
  found, bound = {}, _bound_without_successes(len(numerators))
  for i, name in enumerate(by_level):
    top, bottom = numerators[:, i].sum(), denominators[:, i].sum()
    mean = float(top / bottom) if bottom else math.nan
    low, high = float(lows[i]), float(highs[i])
    if name in shares and mean == 0:
      low, high = 0.0, bound
    elif name in shares and mean == 1:
      low, high = 1 - bound, 1.0
    found[name] = Interval(mean, low, high)
  success = found['success']
  if 'optimal' in found and success.mean in (0, 1) and found['optimal'].mean > 0:
    scale = 1 / found['optimal'].mean
    found['fraction_of_optimal'] = Interval(success.mean * scale, success.low * scale, success.high * scale)
  return found
