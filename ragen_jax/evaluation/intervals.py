"""What episodes amount to, with 95 % intervals over levels: episodes of one level are alike, and make one sample."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np

from ragen_jax.agent.episode import TRUNCATED, Episode, Status

_DRAWS = 2000
_SEED = 0
_TAIL = 0.025
# Numbers of a matrix of weights that are drawn at a time.
_AT_A_TIME = 1 << 20


@dataclasses.dataclass(frozen=True)
class Interval:
  """A mean and its 95 % interval; NaN where it is not known."""

  mean: float
  low: float
  high: float


def pass_at_k(successes: np.ndarray, n: int, k: int) -> np.ndarray:
  """The chance that at least one of k episodes succeeds, without bias, from n of a level.

  1 - C(n - c, k) / C(n, k), equation 1 of Chen et al. 2021 (arXiv 2107.03374).

  Args:
    successes: i32[levels], c, successes among the n episodes of each level.
    n: episodes a level.
    k: at most n.

  Returns:
    f64[levels].
  """
  return np.asarray([1 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)])[successes]


def sizes_of_k(group_size: int) -> list[int]:
  """1, 2, 4, ... up to the group's size, which is among them."""
  return sorted({2**i for i in range(group_size.bit_length())} | {group_size})


def bootstrap(numerators: np.ndarray, denominators: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """95 % intervals of sum(numerators) / sum(denominators) by a bootstrap over levels.

  Levels are drawn with replacement, always by the same chance, so that the same numbers have the same interval. Of few
  levels plain percentiles are too narrow; these are taken further out, as Student's t is further out than the normal
  distribution (the "expanded percentile" interval of Hesterberg 2015, arXiv 1411.5279).

  Args:
    numerators: f64[levels, metrics].
    denominators: f64[levels, metrics].

  Returns:
    (low, high), f64[metrics] each; NaN for a single level, or where a denominator is 0.
  """
  levels, metrics = numerators.shape
  if levels < 2:
    return np.full((metrics,), np.nan), np.full((metrics,), np.nan)
  rng, ratios = np.random.default_rng(_SEED), []
  step = max(_AT_A_TIME // levels, 1)
  for start in range(0, _DRAWS, step):
    draws = min(step, _DRAWS - start)
    chosen = rng.integers(levels, size=(draws, levels)) + levels * np.arange(draws)[:, None]
    # How often each level was drawn: [draws, levels].
    weights = np.bincount(chosen.ravel(), minlength=draws * levels).reshape(draws, levels).astype(np.float64)
    with np.errstate(invalid='ignore', divide='ignore'):
      ratios.append((weights @ numerators) / (weights @ denominators))
  tail = statistics.NormalDist().cdf(-math.sqrt(levels / (levels - 1)) * _students_t(levels - 1))
  low, high = np.quantile(np.concatenate(ratios), [tail, 1 - tail], axis=0)
  return low, high


def _students_t(freedom: int) -> float:
  """The 97.5 % quantile of Student's t, by the first terms of its expansion around the normal one's."""
  z = statistics.NormalDist().inv_cdf(1 - _TAIL)
  return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _widest_of_one_kind(levels: int) -> float:
  """How large a share of levels may be of a kind that none of so many was: 0 of n by Clopper and Pearson."""
  return 1 - _TAIL ** (1 / levels)


def level_intervals(
  episodes: Sequence[Episode], group_size: int, best: np.ndarray | None = None, *, network: bool = False
) -> dict[str, Interval]:
  """The metrics of one environment's episodes, under the names of `statistics.episode_metrics`.

  A share that is 0 (or 1) on every level would have a bootstrap interval without width. Its other end is the bound
  that Clopper and Pearson give for the share of levels on which it is not.

  Args:
    episodes: groups contiguous; a group's episodes are of one level.
    group_size: G.
    best: f32[levels], the best success possible on each; None, or NaN in it, where it is not known.
    network: the policy answers over a network, and may fail to.

  Returns:
    Name -> interval. Beside those names, `response_length` (tokens of all replies of an episode), `pass@k` for k = 1,
    2, 4, ... and G, `optimal` and `fraction_of_optimal` where the best is known, and `no_reply` (share of turns without
    one) with `network`.
  """
  levels = len(episodes) // group_size

  def by_level(values) -> np.ndarray:
    return np.asarray(list(values), np.float64).reshape(levels, group_size).sum(axis=1)

  count = np.full((levels,), float(group_size))
  wins = by_level(e.success for e in episodes)
  turns = by_level(len(e.turns) for e in episodes)
  actions = by_level(sum(len(t.actions) for t in e.turns) for e in episodes)
  shares = {
    'success': (wins, count),
    **{f'pass@{k}': (pass_at_k(wins.astype(int), group_size, k), np.ones(levels)) for k in sizes_of_k(group_size)},
    'action_is_valid': (by_level(sum(t.valid for t in e.turns) for e in episodes), turns),
    'action_is_effective': (by_level(sum(t.effective for t in e.turns) for e in episodes), actions),
    'truncated': (by_level(e.status in TRUNCATED for e in episodes), count),
  }
  errors = by_level(e.status == Status.ENV_ERROR for e in episodes)
  if episodes[0].outside or errors.any():
    shares['env_errors'] = (errors, count)
  if network:
    shares['no_reply'] = (by_level(sum(not t.answered for t in e.turns) for e in episodes), turns)
  others = {
    'score': (by_level(e.score for e in episodes), count),
    'episodic_return': (by_level(e.env_return for e in episodes), count),
    'num_actions': (actions, count),
    'num_turns': (turns, count),
    'response_length': (by_level(sum(t.tokens for t in e.turns) for e in episodes), count),
  }
  if best is not None and not np.isnan(best).any():
    best = np.asarray(best, np.float64)
    others |= {'optimal': (best, np.ones(levels)), 'fraction_of_optimal': (wins / group_size, best)}
  both = shares | others
  numerators, denominators = (np.stack([pair[i] for pair in both.values()], axis=1) for i in (0, 1))
  lows, highs = bootstrap(numerators, denominators)
  found = {}
  for i, name in enumerate(both):
    top, bottom = numerators[:, i].sum(), denominators[:, i].sum()
    mean = float(top / bottom) if bottom else math.nan
    low, high = float(lows[i]), float(highs[i])
    if name in shares and mean == 0:
      low, high = 0.0, _widest_of_one_kind(levels)
    elif name in shares and mean == 1:
      low, high = 1 - _widest_of_one_kind(levels), 1.0
    found[name] = Interval(mean, low, high)
  success = found['success']
  if 'optimal' in found and success.mean in (0, 1) and found['optimal'].mean > 0:
    scale = 1 / found['optimal'].mean
    found['fraction_of_optimal'] = Interval(success.mean * scale, success.low * scale, success.high * scale)
  return found
