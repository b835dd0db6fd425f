"""The training data of the warm start: conversations of the environments' exact solvers, or of a file."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Episode, Limits, Status
from ragen_jax.agent.rollout import Rollout, concatenate, take_rows
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models.vision.processor import ProcessorConfig
from ragen_jax.sft import conversations
from ragen_jax.sft.demonstrations import DemonstrationStyle, Demonstrator
from ragen_jax.training.batches import at_columns, sampled_columns
from ragen_jax.training.images import ImageInputs, ImageInputsMaker
from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class SftExamples:
  """N conversations, one in each row, padded to the longest.

  Attributes:
    tokens: i32[N, T].
    length: i32[N].
    columns: i32[N, R], columns of the trained tokens, see `sampled_columns`.
    mask: bool[N, R].
    values: f32[N, R], targets of the value head: the sum of the rewards that the demonstrated episode still earned.
    value_scale: f32[N], 1 / mean square of the environment's values, so that environments with large rewards do not
      dominate the value loss.
    level: i32[N], equal for conversations on the same level.
    images: what the columns read of images; None if no conversation shows any.
  """

  tokens: np.ndarray
  length: np.ndarray
  columns: np.ndarray
  mask: np.ndarray
  values: np.ndarray
  value_scale: np.ndarray
  level: np.ndarray
  images: ImageInputs | None

  @functools.cached_property
  def checksum(self) -> int:
    """A number that distinguishes these conversations from others."""
    found = zlib.crc32(np.ascontiguousarray(self.mask), zlib.crc32(np.ascontiguousarray(self.tokens)))
    if self.images is None:
      return found
    for image in self.images.gallery.pixels:
      found = zlib.crc32(np.ascontiguousarray(image), found)
    return zlib.crc32(np.ascontiguousarray(self.images.index), found)

  def checksum_for(self, value_coef: float) -> int:
    """The checksum of what a run with this weight of the value loss learns: with the values, if it is not 0."""
    return zlib.crc32(np.ascontiguousarray(self.values), self.checksum) if value_coef else self.checksum

  @functools.cached_property
  def sampled(self) -> np.ndarray:
    """i32[N], number of tokens in the loss."""
    return self.mask.sum(axis=1)

  @functools.cached_property
  def image_counts(self) -> dict[tuple[int, int], np.ndarray]:
    """Images of each conversation, i64[N], by size; with frozen towers tokens of images, see `ImageInputs.sizes`."""
    if self.images is None:
      return {}
    index, gallery = self.images.index, self.images.gallery
    if gallery.features:
      return {size: (index >= 0).sum(axis=1) for size in self.images.sizes()}
    rows, columns = np.nonzero(np.isin(index, gallery.first[:-1]))
    shown = np.searchsorted(gallery.first, index[rows, columns], side='right') - 1
    shapes = [image.shape[:2] for image in gallery.pixels]
    found = {}
    for size in self.images.sizes():
      of_size = np.asarray([shape == size for shape in shapes])
      found[size] = np.bincount(rows[of_size[shown]], minlength=len(index))
    return found


@dataclasses.dataclass(frozen=True)
class DemonstrationSettings:
  """How demonstrations are collected: `config.sft.group_size`, and the seed of the demonstrators' random numbers."""

  group_size: int
  seed: int


@dataclasses.dataclass(frozen=True)
class Lesson:
  """Levels of an environment that are demonstrated in the form of replies of `context`; `first_level` is a seed."""

  spec: EnvSpec
  context: ContextManager
  limits: Limits
  first_level: int


def collect_demonstrations(
  lessons: Sequence[Lesson],
  style: DemonstrationStyle,
  settings: DemonstrationSettings,
  held_out: frozenset[bytes],
  processor: ProcessorConfig | None,
) -> list[Rollout]:
  """Collects demonstrations of the exact solvers and of experts, by lesson.

  Levels that are `held_out` are replaced with others. Outside JAX, episodes without a turn, and those in which the
  environment failed or the expert had no advice that a reply can hold, are left out and counted.

  Raises:
    UserError: no turn of an environment fits into the context.
  """
  rng = np.random.default_rng(settings.seed)
  parts = []
  for lesson in lessons:
    spec = lesson.spec
    bounds = dataclasses.replace(lesson.limits, episode_timeout=0.0, rollout_timeout=0.0)
    envs = EnvStateManager([spec], settings.group_size, held_out=held_out, processor=processor)
    start = time.monotonic()
    form = lesson.context.settings.format
    player = 'expert' if spec.env.has_expert else 'solver'
    _log.info('%s, %s: the %s plays %d levels', spec.tag, form, player, spec.num_groups)
    whole = AgentProxy(envs, lesson.context, bounds).rollout(Demonstrator(rng, style), lesson.first_level)
    rollout, episodes = _usable(whole, spec)
    trajectory = rollout.trajectory
    if not trajectory.loss_mask.any():
      raise UserError(f'agent.max_context={bounds.max_context}: no turn of {spec.tag} fits into it')
    _log.info(
      '%s, %s: %d demonstrations in %.0f s, success %.2f, %.1f tokens each',
      spec.tag,
      form,
      len(episodes),
      time.monotonic() - start,
      np.mean([e.success for e in episodes]),
      trajectory.length.mean(),
    )
    parts.append(rollout)
  return parts


