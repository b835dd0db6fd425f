"""Uncertainty filtering: which prompt groups an update learns from, and how much each of them weighs.

All of this runs on the host with NumPy, on *raw* scores: it decides the number of rows, so it comes before any compiled
program, and it reads what the environment paid and not what a normalisation made of it.

A group whose episodes all end alike has nothing to compare; StarPO-S keeps the groups whose rewards vary most.
Sources: RAGEN, arXiv 2504.20073 (StarPO-S: the fraction of groups of highest in-group deviation); RAGEN-2, arXiv
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
ZERO = 1e-10  # a score whose absolute value is not above this is zero


@dataclasses.dataclass(frozen=True)
class FilterResult:
  """What a filter decided.

  Attributes:
    keep: bool[B], rows to learn from; padding is never kept.
    groups: i32[G], the group ids that the batch has, ascending.
    scores: f64[G], their metric.
    keep_groups: bool[G].
    metrics: `rollout/filter_kept_count`, `_kept_ratio` and `_zero_count`.
  """

  keep: np.ndarray
  groups: np.ndarray
  scores: np.ndarray
  keep_groups: np.ndarray
  metrics: dict[str, float]

  @property
  def kept_ratio(self) -> float:
    return self.metrics['rollout/filter_kept_ratio']


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
  """The metric by which groups are ranked.

  'reward_std' is the in-group standard deviation (unbiased; 0 for one episode) of raw scores, 'reward' their mean,
  'reward_sum' their sum; 'entropy' is the mean over episodes, 'entropy_variance' the in-group *standard deviation* of
  the episodes' entropies (the name is RAGEN's), and 'length' the mean length.

  Args:
    metric: one of `METRICS`.
    group: i32[B].
    valid: bool[B], False for padding.
    scores: f32[B], raw score of each row's episode; for the reward metrics.
    entropy: f32[B], mean token entropy of each row's episode, in nats; for the entropy metrics.
    length: [B], sampled tokens of each row's episode; for 'length'.
    episode: i32[B], None where each row is an episode of its own; an episode counts once.

  Returns:
    (groups i32[G] ascending, metric f64[G]) over the groups that have a valid row.

  Raises:
    ValueError: the metric is unknown or its array is missing.
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
  """The indices of one valid row for each episode."""
  rows = np.flatnonzero(valid)
  if episode is None:
    return rows
  _, first = np.unique(np.asarray(episode)[rows], return_index=True)
  return rows[np.sort(first)]


def _std(x: np.ndarray) -> float:
  """The unbiased standard deviation, exactly 0 for one member and for members that are equal up to rounding."""
  if len(x) < 2 or rounding.is_constant(x.min(), x.max()):
    return 0.0
  return float(np.std(x - x.min(), ddof=1))


