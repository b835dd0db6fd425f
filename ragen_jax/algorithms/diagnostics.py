"""What tells a healthy run from one that is about to collapse.

Metrics of rewards within groups and of the sampler's numbers, averages over time, and RAGEN-2's mutual information
between prompts and reasoning. What acts on them is in `collapse.py`. All of this runs on the host, but for
`ratio_counts`.
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
  """An exponential moving average without the bias of its start.

  Attributes:
    total: f64[], sum of decay^age (1 - decay) x.
    weight: f64[], the sum of those weights, 0 before the first value.
  """

  total: float = 0.0
  weight: float = 0.0

  @property
  def value(self) -> float:
    """The average; not a number before the first value."""
    return self.total / self.weight if self.weight > 0 else math.nan

  def update(self, x: float, decay: float = 0.9) -> Ema:
    """Takes one value in; one that is not finite changes nothing. decay in [0, 1): 0 is the last value."""
    if not math.isfinite(x):
      return self
    return Ema(decay * self.total + (1 - decay) * float(x), decay * self.weight + (1 - decay))


def update_emas(
  emas: Mapping[str, Ema], metrics: Mapping[str, float], decay: float = 0.9
) -> tuple[dict[str, Ema], dict[str, float]]:
  """Moves one average for each metric on.

  Args:
    emas: averages so far; a metric that is not there yet gets one.
    metrics: this step's values.
    decay: as in `Ema.update`.

  Returns:
    (averages, their values under the metrics' names + '_ema').
  """
  emas = dict(emas) | {name: emas.get(name, Ema()).update(x, decay) for name, x in metrics.items()}
  return emas, {f'{name}_ema': emas[name].value for name in metrics}


# --- probability ratios -----------------------------------------------------------------------------------------------

_LOG_EDGES = np.geomspace(1e-4, math.log(10), 32)
# Finest around 1: the first steps away from it are small, and a sequence's ratio (GSPO) moves by 1e-4.
RATIO_EDGES = np.exp(np.concatenate([-_LOG_EDGES[::-1], _LOG_EDGES]))  # f64[64], 0.1 to 10


def ratio_counts(ratio: jax.Array, mask: jax.Array) -> jax.Array:
  """Counts probability ratios in fixed bins, so that counts of micro-batches add up to those of an optimiser step.

  Args:
    ratio: f32[B, T].
    mask: bool[B, T], those that count.

  Returns:
    i32[63], how many lie between two of `RATIO_EDGES`; what lies below or above all of them is in the outermost.
  """
  reached = jnp.sum(mask[..., None] & (ratio[..., None] >= RATIO_EDGES[1:-1].astype(np.float32)), axis=(0, 1))
  whole = jnp.sum(mask)[None]
  return jnp.concatenate([whole, reached]) - jnp.concatenate([reached, jnp.zeros_like(whole)])


# --- rewards within groups, sampler against trainer -------------------------------------------------------------------


def in_group_reward(
  scores: np.ndarray, group: np.ndarray, valid: np.ndarray, episode: np.ndarray | None = None
) -> dict[str, float]:
  """Means over groups of the in-group standard deviation (unbiased), maximum and mean of raw scores.

  Args:
    scores: f32[B], raw score of each row's episode.
    group: i32[B].
    valid: bool[B], False for padding.
    episode: i32[B], None where each row is an episode of its own.

  Returns:
    `rollout/in_group_reward_std`, `_max`, `_mean`; not numbers where there is no valid row.

  Source: RAGEN, arXiv 2504.20073, the first sign of collapse.
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


def reward_std_buckets(std: np.ndarray, *, mode: str = 'quantile', count: int = 6) -> np.ndarray:
  """Sorts groups into buckets by their in-group reward deviation, to compare gradients between buckets.

  Args:
    std: f64[G].
    mode: 'quantile', buckets of equal size by rank; or 'fixed_rv', [0, 1), [1, 2), ... and the last one open.
    count: number of buckets.

  Returns:
    i32[G], 0 is the least.

  Raises:
    ValueError: the mode is unknown.

  Source: RAGEN-2's gradient analysis.
  """
  std = np.asarray(std, np.float64)
  if mode == 'quantile':
    rank = np.argsort(np.argsort(std, kind='stable'), kind='stable')
    return (rank * count // max(len(std), 1)).astype(np.int32)
  if mode == 'fixed_rv':
    return np.minimum(np.floor(std), count - 1).astype(np.int32)
  raise ValueError(f'diagnostics.bucket_mode is {mode!r}; it may be one of quantile, fixed_rv')


def logprob_gap(trainer_logprobs: np.ndarray, sampler_logprobs: np.ndarray, mask: np.ndarray) -> dict[str, float]:
  """How far the sampler's log-probs are from the trainer's for the same tokens and weights.

  Args:
    trainer_logprobs, sampler_logprobs: f32[B, T], in nats.
    mask: bool[B, T], the tokens that the policy sampled.

  Returns:
    `rollout/logprob_gap_mean` and `_max` of the absolute difference, and `rollout/logprob_pearson`, which is 1 where
    the two are the same but for rounding and not a number where either does not vary.
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
  """The chance that two replies to *different* prompts, drawn at random, are the same: the mark of a template.

  Args:
    replies: N replies, compared by equality: the text, or the tuple of sampled ids, of a turn or of its reasoning.
    group: i32[N], the prompt of each.

  Returns:
    A number in [0, 1]; 0 where there is only one prompt.
  """
  _, groups = np.unique(np.asarray(group), return_inverse=True)
  distinct: dict[Hashable, int] = {}
  kinds = np.array([distinct.setdefault(reply, len(distinct)) for reply in replies], np.int64)
  if not len(kinds):
    return 0.0

  def pairs_across(of: np.ndarray) -> float:
    """Ordered pairs of equal `of` and different groups."""
    _, cell = np.unique(of * (groups.max() + 1) + groups, return_counts=True)
    return float((np.bincount(of).astype(np.float64) ** 2).sum() - (cell.astype(np.float64) ** 2).sum())

  every = pairs_across(np.zeros_like(kinds))
  return pairs_across(kinds) / every if every > 0 else 0.0


# --- mutual information between prompts and reasoning -----------------------------------------------------------------


def mutual_information(
  cross_scores: np.ndarray,
  own: np.ndarray,
  *,
  lengths: np.ndarray | None = None,
  prompt_ids: np.ndarray | None = None,
  top_k: Sequence[int] = (1, 2, 4, 8),
  measure: Mapping[str, float] | None = None,
  std_eps: float = 1e-3,
) -> dict[str, float]:
  """Does the reasoning depend on the prompt? RAGEN-2's estimates from one matrix of cross scores.

  With l[z, x] = log p(reasoning z | prompt x) over N pieces of reasoning and M prompts: matched = l[z, own(z)],
  marginal = logsumexp_x l[z, x] - log M. Then I(X; Z) = mean(matched - marginal), H(Z|X) = -mean(matched), H(Z) =
  -mean(marginal). High H(Z|X) with low I(X; Z) is the template collapse, which entropy alone does not show.

  Args:
    cross_scores: f[N, M], sums of token log-probs in nats, by teacher forcing each z under each x.
    own: i32[N], the column of the prompt that z was sampled for.
    lengths: [N], tokens of z; given, the `_per_token` forms are added: the same with l divided by the length first.
    prompt_ids: i32[M], equal for equal prompts, which then count as one in retrieval; None where all differ.
    top_k: the k of the retrieval accuracies: the own prompt is among the k of highest score. Ties count against it.
    measure: the deviations of the marginals to measure I with in `mi_zscore`, under the names `marginal_std` and
      `marginal_std_per_token`, such as moving averages of these metrics; None takes this batch's.
    std_eps: floor of that deviation.

  Returns:
    `mi`, `cond_entropy`, `entropy`, `marginal_std`, `mi_zscore`, each also with `_per_token` where lengths are given;
    `retrieval_top<k>` and `retrieval_top<k>_chance` for each k up to M. Nothing where N is 0.

  Source: RAGEN-2, arXiv 2604.06268 (mutual-information diagnostics).
  """
  scores = np.asarray(cross_scores, np.float64)
  own = np.asarray(own)
  if not len(scores):
    return {}
  prompts = scores.shape[1]
  measure = measure or {}
  metrics = _information(scores, own, measure.get('marginal_std'), std_eps)
  if lengths is not None:
    per_token = scores / np.maximum(np.asarray(lengths, np.float64), 1.0)[:, None]
    information = _information(per_token, own, measure.get('marginal_std_per_token'), std_eps)
    metrics |= {f'{name}_per_token': x for name, x in information.items()}

  ids = np.arange(prompts) if prompt_ids is None else np.asarray(prompt_ids)
  same = ids[None, :] == ids[own][:, None]  # [N, M]
  best = np.where(same, scores, -np.inf).max(axis=1)
  above = (~same & (scores >= best[:, None])).sum(axis=1)  # other prompts at least as likely
  copies = same.sum(axis=1)
  for k in top_k:
    if k <= prompts:
      chance = [1.0 - math.comb(prompts - int(c), k) / math.comb(prompts, k) for c in copies]
      metrics[f'retrieval_top{k}'] = float((above < k).mean())
      metrics[f'retrieval_top{k}_chance'] = float(np.mean(chance))
  return metrics


def _information(scores: np.ndarray, own: np.ndarray, marginal_std: float | None, std_eps: float) -> dict[str, float]:
  matched = scores[np.arange(len(scores)), own]
  marginal = np.logaddexp.reduce(scores, axis=1) - math.log(scores.shape[1])
  std = float(marginal.std(ddof=1)) if len(marginal) > 1 else 0.0
  mi = float((matched - marginal).mean())
  return {
    'mi': mi,
    'cond_entropy': -float(matched.mean()),
    'entropy': -float(marginal.mean()),
    'marginal_std': std,
    'mi_zscore': mi / max(std if marginal_std is None else marginal_std, std_eps),
  }
