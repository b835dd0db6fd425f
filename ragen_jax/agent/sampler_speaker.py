"""The policy as a speaker: gives episodes rows of the device (slots), feeds prompts and samples replies."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.agent.context_manager import Prompt
from ragen_jax.agent.episode import Limits, Status, TextReply
from ragen_jax.agent.episode_log import EpisodeLog
from ragen_jax.agent.eyes import Eyes
from ragen_jax.agent.image_room import ImageRoom
from ragen_jax.distributed import processes
from ragen_jax.models.vision.tower import Features
from ragen_jax.sampling.kv_cache import SamplerState
from ragen_jax.sampling.sampler import Reply, Sampler, Sampling
from ragen_jax.sampling.shapes import Shapes, largest_cache


@dataclasses.dataclass(frozen=True)
class FedRows:
  """Prompts as one call of `Sampler.extend` gets them: whole prompts, or a piece of each.

  Attributes:
    rows: i32[b], the episode of each row of `tokens`; -1 if none.
    tokens: i32[b, O], the prompts or their pieces, padded.
    count: i32[b], number of tokens of each; 0 for rows without a prompt, or without a token in this piece.
    slots: i32[B'], the episode of each slot; -1 if it is free.
    keys: [B'], PRNG keys of the draws.
  """

  rows: np.ndarray
  tokens: np.ndarray
  count: np.ndarray
  slots: np.ndarray
  keys: jax.Array


# One program for each number of rows.
_taken = jax.jit(lambda keys, at: keys[at])


def decode_columns(limits: Limits) -> int:
  """Columns that a call of `decode` writes."""
  return min(limits.decode_chunk, limits.max_response_tokens)


def rows_at_once(sampler: Sampler, limits: Limits, rows: int, room: ImageRoom | None) -> int:
  """How many of `rows` rows of a shard are on the devices at a time. Every process must call.

  Args:
    sampler: of the policy.
    limits: of the episodes.
    rows: of a shard.
    room: for the images of a row; None for text.
  """
  if limits.rows_in_flight:
    rows = min(rows, limits.rows_in_flight // sampler.share.shards)
  columns = largest_cache(limits.max_context, decode_columns(limits), limits.length_step)
  return sampler.rows_that_fit(rows, columns, fed_image_tokens(limits.max_context, room))


def fed_image_tokens(max_context: int, room: ImageRoom | None) -> int:
  """The most tokens of the images that are fed to a row at once; 0 for text."""
  return room.most_tokens(1, max_context, packed=False) if room else 0


class SamplerSpeaker:
  """The policy, which samples tokens for many rows at once.

  With several processes, each has a speaker for its own rows. All call `reply` together and agree on shapes.
  """

  writes_tokens: ClassVar[bool] = True

  def __init__(
    self,
    sampler: Sampler,
    params: Any,
    key: jax.Array,
    sampling: Sampling,
    *,
    observer: Callable[[FedRows], None] | None = None,
    eyes: Eyes | None = None,
  ):
    """Nothing runs before the first reply.

    Args:
      sampler: the compiled programs.
      params: weights of the `ActorCritic`.
      key: PRNG key of the draws; it is split into one key for each episode.
      sampling: how tokens are drawn.
      observer: called before each call of `Sampler.extend`, so once for each piece of long prompts.
      eyes: the vision tower of the policy; needed if observations contain images.
    """
    self._sampler = sampler
    self._params = params
    self._key = key
    self._sampling = sampling
    self._observer = observer
    self._eyes = eyes
    self._seen: dict[bytes, Features] = {}  # of the rollout's images, by digest
    self._state: SamplerState | None = None
    self._size = 0  # columns of the cache
    self._slots = np.zeros((0,), np.int32)  # the episode of each slot, -1 if free, shard by shard
    self._open: dict[int, list[int]] = {}  # sampled ids of the open replies, by episode
    self._began = np.zeros((0,), np.uint32)  # the turn that each episode's present token row began with

  def reply(self, log: EpisodeLog) -> dict[int, TextReply] | None:
    """See `Speaker`. Prompts and replies go to the log's timeline.

    Raises:
      UserError: a first prompt does not fit into the context.
    """
    first = self._state is None
    if first:
      self._begin(log)
    with processes.same_errors() if first else contextlib.nullcontext():
      if first:
        self._check_waiting(log)
      prompts = self._admit(log)
    for row, prompt in prompts.items():
      if prompt.fresh:
        log.timeline.begin_row(row)
        self._began[row] = len(log.past(row))
    if not self._feed(log, prompts):
      return None
    return self._in_text(log, self._sample(log))

  # -- slots: which episode has which row of the device ---------------------------------------------------------------

  def _begin(self, log: EpisodeLog) -> None:
    """Gives the first episodes their rows; the cache is made when the first prompts are known."""
    rows, share, limits = log.envs.rows, self._sampler.share, log.limits
    self._params = self._sampler.decode_weights(self._params)
    self._began = np.zeros((rows,), np.uint32)
    size = rows_at_once(self._sampler, limits, rows // share.own, self._eyes and self._eyes.room)
    self._shapes = Shapes(size, share.shards, limits.max_context, decode_columns(limits), limits.length_step)
    # Round-robin, so that a level with long episodes is spread over all shards.
    self._slots = np.arange(size * share.own, dtype=np.int32).reshape(-1, share.own).T.reshape(-1)

  def _check_waiting(self, log: EpisodeLog) -> None:
    """Checks the first prompts of episodes without a slot, so that none is refused when others are played already.

    Raises:
      UserError: one does not fit; environments outside JAX are not checked.
    """
    for row in sorted(set(log.live).difference(self._slots.tolist())):
      log.check_first_prompt(row)

  def _admit(self, log: EpisodeLog) -> dict[int, Prompt]:
    """The prompts of the episodes that wait for a reply and have a row of the device, or get one now."""
    live = log.status == Status.RUNNING
    self._slots[(self._slots >= 0) & ~live[self._slots]] = -1
    held = set(self._slots.tolist())
    waiting = [row for row in log.live if row not in held]
    prompts = log.prompts(log.limits.room, sorted(r for r in held if r >= 0 and r not in self._open))
    # A prompt that does not fit ends its episode, and its slot is free for the next one.
    self._slots[(self._slots >= 0) & (log.status[self._slots] != Status.RUNNING)] = -1
    by_shard = self._slots.reshape(self._sampler.share.own, -1)
    while waiting:
      free = (by_shard < 0).sum(axis=1)
      if not free.any():
        break
      row, shard = waiting.pop(0), int(np.argmax(free))
      prompt = log.prompts(log.limits.room, [row])
      if prompt:
        by_shard[shard, np.flatnonzero(by_shard[shard] < 0)[0]] = row
        prompts |= prompt
    return prompts

  def _resize(self, columns: int) -> None:
    """Makes the cache, or adds columns that are needed."""
    size = self._shapes.cache(columns)
    if self._state is None:
      self._state, self._size = self._sampler.init(len(self._slots), size), size
    elif size > self._size:
      self._state, self._size = self._sampler.resize(self._state, size), size

  def _selection(self, wanted: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Some rows of each shard: the slots i32[b], and their numbers within the shards; None for all rows.

    Args:
      wanted: bool[B'], slots that come first.
      rows: of a shard.
    """
    if rows == self._shapes.rows:
      return np.arange(len(self._slots)), None
    by_shard = wanted.reshape(self._sampler.share.own, -1)
    taken = np.argsort(~by_shard, axis=1, kind='stable')[:, :rows].astype(np.int32)
    return (taken + self._shapes.rows * np.arange(len(taken))[:, None]).reshape(-1), taken.reshape(-1)

  # -- prompts --------------------------------------------------------------------------------------------------------

  def _feed(self, log: EpisodeLog, prompts: dict[int, Prompt]) -> bool:
    """Feeds prompts to their rows. Returns False if no process has an episode that goes on."""
    length = log.timeline.length
    by_shard = self._slots.reshape(self._sampler.share.own, -1)
    after = [int(length[row]) + (len(prompts[row].ids) if row in prompts else 0) for row in self._slots if row >= 0]
    sizes: list[int] = []
    kinds = {first: {row: p for row, p in prompts.items() if p.fresh == first} for first in (True, False)}
    for own in kinds.values():
      sizes += [
        int(np.isin(by_shard, list(own)).sum(axis=1).max()),
        max((len(p.ids) for p in own.values()), default=0),
        int(length[list(own)].max(initial=0)),
      ]
    # Processes agree on shapes, and go on until the last of them is done.
    live, longest, *sizes = processes.largest((int((by_shard >= 0).sum(axis=1).max()), max(after, default=0), *sizes))
    if not live:
      return False
    self._longest = longest
    self._decoded = self._shapes.decoded_rows(live) if log.limits.drop_finished else self._shapes.rows
    fed, widest, before = (dict(zip(kinds, sizes[i::3], strict=True)) for i in range(3))
    widths = {first: self._shapes.pieces(widest[first], before[first]) for first in kinds if fed[first]}
    wanted = max((before[first] + sum(pieces) for first, pieces in widths.items()), default=0)
    if log.envs.has_images:  # the positions of images are known for whole prompts
      widths = {first: (sum(pieces),) for first, pieces in widths.items()}
    else:
      wanted = min(wanted, self._shapes.caches[-1])
    self._resize(max(longest + decode_columns(log.limits), wanted))
    if fed[True]:
      self._keys = self._row_keys(log)
    self._see(prompts)
    for first, pieces in widths.items():
      self._extend(log, kinds[first], pieces, fed[first], fresh=first)
    for row in prompts:
      log.timeline.append_context(row, prompts[row].ids, len(log.past(row)), prompts[row].images)
      self._open[row] = []
    return True

  def _see(self, prompts: dict[int, Prompt]) -> None:
    """Computes the features of images that the rollout has not shown yet."""
    new = {
      span.segment.digest: span.segment.image
      for prompt in prompts.values()
      for span in prompt.images
      if span.segment.digest not in self._seen
    }
    if new:
      self._seen |= zip(new, self._eyes.encoder(self._params['policy']['visual'], list(new.values())), strict=True)

  def _extend(
    self, log: EpisodeLog, prompts: dict[int, Prompt], widths: tuple[int, ...], fed: int, *, fresh: bool
  ) -> None:
    """Feeds prompts, `widths` columns one after the other, to at most `fed` rows of each shard."""
    calls, rows = self._shapes.calls(fed)
    left = np.isin(self._slots, list(prompts))
    for _ in range(calls):
      at, selected = self._selection(left, rows)
      own = np.where(left[at], self._slots[at], -1)
      left[at] = False
      of_row = {i: prompts[row] for i, row in enumerate(own.tolist()) if row in prompts}
      start = 0
      for width in widths:
        tokens = np.full((len(own), width), log.context.tokenizer.pad_id, np.int32)
        count, begins = np.zeros((len(own),), np.int32), np.zeros((len(own),), bool)
        for i, prompt in of_row.items():
          ids = prompt.ids[start : start + width]
          tokens[i, : len(ids)] = ids
          count[i], begins[i] = len(ids), fresh and not start
        if self._observer is not None:
          self._observer(FedRows(own, tokens, count, self._slots.copy(), self._keys))
        images = None
        if log.envs.has_images:
          images = self._eyes.columns([of_row.get(i) for i in range(len(own))], self._seen, width)
        self._state = self._sampler.extend(
          self._params,
          self._state,
          tokens,
          count,
          begins,
          rows=selected,
          all_begin=fresh and not start,
          images=images,
        )
        start += width

  def _row_keys(self, log: EpisodeLog) -> jax.Array:
    """The keys of the device's rows. If a token row begins in a later turn, the turn is folded into its key.

    A draw depends on its key and its position in the row; a new row restarts the positions, so it needs a new key.
    """
    envs, own = log.envs, np.maximum(self._slots, 0)
    keys = jax.random.split(self._key, envs.rows * self._sampler.share.parts)[
      envs.first_row : envs.first_row + envs.rows
    ]
    keys, began = keys[jnp.asarray(own)], self._began[own]
    if not began.any():
      return keys
    folded = jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, jnp.asarray(began)))
    return jax.random.wrap_key_data(jnp.where(jnp.asarray(began)[:, None] > 0, folded, jax.random.key_data(keys)))

  # -- replies --------------------------------------------------------------------------------------------------------

  def _sample(self, log: EpisodeLog) -> dict[int, list[int]]:
    """Samples until replies are complete: all of them in lockstep, else some, perhaps none. Returns their ids."""
    limits, columns = log.limits, decode_columns(log.limits)
    lockstep, decoded = limits.schedule == 'lockstep', self._decoded
    complete: dict[int, list[int]] = {}
    while True:
      at, selected = self._selection(np.isin(self._slots, list(self._open)), decoded)
      slots, keys = self._slots[at], self._keys if selected is None else _taken(self._keys, at)
      left = [limits.max_response_tokens - len(self._open[r]) if r in self._open else 0 for r in slots.tolist()]
      self._state, reply, goes_on = self._sampler.decode(
        self._params,
        self._state,
        keys,
        np.asarray(left, np.int32),
        columns=columns,
        sampling=self._sampling,
        rows=selected,
        enough=None if lockstep else self._shapes.enough(decoded),
      )
      self._take(log, slots, processes.own_rows(reply), complete)
      if not lockstep or not bool(goes_on):
        return complete
      # The rest of the replies goes on in as few rows as hold them; processes agree on shapes.
      still = np.isin(self._slots, list(self._open))
      rows = still.reshape(self._sampler.share.own, -1).sum(axis=1).max()
      live, self._longest = processes.largest((int(rows), int(log.timeline.length[self._slots[still]].max(initial=0))))
      if limits.drop_finished:
        decoded = self._shapes.decoded_rows(live)
      self._resize(self._longest + columns)

  def _take(self, log: EpisodeLog, slots: np.ndarray, reply: Reply, complete: dict[int, list[int]]) -> None:
    """Writes sampled tokens to the timeline, and moves the replies that are complete to `complete`."""
    log.row_steps += len(slots) * int(reply.count.max(initial=0))
    for i, row in enumerate(slots.tolist()):
      n = int(reply.count[i])
      if not n:
        continue
      log.timeline.append_reply(
        row,
        reply.tokens[i, :n],
        len(log.past(row)),
        logprobs=reply.logprobs[i, :n],
        values=reply.values[i, :n],
        entropies=reply.entropies[i, :n],
      )
      self._open[row] += reply.tokens[i, :n].tolist()
      if not reply.open[i]:
        complete[row] = self._open.pop(row)

  def _in_text(self, log: EpisodeLog, complete: dict[int, list[int]]) -> dict[int, TextReply]:
    stop = self._sampler.stop_ids[0]
    texts = log.context.reply_texts(list(complete.values()))
    return {
      row: TextReply(text, len(ids), ids=tuple(ids), closed=ids[-1] == stop)
      for text, (row, ids) in zip(texts, complete.items(), strict=True)
    }
