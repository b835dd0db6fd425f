"""Engine: what happens on the device between two chunks, and a chunk: slots, prompts, tokens, ends of replies.

Nothing here knows threads; the engine calls it from its own.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ragen_jax.sampling.draw import RowSampling
from ragen_jax.sampling.sampler import Sampler
from ragen_jax.serving.engine.calls import Call
from ragen_jax.serving.engine.device_rows import DeviceRows, Feed
from ragen_jax.serving.engine.eyes import Eyes
from ragen_jax.serving.engine.settings import EngineSettings
from ragen_jax.serving.engine.slots import Slot, SlotTable
from ragen_jax.serving.types import Finish

_log = logging.getLogger(__name__)


class Scheduler:
  """The calls that have a slot, by the index of the slot; `version` is that of the weights."""

  def __init__(self, sampler: Sampler, settings: EngineSettings, params: Any, version: int, eyes: Eyes | None = None):
    self.rows = DeviceRows(
      sampler,
      params,
      rows=settings.slots,
      columns=settings.columns,
      chunk=settings.chunk,
      widths=settings.widths,
      eyes=eyes,
    )
    self.calls: dict[int, Call] = {}
    self.version = version
    self.counts: collections.Counter[str] = collections.Counter()
    self._warned: int | None = None  # the last version whose numbers were not finite
    self._stop_ids = sampler.stop_ids
    self._placeholder = eyes.vision.image_token_id if eyes else 0
    self._table = SlotTable(
      settings.slots,
      sampler.share.shards,
      settings.max_context,
      worth=settings.widths[0],
      cuts=sampler.cfg.linear is None,
    )

  def set_weights(self, params: Any, version: int, *, keep_cache: bool) -> None:
    """See `Engine.set_weights`."""
    self.rows.set_weights(params, keep_cache=keep_cache)
    self.version = version
    if not keep_cache:
      self._table.empty()

  def drop_cancelled(self) -> None:
    """Ends the replies of calls that were cancelled."""
    for index in [index for index, call in self.calls.items() if call.cancelled]:
      slot = self._table.slots[index]
      self._end(slot, slot.length, Finish.ABORTED)

  def prepare(self, waiting: Sequence[Call], admitted: Callable[[Call], None]) -> None:
    """Gives waiting calls slots, the first come first, and feeds every slot that waits for its prompt once.

    `admitted` is called with each call that gets a slot.
    """
    done: set[int] = set()
    while True:
      # Again after a prompt was fed: a call may have waited to copy it.
      waiting = [call for call in waiting if not self._admit(call, admitted)]
      fed = [slot for slot in self._table.fed() if slot.index not in done]
      if not fed:
        return
      done |= {slot.index for slot in fed}
      self._feed(fed)

  def _admit(self, call: Call, admitted: Callable[[Call], None]) -> bool:
    """Gives a call a slot, if there is one for it now."""
    placement = self._table.place(call.prompt)
    if placement is None:
      return False
    if placement.copies:
      rotary = call.images.rotary(placement.kept) if call.images else placement.kept
      self.rows.copy(placement.source.index, placement.slot.index, placement.kept, rotary)
      self.counts['copies'] += 1
    self._table.begin(placement, call.prompt)
    call.cached = placement.kept
    self.counts['prompt_tokens'] += len(call.prompt)
    self.counts['cached_tokens'] += placement.kept
    self.calls[placement.slot.index] = call
    admitted(call)
    return True

  def _feed(self, slots: list[Slot]) -> None:
    """Feeds the next piece of each slot's prompt."""
    by_width: dict[int, list[Slot]] = {}
    for slot in slots:
      by_width.setdefault(self.rows.width_for(slot.length, len(slot.pending)), []).append(slot)
    for width, group in sorted(by_width.items()):
      pieces = [slot.pending[:width] for slot in group]
      self.rows.feed([self._fed(slot, ids) for slot, ids in zip(group, pieces, strict=True)], width)
      for slot, ids in zip(group, pieces, strict=True):
        slot.append(ids)
        slot.pending = slot.pending[len(ids) :]
        self.counts['fed_tokens'] += len(ids)

  def _fed(self, slot: Slot, ids: np.ndarray) -> Feed:
    """What a slot is fed for these columns of its row."""
    call = self.calls[slot.index]
    shown = call.images.piece(slot.length, slot.length + len(ids)) if call.images else None
    ids = ids if shown is None else np.where(ids < 0, self._placeholder, ids)
    return Feed(slot.index, ids, begins=slot.length == 0, shown=shown)

  def sample(self) -> None:
    """Samples a chunk for slots whose prompts are complete, takes it, and returns when the device is idle."""
    ready = self._table.ready()
    if not ready:
      self.rows.wait()
      return
    calls = [self.calls[slot.index] for slot in ready]
    params = [call.request.params for call in calls]
    reply = self.rows.decode(
      [slot.index for slot in ready],
      np.asarray([call.request.key for call in calls], np.uint32),
      np.asarray([call.budget - len(call.ids) for call in calls], np.int32),
      RowSampling(
        temperature=np.asarray([p.temperature for p in params], np.float32),
        top_p=np.asarray([p.top_p for p in params], np.float32),
        top_k=np.asarray([p.top_k for p in params], np.int32),
      ),
      alternatives=any(p.top_logprobs for p in params),
    )
    self.counts['chunks'] += 1
    self._note_spoilt(ready, ~np.isfinite(reply.logprobs))
    for i, (slot, call) in enumerate(zip(ready, calls, strict=True)):
      before = len(call.ids)
      slot.append(reply.tokens[i, : reply.count[i]])
      finish = call.take(reply, i, self.version, self._stop_ids)
      self.counts['sampled_tokens'] += len(call.ids) - before
      if finish is not None:
        self._end(slot, len(call.prompt) + len(call.ids), Finish.ABORTED if call.cancelled else finish)

  def _note_spoilt(self, slots: list[Slot], bad: np.ndarray) -> None:
    """Notes which slots have sampled numbers that are not finite, bool[n, C].

    Their replies go on, since whoever trains on them has to see the numbers. Their rows are cleared when the replies
    end: keys and values that are not finite would spoil the next reply in the row. The row that they began with may be
    the one at fault, so no free slot stays warm.
    """
    if bad.any() and self._warned != self.version:
      self._warned = self.version
      number = int(bad.sum())
      _log.error('policy version %d: not finite: %d sampled log-probs; its replies mean nothing', self.version, number)
    spoilt = [slot for slot, own in zip(slots, bad, strict=True) if own.any() and not slot.spoilt]
    for slot in spoilt:
      slot.spoilt = True
    for slot in self._table.free() if spoilt else []:
      if slot.length:
        self.rows.clear(slot.index)
        slot.empty()

  def _end(self, slot: Slot, length: int, finish: Finish) -> None:
    """Ends the reply of a slot, which stays warm with its first columns."""
    if slot.spoilt:
      self.rows.clear(slot.index)
    self._table.end(slot, length)
    call = self.calls.pop(slot.index)
    self.counts['aborted' if finish is Finish.ABORTED else 'finished'] += 1
    call.end(finish)
