"""StarPO, from top to bottom: roll out, estimate advantages, update, evaluate, save."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from ragen_jax import experiment
from ragen_jax.agent.agent_proxy import Rollout, round_up
from ragen_jax.agent.statistics import episode_metrics, group_metrics, transcript
from ragen_jax.algorithms import losses
from ragen_jax.algorithms.advantages import ESTIMATORS, compute_advantages
from ragen_jax.config_check import check_config
from ragen_jax.distributed import processes
from ragen_jax.distributed.sharding import place, tree_shardings
from ragen_jax.evaluate import Evaluator, mean_success
from ragen_jax.learner import (
  Learner,
  LossConfig,
  TokenBatch,
  gather,
  make_optimizer,
  plan_micro_batches,
  sampled_columns,
)
from ragen_jax.summary import summarize
from ragen_jax.utils.checkpoint import Checkpointer, record_config, workdir_lock
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.metrics import MetricWriter, Timer
from ragen_jax.utils.progress import Progress

_log = logging.getLogger(__name__)

# Fields that may change when a run goes on: they do not alter what the iterations before would have done.
FREE_FIELDS = frozenset(
  {
    'num_iterations',
    'compilation_cache',
    'checkpoint.every',
    'checkpoint.keep',
    'logging.trajectories',
  }
)


def train_and_evaluate(config: ConfigDict, workdir: str) -> dict[str, float]:
  """Trains a policy, or goes on with the run in `workdir`.

  Args:
    config: see configs/default.py.
    workdir: checkpoints, metrics and TensorBoard files are kept here.

  Returns:
    The last evaluation's metrics.

  Raises:
    UserError: the config cannot be run, or the workdir is another run's.
  """
  check_config(config)
  with contextlib.ExitStack() as stack:
    with processes.same_errors():
      if processes.is_first():
        stack.enter_context(workdir_lock(workdir))
        record_config(workdir, config.to_dict(), free_fields=_free_fields(config))
    _use_compilation_cache(config, workdir)
    return _run(config, workdir)


def _run(config: ConfigDict, workdir: str) -> dict[str, float]:
  policy = experiment.load_policy(config)
  trainer = Trainer(config, policy)
  evaluator = Evaluator(config, policy)
  best = 'val-env/success'
  with Checkpointer(workdir, keep=config.checkpoint.keep, save_best=best) as checkpointer:
    params, opt_state, done = trainer.init()
    steps = processes.gather(checkpointer.latest_step())
    if len(set(steps)) > 1:
      raise UserError(f'--workdir={workdir}: the processes see different checkpoints, {steps}; they must share a disk')
    if checkpointer.latest_step() is not None:
      state, meta = checkpointer.restore({'params': params, 'opt_state': opt_state})
      params, opt_state, done = state['params'], state['opt_state'], meta['iteration']
      told = 'going on in %s after iteration %d' if done < config.num_iterations else '%s is finished: %d iterations'
      _log.info(told, workdir, done)
    start_step = done + 1 if done else 0
    timer = Timer()
    with (
      MetricWriter(workdir, start_step=start_step, enabled=processes.is_first()) as writer,
      Progress(config.num_iterations, start=done, enabled=processes.is_first()) as progress,
    ):
      if done == 0:
        with timer('testing'):
          evaluation = evaluator(params)
        _log_evaluation(writer, 0, evaluation, config)
        writer.scalars(0, timer.pop())
      for iteration in range(done, config.num_iterations):
        with timer('step'):
          with timer('gen'):
            rollout = trainer.rollout(params, iteration)
          with timer('adv'):
            batch, metrics = trainer.make_batch(params, rollout)
          with timer('update_actor'):
            params, opt_state, update_metrics = trainer.update(params, opt_state, batch, rollout, iteration)
        step = iteration + 1
        metrics |= update_metrics | trainer.rollout_metrics(rollout)
        writer.scalars(step, metrics)
        scores = {}
        if _due(step, config.eval.every, config.num_iterations):
          with timer('testing'):
            evaluation = evaluator(params)
          _log_evaluation(writer, step, evaluation, config)
          scores[best] = mean_success(evaluation.metrics, tuple(config.eval.tags))
        if _due(step, config.checkpoint.every, config.num_iterations):
          with timer('save_checkpoint'):
            writer.flush()
            checkpointer.save(step, {'params': params, 'opt_state': opt_state}, {'iteration': step}, metrics=scores)
        times = timer.pop()
        tokens = int(rollout.trajectory.length.sum())
        times['perf/total_num_tokens'] = tokens
        times['perf/throughput'] = tokens / times['timing_s/step']
        times['perf/sampled_tokens_per_s'] = rollout.tokens_sampled / times['timing_s/gen']
        writer.scalars(step, times)
        progress.update(
          step,
          {
            'success': float(np.mean([e.success for e in rollout.episodes])),
            'reward': metrics['critic/score/mean'],
          },
          tokens=tokens,
        )
  # The first process has written all there is, and tells the others.
  return processes.gather(summarize(config, workdir) if processes.is_first() else {})[0]


class Trainer:
  """The parts of an iteration."""

  def __init__(self, config: ConfigDict, policy: experiment.Policy):
    """Builds the environments and the update; nothing is compiled before the first iteration."""
    self.config = config
    self.policy = policy
    tags = tuple(config.train.tags)
    specs = experiment.env_groups(config, tags, experiment.equal_shares(config.train.groups, tags, 'train.groups'))
    self.proxy = experiment.agent_proxy(config, policy.tokenizer, policy.sampler, specs, config.train.group_size)
    self.rows = config.train.groups * config.train.group_size
    self.needs_critic = ESTIMATORS[config.algorithm.adv_estimator].needs_critic
    self.steps_per_iteration = config.algorithm.ppo_epochs * (self.rows // config.optimizer.mini_batch_size)
    self.learner = Learner(nnx.split(policy.model)[0], self._optimizer(), self._loss_config(), policy.mesh)
    self._advantages = jax.jit(
      compute_advantages,
      static_argnames=('name', 'gamma', 'lam', 'high_level_gamma', 'whitening'),
    )
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
    )

  def _loss_config(self) -> LossConfig:
    a = self.config.algorithm
    return LossConfig(
      temperature=self.config.train.temperature,
      vocab_limit=self.policy.tokenizer.size,
      clip_ratio_low=a.clip_ratio_low,
      clip_ratio_high=a.clip_ratio_high,
      clip_ratio_c=a.clip_ratio_c or None,
      value_clip=a.value_clip or None,
      value_coef=a.value_coef if self.needs_critic else 0.0,
      entropy_coef=a.entropy_coef,
      logits_chunk=self.config.model.logits_chunk,
      remat=self.config.model.remat,
    )

  def init(self) -> tuple[Any, Any, int]:
    """Weights, the optimiser's state, and how many iterations are behind them: none."""
    params = experiment.param_state(self.policy.model)
    params = place(params, tree_shardings(params, self.policy.mesh))
    return params, self.learner.init(params), 0

  def rollout(self, params: Any, iteration: int) -> Rollout:
    """Plays the iteration's levels: a fresh one for each group."""
    config = self.config
    first_level = config.train.first_level + config.seed * experiment.LEVELS_PER_SEED + iteration * config.train.groups
    key = jax.random.fold_in(jax.random.key(config.seed), iteration)
    return self.proxy.rollout(
      params, first_level, key, experiment.sampling(config.train), policy_version=iteration * self.steps_per_iteration
    )

  def make_batch(self, params: Any, rollout: Rollout) -> tuple[TokenBatch, dict[str, float]]:
    """The rollout's sampled tokens with their advantages and returns."""
    config, t = self.config, rollout.trajectory
    columns, mask = sampled_columns(t.loss_mask)
    width = round_up(mask.shape[1], max(config.length_step // 2, 1))
    columns = np.pad(columns, ((0, 0), (0, width - columns.shape[1])), constant_values=1)
    mask = np.pad(mask, ((0, 0), (0, width - mask.shape[1])))
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
      weights=zeros,
      value_weights=zeros,
    )
    metrics = {}
    if config.algorithm.old_logprobs == 'trainer':
      logprobs, values = self.learner.score(params, batch, self._plans(np.arange(len(mask)), t))
      gap = np.abs(logprobs - batch.old_logprobs)[mask]
      metrics = {'rollout/logprob_gap_mean': float(gap.mean()), 'rollout/logprob_gap_max': float(gap.max())}
      batch = batch.replace(old_logprobs=logprobs, old_values=values)
    rewards = gather(t.rewards, columns, mask)
    estimate = jax.device_get(
      self._advantages(
        config.algorithm.adv_estimator,
        rewards=rewards,
        loss_mask=mask,
        turn=turn,
        group=t.group,
        values=batch.old_values,
        anchors=rollout.anchors,
        gamma=config.algorithm.gamma,
        lam=config.algorithm.lam,
        high_level_gamma=config.algorithm.high_level_gamma,
        whitening=config.algorithm.whiten_advantages,
      )
    )
    # The mask of the critic's tokens goes along as weights until each mini-batch makes its own.
    batch = batch.replace(
      advantages=estimate.advantages,
      returns=estimate.returns,
      value_weights=estimate.value_mask.astype(np.float32),
    )
    for name, x in {
      'advantages': estimate.advantages,
      'returns': estimate.returns,
      'values': batch.old_values,
    }.items():
      if name == 'advantages' or self.needs_critic:
        metrics |= _spread(f'critic/{name}', x[mask])
    if self.needs_critic:
      metrics['critic/vf_explained_var'] = float(
        losses.explained_variance(batch.old_values, estimate.returns, estimate.value_mask)
      )
    return batch, metrics

  def _plans(self, rows: np.ndarray, trajectory) -> list:
    return plan_micro_batches(
      rows,
      trajectory.length,
      trajectory.loss_mask.sum(axis=1),
      size=self.config.optimizer.micro_batch_size,
      length_step=self.config.length_step,
    )

  def update(
    self, params: Any, opt_state: Any, batch: TokenBatch, rollout: Rollout, iteration: int
  ) -> tuple[Any, Any, dict[str, float]]:
    """All optimiser steps of an iteration. `params` and `opt_state` are given away."""
    config = self.config
    most_tokens = self.proxy.limits.max_turns * config.agent.max_response_tokens
    size = config.optimizer.mini_batch_size
    steps = []
    for epoch in range(config.algorithm.ppo_epochs):
      order = np.random.default_rng((config.seed, iteration, epoch)).permutation(self.rows).astype(np.int32)
      for start in range(0, self.rows, size):
        rows = order[start : start + size]
        weights, value_weights = np.zeros_like(batch.weights), np.zeros_like(batch.weights)
        weights[rows] = self._token_weights(
          batch.mask[rows], mode=config.algorithm.loss_agg_mode, norm_length=most_tokens
        )
        value_weights[rows] = self._token_weights(batch.value_weights[rows] > 0, mode='token-mean')
        part = batch.replace(weights=weights, value_weights=value_weights)
        params, opt_state, metrics = self.learner.step(params, opt_state, part, self._plans(rows, rollout.trajectory))
        steps.append(metrics)
    steps = jax.device_get(steps)
    means = {name: float(np.mean([s[name] for s in steps])) for name in steps[0]}
    # Before the first step the weights are those that sampled, so what is left is the two programs' difference.
    for name in ('mean', 'max'):
      means.pop(f'actor/logprob_gap_{name}')
      if config.algorithm.old_logprobs == 'sampler':
        means[f'rollout/logprob_gap_{name}'] = float(steps[0][f'actor/logprob_gap_{name}'])
    if not self.needs_critic:
      means = {name: x for name, x in means.items() if not name.startswith('critic/')}
    means['train/num_mini_batches'] = len(steps)
    return params, opt_state, means

  def rollout_metrics(self, rollout: Rollout) -> dict[str, float]:
    """What the rollout's episodes amount to."""
    t = rollout.trajectory
    scores = np.asarray([e.score for e in rollout.episodes], np.float32)
    sampled = t.loss_mask.sum(axis=1)
    metrics = episode_metrics(rollout.episodes, self.config.train.group_size, 'train')
    metrics |= group_metrics(scores, t.group)
    metrics |= _spread('critic/score', scores)
    metrics |= _spread('response_length', sampled.astype(np.float32))
    metrics |= _spread('rollout/length', t.length.astype(np.float32))
    metrics['rollout/entropy'] = float(t.entropies[t.loss_mask].mean())
    metrics['train/batch_size'] = len(scores)
    return metrics


def _spread(name: str, x: np.ndarray) -> dict[str, float]:
  return {f'{name}/mean': float(x.mean()), f'{name}/max': float(x.max()), f'{name}/min': float(x.min())}


def _due(step: int, every: int, last: int) -> bool:
  return step == last or (every > 0 and step % every == 0)


def _log_evaluation(writer: MetricWriter, step: int, evaluation, config: ConfigDict) -> None:
  tags = tuple(config.eval.tags)
  writer.scalars(step, evaluation.metrics | {'val-env/success': mean_success(evaluation.metrics, tags)})
  shown = []
  for tag in tags:
    firsts = [e for e in evaluation.episodes if e.tag == tag][:: config.eval.group_size]
    shown += firsts[: config.logging.trajectories]
  writer.text(step, {f'val/generations/{i}': transcript(e) for i, e in enumerate(shown)})


def _free_fields(config: ConfigDict) -> frozenset[str]:
  """With a falling learning rate the number of iterations shapes every one of them."""
  return FREE_FIELDS if config.optimizer.final_lr_fraction == 1 else FREE_FIELDS - {'num_iterations'}


def _use_compilation_cache(config: ConfigDict, workdir: str) -> None:
  directory = config.compilation_cache
  if not directory:
    return
  if directory == 'auto':
    directory = os.path.join(workdir, 'xla_cache')
  jax.config.update('jax_compilation_cache_dir', os.path.abspath(directory))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.3)
