"""The sampler: `extend` appends observations, `decode` samples replies, `arrange` compacts the cache between turns.

The programs are in `decode.py` and `kv_cache.py`. This module compiles them, divides rows and heads over the mesh, and
counts how often each is traced.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax.distributed import processes
from ragen_jax.distributed.sharding import ROW_AXES
from ragen_jax.models.qwen import LayerCache
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.sampling import kv_cache
from ragen_jax.sampling.decode import Reply, decode, extend
from ragen_jax.sampling.draw import Sampling
from ragen_jax.sampling.kv_cache import SamplerState
from ragen_jax.utils.errors import UserError

__all__ = ['Reply', 'Sampler', 'SamplerState', 'Sampling']


class Sampler:
  """The sampler's programs, compiled once per shape.

  Attributes:
    traces: number of traces of each program, by name.
    share: the rows that belong to this process.
    values: whether values are recorded.
  """

  def __init__(
    self,
    model: ActorCritic,
    *,
    stop_ids: tuple[int, ...],
    vocab_limit: int | None = None,
    values: bool = True,
    mesh: Mesh | None = None,
  ):
    """Takes the structure of a model; weights are arguments of every call.

    Args:
      model: the policy; only its structure is used.
      stop_ids: tokens that end a reply.
      vocab_limit: see `decode`; default the whole vocabulary.
      values: record values, if the critic reads the policy's trunk.
      mesh: the devices that rows and heads are divided over; default one device.

    Raises:
      UserError: `mesh.tensor` does not divide the key/value heads; see also `processes.row_share`.
    """
    if mesh is not None and model.policy.cfg.num_kv_heads % mesh.shape['tensor']:
      raise UserError(
        f'mesh.tensor={mesh.shape["tensor"]}: does not divide the {model.policy.cfg.num_kv_heads} key/value heads'
      )
    self.graphdef, _ = nnx.split(model)
    self.cfg = model.policy.cfg
    self.stop_ids = tuple(stop_ids)
    self.vocab_limit = vocab_limit or self.cfg.vocab_size
    self.values = values and model.critic is None
    self.traces = {'arrange': 0, 'extend': 0, 'decode': 0}
    self._policy = model.policy
    self._state_specs = kv_cache.state_specs(self.cfg.num_layers)
    self._mesh = mesh
    self.share = processes.row_share(mesh)
    self._compact = jax.jit(self._counted('arrange', self._compact_rows), static_argnames='size')
    self._gather = jax.jit(self._gather_rows)
    self._extend = jax.jit(self._counted('extend', self._extend_rows), donate_argnames='state')
    self._decode = jax.jit(
      self._counted('decode', self._decode_rows),
      static_argnames=('max_new', 'sampling'),
      donate_argnames='state',
    )

  def _counted(self, name, fn):
    @functools.wraps(fn)
    def traced(*args, **kwargs):
      self.traces[name] += 1
      return fn(*args, **kwargs)

    return traced

  def _layout(self, tree: Any, specs: Any) -> Any:
    """Constrains the layout of a tree inside a program; without a mesh it is returned unchanged."""
    if self._mesh is None:
      return tree
    shardings = jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), specs)
    return jax.lax.with_sharding_constraint(tree, shardings)

  def _compact_rows(self, state: SamplerState, rows: jax.Array, live: jax.Array, size: int):
    if self._mesh is None:
      return kv_cache.compaction(state, rows, live, size)
    specs = self._state_specs.replace(cache=())
    of_rows = PartitionSpec(ROW_AXES)
    return jax.shard_map(
      functools.partial(kv_cache.compaction, size=size, mesh_axes=ROW_AXES),
      mesh=self._mesh,
      in_specs=(specs, of_rows, of_rows),
      out_specs=(of_rows, specs),
      check_vma=False,
    )(state, rows, live)

  def _gather_rows(self, layer: LayerCache, rows: jax.Array, columns: jax.Array) -> LayerCache:
    if self._mesh is None:
      return kv_cache.gather_layer(layer, rows, columns)
    cache, of_rows = self._state_specs.cache[0], PartitionSpec(ROW_AXES)
    return jax.shard_map(
      kv_cache.gather_layer, mesh=self._mesh, in_specs=(cache, of_rows, of_rows), out_specs=cache, check_vma=False
    )(layer, rows, columns)

  def _extend_rows(self, params, state, tokens, count, **columns):
    return self._layout(extend(self.graphdef, params, state, tokens, count, **columns), self._state_specs)

  def _decode_rows(self, params, state, key_data, active, temperature, *, max_new, sampling):
    state, reply = decode(
      self.graphdef,
      params,
      state,
      jax.random.wrap_key_data(key_data),
      active,
      temperature,
      max_new=max_new,
      stop_ids=self.stop_ids,
      vocab_limit=self.vocab_limit,
      sampling=sampling,
      with_values=self.values,
    )
    reply = self._layout(reply, jax.tree.map(lambda _: PartitionSpec(ROW_AXES), reply))
    return self._layout(state, self._state_specs), reply

  def _place(self, x):
    return x if self._mesh is None else processes.place_own_rows(x, self._mesh, self.share)

  def init(self, rows: int, size: int) -> SamplerState:
    """An empty state of `rows` rows of this process and `size` columns."""
    rows *= self.share.parts
    return jax.jit(lambda: self._layout(kv_cache.init_state(self._policy, rows, size), self._state_specs))()

  def abstract_state(self, rows: int, size: int) -> SamplerState:
    """Shapes, types and layout of the state that `init` returns, for `rows` rows of all processes together."""
    state = jax.eval_shape(lambda: kv_cache.init_state(self._policy, rows, size))
    if self._mesh is None:
      return state
    return jax.tree.map(
      lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self._mesh, spec)),
      state,
      self._state_specs,
    )

  def lower(
    self, params: Any, state: SamplerState, *, width: int, max_new: int, sampling: Sampling
  ) -> dict[str, jax.stages.Lowered]:
    """Lowers `extend` and `decode` for given shapes, to compile them without running; arguments may be abstract.

    Args:
      params: weights.
      state: see `abstract_state`.
      width: columns of the observation.
      max_new: see `decode`.
      sampling: see `decode`.

    Returns:
      The lowered programs by name.
    """
    rows, by_rows = len(state.count), state.count.sharding
    key_data = jax.eval_shape(lambda: jax.random.key_data(jax.random.split(jax.random.key(0), rows)))

    def abstract(shape, dtype):
      return jax.ShapeDtypeStruct(shape, dtype, sharding=by_rows)

    return {
      'extend': self._extend.lower(
        params=params, state=state, tokens=abstract((rows, width), jnp.int32), count=abstract((rows,), jnp.int32)
      ),
      'decode': self._decode.lower(
        params=params, state=state, key_data=abstract(key_data.shape, key_data.dtype), active=abstract((rows,), bool),
        temperature=np.float32(1), max_new=max_new, sampling=sampling,
      ),
    }  # fmt: skip

  def lower_arrange(self, state: SamplerState, *, rows: int, size: int) -> dict[str, jax.stages.Lowered]:
    """The two programs of `arrange` for given shapes, to be compiled without being run; arguments may be abstract.

    Args:
      state: before, see `abstract_state`.
      rows: rows of all processes after.
      size: columns after.

    Returns:
      'order' runs once, 'pick' once for each layer.
    """
    by_rows = state.count.sharding

    def abstract(shape, dtype):
      return jax.ShapeDtypeStruct(shape, dtype, sharding=by_rows)

    kept, live = abstract((rows,), np.int32), abstract((rows,), bool)
    return {
      'order': self._compact.lower(state.replace(cache=()), kept, live, size=size),
      'pick': self._gather.lower(state.cache[0], kept, abstract((rows, size), np.int32)),
    }

  def arrange(self, state: SamplerState, rows: np.ndarray, size: int, live: np.ndarray | None = None) -> SamplerState:
    """Selects rows, moves their tokens to the left and resizes the cache; see `kv_cache.compaction`.

    Rows stay on their device: they are numbered within each shard.

    Args:
      state: the state before. Its cache is deleted layer by layer, so that the old and the new cache are never both
        held completely.
      rows: i32[B'], the rows of this process to keep, the same number in each of its shards.
      size: number of columns after.
      live: bool[B'], False empties a row; default all True.

    Returns:
      The state after.
    """
    live = np.ones(len(rows), bool) if live is None else live
    rows = self._place(rows)
    columns, after = self._compact(state.replace(cache=()), rows, self._place(live), size=size)
    layers = []
    for layer in state.cache:
      layers.append(self._gather(layer, rows, columns))
      for x in jax.tree.leaves(layer):
        x.delete()
    return after.replace(cache=tuple(layers))

  def extend(
    self,
    params: Any,
    state: SamplerState,
    tokens: jax.Array,
    count: jax.Array,
    embeddings: jax.Array | None = None,
    is_embedded: jax.Array | None = None,
    rotary_offsets: jax.Array | None = None,
  ) -> SamplerState:
    """Appends the rows of this process; see `decode.extend`. `state` is donated."""
    columns = {'embeddings': embeddings, 'is_embedded': is_embedded, 'rotary_offsets': rotary_offsets}
    columns = {name: self._place(x) for name, x in columns.items() if x is not None}
    return self._extend(params=params, state=state, tokens=self._place(tokens), count=self._place(count), **columns)

  def decode(
    self,
    params: Any,
    state: SamplerState,
    keys: jax.Array,
    active: jax.Array,
    *,
    max_new: int,
    sampling: Sampling,
  ) -> tuple[SamplerState, Reply]:
    """Samples replies for the rows of this process; see `decode.decode`. `state` is donated.

    All temperatures above 0 share one program. The reply has the rows of all processes; `processes.own_rows` returns
    those of this process.
    """
    compiled = dataclasses.replace(sampling, temperature=0.0 if sampling.temperature == 0 else 1.0)
    return self._decode(
      params=params,
      state=state,
      key_data=self._place(jax.random.key_data(keys)),
      active=self._place(active),
      temperature=jnp.float32(sampling.temperature),
      max_new=max_new,
      sampling=compiled,
    )
