"""Policies that speak text rather than tokens: random play, the exact solver, a model behind a network.

They play the levels, the luck and the limits that a policy in training would have; their rewards, penalties and ends of
episodes are worked out as in `agent_proxy`. Only the limits in tokens (`max_context`, `max_response_tokens`) do not
bind them: they have no tokenizer in common with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, Protocol

import jax
import numpy as np

from ragen_jax.agent.context_manager import ContextManager, PastTurn, reply_after_prefix
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.trajectory import Episode, Status, Turn, status_after_turn
from ragen_jax.envs.base import Solution
from ragen_jax.envs.outside.base import TextEnvironment

Chat = list[dict[str, str]]
# What stands in a conversation where a reply never came: a chat format wants something between two of the user's.
NO_REPLY = '(no reply)'


@dataclasses.dataclass(frozen=True)
class Said:
  """A reply.

  Attributes:
    text: all of it; nothing was put there for the policy.
    tokens: how many it took; None where nobody counted.
    answered: False where no reply came.
  """

  text: str
  tokens: int | None = None
  answered: bool = True


class TextPolicy(Protocol):
  """Who plays; one object for the episodes of one environment."""

  def speak(self, envs: EnvStateManager, rows: list[int], chats: list[Chat], turn: int) -> list[Said]:
    """The replies of a turn.

    Args:
      envs: of one environment, as it stands.
      rows: whose episodes go on, ascending.
      chats: for each of them the conversation up to the reply.
      turn: from 0.
    """


@dataclasses.dataclass
class Played:
  """Episodes of a text policy.

  Attributes:
    episodes: one a row.
    chats: for each row that was pictured, the conversation before each of its turns.
  """

  episodes: list[Episode]
  chats: dict[int, list[Chat]]


def play(
  envs: EnvStateManager,
  context: ContextManager,
  policy: TextPolicy,
  first_seed: int,
  *,
  format_penalty: float,
  pictured: Collection[int] = (),
) -> Played:
  """Plays one episode a row.

  Args:
    envs: of one environment; it is reset.
    context: with the same environment.
    policy: who plays.
    first_seed: of the levels, see `EnvStateManager.reset`.
    format_penalty: added to the reward of a turn whose reply is not valid; 0 or negative.
    pictured: rows whose boards are drawn and whose conversations are kept.
  """
  (spec,) = envs.specs
  observations, rows = envs.reset(first_seed), envs.rows
  outside = isinstance(spec.env, TextEnvironment)
  episodes = [
    Episode(spec.tag, int(g), int(s), [], outside=outside)
    for g, s in zip(envs.row_group, envs.level_seeds, strict=True)
  ]
  status = np.full((rows,), Status.RUNNING, np.int32)
  status[list(envs.faults)] = Status.ENV_ERROR
  pictures = {row: envs.picture(row) for row in pictured}
  past: list[list[PastTurn]] = [[] for _ in range(rows)]
  replies: list[list[str]] = [[] for _ in range(rows)]
  kept: dict[int, list[Chat]] = {row: [] for row in pictured}
  for turn in range(spec.budget.max_turns):
    live = np.flatnonzero(status == Status.RUNNING).tolist()
    if not live:
      break
    left = envs.actions_left()
    chats = [context.messages(0, past[row], replies[row], observations[row], int(left[row])) for row in live]
    said = dict(zip(live, policy.speak(envs, live, chats, turn), strict=True))
    for row, chat in zip(live, chats, strict=True):
      if row in kept:
        kept[row].append(chat)
    parsed = {row: context.parse(0, s.text) for row, s in said.items()}
    result = envs.step([list(parsed[row].actions) if row in parsed else [] for row in range(rows)])
    before, observations, faults, actions_left = observations, envs.render(), envs.faults, envs.actions_left()
    for row in live:
      names = parsed[row].names[: result.executed[row]]
      past[row].append(PastTurn(before[row], int(left[row]), names, float(result.reward[row]), (), True))
      replies[row].append(said[row].text if said[row].answered else NO_REPLY)
      tokens = said[row].tokens
      episodes[row].turns.append(
        Turn(
          observation=before[row],
          reply=said[row].text,
          actions=list(names),
          reward=float(result.reward[row]),
          penalty=0.0 if parsed[row].valid else format_penalty,
          valid=parsed[row].valid,
          effective=int(result.effective[row]),
          picture=pictures.get(row),
          tokens=len(context.tokenizer.encode(said[row].text)) if tokens is None else tokens,
          answered=said[row].answered,
        )
      )
      status[row] = Status.ENV_ERROR if row in faults else status_after_turn(
        done=result.done[row], success=result.success[row], actions_left=actions_left[row],
        last_turn=turn + 1 >= spec.budget.max_turns,
      )  # fmt: skip
      if row in pictures:
        pictures[row] = envs.picture(row)
  for row, episode in enumerate(episodes):
    episode.status = Status(int(status[row]))
    episode.final_observation = observations[row]
    episode.error = str(envs.faults.get(row, ''))
    episode.final_picture = pictures.get(row)
  envs.end()
  return Played(episodes, kept)


def _written(context: ContextManager, names: list[str]) -> Said:
  """A reply of the right form without a thought, its tokens those that the context's own policy would sample."""
  sampled = reply_after_prefix(context, '', names)
  return Said(context.reply_prefix + sampled, len(context.tokenizer.encode(sampled)) + 1)


