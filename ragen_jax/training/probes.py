"""Diagnostics that need additional forward or backward passes, at fixed intervals. They change no state."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import optax
from flax import nnx

from ragen_jax.agent import finite
from ragen_jax.agent.rollout import Rollout
from ragen_jax.algorithms import filters
from ragen_jax.algorithms.diagnostics import mutual_information, reward_std_buckets
from ragen_jax.training import objective
from ragen_jax.training.batches import TokenRows, TrainBatch, sampled_columns
from ragen_jax.training.learner import Learner
from ragen_jax.training.packing import plan_batches
from ragen_jax.training.selection import Selection
from ragen_jax.training.state import TrainState
from ragen_jax.training.trainer import Trainer

# The end of a thought.
_END = '</think>'


@dataclasses.dataclass(frozen=True)
class ProbeSettings:
  """Fields of `config.monitor`."""

  information_every: int
  information_samples: int
  gradients_every: int
  gradient_buckets: int
  bucket_mode: str


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
  """The columns of a row before a thought: tokens i32[n], and images i32[n] as in `Trajectory`, None without images."""

  tokens: np.ndarray
  image: np.ndarray | None

  @property
  def key(self) -> tuple[bytes, bytes]:
    """Equal for prompts of equal tokens and images."""
    return self.tokens.tobytes(), b'' if self.image is None else self.image.tobytes()


class Probes:
  def __init__(self, settings: ProbeSettings, trainer: Trainer):
    """Nothing is compiled before the first probe that is due."""
    self._settings = settings
    self._trainer = trainer
    graphdef = nnx.split(trainer.model.model)[0]
    # Each takes the gradients of one part of the loss; none takes a step.
    self._learners = {
      name: Learner(
        graphdef,
        trainer.learner.optimizer,
        objective.PolicyAndValueLoss(part),
        trainer.model.mesh,
      )
      for name, part in objective.loss_parts(trainer.settings.loss).items()
    }

  def __call__(self, state: TrainState, rollout: Rollout, selection: Selection, batch: TrainBatch) -> dict[str, float]:
    """The metrics of the probes that are due in this iteration; called before its update.

    They are `grad_norm/bucket_<i>/...` (`gradient_norms`), and `collapse_first_turn_sample/...` and
    `collapse_trajectory_sample/...` (`thought_information`); {} if none is due, or if the rollout's numbers are not
    finite.
    """
    s, metrics = self._settings, {}
    if finite.findings(selection.metrics):
      return {}
    if s.gradients_every and state.iteration % s.gradients_every == 0 and selection.keep.any():
      metrics |= self.gradient_norms(state, selection, batch)
    if s.information_every and state.iteration % s.information_every == 0:
      rng = np.random.default_rng((self._trainer.settings.seed, state.iteration))
      for name, first_only in (('collapse_first_turn_sample', True), ('collapse_trajectory_sample', False)):
        found = self.thought_information(state, rollout, rng, first_only=first_only)
        metrics |= {f'{name}/{key}': value for key, value in found.items()}
    return metrics

  def gradient_norms(self, state: TrainState, selection: Selection, batch: TrainBatch) -> dict[str, float]:
    """Gradient norms of the parts of the loss, by bucket of the groups' reward deviation (RAGEN-2).

    Each bucket with rows has 'grad_norm/bucket_<i>/task', '/entropy' and '/kl' (see `objective.loss_parts`), the mean
    deviation '/reward_std', and the number of '/rows'.
    """
    s, rollout = self._settings, selection.rollout
    t = rollout.trajectory
    groups, std = filters.group_scores('reward_std', t.group, selection.keep, scores=rollout.scores, episode=t.episode)
    buckets = reward_std_buckets(std, mode=s.bucket_mode, count=s.gradient_buckets)
    metrics = {}
    for bucket in range(s.gradient_buckets):
      rows = np.flatnonzero(selection.keep & np.isin(t.group, groups[buckets == bucket]))
      if len(rows):
        for part, learner in self._learners.items():
          gradients, _ = learner.gradients(state, self._trainer.micro_batches(batch, selection, rows))
          metrics[f'grad_norm/bucket_{bucket}/{part}'] = float(optax.tree.norm(gradients))
        metrics[f'grad_norm/bucket_{bucket}/reward_std'] = float(std[buckets == bucket].mean())
        metrics[f'grad_norm/bucket_{bucket}/rows'] = len(rows)
    return metrics

  def thought_information(
    self, state: TrainState, rollout: Rollout, rng: np.random.Generator, *, first_only: bool
  ) -> dict[str, float]:
    """Measures the dependence of thoughts on their prompts (RAGEN-2's cross scores), in one batched pass.

    `information_samples` thoughts of different episodes are drawn: with `first_only` of first turns, and scored after
    first prompts; otherwise of all turns, and each scored after the conversation before it. The metrics are
    `valid_thinking_rate`, the share of drawn replies that close their thought, and those of
    `diagnostics.mutual_information`.
    """
    t = rollout.trajectory
    drawn = self.draw_thoughts(rollout, rng, first_only=first_only)
    closed = [(row, columns) for row, columns in drawn if len(columns)]
    prompts = [
      Prompt(t.tokens[row, : columns[0]], None if t.image is None else t.image[row, : columns[0]])
      for row, columns in closed
    ]
    thoughts = [t.tokens[row, columns] for row, columns in closed]
    metrics = {'valid_thinking_rate': len(thoughts) / max(len(drawn), 1)}
    # Equal prompts of several thoughts are scored once.
    distinct = {p.key: i for i, p in reversed(list(enumerate(prompts)))}
    order = {key: i for i, key in enumerate(distinct)}
    if len(order) < 2:
      return metrics
    own = np.asarray([order[p.key] for p in prompts])
    scores = self.cross_scores(state.params, [prompts[i] for i in distinct.values()], thoughts, rollout.images)
    return metrics | mutual_information(scores, own, lengths=np.asarray([len(z) for z in thoughts]))

  def draw_thoughts(
    self, rollout: Rollout, rng: np.random.Generator, *, first_only: bool
  ) -> list[tuple[int, np.ndarray]]:
    """Draws (row, columns i32[n]) of thoughts of different episodes, see `thought_information`.

    The columns are those of a reply up to the end of the thought; none if the reply does not close its thought.
    """
    t = rollout.trajectory
    rows = rng.permutation(np.flatnonzero(t.loss_mask.any(axis=1)))
    if first_only:
      rows = rows[[0 in t.turn[row][t.loss_mask[row]] for row in rows]]
    rows = rows[np.unique(t.episode[rows], return_index=True)[1]]  # one row of each episode
    drawn = []
    for row in rng.permutation(rows)[: self._settings.information_samples]:
      turns = np.unique(t.turn[row][t.loss_mask[row]])
      turn = turns[0] if first_only else rng.choice(turns)
      columns = np.flatnonzero(t.loss_mask[row] & (t.turn[row] == turn))
      drawn.append((int(row), columns[: self._thought_length(t.tokens[row, columns])]))
    return drawn

  def _thought_length(self, ids: np.ndarray) -> int:
    """Number of tokens of a reply up to the end of its thought; 0 if it does not close a thought."""
    return self._trainer.model.tokenizer.count_until(ids.tolist(), _END)

  def cross_scores(
    self, params: Any, prompts: list[Prompt], thoughts: list[np.ndarray], images: Sequence[np.ndarray] = ()
  ) -> np.ndarray:
    """f64[N, M]: the log-prob in nats of each of N thoughts, i32[length], after each of M prompts with these images."""
    rows, length, image = _cross_rows(prompts, thoughts)
    if image is not None:
      rows = rows.replace(images=self._trainer.sight.of_rows(params, rows.tokens, length, image, images))
    batching = self._trainer.settings.estimate.batching
    every = np.arange(len(length), dtype=np.int32)
    (plans,) = plan_batches([every], length, rows.mask.sum(axis=1), batching)
    logprobs = self._trainer.scorer.logprobs(params, rows, plans)
    return logprobs.astype(np.float64).sum(axis=1).reshape(len(thoughts), len(prompts))


def _cross_rows(prompts: list[Prompt], thoughts: list[np.ndarray]) -> tuple[TokenRows, np.ndarray, np.ndarray | None]:
  """Every thought after every prompt, N * M rows, their lengths i32[N * M], and the images of their columns."""
  pairs = [(x, z) for z in thoughts for x in prompts]
  length = np.asarray([len(x.tokens) + len(z) for x, z in pairs])
  tokens = np.zeros((len(pairs), int(length.max())), np.int32)
  thought, image = np.zeros(tokens.shape, bool), np.full(tokens.shape, -1, np.int32)
  for i, (x, z) in enumerate(pairs):
    before = len(x.tokens)
    tokens[i, :before], tokens[i, before : length[i]] = x.tokens, z
    thought[i, before : length[i]] = True
    if x.image is not None:
      image[i, :before] = x.image
  return TokenRows(tokens, *sampled_columns(thought)), length, image if (image >= 0).any() else None
