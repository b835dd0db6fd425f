"""A rollout: token rows with their episodes, and how rollouts are joined, cut and padded."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from ragen_jax.agent.episode import Episode
from ragen_jax.agent.trajectory import Trajectory


@dataclasses.dataclass
class Rollout:
  """The episodes of a rollout, as token rows and in words.

  Attributes:
    trajectory: token rows, for the update; rows of length 0 where the speaker writes no tokens.
    episodes: in words; empty in rollouts from a replay buffer.
    anchors: i32[B, max_turns], equal where two turns began from the same observation of the same level; -1 where the
      episode did not get there.
    episode_scores: f32[episodes], their raw scores, penalties included; each is `Episode.score`, rounded once. What
      compares episodes reads these, never the float32 sum of a row's rewards.
    tokens_sampled: number of tokens with loss.
    pad_id: the token behind a row's last.
  """

  trajectory: Trajectory
  episodes: list[Episode]
  anchors: np.ndarray
  episode_scores: np.ndarray
  tokens_sampled: int
  pad_id: int

  @property
  def scores(self) -> np.ndarray:
    """f32[B], the raw score of each row's episode."""
    return self.episode_scores[self.trajectory.episode]


def _padding(pad_id: int) -> Trajectory:
  """The value of unused columns and rows, for each array of a trajectory."""
  return Trajectory(**{f.name: 0 for f in dataclasses.fields(Trajectory)}).replace(turn=-1, tokens=pad_id)


def concatenate(parts: list[Rollout], *, renumber: bool) -> Rollout:
  """Joins rollouts; rows keep their order.

  Args:
    parts: shares of one rollout, or several rollouts of fresh levels.
    renumber: each part counts its groups and episodes from 0, as several rollouts do.
  """
  if len(parts) == 1:
    return parts[0]
  if renumber:
    trajectories = [p.trajectory for p in parts]
    groups = np.cumsum([0] + [int(t.group.max()) + 1 for t in trajectories])
    episodes = np.cumsum([0] + [len(p.episode_scores) for p in parts])
    parts = [
      dataclasses.replace(
        p,
        trajectory=p.trajectory.replace(group=p.trajectory.group + g, episode=p.trajectory.episode + e),
        episodes=[dataclasses.replace(x, group=x.group + int(g)) for x in p.episodes],
      )
      for p, g, e in zip(parts, groups, episodes, strict=False)
    ]
  widths = [p.trajectory.tokens.shape[1] for p in parts]

  def join(filler, *leaves):
    if leaves[0].ndim == 1:
      return np.concatenate(leaves)
    grown = [np.pad(x, ((0, 0), (0, max(widths) - x.shape[1])), constant_values=filler) for x in leaves]
    return np.concatenate(grown)

  trajectory = jax.tree.map(join, _padding(parts[0].pad_id), *(p.trajectory for p in parts))
  # Each part numbers its anchors by itself.
  offsets = np.cumsum([0] + [int(p.anchors.max(initial=-1)) + 1 for p in parts])
  anchors = [np.where(p.anchors < 0, -1, p.anchors + o) for p, o in zip(parts, offsets, strict=False)]
  return Rollout(
    trajectory,
    [e for p in parts for e in p.episodes],
    np.concatenate(anchors),
    np.concatenate([p.episode_scores for p in parts]),
    sum(p.tokens_sampled for p in parts),
    parts[0].pad_id,
  )


def take_rows(rollout: Rollout, rows: np.ndarray) -> Rollout:
  """Some rows, i32[b], their groups and episodes counted from 0; episodes in words are left behind."""
  t = rollout.trajectory
  kept, episode = np.unique(t.episode[rows], return_inverse=True)
  own = jax.tree.map(lambda x: x[rows], t)
  own = own.replace(
    group=np.unique(own.group, return_inverse=True)[1].astype(np.int32), episode=episode.astype(np.int32)
  )
  return Rollout(own, [], rollout.anchors[rows], rollout.episode_scores[kept], int(own.loss_mask.sum()), rollout.pad_id)


def pad_rows(rollout: Rollout, multiple: int) -> Rollout:
  """The rollout with empty rows behind it, up to a multiple of a number of rows."""
  more = -len(rollout.trajectory.length) % multiple

  def pad(filler, x):
    return np.pad(x, ((0, more),) + ((0, 0),) * (x.ndim - 1), constant_values=filler)

  return dataclasses.replace(
    rollout,
    trajectory=jax.tree.map(pad, _padding(rollout.pad_id), rollout.trajectory),
    anchors=pad(-1, rollout.anchors),
  )
