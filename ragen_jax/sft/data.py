"""What the warm start learns from, and how it is cut into batches: a row a conversation, or several packed into one.

Rows come from the environments' exact solvers or from a file of conversations. A packed row holds conversations one
behind the other; none sees another, and the positions of each begin at 0, so packing changes the gradient by rounding
only.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
import zlib
from collections.abc import Iterator

import numpy as np
from flax import struct
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.env_manager import EnvGroup, EnvStateManager
from ragen_jax.agent.trajectory import Trajectory
from ragen_jax.sft import conversations
from ragen_jax.sft.demonstrations import DemonstrationStyle, demonstrate
from ragen_jax.training.batches import at_columns, plan_micro_batches, sampled_columns
from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)

# A packed micro-batch has so many rows as a step has conversations, by this: each row holds several, and a step's last
# micro-batch is filled up with empty rows, which small ones keep few.
_CONVERSATIONS_A_PACKED_ROW = 16
# In how many steps the sampled tokens of a packed row are rounded up to its width, so that few programs are compiled.
_REPLY_STEPS = 8


@dataclasses.dataclass
class Conversations:
  """N conversations, a row each, padded to the widest.

  Attributes:
    tokens: i32[N, T].
    length: i32[N].
    columns: i32[N, R], see `sampled_columns`.
    mask: bool[N, R].
    values: f32[N, R], what the best play would still bring, which the value head learns: a sum of rewards that
      happened to come would be mostly luck.
    value_scale: f32[N], one over the mean square of the environment's values, so that an environment that pays tens
      does not drown one that pays ones.
    level: i32[N], what they show: rows of one number are of the same level.
  """

  tokens: np.ndarray
  length: np.ndarray
  columns: np.ndarray
  mask: np.ndarray
  values: np.ndarray
  value_scale: np.ndarray
  level: np.ndarray

  @functools.cached_property
  def checksum(self) -> int:
    """Tells other conversations from these."""
    return zlib.crc32(np.ascontiguousarray(self.mask), zlib.crc32(np.ascontiguousarray(self.tokens)))

  @functools.cached_property
  def sampled(self) -> np.ndarray:
    """i32[N], tokens that carry loss."""
    return self.mask.sum(axis=1)


@struct.dataclass
class Batch:
  """What goes through the model at once: b rows of T columns, with R of them in the loss.

  Attributes:
    tokens: i32[b, T].
    columns: i32[b, R], columns of the trained tokens; 1 behind the last.
    values: f32[b, R], what the value head should say.
    weights: f32[b, R], of the tokens in the loss; they sum to 1 over a step. 0 is not trained.
    value_weights: f32[b, R], the same of the value loss.
    segments: i32[b, T], the number of the conversation in its row; None where each has a row of its own.
  """

  tokens: np.ndarray
  columns: np.ndarray
  values: np.ndarray
  weights: np.ndarray
  value_weights: np.ndarray
  segments: np.ndarray | None = None


def play(
  config: ConfigDict, specs: list[EnvGroup], tokenizer: ChatTokenizer, held_out: frozenset[bytes]
) -> list[Trajectory]:
  """The solvers' play, by environment.

  Args:
    config: reads `sft`, `agent` and `seed`.
    specs: the environments.
    tokenizer: with its chat format.
    held_out: levels in whose place others are shown.

  Raises:
    UserError: no demonstration fits into the context.
  """
  sft = config.sft
  style = DemonstrationStyle(
    discount=sft.discount,
    noise=sft.noise,
    hurry=sft.hurry,
    beginner=sft.beginner,
    timid=sft.timid,
    actions_per_turn=sft.actions_per_turn,
  )
  rng = np.random.default_rng(config.seed)
  data = []
  for spec in specs:
    envs = EnvStateManager([spec], sft.group_size, held_out=held_out)
    context = build.context_manager(config, tokenizer, [spec])
    start = time.monotonic()
    trajectory, episodes = demonstrate(envs, context, sft.first_level, rng, style, config.agent.max_context)
    if not trajectory.loss_mask.any():
      raise UserError(f'agent.max_context={config.agent.max_context}: no turn of {spec.tag} fits into it')
    _log.info(
      '%s: %d demonstrations in %.0f s, success %.2f, %.1f tokens each',
      spec.tag,
      len(episodes),
      time.monotonic() - start,
      np.mean([e.success for e in episodes]),
      trajectory.length.mean(),
    )
    data.append(trajectory)
  return data


def from_file(config: ConfigDict, found: list[conversations.Conversation], tokenizer: ChatTokenizer) -> Trajectory:
  """The conversations of `config.sft.data` as rows; those that are too long are left out, and counted.

  Raises:
    UserError: a text holds a special token, or no conversation is short enough.
  """
  prefix = build.context_manager(config, tokenizer, []).reply_prefix
  limit, source = config.agent.max_context, f'sft.data={config.sft.data!r}'
  trajectory, left_out = conversations.tokenize(found, tokenizer, prefix, limit, source)
  count = len(trajectory.length)
  _log.info('%s: %d conversations, %.1f tokens each', config.sft.data, count, trajectory.length.mean())
  if left_out:
    _log.warning('%s: %d of %d are left out, longer than agent.max_context=%d', source, left_out, len(found), limit)
  return trajectory


def join(parts: list[Trajectory]) -> Conversations:
  """The rows of all parts, each an environment's."""
  width = max(p.tokens.shape[1] for p in parts)

  def stack(name):
    arrays = [getattr(p, name) for p in parts]
    return np.concatenate([np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in arrays])

  columns, mask = sampled_columns(stack('loss_mask'))
  values = at_columns(stack('values'), columns, mask)
  value_scale, level, start = np.ones((len(mask),), np.float32), np.zeros((len(mask),), np.int32), 0
  for part in parts:
    rows = slice(start, start + len(part.length))
    square = float(np.square(values[rows][mask[rows]]).mean())
    value_scale[rows] = 1 / square if square > 0 else 1.0
    level[rows] = part.group + (level[start - 1] + 1 if start else 0)
    start = rows.stop
  length = np.concatenate([p.length for p in parts])
  return Conversations(stack('tokens'), length, columns, mask, values, value_scale, level)


