"""The parts of a training iteration: roll out, choose what to learn from, estimate advantages, update."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.env_manager import first_training_level
from ragen_jax.agent.episode import TRUNCATED, Episode, Status
from ragen_jax.agent.metrics import episode_metrics
from ragen_jax.agent.rollout import Rollout, concatenate, pad_rows, round_up
from ragen_jax.agent.sampler_speaker import SamplerSpeaker
from ragen_jax.agent.trajectory import Trajectory
from ragen_jax.algorithms import filters, losses, masks, rewards
from ragen_jax.algorithms.advantages import ESTIMATORS, compute_advantages
from ragen_jax.algorithms.diagnostics import (
  RATIO_EDGES,
  in_group_reward,
  logprob_gap,
  repeated_replies,
  reward_std_buckets,
)
from ragen_jax.distributed.sharding import place, tree_shardings
from ragen_jax.models import lora
from ragen_jax.runs.metrics import Counts
from ragen_jax.training.learner import (
  Learner,
  LossConfig,
  MicroBatch,
  TokenBatch,
  gather,
  make_optimizer,
  plan_micro_batches,
  sampled_columns,
)
from ragen_jax.training.replay import ReplayBuffer
from ragen_jax.viewer.records import episode_records, first_rows, on_timeline

# Options of `compute_advantages` that are numbers and names of the config.
_SCALARS = (
  'name', 'gamma', 'lam', 'high_level_gamma', 'high_level_lam', 'length_weight', 'whitening', 'step_gamma',
  'step_weight', 'step_std',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Selection:
  """What an update learns from.

  Attributes:
    rollout: the fresh rollout, and behind it what a replay buffer adds.
    keep: bool[B], the rows.
    scale: f32[B], factors of their advantages.
    groups: how many prompt groups of the fresh rollout are kept.
    fresh: rows of the fresh rollout.
    metrics: of the filter.
  """

  rollout: Rollout
  keep: np.ndarray
  scale: np.ndarray
  groups: int
  fresh: int
  metrics: dict[str, float]


class Trainer:
  """The parts of an iteration."""

  def __init__(self, config: ConfigDict, policy: build.Policy, held_out: frozenset[bytes] = frozenset()):
    """Builds the environments and the update; nothing is compiled before the first iteration.

    Args:
      config: the run's.
      policy: where it begins.
      held_out: levels that are never trained on (`Evaluator.held_out`).
    """
    self.config = config
    self.policy = policy
    tags = tuple(config.train.tags)
    specs = build.env_groups(config, tags, build.group_counts(config.train, 'train'))
    self.proxy = build.agent_proxy(config, policy.tokenizer, policy.sampler, specs, config.train.group_size, held_out)
    self.rows = config.train.groups * config.train.group_size
    self.needs_critic = ESTIMATORS[config.algorithm.adv_estimator].needs_critic
    self.needs_reference = config.algorithm.kl_loss_coef > 0 or config.algorithm.kl_reward_coef > 0
    self.steps_per_iteration = config.algorithm.ppo_epochs * (self.rows // config.optimizer.mini_batch_size)
    self.learner = Learner(nnx.split(policy.model)[0], self._optimizer(), self._loss_config(), policy.mesh)
    self._reference: Any = None
    self._ratio_counts: Any = 0
    self.replay = ReplayBuffer(config.replay.max_age)
    self._advantages = jax.jit(compute_advantages, static_argnames=_SCALARS)
    self._shape_rewards = jax.jit(rewards.shape_rewards, static_argnames=('credit', 'grouping', 'method'))
    self._token_weights = jax.jit(losses.token_weights, static_argnames=('mode', 'norm_length'))

  def _optimizer(self):
    o = self.config.optimizer
    return make_optimizer(
      actor_lr=o.actor_lr,
      critic_lr=o.critic_lr,
      warmup_steps=o.warmup_steps,
      decay_steps=self.config.num_iterations * self.steps_per_iteration,
      final_lr_fraction=o.final_lr_fraction,
      b1=o.b1,
      b2=o.b2,
      weight_decay=o.weight_decay,
      grad_clip=o.grad_clip,
      critic_steps=o.critic_warmup * self.steps_per_iteration,
      separate_critic=self.config.model.separate_critic,
    )

  def _loss_config(self) -> LossConfig:
    a = self.config.algorithm
    return LossConfig(
      temperature=self.config.train.temperature,
      vocab_limit=self.policy.tokenizer.size,
      ratio_level=a.ratio_level,
      clip_ratio_low=a.clip_ratio_low,
      clip_ratio_high=a.clip_ratio_high,
      clip_ratio_c=a.clip_ratio_c or None,
      kl_coef=a.kl_loss_coef,
      kl_kind=a.kl_kind,
      value_clip=a.value_clip or None,
      value_coef=a.value_coef if self.needs_critic else 0.0,
      entropy_coef=a.entropy_coef,
      logits_chunk=self.config.model.logits_chunk,
      remat=self.config.model.remat,
    )

  def init(self) -> tuple[Any, Any, int]:
    """Weights, the optimiser's state, and how many iterations are behind them: none.

    Where the KL is on, a copy of what is trained of the policy stays behind as the reference.
    """
    params = build.param_state(self.policy.model)
    params = place(params, tree_shardings(params, self.policy.mesh))
    if self.needs_reference:
      trained, frozen = (part.get('policy', nnx.State({})) for part in lora.partition(params))
      self._reference = lora.join(jax.tree.map(jnp.copy, trained), frozen)
    return params, self.learner.init(params), 0

  def iterate(self, params: Any, opt_state: Any, iteration: int) -> tuple[Any, Any, dict[str, float]]:
    """An iteration with a rollout of its own, for loops that do nothing in between; `train.py` has the long form.

    Returns:
      The new weights, the optimiser's state (those passed are given away), and metrics of rollout and update.
    """
    rollout, selection = self.collect(params, iteration)
    batch, metrics = self.make_batch(params, selection)
    params, opt_state, update_metrics = self.update(params, opt_state, batch, selection, iteration)
    return params, opt_state, metrics | update_metrics | self.rollout_metrics(rollout)

  def collect(self, params: Any, iteration: int) -> tuple[Rollout, Selection]:
    """The iteration's fresh episodes, and what to learn from.

    Where the filter leaves fewer than `train.groups` groups, fresh ones are played until there are as many, or
    `filter.max_rollouts` is reached. With a replay buffer, groups that earlier iterations learnt from come in addition.
    """
    config = self.config
    wanted = config.train.groups
    played = [self.rollout(params, iteration)]
    rollout, selection = played[0], self.select(played[0])
    while selection.groups < wanted and len(played) < config.filter.max_rollouts:
      played.append(self.rollout(params, iteration, attempt=len(played)))
      rollout = concatenate(played, renumber=True)
      selection = self.select(rollout)
    if selection.groups > wanted:
      kept = np.unique(rollout.trajectory.group[selection.keep])
      kept = np.random.default_rng((config.seed, iteration, 2)).permutation(kept)[:wanted]
      keep = selection.keep & np.isin(rollout.trajectory.group, kept)
      selection = dataclasses.replace(selection, keep=keep, groups=wanted)
    selection.metrics['rollout/rollouts'] = len(played)
    if config.replay.groups:
      rows, scale = np.flatnonzero(selection.keep), selection.scale
      drawn = self.replay.draw(config.replay.groups, np.random.default_rng((config.seed, iteration, 1)), iteration)
      selection = _add(selection, drawn, multiple=max(self.rows // 4, 1))
      self.replay.add(rollout, rows, scale, iteration)
    return rollout, selection

  def rollout(self, params: Any, iteration: int, attempt: int = 0) -> Rollout:
    """Plays a fresh level for each group; the attempts of an iteration play different ones."""
    config = self.config
    number = iteration * config.filter.max_rollouts + attempt
    first_level = first_training_level(
      config.train.first_level, config.seed, rollout=number, groups=config.train.groups
    )
    key = jax.random.fold_in(jax.random.key(config.seed), iteration)
    key = jax.random.fold_in(key, attempt) if attempt else key
    return self.proxy.rollout(
      SamplerSpeaker(self.policy.sampler, params, key, build.sampling(config.train)),
      first_level,
      policy_version=iteration,
      pictured=() if attempt else self._recorded_rows(iteration),
    )

  def _recorded_rows(self, iteration: int) -> list[int]:
    """Rows of an iteration's first rollout whose episodes are kept for people to look at."""
    every = self.config.logging.episodes_every
    if not every or (iteration > 0 and (iteration + 1) % every):
      return []
    envs = self.proxy.envs
    return first_rows(envs.specs, envs.group_size, self.config.logging.episodes, one_a_level=False)

  def records(
    self, rollout: Rollout, selection: Selection, batch: TokenBatch, iteration: int
  ) -> tuple[list[Episode], list[dict[str, Any]]]:
    """The iteration's episodes that are kept for people, and what is kept of them; none in most iterations."""
    rows = self._recorded_rows(iteration)
    t, fresh = rollout.trajectory, selection.fresh
    columns, mask, width = batch.columns[:fresh], batch.mask[:fresh], t.tokens.shape[1]
    values = t.values if self.policy.sampler.values else None
    if values is None and self.needs_critic:
      values = on_timeline(np.asarray(batch.old_values)[:fresh], columns, mask, width)
    records = episode_records(
      rollout,
      rows,
      self.policy.tokenizer,
      step=iteration + 1,
      split='train',
      group_size=self.config.train.group_size,
      reply_prefix=self.proxy.context.reply_prefix,
      advantages=on_timeline(np.asarray(batch.advantages)[:fresh], columns, mask, width),
      learnt=selection.keep[:fresh],
      prompts_trained=not self.config.algorithm.mask_loss,
      values=values,
    )
    return [rollout.episodes[row] for row in rows], records

  def select(self, rollout: Rollout) -> Selection:
    """Filters prompt groups by their raw scores."""
    f, t, scores = self.config.filter, rollout.trajectory, rollout.scores
    sampled = t.loss_mask.sum(axis=1)
    valid = _valid(t)
    if ESTIMATORS[self.config.algorithm.adv_estimator].needs_groups:
      # A member that is left alone, as the others' environments failed, has nothing to be compared with.
      episodes = [len(np.unique(t.episode[valid & (t.group == g)])) for g in range(t.group.max() + 1)]
      valid &= np.asarray(episodes)[t.group] > 1
    tokens, entropies = (
      np.bincount(t.episode, x, minlength=len(rollout.episode_scores))[t.episode]
      for x in (sampled, t.entropies.sum(axis=1, where=t.loss_mask))
    )
    result = filters.uncertainty_filter(
      t.group,
      valid,
      metric=f.metric,
      scores=scores,
      entropy=entropies / np.maximum(tokens, 1),
      length=tokens,
      episode=t.episode,
      strategy=f.strategy,
      value=f.value,
      kind=f.type,
      include_zero=f.include_zero,
      top_p_mode=f.top_p_mode,
    )
    kept = int(result.keep_groups.sum())
    share = min(kept / self.config.train.groups, 1.0)  # of what an iteration learns from, also after refilling
    scale = np.full(len(scores), filters.loss_scale(share, f.loss_scaling), np.float32)
    if f.soft:
      scale = scale * filters.soft_weights(scores, t.group, valid, t.episode)
    return Selection(rollout, result.keep, scale, kept, len(scores), dict(result.metrics))

  def make_batch(self, params: Any, selection: Selection) -> tuple[TokenBatch, dict[str, float]]:
    """The tokens of the kept rows with their advantages and returns."""
    config, rollout, keep = self.config, selection.rollout, selection.keep
    t = rollout.trajectory
    a = config.algorithm
    trained, through = (
      np.asarray(x)
      for x in masks.selective_masks(t.loss_mask, t.length, mask_loss=a.mask_loss, mask_advantages=a.mask_advantages)
    )
    columns, mask = sampled_columns(trained | through)
    width = round_up(mask.shape[1], max(config.length_step // 2, 1))
    columns = np.pad(columns, ((0, 0), (0, width - columns.shape[1])), constant_values=1)
    mask = np.pad(mask, ((0, 0), (0, width - mask.shape[1]))) & keep[:, None]
    turn = np.where(mask, gather(t.turn, columns, mask), -1).astype(np.int32)
    zeros = np.zeros(mask.shape, np.float32)
    batch = TokenBatch(
      tokens=t.tokens,
      columns=columns,
      mask=mask,
      turn=turn,
      old_logprobs=gather(t.logprobs, columns, mask),
      old_values=gather(t.values, columns, mask),
      advantages=zeros,
      returns=zeros,
      # The masks of the policy's and the critic's tokens go along as weights until each mini-batch makes its own.
      weights=gather(trained, columns, mask).astype(np.float32),
      value_weights=zeros,
      ref_logprobs=zeros,
      importance=zeros + 1,
    )
    sampled = gather(t.loss_mask, columns, mask)
    plans = self._plans(np.flatnonzero(keep), t)
    metrics = dict(selection.metrics)
    if a.old_logprobs == 'trainer':
      logprobs, values = self.learner.score(params, batch, plans)
      fresh = sampled & (np.arange(len(keep)) < selection.fresh)[:, None]  # what is replayed is of older weights
      metrics |= logprob_gap(logprobs, batch.old_logprobs, fresh)
      if a.tis_cap > 0:
        weights = losses.truncated_importance_weights(logprobs, batch.old_logprobs, sampled, a.tis_cap)
        batch = batch.replace(importance=np.where(sampled, weights, 1).astype(np.float32))
        metrics['rollout/importance_mean'] = _mean(batch.importance[fresh])
      batch = batch.replace(old_logprobs=logprobs, old_values=values)
    elif self.needs_critic and not self.policy.sampler.values:
      batch = batch.replace(old_values=self.learner.values(params, batch, plans))
    if self.needs_reference:
      reference = nnx.State({**params, 'policy': self._reference})
      batch = batch.replace(ref_logprobs=self.learner.logprobs(reference, batch, plans))

    reward = self._shape_rewards(
      gather(t.rewards, columns, mask),
      sampled,
      turn,
      t.group,
      t.env,
      credit=config.reward.credit,
      grouping=config.reward.grouping,
      method=config.reward.method,
      episode=_rows_of_episodes(t.episode),
    )
    if a.kl_reward_coef > 0:
      kl = losses.kl_penalty(batch.old_logprobs, batch.ref_logprobs, sampled, a.kl_kind)
      reward = rewards.kl_in_reward(reward, kl, sampled, a.kl_reward_coef)
      metrics['actor/reward_kl_penalty'] = _mean(np.asarray(kl)[sampled])
    estimate = jax.device_get(
      self._advantages(
        a.adv_estimator,
        rewards=reward,
        loss_mask=sampled,
        turn=turn,
        group=t.group,
        values=batch.old_values,
        bootstrap=self._bootstrap(params, rollout) if a.bootstrap_truncated else None,
        episode=_rows_of_episodes(t.episode),
        adv_mask=None if a.mask_advantages else gather(through, columns, mask),
        anchors=rollout.anchors,
        gamma=a.gamma,
        lam=a.lam,
        high_level_gamma=a.high_level_gamma,
        high_level_lam=None if a.high_level_lam < 0 else a.high_level_lam,
        length_weight=a.length_weight,
        whitening=a.whiten_advantages,
        step_gamma=a.step_gamma,
        step_weight=a.step_weight,
        step_std=a.step_std,
      )
    )
    batch = batch.replace(
      advantages=estimate.advantages * selection.scale[:, None],
      returns=estimate.returns,
      value_weights=estimate.value_mask.astype(np.float32),
    )
    metrics |= spread('critic/rewards', np.asarray(reward).sum(axis=1)[keep])
    metrics |= spread('critic/advantages', batch.advantages[sampled])
    if self.needs_critic:
      metrics |= spread('critic/returns', estimate.returns[sampled]) | spread(
        'critic/values', batch.old_values[sampled]
      )
      metrics['critic/vf_explained_var'] = float(
        losses.explained_variance(batch.old_values, estimate.returns, estimate.value_mask)
      )
    return batch, metrics

  def _bootstrap(self, params: Any, rollout: Rollout) -> np.ndarray:
    """f32[B]: the critic's value behind the last sampled token of rows that a budget cut off, 0 for the others."""
    t = rollout.trajectory
    cut = np.isin(t.status, TRUNCATED)
    last = np.where(t.loss_mask, np.arange(t.loss_mask.shape[1]), 0).max(axis=1)
    # The value that belongs to a column is that of the state before it.
    columns, mask = (last + 1)[:, None].astype(np.int32), cut[:, None]
    zeros = np.zeros(mask.shape, np.float32)
    batch = TokenBatch(
      tokens=np.pad(t.tokens, ((0, 0), (0, 1))), columns=columns, mask=mask, turn=zeros.astype(np.int32),
      **{f.name: zeros for f in dataclasses.fields(TokenBatch) if f.name not in ('tokens', 'columns', 'mask', 'turn')},
    )  # fmt: skip
    plans = plan_micro_batches(
      np.flatnonzero(cut),
      last + 2,
      np.ones_like(last),
      size=self.config.optimizer.micro_batch_size,
      length_step=self.config.length_step,
    )
    return self.learner.values(params, batch, plans)[:, 0]

  def _plans(self, rows: np.ndarray, trajectory) -> list[MicroBatch]:
    a = self.config.algorithm
    tokens = trajectory.loss_mask.sum(axis=1) if a.mask_loss and a.mask_advantages else trajectory.length
    return plan_micro_batches(
      rows,
      trajectory.length,
      tokens,
      size=self.config.optimizer.micro_batch_size,
      length_step=self.config.length_step,
    )

  def _mini_batches(self, kept: np.ndarray, episode: np.ndarray, iteration: int, epoch: int) -> list[np.ndarray]:
    """The kept episodes in a random order, cut into those of optimiser steps: i32[rows] each."""
    size = self.config.optimizer.mini_batch_size
    episodes = np.unique(episode[kept])
    order = np.random.default_rng((self.config.seed, iteration, epoch)).permutation(episodes)
    if self.config.filter.fixed_steps:
      parts = np.array_split(order, max(self.rows // size, 1))
    else:
      parts = [order[start : start + size] for start in range(0, len(order), size)]
    rows = {e: kept[episode[kept] == e] for e in episodes.tolist()}
    return [np.concatenate([rows[e] for e in p.tolist()]).astype(np.int32) for p in parts if len(p)]

  def _weigh(self, batch: TokenBatch, rows: np.ndarray, episode: np.ndarray) -> TokenBatch:
    """The batch with the loss's weights of one mini-batch; a sequence is an episode, whatever its rows."""
    a, n = self.config.algorithm, len(rows)
    norm = a.loss_norm_length or self.proxy.limits.max_turns * self.config.agent.max_response_tokens
    # Padded, so that the weights' program has few shapes.
    more = -n % self.config.optimizer.micro_batch_size
    trained, valued = (np.pad(x[rows] > 0, ((0, more), (0, 0))) for x in (batch.weights, batch.value_weights))
    several = a.loss_agg_mode != 'token-mean' and _rows_of_episodes(episode[rows]) is not None
    sequence = np.pad(episode[rows], (0, more), constant_values=-1) if several else None
    weights, value_weights = np.zeros_like(batch.weights), np.zeros_like(batch.weights)
    weights[rows] = self._token_weights(trained, mode=a.loss_agg_mode, sequence=sequence, norm_length=norm)[:n]
    value_weights[rows] = self._token_weights(valued, mode='token-mean')[:n]
    return batch.replace(weights=weights, value_weights=value_weights)

  def update(
    self,
    params: Any,
    opt_state: Any,
    batch: TokenBatch,
    selection: Selection,
    iteration: int,
    lr_scale: float = 1.0,
  ) -> tuple[Any, Any, dict[str, float]]:
    """All optimiser steps of an iteration, none where nothing is kept. `params` and `opt_state` are given away.

    In the first `optimizer.critic_warmup` iterations they are the critic's alone.
    """
    config, kept, t = self.config, np.flatnonzero(selection.keep), selection.rollout.trajectory
    critic_only = iteration < config.optimizer.critic_warmup
    steps = []
    for epoch in range(config.algorithm.ppo_epochs):
      for rows in self._mini_batches(kept, t.episode, iteration, epoch):
        plans = self._plans(rows, t)
        params, opt_state, metrics = self.learner.step(
          params, opt_state, self._weigh(batch, rows, t.episode), plans, lr_scale, critic_only=critic_only
        )
        steps.append(metrics)
    steps = jax.device_get(steps)
    self._ratio_counts = sum(s.pop('ratio_counts', 0) for s in steps)
    means = {name: float(np.mean([s[name] for s in steps])) for name in steps[0]} if steps else {}
    # Before the first step the weights are those that sampled, so what is left is the two programs' difference.
    for name in ('mean', 'max'):
      gap = means.pop(f'actor/logprob_gap_{name}', None)
      if gap is not None and config.algorithm.old_logprobs == 'sampler' and iteration % config.train.online_k == 0:
        means[f'rollout/logprob_gap_{name}'] = float(steps[0][f'actor/logprob_gap_{name}'])
    if not self.needs_critic:
      means = {name: x for name, x in means.items() if not name.startswith('critic/')}
    if not self.needs_reference:
      means.pop('actor/kl_loss', None)
    means['train/num_mini_batches'] = len(steps)
    means['train/lr_scale'] = lr_scale
    return params, opt_state, means

  def histograms(self, batch: TokenBatch) -> dict[str, Any]:
    """For TensorBoard: advantages of the batch's trained tokens, and their probability ratios in the last `update`."""
    return {
      'critic/advantages': batch.advantages[batch.weights > 0],
      'actor/ratio': Counts(RATIO_EDGES, np.asarray(self._ratio_counts)),
    }

  def rollout_metrics(self, rollout: Rollout) -> dict[str, float]:
    """What the rollout's episodes amount to, those that a filter drops included."""
    t, scores = rollout.trajectory, rollout.scores
    sampled = t.loss_mask.sum(axis=1)
    valid = _valid(t)
    by_episode = np.bincount(t.episode, sampled, minlength=len(rollout.episodes))
    metrics = episode_metrics(rollout.episodes, self.config.train.group_size, 'train')
    metrics |= in_group_reward(scores, t.group, valid, t.episode)
    std = filters.group_scores('reward_std', t.group, valid, scores=scores, episode=t.episode)[1]
    metrics['rollout/zero_std_groups'] = _mean(std <= filters.ZERO)
    metrics |= spread('critic/score', np.asarray([e.score for e in rollout.episodes], np.float32))
    metrics |= spread('response_length', by_episode)
    metrics |= spread('rollout/length', t.length[valid].astype(np.float32))
    metrics['rollout/entropy'] = _mean(t.entropies[t.loss_mask])
    replies = [(turn.reply, e.group) for e in rollout.episodes for turn in e.turns]
    metrics['rollout/repeated_replies'] = repeated_replies([r for r, _ in replies], np.asarray([g for _, g in replies]))
    metrics['train/batch_size'] = len(rollout.episodes)
    return metrics

  def gradient_metrics(self, params: Any, batch: TokenBatch, selection: Selection) -> dict[str, float]:
    """Gradient norms of the loss's parts by bucket of in-group reward deviation, without a step (RAGEN-2)."""
    m, rollout = self.config.monitor, selection.rollout
    t = rollout.trajectory
    groups, std = filters.group_scores('reward_std', t.group, selection.keep, scores=rollout.scores, episode=t.episode)
    buckets = reward_std_buckets(std, mode=m.bucket_mode, count=m.gradient_buckets)
    metrics = {}
    for bucket in range(m.gradient_buckets):
      rows = np.flatnonzero(selection.keep & np.isin(t.group, groups[buckets == bucket]))
      if len(rows):
        norms = self.learner.gradient_norms(params, self._weigh(batch, rows, t.episode), self._plans(rows, t))
        metrics |= {f'grad_norm/bucket_{bucket}/{part}': norm for part, norm in norms.items()}
        metrics[f'grad_norm/bucket_{bucket}/reward_std'] = float(std[buckets == bucket].mean())
        metrics[f'grad_norm/bucket_{bucket}/rows'] = len(rows)
    return metrics


def _add(selection: Selection, drawn: list[tuple[Rollout, np.ndarray]], *, multiple: int) -> Selection:
  """The selection with all of some other rollouts behind it, and empty rows up to a multiple of a number."""
  if not drawn:
    return dataclasses.replace(selection, metrics=selection.metrics | {'rollout/replayed_groups': 0})
  whole = concatenate([selection.rollout, *(r for r, _ in drawn)], renumber=True)
  scale = np.concatenate([selection.scale, *(s for _, s in drawn)])
  keep = np.concatenate([selection.keep, np.ones(len(scale) - len(selection.keep), bool)])
  whole = pad_rows(whole, multiple)
  more = len(whole.trajectory.length) - len(keep)
  groups = sum(len(np.unique(r.trajectory.group)) for r, _ in drawn)
  return dataclasses.replace(
    selection,
    rollout=whole,
    keep=np.pad(keep, (0, more)),
    scale=np.pad(scale, (0, more)),
    metrics=selection.metrics | {'rollout/replayed_groups': groups},
  )


def spread(name: str, x: np.ndarray) -> dict[str, float]:
  """Mean, greatest and least of some numbers; nothing where there are none."""
  if not x.size:
    return {}
  return {f'{name}/mean': float(x.mean()), f'{name}/max': float(x.max()), f'{name}/min': float(x.min())}


def _valid(t: Trajectory) -> np.ndarray:
  """bool[B]: rows to learn from, which hold something and whose environment did not fail."""
  return t.loss_mask.any(axis=1) & (t.status != Status.ENV_ERROR)


def _mean(x: np.ndarray) -> float:
  return float(x.mean()) if x.size else 0.0


def _rows_of_episodes(episode: np.ndarray) -> np.ndarray | None:
  """None where every row is an episode of its own, which estimators are faster with."""
  return None if len(np.unique(episode)) == len(episode) else episode
