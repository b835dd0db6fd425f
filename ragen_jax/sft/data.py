"""The training data of the warm start: conversations of the environments' exact solvers, or of a file."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Limits
from ragen_jax.agent.trajectory import Trajectory
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.sft import conversations
from ragen_jax.sft.demonstrations import DemonstrationStyle, Demonstrator
from ragen_jax.training.batches import at_columns, sampled_columns
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
    values: f32[N, R], targets of the value head: the expected return of the best play from each state, which is less
      noisy than the return of the demonstrated episode.
    value_scale: f32[N], 1 / mean square of the environment's values, so that environments with large rewards do not
      dominate the value loss.
    level: i32[N], equal for conversations on the same level.
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
    """A number that distinguishes these conversations from others."""
    return zlib.crc32(np.ascontiguousarray(self.mask), zlib.crc32(np.ascontiguousarray(self.tokens)))

  @functools.cached_property
  def sampled(self) -> np.ndarray:
    """i32[N], number of tokens in the loss."""
    return self.mask.sum(axis=1)


@dataclasses.dataclass(frozen=True)
class DemonstrationSettings:
  """The levels of demonstrations.

  Attributes:
    first_level: seed of the first level.
    group_size: number of demonstrations of each level.
    seed: seed of the demonstrators' random numbers.
  """

  first_level: int
  group_size: int
  seed: int


def collect_demonstrations(
  specs: Sequence[EnvSpec],
  contexts: Sequence[ContextManager],
  limits: Sequence[Limits],
  style: DemonstrationStyle,
  settings: DemonstrationSettings,
  held_out: frozenset[bytes],
) -> list[Trajectory]:
  """Collects demonstrations of the exact solvers, by environment.

  Args:
    specs: the environments, with their numbers of levels.
    contexts: for each environment, a context manager of this environment only.
    limits: for each environment, the limits of its episodes.
    style: the quality of the demonstrator's play.
    settings: the levels.
    held_out: levels that are replaced with others.

  Raises:
    UserError: no turn of an environment fits into the context.
  """
  rng = np.random.default_rng(settings.seed)
  parts = []
  for spec, context, bounds in zip(specs, contexts, limits, strict=True):
    envs = EnvStateManager([spec], settings.group_size, held_out=held_out)
    start = time.monotonic()
    rollout = AgentProxy(envs, context, bounds).rollout(Demonstrator(rng, style), settings.first_level)
    trajectory, episodes = rollout.trajectory, rollout.episodes
    if not trajectory.loss_mask.any():
      raise UserError(f'agent.max_context={bounds.max_context}: no turn of {spec.tag} fits into it')
    _log.info(
      '%s: %d demonstrations in %.0f s, success %.2f, %.1f tokens each',
      spec.tag,
      len(episodes),
      time.monotonic() - start,
      np.mean([e.success for e in episodes]),
      trajectory.length.mean(),
    )
    parts.append(trajectory)
  return parts


def from_file(
  path: str, found: list[conversations.Conversation], tokenizer: ChatTokenizer, reply_prefix: str, max_context: int
) -> Trajectory:
  """The conversations of a file as rows. Conversations that are too long are skipped, and counted in a warning.

  Args:
    path: path of the file, for messages.
    found: the conversations of the file, from `conversations.read`.
    tokenizer: the tokenizer with the chat format.
    reply_prefix: the forced beginning of a reply; may be ''.
    max_context: maximum tokens of a conversation.

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
  return trajectory


def join(parts: list[Trajectory]) -> SftExamples:
  """Joins the rows of all parts; each part belongs to one environment."""
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
  return SftExamples(stack('tokens'), length, columns, mask, values, value_scale, level)


def validation_levels(levels: int, fraction: float) -> int:
  """Number of levels that are not trained on: at least one if the fraction is above 0."""
  return math.ceil(levels * fraction)


def split(data: SftExamples, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
  """Divides conversations by level into training and validation conversations.

  Args:
    data: the conversations.
    fraction: share of the levels for validation.
    seed: seed of the random choice.

  Returns:
    Rows for training, i64[n], and rows for validation, i64[N - n], both ascending.
  """
  levels = np.unique(data.level)
  rng = np.random.default_rng((seed, 1))
  chosen = rng.choice(levels, size=validation_levels(len(levels), fraction), replace=False)
  kept = ~np.isin(data.level, chosen)
  return np.flatnonzero(kept), np.flatnonzero(~kept)


def step_rows(rows: np.ndarray, batch_size: int, seed: int, first_step: int = 0) -> Iterator[np.ndarray]:
  """The rows of each step, i64[batch_size], drawn without replacement within a step; an endless iterator.

  Args:
    rows: i64[n], rows to draw from.
    batch_size: conversations of a step, at most n.
    seed: seed of the draws.
    first_step: the first step to return; the draws of the steps before it are skipped.
  """
  rng, step = np.random.default_rng(seed), 0
  while True:
    drawn = rng.choice(len(rows), size=batch_size, replace=False)
    if step >= first_step:
      yield rows[drawn]
    step += 1
