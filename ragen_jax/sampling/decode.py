"""The two programs that run the model in a rollout: `extend` appends an observation, `decode` samples a reply."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx, struct

from ragen_jax.models.qwen import Qwen
from ragen_jax.sampling.draw import Sampling, draw_tokens
from ragen_jax.sampling.kv_cache import SamplerState


@struct.dataclass
class Reply:
  """The tokens that `decode` sampled, in R = max_new columns.

  Attributes:
    tokens: i32[B, R], sampled ids including the stop token, then 0.
    logprobs: f32[B, R], log-probability of each token under the distribution that it was drawn from.
    values: f32[B, R], the critic's value of the state that each token was drawn from; zeros without values.
    entropies: f32[B, R], entropy of the distribution that each token was drawn from, before top-k and top-p.
    count: i32[B], number of sampled tokens.
  """

  tokens: jax.Array
  logprobs: jax.Array
  values: jax.Array
  entropies: jax.Array
  count: jax.Array


def extend(
  graphdef: Any,
  params: Any,
  state: SamplerState,
  tokens: jax.Array,
  count: jax.Array,
  embeddings: jax.Array | None = None,
  is_embedded: jax.Array | None = None,
  rotary_offsets: jax.Array | None = None,
) -> SamplerState:
  """Appends up to O tokens to each row and runs the model over them.

  Args:
    graphdef: structure of the `ActorCritic`.
    params: its weights.
    state: the sampler's state, with at least O free columns.
    tokens: i32[B, O], padded on the right.
    count: i32[B], number of tokens of each row; 0 leaves the row unchanged.
    embeddings: [B, O, D], used instead of the embedding of the token, for example for the columns of an image.
    is_embedded: bool[B, O], the columns that take `embeddings`; default all.
    rotary_offsets: i32[B, O], rotary position of each column relative to `state.rotary`; default 0..O-1. The row's
      next text column follows after the largest offset.

  Returns:
    The state after.
  """
  model = nnx.merge(graphdef, params).policy
  chex.assert_shape(tokens, (*state.count.shape, None))
  chex.assert_equal_shape((count, state.count))
  if embeddings is None:
    embedded = model.embed(tokens)
  else:
    chex.assert_shape(embeddings, (*tokens.shape, state.hidden.shape[-1]))
    embedded = embeddings.astype(model.dtype)
    if is_embedded is not None:
      embedded = jnp.where(is_embedded[:, :, None], embedded, model.embed(tokens))
  return _append(model, state, embedded, count, rotary_offsets)


def _append(
  model: Qwen, state: SamplerState, embedded: jax.Array, count: jax.Array, rotary_offsets: jax.Array | None = None
) -> SamplerState:
  """Writes embedded columns [B, O, D] at the write column; the first `count` columns of each row are valid."""
  size, width = state.valid.shape[1], embedded.shape[1]
  new = jnp.arange(width)[None, :] < count[:, None]  # [B, O]
  valid = jax.lax.dynamic_update_slice_in_dim(state.valid, new, state.column, axis=1)
  mask = valid[:, None, :]  # [B, 1, S]; no column after the write column is valid
  if width > 1:
    # Causal mask: a query attends to the valid columns of its row up to and including its own.
    at = state.column + jnp.arange(width)
    mask = mask & (jnp.arange(size)[None, None, :] <= at[None, :, None])  # [B, O, S]
  positions, rotary = rotary_positions(state.rotary, count, width, rotary_offsets)
  hidden, cache = model(embedded, positions, mask=mask, cache=state.cache, column=state.column)
  last = hidden[:, 0]
  if width > 1:
    last = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
  return SamplerState(
    cache=cache,
    valid=valid,
    column=state.column + width,
    count=state.count + count,
    draw_position=state.draw_position + count,
    rotary=rotary,
    hidden=jnp.where((count > 0)[:, None], last, state.hidden),
  )


def rotary_positions(
  rotary: jax.Array, count: jax.Array, width: int, offsets: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Rotary positions of new columns, and of the next text column after them.

  The only function that depends on the shape of positions. With several axes (time, height, width of an image),
  `offsets` has a last axis for them; the position after is the same on all axes, so the state keeps one number per row.

      offsets   0 1 2 2 3     two text columns, an image of 2 columns that takes one position, a text column
      rotary    7         ->  positions 7 8 9 9 10, next 11

  Args:
    rotary: i32[B], position of the first new column.
    count: i32[B], number of new columns of each row.
    width: O, columns of `offsets`.
    offsets: i32[B, O] or [B, O, axes], position of each column relative to `rotary`; default 0..O-1.

  Returns:
    Positions i32[B, O] or [B, O, axes], and i32[B], the position after the largest one of the row's new columns.
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
  active: jax.Array,
  temperature: jax.Array,
  *,
  max_new: int,
  stop_ids: tuple[int, ...],
  vocab_limit: int,
  sampling: Sampling,
  with_values: bool = True,
) -> tuple[SamplerState, Reply]:
  """Samples until every active row has stopped or has `max_new` tokens; the loop ends with the last row.

  The stop token is part of the reply and goes through the model like every other token, so that the next turn attends
  to it.

  Args:
    graphdef: structure of the `ActorCritic`.
    params: its weights.
    state: the sampler's state, with at least `max_new` free columns.
    keys: PRNG keys [B], one per row and episode.
    active: bool[B], rows that get a reply.
    temperature: f32[], used unless `sampling.temperature` is 0.
    max_new: R, the most tokens of a reply.
    stop_ids: tokens that end a reply.
    vocab_limit: ids from this one on are padding of the embedding and are never drawn.
    sampling: `top_p`, `top_k` and whether `temperature` is 0 are compiled in.
    with_values: record values. Must be off for a critic with its own trunk: values are read from the policy's trunk.

  Returns:
    The state after and the `Reply`.
  """
  module = nnx.merge(graphdef, params)
  model, value_head = module.policy, module.value_head
  chex.assert_equal_shape((active, state.count))
  greedy = sampling.temperature == 0
  stops = jnp.asarray(stop_ids, jnp.int32)

  def scores(hidden: jax.Array) -> jax.Array:
    logits = model.logits(hidden)  # [B, V]
    if vocab_limit < logits.shape[-1]:
      logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab_limit, logits, -jnp.inf)
    return logits if greedy else logits / temperature

  def body(carry):
    step, state, reply, live = carry
    token, logprob, entropy = draw_tokens(scores(state.hidden), keys, state.draw_position, sampling)
    token = jnp.where(live, token, 0)

    def record(into, values):
      return jax.lax.dynamic_update_slice_in_dim(into, jnp.where(live, values, 0)[:, None], step, axis=1)

    reply = Reply(
      tokens=record(reply.tokens, token),
      logprobs=record(reply.logprobs, logprob),
      values=record(reply.values, value_head(state.hidden)) if with_values else reply.values,
      entropies=record(reply.entropies, entropy),
      count=reply.count + live,
    )
    state = _append(model, state, model.embed(token[:, None]), live.astype(jnp.int32))
    return step + 1, state, reply, live & ~jnp.any(token[:, None] == stops[None, :], axis=-1)

  def not_finished(carry):
    step, _, _, live = carry
    return (step < max_new) & jnp.any(live)

  start = (jnp.zeros((), jnp.int32), state, _empty_reply(len(active), max_new), active)
  _, state, reply, _ = jax.lax.while_loop(not_finished, body, start)
  return state, reply


def _empty_reply(rows: int, max_new: int) -> Reply:
  return Reply(
    tokens=jnp.zeros((rows, max_new), jnp.int32),
    logprobs=jnp.zeros((rows, max_new), jnp.float32),
    values=jnp.zeros((rows, max_new), jnp.float32),
    entropies=jnp.zeros((rows, max_new), jnp.float32),
    count=jnp.zeros((rows,), jnp.int32),
  )
