"""A buffer of earlier rollouts, from which whole prompt groups are learnt from again.

What is drawn was sampled by an older policy, so its tokens are weighed with truncated importance weights
(`algorithm.tis_cap`), and nothing older than the bound is drawn.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from ragen_jax.agent.rollout import Rollout, take_rows
from ragen_jax.agent.trajectory import Trajectory


@dataclasses.dataclass(frozen=True)
class _Entry:
  iteration: int
  rollout: Rollout  # without its texts
  scale: np.ndarray  # f32[B], factors of the rows' advantages


class ReplayBuffer:
  """The rollouts of the last iterations."""

  def __init__(self, max_age: int):
    """Empty.

    Args:
      max_age: iterations after its own in which a rollout may still be drawn from.
    """
    self._max_age = max_age
    self._entries: list[_Entry] = []

  def add(self, rollout: Rollout, rows: np.ndarray, scale: np.ndarray, iteration: int) -> None:
    """Keeps what an iteration learns from.

    Args:
      rollout: the iteration's.
      rows: i32[b], those of its rows that are learnt from.
      scale: f32[B], factors of the advantages of all its rows.
      iteration: which one it is.
    """
    if len(rows):
      self._entries.append(_Entry(iteration, take_rows(rollout, rows), scale[rows]))

  def draw(self, groups: int, rng: np.random.Generator, iteration: int) -> list[tuple[Rollout, np.ndarray]]:
    """Up to `groups` different groups of rollouts that are not too old; older ones are forgotten.

    Returns:
      For each rollout that some come from: their rows, and their factors.
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
    """Forgets everything."""
    self._entries = []

  def state(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(arrays, a JSON description of them), for a checkpoint."""
    arrays, described = {}, []
    for i, e in enumerate(self._entries):
      own = {f.name: getattr(e.rollout.trajectory, f.name) for f in dataclasses.fields(Trajectory)}
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
    """Arrays of the shapes that are described, to restore a checkpoint into."""
    return {
      str(i): {name: np.zeros(shape, dtype) for name, (shape, dtype) in d['arrays'].items()}
      for i, d in enumerate(described)
    }

  def load_state(self, arrays: dict[str, Any], described: list[dict[str, Any]]) -> None:
    """Goes on where `state` was taken."""
    self._entries = []
    for i, d in enumerate(described):
      own = jax.tree.map(np.asarray, arrays[str(i)])
      trajectory = Trajectory(**{f.name: own[f.name] for f in dataclasses.fields(Trajectory)})
      tokens = int(trajectory.loss_mask.sum())
      rollout = Rollout(trajectory, [], own['anchors'], own['episode_scores'], tokens, d['pad_id'])
      self._entries.append(_Entry(d['iteration'], rollout, own['scale']))
