"""Diagnostics that cost forward or backward passes of their own, every so many iterations; they change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from ragen_jax.agent.rollout import Rollout
from ragen_jax.algorithms.diagnostics import mutual_information
from ragen_jax.training.learner import TokenBatch, plan_micro_batches, sampled_columns
from ragen_jax.training.trainer import Selection, Trainer

# Ends a thought.
_END = '</think>'


def probe(
  trainer: Trainer, params: Any, batch: TokenBatch, rollout: Rollout, selection: Selection, iteration: int
) -> dict[str, float]:
  """The probes that are due in this iteration, on its rollout and before its update.

  Returns:
    `grad_norm/bucket_<i>/...` (`Trainer.gradient_metrics`) and `collapse_first_turn_sample/...`,
    `collapse_trajectory_sample/...` (`thought_information`), or nothing.
  """
  monitor, metrics = trainer.config.monitor, {}
  if monitor.gradients_every and iteration % monitor.gradients_every == 0 and selection.keep.any():
    metrics |= trainer.gradient_metrics(params, batch, selection)
  if monitor.information_every and iteration % monitor.information_every == 0:
    rng = np.random.default_rng((trainer.config.seed, iteration))
    for name, first_only in (('collapse_first_turn_sample', True), ('collapse_trajectory_sample', False)):
      found = thought_information(trainer, params, rollout, rng, first_only=first_only)
      metrics |= {f'{name}/{key}': value for key, value in found.items()}
  return metrics


def thought_information(
  trainer: Trainer, params: Any, rollout: Rollout, rng: np.random.Generator, *, first_only: bool
) -> dict[str, float]:
  """How much thoughts depend on what they were thought about: RAGEN-2's cross scores, in one batched pass.

  Args:
    trainer: reads `monitor.information_samples`, the number of thoughts.
    params: weights to score with.
    rollout: where thoughts are drawn from, each from another episode.
    rng: draws them.
    first_only: thoughts of first turns under first prompts; otherwise of any turn, each under the whole conversation
      before it.

  Returns:
    `valid_thinking_rate`, the share of drawn replies that close their thought, and what
    `diagnostics.mutual_information` gives for those.
  """
  config, t = trainer.config, rollout.trajectory
  rows = rng.permutation(np.flatnonzero(t.loss_mask.any(axis=1)))
  if first_only:
    rows = rows[[0 in t.turn[row][t.loss_mask[row]] for row in rows]]
  rows = rows[np.unique(t.episode[rows], return_index=True)[1]]  # one of each episode
  rows = rng.permutation(rows)[: config.monitor.information_samples]
  prompts, thoughts, drawn = [], [], 0
  for row in rows:
    turns = np.unique(t.turn[row][t.loss_mask[row]])
    turn = turns[0] if first_only else rng.choice(turns)
    columns = np.flatnonzero(t.loss_mask[row] & (t.turn[row] == turn))
    length = _thought_length(trainer, t.tokens[row, columns])
    drawn += 1
    if length:
      prompts.append(t.tokens[row, : columns[0]])
      thoughts.append(t.tokens[row, columns[:length]])
  metrics = {'valid_thinking_rate': len(thoughts) / max(drawn, 1)}
  # A prompt that several thoughts have is scored once.
  distinct = {tuple(p): i for i, p in reversed(list(enumerate(prompts)))}
  order = {key: i for i, key in enumerate(distinct)}
  if len(order) < 2:
    return metrics
  own = np.asarray([order[tuple(p)] for p in prompts])
  scores = _cross_scores(trainer, params, [prompts[i] for i in distinct.values()], thoughts)
  return metrics | mutual_information(scores, own, lengths=np.asarray([len(z) for z in thoughts]))


def _thought_length(trainer: Trainer, ids: np.ndarray) -> int:
  """Tokens of a reply up to its thought's end; 0 where it has none."""
  decode = trainer.policy.tokenizer.decode_batch
  if not trainer.config.agent.think or _END not in decode([ids.tolist()])[0]:
    return 0
  low, high = 1, len(ids)  # the least prefix whose text has the end
  while low < high:
    middle = (low + high) // 2
    low, high = (low, middle) if _END in decode([ids[:middle].tolist()])[0] else (middle + 1, high)
  return low


def _cross_scores(trainer: Trainer, params: Any, prompts: list[np.ndarray], thoughts: list[np.ndarray]) -> np.ndarray:
  """f64[N, M]: the log-prob in nats of each of N thoughts behind each of M prompts."""
  pairs = [(x, z) for z in thoughts for x in prompts]
  length = np.asarray([len(x) + len(z) for x, z in pairs])
  tokens = np.zeros((len(pairs), int(length.max())), np.int32)
  thought = np.zeros(tokens.shape, bool)
  for i, (x, z) in enumerate(pairs):
    tokens[i, : len(x)], tokens[i, len(x) : length[i]] = x, z
    thought[i, len(x) : length[i]] = True
  columns, mask = sampled_columns(thought)
  zeros = np.zeros(mask.shape, np.float32)
  batch = TokenBatch(
    tokens=tokens, columns=columns, mask=mask, turn=zeros.astype(np.int32), old_logprobs=zeros, old_values=zeros,
    advantages=zeros, returns=zeros, weights=zeros, value_weights=zeros, ref_logprobs=zeros, importance=zeros,
  )  # fmt: skip
  plans = plan_micro_batches(
    np.arange(len(pairs), dtype=np.int32),
    length,
    mask.sum(axis=1),
    size=trainer.config.optimizer.micro_batch_size,
    length_step=trainer.config.length_step,
  )
  logprobs = trainer.learner.logprobs(params, batch, plans)
  return logprobs.astype(np.float64).sum(axis=1).reshape(len(thoughts), len(prompts))
