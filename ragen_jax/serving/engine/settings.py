"""Engine: its size, and what it counts."""

from __future__ import annotations

import dataclasses

from ragen_jax.utils.errors import UserError


@dataclasses.dataclass(frozen=True)
class EngineSettings:
  """The size of an engine: fields of `config.serve` and `config.agent`, and these.

  Attributes:
    chunk: tokens that are sampled between two looks at the calls that wait.
    widths: columns of the programs that feed prompts, ascending, see `DeviceRows`. A prompt is fed in pieces of at most
      the largest, one between two chunks.
  """

  slots: int
  max_context: int
  chunk: int
  widths: tuple[int, ...]
  max_queue: int

  @property
  def columns(self) -> int:
    """Columns of a row of the device: programs write theirs behind the last one, filled or not."""
    return self.max_context + max(self.widths[0], self.chunk)

  def __post_init__(self):
    for name, least in (('slots', 1), ('chunk', 1), ('max_queue', 0)):
      if getattr(self, name) < least:
        raise UserError(f'{name}={getattr(self, name)}: must be at least {least}')
    if self.max_context < 2:
      raise UserError(f'max_context={self.max_context}: must be at least 2, a prompt and a reply of one token')
    if not self.widths or min(self.widths) < 1 or list(self.widths) != sorted(set(self.widths)):
      raise UserError(f'widths={self.widths}: must be ascending numbers from 1')
    if self.widths[-1] > self.max_context:
      raise UserError(f'widths={self.widths}: must be at most max_context, {self.max_context}')


@dataclasses.dataclass(frozen=True)
class EngineStats:
  """What an engine holds and has done.

  Attributes:
    alive: whether calls are served; False after an error, and when the engine is closed.
    used: rows with a reply.
    queued: calls that wait for a row.
    prompt_tokens: tokens of the prompts that got a slot; `cached_tokens` of them were not fed.
    fed_tokens: tokens that were fed, those that were fed again for new weights included.
    fed_columns: columns that were computed for them, padding included.
    sampled_tokens: tokens of replies.
    row_steps: rows times steps of the programs that sampled them; `sampled_tokens` is the useful part.
    copies: rows that were copied or cut.
    finished, aborted: replies that ended by themselves, and that were cancelled.
    busy_seconds: wall-clock time in which the thread fed and sampled.
  """

  alive: bool
  slots: int
  used: int
  queued: int
  paused: bool
  version: int
  prompt_tokens: int
  cached_tokens: int
  fed_tokens: int
  fed_columns: int
  sampled_tokens: int
  row_steps: int
  copies: int
  chunks: int
  finished: int
  aborted: int
  busy_seconds: float
