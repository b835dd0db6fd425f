"""How many rows or columns go through the model at once in the update, chosen before anything is compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ragen_jax.models.qwen import Qwen
from ragen_jax.training.batches import BatchingSettings, PackingSettings
from ragen_jax.training.memory import UpdateMemory
from ragen_jax.training.scoring import RematSettings
from ragen_jax.utils.sizes import GIB, round_up

# Widths of bins are multiples of this, the tile of accelerators.
_BIN_STEP = 128
# Numbers of scored tokens of a rollout's rows are 1, 2, 4, ... times this.
_REPLY_STEP = 512
# Bins may be so wide even if no row is: in wider bins fewer columns stay empty, and attention costs more.
_BIN_WIDTH = 2048
# Rows that share their beginnings may fill bins of so many times this width, where attention skips what is not seen.
_WIDER = 2

# Values of `config.model.remat`.
AUTO = 'auto'
REMAT_OF = {False: 'none', 'elementwise': 'elementwise', 'attention': 'attention', True: 'layers'}
_KEPT = {'elementwise': 'products', 'attention': 'attention'}
# A CPU is as fast with these as with more columns at once, and with logits of these as of more positions.
HOST_COLUMNS, HOST_LOGITS = 8192, 256
# A number of a product takes 2 D operations to compute again, and about 12 bytes of traffic to keep in the stack of all
# layers. In narrower models, accelerators compute it again in less time. On a CPU, keeping
# it took less time in both models that were measured, which are narrow (docs/memory.md).
_KEEP_FROM_WIDTH = 1536


@dataclasses.dataclass(frozen=True)
class SizeSettings:
  """What the sizes depend on. Fields of `config.optimizer`, `config.model` and `PackingSettings`, and the following.

  Attributes:
    length_step: widths of rows that are not packed are multiples of this.
    whole_rows: any column may be a scored token, not only the sampled ones.
    shards: parts into which rows are divided.
    most_columns: columns of a device that go through the model at once, where their number is chosen from the memory.
    skips_unseen: whether attention takes no time for the columns that a row does not see.
  """

  mini_batch_size: int
  micro_batch_size: int
  packing: bool
  max_context: int
  length_step: int
  whole_rows: bool
  shards: int
  remat: bool | str
  most_columns: int
  most_shared: int
  skips_unseen: bool = False

  @property
  def economical(self) -> str:
    """The choice of `qwen.REMAT` that needs the least memory."""
    return 'layers' if self.remat == AUTO else REMAT_OF[self.remat]

  @property
  def width(self) -> int:
    """The most columns of a row, or of a bin if rows are packed."""
    if self.packing:
      return max(round_up(self.max_context, _BIN_STEP), _BIN_WIDTH)
    return round_up(self.max_context, self.length_step)

  @property
  def widest(self) -> int:
    """The most columns of a bin whose rows share their beginnings."""
    wider = self.packing and self.skips_unseen and self.most_shared > self.width
    return min(_WIDER * self.width, self.most_shared) if wider else self.width


def remat_settings(
  name: bool | str, policy: Qwen, memory: Callable[[], UpdateMemory], limit: Callable[[], float]
) -> RematSettings:
  """What the backward pass computes again.

  `name` is `config.model.remat`: a key of `REMAT_OF`, or 'auto' for the fastest that fits `policy` and its devices.
  `memory` and `limit`, the bytes that a device may hold, are asked only where they decide.
  """
  if name != AUTO:
    return RematSettings.always(REMAT_OF[name])
  if policy.attention.by_row:  # on one CPU
    kept = ('elementwise', 'attention')
  else:
    kept = ('attention' if policy.cfg.hidden_size < _KEEP_FROM_WIDTH else 'elementwise',)
  found, most = memory(), limit()
  return RematSettings(tuple((remat, found.columns(most, remat)) for remat in kept))


def micro_batch_size(settings: SizeSettings, memory: UpdateMemory, limit: float) -> int:
  """Rows of the greatest length that go through the model at once: the largest even division of a mini-batch that fits.

  A `micro_batch_size` above 0 is returned as it is. `memory` is for rows of `settings.width`, `limit` in bytes of a
  device.
  """
  s = settings
  if s.micro_batch_size:
    return s.micro_batch_size
  most = memory.columns(limit, s.economical) // s.width * s.shards
  sizes = [n for n in range(s.shards, s.mini_batch_size + 1, s.shards) if s.mini_batch_size % n == 0]
  return max((n for n in sizes if n <= most), default=s.shards)


def batching(
  settings: SizeSettings, memory: Callable[[], UpdateMemory], limit: Callable[[], float]
) -> BatchingSettings:
  """The sizes of micro-batches and of bins; `memory` and `limit` are asked only where they decide."""
  s = settings
  micro = micro_batch_size(s, memory(), limit()) if not s.micro_batch_size else s.micro_batch_size
  packing = None
  if s.packing:
    rows = -(-s.mini_batch_size // s.shards)  # more columns than these are not needed
    columns = micro * s.width // s.shards
    if not s.micro_batch_size:
      columns = min(memory().columns(limit(), s.economical), rows * s.width, s.most_columns)
    packing = PackingSettings(
      _BIN_STEP, s.width, max(columns, s.width), s.shards, _REPLY_STEP, s.most_shared, min(s.widest, columns)
    )
  return BatchingSettings(micro_batch_size=micro, length_step=s.length_step, whole_rows=s.whole_rows, packing=packing)


def _columns(settings: SizeSettings, chosen: BatchingSettings) -> int:
  """The most columns that go through the model at once on a device."""
  if chosen.packing is not None:
    return chosen.packing.columns
  return chosen.micro_batch_size * settings.width // settings.shards


def needed(settings: SizeSettings, chosen: BatchingSettings, remat: RematSettings, memory: UpdateMemory) -> int:
  """Bytes of the update on a device, with as many columns as go through the model at once."""
  columns = _columns(settings, chosen)
  return memory.total(columns, remat.choose(columns))


def describe(
  settings: SizeSettings, chosen: BatchingSettings, remat: RematSettings, memory: UpdateMemory, limit: float
) -> str:
  """What goes through the model at once, what is computed again, and why, in one line."""
  s = settings
  columns = _columns(s, chosen)
  text = f'{chosen.micro_batch_size} rows of up to {s.width} columns at once'
  if chosen.packing is not None:
    text = f'rows packed into bins of up to {s.width} columns, {columns} columns at once on a device'
  for name, most in remat.choices:
    if 0 < most < columns:
      text += f', up to {most} of them without computing {_KEPT[name]} again'
  total = needed(s, chosen, remat, memory)
  need = f'about {total / GIB:.1f} GiB a device'
  if s.micro_batch_size:
    return f'update: {text}, as optimizer.micro_batch_size={s.micro_batch_size} says ({need})'
  fits = '' if total <= limit else '; the estimate is that even this does not fit'
  return f'update: {text}; chosen for the {limit / GIB:.1f} GiB that may be filled ({need}){fits}'
