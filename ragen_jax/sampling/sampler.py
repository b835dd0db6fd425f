"""The sampler: `extend` appends an observation, `decode` draws a reply, and the cache lives on between them.

At temperature 1 with top-p 1 and top-k off no filter runs at all, so the distribution that is sampled is the one that
the loss scores. Each draw's random number comes from the row's own key and the token's position in the row, so a reply
does not depend on which other rows share the batch, nor on how rows are laid out over devices.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax.distributed import processes
from ragen_jax.distributed.sharding import ROW_AXES
from ragen_jax.models.qwen import LayerCache
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.sampling import kv_cache
from ragen_jax.sampling.kv_cache import SamplerState
from ragen_jax.utils.errors import UserError

# Entries of a cumulative sum that is taken in one go; longer vocabularies take sums of blocks first.
_BLOCK = 512


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are drawn.

  Attributes:
    temperature: divides the logits; 0 takes the most likely token.
    top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
    top_k: keep this many most likely tokens; 0 keeps all.
  """

  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0


@struct.dataclass
class Reply:
  """What `decode` drew, for R = max_new columns.

  Attributes:
    tokens: i32[B, R], sampled ids, the stop token included, then 0.
    logprobs: f32[B, R], log-probability of each under the distribution that it was drawn from.
    values: f32[B, R], the critic's value of the state that each was drawn from; zeros where they are not asked for.
    entropies: f32[B, R], entropy of the distribution that each was drawn from, before top-k and top-p.
    count: i32[B], how many were sampled.
    stopped: bool[B], the last of them is a stop token.
  """

  tokens: jax.Array
  logprobs: jax.Array
  values: jax.Array
  entropies: jax.Array
  count: jax.Array
  stopped: jax.Array


def filter_logits(logits: jax.Array, top_k: int, top_p: float) -> jax.Array:
  """Sets the logits f32[B, V] of tokens outside top-k and top-p to -inf; k first, then p of what is left."""
  if top_k > 0:
    kth = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
    logits = jnp.where(logits < kth, -jnp.inf, logits)
  if top_p < 1.0:
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probs = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs  # mass of all likelier tokens; the likeliest is always kept
    last = jnp.sum(before < top_p, axis=-1, keepdims=True) - 1
    threshold = jnp.take_along_axis(ordered, jnp.maximum(last, 0), axis=-1)
    logits = jnp.where(logits < threshold, -jnp.inf, logits)
  return logits


def draw(probs: jax.Array, u: jax.Array) -> jax.Array:
  """Inverse-CDF sampling: one uniform number a row instead of one a token.

  Args:
    probs: f32[B, V], not necessarily summing to one exactly.
    u: f32[B] in [0, 1).

  Returns:
    i32[B]; never a token of probability 0.
  """
  b, v = probs.shape
  if v > _BLOCK:  # first which block, then which token in it
    padded = jnp.pad(probs, ((0, 0), (0, -v % _BLOCK))).reshape(b, -1, _BLOCK)
    sums = jnp.sum(padded, axis=-1)  # [B, V/block]
    upto = jnp.cumsum(sums, axis=-1)
    target = _below(u * upto[:, -1], upto[:, -1])
    block = jnp.sum(upto <= target[:, None], axis=-1)
    start = jnp.take_along_axis(upto - sums, block[:, None], axis=1)[:, 0]
    inside = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]  # [B, block]
    cumulative = jnp.cumsum(inside, axis=-1)
    rest = jnp.clip(target - start, 0.0, None)
    token = jnp.sum(cumulative <= _below(rest, cumulative[:, -1])[:, None], axis=-1)
    return (block * _BLOCK + token).astype(jnp.int32)
  cumulative = jnp.cumsum(probs, axis=-1)
  target = _below(u * cumulative[:, -1], cumulative[:, -1])
  return jnp.sum(cumulative <= target[:, None], axis=-1).astype(jnp.int32)


def _below(x: jax.Array, limit: jax.Array) -> jax.Array:
  """x, made strictly smaller than limit where rounding brought it there."""
  return jnp.minimum(x, jnp.nextafter(limit, jnp.zeros_like(limit)))


def extend(graphdef: Any, params: Any, state: SamplerState, tokens: jax.Array, count: jax.Array) -> SamplerState:
  """Appends up to O tokens to each row and runs the model over them.

  Args:
    graphdef: of the `ActorCritic`.
    params: its weights.
    state: the sampler's state; there must be O free columns.
    tokens: i32[B, O], right-padded.
    count: i32[B], how many of them belong to each row; 0 leaves a row as it is.

  Returns:
    The state after.
  """
  model = nnx.merge(graphdef, params).policy
  size, width = state.valid.shape[1], tokens.shape[1]
  new = jnp.arange(width)[None, :] < count[:, None]  # [B, O]
  valid = jax.lax.dynamic_update_slice_in_dim(state.valid, new, state.column, axis=1)
  at = state.column + jnp.arange(width)
  # An own token may look at every token of its row up to its own column.
  mask = valid[:, None, :] & (jnp.arange(size)[None, None, :] <= at[None, :, None])  # [B, O, S]
  positions = state.position[:, None] + jnp.arange(width)[None, :]
  hidden, cache = model(model.embed(tokens), positions, mask=mask, cache=state.cache, column=state.column)
  last = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
  return SamplerState(
    cache=cache,
    valid=valid,
    column=state.column + width,
    position=state.position + count,
    hidden=jnp.where((count > 0)[:, None], last, state.hidden),
  )


