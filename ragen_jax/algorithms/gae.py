"""Generalised advantage estimation over the sampled tokens of an episode, and its turn-level relatives.

All of them solve

    x_t = a_t * x_{t+1} + b_t

backwards. At a slot that the policy did not sample a = 1 and b = 0: it carries x through unchanged, so that nothing
that lies on it can matter. Where an episode or a turn ends a = 0: nothing comes over from what follows.

An episode may lie on several rows (one for each turn, where the context is windowed): then `episode` names it, and the
recursion runs from row to row in the order of their first turns.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.algorithms import masks


def gae(
  rewards: jax.Array,
  values: jax.Array,
  mask: jax.Array,
  gamma: float = 1.0,
  lam: float = 1.0,
  bootstrap: jax.Array | None = None,
  *,
  episode: jax.Array | None = None,
  turn: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Generalised advantage estimation over the masked-in tokens alone.

  With p_1 < ... < p_n the masked-in slots of an episode: delta_i = r(p_i) + gamma V(p_{i+1}) - V(p_i) and
  A(p_i) = delta_i + gamma lam A(p_{i+1}). Slots between are stepped over: neither their values nor their number matter.

  Args:
    rewards: f32[B, T].
    values: f32[B, T], the critic's estimate of the state from which the token is emitted.
    mask: bool[B, T], M_adv; usually the tokens that the policy sampled.
    gamma: discount for each token, in [0, 1].
    lam: the trace's decay, in [0, 1].
    bootstrap: f32[B], the value of the state after the row's last masked-in token where the episode was cut off, 0
      where it ended by itself. None is 0 everywhere. Of an episode with several rows, that of its last row is read.
    episode: i32[B], the episode of each row; None if every row is its own episode.
    turn: i32[B, T], needed with `episode`, to put rows in order.

  Returns:
    (advantages, returns), each f32[B, T] and 0 off the mask; returns = advantages + values; nothing is whitened.

  Source: Schulman et al. 2016, arXiv 1506.02438, eq. 16.
  """
  timeline = _Timeline.of(mask, episode, turn)
  rewards, values, mask = (timeline.lay(x) for x in (rewards, values, mask))
  ends, following = timeline.ends(mask)
  end_values = 0.0 if bootstrap is None else timeline.lay(bootstrap[:, None])
  advantages = _recursion(rewards, values, mask, ends, following, end_values, gamma, lam, timeline.chained)
  return timeline.put_back(advantages), timeline.put_back(jnp.where(mask, advantages + values, 0.0))


def discounted_returns(
  rewards: jax.Array,
  mask: jax.Array,
  gamma: float = 1.0,
  *,
  episode: jax.Array | None = None,
  turn: jax.Array | None = None,
) -> jax.Array:
  """The sum of gamma^k r over the masked-in tokens from each one on: f32[B, T], 0 off the mask. Arguments as `gae`."""
  return gae(rewards, jnp.zeros_like(rewards), mask, gamma, 1.0, episode=episode, turn=turn)[0]


