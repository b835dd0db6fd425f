"""Two programs that run the model: `extend` appends an observation, `decode` samples a reply, or a part of one."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx, struct

from ragen_jax.models import vocabulary
from ragen_jax.models.layer_cache import CacheMask
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.models.vision.features import ImageColumns
from ragen_jax.sampling.draw import RowSampling, Sampling, draw_row_tokens, draw_tokens
from ragen_jax.sampling.kv_cache import Added, SamplerState, columns_of


@struct.dataclass
class Reply:
  """The tokens that `decode` sampled, in C columns.

  Attributes:
    tokens: i32[B, C], sampled ids including the stop token, then 0.
    logprobs: f32[B, C], log-probability of each token under the distribution that it was drawn from.
    values: f32[B, C], the critic's value of the state that each token was drawn from; zeros without values.
    entropies: f32[B, C], entropy of the distribution that each token was drawn from, before top-k and top-p.
    count: i32[B], number of sampled tokens.
    open: bool[B], the reply goes on: it has neither a stop token nor as many tokens as it may have.
    top_tokens: i32[B, C, N], the likeliest tokens of the distribution that each token was drawn from; None unless
      asked for.
    top_logprobs: f32[B, C, N], their log-probabilities, -inf for tokens that could not be drawn.
    experts: [B, C, L, k], the experts that each token was given to, see `Qwen.run`; None unless asked for.
  """

  tokens: jax.Array
  logprobs: jax.Array
  values: jax.Array
  entropies: jax.Array
  count: jax.Array
  open: jax.Array
  top_tokens: jax.Array | None = None
  top_logprobs: jax.Array | None = None
  experts: jax.Array | None = None


def extend(
  graphdef: Any,
  params: Any,
  state: SamplerState,
  tokens: jax.Array,
  count: jax.Array,
  begins: jax.Array,
  *,
  images: ImageColumns | None = None,
  with_experts: bool = False,
) -> tuple[Added, jax.Array | None]:
  """Runs the model over up to O new tokens of each row.

  Args:
    tokens: i32[B, O], padded on the right; rows with tokens to append have O free columns.
    count: i32[B], number of tokens of each row; 0 leaves the row unchanged.
    begins: bool[B], rows that are emptied first.
    images: what the columns read of images, with rotary positions relative to `state.rotary`; the row's next text
      column follows after the largest. None for text, whose positions are 0..O-1.

  Returns:
    What `kv_cache.append` adds to the state; and the experts that each token was given to, [B, O, L, k] as in
      `Qwen.run`, `with_experts` only.
  """
  model = nnx.merge(graphdef, params).policy
  chex.assert_shape(tokens, (*state.count.shape, None))
  chex.assert_equal_shape((count, state.count, begins))
  embedded, deepstack = model.embed_columns(tokens, images)
  state = state.replace(
    count=jnp.where(begins, 0, state.count),
    draw_position=jnp.where(begins, 0, state.draw_position),
    rotary=jnp.where(begins, 0, state.rotary),
  )
  width = tokens.shape[1]
  positions, rotary = rotary_positions(state.rotary, count, width, images and images.positions)
  window = model.begin_window(state.cache, width, state.count)
  causal = jnp.tril(jnp.ones((width, width), bool))[None]
  hidden, window, experts = model.run(
    embedded,
    positions,
    mask=CacheMask(kept=_kept(state), new=causal, fed=count),
    cache=state.cache,
    window=window,
    deepstack=deepstack,
    with_choices=with_experts,
  )
  last = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
  after = SamplerState(
    cache=(),
    count=state.count + count,
    draw_position=state.draw_position + count,
    rotary=rotary,
    hidden=jnp.where((count > 0)[:, None], last, state.hidden),
  )
  # The cache is written after it was read: without a dependence, compilers copy it first, all rows of it.
  written = count + jnp.minimum(jnp.isnan(last[:, 0]).astype(jnp.int32), 0)
  return Added(after, window, written), experts


def _kept(state: SamplerState) -> jax.Array:
  """bool[B, 1, S]: the columns of the cache that belong to the rows."""
  return jnp.arange(columns_of(state.cache))[None, None, :] < state.count[:, None, None]


def rotary_positions(
  rotary: jax.Array, count: jax.Array, width: int, offsets: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Rotary positions i32[B, O] or [B, O, axes] of new columns, and i32[B] of the next text column after them.

  The only function that depends on the shape of positions. With several axes (time, height, width of an image),
  `offsets` has a last axis for them; the position after is the same on all axes, so the state keeps one number per row.

      offsets   0 1 2 2 3     two text columns, an image of 2 columns that takes one position, a text column
      rotary    7         ->  positions 7 8 9 9 10, next 11

  `rotary` i32[B] is the position of the first new column, and `count` i32[B] is how many of the O = `width` columns are
  new. `offsets` i32[B, O] or [B, O, axes] are relative to `rotary`; default 0..O-1. The next text column follows the
  largest position.
  """
  if offsets is None:
    return rotary[:, None] + jnp.arange(width)[None, :], rotary + count
  chex.assert_shape(offsets, (*rotary.shape, width, ...))
  largest = offsets.reshape(*offsets.shape[:2], -1).max(axis=-1)  # [B, O]
  new = jnp.arange(width)[None, :] < count[:, None]
  advance = jnp.max(jnp.where(new, largest + 1, 0), axis=1)
  return rotary.reshape(-1, *(1,) * (offsets.ndim - 1)) + offsets, rotary + advance