def decode(
  graphdef: Any,
  params: Any,
  state: SamplerState,
  keys: jax.Array,
  active: jax.Array,
  temperature: jax.Array,
  *,
  max_new: int,
  stop_ids: tuple[int, ...],
  vocab_limit: int,
  sampling: Sampling,
  with_values: bool = True,
) -> tuple[SamplerState, Reply]:
  """Draws until every active row has stopped or has `max_new` tokens; the loop ends with the last row.

  The stop token is kept, and it is run through the model like every other, so that the next turn can look at it.

  Args:
    graphdef: of the `ActorCritic`.
    params: its weights.
    state: the sampler's state; there must be `max_new` free columns.
    keys: PRNG keys [B], one a row and episode.
    active: bool[B], rows that take part.
    temperature: f32[], used unless `sampling.temperature` is 0.
    max_new: R.
    stop_ids: tokens that end a reply.
    vocab_limit: ids from here on are padding of the embedding and are never drawn.
    sampling: `temperature` (only whether it is 0), `top_p` and `top_k` are compiled in.
    with_values: record values; they come from the policy's trunk, so not with a critic that has its own.

  Returns:
    The state after and the `Reply`.
  """
  module = nnx.merge(graphdef, params)
  model, value_head = module.policy, module.value_head
  rows = state.valid.shape[0]
  greedy = sampling.temperature == 0
  stops = jnp.asarray(stop_ids, jnp.int32)
  start = state.column

  def distribution(hidden):
    logits = model.logits(hidden)  # [B, V]
    if vocab_limit < logits.shape[-1]:
      logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab_limit, logits, -jnp.inf)
    return logits if greedy else logits / temperature

  def body(carry):
    step, state, reply, live = carry
    logits = distribution(state.hidden)
    logp = jax.nn.log_softmax(logits, axis=-1)
    entropy = -jnp.sum(jnp.exp(logp) * jnp.maximum(logp, -1e30), axis=-1)
    if not greedy and (sampling.top_k > 0 or sampling.top_p < 1.0):
      logp = jax.nn.log_softmax(filter_logits(logits, sampling.top_k, sampling.top_p), axis=-1)
    if greedy:
      token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
      u = jax.vmap(lambda key, position: jax.random.uniform(jax.random.fold_in(key, position)))(keys, state.position)
      token = draw(jnp.exp(logp), u)
    token = jnp.where(live, token, 0)

    def record(into, what):
      return jax.lax.dynamic_update_slice_in_dim(into, jnp.where(live, what, 0)[:, None], step, axis=1)

    is_stop = live & jnp.any(token[:, None] == stops[None, :], axis=-1)
    reply = Reply(
      tokens=record(reply.tokens, token),
      logprobs=record(reply.logprobs, jnp.take_along_axis(logp, token[:, None], axis=-1)[:, 0]),
      values=record(reply.values, value_head(state.hidden)) if with_values else reply.values,
      entropies=record(reply.entropies, entropy),
      count=reply.count + live,
      stopped=reply.stopped | is_stop,
    )
    valid = jax.lax.dynamic_update_slice_in_dim(state.valid, live[:, None], start + step, axis=1)
    hidden, cache = model(
      model.embed(token[:, None]),
      state.position[:, None],
      mask=valid[:, None, :],
      cache=state.cache,
      column=start + step,
    )
    state = SamplerState(
      cache=cache,
      valid=valid,
      column=start + step + 1,
      position=state.position + live,
      hidden=jnp.where(live[:, None], hidden[:, 0], state.hidden),
    )
    return step + 1, state, reply, live & ~is_stop

  def going(carry):
    step, _, _, live = carry
    return (step < max_new) & jnp.any(live)

  empty = Reply(
    tokens=jnp.zeros((rows, max_new), jnp.int32),
    logprobs=jnp.zeros((rows, max_new), jnp.float32),
    values=jnp.zeros((rows, max_new), jnp.float32),
    entropies=jnp.zeros((rows, max_new), jnp.float32),
    count=jnp.zeros((rows,), jnp.int32),
    stopped=jnp.zeros((rows,), bool),
  )
  _, state, reply, _ = jax.lax.while_loop(going, body, (jnp.zeros((), jnp.int32), state, empty, active))
  return state, reply


