"""The sampler: `extend` appends observations, `decode` samples replies, `resize` adds columns to the cache, `copy_rows`
copies rows.

The programs are in `decode.py` and `kv_cache.py`. This module compiles them, divides rows and heads over the mesh, and
counts how often each is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax.distributed import processes
from ragen_jax.distributed.sharding import (
  ROW_AXES,
  SamplingLayout,
  copied,
  path_of,
  sampling_mesh,
  sampling_spec,
  without_axis,
)
from ragen_jax.models.qwen import LayerCache
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.models.vision.features import ImageColumns
from ragen_jax.sampling import capacity, kv_cache
from ragen_jax.sampling.decode import Reply, decode, extend
from ragen_jax.sampling.draw import RowSampling, Sampling
from ragen_jax.sampling.kv_cache import SamplerState
from ragen_jax.utils.errors import UserError

# Rows of a device with which the compiler of TPUs computes products of matrices. With fewer it computes products of
# vectors, which take half as long again.
_LEAST_ROWS = {'tpu': 8}

__all__ = ['Reply', 'RowSampling', 'Sampler', 'SamplerState', 'Sampling']


class Sampler:
  """The sampler's programs, compiled once per shape.

  Attributes:
    traces: number of traces of each program, by name.
    share: the rows that belong to this process.
    values: whether values are recorded.
    decode_shards: neighbouring devices that divide the MLP and the vocabulary among them.
    observer: called before `extend`, `decode` and `resize` run, with the name of the program, its shape as
      `sampling.shapes.Shapes.programs` has it, and the weights (None for `resize`); not for programs that those do not
      list, which take images or the `RowSampling` of a server. None if nobody observes.
  """

  def __init__(
    self,
    model: ActorCritic,
    *,
    stop_ids: tuple[int, ...],
    vocab_limit: int | None = None,
    banned: tuple[int, ...] = (),
    values: bool = True,
    mesh: Mesh | None = None,
    decode_shards: int = 1,
  ):
    """Takes the structure of a model; weights are arguments of every call.

    Args:
      model: the policy; only its structure is used.
      stop_ids: tokens that end a reply.
      vocab_limit: see `decode`; default the whole vocabulary.
      banned: see `decode`; default none.
      values: record values, if the critic reads the policy's trunk.
      mesh: the devices that rows and heads are divided over; default one device.
      decode_shards: neighbouring devices that divide the MLP and the vocabulary among them, see
        `sharding.sampling_spec`; above 1, it needs a mesh.

    Raises:
      UserError: `mesh.tensor` does not divide the key/value heads; see also `processes.row_share`.
    """
    if mesh is not None and model.policy.cfg.num_kv_heads % mesh.shape['tensor']:
      raise UserError(
        f'mesh.tensor={mesh.shape["tensor"]}: does not divide the {model.policy.cfg.num_kv_heads} key/value heads'
      )
    self.decode_shards = decode_shards
    if decode_shards > 1:
      mesh = sampling_mesh(mesh, decode_shards)
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    model = nnx.merge(*nnx.split(model))  # a structure of its own, with the same arrays
    model.policy.sample_on(
      SamplingLayout(mesh, decode_shards > 1, 1 if decode_shards > 1 else _LEAST_ROWS.get(platform, 1))
    )
    self.graphdef, _ = nnx.split(model)
    self.cfg = model.policy.cfg
    self.stop_ids = tuple(stop_ids)
    self.vocab_limit = vocab_limit or self.cfg.vocab_size
    self.banned = banned
    self.values = values and model.critic is None
    self.observer: Callable[[str, tuple[Any, ...], Any], None] | None = None
    self.traces = {'resize': 0, 'copy': 0, 'extend': 0, 'decode': 0}
    self._policy = model.policy
    self._state_specs = kv_cache.state_specs(self.cfg.num_layers)
    self._mesh = mesh
    self.share = processes.row_share(mesh)
    self._init = jax.jit(self._init_rows, static_argnames=('rows', 'size'))
    self._casts: dict[tuple[bool, tuple[int, ...]], Any] = {}
    self._resize = jax.jit(self._counted('resize', self._resize_layer), static_argnames='size')
    self._copy = jax.jit(self._counted('copy', functools.partial(self._by_shard, kv_cache.copy_rows)), donate_argnums=0)
    self._extend = jax.jit(
      self._counted('extend', self._extend_rows), static_argnames='all_begin', donate_argnames='state'
    )
    self._decode = jax.jit(
      self._counted('decode', self._decode_rows),
      static_argnames=('columns', 'sampling', 'alternatives'),
      donate_argnames='state',
    )

  def _tell(self, kind: str, params: Any, shape: tuple[Any, ...]) -> None:
    if self.observer is not None:
      self.observer(kind, shape, params)

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

  def _init_rows(self, rows: int, size: int) -> SamplerState:
    return self._layout(kv_cache.init_state(self._policy, rows, size), self._state_specs)

  def _by_shard(self, fn: Any, state: SamplerState, rows: jax.Array | None, *added: kv_cache.Added) -> SamplerState:
    """`fn(state, rows, *added)` with the rows of each shard numbered within it, so that none changes its device."""
    if self._mesh is None:
      return fn(state, rows, *added)
    specs, of_rows = self._state_specs, PartitionSpec(ROW_AXES)
    given = [kv_cache.Added(specs.replace(cache=()), specs.cache, of_rows) for _ in added]
    return jax.shard_map(fn, mesh=self._mesh, in_specs=(specs, of_rows, *given), out_specs=specs, check_vma=False)(
      state, rows, *added
    )

  def _resize_layer(self, layer: LayerCache, size: int) -> LayerCache:
    return self._layout(kv_cache.resize(layer, size), self._state_specs.cache[0])

  def _part(self, state: SamplerState, rows: jax.Array | None) -> SamplerState:
    """The rows that a program runs on."""
    return state if rows is None else self._by_shard(kv_cache.take_rows, state, rows)

  def _append(self, state: SamplerState, rows: jax.Array | None, added: kv_cache.Added) -> SamplerState:
    return self._layout(self._by_shard(kv_cache.append, state, rows, added), self._state_specs)

  def _extend_rows(self, params, state, tokens, count, begins, rows, images=None, *, all_begin):
    part = self._part(state, rows)
    added = extend(self.graphdef, params, part, tokens, count, begins, all_begin=all_begin, images=images)
    return self._append(state, rows, added)

  def _decode_rows(
    self, params, state, key_data, budget, temperature, enough, rows, by_row=None, *, columns, sampling, alternatives=0
  ):
    added, reply = decode(
      self.graphdef,
      params,
      self._part(state, rows),
      jax.random.wrap_key_data(key_data),
      budget,
      temperature,
      enough,
      columns=columns,
      stop_ids=self.stop_ids,
      vocab_limit=self.vocab_limit,
      banned=self.banned,
      sampling=sampling if by_row is None else by_row,
      with_values=self.values,
      alternatives=alternatives,
      shards=self.share.shards,
    )
    reply = self._layout(reply, jax.tree.map(lambda _: PartitionSpec(ROW_AXES), reply))
    return self._append(state, rows, added), reply, self._layout(jnp.any(reply.open), PartitionSpec())

  def _place(self, x):
    return x if self._mesh is None else processes.place_own_rows(x, self._mesh, self.share)

  def rows_that_fit(self, rows: int, columns: int, image_tokens: int = 0) -> int:
    """How many of `rows` rows of a shard can be sampled at a time.

    Every process must call. Decided by the memory that is free now; a device that reports none, as a CPU, holds all.

    Args:
      rows: of a shard.
      columns: of the cache.
      image_tokens: the most tokens of the images that are fed to a row at once.
    """
    tensor = 1 if self._mesh is None else self._mesh.shape['tensor']
    row_bytes = capacity.bytes_per_row(
      self.cfg, columns, self._policy.dtype, tensor, image_tokens=image_tokens, shards=self.share.shards
    )
    free = capacity.free_bytes(jax.local_devices() if self._mesh is None else self._mesh.local_devices)
    return -processes.largest([-capacity.rows_that_fit(rows, row_bytes, free)])[0]

  def init(self, rows: int, size: int) -> SamplerState:
    """An empty state of `rows` rows of this process and `size` columns."""
    return self._init(rows=rows * self.share.parts, size=size)

  def decode_weights(self, params: Any, gathered: bool | None = None) -> Any:
    """The weights as the sampler's programs compute with them, made once for a rollout.

    The matrices of the policy are cast to the type of computations, so that no program casts them again. Weights are
    gathered over the mesh axis `data`, and matrices over `fsdp` too, so that no decoded token waits for their exchange.
    Weights that are so already are not copied.

    Args:
      params: the weights as they are trained.
      gathered: gather matrices over `fsdp`. By default they are gathered if they take at most half of the memory that
        is free now. Every process must call.
    """
    if gathered is None:
      gathered = self._can_gather(params)
    wanted = self.abstract_weights(params, gathered)
    leaves, tree = jax.tree.flatten(params)
    changed = changed_weights(params, wanted)
    if not changed:
      return params
    found = self._cast(changed, wanted, gathered)({i: leaves[i] for i in changed})
    return jax.tree.unflatten(tree, [found.get(i, x) for i, x in enumerate(leaves)])

  def _cast(self, changed: tuple[int, ...], wanted: Any, gathered: bool) -> Any:
    """The program that makes the changed weights, by their indices."""
    layouts = jax.tree.leaves(wanted)
    cast = jax.jit(
      lambda own: {i: x.astype(layouts[i].dtype) for i, x in own.items()},
      out_shardings={i: layouts[i].sharding for i in changed},
    )
    return self._casts.setdefault((gathered, changed), cast)

  def lower_weights(self, params: Any, gathered: bool) -> jax.stages.Lowered | None:
    """Lowers the program of `decode_weights`; None if there is nothing to change. Arguments may be abstract."""
    wanted = self.abstract_weights(params, gathered)
    changed, leaves = changed_weights(params, wanted), jax.tree.leaves(params)
    return self._cast(changed, wanted, gathered).lower({i: leaves[i] for i in changed}) if changed else None

  def _can_gather(self, params: Any) -> bool:
    if self._mesh is None or self.decode_shards > 1 or self._mesh.shape['fsdp'] == 1:
      return True
    needed = 2 * capacity.bytes_per_device(self.abstract_weights({'policy': params['policy']}))
    free = capacity.free_bytes(self._mesh.local_devices)
    return not processes.largest([free is not None and needed > free])[0]

  def abstract_weights(self, params: Any, gathered: bool = True) -> Any:
    """Shapes, types and layout of `decode_weights`; arguments may be abstract."""

    def of(path, x):
      name, sharding = path_of(path), x.sharding
      if name.startswith('critic/'):  # the sampler's programs do not read it
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
      if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, without_axis(sharding.spec, 'data'))
      if not name.startswith('policy/') or name.startswith('policy/visual/') or x.ndim < 2:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
      if self.decode_shards > 1:
        sharding = NamedSharding(self._mesh, sampling_spec(name, x.shape, self._mesh))
      elif gathered and isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, without_axis(sharding.spec, 'fsdp'))
      return jax.ShapeDtypeStruct(x.shape, self._policy.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(of, params)

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
    self,
    params: Any,
    state: SamplerState,
    *,
    width: int,
    columns: int,
    sampling: Sampling,
    rows: int | None = None,
    names: tuple[str, ...] = ('extend_first', 'extend', 'decode'),
    images: Callable[[int], ImageColumns | None] = lambda rows: None,
  ) -> dict[str, jax.stages.Lowered]:
    """Lowers `extend` and `decode` for given shapes, to compile them without running; arguments may be abstract.

    A call with arguments of these shapes, types and layouts then runs what was compiled.

    Args:
      params: weights.
      state: see `abstract_state`.
      width: columns of the observation.
      columns: see `decode`.
      sampling: see `decode`.
      rows: rows of all processes that take part; default all, which is another program than a selection.
      names: of the programs; 'extend_first' is that of first prompts (`all_begin`).
      images: what so many fed rows read of images.

    Returns:
      The lowered programs by name.
    """
    every, by_rows = len(state.count), state.count.sharding
    part = rows or every
    key_data = jax.eval_shape(lambda: jax.random.key_data(jax.random.split(jax.random.key(0), part)))

    def abstract(shape, dtype):
      return jax.ShapeDtypeStruct(shape, dtype, sharding=by_rows)

    selected = None if part == every else abstract((part,), jnp.int32)
    observation = dict(
      tokens=abstract((part, width), jnp.int32), count=abstract((part,), jnp.int32), begins=abstract((part,), bool),
      rows=selected, images=images(part),
    )  # fmt: skip
    sampled = dict(
      key_data=abstract(key_data.shape, key_data.dtype), budget=abstract((part,), jnp.int32),
      temperature=np.float32(1), enough=np.int32(1), rows=selected, columns=columns, sampling=sampling.compiled,
      alternatives=0,
    )  # fmt: skip
    found = {
      'extend_first': lambda: self._extend.lower(params=params, state=state, **observation, all_begin=True),
      'extend': lambda: self._extend.lower(params=params, state=state, **observation, all_begin=False),
      'decode': lambda: self._decode.lower(params=params, state=state, **sampled),
    }
    return {name: found[name]() for name in names}

  def lower_resize(self, state: SamplerState, *, size: int) -> jax.stages.Lowered:
    """The program of `resize` for given shapes, which runs once for each layer; arguments may be abstract."""
    return self._resize.lower(state.cache[0], size=size)

  def resize(self, state: SamplerState, size: int) -> SamplerState:
    """Adds columns to the cache.

    Args:
      state: the state before. Its cache is deleted layer by layer, so that the old and the new cache are never both
        held completely.
      size: S after.

    Returns:
      The state after.
    """
    self._tell('resize', None, (len(state.count), _columns(state), size))
    layers = []
    for layer in state.cache:
      layers.append(self._resize(layer, size=size))
      for x in jax.tree.leaves(layer):
        x.delete()
    return state.replace(cache=tuple(layers))

  def copy_rows(self, state: SamplerState, copies: np.ndarray) -> SamplerState:
    """Copies rows of this process within their shards; see `kv_cache.copy_rows`. `state` is donated.

    Args:
      state: the state before.
      copies: i32[b, 3], the same number of copies in each shard of this process, with rows numbered within it. A copy
        of a row to itself that keeps all columns changes nothing.

    Returns:
      The state after.
    """
    return self._copy(state, self._place(copies))

  def extend(
    self,
    params: Any,
    state: SamplerState,
    tokens: np.ndarray,
    count: np.ndarray,
    begins: np.ndarray | None = None,
    *,
    rows: np.ndarray | None = None,
    all_begin: bool = False,
    images: ImageColumns | None = None,
  ) -> SamplerState:
    """Appends observations to rows of this process; see `decode.extend`. `state` is donated.

    Args:
      params: the weights.
      state: B rows.
      tokens: i32[b, O].
      count: i32[b].
      begins: bool[b]; default none.
      rows: i32[b], the rows that take part, each once, the same number in each shard of this process and numbered
        within it; the others are left alone. Default all B.
      all_begin: see `decode.extend`; compiled in.
      images: see `decode.extend`; rows as in `tokens`. A run with images needs one process.
    """
    if images is not None:
      features = images.features if self._mesh is None else copied(images.features, self._mesh)
      images = ImageColumns(self._place(images.index), self._place(images.positions), features)
    begins = np.zeros(len(count), bool) if begins is None else begins
    if images is None:
      rows_fed, width = self.share.parts * len(count), tokens.shape[1]
      self._tell('extend', params, (len(state.count), rows_fed, _columns(state), width, all_begin))
    return self._extend(
      params=params,
      state=state,
      tokens=self._place(tokens),
      count=self._place(count),
      begins=self._place(begins),
      rows=None if rows is None else self._place(rows),
      all_begin=all_begin,
      images=images,
    )

  def decode(
    self,
    params: Any,
    state: SamplerState,
    keys: jax.Array,
    budget: np.ndarray,
    *,
    columns: int,
    sampling: Sampling | RowSampling,
    alternatives: int = 0,
    rows: np.ndarray | None = None,
    enough: int | None = None,
  ) -> tuple[SamplerState, Reply, jax.Array]:
    """Samples for rows of this process; see `decode.decode`. `state` is donated.

    All temperatures above 0 share one program, as do all `RowSampling`. The reply has the rows of all processes that
    take part; `processes.own_rows` returns those of this process.

    Args:
      params: the weights.
      state: B rows.
      keys: PRNG keys [b].
      budget: i32[b].
      columns: see `decode.decode`, as are the following ones.
      sampling: of all rows, or numbers for each of the b rows.
      alternatives: compiled in.
      rows: i32[b], the rows that take part, as in `extend`. Default all B.
      enough: complete replies of a shard with which the call ends; default all.

    Returns:
      The state after, the `Reply`, and bool[], whether a reply of any process is still open.
    """
    parts = self.share.parts
    if isinstance(sampling, RowSampling):
      drawn = dict(temperature=None, by_row=self._place(sampling), sampling=None)
    else:
      if not alternatives:
        self._tell('decode', params, (len(state.count), parts * len(budget), _columns(state), sampling.compiled))
      drawn = dict(temperature=jnp.float32(sampling.temperature), sampling=sampling.compiled)
    return self._decode(
      params=params,
      state=state,
      key_data=self._place(jax.random.key_data(keys)),
      budget=self._place(budget),
      enough=jnp.int32(len(budget) + 1 if enough is None else enough),
      rows=None if rows is None else self._place(rows),
      columns=columns,
      alternatives=alternatives,
      **drawn,
    )


def _columns(state: SamplerState) -> int:
  """S, the columns of the cache."""
  return state.cache[0].k.shape[1]


def changed_weights(params: Any, wanted: Any) -> tuple[int, ...]:
  """Indices of the weights whose type or layout is not as wanted; see `Sampler.abstract_weights`."""
  pairs = zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True)
  return tuple(
    i for i, (x, to) in enumerate(pairs) if x.dtype != to.dtype or not x.sharding.is_equivalent_to(to.sharding, x.ndim)
  )
