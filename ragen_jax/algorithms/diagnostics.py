"""Metrics that show whether a run is healthy or about to collapse; `collapse.py` has the rules that act on them.

All functions but `ratio_counts` run on the host.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.algorithms.filters import group_scores

# --- averages over time -----------------------------------------------------------------------------------------------


@struct.dataclass
class Ema:
  """An exponential moving average without a bias towards its initial value.

  Attributes:
    total: f64[], sum of decay^age (1 - decay) x.
    weight: f64[], sum of the weights decay^age (1 - decay); 0 before the first value.
  """

  total: float = 0.0
  weight: float = 0.0

  @property
  def value(self) -> float:
    """The average; NaN before the first value."""
    return self.total / self.weight if self.weight > 0 else math.nan

  def update(self, x: float, decay: float) -> Ema:
    """The average after one more value, or unchanged if x is not finite. With decay 0 it is the last value."""
    if not math.isfinite(x):
      return self
    return Ema(decay * self.total + (1 - decay) * float(x), decay * self.weight + (1 - decay))


def update_emas(
  emas: Mapping[str, Ema], metrics: Mapping[str, float], decay: float
) -> tuple[dict[str, Ema], dict[str, float]]:
  """Updates one moving average per metric, or creates it; also gives '<metric>_ema' -> value."""
  emas = dict(emas) | {name: emas.get(name, Ema()).update(x, decay) for name, x in metrics.items()}
  return emas, {f'{name}_ema': emas[name].value for name in metrics}


# --- probability ratios -----------------------------------------------------------------------------------------------

_LOG_EDGES = np.geomspace(1e-4, math.log(10), 32)
# Finest around 1, because ratios of sequences (GSPO) differ from 1 by about 1e-4.
RATIO_EDGES = np.exp(np.concatenate([-_LOG_EDGES[::-1], _LOG_EDGES]))  # f64[64], 0.1 to 10


def ratio_counts(ratio: jax.Array, mask: jax.Array) -> jax.Array:
  """Histogram of probability ratios f32[B, T] in the mask; bins are fixed, so counts of micro-batches can be added.

  The counts i32[63] are between adjacent `RATIO_EDGES`; the outermost bins also count ratios beyond the edges.
  """
  reached = jnp.sum(mask[..., None] & (ratio[..., None] >= RATIO_EDGES[1:-1].astype(np.float32)), axis=(0, 1))
  whole = jnp.sum(mask)[None]
  return jnp.concatenate([whole, reached]) - jnp.concatenate([reached, jnp.zeros_like(whole)])


# --- rewards within groups, sampler against trainer -------------------------------------------------------------------


def in_group_reward(
  scores: np.ndarray, group: np.ndarray, valid: np.ndarray, episode: np.ndarray | None = None
) -> dict[str, float]:
  """Means over groups of the in-group standard deviation (unbiased), maximum and mean of raw scores.

  Arguments are those of `filters.group_scores`. `rollout/in_group_reward_std`, `_max` and `_mean` are NaN if there is
  no valid row. Source: RAGEN, arXiv 2504.20073, the first sign of collapse.
  """
  names = ('std', 'max', 'mean')
  if not np.any(valid):
    return {f'rollout/in_group_reward_{name}': math.nan for name in names}
  of = {'std': group_scores('reward_std', group, valid, scores=scores, episode=episode)[1]}
  of['mean'] = group_scores('reward', group, valid, scores=scores, episode=episode)[1]
  valid = np.asarray(valid, bool)
  members, group = np.asarray(scores)[valid], np.asarray(group)[valid]
  of['max'] = np.array([members[group == g].max() for g in np.unique(group)])
  return {f'rollout/in_group_reward_{name}': float(of[name].mean()) for name in names}


def reward_std_buckets(std: np.ndarray, *, mode: str, count: int) -> np.ndarray:
  """The bucket i32[G] of each group by its in-group reward deviation f64[G], to compare the gradients of buckets.

  Mode 'quantile' makes buckets of equal size by rank; 'fixed_rv' has the buckets [0, 1), [1, 2), ..., the last one
  without an upper limit. Bucket 0 has the smallest deviations. Source: RAGEN-2's gradient analysis.

  Raises:
    ValueError: the mode is unknown.
  """
  std = np.asarray(std, np.float64)
  if mode == 'quantile':
    rank = np.argsort(np.argsort(std, kind='stable'), kind='stable')
    return (rank * count // max(len(std), 1)).astype(np.int32)
  if mode == 'fixed_rv':
    return np.minimum(np.floor(std), count - 1).astype(np.int32)
  raise ValueError(f'monitor.bucket_mode is {mode!r}; it may be one of quantile, fixed_rv')


def logprob_gap(trainer_logprobs: np.ndarray, sampler_logprobs: np.ndarray, mask: np.ndarray) -> dict[str, float]:
  """Difference between the log-probs f32[B, T] of sampler and trainer for the same tokens and weights, over the mask.

  `rollout/logprob_gap_mean` and `_max` are those of the absolute difference in nats. The correlation
  `rollout/logprob_pearson` is 1 if both agree up to rounding, and NaN if either is constant.
  """
  mask = np.asarray(mask, bool)
  x, y = (np.asarray(z, np.float64)[mask] for z in (trainer_logprobs, sampler_logprobs))
  if not len(x):
    return {'rollout/logprob_gap_mean': 0.0, 'rollout/logprob_gap_max': 0.0, 'rollout/logprob_pearson': math.nan}
  gap = np.abs(x - y)
  dx, dy = x - x.mean(), y - y.mean()
  norm = math.sqrt(float(dx @ dx) * float(dy @ dy))
  return {
    'rollout/logprob_gap_mean': float(gap.mean()),
    'rollout/logprob_gap_max': float(gap.max()),
    'rollout/logprob_pearson': float(dx @ dy) / norm if norm > 0 else math.nan,
  }


def repeated_replies(replies: Sequence[Hashable], group: np.ndarray) -> float:
  """The probability that two random replies to *different* prompts are equal, a sign of template replies.

  The N replies, of the prompts `group` i32[N], are compared by equality: the text or the tuple of sampled ids of a
  turn, or of its reasoning. 0 if there is only one prompt.
  """
  _, groups = np.unique(np.asarray(group), return_inverse=True)
  distinct: dict[Hashable, int] = {}
  kinds = np.array([distinct.setdefault(reply, len(distinct)) for reply in replies], np.int64)
  if not len(kinds):
    return 0.0

  def pairs_across(of: np.ndarray) -> float:
    """Number of ordered pairs with equal values in `of` and different groups."""
    _, cell = np.unique(of * (groups.max() + 1) + groups, return_counts=True)
    return float((np.bincount(of).astype(np.float64) ** 2).sum() - (cell.astype(np.float64) ** 2).sum())

  every = pairs_across(np.zeros_like(kinds))
  return pairs_across(kinds) / every if every > 0 else 0.0


# --- mutual information between prompts and reasoning -----------------------------------------------------------------


# The k of the retrieval accuracies.
_RETRIEVAL_KS = (1, 2, 4, 8)
# Lower limit of the deviation that divides in `mi_zscore`.
_MIN_STD = 1e-3


def mutual_information(
  cross_scores: np.ndarray, own: np.ndarray, *, lengths: np.ndarray | None = None
) -> dict[str, float]:
  """RAGEN-2's estimates of how much the reasoning depends on the prompt, from one matrix of cross scores.

  With l[z, x] = log p(reasoning z | prompt x) over N pieces of reasoning and M different prompts: matched =
  l[z, own(z)], marginal = logsumexp_x l[z, x] - log M. Then I(X; Z) = mean(matched - marginal), H(Z|X) =
  -mean(matched), H(Z) = -mean(marginal). A high H(Z|X) with a low I(X; Z) is the template collapse, which entropy alone
  does not show.

  Args:
    cross_scores: f[N, M], sums of token log-probs in nats, by teacher forcing each z after each x.
    own: i32[N], the column of the prompt that z was sampled for.
    lengths: [N], tokens of z. If given, the same metrics of l divided by the length are added as `_per_token`.

  Returns:
    `mi`, `cond_entropy`, `entropy`, `marginal_std`, `mi_zscore` (`mi` in units of `marginal_std`), each also with
    `_per_token` if lengths are given; and for k = 1, 2, 4, 8 up to M, `retrieval_top<k>`, the share of z whose own
    prompt is among the k of highest score (ties count against it), with the value of a random order as
    `retrieval_top<k>_chance`. Empty if N is 0.

  Source: RAGEN-2, arXiv 2604.06268 (mutual-information diagnostics).
  """
  scores = np.asarray(cross_scores, np.float64)
  own = np.asarray(own)
  if not len(scores):
    return {}
  metrics = _information(scores, own)
  if lengths is not None:
    per_token = scores / np.maximum(np.asarray(lengths, np.float64), 1.0)[:, None]
    metrics |= {f'{name}_per_token': x for name, x in _information(per_token, own).items()}

  prompts = scores.shape[1]
  others = np.arange(prompts)[None, :] != own[:, None]  # [N, M]
  above = (others & (scores >= scores[np.arange(len(own)), own][:, None])).sum(axis=1)  # at least as likely prompts
  for k in _RETRIEVAL_KS:
    if k <= prompts:
      metrics[f'retrieval_top{k}'] = float((above < k).mean())
      metrics[f'retrieval_top{k}_chance'] = 1.0 - math.comb(prompts - 1, k) / math.comb(prompts, k)
  return metrics


def _information(scores: np.ndarray, own: np.ndarray) -> dict[str, float]:
  matched = scores[np.arange(len(scores)), own]
  marginal = np.logaddexp.reduce(scores, axis=1) - math.log(scores.shape[1])
  std = float(marginal.std(ddof=1)) if len(marginal) > 1 else 0.0
  mi = float((matched - marginal).mean())
  return {
    'mi': mi,
    'cond_entropy': -float(matched.mean()),
    'entropy': -float(marginal.mean()),
    'marginal_std': std,
    'mi_zscore': mi / max(std, _MIN_STD),
  }