def _usable(rollout: Rollout, spec: EnvSpec) -> tuple[Rollout, list[Episode]]:
  """The rows to learn from, and their episodes, of a rollout outside JAX; of one in JAX, all."""
  if not spec.env.is_outside:
    return rollout, rollout.episodes
  kept = [
    row
    for row, episode in enumerate(rollout.episodes)
    if rollout.trajectory.loss_mask[row].any() and episode.status not in (Status.ENV_ERROR, Status.ABANDONED)
  ]
  left_out = len(rollout.episodes) - len(kept)
  if left_out:
    template = '%s: %d of %d demonstrations are left out: no advice, a failure, a text that cannot be read, or no room'
    _log.warning(template, spec.tag, left_out, len(rollout.episodes))
  if not kept:
    raise UserError(f'sft.tags: none of the {left_out} demonstrations of {spec.tag!r} can be learnt from')
  return take_rows(rollout, np.asarray(kept)), [rollout.episodes[row] for row in kept]


def from_file(
  path: str, found: list[conversations.Conversation], tokenizer: ChatTokenizer, reply_prefix: str, max_context: int
) -> Rollout:
  """The conversations of a file as rows. Conversations that are too long are skipped, and counted in a warning.

  Raises:
    UserError: a text contains a special token, or no conversation is short enough.
  """
  source = f'sft.data={path!r}'
  trajectory, left_out = conversations.tokenize(found, tokenizer, reply_prefix, max_context, source)
  count = len(trajectory.length)
  _log.info('%s: %d conversations, %.1f tokens each', path, count, trajectory.length.mean())
  if left_out:
    template = '%s: %d of %d are skipped, longer than agent.max_context=%d'
    _log.warning(template, source, left_out, len(found), max_context)
  none = np.zeros((count, 0), np.int32)
  return Rollout(trajectory, [], none, none.sum(axis=1), int(trajectory.loss_mask.sum()), tokenizer.pad_id)


def join(parts: list[Rollout], sight: ImageInputsMaker | None, params: Any) -> SftExamples:
  """Joins the rows of all parts, which have whole conversations; each part belongs to one environment.

  Of `params`, the weights of frozen towers are read.
  """
  joined = concatenate(parts, renumber=True)
  whole = joined.trajectory
  columns, mask = sampled_columns(whole.loss_mask)
  rewards = whole.rewards + whole.reply_rewards  # as the returns of RL
  still_earned = np.cumsum(rewards[:, ::-1], axis=1, dtype=np.float64)[:, ::-1]
  values = at_columns(still_earned.astype(np.float32), columns, mask)
  value_scale, start = np.ones((len(mask),), np.float32), 0
  for part in parts:
    rows = slice(start, start + len(part.trajectory.length))
    square = float(np.square(values[rows][mask[rows]]).mean())
    value_scale[rows] = 1 / square if square > 0 else 1.0
    start = rows.stop
  images = None if sight is None else sight.inputs(params, whole, joined.images)
  return SftExamples(whole.tokens, whole.length, columns, mask, values, value_scale, whole.group, images)


def first_turns(data: SftExamples) -> SftExamples:
  """The conversations up to the end of their first trained reply, in arrays of the same width."""
  after = data.columns[:, 1:] - data.columns[:, :-1] > 1  # a gap is behind the reply
  same = np.cumsum(np.pad(after, ((0, 0), (1, 0))), axis=1) == 0
  mask = data.mask & same
  length = (data.columns * mask).max(axis=1).astype(np.int32) + 1
  images = data.images
  if images is not None:
    shown = np.arange(data.tokens.shape[1]) < length[:, None]
    images = images.replace(index=np.where(shown, images.index, -1))
  return dataclasses.replace(data, length=length, columns=np.where(mask, data.columns, 1), mask=mask, images=images)


def validation_levels(levels: int, fraction: float) -> int:
  """Number of levels that are not trained on: at least one if the fraction is above 0."""
  return math.ceil(levels * fraction)


def split(data: SftExamples, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
  """Divides conversations by level into rows for training, i64[n], and for validation, i64[N - n], both ascending.

  `fraction` is the share of the levels for validation.
  """
  levels = np.unique(data.level)
  rng = np.random.default_rng((seed, 1))
  chosen = rng.choice(levels, size=validation_levels(len(levels), fraction), replace=False)
  kept = ~np.isin(data.level, chosen)
  return np.flatnonzero(kept), np.flatnonzero(~kept)


def step_rows(rows: np.ndarray, batch_size: int, seed: int, first_step: int = 0) -> Iterator[np.ndarray]:
  """The rows of each step, i64[batch_size] of `rows`, drawn without replacement within a step; an endless iterator.

  It begins with `first_step`; the draws of the steps before it are skipped.
  """
  rng, step = np.random.default_rng(seed), 0
  while True:
    drawn = rng.choice(len(rows), size=batch_size, replace=False)
    if step >= first_step:
      yield rows[drawn]
    step += 1
