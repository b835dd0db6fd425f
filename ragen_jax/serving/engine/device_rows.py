"""Engine: the rows of the device, the sampler's programs on few fixed shapes; serving compiles nothing new."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ragen_jax.sampling.draw import RowSampling
from ragen_jax.sampling.sampler import Reply, Sampler, SamplerState, changed_weights
from ragen_jax.serving.engine.calls import TOP_LOGPROBS
from ragen_jax.serving.engine.eyes import Eyes, Shown
from ragen_jax.utils.errors import UserError

# Sub-batches have 1, 4, 16, ... rows of a shard.
_GROWTH = 4


@dataclasses.dataclass(frozen=True)
class Feed:
  """Ids for a row, i32[n], at most as many as the width of the program; the row is emptied first if `begins`. `shown`
  are the images among them; None for text."""

  row: int
  ids: np.ndarray
  begins: bool
  shown: Shown | None = None


class DeviceRows:
  """The state of the sampler, and the weights.

  Attributes:
    widths: columns of the programs that feed prompts, ascending.
    fed_columns: columns that were computed to feed prompts, padding included.
    row_steps: rows times steps of the programs that sampled.
  """

  def __init__(
    self, sampler: Sampler, params: Any, *, rows: int, columns: int, chunk: int, widths: Sequence[int],
    eyes: Eyes | None = None,
  ):  # fmt: skip
    """Makes the cache for weights of the `ActorCritic`, as they are trained.

    Args:
      eyes: the vision tower; None for a model of text.
      columns: of a row: those that hold tokens, and those that a program writes behind them.
      chunk: columns of a call of `decode`.
      widths: columns of the programs that feed prompts. The smallest feeds all rows at once. A wider program feeds as
        many rows as make no more columns, at least one: it would need more memory, and would keep replies waiting.

    Raises:
      UserError: the rows do not fit into the memory or cannot be divided over the mesh, or there are several processes.
    """
    share = sampler.share
    if jax.process_count() > 1:
      raise UserError(f'serving: needs one process, and this run has {jax.process_count()}')
    if rows % share.shards:
      raise UserError(f'slots={rows}: must be a multiple of {share.shards}, the number of shards of the mesh')
    self.widths = tuple(sorted(set(widths)))
    self.fed_columns = self.row_steps = 0
    self._sampler, self._eyes = sampler, eyes
    self._shards, self._own = share.shards, rows // share.shards
    self._chunk = chunk
    self._size = columns
    fitting = sampler.rows_that_fit(self._own, self._size) * share.shards
    if fitting < rows:
      raise UserError(f'slots={rows}: only {fitting} rows of {self._size} columns fit into the free memory')
    self._sizes = {width: self._feed_sizes(width) for width in self.widths}
    self._decode_sizes = _sub_batches(self._own)
    self._weights = _committed(sampler.decode_weights(params))
    # Whether weights are gathered depends on the memory that is free, and must not change with it later.
    self._gathered = not changed_weights(self._weights, sampler.abstract_weights(self._weights))
    self._state = self._empty_state()
    self._expected = _shapes(params)

  def _empty_state(self) -> SamplerState:
    return _committed(self._sampler.init(self._own * self._sampler.share.own, self._size))

  def _feed_sizes(self, width: int) -> tuple[int, ...]:
    """Numbers of rows of a shard that a program of a width feeds."""
    columns = max(self._own * self.widths[0], self.widths[-1])
    return _sub_batches(min(self._own, columns // width))

  def check_weights(self, params: Any) -> None:
    """Raises ValueError if weights differ from the present ones in structure, shape or type."""
    found = _shapes(params)
    if found.keys() != self._expected.keys():
      name = sorted(found.keys() ^ self._expected.keys())[0]
      raise ValueError(f'params: has {"no" if name in self._expected else "an unknown"} weight {name}')
    for name, shape in found.items():
      if shape != self._expected[name]:
        raise ValueError(f'params: {name} is {shape}, and must be {self._expected[name]}')

  def set_weights(self, params: Any, *, keep_cache: bool = False) -> None:
    """Replaces the weights; those before are freed first unless somebody else holds them.

    Without `keep_cache`, the rows are made anew, and not only overwritten by and by: what weights without finite
    numbers have written would spoil all that is sampled later, see `kv_cache.copy_rows`.
    """
    self._weights = None
    self._weights = _committed(self._sampler.decode_weights(params, self._gathered))
    if not keep_cache:
      for x in jax.tree.leaves(self._state):
        x.delete()  # first, so that there are never two caches
      self._state = self._empty_state()

  def width_for(self, length: int, pending: int) -> int:
    """The width of the program that feeds the next of `pending` ids to a row that has `length` columns."""
    fitting = [width for width in self.widths if length + width <= self._size]
    return next((width for width in fitting if width >= pending), fitting[-1])

  def feed(self, feeds: Sequence[Feed], width: int) -> None:
    """Feeds rows, each of them once."""
    most = self._sizes[width][-1]
    by_shard = [[f for f in feeds if f.row // self._own == shard] for shard in range(self._shards)]
    for start in range(0, max(map(len, by_shard)), most):
      own = [f for part in by_shard for f in part[start : start + most]]
      self._extend(own, width, any(f.shown for f in own))

  def _extend(self, feeds: Sequence[Feed], width: int, sees: bool) -> None:
    batch = self._batch([f.row for f in feeds], self._sizes[width])
    tokens = np.zeros((batch.size, width), np.int32)
    count, begins = np.zeros((batch.size,), np.int32), np.zeros((batch.size,), bool)
    for i, f in zip(batch.at, feeds, strict=True):
      tokens[i, : len(f.ids)] = f.ids
      count[i], begins[i] = len(f.ids), f.begins
    images = None
    if sees:
      shown: list[Shown | None] = [None] * batch.size
      for i, f in zip(batch.at, feeds, strict=True):
        shown[i] = f.shown
      images = self._eyes.columns(self._weights['policy']['visual'], shown, width)
    self._state = self._sampler.extend(
      self._weights, self._state, tokens, count, begins, rows=batch.taken, images=images
    )
    self.fed_columns += tokens.size

  def _batch(self, rows: Sequence[int], sizes: Sequence[int]) -> _Batch:
    """The smallest sub-batch that holds some rows."""
    by_shard = [[row % self._own for row in rows if row // self._own == shard] for shard in range(self._shards)]
    size = next(n for n in sizes if n >= max(map(len, by_shard)))
    if size == self._own:
      return _Batch(self._shards * size, None, np.asarray(rows, np.int32))
    taken = np.zeros((self._shards, size), np.int32)
    at = {}
    for shard, own in enumerate(by_shard):
      # Each row at most once, so those that fill up are others.
      others = [i for i in range(self._own) if i not in own]
      taken[shard] = [*own, *others[: size - len(own)]]
      at |= {shard * self._own + row: shard * size + i for i, row in enumerate(own)}
    return _Batch(self._shards * size, taken.reshape(-1), np.asarray([at[row] for row in rows], np.int32))

  def copy(self, source: int, target: int, columns: int, rotary: int = -1) -> None:
    """Gives a row the first `columns` columns of a row of the same shard, which may be itself.

    `rotary` is the rotary position after them; -1 if the columns behind them are text.
    """
    copies = np.asarray([(0, 0, self._size, -1)] * self._shards, np.int32)
    copies[target // self._own] = source % self._own, target % self._own, columns, rotary
    self._state = self._sampler.copy_rows(self._state, copies)

  def clear(self, row: int) -> None:
    """Empties a row, and leaves no number in it."""
    self.copy(row, row, 0, 0)

  def decode(
    self, rows: Sequence[int], keys: np.ndarray, budget: np.ndarray, sampling: RowSampling, *, alternatives: bool
  ) -> Reply:
    """Samples a chunk for n rows, each named once; returns their tokens, on the host.

    Args:
      keys: u32[n, 2], data of their PRNG keys.
      budget: i32[n], the most tokens that each row may still get.
      alternatives: record the likeliest tokens.
    """
    batch = self._batch(rows, self._decode_sizes[-1:] if alternatives else self._decode_sizes)

    def spread(x: np.ndarray, others: int) -> np.ndarray:
      """The numbers of the n rows, and one for the other rows of the batch."""
      every = np.full((batch.size, *x.shape[1:]), others, x.dtype)
      every[batch.at] = x
      return every

    self._state, reply, _ = self._sampler.decode(
      self._weights,
      self._state,
      jax.random.wrap_key_data(spread(keys, 0)),
      spread(budget, 0),
      columns=self._chunk,
      sampling=RowSampling(spread(sampling.temperature, 1), spread(sampling.top_p, 1), spread(sampling.top_k, 0)),
      alternatives=min(TOP_LOGPROBS, self._sampler.vocab_limit) if alternatives else 0,
      rows=batch.taken,
    )
    reply = jax.device_get(reply)
    self.row_steps += batch.size * int(reply.count.max())
    return jax.tree.map(lambda x: x[batch.at], reply)

  def wait(self) -> None:
    """Returns when the device has done what it was given."""
    jax.block_until_ready(self._state)

  def compile(self) -> None:
    """Runs every program once, on rows that stay as they are."""
    fed_columns = self.fed_columns
    for width in self.widths:
      for size in self._sizes[width]:
        for sees in (False, True) if self._eyes else (False,):
          self._extend([Feed(i, np.zeros((0,), np.int32), False) for i in range(size)], width, sees)
    self.fed_columns = fed_columns
    self.copy(0, 0, self._size)
    for size, alternatives in [*((n, False) for n in self._decode_sizes), (1, True)]:
      numbers = np.ones(size, np.float32)
      sampling = RowSampling(temperature=numbers, top_p=numbers, top_k=np.zeros(size, np.int32))
      nothing = np.zeros((size, 2), np.uint32), np.zeros(size, np.int32)
      self.decode(range(size), *nothing, sampling, alternatives=alternatives)


@dataclasses.dataclass(frozen=True)
class _Batch:
  """The rows that a program gets, those of all shards.

  `taken` is i32[size], the rows of each shard, numbered within it; None for all rows. `at` is i32[n], where the rows
  are that it is about.
  """

  size: int
  taken: np.ndarray | None
  at: np.ndarray


def _sub_batches(most: int) -> tuple[int, ...]:
  """Numbers of rows that programs are compiled for, ascending."""
  sizes, size = [], 1
  while size < most:
    sizes.append(size)
    size *= _GROWTH
  return (*sizes, most)


def _committed(tree: Any) -> Any:
  """Arrays bound to their devices. Programs are compiled again for arrays that are not, as fresh ones."""
  return jax.tree.map(lambda x: jax.device_put(x, x.sharding), tree)


def _shapes(params: Any) -> dict[str, str]:
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {jax.tree_util.keystr(path): f'{x.dtype}{list(x.shape)}' for path, x in leaves}
