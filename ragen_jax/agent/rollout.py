"""Rollouts: token rows with their episodes, and functions that join, cut and pad rollouts."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from ragen_jax.agent.episode import Episode, Status, Turn
from ragen_jax.agent.segments import ImageSegment, TextSegment, TokenSegment
from ragen_jax.agent.trajectory import Trajectory
from ragen_jax.agent.world_model.state_reward import ReplyReward
from ragen_jax.envs.scenes import RoomScene, Scene, TableScene
from ragen_jax.models.vision.encoder import digest


@dataclasses.dataclass
class Rollout:
  """The episodes of a rollout, as token rows and as text.

  Attributes:
    trajectory: token rows, for the update; rows of length 0 if the speaker writes no tokens.
    episodes: the episodes as text; empty in rollouts from a replay buffer.
    anchors: i32[B, max_turns], equal for turns that began with the same observation of the same level; -1 for turns
      that were not played.
    episode_scores: f32[episodes], raw scores including penalties: `Episode.score`, rounded once. Filters and metrics
      use these scores, estimators `trained_scores`; none the float32 sum of a row's rewards.
    tokens_sampled: number of sampled tokens.
    pad_id: the token that fills unused columns.
    images: the images that the rows show, u8[H, W, 3] each, equal ones once; () in rollouts of text.
    row_steps: rows of the devices times the tokens of the longest reply, summed over the calls of `decode`: the tokens
      that could have been sampled. 0 if nothing was decoded.
  """

  trajectory: Trajectory
  episodes: list[Episode]
  anchors: np.ndarray
  episode_scores: np.ndarray
  tokens_sampled: int
  pad_id: int
  row_steps: int = 0
  images: tuple[np.ndarray, ...] = ()

  @property
  def scores(self) -> np.ndarray:
    """f32[B], the raw score of each row's episode."""
    return self.episode_scores[self.trajectory.episode]

  @property
  def trained_scores(self) -> np.ndarray:
    """f32[B], the score of each row's episode with the rewards of its replies, which estimators compare.

    Equal for episodes with equal raw scores and equal rewards of replies, in whatever turns.
    """
    t = self.trajectory
    added = np.bincount(t.episode, t.reply_rewards.sum(axis=1, dtype=np.float64), minlength=len(self.episode_scores))
    return (self.episode_scores + added).astype(np.float32)[t.episode]


# The types of a rollout, for `processes.gather`.
SENT_TYPES = (
  Rollout, Trajectory, Episode, Turn, Status, TextSegment, ImageSegment, TokenSegment, Scene, RoomScene, TableScene,
  ReplyReward,
)  # fmt: skip


def _padding(pad_id: int, like: Trajectory) -> Trajectory:
  """The value of unused columns and rows, for each array of a trajectory."""
  filler = {f.name: 0 for f in dataclasses.fields(Trajectory)} | {'turn': -1, 'tokens': pad_id, 'image': -1}
  return Trajectory(**{name: None if getattr(like, name) is None else x for name, x in filler.items()})


def _with_joined_images(parts: list[Rollout]) -> tuple[list[Trajectory], tuple[np.ndarray, ...]]:
  """The trajectories of rollouts, whose columns show images of one list, and this list, with equal images once."""
  if not any(p.images for p in parts):
    return [p.trajectory for p in parts], ()
  numbers: dict[bytes, int] = {}
  images: list[np.ndarray] = []
  trajectories = []
  for part in parts:
    t, own = part.trajectory, [-1]  # the last one is that of text columns
    for image in reversed(part.images):
      own.insert(0, numbers.setdefault(digest(image), len(images)))
      if own[0] == len(images):
        images.append(image)
    shown = np.full(t.tokens.shape, -1, np.int32) if t.image is None else t.image
    trajectories.append(t.replace(image=np.asarray(own, np.int32)[shown]))
  return trajectories, tuple(images)


def concatenate(parts: list[Rollout], *, renumber: bool) -> Rollout:
  """Joins the shares of one rollout, or several rollouts of new levels; rows keep their order.

  Use `renumber` if each part counts its groups and episodes from 0, as separate rollouts do.
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
  trajectories, images = _with_joined_images(parts)
  widths = [t.tokens.shape[1] for t in trajectories]

  def join(filler, *leaves):
    if leaves[0].ndim == 1:
      return np.concatenate(leaves)
    grown = [
      np.pad(x, ((0, 0), (0, max(widths) - x.shape[1]), *((0, 0),) * (x.ndim - 2)), constant_values=filler)
      for x in leaves
    ]
    return np.concatenate(grown)

  trajectory = jax.tree.map(join, _padding(parts[0].pad_id, trajectories[0]), *trajectories)
  # Each part numbers its anchors from 0.
  offsets = np.cumsum([0] + [int(p.anchors.max(initial=-1)) + 1 for p in parts])
  anchors = [np.where(p.anchors < 0, -1, p.anchors + o) for p, o in zip(parts, offsets, strict=False)]
  turns = max(a.shape[1] for a in anchors)
  anchors = [np.pad(a, ((0, 0), (0, turns - a.shape[1])), constant_values=-1) for a in anchors]
  return Rollout(
    trajectory,
    [e for p in parts for e in p.episodes],
    np.concatenate(anchors),
    np.concatenate([p.episode_scores for p in parts]),
    sum(p.tokens_sampled for p in parts),
    parts[0].pad_id,
    sum(p.row_steps for p in parts),
    images,
  )


def take_rows(rollout: Rollout, rows: np.ndarray) -> Rollout:
  """Selects rows, i32[b], with groups and episodes renumbered from 0. The result has no episodes as text."""
  t = rollout.trajectory
  kept, episode = np.unique(t.episode[rows], return_inverse=True)
  own = jax.tree.map(lambda x: x[rows], t)
  own = own.replace(
    group=np.unique(own.group, return_inverse=True)[1].astype(np.int32), episode=episode.astype(np.int32)
  )
  images = ()
  if own.image is not None:
    shown = np.unique(own.image[own.image >= 0])
    number = np.full(len(rollout.images) + 1, -1, np.int32)
    number[shown] = np.arange(len(shown))
    own = own.replace(image=number[own.image]) if len(shown) else own.replace(image=None)
    images = tuple(rollout.images[i] for i in shown)
  sampled, scores = int(own.loss_mask.sum()), rollout.episode_scores[kept]
  return Rollout(own, [], rollout.anchors[rows], scores, sampled, rollout.pad_id, images=images)


def pad_rows(rollout: Rollout, multiple: int) -> Rollout:
  """Appends empty rows to a rollout, up to a multiple of a number of rows."""
  more = -len(rollout.trajectory.length) % multiple

  def pad(filler, x):
    return np.pad(x, ((0, more),) + ((0, 0),) * (x.ndim - 1), constant_values=filler)

  return dataclasses.replace(
    rollout,
    trajectory=jax.tree.map(pad, _padding(rollout.pad_id, rollout.trajectory), rollout.trajectory),
    anchors=pad(-1, rollout.anchors),
  )