def select_groups(
  scores: np.ndarray,
  *,
  strategy: str = 'top_p',
  value: float = 1.0,
  kind: str = 'largest',
  include_zero: bool = True,
  top_p_mode: str = 'linear',
  eps: float = 0.01,
) -> np.ndarray:
  """Which groups to keep, by their scores.

  'top_k'      the best floor(value * G) of the G groups.
  'top_k_abs'  the best int(value) groups.
  'min_p'      the groups with score >= value * the greatest score; with 'smallest', those with score <= it.
  'top_p'      the shortest run of the best groups that holds `value` of the mass; all of them from value 1 on.
               'linear': the mass is the score itself, and the run is long enough once it reaches value * total - eps,
               so that with tiny scores nothing is kept; 'softmax': the mass is softmax(score) (of -score with
               'smallest'), without eps.

  Linear top-p does not change with the scale of the rewards (but for eps), softmax does. Ties go to the group that
  comes first. Groups whose score is not a number are never kept.

  Args:
    scores: f64[G]. Where some are below 0, min_p and linear top-p count all from the lowest.
    strategy: one of `STRATEGIES`.
    value: fraction, count, ratio or p, by strategy; not negative.
    kind: 'largest' or 'smallest' scores are the best.
    include_zero: False drops groups with |score| <= 1e-10 before anything else ('top_k' still counts them in G).
    top_p_mode: one of `TOP_P_MODES`.
    eps: slack of linear top-p, in units of the score.

  Returns:
    bool[G].

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
  """The least n, 0 included, with sum(mass[:n]) >= p * sum(mass) - eps, up to rounding; p < 1."""
  reached = np.concatenate([[0.0], np.cumsum(mass)])
  return int(np.argmax(reached >= (p - 1e-12) * reached[-1] - eps))


def _check(field: str, value: str, options: tuple[str, ...]) -> None:
  if value not in options:
    raise ValueError(f'{field} is {value!r}; it may be one of {", ".join(options)}')


def uncertainty_filter(
  group: np.ndarray,
  valid: np.ndarray,
  *,
  metric: str = 'reward_std',
  scores: np.ndarray | None = None,
  entropy: np.ndarray | None = None,
  length: np.ndarray | None = None,
  episode: np.ndarray | None = None,
  strategy: str = 'top_p',
  value: float = 1.0,
  kind: str = 'largest',
  include_zero: bool = True,
  top_p_mode: str = 'linear',
  eps: float = 0.01,
) -> FilterResult:
  """Ranks the groups of a batch and keeps whole ones. Arguments as `group_scores` and `select_groups`.

  StarPO-S is metric 'reward_std', strategy 'top_k', value 0.25; "keep what varies" is 'top_p', 1.0, include_zero False;
  RAGEN-2's signal-to-noise filter is 'top_p', 0.9, include_zero False.
  """
  valid = np.asarray(valid, bool)
  ids, ranked = group_scores(metric, group, valid, scores=scores, entropy=entropy, length=length, episode=episode)
  kept = select_groups(
    ranked, strategy=strategy, value=value, kind=kind, include_zero=include_zero, top_p_mode=top_p_mode, eps=eps
  )
  metrics = {
    'rollout/filter_kept_count': float(kept.sum()),
    'rollout/filter_kept_ratio': float(kept.sum() / max(len(ids), 1)),
    'rollout/filter_zero_count': float((np.abs(ranked) <= ZERO).sum()),
  }
  return FilterResult(np.isin(group, ids[kept]) & valid, ids, ranked, kept, metrics)


def loss_scale(kept_ratio: float, scaling: str = 'none') -> float:
  """The factor of the advantages after a filter: 1, the kept ratio ('linear'), or its square root ('sqrt').

  So that an update from few groups is not as large as one from all. Raises ValueError for an unknown scaling.
  Source: RAGEN-2's `filter_loss_scaling`.
  """
  _check('filter.loss_scaling', scaling, LOSS_SCALINGS)
  return {'none': 1.0, 'linear': float(kept_ratio), 'sqrt': float(np.sqrt(kept_ratio))}[scaling]


def soft_weights(
  scores: np.ndarray, group: np.ndarray, valid: np.ndarray, episode: np.ndarray | None = None
) -> np.ndarray:
  """Soft reweighting, in place of dropping groups: in-group standard deviation over the greatest one.

  Args:
    scores: f32[B], raw score of each row's episode.
    group: i32[B].
    valid: bool[B], False for padding.
    episode: i32[B], None where each row is an episode of its own.

  Returns:
    f32[B] in [0, 1], to multiply a row's advantages with; all 1 where no group varies, and 0 for padding.

  Source: RAGEN-2's `soft_advantage_reweight`.
  """
  valid = np.asarray(valid, bool)
  ids, std = group_scores('reward_std', group, valid, scores=scores, episode=episode)
  greatest = std.max(initial=0.0)
  of_groups = std / greatest if greatest > ZERO else np.ones_like(std)
  weights = np.zeros(len(valid), np.float32)
  weights[valid] = of_groups[np.searchsorted(ids, np.asarray(group)[valid])]
  return weights
