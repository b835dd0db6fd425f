"""Compiles the programs of `decode.py` and `kv_cache.py`, divides rows and heads over the mesh, and counts traces."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax.distributed import processes
from ragen_jax.distributed.sharding import ROW_AXES
from ragen_jax.models.layer_cache import LayerCache
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.sampling import kv_cache
from ragen_jax.sampling.decode import decode, extend
from ragen_jax.sampling.kv_cache import SamplerState
from ragen_jax.utils.alike import made_once


class SamplerPrograms:
  """The programs of a sampler, compiled once per shape; they hold no weights.

  Attributes:
    programs: the compiled functions by name; `init` and `take` are two more, which are not counted.
    traces: number of traces of each program, by name.
    state_specs: the layout of a state on the mesh.
  """

  def __init__(
    self,
    graphdef: Any,
    cfg: QwenConfig,
    dtype: Any,
    mesh: Mesh | None,
    stop_ids: tuple[int, ...],
    vocab_limit: int,
    banned: tuple[int, ...],
    values: bool,
    experts: bool,
  ):
    """Arguments are attributes of `Sampler`; `cfg` and `dtype` are the policy's. Compiles nothing."""
    self._graphdef, self._cfg, self._dtype, self._mesh = graphdef, cfg, dtype, mesh
    self._drawn = {'stop_ids': stop_ids, 'vocab_limit': vocab_limit, 'banned': banned, 'with_values': values}
    self._with_experts = experts
    self._shards = processes.row_share(mesh).shards
    self.state_specs = kv_cache.state_specs(cfg)
    self._layer_specs = {type(specs): specs for specs in self.state_specs.cache}
    self.init = jax.jit(self._init_rows, static_argnames=('rows', 'size'))
    self.take = jax.jit(self._take_rest)
    self.traces = {'resize': 0, 'copy': 0, 'share': 0, 'extend': 0, 'decode': 0}
    self.programs = {
      'resize': self._compiled('resize', self._resize_layer, static_argnames='size'),
      'copy': self._compiled('copy', functools.partial(self._by_shard, kv_cache.copy_rows), donate_argnums=0),
      'share': self._compiled('share', self._share_layer, static_argnames='columns', donate_argnames='layer'),
      'extend': self._compiled('extend', self._extend_rows, donate_argnames='state'),
      'decode': self._compiled(
        'decode', self._decode_rows, static_argnames=('columns', 'sampling', 'alternatives'), donate_argnames='state'
      ),
    }

  def _compiled(self, name, fn, **options):
    @functools.wraps(fn)
    def traced(*args, **kwargs):
      self.traces[name] += 1
      return fn(*args, **kwargs)

    return jax.jit(traced, **options)

  def _layout(self, tree: Any, specs: Any) -> Any:
    """Constrains the layout of a tree inside a program; without a mesh it is returned unchanged."""
    if self._mesh is None or tree is None:
      return tree
    shardings = jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), specs)
    return jax.lax.with_sharding_constraint(tree, shardings)

  def _init_rows(self, rows: int, size: int) -> SamplerState:
    return self._layout(kv_cache.empty_state(self._cfg, self._dtype, rows, size), self.state_specs)

  def _by_shard(self, fn: Any, state: Any, rows: jax.Array | None, *added: kv_cache.Added, specs: Any = None) -> Any:
    """`fn(state, rows, *added)` with the rows of each shard numbered within it, so that none changes its device."""
    if self._mesh is None:
      return fn(state, rows, *added)
    every, of_rows = self.state_specs, PartitionSpec(ROW_AXES)
    specs = every if specs is None else specs
    given = [kv_cache.Added(every.replace(cache=()), every.cache, of_rows) for _ in added]
    return jax.shard_map(fn, mesh=self._mesh, in_specs=(specs, of_rows, *given), out_specs=specs, check_vma=False)(
      state, rows, *added
    )

  def _resize_layer(self, layer: LayerCache, size: int) -> LayerCache:
    return self._layout(kv_cache.resize(layer, size), self._layer_specs[LayerCache])

  def _part(self, state: SamplerState, rows: jax.Array | None) -> SamplerState:
    """The rows that a program runs on."""
    return state if rows is None else self._by_shard(kv_cache.take_rows, state, rows)

  def _append(self, state: SamplerState, rows: jax.Array | None, added: kv_cache.Added) -> SamplerState:
    return self._layout(self._by_shard(kv_cache.append, state, rows, added), self.state_specs)

  def _share_layer(self, layer, source, columns):
    share = functools.partial(kv_cache.share_columns, columns=columns)
    return self._by_shard(share, layer, source, specs=self._layer_specs[type(layer)])

  def _take_rest(self, state, rows):
    return self._by_shard(kv_cache.take_rows, state, rows, specs=self.state_specs.replace(cache=()))

  def _extend_rows(self, params, state, tokens, count, begins, rows, images=None):
    part = self._part(state, rows)
    if images is not None:  # a row may read the tokens of any image
      whole = jax.tree.map(lambda _: PartitionSpec(), images.features)
      images = images.replace(features=self._layout(images.features, whole))
    added, experts = extend(
      self._graphdef, params, part, tokens, count, begins, images=images, with_experts=self._with_experts
    )
    return self._append(state, rows, added), self._layout(experts, PartitionSpec(ROW_AXES))

  def _decode_rows(
    self, params, state, key_data, budget, temperature, enough, rows, by_row=None, *, columns, sampling, alternatives=0
  ):
    added, reply = decode(
      self._graphdef,
      params,
      self._part(state, rows),
      jax.random.wrap_key_data(key_data),
      budget,
      temperature,
      enough,
      columns=columns,
      sampling=sampling if by_row is None else by_row,
      alternatives=alternatives,
      shards=self._shards,
      with_experts=self._with_experts,
      **self._drawn,
    )
    reply = self._layout(reply, jax.tree.map(lambda _: PartitionSpec(ROW_AXES), reply))
    return self._append(state, rows, added), reply, self._layout(jnp.any(reply.open), PartitionSpec())


# Of a policy, and of frozen ones with other stop tokens or without values.
sampler_programs = made_once(8)(SamplerPrograms)
