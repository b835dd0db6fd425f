"""The policy as a speaker: executes what a `Schedule` of the device's rows decides."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ragen_jax.agent.context_manager import Prompt
from ragen_jax.agent.episode import Limits, Status, TextReply
from ragen_jax.agent.episode_log import EpisodeLog
from ragen_jax.agent.image_table_sizes import ImageTableSizes
from ragen_jax.agent.prompt_images import PromptImages
from ragen_jax.distributed import processes
from ragen_jax.models.vision.tower import Features
from ragen_jax.sampling.feeding import common_tokens
from ragen_jax.sampling.kv_cache import SamplerState
from ragen_jax.sampling.sampler import Reply, Sampler, Sampling
from ragen_jax.sampling.schedule import Asked, Feed, Schedule, Share
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


@dataclasses.dataclass(frozen=True)
class _Chosen:
  """The experts of `count` i32[b] tokens of the prompts of some episodes, the tokens from `first` on."""

  episodes: np.ndarray
  first: int
  count: np.ndarray
  experts: jax.Array


def _beginning(prompt: Prompt) -> Hashable:
  """What equal prompts that begin a row have in common; None for others."""
  return (prompt.ids, tuple(span.segment.digest for span in prompt.images)) if prompt.fresh else None


# One program for each number of rows.
_taken = jax.jit(lambda keys, at: keys[at])


def decode_columns(limits: Limits) -> int:
  return min(limits.decode_chunk, limits.max_response_tokens)


def rows_at_once(sampler: Sampler, limits: Limits, rows: int, room: ImageTableSizes | None) -> int:
  """How many of a shard's `rows` are on the devices at a time. Every process must call.

  `room` is that of the images of a row; None for text.
  """
  if limits.rows_in_flight:
    rows = min(rows, limits.rows_in_flight // sampler.share.shards)
  columns = largest_cache(limits.max_context, decode_columns(limits), limits.length_step)
  return sampler.rows_that_fit(rows, columns, fed_image_tokens(limits.max_context, room))


def fed_image_tokens(max_context: int, room: ImageTableSizes | None) -> int:
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
    eyes: PromptImages | None = None,
  ):
    """Nothing runs before the first reply.

    Args:
      key: PRNG key of the draws; it is split into one key for each episode.
      observer: called before each call of `Sampler.extend`: once for each piece of long prompts, and for only one of
        the rows that share a prompt.
      eyes: the vision tower of the policy; needed if observations contain images.
    """
    self._sampler = sampler
    self._params = params
    self._key = key
    self._sampling = sampling
    self._observer = observer
    self._eyes = eyes
    self._visual: Any = None  # the tower's weights
    self._seen: dict[bytes, Features] = {}  # of the rollout's images, by digest
    self._schedule: Schedule | None = None
    self._state: SamplerState | None = None
    self._size = 0  # columns of the cache
    self._keys: jax.Array | None = None  # of the device's rows
    self._open: dict[int, list[int]] = {}  # sampled ids of the open replies, by episode
    self._began = np.zeros((0,), np.uint32)  # the turn that each episode's present token row began with

  @property
  def idle(self) -> bool:
    return not self._open

  def reply(self, log: EpisodeLog) -> dict[int, TextReply] | None:
    """See `Speaker`. Prompts and replies go to the log's timeline. Raises UserError if a first prompt does not fit."""
    first = self._schedule is None
    if first:
      self._begin(log)
    with processes.same_errors() if first else contextlib.nullcontext():
      if first:
        self._check_waiting(log)
      prompts = self._admit(log)
    if log.away and self.idle and not prompts:
      return {}  # all that go on wait for their environments
    for row, prompt in prompts.items():
      if prompt.fresh:
        log.timeline.begin_row(row)
        self._began[row] = len(log.past(row))
    decoded = self._feed(log, prompts)
    return None if decoded is None else self._in_text(log, self._sample(log, decoded))

  def _begin(self, log: EpisodeLog) -> None:
    """Gives the first episodes their rows; the cache is made when the first prompts are known."""
    rows, share, limits = log.envs.rows, self._sampler.share, log.limits
    params = self._sampler.decode_weights(self._params)
    self._visual = params['policy']['visual'] if self._eyes is not None else None
    self._params = nnx.to_pure_dict(params)  # a call takes its arrays in a third of the time that it takes for a state
    self._began = np.zeros((rows,), np.uint32)
    size = rows_at_once(self._sampler, limits, rows // share.own, self._eyes and self._eyes.room)
    if self._sampler.experts:
      log.timeline.record_experts(self._sampler.cfg.choices_shape, self._sampler.cfg.experts.number_type)
    self._schedule = Schedule(
      Shapes(size, share.shards, limits.max_context, decode_columns(limits), limits.length_step),
      share.own,
      lockstep=limits.schedule == 'lockstep',
      drop_finished=limits.drop_finished,
      whole=log.envs.has_images,  # whose positions are known for whole prompts
      largest=processes.largest,
    )

  def _check_waiting(self, log: EpisodeLog) -> None:
    """Raises UserError if the first prompt of an episode without a slot does not fit, before others are played.

    Environments outside JAX are not checked.
    """
    for row in sorted(set(log.live).difference(self._schedule.held)):
      log.check_first_prompt(row)

  def _admit(self, log: EpisodeLog) -> dict[int, Prompt]:
    """The prompts of the episodes that wait for a reply and have a row of the device, or get one now."""
    schedule = self._schedule
    schedule.release(log.status == Status.RUNNING)
    held = set(schedule.held)
    waiting = [row for row in log.live if row not in held]
    prompts = log.prompts(sorted(r for r in held if r not in self._open and r not in log.away))
    # A prompt that does not fit ends its episode, and its slot is free for the next one.
    schedule.release(log.status == Status.RUNNING)
    while waiting and schedule.has_room:
      row = waiting.pop(0)
      if prompt := log.prompts([row]):
        schedule.admit(row)
        prompts |= prompt
    return prompts

  def _resize(self, wanted: int) -> None:
    """Makes the cache, or adds columns that are needed."""
    size = self._schedule.shapes.cache(wanted)
    if self._state is None:
      self._state, self._size = self._sampler.init(self._schedule.slots.size, size), size
    elif size > self._size:
      self._state, self._size = self._sampler.resize(self._state, size), size

  # -- prompts --------------------------------------------------------------------------------------------------------

  def _feed(self, log: EpisodeLog, prompts: dict[int, Prompt]) -> int | None:
    """Feeds prompts to their rows, and returns how many rows of a shard sample then; None if all episodes are over."""
    asked = {row: Asked(len(prompt.ids), _beginning(prompt)) for row, prompt in prompts.items()}
    common = common_tokens([prompt.ids for prompt in prompts.values() if prompt.fresh])
    feeding = self._schedule.feed(asked, log.timeline.length, common)
    if feeding is None:
      return None
    self._resize(feeding.columns)
    if feeding.begins:
      self._keys = self._row_keys(log)
    if log.envs.has_images:
      self._see(prompts)
    found = []
    for call in feeding.calls:
      if isinstance(call, Share):
        self._state = self._sampler.share_rows(self._state, call.source, call.columns)
        found.append(call)
      else:
        found += self._extend(log, prompts, call)
    if self._sampler.experts:
      self._record(log, prompts, found)
    for row in prompts:
      log.timeline.append_context(row, prompts[row].ids, len(log.past(row)), prompts[row].images)
      self._open[row] = []
    return feeding.decoded

  def _see(self, prompts: dict[int, Prompt]) -> None:
    """Computes the features of images that the rollout has not shown yet. All processes must call."""
    new = {
      span.segment.digest: span.segment.image
      for prompt in prompts.values()
      for span in prompt.images
      if span.segment.digest not in self._seen
    }
    self._seen |= zip(new, self._eyes.encoder(self._visual, list(new.values())), strict=True)

  def _extend(self, log: EpisodeLog, prompts: dict[int, Prompt], call: Feed) -> list[_Chosen]:
    """Feeds the tokens of a stage to some rows; gives their experts, if they are recorded."""
    of_row = [prompts.get(row) for row in call.episodes.tolist()]
    start, found = 0, []
    for width in call.stage.pieces:
      tokens = np.full((len(of_row), width), log.context.tokenizer.pad_id, np.int32)
      count = np.zeros((len(of_row),), np.int32)
      for i, prompt in enumerate(of_row):
        ids = prompt.ids[call.stage.tokens][start : start + width] if prompt else ()
        tokens[i, : len(ids)], count[i] = ids, len(ids)
      if self._observer is not None:
        self._observer(FedRows(call.episodes, tokens, count, self._schedule.slots.reshape(-1).copy(), self._keys))
      begins = (call.episodes >= 0) & (call.stage.empties and not start)
      images = self._eyes.columns(of_row, self._seen, width) if log.envs.has_images else None
      given, options = (self._params, self._state, tokens, count, begins), dict(rows=call.rows, images=images)
      if self._sampler.experts:
        self._state, experts = self._sampler.extend_with_experts(*given, **options)
        found.append(_Chosen(call.episodes, (call.stage.tokens.start or 0) + start, count, experts))
      else:
        self._state = self._sampler.extend(*given, **options)
      start += width
    return found

  def _record(self, log: EpisodeLog, prompts: dict[int, Prompt], found: list[_Chosen | Share]) -> None:
    """Writes the experts of prompts behind what their rows hold; those of a copied prompt are copied, too."""
    experts, length = log.timeline.experts, log.timeline.length
    for part in found:
      if isinstance(part, Share):
        slots = self._schedule.slots
        sources = np.take_along_axis(slots, part.source.reshape(slots.shape), axis=1)
        for row, source in zip(slots.ravel().tolist(), sources.ravel().tolist(), strict=True):
          if row != source:
            n = min(part.columns, len(prompts[row].ids))
            experts[row, :n] = experts[source, :n]
        continue
      own = processes.own_rows(part.experts)
      for i, row in enumerate(part.episodes.tolist()):
        if n := int(part.count[i]):
          at = int(length[row]) + part.first
          experts[row, at : at + n] = own[i, :n]

  def _row_keys(self, log: EpisodeLog) -> jax.Array:
    """The keys of the device's rows. If a token row begins in a later turn, the turn is folded into its key.

    A draw depends on its key and its position in the row; a new row restarts the positions, so it needs a new key.
    """
    envs, own = log.envs, np.maximum(self._schedule.slots.reshape(-1), 0)
    keys = jax.random.split(self._key, envs.all_rows)[envs.first_row : envs.first_row + envs.rows]
    keys, began = keys[jnp.asarray(own)], self._began[own]
    if not began.any():
      return keys
    folded = jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, jnp.asarray(began)))
    return jax.random.wrap_key_data(jnp.where(jnp.asarray(began)[:, None] > 0, folded, jax.random.key_data(keys)))

  # -- replies --------------------------------------------------------------------------------------------------------

  def _sample(self, log: EpisodeLog, decoded: int) -> dict[int, list[int]]:
    """Samples until replies are complete: all of them in lockstep, else some, perhaps none. Returns their ids.

    The rest of the replies goes on in as few rows as hold them; `decoded` are the first ones of a shard.
    """
    limits, complete = log.limits, {}
    while True:
      call = self._schedule.decode(self._open, decoded)
      slots, keys = self._schedule.slots.reshape(-1)[call.at], self._keys
      left = [
        log.limits_of(r).max_response_tokens - len(self._open[r]) if r in self._open else 0 for r in slots.tolist()
      ]
      self._state, reply, goes_on = self._sampler.decode(
        self._params,
        self._state,
        keys if call.rows is None else _taken(keys, call.at),
        np.asarray(left, np.int32),
        columns=self._schedule.shapes.chunk,
        sampling=self._sampling,
        rows=call.rows,
        enough=call.enough,
      )
      self._take(log, slots, processes.own_rows(reply), complete)
      if limits.schedule != 'lockstep' or not bool(goes_on):
        return complete
      decoded, wanted = self._schedule.go_on(self._open, log.timeline.length)
      self._resize(wanted)

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
        experts=None if reply.experts is None else reply.experts[i, :n],
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
