"""The rows of the device: the sampler's programs on few fixed shapes, so that serving compiles nothing new."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ragen_jax.sampling.draw import RowSampling
from ragen_jax.sampling.sampler import Reply, Sampler, changed_weights
from ragen_jax.serving.calls import TOP_LOGPROBS
from ragen_jax.utils.errors import UserError

# Sub-batches have 1, 4, 16, ... rows of a shard.
_GROWTH = 4


@dataclasses.dataclass(frozen=True)
class Feed:
  """Ids for a row.

  Attributes:
    row: the row.
    ids: i32[n], at most as many as the width of the program.
    begins: the row is emptied first.
  """

  row: int
  ids: np.ndarray
  begins: bool


class DeviceRows:
  """The state of the sampler, and the weights.

  Attributes:
    widths: columns of the programs that feed prompts, ascending.
    fed_columns: columns that were computed to feed prompts, padding included.
  """

  def __init__(self, sampler: Sampler, params: Any, *, rows: int, max_context: int, chunk: int, widths: Sequence[int]):
    """Makes the cache.

    Args:
      sampler: the compiled programs.
      params: weights of the `ActorCritic`, as they are trained.
      rows: B.
      max_context: the most columns of a row that hold tokens.
      chunk: columns of a call of `decode`.
      widths: columns of the programs that feed prompts. The smallest feeds all rows at once. A wider program feeds as
        many rows as make no more columns, at least one: it would need more memory, and would keep replies waiting.

    Raises:
      UserError: the rows do not fit into the memory, or cannot be divided over the mesh, or there are several
        processes.
    """
    share = sampler.share
    if jax.process_count() > 1:
      raise UserError(f'serving: needs one process, and this run has {jax.process_count()}')
    if rows % share.shards:
      raise UserError(f'slots={rows}: must be a multiple of {share.shards}, the number of shards of the mesh')
    self.widths = tuple(sorted(set(widths)))
    self.fed_columns = 0
    self._sampler = sampler
    self._shards, self._own = share.shards, rows // share.shards
    self._chunk = chunk
    # A program writes its columns behind the row's last one, filled or not.
    self._size = max_context + max(self.widths[0], chunk)
    fitting = sampler.rows_that_fit(self._own, self._size) * share.shards
    if fitting < rows:
      raise UserError(f'slots={rows}: only {fitting} rows of {self._size} columns fit into the free memory')
    self._sizes = {width: self._sub_batches(width) for width in self.widths}
    self._weights = _committed(sampler.decode_weights(params))
    # Whether weights are gathered depends on the memory that is free, and must not change with it later.
    self._gathered = not changed_weights(self._weights, sampler.abstract_weights(self._weights))
    self._state = _committed(sampler.init(self._own * share.own, self._size))
    self._expected = _shapes(params)

  def _sub_batches(self, width: int) -> tuple[int, ...]:
    """Numbers of rows of a shard that a program of a width is compiled for, ascending."""
    columns = max(self._own * self.widths[0], self.widths[-1])
    most, size, sizes = min(self._own, columns // width), 1, []
    while size < most:
      sizes.append(size)
      size *= _GROWTH
    return (*sizes, most)

  def check_weights(self, params: Any) -> None:
    """Checks that weights can take the place of the present ones.

    Raises:
      ValueError: they differ in structure, shape or type.
    """
    found = _shapes(params)
    if found.keys() != self._expected.keys():
      name = sorted(found.keys() ^ self._expected.keys())[0]
      raise ValueError(f'params: has {"no" if name in self._expected else "an unknown"} weight {name}')
    for name, shape in found.items():
      if shape != self._expected[name]:
        raise ValueError(f'params: {name} is {shape}, and must be {self._expected[name]}')

  def set_weights(self, params: Any) -> None:
    """Replaces the weights; those before are freed first unless somebody else holds them."""
    self._weights = None
    self._weights = _committed(self._sampler.decode_weights(params, self._gathered))

  def width_for(self, length: int, pending: int) -> int:
    """The width of the program that feeds the next of `pending` ids to a row that has `length` columns."""
    fitting = [width for width in self.widths if length + width <= self._size]
    return next((width for width in fitting if width >= pending), fitting[-1])

  def feed(self, feeds: Sequence[Feed], width: int) -> None:
    """Feeds rows, each of them once."""
    by_shard = [[f for f in feeds if f.row // self._own == shard] for shard in range(self._shards)]
    most = self._sizes[width][-1]
    for start in range(0, max(map(len, by_shard)), most):
      self._extend([part[start : start + most] for part in by_shard], width)

  def _extend(self, by_shard: list[list[Feed]], width: int) -> None:
    """Feeds at most as many rows of each shard as the largest sub-batch has."""
    fed = max(map(len, by_shard))
    size = next(n for n in self._sizes[width] if n >= fed)
    tokens = np.zeros((self._shards, size, width), np.int32)
    count, begins = np.zeros((self._shards, size), np.int32), np.zeros((self._shards, size), bool)
    rows = np.zeros((self._shards, size), np.int32)
    for shard, feeds in enumerate(by_shard):
      own = [f.row % self._own for f in feeds]
      if size == self._own:
        rows[shard] = np.arange(size)
      else:  # each row once, so those without ids are other rows of the shard
        others = [i for i in range(self._own) if i not in own]
        rows[shard] = [*own, *others[: size - len(own)]]
      at = {row: i for i, row in enumerate(rows[shard].tolist())}
      for f in feeds:
        i = at[f.row % self._own]
        tokens[shard, i, : len(f.ids)] = f.ids
        count[shard, i], begins[shard, i] = len(f.ids), f.begins
    self._state = self._sampler.extend(
      self._weights,
      self._state,
      tokens.reshape(-1, width),
      count.reshape(-1),
      begins.reshape(-1),
      rows=None if size == self._own else rows.reshape(-1),
    )
    self.fed_columns += tokens.size

  def copy(self, source: int, target: int, columns: int) -> None:
    """Gives a row the first `columns` columns of a row of the same shard, which may be itself."""
    copies = np.asarray([(0, 0, self._size)] * self._shards, np.int32)
    copies[target // self._own] = source % self._own, target % self._own, columns
    self._state = self._sampler.copy_rows(self._state, copies)

  def decode(self, keys: np.ndarray, budget: np.ndarray, sampling: RowSampling, *, alternatives: bool) -> Reply:
    """Samples a chunk.

    Args:
      keys: u32[B, 2], data of the rows' PRNG keys.
      budget: i32[B], the most tokens that each row may still get; 0 leaves it as it is.
      sampling: how each row is sampled.
      alternatives: record the likeliest tokens.

    Returns:
      The tokens, on the host.
    """
    self._state, reply, _ = self._sampler.decode(
      self._weights,
      self._state,
      jax.random.wrap_key_data(keys),
      budget,
      columns=self._chunk,
      sampling=sampling,
      alternatives=min(TOP_LOGPROBS, self._sampler.vocab_limit) if alternatives else 0,
    )
    return jax.device_get(reply)

  def wait(self) -> None:
    """Returns when the device has done what it was given."""
    jax.block_until_ready(self._state)

  def compile(self) -> None:
    """Runs every program once, on rows that stay as they are."""
    for width in self.widths:
      for size in self._sizes[width]:
        nothing = [Feed(i, np.zeros((0,), np.int32), False) for i in range(size)]
        self._extend([nothing] * self._shards, width)
    self.fed_columns = 0
    self.copy(0, 0, self._size)
    rows = self._own * self._shards
    sampling = RowSampling(
      temperature=np.ones(rows, np.float32), top_p=np.ones(rows, np.float32), top_k=np.zeros(rows, np.int32)
    )
    for alternatives in (False, True):
      self.decode(np.zeros((rows, 2), np.uint32), np.zeros(rows, np.int32), sampling, alternatives=alternatives)


def _committed(tree: Any) -> Any:
  """Arrays bound to their devices. Programs are compiled again for arrays that are not, as fresh ones."""
  return jax.tree.map(lambda x: jax.device_put(x, x.sharding), tree)


def _shapes(params: Any) -> dict[str, str]:
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {jax.tree_util.keystr(path): f'{x.dtype}{list(x.shape)}' for path, x in leaves}
