"""The loss of a mini-batch: policy loss, entropy bonus, KL term and value loss.

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
from ragen_jax.training.scoring import ScoringSettings, score_and_compare, value_tokens

# Sums and maxima over the micro-batches of a mini-batch, by name.
Stats = tuple[dict[str, jax.Array], dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class LossSettings:
  """The loss. Fields of `config.algorithm`, of which `clip_ratio_c` and `value_clip` are None if they are off.

  `pg_coef` is the weight of the policy's loss: 1, or 0 to compute another part of the loss alone.
  """

  scoring: ScoringSettings
  policy_loss: str
  ratio_level: str
  clip_ratio_low: float
  clip_ratio_high: float
  clip_ratio_c: float | None
  tau_pos: float
  tau_neg: float
  dro_beta: float
  pg_coef: float
  kl_loss_coef: float
  kl_kind: str
  value_clip: float | None
  value_coef: float
  entropy_coef: float


@dataclasses.dataclass(frozen=True)
class WeightSettings:
  """How the losses of tokens become one number. Fields of `config.algorithm`."""

  loss_agg_mode: str
  loss_norm_length: int


# Metrics that are means over tokens of the value loss.
_VALUE_MEANS = ('critic/vf_loss', 'critic/vf_clipfrac', 'critic/vpred_mean')
# Metrics that are means over trained tokens.
_TOKEN_MEANS = (
  'actor/entropy', 'actor/kl_loss', 'actor/pg_clipfrac', 'actor/pg_clipfrac_lower', 'actor/ppo_kl',
  'actor/logprob_gap_mean', 'actor/experts_differ',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PolicyAndValueLoss:
  """`policy_and_value_loss` with these settings."""

  settings: LossSettings

  def __call__(self, module: ActorCritic, batch: MiniBatch) -> tuple[jax.Array, Stats]:
    return policy_and_value_loss(module, batch, self.settings)


@dataclasses.dataclass(frozen=True)
class CriticLoss:
  """`critic_loss` with these settings."""

  settings: LossSettings

  def __call__(self, module: ActorCritic, batch: MiniBatch) -> tuple[jax.Array, Stats]:
    return critic_loss(module, batch, self.settings)


def policy_and_value_loss(module: ActorCritic, batch: MiniBatch, settings: LossSettings) -> tuple[jax.Array, Stats]:
  """The weighted sum f32[] of the token losses of a micro-batch, and (sums, maxima) of metrics.

  The weights of the batch are made for its whole mini-batch. `sums` are weighted as the loss is: over the micro-batches
  of a mini-batch they add up to the mini-batch's numbers, see `token_means`.
  """
  s = settings
  logprobs, entropies, values, differ = score_and_compare(module, batch, s.scoring)
  policy, stats = losses.policy_loss(
    logprobs,
    batch.old_logprobs,
    batch.advantages,
    batch.trained,
    policy_loss=s.policy_loss,
    clip_ratio_low=s.clip_ratio_low,
    clip_ratio_high=s.clip_ratio_high,
    clip_ratio_c=s.clip_ratio_c,
    ratio_level=s.ratio_level,
    tau_pos=s.tau_pos,
    tau_neg=s.tau_neg,
    dro_beta=s.dro_beta,
    turn=batch.turn,
    sequence=batch.sequence,
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
  if differ is not None:
    sums['actor/experts_differ'] = losses.aggregate(differ, batch.weights)
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
  values = value_tokens(module, batch, settings.scoring, freeze_policy=True)
  vf_loss, sums = _value_loss(values, batch, settings)
  return settings.value_coef * vf_loss, (sums, {})


def _value_loss(values: jax.Array, batch: MiniBatch, settings: LossSettings) -> tuple[jax.Array, dict[str, jax.Array]]:
  value, stats = losses.value_loss(values, batch.returns, batch.old_values, batch.mask, clip=settings.value_clip)
  vf_loss = losses.aggregate(value, batch.value_weights)
  return vf_loss, {
    'value_weights': jnp.sum(batch.value_weights),
    'critic/vf_loss': vf_loss,
    'critic/vf_clipfrac': losses.aggregate(stats['clipfrac'], batch.value_weights),
    'critic/vpred_mean': losses.aggregate(values, batch.value_weights),
  }


def token_means(sums: dict[str, Any]) -> dict[str, Any]:
  """The metrics of a mini-batch from the sums over its micro-batches: means over tokens are divided by the weights."""
  means = dict(sums)
  for weights, names in (('weights', _TOKEN_MEANS), ('value_weights', _VALUE_MEANS)):
    if weights in means:
      whole = means.pop(weights)
      whole = jnp.where(whole > 0, whole, 1.0)
      means |= {name: means[name] / whole for name in names if name in means}
  return means


def loss_parts(settings: LossSettings) -> dict[str, LossSettings]:
  """The parts of the policy's loss that are on, each by itself: 'task' (the surrogate), 'entropy', 'kl'."""
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
  """The batch with the loss weights of one mini-batch, `rows` i32[M]; 0 for all other rows.

  `episode` i32[B] is the episode of each row; a sequence of `losses.token_weights` is an episode. M is padded to a
  multiple of `multiple`, so that few programs are compiled.
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
  value_weights[rows] = _token_weights(valued, mode='token-mean')[:n] / value_unit(batch)
  fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(TrainBatch)}
  return MiniBatch(**fields, weights=weights, value_weights=value_weights)


def value_unit(batch: TrainBatch) -> np.float32:
  """What the value loss of a batch is divided by: the mean square of its returns, or of its values if that is larger.

  So the gradient that reaches a shared trunk does not grow with the rewards, whose size is the environment's; a policy
  loss has no size of rewards either, because advantages are whitened or compared in groups. The values are for a critic
  that expects what is not won. At least 0.01.
  """
  if not batch.valued.any():
    return np.float32(1)
  squares = (np.square(x[batch.valued], dtype=np.float64).mean() for x in (batch.returns, batch.old_values))
  return np.float32(max(*squares, 0.01))


def shared_episodes(episode: np.ndarray) -> np.ndarray | None:
  """The episode of each row, or None if every row is its own episode (lets estimators take the fast path)."""
  return None if len(np.unique(episode)) == len(episode) else episode
