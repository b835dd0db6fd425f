"""The loss of a mini-batch: clipped surrogate, entropy bonus, KL term and value loss.

The weights of the tokens are computed from the whole mini-batch (`with_loss_weights`) before it is cut into
micro-batches, so the losses and gradients of the micro-batches add up to those of the mini-batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.algorithms import losses
from ragen_jax.algorithms.diagnostics import ratio_counts
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.training.batches import MiniBatch, TrainBatch
from ragen_jax.training.scoring import ScoringSettings, score_tokens, value_tokens

# Sums and maxima over the micro-batches of a mini-batch, by name.
Stats = tuple[dict[str, jax.Array], dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class LossSettings:
  """The loss. Fields are those of `config.algorithm`, except for `scoring` and `pg_coef`.

  Attributes:
    scoring: how tokens are scored.
    ratio_level: what a probability ratio spans, one of `losses.RATIO_LEVELS`.
    clip_ratio_low: how far below 1 the ratio may fall before its gradient is cut.
    clip_ratio_high: how far above 1 the ratio may rise.
    clip_ratio_c: bound of the dual clip; None is off.
    pg_coef: weight of the clipped surrogate: 1, or 0 to compute another part of the loss alone.
    kl_loss_coef: weight of the KL to the reference.
    kl_kind: estimator of the KL, one of `losses.KL_KINDS`.
    value_clip: how far a value may move before its gradient is cut; None is off.
    value_coef: weight of the value loss; 0 runs no backward pass for a critic.
    entropy_coef: weight of the entropy bonus.
  """

  scoring: ScoringSettings
  ratio_level: str
  clip_ratio_low: float
  clip_ratio_high: float
  clip_ratio_c: float | None
  pg_coef: float
  kl_loss_coef: float
  kl_kind: str
  value_clip: float | None
  value_coef: float
  entropy_coef: float


@dataclasses.dataclass(frozen=True)
class WeightSettings:
  """How the losses of tokens become one number.

  Attributes:
    loss_agg_mode: one of `losses.AGGREGATIONS`.
    loss_norm_length: tokens that 'seq-mean-token-sum-norm' divides by.
  """

  loss_agg_mode: str
  loss_norm_length: int


# Metrics that are means over trained tokens.
_TOKEN_MEANS = (
  'actor/entropy', 'actor/kl_loss', 'actor/pg_clipfrac', 'actor/pg_clipfrac_lower', 'actor/ppo_kl',
  'actor/logprob_gap_mean',
)  # fmt: skip


def policy_and_value_loss(module: ActorCritic, batch: MiniBatch, settings: LossSettings) -> tuple[jax.Array, Stats]:
  """The weighted sum of the token losses of a micro-batch.

  Args:
    module: policy and critic.
    batch: one micro-batch, with weights made for its whole mini-batch.
    settings: see `LossSettings`.

  Returns:
    (loss f32[], (sums, maxima)). `sums` are weighted as the loss is: over the micro-batches of a mini-batch they add up
    to the mini-batch's numbers, see `token_means`.
  """
  s = settings
  logprobs, entropies, values = score_tokens(
    module, batch.tokens, batch.columns, s.scoring, batch.segments, images=batch.images
  )
  packed = batch.segments is not None
  policy, stats = losses.policy_loss(
    logprobs,
    batch.old_logprobs,
    batch.advantages,
    batch.trained,
    clip_ratio_low=s.clip_ratio_low,
    clip_ratio_high=s.clip_ratio_high,
    clip_ratio_c=s.clip_ratio_c,
    ratio_level=s.ratio_level,
    turn=batch.turn,
    sequence=jnp.take_along_axis(batch.segments, batch.columns, axis=1) if packed else None,
    importance_weights=batch.importance,
  )
  vf_loss, value_sums = _value_loss(values, batch, s)
  pg_loss = losses.aggregate(policy, batch.weights)
  entropy = losses.aggregate(entropies, batch.weights)
  loss = s.pg_coef * pg_loss - s.entropy_coef * entropy
  sums = {}
  if batch.ref_logprobs is not None:
    kl = losses.aggregate(losses.kl_penalty(logprobs, batch.ref_logprobs, batch.trained, s.kl_kind), batch.weights)
    loss = loss + s.kl_loss_coef * kl
    sums['actor/kl_loss'] = kl
  if s.value_coef:  # without, no program runs a critic for its gradient
    loss = loss + s.value_coef * vf_loss
  gap = jnp.where(batch.mask, jnp.abs(logprobs - batch.old_logprobs), 0.0)
  sums |= {
    'actor/pg_loss': pg_loss,
    'actor/entropy': entropy,
    'actor/pg_clipfrac': losses.aggregate(stats['clipfrac'], batch.weights),
    'actor/pg_clipfrac_lower': losses.aggregate(stats['clipfrac_lower'], batch.weights),
    'actor/ppo_kl': losses.aggregate(stats['approx_kl'], batch.weights),
    'actor/logprob_gap_mean': losses.aggregate(gap, batch.weights),
    'weights': jnp.sum(batch.weights),
    'ratio_counts': ratio_counts(stats['ratio'], batch.trained),
  }
  return loss, (sums | value_sums, {'actor/logprob_gap_max': jnp.max(gap)})


def critic_loss(module: ActorCritic, batch: MiniBatch, settings: LossSettings) -> tuple[jax.Array, Stats]:
  """The value loss alone, whose gradient does not reach the policy; arguments as for `policy_and_value_loss`."""
  values = value_tokens(
    module, batch.tokens, batch.columns, settings.scoring, batch.segments, freeze_policy=True, images=batch.images
  )
  vf_loss, sums = _value_loss(values, batch, settings)
  return settings.value_coef * vf_loss, (sums, {})


def _value_loss(values: jax.Array, batch: MiniBatch, settings: LossSettings) -> tuple[jax.Array, dict[str, jax.Array]]:
  value, stats = losses.value_loss(values, batch.returns, batch.old_values, batch.mask, clip=settings.value_clip)
  vf_loss = losses.aggregate(value, batch.value_weights)
  return vf_loss, {
    'critic/vf_loss': vf_loss,
    'critic/vf_clipfrac': losses.aggregate(stats['clipfrac'], batch.value_weights),
    'critic/vpred_mean': losses.aggregate(values, batch.value_weights),
  }


def token_means(sums: dict[str, Any]) -> dict[str, Any]:
  """The metrics of a mini-batch from the sums over its micro-batches: means over trained tokens are divided."""
  means = dict(sums)
  if 'weights' in means:
    whole = jnp.maximum(means.pop('weights'), 1e-9)
    means |= {name: means[name] / whole for name in _TOKEN_MEANS if name in means}
  return means


def loss_parts(settings: LossSettings) -> dict[str, LossSettings]:
  """The parts of the policy's loss, each by itself: 'task' (the surrogate), 'entropy', 'kl'.

  Parts whose coefficient is 0 are left out.
  """
  off = dataclasses.replace(settings, pg_coef=0.0, entropy_coef=0.0, kl_loss_coef=0.0, value_coef=0.0)
  parts = {
    'task': dataclasses.replace(off, pg_coef=1.0),
    'entropy': dataclasses.replace(off, entropy_coef=settings.entropy_coef),
    'kl': dataclasses.replace(off, kl_loss_coef=settings.kl_loss_coef),
  }
  return {name: part for name, part in parts.items() if part != off}


_token_weights = jax.jit(losses.token_weights, static_argnames=('mode', 'norm_length'))


def with_loss_weights(
  batch: TrainBatch, rows: np.ndarray, episode: np.ndarray, settings: WeightSettings, *, multiple: int
) -> MiniBatch:
  """The batch with the loss weights of one mini-batch; 0 for all other rows.

  Args:
    batch: of B rows.
    rows: i32[M], the mini-batch.
    episode: i32[B], the episode of each row; a sequence of `losses.token_weights` is an episode.
    settings: see `WeightSettings`.
    multiple: M is padded to a multiple of this, so that few programs are compiled.
  """
  n = len(rows)
  more = -n % multiple
  trained, valued = (np.pad(x[rows], ((0, more), (0, 0))) for x in (batch.trained, batch.valued))
  several = settings.loss_agg_mode != 'token-mean' and shared_episodes(episode[rows]) is not None
  sequence = np.pad(episode[rows], (0, more), constant_values=-1) if several else None
  shape = batch.mask.shape
  weights, value_weights = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
  weights[rows] = _token_weights(
    trained, mode=settings.loss_agg_mode, sequence=sequence, norm_length=settings.loss_norm_length
  )[:n]
  value_weights[rows] = _token_weights(valued, mode='token-mean')[:n]
  fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(TrainBatch)}
  return MiniBatch(**fields, weights=weights, value_weights=value_weights)


def shared_episodes(episode: np.ndarray) -> np.ndarray | None:
  """The episode of each row, or None if every row is its own episode (lets estimators take the fast path)."""
  return None if len(np.unique(episode)) == len(episode) else episode
