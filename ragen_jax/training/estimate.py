"""Estimation: from the rewards of a selection to the advantages and returns of its sampled tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from ragen_jax.agent.episode import TRUNCATED
from ragen_jax.agent.finite import NotFinite
from ragen_jax.agent.rollout import Rollout
from ragen_jax.algorithms import losses, masks, rewards
from ragen_jax.algorithms.advantages import AdvantageInputs, Advantages, AdvantageSettings, compute_advantages
from ragen_jax.algorithms.diagnostics import logprob_gap
from ragen_jax.training.batches import (
  BatchingSettings,
  TokenRows,
  TrainBatch,
  at_columns,
  sampled_columns,
)
from ragen_jax.training.images import ImageInputs, ImageInputsMaker
from ragen_jax.training.objective import shared_episodes
from ragen_jax.training.packing import plan_batches, plan_rows
from ragen_jax.training.rollout_metrics import mean, mean_max_min
from ragen_jax.training.scoring import Scorer
from ragen_jax.training.selection import Selection
from ragen_jax.training.state import TrainState
from ragen_jax.utils.sizes import next_power


@dataclasses.dataclass(frozen=True)
class RewardSettings:
  """The conversion of environment rewards to the estimators' rewards. Fields of `config.reward`."""

  credit: str
  grouping: str
  method: str


@dataclasses.dataclass(frozen=True)
class EstimateSettings:
  """The estimation. Fields of `config.algorithm`, and the following.

  Attributes:
    needs_critic: whether the estimator reads values.
    records_values: whether the sampler records values.
    banned: ids that are never sampled and never scored.
  """

  mask_loss: bool
  mask_advantages: bool
  bootstrap_truncated: bool
  kl_reward_coef: float
  kl_kind: str
  old_logprobs: str
  tis_cap: float
  advantages: AdvantageSettings
  reward: RewardSettings
  batching: BatchingSettings
  needs_critic: bool
  records_values: bool
  banned: tuple[int, ...]


_advantages = jax.jit(compute_advantages, static_argnames='settings')
_explained_variance = jax.jit(losses.explained_variance)
_shape_rewards = jax.jit(rewards.shape_rewards, static_argnames=('credit', 'grouping', 'method'))


@dataclasses.dataclass(frozen=True)
class _Tokens:
  """The columns of a selection that the update reads.

  Attributes:
    rows: the columns in the loss or in the recursion of the advantages.
    turn: i32[B, R], turn index, -1 outside the mask.
    trained: bool[B, R], tokens in the policy loss.
    through: bool[B, R], tokens in the recursion of the advantages.
    sampled: bool[B, R], tokens that the policy sampled.
  """

  rows: TokenRows
  turn: np.ndarray
  trained: np.ndarray
  through: np.ndarray
  sampled: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Scores:
  """Log-probs, values and importance weights of `_Tokens`; f32[B, R] each, as in `TrainBatch`."""

  old_logprobs: np.ndarray
  old_values: np.ndarray
  ref_logprobs: np.ndarray | None
  importance: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class _Rewards:
  """The rewards that the estimator reads.

  Attributes:
    of_tokens: f32[B, R], for recursive estimators.
    of_episodes: f32[B], the sum over each row's episode, not summed in float32, for estimators that compare episodes.
  """

  of_tokens: jax.Array
  of_episodes: jax.Array


def _importance_metrics(importance: np.ndarray, present: np.ndarray, older: np.ndarray, cap: float) -> dict[str, float]:
  """Means of the importance weights f32[B, R] of tokens of the present and of older weights, and the share at the cap.

  Without older tokens, the first alone.
  """
  if not older.any():
    return {'rollout/importance_mean': mean(importance[present])}
  found = {'rollout/importance_mean': mean(importance[present])} if present.any() else {}
  found['rollout/importance_older_mean'] = mean(importance[older])
  return found | {'rollout/importance_capped': mean(importance[present | older] >= np.float32(cap))}