class Sampler:
  """The three programs, compiled once a shape and counted.

  Attributes:
    traces: how often each program has been traced, by name.
    share: which of the rows are this process's.
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
    """Wraps a model's structure; weights come with every call.

    Args:
      model: gives the structure only.
      stop_ids: tokens that end a reply.
      vocab_limit: see `decode`; the whole vocabulary where not given.
      values: record values, where the model's critic reads the policy's trunk.
      mesh: rows are divided over it; one device where not given.

    Raises:
      UserError: the mesh divides the key/value heads unequally; see also `processes.row_share`.
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
    self._mesh = mesh
    self.share = processes.row_share(mesh)
    self._order = jax.jit(self._counted('arrange', self._order_rows), static_argnames='size')
    self._pick = jax.jit(self._pick_rows)
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

  def _state_specs(self) -> SamplerState:
    """How the state lies on the mesh: rows divided, and heads of the cache."""
    rows, cache = PartitionSpec(ROW_AXES), PartitionSpec(ROW_AXES, None, 'tensor', None)
    layers = tuple(LayerCache(k=cache, v=cache) for _ in range(self.cfg.num_layers))
    return SamplerState(cache=layers, valid=rows, column=PartitionSpec(), position=rows, hidden=rows)

  def _layout(self, tree: Any, specs: Any) -> Any:
    """Puts a tree where `specs` say, inside a program; on one device nothing is to be done."""
    if self._mesh is None:
      return tree
    shardings = jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), specs)
    return jax.lax.with_sharding_constraint(tree, shardings)

  def _order_rows(self, state: SamplerState, rows: jax.Array, live: jax.Array, size: int):
    if self._mesh is None:
      return kv_cache.order(state, rows, live, size)
    specs = self._state_specs().replace(cache=())
    of_rows = PartitionSpec(ROW_AXES)
    return jax.shard_map(
      functools.partial(kv_cache.order, size=size, mesh_axes=ROW_AXES),
      mesh=self._mesh,
      in_specs=(specs, of_rows, of_rows),
      out_specs=(of_rows, specs),
      check_vma=False,
    )(state, rows, live)

  def _pick_rows(self, layer: LayerCache, rows: jax.Array, columns: jax.Array) -> LayerCache:
    if self._mesh is None:
      return kv_cache.pick(layer, rows, columns)
    cache, of_rows = self._state_specs().cache[0], PartitionSpec(ROW_AXES)
    return jax.shard_map(
      kv_cache.pick, mesh=self._mesh, in_specs=(cache, of_rows, of_rows), out_specs=cache, check_vma=False
    )(layer, rows, columns)

  def _extend_rows(self, params, state, tokens, count):
    return self._layout(extend(self.graphdef, params, state, tokens, count), self._state_specs())

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
    return self._layout(state, self._state_specs()), reply

  def _place(self, x):
    return x if self._mesh is None else processes.place_own_rows(x, self._mesh, self.share)

  def init(self, rows: int, size: int) -> SamplerState:
    """An empty state for `rows` rows of this process."""
    rows *= self.share.parts
    return jax.jit(lambda: self._layout(kv_cache.init_state(self._policy, rows, size), self._state_specs()))()

  def abstract_state(self, rows: int, size: int) -> SamplerState:
    """What `init` would give for all rows together: shapes, types and layout."""
    state = jax.eval_shape(lambda: kv_cache.init_state(self._policy, rows, size))
    if self._mesh is None:
      return state
    return jax.tree.map(
      lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self._mesh, spec)),
      state,
      self._state_specs(),
    )

  def lower(
    self, params: Any, state: SamplerState, *, width: int, max_new: int, sampling: Sampling
  ) -> dict[str, jax.stages.Lowered]:
    """The programs for these shapes, to be compiled without being run; arguments may be abstract.

    Args:
      params: weights.
      state: see `abstract_state`.
      width: columns of the observation.
      max_new: as `decode`.
      sampling: as `decode`.
    """
    rows, by_rows = len(state.position), state.position.sharding
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

  def arrange(self, state: SamplerState, rows: np.ndarray, size: int, live: np.ndarray | None = None) -> SamplerState:
    """See `kv_cache.order`. Rows stay on their device: they are numbered within each shard.

    Args:
      state: the state before; given away, so that the old cache and the new one are never both held whole.
      rows: i32[B'] for the rows of this process, the same number for each of its shards.
      size: columns after.
      live: bool[B'], rows that go on; all where not given.
    """
    live = np.ones(len(rows), bool) if live is None else live
    rows = self._place(rows)
    columns, after = self._order(state.replace(cache=()), rows, self._place(live), size=size)
    layers = []
    for layer in state.cache:
      layers.append(self._pick(layer, rows, columns))
      layer.k.delete()
      layer.v.delete()
    return after.replace(cache=tuple(layers))

  def extend(self, params: Any, state: SamplerState, tokens: jax.Array, count: jax.Array) -> SamplerState:
    """See `extend`."""
    return self._extend(params=params, state=state, tokens=self._place(tokens), count=self._place(count))

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
    """See `decode`, with rows of this process; `processes.own_rows` brings the reply's back.

    Two temperatures above 0 share one program.
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
