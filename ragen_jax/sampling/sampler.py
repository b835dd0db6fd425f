"""Runs the programs of `decode.py` and `kv_cache.py` on the rows of this process."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from ragen_jax.distributed import processes
from ragen_jax.distributed.sharding import (
  SCALE,
  SamplingLayout,
  path_of,
  sampling_mesh,
  sampling_spec,
  without_axis,
)
from ragen_jax.models import int8
from ragen_jax.models.layer_cache import LayerCache
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.models.vision.features import ImageColumns
from ragen_jax.models.vision.tower import Features
from ragen_jax.sampling import capacity, kv_cache
from ragen_jax.sampling.decode import Reply
from ragen_jax.sampling.draw import RowSampling, Sampling
from ragen_jax.sampling.kv_cache import SamplerState
from ragen_jax.sampling.programs import sampler_programs
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.observer import Observer

# Rows of a device with which the compiler of TPUs computes products of matrices. With fewer it computes products of
# vectors, which take half as long again.
_LEAST_ROWS = {'tpu': 8}

__all__ = ['Reply', 'RowSampling', 'Sampler', 'SamplerState', 'Sampling']


class Sampler:
  """Samples with programs that are compiled once per shape.

  Attributes:
    programs: the compiled functions, by name. Samplers of equal models and settings share them.
    traces: number of traces of each program, by name; those of all that share it.
    share: the rows that belong to this process.
    values: whether values are recorded.
    experts: whether the experts that tokens are given to are recorded.
    observer: told of `extend`, `decode` and `resize`; not of those that `Shapes.programs` does not list, which take
      images or the `RowSampling` of a server.
  """

  def __init__(
    self,
    model: ActorCritic,
    *,
    stop_ids: tuple[int, ...],
    vocab_limit: int | None = None,
    banned: tuple[int, ...] = (),
    values: bool = True,
    experts: bool = False,
    mesh: Mesh | None = None,
    decode_shards: int = 1,
    observer: Observer | None = None,
  ):
    """Takes the structure of a model; weights are arguments of every call.

    `vocab_limit`, by default the whole vocabulary, and `banned` are those of `decode`. Values are recorded if the
    critic reads the policy's trunk, and experts if the policy has any. `decode_shards` neighbouring devices divide the
    MLP and the vocabulary among them, see `sharding.sampling_spec`; above 1, it needs a mesh.

    Raises:
      UserError: `mesh.tensor` does not divide the heads of keys; see also `processes.row_share`.
    """
    heads = {'key/value heads': model.policy.cfg.num_kv_heads}
    if model.policy.cfg.linear is not None:
      heads['key heads of the linear attention'] = model.policy.cfg.linear.key_heads
    for name, number in heads.items():
      if mesh is not None and number % mesh.shape['tensor']:
        raise UserError(f'mesh.tensor={mesh.shape["tensor"]}: does not divide the {number} {name}')
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
    self.experts = experts and self.cfg.experts is not None
    self.observer = observer or Observer()
    self.policy = model.policy
    self.mesh = mesh
    self.share = processes.row_share(mesh)
    self._casts: dict[tuple[bool, tuple[int, ...]], Any] = {}
    self._shared = sampler_programs(
      self.graphdef,
      self.cfg,
      self.policy.dtype,
      mesh,
      self.stop_ids,
      self.vocab_limit,
      banned,
      self.values,
      self.experts,
    )
    self.programs, self.traces = self._shared.programs, self._shared.traces
    self.state_specs = self._shared.state_specs

  def _place(self, x, axis=0):
    return x if self.mesh is None else processes.place_own_rows(x, self.mesh, self.share, axis)

  def _place_images(self, images: ImageColumns) -> ImageColumns:
    """What the rows of all processes read: their tables of features, one behind the other."""
    own = images.features
    first = self.share.index * len(own.embeddings)
    stacked = None if own.deepstack is None else self._place(own.deepstack, axis=1)
    index = np.where(images.index >= 0, images.index + first, -1).astype(np.int32)
    features = Features(self._place(own.embeddings), stacked)
    return ImageColumns(self._place(index), self._place(images.positions), features)

  def rows_that_fit(self, rows: int, columns: int, image_tokens: int = 0) -> int:
    """How many of `rows` rows of a shard, with `columns` columns of the cache, can be sampled at a time.

    Every process must call. Decided by the memory that is free now, on CPUs the host's; a device that reports none
    holds all. `image_tokens` is the most tokens of the images that are fed to a row at once.
    """
    tensor = 1 if self.mesh is None else self.mesh.shape['tensor']
    row_bytes = capacity.bytes_per_row(
      self.cfg, columns, self.policy.dtype, tensor, image_tokens=image_tokens, shards=self.share.shards
    )
    free = capacity.free_bytes(jax.local_devices() if self.mesh is None else self.mesh.local_devices)
    return -processes.largest([-capacity.rows_that_fit(rows, row_bytes, free)])[0]

  def init(self, rows: int, size: int) -> SamplerState:
    """An empty state of `rows` rows of this process and `size` columns."""
    return self._shared.init(rows=rows * self.share.parts, size=size)

  def decode_weights(self, params: Any, gathered: bool | None = None) -> Any:
    """The weights as the sampler's programs compute with them, made once for a rollout.

    The matrices of the policy are cast to the type of computations, so that no program casts them again, or those of
    its layers to 8 bits, if the policy says so. Weights are
    gathered over the mesh axis `data`, and matrices over `fsdp` too, so that no decoded token waits for their exchange.
    Weights that are so already are not copied. `gathered` None gathers over `fsdp` if the matrices then take at most
    half of the memory that is free now; every process must call.
    """
    if gathered is None:
      gathered = self._can_gather(params)
    cast, changed = self.weights_cast(params, gathered)
    if not changed:
      return params
    return int8.replaced(params, cast(changed))

  def weights_cast(self, params: Any, gathered: bool) -> tuple[Any, dict[int, Any]]:
    """The program of `decode_weights`, and the weights that it changes by their indices; they may be abstract."""
    leaves, wanted = int8.leaves(params), self.abstract_weights(params, gathered)
    changed, layouts = changed_weights(params, wanted), int8.leaves(wanted)
    cast = jax.jit(
      lambda own: {i: int8.like(x, layouts[i]) for i, x in own.items()},
      out_shardings={i: jax.tree.map(lambda x: x.sharding, layouts[i]) for i in changed},
    )
    return self._casts.setdefault((gathered, changed), cast), {i: leaves[i] for i in changed}

  def _can_gather(self, params: Any) -> bool:
    if self.mesh is None or self.decode_shards > 1 or self.mesh.shape['fsdp'] == 1:
      return True
    needed = 2 * capacity.bytes_per_device(self.abstract_weights({'policy': params['policy']}))
    free = capacity.free_bytes(self.mesh.local_devices)
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
        sharding = NamedSharding(self.mesh, sampling_spec(name, x.shape, self.mesh))
      elif gathered and isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, without_axis(sharding.spec, 'fsdp'))
      kept = x.dtype == jnp.int8 or name.endswith(SCALE)
      return jax.ShapeDtypeStruct(x.shape, x.dtype if kept else self.policy.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(of, int8.abstract(params) if self.policy.int8 else params)

  def resize(self, state: SamplerState, size: int) -> SamplerState:
    """Adds columns to the cache, up to `size`.

    The cache before is deleted layer by layer, so that the old and the new one are never both held completely. A
    `RecurrentState` has no columns and stays.
    """
    self.observer.runs('resize', (len(state.count), _columns(state), size))
    layers = []
    for layer in state.cache:
      if not isinstance(layer, LayerCache):
        layers.append(layer)
        continue
      layers.append(self.programs['resize'](layer, size=size))
      for x in jax.tree.leaves(layer):
        x.delete()
    return state.replace(cache=tuple(layers))

  def copy_rows(self, state: SamplerState, copies: np.ndarray) -> SamplerState:
    """Copies rows of this process within their shards; see `kv_cache.copy_rows`. `state` is donated.

    `copies` i32[b, 3] or i32[b, 4] are the same number in each shard of this process, with rows numbered within it. A
    copy of a row to itself that keeps all columns changes nothing.
    """
    return self.programs['copy'](state, self._place(copies))

  def share_rows(self, state: SamplerState, source: np.ndarray, columns: int) -> SamplerState:
    """Gives rows of this process what other rows of their shards hold. The cache of `state` is donated.

    `source` i32[B] is the row whose content each row gets, numbered within its shard; itself to stay as it is.
    `columns` are at least those of the rows that others get; compiled in. Layers are copied one by one, so that only
    one of them is held twice.
    """
    source, columns = self._place(source), min(columns, _columns(state))
    cache = tuple(self.programs['share'](layer=layer, source=source, columns=columns) for layer in state.cache)
    return self._shared.take(state.replace(cache=()), source).replace(cache=cache)

  def extend(
    self,
    params: Any,
    state: SamplerState,
    tokens: np.ndarray,
    count: np.ndarray,
    begins: np.ndarray | None = None,
    *,
    rows: np.ndarray | None = None,
    images: ImageColumns | None = None,
  ) -> SamplerState:
    """Appends observations to rows of this process; see `decode.extend`. `state`, of B rows, is donated.

    `tokens` are i32[b, O], `count` i32[b], and `begins` bool[b], by default none. `rows` i32[b] are the rows that take
    part, each once, the same number in each shard of this process and numbered within it; the others are left alone. By
    default all B take part. `images` are what the rows of this process read, on the host; its table of features has the
    same number of rows in all processes, a multiple of the shards of a process.
    """
    return self.extend_with_experts(params, state, tokens, count, begins, rows=rows, images=images)[0]

  def extend_with_experts(
    self,
    params: Any,
    state: SamplerState,
    tokens: np.ndarray,
    count: np.ndarray,
    begins: np.ndarray | None = None,
    *,
    rows: np.ndarray | None = None,
    images: ImageColumns | None = None,
  ) -> tuple[SamplerState, jax.Array | None]:
    """`extend`, and the experts that each token was given to, of the rows of all processes; None without a record."""
    begins = np.zeros(len(count), bool) if begins is None else begins
    if images is None:
      rows_fed, width = self.share.parts * len(count), tokens.shape[1]
      self.observer.runs('extend', (len(state.count), rows_fed, _columns(state), width), params)
    given = self._place({'tokens': tokens, 'count': count, 'begins': begins, 'rows': rows})
    images = None if images is None else self._place_images(images)
    return self.programs['extend'](params=params, state=state, images=images, **given)

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
    """Samples for rows of this process; see `decode.decode`. `state`, of B rows, is donated.

    All temperatures share one program, as do all `RowSampling`. The reply has the rows of all processes that
    take part; `processes.own_rows` returns those of this process. `keys` are PRNG keys [b], `budget` is i32[b], and a
    `RowSampling` has b rows; `rows` are those of `extend`. `columns` and `alternatives` are compiled in. The call ends
    with `enough` complete replies of a shard, by default all.

    Returns:
      The state after, the `Reply`, and bool[], whether a reply of any process is still open.
    """
    parts = self.share.parts
    if isinstance(sampling, RowSampling):
      drawn, by_row = dict(temperature=None, sampling=None), {'by_row': sampling}
    else:
      if not alternatives:
        shape = (len(state.count), parts * len(budget), _columns(state), sampling.compiled)
        self.observer.runs('decode', shape, params)
      drawn, by_row = dict(temperature=np.float32(sampling.temperature), sampling=sampling.compiled), {}
    given = {'key_data': jax.random.key_data(keys), 'budget': budget, 'rows': rows} | by_row
    return self.programs['decode'](
      params=params,
      state=state,
      enough=np.int32(len(budget) + 1 if enough is None else enough),
      columns=columns,
      alternatives=alternatives,
      **self._place(given),
      **drawn,
    )


def _columns(state: SamplerState) -> int:
  return kv_cache.columns_of(state.cache)


def changed_weights(params: Any, wanted: Any) -> tuple[int, ...]:
  """Indices of the weights, as `int8.leaves` has them, whose type or layout is not as wanted.

  `wanted` is that of `Sampler.abstract_weights`.
  """

  def differs(x: Any, to: Any) -> bool:
    x, to = jax.tree.leaves(x), jax.tree.leaves(to)
    return len(x) != len(to) or any(
      a.dtype != b.dtype or not a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in zip(x, to, strict=True)
    )

  pairs = zip(int8.leaves(params), int8.leaves(wanted), strict=True)
  return tuple(i for i, (x, to) in enumerate(pairs) if differs(x, to))
