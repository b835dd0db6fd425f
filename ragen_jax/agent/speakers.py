"""Speakers, which give the replies of episodes: the interface, random play and the exact solver."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import ClassVar, Protocol

import numpy as np

from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import TextReply
from ragen_jax.agent.episode_log import EpisodeLog
from ragen_jax.agent.pools import JaxPool
from ragen_jax.envs.base import Solution


class Speaker(Protocol):
  """Gives the replies of a rollout. An object is used for one rollout, unless its class states otherwise.

  Attributes:
    writes_tokens: whether it writes the token rows of the log's timeline; the limits in tokens then apply to it.
    idle: whether no reply is begun. Only speakers that go on while other rows are `away` have it; for others no row
      plays in a thread of its own.
  """

  writes_tokens: ClassVar[bool]

  def reply(self, log: EpisodeLog) -> dict[int, TextReply] | None:
    """The replies that are complete; the caller records them and calls again.

    `log.live` lists the rows that need a reply, and `log.away` those whose environments play. `log.prompts` and
    `log.chat` give the prompts of live rows. Call `log.leave` to end a row that cannot reply.

    Returns:
      Row -> reply, for all live rows or some of them; may be empty. None if all episodes of all processes are over, and
      no row is away.
    """


def written_reply(
  context: ContextManager, actions: list[str], texts: Mapping[str, str] = types.MappingProxyType({})
) -> TextReply:
  """A reply of the right form, with the tokens that a policy would sample for it; see `templates.format_reply`."""
  text, tokenizer = context.format_reply(actions, texts), context.tokenizer
  ids = (*tokenizer.encode(text), tokenizer.stop_ids[0])
  return TextReply(context.reply_prefix + text, len(ids), ids=ids)


class RandomSpeaker:
  """Random legal actions in the right form. Their number is uniform between 1 and the limit of a turn."""

  writes_tokens = False

  def __init__(self, rng: np.random.Generator):
    """The random generator is used in the order of turns and rows."""
    self._rng = rng

  @staticmethod
  def can_play(envs: EnvStateManager) -> bool:
    """Whether all environments can list their legal actions."""
    return all(spec.env.has_legal_actions for spec in envs.specs)

  def reply(self, log: EpisodeLog) -> dict[int, TextReply] | None:
    rows, envs = log.live, log.envs
    if not rows:
      return None
    legal = [names for pool in envs.pools.values() for names in pool.legal_actions()]
    replies = {}
    for row in rows:
      most = envs.pool_of(row).spec.actions_a_turn
      count = int(self._rng.integers(1, most, endpoint=True))
      chosen = self._rng.integers(len(legal[row]), size=count) if legal[row] else []
      replies[row] = written_reply(log.context, [legal[row][i] for i in chosen])
    return replies


class SolverSpeaker:
  """The best play on each level, by the environment's exact solver, which runs when it is first needed.

  Outside JAX the environment's expert plays.
  """

  writes_tokens = False

  def __init__(self):
    self._solutions: dict[int, Solution] = {}

  def plans(self, log: EpisodeLog) -> list[list[str]]:
    """The best next turn of every row, as names of actions; the plans of finished rows are meaningless.

    Raises ValueError if a game has neither a solver nor an expert, or the solver does not support its size.
    """
    envs, plans, live = log.envs, [], log.live
    for index, pool in envs.pools.items():
      if pool.spec.env.has_expert:
        first = envs.rows_of(index).start
        running = [row - first for row in live if first <= row < first + pool.rows]
        advice = dict(zip(running, pool.expert(running), strict=True))
        plans += [advice.get(row, []) for row in range(pool.rows)]
        continue
      if index not in self._solutions:
        self._solutions[index] = _solve(pool)
      rows, size = envs.rows_of(index), pool.group_size
      turns_left = np.full((pool.rows // size,), pool.spec.budget.max_turns - log.turn, np.int32)
      left = log.actions_left[rows].astype(np.int32)
      # The members of a group play one level, which is solved once.
      by_member = [
        self._solutions[index].plan(pool.members(i, pool.states), turns_left, left[i::size]) for i in range(size)
      ]
      own = [by_member[row % size][row // size] for row in range(pool.rows)]
      plans += [[pool.spec.env.format_action(action) for action in plan] for plan in own]
    return plans

  def reply(self, log: EpisodeLog) -> dict[int, TextReply] | None:
    """See `Speaker`; raises ValueError as `plans`."""
    if not log.live:
      return None
    plans = self.plans(log)
    return {row: written_reply(log.context, plans[row]) for row in log.live}


def _solve(pool: JaxPool) -> Solution:
  if not pool.spec.env.has_solver:
    raise ValueError(f'{pool.spec.env.name} has no solver')
  return pool.spec.env.solve(pool.members(0, pool.fresh_states), pool.spec.budget)
