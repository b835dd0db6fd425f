"""Engine: what each row of the device holds: which slot a prompt goes to, and how much of it is there already.

Nothing here touches the device. A slot is *warm* after its reply: its columns stay until another prompt needs the slot.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(eq=False)
class Slot:
  """A row of the device.

  Attributes:
    shard: the shard of the mesh that holds it; rows are copied within a shard only.
    row: i64[max_context], the ids of the first `length` columns, see `types.marked`.
    length: columns that are valid.
    columns: columns that the device counts; those behind `length` must be dropped before others are added.
    current: the device's hidden state is that of the last valid column, so that the next token can be drawn from it.
    pending: ids that must be fed before the next token can be sampled.
    busy: a reply is being written.
    spoilt: numbers that are not finite were sampled in the row. Its reply goes on, and nothing of it is reused.
    used: when the slot became free, in the order of such events; 0 if it was never used.
  """

  index: int
  shard: int
  row: np.ndarray
  length: int = 0
  columns: int = 0
  current: bool = False
  pending: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0,), np.int64))
  busy: bool = False
  spoilt: bool = False
  used: int = 0

  @property
  def ids(self) -> np.ndarray:
    """The ids whose columns are valid."""
    return self.row[: self.length]

  def append(self, ids: np.ndarray) -> None:
    """Notes that columns were added on the device."""
    self.row[self.length : self.length + len(ids)] = ids
    self.length += len(ids)
    self.columns, self.current = self.length, True

  def empty(self) -> None:
    """Makes all columns invalid; those that a reply needs must be fed again."""
    if self.busy:
      self.pending = np.concatenate([self.ids, self.pending])
    self.length, self.current, self.spoilt = 0, False, False


@dataclasses.dataclass(frozen=True)
class Placement:
  """A slot for a prompt, which starts from the first `kept` columns of the slot `source`, often the same one."""

  slot: Slot
  source: Slot
  kept: int

  @property
  def copies(self) -> bool:
    """Whether the row must be changed on the device before ids are fed: copied, or its last columns dropped."""
    return self.kept > 0 and (self.slot is not self.source or self.source.columns != self.kept)


class SlotTable:
  """All slots of an engine, in the order of the device's rows."""

  def __init__(self, slots: int, shards: int, max_context: int, worth: int, *, cuts: bool = True):
    """All slots are free and empty.

    The rows are divided into `shards` equal parts, and one is copied if that saves feeding at least `worth` tokens.
    `cuts` says whether the last columns of a row can be dropped. Rows with a state of linear attention go on, or are
    copied, as a whole only.
    """
    size = slots // shards
    self._cuts = cuts
    self.slots = [Slot(i, i // size, np.zeros((max_context,), np.int64)) for i in range(slots)]
    self._worth = worth
    self._clock = 0

  def free(self) -> list[Slot]:
    """The slots without a reply, the least recently used first."""
    return sorted((s for s in self.slots if not s.busy), key=lambda s: (s.length > 0, s.used, s.index))

  def fed(self) -> list[Slot]:
    """The slots whose prompt must be fed before a token can be sampled."""
    return [s for s in self.slots if s.busy and len(s.pending)]

  def ready(self) -> list[Slot]:
    """The slots that can sample."""
    return [s for s in self.slots if s.busy and not len(s.pending)]

  def place(self, prompt: np.ndarray) -> Placement | None:
    """The slot for a prompt i64[n], see `types.marked`, so that as little of it as possible is fed.

    A free slot that holds nothing but a beginning of the prompt is continued. Otherwise the least recently used slot is
    overwritten, with a copy of the row that has the longest beginning in common if that is worth it. A slot that holds
    another continuation keeps it in this way.

    None if no slot is free, or if it is better to wait for a row that is being fed and will hold so much more of it.
    """
    free = self.free()
    if not free:
      return None
    common = {s.index: 0 if s.spoilt else _common(s.ids, prompt) for s in self.slots}
    busy = np.bincount([s.shard for s in self.slots if s.busy], minlength=self.slots[-1].shard + 1)
    oldest: dict[int, Slot] = {}
    for slot in free:
      oldest.setdefault(slot.shard, slot)
    continued = [s for s in free if common[s.index] == s.length or oldest[s.shard] is s]
    best = max(
      (Placement(s, s, self._kept(s, common[s.index], prompt)) for s in continued),
      key=lambda p: (p.kept, -busy[p.slot.shard], -free.index(p.slot)),
    )
    copies = [
      Placement(oldest[s.shard], s, self._kept(s, common[s.index], prompt)) for s in self.slots if s.shard in oldest
    ]
    copied = max(copies, key=lambda p: (p.kept, -busy[p.slot.shard]))
    if copied.kept - best.kept >= self._worth:
      best = copied
    coming = max((self._common_when_fed(s, prompt) for s in self.slots if len(s.pending)), default=0)
    return None if coming - best.kept >= self._worth else best

  def _kept(self, slot: Slot, common: int, prompt: np.ndarray) -> int:
    """Columns of a slot that a prompt starts from.

    The last token of a prompt is fed again, since the next token is drawn from its hidden state, unless it is the last
    token of the row too, whose hidden state the device has.
    """
    whole = slot.current and common == len(prompt) == slot.length
    kept = common if whole else min(common, len(prompt) - 1)
    return kept if self._cuts or kept == slot.length == slot.columns else 0

  def _common_when_fed(self, slot: Slot, prompt: np.ndarray) -> int:
    """Columns of a slot that a prompt will be able to start from when the slot's own prompt has been fed."""
    coming = np.concatenate([slot.ids, slot.pending])
    common = _common(coming, prompt)
    return common if self._cuts or common == len(coming) else 0

  def begin(self, placement: Placement, prompt: np.ndarray) -> None:
    """Gives the slot to a prompt; the device's row must be changed accordingly if `placement.copies`."""
    slot, source, kept = placement.slot, placement.source, placement.kept
    slot.current = source.current and kept == source.length
    if placement.copies:
      slot.row[:kept] = source.row[:kept]
      slot.columns = kept
    slot.length = kept
    slot.pending = np.asarray(prompt[kept:], np.int64)
    slot.busy = True

  def end(self, slot: Slot, length: int) -> None:
    """Makes a slot free and warm with its first `length` columns, at most those that it has; none if it is spoilt."""
    self._clock += 1
    length = 0 if slot.spoilt else length
    slot.current = slot.current and length >= slot.length
    slot.length = min(length, slot.length)
    slot.pending = slot.pending[:0]
    slot.busy = slot.spoilt = False
    slot.used = self._clock

  def empty(self) -> None:
    """Makes the columns of all slots invalid."""
    for slot in self.slots:
      slot.empty()


def _common(a: np.ndarray, b: np.ndarray) -> int:
  """Number of equal ids at the beginning of two rows."""
  n = min(len(a), len(b))
  different = np.flatnonzero(a[:n] != b[:n])
  return int(different[0]) if len(different) else n
