"""Selection: the prompt groups of a rollout that an update learns from (StarPO-S), and additional replayed groups."""

from __future__ import annotations

import dataclasses

import numpy as np

from ragen_jax.agent.episode import Status
from ragen_jax.agent.finite import NotFinite
from ragen_jax.agent.rollout import Rollout, concatenate, pad_rows
from ragen_jax.agent.trajectory import Trajectory
from ragen_jax.algorithms import filters


@dataclasses.dataclass(frozen=True)
class FilterSettings:
  """The filter of prompt groups. Fields of `config.filter`, and the number of groups of an iteration.

  `needs_groups`: whether the estimator compares the members of a group; groups of one member are then dropped.
  """

  metric: str
  strategy: str
  value: float
  type: str
  include_zero: bool
  top_p_mode: str
  loss_scaling: str
  soft: bool
  needs_groups: bool
  groups: int


@dataclasses.dataclass(frozen=True)
class Selection:
  """The rows that an update learns from.

  Attributes:
    rollout: the fresh rollout, followed by replayed rows.
    keep: bool[B], the rows to learn from.
    scale: f32[B], factors of the rows' advantages.
    groups: number of kept prompt groups of the fresh rollout.
    fresh: number of rows of the fresh rollout; they come first.
    metrics: metrics of the filter, the refills and the replay, and findings of numbers that are not finite.
  """

  rollout: Rollout
  keep: np.ndarray
  scale: np.ndarray
  groups: int
  fresh: int
  metrics: dict[str, float | NotFinite]


def select_rows(rollout: Rollout, settings: FilterSettings) -> Selection:
  """Filters the prompt groups of a fresh rollout by the raw scores, entropies or lengths of their episodes."""
  t, scores = rollout.trajectory, rollout.scores
  valid = has_replies(t)
  if settings.needs_groups:
    # If the environments of all other members failed, there is nothing to compare a member with.
    episodes = [len(np.unique(t.episode[valid & (t.group == g)])) for g in range(t.group.max() + 1)]
    valid &= np.asarray(episodes)[t.group] > 1
  tokens, entropies = (
    np.bincount(t.episode, x, minlength=len(rollout.episode_scores))[t.episode]
    for x in (t.loss_mask.sum(axis=1), t.entropies.sum(axis=1, where=t.loss_mask))
  )
  result = filters.uncertainty_filter(
    t.group,
    valid,
    metric=settings.metric,
    scores=scores,
    entropy=entropies / np.maximum(tokens, 1),
    length=tokens,
    episode=t.episode,
    strategy=settings.strategy,
    value=settings.value,
    kind=settings.type,
    include_zero=settings.include_zero,
    top_p_mode=settings.top_p_mode,
  )
  kept = int(result.keep_groups.sum())
  share = min(kept / settings.groups, 1.0)  # relative to the groups of an iteration, also after refills
  scale = np.full(len(scores), filters.loss_scale(share, settings.loss_scaling), np.float32)
  if settings.soft:
    scale = scale * filters.soft_weights(scores, t.group, valid, t.episode)
  return Selection(rollout, result.keep, scale, kept, len(scores), dict(result.metrics))


def without_groups(selection: Selection, found: dict[str, NotFinite]) -> Selection:
  """The selection for a rollout with numbers that are not finite: keeps no rows, and has the findings as metrics."""
  keep, scale = np.zeros_like(selection.keep), np.ones_like(selection.scale)
  return dataclasses.replace(selection, keep=keep, scale=scale, groups=0, metrics=selection.metrics | found)


def draw_groups(selection: Selection, count: int, rng: np.random.Generator) -> Selection:
  """The selection, reduced to at most `count` of its kept groups, which are drawn at random."""
  if selection.groups <= count:
    return selection
  group = selection.rollout.trajectory.group
  kept = rng.permutation(np.unique(group[selection.keep]))[:count]
  return dataclasses.replace(selection, keep=selection.keep & np.isin(group, kept), groups=count)


def with_replayed(selection: Selection, drawn: list[tuple[Rollout, np.ndarray]], *, multiple: int) -> Selection:
  """Appends replayed rows to the selection, all of them kept (`ReplayBuffer.draw`), and empty rows.

  The number of rows becomes a multiple of `multiple`, so that few programs are compiled.
  """
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


def has_replies(trajectory: Trajectory) -> np.ndarray:
  """bool[B]: rows with sampled tokens whose environment did not fail; updates use only such rows."""
  return trajectory.loss_mask.any(axis=1) & (trajectory.status != Status.ENV_ERROR)
