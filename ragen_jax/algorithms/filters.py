"""Uncertainty filtering: selects the prompt groups that an update learns from, and weighs them.

Everything runs on the host in NumPy, because the filter decides the number of rows of the compiled programs. It reads
*raw* scores, before any normalisation. A group whose episodes all have the same score carries no relative signal;
StarPO-S keeps the groups with the largest deviation of scores.

Sources: RAGEN, arXiv 2504.20073 (StarPO-S: a fraction of the groups with the highest deviation); RAGEN-2, arXiv
2604.06268 (top-p over deviations); DAPO, arXiv 2503.14476, section 3.2 (drop groups that do not vary).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ragen_jax.algorithms import rounding

METRICS = ('reward_std', 'reward', 'reward_sum', 'entropy', 'entropy_variance', 'length')
STRATEGIES = ('top_k', 'top_k_abs', 'top_p', 'min_p')
TYPES = ('largest', 'smallest')
TOP_P_MODES = ('linear', 'softmax')
LOSS_SCALINGS = ('none', 'linear', 'sqrt')
ZERO = 1e-10  # scores of at most this absolute value count as zero


@dataclasses.dataclass(frozen=True)
class FilterResult:
  """The result of a filter.

  Attributes:
    keep: bool[B], the rows to learn from; False for padding.
    keep_groups: bool[G], the groups to learn from, in the order of their ids.
    metrics: `rollout/filter_kept_count`, `_kept_ratio` and `_zero_count`.
  """

  keep: np.ndarray
  keep_groups: np.ndarray
  metrics: dict[str, float]


def group_scores(
  metric: str,
  group: np.ndarray,
  valid: np.ndarray,
  *,
  scores: np.ndarray | None = None,
  entropy: np.ndarray | None = None,
  length: np.ndarray | None = None,
  episode: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
  """Ids i32[G] of the groups that have a valid row, ascending, and the metric f64[G] by which groups are ranked.

  Over the episodes of a group: 'reward_std' is the standard deviation of raw scores (unbiased; 0 for one episode),
  'reward' their mean, 'reward_sum' their sum, 'entropy' the mean entropy, 'entropy_variance' the *standard deviation*
  of entropies (the name is RAGEN's), and 'length' the mean length.

  Args:
    group: i32[B], prompt group.
    valid: bool[B], False for padding.
    scores: f32[B], raw score of each row's episode; needed by the reward metrics.
    entropy: f32[B], mean token entropy of each row's episode, in nats; needed by the entropy metrics.
    length: [B], sampled tokens of each row's episode; needed by 'length'.
    episode: i32[B], the episode of each row, which counts once; None if every row is its own episode.

  Raises:
    ValueError: the metric is unknown, or the array that it needs is missing.
  """
  if metric not in METRICS:
    raise ValueError(f'filter.metric is {metric!r}; it may be one of {", ".join(METRICS)}')
  kind = metric.split('_')[0]
  x = {'reward': scores, 'entropy': entropy, 'length': length}[kind]
  if x is None:
    raise ValueError(f'filter.metric is {metric!r}, which needs the {kind} of each row')
  rows = _episode_rows(np.asarray(valid, bool), episode)
  ids, index = np.unique(np.asarray(group)[rows], return_inverse=True)
  members = [np.asarray(x, np.float64)[rows][index == i] for i in range(len(ids))]
  if metric in ('reward_std', 'entropy_variance'):
    values = [_std(m) for m in members]
  elif metric == 'reward_sum':
    values = [m.sum() for m in members]
  else:
    values = [m.mean() for m in members]
  return ids, np.array(values, np.float64)


def _episode_rows(valid: np.ndarray, episode: np.ndarray | None) -> np.ndarray:
  """The index of one valid row of each episode."""
  rows = np.flatnonzero(valid)
  if episode is None:
    return rows
  _, first = np.unique(np.asarray(episode)[rows], return_index=True)
  return rows[np.sort(first)]


def _std(x: np.ndarray) -> float:
  """The unbiased standard deviation, exactly 0 for one member and for members that are equal up to rounding.

  The order of the members does not matter, so that groups of equal members tie.
  """
  if len(x) < 2 or rounding.is_constant(x.min(), x.max()):
    return 0.0
  return float(np.std(np.sort(x) - x.min(), ddof=1))


def select_groups(
  scores: np.ndarray,
  *,
  strategy: str,
  value: float,
  kind: str,
  include_zero: bool,
  top_p_mode: str,
  eps: float = 0.01,
) -> np.ndarray:
  """Selects groups by their scores: f64[G] -> bool[G].

  'top_k'      keeps the best floor(value * G) of the G groups.
  'top_k_abs'  keeps the best int(value) groups.
  'min_p'      keeps groups with score >= value * largest score; with 'smallest', groups with score <= that.
  'top_p'      keeps the fewest best groups whose mass reaches `value` of the total; all groups for value >= 1.
               'linear': the mass of a group is its score, and value * total - eps has to be reached, so that nothing
               is kept if all scores are tiny. 'softmax': the mass is softmax(score), or softmax(-score) with
               'smallest'; eps is not used.

  Linear top-p does not depend on the scale of the rewards (except for eps), softmax does. Of groups with equal scores,
  the first is preferred. If any score is negative, min_p and linear top-p shift all by the smallest one. Groups whose
  score is NaN or infinite are never kept.

  Args:
    value: fraction, count, ratio or p, depending on the strategy; not negative.
    kind: whether the 'largest' or the 'smallest' scores are the best.
    include_zero: False first drops groups with |score| <= 1e-10; 'top_k' still counts them in G.
    eps: slack of linear top-p, in units of the score.

  Raises:
    ValueError: an option is unknown, or value is negative.

  Source: RAGEN's `rollout_filter_*` options.
  """
  _check('filter.strategy', strategy, STRATEGIES)
  _check('filter.type', kind, TYPES)
  _check('filter.top_p_mode', top_p_mode, TOP_P_MODES)
  if not value >= 0:
    raise ValueError(f'filter.value is {value}; it may not be negative')
  scores = np.asarray(scores, np.float64)
  candidates = np.isfinite(scores)
  if not include_zero:
    candidates &= np.abs(scores) > ZERO
  index = np.flatnonzero(candidates)
  keep = np.zeros(len(scores), bool)
  if not len(index):
    return keep
  of = scores[index]
  order = np.argsort(-of if kind == 'largest' else of, kind='stable')  # best first
  above = of - min(of.min(), 0.0)

  if strategy == 'min_p':
    bound, slack = value * above.max(), rounding.slack(0.0, above.max())
    chosen = np.flatnonzero(above >= bound - slack if kind == 'largest' else above <= bound + slack)
  elif strategy == 'top_p' and value >= 1:
    chosen = order
  else:
    if strategy == 'top_k':
      count = int(np.floor(value * len(scores) + 1e-9))  # 0.29 * 100 is 28.999...
    elif strategy == 'top_k_abs':
      count = int(value)
    elif top_p_mode == 'linear':
      count = _shortest_run(above[order], value, eps)
    else:
      logits = of if kind == 'largest' else -of
      mass = np.exp(logits - logits.max())
      count = _shortest_run((mass / mass.sum())[order], value, 0.0)
    chosen = order[:count]
  keep[index[chosen]] = True
  return keep


def _shortest_run(mass: np.ndarray, p: float, eps: float) -> int:
  """The smallest n >= 0 with sum(mass[:n]) >= p * sum(mass) - eps, up to rounding; p < 1."""
  reached = np.concatenate([[0.0], np.cumsum(mass)])
  return int(np.argmax(reached >= (p - 1e-12) * reached[-1] - eps))


def _check(field: str, value: str, options: tuple[str, ...]) -> None:
  if value not in options:
    raise ValueError(f'{field} is {value!r}; it may be one of {", ".join(options)}')


def uncertainty_filter(
  group: np.ndarray,
  valid: np.ndarray,
  *,
  metric: str,
  strategy: str,
  value: float,
  kind: str,
  include_zero: bool,
  top_p_mode: str,
  scores: np.ndarray | None = None,
  entropy: np.ndarray | None = None,
  length: np.ndarray | None = None,
  episode: np.ndarray | None = None,
) -> FilterResult:
  """Ranks the groups of a batch and selects complete groups. Arguments: see `group_scores` and `select_groups`.

  StarPO-S is metric 'reward_std', strategy 'top_k', value 0.25. All groups that vary: 'top_p', value 1.0, include_zero
  False. RAGEN-2's signal-to-noise filter: 'top_p', value 0.9, include_zero False.
  """
  valid = np.asarray(valid, bool)
  ids, ranked = group_scores(metric, group, valid, scores=scores, entropy=entropy, length=length, episode=episode)
  kept = select_groups(
    ranked, strategy=strategy, value=value, kind=kind, include_zero=include_zero, top_p_mode=top_p_mode
  )
  metrics = {
    'rollout/filter_kept_count': float(kept.sum()),
    'rollout/filter_kept_ratio': float(kept.sum() / max(len(ids), 1)),
    'rollout/filter_zero_count': float((np.abs(ranked) <= ZERO).sum()),
  }
  return FilterResult(np.isin(group, ids[kept]) & valid, kept, metrics)


def loss_scale(kept_ratio: float, scaling: str) -> float:
  """A factor for the advantages after a filter, which makes an update from few groups smaller than one from all.

  'none' gives 1, 'linear' the share of the groups that the filter kept, 'sqrt' its square root. Source: RAGEN-2's
  `filter_loss_scaling`.

  Raises:
    ValueError: the scaling is unknown.
  """
  _check('filter.loss_scaling', scaling, LOSS_SCALINGS)
  return {'none': 1.0, 'linear': float(kept_ratio), 'sqrt': float(np.sqrt(kept_ratio))}[scaling]


def soft_weights(
  scores: np.ndarray, group: np.ndarray, valid: np.ndarray, episode: np.ndarray | None = None
) -> np.ndarray:
  """Soft alternative to dropping groups: the standard deviation of a group divided by the largest one.

  Arguments are those of `group_scores`. The result f32[B] in [0, 1] are factors for the advantages of rows: 1 for all
  valid rows if no group varies; 0 for padding. Source: RAGEN-2's `soft_advantage_reweight`.
  """
  valid = np.asarray(valid, bool)
  ids, std = group_scores('reward_std', group, valid, scores=scores, episode=episode)
  greatest = std.max(initial=0.0)
  of_groups = std / greatest if greatest > ZERO else np.ones_like(std)
  weights = np.zeros(len(valid), np.float32)
  weights[valid] = of_groups[np.searchsorted(ids, np.asarray(group)[valid])]
  return weights