def turn_wise_gae(
  rewards: jax.Array,
  values: jax.Array,
  loss_mask: jax.Array,
  turn: jax.Array,
  gamma: float = 0.95,
  lam: float = 1.0,
  bootstrap: jax.Array | None = None,
  *,
  episode: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """GAE with one step a turn, between the turns' last sampled tokens; every token of a turn gets the turn's advantage.

  Args:
    rewards: f32[B, T]; only what lies on the last sampled token of a turn is read.
    values: f32[B, T], read at the last sampled token of each turn.
    loss_mask: bool[B, T], the tokens that the policy sampled.
    turn: i32[B, T], turn index, -1 outside of turns.
    gamma: discount for each turn.
    lam: decay for each turn.
    bootstrap, episode: as in `gae`.

  Returns:
    (advantages, returns), each f32[B, T]; advantages on all sampled tokens, returns on the turns' last ones, where
    alone the critic is to be trained. Nothing is whitened.

  Source: VAGEN, arXiv 2510.16907, first release ("turn-wise GAE").
  """
  ends = masks.turn_ends(loss_mask, turn)
  at_ends, returns = gae(rewards, values, ends, gamma, lam, bootstrap, episode=episode, turn=turn)
  return over_turns(at_ends, loss_mask, ends), returns


def bi_level_gae(
  rewards: jax.Array,
  values: jax.Array,
  mask: jax.Array,
  turn: jax.Array,
  gamma: float = 1.0,
  lam: float = 1.0,
  high_level_gamma: float = 0.95,
  high_level_lam: float | None = None,
  bootstrap: jax.Array | None = None,
  *,
  loss_mask: jax.Array | None = None,
  episode: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Bi-level GAE: first between turns, then inside each.

  With e_k the last sampled token of turn k, pass 1 runs over the turns,
      delta^H_k = r(e_k) + gamma_H V(e_{k+1}) - V(e_k),   A^H_k = delta^H_k + gamma_H lam_H A^H_{k+1};
  its result *replaces* the reward of e_k by A^H_k + V(e_k), and pass 2 is token GAE that starts afresh (bootstrap 0,
  accumulator 0) at every e_k. So A(e_k) = A^H_k, and no token's discount reaches over a turn's end.

  Turns end where the turn indices say, whatever the reward there. An episode that was cut off has V(e_{K+1}) =
  `bootstrap`; one that ended has 0.

  Args:
    rewards: f32[B, T], the turn's reward on its last sampled token; other sampled tokens may carry some too (KL).
    values: f32[B, T], as in `gae`.
    mask: bool[B, T], M_adv, the slots over which pass 2 runs.
    turn: i32[B, T], turn index, -1 outside of turns.
    gamma, lam: discount and decay for each token, inside a turn.
    high_level_gamma, high_level_lam: those for each turn; high_level_lam None means `lam`.
    bootstrap, episode: as in `gae`.
    loss_mask: bool[B, T], the tokens that the policy sampled, among which turns end; None means `mask`.

  Returns:
    (advantages, returns), each f32[B, T] and 0 off the mask; nothing is whitened.

  Source: VAGEN, arXiv 2510.16907, section 4.2 and algorithm 2 (of the two, which differ, the algorithm's "replaces").
  """
  high_level_lam = lam if high_level_lam is None else high_level_lam
  turn_ends = masks.turn_ends(mask if loss_mask is None else loss_mask, turn)
  _, targets = gae(rewards, values, turn_ends, high_level_gamma, high_level_lam, bootstrap, episode=episode, turn=turn)
  rewards = jnp.where(turn_ends, targets, rewards)  # A^H + V
  following = masks.next_sampled(mask)
  ends = mask & (turn_ends | (following == mask.shape[-1]))
  advantages = _recursion(rewards, values, mask, ends, following, 0.0, gamma, lam, chained=False)
  return advantages, jnp.where(mask, advantages + values, 0.0)


@struct.dataclass
class _Timeline:
  """How rows follow one another: as they are, or the rows of an episode one after another in one long stream.

  Attributes:
    order: i32[B], rows sorted by episode and then by first turn; None where rows are episodes.
    episode: i32[B], None where rows are episodes.
    chained: rows continue in the next one.
  """

  order: jax.Array | None
  episode: jax.Array | None
  chained: bool = struct.field(pytree_node=False)

  @classmethod
  def of(cls, mask: jax.Array, episode: jax.Array | None, turn: jax.Array | None) -> _Timeline:
    if episode is None:
      return cls(None, None, False)
    if turn is None:
      raise ValueError('`turn` is needed with `episode`: rows of an episode are put in the order of their first turns')
    first_turn = jnp.min(jnp.where(mask & (turn >= 0), turn, jnp.iinfo(jnp.int32).max), axis=-1)  # [B]
    order = jnp.lexsort((first_turn, episode))
    return cls(order, episode[order], True)

  def lay(self, x: jax.Array) -> jax.Array:
    return x[self.order] if self.chained else x

  def put_back(self, x: jax.Array) -> jax.Array:
    return jnp.zeros_like(x).at[self.order].set(x) if self.chained else x

  def ends(self, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The episodes' last masked-in slots, bool[B, T], and each slot's follower, a column of its row or the stream."""
    if not self.chained:
      following = masks.next_sampled(mask)
      return mask & (following == mask.shape[-1]), following
    following = masks.next_sampled(mask.reshape(1, -1)).reshape(mask.shape)  # columns of the stream [B * T]
    row = jnp.minimum(following // mask.shape[-1], mask.shape[0] - 1)
    other = (following == mask.size) | (self.episode[row] != self.episode[:, None])
    return mask & other, following


def _recursion(
  rewards: jax.Array,
  values: jax.Array,
  mask: jax.Array,
  ends: jax.Array,
  following: jax.Array,
  end_values: jax.Array | float,
  gamma: float,
  lam: float,
  chained: bool,
) -> jax.Array:
  """The recursion of GAE, which starts afresh at `ends` with `end_values` in place of the next value: f32[B, T]."""
  stream = (1, -1) if chained else values.shape
  index = jnp.minimum(following.reshape(stream), values.reshape(stream).shape[-1] - 1)
  next_values = jnp.take_along_axis(values.reshape(stream), index, axis=-1).reshape(values.shape)
  deltas = rewards + gamma * jnp.where(ends, end_values, next_values) - values
  a = jnp.where(mask, jnp.where(ends, 0.0, gamma * lam), 1.0)
  b = jnp.where(mask, deltas, 0.0)
  return jnp.where(mask, _solve(a, b, chained), 0.0)


def _solve(a: jax.Array, b: jax.Array, chained: bool) -> jax.Array:
  """x[t] = a[t] x[t+1] + b[t] along each row, from x = 0, or from the first x of the next row where chained."""

  def column(carry, ab):
    slope, offset = carry  # x[t] = slope * (x that enters the row from the right) + offset
    slope, offset = ab[0] * slope, ab[0] * offset + ab[1]
    return (slope, offset), (slope, offset)

  rows = a.shape[:-1]
  start = (jnp.ones(rows, b.dtype), jnp.zeros(rows, b.dtype))
  (slope, offset), (slopes, offsets) = jax.lax.scan(column, start, (a.T, b.T), reverse=True)
  if not chained:
    return offsets.T

  def row(entering, so):
    return so[0] * entering + so[1], entering

  _, entering = jax.lax.scan(row, jnp.zeros((), b.dtype), (slope, offset), reverse=True)
  return offsets.T + slopes.T * entering[:, None]


def over_turns(at_ends: jax.Array, loss_mask: jax.Array, ends: jax.Array) -> jax.Array:
  """Spreads what lies on the last sampled token of each turn over the turn's sampled tokens: f32[B, T]."""
  following = masks.next_sampled(ends)
  index = jnp.where(ends, jnp.arange(ends.shape[-1]), jnp.minimum(following, ends.shape[-1] - 1))
  return jnp.where(loss_mask, jnp.take_along_axis(at_ends, index, axis=-1), 0.0)
