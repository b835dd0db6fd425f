"""Generalised advantage estimation over the sampled tokens of an episode, and its variants over turns.

All estimators solve

    x_t = a_t * x_{t+1} + b_t

backwards. At a column that is not in the mask, a = 1 and b = 0: x passes unchanged, so the content of the column has no
effect. At the end of an episode or a turn, a = 0: nothing passes from later columns.

An episode can have several rows: one per turn with a windowed context, or rows of several agents that take turns.
`episode` then gives the episode of each row, and the recursion runs through the tokens of its rows turn by turn.
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
  gamma: float,
  lam: float,
  bootstrap: jax.Array | None = None,
  *,
  episode: jax.Array | None = None,
  turn: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Generalised advantage estimation over the tokens of the mask, with discount and decay of the trace per token.

  With p_1 < ... < p_n the columns of an episode in the mask: delta_i = r(p_i) + gamma V(p_{i+1}) - V(p_i) and A(p_i) =
  delta_i + gamma lam A(p_{i+1}). Columns between them have no effect, neither by content nor by number.

  Args:
    rewards: f32[B, T].
    values: f32[B, T], the critic's value of the state from which the token is sampled.
    mask: bool[B, T], M_adv; usually the sampled tokens.
    bootstrap: f32[B], value of the state after the row's last token in the mask if the episode was truncated, 0 if it
      terminated. None means 0. For an episode with several rows, the value of the row of its last turn is used.
    episode: i32[B], the episode of each row; None if every row is its own episode.
    turn: i32[B, T], turn index, -1 outside of turns; required with `episode`, to order its tokens.

  Returns:
    Advantages and returns, each f32[B, T] and 0 outside the mask; returns = advantages + values. Not whitened.

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
  gamma: float,
  *,
  episode: jax.Array | None = None,
  turn: jax.Array | None = None,
) -> jax.Array:
  """Discounted return from each token of the mask: f32[B, T], 0 outside the mask. Arguments: see `gae`."""
  return gae(rewards, jnp.zeros_like(rewards), mask, gamma, 1.0, episode=episode, turn=turn)[0]


def turn_wise_gae(
  rewards: jax.Array,
  values: jax.Array,
  loss_mask: jax.Array,
  turn: jax.Array,
  gamma: float,
  lam: float,
  bootstrap: jax.Array | None = None,
  *,
  episode: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """GAE with one step per turn, between the last sampled tokens of turns. All tokens of a turn get its advantage.

  Arguments are those of `gae`, with discount and decay per turn. Rewards and values are read at the last sampled token
  of each turn only.

  Returns:
    Advantages f32[B, T] on all sampled tokens, and returns f32[B, T] on the last sampled token of each turn, the only
    tokens on which the critic should be trained. Not whitened.

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
  gamma: float,
  lam: float,
  high_level_gamma: float,
  high_level_lam: float | None = None,
  bootstrap: jax.Array | None = None,
  *,
  loss_mask: jax.Array | None = None,
  episode: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Bi-level GAE: first over turns, then over the tokens of each turn.

  With e_k the last sampled token of turn k, pass 1 runs over the turns,
      delta^H_k = r(e_k) + gamma_H (S_{k+1} + V(e_{k+1})) - V(e_k),   A^H_k = delta^H_k + gamma_H lam_H A^H_{k+1};
  and *replaces* the reward of e_k by A^H_k + V(e_k). Pass 2 is token GAE that restarts at every e_k, with bootstrap and
  accumulator 0. So A(e_k) = A^H_k, and no discount per token crosses the end of a turn.

  S_k is the sum of the rewards on the tokens of turn k before e_k: penalties of the KL, and rewards of described states
  with `reward.state_place='section'`. VAGEN reads the rewards on e_k only. Those before e_k are earned between e_{k-1}
  and e_k, so they belong to the step that ends at e_k. With all discounts and decays 1 the result is that of `gae`,
  wherever the rewards are.

  The ends of turns follow from the turn indices, independent of rewards. V(e_{K+1}) is `bootstrap` for a truncated
  episode and 0 for one that terminated.

  Arguments are those of `gae`, and the following.

  Args:
    mask: M_adv, the tokens of pass 2.
    gamma, lam: discount and decay per token, within a turn.
    high_level_gamma, high_level_lam: discount and decay per turn; high_level_lam None means `lam`.
    loss_mask: sampled tokens, which determine the ends of turns; None means `mask`.

  Returns:
    Advantages and returns, each f32[B, T] and 0 outside the mask. Not whitened.

  Source: VAGEN, arXiv 2510.16907, section 4.2 and algorithm 2. The two differ; this follows the algorithm ("replaces").
  """
  high_level_lam = lam if high_level_lam is None else high_level_lam
  loss_mask = mask if loss_mask is None else loss_mask
  turn_ends = masks.turn_ends(loss_mask, turn)
  # With S added to both rewards and values, delta^H is the difference of the docstring.
  inside = masks.turn_sums(jnp.where(turn_ends, 0.0, rewards), loss_mask, turn_ends)
  _, targets = gae(
    rewards + inside, values + inside, turn_ends, high_level_gamma, high_level_lam, bootstrap,
    episode=episode, turn=turn,
  )  # fmt: skip
  rewards = jnp.where(turn_ends, targets - inside, rewards)  # A^H + V
  following = masks.next_sampled(mask)
  ends = mask & (turn_ends | (following == mask.shape[-1]))
  advantages = _recursion(rewards, values, mask, ends, following, 0.0, gamma, lam, chained=False)
  return advantages, jnp.where(mask, advantages + values, 0.0)


@struct.dataclass
class _Timeline:
  """The order of columns: unchanged, or sorted so that all columns form one stream of episodes, each turn by turn.

  Attributes:
    order: i32[B * T], columns sorted by episode and turn; None if every row is its own episode.
    episode: i32[B, T], episodes in that order; None if every row is its own episode.
    chained: whether the recursion continues from row to row.
  """

  order: jax.Array | None
  episode: jax.Array | None
  chained: bool = struct.field(pytree_node=False)

  @classmethod
  def of(cls, mask: jax.Array, episode: jax.Array | None, turn: jax.Array | None) -> _Timeline:
    if episode is None:
      return cls(None, None, False)
    if turn is None:
      raise ValueError('`turn` is needed with `episode`: columns of an episode are put in the order of their turns')
    # Columns outside the mask go with the turn before them, or with the first turn of their row.
    known = mask & (turn >= 0)
    first = jnp.min(jnp.where(known, turn, jnp.iinfo(jnp.int32).max), axis=-1, keepdims=True)
    before = jax.lax.cummax(jnp.where(known, turn, -1), axis=turn.ndim - 1)
    turn = jnp.where(before >= 0, before, first)
    episode = jnp.broadcast_to(jnp.asarray(episode)[:, None], mask.shape)
    order = jnp.lexsort((turn.ravel(), episode.ravel()))  # stable: equal columns stay in the order of their rows
    return cls(order, episode.ravel()[order].reshape(mask.shape), True)

  def lay(self, x: jax.Array) -> jax.Array:
    if not self.chained:
      return x
    return jnp.broadcast_to(x, self.episode.shape).ravel()[self.order].reshape(self.episode.shape)

  def put_back(self, x: jax.Array) -> jax.Array:
    if not self.chained:
      return x
    return jnp.zeros_like(x).ravel().at[self.order].set(x.ravel()).reshape(x.shape)

  def ends(self, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each episode's last column in the mask, bool[B, T], and for each column the next column in the mask."""
    if not self.chained:
      following = masks.next_sampled(mask)
      return mask & (following == mask.shape[-1]), following
    following = masks.next_sampled(mask.reshape(1, -1)).reshape(mask.shape)  # columns of the stream [B * T]
    of_next = self.episode.ravel()[jnp.minimum(following, mask.size - 1)]
    return mask & ((following == mask.size) | (of_next != self.episode)), following


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
  """The recursion of GAE, which restarts at `ends` with `end_values` as the next values: f32[B, T]."""
  stream = (1, -1) if chained else values.shape
  index = jnp.minimum(following.reshape(stream), values.reshape(stream).shape[-1] - 1)
  next_values = jnp.take_along_axis(values.reshape(stream), index, axis=-1).reshape(values.shape)
  deltas = rewards + gamma * jnp.where(ends, end_values, next_values) - values
  a = jnp.where(mask, jnp.where(ends, 0.0, gamma * lam), 1.0)
  b = jnp.where(mask, deltas, 0.0)
  return jnp.where(mask, _solve(a, b, chained), 0.0)


def _solve(a: jax.Array, b: jax.Array, chained: bool) -> jax.Array:
  """Solves x[t] = a[t] x[t+1] + b[t] in each row, from x = 0 or, if chained, from the first x of the next row."""

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
  """Copies the entry of each turn's last sampled token to all sampled tokens of the turn: f32[B, T]."""
  following = masks.next_sampled(ends)
  index = jnp.where(ends, jnp.arange(ends.shape[-1]), jnp.minimum(following, ends.shape[-1] - 1))
  return jnp.where(loss_mask, jnp.take_along_axis(at_ends, index, axis=-1), 0.0)
