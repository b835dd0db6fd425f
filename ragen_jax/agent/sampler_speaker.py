"""The policy as a speaker: live rows stay dense on the device, are fed their prompts, and draw their replies."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.agent.context_manager import Prompt
from ragen_jax.agent.episode import Limits, TextReply
from ragen_jax.agent.episode_log import EpisodeLog
from ragen_jax.agent.trajectory import Timeline
from ragen_jax.distributed import processes
from ragen_jax.sampling.kv_cache import SamplerState
from ragen_jax.sampling.sampler import Reply, Sampler, Sampling
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.sizes import round_up


@dataclasses.dataclass(frozen=True)
class DeviceRows:
  """The rows of the device during a turn.

  Attributes:
    state: the sampler's, b rows for each shard.
    rows: i32[own shards * b], the episode that each row belongs to; -1 where it fills up the shard.
  """

  state: SamplerState
  rows: np.ndarray


@dataclasses.dataclass(frozen=True)
class FedTurn:
  """A turn as it is handed to the sampler; B' device rows.

  Attributes:
    turn: its index.
    rows: i32[B'], the episode of each device row; -1 where it fills up the shard.
    tokens: i32[B', O], the prompts, padded.
    count: i32[B'], tokens of each; 0 in rows that take no part.
    keys: PRNG keys [B'], of the draws.
  """

  turn: int
  rows: np.ndarray
  tokens: np.ndarray
  count: np.ndarray
  keys: jax.Array


class SamplerSpeaker:
  """The policy, sampling tokens for all live rows at once.

  With many processes each has a speaker for its own rows; all call `reply` together and agree on shapes.
  """

  writes_tokens: ClassVar[bool] = True

  def __init__(
    self,
    sampler: Sampler,
    params: Any,
    key: jax.Array,
    sampling: Sampling,
    *,
    observer: Callable[[FedTurn], None] | None = None,
  ):
    """Nothing runs before the first turn.

    Args:
      sampler: the programs.
      params: weights of the `ActorCritic`.
      key: of the draws; each episode has a key folded from it.
      sampling: how tokens are drawn.
      observer: called with each turn before it is fed.
    """
    self._sampler = sampler
    self._params = params
    self._key = key
    self._sampling = sampling
    self._observer = observer
    self._device: DeviceRows | None = None
    self._began: np.ndarray | None = None  # u32[B], the turn that each episode's present row began with

  def reply(self, log: EpisodeLog) -> dict[int, TextReply] | None:
    """See `Speaker`. Prompts and replies go to the log's timeline.

    Raises:
      UserError: a first prompt does not fit into the context.
    """
    timeline, limits, share = log.timeline, log.limits, self._sampler.share
    rows = log.envs.rows
    if log.turn == 0:
      self._device, self._began = None, np.zeros((rows,), np.uint32)
    with processes.same_errors() if log.turn == 0 else contextlib.nullcontext():
      prompts = log.prompts(limits.room)
    for row, prompt in prompts.items():
      if prompt.fresh:
        timeline.begin_row(row)
        self._began[row] = log.turn
    live = np.asarray(list(prompts), np.int32)
    # Processes agree on shapes, and go on until the last of them is done.
    busiest, widest, longest = processes.largest(
      (
        int(np.bincount(live % share.own).max(initial=0)),
        max((len(p.ids) for p in prompts.values()), default=0),
        int(timeline.length[live].max(initial=0)),
      )
    )
    if not busiest:
      return None
    # Finer than the cache: every column of an observation is computed, filled or not.
    width = round_up(widest, max(limits.length_step // 4, 1))
    # Columns are written at the longest row's end, so a row may need more of them than it has tokens.
    size = round_up(longest + width + limits.max_response_tokens, limits.length_step)
    if self._device is None:
      device = self._first_rows(rows, size)
    else:
      continued = [row for row in prompts if not prompts[row].fresh]
      device = self._arrange(self._device, limits, rows, live, continued, busiest, size)
    keys = self._row_keys(log.envs.first_row, rows, self._began)
    state, reply = self._sample(log, device, prompts, width, keys)
    self._device = DeviceRows(state, device.rows)
    at = np.flatnonzero(np.isin(device.rows, live) & (reply.count > 0))
    for row in prompts:
      timeline.append_context(row, prompts[row].ids, log.turn)
    _append_replies(timeline, device.rows[at], jax.tree.map(lambda x: x[at], reply), log.turn)
    return self._in_text(log, device.rows[at], [reply.tokens[i, : reply.count[i]].tolist() for i in at])

  def _in_text(self, log: EpisodeLog, rows: np.ndarray, sampled: list[list[int]]) -> dict[int, TextReply]:
    stop = self._sampler.stop_ids[0]
    texts = log.context.reply_texts(sampled)
    return {
      int(row): TextReply(text, len(ids), ids=tuple(ids), closed=ids[-1] == stop)
      for row, text, ids in zip(rows, texts, sampled, strict=True)
    }

  def _row_keys(self, first_row: int, rows: int, began: np.ndarray) -> jax.Array:
    """The keys [B] of this process's episodes. If a row begins in a later turn, the turn is folded into its key.

    A draw depends on its key and its position in the row; a new row restarts the positions, so it needs a new key.
    """
    keys = jax.random.split(self._key, rows * self._sampler.share.parts)[first_row : first_row + rows]
    if not began.any():
      return keys
    folded = jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, jnp.asarray(began)))
    return jax.random.wrap_key_data(jnp.where(jnp.asarray(began)[:, None] > 0, folded, jax.random.key_data(keys)))

  def _first_rows(self, rows: int, size: int) -> DeviceRows:
    """An empty state for all episodes, with `size` columns.

    Rows go round-robin to shards, so a level with long episodes is spread over all of them.
    """
    order = np.arange(rows).reshape(-1, self._sampler.share.own).T.reshape(-1)
    return DeviceRows(self._sampler.init(rows, size), order)

  def _buckets(self, limits: Limits, rows: int) -> list[int]:
    """Rows of a shard that programs are compiled for: halves of the full number, down to an eighth."""
    share = self._sampler.share
    sizes = [rows // share.own]
    while limits.drop_finished and len(sizes) < 4 and sizes[-1] % 2 == 0 and sizes[-1] * share.shards > 8:
      sizes.append(sizes[-1] // 2)
    return sizes

  def _arrange(
    self,
    device: DeviceRows,
    limits: Limits,
    rows: int,
    live: np.ndarray,
    continued: Collection[int],
    busiest: int,
    size: int,
  ) -> DeviceRows:
    """Live rows, dense, with room for the turn.

    Args:
      device: the rows before; given away.
      limits: of the rollout.
      rows: B, all episodes of this process.
      live: i32, the episodes that take part.
      continued: those whose row goes on; the cache of the others is emptied.
      busiest: the most live episodes that any shard has.
      size: columns of the cache.
    """
    shards = device.rows.reshape(self._sampler.share.own, -1)
    bucket = min(b for b in self._buckets(limits, rows) if b >= busiest)
    if bucket == shards.shape[1]:
      batch, pick = device.rows, np.tile(np.arange(bucket, dtype=np.int32), len(shards))
    else:
      order = np.argsort(~np.isin(shards, live), axis=1, kind='stable')[:, :bucket].astype(np.int32)
      batch = np.take_along_axis(shards, order, axis=1)
      batch, pick = np.where(np.isin(batch, live), batch, -1).reshape(-1), order.reshape(-1)
    return DeviceRows(self._sampler.arrange(device.state, pick, size, np.isin(batch, list(continued))), batch)

  def _sample(
    self, log: EpisodeLog, device: DeviceRows, prompts: dict[int, Prompt], width: int, row_keys: jax.Array
  ) -> tuple[SamplerState, Reply]:
    """Feeds each live row its prompt and draws its reply; the other rows of the device take no part.

    Returns:
      The state after, and the replies of this process's device rows, with NumPy leaves.
    """
    tokens = np.full((len(device.rows), width), log.context.tokenizer.pad_id, np.int32)
    count = np.zeros((len(device.rows),), np.int32)
    for i, row in enumerate(device.rows):
      prompt = prompts.get(int(row))
      if prompt is not None:
        if prompt.images:
          raise UserError(f'{log.envs.specs[log.envs.row_env[row]].tag}: the policy reads no images')
        tokens[i, : len(prompt.ids)] = prompt.ids
        count[i] = len(prompt.ids)
    keys = row_keys[jnp.asarray(np.maximum(device.rows, 0))]
    if self._observer is not None:
      self._observer(FedTurn(log.turn, device.rows, tokens, count, keys))
    state = self._sampler.extend(self._params, device.state, tokens, count)
    state, reply = self._sampler.decode(
      self._params,
      state,
      keys,
      count > 0,
      max_new=log.limits.max_response_tokens,
      sampling=self._sampling,
    )
    return state, processes.own_rows(reply)


def _append_replies(timeline: Timeline, rows: np.ndarray, reply: Reply, turn: int) -> None:
  """Writes replies with NumPy leaves, one for each of `rows`."""
  for i, row in enumerate(rows):
    n = reply.count[i]
    timeline.append_reply(
      row,
      reply.tokens[i, :n],
      turn,
      logprobs=reply.logprobs[i, :n],
      values=reply.values[i, :n],
      entropies=reply.entropies[i, :n],
    )