class RandomPolicy:
  """Legal actions at random, in the right form: from 1 to as many as a turn may have, each number as likely."""

  def __init__(self, context: ContextManager, rng: np.random.Generator):
    """`rng` is drawn from in the order of turns and rows."""
    self._context, self._rng = context, rng

  @staticmethod
  def can_play(env: Any) -> bool:
    """Whether actions can be listed; outside JAX only words can."""
    return not isinstance(env, TextEnvironment) or bool(env.action_words)

  def speak(self, envs: EnvStateManager, rows: list[int], chats: list[Chat], turn: int) -> list[Said]:
    """See `TextPolicy`."""
    del chats, turn
    (spec,) = envs.specs
    if isinstance(spec.env, TextEnvironment):
      legal = [list(spec.env.action_words)] * envs.rows
    else:
      legal = [[spec.env.format_action(a) for a in own] for own in spec.env.legal_actions(envs.pool_states(0))]
    said = []
    for row in rows:
      count = int(self._rng.integers(1, spec.budget.max_actions_per_turn, endpoint=True))
      chosen = self._rng.integers(len(legal[row]), size=count) if legal[row] else []
      said.append(_written(self._context, [legal[row][i] for i in chosen]))
    return said


class SolverPolicy:
  """The best play on each level, by the environment's exact solver."""

  def __init__(self, context: ContextManager):
    """The solver runs in the first turn."""
    self._context = context
    self._solution: Solution | None = None

  def speak(self, envs: EnvStateManager, rows: list[int], chats: list[Chat], turn: int) -> list[Said]:
    """See `TextPolicy`.

    Raises:
      ValueError: there is no solver for the game, or not for one of this size.
    """
    del chats
    (spec,), size, states = envs.specs, envs.group_size, envs.pool_states(0)

    def of_members(number: int) -> Any:
      return jax.tree.map(lambda x: np.asarray(x)[number::size], states)

    if turn == 0:
      self._solution = spec.env.solve(of_members(0), spec.budget)
    turns_left = np.full((envs.groups,), spec.budget.max_turns - turn, np.int32)
    # A group's members are of one level, which is solved once.
    plans = [
      self._solution.plan(of_members(i), turns_left, envs.actions_left()[i::size].astype(np.int32)) for i in range(size)
    ]
    chosen = [plans[row % size][row // size] for row in rows]
    return [_written(self._context, [spec.env.format_action(a) for a in plan]) for plan in chosen]