def decode(
  graphdef: Any,
  params: Any,
  state: SamplerState,
  keys: jax.Array,
  budget: jax.Array,
  temperature: jax.Array | None,
  enough: jax.Array,
  *,
  columns: int,
  stop_ids: tuple[int, ...],
  vocab_limit: int,
  banned: tuple[int, ...],
  sampling: Sampling | RowSampling,
  with_values: bool = True,
  with_experts: bool = False,
  alternatives: int = 0,
  shards: int = 1,
) -> tuple[Added, Reply]:
  """Samples up to C tokens for each row; the loop ends with the last row that goes on, or with `enough` complete rows.

  The next call continues a reply that is still open, and draws what a single longer call would. The stop token is part
  of the reply and goes through the model like every other token, so that the next turn attends to it. `columns` is C;
  rows with a budget have so many free ones. The result is what `kv_cache.append` adds to the state, and the `Reply`.

  Args:
    keys: PRNG keys [B], one per row and episode.
    budget: i32[B], the most tokens that each reply may still get; 0 leaves the row unchanged.
    temperature: f32[], that of a `Sampling`; with 0, the most likely tokens are taken.
    enough: i32[], complete replies of a shard with which the loop ends; more than its rows for all.
    vocab_limit: ids from this one on are padding of the embedding and are never drawn.
    banned: other ids that are never drawn.
    sampling: of a `Sampling`, `top_p` and `top_k` are compiled in; of a `RowSampling`, nothing.
    with_values: record values. Must be off for a critic with its own trunk: values are read from the policy's trunk.
    with_experts: record experts.
    alternatives: N, number of likeliest tokens to record for each token; more than 0 needs a `RowSampling`.
    shards: number of equal parts that the rows are divided into.
  """
  module = nnx.merge(graphdef, params)
  model, value_head = module.policy, module.value_head
  chex.assert_equal_shape((budget, state.count))
  by_row = isinstance(sampling, RowSampling)
  if alternatives and not by_row:
    raise ValueError(f'alternatives={alternatives}: needs a RowSampling, not {sampling}')
  greedy = None if by_row else temperature == 0
  stops = jnp.asarray(stop_ids, jnp.int32)
  kept, cache = _kept(state), model.cache_to_read(state.cache)

  def scores(hidden: jax.Array) -> jax.Array:
    logits = vocabulary.masked(model.logits(hidden), vocab_limit, banned, -jnp.inf)  # [B, V]
    return logits if by_row else logits / jnp.where(greedy, 1.0, temperature)

  def body(carry):
    step, window, hidden, reply = carry
    live, done = reply.open, reply.count
    if by_row:
      position = state.draw_position + done
      token, logprob, entropy, top = draw_row_tokens(scores(hidden), keys, position, sampling, alternatives)
    else:
      token, logprob, entropy = draw_tokens(scores(hidden), keys, state.draw_position + done, sampling, greedy)
    token = jnp.where(live, token, 0)

    def record(into, values):
      kept = live.reshape(-1, *(1,) * (values.ndim - 1))
      return jax.lax.dynamic_update_slice_in_dim(into, jnp.where(kept, values, 0)[:, None], step, axis=1)

    positions, _ = rotary_positions(state.rotary + done, live.astype(jnp.int32), 1)
    after, window, experts = model.run(
      model.embed(token[:, None]),
      positions,
      mask=CacheMask(kept=kept, new=jnp.arange(columns)[None, None, :] <= step, fed=live.astype(jnp.int32)),
      cache=cache,
      window=window,
      column=step,
      with_choices=with_experts,
    )
    stopped = jnp.any(token[:, None] == stops[None, :], axis=-1)
    reply = Reply(
      tokens=record(reply.tokens, token),
      logprobs=record(reply.logprobs, logprob),
      values=record(reply.values, value_head(hidden)) if with_values else reply.values,
      entropies=record(reply.entropies, entropy),
      count=done + live,
      open=live & ~stopped & (done + 1 < budget),
      top_tokens=record(reply.top_tokens, top[0]) if alternatives else None,
      top_logprobs=record(reply.top_logprobs, top[1]) if alternatives else None,
      experts=record(reply.experts, experts[:, 0]) if with_experts else None,
    )
    return step + 1, window, jnp.where(live[:, None], after[:, 0], hidden), reply

  def not_finished(carry):
    step, _, _, reply = carry
    complete = jnp.sum(((budget > 0) & ~reply.open).reshape(shards, -1), axis=1)
    of_shards = jnp.stack([reply.open.reshape(shards, -1).any(axis=1), complete >= enough])
    any_open, any_enough = of_shards.any(axis=1)  # one exchange between devices for both
    return (step < columns) & any_open & ~any_enough

  empty = _empty_reply(budget, columns, alternatives, model.cfg if with_experts else None)
  window = model.begin_window(state.cache, columns, state.count)
  start = (jnp.zeros((), jnp.int32), window, state.hidden, empty)
  _, window, hidden, reply = jax.lax.while_loop(not_finished, body, start)
  after = SamplerState(
    cache=(),
    count=state.count + reply.count,
    draw_position=state.draw_position + reply.count,
    rotary=state.rotary + reply.count,
    hidden=hidden,
  )
  return Added(after, window, reply.count), reply


def _empty_reply(budget: jax.Array, columns: int, alternatives: int, routed: QwenConfig | None) -> Reply:
  """`routed` is the model whose experts are recorded."""
  shape, experts = (len(budget), columns), None
  if routed is not None:
    experts = jnp.zeros((*shape, *routed.choices_shape), routed.experts.number_type)
  return Reply(
    tokens=jnp.zeros(shape, jnp.int32),
    logprobs=jnp.zeros(shape, jnp.float32),
    values=jnp.zeros(shape, jnp.float32),
    entropies=jnp.zeros(shape, jnp.float32),
    count=jnp.zeros((len(budget),), jnp.int32),
    open=budget > 0,
    top_tokens=jnp.zeros((*shape, alternatives), jnp.int32) if alternatives else None,
    top_logprobs=jnp.zeros((*shape, alternatives), jnp.float32) if alternatives else None,
    experts=experts,
  )
