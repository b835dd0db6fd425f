"""A buffer of the rollouts of earlier iterations, from whose prompt groups an update can learn again.

Replayed tokens were sampled by an older policy, so they get truncated importance weights (`algorithm.tis_cap`), and
rollouts older than a bound are dropped.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from ragen_jax.agent.rollout import Rollout, take_rows
from ragen_jax.agent.trajectory import Trajectory

# Names of images in a checkpoint begin with this, and end with a number.
_IMAGE = 'image_'


@dataclasses.dataclass(frozen=True)
class ReplaySettings:
  """Fields of `config.replay`."""

  groups: int
  max_age: int


@dataclasses.dataclass(frozen=True)
class _Entry:
  iteration: int
  rollout: Rollout  # without its episodes
  scale: np.ndarray  # f32[B], factors of the rows' advantages


class ReplayBuffer:
  """The rollouts of the last iterations."""

  def __init__(self, settings: ReplaySettings):
    self._max_age = settings.max_age
    self._entries: list[_Entry] = []

  def add(self, rollout: Rollout, rows: np.ndarray, scale: np.ndarray, iteration: int) -> None:
    """Stores the `rows` i32[b] that an iteration selects of B fresh ones; `scale` f32[B] are factors of advantages."""
    if len(rows):
      self._entries.append(_Entry(iteration, take_rows(rollout, rows), scale[rows]))

  def draw(self, groups: int, rng: np.random.Generator, iteration: int) -> list[tuple[Rollout, np.ndarray]]:
    """Drops the rollouts that are too old, and draws prompt groups at random, without replacement.

    The result has (rows, f32[b] factors of their advantages) for each rollout that a drawn group comes from, oldest
    first. Fewer groups are drawn if the buffer holds fewer.
    """
    self._entries = [e for e in self._entries if iteration - e.iteration <= self._max_age]
    every = [(i, g) for i, e in enumerate(self._entries) for g in np.unique(e.rollout.trajectory.group).tolist()]
    chosen = [every[j] for j in rng.permutation(len(every))[:groups]]
    drawn = []
    for i in sorted({k for k, _ in chosen}):
      e = self._entries[i]
      rows = np.flatnonzero(np.isin(e.rollout.trajectory.group, [g for k, g in chosen if k == i]))
      drawn.append((take_rows(e.rollout, rows), e.scale[rows]))
    return drawn

  def clear(self) -> None:
    """Drops all rollouts."""
    self._entries = []

  def state(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The content for a checkpoint: arrays, and a JSON description of their shapes."""
    arrays, described = {}, []
    for i, e in enumerate(self._entries):
      t = e.rollout.trajectory
      own = {f.name: x for f in dataclasses.fields(Trajectory) if (x := getattr(t, f.name)) is not None}
      own |= {f'{_IMAGE}{k}': x for k, x in enumerate(e.rollout.images)}
      own |= {'anchors': e.rollout.anchors, 'episode_scores': e.rollout.episode_scores, 'scale': e.scale}
      arrays[str(i)] = own
      described.append(
        {
          'iteration': e.iteration,
          'pad_id': e.rollout.pad_id,
          'arrays': {name: [list(x.shape), np.dtype(x.dtype).name] for name, x in own.items()},
        }
      )
    return arrays, described

  @staticmethod
  def empty_state(described: list[dict[str, Any]]) -> dict[str, Any]:
    """Arrays of zeros with the described shapes, as the target of a restore."""
    return {
      str(i): {name: np.zeros(shape, dtype) for name, (shape, dtype) in d['arrays'].items()}
      for i, d in enumerate(described)
    }

  def load_state(self, arrays: dict[str, Any], described: list[dict[str, Any]]) -> None:
    """Restores the content from `state`."""
    self._entries = []
    for i, d in enumerate(described):
      own = jax.tree.map(np.asarray, arrays[str(i)])
      trajectory = Trajectory(**{f.name: own[f.name] for f in dataclasses.fields(Trajectory) if f.name in own})
      tokens, scores = int(trajectory.loss_mask.sum()), own['episode_scores']
      images = tuple(own[f'{_IMAGE}{k}'] for k in range(sum(name.startswith(_IMAGE) for name in own)))
      rollout = Rollout(trajectory, [], own['anchors'], scores, tokens, d['pad_id'], images=images)
      self._entries.append(_Entry(d['iteration'], rollout, own['scale']))