def validation_levels(levels: int, fraction: float) -> int:
  """How many of some levels are not trained on: at least one where there is a fraction."""
  return math.ceil(levels * fraction)


def split(data: Conversations, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
  """Rows to train on, and rows that only tell the loss, by level.

  Args:
    data: the conversations.
    fraction: of the levels that only tell the loss.
    seed: chooses them.

  Returns:
    i64[n] and i64[N - n], ascending.
  """
  levels = np.unique(data.level)
  rng = np.random.default_rng((seed, 1))
  chosen = rng.choice(levels, size=validation_levels(len(levels), fraction), replace=False)
  kept = ~np.isin(data.level, chosen)
  return np.flatnonzero(kept), np.flatnonzero(~kept)


def padded_batches(data: Conversations, rows: np.ndarray, size: int, length_step: int) -> Iterator[Batch]:
  """A conversation a row, in micro-batches as wide as their longest.

  Args:
    data: the conversations.
    rows: i64[n], those of a step.
    size: rows of a micro-batch.
    length_step: widths are multiples of this.
  """
  sampled = data.sampled
  total = np.float32(sampled[rows].sum())
  for plan in plan_micro_batches(rows, data.length, sampled, size=size, length_step=length_step):
    at = np.maximum(plan.rows, 0)
    weights = _fit(data.mask[at], plan.replies) * (plan.rows >= 0)[:, None] / total
    yield Batch(
      tokens=_fit(data.tokens[at], plan.width),
      columns=_fit(data.columns[at], plan.replies, 1),
      values=_fit(data.values[at], plan.replies),
      weights=weights,
      value_weights=weights * data.value_scale[at, None],
    )


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
  """Puts things into as few bins as first-fit decreasing finds: the longest first, each into the first with room.

      lengths 3 5 2 4, capacity 7  ->  [[1, 2], [3, 0]]

  Args:
    lengths: i32[n], none above `capacity`.
    capacity: of a bin.

  Returns:
    Indices into `lengths`, by bin.
  """
  bins: list[list[int]] = []
  room: list[int] = []
  for i in np.argsort(-lengths, kind='stable').tolist():
    at = next((b for b, free in enumerate(room) if free >= lengths[i]), len(bins))
    if at == len(bins):
      bins.append([])
      room.append(capacity)
    bins[at].append(i)
    room[at] -= int(lengths[i])
  return bins


def packed_batches(data: Conversations, rows: np.ndarray, size: int, length_step: int) -> Iterator[Batch]:
  """Conversations one behind the other, in rows that hold the longest one of all `data`.

  Args:
    data: the conversations.
    rows: i64[n], those of a step.
    size: rows of a micro-batch.
    length_step: the width is a multiple of this.
  """
  sampled = data.sampled
  total = np.float32(sampled[rows].sum())
  width = -(-int(data.length.max()) // length_step) * length_step
  bins = [rows[b] for b in pack(data.length[rows], width)]
  bins.sort(key=lambda b: sampled[b].sum())  # so that the rows of a micro-batch have about as many trained tokens
  step = max(width // _REPLY_STEPS, 1)
  for start in range(0, len(bins), size):
    part = bins[start : start + size]
    replies = -(-max(int(sampled[b].sum()) for b in part) // step) * step
    batch = Batch(
      tokens=np.zeros((size, width), np.int32),
      columns=np.ones((size, replies), np.int32),
      values=np.zeros((size, replies), np.float32),
      weights=np.zeros((size, replies), np.float32),
      value_weights=np.zeros((size, replies), np.float32),
      segments=np.full((size, width), -1, np.int32),
    )
    for row, members in enumerate(part):
      column = reply = 0
      for number, i in enumerate(members.tolist()):
        n, r = int(data.length[i]), int(sampled[i])
        batch.tokens[row, column : column + n] = data.tokens[i, :n]
        batch.segments[row, column : column + n] = number
        batch.columns[row, reply : reply + r] = data.columns[i, :r] + column
        batch.values[row, reply : reply + r] = data.values[i, :r]
        batch.weights[row, reply : reply + r] = 1 / total
        batch.value_weights[row, reply : reply + r] = data.value_scale[i] / total
        column, reply = column + n, reply + r
    yield batch


def batches(
  data: Conversations, rows: np.ndarray, *, batch_size: int, length_step: int, packing: bool, shards: int
) -> Iterator[Batch]:
  """The micro-batches of a step.

  Args:
    data: the conversations.
    rows: i64[n], those of the step.
    batch_size: how many a step usually has.
    length_step: widths are multiples of this.
    packing: several in a row.
    shards: in how many parts rows are divided; without packing it divides `batch_size // 2`.
  """
  if not packing:
    return padded_batches(data, rows, max(batch_size // 2, 1), length_step)
  size = -(-batch_size // _CONVERSATIONS_A_PACKED_ROW)
  return packed_batches(data, rows, -(-size // shards) * shards, length_step)


def _fit(x: np.ndarray, width: int, fill: int = 0) -> np.ndarray:
  """x cut or padded to `width` columns."""
  x = x[:, :width]
  return np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=fill)