class TargetEstimator:
  """Makes the `TrainBatch` of a selection."""

  def __init__(self, settings: EstimateSettings, scorer: Scorer, sight: ImageInputsMaker | None = None):
    """Nothing is compiled before the first call; `sight` is that of a model that reads images."""
    self._settings = settings
    self._scorer = scorer
    self._sight = sight

  def __call__(self, state: TrainState, selection: Selection) -> tuple[TrainBatch, dict[str, float | NotFinite]]:
    """The batch, with one row for each row of `selection.rollout`, and metrics, including those of the selection."""
    tokens = self._tokens(selection, self._images(state.params, selection.rollout))
    scores, metrics = self._scores(state, selection, tokens)
    reward, kl_metrics = self._rewards(selection, tokens, scores)
    estimate = self._advantages(state, selection, tokens, scores, reward)
    batch = TrainBatch(
      **{f.name: getattr(tokens.rows, f.name) for f in dataclasses.fields(TokenRows)},
      turn=tokens.turn,
      trained=tokens.trained,
      valued=np.asarray(estimate.value_mask),
      old_logprobs=scores.old_logprobs,
      old_values=scores.old_values,
      advantages=estimate.advantages * selection.scale[:, None],
      returns=estimate.returns,
      ref_logprobs=scores.ref_logprobs,
      importance=scores.importance,
    )
    metrics = selection.metrics | metrics | kl_metrics
    metrics |= mean_max_min('critic/rewards', np.asarray(reward.of_tokens, np.float64).sum(axis=1)[selection.keep])
    metrics |= mean_max_min('critic/advantages', batch.advantages[tokens.sampled])
    if self._settings.needs_critic:
      metrics |= mean_max_min('critic/returns', batch.returns[batch.valued])
      metrics |= mean_max_min('critic/values', batch.old_values[batch.valued])
      metrics['critic/vf_explained_var'] = float(_explained_variance(batch.old_values, batch.returns, batch.valued))
    return batch, metrics

  def _images(self, params: Any, rollout: Rollout) -> ImageInputs | None:
    return None if self._sight is None else self._sight.inputs(params, rollout.trajectory, rollout.images)

  def _tokens(self, selection: Selection, images: ImageInputs | None) -> _Tokens:
    s, t, keep = self._settings, selection.rollout.trajectory, selection.keep
    trained, through = masks.selective_masks(
      t.loss_mask, t.length, mask_loss=s.mask_loss, mask_advantages=s.mask_advantages
    )
    if s.banned:  # tokens of prompts that have no probability
      trained, through = (x & ~np.isin(t.tokens, s.banned) for x in (trained, through))
    columns, mask = sampled_columns(trained | through)
    # Few widths, because small programs are compiled for each.
    width = next_power(mask.shape[1], s.batching.reply_step)
    columns = np.pad(columns, ((0, 0), (0, width - columns.shape[1])), constant_values=1)
    mask = np.pad(mask, ((0, 0), (0, width - mask.shape[1]))) & keep[:, None]
    turn = np.where(mask, at_columns(t.turn, columns, mask), -1).astype(np.int32)
    trained, through, sampled = (at_columns(x, columns, mask) for x in (trained, through, t.loss_mask))
    rows = TokenRows(t.tokens, columns, mask, images=images, experts=t.experts)
    return _Tokens(rows, turn, trained, through, sampled)

  def _scores(self, state: TrainState, selection: Selection, tokens: _Tokens) -> tuple[_Scores, dict[str, float]]:
    """Old log-probs and values, importance weights, and log-probs under the reference."""
    s, t, rows, sampled = self._settings, selection.rollout.trajectory, tokens.rows, tokens.sampled
    logprobs, values = (at_columns(x, rows.columns, rows.mask) for x in (t.logprobs, t.values))
    (plans,) = plan_rows([np.flatnonzero(selection.keep)], t, s.batching)
    metrics, importance, reference = {}, None, None
    if s.old_logprobs == 'trainer':
      recorded = logprobs
      logprobs, values = self._scorer.score(state.params, rows, plans)
      present = sampled & (at_columns(t.versions, rows.columns, rows.mask) == state.iteration)
      older = sampled & ~present  # of rows that were played ahead, or are replayed
      if present.any() or not older.any():
        metrics |= logprob_gap(logprobs, recorded, present)
      if s.tis_cap > 0:
        importance = losses.truncated_importance_weights(logprobs, recorded, sampled, s.tis_cap)
        importance = np.where(sampled, importance, 1).astype(np.float32)
        metrics |= _importance_metrics(importance, present, older, s.tis_cap)
    elif s.needs_critic and not s.records_values:
      values = self._scorer.values(state.params, rows, plans)
    if state.reference is not None:
      reference = self._scorer.logprobs(state.reference_params, rows, plans)
    return _Scores(logprobs, values, reference, importance), metrics

  def _rewards(self, selection: Selection, tokens: _Tokens, scores: _Scores) -> tuple[_Rewards, dict[str, float]]:
    s, t, rows, sampled = self._settings, selection.rollout.trajectory, tokens.rows, tokens.sampled
    episode = shared_episodes(t.episode)
    of_tokens, of_episodes = _shape_rewards(
      at_columns(t.rewards + t.reply_rewards, rows.columns, rows.mask),
      sampled,
      tokens.turn,
      t.group,
      t.env,
      credit=s.reward.credit,
      grouping=s.reward.grouping,
      method=s.reward.method,
      episode=episode,
      scores=selection.rollout.trained_scores,
    )
    if s.kl_reward_coef <= 0:
      return _Rewards(of_tokens, of_episodes), {}
    kl = losses.kl_penalty(scores.old_logprobs, scores.ref_logprobs, sampled, s.kl_kind)
    reward = _Rewards(*rewards.kl_in_reward(of_tokens, of_episodes, kl, sampled, s.kl_reward_coef, episode=episode))
    return reward, {'actor/reward_kl_penalty': mean(np.asarray(kl)[sampled])}

  def _advantages(
    self, state: TrainState, selection: Selection, tokens: _Tokens, scores: _Scores, reward: _Rewards
  ) -> Advantages:
    """The result of the estimator, on the host."""
    s, t = self._settings, selection.rollout.trajectory
    inputs = AdvantageInputs(
      rewards=reward.of_tokens,
      scores=reward.of_episodes,
      loss_mask=tokens.sampled,
      turn=tokens.turn,
      group=t.group,
      values=scores.old_values,
      bootstrap=self.bootstrap(state.params, selection.rollout) if s.bootstrap_truncated else None,
      episode=shared_episodes(t.episode),
      adv_mask=None if s.mask_advantages else tokens.through,
      anchors=selection.rollout.anchors,
    )
    return jax.device_get(_advantages(s.advantages, inputs))

  def bootstrap(self, params: Any, rollout: Rollout) -> np.ndarray:
    """f32[B]: the critic's value after the last sampled token of truncated rows, 0 for other rows."""
    t, batching = rollout.trajectory, self._settings.batching
    cut = np.isin(t.status, TRUNCATED)
    last = np.where(t.loss_mask, np.arange(t.loss_mask.shape[1]), 0).max(axis=1)
    # A column has the value of the state before it.
    columns = (last + 1)[:, None].astype(np.int32)
    images = self._images(params, rollout)
    images = None if images is None else images.widened(1)
    experts = None if t.experts is None else np.pad(t.experts, ((0, 0), (0, 1), (0, 0), (0, 0)))
    rows = TokenRows(np.pad(t.tokens, ((0, 0), (0, 1))), columns, cut[:, None], images=images, experts=experts)
    (plans,) = plan_batches([np.flatnonzero(cut)], last + 2, np.ones_like(last), batching)
    return self._scorer.values(params, rows, plans)[:, 0]
