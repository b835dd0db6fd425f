"""Metrics of a rollout: success, rewards, lengths and entropy of all its episodes, and the age of trained rows."""

from __future__ import annotations

import numpy as np

from ragen_jax.agent.metrics import OF_REPLIES, episode_metrics
from ragen_jax.agent.rollout import Rollout
from ragen_jax.algorithms import filters
from ragen_jax.algorithms.diagnostics import in_group_reward, repeated_replies
from ragen_jax.training.selection import Selection, has_replies


def rollout_metrics(rollout: Rollout, group_size: int) -> dict[str, float]:
  """The metrics of a fresh rollout, including the episodes that a filter drops."""
  t, scores = rollout.trajectory, rollout.scores
  valid = has_replies(t)
  by_episode = np.bincount(t.episode, t.loss_mask.sum(axis=1), minlength=len(rollout.episodes))
  metrics = episode_metrics(rollout.episodes, group_size, 'train')
  metrics |= over_tags(metrics, 'train')
  metrics |= in_group_reward(scores, t.group, valid, t.episode)
  std = filters.group_scores('reward_std', t.group, valid, scores=scores, episode=t.episode)[1]
  metrics['rollout/zero_std_groups'] = mean(std <= filters.ZERO)
  metrics |= mean_max_min('critic/score', np.asarray([e.score for e in rollout.episodes]))
  metrics |= mean_max_min('response_length', by_episode)
  metrics |= mean_max_min('rollout/length', t.length[valid].astype(np.float32))
  metrics['rollout/entropy'] = mean(t.entropies[t.loss_mask])
  replies = [(turn.reply, e.group) for e in rollout.episodes for turn in e.turns]
  metrics['rollout/repeated_replies'] = repeated_replies([r for r, _ in replies], np.asarray([g for _, g in replies]))
  metrics['train/batch_size'] = len(rollout.episodes)
  metrics['perf/total_num_tokens'] = int(t.length.sum())
  if rollout.row_steps:
    metrics['perf/used_row_steps'] = rollout.tokens_sampled / rollout.row_steps
  return metrics


def over_tags(metrics: dict[str, float], prefix: str) -> dict[str, float]:
  """`<prefix>/<name>` of the metrics of replies, from `<prefix>/<tag>/<name>`: the mean over the tags that have it."""
  found = {}
  for name in OF_REPLIES:
    own = [x for key, x in metrics.items() if key.startswith(f'{prefix}/') and key.rpartition('/')[2] == name]
    if own:
      found[f'{prefix}/{name}'] = float(np.mean(own))
  return found


def policy_lag(selection: Selection, iteration: int) -> dict[str, float]:
  """How old the policies are that sampled the rows to learn from: 0 for rows of the iteration's own weights.

  Rows of a replay buffer, and of a rollout that several iterations use (`train.online_k`), come from older weights.
  `iteration` is the number of updates behind the weights that learn from them. {} if no row is kept.
  """
  lag = iteration - selection.rollout.trajectory.policy_version[selection.keep]
  if not lag.size:
    return {}
  return {'rollout/policy_lag_mean': float(lag.mean()), 'rollout/policy_lag_max': float(lag.max())}


def mean_max_min(name: str, x: np.ndarray) -> dict[str, float]:
  """`<name>/mean`, `<name>/max` and `<name>/min` of an array; {} if it is empty."""
  if not x.size:
    return {}
  return {f'{name}/mean': float(x.mean()), f'{name}/max': float(x.max()), f'{name}/min': float(x.min())}


def mean(x: np.ndarray) -> float:
  """The mean of an array, 0 if it is empty."""
  return float(x.mean()) if x.size else 0.0
